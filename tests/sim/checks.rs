//! What must hold after every step, by a small model of its own: pages, pins, generations, frames,
//! budget, counts. And at the end: nothing is left but what could not be given back.

use std::collections::HashMap;

use vbar::driver::Driver;
use vbar::driver::sim::Verb;
use vbar::memory::page_table::PageState;
use vbar::options::POISON_BYTE;
use vbar::runtime::Statistics;
use vbar::torch::BlockState;
use vbar::{Fault, Reason, Result};

use crate::world::{OWN, P, World};

impl World {
    /// Everything, behind each step and before those that come in the middle of one.
    pub(crate) fn check(&mut self) {
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        assert_eq!(self.other.violations(), Vec::<String>::new());
        for device in 0..self.devices.len() {
            let runtime = &self.devices[device].runtime;
            assert!(runtime.is_valid(), "the tables contradict themselves");
            let now = runtime.statistics();
            if !self.is_dead(device) {
                self.check_memory(device, &now);
                self.check_blocks(device);
                self.check_saves(device, now.locked.saved_bytes);
            }
            self.check_growth(device, &now);
            self.devices[device].before = Some(now);
        }
        self.check_pages();
        self.check_host_memory();
    }

    /// Frames are the device's handles, and no more than the budget is created.
    fn check_memory(&self, device: usize, now: &Statistics) {
        let (dev, numbers) = (&self.devices[device], &now.memory);
        let used = numbers.used_bytes;
        let used_before = dev.before.as_ref().map_or(0, |before| before.memory.used_bytes);
        // Memory whose handle was released lives until its last mapping goes, which lingers only
        // while nobody has seen its users pass.
        let lingering = numbers.lingering_mappings * P;
        let held = self.sim.used_bytes(dev.ordinal) - OWN;
        let stuck = numbers.quarantined_pages * P;
        assert!(held >= used, "{used} bytes are in the books, the device holds {held}");
        assert!(
            held - used <= lingering + stuck,
            "the device holds {held} bytes, the books have {used}: {numbers:?}"
        );
        let limit = dev.limit.map_or(u64::MAX, |pages| pages * P);
        assert!(numbers.budget_bytes <= limit, "{numbers:?} of {limit}");
        assert!(
            used <= numbers.budget_bytes || used <= used_before,
            "{used} grew beyond the budget: {numbers:?}"
        );
        // Every frame is behind a page, free, on its way, or set aside.
        let known = numbers.resident_pages * P
            + numbers.free_bytes
            + numbers.quarantined_bytes
            + numbers.poison_bytes;
        assert!(known <= used, "{numbers:?}");
        assert!(used - known <= lingering, "frames that nobody has: {numbers:?}");
        assert!(used <= numbers.peak_bytes, "{numbers:?}");
        if self.struck(&Verb::GIVING_BACK) == 0 {
            let aside = (numbers.quarantined_bytes, numbers.quarantined_pages);
            assert_eq!(aside, (0, 0), "set aside, and nothing failed that gives back");
        }
    }

    /// Counts only ever grow.
    fn check_growth(&self, device: usize, now: &Statistics) {
        let Some(before) = &self.devices[device].before else { return };
        let counts = |of: &Statistics| {
            [
                of.hits,
                of.misses,
                of.pages_mapped,
                of.pages_ahead,
                of.pages_evicted,
                of.pages_aliased,
                of.bytes_filled,
                of.driver_retries,
                of.poison_failures,
                of.memory.peak_bytes,
                of.refusals.iter().map(|(_, count)| count).sum(),
                of.waits.iter().map(|(_, wait)| wait.count).sum(),
                of.sources.page_cache_bytes + of.sources.disk_bytes,
            ]
        };
        let (old, new) = (counts(before), counts(now));
        assert!(old.iter().zip(&new).all(|(old, new)| old <= new), "{old:?} became {new:?}");
        assert!(now.pages_ahead <= now.pages_mapped, "{now:?}");
        assert!(now.pages_aliased <= now.pages_evicted, "{now:?}");
    }

    /// A fault counts as a hit or a miss, or by the reason of its refusal.
    pub(crate) fn look_at_fault<G>(
        &self,
        device: usize,
        before: &Statistics,
        outcome: &Result<Fault<G>>,
    ) {
        let outcome = match outcome {
            Ok(Fault::Offloaded(refusal)) => Some(Some(refusal.reason)),
            Ok(Fault::Resident(_)) => Some(None),
            _ => None,
        };
        self.look_at_counts(device, before, outcome);
    }

    /// As [`World::look_at_fault`], with the reason of what was refused; of what came otherwise
    /// nothing is known.
    pub(crate) fn look_at_counts(
        &self,
        device: usize,
        before: &Statistics,
        outcome: Option<Option<Reason>>,
    ) {
        let Some(outcome) = outcome else { return };
        let now = self.devices[device].runtime.statistics();
        let grown = |of: &Statistics| of.hits + of.misses;
        match outcome {
            None => assert_eq!(grown(&now), grown(before) + 1, "a fault is a hit or a miss"),
            Some(reason) => {
                assert_eq!(now.refused(reason), before.refused(reason) + 1, "{reason}");
            }
        }
    }

