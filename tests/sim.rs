//! A seed drives a sequence of operations on a simulated device that fails by the same seed; a
//! small model of its own knows what must hold after each of them. A failing seed prints itself;
//! `VBAR_SIM_SEED=n` runs that one alone, `VBAR_SIM_SEEDS=n` more or fewer of them.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vbar::driver::kernel::{checksum, mix, pattern};
use vbar::driver::sim::{Sim, SimOptions, Verb};
use vbar::driver::{Driver, DriverCode, KernelCall};
use vbar::memory::page_table::PageState;
use vbar::memory::pager::HeldPins;
use vbar::memory::pins::Token;
use vbar::options::{Eviction, POISON_BYTE, Poison};
use vbar::units::{DeviceAddress, DeviceOrdinal, Generation, PageIndex, PageSize, Stream};
use vbar::{Allocation, AllocationFault, Error, ErrorCode, Fault, Runtime, RuntimeOptions, Vbar};

const P: u64 = 4096;
const DEVICE: DeviceOrdinal = DeviceOrdinal(0);
const SEEDS: u64 = 4000;
const OPERATIONS: u64 = 60;

/// What the model knows of an allocation: the pattern that was committed last, if it is to count.
struct Piece {
    allocation: Allocation,
    committed: Option<u64>,
}

struct Bar {
    vbar: Vbar,
    pieces: Vec<Piece>,
}

/// Pins that the model holds: their pages keep their generations.
struct Pinned {
    token: Token,
    stream: Stream,
    vbar: Vbar,
    pages: Vec<(PageIndex, Generation)>,
}

struct Run {
    sim: Arc<Sim>,
    runtime: Runtime,
    streams: [Stream; 3],
    random: u64,
    bars: Vec<Bar>,
    pinned: Vec<Pinned>,
    /// Where checksums go, a word each, and what they must be.
    words: DeviceAddress,
    sums: Vec<u64>,
    budget: u64,
    /// Failures were injected since the last healing.
    trouble: bool,
    /// Unmapping and releasing may fail: then something may be set aside for good.
    may_lose: bool,
    patterns: u64,
}

const VERBS: [Verb; 15] = [
    Verb::MemCreate,
    Verb::MemMap,
    Verb::MemSetAccess,
    Verb::EventRecord,
    Verb::EventCreate,
    Verb::EventQuery,
    Verb::StreamWaitEvent,
    Verb::StreamIsCapturing,
    Verb::StreamGetId,
    Verb::CtxSynchronize,
    Verb::CtxRecordEvent,
    Verb::MemGetInfo,
    Verb::MemAddressReserve,
    // Only poison needs these.
    Verb::MemsetD8Async,
    Verb::StreamCreate,
];
const CODES: [DriverCode; 3] =
    [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY, DriverCode::INVALID_VALUE];

impl Run {
    fn new(seed: u64) -> Self {
        // An older driver now and then: waits for the context are another call there.
        let ctx_event = u8::from(seed % 4 != 3);
        let text = format!(
            "capacity=256K,granularity=4K,seed={seed},poison=1,on_violation=record,\
             ctx_event={ctx_event}"
        );
        let sim = Sim::new(SimOptions::parse(&text).unwrap());
        let random = mix(seed, 0) | 1;
        let budget = 1 + random % 8;
        let options = RuntimeOptions {
            budget_bytes: Some(budget * P),
            headroom_bytes: Some(0),
            page_size: PageSize::new(P).unwrap(),
            eviction: if seed.is_multiple_of(3) { Eviction::Strict } else { Eviction::Aliasing },
            poison: if seed % 4 == 1 { Poison::On } else { Poison::Off },
            poll_interval: Duration::ZERO,
            heal_window: Duration::ZERO,
            record_interval: Duration::from_secs(if seed.is_multiple_of(2) { 0 } else { 1000 }),
            wait_timeout: Duration::from_secs(10),
            ..RuntimeOptions::default()
        };
        let runtime = Runtime::open(sim.driver(), DEVICE, options).unwrap();
        sim.ctx_set_current(Some(runtime.device().context)).unwrap();
        sim.module_load().unwrap();
        let streams = [(); 3].map(|()| sim.stream_create().unwrap());
        let words = sim.mem_address_reserve(P, 0).unwrap();
        let frame = sim.mem_create(DEVICE, P).unwrap();
        sim.mem_map(words, P, frame).unwrap();
        sim.mem_set_access(words, P, &[DEVICE]).unwrap();
        sim.write_bytes(words, &[0; P as usize]).unwrap();
        let may_lose = seed % 5 == 4;
        let mut run = Self {
            sim,
            runtime,
            streams,
            random,
            bars: Vec::new(),
            pinned: Vec::new(),
            words,
            sums: Vec::new(),
            budget,
            trouble: false,
            may_lose,
            patterns: seed << 20,
        };
        for _ in 0..run.below(3) + 1 {
            run.open_bar();
        }
        run
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % end
    }

