//! The CUDA driver: which library and module there are, and why it does not start.
//!
//! Owns the advice for each way in which it fails, which is given here and nowhere else.

use rustix::fs::{Access, access};
use serde::Serialize;
use vbar::Result;
use vbar::driver::DriverCode;
use vbar::driver::select::{self, Opened};
use vbar::host::kernel_module::module_version;
use vbar::host::mounts::SystemRoot;

use super::line::Line;
use super::machine::Machine;

/// The oldest driver that has what is needed.
const MINIMUM: &str = "450.36 (CUDA 11.0)";
/// What the driver needs to reach devices.
const NODES: &[&str] = &["/dev/nvidiactl", "/dev/nvidia-uvm"];

/// What was found of the driver.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct DriverFacts {
    /// How the device was chosen, in words.
    how: Option<String>,
    /// `cuda 13.0`, or the options of a simulated device.
    description: Option<String>,
    simulated: bool,
    /// The library that is open, where one is.
    library: Option<String>,
    /// The version that the library is of, in CUDA's numbers: 13.0.
    cuda_version: Option<String>,
    /// The version of the kernel module, in the driver's numbers: 580.159.04.
    pub(super) module_version: Option<String>,
    minimum: &'static str,
    visible_devices: Option<String>,
}

impl DriverFacts {
    pub(super) fn new(opened: Option<&Opened>, machine: &Machine) -> Result<Self> {
        let root = &machine.root;
        let version = opened.and_then(|opened| opened.driver.version().ok());
        Ok(Self {
            how: opened.map(|opened| opened.how.clone()),
            description: opened.map(|opened| opened.driver.description()),
            simulated: opened.is_some_and(|opened| opened.sim.is_some()),
            library: opened_library(root)?,
            cuda_version: version.map(|it| format!("{}.{}", it / 1000, it % 1000 / 10)),
            module_version: module_version(root)?,
            minimum: MINIMUM,
            visible_devices: machine.raw_variable("CUDA_VISIBLE_DEVICES").map(str::to_owned),
        })
    }

    /// Of a real driver: CUDA's version.
    pub(super) fn cuda_version(&self) -> Option<&str> {
        self.cuda_version.as_deref().filter(|_| !self.simulated)
    }

    /// Lines for a driver that works.
    pub(super) fn lines(&self) -> Vec<Line> {
        let mut lines = Vec::new();
        if self.simulated {
            let how = self.how.as_deref().unwrap_or_default();
            let description = self.description.as_deref().unwrap_or_default();
            let told = how.contains(description);
            let text = if told { how.to_owned() } else { format!("{how}: {description}") };
            lines.push(Line::ok("simulated", text));
            return lines;
        }
        let version = self.cuda_version.as_deref().unwrap_or("of unknown version");
        let library = self.library.as_deref().unwrap_or("a library whose path is not told");
        let module = match &self.module_version {
            Some(version) => format!("kernel module {version}"),
            None => "the kernel module does not tell its version".to_owned(),
        };
        let text = format!("CUDA {version} by {library}; {module}; oldest that works: {MINIMUM}");
        lines.push(Line::ok("driver", text));
        if let Some(visible) = &self.visible_devices {
            lines.push(Line::note(
                "visible",
                format!("CUDA_VISIBLE_DEVICES={visible} chooses and renumbers the devices"),
                "unset it to see all",
            ));
        }
        lines
    }

    /// Lines for a driver that does not, `why` being the library's own words.
    pub(super) fn failure_lines(&self, why: &str, root: &SystemRoot) -> Vec<Line> {
        // Here is what the library's text points to.
        let why = why.trim_end_matches(select::DOCTOR).trim_end_matches("; ");
        let (text, advice) = why.split_once(". ").unwrap_or((why, ""));
        let advice = if advice.is_empty() { advice_for(text, self) } else { advice };
        let mut lines = vec![Line::problem("driver", text, advice)];
        lines.push(match &self.module_version {
            Some(version) => Line::ok("kernel module", version.clone()),
            None => Line::note(
                "kernel module",
                "not loaded: there is no /proc/driver/nvidia/version",
                "is there an NVIDIA GPU? lspci | grep -i nvidia; modprobe nvidia; with a new \
                 kernel the module is built anew (dkms), with Secure Boot it is signed",
            ),
        });
        // Without a module there are no nodes, and nothing to say about them.
        if self.module_version.is_some() {
            lines.extend(NODES.iter().map(|node| node_line(node, root)));
        }
        if let Some(visible) = &self.visible_devices {
            lines.push(Line::note(
                "visible",
                format!("CUDA_VISIBLE_DEVICES='{visible}' may hide every device"),
                "unset it and try again",
            ));
        }
        lines
    }
}

fn node_line(node: &str, root: &SystemRoot) -> Line {
    let path = root.path(node);
    if !path.exists() {
        let advice = "nvidia-modprobe -u -c 0 makes it; in a container, the NVIDIA container \
                      runtime has to pass it in (docker run --gpus all)";
        return Line::note("device node", format!("{node} does not exist"), advice);
    }
    match access(&path, Access::READ_OK | Access::WRITE_OK) {
        Ok(()) => Line::ok("device node", format!("{node} may be opened")),
        Err(error) => Line::note(
            "device node",
            format!("{node}: {}", std::io::Error::from(error)),
            "join the group that owns it (ls -l), or let the administrator set \
             NVreg_DeviceFileMode",
        ),
    }
}

