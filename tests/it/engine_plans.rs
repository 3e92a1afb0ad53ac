//! The engine's plans: what they load in a cycle of several models, and how they move.

use vbar::RuntimeOptions;
use vbar::model::placement::{Cycle, CycleStep, PassMeasured, Ranking};
use vbar::model::policy_model::{Policy, run};
use vbar::model::schedule::{BarId, PageRef};
use vbar::options::Threads;

use crate::engine::Bench;
use crate::world::{P, budget_options};

/// Passes over models, one after the other: which, and how many times.
type Order<'a> = &'a [(usize, usize)];

fn play(bench: &mut Bench, order: Order<'_>) {
    for (bar, passes) in order {
        (0..*passes).for_each(|_| bench.pass(*bar));
    }
}

/// The cycle that the engine learns from it.
fn cycle_of(bench: &Bench, order: Order<'_>) -> Cycle {
    let passes = order.iter().flat_map(|(bar, passes)| std::iter::repeat_n(*bar, *passes));
    let steps = passes.flat_map(|bar| {
        let model = &bench.bars[bar];
        (0..model.model().tensors().len()).map(move |tensor| {
            let bytes = model.range(tensor);
            let pages = bytes.start / P..bytes.end.div_ceil(P);
            let page = |page| PageRef { bar: BarId(bar as u32), page: page as u32 };
            let ordinal = (bar * 1000 + tensor) as u32;
            CycleStep { pages: pages.map(page).collect(), compute_ns: 1, class: 0, ordinal }
        })
    });
    Cycle { steps: steps.collect(), page_ns: 1 }
}

/// Pages loaded in a steady cycle, the fewest possible, and the streaming frames.
#[track_caller]
fn steady_loads(pages: &[u64], frames: u64, order: Order<'_>) -> (u64, u64, u64) {
    let mut bench = Bench::new(pages, budget_options(frames));
    (0..4).for_each(|_| play(&mut bench, order));
    let (misses, mapped) = (bench.misses(), bench.mapped());
    (0..2).for_each(|_| play(&mut bench, order));
    let numbers = bench.world.runtime.engine_numbers();
    assert_eq!(bench.misses() - misses, 0, "{pages:?} {frames}: {numbers:?}");
    let loads = (bench.mapped() - mapped) / 2;
    let ranking = Ranking::new(cycle_of(&bench, order));
    let best = run(Policy::Belady, &ranking, frames as u32).unwrap().loads;
    bench.check_shut();
    (loads, best.ceil() as u64, numbers.streaming_frames)
}

#[test]
fn a_workflow_loads_the_optimum_and_the_streaming_frames() {
    let order = [(0, 1), (1, 8), (2, 1)];
    // The denoiser's 40 pages and what streams beside them; they alone; the same and some more.
    for frames in [52, 43, 60] {
        let (loads, best, streaming) = steady_loads(&[16, 40, 12], frames, &order);
        assert!(loads <= best + streaming, "{frames}: {loads} of {best} and {streaming}");
    }
}

#[test]
fn experts_that_take_turns_have_the_frames_in_turn() {
    // Each of the two fits, both do not.
    let order = [(0, 1), (1, 6), (2, 6)];
    for frames in [44, 52] {
        let (loads, best, streaming) = steady_loads(&[12, 36, 36], frames, &order);
        assert!(loads <= best + streaming, "{frames}: {loads} of {best} and {streaming}");
        // All that stays throughout would leave the half of each to be loaded in each pass.
        assert!(loads < 100, "{loads}");
    }
}

#[test]
fn a_decoder_of_many_tiles_is_loaded_once() {
    let order = [(0, 1), (1, 6), (2, 5)];
    let (loads, best, streaming) = steady_loads(&[12, 40, 16], 48, &order);
    assert!(loads <= best + streaming, "{loads} of {best} and {streaming}");
}

/// Where the denoiser does not fit each of its passes is a steady one: its frames for streaming
/// hold what the next steps need, and no page that the next pass could find.
#[test]
fn a_denoiser_that_does_not_fit_has_its_streaming_frames_in_each_pass() {
    let order = [(0, 1), (1, 6), (2, 1)];
    let (loads, best, streaming) = steady_loads(&[16, 40, 12], 34, &order);
    assert!(loads <= best + 6 * streaming, "{loads} of {best} and 6 * {streaming}");
}

