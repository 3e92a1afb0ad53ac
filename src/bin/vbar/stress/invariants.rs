//! What must be true whenever nothing is going on, and at the end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vbar::memory::pager::HeldPins;
use vbar::options::Threads;
use vbar::units::Stream;
use vbar::{Result, Runtime};

use super::journal::Journal;
use super::settings::FLOOR_MAX;
use super::world::{Bare, Bound, World};

/// What the library's own threads are in the middle of is done by then.
const PATIENCE: Duration = Duration::from_secs(2);

/// Stops the threads for a moment and looks. `thread_pages`: pages that their checks pin.
pub(super) fn look(world: &World, thread_pages: u64) {
    let _nobody_runs = world.pause.write();
    look_at_books(world);
    // With injected failures this may fail; then there is nothing to compare.
    if settle(world).is_ok() {
        must_become_true(world, || budget_complaint(world, thread_pages));
        look_at_books(world);
    }
}

/// All work done, and what the budget no longer covers given back.
fn settle(world: &World) -> Result<()> {
    let device = Arc::clone(world.runtime.device());
    let _scope = device.enter()?;
    // Not the driver's call: the library has to know that everything is done.
    device.context_wait()?;
    // The second one removes the mappings of pages that the first one evicted.
    world.runtime.refresh()?;
    world.runtime.refresh()
}

/// The books of library and device agree.
fn look_at_books(world: &World) {
    let journal = &world.journal;
    if !world.runtime.is_valid() {
        journal.violation("the pager's tables contradict themselves".to_owned());
    }
    let Some(sim) = &world.sim else { return };
    sim.violations().into_iter().for_each(|text| journal.violation(format!("device: {text}")));
    must_become_true(world, || {
        let numbers = world.runtime.numbers();
        let (ours, theirs) = (numbers.used_bytes, sim.used_bytes(world.device));
        // A mapping that lingers may keep the memory of a frame whose handle is released.
        let lingering = numbers.lingering_mappings * world.page_bytes();
        match (ours..=ours + lingering).contains(&theirs) {
            true => None,
            false => Some(format!("{ours} bytes of frames are held, the device has {theirs}")),
        }
    });
}

/// What `complaint` returns is a violation. The library's own threads do not stop for a look: where
/// there are any, it is asked again until it has none, for a while.
fn must_become_true(world: &World, complaint: impl Fn() -> Option<String>) {
    let start = Instant::now();
    while let Some(text) = complaint() {
        if world.runtime.threads() == Threads::Off || start.elapsed() > PATIENCE {
            return world.journal.violation(text);
        }
        std::thread::sleep(Duration::from_millis(1));
        if let Err(error) = settle(world) {
            log::debug!("looking again: {error}");
        }
    }
}

