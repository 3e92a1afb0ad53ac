//! Windows of page-locked memory that are locked ahead of need, by a thread of the library's own.
//!
//! To lock a window takes as long as the program takes to write one, so a program whose own thread
//! locked them would write half as fast. Owns what was asked for and what came of it: one task at a
//! time is under way on a reader thread, which touches each window, locks it and adds it to the
//! carver, until whoever waits has its bytes and [`AHEAD_BYTES`] more are free. Whoever finds
//! nothing free waits for that task, and so for what is left of one window at most, rather than
//! go without: its program would lock memory of its own for the same bytes meanwhile, on the same
//! thread. What nobody has asked for is only locked where there is room for a large window.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::copy::readers::Readers;
use crate::driver::DriverResult;
use crate::error::{Error, ErrorCode, Result};
use crate::host::anonymous::HUGE_PAGE_BYTES;
use crate::host::carved::Carver;
use crate::host::locked::{self, LockedSlot};
use crate::host::room::LockedRoom;
use crate::outcome::WaitKind;
use crate::process;
use crate::sync::device::Device;
use crate::sync::{Condvar, Mutex};
use crate::trace::{self, Kind};
use crate::units::MIB;

/// A window that is locked for ranges which are smaller.
pub(super) const WINDOW_BYTES: u64 = 64 * MIB;
/// So much is kept free: all pages of a large weight are saved at once.
pub(super) const AHEAD_BYTES: u64 = 2 * WINDOW_BYTES;
/// A thread that touches memory does so once in each of these.
const OS_PAGE: usize = 4096;
/// Threads that touch a window.
const TOUCHING_THREADS: usize = 4;
/// The name of all but the first, as the operating system shows it.
const TOUCHING_NAME: &str = "vbar touching";
/// When nobody had bytes for so long, what is free is not kept for more.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// What could not be locked ahead is not tried again before that.
const AGAIN_TIME: Duration = Duration::from_secs(1);

/// See the module's text.
#[derive(Default)]
pub(super) struct Windows {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes of the largest range that somebody waits for.
    wanted: Option<u64>,
    /// Of those, what is being locked: whoever asks again meanwhile has to wait for no more.
    in_hand: Option<u64>,
    is_under_way: bool,
    /// Counts what was locked, or could not be.
    round: u64,
    /// What could not be locked last.
    refused: Option<Refused>,
    /// When somebody had bytes, or asked for some.
    used_at: Option<Instant>,
}

struct Refused {
    round: u64,
    at: Instant,
    /// What was asked for; 0 for what nobody waited for.
    bytes: u64,
    why: Error,
}

/// What locks windows; ended when it is dropped, whether it ran or not.
struct Task {
    windows: Arc<Windows>,
    device: Arc<Device>,
    room: Arc<LockedRoom>,
    carver: Arc<Carver>,
}

/// Who asked last, to wait for what comes of it.
pub(super) struct Asked(u64);

impl Windows {
    /// Has windows locked until `wanted` bytes in a row, where somebody waits for some, and
    /// [`AHEAD_BYTES`] are free, as far as they may be.
    pub(super) fn ask(
        self: &Arc<Self>,
        readers: &Readers,
        (device, room, carver): (&Arc<Device>, &Arc<LockedRoom>, &Arc<Carver>),
        wanted: Option<u64>,
    ) -> Asked {
        let mut state = self.state.lock();
        let asked = Asked(state.round);
        let refused = state.refused.as_ref().filter(|_| wanted.is_none());
        if refused.is_some_and(|refused| refused.at.elapsed() < AGAIN_TIME) {
            return asked;
        }
        state.want(wanted);
        if !std::mem::replace(&mut state.is_under_way, true) {
            drop(state);
            let (device, room, carver) = (Arc::clone(device), Arc::clone(room), Arc::clone(carver));
            let task = Task { windows: Arc::clone(self), device, room, carver };
            readers.submit([Box::new(move || task.run()) as Box<_>]);
        }
        asked
    }

    /// Waits until something came of what was asked for, `patience` at most; whether it did.
    pub(super) fn wait(&self, asked: &Asked, patience: Duration) -> bool {
        let mut state = self.state.lock();
        let is_coming = |state: &State| state.round == asked.0 && state.is_under_way;
        if is_coming(&state) {
            self.changed.wait_for(&mut state, patience);
        }
        !is_coming(&state)
    }