    /// States, pins and generations of every page.
    fn check_pages(&mut self) {
        let mut pins: HashMap<(usize, u32), Vec<u32>> = HashMap::new();
        for pinned in &self.pinned {
            let count = (pinned.vbar.bytes() / P) as usize;
            let key = (pinned.device, pinned.vbar.number());
            let pins = pins.entry(key).or_insert_with(|| vec![0; count]);
            pinned.pages.iter().for_each(|(page, _)| pins[page.0 as usize] += 1);
            if self.is_dead(pinned.device) {
                continue;
            }
            let residency = pinned.vbar.residency();
            for (page, generation) in &pinned.pages {
                let now = residency[page.0 as usize];
                assert!(now.state.is_readable(), "a pinned page is {now:?}");
                assert_eq!(now.generation, *generation, "a pinned page has other bytes");
            }
        }
        let mut seen = Vec::new();
        for (device, vbar) in self.vbars() {
            let expected = pins.get(&(device, vbar.number()));
            let residency = vbar.residency();
            let marks = vbar.marks();
            let mapped = residency.iter().filter(|page| page.state.is_readable()).count();
            assert!(marks.resident as usize <= mapped, "{marks:?}: {}", vbar.draw(64));
            for (index, now) in residency.into_iter().enumerate() {
                let pins = expected.map_or(0, |pins| pins[index]);
                assert_eq!(now.pins, pins, "pins of page {index} of VBAR {}", vbar.number());
                let passing = matches!(now.state, PageState::Claimed);
                assert!(!passing, "page {index} is {now:?} between steps");
                if now.generation.0 > 0 {
                    seen.push((now.generation.0, (device, vbar.number(), index)));
                }
                if now.state == PageState::Absent && !self.is_dead(device) {
                    let address = vbar.base().offset(index as u64 * P);
                    self.check_absent(device, address, index);
                }
            }
        }
        for (generation, owner) in seen {
            let first = *self.generations.entry(generation).or_insert(owner);
            assert_eq!(first, owner, "generation {generation} was given out twice");
        }
    }

    /// Behind an absent page is nothing, or poison where that is wanted.
    fn check_absent(&self, device: usize, address: vbar::units::DeviceAddress, page: usize) {
        let Ok(bytes) = self.sim.read_bytes(address, P as usize) else { return };
        let wanted = self.devices[device].runtime.device().options.poison;
        assert_eq!(wanted, vbar::options::Poison::On, "page {page} is absent and mapped");
        assert!(bytes.iter().all(|byte| *byte == POISON_BYTE), "page {page}");
    }

    /// Page-locked memory and host frames are those in the books.
    fn check_host_memory(&self) {
        if (0..self.devices.len()).any(|device| self.is_dead(device)) {
            return;
        }
        let books = self.devices.iter().map(|dev| dev.runtime.statistics());
        let (mut locked, mut frames, mut lingering) = (0, 0, 0);
        for now in books {
            locked += now.locked_bytes;
            frames += now.memory.host_mapped_bytes;
            lingering += now.memory.lingering_mappings + now.memory.quarantined_pages;
        }
        let lost = self.struck(&[Verb::MemFreeHost, Verb::MemHostUnregister]) > 0;
        let really = self.sim.locked_bytes();
        assert!(really == locked || lost && really > locked, "{really} locked, told {locked}");
        let live = self.sim.live_host_frames() * P;
        assert!(live >= frames && live - frames <= lingering * P, "{live} of {frames}");
    }

    /// PyTorch's blocks lie side by side in its segments and are those that the counts have.
    fn check_blocks(&self, device: usize) {
        let Some(allocator) = &self.devices[device].allocator else { return };
        let (statistics, segments) = (allocator.statistics(), allocator.snapshot());
        let (mut live, mut reserved) = (0, 0);
        for segment in &segments {
            let mut end = segment.address;
            for block in &segment.blocks {
                assert_eq!(block.address, end, "blocks cover their segment");
                end += block.bytes;
                live += u64::from(block.state == BlockState::Allocated);
            }
            assert_eq!(end, segment.address + segment.bytes);
            reserved += segment.bytes;
        }
        assert_eq!(statistics.reserved_bytes.all.current, reserved);
        let of_device = |of: &usize| *of == device;
        let blocks = self.blocks.iter().filter(|block| of_device(&block.device)).count();
        let graphs = self.graphs.iter().filter(|graph| of_device(&graph.device));
        let outputs: usize = graphs.map(|graph| graph.outputs.len()).sum();
        if self.depth == 0 {
            assert_eq!(live, (blocks + outputs) as u64, "live blocks");
        }
    }
}

/// The end.
impl World {
    /// Gives everything back and closes; what is left is what could not be given back.
    pub(crate) fn finish(mut self) -> crate::totals::Totals {
        self.sim.heal();
        self.trouble = false;
        self.release_streams();
        self.blocked.clear();
        let count = self.devices.len();
        (0..count).for_each(|device| self.synchronise(device));
        while !self.graphs.is_empty() {
            self.reset_graph(0);
        }
        while !self.blocks.is_empty() {
            self.free(0, 0);
        }
        for pinned in std::mem::take(&mut self.pinned) {
            let token = pinned.token.expect("no step is under way");
            self.accept_any(
                pinned.device,
                self.devices[pinned.device].runtime.unpin(token, pinned.stream),
            );
        }
        self.look_at_saved();
        (0..count).for_each(|device| self.look_at_words(device));
        self.bars.clear();
        self.models = [None, None];
        for device in 0..count {
            self.close_device(device);
        }
        self.leave()
    }

