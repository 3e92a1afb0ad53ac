//! Waits: how long they may last, and who ends them.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::c_void;
use std::ops::ControlFlow;
use std::time::Duration;

use super::call::{call, call_in_handler};
use super::device::{self, VbarDevice};
use super::status::VbarStatus;
use crate::sync::wait::{WaitCheck, set_wait_check};

/// Sets the longest time that one call waits for one kind of thing, in milliseconds, for waits that
/// start afterwards. 0 is no waiting at all here, UINT64_MAX no limit. Statuses: the common ones.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_set_wait_timeout(
    device: VbarDevice,
    milliseconds: u64,
) -> VbarStatus {
    call(|| {
        device::find(device)?.runtime.set_wait_timeout(Duration::from_millis(milliseconds));
        Ok(())
    })
}

/// Asked on the thread that waits, about every 5 ms while it waits, with no lock held; anything but
/// 0 ends the wait with `VBAR_STATUS_CANCELLED`. It must not throw or jump out.
pub type VbarWaitCheck = Option<unsafe extern "C" fn(user: *mut c_void) -> i32>;

/// Has the calling thread's waits ask `check`; NULL ends that. It concerns this thread alone, on
/// all devices. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// The thread may call `check` with `user` until another one is set, or it ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_thread_set_wait_check(
    check: VbarWaitCheck,
    user: *mut c_void,
) -> VbarStatus {
    call(|| {
        let check = check.map(|check| -> WaitCheck {
            // SAFETY: as the caller promises; the check stays on this thread.
            Box::new(move || match unsafe { check(user) } {
                0 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            })
        });
        set_wait_check(check);
        Ok(())
    })
}

/// Ends every wait that is under way on the device with `VBAR_STATUS_CANCELLED`; later ones are not
/// touched. Statuses: the common ones. Thread-safe. For another thread than the one that waits, or
/// for a handler of a signal: of all functions this one may be called there, with a device that
/// nobody closes meanwhile, on a thread that has called the library before.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_device_cancel_waits(device: VbarDevice) -> VbarStatus {
    call_in_handler(|| {
        device::find(device)?.runtime.cancel_waits();
        Ok(())
    })
}
