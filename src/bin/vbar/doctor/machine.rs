//! What kind of machine this is: WSL, a container, MPS, MIG; read from files and variables alone.
//!
//! The root of the file tree and the variables are parameters, so that tests describe machines that
//! are not at hand. Nothing here asks the driver or NVIDIA's management library.

use std::collections::HashMap;
use std::path::PathBuf;

use serde::Serialize;
use vbar::Result;
use vbar::host::mounts::SystemRoot;

use super::line::Line;

/// Where files are read, and the variables of the environment.
pub(super) struct Machine {
    pub(super) root: SystemRoot,
    variables: HashMap<String, String>,
}

impl Machine {
    /// The machine that this program runs on.
    pub(super) fn here() -> Self {
        let variables = std::env::vars_os();
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        Self {
            root: SystemRoot::default(),
            variables: variables.map(|(name, value)| (text(name), text(value))).collect(),
        }
    }

    /// A variable that is set to something.
    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A variable, also an empty one.
    pub(super) fn raw_variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

/// Multi-process service, by the files of its control daemon.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Mps {
    /// Where its pipes are.
    folder: PathBuf,
    /// Whether its process can be seen; `None` where it did not say which it is.
    running: Option<bool>,
    /// Limits that the environment sets for this client, `NAME=value`.
    limits: Vec<String>,
}

/// What was found.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Platform {
    kernel: Option<String>,
    /// The version of the Windows Subsystem for Linux.
    wsl: Option<u8>,
    /// Who runs the container that this is in.
    container: Option<String>,
    mps: Option<Mps>,
    /// MIG instances by their folders, `gpu0/gi1`.
    mig_instances: Vec<String>,
}

impl Platform {
    pub(super) fn read(machine: &Machine) -> Result<Self> {
        let kernel = machine.root.read("/proc/sys/kernel/osrelease")?;
        let kernel = kernel.map(|text| text.trim().to_owned());
        Ok(Self {
            wsl: kernel.as_deref().and_then(|kernel| wsl(kernel, machine)),
            kernel,
            container: container(machine)?,
            mps: mps(machine)?,
            mig_instances: mig_instances(&machine.root),
        })
    }

    pub(super) fn lines(&self, mig_devices: &[String]) -> Vec<Line> {
        vec![self.wsl_line(), self.container_line(), self.mig_line(mig_devices), self.mps_line()]
    }

    fn wsl_line(&self) -> Line {
        match self.wsl {
            None => Line::ok("WSL", "no"),
            Some(1) => Line::problem(
                "WSL",
                "version 1, which has no GPU",
                "convert the distribution: wsl --set-version NAME 2",
            ),
            Some(version) => Line::note(
                "WSL",
                format!(
                    "version {version}: Windows limits page-locked memory, and may put device \
                     memory into RAM unseen"
                ),
                "give a budget; set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback' \
                 in the NVIDIA Control Panel",
            ),
        }
    }

    fn container_line(&self) -> Line {
        Line::ok("container", self.container.as_deref().unwrap_or("no"))
    }

    fn mig_line(&self, devices: &[String]) -> Line {
        if !devices.is_empty() {
            return Line::note(
                "MIG",
                format!("{}: a part of a GPU, whose link the others use too", devices.join(", ")),
                "expect less than the measured speed while other instances copy",
            );
        }
        if self.mig_instances.is_empty() {
            return Line::ok("MIG", "no instances");
        }
        Line::note(
            "MIG",
            format!("instances exist ({}), this program got none", self.mig_instances.join(", ")),
            "choose one: CUDA_VISIBLE_DEVICES=MIG-..., as nvidia-smi -L lists them",
        )
    }

    fn mps_line(&self) -> Line {
        let Some(mps) = &self.mps else { return Line::ok("MPS", "no control daemon") };
        let folder = mps.folder.display();
        if mps.running == Some(false) {
            return Line::note(
                "MPS",
                format!(
                    "{folder} has a control daemon's files, but its process is not to be seen: it \
                     has ended, or is outside this container"
                ),
                "where it has ended, remove the folder",
            );
        }
        let mut text = format!(
            "a control daemon serves {folder}: clients share the device, and a fault of one can \
             end the others' contexts"
        );
        if !mps.limits.is_empty() {
            text = format!("{text}; {}", mps.limits.join(", "));
        }
        Line::note("MPS", text, "give each program a budget; without MPS: quit the daemon")
    }
}

