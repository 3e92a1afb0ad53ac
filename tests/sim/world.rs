//! The world of a trace: a simulated driver of one or two devices, another process beside it, and
//! all that the program under test has: VBARs, models, blocks, graphs, pins.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tempfile::TempDir;
use vbar::driver::sim::{Sim, SimGraph, SimOptions, Verb};
use vbar::driver::{Driver, FrameHandle, KernelCall};
use vbar::host::spare::HostRoom;
use vbar::memory::pins::Token;
use vbar::options::{ContextWaits, Eviction, HostMapped, Poison, Prefer, Scrub};
use vbar::runtime::Statistics;
use vbar::sync::device::Device;
use vbar::torch::{Allocator, PoolId};
use vbar::units::{Context, DeviceAddress, DeviceOrdinal, Generation, PageIndex, PageSize, Stream};
use vbar::{Allocation, Error, ErrorCode, Runtime, RuntimeOptions, Vbar};

use crate::model_file::Model;
use crate::saves::Saved;
use crate::totals::Totals;
use crate::trace::{Config, Trace};

/// One page, and so one frame.
pub(crate) const P: u64 = 4096;
/// Pages of a device.
pub(crate) const CAPACITY: u64 = 64;
/// Bytes of each device that are the test's own: where kernels put their sums.
pub(crate) const OWN: u64 = 4 * P;
/// Longest wait, where no stream is held.
const WAIT: Duration = Duration::from_secs(10);

/// What is known of an allocation.
pub(crate) struct Piece {
    pub(crate) allocation: Arc<Allocation>,
    /// The pattern that was committed last, and the generations that its pages had.
    pub(crate) committed: Option<(u64, Vec<Generation>)>,
    /// A step that has not ended fills it.
    pub(crate) filling: bool,
    pub(crate) saved: Saved,
    /// A step that has not ended writes and saves it.
    pub(crate) saving: bool,
    /// The stream that wrote what was saved last, and the generations that the pages had: of
    /// those, whoever uses the bytes elsewhere comes behind it by his own doing.
    pub(crate) written: Option<(Stream, Vec<Generation>)>,
}

/// A bare VBAR.
pub(crate) struct Bar {
    pub(crate) device: usize,
    pub(crate) vbar: Vbar,
    pub(crate) pieces: Vec<Piece>,
}

/// Pins that are held: their pages keep their generations.
pub(crate) struct Pinned {
    pub(crate) id: u64,
    pub(crate) device: usize,
    /// `None`: by a guard of a step that has not ended.
    pub(crate) token: Option<Token>,
    pub(crate) stream: Stream,
    pub(crate) vbar: Vbar,
    pub(crate) pages: Vec<(PageIndex, Generation)>,
}

/// What PyTorch has.
pub(crate) struct Block {
    pub(crate) device: usize,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) seed: u64,
    pub(crate) stream: Stream,
}

pub(crate) struct Graph {
    pub(crate) device: usize,
    pub(crate) graph: SimGraph,
    pub(crate) id: PoolId,
    /// What a launch adds to the word at `target`.
    pub(crate) sum: u64,
    pub(crate) word: usize,
    pub(crate) outputs: Vec<u64>,
}

/// Host frames as many as the trace says.
pub(crate) struct Room(pub(crate) AtomicU64);

impl HostRoom for Room {
    fn allowed_bytes(&self, _held_bytes: u64) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct Dev {
    pub(crate) ordinal: DeviceOrdinal,
    pub(crate) runtime: Runtime,
    pub(crate) context: Context,
    pub(crate) streams: Vec<Stream>,
    pub(crate) words: DeviceAddress,
    /// What the words must be.
    pub(crate) sums: Vec<u64>,
    /// Pages, where there is a limit.
    pub(crate) limit: Option<u64>,
    pub(crate) room: Arc<Room>,
    pub(crate) allocator: Option<Arc<Allocator>>,
    /// Frames of the other process.
    pub(crate) others: Vec<FrameHandle>,
    pub(crate) before: Option<Statistics>,
    /// A stream was given up that may have work still.
    pub(crate) has_retired: bool,
    /// A drop of what was saved has failed: a copy of it may be under way, which reads its pages
    /// on a stream that is none of the program's.
    pub(crate) has_owed: bool,
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) sim: Arc<Sim>,
    pub(crate) other: Arc<Sim>,
    pub(crate) devices: Vec<Dev>,
    pub(crate) bars: Vec<Bar>,
    pub(crate) models: [Option<Model>; 2],
    pub(crate) pinned: Vec<Pinned>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) graphs: Vec<Graph>,
    pub(crate) thread: u64,
    /// Streams that are held.
    pub(crate) held: Vec<(usize, Stream)>,
    /// Failures were injected since the last healing.
    pub(crate) trouble: bool,
    /// Every generation seen, and whose it is.
    pub(crate) generations: HashMap<u64, (usize, u32, usize)>,
    pub(crate) last_word: u64,
    pub(crate) folder: Option<TempDir>,
    pub(crate) files: u64,
    pub(crate) totals: Totals,
    /// Steps that waited for a held stream in vain.
    pub(crate) blocked: Vec<crate::operations::Operation>,
    pub(crate) trace: Arc<Trace>,
    pub(crate) at: usize,
    pub(crate) depth: u32,
}

