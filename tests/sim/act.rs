//! Steps: each finds what it is about, calls the library, and notes what that came to.

use std::sync::atomic::Ordering;

use vbar::ErrorCode;
use vbar::driver::kernel::{checksum, pattern};
use vbar::driver::sim::Verb;
use vbar::driver::{Driver, DriverCode, KernelCall};
use vbar::memory::pager::{Freed, HeldPins};
use vbar::units::{DeviceAddress, Stream};

use crate::operations::Operation;
use crate::world::{CAPACITY, OWN, P, World};

/// Steps within steps, at most.
const DEPTH: u32 = 3;

/// The checksum of the pattern of `seed` over `bytes` bytes.
pub(crate) fn pattern_sum(bytes: u64, seed: u64) -> u64 {
    let mut expected = vec![0; bytes as usize];
    pattern(&mut expected, seed);
    checksum(&expected, 0)
}

impl World {
    /// All steps, from first to last.
    pub(crate) fn run(&mut self) {
        while self.at < self.trace.operations.len() {
            self.step();
        }
    }

    /// The next steps, in the middle of another one.
    pub(crate) fn nest(&mut self, count: u64) {
        if self.depth >= DEPTH {
            return;
        }
        let context = self.sim.spare(|| self.sim.ctx_get_current()).unwrap();
        self.depth += 1;
        self.check();
        for _ in 0..count {
            if self.at < self.trace.operations.len() {
                self.step();
            }
        }
        self.depth -= 1;
        // Their threads have contexts of their own.
        self.sim.spare(|| self.sim.ctx_set_current(context)).unwrap();
    }

    fn step(&mut self) {
        let operation = self.trace.operations[self.at].clone();
        self.at += 1;
        self.make(&operation);
    }

    /// One step and the look at everything behind it.
    fn make(&mut self, operation: &Operation) {
        self.totals.count(operation.word());
        // Each thread has a context of its own that is current, the second none.
        let context = match self.thread % 4 {
            1 => None,
            2 => self.devices.last().map(|dev| dev.context),
            _ => Some(self.devices[0].context),
        };
        self.sim.spare(|| self.sim.ctx_set_current(context)).unwrap();
        let struck = self.struck(&[Verb::CtxSetCurrent, Verb::CtxGetCurrent]);
        if self.thread % 4 == 3 {
            // One that was not there before and is gone afterwards.
            std::thread::scope(|scope| {
                let act = || {
                    self.sim.spare(|| self.sim.ctx_set_current(context)).unwrap();
                    self.act(operation);
                };
                if let Err(panic) = scope.spawn(act).join() {
                    std::panic::resume_unwind(panic);
                }
            });
        } else {
            self.act(operation);
        }
        if self.struck(&[Verb::CtxSetCurrent, Verb::CtxGetCurrent]) == struck
            && self.depth == 0
            && !(0..self.devices.len()).any(|device| self.is_dead(device))
        {
            let now = self.sim.spare(|| self.sim.ctx_get_current()).unwrap();
            assert_eq!(now, context, "another context is current than before");
        }
        self.check();
    }

    fn act(&mut self, operation: &Operation) {
        match *operation {
            Operation::Thread { number } => self.thread = number,
            Operation::Press { device, pages } => {
                let device = self.device(device);
                let bytes = pages.min(CAPACITY) * P;
                self.sim.set_outside_bytes(self.devices[device].ordinal, bytes);
            }
            Operation::OthersFrame { device, take } => self.others_frame(device, take),
            Operation::HoldStream { device, stream } => self.hold_stream(device, stream),
            Operation::ReleaseStreams {} => {
                self.release_streams();
                // What was blocked is tried again, and nothing is in its way now.
                for mut blocked in std::mem::take(&mut self.blocked) {
                    if let Operation::Fault { then, .. } | Operation::Tensor { then, .. } =
                        &mut blocked
                    {
                        *then = 0;
                    }
                    self.act(&blocked);
                }
            }
            Operation::Synchronise { device } => self.synchronise(self.device(device)),
            Operation::Fail { verb, nth, count, code } => {
                let verb = Verb::ALL[verb as usize % Verb::COUNT];
                self.sim.fail(verb, nth, count, DriverCode(code as i32));
                self.trouble = true;
            }
            Operation::Heal {} => {
                self.sim.heal();
                self.trouble = false;
            }
            Operation::Unpin { pin, gone } => self.unpin(pin, gone),
            _ => self.act_on_device(operation),
        }
    }