#[test]
fn a_workflow_whose_passes_vary_misses_little_and_no_byte_is_wrong() {
    let mut bench = Bench::new(&[12, 36, 36], budget_options(44));
    (0..4).for_each(|_| play(&mut bench, &[(0, 1), (1, 6), (2, 6)]));
    for (first, second) in [(5, 6), (6, 7), (2, 3), (6, 6), (9, 1)] {
        play(&mut bench, &[(0, 1), (1, first), (2, second)]);
    }
    (0..3).for_each(|_| play(&mut bench, &[(0, 1), (1, 6), (2, 6)]));
    let (misses, mapped) = (bench.misses(), bench.mapped());
    play(&mut bench, &[(0, 1), (1, 6), (2, 6)]);
    assert_eq!(bench.misses() - misses, 0, "{:?}", bench.world.runtime.engine_numbers());
    assert!(bench.mapped() - mapped < 100, "{}", bench.mapped() - mapped);
    bench.check_shut();
}

/// Loads of one pass, in which nothing is missed.
#[track_caller]
fn clean_pass(bench: &mut Bench) -> u64 {
    let (misses, mapped) = (bench.misses(), bench.mapped());
    bench.pass(0);
    assert_eq!(bench.misses() - misses, 0, "{:?}", bench.world.runtime.engine_numbers());
    bench.mapped() - mapped
}

fn streaming(bench: &Bench) -> u64 {
    bench.world.runtime.engine_numbers().streaming_frames
}

fn tell(bench: &Bench, passes: u64, pass_ns: u64) {
    for _ in 0..passes {
        let (wait_ns, copy_ns) = (pass_ns / 4, pass_ns / 2);
        bench.world.runtime.tell_engine_cycle(PassMeasured { pass_ns, wait_ns, copy_ns });
    }
}

#[test]
fn measured_cycles_move_the_streaming_frames_and_only_pages_at_the_margin() {
    let mut bench = Bench::new(&[64], budget_options(32));
    (0..4).for_each(|_| bench.pass(0));
    let (before, plans) = (streaming(&bench), bench.world.runtime.engine_numbers().plans);
    let pages = bench.world.runtime.engine_numbers().planned_pages;
    let loads = clean_pass(&mut bench);
    assert_eq!(loads, pages - 32 + before);
    // One that settles, and four before anything is tried.
    tell(&bench, 4, 1000);
    assert_eq!(streaming(&bench), before);
    tell(&bench, 1, 1000);
    let more = streaming(&bench) - before;
    assert_eq!(more, (before / 4).max(1));
    // The pages that stay no longer are there still, and go when their frames are wanted.
    assert!(clean_pass(&mut bench) <= loads + 2 * more);
    assert_eq!(clean_pass(&mut bench), loads + more);
    // It did not pay: back, and not tried again at once.
    tell(&bench, 4, 1000);
    assert_eq!(streaming(&bench), before);
    assert!(clean_pass(&mut bench) <= loads + 2 * more);
    assert_eq!(clean_pass(&mut bench), loads);
    // It pays now: tried after twice as many, and one that settles.
    tell(&bench, 8, 1000);
    assert_eq!(streaming(&bench), before);
    tell(&bench, 1, 1000);
    assert_eq!(streaming(&bench), before + more);
    tell(&bench, 4, 900);
    assert_eq!(streaming(&bench), before + more);
    assert_eq!(bench.world.runtime.engine_numbers().plans, plans, "no other plan");
    bench.pass(0);
    assert_eq!(clean_pass(&mut bench), loads + more);
    bench.check_shut();
}

#[test]
fn a_budget_that_comes_back_finds_the_loads_that_it_had() {
    let mut bench = Bench::new(&[64], budget_options(40));
    (0..4).for_each(|_| bench.pass(0));
    let (before, loads) = (streaming(&bench), clean_pass(&mut bench));
    for (pages, told) in [(20, 0), (30, 4), (12, 8), (39, 4)] {
        // Whatever was tried at one budget is void at the next.
        tell(&bench, told, 1000);
        for pages in [pages, 40] {
            bench.world.runtime.set_budget(Some(pages * P)).unwrap();
            bench.world.runtime.refresh().unwrap();
            bench.world.runtime.drive_engine().unwrap();
            let misses = bench.misses();
            bench.pass(0);
            // A step or two whose pages were on their way out.
            assert!(bench.misses() - misses <= 3, "{pages}: {}", bench.misses() - misses);
            bench.pass(0);
            let few = clean_pass(&mut bench);
            assert!(bench.world.used() <= pages);
            assert!(pages == 40 || few > loads, "{pages}: {few}");
        }
        assert_eq!((streaming(&bench), clean_pass(&mut bench)), (before, loads), "{pages}");
    }
    bench.check_shut();
}

