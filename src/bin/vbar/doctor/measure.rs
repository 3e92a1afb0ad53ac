//! How fast bytes go to the device and back, and how fast memory is page-locked.
//!
//! Owns the bounds: little memory, few rounds, a quarter of a second for each figure, and a thread
//! that is left alone when the device does not answer. What is made is given back when the device
//! is done with it. Page-locking stops kernel launches of this process while it lasts, and giving
//! page-locked memory back waits for the device; there is no other work here to be disturbed.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::Serialize;
use vbar::driver::Driver;
use vbar::host::locked::{self, LockedSlot};
use vbar::host::pageable::PageableMemory;
use vbar::units::{DeviceAddress, DeviceOrdinal, MIB, Stream, format_bytes};
use vbar::{Error, ErrorCode, Result};

use super::line::Line;
use super::window::{CurrentContext, Window, told};

/// A copy that is long enough that its beginning does not count.
const COPY_BYTES_MAX: u64 = 64 * MIB;
/// What the first copy takes, which tells how many bytes the others may have.
const FIRST_BYTES: u64 = MIB;
/// At most this part of what is free is taken, of the device and of the allowance.
const FREE_PARTS: u64 = 8;
/// Rounds of a copy, and how long they may take together.
const ROUNDS_MAX: usize = 9;
const ROUNDS_TIME: Duration = Duration::from_millis(250);
/// A copy should not take longer than that.
const COPY_TIME: Duration = Duration::from_millis(60);
const LOCKING_ROUNDS_MAX: usize = 3;
/// The smallest that there is.
const OS_PAGE: usize = 4096;
/// After that the device is taken not to answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(15);
/// Below it a real link is worth a word: PCIe 3 with 4 lanes, less what its protocol takes.
const SLOW_BYTES_A_SECOND: f64 = 3e9;

/// One figure.
#[derive(Serialize, Clone, Copy, PartialEq, Debug)]
pub(super) struct Rate {
    /// Bytes of a round.
    bytes: u64,
    rounds: usize,
    /// Median of the rounds.
    ms: f64,
    bytes_a_second: f64,
}

/// The serialized fields are part of the program's interface.
#[derive(Serialize, Clone, Copy, PartialEq, Debug)]
pub(super) struct Measured {
    device: u32,
    simulated: bool,
    locked_to_device: Rate,
    pageable_to_device: Rate,
    locked_from_device: Rate,
    pageable_from_device: Rate,
    /// Allocating page-locked memory, zeroed.
    locking: Rate,
}

/// What may be used.
#[derive(Clone, Copy)]
pub(super) struct Means {
    pub(super) device: DeviceOrdinal,
    pub(super) simulated: bool,
    pub(super) granularity_bytes: u64,
    pub(super) free_bytes: u64,
    pub(super) allowance_bytes: u64,
}

impl Means {
    /// Bytes of the buffers, whole units of the device; `None` where there is no room for one.
    fn buffer_bytes(&self) -> Option<u64> {
        let free = self.free_bytes.min(self.allowance_bytes) / FREE_PARTS;
        let bytes = free.min(COPY_BYTES_MAX) / self.granularity_bytes * self.granularity_bytes;
        (bytes > 0).then_some(bytes)
    }
}

/// Measures in a thread of its own, which the caller's context knows nothing of.
///
/// # Errors
/// What the driver says; `TimedOut` when the device does not answer: the thread is then left to its
/// wait, and its memory with it.
pub(super) fn measure(
    driver: &Arc<dyn Driver>,
    means: Means,
    patience: Duration,
) -> Result<Measured> {
    let (sender, receiver) = mpsc::channel();
    let driver = Arc::clone(driver);
    let work = move || {
        // Nobody listens after the time-out.
        let _ = sender.send(measure_here(&driver, means));
    };
    let thread = std::thread::Builder::new().name("vbar measure".to_owned()).spawn(work);
    let thread = thread.map_err(|error| Error::io("a thread to measure in", &error))?;
    match receiver.recv_timeout(patience) {
        Ok(measured) => {
            // It has sent its last word; a panic would have been seen as none.
            let _ = thread.join();
            measured
        }
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            Err(Error::new(ErrorCode::Internal, "measuring ended with a panic"))
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            let text = format!("the device did not answer for {patience:?}");
            Err(Error::new(ErrorCode::TimedOut, text))
        }
    }
}

