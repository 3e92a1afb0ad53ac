//! Devices without virtual memory management: each block is an allocation of the driver's own.
//!
//! Nothing is shared with weights there, which are offloaded. What is freed is cached for the same
//! stream and size, since a free waits for the device and stops its launches; it goes back when
//! memory is short, or when it is asked to. A block that another stream used is not cached. While a
//! stream may be captured nothing is given to the driver.

use std::collections::HashMap;

use super::heap::ORDINARY;
use super::record::Living;
use super::serve::Ask;
use super::statistics::{Block, BlockState, Kind, Segment};
use super::{Allocator, Freed};
use crate::driver::DriverCode;
use crate::error::Result;
use crate::sync::{Mutex, Relaxed};
use crate::units::{DeviceAddress, MIB, Stream};

/// Largest request that is rounded to 512 bytes; a larger one is to 2 MiB.
const SMALL_MAX: u64 = MIB;

/// A block that is live.
#[derive(Clone, Copy)]
struct Held {
    bytes: u64,
    requested: u64,
    place: Place,
    /// The handle of the stream that it was asked for on.
    stream: Stream,
    /// Another stream uses it too: nobody knows when it is done, but the device.
    is_shared: bool,
}

impl Held {
    /// Its pool is released: graphs may have used the block on any stream.
    fn leave_pool(&mut self) {
        self.place.pool = ORDINARY;
        self.is_shared = true;
    }
}

/// Who may have a cached block.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Place {
    pool: u32,
    stream: u64,
}

#[derive(Default)]
struct State {
    live: HashMap<u64, Held>,
    cached: HashMap<(Place, u64), Vec<u64>>,
    /// To go to the driver.
    leaving: Vec<(u64, u64)>,
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Direct {
    state: Mutex<State>,
}

fn rounded(requested: u64) -> Option<u64> {
    let unit = if requested <= SMALL_MAX { 512 } else { 2 * MIB };
    requested.checked_next_multiple_of(unit)
}

fn kind_of(bytes: u64) -> Kind {
    if bytes <= SMALL_MAX { Kind::Small } else { Kind::Large }
}

impl Allocator {
    /// As `serve`; the address itself.
    pub(super) fn serve_directly(&self, direct: &Direct, ask: &Ask) -> Result<Option<u64>> {
        let Some(bytes) = rounded(ask.requested) else { return Ok(None) };
        let pool = self.core.lock().standing_pool(ask.pool);
        let place = Place { pool, stream: ask.slot.stream_id() };
        let requested = ask.requested;
        let held = Held { bytes, requested, place, stream: ask.stream, is_shared: false };
        let cached = {
            let mut state = direct.state.lock();
            let cached = state.cached.get_mut(&(place, bytes)).and_then(Vec::pop);
            cached.inspect(|address| {
                state.live.insert(*address, held);
            })
        };
        let address = match cached {
            Some(address) => address,
            None => match self.allocate(direct, bytes)? {
                Some(address) => {
                    direct.state.lock().live.insert(address, held);
                    address
                }
                None => return Ok(None),
            },
        };
        // The pool may have been released since it was looked at, and its blocks with it: after
        // this one was entered, what is released meanwhile finds it.
        let mut core = self.core.lock();
        core.count_malloc(kind_of(bytes), bytes, requested);
        let is_standing = core.standing_pool(ask.pool) == pool;
        drop(core);
        if !is_standing && let Some(held) = direct.state.lock().live.get_mut(&address) {
            held.leave_pool();
        }
        Ok(Some(address))
    }

    /// Memory of the driver, after what is cached has gone back if there is no other way.
    fn allocate(&self, direct: &Direct, bytes: u64) -> Result<Option<u64>> {
        let device = &self.pager.device;
        let _scope = device.enter()?;
        for attempt in 0..2 {
            if attempt > 0 {
                self.core.lock().statistics.num_alloc_retries += 1;
                self.release_cached(direct)?;
            }
            if !self.may_allocate(bytes)? {
                continue;
            }
            match device.driver.mem_alloc(bytes) {
                Ok(address) => {
                    let mut core = self.core.lock();
                    core.statistics.reserved_bytes.add(kind_of(bytes), bytes);
                    core.statistics.segment.add(kind_of(bytes), 1);
                    core.statistics.num_device_alloc += 1;
                    return Ok(Some(address.0));
                }
                Err(error) if error.code == DriverCode::OUT_OF_MEMORY => {}
                Err(error) => return Err(device.note(error.into())),
            }
        }
        Ok(None)
    }

    /// Whether limit, fraction and headroom admit more.
    fn may_allocate(&self, bytes: u64) -> Result<bool> {
        let device = &self.pager.device;
        let (limit, headroom) = self.pager.budget_settings();
        let memory = device.driver.mem_get_info().map_err(|error| device.note(error.into()))?;
        let held = self.core.lock().statistics.reserved_bytes.all.current;
        let fraction = self.page_limit.load(Relaxed).saturating_mul(self.arena.page_size.bytes());
        let most = limit.unwrap_or(u64::MAX).min(fraction);
        Ok(held + bytes <= most && bytes.saturating_add(headroom) <= memory.free_bytes)
    }

