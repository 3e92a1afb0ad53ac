//! The way of a batch of fills: sources chosen, reads under way ahead of the copies, which are in
//! order.
//!
//! A span begins when it has a place: its window in the cache, a new window where the pace lets it
//! have one or it comes from the disk, or a slot of the ring. Its reading is handed to the threads,
//! or done at once where there are none. The oldest span is ended first: its read is waited for,
//! its files are compared with what they were, its copy is enqueued, and its place goes back with
//! the fence's ticket. Whoever waits for a slot has none, so two batches never wait for each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::copy::cache::{Key, WindowLease};
use crate::copy::fill::{FillJob, Filler, Keep};
use crate::copy::gpu_clock::CopyTold;
use crate::copy::pace::Came;
use crate::copy::place::Place;
use crate::copy::readers::Readers;
use crate::copy::registered::Copied;
use crate::copy::span::{
    After, Cut, FileSource, Origin, PieceRead, Span, SpanRead, Way, direct_copies, pieces,
};
use crate::copy::windows::register;
use crate::counters;
use crate::driver::{DriverCode, DriverError, DriverResult};
use crate::error::{Error, ErrorCode, Result};
use crate::host::bound::Bound;
use crate::host::file_pages::FileWindow;
use crate::host::locked::LockedSlot;
use crate::host::pageable::PageableMemory;
use crate::outcome::WaitKind;
use crate::sync::ticket::Ticket;
use crate::trace::{self, Kind};
use crate::units::{DeviceAddress, MIB};

/// Spans that are begun before the first of them has ended.
const AHEAD_MAX: usize = 16;
/// A read that is waited for is left for so long before the ring is looked at again.
const LOOK: Duration = Duration::from_micros(500);
/// Copies of ordinary memory are made in pieces of this size.
const PAGEABLE_BYTES: usize = 2 * MIB as usize;

/// See the module's text.
pub struct Pipeline<'a> {
    filler: &'a Filler,
    readers: Option<Arc<Readers>>,
    jobs: Vec<FillJob>,
    /// Not begun.
    spans: VecDeque<Span>,
    next_job: usize,
    begun: VecDeque<(Span, Begun)>,
}

/// Where a span's bytes are, or will be.
enum Begun {
    /// There are none.
    Nothing,
    /// In registered pages of their file.
    Registered(Arc<FileWindow>),
    /// In the page-locked cache.
    Cached(WindowLease),
    /// On their way there.
    Reading { place: Place, read: Arc<SpanRead>, pad: usize },
    /// In page-locked memory of the program's own.
    Direct,
    /// Where they come from: they go through ordinary memory.
    Pageable,
    /// It could not be found out.
    Failed(Error),
}

/// Whether a span must have a place now.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hurry {
    /// It is the oldest: a slot is waited for.
    Yes,
    /// Others are under way.
    No,
}

impl<'a> Pipeline<'a> {
    pub(super) fn new(
        filler: &'a Filler,
        readers: Option<Arc<Readers>>,
        jobs: Vec<FillJob>,
    ) -> Self {
        let (spans, begun) = Default::default();
        let mut pipeline = Self { filler, readers, jobs, spans, next_job: 0, begun };
        if pipeline.readers.is_some() {
            pipeline.begin_more(Hurry::No);
        }
        pipeline
    }

    /// Carries the jobs out in their order: waits for their bytes and enqueues their copies. `each`
    /// is called once a job, in order and with no lock held, with the ticket after which its bytes
    /// are in place, `Ticket::NONE` where no bytes belong there. The first error is the last call:
    /// the jobs after it are not done.
    ///
    /// The errors are `Io`, `FileChanged`, those of waiting, and what the driver says. Copies
    /// enqueued before the failure still run: the caller takes [`Filler::fence`] before it reuses
    /// the targets.
    pub fn run(self, each: &mut dyn FnMut(usize, Result<Ticket>)) {
        self.run_as_admitted(&mut |_| Ok(()), each);
    }

