//! VBARs: creating, binding, ranks and marks, memory given back, residency, closing.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::allocation;
use super::call::{call, invalid, stale};
use super::device::{self, VbarDevice, VbarStream, choice};
use super::source::{self, VbarBindSource};
use super::status::VbarStatus;
use super::tag;
use super::value::{Growing, Out, OutArray, OutGrowing, Plain, byte_range, read_array};
use crate::error::Result;
use crate::memory::page_table::PageState;
use crate::memory::pager::{Freed, HeldPins, Residency, Shortfall};
use crate::model::binding::Binding;
use crate::runtime::Vbar;
use crate::slots::thread::{self, Thread};
use crate::slots::{Handles, Ref, Spread};
use crate::sync::Mutex;
use crate::units::Stream;

/// A VBAR. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarBar {
    /// The id.
    pub id: u64,
}

/// What a VBAR is, and its marks now.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarBarInfo {
    /// `sizeof(VbarBarInfo)`, set by the caller.
    pub size: usize,
    /// Its first device address, a multiple of the page size; it never changes.
    pub address: u64,
    /// Its length in bytes, whole pages.
    pub bytes: u64,
    /// Size of a page in bytes.
    pub page_bytes: u64,
    /// Pages.
    pub page_count: u32,
    /// Pages that have a frame.
    pub resident_count: u32,
    /// Pages at or above are not faulted in; all pages of a bound VBAR, which has none. An eviction
    /// lowers it to its page; prioritising lifts it to all pages, and it heals with time when
    /// memory is left.
    pub watermark: u32,
    /// Pages below are not evicted.
    pub floor: u32,
    /// A larger class is kept longer.
    pub priority_class: i32,
    /// 0 where the device has no addresses for it, so that every fault is offloaded; else 1.
    pub has_addresses: u32,
}

/// Why memory that was asked back did not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarShortfall {
    /// All of it came.
    None = 0,
    /// No page has a frame.
    NothingResident = 1,
    /// What is left lies below the floor.
    AtFloor = 2,
    /// What is left is pinned.
    AllPinned = 3,
    /// What is left was used by streams that no fence covers, and waits for the context are off.
    FenceUnknown = 4,
    /// What is left was still in use when the time was over.
    TimedOut = 5,
}

/// What giving memory back came to.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarFreed {
    /// Bytes given back to the driver, whole pages.
    pub bytes: u64,
    /// A `VbarShortfall`: why it was less than was asked.
    pub shortfall: u32,
    /// Pages that are pinned, for `VBAR_SHORTFALL_ALL_PINNED`.
    pub pinned_count: u32,
}

/// What a page is to the library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarPageState {
    /// No frame.
    Absent = 0,
    /// Getting its frame.
    Claimed = 1,
    /// It has a frame; its bytes, or the frame's former users, are on their way. It counts as
    /// loaded: what is enqueued behind a fault finds them.
    Issued = 2,
    /// It has a frame, and everything before it is done.
    Resident = 3,
    /// Backed by host memory that the device reads over the link.
    HostMapped = 4,
    /// On its way out.
    Evicting = 5,
    /// Lost to a failed undo; never used again.
    Quarantined = 6,
}

/// One page of a residency map.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarPage {
    /// Changes when the page lost its bytes, and never repeats in a process.
    pub generation: u64,
    /// A `VbarPageState`.
    pub state: u32,
    /// Pins.
    pub pin_count: u32,
}

/// What an end of run does with pins that are still held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarHeldPins {
    /// They stay.
    Keep = 0,
    /// They are taken back: their tokens are stale, and are given back all the same, to be freed.
    Release = 1,
}

/// Which bytes of which file belong where in a VBAR.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarBindSegment {
    /// First byte in the VBAR.
    pub bar_offset: u64,
    /// First byte in the file.
    pub source_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Index of the file among the sources.
    pub source: u32,
    /// 0: stored as it is in memory. Others may come.
    pub encoding: u32,
}

