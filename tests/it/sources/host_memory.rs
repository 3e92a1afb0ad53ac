//! How much page-locked memory there is: never above the allowance, reused, and given back.

use std::fmt::Write;

use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;

use super::*;

/// A tree that stands for the system's own files.
pub(super) struct System(TempDir);

impl System {
    /// 64 GiB in all, `available_bytes` of them to be had.
    pub(super) fn new(available_bytes: u64) -> Self {
        let system = Self(TempDir::new().unwrap());
        std::fs::create_dir_all(system.0.path().join("proc/self")).unwrap();
        std::fs::create_dir_all(system.0.path().join("proc/pressure")).unwrap();
        system.set_available(available_bytes);
        system
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(super) fn path(&self) -> &std::path::Path {
        self.0.path()
    }

    /// The version of the driver's kernel module; `None` without one.
    pub(super) fn set_module(&self, version: Option<&str>) {
        let text = version.map(|it| {
            format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {it}  Tue Jul 13 2026\n")
        });
        self.write("proc/driver/nvidia/version", &text.unwrap_or_default());
    }

    pub(super) fn set_available(&self, bytes: u64) {
        let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", 64 << 20, bytes >> 10);
        self.write("proc/meminfo", &text);
    }

    /// The process is in /a/b: limits and use of both groups.
    pub(super) fn set_groups(&self, inner: (&str, u64), outer: (&str, u64)) {
        self.write("proc/self/cgroup", "0::/a/b\n");
        let mount = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n";
        self.write("proc/self/mountinfo", mount);
        for (folder, (limit, current)) in [("a/b", inner), ("a", outer)] {
            let folder = format!("sys/fs/cgroup/{folder}");
            self.write(&format!("{folder}/memory.max"), limit);
            self.write(&format!("{folder}/memory.current"), &current.to_string());
        }
    }

    pub(super) fn options(&self) -> RuntimeOptions {
        RuntimeOptions { system_root: Some(self.0.path().to_owned()), ..threaded() }
    }
}

/// The margin that is left to others where there are 64 GiB.
pub(super) const MARGIN: u64 = 4 << 30;

fn allowed(units: u64) -> RuntimeOptions {
    RuntimeOptions { host_allowance: Some(units * UNIT), ..threaded() }
}

/// What is read from files again is no more than the system may have dropped: less than a second
/// passes between two looks, but the numbers are asked anew.
pub(super) fn let_it_be_seen() {
    std::thread::sleep(Duration::from_millis(110));
}

#[test]
fn scenario_34_a_cap_is_kept_and_windows_are_used_again() {
    // One slot for the ring, and eight windows.
    let rig = Rig::new(800, allowed(9), Reader::Descriptor);
    for cycle in 0..100 {
        let page = cycle * 8;
        rig.fill(page..page + 3, Keep::Locked);
        rig.fill(page + 3..page + 5, Keep::Locked);
        rig.filler().forget(0, page..page + 3);
        rig.fill(page + 5..page + 8, Keep::Locked);
        assert!(rig.filler().locked_bytes() <= 9 * UNIT);
        rig.filler().forget(0, page..page + 8);
    }
    // With the ring's growth, which shares the allowance.
    let registered = rig.sim.calls(Verb::MemHostRegister);
    assert!(registered <= 8, "{registered} windows were registered");
    assert_eq!(rig.sim.calls(Verb::MemHostUnregister), 0);
    // Full: the rest goes through the ring.
    rig.fill(0..100, Keep::Locked);
    assert!(rig.filler().locked_bytes() <= 9 * UNIT);
    rig.check_shut();
}

#[test]
fn scenario_39_the_disk_is_read_once_while_there_is_room() {
    let (pages, passes) = (32u32, 10);
    let rig = Rig::new(u64::from(pages), threaded(), Reader::Watched);
    let model = u64::from(pages) * P;
    for _ in 0..passes {
        // Half of the model at a time, as a budget of half of it has it.
        rig.fill(0..pages / 2, Keep::Locked);
        rig.fill(pages / 2..pages, Keep::Locked);
    }
    assert!(rig.read_bytes() * 100 <= model * 105, "{} of {model}", rig.read_bytes());
    let sources = rig.sources();
    assert_eq!(sources.locked_cache_bytes + sources.disk_bytes, passes * model);
    rig.check_shut();

    let rig = Rig::new(u64::from(pages), allowed(0), Reader::Watched);
    for _ in 0..passes {
        rig.fill(0..pages, Keep::Locked);
    }
    assert_eq!((rig.read_bytes(), rig.filler().locked_bytes()), (passes * model, 0));
    rig.check_shut();
}

#[test]
fn scenario_41_only_what_streams_is_kept() {
    let rig = Rig::new(4, threaded(), Reader::Descriptor);
    rig.fill(0..4, Keep::No);
    // Asked once: the ring may grow between two questions.
    let locked = rig.filler().locked();
    assert_eq!(locked.sum(), locked.ring_bytes);
    rig.fill(1..3, Keep::Locked);
    assert_eq!(rig.cache_bytes(), 2 * UNIT);
    rig.filler().housekeep().unwrap();
    assert_eq!(rig.cache_bytes(), 2 * UNIT, "what is in use stays");
    // They are resident for good now.
    rig.filler().forget(0, 1..3);
    rig.keep_house_until(0);
    // Asked once: the ring may grow between two questions.
    let locked = rig.filler().locked();
    assert_eq!(locked.sum(), locked.ring_bytes);
    rig.check_shut();
}

#[test]
fn scenario_41_what_has_become_resident_leaves_a_few_windows_a_pass_while_others_stream() {
    let rig = Rig::new(8, threaded(), Reader::Descriptor);
    rig.fill(0..8, Keep::Locked);
    assert_eq!(rig.cache_bytes(), 8 * UNIT);
    rig.filler().forget(0, 0..5);
    let pass = |before: u64| {
        rig.fill(5..8, Keep::Locked);
        rig.filler().note_pass_end(None);
        rig.filler().housekeep().unwrap();
        let gone = before - rig.cache_bytes() / UNIT;
        assert!(gone <= 2, "{gone} windows in one pass");
        before - gone
    };
    let mut held = 8;
    for _ in 0..1000 {
        held = pass(held);
        if held == 3 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(held, 3, "those that stream");
    let read = || rig.sources().page_cache_bytes + rig.sources().disk_bytes;
    let before = read();
    assert_eq!(pass(held), 3);
    assert_eq!(read(), before, "they are not read again");
    rig.check_shut();
}

#[test]
fn scenario_51_memory_comes_back_after_every_cycle() {
    let rig = Rig::new(16, allowed(20), Reader::Descriptor);
    let mut after = Vec::new();
    for cycle in 1..=20 {
        rig.fill(0..16, Keep::Locked);
        rig.filler().forget(0, 0..16);
        let held = rig.filler().locked_bytes();
        // A slot that is being made for the ring comes when it comes.
        let mut given_back = rig.filler().trim_host(0).unwrap();
        assert!(given_back >= 16 * UNIT && given_back <= held, "cycle {cycle}");
        while rig.sim.locked_bytes() > UNIT {
            given_back += rig.filler().trim_host(0).unwrap();
        }
        assert_eq!((rig.cache_bytes(), rig.filler().trim_host(0).unwrap()), (0, 0));
        assert_eq!(given_back % UNIT, 0);
        after.push((rig.sim.locked_bytes(), rig.sim.live_streams(), rig.sim.live_events()));
    }
    assert_eq!(after[19], after[1]);
    rig.check_shut();
}

#[test]
fn a_limit_that_shrinks_takes_memory_back_a_little_at_a_time() {
    let system = System::new(MARGIN + 13 * UNIT);
    let rig = Rig::new(12, system.options(), Reader::Descriptor);
    assert_eq!(rig.filler().allowance_bytes(), 12 * UNIT + UNIT);
    rig.fill(0..12, Keep::Locked);
    let held = rig.filler().locked_bytes();
    assert!(rig.cache_bytes() >= UNIT && held <= 13 * UNIT);
    let calls = rig.sim.calls(Verb::MemHostUnregister);
    // Others take all but the margin, and a unit of what we hold.
    system.set_available(MARGIN - UNIT);
    let_it_be_seen();
    rig.filler().housekeep().unwrap();
    assert!(rig.sim.calls(Verb::MemHostUnregister) <= calls + 2, "not all at once");
    // The tree knows nothing of what is given back: it goes on to the last slot, and beyond.
    for _ in 0..100 {
        rig.filler().housekeep().unwrap();
        if rig.filler().locked_bytes() == 0 {
            break;
        }
        let_it_be_seen();
    }
    assert_eq!((rig.cache_bytes(), rig.ring_bytes(), rig.sim.locked_bytes()), (0, 0, 0));
    // Through ordinary memory.
    rig.fill(0..12, Keep::Locked);
    assert_eq!(rig.sim.locked_bytes(), 0);
    // There is room again: so is the ring.
    system.set_available(MARGIN + 13 * UNIT);
    let_it_be_seen();
    for _ in 0..400 {
        rig.fill(0..1, Keep::No);
        if rig.ring_bytes() > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(rig.ring_bytes() > 0);
    rig.check_shut();
}

#[test]
fn groups_around_the_process_bound_it_and_may_change() {
    let system = System::new(60 << 30);
    system.set_groups(("max", 1 << 30), (&(8u64 << 30).to_string(), 2 << 30));
    let rig = Rig::new(2, system.options(), Reader::Descriptor);
    // A sixteenth of the smallest limit is the margin; the ring's slot was there when it was read.
    assert_eq!(rig.filler().allowance_bytes() >> 30, 5);
    system.set_groups(("1073741824", 1 << 30), ("max", 2 << 30));
    let_it_be_seen();
    assert_eq!(rig.filler().allowance_bytes(), 0);
    let before = rig.cache_bytes();
    assert_eq!(rig.try_fill(0..2, Keep::Locked).len(), 2);
    assert_eq!(rig.cache_bytes(), before, "nothing more is locked");
    system.set_groups(("max", 0), ("max", 0));
    let_it_be_seen();
    rig.fill(0..2, Keep::Locked);
    assert_eq!(rig.cache_bytes(), before + 2 * UNIT);
    rig.check_shut();
}

#[test]
fn pressure_gives_windows_back_and_makes_no_new_ones() {
    let system = System::new(60 << 30);
    let rig = Rig::new(4, system.options(), Reader::Descriptor);
    rig.fill(0..2, Keep::Locked);
    assert_eq!(rig.cache_bytes(), 2 * UNIT);
    let mut text = String::new();
    writeln!(text, "some avg10=31.05 avg60=2.00 avg300=0.10 total=1").unwrap();
    system.write("proc/pressure/memory", &text);
    let_it_be_seen();
    rig.filler().housekeep().unwrap();
    assert_eq!(rig.cache_bytes(), 0);
    rig.fill(0..4, Keep::Locked);
    assert_eq!(rig.cache_bytes(), 0);
    rig.check_shut();
}

#[test]
fn without_an_allowance_bytes_come_through_ordinary_memory() {
    for threads in [Threads::Off, Threads::On] {
        let options = RuntimeOptions { threads: Some(threads), ..allowed(0) };
        let rig = Rig::new(8, options, Reader::Descriptor);
        rig.fill(0..8, Keep::Locked);
        assert_eq!((rig.filler().locked_bytes(), rig.sim.locked_bytes()), (0, 0));
        assert_eq!(rig.sim.calls(Verb::MemHostRegister), 0);
        rig.check_shut();
    }
}

#[test]
fn memory_that_the_driver_does_not_lock_is_done_without() {
    let options = RuntimeOptions { system_root: None, ..threaded() };
    let sim = Sim::new(SimOptions::parse(ROOMY).unwrap());
    sim.fail_always(Verb::MemHostRegister, DriverCode::OUT_OF_MEMORY);
    let context = sim.device_primary_ctx_retain(DEVICE).unwrap();
    sim.ctx_set_current(Some(context)).unwrap();
    let device = Arc::new(Device::new(sim.driver(), DEVICE, context, options));
    let filler = Filler::new(device).unwrap();
    assert_eq!((filler.locked_bytes(), sim.calls(Verb::MemHostRegister)), (0, 1));
}

#[test]
fn file_pages_are_given_back_unless_there_is_memory_to_spare() {
    // Eight pages and a slot are all there is room for, or there is more than enough.
    for (options, stays) in [(allowed(9), false), (threaded(), true)] {
        let rig = Rig::new(8, options, Reader::Descriptor);
        let file = File::open(&rig.path).unwrap();
        let system = vbar::host::file_system::FileSystem::of(
            std::os::fd::AsFd::as_fd(&file),
            &vbar::host::mounts::SystemRoot::default(),
        );
        if system.unwrap().kind != vbar::host::file_system::FileSystemKind::Local {
            return; // It cannot be asked what it has in memory.
        }
        // What is not written yet stays in memory whatever is asked.
        file.sync_all().unwrap();
        let is_cached = |page: u64| {
            let (mut byte, flags) = ([0], rustix::io::ReadWriteFlags::NOWAIT);
            let at = OFFSET + page * P + P / 2;
            let mut targets = [io::IoSliceMut::new(&mut byte)];
            rustix::io::preadv2(&file, &mut targets, at, flags).is_ok()
        };
        assert!((0..8).all(is_cached));
        rig.fill(0..8, Keep::Locked);
        assert!(rig.cache_bytes() > 0);
        let left = (0..8).filter(|page| is_cached(*page)).count();
        assert_eq!(left == 8, stays, "{left} of 8 pages are in memory");
        rig.check_shut();
    }
}
