//! Registered pages of a file: when they are used and when not, and that they are given back.

use std::os::fd::AsFd;

use vbar::counters::Waiter;
use vbar::driver::sim::Verb;
use vbar::host::file_system::{FileSystem, FileSystemKind};
use vbar::host::mounts::SystemRoot;
use vbar::outcome::WaitKind;

use super::host_memory::{MARGIN, System, let_it_be_seen};
use super::*;

/// A device that can register pages of files.
pub(super) const ABLE: &str = "capacity=64M,granularity=64K,read_only=1";
pub(super) const PAGES: u32 = 8;

/// A system whose driver can do it, with the mounts and descriptors that there are.
pub(super) fn able(available_bytes: u64) -> System {
    let system = System::new(available_bytes);
    system.set_module(Some("580.95.05"));
    for name in ["mountinfo", "fdinfo"] {
        let link = system.path().join("proc/self").join(name);
        std::os::unix::fs::symlink(format!("/proc/self/{name}"), link).unwrap();
    }
    system
}

/// A folder on a file system whose pages may be registered.
pub(super) fn shared_memory() -> TempDir {
    TempDir::new_in("/dev/shm").expect("/dev/shm is a tmpfs")
}

pub(super) fn rig(system: &System, options: RuntimeOptions) -> Rig {
    rig_in(shared_memory(), system, options)
}

fn rig_in(folder: TempDir, system: &System, options: RuntimeOptions) -> Rig {
    let options = RuntimeOptions { system_root: system.options().system_root, ..options };
    Rig::on(ABLE, folder, PAGES.into(), options, Reader::Descriptor)
}

/// Whether temporary files lie on a disk whose pages may be registered, and not in memory.
fn disk_may_be_registered() -> bool {
    let file = tempfile::tempfile().unwrap();
    let system = FileSystem::of(file.as_fd(), &SystemRoot::default()).unwrap();
    system.may_be_registered() && system.kind == FileSystemKind::Local
}

pub(super) fn preferring(prefer: Prefer) -> RuntimeOptions {
    RuntimeOptions { prefer, ..threaded() }
}

impl Rig {
    pub(super) fn registered_bytes(&self) -> u64 {
        self.filler().locked().registered_bytes
    }

    /// Streams the model so many times, the housekeeping between.
    #[track_caller]
    pub(super) fn stream(&self, passes: usize) {
        for _ in 0..passes {
            self.fill(0..PAGES, Keep::Locked);
            self.filler().housekeep().unwrap();
        }
    }