    fn stream(&mut self) -> Stream {
        self.streams[self.below(3) as usize]
    }

    fn open_bar(&mut self) {
        let pages = self.below(6) + 1;
        let vbar = match self.runtime.create_bar(pages * P) {
            Ok(vbar) => vbar,
            Err(error) => return self.accept(&error),
        };
        let first = vbar.allocate(512).unwrap();
        let mut pieces = vec![Piece { allocation: first, committed: None }];
        loop {
            let bytes = [512, P / 2, P, P + 512, 2 * P][self.below(5) as usize];
            let Ok(allocation) = vbar.allocate(bytes) else { break };
            pieces.push(Piece { allocation, committed: None });
        }
        self.bars.push(Bar { vbar, pieces });
    }

    /// An error is the driver's, and only after it was made to fail.
    fn accept(&self, error: &Error) {
        let expected = matches!(error.code(), ErrorCode::Driver | ErrorCode::Unsupported);
        assert!(self.trouble && expected, "an error out of nothing: {error:?}");
    }

    fn operate(&mut self) {
        if self.bars.is_empty() {
            return self.open_bar();
        }
        let at = self.below(self.bars.len() as u64) as usize;
        match self.below(40) {
            0..22 => self.fault(at),
            22..26 => self.unpin(),
            26 => self.fault_many(),
            27 => {
                let bytes = self.below(4) * P;
                let freed = self.bars[at].vbar.free_memory(bytes).map(drop);
                freed.unwrap_or_else(|error| self.accept(&error));
            }
            28 => {
                let trimmed = self.runtime.trim(self.budget / 2 * P).map(drop);
                trimmed.unwrap_or_else(|error| self.accept(&error));
            }
            29 | 30 => self.bars[at].vbar.prioritise().unwrap(),
            31 => self.bars[at].vbar.deprioritise().unwrap(),
            32 => {
                let class = self.below(3) as i32;
                self.bars[at].vbar.set_class(class).unwrap();
            }
            33 => {
                self.budget = self.below(9);
                let set = self.runtime.set_budget(Some(self.budget * P));
                set.unwrap_or_else(|error| self.accept(&error));
            }
            34 => {
                let pages = self.below(3) as u32;
                self.bars[at].vbar.set_floor(pages).unwrap();
            }
            35 => self.end_run(at),
            36 => {
                let bar = self.bars.swap_remove(at);
                // Pins may still be held, with a handle or without one.
                if self.below(2) == 0 {
                    bar.vbar.close();
                    assert_eq!(bar.vbar.allocate(1).unwrap_err().code(), ErrorCode::Closed);
                }
                drop(bar);
            }
            37 if self.bars.len() < 3 => self.open_bar(),
            37 => self.invalidate(at),
            _ => self.injure(),
        }
    }

    fn injure(&mut self) {
        if self.below(3) == 0 {
            self.sim.heal();
            self.trouble = false;
            return;
        }
        let mut verb = VERBS[self.below(VERBS.len() as u64) as usize];
        if self.may_lose && self.below(3) == 0 {
            verb = [Verb::MemUnmap, Verb::MemRelease][self.below(2) as usize];
        }
        let code = CODES[self.below(3) as usize];
        let (nth, count) = (self.below(3) + 1, [1, 1, 5][self.below(3) as usize]);
        (nth..nth + count).for_each(|nth| self.sim.fail_nth(verb, nth, code));
        self.trouble = true;
    }

    /// Not while somebody reads who has not said that he is done.
    fn invalidate(&mut self, at: usize) {
        let base = self.bars[at].vbar.base();
        if self.pinned.iter().any(|pinned| pinned.vbar.base() == base) {
            return;
        }
        let which = self.below(self.bars[at].pieces.len() as u64) as usize;
        let piece = &mut self.bars[at].pieces[which];
        piece.allocation.invalidate();
        piece.committed = None;
    }

