//! The functions of the headers as a C program has them: statuses are numbers, and nothing but this
//! library's promise keeps a call from doing harm.

#![expect(unsafe_code, reason = "the functions are another language's")]

use std::ffi::{c_char, c_void};

use vbar::ffi::allocation::VbarAllocation;
use vbar::ffi::bar::{VbarBar, VbarBarInfo, VbarBindSegment, VbarFreed, VbarPage};
use vbar::ffi::device::{VbarDevice, VbarDeviceInfo, VbarDeviceOptions};
use vbar::ffi::dlpack::VbarDlpackTensor;
use vbar::ffi::fault::{VbarFault, VbarRange};
use vbar::ffi::log::VbarLogCallback;
use vbar::ffi::model::{VbarModel, VbarModelInfo, VbarTensor};
use vbar::ffi::sim::{VbarSim, VbarSimLive};
use vbar::ffi::sim_graph::VbarSimGraph;
use vbar::ffi::source::VbarBindSource;
use vbar::ffi::statistics::VbarStatistics;
use vbar::ffi::token::VbarToken;
use vbar::ffi::torch::VbarTorchPool;
use vbar::ffi::torch::graph::{VbarTorchGraph, VbarTorchGraphStatistics};
use vbar::ffi::torch::numbers::{VbarTorchBlock, VbarTorchSegment, VbarTorchStatistics};
use vbar::ffi::wait::VbarWaitCheck;