fn options(config: &Config) -> RuntimeOptions {
    let Config::World {
        budget,
        strict,
        poison,
        late_fences,
        no_context_waits,
        host_mapped,
        allowance,
        slots,
        prefer,
        scrub,
        ..
    } = config;
    let on = |flag: &u64| *flag != 0;
    RuntimeOptions {
        budget_bytes: Some(budget * P),
        headroom_bytes: Some(0),
        page_size: PageSize::new(P).unwrap(),
        eviction: if on(strict) { Eviction::Strict } else { Eviction::Aliasing },
        poison: if on(poison) { Poison::On } else { Poison::Off },
        scrub: if on(scrub) { Scrub::On } else { Scrub::Off },
        context_waits: match no_context_waits {
            0 => ContextWaits::Allowed,
            _ => ContextWaits::Never,
        },
        host_mapped: if on(host_mapped) { HostMapped::On } else { HostMapped::Off },
        poll_interval: Duration::ZERO,
        heal_window: Duration::ZERO,
        record_interval: Duration::from_secs(if on(late_fences) { 1000 } else { 0 }),
        wait_timeout: WAIT,
        host_allowance: allowance.checked_sub(1).map(|pages| pages * P),
        staging_slot_count: [4, 1, 2, 3][*slots as usize % 4],
        prefer: [Prefer::Auto, Prefer::Ram, Prefer::Disk][*prefer as usize % 3],
        ..RuntimeOptions::default()
    }
}

impl World {
    pub(crate) fn new(trace: Arc<Trace>) -> Self {
        let config = trace.config.clone();
        let Config::World { schedule, devices, ctx_event, mappings, jitter, engine, .. } = &config;
        let devices = (*devices).clamp(1, 2);
        let mut text = format!(
            "capacity={},granularity=4K,devices={devices},seed={schedule},poison=1,\
             on_violation=record,ctx_event={}",
            CAPACITY * P,
            (*ctx_event).min(1)
        );
        if *mappings > 0 {
            text += &format!(",mappings={}", mappings + devices);
        }
        if *jitter > 0 {
            text += &format!(",jitter={}", 2 * P);
        }
        let sim = Sim::new(SimOptions::parse(&text).unwrap());
        sim.run_unhelped();
        let make = |ordinal| {
            let dev = Dev::new(&sim, DeviceOrdinal(ordinal as u32), &config);
            if *engine > 0 {
                dev.runtime.open_engine_by_hand();
            }
            dev
        };
        let made = (0..devices).map(make).collect();
        let schedule = *schedule;
        Self {
            other: sim.second_process(),
            sim,
            devices: made,
            bars: Vec::new(),
            models: [None, None],
            pinned: Vec::new(),
            blocks: Vec::new(),
            graphs: Vec::new(),
            thread: 0,
            held: Vec::new(),
            trouble: false,
            generations: HashMap::new(),
            last_word: schedule << 20,
            folder: None,
            files: 0,
            totals: Totals::default(),
            blocked: Vec::new(),
            at: 0,
            depth: 0,
            config,
            trace,
        }
    }

    /// A number that nobody had before.
    pub(crate) fn new_number(&mut self) -> u64 {
        self.last_word += 1;
        self.last_word
    }

    pub(crate) fn device(&self, number: u64) -> usize {
        number as usize % self.devices.len()
    }

    /// A stream of a device, for the thread whose turn it is: its own, mostly.
    pub(crate) fn stream(&self, device: usize, number: u64) -> Stream {
        let streams = &self.devices[device].streams;
        match number % 8 {
            0..5 => streams[self.thread as usize % streams.len()],
            5 | 6 => streams[number as usize / 8 % streams.len()],
            _ => Stream::NONE,
        }
    }

    /// What the test itself does: in the device's context, and nothing fails because it was told
    /// to.
    pub(crate) fn own<R>(&self, device: usize, during: impl FnOnce(&Sim) -> R) -> R {
        self.sim.spare(|| {
            let before = self.sim.ctx_get_current().unwrap();
            self.sim.ctx_set_current(Some(self.devices[device].context)).unwrap();
            let made = during(&self.sim);
            self.sim.ctx_set_current(before).unwrap();
            made
        })
    }

