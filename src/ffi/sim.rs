//! The simulated device, for tests of programs that use the library: its streams and kernels, its
//! troubles, and what it found. Nothing here works on a real device.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use super::call::{call, invalid, stale};
use super::device::{self, VbarDevice, VbarStream};
use super::status::VbarStatus;
use super::tag;
use super::value::{Growing, Out, OutArray, OutGrowing, Plain, byte_range, read_array, read_text};
use crate::driver::sim::{Sim, Verb};
use crate::driver::{DriverCode, DriverResult, KernelCall, kernel};
use crate::error::{Error, ErrorCode, Result};
use crate::runtime::Runtime;
use crate::slots::{Handles, Ref, Spread};
use crate::units::{DeviceAddress, DeviceOrdinal, Stream};

/// A simulated device, apart from the library's use of it: it outlives the `VbarDevice`, so that a
/// test can look at what was left. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarSim {
    /// The id.
    pub id: u64,
}

/// What of a simulated driver is alive.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarSimLive {
    /// `sizeof(VbarSimLive)`, set by the caller.
    pub size: usize,
    /// Frames: with a handle, a mapping, or both.
    pub frame_count: u64,
    /// Bytes of those frames.
    pub used_bytes: u64,
    /// Reservations.
    pub reservation_count: u64,
    /// Bytes of those reservations.
    pub reserved_bytes: u64,
    /// Mappings.
    pub mapping_count: u64,
    /// Page-locked bytes.
    pub locked_bytes: u64,
    /// Events.
    pub event_count: u64,
    /// Streams.
    pub stream_count: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarSim {}
// SAFETY: integers; the size first.
unsafe impl Plain for VbarSimLive {}
// SAFETY: as above.
unsafe impl Growing for VbarSimLive {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarSimLive, stream_count) + size_of::<u64>();
}
// SAFETY: a byte.
unsafe impl Plain for u8 {}

struct SimEntry {
    sim: Arc<Sim>,
    device: DeviceOrdinal,
}

static SIMS: Handles<SimEntry> = Handles::new(tag::SIM, Spread::One);

fn find(sim: VbarSim) -> Result<Ref<SimEntry>> {
    SIMS.get(sim.id).ok_or_else(|| stale("simulated device", sim.id))
}

/// The simulated device behind an open one. `VBAR_STATUS_UNSUPPORTED` for a real one. Thread-safe.
///
/// # Safety
/// `sim` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_open(device: VbarDevice, sim: *mut VbarSim) -> VbarStatus {
    call(|| {
        let out = Out::new(sim)?;
        let (sim, runtime) = of_device(device)?;
        let entry = SimEntry { sim, device: runtime.ordinal() };
        let id = SIMS.insert(entry).map_err(|_| device::too_many("simulated devices"))?;
        out.write(VbarSim { id });
        Ok(())
    })
}

/// Lets a simulated device go. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_close(sim: VbarSim) -> VbarStatus {
    call(|| match SIMS.close(sim.id) {
        true => Ok(()),
        false => Err(stale("simulated device", sim.id)),
    })
}

/// The simulated device behind an open one.
///
/// # Errors
/// `StaleHandle`; `Unsupported` for a real one.
pub(super) fn of_device(device: VbarDevice) -> Result<(Arc<Sim>, Runtime)> {
    let entry = device::find(device)?;
    let sim = entry.sim.clone().ok_or_else(|| {
        let text = "this device is a real one; open \"sim\" to simulate one";
        Error::new(ErrorCode::Unsupported, text)
    })?;
    Ok((sim, entry.runtime.clone()))
}

/// Runs driver calls of a program on a simulated device, in its context.
///
/// # Errors
/// As [`of_device`]; what the driver says.
pub(super) fn on_device<T>(
    device: VbarDevice,
    work: impl FnOnce(&Arc<Sim>) -> DriverResult<T>,
) -> Result<T> {
    let (sim, runtime) = of_device(device)?;
    let _context = runtime.device().enter_context()?;
    Ok(work(&sim)?)
}

