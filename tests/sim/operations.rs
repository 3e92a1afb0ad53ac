//! What a seed drives: the operations as data, and how a seed draws them.

use vbar::driver::DriverCode;
use vbar::driver::sim::Verb;

use crate::lines::lines;

lines! {
    /// One step. Indexes are taken modulo what there is when the step is made.
    Operation {
        /// The next steps are another thread's: its context is current, and its streams are used.
        Thread "thread" { number },
        OpenBar "open_bar" { device, pages, sizes },
        CloseBar "close_bar" { bar, explicit },
        /// An allocation for use: written if need be, read else. `then` more steps happen while it
        /// is being filled or held.
        Fault "fault" { bar, piece, stream, commits, pins, then },
        FaultMany "fault_many" { device, count, picks, stream, then },
        Unpin "unpin" { pin, gone },
        /// Room for the bytes of an allocation; `how` says which wrong thing is asked for instead.
        PrepareSave "prepare_save" { bar, piece, how },
        /// An allocation is written, and saved when `then` more steps have happened.
        Save "save" { bar, piece, stream, pins, then },
        DropSave "drop_save" { bar, piece },
        FreeMemory "free_memory" { bar, pages },
        FreeDevice "free_device" { device, pages },
        Trim "trim" { device, pages },
        Refresh "refresh" { device },
        Prioritise "prioritise" { bar },
        Deprioritise "deprioritise" { bar },
        SetClass "set_class" { bar, class },
        SetFloor "set_floor" { bar, pages },
        SetWatermark "set_watermark" { bar, pages },
        /// One page less than `pages`; 0 lifts the limit.
        SetBudget "set_budget" { device, pages },
        SetHeadroom "set_headroom" { device, pages },
        EndOfRun "end_of_run" { bar, stream, forced },
        Invalidate "invalidate" { bar, piece },
        RetireStream "retire_stream" { device, stream },
        /// Another process takes so many pages of the device, or gives them back.
        Press "press" { device, pages },
        OthersFrame "others_frame" { device, take },
        OpenModel "open_model" { device, model },
        CloseModel "close_model" { model },
        Tensor "tensor" { model, tensor, stream, pins, then },
        Pass "pass" { model, stream },
        Prefetch "prefetch" { model, tensor },
        Hint "hint" { model, backwards },
        Drive "drive" { device },
        /// 0 the file is cut, 1 other bytes are written, 2 it cannot be read, else it can again.
        Damage "damage" { model, how },
        HostRoom "host_room" { device, pages },
        TrimHost "trim_host" { device, pages },
        TrimHostFrames "trim_host_frames" { device },
        Malloc "malloc" { device, size, stream },
        Free "free" { block, reader },
        EmptyCache "empty_cache" { device },
        Graph "graph" { device, stream, count, sizes, shared },
        Launch "launch" { graph },
        ResetGraph "reset_graph" { graph },
        /// Nothing more is done on the stream until all are released.
        HoldStream "hold_stream" { device, stream },
        ReleaseStreams "release_streams" {},
        Synchronise "synchronise" { device },
        /// After `nth` good calls of the verb `count` fail.
        Fail "fail" { verb, nth, count, code },
        Heal "heal" {},
    }
}

/// Codes of injected failures; the sticky one is drawn apart, since it ends everything.
pub(crate) const CODES: [DriverCode; 3] =
    [DriverCode::OUT_OF_MEMORY, DriverCode::NOT_READY, DriverCode::INVALID_VALUE];
pub(crate) const STICKY: DriverCode = DriverCode::ILLEGAL_ADDRESS;

/// Verbs that steps call most: half of the failures are theirs.
const BUSY: [Verb; 18] = [
    Verb::MemCreate,
    Verb::MemCreateHost,
    Verb::MemMap,
    Verb::MemSetAccess,
    Verb::MemUnmap,
    Verb::MemRelease,
    Verb::MemcpyHtodAsync,
    Verb::MemcpyDtohAsync,
    Verb::MemHostRegister,
    Verb::MemHostAlloc,
    Verb::MemGetInfo,
    Verb::EventCreate,
    Verb::EventRecord,
    Verb::EventQuery,
    Verb::StreamWaitEvent,
    Verb::StreamQuery,
    Verb::StreamIsCapturing,
    Verb::CtxRecordEvent,
];

/// A small random number generator: the same numbers in every run of a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn of(seed: u64) -> Self {
        Self(vbar::driver::kernel::mix(seed, 0) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }

    fn any(&mut self) -> u64 {
        self.below(1 << 16)
    }

    fn one_in(&mut self, count: u64) -> u64 {
        u64::from(self.below(count) == 0)
    }
}

/// What kinds of steps a seed has.
#[derive(Clone, Copy)]
pub(crate) struct Mix {
    pub(crate) devices: u64,
    pub(crate) models: u64,
    pub(crate) torch: u64,
    pub(crate) saves: u64,
    /// Verbs that give back may fail.
    pub(crate) may_lose: bool,
    /// The device may be lost.
    pub(crate) may_die: bool,
}

impl Mix {
    /// A step.
    pub(crate) fn draw(self, random: &mut Random) -> Operation {
        let weights = [36, 8, 8 * self.models.min(2), 12 * self.torch, 7, 10 * self.saves];
        let mut at = random.below(weights.iter().sum());
        let group = weights.iter().position(|weight| {
            let found = at < *weight;
            at = at.wrapping_sub(*weight);
            found
        });
        match group {
            Some(0) => self.draw_bare(random),
            Some(1) => self.draw_device(random),
            Some(2) => self.draw_model(random),
            Some(3) => self.draw_torch(random),
            Some(5) => Self::draw_save(random),
            _ => self.draw_failure(random),
        }
    }

