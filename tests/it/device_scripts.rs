//! The scripts that run on a GPU, as far as that can be tried without one: which programs they run
//! under compute-sanitizer, and what they make of its answers. What stands in for the tool and the
//! programs writes down how it was called.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::program::write_program;

/// Writes down its options and its program, runs that, and sums up as it is told to. An option that
/// the tool does not have ends it, and one that takes no value makes its value the program.
const TOOL: &str = r#"#!/bin/sh
echo "$@" >> "$CALLS"
while [ "${1#--}" != "$1" ]; do
    case "$1" in
    --tool | --error-exitcode | --target-processes | --print-limit) shift 2 ;;
    --report-api-errors | --leak-check) shift 2 ;;
    --track-unused-memory) shift ;;
    *) echo "unrecognised option '$1'"; exit 1 ;;
    esac
done
if ! command -v "$1" >/dev/null; then
    echo "========= Target application doesn't exist or is not a valid executable"
    exit 1
fi
"$@" || exit
case "$1" in
*"${BROKEN-nothing}"*) echo "========= ERROR SUMMARY: 3 errors"; exit "${STATUS-86}" ;;
esac
[ "${SILENT-no}" = yes ] || echo "========= ERROR SUMMARY: 0 errors"
"#;

struct Bundle {
    folder: TempDir,
}

