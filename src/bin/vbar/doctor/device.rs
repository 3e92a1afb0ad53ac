//! One device: what it is, what is free of it, and whether what the library needs works on it.
//!
//! Virtual memory management is tried, not only asked for: one frame is made, mapped and given
//! back. Nothing here waits for the device.

use std::sync::Arc;

use serde::Serialize;
use vbar::driver::{DeviceAttribute, DeviceMemory, Driver, DriverCode, DriverResult};
use vbar::host::kernel_module::registration_refused;
use vbar::host::mounts::SystemRoot;
use vbar::units::{DeviceOrdinal, format_bytes};

use super::line::Line;
use super::measure::Means;
use super::window::{CurrentContext, Window};

/// When less than one of so many parts is free, others hold the device.
const FREE_PARTS: u64 = 4;

const COMPUTE_MODE_PROHIBITED: i32 = 2;
const COMPUTE_MODE_EXCLUSIVE: i32 = 3;

/// The serialized fields are part of the program's interface; what the driver did not say is null.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(super) struct Device {
    ordinal: u32,
    name: Option<String>,
    compute_capability: Option<String>,
    pub(super) total_bytes: Option<u64>,
    pub(super) free_bytes: Option<u64>,
    virtual_memory_management: bool,
    granularity_bytes: Option<u64>,
    /// Whether a frame could be mapped; the error where not.
    trial_error: Option<String>,
    read_only_host_registration: bool,
    /// Why registered page cache is not used; null where it is.
    registration_refused: Option<String>,
    mig: bool,
    compute_mode: Option<i32>,
    integrated: bool,
    pci: Option<Pci>,
    #[serde(skip)]
    context_error: Option<String>,
    #[serde(skip)]
    trial_code: Option<DriverCode>,
}

/// Where the device is plugged in, as the kernel tells.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
struct Pci {
    address: String,
    /// `32.0 GT/s PCIe`; lower while the device is idle.
    speed: Option<String>,
    lanes: Option<u32>,
    lanes_max: Option<u32>,
}

impl Device {
    pub(super) fn examine(
        driver: &Arc<dyn Driver>,
        ordinal: DeviceOrdinal,
        module_version: Option<&str>,
        root: &SystemRoot,
    ) -> Self {
        let attribute = |attribute| driver.device_get_attribute(ordinal, attribute).ok();
        let capability = attribute(DeviceAttribute::ComputeCapabilityMajor)
            .zip(attribute(DeviceAttribute::ComputeCapabilityMinor));
        let read_only = attribute(DeviceAttribute::ReadOnlyHostRegisterSupported) == Some(1);
        let vmm = super::has_virtual_memory(&**driver, ordinal);
        let granularity_bytes = driver.mem_get_allocation_granularity(ordinal).ok();
        let name = driver.device_get_name(ordinal).ok();
        let mut device = Self {
            ordinal: ordinal.0,
            // `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
            mig: name.as_ref().is_some_and(|name| name.contains(" MIG ")),
            name,
            compute_capability: capability.map(|(major, minor)| format!("{major}.{minor}")),
            total_bytes: driver.device_total_mem(ordinal).ok(),
            free_bytes: None,
            virtual_memory_management: vmm,
            granularity_bytes,
            trial_error: None,
            read_only_host_registration: read_only,
            registration_refused: registration_refused(read_only, module_version),
            compute_mode: attribute(DeviceAttribute::ComputeMode),
            integrated: attribute(DeviceAttribute::Integrated) == Some(1),
            pci: Pci::read(&**driver, ordinal, root),
            context_error: None,
            trial_code: None,
        };
        device.examine_in_context(driver, ordinal);
        device
    }