    /// Why `bytes` cannot be had, if that was found since.
    pub(super) fn refused(&self, asked: &Asked, bytes: u64) -> Option<Error> {
        let state = self.state.lock();
        let refused = state.refused.as_ref()?;
        let is_its = refused.round > asked.0 && (1..=bytes).contains(&refused.bytes);
        is_its.then(|| refused.why.clone())
    }

    /// Somebody has bytes of windows.
    pub(super) fn note_use(&self) {
        self.state.lock().used_at = Some(Instant::now());
    }

    /// Whether nobody has had bytes for long enough that what is free is kept for nothing.
    pub(super) fn is_quiet(&self) -> bool {
        self.state.lock().used_at.is_none_or(|at| at.elapsed() >= QUIET_TIME)
    }

    fn note(&self, locked: Result<()>, wanted: Option<u64>) {
        let mut state = self.state.lock();
        state.round += 1;
        state.in_hand = None;
        let (round, at, bytes) = (state.round, Instant::now(), wanted.unwrap_or(0));
        state.refused = locked.err().map(|why| Refused { round, at, bytes, why });
        self.changed.notify_all();
    }
}

impl State {
    /// Somebody waits for so many bytes in a row, if anybody does.
    fn want(&mut self, wanted: Option<u64>) {
        if wanted > self.in_hand {
            self.wanted = self.wanted.max(wanted);
        }
    }

    /// What to lock now for those who wait.
    fn begin(&mut self) -> Option<u64> {
        self.in_hand = self.wanted.take();
        self.in_hand
    }
}

impl Task {
    fn run(self) {
        loop {
            let wanted = self.windows.state.lock().begin();
            let is_enough = || self.carver.free_bytes() >= AHEAD_BYTES || self.windows.is_quiet();
            if wanted.is_none() && is_enough() {
                return;
            }
            let locked = self.lock(wanted);
            let is_over = locked.is_err();
            self.windows.note(locked, wanted);
            if is_over && self.windows.state.lock().wanted.is_none() {
                return;
            }
        }
    }

    fn lock(&self, wanted: Option<u64>) -> Result<()> {
        let large = self.window(wanted.unwrap_or(0).max(WINDOW_BYTES));
        // A small one where there is no room for many.
        let window = match wanted {
            Some(bytes) => large.or_else(|_| self.window(bytes)),
            None => large,
        };
        let window = window?;
        if wanted.is_some() {
            // Locking a large one takes longer than what is free is kept without use: the
            // housekeeping would take it from whoever waits, time and again.
            self.windows.note_use();
        }
        self.carver.add(window);
        Ok(())
    }

    fn window(&self, bytes: u64) -> Result<LockedSlot> {
        let _span = trace::span(Kind::Register).bytes(bytes);
        window(&self.device, &self.room, bytes, |window| {
            // Locking stops launches: for memory that was touched a fifth as long.
            touch(window.bytes_mut());
            register(&self.device, || window.register())
        })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let mut state = self.windows.state.lock();
        state.is_under_way = false;
        state.in_hand = None;
        // Whoever asked since asks again.
        state.round += 1;
        self.windows.changed.notify_all();
    }
}

/// Has the operating system put memory behind bytes, several threads at once: one gets 4 GB/s of it
/// where a machine is new to its memory, and a program writes faster. They have the signal mask of
/// the caller's, a thread of the library's own.
fn touch(bytes: &mut [u8]) {
    let touch = |part: &mut [u8]| part.chunks_mut(OS_PAGE).for_each(|page| page[0] = 0);
    let count = std::thread::available_parallelism().map_or(1, usize::from).min(TOUCHING_THREADS);
    let mut parts = bytes.chunks_mut(bytes.len().div_ceil(count).next_multiple_of(HUGE_PAGE_BYTES));
    let own = parts.next();
    std::thread::scope(|scope| {
        for part in parts {
            // Where there is no thread to be had the driver touches it, in more time.
            let thread = std::thread::Builder::new().name(TOUCHING_NAME.to_owned());
            let _ = thread.spawn_scoped(scope, move || touch(part));
        }
        own.map(touch);
    });
}

