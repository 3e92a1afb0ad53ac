//! The binding without a GPU: opening what is not there, and a stand-in library, compiled by the
//! test, that checks arguments. What the driver itself does is tested on real devices.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::driver::kernel;
use crate::error::ErrorCode;

const CAPTURING: Stream = Stream(0x10);
const PLAIN: Stream = Stream(0x20);
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

/// A shared library from C text, in a folder that goes with the test.
fn compile(folder: &Path, source: &str, definitions: &[&str]) -> PathBuf {
    let (text, library) = (folder.join("fake.c"), folder.join("libfake.so"));
    std::fs::write(&text, source).unwrap();
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
        .args([&library, &text])
        .args(definitions.iter().map(|definition| format!("-D{definition}")))
        .status();
    assert!(status.expect("a C compiler, cc").success());
    library
}

/// The stand-in, with `changes` to its definitions.
fn fake(changes: &[&str]) -> Arc<Cuda> {
    let mut source = include_str!("fake.c").to_owned();
    let stubs = Api::REQUIRED.iter().filter(|name| !source.contains(&format!("{name}(")));
    let stubs: String = stubs.map(|name| format!("int {name}(void) {{ return 801; }}\n")).collect();
    source.push_str(&stubs);
    let defaults = ["CAPABILITY=90", "REFUSE_CREATE=0", "REFUSE_RETAIN=0", "REFUSE_NEWEST=0"];
    let folder = tempfile::tempdir().unwrap();
    // The compiler takes the last of several definitions.
    let library = compile(folder.path(), &source, &[&defaults[..], changes].concat());
    Cuda::open_library(library.as_os_str()).unwrap()
}

fn code<T>(result: DriverResult<T>) -> i32 {
    result.map(drop).map_or_else(|error| error.code.0, |()| 0)
}

#[test]
fn a_missing_library_is_named() {
    match Cuda::open() {
        Ok(cuda) => {
            assert!(Arc::ptr_eq(&cuda, &Cuda::open().unwrap()));
            assert!(cuda.description().starts_with("cuda "));
        }
        Err(error) if error.code() == ErrorCode::DriverMissing => {
            assert!(error.to_string().contains("libcuda.so.1"), "{error}");
            assert!(error.to_string().contains("Install the NVIDIA driver"), "{error}");
        }
        // A library without a device behind it.
        Err(error) => assert_eq!(error.code(), ErrorCode::Driver, "{error}"),
    }
    let error = Cuda::open_library(OsStr::new("/nonexistent/libcuda.so.1")).err().unwrap();
    assert_eq!(error.code(), ErrorCode::DriverMissing);
    assert!(error.to_string().contains("/nonexistent/libcuda.so.1"), "{error}");
}

#[test]
fn a_missing_symbol_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let library = compile(folder.path(), "int cuInit(unsigned flags) { return flags; }", &[]);
    let error = Cuda::open_library(library.as_os_str()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::DriverMissing);
    assert!(error.to_string().contains("cuDriverGetVersion"), "{error}");
}

#[test]
fn a_driver_that_does_not_start_is_an_error() {
    let stubs = Api::REQUIRED.iter().map(|name| format!("int {name}(void) {{ return 100; }}\n"));
    let folder = tempfile::tempdir().unwrap();
    let library = compile(folder.path(), &stubs.collect::<String>(), &[]);
    let error = Cuda::open_library(library.as_os_str()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Driver);
    assert!(error.to_string().contains("cuInit returned CUDA_ERROR_NO_DEVICE"), "{error}");
}

#[test]
fn devices_have_ordinals_in_range() {
    let cuda = fake(&[]);
    assert_eq!(cuda.description(), "cuda 13.2");
    assert_eq!(cuda.device_get_count(), Ok(1));
    assert_eq!(cuda.device_get_name(DEVICE), Ok("Fake".to_owned()));
    let none = DeviceOrdinal(1);
    assert_eq!(code(cuda.device_get_name(none)), 101);
    assert_eq!(code(cuda.mem_create(none, 2 << 20)), 101);
    assert_eq!(code(cuda.mem_get_allocation_granularity(none)), 101);
    assert_eq!(code(cuda.device_get_attribute(none, DeviceAttribute::ComputeCapabilityMajor)), 101);
}

