//! PyTorch's plug-in allocator: the functions that PyTorch calls, with the signatures that it has.
//!
//! A failure of these is not a status: PyTorch has no place for one. It is an exception of
//! PyTorch's own where that can be thrown (`throw`), which its Python layer makes
//! `torch.OutOfMemoryError` or `RuntimeError` of; else NULL and the thread's last message. Those
//! that PyTorch calls from destructors never throw. After a fork and at exit nothing is touched.
//!
//! PyTorch may hold its own lock, Python's, or both, so that these run nothing of the program's: no
//! wait check, and messages are delivered by the next call that the program makes itself.
//!
//! ```text
//! table     the devices, opened on first use     throw     exceptions of C++
//! pools     which graph pool is meant            callable  a std::function that is kept
//! numbers   statistics and memory for Python     record    what is asked for, to a file
//! graph     scopes whose requests repeat
//! ```

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

mod callable;
pub mod graph;
pub mod numbers;
mod pools;
pub mod record;
mod table;
mod throw;

use std::ffi::{CStr, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::call::{self, call, invalid};
use super::device::{Opening, VbarDevice, VbarDeviceOptions, VbarStream};
use super::log;
use super::status::VbarStatus;
use super::value::{Out, read_growing};
use crate::error::{Error, ErrorCode};
use crate::process;
use crate::sync::wait::Unasked;
use crate::torch::{Freed, OutOfMemory, PoolId};
use crate::units::Stream;

use callable::Callable;
use pools::{Pool, Released};
use throw::{Found, Raise};

/// A graph pool, PyTorch's `MempoolId_t`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarTorchPool {
    /// Its first number.
    pub first: u64,
    /// Its second number.
    pub second: u64,
}

/// How a request that cannot be served is told to PyTorch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarTorchRaise {
    /// By NULL and `vbar_last_message`: PyTorch's libraries are not loaded.
    Nothing = 1,
    /// As `RuntimeError`: `c10::OutOfMemoryError` was not found in PyTorch's libraries.
    RuntimeError = 2,
    /// As `torch.OutOfMemoryError`.
    OutOfMemoryError = 3,
}

impl VbarTorchPool {
    fn on(self, device: i32) -> Pool {
        Pool { device, id: PoolId(self.first, self.second) }
    }
}

/// Why a call failed, told on this thread already.
struct Failed(Raise);

impl Failed {
    #[cold]
    fn of(error: &Error) -> Self {
        call::tell(error);
        Self(Raise::Runtime)
    }

    #[cold]
    fn short(short: &OutOfMemory) -> Self {
        call::tell(&Error::new(ErrorCode::HostMemory, short.to_string()));
        Self(if short.is_memory() { Raise::OutOfMemory } else { Raise::Runtime })
    }

    /// Throws, if there is something to throw with. Nothing may be left to drop.
    #[cold]
    fn raise(self) {
        // SAFETY: the thread's message stays until its next failure.
        unsafe { throw::raise(self.0, call::last_message()) };
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::of(&error)
    }
}

/// Runs what may fail; a panic is a failure. No exception of C++ may come through this.
#[inline(always)]
fn guarded<T>(body: impl FnOnce() -> Result<T, Failed>) -> Result<T, Failed> {
    let unasked = || {
        let _unasked = Unasked::new();
        body()
    };
    match catch_unwind(AssertUnwindSafe(unasked)) {
        Ok(done) => done,
        Err(panic) => Err(Failed::of(&call::panicked(&*panic))),
    }
}

/// Does what a hook asks for, and throws where that fails.
#[inline(always)]
fn hook(body: impl FnOnce() -> Result<(), Failed>) {
    let done = guarded(|| process::check().map_err(Failed::from).and_then(|()| body()));
    if let Err(failed) = done {
        failed.raise();
    }
}

/// The same for a hook that PyTorch calls from destructors: a failure is a message in the log. A
/// process that is ending, or the child of a fork, touches nothing.
#[inline(always)]
fn quiet_hook(body: impl FnOnce() -> Result<(), Failed>) {
    if process::ending() {
        return;
    }
    if guarded(body).is_err() {
        warn_of_failure();
    }
}

