//! The pace at which streamed bytes move into the page-locked cache, told by hand and without
//! times: counts per cycle.

use vbar::host::file_system::{FileSystem, FileSystemKind};
use vbar::host::mounts::SystemRoot;
use vbar::model::placement::PassMeasured;

use super::*;

const PAGES: u32 = 24;

impl Rig {
    /// A cycle over all pages. The windows that came of it.
    #[track_caller]
    fn cycle(&self, pass: Option<PassMeasured>) -> u64 {
        let before = self.cache_bytes();
        self.fill(0..PAGES / 2, Keep::Locked);
        self.fill(PAGES / 2..PAGES, Keep::Locked);
        self.filler().note_pass_end(pass);
        (self.cache_bytes() - before) / UNIT
    }

    fn paced(options: RuntimeOptions, reader: Reader) -> Self {
        let rig = Self::new(PAGES.into(), options, reader);
        rig.filler().pace(PAGES.into());
        rig
    }
}

/// Whether the system can be asked what it has in memory of temporary files.
fn is_told() -> bool {
    let file = tempfile::tempfile().unwrap();
    let system = FileSystem::of(std::os::fd::AsFd::as_fd(&file), &SystemRoot::default()).unwrap();
    system.kind == FileSystemKind::Local
}

#[test]
fn what_comes_from_memory_gets_one_window_a_cycle_until_all_have_theirs() {
    // With memory to spare and without: then file pages are given back one by one.
    for options in [threaded(), RuntimeOptions { host_allowance: Some(28 * UNIT), ..threaded() }] {
        for prefer in [Prefer::Auto, Prefer::Ram] {
            let rig = Rig::paced(RuntimeOptions { prefer, ..options.clone() }, Reader::Descriptor);
            let windows: Vec<u64> = (0..25).map(|_| rig.cycle(None)).collect();
            // The middle one first, then its neighbour behind; none where the end is the next one.
            let expected: Vec<u64> = (0..25).map(|cycle| u64::from(cycle != 13)).collect();
            assert_eq!(windows, expected);
            assert_eq!(rig.cache_bytes(), 24 * UNIT, "{windows:?}");
            let cached = rig.sources().locked_cache_bytes;
            assert_eq!(rig.cycle(None), 0);
            assert_eq!(rig.sources().locked_cache_bytes - cached, 24 * P);
            // Each byte of the 26 cycles came from one of three places.
            let sources = rig.sources();
            let all = sources.locked_cache_bytes + sources.page_cache_bytes + sources.disk_bytes;
            assert_eq!((all, sources.disk_bytes), (26 * 24 * P, 0));
            rig.check_shut();
        }
    }
}

#[test]
fn what_comes_from_the_disk_gets_its_window_at_once() {
    if !is_told() {
        return;
    }
    let rig = Rig::paced(threaded(), Reader::Descriptor);
    assert_eq!(rig.cycle(None), 1);
    // The system lets go of it all, and reads little more than it is asked for.
    let file = rig.bound.file(0).descriptor().unwrap();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random).unwrap();
    rig.drop_from_memory();
    assert_eq!(rig.cycle(None), 23);
    // The system may read more than it is asked for, and the next ones find that.
    assert!(rig.sources().disk_bytes >= P, "{:?}", rig.sources());
    rig.check_shut();
    // And where it is passed by: as with a page cache that has nothing.
    let rig = Rig::paced(RuntimeOptions { prefer: Prefer::Disk, ..threaded() }, Reader::Descriptor);
    if rig.bound.file(0).direct().is_some() {
        assert_eq!(rig.cycle(None), 24);
    }
    rig.check_shut();
}

#[test]
fn scenario_39_the_disk_is_read_once_at_any_pace() {
    // Nobody can say where it comes from.
    let rig = Rig::paced(threaded(), Reader::Watched);
    let model = u64::from(PAGES) * P;
    let windows: u64 = (0..10).map(|_| rig.cycle(None)).sum();
    assert_eq!(windows, u64::from(PAGES));
    assert!(rig.read_bytes() * 100 <= model * 105, "{} of {model}", rig.read_bytes());
    rig.check_shut();
}

#[test]
fn cycles_in_which_windows_come_back_soon_take_them_all() {
    let rig = Rig::paced(threaded(), Reader::Descriptor);
    // Far more than all windows cost is to be saved, twice in a row.
    let pass = PassMeasured { pass_ns: 1 << 40, wait_ns: 1 << 40, copy_ns: 0 };
    assert_eq!(rig.cycle(Some(pass)), 1);
    assert_eq!(rig.cycle(Some(pass)), 1);
    assert_eq!(rig.cycle(None), 22);
    rig.check_shut();
    // They would save nothing, and a cycle has no time for them: a tenth each, once that is known.
    let rig = Rig::paced(threaded(), Reader::Descriptor);
    let pass = PassMeasured { pass_ns: 1, wait_ns: 0, copy_ns: 1 };
    let windows: Vec<u64> = (0..6).map(|_| rig.cycle(Some(pass))).collect();
    assert_eq!(windows, [1, 1, 2, 2, 2, 2]);
    rig.check_shut();
}

#[test]
fn the_pace_stays_within_the_allowance_and_after_pages_are_forgotten() {
    let options = RuntimeOptions { host_allowance: Some(9 * UNIT), ..threaded() };
    let rig = Rig::paced(options, Reader::Descriptor);
    for _ in 0..30 {
        rig.cycle(None);
        assert!(rig.filler().locked_bytes() <= 9 * UNIT);
    }
    let held = rig.cache_bytes();
    assert!(held >= 5 * UNIT, "{held}: beside a ring of four slots at most");
    // Windows without use are taken before new ones are made, and at once: they are locked.
    rig.filler().forget(0, 0..PAGES);
    let before = rig.sources();
    rig.cycle(None);
    assert_eq!((rig.cache_bytes(), rig.sources().since(before).locked_cache_bytes), (held, 0));
    rig.cycle(None);
    assert_eq!(rig.sources().since(before).locked_cache_bytes, held / UNIT * P);
    rig.check_shut();
}
