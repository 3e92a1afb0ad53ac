//! Bytes that a program writes into a VBAR, and the library keeps a copy of.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::bar::{self, VbarBar};
use super::call::call;
use super::device::VbarStream;
use super::status::VbarStatus;
use super::value::byte_range;
use crate::units::Stream;

/// Takes page-locked memory for bytes of a VBAR that is not bound, to save them once they are
/// written. From here on the watermark does not keep them out: they come and go as those of a bound
/// VBAR do. Again: does nothing. Ranges may share pages and must not overlap. Statuses: the common
/// ones, the driver's, `CLOSED`, `TIMED_OUT`, `CANCELLED`; `HOST_MEMORY` where the allowance for
/// page-locked memory has no room or the system is short of memory; `INVALID_ARGUMENT` for no
/// bytes, a range outside the VBAR or over another one, and a bound VBAR. Memory is locked many
/// ranges at a time, which stops launches for some milliseconds: by a thread ahead of need where
/// the device has threads, so that this waits for what is left of that at most, else in this call.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_prepare_save(bar: VbarBar, bar_offset: u64, bytes: u64) -> VbarStatus {
    call(|| bar::find(bar)?.vbar.prepare_save(byte_range(bar_offset, bytes)?))
}

/// Saves bytes that were prepared and are pinned, as they are behind what was enqueued on `stream`;
/// unpin them on that stream afterwards. The copy is made on a stream of the library's own: what is
/// enqueued on `stream` later does not wait for it, and their memory is not used otherwise before
/// it is done. From now on their pages come back with these bytes, ahead of need where the device
/// has threads: `VbarFault::signature` changes as ever, the bytes do not. Until
/// `vbar_bar_drop_save` nobody writes them. Statuses: the common ones, the driver's, `CLOSED`;
/// `UNSUPPORTED` for a stream that is being captured; `INVALID_ARGUMENT` for no stream, and for
/// what is not pinned, was not prepared or is saved already. Where the copy failed they are not
/// prepared any more; nobody writes them before `vbar_bar_drop_save` then either, since it may have
/// begun. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_save(
    bar: VbarBar,
    bar_offset: u64,
    bytes: u64,
    stream: VbarStream,
) -> VbarStatus {
    call(|| bar::find(bar)?.vbar.save(byte_range(bar_offset, bytes)?, Stream(stream)))
}

/// Forgets what was saved of bytes of a VBAR, the same ones, and gives their memory back; pages
/// keep them as long as they are resident. Waits for the copies to and from that memory, so whoever
/// has pinned them may write them on any stream that comes after their uses. Where the wait failed
/// nobody may write them before another call for them has waited. Does nothing where nothing was
/// prepared, and no copy is left to wait for. Statuses: the common ones, the driver's, `TIMED_OUT`,
/// `CANCELLED`; forgotten all the same. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_drop_save(bar: VbarBar, bar_offset: u64, bytes: u64) -> VbarStatus {
    call(|| bar::find(bar)?.vbar.drop_save(byte_range(bar_offset, bytes)?))
}