#[cold]
fn warn_of_failure() {
    // SAFETY: the thread's message is a C string that stays until its next failure.
    let text = unsafe { CStr::from_ptr(call::last_message()) };
    ::log::warn!("a call of PyTorch's failed: {}", text.to_string_lossy());
}

fn address(place: *mut c_void) -> u64 {
    place.expose_provenance() as u64
}

fn place(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Memory for a tensor: `alloc_fn` of `CUDAPluggableAllocator`. NULL for no bytes. Throws
/// `torch.OutOfMemoryError` when nothing is left to give back, `RuntimeError` for all else; NULL,
/// and the thread's last message, where PyTorch is not loaded. Opens the device on first use.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn vbar_torch_malloc(
    size: usize,
    device: i32,
    stream: VbarStream,
) -> *mut c_void {
    let stream = Stream(stream);
    if size == 0 {
        return std::ptr::null_mut();
    }
    // Not guarded: what a filter throws goes on to PyTorch.
    let chosen = if process::ending() { None } else { pools::choose(device, stream) };
    let made = guarded(|| {
        process::check()?;
        let allocator = &table::device(device)?.allocator;
        let made = pools::with_chosen(chosen, || allocator.malloc(size, stream));
        made.map_err(|short| Failed::short(&short))
    });
    match made {
        Ok(address) => place(address),
        Err(failed) => {
            failed.raise();
            std::ptr::null_mut()
        }
    }
}

/// Gives a tensor's memory back: `free_fn` of `CUDAPluggableAllocator`. Work that was enqueued on
/// the stream that it was allocated for may still use it. Only the address is looked at, and
/// `device` for the one that counts an address that is nobody's. Does nothing for NULL, in the
/// child of a fork and while the process ends. Never throws. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_free(
    pointer: *mut c_void,
    size: usize,
    device: i32,
    stream: VbarStream,
) {
    let _ = (size, stream);
    if pointer.is_null() || process::ending() {
        return;
    }
    let freed = guarded(|| Ok(table::free(address(pointer), device)));
    if !matches!(freed, Ok(Freed::Cached | Freed::Deferred)) {
        tell_of_free(pointer, &freed);
    }
}

#[cold]
fn tell_of_free(pointer: *mut c_void, freed: &Result<Freed, Failed>) {
    match freed {
        Ok(Freed::Unknown) => {
            ::log::warn!("free of {pointer:?}: no block that is live begins there");
        }
        Ok(_) => {}
        Err(_) => warn_of_failure(),
    }
}

/// `init_fn` of `CUDAPluggableAllocator`: PyTorch has found its devices; it is called with 0 when
/// the allocator is made, before that. Devices are opened when they are first used. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn vbar_torch_init(device_count: i32) {
    hook(|| {
        // From here on the driver is loaded, whose handler at the exit must be the later one.
        if device_count > 0 {
            process::watch();
        }
        Ok(())
    });
}

/// `reset_fn` of `CUDAPluggableAllocator`, behind `torch.cuda.empty_cache`: gives cached memory of
/// all devices back to the driver, waiting for the work that used it, and delivers messages of
/// calls of PyTorch's. Throws `RuntimeError`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn vbar_torch_reset() {
    log::deliver();
    hook(|| {
        // All of them, also when one is lost.
        let done = table::all().map(|device| device.allocator.empty_cache());
        done.fold(Ok(()), Result::and).map_err(Failed::from)
    });
}

/// `memory_fraction_fn` of `CUDAPluggableAllocator`: the part of the device's memory that PyTorch
/// may hold, 0 to 1. Throws `RuntimeError`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn vbar_torch_memory_fraction(fraction: f64, device: i32) {
    hook(|| {
        if !(0.0..=1.0).contains(&fraction) {
            let text = format!("a memory fraction of {fraction}: 0 to 1 is expected");
            return Err(invalid(text).into());
        }
        table::device(device)?.allocator.set_fraction(fraction);
        Ok(())
    });
}