fn measure_here(driver: &Arc<dyn Driver>, means: Means) -> Result<Measured> {
    let Some(bytes) = means.buffer_bytes() else {
        let text = format!(
            "too little is free: {} of the device, {} of the RAM allowance",
            format_bytes(means.free_bytes),
            format_bytes(means.allowance_bytes)
        );
        return Err(Error::new(ErrorCode::HostMemory, text));
    };
    let _context = CurrentContext::new(driver, means.device)?;
    let window = Window::new(driver, means.device, bytes)?;
    let stream = OwnStream::new(driver)?;
    let locking = locking_rate(driver, bytes as usize)?;
    let mut locked = locked::allocate(driver, 1, bytes as usize)?;
    let slot = &mut locked[0];
    slot.bytes_mut().fill(1);
    let target = Target { driver, stream: stream.stream, address: window.address };
    let locked_to_device = rate(bytes, |bytes| target.locked_in(slot, bytes))?;
    let locked_from_device = rate(bytes, |bytes| target.locked_out(slot, bytes))?;
    let mut pageable = PageableMemory::new(driver, bytes as usize);
    // Pages that nobody has written are all the same page of zeros, which would be copied faster.
    pageable.bytes_mut().fill(1);
    let pageable_to_device = rate(bytes, |bytes| {
        Ok(pageable.copy_to_device(0..bytes, window.address, stream.stream)?)
    })?;
    let pageable_from_device = rate(bytes, |bytes| {
        Ok(pageable.copy_from_device(0..bytes, window.address, stream.stream)?)
    })?;
    Ok(Measured {
        device: means.device.0,
        simulated: means.simulated,
        locked_to_device,
        pageable_to_device,
        locked_from_device,
        pageable_from_device,
        locking,
    })
}

/// A stream that is destroyed at the end; nothing is pending on it then.
struct OwnStream<'a> {
    driver: &'a Arc<dyn Driver>,
    stream: Stream,
}

impl<'a> OwnStream<'a> {
    fn new(driver: &'a Arc<dyn Driver>) -> Result<Self> {
        Ok(Self { driver, stream: driver.stream_create()? })
    }
}

impl Drop for OwnStream<'_> {
    fn drop(&mut self) {
        told(self.driver.stream_destroy(self.stream));
    }
}

/// Where copies go to and come from.
struct Target<'a> {
    driver: &'a Arc<dyn Driver>,
    stream: Stream,
    address: DeviceAddress,
}

impl Target<'_> {
    fn locked_in(&self, slot: &mut LockedSlot, bytes: usize) -> Result<()> {
        slot.copy_to_device(0..bytes, self.address, self.stream)?;
        Ok(self.driver.stream_synchronize(self.stream)?)
    }

    fn locked_out(&self, slot: &mut LockedSlot, bytes: usize) -> Result<()> {
        slot.copy_from_device(0..bytes, self.address, self.stream)?;
        Ok(self.driver.stream_synchronize(self.stream)?)
    }
}

/// The median rate of copies of `bytes`, or of as many as a slow link takes in a moment.
fn rate(bytes: u64, mut copy: impl FnMut(usize) -> Result<()>) -> Result<Rate> {
    let first_bytes = bytes.min(FIRST_BYTES);
    let slowest = timed(|| copy(first_bytes as usize))?;
    if slowest > ROUNDS_TIME {
        return median_rate(first_bytes, 1, || Ok(slowest));
    }
    // Again: the first copy of all pays for what the driver makes late.
    let first = timed(|| copy(first_bytes as usize))?;
    let in_time = first_bytes as f64 / first.as_secs_f64().max(1e-9) * COPY_TIME.as_secs_f64();
    let bytes = bytes.min((in_time as u64).max(first_bytes));
    median_rate(bytes, ROUNDS_MAX, || timed(|| copy(bytes as usize)))
}

