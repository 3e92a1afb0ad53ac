//! Pins owned by tokens: for callers that cannot hold a guard, across a C ABI above all.
//!
//! A token is an index and a generation, so that one that was given back, or never given out, is
//! an error and cannot take a neighbour's pin.

use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::Hold;
use crate::memory::vbar::Bar;
use crate::sync::Mutex;

/// Names pins that were put aside; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(pub u64);

/// The generation of the latest token of an entry, and what it holds.
#[derive(Default)]
struct Entry {
    generation: u32,
    held: Option<(Arc<Bar>, Hold)>,
}

#[derive(Default)]
struct Entries {
    entries: Vec<Entry>,
    vacant: Vec<u32>,
}

/// The pins of a runtime that are owned by tokens.
#[derive(Default)]
pub struct Pins {
    entries: Mutex<Entries>,
}

impl Pins {
    /// Puts a hold aside.
    pub fn put(&self, bar: Arc<Bar>, hold: Hold) -> Token {
        let mut table = self.entries.lock();
        let index = table.vacant.pop().unwrap_or_else(|| {
            table.entries.push(Entry::default());
            (table.entries.len() - 1) as u32
        });
        let entry = &mut table.entries[index as usize];
        entry.generation += 1;
        entry.held = Some((bar, hold));
        Token(u64::from(entry.generation) << 32 | u64::from(index))
    }

    /// Takes a hold back out, once.
    ///
    /// # Errors
    /// `StaleToken` for a token that is not held.
    pub fn take(&self, token: Token) -> Result<(Arc<Bar>, Hold)> {
        let mut table = self.entries.lock();
        let (generation, index) = ((token.0 >> 32) as u32, token.0 as u32);
        let entry = table.entries.get_mut(index as usize);
        let entry = entry.filter(|entry| entry.generation == generation);
        let Some(held) = entry.and_then(|entry| entry.held.take()) else {
            let text = format!("token {:#x} holds no pins", token.0);
            return Err(Error::new(ErrorCode::StaleToken, text));
        };
        // A generation that is used up retires its entry: no token is ever given out twice.
        if generation < u32::MAX {
            table.vacant.push(index);
        }
        Ok(held)
    }
}