    fn draw_bare(self, random: &mut Random) -> Operation {
        let (bar, stream) = (random.any(), random.any());
        match random.below(36) {
            0..19 => Operation::Fault {
                bar,
                piece: random.any(),
                stream,
                commits: 1 - random.one_in(8),
                pins: random.one_in(6),
                then: random.one_in(8) * random.below(4),
            },
            19..23 => Operation::Unpin { pin: random.any(), gone: random.one_in(4) },
            23 => Operation::FaultMany {
                device: random.below(self.devices),
                count: 1 + random.below(3),
                picks: random.any(),
                stream,
                then: random.one_in(4) * random.below(3),
            },
            24 => Operation::FreeMemory { bar, pages: random.below(4) },
            25 | 26 => Operation::Prioritise { bar },
            27 => Operation::Deprioritise { bar },
            28 => Operation::SetClass { bar, class: random.below(3) },
            29 => Operation::SetFloor { bar, pages: random.below(3) },
            30 => Operation::SetWatermark { bar, pages: random.below(6) },
            31 => Operation::EndOfRun { bar, stream, forced: random.one_in(3) },
            32 => Operation::CloseBar { bar, explicit: random.below(2) },
            33 => Operation::OpenBar {
                device: random.below(self.devices),
                pages: 1 + random.below(6),
                sizes: random.any(),
            },
            34 => Operation::Invalidate { bar, piece: random.any() },
            _ => Operation::Thread { number: random.below(4) },
        }
    }

    fn draw_save(random: &mut Random) -> Operation {
        let (bar, piece) = (random.any(), random.any());
        match random.below(16) {
            0 | 1 => Operation::PrepareSave { bar, piece, how: random.one_in(2) * random.below(5) },
            2..13 => Operation::Save {
                bar,
                piece,
                stream: random.any(),
                pins: random.one_in(6),
                then: random.one_in(4) * random.below(4),
            },
            _ => Operation::DropSave { bar, piece },
        }
    }

    fn draw_device(self, random: &mut Random) -> Operation {
        let device = random.below(self.devices);
        match random.below(16) {
            0..3 => Operation::SetBudget { device, pages: random.below(12) },
            3 => Operation::SetHeadroom { device, pages: random.below(4) },
            4 | 5 => Operation::Trim { device, pages: random.below(4) },
            6 => Operation::FreeDevice { device, pages: random.below(6) },
            7 => Operation::Refresh { device },
            8..10 => Operation::Press { device, pages: random.one_in(2) * random.below(64) },
            10 => Operation::OthersFrame { device, take: random.below(3) },
            11 => Operation::RetireStream { device, stream: random.any() },
            12 => Operation::HoldStream { device, stream: random.any() },
            13 | 14 => Operation::ReleaseStreams {},
            _ => Operation::Synchronise { device },
        }
    }

    fn draw_model(self, random: &mut Random) -> Operation {
        let (model, stream) = (random.below(self.models), random.any());
        let device = random.below(self.devices);
        match random.below(24) {
            0..12 => Operation::Tensor {
                model,
                tensor: random.any(),
                stream,
                pins: random.one_in(6),
                then: random.one_in(8) * random.below(3),
            },
            12 => Operation::Pass { model, stream },
            13 => Operation::Prefetch { model, tensor: random.any() },
            14 => Operation::Hint { model, backwards: random.below(2) },
            15..18 => Operation::Drive { device },
            18 => Operation::Damage { model, how: random.below(5) },
            19 => Operation::OpenModel { device, model },
            20 => Operation::CloseModel { model },
            21 => Operation::HostRoom { device, pages: random.below(32) },
            22 => Operation::TrimHost { device, pages: random.below(4) },
            _ => Operation::TrimHostFrames { device },
        }
    }

    fn draw_torch(self, random: &mut Random) -> Operation {
        let (device, stream) = (random.below(self.devices), random.any());
        match random.below(32) {
            0..14 => Operation::Malloc { device, size: random.any(), stream },
            14..27 => Operation::Free { block: random.any(), reader: random.below(6) },
            27 => Operation::EmptyCache { device },
            28 => Operation::Graph {
                device,
                stream,
                count: random.below(6),
                sizes: random.any(),
                shared: random.one_in(3),
            },
            29 | 30 => Operation::Launch { graph: random.any() },
            _ => Operation::ResetGraph { graph: random.any() },
        }
    }

    fn draw_failure(self, random: &mut Random) -> Operation {
        if random.below(3) == 0 {
            return Operation::Heal {};
        }
        let verb = loop {
            let verb = match random.below(2) {
                0 => BUSY[random.below(BUSY.len() as u64) as usize],
                _ => Verb::ALL[random.below(Verb::COUNT as u64) as usize],
            };
            if self.may_lose || !Verb::GIVING_BACK.contains(&verb) {
                break verb;
            }
        };
        let verb = Verb::ALL.iter().position(|known| *known == verb).unwrap_or(0) as u64;
        let sticky = self.may_die && random.below(6) == 0;
        let code = if sticky { STICKY } else { CODES[random.below(3) as usize] };
        let count = [1, 1, 5][random.below(3) as usize];
        Operation::Fail { verb, nth: random.below(3), count, code: code.0 as u64 }
    }
}
