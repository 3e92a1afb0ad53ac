//! Fill jobs: which bytes of which files go where, and the filler that carries them out.
//!
//! A job is enqueued on the fill stream and ends in one ready ticket; it never waits for its own
//! copies. Bytes come from page-locked memory of the program or the cache, from registered pages of
//! a file, or from files and other memory by way of the staging ring: read by the caller's thread,
//! or, where the runtime has threads, by several that run ahead of the copies.
//! What the memory of the host allows is asked of `host/room`; where none can be locked, bytes go
//! through ordinary memory, piece by piece, and the program is none the wiser. `Raw` is the only
//! encoding: the seam where weights that are packed or quantised in the file will be decoded on the
//! device.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::copy::cache::{Cache, Key, Surplus};
use crate::copy::gpu_clock::GpuClock;
use crate::copy::host_copies::HostCopies;
use crate::copy::pace::Pace;
use crate::copy::pipeline::Pipeline;
use crate::copy::readers::Readers;
use crate::copy::registered::Registered;
use crate::copy::staging::Staging;
use crate::copy::transfer::OnStream;
use crate::copy::windows::{Windows, register};
use crate::driver::DriverCode;
use crate::error::{Error, Result};
use crate::host::bound::Bound;
use crate::host::carved::Carver;
use crate::host::direct::ALIGNMENT_MAX;
use crate::host::file_pages::FileWindow;
use crate::host::locked::{self, LockedSlot};
use crate::host::mounts::SystemRoot;
use crate::host::reading::Reading;
use crate::host::room::LockedRoom;
use crate::model::placement::PassMeasured;
use crate::options::{Prefer, Threads};
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::device::{Device, Scope};
use crate::sync::fence::StreamSlot;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::units::{DeviceAddress, MIB, Stream};

pub use crate::copy::locked_bytes::LockedBytes;

/// Largest staging slot: copies of 16 MiB come within 1 % of the link rate.
const SLOT_BYTES_MAX: u64 = 16 * MIB;
/// Slots of the ring when threads read ahead, where the allowance has room for them. No more: what
/// threads write is still in the processor's cache when the device reads it, as long as the ring is
/// small. A warm file came at 51 GB/s through 4 slots, at 48 through 6 and at 38 through 12.
const RING_SLOTS_MAX: u64 = 4;
/// Without a fill for so long nothing streams.
const QUIET_TIME: Duration = Duration::from_secs(1);
/// Windows that one call of the housekeeping gives back: each of them waits for the device.
const WINDOWS_A_CALL: usize = 2;

/// Whether a page's bytes are worth a place in the page-locked cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Keep {
    /// They come once, or the page stays resident.
    #[default]
    No,
    /// They come again and again: they move into page-locked memory if there is room, at a pace.
    Locked,
}

/// One fill: segments of sources and the addresses that they belong at.
#[derive(Clone)]
pub struct FillJob {
    /// The files and what binds them.
    pub bound: Arc<Bound>,
    /// Address of the VBAR's first byte.
    pub base: DeviceAddress,
    /// The bytes of the VBAR to fill, whole pages.
    pub target: Range<u64>,
    /// Index of the VBAR in its runtime.
    pub bar: u32,
    /// The first page.
    pub page: u32,
    /// Whether to keep the bytes on the host.
    pub keep: Keep,
    /// Work that may still use what is behind the target: the copies come after it. Each is covered
    /// by a record.
    pub after: Vec<Ticket>,
}