    /// Free memory is told in a context only, and a frame is mapped in one.
    fn examine_in_context(&mut self, driver: &Arc<dyn Driver>, ordinal: DeviceOrdinal) {
        let context = CurrentContext::new(driver, ordinal);
        let memory: DriverResult<DeviceMemory> =
            context.as_ref().map_err(|error| *error).and_then(|_| driver.mem_get_info());
        match memory {
            Ok(memory) => self.free_bytes = Some(memory.free_bytes),
            Err(error) => self.context_error = Some(error.to_string()),
        }
        if let (Ok(_), true, Some(bytes)) =
            (&context, self.virtual_memory_management, self.granularity_bytes)
            && let Err(error) = Window::new(driver, ordinal, bytes)
        {
            self.trial_error = Some(error.to_string());
            self.trial_code = Some(error.code);
        }
    }

    /// What errors and other lines call it.
    pub(super) fn title(&self) -> String {
        format!("device {} ({})", self.ordinal, self.name.as_deref().unwrap_or("unnamed"))
    }

    /// What of the device measuring may use; `None` where nothing can be allocated on it.
    pub(super) fn means(&self, simulated: bool, allowance_bytes: u64) -> Option<Means> {
        if self.trial_error.is_some() || !self.virtual_memory_management {
            return None;
        }
        Some(Means {
            device: DeviceOrdinal(self.ordinal),
            simulated,
            granularity_bytes: self.granularity_bytes?,
            free_bytes: self.free_bytes?,
            allowance_bytes,
        })
    }

    pub(super) fn is_mig(&self) -> bool {
        self.mig
    }

    pub(super) fn lines(&self) -> Vec<Line> {
        let mut lines = vec![self.device(), self.memory(), self.virtual_memory()];
        lines.extend(self.registration());
        lines.extend(self.mode());
        lines.extend(self.slot());
        lines
    }

    fn topic(&self, word: &str) -> String {
        format!("{word} {}", self.ordinal)
    }

    fn device(&self) -> Line {
        let topic = self.topic("device");
        let name = self.name.as_deref().unwrap_or("its name is not told");
        let capability = self.compute_capability.as_deref().unwrap_or("unknown");
        let text = format!("{name}, compute capability {capability}");
        if self.integrated {
            return Line::note(
                topic,
                format!("{text}; it has no memory of its own and uses the machine's"),
                "nothing is gained by streaming: leave weights where they are",
            );
        }
        Line::ok(topic, text)
    }

    fn memory(&self) -> Line {
        let topic = self.topic("memory");
        if let Some(error) = &self.context_error {
            return Line::problem(
                topic,
                format!("no context, so nothing can be allocated: {error}"),
                "is another program using the device exclusively, or is it full? nvidia-smi",
            );
        }
        let (Some(free), Some(total)) = (self.free_bytes, self.total_bytes) else {
            return Line::note(topic, "the driver does not tell", "give a budget: it is then used");
        };
        let text = format!("{} free of {}", format_bytes(free), format_bytes(total));
        if free < total / FREE_PARTS {
            return Line::note(topic, text, "other programs hold the rest: nvidia-smi lists them");
        }
        Line::ok(topic, text)
    }

    fn virtual_memory(&self) -> Line {
        let topic = self.topic("VMM");
        if !self.virtual_memory_management {
            return Line::problem(
                topic,
                "no virtual memory management: everything is offloaded on this device",
                "use another device, or a later driver (450.36 at least)",
            );
        }
        let Some(granularity) = self.granularity_bytes else {
            return Line::problem(
                topic,
                "the driver does not tell the granularity",
                "nvidia-smi; dmesg | grep -i nvrm",
            );
        };
        let granularity = format_bytes(granularity);
        match (&self.trial_error, self.trial_code) {
            (None, _) if self.context_error.is_some() => {
                Line::ok(topic, format!("supported, granularity {granularity}; not tried"))
            }
            (None, _) => {
                Line::ok(topic, format!("works: one frame mapped, granularity {granularity}"))
            }
            (Some(error), Some(DriverCode::OUT_OF_MEMORY)) => Line::note(
                topic,
                format!("granularity {granularity}; not even one such frame could be had: {error}"),
                "the device is full: nvidia-smi lists who holds it",
            ),
            (Some(error), _) => Line::problem(
                topic,
                format!("granularity {granularity}; a frame could not be mapped: {error}"),
                "dmesg | grep -i nvrm tells what the kernel module says",
            ),
        }
    }

