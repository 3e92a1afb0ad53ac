//! A large request for pages with bytes of their own: the copies begin while later pages are still
//! being mapped.
//!
//! Mapping takes 60 us a page of 16 MiB and the copy 300 us: a model of 8 GiB that is mapped first
//! arrives a fifth later, and one that streams through frames of its own pages has the link stand
//! still before each request. It goes part by part: a part's victims lose their pages when it is
//! mapped. When a call fails, no page of the request has come, once the copies that were begun are
//! done, but for those that somebody else has faulted meanwhile; the victims of the parts before
//! are gone, all other pages are as they were.

use std::cell::RefCell;

use super::{Asker, Backing, Behind, Destination, Failure, Placed, Protected, Take};
use crate::copy::fill::Filler;
use crate::copy::pipeline::Pipeline;
use crate::counters;
use crate::error::{Error, ErrorCode};
use crate::memory::pager::Pager;
use crate::memory::pager::plan::{Blocked, Usable, take_pages};
use crate::process;
use crate::units::GIB;

/// A larger request is mapped first: taking back what has come of it would take its time.
const BYTES_MAX: u64 = 16 * GIB;

impl Pager {
    /// Whether the claims are carried out part by part. Pages that the engine brings are handed out
    /// one by one: a fault may wait for the first of them. Strictly, victims go before anything is
    /// mapped.
    pub(super) fn is_gradual(&self, placed: &[Placed], filler: &Filler) -> bool {
        let bytes = placed.len() as u64 * self.page_bytes();
        placed.len() > self.part_pages(filler)
            && bytes <= BYTES_MAX
            && placed.iter().all(|Placed { claim, before, .. }| {
                let gives_up = matches!(claim.take, Take::Victim(_));
                (!gives_up || claim.asker == Asker::Fault && !self.is_strict())
                    && *before == Behind::Nothing
                    && claim.backing == Backing::Device
                    && claim.fill.is_some()
            })
    }

    /// Pages that are mapped at a time: what the staging ring can be ahead of the copies.
    fn part_pages(&self, filler: &Filler) -> usize {
        (filler.locked().ring_bytes / self.page_bytes()).max(1) as usize
    }

    /// Maps the claims, a part before its first copy, and publishes each page once its copies are
    /// enqueued, as the fault protects it: whoever else wants it need not wait for the rest.
    /// `filling` has a job for each.
    pub(super) fn act_gradually(
        &self,
        placed: Vec<Placed>,
        filler: &Filler,
        filling: Pipeline<'_>,
    ) -> Result<Vec<Protected>, Failure> {
        let part_pages = self.part_pages(filler);
        let placed = RefCell::new(placed);
        let (mut begun, mut failure) = (0, None);
        let mut admit = |job: usize| {
            if job < begun {
                return Ok(());
            }
            let mut placed = placed.borrow_mut();
            let end = placed.len().min(begun + part_pages);
            let part = &mut placed[begun..end];
            match self.create_missing(part).and_then(|()| self.map_all(part)) {
                Ok(()) => {
                    self.part_with_victims(part);
                    begun = end;
                    Ok(())
                }
                Err(why) => {
                    failure = Some(why);
                    Err(Error::new(ErrorCode::Internal, "a part of the pages was not mapped"))
                }
            }
        };
        // The jobs come in their order: what is published is the first of the claims.
        let (mut published, mut protected, mut failed) = (0, Vec::new(), None);
        filling.run_as_admitted(&mut admit, &mut |job, copied| {
            let entry = &placed.borrow()[job];
            match copied.and_then(|copied| entry.ready(filler, copied)) {
                Ok(ready) if failed.is_none() => {
                    protected.extend(self.publish(&entry.claim, entry.frame(), ready));
                    published += 1;
                    self.changed.notify_all();
                }
                Ok(_) => {}
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        });
        counters::add(&self.device.counters.pages_mapped, published as u64);
        counters::add(&self.device.counters.weights_mapped, published as u64);
        let Some(error) = failed else {
            self.notify_changed();
            return Ok(protected);
        };
        let mut first = placed.into_inner();
        let rest = first.split_off(published);
        drop(protected);
        self.give_up(rest, begun - published);
        self.take_back(&first);
        Err(failure.unwrap_or(Failure::Error(error)))
    }

    /// Nothing becomes of the claims. Copies to the first `begun` of them may be under way: those
    /// pages and their frames come free with them, and nobody waits.
    fn give_up(&self, mut placed: Vec<Placed>, begun: usize) {
        let rest = placed.split_off(begun);
        self.undo(rest);
        for entry in placed {
            let destination = destination_of(&entry);
            self.withdraw(&entry.claim, entry.frame(), destination, None);
        }
        self.notify_changed();
    }

    /// Takes pages back that a fault has got before it failed, but for those that somebody else has
    /// come to use. What was fetched ahead stays: it is as good as ever.
    fn take_back(&self, published: &[Placed]) {
        if process::ending() {
            return;
        }
        let faulted = published.iter().filter(|entry| entry.claim.asker == Asker::Fault);
        for entry in faulted {
            let (bar, page) = (&entry.claim.bar, std::iter::once(entry.claim.page.0));
            let taken = {
                let mut state = self.state.lock();
                let (usable, mut in_use) = (Usable::Recorded, Blocked::default());
                let taken = take_pages(&self.device, bar, page, 1, usable, &mut in_use);
                self.note_taken(&mut state, &taken);
                taken
            };
            self.part_or_linger(taken, destination_of(entry));
        }
    }
}

/// Where the frame of a claim goes that comes to nothing.
fn destination_of(entry: &Placed) -> Destination {
    match entry.claim.take {
        Take::Create => Destination::Driver,
        _ => Destination::FreeList,
    }
}
