//! Which device reaches which, and what a stream is of.

#![expect(unsafe_code, reason = "calls the driver through function pointers")]

use std::ffi::c_int;

use super::{Cuda, output, present, real};
use crate::driver::{Context, DriverResult};
use crate::units::{DeviceOrdinal, Stream};

/// Whether `device` can reach the memory of `peer`.
pub(super) fn can_access_peer(
    cuda: &Cuda,
    device: DeviceOrdinal,
    peer: DeviceOrdinal,
) -> DriverResult<bool> {
    const CALL: &str = "cuDeviceCanAccessPeer";
    let (device, peer) = (cuda.device(CALL, device)?.handle, cuda.device(CALL, peer)?.handle);
    let able: c_int = output(CALL, |able| {
        // SAFETY: `able` is a valid place for the result; both are devices of the driver's.
        unsafe { (cuda.api.cuDeviceCanAccessPeer)(able, device, peer) }
    })?;
    Ok(able != 0)
}

/// A stream's number.
pub(super) fn stream_id(cuda: &Cuda, stream: Stream) -> DriverResult<u64> {
    const CALL: &str = "cuStreamGetId";
    let stream = real(CALL, stream)?;
    let get_id = present(CALL, cuda.api.cuStreamGetId)?;
    output(CALL, |id| {
        // SAFETY: `id` is a valid place for the result; a live stream.
        unsafe { get_id(stream, id) }
    })
}

/// The context that a stream was created in.
pub(super) fn stream_context(cuda: &Cuda, stream: Stream) -> DriverResult<Context> {
    const CALL: &str = "cuStreamGetCtx";
    let stream = real(CALL, stream)?;
    let context = output(CALL, |context| {
        // SAFETY: `context` is a valid place for the result; a live stream.
        unsafe { (cuda.api.cuStreamGetCtx)(stream, context) }
    })?;
    Ok(Context(context))
}
