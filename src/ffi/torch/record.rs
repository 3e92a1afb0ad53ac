//! Records of what PyTorch asks for, as texts that can be replayed.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::c_char;

use super::super::call::call;
use super::super::status::VbarStatus;
use super::super::value::{Out, read_path};
use super::table;

/// Writes what PyTorch asks of a device for from now on to the file at `path`, which it replaces,
/// opening the device as an allocation would. Lines `malloc ID BYTES STREAM`, `record ID STREAM`
/// (the block is used on another stream too) and `free ID`, in order; what lives now comes first,
/// streams are numbered as they appear, 0 is the default one. It goes on until
/// `vbar_torch_record_stop`; what a process that ends before has not written is lost. Statuses: IO,
/// INVALID_ARGUMENT also while the device is being recorded, and those of `vbar_device_open`.
/// Thread-safe.
///
/// # Safety
/// `path` is NULL or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_record_start(ordinal: i32, path: *const c_char) -> VbarStatus {
    call(|| {
        let path = read_path(path)?;
        table::device(ordinal)?.allocator.start_recording(path)
    })
}

/// Ends the record of a device, and tells how many events it has: all of them are in the file then.
/// `event_count` may be NULL. Statuses: IO, when the file could not be written to its end;
/// INVALID_ARGUMENT also when the device is not being recorded; those of `vbar_device_open`.
/// Thread-safe.
///
/// # Safety
/// `event_count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_record_stop(ordinal: i32, event_count: *mut u64) -> VbarStatus {
    call(|| {
        let out = if event_count.is_null() { None } else { Some(Out::new(event_count)?) };
        let recorded = table::device(ordinal)?.allocator.stop_recording()?;
        if let Some(out) = out {
            out.write(recorded);
        }
        Ok(())
    })
}
