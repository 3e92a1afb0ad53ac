//! Device addresses of VBARs: real reservations, and stand-ins where there can be none.
//!
//! A reservation costs nothing until pages are mapped. Where the driver cannot reserve, a VBAR
//! still gets addresses, so that its program runs with every fault offloaded: they are distinct,
//! from a range that no device maps (non-canonical: bit 63 set, bit 62 clear), process-wide.

use crate::driver::{Driver, DriverCode};
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};
use crate::units::{DeviceAddress, PageSize};

/// A range of addresses that belongs to one VBAR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// First address, a multiple of the page size.
    pub base: DeviceAddress,
    /// Length, whole pages.
    pub bytes: u64,
    /// Whether pages can be mapped in it.
    pub kind: SpaceKind,
}

/// See [`Space::kind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SpaceKind {
    /// A reservation of the driver.
    Reserved,
    /// Stand-in addresses: every fault is offloaded.
    Unreserved,
}

/// Reserves `bytes`, whole pages. Without address space, or without virtual memory management,
/// the space is a stand-in.
///
/// # Errors
/// Driver codes other than those two.
pub fn reserve(driver: &dyn Driver, bytes: u64, page_size: PageSize) -> Result<Space> {
    match driver.mem_address_reserve(bytes, page_size.bytes()) {
        Ok(base) => Ok(Space { base, bytes, kind: SpaceKind::Reserved }),
        Err(error)
            if matches!(
                error.code,
                DriverCode::OUT_OF_MEMORY | DriverCode::NOT_SUPPORTED | DriverCode::INVALID_VALUE
            ) =>
        {
            log::warn!("no addresses for a VBAR of {bytes} bytes ({error}): it will be offloaded");
            Ok(stand_in(bytes))
        }
        Err(error) => Err(Error::from(error).context(format!("reserving {bytes} bytes"))),
    }
}

/// Addresses that nothing maps.
#[must_use]
pub fn stand_in(bytes: u64) -> Space {
    static NEXT: AtomicU64 = AtomicU64::new(0x8000_0000_0000_0000);
    let base = DeviceAddress(NEXT.fetch_add(bytes, Ordering::Relaxed));
    Space { base, bytes, kind: SpaceKind::Unreserved }
}

/// Frees a space with nothing mapped in it.
///
/// # Errors
/// What the driver says; the addresses are lost then.
pub fn free(driver: &dyn Driver, space: Space) -> Result<()> {
    match space.kind {
        SpaceKind::Reserved => Ok(driver.mem_address_free(space.base, space.bytes)?),
        SpaceKind::Unreserved => Ok(()),
    }
}
