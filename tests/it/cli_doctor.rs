//! `vbar doctor`: verdicts with advice, the same for people and programs, and the exit code.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::program::{SIM, json, lines, model, number, on_terminal, output, text, vbar};

/// The lines of a report by topic.
#[track_caller]
fn line<'a>(report: &'a Value, topic: &str) -> &'a Value {
    let lines = report["lines"].as_array().unwrap();
    let found = lines.iter().find(|line| line["topic"] == topic);
    found.unwrap_or_else(|| panic!("{topic} in {report:#}"))
}

/// What is not ok says what to do, and a problem is what makes the machine unfit.
#[track_caller]
fn check_lines(report: &Value) {
    let lines = report["lines"].as_array().unwrap();
    for line in lines {
        assert!(!line["text"].as_str().unwrap().is_empty(), "{line}");
        assert_eq!(line["advice"].is_null(), line["verdict"] == "ok", "{line}");
    }
    let problems = lines.iter().filter(|line| line["verdict"] == "problem").count();
    assert_eq!(report["ok"], problems == 0);
}

#[test]
fn a_simulated_device_is_fit_and_says_that_it_is_simulated() {
    let report = json(0, &["doctor", "--device", SIM, "--json"]);
    check_lines(&report);
    assert_eq!(report["driver"]["simulated"], true);
    let device = &report["devices"][0];
    assert_eq!(
        (number(device, "granularity_bytes"), number(device, "total_bytes")),
        (65536, 64 << 20)
    );
    assert!(line(&report, "simulated")["text"].as_str().unwrap().contains("capacity=64M"));
    let measured = &report["measured"];
    for key in ["locked_to_device", "pageable_to_device", "locked_from_device", "locking"] {
        let rate = &measured[key];
        assert!(rate["bytes_a_second"].as_f64().unwrap() > 0.0, "{measured}");
        assert!(number(rate, "rounds") >= 1 && number(rate, "bytes") > 0, "{measured}");
    }
    assert!(line(&report, "to device 0")["text"].as_str().unwrap().contains("simulated"));
    let memory = &report["memory"];
    assert!(number(memory, "allowance_bytes") <= number(memory, "available_bytes"));
    for topic in ["VMM 0", "register 0", "WSL", "container", "MIG", "MPS", "RAM", "cgroup"] {
        line(&report, topic);
    }
    for topic in ["RAM allowance", "RLIMIT_MEMLOCK", "RLIMIT_AS", "max_map_count", "overcommit"] {
        line(&report, topic);
    }
}

#[test]
fn every_device_is_described_and_the_chosen_one_measured() {
    let device = "sim:capacity=64M,granularity=64K,devices=2";
    let report = json(0, &["doctor", "--device", device, "--json"]);
    assert_eq!(report["devices"].as_array().unwrap().len(), 2);
    line(&report, "VMM 1");
    assert_eq!(number(&report["measured"], "device"), 0);
    let report = json(0, &["doctor", "--device", SIM, "--json", "--no-measure"]);
    assert_eq!(report["measured"], Value::Null);
}

#[test]
fn a_device_that_cannot_work_is_a_problem() {
    for (fault, topic) in [
        ("vmm=0", "VMM 0"),
        ("fail=device_primary_ctx_retain:1:46", "memory 0"),
        ("fail=mem_map:1:999", "VMM 0"),
    ] {
        let device = format!("{SIM},{fault}");
        let report = json(1, &["doctor", "--device", &device, "--json"]);
        check_lines(&report);
        assert_eq!(line(&report, topic)["verdict"], "problem", "{report:#}");
        assert_eq!(report["measured"], Value::Null, "nothing can be measured on it");
    }
    // Another device than the chosen one may be anybody's.
    let device = format!("{SIM},devices=2,fail=device_primary_ctx_retain:2:46");
    let report = json(0, &["doctor", "--device", &device, "--json", "--no-measure"]);
    assert_eq!(line(&report, "memory 1")["verdict"], "note", "{report:#}");
    // A copy that fails is told, and no reason to call the machine unfit.
    let device = format!("{SIM},fail=memcpy_htod_async:1:2");
    let report = json(0, &["doctor", "--device", &device, "--json"]);
    assert!(line(&report, "link")["text"].as_str().unwrap().contains("cuMemcpyHtoDAsync"));
}

#[test]
fn a_model_tells_its_file_system() {
    let (_folder, path) = model("1M");
    let report = json(0, &["doctor", text(&path), "--device", SIM, "--json", "--no-measure"]);
    check_lines(&report);
    let model = &report["model"];
    assert_eq!(number(model, "model_bytes"), 1 << 20);
    let file = &model["files"][0];
    assert_eq!(file["path"], text(&path));
    assert!(!file["file_system"].as_str().unwrap().is_empty() && file["mount_point"].is_string());
    for topic in ["model", "file system", "O_DIRECT", "page cache"] {
        line(&report, topic);
    }
    // In memory: told apart, and registered pages of it are on the list.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("m.safetensors");
    json(0, &["synth", text(&path), "--bytes", "64K", "--json"]);
    let report = json(0, &["doctor", text(&path), "--device", SIM, "--json", "--no-measure"]);
    assert_eq!(report["model"]["files"][0]["kind"], "memory");
    assert_eq!(report["model"]["files"][0]["may_be_registered"], true);
}

