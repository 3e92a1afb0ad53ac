//! DLPack: faulted bytes for other libraries, with pins of their own.
//!
//! Owns the structs of DLPack 1.1 (dlpack.h of its project), with and without a version, and their
//! deleters, which give one token back. Faults nothing: whoever exports has faulted for it.
//! Capsules of Python are in `capsule`.

#![expect(unsafe_code, reason = "structs that other libraries own, and exported symbols")]

use std::ffi::c_void;

use super::call::{call, invalid};
use super::device::{VbarStream, choice};
use super::model::VbarDtype;
use super::status::VbarStatus;
use super::token::{self, VbarToken};
use super::value::{Growing, Out, Plain, read_array, read_growing};
use crate::error::{Error, ErrorCode, Result};
use crate::slots::thread;
use crate::units::Stream;

/// Which of DLPack's two structs is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarDlpackForm {
    /// `DLManagedTensorVersioned`.
    Versioned = 0,
    /// `DLManagedTensor`, for consumers that know no other. It cannot say that it is read-only.
    Unversioned = 1,
}

/// Whether a consumer may write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarDlpackAccess {
    /// Bytes of a file: what is written to them is gone when they are evicted.
    ReadOnly = 0,
    /// Bytes that the program writes itself.
    Writable = 1,
}

/// A tensor within the pages of a token: rows behind each other, without gaps.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarDlpackTensor {
    /// `sizeof(VbarDlpackTensor)`.
    pub size: usize,
    /// Device address of the first element.
    pub address: u64,
    /// Elements in each dimension, the slowest first; NULL for a scalar.
    pub shape: *const u64,
    /// Dimensions, at most 64.
    pub rank: u32,
    /// A `VbarDtype`. `F4` goes as pairs, with half the elements in the last dimension; the 6-bit
    /// types do not go.
    pub dtype: u32,
    /// A `VbarDlpackForm`.
    pub form: u32,
    /// A `VbarDlpackAccess`.
    pub access: u32,
}

// SAFETY: integers and a raw pointer; the size first.
unsafe impl Plain for VbarDlpackTensor {}
// SAFETY: as above.
unsafe impl Growing for VbarDlpackTensor {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarDlpackTensor, access) + size_of::<u32>();
}
// SAFETY: a raw pointer.
unsafe impl Plain for *mut c_void {}

const DEVICE_CUDA: i32 = 2;
/// The version whose type codes are used.
const VERSION: [u32; 2] = [1, 1];
const FLAG_READ_ONLY: u64 = 1;
const RANK_MAX: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    rank: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedUnversioned {
    tensor: Tensor,
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut ManagedUnversioned),
}

#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: unsafe extern "C" fn(*mut ManagedVersioned),
    flags: u64,
    tensor: Tensor,
}

/// What the consumer owes.
struct Pins {
    /// Known to nobody else.
    token: VbarToken,
    stream: VbarStream,
}

/// What a consumer has, and what is given back when it is done. The consumer sees its first field.
#[repr(C)]
struct Export<M> {
    managed: M,
    pins: Pins,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// Hands a token to a consumer of DLPack, as a `DLManagedTensorVersioned` or a `DLManagedTensor` of
/// device type `kDLCUDA` at `managed`. The pins are the consumer's from then on: its deleter, which
/// any thread may call, gives them back, and the token is stale: each export takes a fault of its
/// own. `stream` is the one that was faulted for, on which the
/// consumer works. One of CUDA's own (0 to 2) is taken for granted then; of another nobody promises
/// that it lives so long, so it is not touched, and the bytes stay until its work is known to be
/// done. On failure the token stays the caller's. Statuses: the common ones, `UNSUPPORTED` for the
/// 6-bit types. Thread-safe.
///
/// # Safety
/// `tensor` points to as many bytes as its size field says, with `rank` numbers at `shape`;
/// `managed` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_dlpack_export(
    token: VbarToken,
    stream: VbarStream,
    tensor: *const VbarDlpackTensor,
    managed: *mut *mut c_void,
) -> VbarStatus {
    call(|| {
        let out = Out::new(managed)?;
        out.write(export(token, stream, tensor)?.into_raw());
        Ok(())
    })
}

