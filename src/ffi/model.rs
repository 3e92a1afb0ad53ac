//! Safetensors models: opening, the table of tensors, faults by tensor.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::ffi::{CStr, CString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::bar::{self, Owner, VbarBar};
use super::call::{call, invalid, stale};
use super::device::{self, VbarDevice, VbarStream};
use super::fault::{self, VbarFault};
use super::source;
use super::status::VbarStatus;
use super::tag;
use super::token::{Bytes, Reserved, Source};
use super::value::{Growing, Out, OutGrowing, Plain, read_path, read_text};
use crate::error::{Error, ErrorCode, Result};
use crate::host::model_files::{Model, ModelTensor};
use crate::host::safetensors::Dtype;
use crate::host::source::ModelFile;
use crate::names::quoted;
use crate::runtime::{Fault, ModelBar};
use crate::slots::{Handles, Ref, Spread, thread};
use crate::units::Stream;

/// A safetensors model, bound to a VBAR of its own. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarModel {
    /// The id.
    pub id: u64,
}

/// What a model is.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarModelInfo {
    /// `sizeof(VbarModelInfo)`, set by the caller.
    pub size: usize,
    /// Its VBAR, for ranks, marks and memory given back. It ends with the model.
    pub bar: VbarBar,
    /// Tensors.
    pub tensor_count: u64,
    /// Bytes of all tensors together.
    pub total_bytes: u64,
    /// Files; see `vbar_model_file`.
    pub file_count: u32,
    /// 0.
    pub reserved: u32,
}

/// A tensor. Its strings and its shape live until the model is closed.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarTensor {
    /// `sizeof(VbarTensor)`, set by the caller.
    pub size: usize,
    /// Its name, UTF-8.
    pub name: *const c_char,
    /// Length of the name without its closing zero; a name may have zeros of its own.
    pub name_bytes: usize,
    /// Elements in each dimension, the slowest first; NULL for a scalar.
    pub shape: *const u64,
    /// Dimensions.
    pub rank: u32,
    /// A `VbarDtype`.
    pub dtype: u32,
    /// Length in bytes.
    pub bytes: u64,
    /// Its device address, 512-byte aligned; it never changes.
    pub address: u64,
    /// Its first byte in the model's VBAR.
    pub bar_offset: u64,
    /// Its first byte in its file.
    pub file_offset: u64,
    /// Index of its file, for `vbar_model_file`.
    pub file: u32,
    /// 0.
    pub reserved: u32,
}

/// Type of a tensor's elements. A number that a program does not know is a new type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
#[expect(non_camel_case_types, reason = "the format's own names")]
pub enum VbarDtype {
    /// A type that this library has no number for.
    Other = 0,
    /// One byte, 0 or 1.
    Bool = 1,
    /// 4-bit float.
    F4 = 2,
    /// 6-bit float, 2 exponent and 3 mantissa bits.
    F6_E2M3 = 3,
    /// 6-bit float, 3 exponent and 2 mantissa bits.
    F6_E3M2 = 4,
    /// Unsigned byte.
    U8 = 5,
    /// Signed byte.
    I8 = 6,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    F8_E5M2 = 7,
    /// 8-bit float, 4 exponent and 3 mantissa bits, finite.
    F8_E4M3 = 8,
    /// 8-bit exponent.
    F8_E8M0 = 9,
    /// `F8_E4M3` without a negative zero.
    F8_E4M3FNUZ = 10,
    /// `F8_E5M2` without a negative zero, finite.
    F8_E5M2FNUZ = 11,
    /// 16 bits, signed.
    I16 = 12,
    /// 16 bits, unsigned.
    U16 = 13,
    /// IEEE half.
    F16 = 14,
    /// bfloat16.
    Bf16 = 15,
    /// 32 bits, signed.
    I32 = 16,
    /// 32 bits, unsigned.
    U32 = 17,
    /// IEEE single.
    F32 = 18,
    /// Two IEEE singles.
    C64 = 19,
    /// IEEE double.
    F64 = 20,
    /// 64 bits, signed.
    I64 = 21,
    /// 64 bits, unsigned.
    U64 = 22,
}

