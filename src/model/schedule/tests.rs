//! Orders that programs have, and what is predicted of them.

use proptest::prelude::*;

use super::*;

/// Step number `index` of a bar: two pages.
fn step(bar: u32, index: u32) -> Span {
    // A page is left between them, or two steps would be neighbours.
    Span::new(BarId(bar), 3 * index..3 * index + 2)
}

fn pass(bar: u32, steps: u32) -> Vec<Span> {
    (0..steps).map(|index| step(bar, index)).collect()
}

/// An encoder, a denoiser `passes` times, a decoder.
fn workflow(passes: usize) -> Vec<Span> {
    let denoiser = pass(1, 20).repeat(passes);
    [pass(0, 12), denoiser, pass(2, 9)].concat()
}

fn play(schedule: &mut Schedule, steps: &[Span]) -> Vec<Verdict> {
    steps.iter().map(|span| schedule.record(&[*span]).unwrap().verdict).collect()
}

fn hint(schedule: &mut Schedule, steps: &[Span]) {
    schedule.hint(steps.iter().map(std::slice::from_ref));
}

fn wrong(verdicts: &[Verdict]) -> usize {
    verdicts.iter().filter(|verdict| **verdict != Verdict::Predicted).count()
}

/// Checks that exactly `expected`, and from the next step on, is predicted.
fn check_upcoming(schedule: &Schedule, expected: &[Span]) {
    let found: Vec<Span> = schedule.upcoming(expected.len()).map(|next| next.spans[0]).collect();
    assert_eq!(found, expected);
    let distances: Vec<u64> = schedule.upcoming(expected.len()).map(|next| next.distance).collect();
    assert_eq!(distances, (1..=expected.len() as u64).collect::<Vec<_>>());
}

