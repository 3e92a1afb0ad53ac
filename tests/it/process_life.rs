//! What happens to a process around the library: the context is reset under it, the system gives
//! no more descriptors, addresses or file bytes, two callers share one device.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};

use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::model::synth::{synthesize, synthesize_sharded};
use vbar::options::{Poison, Threads};
use vbar::{ErrorCode, Fault, Runtime, RuntimeOptions};

use crate::program::{SIM, model, text, vbar};
use crate::world::{DEVICE, P, ROOMY, World, budget_options, options, resident};

/// Somebody else in the process resets the device, as `cudaDeviceReset` does: the context goes, and
/// with it all streams and events in it.
fn reset(world: &World) {
    world.sim.device_primary_ctx_release(DEVICE).unwrap();
}

/// A device that is lost says so, in every call of every thread, and why.
#[track_caller]
fn check_lost(world: &World, call: impl Fn(&Runtime) -> vbar::Result<()> + Sync) {
    let told = |error: vbar::Error| {
        assert_eq!(error.code(), ErrorCode::DeviceLost, "{error}");
        let text = error.to_string();
        assert!(text.contains("_CONTEXT") && text.contains("cudaDeviceReset"), "{text}");
    };
    told(call(&world.runtime).unwrap_err());
    std::thread::scope(|scope| {
        scope.spawn(|| told(call(&world.runtime).unwrap_err()));
    });
}

/// Every call, on a device each: the first one that meets the reset.
#[test]
fn a_context_that_somebody_resets_is_a_lost_device_whichever_call_meets_it() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 8 * P, 3).unwrap();
    type Call = fn(&Runtime, &vbar::Vbar, &vbar::ModelBar) -> vbar::Result<()>;
    let calls: &[(&str, Call)] = &[
        ("miss", |_, vbar, _| vbar.fault(2 * P..3 * P, vbar::units::Stream::LEGACY).map(drop)),
        ("fill", |_, _, model| model.fault(0, vbar::units::Stream::LEGACY).map(drop)),
        ("no stream", |_, vbar, _| vbar.fault(3 * P..4 * P, vbar::units::Stream::NONE).map(drop)),
        ("refresh", |runtime, _, _| runtime.refresh()),
        ("free", |runtime, _, _| runtime.free_memory(u64::MAX).map(drop)),
        ("trim", |runtime, _, _| runtime.trim(0).map(drop)),
        ("create", |runtime, _, _| runtime.create_bar(P).map(drop)),
        ("run", |_, vbar, _| {
            let pins = vbar::memory::pager::HeldPins::Keep;
            vbar.end_of_run(vbar::units::Stream::LEGACY, pins).map(drop)
        }),
    ];
    for threads in [Threads::Off, Threads::On] {
        for (name, call) in calls {
            let more = RuntimeOptions { threads: Some(threads), ..budget_options(6) };
            let world = World::with(ROOMY, more);
            let (vbar, model) = (world.vbar(4), world.runtime.open_model(&path).unwrap());
            let held = resident(&world, &vbar, 0..1);
            let token = resident(&world, &vbar, 1..2).into_token();
            world.sim.stream_synchronize(world.stream).unwrap();
            reset(&world);
            let unmapped = world.sim.calls(Verb::MemUnmap);
            // What needs no context may still be good, or meet a handle that is none. Whoever asks
            // for the memory that is free finds out.
            let first = call(&world.runtime, &vbar, &model);
            println!("{name} {threads:?}: {first:?}");
            assert!(world.runtime.refresh().is_err(), "{name}: nobody found out");
            check_lost(&world, |runtime| call(runtime, &vbar, &model));
            let _ = world.runtime.unpin(token, world.stream);
            drop(held);
            drop((model, vbar));
            let World { sim, runtime, .. } = world;
            drop(runtime);
            // Who may still use those pages cannot be known: nothing goes.
            assert_eq!(sim.calls(Verb::MemUnmap), unmapped, "{name}");
            assert_eq!(sim.violations(), Vec::<String>::new(), "{name}");
            // A new runtime in a new context works beside what has stayed.
            let again = Runtime::open(sim.driver(), DEVICE, budget_options(6)).unwrap();
            let bar = again.create_bar(2 * P).unwrap();
            assert!(matches!(bar.fault(0..P, vbar::units::Stream::NONE), Ok(Fault::Resident(_))));
        }
    }
}

/// The program under limits of the shell's, as `ulimit` calls them.
fn limited(limits: &str, arguments: &[&str]) -> Output {
    let script = format!("{limits}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_vbar")]).args(arguments);
    command.env_remove("VBAR_DRIVER").stdin(Stdio::null()).output().unwrap()
}

/// It ended by itself: with a code of the program's, and a sentence where that is an error.
#[track_caller]
fn check_ended_well(output: &Output, what: &str) -> i32 {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), None, "{what}: {errors}");
    let code = output.status.code().unwrap();
    assert!(code == 0 || code == 3 && errors.starts_with("vbar: "), "{what}: {code}\n{errors}");
    assert!(!errors.contains("panic"), "{what}: {errors}");
    code
}

#[test]
fn few_descriptors_are_an_error_or_enough() {
    let folder = tempfile::TempDir::new().unwrap();
    synthesize_sharded(folder.path(), 2 << 20, 7, 12).unwrap();
    let run = ["run", text(folder.path()), "--device", SIM, "--budget", "50%", "--verify"];
    let mut ends = BTreeSet::new();
    // 12 files, the device's memory, a terminal: from far too few to enough.
    for limit in [4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 32, 64] {
        let output = limited(&format!("ulimit -n {limit}"), &run);
        let code = check_ended_well(&output, &format!("ulimit -n {limit}"));
        if code != 0 {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(errors.contains("Too many open files"), "{limit}: {errors}");
            assert!(!errors.contains("ulimit -v"), "{limit}: {errors}");
        }
        ends.insert(code);
    }
    assert_eq!(ends, BTreeSet::from([0, 3]), "one that is too small, one that is enough");
}

