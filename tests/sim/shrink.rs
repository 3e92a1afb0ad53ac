//! The shortest trace that still fails: chunks of steps are left out, then single ones, then
//! numbers are lowered (Zeller, Hildebrandt, "Simplifying and isolating failure-inducing input",
//! 2002).

use crate::operations::Operation;
use crate::trace::Trace;

/// Shrinks a failing trace; `fails` tells whether another one fails in the same way. Asks it at
/// most `tries` times.
pub(crate) fn shrink(trace: Trace, mut tries: u32, mut fails: impl FnMut(&Trace) -> bool) -> Trace {
    let mut best = trace;
    let mut attempt = |candidate: &Trace| {
        let may = tries > 0;
        tries = tries.saturating_sub(1);
        may && fails(candidate)
    };
    loop {
        let before = best.clone();
        leave_out(&mut best, &mut attempt);
        lower(&mut best, &mut attempt);
        if best == before {
            return best;
        }
    }
}

fn leave_out(best: &mut Trace, attempt: &mut impl FnMut(&Trace) -> bool) {
    let mut length = best.operations.len().div_ceil(2).max(1);
    loop {
        // From the end: what comes late needs what came before.
        let mut end = best.operations.len();
        while end > 0 {
            let start = end.saturating_sub(length);
            let mut candidate = best.clone();
            candidate.operations.drain(start..end);
            if attempt(&candidate) {
                *best = candidate;
            }
            end = start.min(best.operations.len());
        }
        if length == 1 {
            return;
        }
        length = length.div_ceil(2);
    }
}

fn lower(best: &mut Trace, attempt: &mut impl FnMut(&Trace) -> bool) {
    // Not the first: the schedule's seed is no size.
    for index in 1..best.config.numbers().len() {
        lower_one(best.config.numbers()[index], |value| {
            let mut candidate = best.clone();
            candidate.config = best.config.with(index, value);
            let failed = attempt(&candidate);
            if failed {
                *best = candidate;
            }
            failed
        });
    }
    for at in 0..best.operations.len() {
        if matches!(best.operations[at], Operation::Heal {}) {
            continue;
        }
        for index in 0..best.operations[at].numbers().len() {
            // Another verb is another failure and no smaller one; nor is another code.
            let is_name = matches!(best.operations[at], Operation::Fail { .. });
            if is_name && (index == 0 || index == 3) {
                continue;
            }
            lower_one(best.operations[at].numbers()[index], |value| {
                let mut candidate = best.clone();
                candidate.operations[at] = best.operations[at].with(index, value);
                let failed = attempt(&candidate);
                if failed {
                    *best = candidate;
                }
                failed
            });
        }
    }
}

/// Tries 0, then the smallest number that will do, by halving what is between.
fn lower_one(value: u64, mut attempt: impl FnMut(u64) -> bool) {
    if value == 0 || attempt(0) {
        return;
    }
    let (mut good, mut bad) = (0, value);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if attempt(middle) {
            bad = middle;
        } else {
            good = middle;
        }
    }
}

#[test]
fn what_does_not_matter_goes() {
    // Fails when a trim of at least 2 pages comes before a refresh of the second device.
    let fails = |trace: &Trace| {
        let trim = trace.operations.iter().position(
            |operation| matches!(operation, Operation::Trim { pages, .. } if *pages >= 2),
        );
        let refresh = trace
            .operations
            .iter()
            .rposition(|operation| matches!(operation, Operation::Refresh { device: 1 }));
        trim.zip(refresh).is_some_and(|(trim, refresh)| trim < refresh)
    };
    let mut found = 0;
    for seed in 0..400 {
        let trace = Trace::draw(seed, 200);
        if !fails(&trace) {
            continue;
        }
        found += 1;
        let config = trace.config.clone();
        let small = shrink(trace, 5000, fails);
        let expected = [Operation::Trim { device: 0, pages: 2 }, Operation::Refresh { device: 1 }];
        assert_eq!(small.operations, expected);
        assert_eq!(small.config.numbers()[0], config.numbers()[0]);
        assert!(small.config.numbers()[1..].iter().all(|number| *number == 0));
    }
    assert!(found > 20, "{found}");
}