    fn fault(&mut self, at: usize) {
        let which = self.below(self.bars[at].pieces.len() as u64) as usize;
        let (stream, commits, pins) = (self.stream(), self.below(8) > 0, self.below(6) == 0);
        let seed = self.patterns;
        self.patterns += 1;
        let (bar, sim) = (&self.bars[at], Arc::clone(&self.sim));
        let piece = &bar.pieces[which];
        let (mut committed, mut sum, mut token) = (piece.committed, None, None);
        match piece.allocation.fault(stream) {
            Ok(AllocationFault::Resident(guard)) => {
                let seed = committed.expect("resident, and nothing was committed");
                let target = self.words.offset(self.sums.len() as u64 * 8);
                let (source, bytes) = (guard.address(), guard.bytes());
                let call =
                    KernelCall::Checksum { source, bytes, first_word: 0, delay_nanos: 0, target };
                sim.launch_kernel(call, stream).unwrap();
                let mut expected = vec![0; bytes as usize];
                pattern(&mut expected, seed);
                sum = Some(checksum(&expected, 0));
                if pins {
                    token = Some((guard.signature().to_vec(), guard.into_token()));
                }
            }
            Ok(AllocationFault::Refill(fill)) => {
                committed = None;
                let (target, bytes) = (fill.address(), fill.bytes());
                let call = KernelCall::Pattern { target, bytes, seed, delay_nanos: 0 };
                sim.launch_kernel(call, stream).unwrap();
                match commits.then(|| fill.commit(stream)) {
                    Some(Ok(guard)) => {
                        committed = Some(seed);
                        if pins {
                            token = Some((guard.signature().to_vec(), guard.into_token()));
                        }
                    }
                    Some(Err(error)) => self.accept(&error),
                    None => {}
                }
            }
            Ok(AllocationFault::Offloaded(_)) => {}
            Ok(AllocationFault::Busy) => panic!("nobody fills"),
            Err(error) => self.accept(&error),
        }
        let pages = PageSize::new(P).unwrap().pages_of(&piece.allocation.range());
        let vbar = bar.vbar.clone();
        if let Some((signature, token)) = token {
            let pages = pages.map(PageIndex).zip(signature).collect();
            self.pinned.push(Pinned { token, stream, vbar, pages });
        }
        self.bars[at].pieces[which].committed = committed;
        self.sums.extend(sum);
    }

    fn fault_many(&mut self) {
        let stream = self.stream();
        let picks: Vec<(usize, u64, u64)> = (0..self.below(3) + 1)
            .map(|_| {
                let at = self.below(self.bars.len() as u64) as usize;
                let pages = self.bars[at].vbar.bytes() / P;
                let start = self.below(pages);
                (at, start, start + 1 + self.below(pages - start))
            })
            .collect();
        let ranges: Vec<_> = picks
            .iter()
            .map(|(at, start, end)| (&self.bars[*at].vbar, start * P..end * P))
            .collect();
        match self.runtime.fault_many(&ranges, stream) {
            Ok(Fault::Resident(guards) | Fault::HostMapped(guards)) => {
                assert_eq!(guards.len(), ranges.len());
                for ((at, start, end), guard) in picks.iter().zip(&guards) {
                    let drawn = self.bars[*at].vbar.draw(6);
                    let pages = &drawn[*start as usize..*end as usize];
                    assert!(pages.chars().all(|page| page == 'P'), "{drawn} at {start}..{end}");
                    assert_eq!(guard.bytes(), (end - start) * P);
                }
            }
            Ok(Fault::Offloaded(_)) => {}
            Err(error) => self.accept(&error),
        }
    }

    fn unpin(&mut self) {
        if self.pinned.is_empty() {
            return;
        }
        let at = self.below(self.pinned.len() as u64) as usize;
        let pinned = self.pinned.swap_remove(at);
        // Now and then the stream counts as gone: no fence covers the use then.
        let stream = if self.below(4) == 0 { Stream::NONE } else { pinned.stream };
        self.runtime.unpin(pinned.token, stream).unwrap();
        let again = self.runtime.unpin(pinned.token, stream).unwrap_err();
        assert_eq!(again.code(), ErrorCode::StaleToken);
    }

    fn end_run(&mut self, at: usize) {
        let (stream, forced) = (self.stream(), self.below(3) == 0);
        let held = if forced { HeldPins::Release } else { HeldPins::Keep };
        let vbar = self.bars[at].vbar.clone();
        match vbar.end_of_run(stream, held) {
            Ok(_) if forced => {
                // Work of the holders on other streams is not declared any more.
                self.sim.ctx_synchronize().unwrap_or_else(|_| {
                    self.sim.heal();
                    self.trouble = false;
                    self.sim.ctx_synchronize().unwrap();
                });
                let (stale, kept) = std::mem::take(&mut self.pinned)
                    .into_iter()
                    .partition(|pinned: &Pinned| pinned.vbar.base() == vbar.base());
                self.pinned = kept;
                for pinned in stale {
                    let error = self.runtime.unpin(pinned.token, pinned.stream).unwrap_err();
                    assert_eq!(error.code(), ErrorCode::StaleToken);
                }
            }
            Ok(_) => {}
            Err(error) => self.accept(&error),
        }
    }