// SAFETY: integers.
unsafe impl Plain for VbarModel {}
// SAFETY: integers; the size first.
unsafe impl Plain for VbarModelInfo {}
// SAFETY: as above.
unsafe impl Growing for VbarModelInfo {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarModelInfo, reserved) + size_of::<u32>();
}
// SAFETY: integers and raw pointers; the size first.
unsafe impl Plain for VbarTensor {}
// SAFETY: as above.
unsafe impl Growing for VbarTensor {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarTensor, reserved) + size_of::<u32>();
}
// SAFETY: a raw pointer.
unsafe impl Plain for *const c_char {}

pub(super) struct ModelEntry {
    pub(super) bar: ModelBar,
    bar_id: VbarBar,
    /// Names with a closing zero, in the order of the tensors.
    names: Vec<Box<[u8]>>,
    /// Keys and values of all files, with a closing zero; of equal keys the first file's.
    metadata: Vec<(Box<str>, Box<[u8]>)>,
    /// Paths of the files; `None` for one that was opened by descriptor.
    paths: Vec<Option<CString>>,
}

static MODELS: Handles<ModelEntry> = Handles::new(tag::MODEL, Spread::Threads);

pub(super) fn find(model: VbarModel) -> Result<Ref<ModelEntry>> {
    MODELS.get(model.id).ok_or_else(|| stale("model", model.id))
}

/// Opens a safetensors model (a file, a sharded model's index, or a folder) and binds it to a VBAR
/// of its own: every tensor gets an address, none any memory. Statuses: the common ones, the
/// driver's, `IO`, `FORMAT`, `FILE_CHANGED` for one that is written meanwhile, `NO_ADDRESSES` past
/// 2^64 bytes, `HOST_MEMORY` for the staging slots. Thread-safe.
///
/// # Safety
/// `path` is NULL or a C string; `model` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_open(
    device: VbarDevice,
    path: *const c_char,
    model: *mut VbarModel,
) -> VbarStatus {
    call(|| {
        let out = Out::new(model)?;
        let path: &Path = read_path(path)?;
        let runtime = &device::find(device)?.runtime;
        out.write(enter(runtime.open_model(path)?)?);
        Ok(())
    })
}

/// As `vbar_model_open` for one file that is open already, of which the library keeps a duplicate.
/// `name` is what messages call it. Statuses: those of `vbar_model_open`. Thread-safe.
///
/// # Safety
/// `name` is NULL or a C string; `model` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_open_descriptor(
    device: VbarDevice,
    descriptor: i32,
    name: *const c_char,
    model: *mut VbarModel,
) -> VbarStatus {
    call(|| {
        let out = Out::new(model)?;
        let name = read_text(name)?.unwrap_or("a model's descriptor").to_owned();
        let runtime = &device::find(device)?.runtime;
        let file = ModelFile::from_fd(source::duplicate(descriptor)?, name)?;
        out.write(enter(runtime.bind_model(Model::from_file(file)?)?)?);
        Ok(())
    })
}

fn enter(bar: ModelBar) -> Result<VbarModel> {
    let closed = |text: &str| -> Box<[u8]> { text.bytes().chain([0]).collect() };
    let model = bar.model();
    let names = model.tensors().iter().map(|tensor| closed(&tensor.name)).collect();
    let files = (0..model.files().len()).flat_map(|file| model.metadata(file));
    let metadata = files.map(|(key, value)| (key.as_str().into(), closed(value))).collect();
    // A path with a zero byte names no file, so none of these has one.
    let path = |path: &Path| CString::new(path.as_os_str().as_bytes()).ok();
    let paths = model.files().iter().map(|file| file.path().and_then(path)).collect();
    let bar_id = bar::enter(bar.vbar().clone(), Owner::Model)?;
    match MODELS.insert(ModelEntry { bar, bar_id, names, metadata, paths }) {
        Ok(id) => Ok(VbarModel { id }),
        Err(_) => {
            bar::close(bar_id, Owner::Model)?;
            Err(device::too_many("models"))
        }
    }
}

