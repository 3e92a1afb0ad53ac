//! What a user of ComfyUI needs: its version, its Python, the arguments and variables that change
//! what vbar can do for it, memory that it may page-lock, and the disk that its models are on.
//!
//! Owns the words for each, with the remedy. The Python is asked by `python`, which imports none of
//! its packages.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use vbar::host::model_files::Model;
use vbar::units::{GIB, format_bytes};
use vbar::{Error, ErrorCode, Result};

use super::disk::{self, Disk};
use super::line::Line;
use super::machine::Machine;
use super::memory::Memory;
use super::python::{self, PythonFacts};

/// Versions that it is written against, the first and the last.
const KNOWN: ((u32, u32), (u32, u32)) = ((0, 33), (0, 37));
const TOPIC: &str = "ComfyUI";
/// Folders and files of a models' folder that are looked at.
const ENTRIES_MAX: usize = 20_000;
/// Arguments with which ComfyUI uses none of its VBARs.
const WITHOUT_VBARS: &[&str] =
    &["--disable-dynamic-vram", "--highvram", "--gpu-only", "--novram", "--cpu"];

/// The serialized fields are part of the program's interface.
#[derive(Serialize, PartialEq, Debug)]
pub(super) struct ComfyFacts {
    /// Null where no folder was given and the current one is none.
    folder: Option<PathBuf>,
    version: Option<String>,
    /// Of `comfy-aimdo`, as its requirements have it.
    wanted_allocator: Option<String>,
    arguments: Vec<String>,
    python: Option<PythonFacts>,
    /// What it takes for the most that it may page-lock.
    page_locked_max_bytes: Option<u64>,
    models: Option<Models>,
}

/// What is in its folder of models.
#[derive(Serialize, PartialEq, Debug)]
struct Models {
    folder: PathBuf,
    file_count: usize,
    bytes: u64,
    largest: Option<PathBuf>,
    /// Null where it was not measured.
    disk: Option<Disk>,
    /// A file of its that names more folders, which are not looked at.
    more_folders: Option<PathBuf>,
}

impl ComfyFacts {
    /// Looks at what [`folder`] found.
    pub(super) fn read(
        folder: Option<PathBuf>,
        arguments: &[String],
        machine: &Machine,
        memory: Option<&Memory>,
        is_measured: bool,
    ) -> Self {
        let read =
            |name: &str| folder.as_ref().and_then(|it| fs::read_to_string(it.join(name)).ok());
        let version = read("comfyui_version.py").and_then(|text| assigned(&text, "__version__"));
        let wanted = read("requirements.txt").and_then(|text| required(&text, "comfy-aimdo"));
        Self {
            python: python::ask(folder.as_deref(), machine),
            models: folder.as_deref().and_then(|folder| Models::read(folder, is_measured)),
            version,
            wanted_allocator: wanted,
            arguments: arguments.to_vec(),
            page_locked_max_bytes: memory.map(|memory| page_locked_max(memory.total_bytes)),
            folder,
        }
    }

    /// `driver`: the version of CUDA that the driver is of, where there is one.
    pub(super) fn lines(
        &self,
        driver: Option<&str>,
        machine: &Machine,
        memory: Option<&Memory>,
    ) -> Vec<Line> {
        let mut lines: Vec<Line> = self.tree().into_iter().collect();
        match &self.python {
            Some(python) => lines.extend(python.lines(driver, self.wanted_allocator.as_deref())),
            None => lines.push(Line::problem(
                "Python",
                "none was found",
                "activate ComfyUI's environment, or name its interpreter with VBAR_PYTHON",
            )),
        }
        lines.extend(argument_lines(&self.arguments));
        lines.extend(variable_lines(machine));
        lines.extend(self.page_locked(memory));
        lines.extend(self.models.iter().flat_map(Models::lines));
        lines
    }