impl Bundle {
    /// A bundle whose programs do nothing, and whose compiler makes such programs.
    fn new() -> Self {
        let bundle = Self { folder: TempDir::new().unwrap() };
        for script in ["device-run.sh", "sanitized.sh"] {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts").join(script);
            bundle.script(script, &fs::read_to_string(source).unwrap());
        }
        for program in [
            "device",
            "faults",
            "c_abi",
            "engine-rust",
            "smallest-rust",
            "own-weights-rust",
            "vbar",
        ] {
            bundle.script(program, "#!/bin/sh\n");
        }
        fs::create_dir_all(bundle.path("tests/abi")).unwrap();
        fs::write(bundle.path("tests/abi/hostile.c"), "").unwrap();
        fs::create_dir(bundle.path("bin")).unwrap();
        let compiler = "#!/bin/sh\nwhile [ \"$1\" != -o ]; do shift; done\n\
                        printf '#!/bin/sh\\n' > \"$2\"\nchmod +x \"$2\"\n";
        bundle.script("bin/gcc", compiler);
        bundle.script("bin/g++", compiler);
        bundle.script("bin/compute-sanitizer", TOOL);
        bundle
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn script(&self, name: &str, text: &str) {
        write_program(&self.path(name), text.as_bytes());
    }

    fn command(&self, script: &str) -> Command {
        let mut command = Command::new(self.path(script));
        let path = format!("{}:/usr/bin:/bin", self.path("bin").display());
        command.current_dir(self.folder.path()).env("PATH", path).env("CALLS", self.path("calls"));
        for name in ["COMPUTE_SANITIZER", "SANITIZER_TOOLS", "VBAR_DRIVER", "VBAR_TEST_DRIVER"] {
            command.env_remove(name);
        }
        command
    }

    fn run(&self, more: &[(&str, &str)]) -> (bool, String) {
        self.run_parts(&["sanitizer"], more)
    }

    fn run_parts(&self, parts: &[&str], more: &[(&str, &str)]) -> (bool, String) {
        let out = self.command("device-run.sh").args(parts).envs(more.to_vec()).output();
        told(&out.unwrap())
    }

    /// How the tool was called, line by line.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn told(out: &Output) -> (bool, String) {
    let text = [&out.stdout[..], &out.stderr].concat();
    (out.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn both_tools_look_at_the_suite_the_c_programs_and_the_engines() {
    let bundle = Bundle::new();
    let (passed, text) = bundle.run(&[]);
    assert!(passed && text.contains("== all passed"), "{text}");
    let calls = bundle.calls();
    for tool in ["memcheck", "initcheck"] {
        let of_tool = format!("--tool {tool} --error-exitcode 86 --target-processes all");
        for program in [
            "./device",
            "built/hostile",
            "built/gpu",
            "built/life",
            "built/threads",
            "built/files",
            "built/engine-c",
            "built/engine-cpp",
            "./engine-rust",
        ] {
            let program = format!(" {program} ");
            let found = calls
                .iter()
                .filter(|call| call.starts_with(&of_tool) && format!("{call} ").contains(&program));
            assert_eq!(found.count(), 1, "{tool}{program}: {calls:#?}");
        }
    }
    assert_eq!(calls.len(), 18, "{calls:#?}");
    // Failures that tests ask for are no finds; the tests that measure time are left out.
    let memchecks = calls.iter().filter(|call| call.contains("memcheck"));
    assert!(memchecks.clone().all(|call| call.contains("--report-api-errors no")));
    let suites: Vec<&String> = calls.iter().filter(|call| call.contains(" ./device ")).collect();
    assert!(suites.iter().all(|call| call.contains("--skip the_door")), "{suites:#?}");
}

/// Every test that is left out of the suite is one of it.
#[test]
fn what_is_skipped_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = fs::read_to_string(root.join("scripts/device-run.sh")).unwrap();
    let suite = fs::read_to_string(root.join("tests/device.rs")).unwrap();
    let skipped: Vec<&str> =
        script.split("--skip ").skip(1).filter_map(|rest| rest.split_whitespace().next()).collect();
    assert_eq!(skipped.len(), 5, "{skipped:?}");
    for name in skipped {
        let tests = suite.split("#[test]\nfn ").skip(1);
        let found = tests.filter(|text| text.split('(').next().unwrap().contains(name));
        assert_eq!(found.count(), 1, "{name}");
    }
}

#[test]
fn one_tool_can_be_chosen() {
    let bundle = Bundle::new();
    assert!(bundle.run(&[("SANITIZER_TOOLS", "initcheck")]).0);
    let calls = bundle.calls();
    assert!(calls.len() == 9 && calls.iter().all(|call| call.contains("initcheck")), "{calls:#?}");
}

#[test]
fn what_the_tool_finds_fails_the_run_and_the_rest_is_run() {
    // Also where its status is that of the program all the same.
    for status in ["86", "0"] {
        let bundle = Bundle::new();
        let (passed, text) = bundle.run(&[("BROKEN", "built/life"), ("STATUS", status)]);
        assert!(!passed && text.contains("FAILED with 86: ./sanitized.sh memcheck"), "{text}");
        assert!(text.contains("== something failed"), "{text}");
        assert_eq!(bundle.calls().len(), 18);
    }
}

#[test]
fn a_tool_that_did_not_look_has_not_passed() {
    let (passed, text) = Bundle::new().run(&[("SILENT", "yes")]);
    assert!(!passed && text.contains("memcheck did not look at ./device"), "{text}");
}

#[test]
fn a_program_that_fails_keeps_its_status_and_a_tool_that_is_missing_is_told() {
    let bundle = Bundle::new();
    bundle.script("fails", "#!/bin/sh\nexit 7\n");
    let run = |script: &str, path: Option<&str>, arguments: &[&str]| {
        let mut command = bundle.command(script);
        if let Some(path) = path {
            command.env("PATH", path);
        }
        let out = command.args(arguments).output().unwrap();
        (out.status.code(), told(&out).1)
    };
    assert_eq!(run("sanitized.sh", None, &["memcheck", "./fails"]).0, Some(7));
    assert_eq!(run("sanitized.sh", None, &["racecheck", "./fails"]).0, Some(2));
    if !Path::new("/usr/local/cuda").exists() {
        let (code, text) = run("sanitized.sh", Some("/usr/bin:/bin"), &["memcheck", "./fails"]);
        assert!(code == Some(127) && text.contains("CUDA's toolkit"), "{code:?}: {text}");
    }
}

/// While a soak has all of the device's memory nobody else gets a context, `vbar doctor` included.
#[test]
fn a_soak_is_looked_at_while_the_device_has_no_room_for_others() {
    let bundle = Bundle::new();
    bundle.script("vbar", "#!/bin/sh\necho \"no context\"\nexit 1\n");
    fs::create_dir(bundle.path("benches")).unwrap();
    // It takes its verdict from the folder's name.
    let judge = "import sys; print('judged', *sys.argv[1:]); sys.exit('bad' in sys.argv[2])";
    fs::write(bundle.path("benches/soak.py"), judge).unwrap();
    for (folder, passes) in [("good", true), ("bad", false)] {
        let folder = bundle.path(folder);
        fs::create_dir(&folder).unwrap();
        for name in ["soak.jsonl", "soak.log", "soak.svg", "verdict.json"] {
            fs::write(folder.join(name), "").unwrap();
        }
        let polled = [("SOAK_FOLDER", folder.to_str().unwrap())];
        let (passed, text) = bundle.run_parts(&["soak-poll"], &polled);
        assert!(passed == passes && text.contains("judged --report"), "{text}");
        assert!(!text.contains("no context"), "{text}");
    }
    // Whatever else is asked for needs a device.
    for parts in [&["soak-poll", "suite"][..], &["soak"], &[]] {
        let (passed, text) = bundle.run_parts(parts, &[]);
        assert!(!passed && text.contains("no usable GPU") && !text.contains("judged"), "{text}");
    }
}

/// A recipe of make's cannot quote: `rm -rf a b/target/staged` would take the folder `a`.
#[test]
fn make_builds_in_no_folder_whose_path_has_a_space() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = TempDir::new().unwrap();
    for (name, works) in [("a b", false), ("ab", true)] {
        let checkout = folder.path().join(name);
        fs::create_dir_all(checkout.join("include")).unwrap();
        fs::create_dir(checkout.join("src")).unwrap();
        for file in ["Makefile", "Cargo.toml", "include/vbar.h"] {
            fs::copy(root.join(file), checkout.join(file)).unwrap();
        }
        for (target, needs) in [("demo", true), ("install", true), ("test", false)] {
            let mut make = Command::new("make");
            make.args(["--dry-run", target]).current_dir(&checkout);
            // Prerequisites that are missing here are of no concern: only make's own word is.
            let out = make.env_remove("CARGO_TARGET_DIR").env_remove("MAKEFLAGS").output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(said.contains("has a space"), needs && !works, "{name} {target}: {said}");
        }
    }
}
