//! What PyTorch's allocator counts and how its memory is laid out, for who tells programs.
//!
//! `torch.cuda.memory_stats` and its like raise with a plug-in allocator; the Python package
//! answers them from here. Structs and copies of numbers, nothing else.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::super::call::call;
use super::super::device::VbarStream;
use super::super::status::VbarStatus;
use super::super::value::{Growing, Out, OutArray, OutGrowing, Plain};
use super::{VbarTorchPool, table};
use crate::torch::{Block, BlockState, Kind, PoolStat, Segment, Stat};

/// One number over time.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct VbarTorchStat {
    /// Now.
    pub current: u64,
    /// The most since the start or the last `vbar_torch_reset_peaks`.
    pub peak: u64,
    /// All that was added since the start or the last `vbar_torch_reset_accumulated`.
    pub allocated: u64,
    /// All that was taken off since then.
    pub freed: u64,
}

/// A number of all requests, of small ones and of large ones.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct VbarTorchPoolStat {
    /// All.
    pub all: VbarTorchStat,
    /// Small requests.
    pub small_pool: VbarTorchStat,
    /// Large requests.
    pub large_pool: VbarTorchStat,
}

/// What PyTorch's allocator of a device counts. Names are the keys of `torch.cuda.memory_stats`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarTorchStatistics {
    /// `sizeof(VbarTorchStatistics)`, set by the caller.
    pub size: usize,
    /// Live blocks.
    pub allocation: VbarTorchPoolStat,
    /// Runs of neighbouring pages that are mapped.
    pub segment: VbarTorchPoolStat,
    /// Live blocks, and those that were freed and wait for streams.
    pub active: VbarTorchPoolStat,
    /// Free pieces of pages that are partly used.
    pub inactive_split: VbarTorchPoolStat,
    /// Bytes of live blocks, rounded up as they are.
    pub allocated_bytes: VbarTorchPoolStat,
    /// Bytes of mapped pages.
    pub reserved_bytes: VbarTorchPoolStat,
    /// Bytes of `active`.
    pub active_bytes: VbarTorchPoolStat,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: VbarTorchPoolStat,
    /// Bytes of live blocks, as they were asked for.
    pub requested_bytes: VbarTorchPoolStat,
    /// Requests that were searched for again after memory was given back.
    pub alloc_retry_count: u64,
    /// Requests that ended out of memory.
    pub oom_count: u64,
    /// Times that all streams were waited for.
    pub sync_all_streams_count: u64,
    /// Pages mapped.
    pub device_alloc_count: u64,
    /// Pages given back.
    pub device_free_count: u64,
    /// Requests of at least one byte: 0 while PyTorch allocates elsewhere.
    pub malloc_count: u64,
    /// Frees that were served.
    pub free_count: u64,
    /// Frees of an address that no live block begins at; NULL is none.
    pub unknown_free_count: u64,
    /// Bytes in blocks that were freed and wait for streams or for the end of a capture.
    pub pending_bytes: u64,
    /// Bytes of the pages of graph pools.
    pub pool_bytes: u64,
    /// Bytes of mapped pages that cached blocks may keep before weights are evicted.
    pub reserve_bytes: u64,
    /// Bytes that the driver calls free.
    pub device_free_bytes: u64,
    /// The whole device, in bytes.
    pub device_total_bytes: u64,
    /// Bytes of frames that no page has: theirs who ask first.
    pub free_frame_bytes: u64,
    /// The part of the device's memory that PyTorch may hold, 0 to 1.
    pub memory_fraction: f64,
}

/// What a piece of a segment is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarTorchBlockState {
    /// `active_allocated`.
    Allocated = 1,
    /// `active_awaiting_free`.
    AwaitingFree = 2,
    /// `inactive`.
    Free = 3,
}

/// A piece of a segment.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarTorchBlock {
    /// Its first byte.
    pub address: u64,
    /// Its length in bytes, rounded up as it is.
    pub bytes: u64,
    /// As it was asked for; 0 of a free piece.
    pub requested_bytes: u64,
    /// A `VbarTorchBlockState`.
    pub state: u32,
    /// 0.
    pub reserved: u32,
}

/// Neighbouring pages that are mapped, of one kind and pool.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarTorchSegment {
    /// Its first byte.
    pub address: u64,
    /// Its length in bytes, whole pages.
    pub bytes: u64,
    /// The stream that its first piece was used on last; `VBAR_STREAM_NONE` when none is known.
    pub stream: VbarStream,
    /// The graph pool; both 0 for the ordinary one.
    pub pool: VbarTorchPool,
    /// Its pieces, in order of address; they cover it.
    pub block_count: u64,
    /// 1 when it serves small requests, else 0.
    pub small: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: integers and a float, of which every pattern is a value; the size first.
unsafe impl Plain for VbarTorchStatistics {}
// SAFETY: as above.
unsafe impl Growing for VbarTorchStatistics {
    const FIRST_BYTES: usize =
        std::mem::offset_of!(VbarTorchStatistics, memory_fraction) + size_of::<f64>();
}
// SAFETY: integers.
unsafe impl Plain for VbarTorchBlock {}
// SAFETY: integers.
unsafe impl Plain for VbarTorchSegment {}