// SAFETY: integers; the size first.
unsafe impl Plain for VbarBarInfo {}
// SAFETY: as above.
unsafe impl Growing for VbarBarInfo {
    const FIRST_BYTES: usize = std::mem::offset_of!(VbarBarInfo, has_addresses) + size_of::<u32>();
}
// SAFETY: integers.
unsafe impl Plain for VbarBar {}
// SAFETY: integers.
unsafe impl Plain for VbarFreed {}
// SAFETY: integers.
unsafe impl Plain for VbarPage {}
// SAFETY: integers.
unsafe impl Plain for VbarBindSegment {}
// SAFETY: an integer.
unsafe impl Plain for u32 {}

/// Who may close a VBAR.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Its id's holder.
    Caller,
    /// The model that it is part of.
    Model,
}

pub(super) struct BarEntry {
    pub(super) vbar: Vbar,
    owner: Owner,
    /// Ids of its allocations, which end with it.
    pub(super) allocations: Mutex<Vec<u64>>,
}

static BARS: Handles<BarEntry> = Handles::new(tag::BAR, Spread::Threads);

/// The VBAR that an id names.
///
/// # Errors
/// `StaleHandle`.
pub(super) fn find(bar: VbarBar) -> Result<Ref<BarEntry>> {
    thread::with(|thread| find_on(thread, bar))
}

/// As [`find`], for who has looked up the calling thread already.
///
/// # Errors
/// As there.
#[inline(always)]
pub(super) fn find_on(thread: &Thread, bar: VbarBar) -> Result<Ref<BarEntry>> {
    BARS.get_on(thread, bar.id).ok_or_else(|| stale("VBAR", bar.id))
}

/// Gives a VBAR an id.
///
/// # Errors
/// `Internal` when there are no more ids.
pub(super) fn enter(vbar: Vbar, owner: Owner) -> Result<VbarBar> {
    let entry = BarEntry { vbar, owner, allocations: Mutex::new(Vec::new()) };
    let id = BARS.insert(entry).map_err(|_| device::too_many("VBARs"))?;
    Ok(VbarBar { id })
}

/// Closes a VBAR and ends the ids of it and of its allocations.
///
/// # Errors
/// `StaleHandle`; `InvalidArgument` when somebody else owns it.
pub(super) fn close(bar: VbarBar, owner: Owner) -> Result<Vbar> {
    let entry = find(bar)?;
    if entry.owner != owner {
        return Err(invalid("the VBAR belongs to a model: close the model"));
    }
    if !entry.close() {
        return Err(stale("VBAR", bar.id));
    }
    allocation::forget_allocations(&entry.allocations);
    entry.vbar.close();
    Ok(entry.vbar.clone())
}

/// Makes a VBAR of `bytes`, rounded up to whole pages: addresses that cost nothing. Where the
/// driver has none for it, every fault is offloaded. Statuses: the common ones, the driver's;
/// `INVALID_ARGUMENT` for no bytes, or more than 2^31 pages. Thread-safe.
///
/// # Safety
/// `bar` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_create(
    device: VbarDevice,
    bytes: u64,
    bar: *mut VbarBar,
) -> VbarStatus {
    call(|| {
        let out = Out::new(bar)?;
        let vbar = device::find(device)?.runtime.create_bar(bytes)?;
        out.write(enter(vbar, Owner::Caller)?);
        Ok(())
    })
}

/// Closes a VBAR and its allocations. Never blocks: its memory goes when the work that uses it is
/// done and its tokens were given back. Statuses: the common ones. Thread-safe; calls under way on
/// other threads finish, or return `VBAR_STATUS_CLOSED`.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_destroy(bar: VbarBar) -> VbarStatus {
    call(|| close(bar, Owner::Caller).map(|_| ()))
}

/// As `vbar_bar_destroy`, then waits until its memory was given back. The VBAR is closed also when
/// the wait times out, as it does while tokens of it are held. `vbar_bar_end_of_run` before it
/// covers the last use with a fence. Statuses: the common ones, the driver's, `TIMED_OUT`,
/// `CANCELLED`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_destroy_wait(bar: VbarBar) -> VbarStatus {
    call(|| close(bar, Owner::Caller)?.destroy_wait())
}