    /// Whether the device is lost, or its runtime was told so.
    pub(crate) fn is_dead(&self, device: usize) -> bool {
        self.sim.is_lost(self.devices[device].ordinal) || self.knows_loss(device)
    }

    pub(crate) fn knows_loss(&self, device: usize) -> bool {
        self.devices[device].runtime.device().check().is_err()
    }

    /// Calls of a verb that failed because they were told to.
    pub(crate) fn struck(&self, verbs: &[Verb]) -> u64 {
        let struck = self.sim.struck();
        struck.iter().filter(|it| verbs.contains(&it.verb)).map(|it| it.count).sum()
    }

    /// Enqueues a kernel; on a lost device nothing is.
    pub(crate) fn launch(&self, device: usize, call: KernelCall, stream: Stream) {
        let launched = self.own(device, |sim| sim.launch_kernel(call, stream));
        assert!(launched.is_ok() || self.is_dead(device), "{launched:?}");
    }

    /// Everything that was enqueued is done; nothing is held any more.
    pub(crate) fn synchronise(&mut self, device: usize) {
        self.release_streams();
        let done = self.own(device, |sim| sim.ctx_synchronize());
        assert!(done.is_ok() || self.is_dead(device), "{done:?}");
    }

    pub(crate) fn release_streams(&mut self) {
        for (device, stream) in std::mem::take(&mut self.held) {
            self.own(device, |sim| sim.release_stream(stream)).unwrap();
        }
        self.devices.iter().for_each(|dev| dev.runtime.set_wait_timeout(WAIT));
    }

    /// An error is the driver's, and only after it was made to fail; or it says what was done to
    /// the device.
    pub(crate) fn accept(&self, device: usize, error: &Error) {
        let expected = match error.code() {
            ErrorCode::Driver | ErrorCode::Unsupported => self.trouble || self.is_dead(device),
            ErrorCode::HostMemory | ErrorCode::NoAddresses => self.trouble,
            ErrorCode::DeviceLost => self.is_dead(device),
            ErrorCode::TimedOut => !self.held.is_empty(),
            _ => false,
        };
        assert!(expected, "an error out of nothing: {error:?}");
    }

    /// As [`World::accept`], of a call whose value is of no interest.
    pub(crate) fn accept_any<T>(&self, device: usize, done: vbar::Result<T>) {
        if let Err(error) = done {
            self.accept(device, &error);
        }
    }

    /// The VBARs that are open, models' ones too.
    pub(crate) fn vbars(&self) -> impl Iterator<Item = (usize, &Vbar)> {
        let bare = self.bars.iter().map(|bar| (bar.device, &bar.vbar));
        bare.chain(self.models.iter().flatten().map(|model| (model.device, model.bar.vbar())))
    }

    /// Weak handles, to see that nothing keeps a device.
    pub(crate) fn watch(&self) -> Vec<Weak<Device>> {
        self.devices.iter().map(|dev| Arc::downgrade(dev.runtime.device())).collect()
    }
}

impl Dev {
    fn new(sim: &Arc<Sim>, ordinal: DeviceOrdinal, config: &Config) -> Self {
        let options = options(config);
        let limit = options.budget_bytes.map(|bytes| bytes / P);
        let runtime = Runtime::open(sim.driver(), ordinal, options).unwrap();
        let context = runtime.device().context;
        sim.ctx_set_current(Some(context)).unwrap();
        // The program has one of its own: what is left in the context does not go with it.
        assert_eq!(sim.device_primary_ctx_retain(ordinal).unwrap(), context);
        sim.module_load().unwrap();
        let mut streams: Vec<Stream> = (0..3).map(|_| sim.stream_create().unwrap()).collect();
        streams.push(Stream::DEFAULT);
        let words = sim.mem_address_reserve(OWN, 0).unwrap();
        let frame = sim.mem_create(ordinal, OWN).unwrap();
        sim.mem_map(words, OWN, frame).unwrap();
        sim.mem_set_access(words, OWN, &[ordinal]).unwrap();
        sim.write_bytes(words, &vec![0; OWN as usize]).unwrap();
        let room = Arc::new(Room(AtomicU64::new(u64::MAX)));
        runtime.set_host_room(Arc::clone(&room) as _);
        Self {
            ordinal,
            runtime,
            context,
            streams,
            words,
            sums: Vec::new(),
            limit,
            room,
            allocator: None,
            others: Vec::new(),
            before: None,
            has_retired: false,
            has_owed: false,
        }
    }
}