/// The kernels of version 1 are called `...-Microsoft`, those of version 2
/// `...-microsoft-standard-WSL2`, or as one likes; but there the GPU's device is.
fn wsl(kernel: &str, machine: &Machine) -> Option<u8> {
    if kernel.contains("WSL2") || kernel.contains("microsoft-standard") {
        return Some(2);
    }
    if kernel.to_ascii_lowercase().contains("microsoft") {
        return Some(1);
    }
    let named = machine.variable("WSL_DISTRO_NAME").is_some();
    (named && machine.root.exists("/dev/dxg")).then_some(2)
}

/// By the files that those who run containers leave, then by names of control groups.
fn container(machine: &Machine) -> Result<Option<String>> {
    if let Some(text) = machine.root.read("/run/systemd/container")? {
        return Ok(Some(text.trim().to_owned()));
    }
    let by_file = [("/run/.containerenv", "podman"), ("/.dockerenv", "docker")];
    if let Some((_, name)) = by_file.iter().find(|(path, _)| machine.root.exists(path)) {
        return Ok(Some((*name).to_owned()));
    }
    if machine.variable("KUBERNETES_SERVICE_HOST").is_some() {
        return Ok(Some("kubernetes".to_owned()));
    }
    if let Some(name) = machine.variable("container") {
        return Ok(Some(name.to_owned()));
    }
    let groups = machine.root.read("/proc/self/cgroup")?.unwrap_or_default();
    let names = ["kubepods", "docker", "libpod", "containerd", "lxc", "garden"];
    let found = names.iter().find(|name| groups.contains(&format!("/{name}")));
    Ok(found.map(|name| (*name).to_owned()))
}

fn mps(machine: &Machine) -> Result<Option<Mps>> {
    let folder = machine.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap_or("/tmp/nvidia-mps");
    let folder = PathBuf::from(folder);
    if !machine.root.exists(folder.join("control")) {
        return Ok(None);
    }
    let process = machine.root.read(folder.join("nvidia-cuda-mps-control.pid"))?;
    let process = process.and_then(|text| text.trim().parse::<u32>().ok());
    let running = process.map(|process| machine.root.exists(format!("/proc/{process}")));
    let limits = ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"];
    let limits =
        limits.iter().filter_map(|name| Some(format!("{name}={}", machine.variable(name)?)));
    Ok(Some(Mps { folder, running, limits: limits.collect() }))
}

