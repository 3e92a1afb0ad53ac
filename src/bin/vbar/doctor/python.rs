//! The Python that starts ComfyUI, and its packages: which versions there are, and where.
//!
//! It is asked by a program of its own that finds packages and imports none of them: an import of
//! PyTorch takes seconds and opens the driver. What PyTorch was built for is read in its
//! `version.py`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::comfy::{assigned, numbers};
use super::line::Line;
use super::machine::Machine;

/// Versions of PyTorch that are known, the first and the last; those of Python that ComfyUI takes
/// from.
const TORCH: ((u32, u32), (u32, u32)) = ((2, 8), (2, 14));
const OLDEST_PYTHON: (u32, u32) = (3, 9);
/// An interpreter that does not answer is none.
const PATIENCE: Duration = Duration::from_secs(20);

/// Finds as an import would, in ComfyUI's folder, and tells as JSON.
const PROGRAM: &str = r#"
import importlib.metadata as metadata, importlib.util as util, json, os, sys
sys.path[:] = [entry for entry in sys.path if entry]
if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
def found(name, package):
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = None
    folders = [os.path.abspath(one) for one in spec.submodule_search_locations or []]
    regular = bool(spec.origin) and os.path.basename(spec.origin).startswith("__init__.")
    folder = folders[0] if folders else spec.origin
    return {"version": version, "folder": folder, "regular": regular}
print(json.dumps({
    "version": "%d.%d.%d" % sys.version_info[:3],
    "torch": found("torch", "torch"),
    "allocator": found("comfy_aimdo", "comfy-aimdo"),
    "vbar": found("vbar", "vbar-cuda"),
}))
"#;