// SAFETY: the signatures are the headers'. That a call does no harm, whatever its arguments, is
// what this target is about; pointers that it gives are NULL, not aligned, or lead to enough bytes.
unsafe extern "C" {
    pub(super) safe fn vbar_device_read_file(
        device: VbarDevice,
        descriptor: i32,
        file_offset: u64,
        bytes: u64,
        target: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_device_write_file(
        device: VbarDevice,
        descriptor: i32,
        file_offset: u64,
        bytes: u64,
        source: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_device_copy_from_host(
        device: VbarDevice,
        memory: *const c_void,
        bytes: u64,
        target: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_device_lock_host(
        device: VbarDevice,
        memory: *mut c_void,
        bytes: u64,
    ) -> i32;
    pub(super) safe fn vbar_device_unlock_host(device: VbarDevice, memory: *mut c_void) -> i32;
    pub(super) safe fn vbar_abi_version() -> u32;
    pub(super) safe fn vbar_version() -> *const c_char;
    pub(super) safe fn vbar_status_text(status: i32) -> *const c_char;
    pub(super) safe fn vbar_last_message() -> *const c_char;
    pub(super) safe fn vbar_log_set_level(level: u32) -> i32;
    pub(super) safe fn vbar_log_set_callback(callback: VbarLogCallback, user: *mut c_void) -> i32;
    pub(super) safe fn vbar_log_poll(
        message: *mut c_char,
        capacity: usize,
        level: *mut u32,
        message_bytes: *mut usize,
    ) -> i32;
    pub(super) safe fn vbar_device_open(
        options: *const VbarDeviceOptions,
        device: *mut VbarDevice,
    ) -> i32;
    pub(super) safe fn vbar_device_close(device: VbarDevice) -> i32;
    pub(super) safe fn vbar_device_info(device: VbarDevice, info: *mut VbarDeviceInfo) -> i32;
    pub(super) safe fn vbar_device_set_budget(device: VbarDevice, bytes: u64) -> i32;
    pub(super) safe fn vbar_device_set_headroom(device: VbarDevice, bytes: u64) -> i32;
    pub(super) safe fn vbar_device_budget(
        device: VbarDevice,
        budget_bytes: *mut u64,
        headroom_bytes: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_device_refresh(device: VbarDevice) -> i32;
    pub(super) safe fn vbar_device_trim(
        device: VbarDevice,
        keep_bytes: u64,
        freed_bytes: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_device_trim_host(
        device: VbarDevice,
        keep_bytes: u64,
        freed_bytes: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_device_trim_host_frames(
        device: VbarDevice,
        freed_bytes: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_device_free_memory(
        device: VbarDevice,
        bytes: u64,
        freed: *mut VbarFreed,
    ) -> i32;
    pub(super) safe fn vbar_stream_retire(device: VbarDevice, stream: usize) -> i32;
    pub(super) safe fn vbar_flag_raise(flag: *mut c_void);
    pub(super) safe fn vbar_bar_create(device: VbarDevice, bytes: u64, bar: *mut VbarBar) -> i32;
    pub(super) safe fn vbar_bar_destroy(bar: VbarBar) -> i32;
    pub(super) safe fn vbar_bar_destroy_wait(bar: VbarBar) -> i32;
    pub(super) safe fn vbar_bar_info(bar: VbarBar, info: *mut VbarBarInfo) -> i32;
    pub(super) safe fn vbar_bar_bind(
        bar: VbarBar,
        sources: *const VbarBindSource,
        source_count: usize,
        segments: *const VbarBindSegment,
        segment_count: usize,
    ) -> i32;
    pub(super) safe fn vbar_bar_prioritise(bar: VbarBar) -> i32;
    pub(super) safe fn vbar_bar_deprioritise(bar: VbarBar) -> i32;
    pub(super) safe fn vbar_bar_set_class(bar: VbarBar, priority_class: i32) -> i32;
    pub(super) safe fn vbar_bar_set_floor(bar: VbarBar, page_count: u32) -> i32;
    pub(super) safe fn vbar_bar_set_watermark(bar: VbarBar, page_count: u32) -> i32;
    pub(super) safe fn vbar_bar_free_memory(bar: VbarBar, bytes: u64, freed: *mut VbarFreed)
    -> i32;
    pub(super) safe fn vbar_bar_end_of_run(
        bar: VbarBar,
        stream: usize,
        held: u32,
        pinned_count: *mut u32,
    ) -> i32;
    pub(super) safe fn vbar_bar_residency(
        bar: VbarBar,
        first: u32,
        count: usize,
        pages: *mut VbarPage,
    ) -> i32;
    pub(super) safe fn vbar_bar_allocate(
        bar: VbarBar,
        bytes: u64,
        allocation: *mut VbarAllocation,
    ) -> i32;
    pub(super) safe fn vbar_allocation_place(
        allocation: VbarAllocation,
        address: *mut u64,
        bar_offset: *mut u64,
        bytes: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_allocation_fault(
        allocation: VbarAllocation,
        stream: usize,
        fault: *mut VbarFault,
    ) -> i32;
    pub(super) safe fn vbar_allocation_fault_wait(
        allocation: VbarAllocation,
        stream: usize,
        fault: *mut VbarFault,
    ) -> i32;
    pub(super) safe fn vbar_allocation_invalidate(allocation: VbarAllocation) -> i32;
    pub(super) safe fn vbar_bar_fault(
        bar: VbarBar,
        bar_offset: u64,
        bytes: u64,
        stream: usize,
        fault: *mut VbarFault,
    ) -> i32;
    pub(super) safe fn vbar_device_fault_many(
        device: VbarDevice,
        ranges: *const VbarRange,
        count: usize,
        stream: usize,
        faults: *mut VbarFault,
    ) -> i32;
    pub(super) safe fn vbar_reason_text(reason: u32) -> *const c_char;
    pub(super) safe fn vbar_token_unpin(token: VbarToken, stream: usize) -> i32;
    pub(super) safe fn vbar_tokens_unpin(
        tokens: *const VbarToken,
        count: usize,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_token_also_used_on(token: VbarToken, stream: usize) -> i32;
    pub(super) safe fn vbar_token_commit(token: VbarToken, stream: usize) -> i32;
    pub(super) safe fn vbar_device_set_wait_timeout(device: VbarDevice, milliseconds: u64) -> i32;
    pub(super) safe fn vbar_thread_set_wait_check(check: VbarWaitCheck, user: *mut c_void) -> i32;
    pub(super) safe fn vbar_device_cancel_waits(device: VbarDevice) -> i32;
    pub(super) safe fn vbar_model_open(
        device: VbarDevice,
        path: *const c_char,
        model: *mut VbarModel,
    ) -> i32;
    pub(super) safe fn vbar_model_open_descriptor(
        device: VbarDevice,
        descriptor: i32,
        name: *const c_char,
        model: *mut VbarModel,
    ) -> i32;
    pub(super) safe fn vbar_model_close(model: VbarModel) -> i32;
    pub(super) safe fn vbar_model_info(model: VbarModel, info: *mut VbarModelInfo) -> i32;
    pub(super) safe fn vbar_model_tensor(
        model: VbarModel,
        index: u64,
        tensor: *mut VbarTensor,
    ) -> i32;
    pub(super) safe fn vbar_model_find(
        model: VbarModel,
        name: *const c_char,
        index: *mut u64,
    ) -> i32;
    pub(super) safe fn vbar_model_metadata(
        model: VbarModel,
        key: *const c_char,
        value: *mut *const c_char,
    ) -> i32;
    pub(super) safe fn vbar_model_file(
        model: VbarModel,
        index: u32,
        path: *mut *const c_char,
    ) -> i32;
    pub(super) safe fn vbar_model_fault(
        model: VbarModel,
        index: u64,
        stream: usize,
        fault: *mut VbarFault,
    ) -> i32;
    pub(super) safe fn vbar_dtype_text(dtype: u32) -> *const c_char;
    pub(super) safe fn vbar_bar_prefetch(bar: VbarBar, bar_offset: u64, bytes: u64) -> i32;
    pub(super) safe fn vbar_bar_prepare_save(bar: VbarBar, bar_offset: u64, bytes: u64) -> i32;
    pub(super) safe fn vbar_bar_save(
        bar: VbarBar,
        bar_offset: u64,
        bytes: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_bar_drop_save(bar: VbarBar, bar_offset: u64, bytes: u64) -> i32;
    pub(super) safe fn vbar_model_prefetch(model: VbarModel, index: u64) -> i32;
    pub(super) safe fn vbar_device_schedule_hint(
        device: VbarDevice,
        ranges: *const VbarRange,
        range_counts: *const usize,
        step_count: usize,
    ) -> i32;
    pub(super) safe fn vbar_model_schedule_hint(
        model: VbarModel,
        indexes: *const u64,
        count: usize,
    ) -> i32;
    pub(super) safe fn vbar_dlpack_export(
        token: VbarToken,
        stream: usize,
        tensor: *const VbarDlpackTensor,
        managed: *mut *mut c_void,
    ) -> i32;
    pub(super) safe fn vbar_dlpack_set_capsule_functions(
        is_valid: *mut c_void,
        get_pointer: *mut c_void,
        set_pointer: *mut c_void,
        set_name: *mut c_void,
    ) -> i32;
    pub(super) safe fn vbar_dlpack_export_capsule(
        token: VbarToken,
        stream: usize,
        tensor: *const VbarDlpackTensor,
        capsule: *mut c_void,
    ) -> i32;
    pub(super) safe fn vbar_dlpack_capsule_destructor(capsule: *mut c_void);
    pub(super) safe fn vbar_device_statistics(
        device: VbarDevice,
        statistics: *mut VbarStatistics,
    ) -> i32;
    pub(super) safe fn vbar_torch_configure(options: *const VbarDeviceOptions) -> i32;
    pub(super) safe fn vbar_torch_device(ordinal: i32, device: *mut VbarDevice) -> i32;
    pub(super) safe fn vbar_torch_raise(raise: *mut u32) -> i32;
    pub(super) safe fn vbar_torch_statistics(
        ordinal: i32,
        statistics: *mut VbarTorchStatistics,
    ) -> i32;
    pub(super) safe fn vbar_torch_reset_peaks(ordinal: i32) -> i32;
    pub(super) safe fn vbar_torch_reset_accumulated(ordinal: i32) -> i32;
    pub(super) safe fn vbar_torch_snapshot(
        ordinal: i32,
        segments: *mut VbarTorchSegment,
        segment_capacity: usize,
        segment_count: *mut usize,
        blocks: *mut VbarTorchBlock,
        block_capacity: usize,
        block_count: *mut usize,
    ) -> i32;
    pub(super) safe fn vbar_torch_record_start(ordinal: i32, path: *const c_char) -> i32;
    pub(super) safe fn vbar_torch_record_stop(ordinal: i32, event_count: *mut u64) -> i32;
    pub(super) safe fn vbar_torch_graph_create(
        ordinal: i32,
        stream: usize,
        graph: *mut VbarTorchGraph,
    ) -> i32;
    pub(super) safe fn vbar_torch_graph_step(
        graph: VbarTorchGraph,
        step: u32,
        name: u64,
        broken: *mut u32,
    ) -> i32;
    pub(super) safe fn vbar_torch_graph_use_stream(graph: VbarTorchGraph, stream: usize) -> i32;
    pub(super) safe fn vbar_torch_graph_statistics(
        graph: VbarTorchGraph,
        statistics: *mut VbarTorchGraphStatistics,
    ) -> i32;
    pub(super) safe fn vbar_torch_graph_destroy(graph: VbarTorchGraph) -> i32;
    pub(super) safe fn vbar_sim_open(device: VbarDevice, sim: *mut VbarSim) -> i32;
    pub(super) safe fn vbar_sim_close(sim: VbarSim) -> i32;
    pub(super) safe fn vbar_sim_stream_create(device: VbarDevice, stream: *mut usize) -> i32;
    pub(super) safe fn vbar_sim_stream_destroy(device: VbarDevice, stream: usize) -> i32;
    pub(super) safe fn vbar_sim_stream_wait(device: VbarDevice, stream: usize, other: usize)
    -> i32;
    pub(super) safe fn vbar_sim_stream_synchronize(device: VbarDevice, stream: usize) -> i32;
    pub(super) safe fn vbar_sim_stream_hold(device: VbarDevice, stream: usize) -> i32;
    pub(super) safe fn vbar_sim_stream_release(device: VbarDevice, stream: usize) -> i32;
    pub(super) safe fn vbar_sim_launch_checksum(
        device: VbarDevice,
        source: u64,
        bytes: u64,
        target: u64,
        delay_us: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_launch_pattern(
        device: VbarDevice,
        target: u64,
        bytes: u64,
        seed: u64,
        delay_us: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_launch_sleep(
        device: VbarDevice,
        delay_us: u64,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_copy_to_device(
        device: VbarDevice,
        target: u64,
        source: *const c_void,
        bytes: usize,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_copy_to_host(
        device: VbarDevice,
        target: *mut c_void,
        source: u64,
        bytes: usize,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_peek(
        sim: VbarSim,
        address: u64,
        target: *mut c_void,
        bytes: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_checksum(source: *const c_void, bytes: usize) -> u64;
    pub(super) safe fn vbar_sim_pattern(target: *mut c_void, bytes: usize, seed: u64) -> i32;
    pub(super) safe fn vbar_sim_set_outside_bytes(sim: VbarSim, bytes: u64) -> i32;
    pub(super) safe fn vbar_sim_fail(
        sim: VbarSim,
        verb: *const c_char,
        skip: u64,
        count: u64,
        code: i32,
    ) -> i32;
    pub(super) safe fn vbar_sim_fail_rate(sim: VbarSim, probability: f64, seed: u64) -> i32;
    pub(super) safe fn vbar_sim_heal(sim: VbarSim) -> i32;
    pub(super) safe fn vbar_sim_lose_device(sim: VbarSim, code: i32) -> i32;
    pub(super) safe fn vbar_sim_calls(sim: VbarSim, verb: *const c_char, count: *mut u64) -> i32;
    pub(super) safe fn vbar_sim_live(sim: VbarSim, live: *mut VbarSimLive) -> i32;
    pub(super) safe fn vbar_sim_violation_count(sim: VbarSim, count: *mut u64) -> i32;
    pub(super) safe fn vbar_sim_violation(
        sim: VbarSim,
        index: u64,
        text: *mut c_char,
        capacity: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_stream_begin_capture(
        device: VbarDevice,
        stream: usize,
        mode: u32,
    ) -> i32;
    pub(super) safe fn vbar_sim_stream_end_capture(
        device: VbarDevice,
        stream: usize,
        graph: *mut VbarSimGraph,
    ) -> i32;
    pub(super) safe fn vbar_sim_graph_launch(
        device: VbarDevice,
        graph: VbarSimGraph,
        stream: usize,
    ) -> i32;
    pub(super) safe fn vbar_sim_graph_destroy(graph: VbarSimGraph) -> i32;
}

// SAFETY: as above. PyTorch is not loaded, so that none of them throws.
unsafe extern "C-unwind" {
    pub(super) safe fn vbar_torch_malloc(size: usize, device: i32, stream: usize) -> *mut c_void;
    pub(super) safe fn vbar_torch_free(
        pointer: *mut c_void,
        size: usize,
        device: i32,
        stream: usize,
    );
    pub(super) safe fn vbar_torch_init(device_count: i32);
    pub(super) safe fn vbar_torch_reset();
    pub(super) safe fn vbar_torch_memory_fraction(fraction: f64, device: i32);
    pub(super) safe fn vbar_torch_base_alloc(pointer: *mut c_void, size: *mut usize)
    -> *mut c_void;
    pub(super) safe fn vbar_torch_record_stream(pointer: *mut c_void, stream: usize);
    pub(super) safe fn vbar_torch_begin_pool(device: i32, pool: VbarTorchPool, filter: *mut c_void);
    pub(super) safe fn vbar_torch_end_pool(device: i32, pool: VbarTorchPool);
    pub(super) safe fn vbar_torch_release_pool(device: i32, pool: VbarTorchPool);
    pub(super) safe fn vbar_torch_segment_malloc(
        size: usize,
        device: i32,
        stream: usize,
    ) -> *mut c_void;
    pub(super) safe fn vbar_torch_segment_free(
        pointer: *mut c_void,
        size: usize,
        device: i32,
        stream: usize,
    );
}