    /// Two lines would say the same twice: why not is in the text.
    fn registration(&self) -> Option<Line> {
        let topic = self.topic("register");
        Some(match &self.registration_refused {
            None => Line::ok(topic, "read-only host memory can be registered (page cache)"),
            Some(why) => Line::note(
                topic,
                format!("page cache is not registered with the device: {why}"),
                "nothing to do: files are read into page-locked memory instead",
            ),
        })
    }

    /// None in the usual mode.
    fn mode(&self) -> Option<Line> {
        let topic = self.topic("mode");
        match self.compute_mode? {
            COMPUTE_MODE_PROHIBITED => Some(Line::problem(
                topic,
                "compute mode PROHIBITED: no context may be created",
                format!("nvidia-smi -i {} -c DEFAULT", self.ordinal),
            )),
            COMPUTE_MODE_EXCLUSIVE => Some(Line::note(
                topic,
                "compute mode EXCLUSIVE_PROCESS: one process at a time",
                format!("nvidia-smi -i {} -c DEFAULT lets several share it", self.ordinal),
            )),
            _ => None,
        }
    }

    /// None where the kernel does not tell, as in many virtual machines.
    fn slot(&self) -> Option<Line> {
        let pci = self.pci.as_ref()?;
        let lanes = pci.lanes?;
        let speed = pci.speed.as_deref().unwrap_or("unknown speed");
        let text = format!("{lanes} lanes at {speed} when asked ({})", pci.address);
        Some(match pci.lanes_max {
            Some(most) if lanes < most => Line::note(
                self.topic("slot"),
                format!("{text}; the device has {most}"),
                "another slot or riser may give more",
            ),
            _ => Line::ok(self.topic("slot"), text),
        })
    }
}

impl Pci {
    fn read(driver: &dyn Driver, ordinal: DeviceOrdinal, root: &SystemRoot) -> Option<Self> {
        let number = |attribute| driver.device_get_attribute(ordinal, attribute).ok();
        let domain = number(DeviceAttribute::PciDomainId)?;
        let bus = number(DeviceAttribute::PciBusId)?;
        let device = number(DeviceAttribute::PciDeviceId)?;
        Some(Self::of(format!("{domain:04x}:{bus:02x}:{device:02x}.0"), root))
    }

    /// What the kernel says of the device at an address; a width of 0 or 255 says nothing.
    fn of(address: String, root: &SystemRoot) -> Self {
        let file = |name: &str| {
            let text = root.read(format!("/sys/bus/pci/devices/{address}/{name}")).ok()??;
            Some(text.trim().to_owned())
        };
        let lanes = |name| file(name)?.parse::<u32>().ok().filter(|lanes| (1..=64).contains(lanes));
        let speed = file("current_link_speed").filter(|speed| !speed.starts_with("Unknown"));
        let (lanes, lanes_max) = (lanes("current_link_width"), lanes("max_link_width"));
        Self { speed, lanes, lanes_max, address }
    }
}

#[cfg(test)]
mod tests {
    use vbar::driver::sim::{Sim, SimOptions};

    use super::super::line::Level;
    use super::super::machine::tests::machine;
    use super::*;

    fn examined(options: &str) -> (Arc<Sim>, Device) {
        let sim = Sim::new(SimOptions::parse(options).unwrap());
        let (_folder, machine) = machine(&[], &[]);
        let device = Device::examine(&sim.driver(), DeviceOrdinal(0), None, &machine.root);
        (sim, device)
    }

    fn verdicts(device: &Device) -> Vec<(String, Level)> {
        device.lines().into_iter().map(|line| (line.topic, line.verdict)).collect()
    }

    #[track_caller]
    fn check(device: &Device, topic: &str, verdict: Level, text: &str) {
        let lines = device.lines();
        let line = lines.iter().find(|line| line.topic == topic);
        let line = line.unwrap_or_else(|| panic!("{topic}: {lines:?}"));
        assert_eq!(line.verdict, verdict, "{line:?}");
        assert!(line.text.contains(text), "{line:?}");
    }

