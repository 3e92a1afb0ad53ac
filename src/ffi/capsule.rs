//! Python's capsules around tensors of DLPack: one is filled, and emptied, in one call each.
//!
//! The library links no Python; who makes capsules tells it the functions that it needs. A handler
//! of a signal may raise between any two instructions of Python, so whoever owns an export there
//! owned it before the call that made it: the capsule, which has its destructor from the start.
//! What a capsule holds is told by its name.

#![expect(unsafe_code, reason = "functions of Python, and exported symbols")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::AtomicPtr;

use super::call::{call, invalid};
use super::device::VbarStream;
use super::dlpack::{self, VbarDlpackForm, VbarDlpackTensor};
use super::status::VbarStatus;
use super::token::VbarToken;
use crate::error::{Error, ErrorCode, Result};
use crate::sync::{Acquire, Release};

/// The name of a capsule that was not filled yet.
const EMPTY: &CStr = c"vbar_dlpack_empty";

/// The name of a capsule that nobody has consumed.
const fn name_of(form: VbarDlpackForm) -> &'static CStr {
    match form {
        VbarDlpackForm::Versioned => c"dltensor_versioned",
        VbarDlpackForm::Unversioned => c"dltensor",
    }
}

type IsValid = unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int;
type GetPointer = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type SetPointer = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type SetName = unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int;

/// The functions of Python, NULL until they are told; the first one is told last.
static FUNCTIONS: [AtomicPtr<c_void>; 4] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 4];

/// Tells the library where Python has `PyCapsule_IsValid`, `PyCapsule_GetPointer`,
/// `PyCapsule_SetPointer` and `PyCapsule_SetName`, for the two functions on capsules. Statuses: the
/// common ones. Thread-safe.
///
/// # Safety
/// They are these functions, and stay for as long as the process has capsules.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_dlpack_set_capsule_functions(
    is_valid: *mut c_void,
    get_pointer: *mut c_void,
    set_pointer: *mut c_void,
    set_name: *mut c_void,
) -> VbarStatus {
    call(|| {
        let told = [is_valid, get_pointer, set_pointer, set_name];
        if told.iter().any(|function| function.is_null()) {
            return Err(invalid("a function of Python's capsules is NULL"));
        }
        let places = FUNCTIONS.iter().zip(told).rev();
        places.for_each(|(place, function)| place.store(function, Release));
        Ok(())
    })
}

/// As `vbar_dlpack_export`, into a Python capsule that is named `vbar_dlpack_empty`, whatever it
/// points to, and has `vbar_dlpack_capsule_destructor` for its destructor. It is given the name
/// that consumers expect; on failure it stays as it was. The caller holds Python's lock, and the
/// call does not wait. Statuses: those of `vbar_dlpack_export`; `INVALID_ARGUMENT` for any other
/// capsule, and before `vbar_dlpack_set_capsule_functions`. Thread-safe.
///
/// # Safety
/// `tensor` as there; `capsule` is NULL or a capsule.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_dlpack_export_capsule(
    token: VbarToken,
    stream: VbarStream,
    tensor: *const VbarDlpackTensor,
    capsule: *mut c_void,
) -> VbarStatus {
    call(|| {
        // SAFETY: a capsule, as the caller promises, or NULL.
        let capsule = unsafe { Capsule::named(capsule, EMPTY) };
        let capsule = capsule.ok_or_else(|| invalid("no empty capsule to export into"))?;
        capsule.fill(dlpack::export(token, stream, tensor)?)
    })
}

/// The destructor of a Python capsule for `vbar_dlpack_export_capsule`: deletes the tensor, if it
/// has one, unless somebody has consumed it. Python calls it, on any thread that holds its lock.
///
/// # Safety
/// `capsule` is NULL or a capsule.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_dlpack_capsule_destructor(capsule: *mut c_void) {
    for form in [VbarDlpackForm::Versioned, VbarDlpackForm::Unversioned] {
        // SAFETY: as the caller promises.
        let Some(found) = (unsafe { Capsule::named(capsule, name_of(form)) }) else { continue };
        let managed = found.pointer(name_of(form));
        // SAFETY: a capsule of this name that was not consumed holds what was exported to it.
        return unsafe { dlpack::delete_as(form, managed) };
    }
}

/// A capsule, and the functions of Python.
struct Capsule {
    capsule: *mut c_void,
    get_pointer: GetPointer,
    set_pointer: SetPointer,
    set_name: SetName,
}

impl Capsule {
    /// A capsule if it has that name. `None` as well while no functions are told.
    ///
    /// # Safety
    /// It is NULL or a capsule.
    unsafe fn named(capsule: *mut c_void, name: &CStr) -> Option<Self> {
        let [is_valid, get_pointer, set_pointer, set_name] =
            [0, 1, 2, 3].map(|index: usize| FUNCTIONS[index].load(Acquire));
        if capsule.is_null() || is_valid.is_null() {
            return None;
        }
        // SAFETY: whoever told them promised that they are these functions; the others were told
        // before the first one.
        let is_valid = unsafe { std::mem::transmute::<*mut c_void, IsValid>(is_valid) };
        // SAFETY: as above.
        let get_pointer = unsafe { std::mem::transmute::<*mut c_void, GetPointer>(get_pointer) };
        // SAFETY: as above.
        let set_pointer = unsafe { std::mem::transmute::<*mut c_void, SetPointer>(set_pointer) };
        // SAFETY: as above.
        let set_name = unsafe { std::mem::transmute::<*mut c_void, SetName>(set_name) };
        // SAFETY: a capsule, as the caller promises, and a C string.
        let is_valid = unsafe { is_valid(capsule, name.as_ptr()) } != 0;
        is_valid.then_some(Self { capsule, get_pointer, set_pointer, set_name })
    }

    /// What it points to.
    fn pointer(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a capsule that was found to have that name.
        unsafe { (self.get_pointer)(self.capsule, name.as_ptr()) }
    }

    /// Makes it the owner of a tensor. Nothing of Python runs in between: its lock is held.
    fn fill(&self, exported: dlpack::Exported) -> Result<()> {
        let failed =
            |what| Error::new(ErrorCode::Internal, format!("a capsule refused its {what}"));
        let (name, managed) = (name_of(exported.form), exported.managed());
        // SAFETY: a capsule, and a pointer that is not NULL.
        if unsafe { (self.set_pointer)(self.capsule, managed) } != 0 {
            return Err(failed("pointer"));
        }
        // SAFETY: a capsule, and a C string that stays as long as the library.
        if unsafe { (self.set_name)(self.capsule, name.as_ptr()) } != 0 {
            return Err(failed("name"));
        }
        exported.into_raw();
        Ok(())
    }
}