/// What to do about an error that the library gives no advice for.
fn advice_for(text: &str, facts: &DriverFacts) -> &'static str {
    let is = |code: DriverCode| text.contains(&format!("{code:?}"));
    let mps = [
        DriverCode::MPS_CONNECTION_FAILED,
        DriverCode::MPS_RPC_FAILURE,
        DriverCode::MPS_SERVER_NOT_READY,
        DriverCode::MPS_MAX_CLIENTS_REACHED,
        DriverCode::MPS_MAX_CONNECTIONS_REACHED,
    ];
    if is(DriverCode::STUB_LIBRARY) {
        "the toolkit's stub was found in place of the driver: take its folder out of \
         LD_LIBRARY_PATH"
    } else if is(DriverCode::SYSTEM_DRIVER_MISMATCH) {
        "library and kernel module are of different versions: reboot after an update; in a \
         container, use the library of the host"
    } else if is(DriverCode::COMPAT_NOT_SUPPORTED_ON_DEVICE) {
        "this GPU cannot use the compatibility library: take cuda-compat out of LD_LIBRARY_PATH"
    } else if is(DriverCode::SYSTEM_NOT_READY) {
        "on machines with NVSwitch: systemctl start nvidia-fabricmanager"
    } else if mps.into_iter().any(is) {
        "the MPS control daemon does not serve us: restart it, or unset CUDA_MPS_PIPE_DIRECTORY"
    } else if is(DriverCode::OUT_OF_MEMORY) {
        "the address space may be limited: ulimit -v unlimited"
    } else if facts.module_version.is_none() {
        "see the kernel module's line"
    } else if is(DriverCode::NO_DEVICE) {
        "does nvidia-smi -L list a GPU? CUDA_VISIBLE_DEVICES may hide it; a container needs \
         --gpus all"
    } else {
        "does nvidia-smi work? dmesg | grep -i nvrm tells what the kernel module says"
    }
}

/// The mapping of `libcuda` in this process.
fn opened_library(root: &SystemRoot) -> Result<Option<String>> {
    let maps = root.read("/proc/self/maps")?.unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut paths = paths
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libcuda.so")));
    Ok(paths.next().map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::super::machine::tests::machine;
    use super::*;

    const VERSION: (&str, &str) = (
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n\
         GCC version:  gcc version 12.2.0\n",
    );

    #[track_caller]
    fn check(why: &str, files: &[(&str, &str)], advice: &str) -> Vec<Line> {
        let (_folder, machine) = machine(files, &[]);
        let facts = DriverFacts::new(None, &machine).unwrap();
        let lines = facts.failure_lines(why, &machine.root);
        assert_eq!(lines[0].verdict, Level::Problem);
        assert!(lines[0].advice.as_ref().unwrap().contains(advice), "{lines:?}");
        lines
    }

    #[test]
    fn the_advice_follows_the_error() {
        let missing = "libcuda.so.1 could not be opened (no such file). Install the NVIDIA driver";
        let lines = check(missing, &[], "Install the NVIDIA driver");
        assert_eq!(lines[1].verdict, Level::Note, "the module is missing too: {lines:?}");
        assert_eq!(lines.len(), 2);
        let returned = |code: DriverCode| format!("libcuda.so.1: cuInit returned {code:?}");
        for (code, advice) in [
            (DriverCode::STUB_LIBRARY, "LD_LIBRARY_PATH"),
            (DriverCode::SYSTEM_DRIVER_MISMATCH, "reboot"),
            (DriverCode::COMPAT_NOT_SUPPORTED_ON_DEVICE, "cuda-compat"),
            (DriverCode::SYSTEM_NOT_READY, "fabricmanager"),
            (DriverCode::MPS_SERVER_NOT_READY, "MPS control daemon"),
            (DriverCode::OUT_OF_MEMORY, "ulimit -v"),
            (DriverCode::NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
            (DriverCode::UNKNOWN, "dmesg"),
        ] {
            check(&returned(code), &[VERSION], advice);
        }
        check(&returned(DriverCode::NO_DEVICE), &[], "kernel module's line");
    }

    #[test]
    fn missing_nodes_are_told() {
        let error = "libcuda.so.1: cuInit returned CUDA_ERROR_UNKNOWN (999)";
        let lines = check(error, &[VERSION, ("dev/nvidiactl", "")], "dmesg");
        assert_eq!(lines[1].text, "580.159.04");
        assert_eq!((lines[2].verdict, lines[3].verdict), (Level::Ok, Level::Note), "{lines:?}");
        assert!(lines[3].text.contains("/dev/nvidia-uvm does not exist"), "{lines:?}");
    }

    #[test]
    fn versions_and_paths_are_found() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 5   /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 08:01 6   /usr/lib/x/libcuda.so.580.159.04\n";
        let old = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\n";
        let (_folder, machine) =
            machine(&[("proc/self/maps", maps), ("proc/driver/nvidia/version", old)], &[]);
        let facts = DriverFacts::new(None, &machine).unwrap();
        assert_eq!(facts.library.as_deref(), Some("/usr/lib/x/libcuda.so.580.159.04"));
        assert_eq!(facts.module_version.as_deref(), Some("470.57.02"));
    }
}