    fn check(&self, used_before: u64) {
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert!(self.runtime.is_valid(), "the tables contradict themselves");
        let used = self.runtime.used_bytes();
        // Memory whose handle was released lives until its last mapping goes, which lingers only
        // while nobody has seen its users pass.
        let beyond = self.sim.used_bytes(DEVICE) - P - used;
        let lingering = self.runtime.numbers().lingering_mappings;
        assert!(beyond <= lingering * P, "the device holds {beyond} bytes that the books do not");
        assert!(used <= self.budget * P || used <= used_before, "{used} grew beyond the budget");
        self.check_absent_pages();
        for pinned in &self.pinned {
            let residency = pinned.vbar.residency();
            for (page, generation) in &pinned.pages {
                let now = residency[page.0 as usize];
                assert!(now.state.is_mapped() && now.pins > 0, "a pinned page is {now:?}");
                assert_eq!(now.generation, *generation);
            }
        }
    }

    /// Behind an absent page is nothing, or poison where that is wanted.
    fn check_absent_pages(&self) {
        let wanted = self.runtime.device().options.poison == Poison::On;
        for bar in &self.bars {
            for (page, now) in (0..).zip(bar.vbar.residency()) {
                let address = bar.vbar.base().offset(page * P);
                match self.sim.read_bytes(address, P as usize) {
                    _ if now.state != PageState::Absent => {}
                    Ok(bytes) => {
                        assert!(wanted, "page {page} is absent and mapped");
                        assert!(bytes.iter().all(|byte| *byte == POISON_BYTE), "page {page}");
                    }
                    Err(_) => {}
                }
            }
        }
    }

    fn finish(mut self) {
        self.sim.heal();
        self.sim.ctx_synchronize().unwrap();
        for (index, sum) in self.sums.iter().enumerate() {
            let word = self.sim.read_bytes(self.words.offset(index as u64 * 8), 8).unwrap();
            let word = u64::from_le_bytes(word.try_into().unwrap());
            assert_eq!(word, *sum, "the bytes of reading {index} are others");
        }
        for pinned in std::mem::take(&mut self.pinned) {
            self.runtime.unpin(pinned.token, pinned.stream).unwrap();
        }
        self.bars.clear();
        // The unpins recorded fences of their own.
        self.sim.ctx_synchronize().unwrap();
        self.runtime.free_memory(u64::MAX).unwrap();
        self.runtime.refresh().unwrap();
        self.runtime.trim(0).unwrap();
        let numbers = self.runtime.numbers();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(numbers.used_bytes, numbers.quarantined_bytes, "{numbers:?}");
        let lost = numbers.quarantined_bytes / P + numbers.quarantined_pages;
        assert!(self.may_lose || lost == 0, "{numbers:?}");
        if lost == 0 {
            assert_eq!((numbers.closing_bars, numbers.lingering_mappings), (0, 0));
        }
        let Self { sim, runtime, .. } = self;
        drop(runtime);
        assert_eq!(sim.violations(), Vec::<String>::new());
        assert_eq!(sim.live_events(), 0);
        if lost == 0 {
            let left = (sim.live_frames(DEVICE), sim.live_mappings(), sim.live_reservations());
            assert_eq!(left, (1, 1, 1), "more than the test's own page is left");
        }
    }
}

fn run(seed: u64) {
    let mut run = Run::new(seed);
    for _ in 0..OPERATIONS {
        let used = run.runtime.used_bytes();
        run.operate();
        run.check(used);
    }
    run.finish();
}

#[test]
fn every_sequence_of_operations_keeps_the_promises() {
    if let Ok(seed) = std::env::var("VBAR_SIM_SEED") {
        return run(seed.parse().unwrap());
    }
    let seeds = std::env::var("VBAR_SIM_SEEDS").map_or(SEEDS, |seeds| seeds.parse().unwrap());
    let next = AtomicU64::new(0);
    let failed = AtomicU64::new(u64::MAX);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while failed.load(Ordering::Relaxed) == u64::MAX {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    if std::panic::catch_unwind(AssertUnwindSafe(|| run(seed))).is_err() {
                        failed.fetch_min(seed, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    assert_eq!(failed, u64::MAX, "seed {failed} failed: VBAR_SIM_SEED={failed} runs it alone");
}