    /// Streams the model until all of it is registered.
    #[track_caller]
    pub(super) fn register(&self) {
        self.stream(3);
        for _ in 0..6000 {
            if self.registered_bytes() == u64::from(PAGES) * UNIT {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
            // What other runtimes of the process have locked may leave no room for a while, and
            // what found none is wanted again when it streams again.
            self.stream(1);
        }
        panic!("{} bytes are registered", self.registered_bytes());
    }

    /// Drops the file from memory.
    pub(super) fn drop_from_memory(&self) {
        let file = File::open(&self.path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    }

    pub(super) fn read_only_calls(&self) -> u64 {
        self.sim.calls(Verb::MemHostRegisterReadOnly)
    }
}

/// Whatever a test streams is not registered, and comes all the same.
#[track_caller]
fn check_unused(rig: Rig) {
    rig.stream(6);
    assert_eq!((rig.read_only_calls(), rig.registered_bytes()), (0, 0));
    assert_eq!(rig.sources().registered_bytes, 0);
    rig.check_shut();
}

#[test]
fn a_file_is_registered_after_two_rounds_from_memory() {
    // In memory, and on a disk where that is of a kind that may be.
    let disk = disk_may_be_registered();
    for in_memory in [true, false].into_iter().filter(|in_memory| *in_memory || disk) {
        let system = able(60 << 30);
        let folder = if in_memory { shared_memory() } else { TempDir::new().unwrap() };
        let rig = rig_in(folder, &system, preferring(Prefer::Ram));
        rig.stream(2);
        assert_eq!(rig.read_only_calls(), 0, "it is not known to be warm before");
        rig.register();
        assert_eq!(rig.read_only_calls(), u64::from(PAGES));
        // One copy in memory, and nothing is read any more.
        assert_eq!(rig.cache_bytes(), 0);
        let before = rig.sources();
        rig.stream(3);
        let since = rig.sources().since(before);
        let all = 3 * u64::from(PAGES) * P;
        assert_eq!((since.registered_bytes, since.page_cache_bytes), (all, 0));
        assert_eq!((since.disk_bytes, since.locked_cache_bytes), (0, 0));
        assert_eq!(rig.read_only_calls(), u64::from(PAGES), "a steady pass registers nothing");
        assert_eq!(rig.sim.calls(Verb::MemHostUnregister), 0);
        let waits = |waiter| rig.device.counters.waits(WaitKind::Register, waiter).count;
        // With those of slots that the ring grew by.
        let counted = waits(Waiter::Library) + waits(Waiter::Program);
        assert!(counted >= u64::from(PAGES), "each is counted");
        assert!(waits(Waiter::Library) > 0, "the first was on trial");
        rig.check_shut();
    }
}

#[test]
fn each_condition_that_does_not_hold_leaves_the_ring() {
    let system = || able(60 << 30);
    let on = |sim: &str| {
        let options = RuntimeOptions { system_root: None, ..preferring(Prefer::Ram) };
        let held = system();
        let options = RuntimeOptions { system_root: held.options().system_root, ..options };
        let rig = Rig::on(sim, shared_memory(), PAGES.into(), options, Reader::Descriptor);
        (rig, held)
    };
    // The device, and the library of the driver.
    for text in [ROOMY, &format!("{ABLE},ctx_event=0")] {
        let (rig, _system) = on(text);
        check_unused(rig);
    }
    // The module of the driver.
    for version in [None, Some("565.57.01"), Some("none")] {
        let system = system();
        system.set_module(version);
        check_unused(rig(&system, preferring(Prefer::Ram)));
    }
    // The file system.
    let other = system();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    std::fs::remove_file(other.path().join("proc/self/mountinfo")).unwrap();
    other.write("proc/self/mountinfo", &mounts.replace(" - tmpfs ", " - devtmpfs "));
    check_unused(rig(&other, preferring(Prefer::Ram)));
    // What is asked for, no threads, and memory that is short.
    let system = system();
    check_unused(rig(&system, preferring(Prefer::Auto)));
    check_unused(rig(&system, preferring(Prefer::Disk)));
    let off = RuntimeOptions { threads: Some(Threads::Off), ..preferring(Prefer::Ram) };
    check_unused(rig(&system, off));
    let poor = RuntimeOptions { host_allowance: Some(6 * UNIT), ..preferring(Prefer::Ram) };
    check_unused(rig(&system, poor));
    system.write("proc/pressure/memory", "some avg10=31.05 avg60=2.00 avg300=0.10 total=1\n");
    let_it_be_seen();
    check_unused(rig(&system, preferring(Prefer::Ram)));
}

#[test]
fn a_file_that_others_have_locked_is_not_registered() {
    let system = able(60 << 30);
    let first = rig(&system, preferring(Prefer::Ram));
    first.register();
    // Another description of the same file, as another process has it.
    let again = Arc::new(ModelFile::open(&first.path).unwrap());
    assert!(!again.is_ours() && first.bound.file(0).is_ours());
    drop(again);
    let second = rig(&system, preferring(Prefer::Ram));
    let file = File::open(&second.path).unwrap();
    file.lock_shared().unwrap();
    check_unused(second);
    first.check_shut();
}

#[test]
fn pages_that_left_memory_are_read_before_they_are_registered() {
    if !disk_may_be_registered() {
        return; // A file in memory does not leave it.
    }
    let system = able(60 << 30);
    let rig = rig_in(TempDir::new().unwrap(), &system, preferring(Prefer::Ram));
    rig.stream(2);
    rig.fill(0..PAGES, Keep::Locked);
    rig.drop_from_memory();
    rig.filler().housekeep().unwrap();
    assert_eq!(rig.read_only_calls(), 0, "the driver would have waited for the disk");
    rig.register();
    let before = rig.sources();
    rig.stream(1);
    assert_eq!(rig.sources().since(before).registered_bytes, u64::from(PAGES) * P);
    rig.check_shut();
}

#[test]
fn a_file_that_comes_from_the_disk_is_locked_in_memory_of_ours() {
    if !disk_may_be_registered() {
        return;
    }
    let system = able(60 << 30);
    let rig = rig_in(TempDir::new().unwrap(), &system, preferring(Prefer::Auto));
    rig.drop_from_memory();
    rig.stream(4);
    assert_eq!((rig.read_only_calls(), rig.cache_bytes()), (0, u64::from(PAGES) * UNIT));
    assert!(rig.sources().disk_bytes > 0);
    rig.check_shut();
    // When it is told to stay in the page cache it is registered all the same, once it is there.
    let rig = rig_in(TempDir::new().unwrap(), &system, preferring(Prefer::Ram));
    rig.drop_from_memory();
    rig.stream(1);
    rig.register();
    assert_eq!(rig.cache_bytes(), 0);
    rig.check_shut();
}

/// Streams a model each of whose pages is two halves, from places in the file that `places` tells.
fn halves(system: &System, places: impl Fn(u64) -> [u64; 2]) -> Rig {
    let mut rig = rig(system, preferring(Prefer::Ram));
    let (mut binding, mut bytes) = (Binding::new(), Vec::new());
    for page in 0..u64::from(PAGES) {
        for (at, source) in places(page).into_iter().enumerate() {
            let target = page * P + at as u64 * P / 2;
            binding.bind(target..target + P / 2, 0, OFFSET + source, P / 2).unwrap();
            bytes.extend_from_slice(&rig.bytes[source as usize..(source + P / 2) as usize]);
        }
    }
    let file = Arc::clone(rig.bound.file(0));
    rig.bound = Arc::new(Bound::new(binding, vec![file]).unwrap());
    rig.bytes = bytes;
    rig
}

#[test]
fn what_lies_close_together_takes_several_copies_of_one_window() {
    // The second half of a page comes first.
    let places = |page| [page * P + P / 2, page * P];
    let system = able(60 << 30);
    let rig = halves(&system, places);
    rig.register();
    let copies = rig.sim.calls(Verb::MemcpyHtodAsync);
    rig.stream(1);
    assert_eq!(rig.sim.calls(Verb::MemcpyHtodAsync) - copies, 2 * u64::from(PAGES));
    assert_eq!(rig.sources().registered_bytes, u64::from(PAGES) * P);
    // The second copy of a page fails: the first is on its way all the same.
    let rig = halves(&system, places);
    rig.register();
    rig.sim.fail_nth(Verb::MemcpyHtodAsync, 2, vbar::driver::DriverCode::INVALID_VALUE);
    let (stream, _) = rig.filler().stream();
    rig.sim.hold_stream(stream).unwrap();
    assert!(rig.fill_failing(0..PAGES, Keep::Locked).to_string().contains("cuMemcpyHtoD"));
    std::thread::scope(|scope| {
        let trimmed = scope.spawn(|| rig.filler().trim_host(0).unwrap());
        std::thread::sleep(Duration::from_millis(30));
        rig.sim.release_stream(stream).unwrap();
        trimmed.join().unwrap();
    });
    assert_eq!(rig.registered_bytes(), UNIT, "its first window was being copied");
    rig.check_shut();
}

#[test]
fn what_does_not_lie_together_goes_through_the_ring() {
    check_unused(halves(&able(60 << 30), |page| [page * P / 2, (page + u64::from(PAGES)) * P / 2]));
}

#[test]
fn registered_pages_are_given_back_when_the_allowance_shrinks() {
    let system = able(MARGIN + 40 * UNIT);
    let rig = rig(&system, preferring(Prefer::Ram));
    rig.register();
    let calls = rig.sim.calls(Verb::MemHostUnregister);
    // Nothing at all is left: the pages are file pages, no memory that we have besides.
    system.set_available(MARGIN / 2);
    let_it_be_seen();
    rig.filler().housekeep().unwrap();
    assert!(rig.sim.calls(Verb::MemHostUnregister) <= calls + 2, "not all at once");
    for _ in 0..100 {
        let_it_be_seen();
        rig.filler().housekeep().unwrap();
        if rig.filler().locked_bytes() == 0 {
            break;
        }
    }
    assert_eq!((rig.registered_bytes(), rig.sim.locked_bytes()), (0, 0));
    rig.stream(2);
    assert_eq!(rig.registered_bytes(), 0);
    // There is room again.
    system.set_available(MARGIN + 40 * UNIT);
    let_it_be_seen();
    rig.register();
    rig.check_shut();
}

#[test]
fn pressure_takes_registered_pages_first() {
    let system = able(60 << 30);
    let rig = rig(&system, preferring(Prefer::Ram));
    rig.register();
    let ring = rig.ring_bytes();
    system.write("proc/pressure/memory", "some avg10=31.05 avg60=2.00 avg300=0.10 total=1\n");
    let_it_be_seen();
    for _ in 0..PAGES {
        rig.filler().housekeep().unwrap();
    }
    assert_eq!((rig.registered_bytes(), rig.ring_bytes()), (0, ring));
    rig.stream(2);
    assert_eq!(rig.registered_bytes(), 0);
    rig.check_shut();
}

#[test]
fn what_is_trimmed_or_forgotten_is_given_back_after_its_last_copy() {
    let system = able(60 << 30);
    let rig = rig(&system, preferring(Prefer::Ram));
    rig.register();
    let (stream, _) = rig.filler().stream();
    rig.sim.hold_stream(stream).unwrap();
    let results = rig.try_fill(0..PAGES, Keep::Locked);
    assert!(results.len() == PAGES as usize && results.iter().all(Result::is_ok));
    // Giving anything back waits for the device: this ends when the stream is released.
    std::thread::scope(|scope| {
        let trimmed = scope.spawn(|| rig.filler().trim_host(0).unwrap());
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(rig.registered_bytes(), u64::from(PAGES) * UNIT, "the device reads it");
        rig.sim.release_stream(stream).unwrap();
        trimmed.join().unwrap();
    });
    rig.sim.stream_synchronize(stream).unwrap();
    assert_eq!(rig.sim.violations(), Vec::<String>::new());
    assert!(rig.filler().trim_host(0).unwrap() >= u64::from(PAGES) * UNIT);
    assert_eq!(rig.registered_bytes(), 0);
    // Again, and they stay on the device from now on: given back when nothing streams.
    rig.register();
    rig.filler().forget(0, 0..PAGES - 1);
    rig.filler().housekeep().unwrap();
    assert_eq!(rig.registered_bytes(), u64::from(PAGES) * UNIT, "not while it streams");
    for _ in 0..400 {
        rig.filler().housekeep().unwrap();
        if rig.registered_bytes() == UNIT {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(rig.registered_bytes(), UNIT);
    rig.check_shut();
}