/// Carries out fill jobs on a stream of its own.
pub struct Filler {
    pub(super) device: Arc<Device>,
    pub(super) staging: Staging,
    pub(super) cache: Arc<Cache>,
    pub(super) registered: Registered,
    pub(super) pace: Pace,
    pub(super) stream: Stream,
    pub(super) saved: Arc<Carver>,
    pub(super) windows: Arc<Windows>,
    pub(super) room: Arc<LockedRoom>,
    pub(super) slot: StreamSlot,
    /// What is saved is copied on it, so that nobody's work waits for that.
    pub(super) saving: OnStream,
    readers: Mutex<Option<Arc<Readers>>>,
    /// Whether a slot is on its way into the ring, or none can be had any more.
    growing: Arc<AtomicBool>,
    pub(super) clock: GpuClock,
    pub(super) host_copies: HostCopies,
    /// When the last jobs came.
    busy_at: Mutex<Instant>,
    /// A pass has ended since pages were given back.
    pass_ended: AtomicBool,
    /// Whether it was told that memory cannot be locked.
    told: AtomicBool,
}

impl Filler {
    /// Makes its streams, the staging ring as far as the host has memory for it, and the
    /// threads that the options ask for; the runtime's context is current.
    ///
    /// # Errors
    /// What the driver says; nothing is left behind then.
    pub fn new(device: Arc<Device>) -> Result<Self> {
        let options = &device.options;
        let root = options.system_root.as_ref().map(SystemRoot::new).unwrap_or_default();
        let room = Arc::new(LockedRoom::new(root, options.host_allowance));
        Self::with_room(device, room)
    }

    /// As [`Filler::new`], what it locks held in `room`.
    ///
    /// # Errors
    /// As there.
    pub fn with_room(device: Arc<Device>, room: Arc<LockedRoom>) -> Result<Self> {
        let filling = OnStream::make(&device)?;
        let saving = OnStream::make(&device).inspect_err(|_| filling.destroy_unused(&device))?;
        let options = &device.options;
        let slot_bytes = options.page_size.bytes().min(SLOT_BYTES_MAX) + ALIGNMENT_MAX;
        let count = options.staging_slot_count.max(1);
        let threads = options.threads.unwrap_or_default();
        let (staging, told) = make_ring(&device, &room, count, slot_bytes as usize);
        let cache = Cache::new(Arc::clone(&device), Arc::clone(&room), slot_bytes as usize);
        let registered = Registered::new(Arc::clone(&device), Arc::clone(&room));
        let filler = Self {
            staging,
            registered,
            pace: Pace::default(),
            cache: Arc::new(cache),
            saved: Arc::default(),
            windows: Arc::default(),
            stream: filling.stream,
            room,
            slot: filling.slot,
            saving,
            readers: Mutex::new(None),
            growing: Arc::default(),
            clock: GpuClock::default(),
            host_copies: HostCopies::default(),
            busy_at: Mutex::new(Instant::now()),
            pass_ended: AtomicBool::default(),
            told: AtomicBool::new(told),
            device,
        };
        filler.set_threads(threads);
        Ok(filler)
    }

    /// The fill stream and its slot.
    #[must_use]
    pub fn stream(&self) -> (Stream, StreamSlot) {
        (self.stream, self.slot)
    }

    /// Page-locked bytes that the filler holds, in all.
    #[must_use]
    pub fn locked_bytes(&self) -> u64 {
        self.locked().sum()
    }

    /// Page-locked bytes by what holds them.
    #[must_use]
    pub fn locked(&self) -> LockedBytes {
        let (ring_bytes, cache_bytes) = (self.staging.locked_bytes(), self.cache.bytes());
        let (registered_bytes, saved_bytes) = (self.registered.bytes(), self.saved.bytes());
        let saved_excess = if saved_bytes > 0 && self.room.is_short() { saved_bytes } else { 0 };
        let excess_bytes = self.room.excess_bytes().max(saved_excess);
        LockedBytes { ring_bytes, cache_bytes, registered_bytes, saved_bytes, excess_bytes }
    }

    /// Page-locked bytes that may be held now; the system is asked at most each 100 ms.
    #[must_use]
    pub fn allowance_bytes(&self) -> u64 {
        self.room.allowance_bytes()
    }

    /// Time that a MiB took on the link lately, in nanoseconds; `None` without threads, and before
    /// enough was measured.
    #[must_use]
    pub fn link_ns_per_mib(&self) -> Option<u64> {
        self.clock.link_ns_per_mib()
    }

