//! The frames of one device: every driver handle that we hold, and what it is for.
//!
//! A plain table under the device's lock; it makes no driver call. Invariant: each frame is in
//! exactly one place, and `held` frames and those being created never exceed what the budget
//! allowed when they were asked for.

use crate::driver::FrameHandle;
use crate::sync::ticket::Ticket;

/// Index of a frame in the table.
pub type FrameIndex = u32;

/// Where a frame is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the free list, mapped nowhere but at addresses that are on their way out.
    Free,
    /// Behind a page, or on its way there.
    Mapped,
    /// On its way back to the driver; an old mapping of it has to go first.
    Leaving,
    /// In a state that the driver alone knows, after a failed undo. Never used again.
    Quarantined,
}

/// One frame.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The driver's handle.
    pub handle: FrameHandle,
    /// Where it is.
    pub place: Place,
    /// For a free frame: work that may still use it.
    pub users: Vec<Ticket>,
    /// It is mapped at addresses too that could not be unmapped: releasing its handle would not
    /// give its memory back.
    stray: bool,
    /// Mappings at addresses that the frame has left, and that are not removed yet. Until then the
    /// memory would outlive its handle, and the books would not be the driver's.
    old_mappings: u32,
}

/// All frames of a device.
#[derive(Default)]
pub struct Frames {
    frames: Vec<Option<Frame>>,
    vacant: Vec<FrameIndex>,
    free: Vec<FrameIndex>,
    creating: u32,
    held: u32,
    quarantined: u32,
    leaving: u32,
    peak: u32,
}

impl Frames {
    /// Frames that exist, and those being created: what counts against the budget.
    #[must_use]
    pub fn held(&self) -> u32 {
        self.held + self.creating
    }

    /// The most that were held at a time.
    #[must_use]
    pub fn peak(&self) -> u32 {
        self.peak
    }

    /// Frames on the free list.
    #[must_use]
    pub fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    /// Frames in quarantine.
    #[must_use]
    pub fn quarantined(&self) -> u32 {
        self.quarantined
    }

    /// Whether a frame is being created just now.
    #[must_use]
    pub fn is_creating(&self) -> bool {
        self.creating > 0
    }

    /// Counts `count` frames that the caller is about to create.
    pub fn start_creating(&mut self, count: u32) {
        self.creating += count;
        self.peak = self.peak.max(self.held());
    }

    /// Takes back the count of `count` frames that were not created after all.
    pub fn cancel_creating(&mut self, count: u32) {
        self.creating -= count;
    }

    /// Enters a frame that was created, behind a page.
    pub fn created(&mut self, handle: FrameHandle) -> FrameIndex {
        self.creating -= 1;
        self.held += 1;
        let (place, users) = (Place::Mapped, Vec::new());
        let frame = Some(Frame { handle, place, users, stray: false, old_mappings: 0 });
        match self.vacant.pop() {
            Some(index) => {
                self.frames[index as usize] = frame;
                index
            }
            None => {
                self.frames.push(frame);
                (self.frames.len() - 1) as FrameIndex
            }
        }
    }

    /// The frame's handle.
    #[must_use]
    pub fn handle(&self, index: FrameIndex) -> FrameHandle {
        self.frame(index).handle
    }

    /// Takes up to `count` free frames that `admit` allows, the latest freed first. `admit` is told
    /// what may still use a frame, and answers with what its next user must wait for: once a frame.
    pub fn take_free(
        &mut self,
        count: usize,
        mut admit: impl FnMut(&[Ticket]) -> Option<Vec<Ticket>>,
    ) -> Vec<(FrameIndex, Vec<Ticket>)> {
        let (mut taken, mut at) = (Vec::new(), self.free.len());
        while at > 0 && taken.len() < count {
            at -= 1;
            let index = self.free[at];
            let Some(users) = admit(&self.frame(index).users) else { continue };
            self.free.remove(at);
            let frame = self.frame_mut(index);
            frame.place = Place::Mapped;
            frame.users.clear();
            taken.push((index, users));
        }
        taken
    }

    /// Puts a frame on the free list, with what may still use it.
    pub fn put_free(&mut self, index: FrameIndex, users: Vec<Ticket>) {
        let frame = self.frame_mut(index);
        debug_assert_eq!(frame.place, Place::Mapped, "frame {index} freed twice");
        frame.place = Place::Free;
        frame.users = users;
        self.free.push(index);
    }

    /// Takes a free frame that could go back to the driver at once: `passed` holds for its users,
    /// and it has no old mapping.
    pub fn take_releasable(
        &mut self,
        mut passed: impl FnMut(&[Ticket]) -> bool,
    ) -> Option<FrameIndex> {
        let mut may_go = |index: &FrameIndex| {
            let frame = self.frame(*index);
            frame.old_mappings == 0 && passed(&frame.users)
        };
        let at = self.free.iter().rposition(&mut may_go)?;
        let index = self.free.remove(at);
        self.frame_mut(index).place = Place::Mapped;
        Some(index)
    }

