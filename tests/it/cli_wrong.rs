//! The program used wrongly, told early by one clear text; and used where there are no threads.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::program::{SIM, copied, json, lines, model, number, output, text, vbar};

/// A device that there is not: whoever gets as far as opening one fails with another text.
const NO_DEVICE: &str = "cuda:9";

/// Nobody's number, so that nothing but the program counts for its limit.
const A_USER: u32 = 61_234;

#[track_caller]
fn errors(code: i32, arguments: &[&str]) -> String {
    let output = output(arguments);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
    assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
    errors
}

#[test]
fn a_number_that_is_none_is_told_with_its_bounds() {
    let whole = "no whole number from";
    for (arguments, why) in [
        (&["stress", "--seconds", "abc"][..], "'abc' is no whole number from 0 to"),
        (&["stress", "--seconds", "-1"], "'-1' is no whole number"),
        (&["stress", "--seconds", "1.5"], whole),
        (&["stress", "--threads", "65"], "'65' is no whole number from 1 to 64"),
        (&["stress", "--operations", "0"], whole),
        (&["stress", "--seed", "x"], whole),
        (&["stress", "--fail", "x"], "'x' is no probability: use 0 to 1"),
        (&["stress", "--fail", "-0.5"], "'-0.5' is no probability"),
        (&["synth", "x", "--bytes", "1M", "--seed", "x"], whole),
        (&["synth", "x", "--bytes", "1M", "--shards", "17"], "from 1 to 16"),
        (&["synth", "x", "--bytes", "-1"], "'-1' is not a size"),
        (&["synth", "x", "--bytes", "."], "'.' is not a size: use bytes, or K"),
        (&["run", "x", "--passes", "x"], "'x' is no whole number from 1 to"),
        (&["run", "x", "--budget", "40x"], "K, M, G, T; or a part of the model, as 40%"),
        (&["run", "x", "--budget", "-5"], "as 40%"),
        (&["run", "x", "--budget", "0%"], "use a percentage above 0, as 40%"),
        (&["trace", "x", "--output", "t", "--spans", "0"], "from 1 to"),
        (&["bench", "policy", "--budgets", "10,x"], "'x' is no whole number from 1 to 100"),
        (&["bench", "load", "--rounds", "0"], "from 1 to 1000"),
        (&["bench", "stream", "--learn", ""], "from 1 to 1000"),
        (&["bench", "policy", "--json", "report.json"], "'--json' takes no file"),
        (&["doctor", "--device", "sim:capacity"], "capacity needs a value, as capacity=SIZE"),
        (&["doctor", "--device", "sim:seed="], "seed needs a value, as seed=NUMBER"),
    ] {
        let errors = errors(2, arguments);
        assert!(errors.contains(why), "{arguments:?}: {errors}");
        for jargon in ["invalid digit", "float literal", "target type", "non-zero type", "'-- "] {
            assert!(!errors.contains(jargon), "{arguments:?}: {errors}");
        }
    }
}

#[test]
fn a_budget_that_is_halved_needs_a_pass_to_be_restored_in() {
    let arguments = ["run", "/nowhere", "--halve-budget", "on", "--passes", "1"];
    let errors = errors(2, &arguments);
    assert!(errors.contains("--passes must be 2 or more"), "{errors}");
}

#[test]
fn what_says_to_take_the_simulated_device_helps_where_cuda_was_named() {
    let (_folder, path) = model("1M");
    let said = vbar(&["run", text(&path), "--device", "cuda"]).output().unwrap();
    let errors = String::from_utf8_lossy(&said.stderr);
    // With a driver there is nothing to say.
    if errors.contains("could not be opened") {
        assert!(errors.contains("name sim in the place of cuda"), "{errors}");
        let (before, after) = errors.rsplit_once(';').unwrap();
        assert!(!before.contains("VBAR_DRIVER=sim") && after.contains("no device is named"));
    }
}

/// The place is looked at before the model and the device, and is left as it was.
#[test]
fn a_file_that_cannot_be_written_is_told_before_all_work() {
    let (folder, path) = model("1M");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &link).unwrap();
    let missing = folder.path().join("missing/file");
    let before = std::fs::read(&path).unwrap();
    let to_write = [
        &["trace", "/nowhere", "--output"][..],
        &["bench", "policy", "--svg"],
        &["bench", "load", "/nowhere", "--svg"],
        &["bench", "stream", "/nowhere", "--svg"],
    ];
    for arguments in to_write {
        for (place, code, why) in [
            (missing.as_path(), 3, "/missing does not exist"),
            (&link, 3, "is a symbolic link"),
            // Root may write anywhere but there.
            (Path::new("/proc/file"), 3, "/proc/file: No such file"),
            (folder.path(), 2, "is a folder; name a file"),
            (&path, 2, "remove it or name another file"),
        ] {
            let said = output(&[arguments, &[text(place)]].concat());
            let errors = String::from_utf8_lossy(&said.stderr);
            assert_eq!(said.status.code(), Some(code), "{arguments:?}: {errors}");
            assert!(errors.contains(text(place)) && errors.contains(why), "{errors}");
            assert!(said.stdout.is_empty(), "{arguments:?} {place:?} was begun");
        }
        // One that can be is made by no command that fails.
        let new = folder.path().join("new");
        if arguments.contains(&"/nowhere") {
            errors(3, &[arguments, &[text(&new)]].concat());
            assert!(!new.exists());
        }
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    // A plot in the place of a plot is replaced.
    let plot = folder.path().join("plot.svg");
    for _ in 0..2 {
        lines(0, &["bench", "policy", "--budgets", "50", "--svg", text(&plot)]);
    }
}

