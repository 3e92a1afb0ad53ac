//! The library's kernels on a real device: PTX, compiled by the driver once per context.
//!
//! There is one text, `kernels.ptx`; what differs is the header, which says for which devices and
//! drivers it is meant. Owns the list of contexts that have the kernels. Launching takes a read
//! lock; compiling, which waits for the device, takes none.

#![expect(unsafe_code, reason = "calls the driver through function pointers")]

use std::ffi::{CStr, CString, c_uint, c_void};
use std::ptr;

use parking_lot::RwLock;

use super::{Cuda, check, output, real};
use crate::driver::sys::{
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CUcontext, CUfunction, CUmodule,
};
use crate::driver::{Driver, DriverCode, DriverError, DriverResult, KernelCall};
use crate::units::{DeviceAddress, Stream};

const BODY: &str = include_str!("kernels.ptx");
/// `.maxntid` in the text: the kernels may rely on full warps.
const BLOCK_THREADS: u32 = 256;
const LAUNCH: &str = "cuLaunchKernel";

/// A header for [`BODY`]. A device compiles text for its own compute capability or an older one.
struct Variant {
    /// The language's version, and with it the oldest driver: 7.0 is CUDA 11.0.
    version: &'static str,
    target: &'static str,
    /// Oldest compute capability, 10 x major + minor.
    capability: i32,
}

/// In order of trying. The CUDA 13 tools compile for 7.5 and up, but still read text written for
/// 5.0; should a later driver stop reading it, the first variant is for the devices it has left.
const VARIANTS: [Variant; 2] = [
    Variant { version: "7.0", target: "sm_75", capability: 75 },
    Variant { version: "6.4", target: "sm_50", capability: 50 },
];

/// Contexts with the kernels in them. Few, so a list.
#[derive(Default)]
pub(super) struct Loaded {
    contexts: RwLock<Vec<(ContextKey, Functions)>>,
}

/// A context's address may be used again by a later one; drivers since 12.0 tell them apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ContextKey {
    context: CUcontext,
    id: u64,
}

#[derive(Clone, Copy)]
struct Functions {
    checksum: CUfunction,
    pattern: CUfunction,
    /// Blocks that the device runs at once. More would wait for the first ones, and their delay
    /// would add to them.
    block_count_max: u32,
}

impl Loaded {
    /// Forgets the kernels of a context that no longer exists.
    pub(super) fn forget(&self, context: CUcontext) {
        self.contexts.write().retain(|(key, _)| key.context != context);
    }

    fn find(&self, key: ContextKey) -> Option<Functions> {
        let contexts = self.contexts.read();
        contexts.iter().find(|(other, _)| *other == key).map(|(_, functions)| *functions)
    }

    /// Whether `functions` became those of `key`; false when another thread was first.
    fn insert(&self, key: ContextKey, functions: Functions) -> bool {
        let mut contexts = self.contexts.write();
        let first = contexts.iter().all(|(other, _)| *other != key);
        if first {
            contexts.push((key, functions));
        }
        first
    }
}

impl Cuda {
    /// `module_load`.
    pub(super) fn load_kernels(&self) -> DriverResult<()> {
        let key = self.context_key("cuModuleLoadDataEx")?;
        if self.kernels.find(key).is_some() {
            return Ok(());
        }
        let (module, block_count_max) = self.compile_for_device()?;
        let functions = || {
            let checksum = self.function(module, c"vbar_checksum")?;
            let pattern = self.function(module, c"vbar_pattern")?;
            Ok(Functions { checksum, pattern, block_count_max })
        };
        let inserted = functions().map(|functions| self.kernels.insert(key, functions));
        if inserted != Ok(true) {
            // SAFETY: loaded above, and nothing has got a function of it.
            unsafe { (self.api.cuModuleUnload)(module) };
        }
        inserted.map(|_| ())
    }

