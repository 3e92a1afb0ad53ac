//! Devices: opening with options, information, budget, waits, streams.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::{c_char, c_void};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::bar::VbarFreed;
use super::call::{call, invalid, stale};
use super::status::VbarStatus;
use super::tag;
use super::value::{Growing, Out, OutGrowing, Plain, read_growing, read_text};
use crate::driver::select::{self, Opened, Selection};
use crate::driver::sim::Sim;
use crate::error::{Error, ErrorCode, Result};
use crate::options::{
    ContextWaits, Eviction, HostMapped, Poison, Prefer, RuntimeOptions, Scrub, Threads,
};
use crate::runtime::Runtime;
use crate::slots::{Handles, Ref, Spread};
use crate::units::{Context, DeviceOrdinal, PageSize, Stream};

/// An open device. Each opening has an id of its own, 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarDevice {
    /// The id.
    pub id: u64,
}

/// A stream: a `CUstream` (or `cudaStream_t`) as a number, `(VbarStream)(uintptr_t)stream`. 0 is
/// the default stream of the legacy kind, 1 and 2 are `CU_STREAM_LEGACY` and
/// `CU_STREAM_PER_THREAD`, `VBAR_STREAM_NONE` is none. The library keeps no handle: it must be
/// valid during each call that it is given to. A stream that is faulted for lives until the token
/// was given back; then `vbar_stream_retire`, then destroy it.
pub type VbarStream = usize;

/// A headroom of nothing; 0 is the default of 256 MiB.
pub const VBAR_HEADROOM_NONE: u64 = u64::MAX;

/// No page-locked host memory; 0 is what the system can spare.
pub const VBAR_HOST_ALLOWANCE_NONE: u64 = u64::MAX;

/// How a frame in use gets to its next page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarEviction {
    /// Mapped at its next address at once, behind fences: nobody waits.
    Aliasing = 0,
    /// Unmapped first, after its fences: for debugging, a use after the unpin faults.
    Strict = 1,
}

/// Whether the library may have threads of its own. None is what C gets unless it asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarThreads {
    /// None, or what the device has where it is open already.
    Default = 0,
    /// "vbar pressure", which notices what other programs take from the device between calls too,
    /// and "vbar engine", which learns the order of faults of bound VBARs that exceed the budget,
    /// decides which of their pages stay, and fetches the others before they are asked for; and
    /// some that read files for them. A fault that comes first helps itself. What is streamed pass
    /// after pass is kept in page-locked memory, within `host_allowance_bytes`.
    On = 1,
    /// None: pressure is noticed at the next miss, and every miss waits for its own bytes. Ends
    /// those of a device that is open.
    Off = 2,
}

/// Whether a call may wait for the whole context when no fence covers a page that must go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarContextWaits {
    /// One wait rather than a refusal.
    Allowed = 0,
    /// Refuse with `VBAR_REASON_FENCE_UNKNOWN`. With PyTorch's allocator on the device, which knows
    /// when a graph is being captured, a fault waits all the same before it is refused for that.
    Never = 1,
}

/// What is behind an evicted page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarPoison {
    /// Nothing: a use faults, and costs the context.
    Off = 0,
    /// A frame whose every byte is 0xFF, which reads as NaN in all the usual floats: for debugging.
    On = 1,
}

/// Whether a frame is cleared before another page has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarScrub {
    /// It is not: a page that you write holds what was in its frame before, and a bound one does
    /// where no file fills it.
    Off = 0,
    /// On the device, in the order of the stream, one `cuMemsetD8Async` for each run of pages;
    /// memory that comes from the driver too. Blocks that PyTorch frees and gets again are not.
    On = 1,
}

/// What a range of a bound VBAR comes to that needs more device frames than it can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarHostMapped {
    /// It is offloaded.
    Off = 0,
    /// Its missing pages get page-locked host memory, as far as the host has some to spare, that
    /// the device reads over the link: `VBAR_REASON_HOST_MAPPED`. They move to device frames at the
    /// next fault for which there are some. As off where the device cannot map host memory.
    On = 1,
}

/// Where the bytes of a bound file are read from, when page-locked memory does not hold them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarPrefer {
    /// From the page cache what is there, or all of it when the file fits into what the host can
    /// spare; else past it.
    Auto = 0,
    /// Through the page cache. What is streamed again and again is registered there where that can
    /// be, instead of kept in page-locked memory: one copy of it less, and slower until it is done.
    Ram = 1,
    /// Past the page cache (`O_DIRECT`), where the file system can; else through it.
    Disk = 2,
}