#[test]
fn a_folder_without_permission_is_told_before_all_work() {
    if rustix::process::geteuid().is_root() {
        println!("root needs no permission");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let place = folder.path().join("trace.json");
    let errors = errors(3, &["trace", "/nowhere", "--output", text(&place)]);
    assert!(errors.contains("Permission denied"), "{errors}");
}

#[test]
fn a_model_for_which_there_is_no_room_is_told_before_it_is_measured() {
    let (_folder, path) = model("4M");
    let device = ["--device", "sim:capacity=4M,granularity=64K", "--page-size", "64K"];
    let errors = errors(2, &[&["bench", "load", text(&path)][..], &device].concat());
    assert!(errors.contains("does not fit into the device's") && errors.contains("--page-size"));
}

#[test]
fn a_folder_that_is_no_comfyui_is_told_before_anything_is_examined() {
    let folder = tempfile::tempdir().unwrap();
    let said = output(&["doctor", "--device", NO_DEVICE, "--comfy", text(folder.path())]);
    assert_eq!(said.status.code(), Some(3));
    assert!(said.stdout.is_empty(), "{}", String::from_utf8_lossy(&said.stdout));
    // One that was not named is told first.
    let arguments = ["doctor", "--device", SIM, "--no-measure", "--comfy"];
    let said = vbar(&arguments).current_dir(folder.path()).output().unwrap();
    let told = String::from_utf8(said.stdout).unwrap();
    assert!(told.starts_with("note     ComfyUI         its folder was not named"), "{told}");
    assert_eq!(told.matches("its folder was not named").count(), 1, "{told}");
}

#[test]
fn the_verdict_names_the_problems_beside_a_missing_gpu() {
    let folder = tempfile::tempdir().unwrap();
    for (device, is_simulated) in [(SIM, true), ("auto", false)] {
        let arguments = ["doctor", "--device", device, "--no-measure", "--comfy"];
        let mut command = vbar(&arguments);
        // No Python is found there.
        let said = command.current_dir(folder.path()).env("PATH", folder.path()).output().unwrap();
        let told = String::from_utf8(said.stdout).unwrap();
        assert_eq!(said.status.code(), Some(1), "{told}");
        let last = told.lines().last().unwrap();
        if is_simulated {
            assert!(last.starts_with("fit: no, for 1 problem: Python ("), "{told}");
        } else if told.contains("problem  driver") {
            let both = "fit: no, there is no GPU; only the simulated device works; and for 1 \
                        problem: Python (";
            assert!(last.starts_with(both), "{told}");
        }
    }
}

/// One refusal that says what differs, not a line for each tensor of each pass.
#[test]
fn another_model_is_no_copy() {
    let (folder, path) = model("2M");
    let (_other_folder, other) = model("4M");
    let run = ["run", text(&path), "--verify", "--device", SIM, "--expect"];
    let said = output(&[&run[..], &[text(&other)]].concat());
    let errors = String::from_utf8_lossy(&said.stderr);
    assert_eq!((said.status.code(), said.stdout.len()), (Some(2), 0), "{errors}");
    assert!(errors.contains("is no copy of") && errors.contains(" tensors differ; the first, "));
    assert!(errors.contains("] there, not ") && errors.lines().count() == 1, "{errors}");
    let report = json(3, &[&run[..], &["/nowhere", "--json"]].concat());
    assert!(report["error"].as_str().unwrap().starts_with("--expect: /nowhere"), "{report}");
    // One whose bytes alone are others is compared, and a few tensors are named.
    let copy = folder.path().join("copy.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[header..].iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(&copy, bytes).unwrap();
    let arguments = [&run[..], &[text(&copy)]].concat();
    let report = json(1, &[&arguments[..], &["--json"]].concat());
    let wrong: u64 =
        report["passes"].as_array().unwrap().iter().map(|p| number(p, "mismatches")).sum();
    let shown = lines(1, &arguments);
    assert_eq!(shown.matches("MISMATCH tensor").count(), 2 * 8, "{shown}");
    assert_eq!(shown.matches("MISMATCH and ").count(), 2, "{shown}");
    let checks = 2 * number(&report, "tensor_count");
    let last = format!("FAILED: {wrong} of {checks} checks found other bytes than the file's\n");
    assert!(shown.ends_with(&last), "{shown}");
}

/// Runs a copy of the program with so few threads, and other programs of its user, as that.
fn limited(program: &Path, processes: u32, arguments: &[&str]) -> Output {
    // Each shell has its own letter for that limit.
    let script = format!("ulimit -p {processes} 2>/dev/null || ulimit -u {processes} || exit 99");
    let script = format!("{script}; exec \"$@\"");
    let mut command = Command::new("timeout");
    command.args(["120", "sh", "-c", &script, "sh", text(program)]).args(arguments);
    command.env("TMPDIR", program.parent().unwrap()).env_remove("VBAR_DRIVER");
    command.env("RUST_BACKTRACE", "0");
    // The limit does not hold root.
    if rustix::process::geteuid().is_root() {
        command.uid(A_USER).gid(A_USER);
    }
    command.output().unwrap()
}

/// However many threads the system gives, the program ends, and says that it got none.
#[test]
fn without_threads_there_is_an_error_and_neither_panic_nor_hang() {
    let (models, path) = model("1M");
    let folder = tempfile::tempdir().unwrap();
    let program = copied(folder.path());
    for (place, mode) in [(models.path(), 0o755), (folder.path(), 0o777)] {
        std::fs::set_permissions(place, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let written = folder.path().join("written.safetensors");
    let small = ["--device", SIM, "--rounds", "1", "--page-size", "64K"];
    let commands = [
        // Large enough to be written by several threads.
        vec!["synth", text(&written), "--bytes", "16M", "--seed"],
        vec!["stress", "--seconds", "0", "--library-threads", "off", "--device", "sim"],
        vec!["stress", "--seconds", "0", "--device", "sim"],
        [&["bench", "load", text(&path)], &small[..]].concat(),
        [&["bench", "stream", text(&path)], &small[..]].concat(),
        vec!["run", text(&path), "--verify", "--device", SIM],
    ];
    // Beside the program there is the one that waits for it.
    for processes in 2..=7 {
        let seed = processes.to_string();
        for command in &commands {
            let more = if command[0] == "synth" { &[&*seed][..] } else { &[] };
            let said = limited(&program, processes, &[command, more].concat());
            let errors = String::from_utf8_lossy(&said.stderr);
            let code = said.status.code();
            assert!(!errors.contains("panicked"), "{processes}: {command:?}: {errors}");
            match command[0] {
                // It does without.
                "synth" => assert_eq!(code, Some(0), "{processes}: {command:?}: {errors}"),
                _ if processes == 2 => {
                    assert_eq!(code, Some(3), "{command:?}: {errors}");
                }
                _ => assert!(matches!(code, Some(0 | 1 | 3)), "{processes}: {command:?}: {code:?}"),
            }
            if processes == 2 && command.contains(&"off") {
                assert!(errors.contains("4 threads: "), "{errors}");
            }
        }
    }
}

#[test]
fn the_environment_in_help_is_what_is_read() {
    let help = lines(0, &["--help"]);
    let (_, environment) = help.split_once("\nEnvironment:\n").unwrap();
    for name in ["VBAR_DRIVER", "VBAR_TRACE", "VBAR_PYTHON", "RUST_LOG", "NO_COLOR", "TMPDIR"] {
        let is_row = |line: &str| line.starts_with(&format!("  {name} "));
        assert!(environment.lines().any(is_row), "{name}: {environment}");
    }
    // What it says of them holds.
    let (folder, path) = model("1M");
    let trace = folder.path().join("%p.json");
    let arguments = ["run", text(&path), "--device", SIM, "--passes", "1", "--json"];
    let child = vbar(&arguments).env("VBAR_TRACE", &trace).output().unwrap();
    let report: Value = serde_json::from_slice(&child.stdout).unwrap();
    assert_eq!(report["ok"], true);
    let traces = std::fs::read_dir(folder.path()).unwrap().flatten();
    let traces = traces.filter(|entry| entry.file_name().to_string_lossy().ends_with(".json"));
    assert_eq!(traces.count(), 1);
    // A mistyped name costs nobody a model.
    let before = std::fs::read(&path).unwrap();
    let child = vbar(&arguments).env("VBAR_TRACE", &path).output().unwrap();
    let errors = String::from_utf8_lossy(&child.stderr);
    assert_eq!(child.status.code(), Some(0), "{errors}");
    assert!(errors.contains("VBAR_TRACE: no trace of this run: "), "{errors}");
    assert!(errors.contains("is there already and no trace"), "{errors}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}