    /// The same for targets that are not mapped yet: `admit` is called once a job, before its first
    /// copy, and has it mapped when it returns. Its failure is the job's.
    pub fn run_as_admitted(
        mut self,
        admit: &mut dyn FnMut(usize) -> Result<()>,
        each: &mut dyn FnMut(usize, Result<Ticket>),
    ) {
        let (mut ready, mut ordered) = (Ticket::NONE, 0);
        loop {
            self.begin_more(Hurry::Yes);
            let Some((span, begun)) = self.begun.pop_front() else { return };
            let (job, is_last) = (span.job, span.is_last);
            // Job by job: a wait that is placed for a later page would hold up this one's copy.
            let admitted =
                if job >= ordered { admit(job).and_then(|()| self.order(job)) } else { Ok(()) };
            ordered = job + 1;
            let ended = match admitted {
                Ok(()) => self.end(&span, begun),
                Err(error) => {
                    self.begun.push_front((span, begun));
                    each(job, Err(error));
                    return;
                }
            };
            match ended {
                Ok(ticket) if ticket.is_none() => {}
                Ok(ticket) => ready = ticket,
                Err(error) => {
                    each(job, Err(error));
                    return;
                }
            }
            if is_last {
                each(job, Ok(std::mem::replace(&mut ready, Ticket::NONE)));
            }
        }
    }

    /// Lets the fill stream wait for what may still use a job's target.
    fn order(&self, job: usize) -> Result<()> {
        let filler = self.filler;
        let device = &filler.device;
        for user in &self.jobs[job].after {
            let wait = || device.fences.stream_wait(filler.stream, filler.slot, *user);
            if !device.retry(wait).map_err(|error| device.note(error))? {
                let text = "a frame in use was taken although no fence covers its user";
                return Err(Error::new(ErrorCode::Internal, text));
            }
        }
        filler.scrub(&self.jobs[job])
    }

    /// Begins as many spans as have a place; in a hurry, one at least.
    fn begin_more(&mut self, hurry: Hurry) {
        let ahead = if self.readers.is_some() { AHEAD_MAX } else { 1 };
        while self.begun.len() < ahead && !matches!(self.begun.back(), Some((_, Begun::Failed(_))))
        {
            let Some(span) = self.next_span() else { return };
            let hurry = if self.begun.is_empty() { hurry } else { Hurry::No };
            match self.begin(&span, hurry) {
                Ok(Some(begun)) => {
                    self.note_pace(&span, &begun);
                    self.begun.push_back((span, begun));
                }
                Ok(None) => return self.spans.push_front(span),
                Err(error) => self.begun.push_back((span, Begun::Failed(error))),
            }
        }
    }

    fn next_span(&mut self) -> Option<Span> {
        if self.spans.is_empty() {
            let job = self.jobs.get(self.next_job)?;
            let slot_bytes = self.filler.part_bytes();
            self.spans.extend(Span::of_job(self.next_job, &job.bound, &job.target, slot_bytes));
            self.next_job += 1;
        }
        self.spans.pop_front()
    }

    /// `None` when it has no place yet.
    fn begin(&mut self, span: &Span, hurry: Hurry) -> Result<Option<Begun>> {
        if span.segments.is_empty() {
            return Ok(Some(Begun::Nothing));
        }
        if span.way == Way::Direct {
            return Ok(Some(Begun::Direct));
        }
        let (filler, job) = (self.filler, &self.jobs[span.job]);
        if span.way == Way::Read {
            let key = filler.key(job.bar, span.bytes.start);
            if let Some(window) = self.find_registered(span, key) {
                return Ok(Some(Begun::Registered(window)));
            }
            if let Some(window) = filler.cache.find(key) {
                return Ok(Some(Begun::Cached(window)));
            }
            if job.keep == Keep::Locked
                && self.readers.is_some()
                && !self.is_left_in_page_cache(span)
                && let Some(window) = self.window_for(span, key)
            {
                return self.read(span, &job.bound, Place::Window(window)).map(Some);
            }
        }
        if filler.staging.slot_count() == 0 {
            // There may be room for one again.
            self.readers.iter().for_each(|readers| filler.grow(readers));
            return Ok(Some(Begun::Pageable));
        }
        filler.cover()?;
        let slot = match (filler.staging.try_take(&filler.device)?, hurry) {
            (None, Hurry::No) => {
                self.readers.iter().for_each(|readers| filler.grow(readers));
                return Ok(None);
            }
            (None, Hurry::Yes) => match filler.staging.take(&filler.device)? {
                Some(slot) => slot,
                None => return Ok(Some(Begun::Pageable)),
            },
            (Some(slot), _) => slot,
        };
        self.read(span, &job.bound, Place::Slot(slot)).map(Some)
    }

