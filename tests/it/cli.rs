//! The program: what it prints, what it returns, and that it finds what is wrong.

use std::process::Stdio;

use serde_json::Value;

use crate::program::{SIM, json, lines, model, number, output, text, vbar, written_model};

/// Every pass accounts for every tensor, nothing was above the budget, and all bytes were right.
#[track_caller]
fn check_run(report: &Value, passes: usize) {
    let tensors = number(report, "tensor_count");
    assert_eq!(report["passes"].as_array().unwrap().len(), passes);
    for pass in report["passes"].as_array().unwrap() {
        let sum = ["resident", "refilled", "offloaded"].map(|key| number(pass, key));
        assert_eq!(sum.iter().sum::<u64>(), tensors, "{pass}");
        assert_eq!(number(pass, "mismatches"), 0);
        assert!(pass["ms"].as_f64().unwrap() > 0.0);
    }
    assert!(number(report, "peak_device_bytes") <= number(report, "budget_bytes"), "{report}");
    assert_eq!(report["ok"], true);
}

#[test]
fn a_model_larger_than_its_budget_is_verified() {
    let (_folder, path) = model("8M");
    let arguments = ["run", text(&path), "--budget", "40%", "--passes", "3", "--verify", "--json"];
    let report = json(0, &[&arguments[..], &["--device", SIM]].concat());
    check_run(&report, 3);
    let model_bytes = number(&report, "model_bytes");
    assert_eq!(model_bytes, 8 << 20);
    assert_eq!(number(&report, "budget_bytes"), model_bytes * 2 / 5);
    assert!(number(&report, "page_bytes") < 1 << 20);
    assert!(number(&report, "peak_locked_bytes") > 0);
    let copied: Vec<u64> =
        report["passes"].as_array().unwrap().iter().map(|p| number(p, "bytes_copied")).collect();
    assert!(copied[0] >= model_bytes && copied.iter().all(|bytes| *bytes > 0), "{copied:?}");
}

#[test]
fn what_is_offloaded_is_verified_too() {
    let (_folder, path) = model("4M");
    for budget in ["64K", "256K"] {
        let arguments = ["run", text(&path), "--budget", budget, "--verify", "--json"];
        let report = json(0, &[&arguments[..], &["--device", SIM]].concat());
        check_run(&report, 2);
        assert!(number(&report["passes"][0], "offloaded") > 0);
    }
}

#[test]
fn a_model_that_fits_stays() {
    let (_folder, path) = model("2M");
    let arguments = ["run", text(&path), "--budget", "16M", "--passes", "1", "--json", "--verify"];
    check_run(&json(0, &[&arguments[..], &["--device", SIM]].concat()), 1);
    let arguments = ["run", text(&path), "--budget", "32M", "--passes", "4", "--json", "--verify"];
    let report = json(0, &[&arguments[..], &["--device", SIM]].concat());
    check_run(&report, 4);
    assert_eq!(number(&report["passes"][3], "bytes_copied"), 0);
    assert_eq!(number(&report["passes"][3], "refilled"), 0);
}

#[test]
fn without_verification_it_still_streams() {
    let (_folder, path) = model("2M");
    let arguments = ["run", text(&path), "--budget", "50%", "--json", "--page-size", "128K"];
    let report = json(0, &[&arguments[..], &["--device", SIM]].concat());
    check_run(&report, 2);
    assert_eq!(number(&report, "page_bytes"), 128 << 10);
    // Without virtual memory management there is nothing to stream to.
    let report = json(1, &["run", text(&path), "--json", "--device", "sim:vmm=0"]);
    assert_eq!(number(&report["passes"][0], "refilled"), 0);
    assert!(report["warning"].as_str().unwrap().contains("no virtual memory management"));
    let report = json(3, &["run", text(&path), "--json", "--verify", "--device", "sim:vmm=0"]);
    assert_eq!(report["ok"], false);
    let error = report["error"].as_str().unwrap();
    assert!(error.contains("no virtual memory") && error.contains("--device"), "{error}");
}

