//! What threads have in their hands: frames that are on no list for as long as driver calls take.
//!
//! Whoever claims pages, or takes frames from them, does so under the lock and carries it out
//! without; a [`InHand`] says so meanwhile. Who asks for memory to be given back, and finds nothing
//! more to take, waits for those that there are then, once: what begins later is not waited for,
//! lest threads that fault all the time keep it for ever. Nor is the caller's own, which may be
//! under way below it: a wait asks the program's check.

use std::collections::BTreeMap;
use std::thread::ThreadId;

use super::Pager;
use super::state::State;
use crate::error::Result;
use crate::outcome::WaitKind;
use crate::process;

/// What is in hand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Grip {
    /// Pages that get frames.
    Coming,
    /// Frames that pages have lost.
    Leaving,
}

/// All that is in hand, in the order in which it was taken.
#[derive(Default)]
pub(super) struct Hands {
    taken: u64,
    held: BTreeMap<u64, (ThreadId, Grip)>,
}

impl Hands {
    /// Whether another thread has some of these in hand that it took up to then.
    fn others_have(&self, until: u64, grips: &[Grip]) -> bool {
        let own = std::thread::current().id();
        let mut held = self.held.range(..=until);
        held.any(|(_, (thread, grip))| *thread != own && grips.contains(grip))
    }
}

/// Something in the hands of the calling thread, until this is dropped.
pub(super) struct InHand<'a> {
    pager: &'a Pager,
    number: u64,
}

impl<'a> InHand<'a> {
    /// Under the lock under which it was taken.
    pub(super) fn new(pager: &'a Pager, state: &mut State, grip: Grip) -> Self {
        let hands = &mut state.hands;
        hands.taken += 1;
        hands.held.insert(hands.taken, (std::thread::current().id(), grip));
        Self { pager, number: hands.taken }
    }
}

impl Drop for InHand<'_> {
    fn drop(&mut self) {
        if !process::ending() {
            self.pager.state.lock().hands.held.remove(&self.number);
        }
    }
}

impl Pager {
    /// Waits for what other threads have in hand of these now. Returns whether there was anything.
    ///
    /// # Errors
    /// Those of waiting.
    pub(super) fn wait_for_hands(&self, grips: &[Grip]) -> Result<bool> {
        let until = {
            let hands = &self.state.lock().hands;
            if !hands.others_have(hands.taken, grips) {
                return Ok(false);
            }
            hands.taken
        };
        let mut wait = self.device.wait(WaitKind::Claim);
        while self.state.lock().hands.others_have(until, grips) {
            wait.pause()?;
        }
        Ok(true)
    }
}