/// `/proc/driver/nvidia/capabilities/gpu0/mig/gi1`: one folder an instance. Without MIG the folder
/// `mig` of a GPU is empty or missing; what cannot be read is not there.
fn mig_instances(root: &SystemRoot) -> Vec<String> {
    let folders = |path: PathBuf, prefix: &'static str| {
        let entries = std::fs::read_dir(root.path(path)).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names: Vec<String> = names.filter(|name| name.starts_with(prefix)).collect();
        names.sort();
        names
    };
    let capabilities = PathBuf::from("/proc/driver/nvidia/capabilities");
    let gpus = folders(capabilities.clone(), "gpu");
    let instances = gpus.into_iter().flat_map(|gpu| {
        let instances = folders(capabilities.join(&gpu).join("mig"), "gi");
        instances.into_iter().map(move |instance| format!("{gpu}/{instance}"))
    });
    instances.collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    use super::super::line::Level;
    use super::*;

    /// A machine with these files and variables; a path that ends in `/` is a folder.
    pub(in super::super) fn machine(
        files: &[(&str, &str)],
        variables: &[(&str, &str)],
    ) -> (tempfile::TempDir, Machine) {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let at = folder.path().join(path);
            match path.ends_with('/') {
                true => fs::create_dir_all(at).unwrap(),
                false => {
                    fs::create_dir_all(at.parent().unwrap()).unwrap();
                    fs::write(at, text).unwrap();
                }
            }
        }
        let root = SystemRoot::new(folder.path());
        let variables = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let machine = Machine { root, variables: variables.collect() };
        (folder, machine)
    }

    fn platform(files: &[(&str, &str)], variables: &[(&str, &str)]) -> Platform {
        let (_folder, machine) = machine(files, variables);
        Platform::read(&machine).unwrap()
    }

    #[track_caller]
    fn check(line: &Line, verdict: Level, text: &str) {
        assert_eq!(line.verdict, verdict, "{line:?}");
        assert!(line.text.contains(text), "{line:?}");
        assert_eq!(line.advice.is_some(), verdict != Level::Ok, "{line:?}");
    }

    #[test]
    fn an_ordinary_machine_is_none_of_it() {
        let kernel = ("proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
        let plain = platform(&[kernel, ("proc/self/cgroup", "0::/user.slice/x\n")], &[]);
        assert_eq!(plain.kernel.as_deref(), Some("6.8.0-45-generic"));
        let lines = plain.lines(&[]);
        assert!(lines.iter().all(|line| line.verdict == Level::Ok), "{lines:?}");
        assert_eq!(lines.len(), 4);
        // Nothing at all to read.
        assert_eq!(platform(&[], &[]).lines(&[]), lines);
    }

    #[test]
    fn wsl_is_told_by_its_kernel() {
        let of = |kernel| platform(&[("proc/sys/kernel/osrelease", kernel)], &[]);
        let second = of("5.15.167.4-microsoft-standard-WSL2\n");
        check(&second.wsl_line(), Level::Note, "version 2");
        check(&of("4.4.0-19041-Microsoft\n").wsl_line(), Level::Problem, "version 1");
        check(&of("6.8.0-45-generic\n").wsl_line(), Level::Ok, "no");
        let files = [("proc/sys/kernel/osrelease", "6.6.0-own"), ("dev/dxg", "")];
        let own = platform(&files, &[("WSL_DISTRO_NAME", "Ubuntu")]);
        check(&own.wsl_line(), Level::Note, "version 2");
    }

    #[test]
    fn containers_are_told_by_what_runs_them() {
        let of = |files: &[(&str, &str)], variables: &[(&str, &str)]| {
            platform(files, variables).container
        };
        assert_eq!(of(&[(".dockerenv", "")], &[]).as_deref(), Some("docker"));
        assert_eq!(
            of(&[("run/.containerenv", "engine=\"podman\"")], &[]).as_deref(),
            Some("podman")
        );
        let nspawn = of(&[("run/systemd/container", "systemd-nspawn\n")], &[]);
        assert_eq!(nspawn.as_deref(), Some("systemd-nspawn"));
        let pod = of(&[], &[("KUBERNETES_SERVICE_HOST", "10.0.0.1")]);
        assert_eq!(pod.as_deref(), Some("kubernetes"));
        assert_eq!(of(&[], &[("container", "lxc")]).as_deref(), Some("lxc"));
        let group = "0::/kubepods.slice/kubepods-burstable.slice/cri-containerd-abc.scope";
        assert_eq!(of(&[("proc/self/cgroup", group)], &[]).as_deref(), Some("kubepods"));
        assert_eq!(of(&[("proc/self/cgroup", "0::/user.slice")], &[]), None);
    }

    #[test]
    fn mps_is_told_by_its_pipes() {
        let usual = [("tmp/nvidia-mps/control", "")];
        check(&platform(&usual, &[]).mps_line(), Level::Note, "/tmp/nvidia-mps");
        let pid = ("tmp/nvidia-mps/nvidia-cuda-mps-control.pid", "4711\n");
        let ended = platform(&[usual[0], pid], &[]);
        check(&ended.mps_line(), Level::Note, "process is not to be seen");
        let running = platform(&[usual[0], pid, ("proc/4711/", "")], &[]);
        check(&running.mps_line(), Level::Note, "serves /tmp/nvidia-mps");
        // A folder of one's own, and its limits.
        let variables =
            [("CUDA_MPS_PIPE_DIRECTORY", "/run/mps"), ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2G")];
        check(&platform(&usual, &variables).mps_line(), Level::Ok, "no control daemon");
        let own = platform(&[("run/mps/control", "")], &variables);
        check(&own.mps_line(), Level::Note, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=2G");
    }

    #[test]
    fn mig_is_told_by_the_instances() {
        let capabilities = "proc/driver/nvidia/capabilities";
        // A driver that knows MIG, a GPU that does not use it.
        let off = platform(
            &[
                (&format!("{capabilities}/mig/config"), ""),
                (&format!("{capabilities}/gpu0/mig/"), ""),
            ],
            &[],
        );
        check(&off.mig_line(&[]), Level::Ok, "no instances");
        let on = platform(
            &[
                (&format!("{capabilities}/gpu0/mig/gi2/access"), ""),
                (&format!("{capabilities}/gpu0/mig/gi1/ci0/access"), ""),
            ],
            &[],
        );
        assert_eq!(on.mig_instances, ["gpu0/gi1", "gpu0/gi2"]);
        check(&on.mig_line(&[]), Level::Note, "gpu0/gi1");
        let device = "device 0 (NVIDIA A100-SXM4-40GB MIG 1g.5gb)".to_owned();
        check(&on.mig_line(&[device]), Level::Note, "MIG 1g.5gb");
    }
}