#[test]
fn a_budget_in_which_nothing_fits_is_told() {
    let (_folder, path) = model("4M");
    let arguments = ["run", text(&path), "--device", SIM, "--passes", "1"];
    let shown = output(&[&arguments[..], &["--budget", "4K"]].concat());
    let lines = String::from_utf8(shown.stdout).unwrap();
    assert_eq!(shown.status.code(), Some(1), "{lines}");
    assert!(lines.contains("FAILED: no byte of the model was ever resident"), "{lines}");
    assert!(!lines.contains("mismatches"), "{lines}");
    let (_, least) = lines.split_once("nothing fitted: raise --budget (at least ").expect(&lines);
    assert!(!lines.contains("MB/s"), "{lines}");
    assert!(lines.contains("total    0 B of 4.0 MiB used in "), "{lines}");
    let least = least.split_once(')').unwrap().0;
    let report = json(0, &[&arguments[..], &["--budget", least, "--json"]].concat());
    assert_eq!((number(&report["passes"][0], "offloaded"), &report["warning"]), (0, &Value::Null));

    let arguments = [&arguments[..], &["--verify", "--json", "--budget"]].concat();
    let report = json(3, &[&arguments[..], &["4K"]].concat());
    let error = report["error"].as_str().unwrap();
    // What is said to suffice does.
    let (_, least) = error.split_once("raise --budget to at least ").expect(error);
    let (least, _) = least.split_once(',').unwrap();
    let report = json(0, &[&arguments[..], &[least]].concat());
    assert_eq!((number(&report["passes"][0], "offloaded"), &report["warning"]), (0, &Value::Null));
    // With its scratch alone it verifies, and says that nothing else fitted.
    let report = json(0, &[&arguments[..], &["64K"]].concat());
    assert!(report["warning"].as_str().unwrap().contains("raise --budget"), "{report}");
    let shown = crate::program::lines(0, &[&without_json(&arguments)[..], &["64K"]].concat());
    let last = shown.lines().last().unwrap();
    assert!(last.starts_with("ok, but nothing fitted: every tensor"), "{shown}");
    assert!(shown.contains("total    4.0 MiB used in"), "what is offloaded is used too: {shown}");
}

#[test]
fn what_a_run_did_is_counted() {
    let (_folder, path) = model("4M");
    let arguments = ["run", text(&path), "--budget", "2M", "--passes", "3", "--json"];
    let arguments = [&arguments[..], &["--device", SIM]].concat();
    // A run keeps its budget; one that is there to check halves it, unless it is told otherwise.
    for (more, halved) in [
        (&[][..], false),
        (&["--verify"], true),
        (&["--halve-budget", "on"], true),
        (&["--verify", "--halve-budget", "off"], false),
    ] {
        let report = json(0, &[&arguments[..], more].concat());
        let changes = report["budget_changes"].as_array().unwrap();
        let told: Vec<_> =
            changes.iter().map(|c| (number(c, "pass"), number(c, "budget_bytes"))).collect();
        let expected = [(2, 1 << 20), (3, 2 << 20)];
        assert_eq!(told, if halved { &expected[..] } else { &[] }, "{more:?}");
        let shown = lines(0, &[&without_json(&arguments)[..], more].concat());
        let said = ["halved in mid-run, to check", "budget   halved", "budget   restored"];
        assert!(said.iter().all(|text| shown.contains(text) == halved), "{more:?}: {shown}");
    }
    let report = json(0, &arguments);
    assert!(number(&report, "evicted_pages") > 0);
    assert!(report["refusals"].is_object() && report["waits"].is_object(), "{report}");
}

fn without_json<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    arguments.iter().copied().filter(|argument| *argument != "--json").collect()
}

#[test]
fn the_option_that_was_called_threads_is_refused_with_its_name() {
    for command in [&["run", "m"][..], &["trace", "m", "--output", "t.json"]] {
        for more in [&["--threads", "off"][..], &["--threads=on"], &["--threads"]] {
            let refused = output(&[command, more].concat());
            let error = String::from_utf8_lossy(&refused.stderr);
            assert_eq!(refused.status.code(), Some(2), "{error}");
            assert!(error.contains("'--library-threads on|off'"), "{error}");
        }
        for wrong in ["yes", "4", ""] {
            let arguments = [command, &["--library-threads", wrong]].concat();
            assert_eq!(output(&arguments).status.code(), Some(2), "{wrong:?}");
        }
    }
    // Where it is a count it is one, and where it never was there is nothing to hint at.
    let refused = output(&["inspect", "m", "--threads", "on"]);
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("--library-threads"));
    let refused = output(&["stress", "--threads", "on"]);
    assert_eq!(refused.status.code(), Some(2));
    for shell in ["bash", "zsh", "fish"] {
        let script = lines(0, &["completions", shell]);
        assert!(script.contains("library-threads"), "{shell}");
    }
}