/// How to open a device. Zeros are the defaults: set `size` to its sizeof, then what differs.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarDeviceOptions {
    /// `sizeof(VbarDeviceOptions)`.
    pub size: usize,
    /// The driver: "cuda", "cuda:1", "sim", "sim:capacity=8G,seed=7", or "auto", which is what the
    /// environment variable `VBAR_DRIVER` says, else a CUDA device where there is one, else a
    /// simulated one. NULL is what `VBAR_DRIVER` says, else "cuda". Simulated devices with equal
    /// options are one device, while anybody has it open.
    pub driver: *const c_char,
    /// The device's ordinal in that driver; "cuda:1" has its own.
    pub ordinal: u32,
    /// A `VbarThreads`.
    pub threads: u32,
    /// Most device memory for frames, in bytes; 0: what is free, less the headroom, followed as it
    /// changes. On a device that is open: applied as a change unless 0.
    pub budget_bytes: u64,
    /// Device memory left free for others, in bytes; 0: 256 MiB. As `budget_bytes` otherwise.
    pub headroom_bytes: u64,
    /// Size of pages and frames, a power of two and a multiple of the granularity; 0: 16 MiB.
    pub page_bytes: u64,
    /// The `CUcontext` to work in; NULL: the device's primary context, or the one that the device
    /// is open in.
    pub context: *mut c_void,
    /// A `VbarEviction`.
    pub eviction: u32,
    /// A `VbarContextWaits`.
    pub context_waits: u32,
    /// Longest time that one call waits for anything, in milliseconds, then
    /// `VBAR_STATUS_TIMED_OUT`; 0: 30,000.
    pub wait_timeout_ms: u64,
    /// Page-locked slots between file and device, at most 64; 0: 4. One is a page, or 16 MiB where
    /// pages are larger.
    pub staging_slot_count: u32,
    /// A `VbarPoison`.
    pub poison: u32,
    /// A `VbarHostMapped`.
    pub host_mapped: u32,
    /// A `VbarPrefer`. This and `host_allowance_bytes` are those of the first opening while the
    /// device is open.
    pub prefer: u32,
    /// Most host memory that may be page-locked or registered, host frames included, in bytes; 0:
    /// what the system can spare for all devices of the process, which bounds a number too;
    /// `VBAR_HOST_ALLOWANCE_NONE`: none. Without room for one slot between
    /// file and device copies are from pageable memory, and slower.
    pub host_allowance_bytes: u64,
    /// A `VbarScrub`. It is that of the first opening while the device is open.
    pub scrub: u32,
    /// The budget in millionths of the device's memory, in place of `budget_bytes`: 500,000 are a
    /// half of it; 0: none. On a device that is open: applied as a change unless 0.
    pub budget_ppm: u32,
}

// SAFETY: integers and raw pointers; the size first.
unsafe impl Plain for VbarDeviceOptions {}
// SAFETY: as above.
unsafe impl Growing for VbarDeviceOptions {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarDeviceOptions, prefer) + size_of::<u32>();
}

/// What a device is.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarDeviceInfo {
    /// `sizeof(VbarDeviceInfo)`, set by the caller.
    pub size: usize,
    /// Ordinal in its driver.
    pub ordinal: u32,
    /// 1 for a simulated device, else 0.
    pub simulated: u32,
    /// The `CUcontext` that the library works in; make it current for driver calls of your own.
    pub context: *mut c_void,
    /// Size of pages and frames, in bytes.
    pub page_bytes: u64,
    /// The whole device, in bytes.
    pub total_bytes: u64,
    /// The device's name, cut off at 255 bytes.
    pub name: [c_char; 256],
    /// The driver and why it was chosen, cut off at 255 bytes.
    pub driver: [c_char; 256],
}

// SAFETY: integers, a raw pointer and arrays of integers; the size first.
unsafe impl Plain for VbarDeviceInfo {}
// SAFETY: as above.
unsafe impl Growing for VbarDeviceInfo {
    const FIRST_BYTES: usize =
        std::mem::offset_of!(VbarDeviceInfo, driver) + size_of::<[c_char; 256]>();
}

// SAFETY: integers.
unsafe impl Plain for VbarDevice {}
// SAFETY: an integer.
unsafe impl Plain for u64 {}

