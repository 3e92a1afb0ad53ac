//! Pages of model files that the device reads itself: no copy of them in memory but the system's.
//!
//! A file gets there step by step. At first sight it is asked whether it may be at all: driver,
//! device, file system, and that this process alone has it. Then its streamed bytes go through the
//! ring until they came from the page cache round after round ([`Warmth`]); from then on each span
//! that is streamed is wanted, and the housekeeping registers a few a call. The first of a file is
//! tried on a thread of its own that is left behind when it does not come back.
//!
//! Owns the windows, one a span, so that no copy crosses one; which copies of them are not known to
//! be done; and which pages got bytes of a file that changed before their copy was done. A window
//! is given back only after its last copy, on the housekeeping thread, or when all ends.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::copy::cache::{Cache, Key, Surplus};
use crate::copy::trial::Trial;
use crate::copy::warmth::{Verdict, Warmth};
use crate::copy::windows::register;
use crate::driver::DeviceAttribute;
use crate::error::{Error, ErrorCode};
use crate::host::file_pages::{Cached, FileWindow};
use crate::host::file_system::FileSystem;
use crate::host::kernel_module::{module_version, registration_refused};
use crate::host::room::{Held, LockedRoom};
use crate::host::source::ModelFile;
use crate::options::Prefer;
use crate::sync::device::Device;
use crate::sync::fence::Cover;
use crate::sync::ticket::Ticket;
use crate::sync::{AtomicBool, Mutex, Relaxed};
use crate::units::MIB;

/// The first library whose flag means what is wanted here: CUDA 12.8, of driver 570.
const VERSION_MIN: i32 = 12_080;
/// What one call of the housekeeping registers: launches wait for about 4 ms of it, in steps of a
/// window, one in 25.
const BYTES_A_CALL: u64 = 128 * MIB;
/// A window whose pages are not in memory is looked at so many times.
const LOOKS_MAX: u32 = 8;
/// A trial that has not come back by then never counts.
pub(super) const TRIAL_TIME: Duration = Duration::from_secs(2);

/// See the module's text.
pub(super) struct Registered {
    device: Arc<Device>,
    room: Arc<LockedRoom>,
    /// Whether driver and device can do it, once that was asked.
    is_able: OnceLock<bool>,
    /// Nothing more is registered.
    off: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: Vec<Known>,
    windows: BTreeMap<Key, Entry>,
    wanted: BTreeMap<Key, Wanted>,
    /// The wanted one that is being made, unless it was forgotten since.
    making: Option<Key>,
    /// With what it is for, unless that was forgotten since.
    trial: Option<(Option<Key>, Trial)>,
    /// Without use, registered all the same.
    parting: Vec<(Entry, Instant)>,
    copies: Vec<Copied>,
    /// Pages, by VBAR and number, with bytes of a file that had changed.
    stale: Vec<(u32, u32)>,
    /// Bytes of all windows, the one on trial included.
    held_bytes: u64,
    uses: u64,
}

/// What is known of a file.
struct Known {
    file: Weak<ModelFile>,
    stage: Stage,
    /// A window of it was registered and came back.
    is_tried: bool,
}

enum Stage {
    Never,
    Judged(Warmth),
    Promoted,
}

struct Entry {
    window: Arc<FileWindow>,
    /// Copies that were not seen to be done.
    tickets: Vec<Ticket>,
    used: u64,
}

struct Wanted {
    file: Arc<ModelFile>,
    bytes: Range<u64>,
    looks: u32,
}

/// A copy whose file is compared once more when it is done.
pub(super) struct Copied {
    pub(super) ticket: Ticket,
    pub(super) page: (u32, u32),
    pub(super) file: Arc<ModelFile>,
}

/// What came of a wanted window.
enum Made {
    /// So many bytes were registered, or read ahead.
    Bytes(u64),
    Nothing,
    /// It is on trial: the others wait.
    Tried,
    /// Not now: whatever is wanted is wanted again.
    Stop,
}