    /// So many pages stream a cycle from now on: of those that come from memory a few a cycle move
    /// into the page-locked cache. Before the first call all that may be kept does at once.
    pub fn pace(&self, pages: u64) {
        let parts = self.device.options.page_size.bytes().div_ceil(self.part_bytes());
        self.pace.set_spans(pages.saturating_mul(parts));
    }

    /// Cycles take other times from now on.
    pub fn forget_times(&self) {
        self.pace.forget_times();
    }

    /// Starts the threads that read, or stops them after what they have begun. Without them the
    /// caller's thread reads, and nothing is put into the cache. Not for a thread that fills.
    pub fn set_threads(&self, threads: Threads) {
        // Who decides by it runs ahead on a thread.
        self.clock.measure_link(threads == Threads::On);
        let mut readers = self.readers.lock();
        let stopped = match (threads, readers.is_some()) {
            (Threads::Off, _) => readers.take(),
            (Threads::On, true) => None,
            (Threads::On, false) => {
                match Readers::start() {
                    Ok(started) => *readers = Some(Arc::new(started)),
                    Err(error) => log::warn!("no threads to read files with: {error}"),
                }
                None
            }
        };
        drop(readers);
        drop(stopped);
    }

    /// The threads that read, where there are some.
    pub(super) fn readers(&self) -> Option<Arc<Readers>> {
        self.readers.lock().clone()
    }