#[test]
fn what_stands_in_the_way_is_told() {
    let (_folder, path) = model("4M");
    let arguments = ["run", text(&path), "--budget", "1M", "--passes", "1", "--page-size", "64K"];
    for (device, why) in [
        ("sim:capacity=64M,granularity=64K,address_space=1M", "has no addresses left"),
        ("sim:capacity=64M,granularity=64K,mappings=0", "allows no more mappings"),
    ] {
        let told = json(1, &[&arguments[..], &["--json", "--device", device]].concat());
        assert_eq!(told["ok"], false);
        let warning = told["warning"].as_str().unwrap();
        assert!(warning.starts_with("nothing fitted: ") && warning.contains(why), "{warning}");
    }
    // No budget would help.
    let small = ["run", text(&path), "--passes", "1", "--json", "--device", "sim:capacity=4M"];
    let told = json(1, &small);
    let warning = told["warning"].as_str().unwrap();
    assert!(warning.contains("the device has 4.0 MiB in all") && warning.contains("--page-size"));
}

#[test]
fn a_model_of_nothing_is_told() {
    for (tensors, why) in
        [(&[][..], "the model has no tensors"), (&[("a", 0)], "no tensor of the model has a byte")]
    {
        let (_folder, path) = written_model(tensors);
        for more in [&[][..], &["--verify"]] {
            let arguments = [&["run", text(&path), "--json", "--device", SIM][..], more].concat();
            let report = json(2, &arguments);
            let error = report["error"].as_str().unwrap();
            assert!(error.starts_with(text(&path)) && error.contains(why), "{error}");
        }
    }
    let (_folder, path) = written_model(&[]);
    let shown = lines(0, &["inspect", text(&path)]);
    assert!(shown.contains("the model has no tensors") && !shown.contains("pages"), "{shown}");
}

#[test]
fn a_run_fetches_ahead_unless_it_is_told_not_to() {
    let (_folder, path) = model("8M");
    let arguments = ["run", text(&path), "--budget", "50%", "--passes", "5", "--verify"];
    let arguments = [&arguments[..], &["--device", SIM, "--page-size", "64K"]].concat();
    for threads in ["on", "off"] {
        let arguments = [&arguments[..], &["--library-threads", threads]].concat();
        let report = json(0, &[&arguments[..], &["--json"]].concat());
        check_run(&report, 5);
        let ahead = number(&report, "pages_ahead");
        assert_eq!(ahead > 0, threads == "on", "{report}");
        assert_eq!(report["engine"].is_object(), threads == "on", "{report}");
        let passes = report["passes"].as_array().unwrap();
        let told: u64 = passes.iter().map(|pass| number(pass, "pages_ahead")).sum();
        assert!(told <= ahead, "{report}");
        let misses: u64 = passes.iter().map(|pass| number(pass, "refilled")).sum();
        assert_eq!(number(&report, "misses"), misses);
        let rates = passes.iter().chain([&report]).map(|of| of["hit_rate"].as_f64().unwrap());
        assert!(rates.into_iter().all(|rate| (0.0..=1.0).contains(&rate)), "{report}");
        assert!(report["copied_bytes_per_second"].as_f64().unwrap() > 0.0);
        let shown = String::from_utf8(output(&arguments).stdout).unwrap();
        assert!(shown.contains("% hits, ") && shown.contains("misses"), "{shown}");
        assert_eq!(shown.contains("pages fetched before"), threads == "on", "{shown}");
    }
}

