//! Bytes that the program wrote, on their way from the device to memory that it comes back from.
//!
//! The memory is page-locked, within the allowance, and cut from windows: locking stops launches,
//! so it is done for many ranges at a time, and a window stays until what is held is too much or
//! its owner asks for it back. A copy runs on the program's stream, behind what it enqueued there;
//! its fence is noted with the memory, which goes when no copy to or from it is under way.

use std::sync::Arc;

use crate::copy::fill::Filler;
use crate::copy::transfer::OnStream;
use crate::error::{Error, ErrorCode, Result};
use crate::host::carved::Part;
use crate::host::locked::{self, LockedSlot};
use crate::host::memory::HostMemory;
use crate::outcome::WaitKind;
use crate::sync::ticket::Ticket;
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, MIB};

/// A window that is locked for ranges which are smaller.
const WINDOW_BYTES: u64 = 64 * MIB;
/// Others are whole huge pages.
const WINDOW_GRAIN: u64 = 2 * MIB;

impl Filler {
    /// Room for `bytes` that will be saved; the context is current.
    ///
    /// # Errors
    /// `HostMemory` where the allowance has none, the system is short of memory, or it cannot be
    /// locked.
    pub fn room_to_save(&self, bytes: u64) -> Result<Part> {
        self.sweep();
        let refuse = |why: &str| {
            let text = format!("{bytes} bytes to save what is written: {why}");
            Error::new(ErrorCode::HostMemory, text)
        };
        let length = usize::try_from(bytes).map_err(|_| refuse("more than there are addresses"))?;
        if let Some(part) = self.saved.take(length) {
            return Ok(part);
        }
        let whole = bytes.checked_next_multiple_of(WINDOW_GRAIN);
        let whole = whole.ok_or_else(|| refuse("more than there are addresses"))?;
        // A small one where there is no room for many.
        let large = self.window_to_save(whole.max(WINDOW_BYTES));
        let window = large.or_else(|_| self.window_to_save(whole));
        // One step: the housekeeping gives back what nobody has a part of.
        let window = window.map_err(|error| match self.device.is_lost() {
            true => error,
            false => refuse(&error.to_string()),
        })?;
        self.saved.add_for(window, length).ok_or_else(|| refuse("it does not fit a window"))
    }

    fn window_to_save(&self, bytes: u64) -> Result<LockedSlot> {
        if self.room.is_short() || !self.room.try_hold(bytes) {
            return Err(Error::new(ErrorCode::HostMemory, "no more may be page-locked"));
        }
        let _wait = self.device.wait(WaitKind::Register);
        let locked = usize::try_from(bytes)
            .map_err(|_| Error::new(ErrorCode::HostMemory, "more than there are addresses"))
            .and_then(|bytes| locked::map_window(&self.device.driver, bytes))
            .and_then(|slot| {
                let span = trace::span(Kind::Register).bytes(bytes);
                let locked = self.device.retry(|| slot.register());
                drop(span);
                locked.map(|()| slot).map_err(|error| self.device.note(error.into()))
            });
        locked.inspect_err(|_| self.room.release(bytes))
    }

    /// Enqueues the copy of a range of the device to its room, on a stream; the context is current.
    /// The range keeps its frames until the copy is done.
    ///
    /// # Errors
    /// What the driver says. The room is given up then.
    pub fn save(
        &self,
        bar: u32,
        mut room: Part,
        source: DeviceAddress,
        on: OnStream,
    ) -> Result<Arc<HostMemory>> {
        let (stream, length) = (on.stream, room.len());
        let copied = trace::span(Kind::Copy).device(self.device.ordinal).stream(stream);
        let _copied = copied.bytes(length as u64);
        let copy = || room.slot().copy_from_device(0..length, source, stream);
        self.device.retry(copy).map_err(|error| self.device.note(error.into()))?;
        let (free_at, fenced) = self.fence_on(on);
        let memory = Arc::new(HostMemory::of_part(room)?);
        if !free_at.is_none() {
            self.host_copies.note(bar, &memory, memory.lease()?, free_at);
        }
        if let Err(error) = fenced {
            self.host_copies.part(bar, memory);
            return Err(error);
        }
        Ok(memory)
    }

    /// Takes leave of memory that a range was saved to: it goes once nobody has it and no copy to
    /// or from it is under way. Returns the fences of those that are, for
    /// [`Filler::wait_for_saved`]. Calls no driver: whatever else fails, the memory goes.
    #[must_use]
    pub fn drop_saved(&self, bar: u32, memory: Arc<HostMemory>) -> Vec<Ticket> {
        let fences = self.host_copies.fences_of(&memory);
        self.host_copies.part(bar, memory);
        fences
    }

    /// Waits for the copies to and from memory that was dropped; the context is current.
    ///
    /// # Errors
    /// Those of waiting; the memory goes later all the same.
    pub fn wait_for_saved(&self, copies: &[Ticket]) -> Result<()> {
        let waited = self.device.wait_passed(copies, WaitKind::Ready);
        self.sweep();
        waited
    }

    /// Adds windows whose ranges were all dropped to those that are given back, `count` in all.
    pub(super) fn add_idle_saved(&self, windows: &mut Vec<LockedSlot>, count: usize) {
        windows.extend(self.saved.take_idle(count.saturating_sub(windows.len())));
    }
}