#[test]
fn a_pipe_gets_one_line_a_verdict() {
    let arguments = ["doctor", "--device", SIM, "--no-measure"];
    let report = json(0, &[&arguments[..], &["--json"]].concat());
    let told = lines(0, &arguments);
    let expected = report["lines"].as_array().unwrap();
    assert_eq!(told.lines().count(), expected.len() + 1, "{told}");
    for (told, expected) in told.lines().zip(expected) {
        let part = |key: &str| expected[key].as_str().unwrap_or_default();
        assert!(told.starts_with(part("verdict")) && told.contains(part("topic")), "{told}");
        assert!(told.ends_with(part("advice")), "{told}");
    }
    assert!(told.lines().last().unwrap().starts_with("fit: yes"), "{told}");
}

#[test]
fn colours_are_for_terminals_only() {
    let arguments = ["doctor", "--device", SIM, "--no-measure"];
    let coloured = on_terminal(80, &arguments, &[]);
    assert!(coloured.raw.contains("\u{1b}[32mok"), "{}", coloured.raw);
    coloured.check_fits(80);
    for variable in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let plain = on_terminal(80, &arguments, &[variable]);
        assert!(!plain.raw.contains('\u{1b}'), "{}", plain.raw);
    }
}

#[test]
fn what_auto_means_is_said_by_the_variable() {
    let doctor = |variable: &str, arguments: &[&str]| {
        let arguments = [&["doctor", "--no-measure"], arguments].concat();
        vbar(&arguments).env("VBAR_DRIVER", variable).output().unwrap()
    };
    let output = doctor(SIM, &[]);
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output.stdout).contains("VBAR_DRIVER says so"));
    let output = doctor("gpu", &["--json"]);
    assert_eq!(output.status.code(), Some(2));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["error"].as_str().unwrap().starts_with("VBAR_DRIVER: 'gpu'"), "{report}");
}

/// Whether there is a driver or not, it answers; without one it says how to come by one.
#[test]
fn a_machine_without_a_gpu_is_told_so() {
    for device in ["auto", "cuda", "cuda:7"] {
        let plain = output(&["doctor", "--device", device, "--json", "--no-measure"]);
        let report: Value = serde_json::from_slice(&plain.stdout).unwrap();
        check_lines(&report);
        assert_eq!(plain.status.code(), Some(if report["ok"] == true { 0 } else { 1 }));
        if report["driver"]["library"].is_null() {
            assert_eq!(line(&report, "driver")["verdict"], "problem");
            let advice = line(&report, "driver")["advice"].as_str().unwrap();
            assert!(advice.starts_with("Install the NVIDIA driver"), "{advice}");
            let people = lines(1, &["doctor", "--device", device, "--no-measure"]);
            let last = people.lines().last().unwrap();
            let expected = match device {
                "auto" => "fit: no, there is no GPU; only the simulated device works",
                _ => "fit: no, for 1 problem",
            };
            assert!(last.starts_with(expected), "{people}");
        }
    }
}

#[test]
fn a_limited_address_space_is_an_error_and_no_panic() {
    let limited = |arguments: &str| {
        let script = format!("ulimit -v 4000000; exec \"$0\" {arguments}");
        let program = env!("CARGO_BIN_EXE_vbar");
        Command::new("sh")
            .args(["-c", &script, program])
            .env_remove("VBAR_DRIVER")
            .output()
            .unwrap()
    };
    let refused = limited("doctor --device sim:capacity=8G");
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(3), "{errors}");
    assert!(
        errors.starts_with("vbar: a simulated device of 8.0 GiB cannot have its addresses"),
        "{errors}"
    );
    // One that fits works, and the limit is told.
    let fits = limited("doctor --device sim:capacity=16M,granularity=64K --json");
    let report: Value = serde_json::from_slice(&fits.stdout).unwrap();
    assert_eq!(
        (fits.status.code(), &line(&report, "RLIMIT_AS")["verdict"]),
        (Some(0), &"note".into())
    );
}

#[test]
fn the_disk_of_a_model_is_measured_unless_told_otherwise() {
    let (_folder, path) = model("16M");
    let arguments = ["doctor", text(&path), "--device", SIM, "--json"];
    let file = |report: &Value| report["model"]["files"][0].clone();
    let left_out = file(&json(0, &[&arguments[..], &["--no-measure"]].concat()));
    assert_eq!(left_out["disk"], Value::Null);
    let report = json(0, &arguments);
    let measured = file(&report);
    // Where the file system has no direct reads there is nothing to measure.
    if measured["direct_error"].is_null() {
        assert!(number(&measured["disk"], "read_bytes") > 0, "{measured}");
        let lines = report["lines"].as_array().unwrap();
        assert!(lines.iter().any(|line| line["topic"] == "disk"), "{report}");
    }
}