/// A managed tensor that nobody has yet. Dropped, it is deleted.
pub(super) struct Exported {
    pub(super) form: VbarDlpackForm,
    managed: *mut c_void,
}

impl Exported {
    pub(super) fn managed(&self) -> *mut c_void {
        self.managed
    }

    /// The tensor, which the caller deletes from now on.
    pub(super) fn into_raw(self) -> *mut c_void {
        let managed = self.managed;
        std::mem::forget(self);
        managed
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        // SAFETY: `export` made it, in this form, and nobody else has it.
        unsafe { delete_as(self.form, self.managed) };
    }
}

/// Hands a token to a managed tensor.
///
/// # Errors
/// As [`vbar_dlpack_export`]; the token stays the caller's then.
pub(super) fn export(
    token: VbarToken,
    stream: VbarStream,
    tensor: *const VbarDlpackTensor,
) -> Result<Exported> {
    if tensor.is_null() {
        return Err(invalid("the pointer to the tensor is NULL"));
    }
    let told = read_growing(tensor)?;
    let forms = [VbarDlpackForm::Versioned, VbarDlpackForm::Unversioned];
    let form = choice("form", told.form, forms)?;
    let flags = choice("access", told.access, [FLAG_READ_ONLY, 0])?;
    let layout = Layout::of(&told)?;
    let device_id = token::look(token, |held| check_place(held, &told, layout.bytes))??;
    let pins = Pins { token: token::renew(token)?, stream };
    let give = match form {
        VbarDlpackForm::Versioned => Export::<ManagedVersioned>::give,
        VbarDlpackForm::Unversioned => Export::<ManagedUnversioned>::give,
    };
    Ok(Exported { form, managed: give(pins, layout, device_id, flags) })
}

/// Deletes a managed tensor, as its consumer would.
///
/// # Safety
/// [`export`] made it, in that form; it is deleted once.
pub(super) unsafe fn delete_as(form: VbarDlpackForm, managed: *mut c_void) {
    match form {
        // SAFETY: as the caller promises.
        VbarDlpackForm::Versioned => unsafe { delete::<ManagedVersioned>(managed.cast()) },
        // SAFETY: as above.
        VbarDlpackForm::Unversioned => unsafe { delete::<ManagedUnversioned>(managed.cast()) },
    }
}