/// Closes a model and its VBAR, as `vbar_bar_destroy` does. Its strings end. Statuses: the common
/// ones. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_model_close(model: VbarModel) -> VbarStatus {
    call(|| {
        let entry = find(model)?;
        if !entry.close() {
            return Err(stale("model", model.id));
        }
        bar::close(entry.bar_id, Owner::Model).map(|_| ())
    })
}

/// Tells what a model is. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// `info` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_info(model: VbarModel, info: *mut VbarModelInfo) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(info)?;
        let entry = find(model)?;
        let model = entry.bar.model();
        out.write(VbarModelInfo {
            size: 0,
            bar: entry.bar_id,
            tensor_count: model.tensors().len() as u64,
            total_bytes: model.total_bytes(),
            file_count: u32::try_from(model.files().len()).unwrap_or(u32::MAX),
            reserved: 0,
        });
        Ok(())
    })
}

/// Tells a tensor by its index, from 0, in the natural order of names. Statuses: the common ones.
/// Thread-safe.
///
/// # Safety
/// `tensor` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_tensor(
    model: VbarModel,
    index: u64,
    tensor: *mut VbarTensor,
) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(tensor)?;
        let entry = find(model)?;
        let (number, tensor) = entry.tensor(index)?;
        out.write(entry.told(number, tensor));
        Ok(())
    })
}

/// Finds a tensor's index by its name. Statuses: the common ones, `NOT_FOUND`. Thread-safe.
///
/// # Safety
/// `name` is NULL or a C string; `index` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_find(
    model: VbarModel,
    name: *const c_char,
    index: *mut u64,
) -> VbarStatus {
    call(|| {
        let out = Out::new(index)?;
        let name = read_text(name)?.ok_or_else(|| invalid("a name is NULL"))?;
        out.write(find(model)?.bar.index(name)? as u64);
        Ok(())
    })
}

/// Tells a value of the model's `__metadata__`, UTF-8; it lives until the model is closed.
/// Statuses: the common ones, `NOT_FOUND`. Thread-safe.
///
/// # Safety
/// `key` is NULL or a C string; `value` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_metadata(
    model: VbarModel,
    key: *const c_char,
    value: *mut *const c_char,
) -> VbarStatus {
    call(|| {
        let out = Out::new(value)?;
        let key = read_text(key)?.ok_or_else(|| invalid("a key is NULL"))?;
        let entry = find(model)?;
        let found = entry.metadata.iter().find(|(name, _)| **name == *key).ok_or_else(|| {
            let text = format!("{}: no metadata {}", entry.bar.model().name(), quoted(key));
            Error::new(ErrorCode::NotFound, text)
        })?;
        out.write(found.1.as_ptr().cast());
        Ok(())
    })
}

/// Tells the path that a file of the model was opened by, for the host's copy of a tensor: its
/// bytes are at `VbarTensor.file_offset` of it. It is as it was given, or the index's folder and
/// the name in the index; NULL where the model was opened by descriptor. `index` counts from 0. The
/// string lives until the model is closed. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// `path` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_file(
    model: VbarModel,
    index: u32,
    path: *mut *const c_char,
) -> VbarStatus {
    call(|| {
        let out = Out::new(path)?;
        let entry = find(model)?;
        let path = entry.paths.get(index as usize).ok_or_else(|| {
            let (name, count) = (entry.bar.model().name(), entry.paths.len());
            invalid(format!("{name} has {count} files, none has index {index}"))
        })?;
        out.write(path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr()));
        Ok(())
    })
}

/// Makes a tensor resident for work on `stream`, and pins it; see `vbar_bar_fault`. Statuses: those
/// of `vbar_bar_fault`. Thread-safe.
///
/// # Safety
/// `fault` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_fault(
    model: VbarModel,
    index: u64,
    stream: VbarStream,
    fault: *mut VbarFault,
) -> VbarStatus {
    call(|| {
        let out = Out::new(fault)?;
        let entry = find(model)?;
        let (number, _) = entry.tensor(index)?;
        let reserved = thread::with(Reserved::take)?;
        let (told, hold) = match entry.bar.fault(number, Stream(stream))? {
            Fault::Resident(guard) => fault::told_and_hold(guard),
            Fault::HostMapped(guard) => {
                let (told, hold) = fault::told_and_hold(guard);
                (told.host_mapped(), hold)
            }
            Fault::Offloaded(refusal) => {
                out.write(VbarFault::offloaded(refusal));
                return Ok(());
            }
        };
        let token = reserved.hand_out(Source::Model(entry), hold, Bytes::Valid);
        out.write(VbarFault { token, ..told });
        Ok(())
    })
}