    /// Begins the jobs: where threads read, they do so from now on. What comes of it is for
    /// [`Pipeline::run`]; dropped before that, nothing does.
    #[must_use = "nothing is copied before it is run"]
    pub fn begin(&self, jobs: Vec<FillJob>) -> Pipeline<'_> {
        *self.busy_at.lock() = Instant::now();
        let readers = self.readers();
        if readers.is_none() && self.staging.slot_count() > 0 && self.room.excess_bytes() > 0 {
            // Nobody else looks after it. Where it cannot be, the slots stay until the next time.
            let _ = self.housekeep();
        }
        Pipeline::new(self, readers, jobs)
    }

    /// Records a fence on the fill stream that covers everything enqueued so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fence(&self) -> Result<Ticket> {
        let record = || self.device.fences.record(self.stream, self.slot);
        let recorded = self.device.retry(record);
        recorded.map_err(|error| self.device.note(error))
    }

    /// The ticket of everything enqueued so far, where no fence can be had: the next one covers it.
    #[must_use]
    pub fn stamp(&self) -> Ticket {
        self.device.fences.stamp_anyhow(self.slot)
    }

    /// Records the fence that was not to be had for copies before, if there are such copies.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn cover(&self) -> Result<()> {
        let covered = self.device.retry(|| self.device.fences.cover_stamps(self.stream, self.slot));
        covered.map_err(|error| self.device.note(error))
    }

    /// Waits for everything enqueued so far, where no fence can be had.
    ///
    /// # Errors
    /// Those of waiting, and what the driver says.
    pub fn wait(&self) -> Result<()> {
        self.wait_for(self.stream)
    }

    /// Waits for everything enqueued on a stream so far, as [`Filler::wait`].
    ///
    /// # Errors
    /// As there.
    pub(super) fn wait_for(&self, stream: Stream) -> Result<()> {
        let mut wait = self.device.wait(WaitKind::Staging);
        loop {
            match self.device.driver.stream_query(stream) {
                Ok(()) => return Ok(()),
                Err(error) if error.code == DriverCode::NOT_READY => wait.pause()?,
                Err(error) => return Err(self.device.note(error.into())),
            }
        }
    }

    /// Drops pages of a VBAR from the page-locked cache: it was closed, or they stay resident.
    /// Their windows wait for other pages; [`Filler::housekeep`] gives back what nobody needs.
    pub fn forget(&self, bar: u32, pages: Range<u32>) {
        let parts = self.device.options.page_size.bytes() / self.part_bytes();
        let parts = u64::from(pages.start) * parts..u64::from(pages.end) * parts;
        self.cache.forget(bar, parts.clone());
        self.registered.forget(bar, parts);
    }

    /// Pages, by VBAR and number, that got bytes of a file which had changed by the time that they
    /// were copied: they are not to be used. A page that cannot be taken off the device now is told
    /// again after [`Filler::put_stale`].
    #[must_use]
    pub fn take_stale(&self) -> Vec<(u32, u32)> {
        self.registered.take_stale()
    }

    /// See [`Filler::take_stale`].
    pub fn put_stale(&self, pages: Vec<(u32, u32)>) {
        self.registered.put_stale(pages);
    }

    /// Takes leave of the program's memory that a VBAR was bound to; the VBAR is gone. What copies
    /// still read stays until [`Filler::sweep`] finds them done.
    pub fn retire(&self, bar: u32, bound: &Bound) {
        self.host_copies.retire(bar, bound);
        self.sweep();
    }

    /// Lets go of the program's memory that VBARs which are gone were bound to, and that no copy
    /// reads any more: its owner is dropped here. With no lock held.
    pub fn sweep(&self) {
        self.host_copies.sweep(&self.device);
    }

    /// Whether copies still read the program's memory for a VBAR that is gone, as far as is known.
    #[must_use]
    pub fn is_leaving(&self, bar: u32) -> bool {
        self.host_copies.is_leaving(bar)
    }

    /// A pass of the program has ended, which came to this where it was measured: the housekeeping
    /// may give a few windows back although others stream, and the pace is that of the next one.
    pub fn note_pass_end(&self, pass: Option<PassMeasured>) {
        self.pass_ended.store(true, Relaxed);
        self.pace.end_cycle(pass);
    }

    /// Gives page-locked memory back where it is time to: what is held above the allowance, where
    /// the system is short of memory, and windows without use for a second, a few of them a pass
    /// while others stream. Then registers pages of files that are worth it. A few windows a call,
    /// each of which waits for the device or stops launches: for a thread that nobody waits for.
    ///
    /// # Errors
    /// What the driver says when the context is entered.
    pub fn housekeep(&self) -> Result<()> {
        self.registered.check_copies();
        self.sweep();
        let above = self.room.excess_bytes() > 0;
        let surplus = match above || self.room.is_short() {
            true => Surplus::Any,
            false if self.busy_at.lock().elapsed() < QUIET_TIME => {
                // What has become resident has no need of them; file pages may be streamed again.
                let at_most = if self.pass_ended.swap(false, Relaxed) { WINDOWS_A_CALL } else { 0 };
                let idle_saved = self.may_have_idle_saved();
                if at_most > 0 && (idle_saved || self.cache.may_have(Surplus::LongIdle)) {
                    let scope = self.device.enter()?;
                    let mut windows = self.cache.take_out(Surplus::LongIdle, at_most);
                    self.add_idle_saved(&mut windows, if idle_saved { at_most } else { 0 });
                    self.give_back(&scope, windows, Vec::new());
                }
                self.registered.advance(&self.cache);
                return Ok(());
            }
            false => Surplus::LongIdle,
        };
        let may_have = self.registered.may_have(surplus) || self.cache.may_have(surplus);
        let idle_saved = self.may_have_idle_saved();
        if above || may_have || idle_saved {
            let scope = self.device.enter()?;
            // File pages first: they stay in memory as long as nobody needs it.
            let pages = self.registered.take_out(surplus, WINDOWS_A_CALL);
            let mut windows = self.cache.take_out(surplus, WINDOWS_A_CALL - pages.len());
            self.add_idle_saved(&mut windows, if idle_saved { WINDOWS_A_CALL } else { 0 });
            if above && windows.is_empty() && pages.is_empty() {
                // To the last slot: without any, bytes go through ordinary memory.
                windows = self.staging.take_out(&self.device, WINDOWS_A_CALL, 0)?;
            }
            self.give_back(&scope, windows, pages);
        }
        self.registered.advance(&self.cache);
        Ok(())
    }

    /// Gives page-locked memory back until `target_bytes` are held, or what is left is in use; one
    /// slot of the ring stays. Returns the bytes given back. Waits for the device.
    ///
    /// # Errors
    /// What the driver says when the context is entered.
    pub fn trim_host(&self, target_bytes: u64) -> Result<u64> {
        self.sweep();
        let window_bytes = self.staging.slot_bytes() as u64;
        let excess = self.locked_bytes().saturating_sub(target_bytes);
        if excess == 0 {
            return Ok(0);
        }
        let scope = self.device.enter()?;
        let count = excess.div_ceil(window_bytes) as usize;
        let pages = self.registered.take_out(Surplus::Any, count);
        let missing = excess.saturating_sub(pages.iter().map(FileWindow::bytes).sum());
        // In bytes: a window of what is saved is many of the others.
        let slots_of = |bytes: u64| bytes.div_ceil(window_bytes) as usize;
        let mut windows = self.cache.take_out(Surplus::Any, slots_of(missing));
        windows.extend(self.saved.take_idle_bytes(missing.saturating_sub(bytes_of(&windows))));
        let missing = missing.saturating_sub(bytes_of(&windows));
        let slots = self.staging.take_out(&self.device, slots_of(missing), 1);
        let (slots, failed) = slots.map_or_else(|error| (Vec::new(), Some(error)), |it| (it, None));
        windows.extend(slots);
        let bytes = self.give_back(&scope, windows, pages);
        failed.map_or(Ok(bytes), Err)
    }

    /// Gives memory back that was taken out of where it was; the scope is entered before that,
    /// since the driver frees nothing without the context. Returns its bytes; what the driver does
    /// not let go stays held.
    fn give_back(
        &self,
        _scope: &Scope<'_>,
        windows: Vec<LockedSlot>,
        pages: Vec<FileWindow>,
    ) -> u64 {
        if windows.is_empty() && pages.is_empty() {
            return 0;
        }
        let wait = self.device.wait(WaitKind::Register);
        let mut bytes = 0;
        for window in windows {
            let of_window = window.len() as u64;
            let freed = window.free().map_err(|error| self.device.note(error.into()));
            bytes += freed.map_or(0, |()| of_window);
        }
        self.room.release(bytes);
        let bytes = bytes + self.registered.give_back(pages);
        drop(wait);
        bytes
    }

    /// Bytes of a VBAR that one slot or window holds.
    pub(super) fn part_bytes(&self) -> u64 {
        self.staging.slot_bytes() as u64 - ALIGNMENT_MAX
    }

    pub(super) fn key(&self, bar: u32, start: u64) -> Key {
        Key { bar, part: start / self.part_bytes() }
    }

    /// The way that a model's files are read.
    pub(super) fn reading(&self, bound: &Bound) -> Reading {
        Reading::of(self.prefer(bound), || self.fits(bound))
    }

    pub(super) fn prefer(&self, bound: &Bound) -> Prefer {
        bound.prefer().unwrap_or(self.device.options.prefer)
    }

    /// Whether the host could spare a model's bytes beside all that is held.
    pub(super) fn has_room_for(&self, bound: &Bound) -> bool {
        bound.file_bytes() <= self.room.spare_bytes() && !self.room.is_short()
    }

    /// Whether a model is no more than the host can spare.
    pub(super) fn fits(&self, bound: &Bound) -> bool {
        bound.file_bytes() <= self.room.allowance_bytes()
    }

    /// Memory was not locked: told once a runtime.
    pub(super) fn tell(&self, error: &Error) {
        if !self.told.swap(true, Relaxed) {
            tell_slower(error);
        }
    }

    /// Has one more slot made, on a thread that reads, if the ring is short of them.
    pub(super) fn grow(&self, readers: &Readers) {
        let bytes = self.staging.slot_bytes();
        if self.staging.slot_count() >= RING_SLOTS_MAX || self.growing.swap(true, Relaxed) {
            return;
        }
        if self.room.is_short() || !self.room.try_hold(bytes as u64) {
            self.growing.store(false, Relaxed);
            return;
        }
        let (device, room) = (Arc::clone(&self.device), Arc::clone(&self.room));
        let (staging, growing) = (self.staging.clone(), Arc::clone(&self.growing));
        let make = move || {
            let made = locked::map_window(&device.driver, bytes)
                .and_then(|slot| register(&device, || slot.register()).map(|()| slot));
            match made {
                Ok(slot) => {
                    staging.add(slot);
                    growing.store(false, Relaxed);
                }
                // The ring stays as it is.
                Err(_) => room.release(bytes as u64),
            }
        };
        readers.submit([Box::new(make) as Box<_>]);
    }
}

