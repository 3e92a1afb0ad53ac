//! A thread of a stress run: its streams, its checks, the pins it holds, and what it does next.
//!
//! Which operation comes next, and with which numbers, follows from seed and thread alone; how it
//! ends depends on the others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vbar::memory::pins::Token;
use vbar::units::Stream;
use vbar::{ErrorCode, Guard, Result};

use super::checks::Checks;
use super::choice::Choice;
use super::world::{Bare, Bound, World};

/// Streams of a thread. The last one is destroyed and made anew now and then, so no token is ever
/// put aside on it.
const STREAMS: usize = 3;
/// Tokens that a thread holds at most.
const HELD_MAX: usize = 5;

/// See the module's text.
pub(super) struct Worker<'w> {
    pub(super) world: &'w World,
    pub(super) number: usize,
    pub(super) choice: Choice,
    pub(super) checks: Checks<'w>,
    /// Tensor that comes next where they are used in order.
    pub(super) next_tensor: usize,
    streams: Vec<Stream>,
    held: Vec<Held>,
}

/// Pins put aside under a token.
struct Held {
    token: Token,
    stream: Stream,
    pages: u64,
    at: HeldAt,
}

/// What the pins are on, and how often pins had been released there by force.
pub(super) enum HeldAt {
    Piece {
        bare: Arc<Bare>,
        index: usize,
        version: Option<u64>,
        epoch: u64,
    },
    Tensor {
        bound: Arc<Bound>,
        tensor: usize,
        epoch: u64,
    },
    /// The VBAR may be gone: its pages stay while the token is held.
    Forgotten,
}