    #[test]
    fn a_device_that_works_leaves_nothing_behind() {
        let (sim, device) = examined("capacity=64M,granularity=64K");
        check(&device, "VMM 0", Level::Ok, "granularity 64.0 KiB");
        check(&device, "memory 0", Level::Ok, "64.0 MiB free of 64.0 MiB");
        check(&device, "register 0", Level::Note, "no read-only registration");
        assert_eq!(verdicts(&device).len(), 4);
        assert_eq!((sim.live_frames(DeviceOrdinal(0)), sim.live_reservations()), (0, 0));
        assert_eq!(sim.ctx_get_current(), Ok(None));
    }

    #[test]
    fn what_fails_is_told_with_the_drivers_words() {
        let (_sim, device) = examined("vmm=0");
        check(&device, "VMM 0", Level::Problem, "no virtual memory management");
        let (_sim, device) = examined("fail=device_primary_ctx_retain:1:46");
        check(&device, "memory 0", Level::Problem, "CUDA_ERROR_DEVICE_UNAVAILABLE");
        check(&device, "VMM 0", Level::Ok, "not tried");
        let (sim, device) = examined("fail=mem_create:1:2");
        check(&device, "VMM 0", Level::Note, "CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(sim.live_reservations(), 0);
        let (sim, device) = examined("fail=mem_set_access:1:999");
        check(&device, "VMM 0", Level::Problem, "cuMemSetAccess");
        assert_eq!((sim.live_frames(DeviceOrdinal(0)), sim.live_mappings()), (0, 0));
        let (_sim, device) = examined("fail=device_get_name:1:999");
        check(&device, "device 0", Level::Ok, "its name is not told");
    }

    #[test]
    fn others_memory_modes_and_parts_are_noted() {
        let (_sim, usual) = examined("capacity=64M,granularity=64K");
        let full = Device { free_bytes: Some(1 << 20), ..usual.clone() };
        check(&full, "memory 0", Level::Note, "1.0 MiB free");
        let mode = |mode| Device { compute_mode: Some(mode), ..usual.clone() };
        check(&mode(2), "mode 0", Level::Problem, "PROHIBITED");
        check(&mode(3), "mode 0", Level::Note, "EXCLUSIVE_PROCESS");
        let integrated = Device { integrated: true, ..usual.clone() };
        check(&integrated, "device 0", Level::Note, "uses the machine's");
    }

    #[test]
    fn registration_needs_the_attribute_and_the_module() {
        assert_eq!(registration_refused(true, Some("570.86.15")), None);
        let why = |read_only, module| registration_refused(read_only, module).unwrap();
        assert!(why(true, Some("550.54")).contains("driver 550"));
        assert!(why(true, None).contains("not known"));
        assert!(why(false, Some("580.1")).contains("no read-only registration"));
    }

    #[test]
    fn the_slot_is_read_from_the_kernel() {
        let (_sim, usual) = examined("capacity=64M,granularity=64K");
        let of = |files: &[(&str, &str)]| {
            let files: Vec<_> = files
                .iter()
                .map(|(name, text)| (format!("sys/bus/pci/devices/0000:3b:00.0/{name}"), *text))
                .collect();
            let files: Vec<_> = files.iter().map(|(name, text)| (&**name, *text)).collect();
            let (_folder, machine) = machine(&files, &[]);
            let pci = Some(Pci::of("0000:3b:00.0".to_owned(), &machine.root));
            Device { pci, ..usual.clone() }
        };
        let width = |width| ("current_link_width", width);
        let most = ("max_link_width", "16\n");
        let speed = ("current_link_speed", "16.0 GT/s PCIe\n");
        check(&of(&[width("16\n"), most, speed]), "slot 0", Level::Ok, "16 lanes at 16.0 GT/s");
        check(&of(&[width("4\n"), most, speed]), "slot 0", Level::Note, "the device has 16");
        assert_eq!(of(&[width("0\n"), most]).slot(), None);
        assert_eq!(of(&[]).slot(), None);
    }
}
