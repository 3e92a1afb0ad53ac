//! A large request for pages with bytes of their own, into frames that nobody gives up: the copies
//! begin while later pages are still being mapped.
//!
//! Mapping takes 60 us a page of 16 MiB and the copy 300 us: a model of 8 GiB that is mapped first
//! arrives a fifth later. Nothing is lost before the last page stands, for there are no victims:
//! when a call fails every page is as it was, once the copies that were begun are done.

use super::{Backing, Behind, Destination, Failure, Placed, Protected, Take};
use crate::copy::fill::Filler;
use crate::copy::pipeline::Pipeline;
use crate::counters;
use crate::error::{Error, ErrorCode};
use crate::memory::pager::Pager;
use crate::units::GIB;

/// Pages are for nobody until the last copy is enqueued. A larger request is mapped first and hands
/// them out one by one, lest other threads wait for the rest of it.
const BYTES_MAX: u64 = 16 * GIB;

/// Whether bytes may be on their way to pages that are mapped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Copies {
    None,
    Begun,
}

impl Pager {
    /// Whether the claims are carried out part by part.
    pub(super) fn is_gradual(&self, placed: &[Placed], filler: &Filler) -> bool {
        let bytes = placed.len() as u64 * self.page_bytes();
        placed.len() > self.part_pages(filler)
            && bytes <= BYTES_MAX
            && placed.iter().all(|Placed { claim, before, .. }| {
                !matches!(claim.take, Take::Victim(_))
                    && *before == Behind::Nothing
                    && claim.backing == Backing::Device
                    && claim.bar.bound().is_some()
            })
    }

    /// Pages that are mapped at a time: what the staging ring can be ahead of the copies.
    fn part_pages(&self, filler: &Filler) -> usize {
        (filler.locked().ring_bytes / self.page_bytes()).max(1) as usize
    }

    /// Maps the claims, a part before its first copy, and publishes all of them at the end.
    /// `filling` has a job for each.
    pub(super) fn act_gradually(
        &self,
        mut placed: Vec<Placed>,
        filler: &Filler,
        filling: Pipeline<'_>,
    ) -> Result<Vec<Protected>, Failure> {
        let part_pages = self.part_pages(filler);
        let (mut begun, mut failure, mut tickets) = (0, None, Vec::with_capacity(placed.len()));
        let mut copies = Copies::None;
        let mut admit = |job: usize| {
            if job < begun {
                return Ok(());
            }
            let end = placed.len().min(begun + part_pages);
            let part = &mut placed[begun..end];
            begun = end;
            match self.create_missing(part).and_then(|()| self.map_all(part)) {
                Ok(()) => {
                    copies = Copies::Begun;
                    Ok(())
                }
                Err(why) => {
                    failure = Some(why);
                    Err(Error::new(ErrorCode::Internal, "a part of the pages was not mapped"))
                }
            }
        };
        let mut failed = None;
        filling.run_as_admitted(&mut admit, &mut |_, copied| match copied {
            Ok(ticket) => tickets.push(ticket),
            Err(error) => failed = Some(error),
        });
        let ready = match failed {
            Some(error) => Err(failure.unwrap_or(Failure::Error(error))),
            None => (placed.iter().zip(&tickets))
                .map(|(entry, copied)| entry.ready(filler, *copied))
                .collect::<crate::error::Result<Vec<_>>>()
                .map_err(Failure::Error),
        };
        let ready = match ready {
            Ok(ready) => ready,
            Err(failure) => {
                self.give_up(placed, copies);
                return Err(failure);
            }
        };
        counters::add(&self.device.counters.pages_mapped, placed.len() as u64);
        let published = placed.iter().zip(ready);
        let published = published
            .filter_map(|(entry, ready)| self.publish(&entry.claim, entry.frame(), ready))
            .collect();
        self.notify_changed();
        Ok(published)
    }

    /// Nothing becomes of the claims. Copies to what is mapped may be under way: those pages and
    /// their frames come free with them, and nobody waits.
    fn give_up(&self, placed: Vec<Placed>, copies: Copies) {
        let may_be_filled = |entry: &Placed| entry.mapped && copies == Copies::Begun;
        let (mapped, rest): (Vec<_>, Vec<_>) = placed.into_iter().partition(may_be_filled);
        self.undo(rest);
        for entry in mapped {
            let destination = match entry.claim.take {
                Take::Create => Destination::Driver,
                _ => Destination::FreeList,
            };
            self.withdraw(&entry.claim, entry.frame(), destination);
        }
        self.notify_changed();
    }
}
