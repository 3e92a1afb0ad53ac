//! Bare VBARs: allocations that are written, read, lost and written again.

use std::sync::Arc;

use vbar::driver::KernelCall;
use vbar::driver::kernel::mix;
use vbar::memory::pins::Token;
use vbar::runtime::FillGuard;
use vbar::units::{DeviceAddress, Generation, PageIndex, PageSize, Stream};
use vbar::{Allocation, AllocationFault, ErrorCode, Fault, Guard, Vbar};

use crate::act::pattern_sum;
use crate::operations::Operation;
use crate::saves::Saved;
use crate::world::{Bar, P, Piece, Pinned, World};

/// Most bare VBARs at a time.
const BARS: usize = 4;

fn pages_of(range: &std::ops::Range<u64>) -> impl Iterator<Item = PageIndex> + use<> {
    PageSize::new(P).unwrap().pages_of(range).map(PageIndex)
}

impl World {
    pub(crate) fn open_bar(&mut self, device: u64, pages: u64, sizes: u64) {
        if self.bars.len() >= BARS {
            return;
        }
        let device = self.device(device);
        let vbar = match self.devices[device].runtime.create_bar((pages % 8 + 1) * P) {
            Ok(vbar) => vbar,
            Err(error) => return self.accept(device, &error),
        };
        let mut pieces = Vec::new();
        for number in 0.. {
            let bytes = match number {
                0 => 512,
                _ => [512, P / 2, P, P + 512, 2 * P][mix(sizes, number) as usize % 5],
            };
            match vbar.allocate(bytes) {
                Ok(allocation) => {
                    let allocation = Arc::new(allocation);
                    assert_eq!(allocation.address().0 % 512, 0);
                    let (committed, saved, written) = (None, Saved::No, None);
                    let (filling, saving) = (false, false);
                    pieces.push(Piece { allocation, committed, filling, saved, saving, written });
                }
                Err(error) => {
                    let is_full = error.code() == ErrorCode::NoAddresses;
                    assert!(is_full || self.is_dead(device), "{error:?}");
                    break;
                }
            }
        }
        if !pieces.is_empty() {
            self.bars.push(Bar { device, vbar, pieces });
        }
    }

    pub(crate) fn close_bar(&mut self, at: usize, operation: &Operation) {
        let bar = self.bars.swap_remove(at);
        // Pins may still be held, with a handle or without one.
        if matches!(operation, Operation::CloseBar { explicit: 1.., .. }) {
            bar.vbar.close();
            let code = bar.vbar.allocate(1).unwrap_err().code();
            let expected = [ErrorCode::Closed, ErrorCode::DeviceLost];
            assert!(expected.contains(&code), "{code:?}");
            let code = bar.vbar.fault(0..P, Stream::NONE).map(drop).unwrap_err().code();
            assert!(expected.contains(&code), "{code:?}");
            let code = bar.vbar.prepare_save(0..P).unwrap_err().code();
            assert!(expected.contains(&code), "{code:?}");
        }
    }

    /// Not while somebody reads who has not said that he is done.
    pub(crate) fn invalidate(&mut self, at: usize, piece: u64) {
        let Bar { device, vbar, .. } = &self.bars[at];
        let is_of = |pin: &Pinned| pin.device == *device && pin.vbar.number() == vbar.number();
        if self.pinned.iter().any(is_of) {
            return;
        }
        let pieces = &mut self.bars[at].pieces;
        let which = piece as usize % pieces.len();
        pieces[which].allocation.invalidate();
        pieces[which].committed = None;
    }

    pub(crate) fn piece(
        &mut self,
        (device, number, which): (usize, u32, usize),
    ) -> Option<&mut Piece> {
        let mut bars = self.bars.iter_mut();
        let bar = bars.find(|bar| bar.device == device && bar.vbar.number() == number)?;
        Some(&mut bar.pieces[which])
    }

    /// Whether every page still has the bytes that were committed: by what the pages show.
    fn is_valid_piece(piece: &Piece) -> bool {
        let Some((_, generations)) = &piece.committed else { return false };
        let residency = piece.allocation.vbar().residency();
        let pages = pages_of(&piece.allocation.range());
        pages.zip(generations).all(|(page, generation)| {
            let now = residency[page.0 as usize];
            now.state.is_mapped() && now.generation == *generation
        })
    }