fn check_cycle(schedule: &Schedule, expected: &[Span]) {
    let cycle = schedule.cycle().expect("a confirmed cycle");
    let found: Vec<Span> = cycle.iter().map(|step| schedule.spans(*step)[0]).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_loop_is_known_after_one_pass() {
    let mut schedule = Schedule::default();
    let order = pass(0, 64);
    assert!(play(&mut schedule, &order).iter().all(|verdict| *verdict == Verdict::Unknown));
    assert_eq!((schedule.trust(), schedule.cycle()), (0, None));
    let second = play(&mut schedule, &order);
    assert_eq!(second[0], Verdict::Unknown);
    assert_eq!(wrong(&second[1..]), 0);
    check_upcoming(&schedule, &order.repeat(3)[..150]);
    check_cycle(&schedule, &order);
    assert_eq!(schedule.revision(), 1);
    for _ in 0..5 {
        assert_eq!(wrong(&play(&mut schedule, &order)), 0);
    }
    assert_eq!((schedule.revision(), schedule.departure_count()), (1, 0));
}

#[test]
fn the_second_pass_is_predicted_from_its_first_step() {
    let mut schedule = Schedule::default();
    let order = pass(0, 64);
    play(&mut schedule, &order);
    play(&mut schedule, &order[..1]);
    check_upcoming(&schedule, &order[1..5]);
    assert_eq!(schedule.upcoming(100).count(), 4, "no further than it is worth");
    play(&mut schedule, &order[1..4]);
    check_upcoming(&schedule, &order[4..20]);
}

#[test]
fn a_workflow_is_known_after_one_cycle() {
    let (mut schedule, order) = (Schedule::default(), workflow(10));
    play(&mut schedule, &order);
    // Its first step departs: the decoder's pass came once, and nothing says what follows it.
    let second = play(&mut schedule, &order);
    assert_eq!(wrong(&second[1..]), 0, "{second:?}");
    check_cycle(&schedule, &order);
    check_upcoming(&schedule, &order.repeat(2));
    let revision = schedule.revision();
    for _ in 0..3 {
        assert_eq!(wrong(&play(&mut schedule, &order)), 0);
    }
    assert_eq!(schedule.revision(), revision);
}

#[test]
fn the_loop_in_the_first_workflow_is_known_too() {
    let mut schedule = Schedule::default();
    play(&mut schedule, &pass(0, 12));
    play(&mut schedule, &pass(1, 20));
    assert_eq!(wrong(&play(&mut schedule, &pass(1, 20).repeat(3))[1..]), 0);
    check_cycle(&schedule, &pass(1, 20));
}

#[test]
fn another_number_of_passes_costs_two_departures() {
    let mut schedule = Schedule::default();
    play(&mut schedule, &workflow(10).repeat(3));
    let longer = play(&mut schedule, &workflow(14));
    assert!(wrong(&longer) <= 2, "{}", wrong(&longer));
    // What follows the decoder is told from the decoder, not from the passes before it.
    assert!(wrong(&play(&mut schedule, &workflow(14))) <= 1);
    assert_eq!(wrong(&play(&mut schedule, &workflow(14))), 0);
    assert!(wrong(&play(&mut schedule, &workflow(6))) <= 2);
}

#[test]
fn skipped_steps_do_not_lose_the_cycle() {
    let (mut schedule, order) = (Schedule::default(), workflow(10));
    play(&mut schedule, &order.repeat(3));
    let revision = schedule.revision();
    // In the fifth pass of the denoiser three layers are left out.
    let mut skipping = order.clone();
    skipping.drain(12 + 4 * 20 + 7..12 + 4 * 20 + 10);
    let verdicts = play(&mut schedule, &skipping);
    let at = 12 + 4 * 20 + 7;
    assert_eq!(verdicts[at], Verdict::Skipped(3));
    assert_eq!(wrong(&verdicts), 1, "the denoiser's last pass is still told from the others");
    assert_eq!(schedule.revision(), revision, "one skip is no new order");
    // The next cycle has them again: that is a departure, and the cycle is still known.
    let verdicts = play(&mut schedule, &order);
    assert!(wrong(&verdicts) <= 2, "{}", wrong(&verdicts));
    assert_eq!(wrong(&play(&mut schedule, &order)), 0);
    check_cycle(&schedule, &order);
}

#[test]
fn a_layer_put_in_once_does_not_lose_the_cycle() {
    let (mut schedule, order) = (Schedule::default(), workflow(10));
    play(&mut schedule, &order.repeat(3));
    let mut longer = order.clone();
    longer.insert(100, step(1, 77));
    let verdicts = play(&mut schedule, &longer);
    assert_eq!(wrong(&verdicts), 1);
    assert_eq!(verdicts[100], Verdict::Departed);
}

#[test]
fn layers_that_come_every_other_pass_are_learned() {
    let mut schedule = Schedule::default();
    let (with, mut without) = (pass(0, 30), pass(0, 30));
    without.drain(10..13);
    let both = [with, without].concat();
    play(&mut schedule, &both.repeat(3));
    assert_eq!(wrong(&play(&mut schedule, &both)), 0);
    check_cycle(&schedule, &both);
}

#[test]
fn a_changed_order_is_known_after_one_pass() {
    let (mut schedule, order) = (Schedule::default(), pass(0, 64));
    play(&mut schedule, &order.repeat(20));
    let revision = schedule.revision();
    let reversed: Vec<_> = order.iter().rev().copied().collect();
    let shuffled: Vec<_> = (0..64).map(|index| order[index * 37 % 64]).collect();
    for changed in [reversed, shuffled] {
        play(&mut schedule, &changed);
        assert!(wrong(&play(&mut schedule, &changed)) <= 2);
        assert_eq!(wrong(&play(&mut schedule, &changed)), 0);
        check_cycle(&schedule, &changed);
    }
    assert!((revision + 1..=revision + 4).contains(&schedule.revision()));
}

#[test]
fn a_restart_in_the_middle_of_a_pass_costs_two_departures() {
    let (mut schedule, order) = (Schedule::default(), pass(0, 100));
    for stop in [10, 50, 90, 99] {
        play(&mut schedule, &order.repeat(2));
        play(&mut schedule, &order[..stop]);
        let after = play(&mut schedule, &order);
        assert!(wrong(&after) <= 2, "stopped at {stop}: {}", wrong(&after));
        // It may take the restart for what follows a whole pass, once.
        assert!(wrong(&play(&mut schedule, &order)) <= 1);
        assert_eq!(wrong(&play(&mut schedule, &order)), 0);
        check_upcoming(&schedule, &order);
    }
}

#[test]
fn a_weight_that_comes_twice_is_told_by_what_came_before() {
    let mut schedule = Schedule::default();
    let mut order = pass(0, 40);
    order[25] = order[5];
    play(&mut schedule, &order.repeat(2));
    assert_eq!(wrong(&play(&mut schedule, &order)), 0);
    check_upcoming(&schedule, &order);
}

#[test]
fn a_hint_is_believed_before_the_first_pass() {
    let (mut schedule, order) = (Schedule::default(), pass(0, 50));
    hint(&mut schedule, &order);
    check_upcoming(&schedule, &order.repeat(2));
    check_cycle(&schedule, &order);
    assert_eq!(wrong(&play(&mut schedule, &order.repeat(3))), 0);
    // And over what was learned.
    let reversed: Vec<_> = order.iter().rev().copied().collect();
    hint(&mut schedule, &reversed);
    assert_eq!(wrong(&play(&mut schedule, &reversed.repeat(2))), 0);
    hint(&mut schedule, &[]);
    check_upcoming(&schedule, &reversed);
}

#[test]
fn wishes_are_kept_until_they_are_taken_or_overtaken() {
    let mut schedule = Schedule::default();
    let span = |first| Span::new(BarId(3), first..first + 1);
    for first in [1, 2, 2, 3] {
        schedule.prefetch(span(first));
    }
    schedule.prefetch(Span::new(BarId(3), 9..9));
    schedule.record(&[Span::new(BarId(3), 0..2)]);
    assert_eq!(schedule.take_prefetch(), Some(span(2)));
    assert_eq!(schedule.take_prefetch(), Some(span(3)));
    assert_eq!(schedule.take_prefetch(), None);
    (0..5000).for_each(|first| schedule.prefetch(span(first)));
    assert_eq!(schedule.take_prefetch(), Some(span(5000 - PREFETCHES_MAX as u32)));
}

#[test]
fn spans_side_by_side_are_one() {
    let mut schedule = Schedule::default();
    let span = |pages| Span::new(BarId(0), pages);
    let apart = [span(0..2), span(1..3), span(3..3), span(3..4), span(6..7)];
    let step = schedule.record(&apart).unwrap().step;
    assert_eq!(schedule.spans(step), [span(0..4), span(6..7)]);
    assert_eq!(schedule.record(&[span(0..4), span(6..7)]).unwrap().step, step);
    assert_eq!(schedule.record(&[span(4..4)]), None);
}

#[test]
fn samples_are_smoothed_and_add_up_on_the_way() {
    let (mut schedule, order) = (Schedule::default(), pass(0, 4));
    for spans in order.repeat(2) {
        let step = schedule.record(&[spans]).unwrap().step;
        schedule.sample(step, 100);
    }
    schedule.sample(StepId(0), 200);
    schedule.sample(StepId(99), 1);
    assert_eq!(schedule.compute_ns(StepId(0)), Some(125));
    let times: Vec<u64> = schedule.upcoming(4).map(|next| next.starts_in_ns).collect();
    assert_eq!(times, [0, 125, 225, 325]);
}

#[test]
fn a_closed_bar_is_predicted_no_more() {
    let (mut schedule, order) = (Schedule::default(), workflow(4));
    play(&mut schedule, &order.repeat(2));
    schedule.prefetch(Span::new(BarId(2), 0..1));
    schedule.forget(BarId(2));
    assert!(schedule.upcoming(1000).all(|next| next.spans[0].bar != BarId(2)));
    assert_eq!(schedule.take_prefetch(), None);
    assert_eq!(schedule.held().0, 2 * (12 + 80));
    play(&mut schedule, &pass(0, 12));
    assert_eq!(wrong(&play(&mut schedule, &pass(1, 20))), 0);
}

#[test]
fn a_million_steps_take_no_more_memory_than_the_history() {
    let mut schedule = Schedule::new(1000);
    let mut number = 1u64;
    for index in 0..1_000_000u32 {
        number = number.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let first = if index < 500_000 { index } else { (number >> 40) as u32 % 3000 };
        schedule.record(&[Span::new(BarId(0), first..first + 1)]);
    }
    let (steps, spans) = schedule.held();
    assert!(steps == 1000 && spans <= 1000, "{steps} {spans}");
    assert!(schedule.steps.len() <= 1001 && schedule.history.index_len() <= 2000);
    // Steps of many spans are bounded by their spans.
    let mut schedule = Schedule::default();
    for index in 0..300u32 {
        let spans: Vec<Span> =
            (0..5000).map(|page| Span::new(BarId(index), 2 * page..2 * page + 1)).collect();
        schedule.record(&spans);
    }
    assert!(schedule.held().1 <= SPANS_MAX);
}

proptest! {
    /// Whatever came before, a loop is known when it has been played twice, and once more for each
    /// time that it can have been there before, followed by something else.
    #[test]
    fn any_loop_is_known_after_what_came_before(
        before in proptest::collection::vec((0..2u32, 0..8u32), 0..60),
        length in 2..40usize,
        seed in 0..1000usize,
    ) {
        let mut schedule = Schedule::default();
        let before: Vec<_> = before.into_iter().map(|(bar, index)| step(bar, index)).collect();
        play(&mut schedule, &before);
        let mut order = pass(0, length as u32);
        (1..length).for_each(|index| order.swap(index, (index * 7 + seed) % (index + 1)));
        play(&mut schedule, &order.repeat(2 + 60 / length));
        prop_assert_eq!(wrong(&play(&mut schedule, &order.repeat(2))), 0);
        check_cycle(&schedule, &order);
        check_upcoming(&schedule, &order.repeat(2));
    }

    /// Any steps at all: no panic, bounds kept, the same answers again.
    #[test]
    fn any_steps_are_taken(
        steps in proptest::collection::vec((0..3u32, 0..6u32, 0..5usize), 0..400),
        capacity in 0..40usize,
    ) {
        let run = || {
            let mut schedule = Schedule::new(capacity);
            let mut answers = Vec::new();
            for (bar, index, kind) in &steps {
                match kind {
                    0 if *index == 0 => schedule.forget(BarId(*bar)),
                    1 if *index < 2 => hint(&mut schedule, &pass(*bar, *index + 3)),
                    _ => answers.push(schedule.record(&[step(*bar, *index)]).unwrap().verdict),
                }
                let (held, spans) = schedule.held();
                assert!(held <= capacity.max(2) && spans <= held + 1);
                assert!(schedule.upcoming(50).all(|next| !next.spans.is_empty()));
            }
            answers
        };
        prop_assert_eq!(run(), run());
    }
}
