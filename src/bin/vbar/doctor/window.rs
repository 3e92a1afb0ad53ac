//! A stretch of device memory for the doctor's own use, and the context that it is made in.
//!
//! Owns both and gives them back: the thread's context is what it was, and nothing stays mapped.
//! What cannot be given back is told in the log.

use std::sync::Arc;

use vbar::driver::{Context, Driver, DriverResult, FrameHandle};
use vbar::units::{DeviceAddress, DeviceOrdinal};

/// The primary context of a device, current on the thread until it is dropped.
pub(super) struct CurrentContext {
    driver: Arc<dyn Driver>,
    device: DeviceOrdinal,
    before: Option<Context>,
}

impl CurrentContext {
    pub(super) fn new(driver: &Arc<dyn Driver>, device: DeviceOrdinal) -> DriverResult<Self> {
        let before = driver.ctx_get_current()?;
        let context = driver.device_primary_ctx_retain(device)?;
        // From here on it is released, whatever happens.
        let current = Self { driver: Arc::clone(driver), device, before };
        driver.ctx_set_current(Some(context))?;
        Ok(current)
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        told(self.driver.ctx_set_current(self.before));
        told(self.driver.device_primary_ctx_release(self.device));
    }
}

/// Mapped device memory. The context must be current while it lives, and no work pending on it when
/// it is dropped.
pub(super) struct Window {
    driver: Arc<dyn Driver>,
    pub(super) address: DeviceAddress,
    bytes: u64,
    frame: Option<FrameHandle>,
    mapped: bool,
}

impl Window {
    /// `bytes`, a multiple of the granularity.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceOrdinal,
        bytes: u64,
    ) -> DriverResult<Self> {
        let address = driver.mem_address_reserve(bytes, 0)?;
        let driver = Arc::clone(driver);
        // Whatever fails below, what was made before is given back.
        let mut window = Self { driver, address, bytes, frame: None, mapped: false };
        let frame = window.driver.mem_create(device, bytes)?;
        window.frame = Some(frame);
        window.driver.mem_map(address, bytes, frame)?;
        window.mapped = true;
        window.driver.mem_set_access(address, bytes, &[device])?;
        Ok(window)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.mapped {
            told(self.driver.mem_unmap(self.address, self.bytes));
        }
        if let Some(frame) = self.frame {
            told(self.driver.mem_release(frame));
        }
        told(self.driver.mem_address_free(self.address, self.bytes));
    }
}

/// Giving back is all that is left to do: an error of it is no reason to stop.
pub(super) fn told(result: DriverResult<()>) {
    if let Err(error) = result {
        log::warn!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use vbar::driver::DriverCode;
    use vbar::driver::sim::{Sim, SimOptions, Verb};

    use super::*;

    const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

    #[track_caller]
    fn check_nothing_is_left(sim: &Arc<Sim>, before: Option<Context>) {
        assert_eq!((sim.live_frames(DEVICE), sim.live_mappings()), (0, 0));
        assert_eq!(sim.live_reservations(), 0);
        assert_eq!(sim.ctx_get_current(), Ok(before));
        assert_eq!(sim.violations(), Vec::<String>::new());
    }

    #[test]
    fn everything_is_given_back_whichever_call_fails() {
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K,devices=2").unwrap());
        let driver = sim.driver();
        // Somebody else's context is current.
        let other = driver.device_primary_ctx_retain(DeviceOrdinal(1)).unwrap();
        driver.ctx_set_current(Some(other)).unwrap();
        let verbs = [
            Verb::DevicePrimaryCtxRetain,
            Verb::CtxSetCurrent,
            Verb::MemAddressReserve,
            Verb::MemCreate,
            Verb::MemMap,
            Verb::MemSetAccess,
        ];
        for verb in verbs {
            sim.fail_nth(verb, 1, DriverCode::OUT_OF_MEMORY);
            let made = CurrentContext::new(&driver, DEVICE).and_then(|context| {
                Window::new(&driver, DEVICE, 64 << 10)?;
                drop(context);
                Ok(())
            });
            assert!(made.is_err(), "{verb}");
            check_nothing_is_left(&sim, Some(other));
        }
        let context = CurrentContext::new(&driver, DEVICE).unwrap();
        drop(Window::new(&driver, DEVICE, 64 << 10).unwrap());
        drop(context);
        check_nothing_is_left(&sim, Some(other));
        // The doctor's own hold on the context is gone: the last one releases it.
        assert!(driver.device_primary_ctx_release(DEVICE).is_err());
    }
}
