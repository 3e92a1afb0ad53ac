//! Values that cross the boundary: structs that grow, outputs, texts, arrays.
//!
//! Owns the only reading and writing through a caller's pointers. A struct that grows says its size
//! in its first field: what an older caller does not have stays as it is, what a newer caller has
//! and we do not know must be zero, so that nobody asks for something and silently does not get it.

#![expect(unsafe_code, reason = "reads and writes through a caller's pointers")]

use std::ffi::{CStr, c_char};

use super::call::invalid;
use crate::error::Result;

/// Plain C data: every bit pattern is a value, all zeros too.
///
/// # Safety
/// The type is `repr(C)`, of integers, raw pointers and arrays of these, without invariants.
pub(super) unsafe trait Plain: Copy {}

/// A struct whose first field, a `size_t`, is its size in the caller's version of the header.
///
/// # Safety
/// As [`Plain`]; the first field is a `usize`.
pub(super) unsafe trait Growing: Plain {
    /// Bytes of its first version.
    const FIRST_BYTES: usize;
}

/// A place for a result, checked before any work is done.
pub(super) struct Out<T>(*mut T);

impl<T: Plain> Out<T> {
    /// # Errors
    /// `InvalidArgument` for NULL or a pointer that is not aligned.
    #[inline]
    pub(super) fn new(place: *mut T) -> Result<Self> {
        if place.is_null() || !place.is_aligned() {
            return Err(bad_pointer("output", place.is_null()));
        }
        Ok(Self(place))
    }

    #[inline]
    pub(super) fn write(&self, value: T) {
        // SAFETY: not NULL, aligned; the caller of the export promises that it points to a `T`.
        unsafe { self.0.write(value) };
    }
}

/// As [`Out`] for a struct that grows.
pub(super) struct OutGrowing<T> {
    place: *mut T,
    bytes: usize,
}

impl<T: Growing> OutGrowing<T> {
    /// # Errors
    /// `InvalidArgument` for NULL, a pointer that is not aligned, or a size below the first
    /// version's.
    pub(super) fn new(place: *mut T) -> Result<Self> {
        Ok(Self { bytes: size_of_growing(place)?.min(size_of::<T>()), place })
    }

    /// Writes what the caller's version has; its size field stays.
    pub(super) fn write(&self, value: T) {
        let skip = size_of::<usize>();
        let source = (&raw const value).cast::<u8>().wrapping_add(skip);
        let target = self.place.cast::<u8>().wrapping_add(skip);
        // SAFETY: both have at least `bytes` bytes: `T` by the minimum, the caller's by its size
        // field; the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source, target, self.bytes - skip) };
    }
}

/// Reads a struct that grows; NULL is one of zeros, every field at its default.
///
/// # Errors
/// `InvalidArgument` for a pointer that is not aligned, a size below the first version's, or bytes
/// beyond our version that are not zero.
pub(super) fn read_growing<T: Growing>(place: *const T) -> Result<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    if !place.is_null() {
        let bytes = size_of_growing(place)?;
        let known = bytes.min(size_of::<T>());
        // SAFETY: the caller of the export promises that `bytes` bytes are there; `value` has
        // `known` of them.
        unsafe {
            std::ptr::copy_nonoverlapping(place.cast::<u8>(), value.as_mut_ptr().cast(), known)
        };
        let extra = place.cast::<u8>().wrapping_add(known);
        // SAFETY: as above: the caller's struct goes on for as long as it says.
        let extra = unsafe { std::slice::from_raw_parts(extra, bytes - known) };
        if extra.iter().any(|byte| *byte != 0) {
            let text = format!(
                "options of {bytes} bytes have a field set that this library, with {known}, does \
                 not know: it is older than the program"
            );
            return Err(invalid(text));
        }
    }
    // SAFETY: `T` is plain: all zeros, and whatever the caller had, are values of it.
    Ok(unsafe { value.assume_init() })
}

/// Largest size that a struct may claim: garbage is told before it is read.
const GROWING_BYTES_MAX: usize = 1 << 16;

fn size_of_growing<T: Growing>(place: *const T) -> Result<usize> {
    if place.is_null() || !place.is_aligned() {
        return Err(bad_pointer("struct", place.is_null()));
    }
    // SAFETY: not NULL, aligned; the first field of a growing struct is its size.
    let bytes = unsafe { place.cast::<usize>().read() };
    if !(T::FIRST_BYTES..=GROWING_BYTES_MAX).contains(&bytes) {
        let text = format!(
            "a struct's size field is {bytes}, {} or more is expected: set it to its sizeof",
            T::FIRST_BYTES
        );
        return Err(invalid(text));
    }
    Ok(bytes)
}

/// A text, or `None` for NULL.
///
/// # Errors
/// `InvalidArgument` unless it is UTF-8.
pub(super) fn read_text<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL; the caller of the export promises a C string that lives during the call.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str().map_err(|_| invalid(format!("{text:?} is not UTF-8")))?;
    Ok(Some(text))
}