/// `base_alloc_fn` of `CUDAPluggableAllocator`: the block that an address lies in, and its length
/// in bytes. An address that is in none is its own, and the length stays. Never throws.
/// Thread-safe.
///
/// # Safety
/// `size` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_base_alloc(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let mut base = pointer;
    quiet_hook(|| {
        let found = table::all().find_map(|device| device.allocator.base_of(address(pointer)));
        if let Some((first, bytes)) = found {
            base = place(first);
            if let Ok(size) = Out::new(size) {
                size.write(bytes as usize);
            }
        }
        Ok(())
    });
    base
}

/// `record_stream_fn` of `CUDAPluggableAllocator`: the block at an address is used on `stream` too,
/// and is not given out again before the work there is done. NULL and addresses of others are
/// ignored. Throws `RuntimeError`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn vbar_torch_record_stream(pointer: *mut c_void, stream: VbarStream) {
    if pointer.is_null() {
        return;
    }
    hook(|| {
        // Those that it is not theirs ignore it.
        let record = |device: &table::TorchDevice| {
            device.allocator.record_stream(address(pointer), Stream(stream));
        };
        table::all().for_each(record);
        Ok(())
    });
}

/// `begin_allocate_to_pool` of `CUDAPluggableAllocator`, at the beginning of a capture: from now on
/// what is allocated for streams that `filter` admits comes from a pool of its own, which keeps its
/// memory until it is released. `filter` is what C++ passes for a
/// `std::function<bool(cudaStream_t)>` by value, of libstdc++: it is moved from, and kept until the
/// pool is ended. Throws `RuntimeError`. Thread-safe.
///
/// # Safety
/// `filter` is NULL or such an object, which any thread may call, one at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vbar_torch_begin_pool(
    device: i32,
    pool: VbarTorchPool,
    filter: *mut c_void,
) {
    hook(|| {
        let allocator = &table::device(device)?.allocator;
        // SAFETY: as the caller promises.
        let filter = unsafe { Callable::take(filter) };
        let filter = filter.ok_or_else(|| invalid("a pool without a filter"))?;
        let pool = pool.on(device);
        if pools::begin(pool, filter).is_err() {
            return Err(invalid("the pool is open already").into());
        }
        allocator.begin_pool(pool.id, pools::filter_of(pool.id));
        Ok(())
    });
}

/// `end_allocate_to_pool_fn` of `CUDAPluggableAllocator`, at the end of a capture. When it returns
/// the pool's filter was destroyed. Never throws. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_end_pool(device: i32, pool: VbarTorchPool) {
    quiet_hook(|| {
        let pool = pool.on(device);
        if !pools::end(pool) {
            return Err(invalid("the end of a pool that is not open").into());
        }
        table::device(device)?.allocator.end_pool(pool.id);
        Ok(())
    });
}

/// `release_pool` of `CUDAPluggableAllocator`: a graph is gone. After as many releases as there
/// were beginnings the pool's memory is ordinary again as its tensors die. Never throws.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_release_pool(device: i32, pool: VbarTorchPool) {
    quiet_hook(|| {
        let pool = pool.on(device);
        let allocator = &table::device(device)?.allocator;
        match pools::release(pool) {
            Released::Unknown => return Err(invalid("the release of an unknown pool").into()),
            Released::WasOpen => allocator.end_pool(pool.id),
            Released::WasClosed => {}
        }
        allocator.release_pool(pool.id);
        Ok(())
    });
}

/// Memory for a pool of PyTorch's own caching allocator (`torch.cuda.MemPool`): `alloc_fn` of the
/// allocator that the pool is made with. NULL, and the thread's last message, when there is none:
/// PyTorch then gives back what it can, and asks again or raises. Never throws. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_segment_malloc(
    size: usize,
    device: i32,
    stream: VbarStream,
) -> *mut c_void {
    let made = guarded(|| {
        process::check()?;
        let allocator = &table::device(device)?.allocator;
        let made = if size == 0 { None } else { allocator.segment_malloc(size, Stream(stream)) };
        made.ok_or_else(|| no_segment(size).into())
    });
    made.map_or(std::ptr::null_mut(), place)
}