#[derive(Clone)]
pub(super) struct DeviceEntry {
    pub(super) runtime: Runtime,
    pub(super) sim: Option<Arc<Sim>>,
    how: String,
}

static DEVICES: Handles<DeviceEntry> = Handles::new(tag::DEVICE, Spread::Threads);

/// The device that an id names.
///
/// # Errors
/// `StaleHandle`.
pub(super) fn find(device: VbarDevice) -> Result<Ref<DeviceEntry>> {
    DEVICES.get(device.id).ok_or_else(|| stale("device", device.id))
}

/// Opens a device; `options` may be NULL. Opening it again gives another id of the same runtime:
/// driver, context and page size must match, budget, headroom, wait time-out and threads given
/// again are applied as changes. Each id is closed by itself. Statuses: the common ones, the
/// driver's, `DRIVER_MISSING`, `DEVICE_NOT_REGISTERED`, `ALREADY_OPEN`, `UNSUPPORTED` for pages
/// that are no multiple of the granularity, `HOST_MEMORY` for a simulated device that is too large,
/// `IO` when no thread can be had, `TIMED_OUT` and `CANCELLED` of a wait for what a smaller budget
/// takes back. Thread-safe.
///
/// # Safety
/// `options` is NULL or points to as many bytes as its size field says; `device` is NULL or can be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_open(
    options: *const VbarDeviceOptions,
    device: *mut VbarDevice,
) -> VbarStatus {
    call(|| {
        let out = Out::new(device)?;
        let options = read_growing(options)?;
        out.write(hand_out(open(&options)?)?);
        Ok(())
    })
}

/// An id of a device.
pub(super) fn hand_out(entry: DeviceEntry) -> Result<VbarDevice> {
    let id = DEVICES.insert(entry).map_err(|_| too_many("devices"))?;
    Ok(VbarDevice { id })
}

fn open(options: &VbarDeviceOptions) -> Result<DeviceEntry> {
    Opening::read(options)?.open()
}

/// Options of an opening, read: nothing of them points to the caller's memory any more.
#[derive(Clone)]
pub(super) struct Opening {
    pub(super) selection: Selection,
    pub(super) ordinal: DeviceOrdinal,
    pub(super) options: RuntimeOptions,
    pub(super) wait_timeout: Option<Duration>,
    /// The budget in millionths of a device's memory, where it is told so.
    pub(super) budget_ppm: Option<NonZeroU32>,
    /// Whether a device that is open keeps the page size that it has.
    pub(super) any_pages: bool,
}

impl Opening {
    pub(super) fn read(options: &VbarDeviceOptions) -> Result<Self> {
        let timeout = options.wait_timeout_ms;
        Ok(Self {
            selection: selection(read_text(options.driver)?)?,
            ordinal: DeviceOrdinal(options.ordinal),
            options: runtime_options(options)?,
            wait_timeout: (timeout != 0).then(|| Duration::from_millis(timeout)),
            budget_ppm: NonZeroU32::new(options.budget_ppm),
            any_pages: false,
        })
    }

    pub(super) fn open(mut self) -> Result<DeviceEntry> {
        let (opened, device) = self.driver()?;
        if self.any_pages
            && let Ok(open) = Runtime::opened(&opened.driver, device)
        {
            self.options.page_size = open.page_size();
        }
        if let Some(ppm) = self.budget_ppm {
            let total = opened.driver.device_total_mem(device)?;
            self.options.budget_bytes = Some(part_of(total, ppm.get()));
        }
        let runtime = Runtime::open(opened.driver, device, self.options)?;
        if let Some(timeout) = self.wait_timeout {
            // Where the device was open already, too.
            runtime.set_wait_timeout(timeout);
        }
        Ok(DeviceEntry { runtime, sim: opened.sim, how: opened.how })
    }

    fn driver(&self) -> Result<(Opened, DeviceOrdinal)> {
        let (opened, ordinal) = (select::open_shared(&self.selection)?, self.ordinal);
        let device = opened.device;
        if device.0 != 0 && ordinal.0 != 0 && device != ordinal {
            let text = format!("the driver's name says device {device}, the ordinal {ordinal}");
            return Err(invalid(text));
        }
        let device = device.max(ordinal);
        Ok((opened, device))
    }
}