/// The same of making page-locked memory; giving it back is not counted.
fn locking_rate(driver: &Arc<dyn Driver>, bytes: usize) -> Result<Rate> {
    median_rate(bytes as u64, LOCKING_ROUNDS_MAX, || {
        let start = Instant::now();
        let mut slots = locked::allocate(driver, 1, bytes)?;
        // Memory that the system has promised only, as a simulated device's, is there afterwards.
        slots[0].bytes_mut().iter_mut().step_by(OS_PAGE).for_each(|byte| *byte = 1);
        let time = start.elapsed();
        drop(slots);
        Ok(time)
    })
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

/// As many rounds as there is time for, one at least.
fn median_rate(
    bytes: u64,
    rounds_max: usize,
    mut round: impl FnMut() -> Result<Duration>,
) -> Result<Rate> {
    let start = Instant::now();
    let mut times = vec![round()?];
    while times.len() < rounds_max && start.elapsed() < ROUNDS_TIME {
        times.push(round()?);
    }
    times.sort();
    let seconds = times[times.len() / 2].as_secs_f64().max(1e-9);
    let rounds = times.len();
    Ok(Rate { bytes, rounds, ms: seconds * 1e3, bytes_a_second: bytes as f64 / seconds })
}

impl Measured {
    pub(super) fn lines(&self) -> Vec<Line> {
        let into = copies(&self.locked_to_device, &self.pageable_to_device);
        let out = copies(&self.locked_from_device, &self.pageable_from_device);
        let locking = format!(
            "{}: {} in {:.0} ms, median of {}",
            rated(self.locking.bytes_a_second),
            format_bytes(self.locking.bytes),
            self.locking.ms,
            self.locking.rounds
        );
        let locking = match self.simulated {
            true => format!("{locking}; simulated: nothing is locked"),
            false => locking,
        };
        vec![
            self.link(format!("to device {}", self.device), into, &self.locked_to_device),
            self.link(format!("from device {}", self.device), out, &self.locked_from_device),
            Line::ok("page-locking", locking),
        ]
    }

    fn link(&self, topic: String, text: String, locked: &Rate) -> Line {
        if self.simulated {
            return Line::ok(topic, format!("{text}; simulated: these are copies in RAM"));
        }
        if locked.bytes_a_second >= SLOW_BYTES_A_SECOND {
            return Line::ok(topic, text);
        }
        Line::note(
            topic,
            format!("{text}: a slow link"),
            "see the slot's lanes; is another program copying, or the device a virtual one?",
        )
    }
}

fn copies(locked: &Rate, pageable: &Rate) -> String {
    format!(
        "{} page-locked ({}, median of {}), {} pageable ({}, median of {})",
        rated(locked.bytes_a_second),
        format_bytes(locked.bytes),
        locked.rounds,
        rated(pageable.bytes_a_second),
        format_bytes(pageable.bytes),
        pageable.rounds
    )
}

/// As links are rated: a million or a billion bytes.
fn rated(bytes_a_second: f64) -> String {
    match bytes_a_second < 1e9 {
        true => format!("{:.1} MB/s", bytes_a_second / 1e6),
        false => format!("{:.1} GB/s", bytes_a_second / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use vbar::driver::DriverCode;
    use vbar::driver::sim::{Sim, SimOptions, Verb};

    use super::super::line::Level;
    use super::*;

    const DEVICE: DeviceOrdinal = DeviceOrdinal(0);

    fn means(sim: &Sim) -> Means {
        let SimOptions { granularity, capacity, .. } = *sim.options();
        Means {
            device: DEVICE,
            simulated: true,
            granularity_bytes: granularity,
            free_bytes: capacity,
            allowance_bytes: 1 << 30,
        }
    }

    fn sim(options: &str) -> Arc<Sim> {
        Sim::new(SimOptions::parse(options).unwrap())
    }

    #[track_caller]
    fn check_nothing_is_left(sim: &Arc<Sim>) {
        assert_eq!((sim.live_frames(DEVICE), sim.live_reservations()), (0, 0));
        assert_eq!((sim.live_streams(), sim.locked_bytes()), (0, 0));
        assert_eq!(sim.violations(), Vec::<String>::new());
        assert_eq!(sim.ctx_get_current(), Ok(None));
    }

    #[test]
    fn every_figure_says_what_it_is_of() {
        let sim = sim("capacity=16M,granularity=64K");
        let measured = measure(&sim.driver(), means(&sim), PATIENCE).unwrap();
        for rate in [
            measured.locked_to_device,
            measured.pageable_to_device,
            measured.locked_from_device,
            measured.pageable_from_device,
            measured.locking,
        ] {
            assert!(rate.rounds >= 1 && rate.rounds <= ROUNDS_MAX, "{rate:?}");
            assert!(rate.bytes >= MIB && rate.bytes <= 2 * MIB, "{rate:?}");
            assert!(rate.bytes_a_second > 0.0 && rate.ms > 0.0, "{rate:?}");
        }
        check_nothing_is_left(&sim);
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        for verb in [
            Verb::DevicePrimaryCtxRetain,
            Verb::MemCreate,
            Verb::StreamCreate,
            Verb::MemHostAlloc,
            Verb::MemcpyHtodAsync,
            Verb::MemcpyDtohAsync,
        ] {
            let sim = sim("capacity=16M,granularity=64K");
            sim.fail_nth(verb, 1, DriverCode::OUT_OF_MEMORY);
            let error = measure(&sim.driver(), means(&sim), PATIENCE).unwrap_err().to_string();
            assert!(error.contains(verb.call()), "{error}");
            check_nothing_is_left(&sim);
        }
        let sim = sim("capacity=256K,granularity=64K");
        let error = measure(&sim.driver(), means(&sim), PATIENCE).unwrap_err().to_string();
        assert!(error.contains("too little is free: 256.0 KiB of the device"), "{error}");
    }

    #[test]
    fn a_device_that_does_not_answer_is_left() {
        // A copy of 1 MiB would take a quarter of an hour.
        let sim = sim("capacity=16M,granularity=64K,bandwidth=1K");
        let error = measure(&sim.driver(), means(&sim), Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::TimedOut);
        assert!(error.to_string().contains("did not answer for 50ms"), "{error}");
    }

    #[test]
    fn a_very_slow_link_copies_once() {
        let mut copies = Vec::new();
        let slow = |bytes| {
            copies.push(bytes);
            std::thread::sleep(ROUNDS_TIME + COPY_TIME);
            Ok(())
        };
        let rate = rate(64 * MIB, slow).unwrap();
        assert_eq!((rate.bytes, rate.rounds), (MIB, 1));
        assert_eq!(copies, [FIRST_BYTES as usize]);
    }

    #[test]
    fn a_slow_link_is_noted_where_it_is_real() {
        let rate = median_rate(MIB, 3, || Ok(Duration::from_millis(20))).unwrap();
        assert_eq!((rate.rounds, rate.bytes), (3, MIB));
        let measured = Measured {
            device: 0,
            simulated: false,
            locked_to_device: rate,
            pageable_to_device: rate,
            locked_from_device: rate,
            pageable_from_device: rate,
            locking: rate,
        };
        let lines = measured.lines();
        assert_eq!(lines[0].verdict, Level::Note);
        assert!(lines[0].text.starts_with("52.4 MB/s page-locked (1.0 MiB, median of 3)"));
        let simulated = Measured { simulated: true, ..measured }.lines();
        assert!(simulated[0].text.ends_with("copies in RAM"), "{simulated:?}");
        let fast = Rate { bytes_a_second: 55e9, ..rate };
        let lines = Measured { locked_to_device: fast, ..measured }.lines();
        assert_eq!(lines[0].verdict, Level::Ok);
    }
}