    pub(super) fn free_directly(&self, direct: &Direct, address: u64) -> Freed {
        let held = {
            let mut state = direct.state.lock();
            let Some(held) = state.live.remove(&address) else {
                drop(state);
                return self.count_unknown(address);
            };
            match held.is_shared {
                true => state.leaving.push((address, held.bytes)),
                false => state.cached.entry((held.place, held.bytes)).or_default().push(address),
            }
            held
        };
        self.core.lock().count_free(kind_of(held.bytes), held.bytes, held.requested);
        if !held.is_shared {
            return Freed::Cached;
        }
        match self.release_leaving(direct) {
            Ok(()) => Freed::Cached,
            Err(error) => {
                log::warn!("a block stays: {error}");
                Freed::Deferred
            }
        }
    }

    pub(super) fn record_directly(&self, direct: &Direct, address: u64, stream: Stream) {
        let device = &self.pager.device;
        let slot = device.enter_context().and_then(|_context| device.inspect(stream));
        let id = slot.ok().and_then(|(_, slot)| slot).map(|slot| slot.stream_id());
        if let Some(held) = direct.state.lock().live.get_mut(&address) {
            held.is_shared |= id != Some(held.place.stream);
        }
    }

    /// Gives everything that is cached for the ordinary pool to the driver.
    pub(super) fn release_cached(&self, direct: &Direct) -> Result<()> {
        if self.open.any() || self.pager.device.fences.is_capture_known() {
            return Ok(());
        }
        direct.state.lock().let_go(|place| place.pool == ORDINARY);
        self.release_leaving(direct)
    }

    /// Blocks of a pool that was released are ordinary; what is cached of it goes.
    pub(super) fn release_pool_directly(&self, direct: &Direct, pool: u32) {
        {
            let mut state = direct.state.lock();
            state.let_go(|place| place.pool == pool);
            let live = state.live.values_mut();
            live.filter(|held| held.place.pool == pool).for_each(Held::leave_pool);
        }
        if let Err(error) = self.release_leaving(direct) {
            log::warn!("the memory of a graph pool: {error}");
        }
    }

    /// Frees what is to go, when all work of the device is known to be over. Each free waits for
    /// the device by itself, but that promises no order.
    pub(super) fn release_leaving(&self, direct: &Direct) -> Result<()> {
        let device = &self.pager.device;
        if self.open.any() || device.fences.is_capture_known() {
            return Ok(());
        }
        let _scope = device.enter()?;
        // Taken before the wait: what comes after it may be in use.
        let mut leaving = std::mem::take(&mut direct.state.lock().leaving);
        let mut freed = match leaving.is_empty() {
            true => Ok(()),
            false => device.context_wait_asked(),
        };
        while freed.is_ok()
            && let Some((address, bytes)) = leaving.pop()
        {
            let answer = device.driver.mem_free(DeviceAddress(address));
            if let Err(error) = answer {
                leaving.push((address, bytes));
                freed = Err(device.note(error.into()));
                break;
            }
            let mut core = self.core.lock();
            core.statistics.reserved_bytes.sub(kind_of(bytes), bytes);
            core.statistics.segment.sub(kind_of(bytes), 1);
            core.statistics.num_device_free += 1;
        }
        direct.state.lock().leaving.append(&mut leaving);
        freed
    }
}

impl State {
    fn let_go(&mut self, which: impl Fn(Place) -> bool) {
        let Self { cached, leaving, .. } = self;
        cached.retain(|(place, bytes), addresses| {
            let goes = which(*place);
            if goes {
                leaving.extend(addresses.drain(..).map(|address| (address, *bytes)));
            }
            !goes
        });
    }
}

impl Direct {
    /// The live block that an address lies in.
    pub(super) fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.state.lock();
        let mut live = state.live.iter().map(|(start, held)| (*start, held.bytes));
        live.find(|(start, bytes)| (*start..start + bytes).contains(&address))
    }

    /// The blocks that a record begins with.
    pub(super) fn living(&self) -> Vec<Living> {
        let state = self.state.lock();
        let living = state.live.iter().map(|(address, held)| {
            let (address, requested, stream) = (*address, held.requested, held.stream);
            Living { address, requested, stream, uses: Vec::new() }
        });
        living.collect()
    }

    /// Each block is a segment of its own.
    pub(super) fn segments(&self) -> Vec<Segment> {
        let state = self.state.lock();
        let live = state
            .live
            .iter()
            .map(|(address, held)| (*address, held.bytes, held.requested, BlockState::Allocated));
        let cached = state.cached.iter().flat_map(|((_, bytes), addresses)| {
            addresses.iter().map(|address| (*address, *bytes, 0, BlockState::Free))
        });
        let leaving = state.leaving.iter();
        let leaving = leaving.map(|(address, bytes)| (*address, *bytes, 0, BlockState::Free));
        let all = live.chain(cached).chain(leaving);
        let segment = |(address, bytes, requested_bytes, state)| Segment {
            address,
            bytes,
            kind: kind_of(bytes),
            stream: Stream::NONE,
            pool: None,
            blocks: vec![Block { address, bytes, requested_bytes, state }],
        };
        let mut segments: Vec<Segment> = all.map(segment).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }
}
