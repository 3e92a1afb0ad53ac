//! Pins owned by tokens: for callers that cannot hold a guard, across a C ABI above all.
//!
//! A token is a number that the process gives out once, so that one that was given back, was never
//! given out, or is another runtime's is an error and cannot take a neighbour's pin.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, ErrorCode, Result};
use crate::memory::pager::Hold;
use crate::memory::vbar::Bar;
use crate::process;
use crate::sync::{AtomicU64, Mutex, Relaxed};

/// Names pins that were put aside; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Token(pub u64);

/// The pins of a runtime that are owned by tokens.
#[derive(Default)]
pub struct Pins {
    held: Mutex<HashMap<u64, (Arc<Bar>, Hold)>>,
}

impl Pins {
    /// Puts a hold aside. In a forked child, which has no pins, and at exit, its token is stale.
    pub fn put(&self, bar: Arc<Bar>, hold: Hold) -> Token {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let token = NEXT.fetch_add(1, Relaxed);
        if !process::ending() {
            self.held.lock().insert(token, (bar, hold));
        }
        Token(token)
    }

    /// Takes a hold back out, once.
    ///
    /// # Errors
    /// `StaleToken` for a token that is not held; `ProcessEnding`.
    pub fn take(&self, token: Token) -> Result<(Arc<Bar>, Hold)> {
        process::check()?;
        self.held.lock().remove(&token.0).ok_or_else(|| {
            let text = format!("token {} holds no pins of this runtime", token.0);
            Error::new(ErrorCode::StaleToken, text)
        })
    }
}
