//! Failures: every verb can fail, and a verb that fails has changed nothing.
#![expect(unsafe_code, reason = "copies through the trait take raw pointers")]

use std::ptr::NonNull;

use vbar::driver::sim::{Sim, Verb};
use vbar::driver::{
    CaptureMode, DeviceAttribute, Driver, DriverCode, DriverResult, Event, FrameHandle, HostNode,
    KernelCall,
};
use vbar::units::{DeviceAddress, Stream};

use super::{DEVICE, open, sim};
use crate::door::{Rig, assert_code};

/// Memory that may stay registered.
fn immortal() -> NonNull<u8> {
    NonNull::from(Box::leak(Box::new([0u8; 8]))).cast()
}

/// Something of each kind for a verb to act on.
struct Stage {
    address: DeviceAddress,
    bytes: u64,
    /// Mapped at `address`.
    mapped: FrameHandle,
    free: FrameHandle,
    /// The driver's own.
    linear: DeviceAddress,
    stream: Stream,
    event: Event,
}

impl Stage {
    fn new(sim: &Sim, rig: &Rig) -> Self {
        let bytes = rig.page;
        let address = sim.mem_address_reserve(2 * bytes, 0).unwrap();
        let (mapped, free) = (sim.mem_create(DEVICE, bytes), sim.mem_create(DEVICE, bytes));
        let (mapped, free) = (mapped.unwrap(), free.unwrap());
        sim.mem_map(address, bytes, mapped).unwrap();
        let linear = sim.mem_alloc(bytes).unwrap();
        Self { address, bytes, mapped, free, linear, stream: rig.stream(), event: rig.event() }
    }

    /// A call of the verb that would succeed.
    fn call(&self, sim: &Sim, verb: Verb) -> DriverResult<()> {
        let Self { address, bytes, .. } = *self;
        let mut buffer = [0u8; 8];
        match verb {
            Verb::Version => sim.version().map(drop),
            Verb::DeviceGetCount => sim.device_get_count().map(drop),
            Verb::DeviceGetName => sim.device_get_name(DEVICE).map(drop),
            Verb::DeviceTotalMem => sim.device_total_mem(DEVICE).map(drop),
            Verb::DeviceGetAttribute | Verb::DeviceCanAccessPeer => call_device(sim, verb),
            Verb::DevicePrimaryCtxRetain => sim.device_primary_ctx_retain(DEVICE).map(drop),
            Verb::DevicePrimaryCtxRelease => sim.device_primary_ctx_release(DEVICE),
            Verb::CtxGetCurrent => sim.ctx_get_current().map(drop),
            Verb::CtxSetCurrent => sim.ctx_set_current(None),
            Verb::CtxSynchronize => sim.ctx_synchronize(),
            Verb::CtxRecordEvent => {
                let context = sim.device_primary_ctx_retain(DEVICE).unwrap();
                sim.device_primary_ctx_release(DEVICE).unwrap();
                sim.ctx_record_event(context, self.event)
            }
            Verb::MemGetInfo => sim.mem_get_info().map(drop),
            Verb::MemGetAllocationGranularity => {
                sim.mem_get_allocation_granularity(DEVICE).map(drop)
            }
            Verb::MemAddressReserve => sim.mem_address_reserve(bytes, 0).map(drop),
            Verb::MemAddressFree => sim.mem_address_free(address, 2 * bytes),
            Verb::MemCreate => sim.mem_create(DEVICE, bytes).map(drop),
            Verb::MemCreateHost => sim.mem_create_host(HostNode(0), bytes).map(drop),
            Verb::MemRelease => sim.mem_release(self.free),
            Verb::MemMap => sim.mem_map(address.offset(bytes), bytes, self.free),
            Verb::MemSetAccess => sim.mem_set_access(address, bytes, &[DEVICE]),
            Verb::MemUnmap => sim.mem_unmap(address, bytes),
            Verb::MemAlloc => sim.mem_alloc(bytes).map(drop),
            Verb::MemFree => sim.mem_free(self.linear),
            Verb::MemHostAlloc
            | Verb::MemFreeHost
            | Verb::MemHostRegister
            | Verb::MemHostRegisterReadOnly
            | Verb::MemHostUnregister
            | Verb::PointerGetHostRange => call_host(sim, verb),
            Verb::MemcpyHtodAsync => {
                // SAFETY: pageable memory, so the call waits for the copy.
                unsafe { sim.memcpy_htod_async(address, buffer.as_ptr(), 8, self.stream) }
            }
            Verb::MemcpyDtohAsync => {
                // SAFETY: pageable memory, so the call waits for the copy.
                unsafe { sim.memcpy_dtoh_async(buffer.as_mut_ptr(), address, 8, self.stream) }
            }
            Verb::MemsetD8Async => sim.memset_d8_async(address, 9, 8, self.stream),
            Verb::StreamCreate => sim.stream_create().map(drop),
            Verb::StreamDestroy => sim.stream_destroy(self.stream),
            Verb::StreamSynchronize => sim.stream_synchronize(self.stream),
            Verb::StreamQuery => sim.stream_query(self.stream),
            Verb::StreamWaitEvent => sim.stream_wait_event(self.stream, self.event),
            Verb::StreamGetId => sim.stream_get_id(self.stream).map(drop),
            Verb::StreamGetContext => sim.stream_get_context(self.stream).map(drop),
            Verb::StreamIsCapturing => sim.stream_is_capturing(self.stream).map(drop),
            Verb::ThreadExchangeStreamCaptureMode => {
                sim.thread_exchange_stream_capture_mode(CaptureMode::Relaxed).map(drop)
            }
            Verb::GraphRetain => {
                sim.graph_retain(self.stream, Box::new(|| panic!("released by a failed call")))
            }
            Verb::EventCreate => sim.event_create().map(drop),
            Verb::EventCreateTimed => sim.event_create_timed().map(drop),
            Verb::EventElapsed => sim.event_elapsed(self.event, self.event).map(drop),
            Verb::EventDestroy => sim.event_destroy(self.event),
            Verb::EventRecord => sim.event_record(self.event, self.stream),
            Verb::EventQuery => sim.event_query(self.event),
            Verb::ModuleLoad => sim.module_load(),
            Verb::LaunchKernel => self.launch(sim),
        }
    }

