//! Ranges of bare VBARs that the program writes and the library saves: prepared, saved, lost and
//! brought back, dropped, written anew.
//!
//! The model knows of each allocation whether there is room for its bytes, or which pattern was
//! saved: that is what it has from then on, whatever becomes of its pages.

use std::ops::Range;

use vbar::units::{PageIndex, PageSize, Stream};
use vbar::{Error, ErrorCode, Fault, Reason, Vbar};

use crate::act::pattern_sum;
use crate::operations::Operation;
use crate::trace::Config;
use crate::world::{P, World};

/// What the library has of an allocation's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Saved {
    #[default]
    No,
    Room,
    /// The pattern of this seed.
    Bytes(u64),
}

/// An allocation that is saved: which, and where.
struct Place {
    key: (usize, u32, usize),
    vbar: Vbar,
    range: Range<u64>,
}

impl World {
    fn place(&self, bar: u64, piece: u64) -> Place {
        let bar = &self.bars[bar as usize % self.bars.len()];
        let which = piece as usize % bar.pieces.len();
        let range = bar.pieces[which].allocation.range();
        let key = (bar.device, bar.vbar.number(), which);
        Place { key, vbar: bar.vbar.clone(), range }
    }

    fn saved(&mut self, place: &Place) -> Saved {
        self.piece(place.key).map_or(Saved::No, |piece| piece.saved)
    }

    fn note_saved(&mut self, place: &Place, saved: Saved) {
        if let Some(piece) = self.piece(place.key) {
            piece.saved = saved;
        }
    }

    fn note_saving(&mut self, place: &Place, saving: bool) {
        if let Some(piece) = self.piece(place.key) {
            piece.saving = saving;
        }
    }

    /// As [`World::accept`], of what needs page-locked memory, which may be bounded.
    fn accept_room(&self, device: usize, error: &Error) {
        let Config::World { allowance, .. } = self.config;
        if !(error.code() == ErrorCode::HostMemory && allowance > 0) {
            self.accept(device, error);
        }
    }

    /// A refusal of what is wrong by itself.
    fn refused(&self, device: usize, outcome: vbar::Result<()>) {
        let error = outcome.expect_err("it is to be refused");
        match error.code() {
            ErrorCode::InvalidArgument => {}
            _ => self.accept(device, &error),
        }
    }

    /// 0 prepares; 1 tries a part of what is known, 2 no bytes, 3 bytes outside, 4 a bound VBAR.
    pub(crate) fn prepare_save(&mut self, bar: u64, piece: u64, how: u64) {
        let place = self.place(bar, piece);
        let (device, Range { start, end }) = (place.key.0, place.range.clone());
        match how % 5 {
            1 if self.saved(&place) != Saved::No => {
                self.refused(device, place.vbar.prepare_save(start..end - 8));
                self.refused(device, place.vbar.prepare_save(start + 8..end));
            }
            2 => self.refused(device, place.vbar.prepare_save(start..start)),
            3 => {
                let end = place.vbar.bytes() + 1;
                self.refused(device, place.vbar.prepare_save(start..end));
            }
            4 => {
                if let Some(model) = self.models.iter().flatten().next() {
                    let outcome = model.bar.vbar().prepare_save(0..P);
                    self.refused(model.device, outcome);
                }
            }
            _ => drop(self.prepare(&place)),
        }
    }

    /// Whether there is room then.
    fn prepare(&mut self, place: &Place) -> bool {
        let known = self.saved(place);
        match place.vbar.prepare_save(place.range.clone()) {
            Ok(()) if known == Saved::No => self.note_saved(place, Saved::Room),
            Ok(()) => {}
            // What is known asks for nothing more.
            Err(error) if known == Saved::No => {
                self.accept_room(place.key.0, &error);
                return false;
            }
            Err(error) => {
                assert!(self.is_dead(place.key.0), "{error:?}");
                return false;
            }
        }
        true
    }

    pub(crate) fn drop_save(&mut self, bar: u64, piece: u64) {
        let place = self.place(bar, piece);
        self.forget(&place);
    }

    /// Forgets what was saved, whether waiting for its copies went well or not: another call waits
    /// anew.
    fn forget(&mut self, place: &Place) {
        let dropped = place.vbar.drop_save(place.range.clone());
        self.note_saved(place, Saved::No);
        let again = place.vbar.drop_save(place.range.clone());
        assert!(dropped.is_err() || again.is_ok(), "there was nothing left to wait for: {again:?}");
        let device = place.key.0;
        self.devices[device].has_owed |= again.is_err();
        self.accept_any(device, dropped);
        self.accept_any(device, again);
    }

    /// Whether a guard has pins on pages of a range: its bytes are used.
    fn is_in_use(&self, place: &Place) -> bool {
        let pages = PageSize::new(P).unwrap().pages_of(&place.range);
        let mut guards = self.pinned.iter().filter(|pin| pin.token.is_none());
        guards.any(|pin| {
            (pin.device, pin.vbar.number()) == (place.key.0, place.key.1)
                && pin.pages.iter().any(|(page, _)| pages.contains(&page.0))
        })
    }