    fn act_on_device(&mut self, operation: &Operation) {
        match *operation {
            Operation::FreeDevice { device, pages } => {
                let device = self.device(device);
                let freed = self.devices[device].runtime.free_memory(pages * P);
                self.look_at_freed(device, pages * P, freed);
            }
            Operation::Trim { device, pages } => {
                let device = self.device(device);
                let trimmed = self.devices[device].runtime.trim(pages * P);
                self.accept_any(device, trimmed);
            }
            Operation::Refresh { device } => {
                let device = self.device(device);
                self.accept_any(device, self.devices[device].runtime.refresh());
            }
            Operation::SetBudget { device, pages } => {
                let device = self.device(device);
                self.devices[device].limit = pages.checked_sub(1);
                let bytes = self.devices[device].limit.map(|pages| pages * P);
                self.accept_any(device, self.devices[device].runtime.set_budget(bytes));
            }
            Operation::SetHeadroom { device, pages } => {
                let device = self.device(device);
                let set = self.devices[device].runtime.set_headroom(pages.min(CAPACITY) * P);
                self.accept_any(device, set);
            }
            Operation::RetireStream { device, stream } => self.retire_stream(device, stream),
            Operation::HostRoom { device, pages } => {
                let device = self.device(device);
                self.devices[device].room.0.store(pages * P, Ordering::Relaxed);
            }
            Operation::TrimHost { device, pages } => {
                let device = self.device(device);
                // It waits for the device, whatever it has to wait for.
                self.release_streams();
                let trimmed = self.devices[device].runtime.trim_host(pages * P);
                self.accept_any(device, trimmed);
            }
            Operation::TrimHostFrames { device } => {
                let device = self.device(device);
                self.accept_any(device, self.devices[device].runtime.trim_host_frames());
            }
            Operation::Drive { device } => {
                let device = self.device(device);
                self.accept_any(device, self.devices[device].runtime.drive_engine());
            }
            _ => self.act_on_bar(operation),
        }
    }

    fn act_on_bar(&mut self, operation: &Operation) {
        match *operation {
            Operation::OpenBar { device, pages, sizes } => self.open_bar(device, pages, sizes),
            Operation::OpenModel { device, model } => self.open_model(device, model),
            Operation::CloseModel { model } => self.close_model(model),
            Operation::Tensor { model, tensor, stream, pins, then } => {
                self.tensor(operation, model, tensor, stream, (pins, then));
            }
            Operation::Pass { model, stream } => self.pass(model, stream),
            Operation::Prefetch { model, tensor } => self.prefetch(model, tensor),
            Operation::Hint { model, backwards } => self.hint(model, backwards),
            Operation::Damage { model, how } => self.damage(model, how),
            Operation::Malloc { device, size, stream } => self.malloc(device, size, stream),
            Operation::Free { block, reader } => self.free(block, reader),
            Operation::EmptyCache { device } => self.empty_cache(device),
            Operation::Graph { device, stream, count, sizes, shared } => {
                self.graph(device, stream, (count, sizes), shared);
            }
            Operation::Launch { graph } => self.launch_graph(graph),
            Operation::ResetGraph { graph } => self.reset_graph(graph),
            Operation::FaultMany { device, count, picks, stream, then } => {
                self.fault_many(device, (count, picks), stream, then);
            }
            _ if self.bars.is_empty() => self.open_bar(0, 3, 0),
            Operation::PrepareSave { bar, piece, how } => self.prepare_save(bar, piece, how),
            Operation::Save { bar, piece, stream, pins, then } => {
                self.save((bar, piece), stream, (pins, then));
            }
            Operation::DropSave { bar, piece } => self.drop_save(bar, piece),
            Operation::Fault { bar, piece, stream, commits, pins, then } => {
                self.fault(operation, (bar, piece), stream, (commits, pins, then));
            }
            _ => self.act_on_marks(operation),
        }
    }