/// So many millionths of some bytes, rounded down; at least 1, as 0 bytes would be no budget.
fn part_of(bytes: u64, ppm: u32) -> u64 {
    let part = u128::from(bytes) * u128::from(ppm) / 1_000_000;
    u64::try_from(part).unwrap_or(u64::MAX).max(1)
}

/// A program that names no driver wants a GPU: the simulated device is never a silent substitute.
fn selection(driver: Option<&str>) -> Result<Selection> {
    match driver {
        Some(text) => Selection::parse(text),
        None => select::from_environment().unwrap_or(Ok(Selection::Cuda(DeviceOrdinal(0)))),
    }
}

fn runtime_options(options: &VbarDeviceOptions) -> Result<RuntimeOptions> {
    let defaults = RuntimeOptions::default();
    let page_size = match options.page_bytes {
        0 => defaults.page_size,
        bytes => PageSize::new(bytes).ok_or_else(|| {
            invalid(format!("pages of {bytes} bytes: a power of two from 4 KiB to 1 TiB is needed"))
        })?,
    };
    let headroom_bytes = match options.headroom_bytes {
        0 => None,
        VBAR_HEADROOM_NONE => Some(0),
        bytes => Some(bytes),
    };
    let host_allowance = match options.host_allowance_bytes {
        0 => None,
        VBAR_HOST_ALLOWANCE_NONE => Some(0),
        bytes => Some(bytes),
    };
    if options.budget_ppm != 0 && options.budget_bytes != 0 {
        return Err(invalid("budget_bytes and budget_ppm are both given: one of them is expected"));
    }
    let given = |count: u64| (count != 0).then_some(count);
    Ok(RuntimeOptions {
        budget_bytes: given(options.budget_bytes),
        headroom_bytes,
        page_size,
        context: (!options.context.is_null()).then(|| Context(options.context.expose_provenance())),
        eviction: choice("eviction", options.eviction, [Eviction::Aliasing, Eviction::Strict])?,
        context_waits: choice(
            "context_waits",
            options.context_waits,
            [ContextWaits::Allowed, ContextWaits::Never],
        )?,
        wait_timeout: given(options.wait_timeout_ms)
            .map_or(defaults.wait_timeout, Duration::from_millis),
        poison: choice("poison", options.poison, [Poison::Off, Poison::On])?,
        scrub: choice("scrub", options.scrub, [Scrub::Off, Scrub::On])?,
        host_mapped: choice("host_mapped", options.host_mapped, [HostMapped::Off, HostMapped::On])?,
        prefer: choice("prefer", options.prefer, [Prefer::Auto, Prefer::Ram, Prefer::Disk])?,
        host_allowance,
        threads: choice("threads", options.threads, [None, Some(Threads::On), Some(Threads::Off)])?,
        staging_slot_count: match options.staging_slot_count {
            0 => defaults.staging_slot_count,
            count => count as usize,
        },
        ..defaults
    })
}

/// One of two or three, by number.
pub(super) fn choice<T, const N: usize>(name: &str, number: u32, all: [T; N]) -> Result<T> {
    let expected = || match N {
        2 => "0 or 1 is expected".to_owned(),
        _ => format!("0 to {} are expected", N - 1),
    };
    let chosen = all.into_iter().nth(number as usize);
    chosen.ok_or_else(|| invalid(format!("{name} is {number}: {}", expected())))
}

#[cold]
pub(super) fn too_many(kind: &str) -> Error {
    Error::new(ErrorCode::Internal, format!("16.7 million {kind} are open: that is all there are"))
}

/// Closes a device id. What was made with it lives on; the runtime goes with its last id, VBAR and
/// model. Statuses: the common ones. Thread-safe; calls under way on other threads finish.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_close(device: VbarDevice) -> VbarStatus {
    call(|| match DEVICES.close(device.id) {
        true => Ok(()),
        false => Err(stale("device", device.id)),
    })
}

/// Tells what a device is. Statuses: the common ones, the driver's. Thread-safe.
///
/// # Safety
/// `info` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_info(
    device: VbarDevice,
    info: *mut VbarDeviceInfo,
) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(info)?;
        let entry = find(device)?;
        let below = entry.runtime.device();
        out.write(VbarDeviceInfo {
            size: 0,
            ordinal: below.ordinal.0,
            simulated: u32::from(entry.sim.is_some()),
            context: std::ptr::with_exposed_provenance_mut(below.context.0),
            page_bytes: entry.runtime.page_size().bytes(),
            total_bytes: below.driver.device_total_mem(below.ordinal)?,
            name: fixed_text(&below.driver.device_get_name(below.ordinal)?),
            driver: fixed_text(&entry.how),
        });
        Ok(())
    })
}