/// A ComfyUI, and packages for a Python, that are there by their names alone.
fn comfy(torch: &str, cuda: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    };
    write("ComfyUI/main.py", "raise SystemExit('it is not to be started')\n");
    write("ComfyUI/comfy/__init__.py", "");
    write("ComfyUI/comfyui_version.py", "__version__ = \"0.33.0\"\n");
    write("ComfyUI/requirements.txt", "torch\ncomfy-aimdo==0.4.13\n");
    write("ComfyUI/extra_model_paths.yaml", "");
    write("packages/torch/__init__.py", "raise SystemExit('it is not to be imported')\n");
    let version = format!("__version__ = '{torch}'\ncuda: Optional[str] = {cuda}\n");
    write("packages/torch/version.py", &version);
    write("packages/comfy_aimdo/control.py", "");
    write("packages/comfy_aimdo-0.4.12.dist-info/METADATA", "Name: comfy-aimdo\nVersion: 0.4.12\n");
    let models = folder.path().join("ComfyUI/models/unet/large.safetensors");
    std::fs::create_dir_all(models.parent().unwrap()).unwrap();
    json(0, &["synth", text(&models), "--bytes", "16M", "--json"]);
    folder
}

/// What the doctor says of it; the package of vbar is the repository's own.
fn examined(tree: &Path, folder: &Path, code: i32, arguments: &[&str]) -> Value {
    let shim = concat!(env!("CARGO_MANIFEST_DIR"), "/python_shim");
    let path = format!("{}:{shim}", folder.join("packages").display());
    let start = ["doctor", "--device", SIM, "--json", "--no-measure", "--comfy", text(tree)];
    let output = vbar(&[&start[..], arguments].concat())
        .env("PYTHONPATH", path)
        .env_remove("VIRTUAL_ENV")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{errors}");
    let report = serde_json::from_slice(&output.stdout).unwrap();
    check_lines(&report);
    report
}

#[test]
fn comfyui_is_looked_at_and_nothing_of_it_imported() {
    let folder = comfy("2.11.0+cu130", "'13.0'");
    let arguments = ["--", "--listen", "--disable-dynamic-vram"];
    let report = examined(&folder.path().join("ComfyUI"), folder.path(), 0, &arguments);
    let told = |topic: &str| line(&report, topic)["text"].as_str().unwrap().to_owned();
    assert!(told("ComfyUI").starts_with("0.33.0 in "), "{}", told("ComfyUI"));
    assert_eq!(told("torch"), "2.11.0+cu130 for CUDA 13.0");
    let aimdo = told("comfy_aimdo");
    assert!(aimdo.starts_with("0.4.12 in ") && aimdo.contains("0.4.13 is asked for"), "{aimdo}");
    assert!(told("vbar for Python").contains("python_shim/vbar"), "{}", told("vbar for Python"));
    assert!(told("models").starts_with("1 file of 16.0 MiB in "), "{}", told("models"));
    assert!(told("models").contains("extra_model_paths.yaml"), "{}", told("models"));
    assert_eq!(line(&report, "arguments")["verdict"], "note");
    assert!(told("arguments").starts_with("--disable-dynamic-vram makes"), "{report:#}");
    let comfy = &report["comfy"];
    assert_eq!(comfy["python"]["torch_cuda"], "13.0");
    assert_eq!(comfy["arguments"], serde_json::json!(["--listen", "--disable-dynamic-vram"]));
    assert!(number(comfy, "page_locked_max_bytes") > 0);
    // Its main program is its folder too; without an argument nothing is said of any.
    let main = folder.path().join("ComfyUI/main.py");
    let report = examined(&main, folder.path(), 0, &[]);
    assert_eq!(line(&report, "ComfyUI")["verdict"], "ok");
    let files: Vec<_> = std::fs::read_dir(folder.path().join("ComfyUI")).unwrap().collect();
    assert_eq!(files.len(), 6, "something was left there: {files:?}");
}

#[test]
fn a_torch_without_cuda_makes_comfyui_unfit() {
    let folder = comfy("2.11.0+cpu", "None");
    let report = examined(&folder.path().join("ComfyUI"), folder.path(), 1, &[]);
    assert_eq!(line(&report, "torch")["text"], "2.11.0+cpu was not built for CUDA");
    assert!(report["comfy"]["python"]["torch_cuda"].is_null());
    assert_eq!(report["comfy"]["models"]["disk"], Value::Null);
}

#[test]
fn a_folder_that_is_no_comfyui_is_an_error_and_none_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["doctor", "--device", SIM, "--no-measure", "--comfy", text(folder.path())];
    let output = output(&arguments);
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no ComfyUI is there"));
    let none = ["doctor", "--device", SIM, "--no-measure", "--json", "--comfy"];
    let output = vbar(&none).current_dir(folder.path()).env("PATH", folder.path()).output();
    let report: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    check_lines(&report);
    assert_eq!(line(&report, "ComfyUI")["verdict"], "note");
    assert_eq!(line(&report, "Python")["verdict"], "problem");
    // Arguments of ComfyUI are not the program's.
    let without = ["doctor", "--device", SIM, "--", "--listen"];
    assert_eq!(crate::program::output(&without).status.code(), Some(2));
}