    /// Of a folder that is not known, [`unnamed`] has told.
    fn tree(&self) -> Option<Line> {
        let place = self.folder.as_ref()?.display();
        let Some(version) = &self.version else {
            let advice = "what it needs of its allocator is not known: try it";
            return Some(Line::note(TOPIC, format!("{place} tells no version"), advice));
        };
        let text = format!("{version} in {place}");
        let ((oldest, first), (newest, last)) = KNOWN;
        Some(match numbers(version) {
            Some(found) if found < KNOWN.0 => Line::note(
                TOPIC,
                text,
                format!("older than {oldest}.{first}, which vbar is written against: update it"),
            ),
            Some(found) if found > KNOWN.1 => Line::note(
                TOPIC,
                text,
                format!(
                    "newer than {newest}.{last}, the last that vbar knows: --vbar-off if it fails"
                ),
            ),
            _ => Line::ok(TOPIC, text),
        })
    }

    /// It asks for the machine's memory, whatever the control groups around it allow.
    fn page_locked(&self, memory: Option<&Memory>) -> Option<Line> {
        const TOPIC: &str = "page-locked";
        let (memory, most) = (memory?, self.page_locked_max_bytes?);
        if self.arguments.iter().any(|argument| argument == "--disable-pinned-memory") {
            return None;
        }
        let (limit, room) = (format_bytes(most), format_bytes(memory.allowance_bytes));
        let text = format!("ComfyUI page-locks up to {limit}; {room} can be spared now");
        let is_grouped = memory.bound_by != "machine";
        if is_grouped && memory.allowance_bytes < most {
            let advice = "give the container more memory, or start ComfyUI with \
                          --disable-pinned-memory: it does not look at the container's limit, and \
                          the kernel ends what exceeds it";
            return Some(Line::note(TOPIC, text, advice));
        }
        Some(Line::ok(TOPIC, text))
    }
}

impl Models {
    fn read(folder: &Path, is_measured: bool) -> Option<Self> {
        let models = folder.join("models");
        let (mut file_count, mut bytes, mut entries) = (0, 0, 0);
        let mut largest: Option<(u64, PathBuf)> = None;
        let mut open = vec![models.clone()];
        while let Some(next) = open.pop() {
            let Ok(found) = fs::read_dir(&next) else { continue };
            for path in found.flatten().map(|entry| entry.path()) {
                entries += 1;
                // Links are followed: people keep models elsewhere. What they lead back to is
                // left by the number of entries.
                let Ok(metadata) = fs::metadata(&path) else { continue };
                if metadata.is_dir() && entries < ENTRIES_MAX {
                    open.push(path);
                } else if path.extension().is_some_and(|kind| kind == "safetensors") {
                    file_count += 1;
                    bytes += metadata.len();
                    if largest.as_ref().is_none_or(|(most, _)| metadata.len() > *most) {
                        largest = Some((metadata.len(), path));
                    }
                }
            }
        }
        let more = folder.join("extra_model_paths.yaml");
        let largest = largest.map(|(_, path)| path);
        Some(Self {
            folder: fs::canonicalize(&models).ok()?,
            file_count,
            bytes,
            disk: largest.as_deref().filter(|_| is_measured).and_then(measure),
            largest,
            more_folders: more.is_file().then_some(more),
        })
    }

    fn lines(&self) -> Vec<Line> {
        const TOPIC: &str = "models";
        let place = self.folder.display();
        let mut text = match self.file_count {
            0 => format!("{place} has no safetensors file"),
            1 => format!("1 file of {} in {place}", format_bytes(self.bytes)),
            count => format!("{count} files of {} in {place}", format_bytes(self.bytes)),
        };
        if let Some(more) = &self.more_folders {
            text.push_str(&format!("; those that {} names are not looked at", more.display()));
        }
        let mut lines = vec![Line::ok(TOPIC, text)];
        lines.extend(self.disk.map(|disk| disk.line().of("models' disk")));
        lines
    }
}