/// A text cut off to fit, and its closing zero.
fn fixed_text(text: &str) -> [c_char; 256] {
    let mut fixed = [0; 256];
    let cut = text.floor_char_boundary(fixed.len() - 1);
    for (place, byte) in fixed.iter_mut().zip(text[..cut].bytes()) {
        *place = byte as c_char;
    }
    fixed
}

/// Sets the explicit budget in bytes, 0 for an automatic one, and gives back at once what it no
/// longer covers, as far as pins and fences allow. The budget is set also when that fails.
/// Statuses: the common ones, the driver's, `TIMED_OUT` and `CANCELLED` of a wait for the context.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_set_budget(device: VbarDevice, bytes: u64) -> VbarStatus {
    call(|| find(device)?.runtime.set_budget((bytes != 0).then_some(bytes)))
}

/// Sets the headroom in bytes (0 is none here); as `vbar_device_set_budget`. Statuses: those of
/// `vbar_device_set_budget`; `INVALID_ARGUMENT` for more than the device has. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_set_headroom(device: VbarDevice, bytes: u64) -> VbarStatus {
    call(|| find(device)?.runtime.set_headroom(bytes))
}

/// Tells the explicit budget, 0 if there is none, and the headroom, as they were set, in bytes.
/// What may be held now is in `vbar_device_statistics`. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// Both outputs are NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_budget(
    device: VbarDevice,
    budget_bytes: *mut u64,
    headroom_bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let outputs = (Out::new(budget_bytes)?, Out::new(headroom_bytes)?);
        let (budget, headroom) = find(device)?.runtime.budget_settings();
        outputs.0.write(budget.unwrap_or(0));
        outputs.1.write(headroom);
        Ok(())
    })
}

/// Notices pressure now, as the next miss would. Statuses: those of `vbar_device_set_budget`.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_refresh(device: VbarDevice) -> VbarStatus {
    call(|| find(device)?.runtime.refresh())
}

/// Gives frames that no page has back to the driver until at most `keep_bytes` are held, and tells
/// the bytes given back. Statuses: the common ones, the driver's, `CANCELLED`. Thread-safe.
///
/// # Safety
/// `freed_bytes` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_trim(
    device: VbarDevice,
    keep_bytes: u64,
    freed_bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = Out::new(freed_bytes)?;
        out.write(find(device)?.runtime.trim(keep_bytes)?);
        Ok(())
    })
}

/// Gives page-locked host memory back until at most `keep_bytes` are held, or what is left is in
/// use or the last slot, and tells the bytes given back; host frames are none of it. Waits for the
/// device.
/// Statuses: the common ones, the driver's. Thread-safe.
///
/// # Safety
/// `freed_bytes` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_trim_host(
    device: VbarDevice,
    keep_bytes: u64,
    freed_bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = Out::new(freed_bytes)?;
        out.write(find(device)?.runtime.trim_host(keep_bytes)?);
        Ok(())
    })
}

/// Gives host frames back that nobody pins and whose uses are over, and tells their bytes; see
/// `VbarDeviceOptions::host_mapped`. Statuses: the common ones, the driver's. Thread-safe.
///
/// # Safety
/// `freed_bytes` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_trim_host_frames(
    device: VbarDevice,
    freed_bytes: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = Out::new(freed_bytes)?;
        out.write(find(device)?.runtime.trim_host_frames()?);
        Ok(())
    })
}

/// Gives memory of all VBARs back to the driver, lowest rank first; as `vbar_bar_free_memory`.
/// Statuses: the common ones, the driver's, `CANCELLED`; time that runs out is a shortfall.
/// Thread-safe.
///
/// # Safety
/// `freed` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_free_memory(
    device: VbarDevice,
    bytes: u64,
    freed: *mut VbarFreed,
) -> VbarStatus {
    call(|| {
        let out = Out::new(freed)?;
        out.write(find(device)?.runtime.free_memory(bytes)?.into());
        Ok(())
    })
}

/// Tells the library that a stream is about to be destroyed; it must still be valid. Statuses: the
/// common ones, the driver's. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_stream_retire(device: VbarDevice, stream: VbarStream) -> VbarStatus {
    call(|| find(device)?.runtime.retire_stream(Stream(stream)))
}