/// Tells what PyTorch's allocator of a device counts, opening the device as an allocation would.
/// Statuses: those of `vbar_device_open`. Thread-safe.
///
/// # Safety
/// `statistics` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_statistics(
    ordinal: i32,
    statistics: *mut VbarTorchStatistics,
) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(statistics)?;
        let device = table::device(ordinal)?;
        let runtime = &device.entry.runtime;
        let below = {
            let _scope = runtime.device().enter()?;
            runtime.device().driver.mem_get_info()?
        };
        let from = device.allocator.statistics();
        out.write(VbarTorchStatistics {
            size: 0,
            allocation: from.allocation.into(),
            segment: from.segment.into(),
            active: from.active.into(),
            inactive_split: from.inactive_split.into(),
            allocated_bytes: from.allocated_bytes.into(),
            reserved_bytes: from.reserved_bytes.into(),
            active_bytes: from.active_bytes.into(),
            inactive_split_bytes: from.inactive_split_bytes.into(),
            requested_bytes: from.requested_bytes.into(),
            alloc_retry_count: from.num_alloc_retries,
            oom_count: from.num_ooms,
            sync_all_streams_count: from.num_sync_all_streams,
            device_alloc_count: from.num_device_alloc,
            device_free_count: from.num_device_free,
            malloc_count: from.malloc_count,
            free_count: from.free_count,
            unknown_free_count: from.unknown_free,
            pending_bytes: from.pending_bytes,
            pool_bytes: from.pool_bytes,
            reserve_bytes: from.reserve_bytes,
            device_free_bytes: below.free_bytes,
            device_total_bytes: below.total_bytes,
            free_frame_bytes: runtime.statistics().memory.free_bytes,
            memory_fraction: device.allocator.fraction(),
        });
        Ok(())
    })
}

/// Makes every `peak` what is `current`. Statuses: those of `vbar_device_open`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_reset_peaks(ordinal: i32) -> VbarStatus {
    call(|| {
        table::device(ordinal)?.allocator.reset_peaks();
        Ok(())
    })
}

/// Makes every `allocated` and `freed`, and the counts that only grow, 0. Statuses: those of
/// `vbar_device_open`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_reset_accumulated(ordinal: i32) -> VbarStatus {
    call(|| {
        table::device(ordinal)?.allocator.reset_accumulated();
        Ok(())
    })
}

/// Tells all segments of a device and, one segment's after the other's, their pieces: as many as
/// there is room for, and how many there are. When there are more than room, make room and ask
/// again: each call looks anew. Statuses: those of `vbar_device_open`. Thread-safe.
///
/// # Safety
/// The arrays have room for as many as is said, NULL for none; the counts are NULL or can be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_snapshot(
    ordinal: i32,
    segments: *mut VbarTorchSegment,
    segment_capacity: usize,
    segment_count: *mut usize,
    blocks: *mut VbarTorchBlock,
    block_capacity: usize,
    block_count: *mut usize,
) -> VbarStatus {
    call(|| {
        let counts = (Out::new(segment_count)?, Out::new(block_count)?);
        let segments = OutArray::new(segments, segment_capacity)?;
        let blocks = OutArray::new(blocks, block_capacity)?;
        let found = table::device(ordinal)?.allocator.snapshot();
        segments.write(found.iter().map(VbarTorchSegment::from));
        blocks.write(found.iter().flat_map(|segment| &segment.blocks).map(VbarTorchBlock::from));
        counts.0.write(found.len());
        counts.1.write(found.iter().map(|segment| segment.blocks.len()).sum());
        Ok(())
    })
}

impl From<Stat> for VbarTorchStat {
    fn from(from: Stat) -> Self {
        let Stat { current, peak, allocated, freed } = from;
        Self { current, peak, allocated, freed }
    }
}

impl From<PoolStat> for VbarTorchPoolStat {
    fn from(from: PoolStat) -> Self {
        Self {
            all: from.all.into(),
            small_pool: from.small_pool.into(),
            large_pool: from.large_pool.into(),
        }
    }
}

impl From<&Segment> for VbarTorchSegment {
    fn from(from: &Segment) -> Self {
        let pool = from.pool.map_or((0, 0), |pool| (pool.0, pool.1));
        Self {
            address: from.address,
            bytes: from.bytes,
            stream: from.stream.0,
            pool: VbarTorchPool { first: pool.0, second: pool.1 },
            block_count: from.blocks.len() as u64,
            small: u32::from(from.kind == Kind::Small),
            reserved: 0,
        }
    }
}

impl From<&Block> for VbarTorchBlock {
    fn from(from: &Block) -> Self {
        let state = match from.state {
            BlockState::Allocated => VbarTorchBlockState::Allocated,
            BlockState::AwaitingFree => VbarTorchBlockState::AwaitingFree,
            BlockState::Free => VbarTorchBlockState::Free,
        };
        Self {
            address: from.address,
            bytes: from.bytes,
            requested_bytes: from.requested_bytes,
            state: state as u32,
            reserved: 0,
        }
    }
}