    fn launch(&self, sim: &Sim) -> DriverResult<()> {
        let (target, seed) = (self.address, 1);
        sim.launch_kernel(
            KernelCall::Pattern { target, bytes: 8, seed, delay_nanos: 0 },
            self.stream,
        )
    }
}

/// What asks about a device.
fn call_device(sim: &Sim, verb: Verb) -> DriverResult<()> {
    match verb {
        Verb::DeviceCanAccessPeer => sim.device_can_access_peer(DEVICE, DEVICE).map(drop),
        _ => sim.device_get_attribute(DEVICE, DeviceAttribute::Integrated).map(drop),
    }
}

/// A call of a verb of page-locked memory that would succeed.
fn call_host(sim: &Sim, verb: Verb) -> DriverResult<()> {
    match verb {
        Verb::MemHostAlloc => sim.mem_host_alloc(4096).map(drop),
        Verb::MemFreeHost => {
            let memory = sim.mem_host_alloc(4096).unwrap();
            // SAFETY: allocated above and not used.
            unsafe { sim.mem_free_host(memory) }
        }
        Verb::MemHostRegister => {
            // SAFETY: memory that lives for ever.
            unsafe { sim.mem_host_register(immortal(), 8) }
        }
        Verb::MemHostRegisterReadOnly => {
            let pages = super::registered::file_pages(4096);
            let at = NonNull::new(pages.as_mut_ptr()).unwrap();
            std::mem::forget(pages);
            // SAFETY: a mapping that lives for ever.
            unsafe { sim.mem_host_register_read_only(at, 4096) }
        }
        Verb::MemHostUnregister => {
            let memory = immortal();
            // SAFETY: memory that lives for ever.
            unsafe { sim.mem_host_register(memory, 8) }.unwrap();
            sim.mem_host_unregister(memory)
        }
        Verb::PointerGetHostRange => sim.pointer_get_host_range(8).map(drop),
        _ => unreachable!("{verb} is none of host memory"),
    }
}

/// Everything that a verb could change, as one text.
fn state(sim: &Sim, stage: &Stage) -> String {
    let context = sim.ctx_get_current();
    let mode = sim.thread_exchange_stream_capture_mode(CaptureMode::Global).unwrap();
    format!(
        "{context:?} {mode:?} {:?} frames {} {} reservations {} {} mappings {} events {} \
         streams {} locked {} bytes {:?} {:?}",
        sim.mem_get_info(),
        sim.live_frames(DEVICE),
        sim.used_bytes(DEVICE),
        sim.live_reservations(),
        sim.reserved_bytes(),
        sim.live_mappings(),
        sim.live_events(),
        sim.live_streams(),
        sim.locked_bytes(),
        sim.read_bytes(stage.address, 8),
        sim.violations(),
    )
}