/// Tells what a VBAR is, and its marks. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// `info` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_info(bar: VbarBar, info: *mut VbarBarInfo) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(info)?;
        let entry = find(bar)?;
        let (vbar, marks) = (&entry.vbar, entry.vbar.marks());
        out.write(VbarBarInfo {
            size: 0,
            address: vbar.base().0,
            bytes: vbar.bytes(),
            page_bytes: vbar.runtime().page_size().bytes(),
            page_count: marks.page_count,
            resident_count: marks.resident,
            watermark: marks.watermark,
            floor: marks.floor,
            priority_class: marks.class,
            has_addresses: u32::from(vbar.is_reserved()),
        });
        Ok(())
    })
}

/// Binds a VBAR that was never used to files and host memory: from now on a fault fills what it
/// maps. Once for a VBAR, in any order of segments, none overlapping; what no segment covers has no
/// bytes of its own. Works for any format whose tensors are stored as they are in memory. Statuses:
/// the common ones, the driver's, `CLOSED`, `IO`, `FORMAT` for what is no regular file,
/// `HOST_MEMORY` for the staging slots; `INVALID_ARGUMENT` for a VBAR that was used, segments that
/// overlap or leave the VBAR or their source, and memory that is not page-locked where it must be.
/// Thread-safe.
///
/// # Safety
/// Both arrays have as many elements as is said, their paths are C strings, and nobody writes them
/// during the call. Memory of sources stays as it is for as long as `VbarBindSource` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_bind(
    bar: VbarBar,
    sources: *const VbarBindSource,
    source_count: usize,
    segments: *const VbarBindSegment,
    segment_count: usize,
) -> VbarStatus {
    call(|| {
        // First of all: whatever goes wrong from here on, the owners of memory are told.
        let sources = source::take(read_array(sources, source_count)?);
        let segments = read_array(segments, segment_count)?;
        let entry = find(bar)?;
        let mut binding = Binding::new();
        segments.iter().try_for_each(|segment| bind_segment(&mut binding, segment))?;
        let sources = sources.into_iter().map(source::Taken::open).collect::<Result<Vec<_>>>()?;
        entry.vbar.bind_sources(binding, sources)
    })
}

fn bind_segment(binding: &mut Binding, segment: &VbarBindSegment) -> Result<()> {
    if segment.encoding != 0 {
        return Err(invalid(format!("encoding {} is not known", segment.encoding)));
    }
    let target = byte_range(segment.bar_offset, segment.bytes)?;
    binding.bind(target, segment.source as usize, segment.source_offset, segment.bytes)
}

/// Makes a VBAR the newest of its class and lifts its watermark to all pages. Statuses: the common
/// ones, `CLOSED`, `DEVICE_LOST`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_prioritise(bar: VbarBar) -> VbarStatus {
    call(|| find(bar)?.vbar.prioritise())
}

/// Makes a VBAR the oldest of its class: the first to lose pages. Statuses: the common ones,
/// `CLOSED`, `DEVICE_LOST`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_deprioritise(bar: VbarBar) -> VbarStatus {
    call(|| find(bar)?.vbar.deprioritise())
}

/// Puts a VBAR into a class, 0 at first; a larger one is kept longer. Statuses: the common ones,
/// `CLOSED`, `DEVICE_LOST`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_set_class(bar: VbarBar, priority_class: i32) -> VbarStatus {
    call(|| find(bar)?.vbar.set_class(priority_class))
}

/// Keeps the first `page_count` pages of a VBAR from eviction until the end of its run. Statuses:
/// the common ones, `CLOSED`, `DEVICE_LOST`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_set_floor(bar: VbarBar, page_count: u32) -> VbarStatus {
    call(|| find(bar)?.vbar.set_floor(page_count))
}

/// Sets the watermark of a VBAR that is not bound, in pages, and frees unpinned pages at or above
/// it. A bound one has none: use `vbar_bar_free_memory`. Statuses: the common ones, the driver's,
/// `CLOSED`, `CANCELLED`; `INVALID_ARGUMENT` for a bound one. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_set_watermark(bar: VbarBar, page_count: u32) -> VbarStatus {
    call(|| find(bar)?.vbar.set_watermark(page_count))
}

