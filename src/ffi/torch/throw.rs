//! Raising `torch.OutOfMemoryError` and `RuntimeError` through PyTorch's C++, without linking it.
//!
//! PyTorch's Python layer tells exceptions by their C++ type: `c10::OutOfMemoryError` becomes
//! `torch.OutOfMemoryError`, another `c10::Error` a `RuntimeError`. The type, its constructor and
//! the functions that throw are looked up in the libraries that the process has loaded already.
//! Those are `RTLD_LOCAL` in Python: a search of the whole process finds none of them, so each is
//! opened by name without being loaded (`RTLD_NOLOAD`). Knows no devices and makes no text.
//!
//! What throws leaves its callers' frames by unwinding: nobody above holds anything that is to be
//! dropped, and no `catch_unwind` is in between, which would end the process.

#![expect(unsafe_code, reason = "calls C++ by its mangled names")]

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LAZY};

/// How a failure reaches PyTorch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Raise {
    /// As `torch.OutOfMemoryError`.
    OutOfMemory,
    /// As `RuntimeError`.
    Runtime,
}

/// What can be raised in this process, as far as is known now: more once PyTorch is loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Found {
    /// Nothing: no library of PyTorch's is loaded.
    Nothing,
    /// `RuntimeError` only: `c10::OutOfMemoryError` was not found.
    Runtime,
    /// Both.
    OutOfMemory,
}

/// Where the type is, by version: libc10_cuda.so up to PyTorch 2.13, libc10.so from then on.
const WITH_THE_TYPE: [&str; 2] = ["libc10_cuda.so", "libc10.so"];
const C10: [&str; 1] = ["libc10.so"];
const STANDARD: [&str; 1] = ["libstdc++.so.6"];

// Itanium ABI: `typeinfo for`, `vtable for`, and a constructor of complete objects.
const TYPE_INFO: &str = "_ZTIN3c1016OutOfMemoryErrorE";
const VTABLE: &str = "_ZTVN3c1016OutOfMemoryErrorE";
const ERROR_NEW: &str =
    "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
const STRING_NEW: &str = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcRKS3_";
const STRING_END: &str = "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev";
/// `c10::detail::torchCheckFail(char const *, char const *, unsigned, char const *)`.
const CHECK_FAIL: &str = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_";

/// More than any version's `c10::OutOfMemoryError` has; its size is not known here.
const OBJECT_BYTES: usize = 1024;
/// Of a vtable, offset to top and type information come before what an object points to.
const VTABLE_HEADER: usize = 2 * size_of::<usize>();

/// `c10::SourceLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

/// A `std::string` of libstdc++.
#[repr(C)]
struct StdString([usize; 4]);

type Destructor = unsafe extern "C" fn(*mut c_void);

/// What an exception is made with.
struct Exception {
    allocate: unsafe extern "C" fn(usize) -> *mut c_void,
    throw: unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destructor>) -> !,
    string_new: unsafe extern "C-unwind" fn(*mut StdString, *const c_char, *const u8),
    string_end: unsafe extern "C" fn(*mut StdString),
    error_new: unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StdString),
    type_info: *mut c_void,
    vtable: *mut c_void,
}

// SAFETY: addresses of functions and constants of libraries that stay loaded.
unsafe impl Send for Exception {}
// SAFETY: as above.
unsafe impl Sync for Exception {}

type CheckFail =
    unsafe extern "C-unwind" fn(*const c_char, *const c_char, c_int, *const c_char) -> !;

/// Raises a failure. Returns when PyTorch is not loaded, so that there is nothing to raise with.
///
/// Call it outside of `catch_unwind`, with nothing left to drop.
///
/// # Safety
/// `text` is a C string that stays until the exception is made.
pub(super) unsafe fn raise(kind: Raise, text: *const c_char) {
    if kind == Raise::OutOfMemory
        && let Some(exception) = exception()
    {
        // SAFETY: the text is one as the caller promises.
        unsafe { exception.throw(text) };
    }
    if let Some(fail) = check_fail() {
        let place = location();
        // SAFETY: the signature is the function's; it copies its texts, and throws.
        unsafe { fail(place.function, place.file, place.line as c_int, text) };
    }
}

/// What can be raised now.
pub(super) fn found() -> Found {
    match (exception(), check_fail()) {
        (Some(_), Some(_)) => Found::OutOfMemory,
        (_, Some(_)) => Found::Runtime,
        (_, None) => Found::Nothing,
    }
}