    pub(crate) fn fault(
        &mut self,
        operation: &Operation,
        (bar, piece): (u64, u64),
        stream: u64,
        (commits, pins, then): (u64, u64, u64),
    ) {
        let at = bar as usize % self.bars.len();
        let (device, vbar) = (self.bars[at].device, self.bars[at].vbar.clone());
        let which = piece as usize % self.bars[at].pieces.len();
        if let Saved::Bytes(_) = self.bars[at].pieces[which].saved {
            return self.fault_saved(operation, (bar, piece), stream, (pins, then));
        }
        if self.bars[at].pieces[which].saving {
            return;
        }
        let key = (device, vbar.number(), which);
        let stream = self.stream(device, stream);
        let piece = &self.bars[at].pieces[which];
        let (valid, filling) = (Self::is_valid_piece(piece), piece.filling);
        let committed = piece.committed.clone();
        let allocation = Arc::clone(&piece.allocation);
        let was_lost = self.knows_loss(device);
        let before = self.devices[device].runtime.statistics();
        let outcome = allocation.fault(stream);
        self.look_at_counts(
            device,
            &before,
            match &outcome {
                Ok(AllocationFault::Offloaded(refusal)) => Some(Some(refusal.reason)),
                Ok(AllocationFault::Resident(_)) => Some(None),
                _ => None,
            },
        );
        assert!(!was_lost || outcome.is_err(), "a fault of a lost device: {outcome:?}");
        match outcome {
            Ok(AllocationFault::Resident(guard)) => {
                assert!(valid && !filling, "resident, and the bytes are not there");
                let (seed, generations) = committed.expect("it is valid");
                assert_eq!(guard.signature(), generations);
                self.come_behind_writer(key, stream);
                let place = (guard.address(), guard.bytes());
                let sum = pattern_sum(place.1, seed);
                self.verify(device, place, sum, stream);
                self.keep(device, &vbar, guard, stream, (pins, then), Some(sum));
            }
            Ok(AllocationFault::Refill(fill)) => {
                assert!(!valid && !filling, "written again, and the bytes are there");
                // Bytes that were saved are read by who knows of no commit.
                if self.piece(key).is_some_and(|piece| piece.written.is_some()) {
                    self.come_behind_all(device, stream);
                }
                self.refill(key, &allocation, fill, stream, (commits, pins, then));
            }
            Ok(AllocationFault::Offloaded(refusal)) => {
                self.totals.refuse(refusal.reason.word());
                self.note_blocked(operation);
            }
            Ok(AllocationFault::Busy) => assert!(filling, "nobody fills"),
            Err(error) => {
                self.accept(device, &error);
                if !valid && !filling {
                    // It may have got as far as asking for the bytes.
                    self.piece(key).expect("nothing has happened since").committed = None;
                }
                self.note_blocked(operation);
            }
        }
    }

    /// Writes what a fault asked for, and commits it or does not.
    fn refill(
        &mut self,
        key: (usize, u32, usize),
        allocation: &Allocation,
        fill: FillGuard<'_>,
        stream: Stream,
        (commits, pins, then): (u64, u64, u64),
    ) {
        let (device, vbar) = (key.0, allocation.vbar().clone());
        let seed = self.new_number();
        self.write(device, (fill.address(), fill.bytes()), seed, stream);
        let piece = self.piece(key).expect("nothing has happened since");
        (piece.filling, piece.committed) = (true, None);
        // Its pins are known by what they show only: a fill does not tell them.
        let pages = pages_of(&allocation.range()).collect::<Vec<_>>();
        let id = self.note_pins(device, &vbar, &pages, None, stream);
        self.nest(then);
        // Or its pins were taken back by force.
        let is_held = self.pinned.iter().any(|pin| pin.id == id);
        self.pinned.retain(|pin| pin.id != id);
        let committed = (commits > 0).then(|| fill.commit(stream));
        if let Some(piece) = self.piece(key) {
            piece.filling = false;
        }
        match committed {
            Some(Ok(guard)) if !is_held => {
                let error = guard.unpin().unwrap_err();
                assert_eq!(error.code(), ErrorCode::StaleToken);
            }
            Some(Ok(guard)) => {
                let signature = guard.signature().to_vec();
                if let Some(piece) = self.piece(key) {
                    piece.committed = Some((seed, signature));
                }
                self.keep(device, &vbar, guard, stream, (pins, 0), None);
            }
            Some(Err(error)) if !is_held && error.code() == ErrorCode::StaleToken => {}
            Some(Err(error)) => self.accept(device, &error),
            None => {}
        }
    }

    pub(crate) fn note_blocked(&mut self, operation: &Operation) {
        if !self.held.is_empty() && self.blocked.len() < 4 {
            self.blocked.push(operation.clone());
        }
    }

    /// Writes a pattern: by a kernel, or at once where there is no stream.
    pub(crate) fn write(
        &mut self,
        device: usize,
        (target, bytes): (DeviceAddress, u64),
        seed: u64,
        stream: Stream,
    ) {
        if self.is_dead(device) {
            return;
        }
        if stream.is_none() {
            let mut pattern = vec![0; bytes as usize];
            vbar::driver::kernel::pattern(&mut pattern, seed);
            return self.sim.write_bytes(target, &pattern).unwrap();
        }
        let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
        self.launch(device, call, stream);
    }

    /// Notes pins that are held now.
    pub(crate) fn note_pins(
        &mut self,
        device: usize,
        vbar: &Vbar,
        pages: &[PageIndex],
        token: Option<Token>,
        stream: Stream,
    ) -> u64 {
        let residency = vbar.residency();
        let generation = |page: &PageIndex| residency[page.0 as usize].generation;
        let pages = pages.iter().map(|page| (*page, generation(page))).collect();
        let (id, vbar) = (self.new_number(), vbar.clone());
        self.pinned.push(Pinned { id, device, token, stream, vbar, pages });
        id
    }