/// What cannot be opened or read past the page cache is not measured.
fn measure(path: &Path) -> Option<Disk> {
    let model = Model::open(path).ok()?;
    let file = model.files().first()?;
    Disk::measure(file.descriptor()?, file.bytes(), disk::PATIENCE).ok().flatten()
}

/// The folder of ComfyUI that was named; without a name the current one, where it is one.
///
/// # Errors
/// `Io` where there is no ComfyUI in the folder that was named.
pub(super) fn folder(named: Option<&Path>) -> Result<Option<PathBuf>> {
    let is_comfy =
        |folder: &Path| folder.join("main.py").is_file() && folder.join("comfy").is_dir();
    match named {
        Some(named) => {
            // Its main program will do.
            let folder = if named.is_file() { named.parent().unwrap_or(named) } else { named };
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            if is_comfy(folder) {
                return Ok(Some(folder.to_owned()));
            }
            let text = format!("{}: no ComfyUI is there (main.py, comfy/)", named.display());
            Err(Error::new(ErrorCode::Io, text))
        }
        None => {
            let here = std::env::current_dir().ok();
            Ok(here.filter(|here| is_comfy(here)))
        }
    }
}

/// That it is nowhere: told first, so that nobody waits for the rest in vain.
pub(super) fn unnamed() -> Line {
    let advice = "name it: vbar doctor --comfy path/to/ComfyUI";
    Line::note(TOPIC, "its folder was not named, and is not the current one", advice)
}

fn argument_lines(arguments: &[String]) -> Vec<Line> {
    const TOPIC: &str = "arguments";
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let mut lines = Vec::new();
    if has("--vbar-off") {
        let text = "--vbar-off starts ComfyUI as if vbar were not there";
        lines.push(Line::note(TOPIC, text, "leave it out"));
    }
    if !has("--enable-dynamic-vram")
        && let Some(name) = WITHOUT_VBARS.iter().find(|name| has(name))
    {
        let text = format!("{name} makes ComfyUI load whole models, without VBARs");
        lines.push(Line::note(TOPIC, text, "leave it out"));
    }
    if has("--disable-pinned-memory") {
        let text = "--disable-pinned-memory: what is streamed is copied at a fraction of the rate";
        lines.push(Line::note(TOPIC, text, "leave it out where memory allows"));
    }
    let is_zero = |pair: &[String]| pair[0] == "--async-offload" && pair[1] == "0";
    if has("--disable-async-offload") || arguments.windows(2).any(is_zero) {
        let text = "copies of weights do not run beside computing";
        lines.push(Line::note(TOPIC, text, "leave --disable-async-offload, --async-offload 0 out"));
    }
    if has("--cuda-malloc") {
        let text = "--cuda-malloc has no effect: PyTorch allocates with vbar";
        lines.push(Line::note(TOPIC, text, "leave it out"));
    }
    if lines.is_empty() && !arguments.is_empty() {
        lines.push(Line::ok(TOPIC, "none of them keeps vbar from what it does"));
    }
    lines
}

fn variable_lines(machine: &Machine) -> Vec<Line> {
    let mut lines = Vec::new();
    for name in ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"] {
        let Some(value) = machine.variable(name) else { continue };
        let text = format!("{name}={value}");
        let plain = value.to_lowercase().replace(' ', "");
        lines.push(match plain.contains("expandable_segments:true") {
            true => Line::note(
                "PyTorch",
                format!("{text} is of PyTorch's own allocator, which is not in use"),
                "unset it: ComfyUI on vbar warns of it at each start",
            ),
            false => Line::ok("PyTorch", format!("{text} says nothing to vbar's allocator")),
        });
    }
    if let Some(value) = machine.variable("VBAR_DRIVER").filter(|value| value.starts_with("sim")) {
        lines.push(Line::problem(
            "VBAR_DRIVER",
            format!("{value}: ComfyUI's tensors would be on a simulated device"),
            "unset VBAR_DRIVER",
        ));
    }
    lines
}