    /// What a bare VBAR is told. Of a lost device every answer is that it is lost.
    fn act_on_marks(&mut self, operation: &Operation) {
        let (Operation::FreeMemory { bar, .. }
        | Operation::Prioritise { bar }
        | Operation::Deprioritise { bar }
        | Operation::SetClass { bar, .. }
        | Operation::SetFloor { bar, .. }
        | Operation::SetWatermark { bar, .. }
        | Operation::EndOfRun { bar, .. }
        | Operation::Invalidate { bar, .. }
        | Operation::CloseBar { bar, .. }) = *operation
        else {
            panic!("{operation} is carried out by nobody");
        };
        let at = bar as usize % self.bars.len();
        let (device, vbar) = (self.bars[at].device, self.bars[at].vbar.clone());
        let was_lost = self.knows_loss(device);
        let done = match *operation {
            Operation::FreeMemory { pages, .. } => {
                let freed = vbar.free_memory(pages * P);
                return self.look_at_freed(device, pages * P, freed);
            }
            Operation::Prioritise { .. } => vbar.prioritise(),
            Operation::Deprioritise { .. } => vbar.deprioritise(),
            Operation::SetClass { class, .. } => vbar.set_class(class as i32 - 1),
            Operation::SetFloor { pages, .. } => vbar.set_floor(pages as u32),
            Operation::SetWatermark { pages, .. } => vbar.set_watermark(pages as u32),
            Operation::EndOfRun { stream, forced, .. } => {
                return self.end_run(at, stream, forced);
            }
            Operation::Invalidate { piece, .. } => return self.invalidate(at, piece),
            _ => return self.close_bar(at, operation),
        };
        match done {
            Ok(()) => assert!(!was_lost, "{operation} of a lost device"),
            Err(error) => self.accept(device, &error),
        }
    }

    /// Freed is what was asked for, in whole pages, or it is said why not.
    fn look_at_freed(&self, device: usize, asked: u64, freed: vbar::Result<Freed>) {
        match freed {
            Ok(Freed { bytes, shortfall }) => {
                assert!(bytes.is_multiple_of(P), "{bytes}");
                assert!(bytes >= asked || shortfall.is_some() || self.trouble, "{bytes} {asked}");
            }
            Err(error) => self.accept(device, &error),
        }
    }

    fn others_frame(&mut self, device: u64, take: u64) {
        let device = self.device(device);
        let (other, dev) = (&self.other, &mut self.devices[device]);
        if take > 0 {
            dev.others.extend(other.mem_create(dev.ordinal, take * 4 * P));
        } else if let Some(frame) = dev.others.pop() {
            other.mem_release(frame).unwrap();
        }
    }

    /// Older drivers have a wait that would never end then.
    fn hold_stream(&mut self, device: u64, stream: u64) {
        let crate::trace::Config::World { ctx_event, .. } = self.config;
        let device = self.device(device);
        let stream = self.devices[device].streams[stream as usize % 3];
        if ctx_event == 0 || self.held.contains(&(device, stream)) {
            return;
        }
        self.own(device, |sim| sim.hold_stream(stream)).unwrap();
        self.held.push((device, stream));
        self.devices.iter().for_each(|dev| dev.runtime.set_wait_timeout(Default::default()));
    }

    fn retire_stream(&mut self, device: u64, stream: u64) {
        let device = self.device(device);
        let at = stream as usize % 3;
        let stream = self.devices[device].streams[at];
        let is_used = self.blocks.iter().any(|block| block.stream == stream)
            || self.graphs.iter().any(|graph| graph.device == device)
            || self.held.contains(&(device, stream))
            || self.pinned.iter().any(|pin| pin.token.is_none() && pin.stream == stream);
        if is_used {
            return;
        }
        match self.devices[device].runtime.retire_stream(stream) {
            Ok(()) => {
                self.devices[device].has_retired = true;
                self.forget_writer(device, stream);
                let made = self.own(device, |sim| {
                    sim.stream_destroy(stream)?;
                    sim.stream_create()
                });
                // Its handle may be the old one's.
                self.devices[device].streams[at] = match made {
                    Ok(made) => made,
                    Err(_) => return assert!(self.is_dead(device)),
                };
                for pin in self.pinned.iter_mut().filter(|pin| pin.device == device) {
                    if pin.stream == stream {
                        pin.stream = Stream::NONE;
                    }
                }
            }
            Err(error) => self.accept(device, &error),
        }
    }