#[test]
fn frames_are_plain_and_access_is_one_call() {
    let cuda = fake(&[]);
    assert_eq!(cuda.mem_get_allocation_granularity(DEVICE), Ok(2 << 20));
    assert_eq!(cuda.mem_create(DEVICE, 4 << 20), Ok(FrameHandle(4 << 20)));
    assert_eq!(cuda.mem_create_host(HostNode(2), 6 << 20), Ok(FrameHandle(6 << 20)));
    assert_eq!(code(cuda.mem_create_host(HostNode(u32::MAX), 6 << 20)), 1);
    let address = DeviceAddress(0x1000);
    assert_eq!(cuda.mem_set_access(address, 0x2000, &[DEVICE, DEVICE]), Ok(()));
    assert_eq!(code(cuda.mem_set_access(address, 0x2000, &[DEVICE, DeviceOrdinal(1)])), 101);
    assert_eq!(code(cuda.mem_set_access(address, 0x2000, &[])), 1);
}

#[test]
fn peers_and_the_context_of_a_stream_are_asked_for() {
    let cuda = fake(&[]);
    assert_eq!(cuda.device_can_access_peer(DEVICE, DEVICE), Ok(false));
    assert_eq!(code(cuda.device_can_access_peer(DEVICE, DeviceOrdinal(1))), 101);
    let context = cuda.device_primary_ctx_retain(DEVICE).unwrap();
    assert_eq!(cuda.stream_get_context(PLAIN), Ok(context));
    assert_eq!(code(cuda.stream_get_context(Stream::NONE)), 400);
}

#[test]
fn what_an_older_driver_lacks_is_not_supported() {
    let cuda = fake(&[]);
    assert_eq!(code(cuda.stream_get_id(PLAIN)), 801);
    assert_eq!(code(cuda.stream_get_id(Stream::NONE)), 400);
    assert_eq!(code(cuda.stream_destroy(Stream::PER_THREAD)), 400);
}

#[test]
fn an_event_is_recorded_for_a_context() {
    let cuda = fake(&[]);
    let context = cuda.device_primary_ctx_retain(DEVICE).unwrap();
    assert_eq!(cuda.ctx_record_event(context, Event(0x70)), Ok(()));
    assert_eq!(code(cuda.ctx_record_event(context, Event(0x71))), 400);
    assert_eq!(code(cuda.ctx_record_event(Context(0x70), Event(0x70))), 201);
    let older = fake(&["cuCtxRecordEvent=of_a_newer_driver"]);
    assert_eq!(code(older.ctx_record_event(context, Event(0x70))), 801);
}

#[test]
fn memory_is_registered_portably_and_time_has_no_sign() {
    let cuda = fake(&[]);
    let mut memory = [0u8; 8];
    let at = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the stand-in touches no memory.
    assert_eq!(unsafe { cuda.mem_host_register(at, 4096) }, Ok(()));
    // SAFETY: as above; the stand-in takes that size with the flags for reading only.
    assert_eq!(unsafe { cuda.mem_host_register_read_only(at, 8192) }, Ok(()));
    assert_eq!(cuda.mem_host_unregister(at), Ok(()));
    for address in [0x10000, 0x11fff] {
        assert_eq!(cuda.pointer_get_host_range(address), Ok(Some(0x10000..0x12000)));
    }
    // Past its end, managed, the device's, and not known.
    for address in [0x12000, 0x20000, 0x30000, 0x40000] {
        assert_eq!(cuda.pointer_get_host_range(address), Ok(None), "{address:#x}");
    }
    let (timed, plain) = (cuda.event_create_timed().unwrap(), cuda.event_create().unwrap());
    assert_eq!((timed, plain), (Event(0x70), Event(0x72)));
    assert_eq!(cuda.event_elapsed(timed, plain), Ok(Duration::from_micros(1500)));
    assert_eq!(cuda.event_elapsed(plain, timed), Ok(Duration::ZERO));
}

#[test]
fn the_legacy_stream_beside_a_capture_is_implicit() {
    let cuda = fake(&[]);
    assert_eq!(cuda.stream_is_capturing(Stream::DEFAULT), Ok(CaptureState::Implicit));
    assert_eq!(cuda.stream_is_capturing(CAPTURING), Ok(CaptureState::Active));
    assert_eq!(cuda.stream_is_capturing(PLAIN), Ok(CaptureState::None));
}

/// Adds 1 when it is called, 100 when it is dropped.
fn counted(count: &Arc<AtomicU32>) -> GraphRelease {
    struct Dropped(Arc<AtomicU32>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(100, Ordering::Relaxed);
        }
    }
    let dropped = Dropped(Arc::clone(count));
    Box::new(move || {
        dropped.0.fetch_add(1, Ordering::Relaxed);
    })
}

