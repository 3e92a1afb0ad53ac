//! Bytes that the program wrote, on their way from the device to memory that it comes back from.
//!
//! The memory is page-locked, within the allowance, and cut from windows: locking stops launches,
//! so it is done for many ranges at a time, ahead of need where there are threads (`copy/windows`),
//! and a window stays until what is held is too much, nothing was saved for a while or its owner
//! asks for it back. A copy runs on a stream of its own, so that neither the program's work nor a
//! fill waits for it: behind a fence of the program's stream, and with one of its own behind it.
//! That is noted with the memory, which goes when no copy to or from it is under way, and is for
//! whoever has the frames, which no copy may read any more when they are written anew.

use std::sync::Arc;

use crate::copy::fill::Filler;
use crate::copy::transfer::OnStream;
use crate::copy::windows::{AHEAD_BYTES, Asked, WINDOW_BYTES, length_of, window};
use crate::error::{Error, ErrorCode, Result};
use crate::host::carved::Part;
use crate::host::locked::LockedSlot;
use crate::host::memory::HostMemory;
use crate::outcome::WaitKind;
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, MIB, Stream};

/// Windows larger than usual, and smaller ones where there is no room, are whole huge pages.
const WINDOW_GRAIN: u64 = 2 * MIB;

impl Filler {
    /// Room for `bytes` that will be saved; the context is current.
    ///
    /// # Errors
    /// `HostMemory` where the allowance has none, the system is short of memory, or it cannot be
    /// locked.
    pub fn room_to_save(&self, bytes: u64) -> Result<Part> {
        self.sweep();
        self.windows.note_use();
        let refuse = |why: &str| {
            let text = format!("{bytes} bytes to save what is written: {why}");
            Error::new(ErrorCode::HostMemory, text)
        };
        let length = length_of(bytes).map_err(|error| refuse(&error.to_string()))?;
        if let Some(part) = self.saved.take(length) {
            if self.saved.free_bytes() < AHEAD_BYTES {
                self.ask_for_windows(None);
            }
            return Ok(part);
        }
        let whole = bytes.checked_next_multiple_of(WINDOW_GRAIN);
        let whole = whole.ok_or_else(|| refuse("more than there are addresses"))?;
        let part = self.lock_to_save(length, whole);
        part.map_err(|error| match error.code() {
            // What the driver does not lock is memory that there is not, if the device is well.
            ErrorCode::HostMemory | ErrorCode::Driver => refuse(&error.to_string()),
            _ => error,
        })
    }

    /// Room where none is free.
    fn lock_to_save(&self, length: usize, whole: u64) -> Result<Part> {
        let wait = self.device.wait(WaitKind::Register);
        while let Some(asked) = self.ask_for_windows(Some(whole)) {
            // Asked again before something came of it, another window would be locked.
            loop {
                let is_over = self.windows.wait(&asked, wait.check()?);
                if let Some(part) = self.saved.take(length) {
                    return Ok(part);
                }
                if is_over {
                    break;
                }
            }
            if let Some(error) = self.windows.refused(&asked, whole) {
                return Err(error);
            }
        }
        // A small one where there is no room for many.
        let large = self.window_to_save(whole.max(WINDOW_BYTES));
        let window = large.or_else(|_| self.window_to_save(whole))?;
        // One step: the housekeeping gives back what nobody has a part of.
        let small = || Error::new(ErrorCode::HostMemory, "it does not fit a window");
        self.saved.add_for(window, length).ok_or_else(small)
    }

    /// Has windows locked by a thread, if there is one.
    fn ask_for_windows(&self, wanted: Option<u64>) -> Option<Asked> {
        let of = (&self.device, &self.room, &self.saved);
        self.readers().map(|readers| self.windows.ask(&readers, of, wanted))
    }

    fn window_to_save(&self, bytes: u64) -> Result<LockedSlot> {
        window(&self.device, &self.room, bytes, |window| {
            let _span = trace::span(Kind::Register).bytes(bytes);
            let locked = self.device.retry(|| window.register());
            locked.map_err(|error| self.device.note(error.into()))
        })
    }

    /// Enqueues the copy of a range of the device to its room, behind what was enqueued on the
    /// program's stream; the context is current. The range keeps its frames until the copy is done.
    /// Returns its fence, also where the rest failed: none where nothing was enqueued.
    ///
    /// # Errors
    /// What the driver says. The room is given up then.
    pub fn save(
        &self,
        bar: u32,
        room: Part,
        source: DeviceAddress,
        program: OnStream,
    ) -> (Ticket, Result<Arc<HostMemory>>) {
        match self.begin_save(room, source, program) {
            Ok(memory) => self.end_save(bar, memory),
            Err(error) => (Ticket::NONE, Err(error)),
        }
    }

    fn begin_save(
        &self,
        mut room: Part,
        source: DeviceAddress,
        program: OnStream,
    ) -> Result<Arc<HostMemory>> {
        let (device, own, length) = (&self.device, self.saving, room.len());
        let written = device.retry(|| device.fences.record(program.stream, program.slot));
        let written = written.map_err(|error| device.note(error))?;
        let order = || device.fences.stream_wait(own.stream, own.slot, written);
        let is_ordered = device.retry(order).map_err(|error| device.note(error))?;
        assert!(is_ordered, "it was recorded above");
        let copied = trace::span(Kind::Copy).device(device.ordinal).stream(own.stream);
        let _copied = copied.bytes(length as u64);
        let copy = || room.slot().copy_from_device(0..length, source, own.stream);
        device.retry(copy).map_err(|error| device.note(error.into()))?;
        Ok(Arc::new(HostMemory::of_part(room).expect("a room is bytes in the address space")))
    }

    fn end_save(&self, bar: u32, memory: Arc<HostMemory>) -> (Ticket, Result<Arc<HostMemory>>) {
        let (free_at, fenced) = self.fence_on(self.saving);
        let noted = match free_at.is_none() {
            true => Ok(()),
            false => memory.lease().map(|it| self.host_copies.note(bar, &memory, it, free_at)),
        };
        match fenced.and(noted) {
            Ok(()) => (free_at, Ok(memory)),
            Err(error) => {
                self.host_copies.part(bar, memory);
                (free_at, Err(error))
            }
        }
    }

    /// The stream that is saved on, and its slot.
    #[must_use]
    pub fn saving(&self) -> (Stream, StreamSlot) {
        (self.saving.stream, self.saving.slot)
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
        let waited = self.cover_saves(copies);
        let waited = waited.and_then(|()| self.device.wait_passed(copies, WaitKind::Ready));
        self.sweep();
        waited
    }

    /// Records the fences that were not to be had for copies, if there are such copies.
    fn cover_saves(&self, copies: &[Ticket]) -> Result<()> {
        if copies.iter().all(|copy| self.device.fences.is_recorded(*copy)) {
            return Ok(());
        }
        self.cover()?;
        let OnStream { stream, slot } = self.saving;
        let covered = self.device.retry(|| self.device.fences.cover_stamps(stream, slot));
        covered.map_err(|error| self.device.note(error))
    }

    /// Whether windows that nothing is saved in are kept for nothing.
    pub(super) fn may_have_idle_saved(&self) -> bool {
        let is_due = self.windows.is_quiet() || self.room.is_short();
        (is_due || self.room.excess_bytes() > 0) && self.saved.is_any_idle()
    }

    /// Adds windows whose ranges were all dropped to those that are given back, `count` in all.
    pub(super) fn add_idle_saved(&self, windows: &mut Vec<LockedSlot>, count: usize) {
        windows.extend(self.saved.take_idle(count.saturating_sub(windows.len())));
    }
}