    fn unpin(&mut self, pin: u64, gone: u64) {
        let tokens = self.pinned.iter().enumerate().filter(|(_, pin)| pin.token.is_some());
        let at: Vec<usize> = tokens.map(|(at, _)| at).collect();
        if at.is_empty() {
            return;
        }
        let pinned = self.pinned.swap_remove(at[pin as usize % at.len()]);
        let (device, token) = (pinned.device, pinned.token.expect("it was chosen for it"));
        // Now and then the stream counts as gone: no fence covers the use then.
        let stream = if gone > 0 { Stream::NONE } else { pinned.stream };
        let runtime = &self.devices[device].runtime;
        match runtime.unpin(token, stream) {
            Ok(()) => {}
            Err(error) => self.accept(device, &error),
        }
        let again = self.devices[device].runtime.unpin(token, stream).unwrap_err();
        assert_eq!(again.code(), ErrorCode::StaleToken);
    }

    /// Work on a stream comes behind that on another from now on.
    pub(crate) fn order(&self, device: usize, first: Stream, then: Stream) {
        let ordered = self.own(device, |sim| {
            let event = sim.event_create()?;
            sim.event_record(event, first)?;
            sim.stream_wait_event(then, event)?;
            sim.event_destroy(event)
        });
        assert!(ordered.is_ok() || self.is_dead(device), "{ordered:?}");
    }

    /// Reads a range, by a kernel where there is a stream for it, and compares the sum.
    pub(crate) fn verify(
        &mut self,
        device: usize,
        (source, bytes): (DeviceAddress, u64),
        expected: u64,
        stream: Stream,
    ) {
        if self.is_dead(device) {
            return;
        }
        self.totals.bytes_verified += bytes;
        if stream.is_none() {
            let read = self.sim.read_bytes(source, bytes as usize).unwrap();
            assert_eq!(checksum(&read, 0), expected, "{bytes} bytes at {source} are others");
            return;
        }
        let target = self.word(device, expected);
        let call = KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos: 0, target };
        self.launch(device, call, stream);
    }

    /// A word of the test's own that is to be `expected` in the end.
    pub(crate) fn word(&mut self, device: usize, expected: u64) -> DeviceAddress {
        if self.devices[device].sums.len() as u64 == OWN / 8 {
            while !self.graphs.is_empty() {
                self.reset_graph(0);
            }
            self.look_at_words(device);
        }
        let dev = &mut self.devices[device];
        let target = dev.words.offset(dev.sums.len() as u64 * 8);
        dev.sums.push(expected);
        target
    }

    /// Every reading so far had the right bytes.
    pub(crate) fn look_at_words(&mut self, device: usize) {
        self.synchronise(device);
        let dev = &mut self.devices[device];
        let sums = std::mem::take(&mut dev.sums);
        let words = dev.words;
        if self.is_dead(device) {
            return;
        }
        let read = self.sim.read_bytes(words, sums.len() * 8).unwrap();
        for (index, (word, sum)) in read.chunks_exact(8).zip(&sums).enumerate() {
            let word = u64::from_le_bytes(word.try_into().unwrap());
            assert_eq!(word, *sum, "the bytes of reading {index} are others");
        }
        self.sim.write_bytes(words, &vec![0; OWN as usize]).unwrap();
    }

    /// Pins given back by force are nobody's.
    pub(crate) fn end_run(&mut self, at: usize, stream: u64, forced: u64) {
        let (device, vbar) = (self.bars[at].device, self.bars[at].vbar.clone());
        let stream = self.stream(device, stream);
        let held = if forced > 0 { HeldPins::Release } else { HeldPins::Keep };
        let before: u64 = vbar.residency().iter().map(|page| u64::from(page.pins)).sum();
        let ended = match vbar.end_of_run(stream, held) {
            Ok(ended) => ended,
            Err(error) => return self.accept(device, &error),
        };
        let told: u64 = ended.held.iter().map(|(_, pins)| u64::from(*pins)).sum();
        assert_eq!(told, before, "pins that the end of the run told of");
        if forced == 0 {
            return;
        }
        // Work of the holders on other streams is not declared any more.
        self.synchronise(device);
        let is_of =
            |pin: &crate::world::Pinned| pin.device == device && pin.vbar.number() == vbar.number();
        let (stale, kept) = std::mem::take(&mut self.pinned).into_iter().partition(is_of);
        self.pinned = kept;
        for pinned in stale {
            let Some(token) = pinned.token else { continue };
            let error = self.devices[device].runtime.unpin(token, pinned.stream).unwrap_err();
            assert_eq!(error.code(), ErrorCode::StaleToken);
        }
    }
}