#[test]
fn a_small_address_space_is_an_error_or_enough() {
    let (_folder, path) = model("4M");
    let device = "sim:capacity=16M,granularity=64K";
    let run = ["run", text(&path), "--device", device, "--budget", "2M", "--verify"];
    let mut ends = BTreeSet::new();
    for limit in [150_000, 200_000, 300_000, 400_000, 800_000, 4_000_000] {
        let output = limited(&format!("ulimit -v {limit}"), &run);
        ends.insert(check_ended_well(&output, &format!("ulimit -v {limit}")));
    }
    assert_eq!(ends.first(), Some(&0), "4 GB are enough");
}

#[test]
fn sixty_four_kibibytes_of_lockable_memory_are_enough() {
    let (_folder, path) = model("4M");
    let run = ["run", text(&path), "--device", SIM, "--budget", "50%", "--passes", "4", "--verify"];
    let output = limited("ulimit -l 64", &run);
    assert_eq!(check_ended_well(&output, "ulimit -l 64"), 0);
    // What the system's own limit means is told beforehand.
    let doctor = ["doctor", "--device", SIM, "--no-measure", "--json"];
    let report = String::from_utf8(limited("ulimit -l 64", &doctor).stdout).unwrap();
    assert!(report.contains("RLIMIT_MEMLOCK") && report.contains("64"), "{report}");
}

#[test]
fn a_disk_that_is_full_is_an_error_of_whoever_writes() {
    let (folder, path) = model("4M");
    let run = ["run", text(&path), "--device", SIM, "--budget", "50%"];
    let full = |arguments: &[&str]| {
        let output = vbar(arguments).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {errors}");
        assert!(errors.contains("No space left"), "{arguments:?}: {errors}");
    };
    full(&["trace", text(&path), "--device", SIM, "--budget", "50%", "--output", "/dev/full"]);
    full(&["bench", "policy", "--link", "55", "--budgets", "50", "--svg", "/dev/full"]);
    let standard = |arguments: &[&str]| {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = vbar(arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{arguments:?}");
    };
    standard(&run);
    standard(&[&run[..], &["--json"]].concat());
    standard(&["doctor", "--device", SIM, "--no-measure", "--json"]);
    // A trace that the environment asks for is no affair of the run's.
    let output = vbar(&run).env("VBAR_TRACE", "/dev/full").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // A file that may not grow: nothing is left of it.
    let large = folder.path().join("large.safetensors");
    let synth = ["synth", text(&large), "--bytes", "64M", "--seed", "1"];
    let output = limited("trap '' XFSZ; ulimit -f 2048", &synth);
    assert_eq!(check_ended_well(&output, "ulimit -f"), 3);
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 1, "the unfinished model is there still");
}

#[test]
fn standard_streams_that_are_closed_change_nothing() {
    let (_folder, path) = model("4M");
    let run = ["run", text(&path), "--device", SIM, "--budget", "50%", "--verify"];
    for closed in ["exec >&-", "exec 2>&-", "exec <&- >&- 2>&-"] {
        let output = limited(closed, &run);
        assert_eq!(output.status.code(), Some(0), "{closed}: {output:?}");
    }
}

/// Nothing writes to a model's file or its folder, however often it is loaded and evicted.
#[test]
fn scenario_38_e_a_file_is_what_it_was_after_fifty_cycles() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("model.safetensors");
    synthesize(&path, 16 * P, 5).unwrap();
    let mode = |path: &std::path::Path, bits| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(bits)).unwrap();
    };
    mode(&path, 0o444);
    mode(folder.path(), 0o555);
    let identity = || {
        use std::os::unix::fs::MetadataExt;
        let one = std::fs::metadata(&path).unwrap();
        let both = (one.mtime_nsec(), one.ctime_nsec());
        (std::fs::read(&path).unwrap(), one.mtime(), one.ctime(), both)
    };
    let before = identity();
    for threads in [Threads::Off, Threads::On] {
        let more = RuntimeOptions { threads: Some(threads), ..budget_options(6) };
        let world = World::with(ROOMY, RuntimeOptions { poison: Poison::Off, ..more });
        for _ in 0..50 {
            let model = world.runtime.open_model(&path).unwrap();
            for tensor in 0..model.model().tensors().len() {
                drop(model.fault(tensor, world.stream).unwrap());
            }
            world.sim.stream_synchronize(world.stream).unwrap();
            model.vbar().free_memory(u64::MAX).unwrap();
        }
        world.check();
        world.check_shut();
    }
    assert!(identity() == before, "the model's file has changed");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    mode(folder.path(), 0o755);
}

/// The driver's number and ours agree at each step, of frames that come, go and are kept.
#[test]
fn scenario_52_what_is_used_is_what_the_driver_misses() {
    let world = World::with("capacity=4M,granularity=64K", options());
    let all = 4 << 20;
    let agree = || {
        let free = world.sim.mem_get_info().unwrap().free_bytes;
        assert_eq!(all - free, world.runtime.used_bytes());
        free
    };
    let vbar = world.vbar(16);
    assert_eq!(agree(), all);
    drop(resident(&world, &vbar, 0..16));
    assert_eq!(agree(), all - 16 * P);
    assert_eq!(vbar.free_memory(5 * P).unwrap().bytes, 5 * P);
    assert_eq!(agree(), all - 11 * P);
    world.runtime.trim(0).unwrap();
    agree();
    vbar.destroy_wait().unwrap();
    agree();
    world.runtime.trim(0).unwrap();
    assert_eq!(agree(), all);
    world.check_shut();
}