/// Whether it is true, or comes to be where threads of the library's own may have frames in their
/// hands: what they give back a smaller budget does not take a second time.
fn becomes_true(runtime: &Runtime, is_true: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    while !is_true() {
        if runtime.threads() == Threads::Off || start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Nothing beyond the budget but what is pinned or below a floor.
fn budget_complaint(world: &World, thread_pages: u64) -> Option<String> {
    let numbers = world.runtime.numbers();
    let marks = all_marks(world);
    let floors = marks.iter().map(|marks| u64::from(marks.floor)).sum::<u64>();
    // VBARs that were replaced and that a token keeps open: their floors are not known here.
    let others = u64::from(numbers.bars).saturating_sub(marks.len() as u64 + thread_pages);
    let held = world.held_pages.load(Ordering::Relaxed);
    let kept = floors + others * u64::from(FLOOR_MAX) + held + thread_pages;
    let allowed = numbers.budget_bytes.max(kept * world.page_bytes());
    if numbers.used_bytes - numbers.quarantined_bytes <= allowed {
        return None;
    }
    let drawn = drawings(world);
    Some(format!("{kept} pages are kept, and more is used: {numbers:?}, pages {drawn:?}"))
}

/// The pages of all VBARs that have a frame, with their numbers.
fn drawings(world: &World) -> Vec<String> {
    let bare = (0..world.bare.len()).map(|index| world.bare(index).vbar.draw(u32::MAX));
    bare.chain([world.bound().bar.vbar().draw(u32::MAX)]).collect()
}

fn all_marks(world: &World) -> Vec<vbar::memory::pager::BarMarks> {
    let bare = (0..world.bare.len()).map(|index| world.bare(index).vbar.marks());
    bare.chain([world.bound().bar.vbar().marks()]).collect()
}

/// Pages and frames agree: each page with a frame is counted once, and so is each frame.
fn pages_complaint(world: &World) -> Option<String> {
    let numbers = world.runtime.numbers();
    let bare = (0..world.bare.len()).map(|index| world.bare(index).vbar.residency());
    let pages: Vec<_> = bare.chain([world.bound().bar.vbar().residency()]).collect();
    let mapped = pages.iter().flatten().filter(|page| page.state.is_mapped()).count() as u64;
    let others = numbers.free_bytes + numbers.quarantined_bytes + numbers.poison_bytes;
    let frames = mapped * world.page_bytes() + others;
    let bars = pages.len() as u64;
    let agree = numbers.resident_pages == mapped && numbers.used_bytes == frames;
    match agree && u64::from(numbers.bars) == bars {
        true => None,
        false => Some(format!("{bars} VBARs have {mapped} pages mapped: {numbers:?}")),
    }
}

/// Gives everything back and sees that nothing is left. After a violation the rest says nothing.
pub(super) fn look_at_the_end(world: World, budget_bytes: u64) -> Journal {
    // VBARs that were replaced are gone when all work on them is done.
    if let Err(error) = settle(&world) {
        world.journal.violation(format!("at the end: {error}"));
    }
    must_become_true(&world, || pages_complaint(&world));
    let World { runtime, sim, device, journal, bare, bound, pause, held_pages, tensors, .. } =
        world;
    let _ = (pause, held_pages, tensors);
    if !journal.violations().is_empty() {
        return journal;
    }
    let bare: Vec<Arc<Bare>> = bare.into_iter().map(parking_lot::RwLock::into_inner).collect();
    let bound: Arc<Bound> = bound.into_inner();
    let closed = unpinned(&journal, &bare, &bound)
        .and_then(|()| runtime.set_headroom(0))
        .and_then(|()| runtime.set_budget(Some(budget_bytes)))
        .and_then(|()| {
            if !becomes_true(&runtime, || runtime.used_bytes() <= budget_bytes) {
                let text = format!("more than the budget is used: {:?}", runtime.numbers());
                journal.violation(text);
            }
            close_bars(&journal, bare, bound)
        })
        .and_then(|()| runtime.trim(0));
    match closed {
        Ok(_) if runtime.used_bytes() > 0 => {
            journal.violation(format!("memory is left: {:?}", runtime.numbers()));
        }
        Ok(_) => {}
        Err(error) => journal.violation(format!("closing: {error}")),
    }
    drop(runtime);
    if let Some(sim) = sim {
        sim.violations().into_iter().for_each(|text| journal.violation(format!("device: {text}")));
        let left = [
            ("frames", sim.live_frames(device)),
            ("reservations", sim.live_reservations() as u64),
            ("mappings", sim.live_mappings() as u64),
            ("events", sim.live_events() as u64),
            ("streams", sim.live_streams() as u64),
            ("page-locked bytes", sim.locked_bytes()),
        ];
        for (what, count) in left.into_iter().filter(|(_, count)| *count > 0) {
            journal.violation(format!("{count} {what} are left at the end"));
        }
    }
    journal
}

/// Ends the runs, which lifts the floors; no page has a pin any more.
fn unpinned(journal: &Journal, bare: &[Arc<Bare>], bound: &Bound) -> Result<()> {
    let vbars = bare.iter().map(|bare| &bare.vbar).chain([bound.bar.vbar()]);
    for (number, vbar) in vbars.enumerate() {
        let held = vbar.end_of_run(Stream::NONE, HeldPins::Keep)?.held;
        if !held.is_empty() {
            journal.violation(format!("pins are left on VBAR {number}: {held:?}"));
        }
    }
    Ok(())
}

fn close_bars(journal: &Journal, bare: Vec<Arc<Bare>>, bound: Arc<Bound>) -> Result<()> {
    for bare in bare {
        match Arc::try_unwrap(bare) {
            Ok(Bare { vbar, pieces, kept, .. }) => {
                drop((pieces, kept));
                vbar.destroy_wait()?;
            }
            Err(_) => journal.violation("a thread still has a VBAR".to_owned()),
        }
    }
    let Ok(Bound { bar, .. }) = Arc::try_unwrap(bound) else {
        journal.violation("a thread still has the bound VBAR".to_owned());
        return Ok(());
    };
    let vbar = bar.vbar().clone();
    drop(bar);
    vbar.destroy_wait()
}