    /// Writes an allocation and saves it, `then` steps between; what was saved before is dropped.
    pub(crate) fn save(&mut self, (bar, piece): (u64, u64), stream: u64, (pins, then): (u64, u64)) {
        let place = self.place(bar, piece);
        let device = place.key.0;
        let stream = self.stream(device, stream);
        let is_filling = self.piece(place.key).is_some_and(|piece| piece.filling);
        if is_filling || self.is_in_use(&place) || !self.prepare(&place) {
            return;
        }
        let Some(guard) = self.fault_known(&place, stream) else { return };
        if matches!(self.saved(&place), Saved::Bytes(_)) {
            self.forget(&place);
            if !self.prepare(&place) {
                return self.accept_any(device, guard.unpin());
            }
        }
        let seed = self.overwrite(&place, guard.bytes(), stream);
        let generations = guard.signature().iter().copied();
        let pages = PageSize::new(P).unwrap().pages_of(&place.range).map(PageIndex);
        let id = self.note_pins(device, &place.vbar, &pages.collect::<Vec<_>>(), None, stream);
        assert!(self.pin_of(id).pages.iter().map(|page| page.1).eq(generations));
        self.note_saving(&place, true);
        self.nest(then);
        self.note_saving(&place, false);
        let is_held = self.pinned.iter().any(|pin| pin.id == id);
        self.pinned.retain(|pin| pin.id != id);
        if !is_held {
            // By force: nobody promises that the bytes are there.
            assert_eq!(guard.unpin().unwrap_err().code(), ErrorCode::StaleToken);
            return;
        }
        let mut on = stream;
        if stream.is_none() {
            let before = self.saved(&place);
            let refused = place.vbar.save(place.range.clone(), Stream::NONE);
            self.refused_or_closed(&place, refused);
            assert_eq!(self.saved(&place), before);
            on = self.devices[device].streams[self.thread as usize % 4];
        }
        self.save_written(&place, seed, on);
        if on != stream
            && let Err(error) = guard.also_used_on(on)
        {
            self.accept(device, &error);
            self.synchronise(device);
        }
        self.keep(device, &place.vbar, guard, stream, (pins, 0), None);
    }

    fn refused_or_closed(&self, place: &Place, outcome: vbar::Result<()>) {
        match outcome {
            Err(error) if error.code() == ErrorCode::Closed => assert!(place.vbar.is_closed()),
            outcome => self.refused(place.key.0, outcome),
        }
    }