/// An operation, by the numbers below which it is drawn out of 1000.
type Operation<'w> = (u64, &'static str, fn(&mut Worker<'w>) -> Result<()>);

impl<'w> Worker<'w> {
    /// A worker that has done nothing yet; the context is current.
    pub(super) fn new(world: &'w World, number: usize, seed: u64) -> Result<Self> {
        let driver = &world.runtime.device().driver;
        let streams = (0..STREAMS).map(|_| driver.stream_create());
        let streams: Vec<Stream> = streams.collect::<std::result::Result<_, _>>()?;
        let checks = Checks::new(world, streams.clone())?;
        let choice = Choice::new(seed, number as u64);
        let (next_tensor, held) = (0, Vec::new());
        Ok(Self { world, number, choice, checks, next_tensor, streams, held })
    }

    const OPERATIONS: [Operation<'w>; 26] = [
        (290, "allocation", Self::use_piece),
        (340, "saved range", Self::use_saved),
        (500, "tensor", Self::use_tensor),
        (560, "tensors in order", Self::use_in_order),
        (566, "wish", Self::wish),
        (570, "hint", Self::hint),
        (630, "part of a tensor", Self::use_part),
        (680, "fault_many", Self::use_many),
        (710, "nested", Self::use_nested),
        (740, "no stream", Self::use_without_stream),
        (770, "two streams", Self::use_on_two_streams),
        (830, "give a token back", Self::give_back),
        (860, "free memory", Self::free_memory),
        (890, "rank", Self::set_rank),
        (920, "floor or watermark", Self::set_marks),
        (945, "budget", Self::set_budget),
        (955, "trim", Self::trim),
        (965, "numbers", Self::look_at_numbers),
        (970, "another VBAR", Self::replace_bar),
        (978, "end of run", Self::end_of_run),
        (981, "release by force", Self::release_by_force),
        (988, "pressure", Self::press_from_outside),
        (992, "invalidate", Self::invalidate),
        (995, "another stream", Self::replace_stream),
        (996, "cancel waits", Self::cancel_waits),
        (1000, "compare", Self::compare),
    ];

    /// One operation.
    pub(super) fn step(&mut self) {
        let drawn = self.choice.below(1000);
        let operation = Self::OPERATIONS.iter().find(|(below, _, _)| drawn < *below);
        let Some((_, name, operate)) = operation else { return };
        let _running = self.world.pause.read();
        if self.checks.is_nearly_full() {
            let flushed = self.checks.flush();
            self.note("compare", flushed);
        }
        match catch_unwind(AssertUnwindSafe(|| operate(self))) {
            Ok(result) => self.note(name, result),
            Err(_) => self.world.journal.violation(format!("{name}: panicked")),
        }
    }

    fn note(&self, doing: &'static str, result: Result<()>) {
        if let Err(error) = result {
            self.world.journal.error(doing, &error);
        }
    }

    /// Tells the journal what is done now.
    pub(super) fn tell(&self, text: impl FnOnce() -> String) {
        self.world.journal.operation(self.number, text());
    }

    /// Any of the streams.
    pub(super) fn any_stream(&mut self) -> Stream {
        self.streams[self.choice.index(STREAMS)]
    }

    /// A stream that lives as long as the worker.
    pub(super) fn lasting_stream(&mut self) -> Stream {
        self.streams[self.choice.index(STREAMS - 1)]
    }

    /// Puts a guard aside under a token, if there is room; no work was enqueued under its pins.
    pub(super) fn hold(&mut self, guard: Guard<'_>, stream: Stream, at: HeldAt) {
        // Pins on no page cannot be released by force.
        if self.held.len() == HELD_MAX || guard.signature().is_empty() {
            return;
        }
        let pages = guard.signature().len() as u64;
        self.world.held_pages.fetch_add(pages, Ordering::Relaxed);
        self.held.push(Held { token: guard.into_token(), stream, pages, at });
    }

    fn give_back(&mut self) -> Result<()> {
        let index = self.choice.index(HELD_MAX);
        let used = self.choice.one_in(2);
        if index >= self.held.len() {
            return Ok(());
        }
        let held = self.held.swap_remove(index);
        self.tell(|| format!("give {:?} back", held.token));
        self.give_back_held(held, used)
    }

    /// Checks what the pins have kept, then gives them back.
    fn give_back_held(&mut self, held: Held, used: bool) -> Result<()> {
        let Held { token, stream, pages, at } = held;
        self.world.held_pages.fetch_sub(pages, Ordering::Relaxed);
        let checked;
        let answer;
        let stale = match &at {
            HeldAt::Piece { bare, index, version, epoch } => {
                let now = bare.usage.0.read();
                let stale = *now != *epoch;
                let good = used && !stale;
                checked =
                    if good { self.check_held(bare, *index, *version, stream) } else { Ok(()) };
                answer = self.world.runtime.unpin(token, stream);
                Some(stale)
            }
            HeldAt::Tensor { bound, tensor, epoch } => {
                let now = bound.usage.0.read();
                let stale = *now != *epoch;
                let good = used && !stale;
                let address = bound.bar.address(*tensor);
                checked = if good { self.check_tensor(address, *tensor, stream) } else { Ok(()) };
                answer = self.world.runtime.unpin(token, stream);
                Some(stale)
            }
            HeldAt::Forgotten => {
                checked = Ok(());
                answer = self.world.runtime.unpin(token, stream);
                None
            }
        };
        match (answer, stale) {
            (Ok(()), Some(true)) => {
                let text = format!("{token:?} gave pins back that were released by force");
                self.world.journal.violation(text);
            }
            (Err(error), Some(true) | None) if error.code() == ErrorCode::StaleToken => {}
            (answer, _) => answer?,
        }
        checked
    }

    fn check_held(
        &mut self,
        bare: &Bare,
        index: usize,
        version: Option<u64>,
        stream: Stream,
    ) -> Result<()> {
        let piece = &bare.pieces[index];
        let content = piece.content.lock();
        // It may have been invalidated, and written anew, meanwhile.
        if content.version.is_none() || content.version != version {
            return Ok(());
        }
        let (address, bytes) = (piece.allocation.address(), piece.bytes());
        let what = || format!("pinned allocation {index} at {address}");
        self.checks.launch(address, bytes, content.checksum, stream, what)
    }

    fn replace_stream(&mut self) -> Result<()> {
        let old = self.streams[STREAMS - 1];
        self.tell(|| format!("replace {old:?}"));
        self.checks.flush()?;
        let driver = &self.world.runtime.device().driver;
        let new = driver.stream_create()?;
        self.world.runtime.retire_stream(old)?;
        driver.stream_destroy(old)?;
        self.streams[STREAMS - 1] = new;
        self.checks.replace_stream(old, new);
        Ok(())
    }

    fn compare(&mut self) -> Result<()> {
        self.tell(|| "compare".to_owned());
        self.checks.flush()
    }

    /// Gives everything back; no failures are injected any more.
    pub(super) fn finish(mut self) -> Result<()> {
        while let Some(held) = self.held.pop() {
            self.give_back_held(held, true)?;
            if self.checks.is_nearly_full() {
                self.checks.flush()?;
            }
        }
        self.checks.finish()?;
        for stream in self.streams {
            self.world.runtime.retire_stream(stream)?;
            self.world.runtime.device().driver.stream_destroy(stream)?;
        }
        Ok(())
    }
}
