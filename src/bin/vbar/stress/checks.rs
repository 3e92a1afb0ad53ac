//! Checks of bytes on the device: checksums launched now, compared later, many at a time.
//!
//! Owns a page of device memory that stays pinned, with a word for each check. When the words are
//! used up the streams are waited for, the words are read back and compared.

use vbar::driver::KernelCall;
use vbar::host::locked::{self, LockedSlot};
use vbar::memory::pins::Token;
use vbar::units::{DeviceAddress, Stream};
use vbar::{Error, ErrorCode, Fault, Result, Vbar};

use super::world::{World, internal};

/// Checks that are compared together.
const BATCH: usize = 64;
const WORD_BYTES: u64 = 8;
/// Attempts at calls that the injected failures may strike.
const ATTEMPTS: usize = 100;

/// A checksum that was launched.
struct Check {
    expected: u64,
    what: String,
}

/// The checks of one thread.
pub(super) struct Checks<'w> {
    world: &'w World,
    vbar: Vbar,
    token: Option<Token>,
    words: LockedSlot,
    streams: Vec<Stream>,
    pending: Vec<Check>,
    state: Words,
}

/// Whether the words can be added to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Words {
    Zeroed,
    Dirty,
}

impl<'w> Checks<'w> {
    /// With no check yet. `streams` are all that checks will be launched on.
    pub(super) fn new(world: &'w World, streams: Vec<Stream>) -> Result<Self> {
        let bytes = BATCH as u64 * WORD_BYTES;
        let driver = &world.runtime.device().driver;
        let slots = locked::allocate(driver, 1, bytes as usize)?;
        let words = slots.into_iter().next().ok_or_else(|| internal("no slot"))?;
        let vbar = world.runtime.create_bar(bytes)?;
        vbar.set_class(i32::MAX)?;
        let token = match vbar.fault(0..bytes, streams[0])? {
            Fault::Resident(guard) | Fault::HostMapped(guard) => guard.into_token(),
            Fault::Offloaded(reason) => {
                let text = format!(
                    "the device has no room for what each thread keeps pinned ({reason}): use \
                     fewer --threads, or a larger device"
                );
                return Err(Error::new(ErrorCode::Unsupported, text));
            }
        };
        let (pending, state) = (Vec::new(), Words::Dirty);
        Ok(Self { world, vbar, token: Some(token), words, streams, pending, state })
    }

    /// Launches the checksum of bytes on the device, which must be `expected`.
    pub(super) fn launch(
        &mut self,
        source: DeviceAddress,
        bytes: u64,
        expected: u64,
        stream: Stream,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if self.state == Words::Dirty {
            self.clear_words()?;
        }
        let target = self.vbar.base().offset(self.pending.len() as u64 * WORD_BYTES);
        let call = KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos: 0, target };
        self.world.runtime.device().driver.launch_kernel(call, stream)?;
        self.pending.push(Check { expected, what: what() });
        Ok(())
    }

    /// Whether the next operation should find room; one makes at most `BATCH / 4` checks.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.pending.len() >= BATCH - BATCH / 4
    }

    /// Waits for the checks launched so far and compares. Should the driver fail for good, they are
    /// lost, which is counted.
    pub(super) fn flush(&mut self) -> Result<()> {
        let flushed = self.compare();
        if flushed.is_err() {
            self.state = Words::Dirty;
        }
        self.world.journal.compared(0, self.pending.len() as u64);
        self.pending.clear();
        flushed
    }

    fn compare(&mut self) -> Result<()> {
        let driver = &self.world.runtime.device().driver;
        for stream in &self.streams {
            driver.stream_synchronize(*stream)?;
        }
        let count = self.pending.len();
        if count == 0 {
            return Ok(());
        }
        let (length, source) = (count * WORD_BYTES as usize, self.vbar.base());
        let (words, stream) = (&mut self.words, self.streams[0]);
        retry(|| Ok(words.copy_from_device(0..length, source, stream)?))?;
        driver.stream_synchronize(stream)?;
        let found = self.words.bytes_mut()[..length].chunks_exact(WORD_BYTES as usize);
        for (check, found) in self.pending.drain(..).zip(found) {
            if found != check.expected.to_le_bytes() {
                let text = format!("{}: wrong bytes on the device", check.what);
                self.world.journal.violation(text);
            }
        }
        self.world.journal.compared(count as u64, 0);
        self.clear_words()
    }

    /// Zeroes the words, and waits: any stream may add to them next.
    fn clear_words(&mut self) -> Result<()> {
        self.state = Words::Dirty;
        let (driver, bytes) = (&self.world.runtime.device().driver, BATCH as u64 * WORD_BYTES);
        let stream = self.streams[0];
        retry(|| Ok(driver.memset_d8_async(self.vbar.base(), 0, bytes, stream)?))?;
        driver.stream_synchronize(stream)?;
        self.state = Words::Zeroed;
        Ok(())
    }

    /// Compares, then puts another stream in the place of one.
    pub(super) fn replace_stream(&mut self, old: Stream, new: Stream) {
        self.streams.iter_mut().filter(|stream| **stream == old).for_each(|stream| *stream = new);
    }

    /// The last comparison.
    pub(super) fn finish(mut self) -> Result<()> {
        let flushed = self.flush();
        if let Some(token) = self.token.take() {
            self.world.runtime.unpin(token, self.streams[0])?;
        }
        flushed
    }
}

/// Calls again when injected failures strike, or there is no memory for the moment.
fn retry<T>(mut call: impl FnMut() -> Result<T>) -> Result<T> {
    let mut answer = call();
    for _ in 1..ATTEMPTS {
        if answer.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
        answer = call();
    }
    answer
}