fn bytes_of(windows: &[LockedSlot]) -> u64 {
    windows.iter().map(|window| window.len() as u64).sum()
}

/// The ring, as large as the host has memory for; and whether that it has none was told.
fn make_ring(
    device: &Device,
    room: &LockedRoom,
    count: usize,
    slot_bytes: usize,
) -> (Staging, bool) {
    let count = room.hold_some(count, slot_bytes as u64);
    if count == 0 {
        let error = Error::new(
            crate::error::ErrorCode::HostMemory,
            format!(
                "of {} bytes that may be page-locked there is no room for one slot of {slot_bytes}",
                room.allowance_bytes()
            ),
        );
        tell_slower(&error);
        return (Staging::empty(slot_bytes), true);
    }
    // Apart, so that each can go by itself when the host runs short of memory.
    let mut slots = Vec::with_capacity(count);
    let mut told = false;
    while slots.len() < count && !told {
        // Windows, not the driver's memory: 64 MiB in 17 ms instead of 35 to 47 (one H200).
        match locked::lock_window(&device.driver, slot_bytes) {
            Ok(slot) => slots.push(slot),
            Err(error) => {
                tell_slower(&device.note(error));
                told = true;
            }
        }
    }
    room.release(((count - slots.len()) * slot_bytes) as u64);
    (Staging::of(slots, slot_bytes), told)
}