    /// The window of a span whose pages are registered. Without threads nobody would look after
    /// its copies.
    fn find_registered(&self, span: &Span, key: Key) -> Option<Arc<FileWindow>> {
        self.readers.as_ref()?;
        let source = span.source()?;
        let file = self.jobs[span.job].bound.source(source.file).file()?;
        self.filler.registered.find(key, file, &source.bytes)
    }

    /// Whether a span's bytes are, or come to be, registered where they are.
    fn is_left_in_page_cache(&self, span: &Span) -> bool {
        let (filler, bound) = (self.filler, &self.jobs[span.job].bound);
        let Some(source) = span.source() else { return false };
        let Some(file) = bound.source(source.file).file() else { return false };
        filler.registered.claims(file, filler.prefer(bound), || filler.fits(bound))
    }

    /// The window that a span moves into, if it may now.
    fn window_for(&self, span: &Span, key: Key) -> Option<WindowLease> {
        let (filler, bound) = (self.filler, &self.jobs[span.job].bound);
        let may_be_new =
            || filler.pace.is_due() || span.comes_from_disk(bound, filler.reading(bound));
        let idle = filler.cache.idle_window_for(key);
        idle.or_else(|| may_be_new().then(|| filler.cache.new_window_for(key))?)
    }

    /// A span that may be kept has begun.
    fn note_pace(&self, span: &Span, begun: &Begun) {
        let is_kept = self.jobs[span.job].keep == Keep::Locked && self.readers.is_some();
        if span.way == Way::Read && is_kept && !span.segments.is_empty() {
            let is_new = matches!(begun, Begun::Reading { place, .. } if place.is_untouched());
            let came = if is_new { Came::Promoted } else { Came::AsBefore };
            self.filler.pace.note_span(came);
        }
    }

    /// Has a span read to its place.
    fn read(&self, span: &Span, bound: &Arc<Bound>, mut place: Place) -> Result<Begun> {
        let device = &self.filler.device;
        let reading = self.filler.reading(bound);
        let first = span.segments.iter().find_map(|it| bound.source(it.file).file());
        let first = first.filter(|_| reading.may_be_direct());
        let direct = first.and_then(|file| file.direct());
        let pad = direct.map_or(0, |direct| span.pad(direct.alignment()));
        let after = match &mut place {
            Place::Slot(_) => None,
            Place::Window(window) => {
                window.pad = pad;
                Some(self.after(span, bound, window))
            }
        };
        let cut = if place.is_untouched() { Cut::InMemory } else { Cut::InFile };
        let pieces = pieces(span, pad, cut);
        let origins = pieces.iter().map(|piece| Origin::of(bound.source(piece.file)));
        let origins = origins.collect::<Result<Vec<_>>>()?;
        self.filler.scrub_slot(place.memory(), pad + span.len(), &pieces);
        let parts = place.memory().lend(pieces.iter().map(|piece| piece.place.clone()));
        let read = SpanRead::new(pieces.len(), span, bound, after);
        let each = pieces.into_iter().zip(parts).zip(origins).enumerate();
        let tasks = each.map(|(index, ((piece, part), origin))| {
            let (device, span) = (Arc::clone(device), Arc::clone(&read));
            let (source, memory) = (piece.source, Some(part));
            let piece = PieceRead { device, span, index, origin, source, reading, memory };
            Box::new(move || piece.run()) as Box<dyn FnOnce() + Send>
        });
        match &self.readers {
            Some(readers) => readers.submit(tasks),
            None => tasks.for_each(|task| task()),
        }
        Ok(Begun::Reading { place, read, pad })
    }