/// As ComfyUI reckons on Linux, without swap.
fn page_locked_max(total: u64) -> u64 {
    let part = |percent: u64| total / 100 * percent;
    let rest = |gib: u64| total.saturating_sub(gib * GIB);
    part(40).max(part(90).min(rest(4)).min(rest(16)))
}

/// The value of `name = "value"` in a module of Python.
pub(super) fn assigned(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        // With the annotation that some have.
        let rest = line.strip_prefix(name)?.split_once('=')?.1.trim();
        let quote = rest.chars().next().filter(|first| matches!(first, '\'' | '"'))?;
        let (value, _) = rest[1..].split_once(quote)?;
        Some(value.to_owned())
    })
}

/// What follows a package's name in a file of requirements.
fn required(text: &str, package: &str) -> Option<String> {
    let mut found = text.lines().filter_map(|line| line.trim().strip_prefix(package));
    found.find_map(|rest| rest.trim_start().strip_prefix("==")).map(|it| it.trim().to_owned())
}

/// The first two numbers of a version.
pub(super) fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|letter: char| !letter.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// For tests of what is read of files alone.
#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::super::machine::tests::machine;
    use super::*;

    #[test]
    fn versions_are_read_as_text() {
        assert_eq!(assigned("# x\n__version__ = \"0.33.0\"\n", "__version__").unwrap(), "0.33.0");
        assert_eq!(assigned("cuda: Optional[str] = '13.0'\n", "cuda").unwrap(), "13.0");
        assert_eq!(assigned("cuda: Optional[str] = None\n", "cuda"), None);
        assert_eq!(assigned("version", "version"), None);
        assert_eq!(required("torch\ncomfy-aimdo==0.4.13\n", "comfy-aimdo").unwrap(), "0.4.13");
        assert_eq!(required("comfy-aimdo>=1\n", "comfy-aimdo"), None);
        assert_eq!(numbers("2.11.0+cu130"), Some((2, 11)));
        assert_eq!(numbers("unknown"), None);
    }

    #[test]
    fn arguments_that_matter_are_noted() {
        let noted = |text: &str| {
            let arguments: Vec<String> = text.split(' ').map(str::to_owned).collect();
            let lines = argument_lines(&arguments);
            lines.iter().filter(|line| line.verdict == Level::Note).count()
        };
        assert_eq!(noted("--listen --async-offload 2 --reserve-vram 1"), 0);
        for one in WITHOUT_VBARS.iter().chain(&["--vbar-off", "--cuda-malloc"]) {
            assert_eq!(noted(one), 1, "{one}");
        }
        assert_eq!(noted("--async-offload 0"), 1);
        assert_eq!(noted("--highvram --enable-dynamic-vram"), 0);
        assert_eq!(noted("--disable-pinned-memory --disable-async-offload"), 2);
        assert!(argument_lines(&[]).is_empty());
    }

    #[test]
    fn variables_that_matter_are_told() {
        let levels = |name: &str, value: &str| {
            let (_folder, machine) = machine(&[], &[(name, value)]);
            variable_lines(&machine).iter().map(|line| line.verdict).collect::<Vec<_>>()
        };
        assert_eq!(levels("PYTORCH_ALLOC_CONF", "expandable_segments: True"), [Level::Note]);
        assert_eq!(levels("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"), [Level::Ok]);
        assert_eq!(levels("VBAR_DRIVER", "sim:capacity=1G"), [Level::Problem]);
        assert_eq!(levels("VBAR_DRIVER", "cuda:1"), []);
    }

    #[test]
    fn it_reckons_as_comfyui_does() {
        assert_eq!(page_locked_max(10 * GIB), 10 * GIB / 100 * 40);
        assert_eq!(page_locked_max(128 * GIB), 112 * GIB);
        assert_eq!(page_locked_max(1000 * GIB), 1000 * GIB / 100 * 90);
    }
}