fn no_segment(size: usize) -> Error {
    let text = format!("a segment of {size} bytes could not be had");
    Error::new(ErrorCode::HostMemory, text)
}

/// Gives such memory back: `free_fn` of that allocator. The pages go when the work that was
/// enqueued on the device before is done. As `vbar_torch_free` otherwise. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_segment_free(
    pointer: *mut c_void,
    size: usize,
    device: i32,
    stream: VbarStream,
) {
    let _ = (size, stream);
    if pointer.is_null() || process::ending() {
        return;
    }
    let freed = guarded(|| {
        let holder = table::holder(address(pointer), device);
        Ok(holder.map_or(Freed::Unknown, |holder| holder.allocator.segment_free(address(pointer))))
    });
    tell_of_free(pointer, &freed);
}

/// Says how devices are opened that PyTorch allocates on from now on, and changes what can be
/// changed of those that it allocates on already. Zeros are the defaults, but that a device which
/// is open keeps its page size; a context or an ordinal may not be given. Not needed: what a device
/// is opened with on first use is what `vbar_device_open` with no driver named would, with no waits
/// for the whole context. Statuses: those of `vbar_device_open`. Thread-safe.
///
/// # Safety
/// `options` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_configure(options: *const VbarDeviceOptions) -> VbarStatus {
    call(|| {
        let options = read_growing(options)?;
        let opening = Opening::read(&options)?;
        table::configure(Opening { any_pages: options.page_bytes == 0, ..opening })
    })
}

/// An id of the device that PyTorch allocates on, by PyTorch's number, opening it as the first
/// allocation would. Close it as any other. Statuses: those of `vbar_device_open`. Thread-safe.
///
/// # Safety
/// `device` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_device(ordinal: i32, device: *mut VbarDevice) -> VbarStatus {
    call(|| {
        let out = Out::new(device)?;
        out.write(table::hand_out(ordinal)?);
        Ok(())
    })
}

/// Tells how a request that cannot be served is told to PyTorch, a `VbarTorchRaise`, as far as its
/// libraries are loaded now. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// `raise` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_raise(raise: *mut u32) -> VbarStatus {
    call(|| {
        Out::new(raise)?.write(match throw::found() {
            Found::Nothing => VbarTorchRaise::Nothing as u32,
            Found::Runtime => VbarTorchRaise::RuntimeError as u32,
            Found::OutOfMemory => VbarTorchRaise::OutOfMemoryError as u32,
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::time::Duration;

    use super::*;
    use crate::counters::Counters;
    use crate::outcome::WaitKind;
    use crate::sync::wait::{Cancellation, Wait, set_wait_check};

    fn message() -> String {
        // SAFETY: the thread's message is a C string that stays until its next failure.
        unsafe { CStr::from_ptr(call::last_message()) }.to_str().unwrap_or_default().to_owned()
    }

    #[test]
    fn a_panic_is_a_failure_and_a_message() {
        let failed = guarded(|| -> Result<u64, Failed> { panic!("number {}", 7) });
        assert!(matches!(failed, Err(Failed(Raise::Runtime))));
        assert_eq!(message(), "a bug of vbar: number 7");
        // Nothing of PyTorch is loaded here: it comes back.
        hook(|| panic!("number {}", 8));
        assert_eq!(message(), "a bug of vbar: number 8");
        quiet_hook(|| panic!("number {}", 9));
        assert_eq!(message(), "a bug of vbar: number 9");
    }

    #[test]
    fn waits_of_pytorchs_calls_run_nothing_of_the_programs() {
        let (counters, cancellation) = (Counters::default(), Cancellation::default());
        let wait = || {
            let timeout = Duration::from_secs(60);
            let mut wait = Wait::start(WaitKind::Ready, &counters, &cancellation, timeout);
            wait.pause()
        };
        set_wait_check(Some(Box::new(|| ControlFlow::Break(()))));
        assert!(guarded(|| wait().map_err(Failed::from)).is_ok());
        let _ = guarded(|| -> Result<(), Failed> { panic!("on the way") });
        // It is asked again when that is over.
        let asked = wait();
        set_wait_check(None);
        assert!(asked.is_err());
    }
}