    /// What follows the reading of a window: it is locked, and its bytes are in memory once only
    /// where there is no more of it.
    fn after(&self, span: &Span, bound: &Arc<Bound>, window: &mut WindowLease) -> After {
        let (device, bound) = (Arc::clone(&self.filler.device), Arc::clone(bound));
        let registrar = window.memory().registrar();
        let is_locked = window.memory().is_locked();
        let extents = span.segments.iter().map(|segment| {
            let start = segment.source_offset;
            (segment.file, start..start + segment.bytes())
        });
        // With memory to spare the file's pages stay, too: the system drops them when it needs
        // them, and what streams by the next plan does not come from the disk again.
        let extents: Vec<_> =
            if self.filler.has_room_for(&bound) { Vec::new() } else { extents.collect() };
        Box::new(move || {
            if !is_locked {
                register(&device, || registrar.register())?;
            }
            for (source, range) in &extents {
                bound.source(*source).file().iter().for_each(|file| file.drop_cached(range));
            }
            Ok(())
        })
    }

    fn end(&mut self, span: &Span, begun: Begun) -> Result<Ticket> {
        let bound = &Arc::clone(&self.jobs[span.job].bound);
        match begun {
            Begun::Nothing => Ok(Ticket::NONE),
            Begun::Failed(error) => Err(error),
            Begun::Direct => self.copy_direct(span, bound),
            Begun::Pageable => self.copy_pageable(span, bound),
            Begun::Registered(window) => self.copy_registered(span, bound, &window),
            Begun::Cached(window) => self.copy_cached(span, bound, window),
            Begun::Reading { place, read, pad } => {
                if let Err(error) = self.wait(&read) {
                    read.give_up(place);
                    return Err(error);
                }
                self.copy_read(span, bound, (place, pad), &read)
            }
        }
    }

    /// Waits for a read, and begins others meanwhile.
    fn wait(&mut self, read: &SpanRead) -> Result<()> {
        if read.wait(Duration::ZERO) {
            return Ok(());
        }
        let device = Arc::clone(&self.filler.device);
        let wait = device.wait(WaitKind::Read);
        loop {
            let patience = wait.check()?;
            if read.wait(patience.min(LOOK)) {
                return Ok(());
            }
            self.begin_more(Hurry::No);
        }
    }

    fn copy_registered(
        &self,
        span: &Span,
        bound: &Bound,
        window: &Arc<FileWindow>,
    ) -> Result<Ticket> {
        span.check_unchanged(bound)?;
        let (filler, job) = (self.filler, &self.jobs[span.job]);
        let runs = span.source().map_or_else(Vec::new, |source| source.runs);
        let mut is_begun = false;
        let (mut ticket, copied) = self.enqueue(span, |target| {
            runs.iter().try_for_each(|run| {
                let target = target.offset(run.target - span.bytes.start);
                let bytes = run.source..run.source + run.bytes;
                window.copy_to_device(&bytes, target, filler.stream)?;
                is_begun = true;
                Ok(())
            })
        });
        if ticket.is_none() && is_begun {
            // Some are enqueued, and the window is not given back before they are done.
            ticket = filler.fence().unwrap_or_else(|_| filler.stamp());
        }
        if !ticket.is_none() {
            let (page, file) = ((job.bar, job.page), Arc::clone(window.file()));
            let key = filler.key(job.bar, span.bytes.start);
            filler.registered.note_copy(key, window, Copied { ticket, page, file });
        }
        if copied.is_ok() {
            counters::add(&filler.device.counters.sources.registered, span.len() as u64);
        }
        copied
    }

    fn copy_cached(&self, span: &Span, bound: &Bound, mut window: WindowLease) -> Result<Ticket> {
        if let Err(error) = span.check_unchanged(bound) {
            let ticket = window.ticket();
            window.discard(ticket);
            return Err(error);
        }
        let pad = window.pad;
        let (free_at, copied) = self.copy(span, window.memory(), pad);
        let length = span.len() as u64;
        // An earlier copy comes first on the same stream.
        let free_at = if free_at.is_none() { window.ticket() } else { free_at };
        window.keep(free_at);
        if copied.is_ok() {
            counters::add(&self.filler.device.counters.sources.locked_cache, length);
        }
        copied
    }