/// A path, which may be of any bytes.
///
/// # Errors
/// `InvalidArgument` for NULL or an empty path.
pub(super) fn read_path<'a>(path: *const c_char) -> Result<&'a std::path::Path> {
    use std::os::unix::ffi::OsStrExt;
    if path.is_null() {
        return Err(invalid("a path is NULL"));
    }
    // SAFETY: not NULL; the caller of the export promises a C string that lives during the call.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    if path.is_empty() {
        return Err(invalid("a path is empty"));
    }
    Ok(std::path::Path::new(std::ffi::OsStr::from_bytes(path)))
}

/// An array of `count` values, which may be NULL when it is empty.
///
/// # Errors
/// `InvalidArgument` for NULL, a pointer that is not aligned, or a size that no array has.
pub(super) fn read_array<'a, T: Plain>(values: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check_array(values, count)?;
    // SAFETY: not NULL, aligned, of a size that an array can have; the caller of the export
    // promises that it has `count` values that nobody writes during the call.
    Ok(unsafe { std::slice::from_raw_parts(values, count) })
}

/// A place for `count` results; written by index, so that nothing is read from it.
pub(super) struct OutArray<T> {
    values: *mut T,
    count: usize,
}

impl<T: Plain> OutArray<T> {
    /// # Errors
    /// As [`read_array`].
    pub(super) fn new(values: *mut T, count: usize) -> Result<Self> {
        if count > 0 {
            check_array(values, count)?;
        }
        Ok(Self { values, count })
    }

    /// Writes the values that there is room for.
    pub(super) fn write(&self, values: impl IntoIterator<Item = T>) {
        self.write_from(0, values);
    }

    /// As [`OutArray::write`], from an index on.
    pub(super) fn write_from(&self, first: usize, values: impl IntoIterator<Item = T>) {
        for (index, value) in (first..self.count).zip(values) {
            // SAFETY: within the `count` values that the caller of the export promises.
            unsafe { self.values.wrapping_add(index).write(value) };
        }
    }
}

fn check_array<T>(values: *const T, count: usize) -> Result<()> {
    if values.is_null() || !values.is_aligned() {
        return Err(bad_pointer("array", values.is_null()));
    }
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(invalid(format!("an array of {count} values is larger than memory")));
    }
    Ok(())
}

#[cold]
fn bad_pointer(what: &str, null: bool) -> crate::error::Error {
    invalid(format!("the pointer to the {what} is {}", if null { "NULL" } else { "not aligned" }))
}

/// Bytes from `offset` on.
///
/// # Errors
/// `InvalidArgument` past 2^64.
#[inline]
pub(super) fn byte_range(offset: u64, bytes: u64) -> Result<std::ops::Range<u64>> {
    match offset.checked_add(bytes) {
        Some(end) => Ok(offset..end),
        None => Err(invalid(format!("{bytes} bytes at {offset} end past 2^64"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Debug)]
    #[repr(C)]
    struct Old {
        size: usize,
        first: u64,
    }
    #[derive(Clone, Copy, PartialEq, Debug)]
    #[repr(C)]
    struct New {
        size: usize,
        first: u64,
        second: u64,
    }
    // SAFETY: plain integers, the size first.
    unsafe impl Plain for Old {}
    // SAFETY: as above.
    unsafe impl Growing for Old {
        const FIRST_BYTES: usize = 16;
    }
    // SAFETY: plain integers, the size first.
    unsafe impl Plain for New {}
    // SAFETY: as above.
    unsafe impl Growing for New {
        const FIRST_BYTES: usize = 16;
    }

    #[test]
    fn an_older_caller_gets_defaults_and_a_newer_one_is_told() {
        let old = Old { size: 16, first: 7 };
        let read = read_growing::<New>((&raw const old).cast()).unwrap();
        assert_eq!((read.first, read.second), (7, 0));
        let mut new = New { size: 24, first: 8, second: 0 };
        assert_eq!(read_growing::<Old>((&raw const new).cast()).unwrap().first, 8);
        new.second = 1;
        let error = read_growing::<Old>((&raw const new).cast()).unwrap_err();
        assert!(error.to_string().contains("older than the program"), "{error}");
        for size in [0, 15, usize::MAX] {
            new.size = size;
            assert!(read_growing::<New>(&raw const new).is_err(), "{size}");
        }
        assert_eq!(read_growing::<New>(std::ptr::null()).unwrap().first, 0);
    }

    #[test]
    fn an_older_caller_is_written_no_more_than_it_has() {
        let mut pair = [Old { size: 16, first: 1 }, Old { size: 99, first: 2 }];
        let out = OutGrowing::<New>::new(pair.as_mut_ptr().cast()).unwrap();
        out.write(New { size: 0, first: 5, second: 6 });
        assert_eq!(pair, [Old { size: 16, first: 5 }, Old { size: 99, first: 2 }]);
    }
}
