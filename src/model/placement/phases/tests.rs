//! Pages kept from visit to visit, beside every choice of what to keep, and beside the optimum.

use super::*;
use crate::model::placement::{Cycle, CycleStep};
use crate::model::policy_model::{Policy, experts, layer_steps, run, workflow};
use crate::model::schedule::BarId;

const C: u64 = 1000;

fn page(bar: u32, page: u32) -> PageRef {
    PageRef { bar: BarId(bar), page }
}

fn ranking_of(steps: Vec<CycleStep>) -> Ranking {
    Ranking::new(Cycle { steps, page_ns: C })
}

/// Models one behind another: pages of each layer, layers, passes.
fn models(shapes: &[(u32, usize, usize)]) -> Ranking {
    let (mut steps, mut ordinal) = (Vec::new(), 0);
    for ((pages, layers, passes), bar) in shapes.iter().zip(0..) {
        let pass = layer_steps(bar, &vec![*pages; *layers], C * 3 / 2, ordinal);
        ordinal += *layers as u32;
        (0..*passes).for_each(|_| steps.extend(pass.iter().cloned()));
    }
    ranking_of(steps)
}

/// What is loaded in a cycle that keeps the gaps of `kept`; `None` where that takes more than
/// `room` frames at a step.
fn loads_if(ranking: &Ranking, kept: u32, room: usize) -> Option<u64> {
    let steps = ranking.cycle.steps.len();
    let mut taken = vec![0; steps];
    let (mut number, mut loads) = (0, 0);
    for visits in &ranking.visits {
        let is_kept = |gap: usize| kept & (1 << (number + gap % visits.len())) != 0;
        for (index, visit) in visits.iter().enumerate() {
            let next = visits[(index + 1) % visits.len()].first;
            let next = if index + 1 == visits.len() { next + steps } else { next };
            if is_kept(index) {
                (visit.last + 1..next).for_each(|step| taken[step % steps] += 1);
            } else {
                loads += 1;
            }
            if is_kept(index) || is_kept(index + visits.len() - 1) {
                (visit.first..=visit.last).for_each(|step| taken[step % steps] += 1);
            }
        }
        number += visits.len();
    }
    taken.iter().all(|taken| *taken <= room).then_some(loads)
}

#[test]
fn small_workflows_are_near_the_best_of_all_choices() {
    let (mut worst, mut sum, mut count) = (1.0f64, 0.0, 0);
    let mut number = 99u64;
    let mut random = |below: u64| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (number >> 33) % below
    };
    for _ in 0..80 {
        let shapes: Vec<(u32, usize, usize)> = (0..2 + random(2))
            .map(|_| (1 + random(2) as u32, 1 + random(3) as usize, 1 + random(3) as usize))
            .collect();
        let ranking = models(&shapes);
        let gaps: usize = ranking.visits.iter().map(Vec::len).sum();
        if gaps > 16 {
            continue;
        }
        for room in 1..ranking.page_count() {
            let all = 0..1u32 << gaps;
            let best = all.filter_map(|kept| loads_if(&ranking, kept, room as usize)).min();
            let best = best.unwrap() as f64;
            let streaming = 2 * ranking.largest_step();
            let layout = ranking.place_phases(room + streaming, streaming).unwrap();
            let loads = layout.flow().unwrap().loads as f64;
            // Where nothing streams there may be more room than was asked for.
            let ratio = if best == 0.0 { 1.0 + loads } else { (loads / best).max(1.0) };
            (worst, sum, count) = (worst.max(ratio), sum + ratio, count + 1);
        }
    }
    assert!(count > 100, "{count}");
    assert!(worst <= 1.34 && sum / f64::from(count) <= 1.02, "{worst}, {sum} of {count}");
}

#[test]
fn long_workflows_load_what_the_optimum_does_with_the_frames_that_stay() {
    let tiles = || {
        let denoiser = layer_steps(1, &[16; 40], C * 3 / 4, 24);
        let tile = layer_steps(2, &[4; 16], C * 2, 64);
        let mut steps = layer_steps(0, &[8; 24], C / 4, 0);
        (0..20).for_each(|_| steps.extend(denoiser.iter().cloned()));
        (0..9).for_each(|_| steps.extend(tile.iter().cloned()));
        steps
    };
    for (name, steps) in
        [("workflow", workflow(C, 20)), ("experts", experts(C, 10)), ("tiles", tiles())]
    {
        let ranking = ranking_of(steps);
        for frames in [150, 300, 448, 640, 645, 700, 800] {
            let layout = ranking.lay_out(frames).unwrap();
            let flow = layout.flow().unwrap();
            let best = run(Policy::Belady, &ranking, frames).unwrap();
            let few = frames - layout.streaming_frames();
            let streaming = f64::from(layout.streaming_frames());
            let with_few = run(Policy::Belady, &ranking, few).unwrap().loads;
            let name = (name, frames, flow, best.loads, with_few);
            // The greatest is that of pages which nobody keeps between two passes of one phase.
            assert!(flow.loads as f64 <= with_few * 1.01 + streaming, "{name:?}");
            assert!(flow.loads as f64 >= best.loads, "{name:?}");
            if frames >= 640 {
                assert!(flow.loads as f64 <= best.loads + streaming, "{name:?}");
            }
        }
    }
}

