//! Copies that a program asks for itself, between files, its memory and device addresses.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::call::{call, invalid};
use super::device::{self, VbarDevice, VbarStream};
use super::source;
use super::status::VbarStatus;
use super::value::byte_range;
use crate::error::{Error, ErrorCode, Result};
use crate::units::{DeviceAddress, Stream};

/// Reads bytes of an open file through page-locked memory and enqueues their copies to the device
/// address `target` on `stream`, in order. Returns when the last copy is enqueued: the file may be
/// changed or closed then, the bytes are there for work on `stream`. Whatever is behind `target`,
/// pinned pages as a rule, stays until the copies are done. Statuses: the common ones, the
/// driver's, `IO`, `TIMED_OUT`, `CANCELLED`, `HOST_MEMORY` for the staging slots, `UNSUPPORTED` for
/// a stream that is being captured; `INVALID_ARGUMENT` for no stream, a negative descriptor, and
/// ranges past 2^64. After a failure copies may run that came before it.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_read_file(
    device: VbarDevice,
    descriptor: i32,
    file_offset: u64,
    bytes: u64,
    target: u64,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        let (entry, range) = (device::find(device)?, byte_range(file_offset, bytes)?);
        let target = address(target, &range)?;
        let file = Arc::new(File::from(source::duplicate(descriptor)?));
        entry.runtime.read_file(&file, range, target, Stream(stream))
    })
}

/// Writes `bytes` from the device address `source` on to an open file, as they are behind what was
/// enqueued on `stream`. Returns when the file has them. Statuses: those of
/// `vbar_device_read_file`. After a failure a part of them may have been written. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_write_file(
    device: VbarDevice,
    descriptor: i32,
    file_offset: u64,
    bytes: u64,
    source: u64,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        let (entry, range) = (device::find(device)?, byte_range(file_offset, bytes)?);
        let source = address(source, &range)?;
        let file = File::from(source::duplicate(descriptor)?);
        entry.runtime.write_file(&file, range, source, Stream(stream))
    })
}

/// Enqueues a copy of `bytes` of host memory to the device address `target` on `stream`. From
/// page-locked memory the device reads by itself: `memory` stays, unchanged, until that is done.
/// Other memory is read before the call returns. Statuses: the common ones, the driver's;
/// `INVALID_ARGUMENT` for no stream. Thread-safe.
///
/// # Safety
/// `memory` is NULL, or `bytes` of it can be read until the copy is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_copy_from_host(
    device: VbarDevice,
    memory: *const c_void,
    bytes: u64,
    target: u64,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        let target = address(target, &byte_range(memory.addr() as u64, bytes)?)?;
        let (entry, stream) = (device::find(device)?, Stream(stream));
        if stream.is_none() || (memory.is_null() && bytes > 0) {
            return Err(invalid("a copy needs memory and a stream"));
        }
        let length = usize::try_from(bytes).map_err(|_| invalid("more bytes than addresses"))?;
        let source = memory.cast();
        entry.runtime.within(|driver| match length {
            0 => Ok(()),
            // SAFETY: as the caller promises.
            _ => unsafe { driver.memcpy_htod_async(target, source, length, stream) },
        })
    })
}

/// A device address that as many bytes may begin at as a range has.
fn address(first: u64, range: &Range<u64>) -> Result<DeviceAddress> {
    byte_range(first, range.end - range.start)?;
    Ok(DeviceAddress(first))
}

/// Page-locks memory of the program's (`cuMemHostRegister`), so that the device may read and write
/// it directly. It is the program's own all the same, and no part of the allowance. Kernels are
/// not started meanwhile. Statuses: the common ones, the driver's, also for memory that is locked
/// already and pages of a file; `INVALID_ARGUMENT` for no bytes. Thread-safe.
///
/// # Safety
/// `memory` is NULL, or `bytes` of it are mapped and stay so until `vbar_device_unlock_host`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_lock_host(
    device: VbarDevice,
    memory: *mut c_void,
    bytes: u64,
) -> VbarStatus {
    call(|| {
        let entry = device::find(device)?;
        let range = byte_range(memory.addr() as u64, bytes)?;
        let length = usize::try_from(range.end - range.start).ok().filter(|length| *length > 0);
        let (Some(memory), Some(length)) = (NonNull::new(memory.cast::<u8>()), length) else {
            return Err(invalid("no memory to lock"));
        };
        // SAFETY: as the caller promises.
        entry.runtime.within(|driver| unsafe { driver.mem_host_register(memory, length) })
    })
}

/// Ends the page-lock of memory of the program's that begins at `memory`, whoever locked it in this
/// process: `vbar_device_lock_host`, `cuMemHostRegister`, `cudaHostRegister`. Waits for running
/// kernels; no copy of it is pending. Statuses: the common ones, the driver's; `NOT_FOUND` where no
/// locked range begins there, or one that the library has locked for itself. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_unlock_host(device: VbarDevice, memory: *mut c_void) -> VbarStatus {
    call(|| {
        let entry = device::find(device)?;
        match NonNull::new(memory.cast::<u8>()) {
            Some(start) if entry.runtime.unlock_host(start)? => Ok(()),
            _ => {
                let text = format!("no locked range of the program's begins at {memory:?}");
                Err(Error::new(ErrorCode::NotFound, text))
            }
        }
    })
}