fn location() -> SourceLocation {
    SourceLocation {
        function: c"vbar_torch_malloc".as_ptr(),
        file: c"vbar".as_ptr(),
        line: line!(),
    }
}

impl Exception {
    /// # Safety
    /// `text` is a C string.
    unsafe fn throw(&self, text: *const c_char) -> ! {
        // SAFETY: any size may be asked for; the answer is never NULL (std::terminate otherwise).
        let object = unsafe { (self.allocate)(OBJECT_BYTES) };
        let mut message = MaybeUninit::<StdString>::uninit();
        // An allocator of the standard library is an empty object.
        let allocator = 0u8;
        // SAFETY: the constructor fills the place of a string from a C string.
        unsafe { (self.string_new)(message.as_mut_ptr(), text, &raw const allocator) };
        // SAFETY: the object has room for the base class; a `SourceLocation` of 24 bytes is passed
        // as C passes it, and a string, which has a destructor, by the address of a temporary.
        unsafe { (self.error_new)(object, location(), message.as_mut_ptr()) };
        // SAFETY: the caller of a function destroys its temporaries; the string was made above.
        unsafe { (self.string_end)(message.as_mut_ptr()) };
        let table = self.vtable.wrapping_byte_add(VTABLE_HEADER);
        // SAFETY: an object with virtual functions begins with the address of its vtable. The
        // class adds nothing to `c10::Error`, so that this makes it one of its own.
        unsafe { object.cast::<*mut c_void>().write(table) };
        // SAFETY: `std::exception`, the first base, declares its destructor first: the vtable
        // begins with the one of complete objects.
        let destructor = unsafe { table.cast::<Option<Destructor>>().read() };
        // SAFETY: the object is complete, and of the type that the type information is of.
        unsafe { (self.throw)(object, self.type_info, destructor) }
    }
}

/// What an exception is made with, once it was found.
fn exception() -> Option<&'static Exception> {
    static FOUND: OnceLock<Exception> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Some(found);
    }
    // Not remembered while it is not there: PyTorch may be loaded later.
    let found = find_exception()?;
    Some(FOUND.get_or_init(|| found))
}

fn find_exception() -> Option<Exception> {
    let type_info = find(&WITH_THE_TYPE, TYPE_INFO)?;
    let vtable = find(&WITH_THE_TYPE, VTABLE)?;
    let (error_new, string_new) = (find(&C10, ERROR_NEW)?, find(&STANDARD, STRING_NEW)?);
    let string_end = find(&STANDARD, STRING_END)?;
    let allocate = find(&STANDARD, "__cxa_allocate_exception")?;
    let throw = find(&STANDARD, "__cxa_throw")?;
    Some(Exception {
        // SAFETY: `void *__cxa_allocate_exception(size_t) noexcept`.
        allocate: unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(usize) -> *mut c_void>(allocate)
        },
        // SAFETY: `void __cxa_throw(void *, std::type_info *, void (*)(void *))`, which never
        // returns.
        throw: unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destructor>) -> !,
            >(throw)
        },
        // SAFETY: `std::string::string(char const *, std::allocator<char> const &)`.
        string_new: unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*mut StdString, *const c_char, *const u8),
            >(string_new)
        },
        // SAFETY: `std::string::~string()`.
        string_end: unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut StdString)>(string_end)
        },
        // SAFETY: `c10::Error::Error(c10::SourceLocation, std::string)`.
        error_new: unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut StdString),
            >(error_new)
        },
        type_info,
        vtable,
    })
}

fn check_fail() -> Option<CheckFail> {
    static FOUND: OnceLock<CheckFail> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Some(*found);
    }
    let address = find(&C10, CHECK_FAIL)?;
    // SAFETY: the signature is in the mangled name; it is declared as never returning.
    let function = unsafe { std::mem::transmute::<*mut c_void, CheckFail>(address) };
    Some(*FOUND.get_or_init(|| function))
}

/// The address of a symbol in the first of the libraries that is loaded and has it.
fn find(libraries: &[&str], symbol: &str) -> Option<*mut c_void> {
    libraries.iter().find_map(|name| {
        // SAFETY: the library is loaded already or the call fails: no initialiser runs.
        let library = unsafe { Library::open(Some(*name), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
        // SAFETY: only the address is taken; its type is given to it by who knows the symbol.
        let address = unsafe { library.get::<*mut c_void>(symbol) }.ok()?.as_raw_ptr();
        // Never closed: its symbols are kept.
        std::mem::forget(library);
        (!address.is_null()).then_some(address)
    })
}