    /// Frames that wait for an old mapping to go before they go back to the driver.
    #[must_use]
    pub fn leaving(&self) -> u32 {
        self.leaving
    }

    /// Mappings that the frame has left behind and that are not removed yet.
    #[must_use]
    pub fn old_mappings(&self, index: FrameIndex) -> u32 {
        self.frame(index).old_mappings
    }

    /// Counts a mapping that the frame leaves behind.
    pub fn leave_mapping(&mut self, index: FrameIndex) {
        self.frame_mut(index).old_mappings += 1;
    }

    /// A mapping that the frame left behind is gone. Gives the handle out if the frame was waiting
    /// for that to go back to the driver.
    pub fn drop_old_mapping(&mut self, index: FrameIndex) -> Option<FrameHandle> {
        let frame = self.frame_mut(index);
        frame.old_mappings -= 1;
        if frame.old_mappings > 0 || frame.place != Place::Leaving {
            return None;
        }
        frame.place = Place::Mapped;
        self.leaving -= 1;
        self.remove(index)
    }

    /// Notes that a mapping of the frame could not be removed. It still serves pages; the driver
    /// never gets it back.
    pub fn note_stray(&mut self, index: FrameIndex) {
        self.frame_mut(index).stray = true;
    }

    /// Forgets a frame that the caller releases to the driver, and gives its handle out. `None` for
    /// one with a stray mapping, which goes into quarantine instead, and for one that has to wait
    /// for an old mapping to go.
    pub fn remove(&mut self, index: FrameIndex) -> Option<FrameHandle> {
        if self.frame(index).stray {
            self.quarantine(index);
            return None;
        }
        if self.frame(index).old_mappings > 0 {
            self.frame_mut(index).place = Place::Leaving;
            self.leaving += 1;
            return None;
        }
        let frame = self.frames[index as usize].take().expect("a frame is removed once");
        debug_assert_eq!(frame.place, Place::Mapped, "only a taken frame is removed");
        self.vacant.push(index);
        self.held -= 1;
        Some(frame.handle)
    }

    /// Sets a frame aside for good. It still counts as held: the driver still has it.
    pub fn quarantine(&mut self, index: FrameIndex) {
        let frame = self.frame_mut(index);
        debug_assert_ne!(frame.place, Place::Free, "a free frame is in a known state");
        if frame.place != Place::Quarantined {
            frame.place = Place::Quarantined;
            self.quarantined += 1;
        }
    }

    /// Counts a handle whose release failed: the driver may still have it.
    pub fn quarantine_handle(&mut self, handle: FrameHandle) {
        self.creating += 1;
        let index = self.created(handle);
        self.quarantine(index);
    }

    /// Every handle there is, for closing.
    pub fn drain(&mut self) -> Vec<FrameHandle> {
        self.free.clear();
        self.vacant.clear();
        self.held = 0;
        self.frames.drain(..).flatten().map(|frame| frame.handle).collect()
    }

    /// Checks the table's invariant; for tests and debug builds.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let count = |place| self.frames.iter().flatten().filter(|f| f.place == place).count();
        count(Place::Free) == self.free.len()
            && count(Place::Quarantined) == self.quarantined as usize
            && count(Place::Leaving) == self.leaving as usize
            && self.frames.iter().flatten().count() == self.held as usize
    }

    fn frame(&self, index: FrameIndex) -> &Frame {
        self.frames[index as usize].as_ref().expect("the index is of a frame that exists")
    }

    fn frame_mut(&mut self, index: FrameIndex) -> &mut Frame {
        self.frames[index as usize].as_mut().expect("the index is of a frame that exists")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_counted_wherever_they_are() {
        let mut frames = Frames::default();
        frames.start_creating(2);
        assert_eq!(frames.held(), 2);
        let one = frames.created(FrameHandle(1));
        frames.cancel_creating(1);
        assert_eq!((frames.held(), frames.peak()), (1, 2));
        frames.put_free(one, vec![Ticket::new(1, 1)]);
        assert!(frames.take_free(2, |users| users.is_empty().then(Vec::new)).is_empty());
        assert!(frames.take_free(0, |_| Some(Vec::new())).is_empty());
        let taken = frames.take_free(2, |users| Some(users.to_vec()));
        let [(again, users)] = &taken[..] else { panic!("{taken:?}") };
        let again = *again;
        assert_eq!((again, users.len()), (one, 1));
        assert_eq!(frames.remove(again), Some(FrameHandle(1)));
        frames.start_creating(1);
        let two = frames.created(FrameHandle(3));
        frames.leave_mapping(two);
        assert_eq!((frames.remove(two), frames.held(), frames.leaving()), (None, 1, 1));
        assert_eq!(frames.drop_old_mapping(two), Some(FrameHandle(3)));
        assert_eq!((frames.held(), frames.leaving()), (0, 0));
        frames.quarantine_handle(FrameHandle(2));
        assert_eq!((frames.held(), frames.quarantined()), (1, 1));
        assert!(frames.is_valid());
    }
}
