//! PyTorch's devices: opened on first use, and kept until the process ends.
//!
//! One allocator for each ordinal, found without a lock once it is there. PyTorch may free a tensor
//! at any later time, so nothing here is ever closed or dropped. The runtime is the one that the
//! program's own weights of the device are in.

use std::sync::{Arc, OnceLock};

use super::super::device::{self, DeviceEntry, Opening};
use crate::driver::select::{self, Selection};
use crate::error::{Error, ErrorCode, Result};
use crate::options::{ContextWaits, RuntimeOptions};
use crate::process;
use crate::sync::{AtomicU32, Mutex, Ordering};
use crate::torch::{Allocator, Freed};
use crate::units::DeviceOrdinal;

/// More than PyTorch counts to.
const DEVICES_MAX: usize = 128;

static DEVICES: [OnceLock<TorchDevice>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];
/// Above every ordinal that is open.
static END: AtomicU32 = AtomicU32::new(0);
/// How devices are opened from now on; held while one is.
static OPENING: Mutex<Option<Opening>> = Mutex::new(None);

/// A device that PyTorch allocates on.
pub(super) struct TorchDevice {
    pub(super) entry: DeviceEntry,
    pub(super) allocator: Arc<Allocator>,
}

/// The device of an ordinal, which is opened when it is not.
///
/// # Errors
/// Those of opening a device.
#[inline]
pub(super) fn device(ordinal: i32) -> Result<&'static TorchDevice> {
    match opened(ordinal) {
        Some(device) => Ok(device),
        None => open(ordinal),
    }
}

/// The device of an ordinal if it is open.
#[inline]
pub(super) fn opened(ordinal: i32) -> Option<&'static TorchDevice> {
    DEVICES.get(usize::try_from(ordinal).ok()?)?.get()
}

/// All devices that are open.
pub(super) fn all() -> impl Iterator<Item = &'static TorchDevice> {
    let end = END.load(Ordering::Acquire) as usize;
    DEVICES[..end].iter().filter_map(OnceLock::get)
}

/// Sets how devices are opened from now on, and applies it to those that are open.
///
/// # Errors
/// `InvalidArgument` for a context or an ordinal, which PyTorch has the say of; what applying says.
pub(super) fn configure(opening: Opening) -> Result<()> {
    let asked = if opening.options.context.is_some() { "context" } else { "ordinal" };
    if opening.options.context.is_some() || opening.ordinal.0 != 0 {
        let text = format!("options with a {asked}: PyTorch has its own");
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    }
    let _entering = process::entering();
    let mut current = OPENING.lock();
    for ordinal in 0..END.load(Ordering::Acquire) {
        if DEVICES[ordinal as usize].get().is_some() {
            of_ordinal(opening.clone(), DeviceOrdinal(ordinal)).open()?;
        }
    }
    *current = Some(opening);
    Ok(())
}

#[cold]
fn open(ordinal: i32) -> Result<&'static TorchDevice> {
    process::check()?;
    let place = usize::try_from(ordinal).ok().and_then(|ordinal| DEVICES.get(ordinal));
    let Some(place) = place else {
        let text = format!("device {ordinal}: 0 to {} are expected", DEVICES_MAX - 1);
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    };
    let _entering = process::entering();
    let configured = OPENING.lock();
    if let Some(device) = place.get() {
        return Ok(device);
    }
    let ordinal = DeviceOrdinal(ordinal.unsigned_abs());
    let entry = match configured.clone() {
        Some(opening) => of_ordinal(opening, ordinal).open()?,
        None => of_ordinal(unasked()?, ordinal).open()?,
    };
    if entry.runtime.device().ordinal != ordinal {
        let text = format!("PyTorch's device {ordinal} is another one: name the driver alone");
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    }
    let allocator = entry.runtime.torch_allocator()?;
    let device = place.get_or_init(|| TorchDevice { entry, allocator });
    // Under the lock: nobody else raises it.
    END.store(END.load(Ordering::Relaxed).max(ordinal.0 + 1), Ordering::Release);
    Ok(device)
}

/// What is opened when nobody has said how.
fn unasked() -> Result<Opening> {
    let selection = select::from_environment().unwrap_or(Ok(Selection::Cuda(DeviceOrdinal(0))))?;
    // PyTorch captures graphs, which a wait for the whole context would break.
    let options = RuntimeOptions { context_waits: ContextWaits::Never, ..Default::default() };
    let ordinal = DeviceOrdinal(0);
    Ok(Opening {
        selection,
        ordinal,
        options,
        wait_timeout: None,
        budget_ppm: None,
        any_pages: true,
    })
}

/// The same for another device, by PyTorch's number, which is the driver's: an index in a driver's
/// name says nothing.
fn of_ordinal(opening: Opening, ordinal: DeviceOrdinal) -> Opening {
    let selection = match opening.selection {
        Selection::Cuda(_) => Selection::Cuda(ordinal),
        other => other,
    };
    Opening { selection, ordinal, ..opening }
}

/// Frees a block on the device that has it. Neither its size nor its device are asked for: PyTorch
/// 2.8 tells those of another tensor when an address is used a second time.
pub(super) fn free(address: u64, ordinal: i32) -> Freed {
    match holder(address, ordinal) {
        Some(device) => device.allocator.free(address),
        None => Freed::Unknown,
    }
}

/// Who has a block: the one device that is open, or the one whose it is; the one that was named
/// when it is nobody's, so that somebody counts it.
pub(super) fn holder(address: u64, ordinal: i32) -> Option<&'static TorchDevice> {
    let end = END.load(Ordering::Acquire);
    if end <= 1 {
        return DEVICES[0].get();
    }
    let owner = all().find(|device| device.allocator.owns(address));
    owner.or_else(|| opened(ordinal)).or_else(|| all().next())
}

/// An id of the program's for the device.
///
/// # Errors
/// Those of opening a device.
pub(super) fn hand_out(ordinal: i32) -> Result<device::VbarDevice> {
    device::hand_out(device(ordinal)?.entry.clone())
}