    fn copy_read(
        &self,
        span: &Span,
        bound: &Bound,
        (mut place, pad): (Place, usize),
        read: &SpanRead,
    ) -> Result<Ticket> {
        let end = read.end();
        end.read?;
        // After the reads: bytes of a file that changed meanwhile must not count as the model's.
        span.check_unchanged(bound)?;
        if let Err(error) = end.after
            && self.filler.cache.refuse()
        {
            self.filler.tell(&error);
        }
        let (free_at, copied) = self.copy(span, place.memory(), pad);
        let is_locked = place.memory().is_locked();
        match place {
            Place::Slot(slot) => {
                slot.give_back(free_at);
                self.note_read(span, bound, read);
            }
            Place::Window(window) if !is_locked => {
                // Copied as ordinary memory is, which it stays: it goes when the copy is done.
                match self.filler.wait() {
                    Ok(()) => drop(window),
                    Err(_) => window.leak(),
                }
            }
            Place::Window(window) if copied.is_ok() => {
                if window.is_new && read.disk_bytes() == 0 {
                    self.filler.pace.note_window(end.time);
                }
                window.keep(free_at);
            }
            Place::Window(window) => window.discard(free_at),
        }
        copied
    }

    /// A span that is streamed again and again went through the ring.
    fn note_read(&self, span: &Span, bound: &Bound, read: &SpanRead) {
        let (filler, job) = (self.filler, &self.jobs[span.job]);
        let Some(FileSource { file, bytes, .. }) = span.source() else { return };
        let Some(file) = bound.source(file).file().filter(|_| span.way == Way::Read) else {
            return;
        };
        if job.keep == Keep::Locked && self.readers.is_some() {
            let (key, prefer) = (filler.key(job.bar, span.bytes.start), filler.prefer(bound));
            let source = (file, bytes);
            filler.registered.note_read(key, source, prefer, read.disk_bytes());
        }
    }

    /// Enqueues a span's copy. Returns when its memory is free again, too.
    fn copy(&self, span: &Span, memory: &mut LockedSlot, pad: usize) -> (Ticket, Result<Ticket>) {
        let (stream, length) = (self.filler.stream, span.len());
        self.enqueue(span, |target| memory.copy_to_device(pad..pad + length, target, stream))
    }

    /// Enqueues a span's copy as `copy` does it. Returns when its memory is free again, too.
    fn enqueue(
        &self,
        span: &Span,
        mut copy: impl FnMut(DeviceAddress) -> DriverResult<()>,
    ) -> (Ticket, Result<Ticket>) {
        let (filler, length) = (self.filler, span.len());
        let target = self.jobs[span.job].base.offset(span.bytes.start);
        let _traced = self.trace_copy(span);
        let start = filler.clock.begin(&filler.device, filler.stream);
        if let Err(error) = filler.device.retry(|| copy(target)) {
            return (Ticket::NONE, Err(filler.device.note(error.into())));
        }
        filler.clock.end(&filler.device, filler.stream, start, self.told(span));
        let (free_at, fenced) = self.fence_copies();
        if fenced.is_ok() {
            counters::add(&filler.device.counters.bytes_filled, length as u64);
        }
        (free_at, fenced)
    }

