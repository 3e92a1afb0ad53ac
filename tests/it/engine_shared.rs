//! Several runtimes and processes stream one file at once: who holds its lock gives its cached
//! pages back, the others read on, and nobody gets a wrong byte.

use std::path::Path;
use std::process::Command;

use rustix::fs::{FlockOperation, flock};
use vbar::ModelBar;
use vbar::options::Prefer;

use crate::engine_more::{PATIENCE, Rig, eventually, threaded};

/// Pages of the model and of each budget.
const MODEL: u64 = 40;
const BUDGET: u64 = 16;

/// A device with the model at `path` open, which streams it.
fn streaming(path: &Path, prefer: Prefer) -> (Rig, ModelBar) {
    let rig = Rig::new(vbar::RuntimeOptions { prefer, ..threaded(BUDGET) });
    let model = rig.world.runtime.open_model(path).unwrap();
    (rig, model)
}

/// Whether somebody holds the file's lock.
fn is_locked(path: &Path) -> bool {
    let file = std::fs::File::open(path).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
}

#[test]
fn two_devices_of_one_process_stream_one_file() {
    for prefer in [Prefer::Auto, Prefer::Ram, Prefer::Disk] {
        let owner = Rig::new(threaded(BUDGET));
        let path = owner.path("model", MODEL);
        std::thread::scope(|scope| {
            for passes in [6, 9] {
                let path = &path;
                scope.spawn(move || {
                    let (rig, model) = streaming(path, prefer);
                    rig.check_passes(&model, passes);
                    assert!(rig.plans() > 0);
                    rig.check_shut(vec![model]);
                });
            }
        });
        assert!(!is_locked(&path), "the lock outlives the model");
        owner.check_shut(Vec::new());
    }
}

#[test]
fn a_file_that_another_program_has_locked_is_streamed_all_the_same() {
    for operation in [FlockOperation::LockShared, FlockOperation::LockExclusive] {
        let rig = Rig::new(threaded(BUDGET));
        let path = rig.path("model", MODEL);
        let file = std::fs::File::open(&path).unwrap();
        flock(&file, operation).unwrap();
        let model = rig.world.runtime.open_model(&path).unwrap();
        rig.check_passes(&model, 6);
        // It is let go in mid-stream, and taken again by others as they like.
        drop(file);
        rig.check_passes(&model, 2);
        rig.check_shut(vec![model]);
    }
}

#[test]
fn two_processes_stream_one_file() {
    let owner = Rig::new(threaded(BUDGET));
    let path = owner.path("model", MODEL);
    let (rig, model) = streaming(&path, Prefer::Auto);
    let this = std::env::current_exe().unwrap();
    let run = |how: &str| {
        let mut command = Command::new(&this);
        command.args(["--exact", "engine_shared::streams_in_a_process_of_its_own", "--ignored"]);
        command.env("VBAR_TEST_MODEL", &path).env("VBAR_TEST_ENDS", how);
        command.stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    // One that closes, one that is killed in mid-stream, whatever it holds then.
    let (mut closes, mut killed) = (run("closes"), run("streams"));
    rig.check_passes(&model, 6);
    assert!(closes.wait().unwrap().success());
    rig.check_passes(&model, 2);
    killed.kill().unwrap();
    killed.wait().unwrap();
    rig.check_passes(&model, 6);
    rig.check_shut(vec![model]);
    eventually("nobody has the lock", || !is_locked(&path));
    owner.check_shut(Vec::new());
}

#[test]
#[ignore = "for a process of its own"]
fn streams_in_a_process_of_its_own() {
    let path = std::env::var_os("VBAR_TEST_MODEL").unwrap();
    let (rig, model) = streaming(Path::new(&path), Prefer::Auto);
    match std::env::var("VBAR_TEST_ENDS").as_deref() {
        Ok("closes") => rig.check_passes(&model, 8),
        _ => {
            let start = std::time::Instant::now();
            while start.elapsed() < PATIENCE {
                rig.check_passes(&model, 1);
            }
        }
    }
    rig.check_shut(vec![model]);
}