fn tell_slower(error: &Error) {
    log::warn!(
        "{error}; copies to the device are slower without; `vbar doctor` tells what bounds it"
    );
}

impl Drop for Filler {
    fn drop(&mut self) {
        if process::ending() {
            return;
        }
        // The threads first: what they read may be in the ring or in windows.
        self.set_threads(Threads::Off);
        self.registered.shut(&self.cache);
        // What the driver does not let go without the context, or the device may still read.
        let leak = || {
            std::mem::forget(self.cache.take_out(Surplus::All, usize::MAX));
            std::mem::forget(self.saved.take_all());
            std::mem::forget(self.registered.take_out(Surplus::All, usize::MAX));
            self.host_copies.leak();
        };
        if self.device.is_lost() {
            return leak();
        }
        // Whoever closes has waited for the context: this ends at once.
        let mut end = || -> Result<()> {
            let (driver, streams) = (&self.device.driver, [self.stream, self.saving.stream]);
            let _scope = self.device.enter()?;
            streams
                .iter()
                .try_for_each(|own| self.device.retry(|| driver.stream_synchronize(*own)))?;
            self.host_copies.end();
            self.clock.close(&self.device);
            drop((self.cache.take_out(Surplus::All, usize::MAX), self.saved.take_all()));
            self.registered.give_back(self.registered.take_out(Surplus::All, usize::MAX));
            drop(std::mem::replace(&mut self.staging, Staging::empty(0)));
            let mut destroy = |own: &Stream| self.device.retry(|| driver.stream_destroy(*own));
            streams.iter().try_for_each(&mut destroy).map_err(Error::from)
        };
        if let Err(error) = end() {
            log::warn!("closing the streams of copies: {error}");
            leak();
        }
    }
}