/// Makes a non-blocking stream, as `cuStreamCreate`. Thread-safe.
///
/// # Safety
/// `stream` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_stream_create(
    device: VbarDevice,
    stream: *mut VbarStream,
) -> VbarStatus {
    call(|| {
        let out = Out::new(stream)?;
        out.write(on_device(device, |sim| sim.driver().stream_create())?.0);
        Ok(())
    })
}

/// Destroys a stream; what was enqueued on it still runs. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_destroy(device: VbarDevice, stream: VbarStream) -> VbarStatus {
    call(|| on_device(device, |sim| sim.driver().stream_destroy(Stream(stream))))
}

/// Waits until everything that was enqueued on a stream has run. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_synchronize(
    device: VbarDevice,
    stream: VbarStream,
) -> VbarStatus {
    call(|| on_device(device, |sim| sim.driver().stream_synchronize(Stream(stream))))
}

/// Makes later work on a stream wait for what was enqueued on another one by now, as an event does
/// that is recorded there. The call itself waits for nothing. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_wait(
    device: VbarDevice,
    stream: VbarStream,
    other: VbarStream,
) -> VbarStatus {
    call(|| {
        on_device(device, |sim| {
            let driver = sim.driver();
            let event = driver.event_create()?;
            let ordered = driver
                .event_record(event, Stream(other))
                .and_then(|()| driver.stream_wait_event(Stream(stream), event));
            // What waits keeps the record.
            ordered.and(driver.event_destroy(event))
        })
    })
}

/// Nothing more runs on a stream until `vbar_sim_stream_release`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_hold(device: VbarDevice, stream: VbarStream) -> VbarStatus {
    call(|| on_device(device, |sim| sim.hold_stream(Stream(stream))))
}

/// Lets a held stream go on. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_release(device: VbarDevice, stream: VbarStream) -> VbarStatus {
    call(|| on_device(device, |sim| sim.release_stream(Stream(stream))))
}

/// Enqueues a kernel that reads: it waits `delay_us` microseconds, then adds the checksum of
/// `bytes` bytes at `source` to the 64-bit word at `target`. Both are device addresses, multiples
/// of 8. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_launch_checksum(
    device: VbarDevice,
    source: u64,
    bytes: u64,
    target: u64,
    delay_us: u64,
    stream: VbarStream,
) -> VbarStatus {
    let kernel = KernelCall::Checksum {
        source: DeviceAddress(source),
        bytes,
        first_word: 0,
        delay_nanos: delay_us.saturating_mul(1000),
        target: DeviceAddress(target),
    };
    call(|| launch(device, kernel, stream))
}

/// Enqueues a kernel that writes: it waits `delay_us` microseconds, then writes the pattern of
/// `seed` over `bytes` bytes at `target`, a device address, a multiple of 8. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_launch_pattern(
    device: VbarDevice,
    target: u64,
    bytes: u64,
    seed: u64,
    delay_us: u64,
    stream: VbarStream,
) -> VbarStatus {
    let kernel = KernelCall::Pattern {
        target: DeviceAddress(target),
        bytes,
        seed,
        delay_nanos: delay_us.saturating_mul(1000),
    };
    call(|| launch(device, kernel, stream))
}

/// Enqueues a kernel that waits `delay_us` microseconds and touches nothing. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_launch_sleep(
    device: VbarDevice,
    delay_us: u64,
    stream: VbarStream,
) -> VbarStatus {
    let delay_nanos = delay_us.saturating_mul(1000);
    let kernel = KernelCall::Pattern { target: DeviceAddress(0), bytes: 0, seed: 0, delay_nanos };
    call(|| launch(device, kernel, stream))
}

fn launch(device: VbarDevice, kernel: KernelCall, stream: VbarStream) -> Result<()> {
    on_device(device, |sim| {
        load_kernels(sim)?;
        sim.driver().launch_kernel(kernel, Stream(stream))
    })
}