    fn close_device(&mut self, device: usize) {
        // The unpins recorded fences of their own.
        self.synchronise(device);
        // Not the driver's call: the library has to know that everything is done.
        self.settle(device);
        let has_arena = self.devices[device].allocator.is_some();
        if let Some(allocator) = self.devices[device].allocator.take() {
            self.accept_any(device, allocator.empty_cache());
            let left = allocator.statistics();
            if !self.is_dead(device) {
                let left = (left.reserved_bytes.all.current, left.pending_bytes);
                assert_eq!(left, (0, 0), "PyTorch's memory is left");
            }
        }
        let runtime = &self.devices[device].runtime;
        self.accept_any(device, runtime.free_memory(u64::MAX));
        self.settle(device);
        self.accept_any(device, runtime.trim_host_frames());
        self.accept_any(device, runtime.trim(0));
        if self.is_dead(device) {
            return;
        }
        let numbers = runtime.numbers();
        // Pages of PyTorch's addresses have poison behind them until the device is closed.
        let poison = if has_arena { numbers.poison_bytes } else { 0 };
        assert_eq!(numbers.used_bytes, numbers.quarantined_bytes + poison, "{numbers:?}");
        let lost = numbers.quarantined_bytes / P + numbers.quarantined_pages;
        if self.struck(&Verb::GIVING_BACK) == 0 {
            assert_eq!(lost, 0, "{numbers:?}");
        }
        if lost == 0 {
            assert_eq!((numbers.closing_bars, numbers.lingering_mappings), (0, 0));
        }
        self.accept_any(device, runtime.trim_host(0));
        if lost == 0 {
            let saved = runtime.statistics().locked.saved_bytes;
            assert_eq!(saved, 0, "memory for saves is left, and no VBAR is");
        }
        self.totals.set_aside += u64::from(lost > 0);
    }

    fn settle(&self, device: usize) {
        let runtime = &self.devices[device].runtime;
        // A stream is known to be captured until it is met again, should the call fail that asks.
        for stream in &self.devices[device].streams {
            let met = runtime.device().enter().and_then(|_scope| runtime.device().inspect(*stream));
            self.accept_any(device, met);
        }
        let known =
            runtime.device().enter().and_then(|_scope| runtime.device().context_wait_asked());
        self.accept_any(device, known);
        // The second one removes the mappings of pages that the first one evicted.
        self.accept_any(device, runtime.refresh());
        self.accept_any(device, runtime.refresh());
    }

    /// Closes the runtimes. Of each thing no more is left than failed to be given back.
    fn leave(mut self) -> crate::totals::Totals {
        let died = (0..self.devices.len()).any(|device| self.is_dead(device));
        let watched = self.watch();
        let mut totals = std::mem::take(&mut self.totals);
        totals.seeds = 1;
        totals.losses += u64::from(died);
        totals.add_struck(&self.sim.struck());
        let unmapped = self.struck(&[Verb::MemUnmap]);
        let released = self.struck(&[Verb::MemRelease]);
        let freed = self.struck(&[Verb::MemAddressFree]);
        let events = self.struck(&[Verb::EventDestroy]);
        let streams = self.struck(&[Verb::StreamDestroy]);
        let host = self.struck(&[Verb::MemFreeHost, Verb::MemHostUnregister]);
        let Self { sim, other, devices, .. } = self;
        let (count, mut own) = (devices.len() as u64, 0);
        for dev in devices {
            own += dev.streams.len() - 1;
            dev.others.iter().for_each(|frame| other.mem_release(*frame).unwrap());
            let ordinal = dev.ordinal;
            drop(dev.runtime);
            if !died {
                let frames = sim.live_frames(ordinal);
                assert!(
                    (1..=1 + unmapped + released).contains(&frames),
                    "{frames} frames are left"
                );
            }
        }
        assert_eq!(sim.violations(), Vec::<String>::new());
        let kept = watched.iter().filter(|device| device.strong_count() > 0).count();
        assert_eq!(kept, 0, "a runtime is kept when nobody has it");
        if died {
            return totals;
        }
        let left = [
            ("mappings", sim.live_mappings() as u64, count, unmapped),
            ("reservations", sim.live_reservations() as u64, count, unmapped + freed),
            ("events", sim.live_events() as u64, 0, events),
            ("streams", sim.live_streams() as u64, own as u64, streams),
            ("host frames", sim.live_host_frames(), 0, unmapped + released),
            ("page-locked bytes", sim.locked_bytes(), 0, host << 40),
        ];
        for (what, left, own, lost) in left {
            assert!((own..=own + lost).contains(&left), "{left} {what} are left, {lost} were lost");
        }
        totals
    }
}