#[test]
fn a_run_tells_where_its_bytes_came_from() {
    const SOURCES: [&str; 4] =
        ["locked_cache_bytes", "registered_bytes", "page_cache_bytes", "disk_bytes"];
    let (_folder, path) = model("4M");
    for prefer in ["auto", "ram", "disk"] {
        let arguments = ["run", text(&path), "--budget", "2M", "--passes", "3", "--json"];
        let more = ["--prefer", prefer, "--host-allowance", "0", "--device", SIM];
        let report = json(0, &[&arguments[..], &more].concat());
        let passes = report["passes"].as_array().unwrap();
        for source in SOURCES {
            let told: u64 = passes.iter().map(|pass| number(&pass["sources"], source)).sum();
            assert!(told <= number(&report["sources"], source), "{report}");
        }
        let all: u64 = SOURCES.iter().map(|of| number(&report["sources"], of)).sum();
        assert!(all >= 4 << 20, "{report}");
        assert!(prefer != "ram" || number(&report["sources"], "direct_bytes") == 0, "{report}");
        let locked = &report["locked"];
        assert_eq!((number(locked, "ring_bytes"), number(locked, "cache_bytes")), (0, 0));
    }
    for wrong in [["--prefer", "fast"], ["--host-allowance", "x"]] {
        let arguments = [&["run", text(&path)][..], &wrong[..]].concat();
        assert_eq!(output(&arguments).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_wrong_byte_is_a_mismatch() {
    let (folder, path) = model("2M");
    let copy = folder.path().join("copy.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&copy, bytes).unwrap();
    let arguments = ["run", text(&path), "--budget", "50%", "--verify", "--expect", text(&copy)];
    let report = json(1, &[&arguments[..], &["--json", "--device", SIM]].concat());
    assert_eq!(report["ok"], false);
    for pass in report["passes"].as_array().unwrap() {
        assert_eq!(number(pass, "mismatches"), 1);
    }
    let shown = output(&[&arguments[..], &["--device", SIM]].concat());
    assert_eq!(shown.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&shown.stdout).contains("MISMATCH tensor"));
}

#[test]
fn people_get_lines() {
    let (_folder, path) = model("2M");
    let shown = output(&["run", text(&path), "--budget", "50%", "--verify", "--device", SIM]);
    let lines = String::from_utf8(shown.stdout).unwrap();
    for expected in [
        "device   a simulated",
        "computing the checksums",
        "budget   halved",
        "budget   restored",
        "pass 2/2",
        "ok:",
    ] {
        assert!(lines.contains(expected), "{expected}: {lines}");
    }
    assert!(!lines.contains('\u{1b}'), "no escapes into a pipe: {lines}");
    assert!(shown.stderr.is_empty());
}

#[test]
fn synth_writes_once_and_inspect_reads() {
    let (folder, path) = model("1M");
    let again = json(0, &["synth", text(&path), "--bytes", "1M", "--seed", "7", "--json"]);
    assert_eq!(again["written"], false);
    let report = json(0, &["inspect", text(&path), "--json"]);
    assert_eq!(number(&report, "model_bytes"), 1 << 20);
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(number(&report, "tensor_count"), tensors.len() as u64);
    assert_eq!(tensors.iter().map(|tensor| number(tensor, "bytes")).sum::<u64>(), 1 << 20);
    let shards = folder.path().join("shards");
    let arguments = ["synth", text(&shards), "--bytes", "4M", "--shards", "2", "--json"];
    assert_eq!(json(0, &arguments)["paths"].as_array().unwrap().len(), 3);
    let report = json(0, &["inspect", text(&shards), "--json"]);
    assert_eq!(report["files"].as_array().unwrap().len(), 2);
}

#[test]
fn synth_replaces_other_files_by_force_only() {
    let (_folder, path) = model("1M");
    std::fs::write(&path, "mine").unwrap();
    let arguments = ["synth", text(&path), "--bytes", "1M", "--json"];
    let report = json(2, &arguments);
    let error = report["error"].as_str().unwrap();
    assert!(error.contains(text(&path)) && error.contains("--force"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    assert_eq!(json(0, &[&arguments[..], &["--force"]].concat())["written"], true);
    assert_eq!(json(0, &[&arguments[..], &["--force"]].concat())["written"], false);
    let report = json(2, &["synth", "/dev/null", "--bytes", "1M", "--force", "--json"]);
    assert!(report["error"].as_str().unwrap().contains("/dev/null: a device"), "{report}");
}

#[test]
fn wrong_arguments_are_told() {
    for arguments in [
        &["run"][..],
        &["run", "x", "--budget", "none"],
        &["run", "x", "--passes", "0"],
        &["run", "x", "--device", "gpu"],
        &["run", "x", "--expect", "y"],
        &["stress", "--fail", "2"],
        &["stress", "--fail", "0.1", "--device", "cuda"],
        &["synth", "x"],
        &["synth", "/nowhere/x", "--bytes", "63K"],
        &["synth", "/nowhere/x", "--bytes", "1M", "--shards", "0"],
        &["synth", "/nowhere/x", "--bytes", "1M", "--shards", "17"],
        &["inspect", "x", "--page-size", "5M"],
        &["inspect", "x", "--page-size", "2K"],
        &["doctor", "x", "y"],
        &["doctor", "--device", "sim:colour=red"],
        &["completions", "tcsh"],
        &["fly"],
        &[],
    ] {
        let output = output(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
    assert_eq!(output(&["--help"]).status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output(&["run", "--help"]).stdout).contains("Examples:"));
}

#[test]
fn missing_files_are_errors() {
    for command in ["run", "inspect", "doctor"] {
        let report = json(3, &[command, "/nowhere/model.safetensors", "--json"]);
        let error = report["error"].as_str().unwrap();
        assert!(error.starts_with("/nowhere/model.safetensors: "), "{error}");
        assert!(error.ends_with("; `vbar synth` writes one to try"), "{error}");
        let output = output(&[command, "/nowhere/model.safetensors"]);
        assert_eq!(output.status.code(), Some(3));
        assert!(output.stdout.is_empty(), "{command}");
        assert!(String::from_utf8_lossy(&output.stderr).starts_with("vbar: /nowhere/model"));
    }
    let report = json(3, &["synth", "/nowhere/x", "--bytes", "1M", "--json"]);
    assert_eq!(report["error"], "/nowhere/x: the folder /nowhere does not exist");
}

#[test]
fn what_is_no_model_is_an_error_that_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let short = file("short.safetensors", b"1234");
    let noise = file("noise.safetensors", &[0xFF; 64]);
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    for (path, why) in [
        (text(&empty), "no *.safetensors file in the folder"),
        (text(&short), "4 bytes"),
        (text(&noise), "header"),
        ("/dev/null", "not a regular file"),
    ] {
        for command in ["inspect", "run", "doctor"] {
            let report = json(3, &[command, path, "--json"]);
            let error = report["error"].as_str().unwrap();
            assert!(error.starts_with(path) && error.contains(why), "{command}: {error}");
        }
    }
}

#[test]
fn a_reader_who_goes_away_is_no_panic() {
    let (_folder, path) = model("1M");
    let doctor = ["doctor", "--no-measure", "--device", SIM];
    for arguments in [
        &["inspect", text(&path)][..],
        &["inspect", text(&path), "--json"],
        &["--help"],
        &["run", "--help"],
        &["man"],
        &["completions", "bash"],
        &doctor,
        &["doctor", "--device", SIM, "--json"],
        &["run", text(&path), "--device", SIM, "--budget", "50%"],
    ] {
        let mut child =
            vbar(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn what_cannot_be_written_is_an_error() {
    let (_folder, path) = model("1M");
    for arguments in [&["inspect", text(&path)][..], &["--help"], &["man"], &["run", "--help"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = vbar(arguments).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{arguments:?}");
    }
}

#[test]
fn stress_asks_no_headroom_that_the_device_has_not() {
    let device = ["--device", "sim:capacity=4M", "--threads", "1", "--seed", "2"];
    let report = json(0, &[&["stress", "--seconds", "2", "--json"][..], &device].concat());
    assert_eq!((number(&report, "violations"), &report["ok"]), (0, &Value::Bool(true)));
    // More threads than such a device has room for are told.
    let device = ["--device", "sim:capacity=4M", "--threads", "4"];
    let report = json(3, &[&["stress", "--seconds", "1", "--json"][..], &device].concat());
    assert!(report["error"].as_str().unwrap().contains("use fewer --threads"), "{report}");
}

#[test]
fn stress_that_cannot_check_is_not_good() {
    let arguments = ["stress", "--seconds", "1", "--json", "--device"];
    let report = json(1, &[&arguments[..], &["sim", "--fail", "1"]].concat());
    let counted = (number(&report, "checks"), number(&report, "violations"));
    assert_eq!(counted, (0, 0), "{report}");
    assert_eq!(report["ok"], false);
    let report = json(3, &[&arguments[..], &["sim:vmm=0"]].concat());
    assert!(report["error"].as_str().unwrap().contains("no virtual memory"), "{report}");
}

#[test]
fn scenario_13_stress_ends_after_so_many_operations() {
    let arguments = ["stress", "--threads", "8", "--device", "sim", "--json", "--seed", "1"];
    let report = json(0, &[&arguments[..], &["--operations", "5000"]].concat());
    assert_eq!((number(&report, "violations"), &report["ok"]), (0, &Value::Bool(true)));
    assert!(number(&report, "operations") >= 5000, "{report}");
    let both = [&arguments[..], &["--operations", "5", "--seconds", "1"]].concat();
    assert_eq!(output(&both).status.code(), Some(2));
}

#[test]
fn stress_finds_nothing() {
    for (seed, fail) in [("1", "0"), ("3", "0"), ("5", "0.02")] {
        let arguments = ["stress", "--seconds", "2", "--threads", "3", "--device", "sim", "--json"];
        let report = json(0, &[&arguments[..], &["--seed", seed, "--fail", fail]].concat());
        let found = (number(&report, "violations"), &report["ok"]);
        assert_eq!(found, (0, &Value::Bool(true)), "{report}");
        assert_eq!(report["seed"].to_string(), seed);
        assert!(number(&report, "operations") > 100 && number(&report, "checks") > 50, "{report}");
    }
}

/// Runs the program to its end: what it printed, and the bytes that it had read from disks, as the
/// kernel counts them for the whole process.
#[expect(unsafe_code, reason = "wait4(2) is what tells what a child has used")]
fn counted_run(arguments: &[&str]) -> (Value, u64) {
    let mut child = vbar(arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut text).unwrap();
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    let mut status = 0;
    // SAFETY: the child is ours and nobody has waited for it; both places may be written.
    let waited = unsafe { libc::wait4(child.id() as i32, &mut status, 0, usage.as_mut_ptr()) };
    assert_eq!((waited, status), (child.id() as i32, 0), "{text}");
    assert!(child.wait().is_err(), "it has been waited for");
    // SAFETY: zeroed, and written by the call.
    let blocks = unsafe { usage.assume_init() }.ru_inblock;
    (serde_json::from_str(&text).unwrap(), blocks as u64 * 512)
}

#[test]
fn scenario_39_ten_passes_read_the_disk_once() {
    let (_folder, path) = model("64M");
    let _in_memory_from_here_on = output(&["--version"]);
    for prefer in ["auto", "ram"] {
        // Nothing of it in memory, where the file system lets go.
        let file = std::fs::File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let arguments = ["run", text(&path), "--budget", "50%", "--passes", "10", "--json"];
        let more = ["--prefer", prefer, "--device", SIM];
        let (report, read_bytes) = counted_run(&[&arguments[..], &more].concat());
        let model = number(&report, "model_bytes");
        let sources = &report["sources"];
        assert!(number(sources, "disk_bytes") * 100 <= model * 105, "{report}");
        assert!(read_bytes * 100 <= model * 105, "{read_bytes} of {model}: {report}");
        // A file system in memory reads no disk; one that does reads all of it once.
        assert!(read_bytes == 0 || read_bytes * 100 >= model * 95, "{read_bytes} of {model}");
        // Ring, page-locked cache and what was given back in between: each byte came somewhere.
        let copied = ["locked_cache_bytes", "registered_bytes", "page_cache_bytes", "disk_bytes"];
        let copied: u64 = copied.iter().map(|source| number(sources, source)).sum();
        assert!(copied > 3 * model, "{report}");
        // How much of it is page-locked by the tenth pass is a matter of the passes' time.
        assert!(number(sources, "locked_cache_bytes") > 0, "{report}");
    }
}
