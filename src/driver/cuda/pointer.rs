//! What the driver knows of an address.

#![expect(unsafe_code, reason = "calls the driver through a function pointer")]

use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;

use super::check;
use crate::driver::DriverResult;
use crate::driver::sys::{
    Api, CU_MEMORYTYPE_HOST, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
};

/// The page-locked range of the host that the address lies in. A driver (580, CUDA 13.0) answers
/// with exactly what was allocated or registered, ranges that touch each other apart; of an address
/// that it does not know it says success and a type of 0. Managed memory may be anywhere.
pub(super) fn host_range(api: &Api, address: u64) -> DriverResult<Option<Range<u64>>> {
    let (mut kind, mut managed): (c_uint, c_uint) = (0, 0);
    let (mut start, mut bytes) = (0u64, 0usize);
    let mut attributes: [c_int; 4] = [
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ];
    let mut places: [*mut c_void; 4] = [
        (&raw mut kind).cast(),
        (&raw mut managed).cast(),
        (&raw mut start).cast(),
        (&raw mut bytes).cast(),
    ];
    // SAFETY: four attributes, and four places of the sizes that cuda.h says they have.
    let code = unsafe {
        (api.cuPointerGetAttributes)(4, attributes.as_mut_ptr(), places.as_mut_ptr(), address)
    };
    check("cuPointerGetAttributes", code)?;
    let range = start..start.saturating_add(bytes as u64);
    let known = kind == CU_MEMORYTYPE_HOST && managed == 0 && range.contains(&address);
    Ok(known.then_some(range))
}