/// Loads the kernels into the current context, once: a second time would break captures.
///
/// # Errors
/// What the driver says.
pub(super) fn load_kernels(sim: &Arc<Sim>) -> DriverResult<()> {
    if sim.has_module() { Ok(()) } else { sim.driver().module_load() }
}

/// Enqueues a copy from host to device, as `cuMemcpyHtoDAsync`: `source` stays as it is until the
/// copy has run. Thread-safe.
///
/// # Safety
/// `source` has `bytes` readable bytes until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_copy_to_device(
    device: VbarDevice,
    target: u64,
    source: *const c_void,
    bytes: usize,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        read_array(source.cast::<u8>(), bytes)?;
        on_device(device, |sim| {
            let (target, stream) = (DeviceAddress(target), Stream(stream));
            // SAFETY: as the caller promises.
            unsafe { sim.driver().memcpy_htod_async(target, source.cast(), bytes, stream) }
        })
    })
}

/// Enqueues a copy from device to host, as `cuMemcpyDtoHAsync`: `target` is not touched until the
/// copy has run. Thread-safe.
///
/// # Safety
/// `target` has `bytes` writable bytes until then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_copy_to_host(
    device: VbarDevice,
    target: *mut c_void,
    source: u64,
    bytes: usize,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        OutArray::new(target.cast::<u8>(), bytes)?;
        on_device(device, |sim| {
            let (source, stream) = (DeviceAddress(source), Stream(stream));
            // SAFETY: as the caller promises.
            unsafe { sim.driver().memcpy_dtoh_async(target.cast(), source, bytes, stream) }
        })
    })
}

/// Copies the bytes at a mapped device address to the host, now, whatever streams do. Thread-safe.
///
/// # Safety
/// `target` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_peek(
    sim: VbarSim,
    address: u64,
    target: *mut c_void,
    bytes: usize,
) -> VbarStatus {
    call(|| {
        let out = OutArray::new(target.cast::<u8>(), bytes)?;
        let entry = find(sim)?;
        let end = byte_range(address, bytes as u64)?.end;
        // In pieces: a size that is a mistake must not take as much memory before it is told.
        let mut at = address;
        while at < end {
            let piece = PEEK_BYTES.min(end - at);
            let read = entry.sim.read_bytes(DeviceAddress(at), piece as usize)?;
            out.write_from((at - address) as usize, read);
            at += piece;
        }
        Ok(())
    })
}

/// Bytes that a peek reads at a time.
const PEEK_BYTES: u64 = 1 << 20;

/// The checksum of bytes of the host, as `vbar_sim_launch_checksum` computes it; 0 for none.
/// Thread-safe.
///
/// # Safety
/// `source` has `bytes` readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_checksum(source: *const c_void, bytes: usize) -> u64 {
    read_array(source.cast::<u8>(), bytes).map_or(0, |bytes| kernel::checksum(bytes, 0))
}

/// Writes to the host what `vbar_sim_launch_pattern` writes on the device. Thread-safe.
///
/// # Safety
/// `target` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_pattern(
    target: *mut c_void,
    bytes: usize,
    seed: u64,
) -> VbarStatus {
    call(|| {
        let out = OutArray::new(target.cast::<u8>(), bytes)?;
        let words =
            (0..bytes.div_ceil(8)).flat_map(|at| kernel::mix(seed, at as u64).to_le_bytes());
        out.write(words);
        Ok(())
    })
}

/// Sets how many bytes of the device other programs use from now on. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_set_outside_bytes(sim: VbarSim, bytes: u64) -> VbarStatus {
    call(|| {
        let entry = find(sim)?;
        entry.sim.set_outside_bytes(entry.device, bytes);
        Ok(())
    })
}

/// Lets `count` calls of a driver verb fail with `code` (a `CUresult`), after `skip` good ones;
/// `count` UINT64_MAX is all of them. A verb is the CUDA call, "cuMemMap", or "mem_map".
/// Thread-safe.
///
/// # Safety
/// `verb` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_fail(
    sim: VbarSim,
    verb: *const c_char,
    skip: u64,
    count: u64,
    code: i32,
) -> VbarStatus {
    call(|| {
        let (verb, code) = (verb_of(verb)?, failure(code)?);
        find(sim)?.sim.fail(verb, skip, count, code);
        Ok(())
    })
}