#[test]
fn a_loop_and_a_lone_pass_have_no_phases() {
    for shapes in [vec![(4, 20, 1)], vec![(4, 20, 1), (2, 10, 1)]] {
        let ranking = models(&shapes);
        assert!(!ranking.items().iter().any(|item| ranking.is_part(item)));
        let layout = ranking.lay_out(40).unwrap();
        let placement = ranking.place_best(40).unwrap();
        assert_eq!(layout, placement.layout());
        assert_eq!((layout.turns(8), layout.kept_behind(3).count()), (vec![0], 0));
    }
}

/// What is kept behind each step, from the loads: each page once it was loaded and until it goes.
#[test]
fn pages_are_kept_from_their_load_to_their_last_visit() {
    let ranking = models(&[(2, 4, 1), (4, 10, 6), (4, 10, 6)]);
    let layout = ranking.lay_out(46).unwrap();
    assert!(layout.has_phases());
    let all = ranking.cycle.steps.len();
    // In the middle of each expert's phase all of it is there, and none of the encoder.
    for (bar, step) in [(1, 4 + 25), (2, 4 + 60 + 25)] {
        assert!(
            (0..40).all(|index| layout.is_kept_behind(page(bar, index), step)
                || layout.residents().contains(&page(bar, index))),
            "{bar}"
        );
        assert!((0..8).all(|index| !layout.is_kept_behind(page(0, index), step)));
    }
    // Behind the last use of the first expert its pages go, the first ones first.
    assert!(
        !layout.is_kept_behind(page(1, 0), 4 + 55) || !layout.is_kept_behind(page(1, 4), 4 + 55)
    );
    let kept = |step: usize| {
        let mut pages: Vec<_> = layout.kept_behind(step).collect();
        pages.sort_unstable();
        pages
    };
    for step in 0..all {
        let count = kept(step).len() + layout.residents().len();
        assert!(count <= 46, "{step}: {count}");
    }
    // Between two turns few pages become others.
    let turns = layout.turns(8);
    assert!((8..40).contains(&turns.len()) && turns[0] == 0, "{turns:?}");
    assert!(turns.is_sorted() && turns.iter().all(|turn| *turn < all));
}

/// Passes over three models in an order that a number says: four of each, or none.
fn passes(count: usize, mut model: impl FnMut(usize) -> u32) -> Ranking {
    let of = |bar: u32| layer_steps(bar, &[4; 16], C * 3 / 2, bar * 16);
    ranking_of((0..count).flat_map(|pass| of(model(pass))).collect())
}

/// The work of a choice grows with the visits where passes repeat, and with their square where they
/// come in no order: that would take minutes for as many steps as are remembered.
#[test]
fn phases_are_looked_for_in_workflows_and_not_in_thousands_of_passes_in_no_order() {
    let mut number = 7u64;
    let mut random = |_| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (number >> 33) as u32 % 3
    };
    let frames = 90;
    let short = passes(40, &mut random);
    assert!(short.lay_out(frames).unwrap().has_phases(), "few passes cost little");
    let long = passes(2400, &mut random);
    let (work, visits) = (long.work_of(&long.items()), long.timetable.len() as u64);
    assert!(work > 200 * visits, "{work} for {visits}");
    let layout = long.lay_out(frames).unwrap();
    assert_eq!(layout, long.place_best(frames).unwrap().layout());
    // As many passes in the order of a workflow.
    let workflow = passes(2400, |pass| (pass / 800) as u32);
    let work = workflow.work_of(&workflow.items());
    assert!(work > 1 << 18 && work <= 3 * visits, "{work} for {visits}");
    assert!(workflow.lay_out(frames).unwrap().has_phases());
}

/// Each turn is a list of the pages that stay.
#[test]
fn a_cycle_has_a_bounded_number_of_turns() {
    let mut number = 9u64;
    let ranking = passes(200, |_| {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (number >> 33) as u32 % 3
    });
    let layout = ranking.lay_out(90).unwrap();
    let changes: usize = layout.stays.values().map(|stays| 2 * stays.len()).sum();
    assert!(changes / (layout.stays.len() / 8) > 3 * TURNS_MAX, "{changes}");
    let turns = layout.turns(8);
    assert!(turns.len() > TURNS_MAX / 2 && turns.len() <= TURNS_MAX + 1, "{}", turns.len());
}

#[test]
fn a_streaming_frame_more_moves_pages_at_the_margin_only() {
    for steps in [workflow(C, 6), experts(C, 6)] {
        let ranking = ranking_of(steps);
        let all = ranking.cycle.steps.len();
        let at = |frames: u32, streaming: u32| ranking.place_phases(frames, streaming).unwrap();
        let before = at(660, 20);
        for (frames, streaming, most) in [(660, 21, 4), (660, 19, 4), (661, 20, 4), (650, 20, 40)] {
            let after = at(frames, streaming);
            for step in (0..all).step_by(17) {
                let there = |layout: &Layout, page: PageRef| {
                    layout.residents().contains(&page) || layout.is_kept_behind(page, step)
                };
                let moved = ranking.pages().iter();
                let moved = moved.filter(|page| there(&before, **page) != there(&after, **page));
                let moved = moved.count();
                assert!(moved <= most, "{frames} {streaming} behind {step}: {moved}");
            }
        }
        assert_eq!(at(660, 20), before, "a budget that comes back finds what it had");
    }
}

#[test]
fn too_few_frames_for_what_streams_are_told() {
    let ranking = models(&[(4, 6, 1), (4, 10, 6)]);
    assert_eq!(ranking.place_phases(3, 4).unwrap_err(), TooFewFrames { needed: 4 });
    assert!(ranking.place_phases(20, 1).is_err());
    assert!(ranking.place_phases(20, 8).is_ok());
}