/// The serialized fields are part of the program's interface.
#[derive(Serialize, PartialEq, Debug)]
pub(super) struct PythonFacts {
    executable: PathBuf,
    version: String,
    torch: Option<Package>,
    /// CUDA's version that PyTorch was built for.
    torch_cuda: Option<String>,
    allocator: Option<Package>,
    vbar: Option<Package>,
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Package {
    version: Option<String>,
    folder: Option<String>,
    /// Whether it has an `__init__`.
    #[serde(skip_serializing)]
    regular: bool,
}

#[derive(Deserialize)]
struct Answer {
    version: String,
    torch: Option<Package>,
    allocator: Option<Package>,
    vbar: Option<Package>,
}

/// Asks the first interpreter that answers: the one that `VBAR_PYTHON` names, that of an
/// environment in ComfyUI's folder, of the active environment, of the path.
pub(super) fn ask(folder: Option<&Path>, machine: &Machine) -> Option<PythonFacts> {
    // With other rights than its user's this program starts nothing of that user's.
    vbar::process::variable("PATH")?;
    candidates(folder, machine).into_iter().find_map(|executable| {
        let answer = answer(&executable, folder)?;
        let torch_folder = answer.torch.as_ref().and_then(|torch| torch.folder.as_deref());
        let version = torch_folder.map(|folder| Path::new(folder).join("version.py"));
        let version = version.and_then(|path| std::fs::read_to_string(path).ok());
        let version = version.unwrap_or_default();
        let torch = answer.torch.map(|torch| Package {
            // What it says itself, with what it was built for.
            version: assigned(&version, "__version__").or(torch.version),
            ..torch
        });
        Some(PythonFacts {
            executable,
            version: answer.version,
            torch,
            torch_cuda: assigned(&version, "cuda"),
            allocator: answer.allocator,
            vbar: answer.vbar,
        })
    })
}

fn candidates(folder: Option<&Path>, machine: &Machine) -> Vec<PathBuf> {
    if let Some(named) = machine.variable("VBAR_PYTHON") {
        return vec![PathBuf::from(named)];
    }
    let mut found = Vec::new();
    let own = ["venv", ".venv", "../venv", "../.venv"].map(|name| folder.map(|it| it.join(name)));
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"];
    let active = active.map(|name| machine.variable(name).map(PathBuf::from));
    // One that somebody has activated is what would start it.
    let environments = active.into_iter().chain(own).flatten();
    found.extend(environments.map(|it| it.join("bin/python")).filter(|path| path.is_file()));
    let folders = machine.variable("PATH").unwrap_or_default();
    for name in ["python3", "python"] {
        // None of the current folder, which an empty or relative entry would be.
        let paths = std::env::split_paths(folders).filter(|folder| folder.is_absolute());
        found.extend(paths.map(|folder| folder.join(name)).find(|path| path.is_file()));
    }
    found
}

fn answer(executable: &Path, folder: Option<&Path>) -> Option<Answer> {
    let mut command = Command::new(executable);
    // Nothing of it is to be compiled into anybody's folder.
    command.args(["-B", "-c", PROGRAM]).args(folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let started = Instant::now();
    // What it says fits into a pipe.
    while child.try_wait().ok()?.is_none() {
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut told = String::new();
    child.stdout.take()?.read_to_string(&mut told).ok()?;
    serde_json::from_str(told.lines().last()?).ok()
}

impl PythonFacts {
    pub(super) fn lines(&self, driver: Option<&str>, wanted_allocator: Option<&str>) -> Vec<Line> {
        vec![
            self.interpreter(),
            self.torch_line(driver),
            self.vbar_line(),
            self.allocator_line(wanted_allocator),
        ]
    }

    fn interpreter(&self) -> Line {
        let text = format!("{} by {}", self.version, self.executable.display());
        match numbers(&self.version) {
            Some(found) if found < OLDEST_PYTHON => {
                Line::problem("Python", text, "3.9 or newer is needed: make a new environment")
            }
            _ => Line::ok("Python", text),
        }
    }

    fn torch_line(&self, driver: Option<&str>) -> Line {
        const TOPIC: &str = "torch";
        let install = "install a build with CUDA into this Python: https://pytorch.org";
        let Some(torch) = &self.torch else {
            return Line::problem(TOPIC, "is not installed for this Python", install);
        };
        let version = torch.version.as_deref().unwrap_or("of unknown version");
        let Some(cuda) = &self.torch_cuda else {
            return Line::problem(TOPIC, format!("{version} was not built for CUDA"), install);
        };
        let text = format!("{version} for CUDA {cuda}");
        let major = |version: &str| numbers(version).map(|found| found.0);
        if let Some(driver) = driver
            && major(driver) < major(cuda)
        {
            let text = format!("{text}, and the driver is of CUDA {driver}");
            return Line::problem(TOPIC, text, "update the driver, or install an older build");
        }
        let ((old_major, old_minor), (new_major, new_minor)) = TORCH;
        match numbers(version) {
            Some(found) if found < TORCH.0 => {
                let advice = format!("{old_major}.{old_minor} or newer is needed: update it");
                Line::problem(TOPIC, text, advice)
            }
            Some(found) if found > TORCH.1 => Line::note(
                TOPIC,
                text,
                format!("newer than {new_major}.{new_minor}, the last that vbar knows: try it"),
            ),
            _ => Line::ok(TOPIC, text),
        }
    }

    fn vbar_line(&self) -> Line {
        const TOPIC: &str = "vbar for Python";
        match &self.vbar {
            Some(vbar) => Line::ok(TOPIC, placed(vbar)),
            None => Line::problem(
                TOPIC,
                "is not installed for this Python",
                format!("{} -m pip install vbar_cuda-*.whl", self.executable.display()),
            ),
        }
    }

    fn allocator_line(&self, wanted: Option<&str>) -> Line {
        const TOPIC: &str = "comfy_aimdo";
        let Some(found) = &self.allocator else {
            let text =
                "is not installed: vbar's is there by itself, and ComfyUI without vbar has none";
            return Line::ok(TOPIC, text);
        };
        let text = placed(found);
        if found.regular && self.vbar.is_none() {
            let advice = "is it somebody's replacement? ComfyUI's own has no __init__";
            return Line::note(TOPIC, text, advice);
        }
        let other =
            wanted.filter(|wanted| found.version.as_deref().is_some_and(|it| it != *wanted));
        let wanted = other.map_or(String::new(), |wanted| format!(", {wanted} is asked for"));
        Line::ok(TOPIC, format!("{text}{wanted}; left alone, vbar's is used in its place"))
    }
}

fn placed(package: &Package) -> String {
    let version = package.version.as_deref().unwrap_or("of unknown version");
    let folder = package.folder.as_deref().unwrap_or("a place that is not told");
    format!("{version} in {folder}")
}

#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::*;

    fn facts(torch: &str, cuda: Option<&str>) -> PythonFacts {
        let package = |version: &str| Package {
            version: Some(version.to_owned()),
            folder: Some("/packages".to_owned()),
            regular: false,
        };
        PythonFacts {
            executable: PathBuf::from("/bin/python3"),
            version: "3.12.1".to_owned(),
            torch: Some(package(torch)),
            torch_cuda: cuda.map(str::to_owned),
            allocator: Some(package("0.4.13")),
            vbar: Some(package("0.1.0")),
        }
    }

    #[test]
    fn a_torch_that_cannot_be_used_is_a_problem() {
        let level = |torch, cuda, driver| facts(torch, cuda).torch_line(driver).verdict;
        assert_eq!(level("2.11.0+cu130", Some("13.0"), Some("13.0")), Level::Ok);
        assert_eq!(level("2.11.0+cu126", Some("12.6"), Some("13.0")), Level::Ok);
        assert_eq!(level("2.11.0+cu130", Some("13.0"), Some("12.8")), Level::Problem);
        assert_eq!(level("2.11.0+cpu", None, None), Level::Problem);
        assert_eq!(level("2.7.1+cu126", Some("12.6"), None), Level::Problem);
        assert_eq!(level("3.0.0", Some("14.0"), None), Level::Note);
        let none = PythonFacts { torch: None, ..facts("", None) };
        assert_eq!(none.torch_line(None).verdict, Level::Problem);
    }

    #[test]
    fn what_is_missing_has_a_remedy() {
        let told = PythonFacts { vbar: None, ..facts("2.11.0", Some("13.0")) }.lines(None, None);
        assert_eq!(told[2].verdict, Level::Problem);
        assert!(told[2].advice.as_ref().unwrap().starts_with("/bin/python3 -m pip install"));
        let old = PythonFacts { version: "3.8.10".to_owned(), ..facts("2.11", Some("13.0")) };
        assert_eq!(old.interpreter().verdict, Level::Problem);
        let other = facts("2.11", Some("13.0")).allocator_line(Some("0.5.0"));
        assert!(other.text.contains("0.4.13 in /packages, 0.5.0 is asked for"), "{other:?}");
    }
}