    /// Holds a guard for `then` steps and reads its bytes again, on a second stream too; then gives
    /// it back or puts it under a token.
    pub(crate) fn keep(
        &mut self,
        device: usize,
        vbar: &Vbar,
        guard: Guard<'_>,
        stream: Stream,
        (pins, then): (u64, u64),
        sum: Option<u64>,
    ) {
        let start = guard.address().0 - vbar.base().0;
        let pages: Vec<PageIndex> = pages_of(&(start..start + guard.bytes())).collect();
        let told: Vec<Generation> = guard.signature().to_vec();
        let id = self.note_pins(device, vbar, &pages, None, stream);
        let known: Vec<Generation> = self.pin_of(id).pages.iter().map(|page| page.1).collect();
        assert_eq!(told, known, "the signature is not what the pages show");
        if then > 0 {
            self.nest(then);
        }
        let is_held = self.pinned.iter().any(|pin| pin.id == id);
        if !is_held {
            // By force.
            let error = guard.unpin().unwrap_err();
            assert_eq!(error.code(), ErrorCode::StaleToken);
            return;
        }
        if let (1.., Some(sum)) = (then, sum) {
            self.verify(device, (guard.address(), guard.bytes()), sum, stream);
            self.use_elsewhere(device, &guard, sum, stream);
        }
        if pins > 0 {
            let token = guard.into_token();
            let pin = self.pinned.iter_mut().find(|pin| pin.id == id).expect("it is held");
            pin.token = Some(token);
        } else {
            self.pinned.retain(|pin| pin.id != id);
            self.accept_any(device, guard.unpin());
        }
    }

    /// Work on another stream, ordered behind the first by hand, which the guard is told of.
    fn use_elsewhere(&mut self, device: usize, guard: &Guard<'_>, sum: u64, stream: Stream) {
        let other = self.devices[device].streams[(self.thread as usize + 1) % 3];
        if stream.is_none() || other == stream || self.is_dead(device) {
            return;
        }
        self.order(device, stream, other);
        let place = (guard.address(), guard.bytes());
        self.verify(device, place, sum, other);
        if let Err(error) = guard.also_used_on(other) {
            self.accept(device, &error);
            // Nobody knows of it: it has to be over before the guard goes.
            self.synchronise(device);
        }
    }

    pub(crate) fn pin_of(&self, id: u64) -> &Pinned {
        self.pinned.iter().find(|pin| pin.id == id).expect("it was noted just now")
    }

    pub(crate) fn fault_many(
        &mut self,
        device: u64,
        (count, picks): (u64, u64),
        stream: u64,
        then: u64,
    ) {
        let device = self.device(device);
        let stream = self.stream(device, stream);
        let vbars: Vec<Vbar> =
            self.vbars().filter(|(of, _)| *of == device).map(|(_, vbar)| vbar.clone()).collect();
        if vbars.is_empty() {
            return;
        }
        let pick = |number: u64| {
            let vbar = &vbars[mix(picks, 3 * number) as usize % vbars.len()];
            let pages = vbar.bytes() / P;
            let start = mix(picks, 3 * number + 1) % pages;
            let end = start + 1 + mix(picks, 3 * number + 2) % (pages - start);
            (vbar, start, end.min(start + 6))
        };
        let picks: Vec<_> = (0..count % 4).map(pick).collect();
        let ranges: Vec<_> =
            picks.iter().map(|(vbar, start, end)| (*vbar, start * P..end * P)).collect();
        let was_lost = self.knows_loss(device);
        let before = self.devices[device].runtime.statistics();
        let runtime = self.devices[device].runtime.clone();
        let outcome = runtime.fault_many(&ranges, stream);
        if !ranges.is_empty() {
            self.look_at_fault(device, &before, &outcome);
            assert!(!was_lost || outcome.is_err(), "a fault of a lost device");
        }
        match outcome {
            Ok(Fault::Resident(guards) | Fault::HostMapped(guards)) => {
                assert_eq!(guards.len(), ranges.len());
                let mut ids = Vec::new();
                for ((vbar, start, end), guard) in picks.iter().zip(&guards) {
                    assert_eq!(guard.bytes(), (end - start) * P);
                    let pages: Vec<_> = (*start as u32..*end as u32).map(PageIndex).collect();
                    let residency = vbar.residency();
                    for page in &pages {
                        let now = residency[page.0 as usize];
                        assert!(now.state.is_readable() && now.pins > 0, "{page:?} is {now:?}");
                    }
                    ids.push(self.note_pins(device, vbar, &pages, None, stream));
                }
                self.nest(then);
                drop(guards);
                self.pinned.retain(|pin| !ids.contains(&pin.id));
            }
            Ok(Fault::Offloaded(refusal)) => self.totals.refuse(refusal.reason.word()),
            Err(error) => self.accept_fill(device, &error),
        }
    }
}
