//! A `std::function<bool(cudaStream_t)>` of libstdc++, held longer than the call that brought it.
//!
//! PyTorch passes one by value: the callee gets the address of a temporary of four words that dies
//! after the call. It is moved out as libstdc++ moves it, by copying the words and marking the
//! source empty, which its owner then has nothing to destroy of. Small callables are in the first
//! two words and are only ever such that may be copied as bytes.

#![expect(unsafe_code, reason = "an object of C++, by its layout")]

use std::ffi::{c_int, c_void};

use crate::units::Stream;

/// What libstdc++ stores the callable in, or its address.
type AnyData = [usize; 2];

/// Copies, destroys or describes what is stored, by a number.
type Manager = unsafe extern "C-unwind" fn(*mut AnyData, *const AnyData, c_int) -> bool;
/// The second argument is the address of a `cudaStream_t`.
type Invoker = unsafe extern "C-unwind" fn(*const AnyData, *const usize) -> bool;

/// `std::__destroy_functor`.
const DESTROY: c_int = 3;

/// `std::function`, field by field.
#[repr(C)]
struct Words {
    stored: AnyData,
    /// NULL of an empty function, whose other words say nothing.
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

/// A function of C++ that says whether a stream is meant. It may throw.
pub(super) struct Callable {
    stored: AnyData,
    manager: Manager,
    invoker: Invoker,
}

const _: () = assert!(size_of::<Words>() == 32);

impl Callable {
    /// Moves a function out of its place; `None` for NULL and for an empty one.
    ///
    /// # Safety
    /// `source` is NULL or the address of a `std::function<bool(cudaStream_t)>` of libstdc++ that
    /// may be called from any thread, one at a time.
    pub(super) unsafe fn take(source: *mut c_void) -> Option<Self> {
        let source = source.cast::<Words>();
        if source.is_null() || !source.is_aligned() {
            return None;
        }
        // SAFETY: the caller promises that one is there.
        let words = unsafe { &mut *source };
        // Of an empty one the other words are anything.
        let manager = words.manager.take()?;
        Some(Self { stored: words.stored, manager, invoker: words.invoker? })
    }

    /// Calls it. An exception of C++ may leave this by unwinding: call it outside of
    /// `catch_unwind`.
    pub(super) fn admits(&self, stream: Stream) -> bool {
        let stream = stream.0;
        // SAFETY: as `std::function::operator()` calls it: what is stored, and its argument.
        unsafe { (self.invoker)(&raw const self.stored, &raw const stream) }
    }
}

impl Drop for Callable {
    fn drop(&mut self) {
        let stored = &raw mut self.stored;
        // SAFETY: as the destructor of `std::function` calls it; the words are nobody else's since
        // they were moved out.
        unsafe { (self.manager)(stored, stored, DESTROY) };
    }
}

// SAFETY: who gave it promises that it may be called and destroyed by any thread.
unsafe impl Send for Callable {}