    /// Pins an allocation that is known: no watermark keeps it out.
    fn fault_known<'v>(&mut self, place: &'v Place, stream: Stream) -> Option<vbar::Guard<'v>> {
        let device = place.key.0;
        let was_lost = self.knows_loss(device);
        let before = self.devices[device].runtime.statistics();
        let outcome = place.vbar.fault(place.range.clone(), stream);
        self.look_at_fault(device, &before, &outcome);
        assert!(!was_lost || outcome.is_err(), "a fault of a lost device: {outcome:?}");
        match outcome {
            Ok(Fault::Resident(guard)) => Some(guard),
            Ok(Fault::HostMapped(_)) => panic!("what is saved is bound to nothing"),
            Ok(Fault::Offloaded(refusal)) => {
                assert_ne!(refusal.reason, Reason::AboveWatermark);
                self.totals.refuse(refusal.reason.word());
                None
            }
            Err(error) => {
                self.accept(device, &error);
                None
            }
        }
    }

    /// Writes other bytes, behind whoever read the old ones. Returns their seed.
    fn overwrite(&mut self, place: &Place, bytes: u64, stream: Stream) -> u64 {
        let (device, seed) = (place.key.0, self.new_number());
        self.come_behind_all(device, stream);
        let target = place.vbar.base().offset(place.range.start);
        self.write(device, (target, bytes), seed, stream);
        let residency = place.vbar.residency();
        let pages = PageSize::new(P).unwrap().pages_of(&place.range);
        let generations = pages.map(|page| residency[page as usize].generation).collect();
        let piece = self.piece(place.key).expect("nothing has happened since");
        piece.written = Some((stream, generations));
        // Where the allocation was good it is, with the new bytes.
        if let Some((committed, _)) = &mut piece.committed {
            *committed = seed;
        }
        seed
    }

    /// What comes on a stream from now on comes behind all that was enqueued.
    pub(crate) fn come_behind_all(&mut self, device: usize, stream: Stream) {
        let dev = &mut self.devices[device];
        let is_unknown = std::mem::take(&mut dev.has_retired) | std::mem::take(&mut dev.has_owed);
        if stream.is_none() || is_unknown {
            self.synchronise(device);
        }
        if stream.is_none() || self.is_dead(device) {
            return;
        }
        for other in self.devices[device].streams.clone() {
            if other != stream {
                self.order(device, other, stream);
            }
        }
    }

    /// Pages that were not lost since they were written have their bytes from the stream that wrote
    /// them; the library knows of none of that.
    pub(crate) fn come_behind_writer(&mut self, key: (usize, u32, usize), stream: Stream) {
        let device = key.0;
        let Some(piece) = self.piece(key) else { return };
        let Some((writer, generations)) = piece.written.clone() else { return };
        let residency = piece.allocation.vbar().residency();
        let pages = PageSize::new(P).unwrap().pages_of(&piece.allocation.range());
        let mut pages = pages.zip(generations);
        let is_kept = pages.any(|(page, then)| residency[page as usize].generation == then);
        if !is_kept || self.is_dead(device) {
            return;
        }
        if stream.is_none() || writer.is_none() {
            return self.synchronise(device);
        }
        if writer != stream {
            self.order(device, writer, stream);
        }
    }

    /// A stream is given up: its handle may be another's from now on.
    pub(crate) fn forget_writer(&mut self, device: usize, stream: Stream) {
        let bars = self.bars.iter_mut().filter(|bar| bar.device == device);
        let written = bars.flat_map(|bar| &mut bar.pieces).filter_map(|it| it.written.as_mut());
        let its = written.filter(|(writer, _)| *writer == stream);
        its.for_each(|(writer, _)| *writer = Stream::NONE);
    }

    /// Saves what was written: by what is known of it, that succeeds or is refused.
    fn save_written(&mut self, place: &Place, seed: u64, stream: Stream) {
        let saved = place.vbar.save(place.range.clone(), stream);
        let is_known = self.piece(place.key).is_some();
        match (self.saved(place), saved) {
            (Saved::Room, Ok(())) => {
                self.totals.saves += 1;
                self.note_saved(place, Saved::Bytes(seed));
                // Not twice.
                let again = place.vbar.save(place.range.clone(), stream);
                self.refused(place.key.0, again);
            }
            // Whether a copy was tried is not known.
            (Saved::Room, Err(error)) => {
                assert_ne!(error.code(), ErrorCode::InvalidArgument, "{error:?}");
                self.accept_room(place.key.0, &error);
                self.forget(place);
            }
            // A VBAR that was let go of meanwhile, with its room.
            (Saved::No, Ok(())) => assert!(!is_known, "saved without room"),
            (Saved::No, Err(error)) if !is_known => match error.code() {
                ErrorCode::Closed => assert!(place.vbar.is_closed()),
                ErrorCode::InvalidArgument => panic!("{error:?}"),
                _ => self.accept_room(place.key.0, &error),
            },
            (_, refused) => self.refused(place.key.0, refused),
        }
    }

    /// A fault of an allocation that is saved: resident with those bytes.
    pub(crate) fn fault_saved(
        &mut self,
        operation: &Operation,
        (bar, piece): (u64, u64),
        stream: u64,
        (pins, then): (u64, u64),
    ) {
        let place = self.place(bar, piece);
        let Saved::Bytes(seed) = self.saved(&place) else { unreachable!("asked before") };
        let device = place.key.0;
        let stream = self.stream(device, stream);
        let Some(guard) = self.fault_known(&place, stream) else {
            return self.note_blocked(operation);
        };
        self.come_behind_writer(place.key, stream);
        let at = (guard.address(), guard.bytes());
        let sum = pattern_sum(at.1, seed);
        self.verify(device, at, sum, stream);
        self.keep(device, &place.vbar, guard, stream, (pins, then), Some(sum));
    }

    /// At the end all that is saved is brought back once more.
    pub(crate) fn look_at_saved(&mut self) {
        for bar in 0..self.bars.len() {
            for piece in 0..self.bars[bar].pieces.len() {
                let Saved::Bytes(_) = self.bars[bar].pieces[piece].saved else { continue };
                let (bar, piece) = (bar as u64, piece as u64);
                let stream = bar + piece;
                let operation =
                    Operation::Fault { bar, piece, stream, commits: 0, pins: 0, then: 0 };
                self.fault_saved(&operation, (bar, piece), stream % 5, (0, 0));
            }
        }
    }

    /// What is held for saves is no less than what is known of them.
    pub(crate) fn check_saves(&self, device: usize, saved_bytes: u64) {
        let bars = self.bars.iter().filter(|bar| bar.device == device);
        let pieces = bars.flat_map(|bar| &bar.pieces);
        let known = pieces.filter(|piece| piece.saved != Saved::No);
        let ranges = known.map(|piece| piece.allocation.range());
        let bytes: u64 = ranges.map(|range| range.end - range.start).sum();
        assert!(saved_bytes >= bytes, "{bytes} bytes are saved, the books have {saved_bytes}");
    }
}