    /// `launch_kernel`.
    pub(super) fn launch(&self, call: KernelCall, stream: Stream) -> DriverResult<()> {
        let stream = real(LAUNCH, stream)?;
        let (bytes, addresses) = match call {
            KernelCall::Checksum { source, bytes, target, .. } => (bytes, [source, target]),
            KernelCall::Pattern { target, bytes, .. } => (bytes, [target, target]),
        };
        if !addresses.iter().all(|address| address.0.is_multiple_of(8))
            || addresses[0].checked_add(bytes).is_none()
        {
            return Err(DriverError::new(LAUNCH, DriverCode::INVALID_VALUE));
        }
        let functions = self.kernels.find(self.context_key(LAUNCH)?);
        let functions = functions.ok_or(DriverError::new(LAUNCH, DriverCode::NOT_FOUND))?;
        let (function, mut arguments) = arguments(functions, call);
        let mut pointers = arguments.each_mut().map(|argument| ptr::from_mut(argument).cast());
        let blocks = block_count(bytes, functions.block_count_max);
        // SAFETY: a function of the current context; `pointers` are as many valid arguments as it
        // takes, or one more, all copied during the call. The kernel stays within device memory.
        let code = unsafe {
            (self.api.cuLaunchKernel)(
                function,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                stream,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        check(LAUNCH, code)
    }

    fn context_key(&self, call: &'static str) -> DriverResult<ContextKey> {
        let context = self.ctx_get_current()?;
        let context = context.ok_or(DriverError::new(call, DriverCode::INVALID_CONTEXT))?.0;
        let id = match self.api.cuCtxGetId {
            Some(get_id) => output("cuCtxGetId", |id| {
                // SAFETY: `id` is a valid place for the result, the context is the current one.
                unsafe { get_id(context, id) }
            })?,
            None => 0,
        };
        Ok(ContextKey { context, id })
    }

    /// The first variant that the current context's device and driver accept, and how many blocks
    /// of it run at once.
    fn compile_for_device(&self) -> DriverResult<(CUmodule, u32)> {
        let device = output("cuCtxGetDevice", |device| {
            // SAFETY: `device` is a valid place for the result.
            unsafe { (self.api.cuCtxGetDevice)(device) }
        })?;
        let major = self.attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let processors = self.attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let threads = self.attribute(device, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
        let threads = processors.unsigned_abs().saturating_mul(threads.unsigned_abs());

        let mut result = Err(DriverError::new("cuModuleLoadDataEx", DriverCode::NOT_SUPPORTED));
        for variant in VARIANTS.iter().filter(|it| it.capability <= 10 * major + minor) {
            result = self.compile(variant);
            match result {
                Err(error) if is_about_ptx(error.code) => {}
                _ => break,
            }
        }
        Ok((result?, (threads / BLOCK_THREADS).max(1)))
    }

    fn compile(&self, variant: &Variant) -> DriverResult<CUmodule> {
        let text = text(variant);
        let mut log = [0u8; 4096];
        let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        // The second value is a number in a pointer's place, as cuda.h has it.
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len() - 1)];
        let mut module = 0;
        // SAFETY: `text` ends with a NUL, the two arrays have two entries, and `log` has the bytes
        // that the options name. All are used during the call only.
        let code = unsafe {
            (self.api.cuModuleLoadDataEx)(
                &mut module,
                text.as_ptr().cast(),
                options.len() as c_uint,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        check("cuModuleLoadDataEx", code).inspect_err(|error| {
            let log = CStr::from_bytes_until_nul(&log).map(CStr::to_string_lossy);
            let log = log.unwrap_or_default();
            let Variant { version, target, .. } = variant;
            log::warn!("PTX {version} for {target}: {error}: {}", log.trim());
        })?;
        Ok(module)
    }

    fn function(&self, module: CUmodule, name: &CStr) -> DriverResult<CUfunction> {
        output("cuModuleGetFunction", |function| {
            // SAFETY: `function` is a valid place, the module was just loaded, the name is a C
            // string that is read during the call only.
            unsafe { (self.api.cuModuleGetFunction)(function, module, name.as_ptr()) }
        })
    }
}

/// Whether another text may do where this one was refused.
fn is_about_ptx(code: DriverCode) -> bool {
    const NO_BINARY_FOR_GPU: DriverCode = DriverCode(209);
    matches!(
        code,
        DriverCode::INVALID_IMAGE
            | NO_BINARY_FOR_GPU
            | DriverCode::INVALID_PTX
            | DriverCode::UNSUPPORTED_PTX_VERSION
    )
}

fn text(variant: &Variant) -> CString {
    let Variant { version, target, .. } = variant;
    let text = format!(".version {version}\n.target {target}\n.address_size 64\n{BODY}");
    CString::new(text).expect("the text has no NUL")
}

/// One thread a word, until the device is full; one block at least, which waits and does nothing.
fn block_count(bytes: u64, block_count_max: u32) -> u32 {
    let needed = bytes.div_ceil(8 * u64::from(BLOCK_THREADS));
    u32::try_from(needed).unwrap_or(u32::MAX).clamp(1, block_count_max)
}

/// The function and its arguments in the order of the text; the pattern takes the first four.
fn arguments(functions: Functions, call: KernelCall) -> (CUfunction, [u64; 5]) {
    match call {
        KernelCall::Checksum {
            source: DeviceAddress(source),
            bytes,
            first_word,
            delay_nanos,
            target: DeviceAddress(target),
        } => (functions.checksum, [source, bytes, first_word, delay_nanos, target]),
        KernelCall::Pattern { target: DeviceAddress(target), bytes, seed, delay_nanos } => {
            (functions.pattern, [target, bytes, seed, delay_nanos, 0])
        }
    }
}