/// Gives memory of a VBAR back to the driver: from its end down to its floor, whole pages;
/// UINT64_MAX asks for everything. Waits for fences, never for pins, and tells why it was less.
/// Fences are recorded now and then: `vbar_bar_end_of_run` before it covers the last use. Lowers
/// the watermark of a VBAR that is not bound: prioritise it before its next run. Statuses: the
/// common ones, the driver's, `CLOSED`, `CANCELLED`; time that runs out is a shortfall.
/// Thread-safe.
///
/// # Safety
/// `freed` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_free_memory(
    bar: VbarBar,
    bytes: u64,
    freed: *mut VbarFreed,
) -> VbarStatus {
    call(|| {
        let out = Out::new(freed)?;
        out.write(find(bar)?.vbar.free_memory(bytes)?.into());
        Ok(())
    })
}

/// Ends a run of a VBAR, whose work was enqueued on `stream`: records a fence, lifts the floor, and
/// tells how many pages still have pins, which stay or are taken back (a `VbarHeldPins`). Statuses:
/// the common ones, the driver's, `CLOSED`. Thread-safe.
///
/// # Safety
/// `pinned_count` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_end_of_run(
    bar: VbarBar,
    stream: VbarStream,
    held: u32,
    pinned_count: *mut u32,
) -> VbarStatus {
    call(|| {
        let out = Out::new(pinned_count)?;
        let held = choice("held", held, [HeldPins::Keep, HeldPins::Release])?;
        let ended = find(bar)?.vbar.end_of_run(Stream(stream), held)?;
        out.write(u32::try_from(ended.held.len()).unwrap_or(u32::MAX));
        Ok(())
    })
}

/// Tells the state of `count` pages of a VBAR from `first` on; of those whose bytes were on their
/// way the driver is asked whether they have arrived. Statuses: the common ones. Thread-safe; each
/// page is told as it was at some moment of the call.
///
/// # Safety
/// `pages` has room for `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_bar_residency(
    bar: VbarBar,
    first: u32,
    count: usize,
    pages: *mut VbarPage,
) -> VbarStatus {
    call(|| {
        let out = OutArray::new(pages, count)?;
        let entry = find(bar)?;
        let page_count = entry.vbar.marks().page_count;
        let end = u32::try_from(count).ok().and_then(|count| first.checked_add(count));
        let Some(end) = end.filter(|end| *end <= page_count) else {
            return Err(invalid(format!("{count} pages from {first} of a VBAR of {page_count}")));
        };
        out.write(entry.vbar.residency_of(first..end).iter().map(VbarPage::from));
        Ok(())
    })
}

impl From<&Residency> for VbarPage {
    fn from(page: &Residency) -> Self {
        let state = match page.state {
            PageState::Absent => VbarPageState::Absent,
            PageState::Claimed => VbarPageState::Claimed,
            PageState::Issued => VbarPageState::Issued,
            PageState::Resident => VbarPageState::Resident,
            PageState::HostMapped => VbarPageState::HostMapped,
            PageState::Evicting => VbarPageState::Evicting,
            PageState::Quarantined => VbarPageState::Quarantined,
        };
        Self { generation: page.generation.0, state: state as u32, pin_count: page.pins }
    }
}

impl From<Freed> for VbarFreed {
    fn from(freed: Freed) -> Self {
        let (shortfall, pinned_count) = match freed.shortfall {
            None => (VbarShortfall::None, 0),
            Some(Shortfall::NothingResident) => (VbarShortfall::NothingResident, 0),
            Some(Shortfall::AtFloor) => (VbarShortfall::AtFloor, 0),
            Some(Shortfall::AllPinned(pages)) => (VbarShortfall::AllPinned, pages),
            Some(Shortfall::FenceUnknown) => (VbarShortfall::FenceUnknown, 0),
            Some(Shortfall::TimedOut) => (VbarShortfall::TimedOut, 0),
        };
        Self { bytes: freed.bytes, shortfall: shortfall as u32, pinned_count }
    }
}