impl ModelEntry {
    pub(super) fn tensor(&self, index: u64) -> Result<(usize, &ModelTensor)> {
        let tensors = self.bar.model().tensors();
        let number = usize::try_from(index).unwrap_or(usize::MAX);
        let tensor = tensors.get(number).ok_or_else(|| {
            let name = self.bar.model().name();
            invalid(format!("{name} has {} tensors, none has index {index}", tensors.len()))
        })?;
        Ok((number, tensor))
    }

    fn told(&self, number: usize, tensor: &ModelTensor) -> VbarTensor {
        let name = &self.names[number];
        let shape = &tensor.shape;
        VbarTensor {
            size: 0,
            name: name.as_ptr().cast(),
            name_bytes: name.len() - 1,
            shape: if shape.is_empty() { std::ptr::null() } else { shape.as_ptr() },
            rank: shape.len() as u32,
            dtype: VbarDtype::from(tensor.dtype) as u32,
            bytes: tensor.bytes,
            address: self.bar.address(number).0,
            bar_offset: self.bar.range(number).start,
            file_offset: tensor.offset,
            file: tensor.file as u32,
            reserved: 0,
        }
    }
}

/// The format's name of a type, "BF16", as a string of static life time. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_dtype_text(dtype: u32) -> *const c_char {
    const TEXTS: [&CStr; 23] = [
        c"other",
        c"BOOL",
        c"F4",
        c"F6_E2M3",
        c"F6_E3M2",
        c"U8",
        c"I8",
        c"F8_E5M2",
        c"F8_E4M3",
        c"F8_E8M0",
        c"F8_E4M3FNUZ",
        c"F8_E5M2FNUZ",
        c"I16",
        c"U16",
        c"F16",
        c"BF16",
        c"I32",
        c"U32",
        c"F32",
        c"C64",
        c"F64",
        c"I64",
        c"U64",
    ];
    TEXTS.get(dtype as usize).map_or(c"unknown".as_ptr(), |text| text.as_ptr())
}

impl From<Dtype> for VbarDtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::BOOL => Self::Bool,
            Dtype::F4 => Self::F4,
            Dtype::F6_E2M3 => Self::F6_E2M3,
            Dtype::F6_E3M2 => Self::F6_E3M2,
            Dtype::U8 => Self::U8,
            Dtype::I8 => Self::I8,
            Dtype::F8_E5M2 => Self::F8_E5M2,
            Dtype::F8_E4M3 => Self::F8_E4M3,
            Dtype::F8_E8M0 => Self::F8_E8M0,
            Dtype::F8_E4M3FNUZ => Self::F8_E4M3FNUZ,
            Dtype::F8_E5M2FNUZ => Self::F8_E5M2FNUZ,
            Dtype::I16 => Self::I16,
            Dtype::U16 => Self::U16,
            Dtype::F16 => Self::F16,
            Dtype::BF16 => Self::Bf16,
            Dtype::I32 => Self::I32,
            Dtype::U32 => Self::U32,
            Dtype::F32 => Self::F32,
            Dtype::C64 => Self::C64,
            Dtype::F64 => Self::F64,
            Dtype::I64 => Self::I64,
            Dtype::U64 => Self::U64,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_have_the_names_of_the_format() {
        for dtype in [Dtype::BOOL, Dtype::F8_E4M3FNUZ, Dtype::BF16, Dtype::C64, Dtype::U64] {
            let text = vbar_dtype_text(VbarDtype::from(dtype) as u32);
            // SAFETY: a string of static life time.
            let text = unsafe { CStr::from_ptr(text) }.to_str().unwrap();
            assert_eq!(text, dtype.to_string());
        }
    }
}
