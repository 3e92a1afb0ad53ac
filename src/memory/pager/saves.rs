//! Bytes that the program writes and the library keeps a copy of, so that it can bring them back.
//!
//! A range is prepared before it is faulted, so that no watermark refuses it; saved when its bytes
//! are final, while it is pinned; and dropped before they are written anew. From the save on its
//! pages are filled as those of a bound VBAR are. What else has a place in such a page is the
//! program's, which is told by the page's generation as ever that it was lost.

use std::ops::Range;
use std::sync::Arc;

use super::Pager;
use crate::copy::fill::Filler;
use crate::error::{Error, ErrorCode, Result};
use crate::memory::saves::{Held, Saves};
use crate::memory::vbar::Bar;
use crate::process;
use crate::sync::ticket::Ticket;
use crate::units::Stream;

impl Pager {
    /// Sees to it that a range has room to be saved; again: does nothing. Its pages stream from now
    /// on.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, a range outside the VBAR or one that overlaps another, and
    /// for a bound VBAR; `HostMemory` where there is no room; those of waiting for a thread that
    /// locks some; `Closed`, `DeviceLost`, `ProcessEnding`, and what the driver says.
    pub fn prepare_save(&self, bar: &Arc<Bar>, bytes: Range<u64>) -> Result<()> {
        let prepared = self.prepare_range(bar, &bytes);
        prepared.map_err(|error| self.told_of(error, "preparing to save", bar, &bytes))
    }

    fn prepare_range(&self, bar: &Arc<Bar>, bytes: &Range<u64>) -> Result<()> {
        self.device.check()?;
        bar.check_open()?;
        if bar.pages_of(bytes)?.is_empty() {
            return Err(Error::new(ErrorCode::InvalidArgument, "there are no bytes to save"));
        }
        let saves = bar.saves_or_new()?;
        if saves.is_known(bytes)? {
            return Ok(());
        }
        let _scope = self.device.enter()?;
        let room = self.filler()?.room_to_save(bytes.end - bytes.start)?;
        // Another thread's is as good.
        saves.prepare(bytes, room).map(drop)
    }

    /// Saves a range that was prepared, as it is behind what was enqueued on `stream`: from now on
    /// its pages come back with its bytes. The caller has pinned it, and unpins it on that stream.
    ///
    /// # Errors
    /// `InvalidArgument` where it is not pinned, was not prepared or is saved already, and for no
    /// stream; `Unsupported` for one that is being captured; `Closed`, `DeviceLost`,
    /// `ProcessEnding`, and what the driver says. Where the copy failed it is prepared no more.
    pub fn save(&self, bar: &Arc<Bar>, bytes: Range<u64>, stream: Stream) -> Result<()> {
        let saved = self.save_range(bar, &bytes, stream);
        saved.map_err(|error| self.told_of(error, "saving", bar, &bytes))
    }

    fn save_range(&self, bar: &Arc<Bar>, bytes: &Range<u64>, stream: Stream) -> Result<()> {
        self.device.check()?;
        bar.check_open()?;
        let Some(saves) = bar.saves() else {
            return Err(Error::new(ErrorCode::InvalidArgument, "it was not prepared"));
        };
        let _scope = self.device.enter()?;
        let filler = self.filler()?;
        let mut pages = bar.table.pages(bar.pages_of(bytes)?);
        if !pages.all(|(_, page)| page.word().state.is_mapped() && page.word().pins > 0) {
            return Err(Error::new(ErrorCode::InvalidArgument, "it is not pinned"));
        }
        let on = filler.on_stream(stream)?;
        let (begun, room) = saves.start(bytes)?;
        let source = bar.space.base.offset(bytes.start);
        let (copied_at, saved) = filler.save(bar.id, room, source, on);
        // Before the caller unpins them: from here on it is an eviction's to look at.
        let stamped = self.stamp_saved(bar, bytes, copied_at, &filler);
        let failed = match (saved, stamped) {
            (Ok(memory), Ok(())) => match saves.finish(bytes, begun, memory) {
                None => return Ok(()),
                Some(memory) => {
                    saves.owe(bytes, &filler.drop_saved(bar.id, memory));
                    return self.wait_for_copies(saves, bytes);
                }
            },
            (Ok(memory), Err(error)) => {
                saves.owe(bytes, &filler.drop_saved(bar.id, memory));
                error
            }
            (Err(error), _) => {
                saves.owe(bytes, &[copied_at]);
                error
            }
        };
        // Whoever drops it waits for what was begun.
        saves.give_up(bytes, begun);
        Err(failed)
    }

    /// The stream that is saved on uses the pages of a range, until `copied_at`.
    fn stamp_saved(
        &self,
        bar: &Bar,
        bytes: &Range<u64>,
        copied_at: Ticket,
        filler: &Filler,
    ) -> Result<()> {
        if copied_at.is_none() {
            return Ok(());
        }
        let (stream, slot) = filler.saving();
        let mut is_joined = false;
        for (_, page) in bar.table.pages(bar.pages_of(bytes)?) {
            if !page.stamp(copied_at, |other| self.device.fences.known_passed(other)) {
                self.join_stamp(page, stream, slot);
                is_joined = true;
            }
        }
        if !is_joined {
            return Ok(());
        }
        let record = || self.device.fences.record(stream, slot);
        self.device.retry(record).map(drop).map_err(|error| self.device.note(error))
    }

    /// Forgets what was saved of a range, and its room: nothing fills it any more. Waits for the
    /// copies to and from that memory, and for those that an earlier call of these bytes could not
    /// wait for, so that whoever has pinned the range may write it. Of a range that is not known,
    /// and that no copies are left of: does nothing.
    ///
    /// # Errors
    /// Those of waiting, `DeviceLost`, `ProcessEnding`, and what the driver says; it is forgotten
    /// all the same.
    pub fn drop_saved(&self, bar: &Arc<Bar>, bytes: Range<u64>) -> Result<()> {
        // Locks that other threads held at a fork are locked for ever in the child.
        if process::ending() {
            return self.device.check();
        }
        let Some(saves) = bar.saves() else { return Ok(()) };
        let dropped = match saves.remove(&bytes) {
            Some(Held::Bytes(memory)) => {
                // Before anything that may fail: nobody else would take leave of it.
                let copies = self.made_filler().map(|filler| filler.drop_saved(bar.id, memory));
                saves.owe(&bytes, &copies.unwrap_or_default());
                self.wait_for_copies(saves, &bytes)
            }
            held if saves.owed(&bytes).is_empty() => match held {
                Some(_) => self.device.check(),
                None => return Ok(()),
            },
            _ => self.wait_for_copies(saves, &bytes),
        };
        dropped.map_err(|error| self.told_of(error, "forgetting what was saved of", bar, &bytes))
    }

    /// Waits for copies of bytes whose ranges are gone; what fails is for the next drop of them.
    fn wait_for_copies(&self, saves: &Saves, bytes: &Range<u64>) -> Result<()> {
        self.device.check()?;
        let Some(filler) = self.made_filler() else { return Ok(()) };
        let copies = saves.owed(bytes);
        let _scope = self.device.enter()?;
        filler.wait_for_saved(&copies)?;
        saves.settle(bytes, &copies);
        Ok(())
    }

    fn told_of(&self, error: Error, act: &str, bar: &Bar, bytes: &Range<u64>) -> Error {
        let Range { start, end } = bytes;
        self.told(error, format_args!("{act} bytes {start}..{end} of VBAR {}", bar.id))
    }
}