/// Lets memory, copy and event calls fail with this probability, by `seed`, with out-of-memory or
/// not-ready as each may. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_fail_rate(sim: VbarSim, probability: f64, seed: u64) -> VbarStatus {
    call(|| {
        if !(0.0..=1.0).contains(&probability) {
            return Err(invalid(format!("a probability of {probability}")));
        }
        find(sim)?.sim.fail_rate(probability, seed);
        Ok(())
    })
}

/// Ends all failures. A lost device stays lost. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_heal(sim: VbarSim) -> VbarStatus {
    call(|| {
        find(sim)?.sim.heal();
        Ok(())
    })
}

/// Loses the device: every later call that touches it returns `code` (a `CUresult`). Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_lose_device(sim: VbarSim, code: i32) -> VbarStatus {
    call(|| {
        let (code, entry) = (failure(code)?, find(sim)?);
        entry.sim.lose_device(entry.device, code);
        Ok(())
    })
}

fn failure(code: i32) -> Result<DriverCode> {
    if code == 0 {
        return Err(invalid("code 0 is success"));
    }
    Ok(DriverCode(code))
}

/// Tells how often a verb was called, failed calls included. Thread-safe.
///
/// # Safety
/// `verb` is NULL or a C string; `count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_calls(
    sim: VbarSim,
    verb: *const c_char,
    count: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = Out::new(count)?;
        out.write(find(sim)?.sim.calls(verb_of(verb)?));
        Ok(())
    })
}

fn verb_of(verb: *const c_char) -> Result<Verb> {
    let text = read_text(verb)?.ok_or_else(|| invalid("a verb is NULL"))?;
    let called = Verb::ALL.iter().find(|verb| verb.call() == text);
    called.map_or_else(|| text.parse().map_err(invalid), |verb| Ok(*verb))
}

/// Tells what is alive. Thread-safe.
///
/// # Safety
/// `live` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_live(sim: VbarSim, live: *mut VbarSimLive) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(live)?;
        let entry = find(sim)?;
        let sim = &entry.sim;
        out.write(VbarSimLive {
            size: 0,
            frame_count: sim.live_frames(entry.device),
            used_bytes: sim.used_bytes(entry.device),
            reservation_count: sim.live_reservations() as u64,
            reserved_bytes: sim.reserved_bytes(),
            mapping_count: sim.live_mappings() as u64,
            locked_bytes: sim.locked_bytes(),
            event_count: sim.live_events() as u64,
            stream_count: sim.live_streams() as u64,
        });
        Ok(())
    })
}

/// Tells how many breaches of CUDA's contract were found: races between streams, uses of what is
/// not mapped, unmapping under pending work. Thread-safe.
///
/// # Safety
/// `count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_violation_count(sim: VbarSim, count: *mut u64) -> VbarStatus {
    call(|| {
        let out = Out::new(count)?;
        out.write(find(sim)?.sim.violations().len() as u64);
        Ok(())
    })
}

/// Tells a breach by its index, from 0: a sentence with the page's history, cut off at `capacity`
/// bytes, the closing zero included. Thread-safe.
///
/// # Safety
/// `text` has room for `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_violation(
    sim: VbarSim,
    index: u64,
    text: *mut c_char,
    capacity: usize,
) -> VbarStatus {
    call(|| {
        let out = OutArray::new(text, capacity)?;
        if capacity == 0 {
            return Err(invalid("a sentence needs room"));
        }
        let violations = find(sim)?.sim.violations();
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let told = violations.get(index).ok_or_else(|| {
            let text = format!("{} violations, none has index {index}", violations.len());
            Error::new(ErrorCode::NotFound, text)
        })?;
        let cut = told.floor_char_boundary(capacity - 1);
        out.write(told[..cut].bytes().chain([0]).map(|byte| byte as c_char));
        Ok(())
    })
}