#[test]
fn compute_times_that_drift_make_another_plan_and_noise_makes_none() {
    let mut bench = Bench::new(&[64], budget_options(32));
    (0..4).for_each(|_| bench.pass(0));
    let tensors = bench.bars[0].model().tensors().len();
    let tell = |bench: &Bench, compute_ns: u64| {
        for tensor in 0..tensors {
            bench.bars[0].tell_engine_compute(tensor, compute_ns).unwrap();
        }
    };
    let plans = |bench: &Bench| bench.world.runtime.engine_numbers().plans;
    let before = plans(&bench);
    // Two cycles, and a third that is as fast as ever.
    for _ in 0..4 {
        for _ in 0..2 {
            tell(&bench, 1_000_000_000);
            bench.pass(0);
        }
        bench.pass(0);
        tell(&bench, 1);
        bench.pass(0);
    }
    assert_eq!(plans(&bench), before);
    for _ in 0..4 {
        tell(&bench, 1_000_000_000);
        bench.pass(0);
    }
    bench.pass(0);
    assert_eq!(plans(&bench), before + 1);
    clean_pass(&mut bench);
    assert_eq!(plans(&bench), before + 1);
    bench.check_shut();
}

/// The clock, the samples and the timed copies come together; how much each is is not asked.
#[test]
fn with_a_thread_of_its_own_cycles_and_the_link_are_measured() {
    let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(32) };
    let mut bench = Bench::new(&[64], options);
    let is_measured = |bench: &Bench| {
        let numbers = bench.world.runtime.engine_numbers();
        numbers.measured_cycles > 0 && numbers.link_ns_per_mib > 0
    };
    let passes = (0..1000).find(|_| {
        bench.pass(0);
        is_measured(&bench)
    });
    assert!(passes.is_some(), "{:?}", bench.world.runtime.engine_numbers());
    bench.world.runtime.set_threads(Threads::Off).unwrap();
    bench.check_shut();
    // Driven by hand it has no clock and measures nothing.
    let mut bench = Bench::new(&[64], budget_options(32));
    (0..8).for_each(|_| bench.pass(0));
    let numbers = bench.world.runtime.engine_numbers();
    assert_eq!((numbers.measured_cycles, numbers.link_ns_per_mib), (0, 0));
    bench.check_shut();
}

#[test]
fn tensors_that_share_a_page_are_no_cycle_to_lock_memory_for() {
    let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(16) };
    let mut bench = Bench::new(&[64], options);
    // As small tensors of one page look in the middle of a first pass.
    let looked = (0..2000).find(|_| {
        bench.touch(0, 0);
        std::thread::sleep(std::time::Duration::from_millis(1));
        let numbers = bench.world.runtime.engine_numbers();
        numbers.plans > 0 && numbers.trust > 20
    });
    assert!(looked.is_some(), "{:?}", bench.world.runtime.engine_numbers());
    bench.pass(0);
    let locked = bench.world.runtime.statistics().locked;
    assert_eq!(locked.cache_bytes, 0, "what comes once is not kept");
    bench.world.runtime.set_threads(Threads::Off).unwrap();
    bench.check_shut();
}

/// By the clock: how many a cycle is not asked.
#[test]
fn with_threads_what_streams_moves_into_page_locked_memory_and_comes_to_its_end() {
    let options = RuntimeOptions { threads: Some(Threads::On), ..budget_options(32) };
    let mut bench = Bench::new(&[64], options);
    let cached = |bench: &Bench| bench.world.runtime.statistics().locked.cache_bytes;
    let is_done = |bench: &Bench| {
        let numbers = bench.world.runtime.engine_numbers();
        let streamed = numbers.planned_pages - numbers.kept_pages;
        numbers.planned_pages > 0 && streamed > 0 && cached(bench) >= streamed * P
    };
    let passes = (0..2000).find(|_| {
        bench.pass(0);
        is_done(&bench)
    });
    let told = (bench.world.runtime.engine_numbers(), cached(&bench));
    assert!(passes.is_some(), "{told:?}");
    bench.world.runtime.set_threads(Threads::Off).unwrap();
    bench.check_shut();
}
