//! Failure injection: which call of which verb fails, and with what.
//!
//! Owns the rules. A verb asks before it does anything, so an injected failure changes nothing.
//! Does not own the loss of a device that a sticky code brings; the caller sees to that.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::{Condvar, Mutex};

use super::random::Random;
use super::verb::Verb;
use crate::driver::code::DriverCode;

/// A verb's calls that fail: after `skip` good ones, `count` bad ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FailRule {
    /// The verb.
    pub verb: Verb,
    /// Calls that still succeed.
    pub skip: u64,
    /// Calls that fail after those; `u64::MAX` for all.
    pub count: u64,
    /// What they return.
    pub code: DriverCode,
}

/// How often calls of a verb failed with a code because they were told to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Struck {
    /// The verb.
    pub verb: Verb,
    /// What its calls returned.
    pub code: DriverCode,
    /// How many of them.
    pub count: u64,
}

#[derive(Default)]
struct Rules {
    rules: Vec<FailRule>,
    rate: Option<(f64, Random)>,
    struck: Vec<Struck>,
}

/// The rules in force.
#[derive(Default)]
pub(super) struct Faults {
    /// Whether there is any rule: the one thing that a quick verb reads.
    armed: AtomicBool,
    /// How many ask that nothing fails for the moment.
    spared: AtomicU32,
    rules: Mutex<Rules>,
    /// The verb whose calls do not return until they are healed.
    hung: Mutex<Option<Verb>>,
    healed: Condvar,
}

impl Faults {
    pub(super) fn add(&self, rule: FailRule) {
        self.rules.lock().rules.push(rule);
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn set_rate(&self, probability: f64, seed: u64) {
        self.rules.lock().rate = Some((probability, Random::new(seed)));
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn hang(&self, verb: Verb) {
        *self.hung.lock() = Some(verb);
        self.armed.store(true, Ordering::Release);
    }

    pub(super) fn heal(&self) {
        let mut rules = self.rules.lock();
        (rules.rules, rules.rate) = (Vec::new(), None);
        drop(rules);
        self.armed.store(false, Ordering::Release);
        *self.hung.lock() = None;
        self.healed.notify_all();
    }

    /// Calls made meanwhile fail for no rule, and no rule counts them.
    pub(super) fn spare<R>(&self, during: impl FnOnce() -> R) -> R {
        self.spared.fetch_add(1, Ordering::AcqRel);
        let made = during();
        self.spared.fetch_sub(1, Ordering::AcqRel);
        made
    }

    pub(super) fn struck(&self) -> Vec<Struck> {
        self.rules.lock().struck.clone()
    }

    fn wait_if_hung(&self, verb: Verb) {
        let mut hung = self.hung.lock();
        while *hung == Some(verb) {
            self.healed.wait(&mut hung);
        }
    }

    /// The code that this call of `verb` fails with, if it does. Counts the call.
    pub(super) fn check(&self, verb: Verb) -> Option<DriverCode> {
        if !self.armed.load(Ordering::Acquire) || self.spared.load(Ordering::Acquire) > 0 {
            return None;
        }
        self.wait_if_hung(verb);
        let mut rules = self.rules.lock();
        let mut failed = None;
        // Every rule of the verb counts the call; the first that strikes gives the code.
        for rule in rules.rules.iter_mut().filter(|rule| rule.verb == verb) {
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if failed.is_none() {
                failed = Some(rule.code);
                rule.count = if rule.count == u64::MAX { u64::MAX } else { rule.count - 1 };
            }
        }
        rules.rules.retain(|rule| rule.count > 0);
        if failed.is_none()
            && let Some((probability, random)) = &mut rules.rate
        {
            let codes = verb.random_failures();
            if !codes.is_empty() && random.chance(*probability) {
                failed = Some(codes[random.below(codes.len() as u64) as usize]);
            }
        }
        if let Some(code) = failed {
            rules.note(verb, code);
        }
        failed
    }
}

impl Rules {
    fn note(&mut self, verb: Verb, code: DriverCode) {
        let known = |struck: &&mut Struck| (struck.verb, struck.code) == (verb, code);
        match self.struck.iter_mut().find(known) {
            Some(struck) => struck.count += 1,
            None => self.struck.push(Struck { verb, code, count: 1 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_once() {
        let faults = Faults::default();
        let code = DriverCode::NOT_READY;
        faults.add(FailRule { verb: Verb::MemMap, skip: 2, count: 1, code });
        let seen: Vec<_> = (0..4).map(|_| faults.check(Verb::MemMap)).collect();
        assert_eq!(seen, [None, None, Some(code), None]);
        assert_eq!(faults.check(Verb::MemUnmap), None);
        faults.add(FailRule { verb: Verb::MemMap, skip: 0, count: u64::MAX, code });
        assert!((0..100).all(|_| faults.check(Verb::MemMap).is_some()));
        assert_eq!(faults.spare(|| faults.check(Verb::MemMap)), None);
        faults.heal();
        assert_eq!(faults.check(Verb::MemMap), None);
        assert_eq!(faults.struck(), [Struck { verb: Verb::MemMap, code, count: 101 }]);
    }

    #[test]
    fn a_rate_is_kept_and_repeats_by_seed() {
        let draw = || {
            let faults = Faults::default();
            faults.set_rate(0.25, 9);
            (0..4000).map(|_| faults.check(Verb::MemCreate)).collect::<Vec<_>>()
        };
        let first = draw();
        assert_eq!(first, draw());
        let failed = first.iter().flatten().count();
        assert!((800..1200).contains(&failed), "{failed} of 4000 failed");
        assert!(Verb::MemUnmap.random_failures().is_empty());
    }
}