/// A window that `lock` locks; its bytes are held before that.
pub(super) fn window(
    device: &Device,
    room: &LockedRoom,
    bytes: u64,
    lock: impl FnOnce(&mut LockedSlot) -> Result<()>,
) -> Result<LockedSlot> {
    if room.is_short() || !room.try_hold(bytes) {
        return Err(Error::new(ErrorCode::HostMemory, "no more may be page-locked"));
    }
    let locked = length_of(bytes)
        .and_then(|length| locked::map_window(&device.driver, length))
        .and_then(|mut window| lock(&mut window).map(|()| window));
    locked.inspect_err(|_| room.release(bytes))
}

pub(super) fn length_of(bytes: u64) -> Result<usize> {
    let text = "more than there are addresses";
    usize::try_from(bytes).map_err(|_| Error::new(ErrorCode::HostMemory, text))
}

/// Registers memory on a thread of the library's own.
pub(super) fn register(device: &Device, register: impl FnMut() -> DriverResult<()>) -> Result<()> {
    let _work = process::work()
        .ok_or_else(|| Error::new(ErrorCode::ProcessEnding, "the process is ending"))?;
    let _scope = device.enter()?;
    let _wait = device.wait(WaitKind::Register);
    device.retry(register).map_err(|error| device.note(error.into()))
}

#[cfg(test)]
#[cfg(not(vbar_loom))]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::host::mounts::SystemRoot;
    use crate::options::RuntimeOptions;
    use crate::units::DeviceOrdinal;

    #[test]
    fn every_page_of_a_window_is_touched() {
        for bytes in [OS_PAGE, HUGE_PAGE_BYTES + OS_PAGE, 9 * HUGE_PAGE_BYTES, 64 * MIB as usize] {
            let mut memory = vec![7; bytes];
            touch(&mut memory);
            let touched = memory.chunks(OS_PAGE).filter(|page| page[0] == 0 && page[1] == 7);
            assert_eq!(touched.count(), bytes / OS_PAGE);
        }
    }

    #[test]
    fn who_asks_again_while_it_is_being_locked_has_no_second_one_locked() {
        let mut state = State::default();
        state.want(Some(2));
        assert_eq!(state.begin(), Some(2));
        // Its own, that of one who waits for less, and nobody's.
        [Some(2), Some(1), None].into_iter().for_each(|wanted| state.want(wanted));
        assert_eq!(state.wanted, None);
        state.want(Some(3));
        assert_eq!((state.begin(), state.begin()), (Some(3), None));
        state.want(Some(1));
        assert_eq!(state.begin(), Some(1));
    }

    /// Else the housekeeping takes it from whoever waits, who has another one locked, and so on.
    #[test]
    fn what_somebody_waits_for_is_in_use_however_long_it_took_to_lock() {
        let system = tempfile::tempdir().unwrap();
        std::fs::create_dir(system.path().join("proc")).unwrap();
        let text = "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n";
        std::fs::write(system.path().join("proc/meminfo"), text).unwrap();
        let sim = Sim::new(SimOptions::parse("capacity=1M,granularity=64K").unwrap());
        let context = sim.device_primary_ctx_retain(DeviceOrdinal(0)).unwrap();
        let options = RuntimeOptions::default();
        let device = Arc::new(Device::new(sim.driver(), DeviceOrdinal(0), context, options));
        let room = Arc::new(LockedRoom::new(SystemRoot::new(system.path()), None));
        let (carver, windows) = (Arc::<Carver>::default(), Arc::<Windows>::default());
        // Asked for so long ago that nobody has had bytes since.
        windows.state.lock().wanted = Some(2 * MIB);
        assert!(windows.is_quiet());
        let (room_of, carver_of) = (Arc::clone(&room), Arc::clone(&carver));
        Task { windows: Arc::clone(&windows), device, room: room_of, carver: carver_of }.run();
        assert!(carver.is_any_idle() && !windows.is_quiet());
        assert_eq!(room.held_bytes(), carver.bytes());
        sim.ctx_set_current(Some(context)).unwrap();
        drop(carver.take_all());
        assert_eq!((sim.locked_bytes(), sim.violations()), (0, vec![]));
    }
}