#[test]
fn a_verb_that_fails_changes_nothing() {
    for &verb in Verb::ALL {
        let (sim, rig) = open("capacity=4M,granularity=64K,read_only=1");
        let stage = Stage::new(&sim, &rig);
        let before = state(&sim, &stage);
        sim.fail_nth(verb, 1, DriverCode::UNKNOWN);
        let calls = sim.calls(verb);
        let result = stage.call(&sim, verb);
        assert_eq!(result, Err(vbar::driver::DriverError::new(verb.call(), DriverCode::UNKNOWN)));
        assert_eq!(sim.calls(verb), calls + 1);
        let expected = match verb {
            // The memory that was to be freed is still there.
            Verb::MemFreeHost => before.replace("locked 0", "locked 4096"),
            Verb::MemHostUnregister => before.replace("locked 0", "locked 8"),
            _ => before,
        };
        assert_eq!(state(&sim, &stage), expected, "{verb}");
        // And the next one goes through as if nothing had been.
        let refused = [Verb::GraphRetain, Verb::MemAddressFree, Verb::EventElapsed];
        let needs_access =
            [Verb::MemcpyHtodAsync, Verb::MemcpyDtohAsync, Verb::MemsetD8Async, Verb::LaunchKernel];
        if needs_access.contains(&verb) {
            sim.mem_set_access(stage.address, stage.bytes, &[DEVICE]).unwrap();
        }
        assert_eq!(stage.call(&sim, verb).is_err(), refused.contains(&verb), "{verb}");
        let _ = sim.mem_release(stage.mapped);
        assert_eq!(sim.violations(), Vec::<String>::new(), "{verb}");
    }
}

#[test]
fn failures_come_from_the_option_string_too() {
    let sim = sim("capacity=4M,granularity=64K,fail=mem_create:2:2,fail=mem_create:4:600");
    let codes: Vec<_> = (0..5).map(|_| sim.mem_create(DEVICE, 65536).err()).collect();
    let codes: Vec<_> = codes.into_iter().map(|error| error.map_or(0, |one| one.code.0)).collect();
    assert_eq!(codes, [0, 2, 0, 600, 0]);
}

#[test]
fn failures_last_as_long_as_asked() {
    let sim = sim("capacity=4M,granularity=64K");
    let create = || sim.mem_create(DEVICE, 65536).map_err(|error| error.code);
    sim.fail_next_n(Verb::MemCreate, 2, DriverCode::NOT_READY);
    assert_eq!((create(), create()), (Err(DriverCode::NOT_READY), Err(DriverCode::NOT_READY)));
    create().unwrap();
    sim.fail_always(Verb::MemCreate, DriverCode::OUT_OF_MEMORY);
    assert!((0..50).all(|_| create().is_err()));
    sim.heal();
    create().unwrap();
    sim.fail_rate(0.5, 1);
    let failed: Vec<_> = (0..60).filter_map(|_| create().err()).collect();
    assert!(failed.iter().all(|code| code.is_transient()) && failed.len() > 10);
    sim.heal();
    create().unwrap();
}

#[test]
fn a_sticky_failure_loses_the_device() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let (stream, event) = (rig.stream(), rig.event());
    sim.fail_nth(Verb::EventRecord, 1, DriverCode::ECC_UNCORRECTABLE);
    assert_code(sim.event_record(event, stream), DriverCode::ECC_UNCORRECTABLE);
    assert_code(sim.event_query(event), DriverCode::ECC_UNCORRECTABLE);
    assert_code(sim.stream_synchronize(stream), DriverCode::ECC_UNCORRECTABLE);
    assert_code(sim.mem_create(DEVICE, rig.page), DriverCode::ECC_UNCORRECTABLE);
    assert_code(sim.mem_address_reserve(rig.page, 0), DriverCode::ECC_UNCORRECTABLE);
    // The first sticky code stays.
    sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    assert_code(sim.mem_get_info(), DriverCode::ECC_UNCORRECTABLE);
}

#[test]
fn work_of_a_lost_device_ends_undone() {
    let (sim, rig) = open("capacity=4M,granularity=64K");
    let (pages, stream) = (rig.pages(1), rig.stream());
    sim.hold_stream(stream).unwrap();
    rig.memset(pages.address, 1, 8, stream);
    sim.lose_device(DEVICE, DriverCode::ILLEGAL_ADDRESS);
    sim.release_stream(stream).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert_eq!(sim.read_bytes(pages.address, 1).unwrap(), [0]);
}
