//! The guards of ranges that were faulted together, which give their pins back together.

use std::ops::Deref;

use super::bar::{Guard, log_failed_unpin};
use crate::error::Result;

/// The guards of [`Runtime::fault_many`](super::Runtime::fault_many), in the order of its ranges.
///
/// A slice of them. Dropped together they give their pins back together, which costs less than one
/// by one: a single fence covers all uses. A guard that is taken out, by iterating over them or
/// with [`Guards::into_vec`], gives back its own.
#[derive(Debug)]
pub struct Guards<'a>(Vec<Guard<'a>>);

impl<'a> Guards<'a> {
    pub(super) fn new(guards: Vec<Guard<'a>>) -> Self {
        Self(guards)
    }

    /// Unpins all, as dropping does, and says what failed first.
    ///
    /// # Errors
    /// `StaleToken` when a forced end of run released pins of some; the others were given back.
    pub fn unpin(mut self) -> Result<()> {
        self.give_back()
    }

    /// The guards, each by itself from now on.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<Guard<'a>> {
        std::mem::take(&mut self.0)
    }

    fn give_back(&mut self) -> Result<()> {
        // All of one runtime, and for one stream: nobody can put another guard among them.
        let owned: Vec<_> = self.0.drain(..).map(Guard::into_parts).collect();
        let pins: Vec<_> = owned.iter().map(|(vbar, hold)| (&vbar.bar, hold)).collect();
        match owned.first() {
            Some((vbar, hold)) => vbar.runtime.pager().unpin_all_on(&pins, hold.stream),
            None => Ok(()),
        }
    }
}

impl<'a> Deref for Guards<'a> {
    type Target = [Guard<'a>];

    fn deref(&self) -> &[Guard<'a>] {
        &self.0
    }
}

impl<'a> IntoIterator for Guards<'a> {
    type Item = Guard<'a>;
    type IntoIter = std::vec::IntoIter<Guard<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.into_vec().into_iter()
    }
}

impl<'g, 'a> IntoIterator for &'g Guards<'a> {
    type Item = &'g Guard<'a>;
    type IntoIter = std::slice::Iter<'g, Guard<'a>>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl Drop for Guards<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            log_failed_unpin(&error);
        }
    }
}