fn check_graph(changes: &[&str], stream: Stream, retained: i32, before: u32, after: u32) {
    let cuda = fake(changes);
    let count = Arc::new(AtomicU32::new(0));
    assert_eq!(code(cuda.graph_retain(stream, counted(&count))), retained, "{changes:?}");
    assert_eq!(count.load(Ordering::Relaxed), before, "{changes:?}, the graph lives");
    cuda.ctx_synchronize().unwrap();
    assert_eq!(count.load(Ordering::Relaxed), after, "{changes:?}, the graph is destroyed");
    assert_eq!(Arc::strong_count(&count), 1, "{changes:?}");
}

#[test]
fn a_graph_releases_once_and_a_failed_retain_never() {
    check_graph(&[], CAPTURING, 0, 0, 101);
    check_graph(&["CAPTURE_INFO_V3"], CAPTURING, 0, 0, 101);
    check_graph(&["REFUSE_CREATE=1"], CAPTURING, 1, 100, 100);
    check_graph(&["REFUSE_RETAIN=1"], CAPTURING, 1, 100, 100);
    check_graph(&[], PLAIN, 1, 100, 100);
    check_graph(&[], Stream::DEFAULT, 906, 100, 100);
}

#[test]
fn a_panic_in_a_release_stays_inside() {
    let cuda = fake(&[]);
    cuda.graph_retain(CAPTURING, Box::new(|| panic!("expected by this test"))).unwrap();
    cuda.ctx_synchronize().unwrap();
}

fn check_kernels(cuda: &Cuda, byte_count: usize) {
    // Eight bytes behind the end, which a kernel must leave alone.
    let mut words = vec![u64::MAX; byte_count.div_ceil(8) + 1];
    let mut sum = 17u64;
    let address = DeviceAddress(words.as_mut_ptr().expose_provenance() as u64);
    let bytes = byte_count as u64;
    let write = KernelCall::Pattern { target: address, bytes, seed: 3, delay_nanos: 6 };
    cuda.launch_kernel(write, PLAIN).unwrap();
    let target = DeviceAddress((&raw mut sum).expose_provenance() as u64);
    let read =
        KernelCall::Checksum { source: address, bytes, first_word: 9, delay_nanos: 5, target };
    cuda.launch_kernel(read, PLAIN).unwrap();

    let written: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut expected = vec![0xff; written.len()];
    kernel::pattern(&mut expected[..byte_count], 3);
    assert!(written == expected, "{byte_count} bytes");
    assert_eq!(sum, kernel::checksum(&expected[..byte_count], 9).wrapping_add(17));
}

#[test]
fn kernels_get_their_arguments() {
    for changes in [&[][..], &["REFUSE_NEWEST=1"], &["CAPABILITY=61"]] {
        let cuda = fake(changes);
        cuda.module_load().unwrap();
        cuda.module_load().unwrap();
        for byte_count in [0, 1, 8, 13, 4096, 100_003] {
            check_kernels(&cuda, byte_count);
        }
    }
    assert_eq!(code(fake(&["CAPABILITY=35"]).module_load()), 801);
}

#[test]
fn kernels_belong_to_a_context() {
    let cuda = fake(&[]);
    let call = |target| KernelCall::Pattern { target, bytes: 0, seed: 0, delay_nanos: 6 };
    let aligned = call(DeviceAddress(64));
    assert_eq!(code(cuda.launch_kernel(aligned, PLAIN)), 500);
    let context = cuda.device_primary_ctx_retain(DEVICE).unwrap();
    cuda.module_load().unwrap();
    assert_eq!(code(cuda.launch_kernel(aligned, PLAIN)), 0);
    assert_eq!(code(cuda.launch_kernel(call(DeviceAddress(63)), PLAIN)), 1);
    assert_eq!(code(cuda.launch_kernel(aligned, Stream::NONE)), 400);

    cuda.ctx_set_current(None).unwrap();
    assert_eq!(cuda.ctx_get_current(), Ok(None));
    assert_eq!(code(cuda.launch_kernel(aligned, PLAIN)), 201);
    assert_eq!(code(cuda.module_load()), 201);

    // The context that comes after the last release has the address of the one before.
    cuda.device_primary_ctx_release(DEVICE).unwrap();
    assert_eq!(cuda.device_primary_ctx_retain(DEVICE), Ok(context));
    assert_eq!(code(cuda.launch_kernel(aligned, PLAIN)), 500);
}