    /// Enqueues the copies of a span from where the program has it.
    fn copy_direct(&self, span: &Span, bound: &Bound) -> Result<Ticket> {
        let (filler, device) = (self.filler, &self.filler.device);
        let (driver, job) = (&*device.driver, &self.jobs[span.job]);
        let base = job.base.offset(span.bytes.start);
        let copies = direct_copies(span, bound).into_iter().map(|(memory, copy)| {
            let range = copy.source..copy.source + copy.place.len() as u64;
            Ok((memory, memory.lease()?, range, base.offset(copy.place.start as u64)))
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let (traced, mut enqueued_bytes) = (self.trace_copy(span), 0);
        let start = filler.clock.begin(device, filler.stream);
        let enqueued = copies.iter().try_for_each(|(_, lease, range, target)| {
            let copy = || lease.copy_to_device(driver, range.clone(), *target, filler.stream);
            device.retry(copy)?;
            enqueued_bytes += range.end - range.start;
            Ok::<_, DriverError>(())
        });
        if enqueued.is_ok() {
            filler.clock.end(device, filler.stream, start, self.told(span));
        }
        drop(traced);
        // Where one was refused those before it read the memory all the same.
        let (free_at, fenced) = match enqueued_bytes {
            0 => (Ticket::NONE, Ok(Ticket::NONE)),
            _ => self.fence_copies(),
        };
        if !free_at.is_none() {
            for (memory, lease, ..) in copies {
                filler.host_copies.note(job.bar, memory, lease, free_at);
            }
        }
        enqueued.map_err(|error| device.note(error.into()))?;
        let ticket = fenced?;
        counters::add(&device.counters.bytes_filled, enqueued_bytes);
        counters::add(&device.counters.sources.host_locked, enqueued_bytes);
        Ok(ticket)
    }

    /// Records a fence behind copies that were enqueued. Returns when their memory is free again,
    /// too.
    fn fence_copies(&self) -> (Ticket, Result<Ticket>) {
        let filler = self.filler;
        match filler.fence() {
            Ok(ticket) => (ticket, Ok(ticket)),
            // The copy is enqueued and no fence covers it: only the stream's end tells when the
            // memory is free again, or else the fence of whoever needs it next.
            Err(error) if filler.wait().is_ok() => (Ticket::NONE, Err(error)),
            Err(error) => (filler.stamp(), Err(error)),
        }
    }

    fn told(&self, span: &Span) -> CopyTold {
        let job = &self.jobs[span.job];
        CopyTold { bar: job.bar, pages: job.page..job.page + 1, bytes: span.len() as u64 }
    }

    fn trace_copy(&self, span: &Span) -> trace::Guard {
        let (job, filler) = (&self.jobs[span.job], self.filler);
        let copied = trace::span(Kind::Copy).device(filler.device.ordinal).stream(filler.stream);
        copied.pages(job.bar, job.page..job.page + 1).bytes(span.len() as u64)
    }

    /// The whole way through ordinary memory, at a tenth of the link.
    fn copy_pageable(&self, span: &Span, bound: &Arc<Bound>) -> Result<Ticket> {
        let (filler, device) = (self.filler, &self.filler.device);
        let reading = filler.reading(bound);
        let base = self.jobs[span.job].base.offset(span.bytes.start);
        let mut memory = PageableMemory::new(&device.driver, PAGEABLE_BYTES.min(span.len()));
        for piece in pieces(span, 0, Cut::InFile) {
            let origin = Origin::of(bound.source(piece.file))?;
            let (mut source, mut place) = (piece.source, piece.place);
            while !place.is_empty() {
                let length = place.len().min(memory.bytes_mut().len());
                let target = &mut memory.bytes_mut()[..length];
                origin.read(reading, source, target, &device.counters.sources, || ())?;
                let target = base.offset(place.start as u64);
                let copy = || match memory.is_given_up() {
                    false => memory.copy_to_device(0..length, target, filler.stream),
                    true => Err(DriverError::new("cuStreamSynchronize", DriverCode::UNKNOWN)),
                };
                device.retry(copy).map_err(|error| device.note(error.into()))?;
                source += length as u64;
                place.start += length;
            }
        }
        span.check_unchanged(bound)?;
        counters::add(&device.counters.bytes_filled, span.len() as u64);
        filler.fence()
    }
}

impl Drop for Pipeline<'_> {
    fn drop(&mut self) {
        // What was begun and is not wanted any more.
        for (_, begun) in self.begun.drain(..) {
            if let Begun::Reading { place, read, .. } = begun {
                read.give_up(place);
            }
        }
    }
}