impl Registered {
    pub(super) fn new(device: Arc<Device>, room: Arc<LockedRoom>) -> Self {
        let (is_able, off, state) = Default::default();
        Self { device, room, is_able, off, state }
    }

    /// Bytes of registered file pages held.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().held_bytes
    }

    /// The window of a span that comes from those bytes of a file. It stays registered while the
    /// caller has it.
    pub(super) fn find(
        &self,
        key: Key,
        file: &Arc<ModelFile>,
        bytes: &Range<u64>,
    ) -> Option<Arc<FileWindow>> {
        let mut state = self.state.lock();
        state.uses += 1;
        let used = state.uses;
        let entry = state.windows.get_mut(&key)?;
        entry.used = used;
        entry.window.shows(file, bytes).then(|| Arc::clone(&entry.window))
    }

    /// A copy of a window was enqueued; the caller still has the window.
    pub(super) fn note_copy(&self, key: Key, window: &Arc<FileWindow>, copied: Copied) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let entry = state.windows.get_mut(&key).into_iter();
        // One that was forgotten meanwhile is on its way out.
        let mut entries = entry.chain(state.parting.iter_mut().map(|(entry, _)| entry));
        if let Some(entry) = entries.find(|entry| Arc::ptr_eq(&entry.window, window)) {
            entry.tickets.retain(|ticket| !self.has_passed(*ticket));
            entry.tickets.push(copied.ticket);
        }
        state.copies.push(copied);
    }

    /// Whether streamed bytes of a file are left in the page cache, because they are registered or
    /// may come to be: only of a file that is preferred there. On an H200 a pass over registered
    /// pages takes 2 % longer than one over page-locked memory, and those during which they are
    /// registered 20 to 40 %. `fits`: the model is no more than the host can spare.
    pub(super) fn claims(
        &self,
        file: &Arc<ModelFile>,
        prefer: Prefer,
        fits: impl FnOnce() -> bool,
    ) -> bool {
        if self.off.load(Relaxed) || prefer != Prefer::Ram || !self.is_able() {
            return false;
        }
        if let Some(known) = self.state.lock().known(file) {
            return !matches!(known.stage, Stage::Never);
        }
        // Asks the system: with the lock free.
        let may = fits() && self.may_be_registered(file);
        let mut state = self.state.lock();
        if state.known(file).is_none() {
            let stage = if may { Stage::Judged(Warmth::default()) } else { Stage::Never };
            state.files.retain(|known| known.file.strong_count() > 0);
            state.files.push(Known { file: Arc::downgrade(file), stage, is_tried: false });
        }
        may
    }

    fn is_able(&self) -> bool {
        *self.is_able.get_or_init(|| {
            let (driver, ordinal) = (&self.device.driver, self.device.ordinal);
            let attribute = DeviceAttribute::ReadOnlyHostRegisterSupported;
            let read_only = driver.device_get_attribute(ordinal, attribute) == Ok(1);
            let version = module_version(self.room.root()).ok().flatten();
            let refused = registration_refused(read_only, version.as_deref());
            let is_new = driver.version().is_ok_and(|version| version >= VERSION_MIN);
            if let Some(why) = &refused {
                log::debug!("device {ordinal}: page cache is not registered: {why}");
            }
            is_new && refused.is_none()
        })
    }

    fn may_be_registered(&self, file: &Arc<ModelFile>) -> bool {
        let Some(descriptor) = file.descriptor() else { return false };
        let system = FileSystem::of(descriptor, self.room.root());
        system.is_ok_and(|system| system.may_be_registered()) && file.is_ours()
    }

    /// A span of a file was streamed through the ring, `disk_bytes` of it from the disk.
    pub(super) fn note_read(
        &self,
        key: Key,
        (file, bytes): (&Arc<ModelFile>, Range<u64>),
        prefer: Prefer,
        disk_bytes: u64,
    ) {
        let mut state = self.state.lock();
        let Some(known) = state.known(file) else { return };
        if let Stage::Judged(warmth) = &mut known.stage {
            known.stage = match warmth.read((key.bar, key.part), disk_bytes) {
                Verdict::Warm => Stage::Promoted,
                Verdict::Cold => Stage::Never,
                // It is as well locked in memory of ours, while it comes from the disk anyway.
                Verdict::Open if prefer == Prefer::Auto && warmth.is_cold() => Stage::Never,
                Verdict::Open => return,
            };
        }
        if matches!(known.stage, Stage::Promoted) && !state.has(key) {
            let wanted = Wanted { file: Arc::clone(file), bytes, looks: 0 };
            state.wanted.entry(key).or_insert(wanted);
        }
    }

    /// Forgets spans: their windows are given back when it is time to.
    pub(super) fn forget(&self, bar: u32, parts: Range<u64>) {
        let keys = Key { bar, part: parts.start }..Key { bar, part: parts.end };
        if keys.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        state.making = state.making.filter(|key| !keys.contains(key));
        if let Some((key, _)) = &mut state.trial {
            *key = key.filter(|key| !keys.contains(key));
        }
        state.wanted.retain(|key, _| !keys.contains(key));
        let found: Vec<Key> = state.windows.range(keys).map(|(key, _)| *key).collect();
        found.into_iter().for_each(|key| state.part(key));
    }

    /// Registers some of what is wanted, and looks after the one on trial. For a thread that nobody
    /// waits for.
    pub(super) fn advance(&self, cache: &Cache) {
        self.look_at_trial(cache);
        let (mut bytes, mut last) = (0, None);
        while bytes < BYTES_A_CALL {
            let Some((key, wanted, is_tried)) = self.next_wanted(last) else { break };
            last = Some(key);
            match self.make(key, wanted, is_tried, cache) {
                Made::Bytes(made) => bytes += made,
                Made::Nothing => {}
                Made::Tried => break,
                Made::Stop => {
                    self.state.lock().wanted.clear();
                    break;
                }
            }
        }
        self.state.lock().making = None;
    }

    /// The next that is wanted, behind `last`.
    fn next_wanted(&self, last: Option<Key>) -> Option<(Key, Wanted, bool)> {
        let mut state = self.state.lock();
        if self.off.load(Relaxed) || state.trial.is_some() {
            return None;
        }
        let behind = (last.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        // What has come by the trial meanwhile is there.
        let mut keys = state.wanted.range(behind).map(|(key, _)| *key);
        let key = keys.find(|key| !state.has(*key))?;
        let wanted = state.wanted.remove(&key)?;
        state.making = Some(key);
        let is_tried = state.known(&wanted.file).is_some_and(|known| known.is_tried);
        Some((key, wanted, is_tried))
    }

    fn make(&self, key: Key, wanted: Wanted, is_tried: bool, cache: &Cache) -> Made {
        let file = Arc::clone(&wanted.file);
        if self.room.is_short() {
            return Made::Stop;
        }
        // A file that changed is an error of whoever fills from it.
        let mapped = file
            .check_unchanged()
            .and_then(|()| FileWindow::map(&self.device.driver, &file, &wanted.bytes));
        let mut window = match mapped {
            Ok(window) => window,
            Err(error) => {
                log::debug!("pages are not registered: {error}");
                self.give_up(&file);
                return Made::Nothing;
            }
        };
        let bytes = window.bytes();
        match window.cached() {
            Cached::Yes => {}
            Cached::No => {
                window.read_ahead();
                self.look_again(key, wanted);
                return Made::Bytes(bytes);
            }
            Cached::Unknown => {
                self.give_up(&file);
                return Made::Nothing;
            }
        }
        if !self.room.try_hold_as(Held::FilePages, bytes) {
            return Made::Stop;
        }
        self.state.lock().held_bytes += bytes;
        if !is_tried {
            match Trial::start(&self.device, window) {
                Ok(trial) => {
                    let mut state = self.state.lock();
                    state.trial = Some((state.making, trial));
                }
                Err(error) => {
                    self.release(bytes);
                    self.turn_off(&error);
                }
            }
            return Made::Tried;
        }
        match register(&self.device, || window.register()) {
            Ok(()) => {
                self.enter(window, cache);
                Made::Bytes(bytes)
            }
            Err(error) => {
                self.release(bytes);
                self.refused(&file, &error);
                Made::Nothing
            }
        }
    }

    /// A window's pages are not all in memory yet.
    fn look_again(&self, key: Key, wanted: Wanted) {
        let mut state = self.state.lock();
        if wanted.looks < LOOKS_MAX && state.making == Some(key) {
            state.wanted.insert(key, Wanted { looks: wanted.looks + 1, ..wanted });
        }
    }

    /// The window that was being made is registered.
    fn enter(&self, window: FileWindow, cache: &Cache) {
        let mut state = self.state.lock();
        if let Some(known) = state.known(window.file()) {
            known.is_tried = true;
        }
        let entry = Entry { window: Arc::new(window), tickets: Vec::new(), used: state.uses };
        let Some(key) = state.making else {
            // It was forgotten, or its VBAR closed, meanwhile.
            return state.parting.push((entry, Instant::now()));
        };
        debug_assert!(!state.has(key), "a span has one window");
        // It may have been wanted again while it was on trial.
        state.wanted.remove(&key);
        state.windows.insert(key, entry);
        drop(state);
        // One copy in memory is enough.
        cache.forget(key.bar, key.part..key.part + 1);
    }

    fn look_at_trial(&self, cache: &Cache) {
        let mut state = self.state.lock();
        let is_over = |trial: &Trial| trial.has_come() || trial.age() >= TRIAL_TIME;
        let Some((key, trial)) = state.trial.take_if(|(_, trial)| is_over(trial)) else { return };
        state.making = key;
        drop(state);
        let (file, bytes) = (Arc::clone(trial.file()), trial.bytes());
        match trial.end(&self.device) {
            Some(Ok(window)) => self.enter(window, cache),
            Some(Err(error)) => {
                self.release(bytes);
                self.refused(&file, &error);
            }
            // Its bytes stay held: nobody knows what the driver has of them.
            None => {
                let text = format!("{}: the driver did not come back in 2 s", file.name());
                self.turn_off(&Error::new(ErrorCode::TimedOut, text));
            }
        }
    }

    /// The driver refused a window: all others too, unless it was the file's fault.
    fn refused(&self, file: &Arc<ModelFile>, error: &Error) {
        match file.check_unchanged() {
            Ok(()) => self.turn_off(error),
            Err(_) => self.give_up(file),
        }
    }

    fn turn_off(&self, error: &Error) {
        if !self.off.swap(true, Relaxed) {
            log::warn!("page cache is not registered with the device from here on: {error}");
        }
    }

    fn give_up(&self, file: &Arc<ModelFile>) {
        if let Some(known) = self.state.lock().known(file) {
            known.stage = Stage::Never;
        }
    }

    fn release(&self, bytes: u64) {
        self.state.lock().held_bytes -= bytes;
        self.room.release_as(Held::FilePages, bytes);
    }

    /// Whether there may be windows to be taken out.
    pub(super) fn may_have(&self, surplus: Surplus) -> bool {
        let state = self.state.lock();
        state.parting.iter().any(|(_, since)| surplus.takes_idle(*since))
            || surplus != Surplus::LongIdle && !state.windows.is_empty()
    }

    /// Takes windows out, as many as told at most, those without use first.
    pub(super) fn take_out(&self, surplus: Surplus, at_most: usize) -> Vec<FileWindow> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let may_go = |entry: &Entry| {
            let is_free = Arc::strong_count(&entry.window) == 1;
            let passed = |ticket: &Ticket| surplus == Surplus::All || self.has_passed(*ticket);
            is_free && entry.tickets.iter().all(passed)
        };
        let mut taken = Vec::new();
        let mut index = 0;
        while index < state.parting.len() && taken.len() < at_most {
            let (entry, since) = &state.parting[index];
            match surplus.takes_idle(*since) && may_go(entry) {
                true => taken.push(state.parting.swap_remove(index).0),
                false => index += 1,
            }
        }
        if surplus != Surplus::LongIdle {
            // Passes go round: what was used last is needed again last.
            let mut keys: Vec<_> = state.windows.iter().map(|(key, it)| (it.used, *key)).collect();
            keys.sort_unstable();
            for (_, key) in keys.into_iter().rev() {
                if taken.len() < at_most && may_go(&state.windows[&key]) {
                    taken.extend(state.windows.remove(&key));
                }
            }
        }
        let taken = taken.into_iter().map(|entry| Arc::into_inner(entry.window));
        taken.map(|window| window.expect("windows are lent under the lock only")).collect()
    }

    /// Gives windows back, in the caller's scope. Returns their bytes; what the driver does not let
    /// go stays held.
    pub(super) fn give_back(&self, windows: Vec<FileWindow>) -> u64 {
        let mut given_back = 0;
        for mut window in windows {
            match window.unregister() {
                Ok(()) => given_back += window.bytes(),
                Err(error) => {
                    log::warn!("{}: pages stay registered: {error}", window.file().name());
                    self.device.note(error.into());
                }
            }
        }
        self.release(given_back);
        given_back
    }

    /// Compares the files of copies that are done with what they were: their bytes were read when
    /// the copies ran.
    pub(super) fn check_copies(&self) {
        let mut done = Vec::new();
        {
            let mut state = self.state.lock();
            let mut index = 0;
            while index < state.copies.len() {
                match self.has_passed(state.copies[index].ticket) {
                    true => done.push(state.copies.swap_remove(index)),
                    false => index += 1,
                }
            }
        }
        done.sort_by_key(|copied| Arc::as_ptr(&copied.file).addr());
        for copies in done.chunk_by(|first, second| Arc::ptr_eq(&first.file, &second.file)) {
            let file = &copies[0].file;
            if let Err(error) = file.check_unchanged() {
                log::debug!("bytes of a file came late: {error}");
                let mut state = self.state.lock();
                state.stale.extend(copies.iter().map(|copied| copied.page));
                state.part_with(file);
            }
        }
    }

    /// Pages whose bytes are not their file's any more; the caller takes them off the device.
    pub(super) fn take_stale(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.state.lock().stale)
    }

    /// Pages that could not be taken off now.
    pub(super) fn put_stale(&self, pages: Vec<(u32, u32)>) {
        self.state.lock().stale.extend(pages);
    }

    /// Waits for the window on trial, as long as it counts; nothing more is registered.
    pub(super) fn shut(&self, cache: &Cache) {
        self.off.store(true, Relaxed);
        let trial = self.state.lock().trial.take();
        if let Some((key, trial)) = trial {
            trial.wait(TRIAL_TIME);
            self.state.lock().trial = Some((key, trial));
            self.look_at_trial(cache);
        }
    }

    fn has_passed(&self, ticket: Ticket) -> bool {
        matches!(self.device.fences.cover(ticket), Ok(Cover::Passed))
    }
}

impl State {
    fn known(&mut self, file: &Arc<ModelFile>) -> Option<&mut Known> {
        self.files.iter_mut().find(|known| std::ptr::eq(known.file.as_ptr(), Arc::as_ptr(file)))
    }

    /// Whether there is a window for a span, or one on trial.
    fn has(&self, key: Key) -> bool {
        let on_trial = self.trial.as_ref().and_then(|(key, _)| *key);
        self.windows.contains_key(&key) || on_trial == Some(key)
    }

    fn part(&mut self, key: Key) {
        if let Some(entry) = self.windows.remove(&key) {
            self.parting.push((entry, Instant::now()));
        }
    }

    /// A file changed: none of its windows is of use.
    fn part_with(&mut self, file: &Arc<ModelFile>) {
        if let Some(known) = self.known(file) {
            known.stage = Stage::Never;
        }
        self.wanted.retain(|_, wanted| !Arc::ptr_eq(&wanted.file, file));
        let of_file = |entry: &Entry| Arc::ptr_eq(entry.window.file(), file);
        let windows = self.windows.iter().filter(|(_, entry)| of_file(entry));
        let keys: Vec<Key> = windows.map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.part(key));
    }
}