/// What DLPack says of a tensor, in its own numbers.
#[derive(Debug)]
struct Layout {
    data: u64,
    bytes: u64,
    dtype: DataType,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Layout {
    fn of(told: &VbarDlpackTensor) -> Result<Self> {
        if told.rank > RANK_MAX {
            return Err(invalid(format!("{} dimensions: {RANK_MAX} at most", told.rank)));
        }
        let shape = read_array(told.shape, told.rank as usize)?;
        let dtype = data_type(told.dtype)?;
        let too_large = || invalid(format!("a tensor of shape {shape:?} is larger than memory"));
        let mut dimensions: Vec<i64> = Vec::with_capacity(shape.len());
        for count in shape {
            dimensions.push(i64::try_from(*count).map_err(|_| too_large())?);
        }
        if dtype.lanes == 2 {
            let last = dimensions.last_mut().filter(|last| **last % 2 == 0);
            *last.ok_or_else(|| invalid(format!("{shape:?}: 4-bit elements go in pairs")))? /= 2;
        }
        let mut strides = vec![1; dimensions.len()];
        let mut elements = 1_i64;
        for (stride, count) in strides.iter_mut().zip(&dimensions).rev() {
            *stride = elements;
            elements = elements.checked_mul((*count).max(1)).ok_or_else(too_large)?;
        }
        let element_bytes = u64::from(dtype.bits) * u64::from(dtype.lanes) / 8;
        let elements = if dimensions.contains(&0) { 0 } else { elements.unsigned_abs() };
        let bytes = elements.checked_mul(element_bytes).ok_or_else(too_large)?;
        if !told.address.is_multiple_of(element_bytes) {
            let text = format!("address {:#x} is not aligned for its type", told.address);
            return Err(invalid(text));
        }
        // An empty tensor points nowhere.
        let data = if bytes == 0 { 0 } else { told.address };
        Ok(Self { data, bytes, dtype, shape: dimensions, strides })
    }

    /// Nobody writes through the two pointers: DLPack has them mutable for consumers of old.
    fn tensor(&self, device_id: i32) -> Tensor {
        Tensor {
            data: std::ptr::with_exposed_provenance_mut(self.data as usize),
            device_type: DEVICE_CUDA,
            device_id,
            rank: self.shape.len() as i32,
            dtype: self.dtype,
            shape: self.shape.as_ptr().cast_mut(),
            strides: self.strides.as_ptr().cast_mut(),
            byte_offset: 0,
        }
    }
}

/// Type code, bits and lanes.
fn data_type(dtype: u32) -> Result<DataType> {
    let (code, bits, lanes) = match dtype {
        d if d == VbarDtype::I8 as u32 => (0, 8, 1),
        d if d == VbarDtype::I16 as u32 => (0, 16, 1),
        d if d == VbarDtype::I32 as u32 => (0, 32, 1),
        d if d == VbarDtype::I64 as u32 => (0, 64, 1),
        d if d == VbarDtype::U8 as u32 => (1, 8, 1),
        d if d == VbarDtype::U16 as u32 => (1, 16, 1),
        d if d == VbarDtype::U32 as u32 => (1, 32, 1),
        d if d == VbarDtype::U64 as u32 => (1, 64, 1),
        d if d == VbarDtype::F16 as u32 => (2, 16, 1),
        d if d == VbarDtype::F32 as u32 => (2, 32, 1),
        d if d == VbarDtype::F64 as u32 => (2, 64, 1),
        d if d == VbarDtype::Bf16 as u32 => (4, 16, 1),
        d if d == VbarDtype::C64 as u32 => (5, 64, 1),
        d if d == VbarDtype::Bool as u32 => (6, 8, 1),
        d if d == VbarDtype::F8_E4M3 as u32 => (10, 8, 1),
        d if d == VbarDtype::F8_E4M3FNUZ as u32 => (11, 8, 1),
        d if d == VbarDtype::F8_E5M2 as u32 => (12, 8, 1),
        d if d == VbarDtype::F8_E5M2FNUZ as u32 => (13, 8, 1),
        d if d == VbarDtype::F8_E8M0 as u32 => (14, 8, 1),
        d if d == VbarDtype::F4 as u32 => (17, 4, 2),
        d if d == VbarDtype::F6_E2M3 as u32 || d == VbarDtype::F6_E3M2 as u32 => {
            let text = "DLPack does not say how 6-bit elements are packed: take them as U8";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        _ => return Err(invalid(format!("there is no type {dtype} for DLPack"))),
    };
    Ok(DataType { code, bits, lanes })
}

/// The device's ordinal, if the tensor lies within the token's pages and is not to be written
/// first.
fn check_place(held: &token::Held, told: &VbarDlpackTensor, bytes: u64) -> Result<i32> {
    if held.is_to_be_written() {
        return Err(invalid("the token's bytes were not committed"));
    }
    let pages = held.addresses();
    let end = told.address.checked_add(bytes);
    let within = end.is_some_and(|end| pages.start <= told.address && end <= pages.end);
    if bytes > 0 && !within {
        let text = format!(
            "{bytes} bytes at {:#x} are not within the token's pages, {:#x} to {:#x}",
            told.address, pages.start, pages.end
        );
        return Err(invalid(text));
    }
    i32::try_from(held.runtime().ordinal().0).map_err(|_| invalid("the ordinal does not fit"))
}

/// One of DLPack's two structs.
trait Managed: Sized {
    /// With no context yet.
    fn new(tensor: Tensor, flags: u64) -> Self;

    fn context(&mut self) -> &mut *mut c_void;
}

impl Managed for ManagedVersioned {
    fn new(tensor: Tensor, flags: u64) -> Self {
        let context = std::ptr::null_mut();
        Self { version: VERSION, context, deleter: delete::<Self>, flags, tensor }
    }

    fn context(&mut self) -> &mut *mut c_void {
        &mut self.context
    }
}

impl Managed for ManagedUnversioned {
    fn new(tensor: Tensor, _flags: u64) -> Self {
        Self { tensor, context: std::ptr::null_mut(), deleter: delete::<Self> }
    }

    fn context(&mut self) -> &mut *mut c_void {
        &mut self.context
    }
}

impl<M: Managed> Export<M> {
    fn give(pins: Pins, layout: Layout, device_id: i32, flags: u64) -> *mut c_void {
        let managed = M::new(layout.tensor(device_id), flags);
        let Layout { shape, strides, .. } = layout;
        let export = Box::into_raw(Box::new(Self { managed, pins, shape, strides }));
        // SAFETY: just made, and nobody else's yet.
        unsafe { *(*export).managed.context() = export.cast() };
        export.cast()
    }
}

unsafe extern "C" fn delete<M: Managed>(managed: *mut M) {
    if managed.is_null() {
        return;
    }
    // SAFETY: what `Export::give` made, or the consumer's copy of it.
    let context = unsafe { *(*managed).context() };
    // SAFETY: the context is the box that was made with it; the consumer gives it back once.
    let export = unsafe { Box::from_raw(context.cast::<Export<M>>()) };
    give_back(export.pins.token, export.pins.stream);
}

/// Gives the pins back. A stream that a consumer made may be gone by now, and a driver call on a
/// stream that is gone is undefined: its handle is not used. After a fork, or at exit, they stay.
fn give_back(token: VbarToken, stream: VbarStream) {
    let stream = if Stream(stream).is_implicit() { Stream(stream) } else { Stream::NONE };
    call(|| {
        let given_back = thread::with(|thread| token::give_back(thread, token, stream));
        match &given_back {
            Ok(()) => {}
            // A forced end of run took the pins before.
            Err(error) if error.code() == ErrorCode::StaleToken => {
                log::debug!("a DLPack tensor was dropped: {error}");
            }
            Err(error) => log::warn!("a DLPack tensor was dropped: {error}"),
        }
        given_back
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dtype: VbarDtype, shape: &[u64]) -> Result<Layout> {
        Layout::of(&VbarDlpackTensor {
            size: 0,
            address: 512,
            shape: shape.as_ptr(),
            rank: shape.len() as u32,
            dtype: dtype as u32,
            form: 0,
            access: 0,
        })
    }

    #[test]
    fn rows_lie_behind_each_other() {
        let found = layout(VbarDtype::Bf16, &[2, 3, 4]).unwrap();
        assert_eq!((found.bytes, found.data), (48, 512));
        assert_eq!((found.shape, found.strides), (vec![2, 3, 4], vec![12, 4, 1]));
        let scalar = layout(VbarDtype::C64, &[]).unwrap();
        assert_eq!((scalar.bytes, scalar.shape.len()), (8, 0));
        let empty = layout(VbarDtype::F32, &[3, 0, 5]).unwrap();
        assert_eq!((empty.bytes, empty.data), (0, 0));
    }

    #[test]
    fn four_bit_elements_go_in_pairs_and_six_bit_ones_do_not_go() {
        let found = layout(VbarDtype::F4, &[3, 8]).unwrap();
        assert_eq!(found.dtype, DataType { code: 17, bits: 4, lanes: 2 });
        assert_eq!((found.shape, found.strides, found.bytes), (vec![3, 4], vec![4, 1], 12));
        for shape in [&[3_u64, 7][..], &[]] {
            let error = layout(VbarDtype::F4, shape).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument);
        }
        let error = layout(VbarDtype::F6_E2M3, &[8]).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unsupported);
    }

    #[test]
    fn sizes_that_no_memory_has_are_refused() {
        for shape in [&[u64::MAX][..], &[1 << 32, 1 << 32], &[0, 1 << 40, 1 << 40]] {
            let error = layout(VbarDtype::F32, shape).unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidArgument, "{shape:?}");
        }
        assert!(layout(VbarDtype::F32, &[1; 65]).is_err());
    }
}
