//! Registered pages of a file under a whole runtime: the bytes, the counters, a file that changes.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::{Driver, KernelCall};
use vbar::host::source::ModelFile;
use vbar::model::binding::Binding;
use vbar::options::{Prefer, RuntimeOptions, Threads};
use vbar::units::DeviceAddress;
use vbar::{Error, ErrorCode, Fault, Vbar};

use crate::world::{P, World, budget_options, pattern_bytes, pattern_sum};

const SEED: u64 = 9;
/// Pages of the VBAR; 10 of them fit.
const PAGES: u64 = 24;
/// Where their bytes begin in the file.
const OFFSET: u64 = 1000;

/// A runtime with threads on a device and a system that can register pages, and a VBAR bound to a
/// file in memory that is larger than its budget.
struct Bench {
    world: World,
    vbar: Vbar,
    path: PathBuf,
    target: DeviceAddress,
    _folders: [TempDir; 2],
}

fn bench(prefer: Prefer) -> Bench {
    let (folder, system) = (TempDir::new_in("/dev/shm").unwrap(), TempDir::new().unwrap());
    let write = |path: &str, text: &str| {
        let path = system.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n");
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA Kernel Module  580.95.05  x\n");
    std::fs::create_dir_all(system.path().join("proc/self")).unwrap();
    for name in ["mountinfo", "fdinfo"] {
        let link = system.path().join("proc/self").join(name);
        std::os::unix::fs::symlink(format!("/proc/self/{name}"), link).unwrap();
    }
    let path = folder.path().join("weights");
    let mut bytes = vec![0; OFFSET as usize];
    bytes.extend(pattern_bytes(PAGES * P, SEED));
    std::fs::write(&path, bytes).unwrap();
    let options = RuntimeOptions {
        threads: Some(Threads::On),
        prefer,
        system_root: Some(system.path().to_owned()),
        ..budget_options(10)
    };
    let world = World::with("capacity=64M,granularity=64K,read_only=1", options);
    let vbar = world.vbar(PAGES);
    let mut binding = Binding::new();
    binding.bind(0..PAGES * P, 0, OFFSET, PAGES * P).unwrap();
    vbar.bind(binding, vec![Arc::new(ModelFile::open(&path).unwrap())]).unwrap();
    let target = world.scratch();
    Bench { world, vbar, path, target, _folders: [folder, system] }
}

impl Bench {
    /// One pass; whether every byte of it was right as kernels saw it.
    fn pass(&self) -> Result<bool, Error> {
        let (world, stream) = (&self.world, self.world.stream);
        let before = world.word(self.target, stream);
        for page in 0..PAGES {
            let bytes = page * P..(page + 1) * P;
            match self.vbar.fault(bytes, stream)? {
                Fault::Resident(guard) | Fault::HostMapped(guard) => {
                    let (source, delay_nanos) = (guard.address(), 0);
                    let (first_word, target) = (page * P / 8, self.target);
                    let call =
                        KernelCall::Checksum { source, bytes: P, first_word, delay_nanos, target };
                    world.sim.launch_kernel(call, stream).unwrap();
                }
                Fault::Offloaded(refused) => panic!("{refused}"),
            }
        }
        let sum = world.word(self.target, stream).wrapping_sub(before);
        Ok(sum == pattern_sum(PAGES * P, SEED))
    }

    /// Passes until most of what streams is read from registered pages.
    #[track_caller]
    fn register(&self) {
        let mut before = 0;
        for _ in 0..6000 {
            assert!(self.pass().unwrap());
            std::thread::sleep(Duration::from_millis(5));
            let told = self.world.runtime.statistics();
            assert_eq!(told.locked_bytes, told.locked.sum());
            let came = told.sources.registered_bytes - before;
            before = told.sources.registered_bytes;
            if came >= 10 * P {
                return;
            }
        }
        panic!("{:?}", self.world.runtime.statistics());
    }

    /// A pass fails before long, since the file has changed; nothing is left over.
    #[track_caller]
    fn check_changed(self) {
        let failed = (0..400).find_map(|_| self.pass().err());
        assert_eq!(failed.map(|error| error.code()), Some(ErrorCode::FileChanged));
        assert!(self.pass().is_err());
        self.world.check();
        drop(self.vbar);
        self.world.check_shut();
    }
}

#[test]
fn a_file_streams_from_registered_pages_and_says_when_it_was_cut_short() {
    let bench = bench(Prefer::Ram);
    bench.register();
    let told = bench.world.runtime.statistics();
    assert!(told.locked.registered_bytes >= 10 * P, "{told:?}");
    assert_eq!(told.locked.cache_bytes, 0, "a second copy");
    bench.world.check();
    OpenOptions::new().write(true).open(&bench.path).unwrap().set_len(100).unwrap();
    bench.check_changed();
}

#[test]
fn a_page_whose_file_changed_under_its_copy_leaves_the_device() {
    // Which copies wait for the stream is the engine's affair: those that were done before the file
    // changed are right, and stay. It is tried until one was late.
    assert!((0..20).any(|_| leaves_after_a_change()));
}

/// Changes the file under copies that wait for a stream that is held; whether any page left.
fn leaves_after_a_change() -> bool {
    let bench = bench(Prefer::Ram);
    bench.register();
    let (world, stream) = (&bench.world, bench.world.stream);
    let fault = |page: u64| bench.vbar.fault(page * P..(page + 1) * P, stream);
    // The frames go round behind a stream that stands still: the last copies wait for it.
    world.sim.hold_stream(stream).unwrap();
    for page in 0..PAGES {
        let Ok(Fault::Resident(guard)) = fault(page) else { panic!("page {page}") };
        world.sum(guard.address(), P, bench.target, Duration::ZERO, stream);
        drop(guard);
        if bench.vbar.draw(u32::MAX).matches('i').count() > 2 {
            break;
        }
    }
    let drawn = bench.vbar.draw(u32::MAX);
    let late: Vec<u64> = (0..).zip(drawn.chars()).filter(|it| it.1 == 'i').map(|it| it.0).collect();
    assert!(!late.is_empty(), "{drawn}");
    let file = OpenOptions::new().write(true).open(&bench.path).unwrap();
    file.set_len(OFFSET + PAGES * P + 1).unwrap();
    // The engine has nothing to do any more, and takes no frames from them.
    world.runtime.set_budget(Some(4 * PAGES * P)).unwrap();
    world.sim.release_stream(stream).unwrap();
    world.sim.stream_synchronize(stream).unwrap();
    // They were resident before anybody knew; those that were late do not stay, nor come again.
    let is_gone = |page: &u64| bench.vbar.draw(u32::MAX).as_bytes()[*page as usize] == b'.';
    let all_gone = || late.iter().all(is_gone);
    (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        all_gone()
    });
    let gone: Vec<u64> = late.iter().copied().filter(|page| is_gone(page)).collect();
    for page in &gone {
        let code = fault(*page).map(drop).map_err(|error| error.code());
        assert_eq!(code, Err(ErrorCode::FileChanged), "page {page}");
    }
    bench.check_changed();
    !gone.is_empty()
}
