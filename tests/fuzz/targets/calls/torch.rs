//! What PyTorch calls. Its devices live as long as the process, so an input gives back what it
//! took, and its end looks at what is left.

use std::ffi::c_void;
use std::sync::{Mutex, Once};

use vbar::ffi::device::{VbarDevice, VbarDeviceOptions};
use vbar::ffi::sim::{VbarSim, VbarSimLive};
use vbar::ffi::torch::VbarTorchPool;
use vbar::ffi::torch::graph::VbarTorchGraph;
use vbar::ffi::torch::numbers::VbarTorchStatistics;

use super::abi::*;
use super::world::{PAGE_BYTES, World, check_violations, files, zeroed};
use super::{Bytes, Came, Op};

pub(super) const OPS: &[Op] = &[
    ("vbar_torch_malloc", |w, b| malloc(w, b)),
    ("vbar_torch_malloc", |w, b| malloc(w, b)),
    ("vbar_torch_malloc", |w, b| malloc(w, b)),
    ("vbar_torch_free", |w, b| free(w, b)),
    ("vbar_torch_free", |w, b| free(w, b)),
    ("vbar_torch_init", |_, b| {
        vbar_torch_init(b.one_of(&[0, 1, -1, i32::MAX]));
        None
    }),
    ("vbar_torch_reset", |_, _| {
        vbar_torch_reset();
        None
    }),
    ("vbar_torch_memory_fraction", |_, b| {
        let fraction = b.one_of(&[1.0, 0.5, 0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300]);
        vbar_torch_memory_fraction(fraction, ordinal(b));
        None
    }),
    ("vbar_torch_base_alloc", |w, b| {
        let pointer = pointer(w, b);
        let _ = vbar_torch_base_alloc(pointer, w.out(0, b));
        None
    }),
    ("vbar_torch_record_stream", |w, b| {
        let pointer = pointer(w, b);
        vbar_torch_record_stream(pointer, w.torch.stream(b));
        None
    }),
    ("vbar_torch_begin_pool", |w, b| begin_pool(w, b)),
    ("vbar_torch_end_pool", |_, b| {
        let (ordinal, pool) = (ordinal(b), pool(b));
        vbar_torch_end_pool(ordinal, pool);
        None
    }),
    ("vbar_torch_release_pool", |w, b| {
        let (ordinal, pool) = (ordinal(b), pool(b));
        vbar_torch_release_pool(ordinal, pool);
        if let Some(at) = w.torch.pools.iter().position(|open| *open == (ordinal, pool)) {
            w.torch.pools.remove(at);
        }
        None
    }),
    ("vbar_torch_segment_malloc", |w, b| {
        let (size, stream) = (World::size(b), w.torch.stream(b));
        let made = vbar_torch_segment_malloc(size as usize, ordinal(b), stream);
        if !made.is_null() {
            w.torch.segments.push(made);
        }
        None
    }),
    ("vbar_torch_segment_free", |w, b| {
        let made = w.torch.segments.pop().unwrap_or(std::ptr::without_provenance_mut(0xdead));
        vbar_torch_segment_free(made, 1, ordinal(b), w.torch.stream(b));
        None
    }),
    ("vbar_torch_configure", |w, b| {
        let place: *mut VbarDeviceOptions = w.growing(0, b);
        let mut options = VbarDeviceOptions { size: w.read::<usize>(0), ..usual() };
        match b.byte() % 8 {
            0 => options.ordinal = 1,
            1 => options.context = std::ptr::without_provenance_mut(0xdead),
            2 => options.page_bytes = b.one_of(&[0, 3, PAGE_BYTES, 2 * PAGE_BYTES]),
            3 => options.budget_bytes = World::size(b),
            4 => options.threads = b.one_of(&[2, 3, u32::MAX]),
            5 => options.driver = c"gpu".as_ptr(),
            _ => {}
        }
        w.write(0, 0, options);
        // No options are those of a real device.
        if place.is_null() { None } else { Some(vbar_torch_configure(place)) }
    }),
    ("vbar_torch_device", |w, b| {
        let status = vbar_torch_device(ordinal(b), w.out(0, b));
        if status == 0 {
            assert_eq!(vbar_device_close(w.read(0)), 0);
        }
        Some(status)
    }),
    ("vbar_torch_raise", |w, b| Some(vbar_torch_raise(w.out(0, b)))),
    ("vbar_torch_statistics", |w, b| Some(vbar_torch_statistics(ordinal(b), w.growing(0, b)))),
    ("vbar_torch_reset_peaks", |_, b| Some(vbar_torch_reset_peaks(ordinal(b)))),
    ("vbar_torch_reset_accumulated", |_, b| Some(vbar_torch_reset_accumulated(ordinal(b)))),
    ("vbar_torch_snapshot", |w, b| {
        let capacities = b.one_of(&[(0, 0), (4, 4), (100, 100), (1, 0), (usize::MAX, 1)]);
        let (segments, count) = (w.out(0, b), w.out(1, b));
        let (blocks, block_count) = (w.out(2, b), w.out(3, b));
        Some(vbar_torch_snapshot(
            ordinal(b),
            segments,
            capacities.0,
            count,
            blocks,
            capacities.1,
            block_count,
        ))
    }),
    ("vbar_torch_record_start", |w, b| {
        let written = files().written.path.as_ptr();
        let path = b.one_of(&[written, written, c"/nonexistent/x".as_ptr(), std::ptr::null()]);
        let ordinal = ordinal(b);
        let status = vbar_torch_record_start(ordinal, path);
        if status == 0 {
            w.torch.recorded.push(ordinal);
        }
        Some(status)
    }),
    ("vbar_torch_record_stop", |w, b| {
        let ordinal = ordinal(b);
        let status = vbar_torch_record_stop(ordinal, w.out(0, b));
        if status == 0 {
            w.torch.recorded.retain(|other| *other != ordinal);
        }
        Some(status)
    }),
    ("vbar_torch_graph_create", |w, b| {
        let (ordinal, stream) = (ordinal(b), w.torch.stream(b));
        let status = vbar_torch_graph_create(ordinal, stream, w.out(0, b));
        if status == 0 {
            w.torch.graphs.push(w.read(0));
        }
        Some(status)
    }),
    ("vbar_torch_graph_step", |w, b| step_graph(w, b)),
    ("vbar_torch_graph_step", |w, b| step_graph(w, b)),
    ("vbar_torch_graph_step", |w, b| step_graph(w, b)),
    ("vbar_torch_graph_use_stream", |w, b| {
        Some(vbar_torch_graph_use_stream(w.torch.graph(b), w.torch.stream(b)))
    }),
    ("vbar_torch_graph_statistics", |w, b| {
        Some(vbar_torch_graph_statistics(w.torch.graph(b), w.growing(0, b)))
    }),
    ("vbar_torch_graph_destroy", |w, b| {
        let graph = w.torch.graph(b);
        w.torch.graphs.retain(|other| *other != graph);
        Some(vbar_torch_graph_destroy(graph))
    }),
];

fn step_graph(w: &mut World, b: &mut Bytes<'_>) -> Came {
    let (graph, name) = (w.torch.graph(b), u64::from(b.byte() % 3));
    let step = b.one_of(&[1, 2, 3, 3, 4, 5, 6, 0, 7, u32::MAX]);
    Some(vbar_torch_graph_step(graph, step, name, w.out(0, b)))
}

/// What an input has of PyTorch's.
pub(super) struct Torch {
    /// An id of the first device.
    pub(super) device: VbarDevice,
    blocks: Vec<*mut c_void>,
    segments: Vec<*mut c_void>,
    pools: Vec<(i32, VbarTorchPool)>,
    recorded: Vec<i32>,
    graphs: Vec<VbarTorchGraph>,
    streams: [usize; 2],
}

fn usual() -> VbarDeviceOptions {
    VbarDeviceOptions {
        size: size_of::<VbarDeviceOptions>(),
        driver: c"sim:capacity=6M,granularity=64K,seed=9,on_violation=record,devices=2".as_ptr(),
        page_bytes: PAGE_BYTES,
        wait_timeout_ms: 5,
        headroom_bytes: u64::MAX,
        budget_bytes: 64 * PAGE_BYTES,
        ..zeroed()
    }
}

/// Both devices are opened before the first input, and each has two streams.
fn prepare() -> [usize; 2] {
    static MADE: Mutex<[usize; 2]> = Mutex::new([0; 2]);
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        super::models::prepare();
        let options = usual();
        assert_eq!(vbar_torch_configure(&raw const options), 0, "{}", super::message());
        let mut streams = MADE.lock().expect("nobody panics in there");
        for ordinal in [1, 0] {
            let mut device = VbarDevice { id: 0 };
            let status = vbar_torch_device(ordinal, &raw mut device);
            assert_eq!(status, 0, "{}", super::message());
            for stream in streams.iter_mut() {
                assert_eq!(vbar_sim_stream_create(device, stream), 0);
            }
            vbar_device_close(device);
        }
    });
    *MADE.lock().expect("nobody panics in there")
}

impl Torch {
    pub(super) fn new() -> Self {
        let streams = prepare();
        let options = usual();
        assert_eq!(vbar_torch_configure(&raw const options), 0, "{}", super::message());
        let mut device = VbarDevice { id: 0 };
        assert_eq!(vbar_torch_device(0, &raw mut device), 0, "{}", super::message());
        Self {
            device,
            blocks: Vec::new(),
            segments: Vec::new(),
            pools: Vec::new(),
            recorded: Vec::new(),
            graphs: Vec::new(),
            streams,
        }
    }

    fn stream(&self, bytes: &mut Bytes<'_>) -> usize {
        match bytes.byte() {
            choice @ 0..=159 => self.streams[usize::from(choice % 2)],
            160..=247 => 0,
            _ => [0xdead, usize::MAX, 2, 1][usize::from(bytes.byte() % 4)],
        }
    }

    fn graph(&self, bytes: &mut Bytes<'_>) -> VbarTorchGraph {
        match (usize::from(bytes.byte()), self.graphs.len()) {
            (choice @ 0..=240, count @ 1..) => self.graphs[choice % count],
            (choice, _) => VbarTorchGraph { id: [0, 1, u64::MAX][choice % 3] },
        }
    }

    pub(super) fn uses(&self, stream: usize) -> bool {
        self.streams.contains(&stream)
    }

    /// Gives everything back.
    pub(super) fn end(&mut self) {
        for ordinal in self.recorded.drain(..) {
            let mut count = 0;
            vbar_torch_record_stop(ordinal, &raw mut count);
        }
        for graph in self.graphs.drain(..) {
            assert_eq!(vbar_torch_graph_destroy(graph), 0, "{}", super::message());
        }
        for (ordinal, pool) in self.pools.drain(..) {
            vbar_torch_end_pool(ordinal, pool);
            vbar_torch_release_pool(ordinal, pool);
        }
        self.blocks.drain(..).for_each(|block| vbar_torch_free(block, 0, 0, 0));
        self.segments.drain(..).for_each(|segment| vbar_torch_segment_free(segment, 0, 0, 0));
        self.synchronize();
        let options = VbarDeviceOptions { wait_timeout_ms: 60_000, ..usual() };
        assert_eq!(vbar_torch_configure(&raw const options), 0, "{}", super::message());
        for ordinal in [0, 1] {
            vbar_torch_memory_fraction(1.0, ordinal);
        }
        vbar_torch_reset();
    }

    /// Everything that was enqueued on the first device has run.
    pub(super) fn synchronize(&self) {
        let mut device = VbarDevice { id: 0 };
        assert_eq!(vbar_torch_device(0, &raw mut device), 0);
        for stream in self.streams.into_iter().chain([0, 2]) {
            assert_eq!(vbar_sim_stream_synchronize(device, stream), 0, "{}", super::message());
        }
        vbar_device_close(device);
    }

    /// Nothing of the input is left on PyTorch's devices.
    pub(super) fn check(&self) {
        for ordinal in [0, 1] {
            let size = size_of::<VbarTorchStatistics>();
            let mut told = VbarTorchStatistics { size, ..zeroed() };
            assert_eq!(vbar_torch_statistics(ordinal, &raw mut told), 0);
            let left = (told.allocated_bytes.all.current, told.pending_bytes, told.pool_bytes);
            assert_eq!(left, (0, 0, 0), "PyTorch's device {ordinal}");
        }
        let mut device = VbarDevice { id: 0 };
        assert_eq!(vbar_torch_device(0, &raw mut device), 0);
        let mut sim = VbarSim { id: 0 };
        assert_eq!(vbar_sim_open(device, &raw mut sim), 0);
        check_violations(sim);
        let mut freed = 0;
        assert_eq!(vbar_device_refresh(device), 0, "{}", super::message());
        assert_eq!(vbar_device_trim(device, 0, &raw mut freed), 0, "{}", super::message());
        let mut live = VbarSimLive { size: size_of::<VbarSimLive>(), ..zeroed() };
        assert_eq!(vbar_sim_live(sim, &raw mut live), 0);
        assert_eq!((live.frame_count, live.mapping_count), (0, 0), "PyTorch's frames");
        vbar_sim_close(sim);
        vbar_device_close(device);
    }
}

fn ordinal(bytes: &mut Bytes<'_>) -> i32 {
    match bytes.byte() {
        0..=179 => 0,
        180..=239 => 1,
        choice => [2, -1, i32::MAX, i32::MIN, 127, 128][usize::from(choice) % 6],
    }
}

/// A request of no more than a few pages, or of more than there can be.
fn malloc(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (size, stream) = (World::size(bytes), world.torch.stream(bytes));
    let made = vbar_torch_malloc(size as usize, ordinal(bytes), stream);
    assert!(!world.torch.blocks.contains(&made) || made.is_null(), "given out twice");
    if !made.is_null() {
        world.torch.blocks.push(made);
    }
    None
}

/// A block that lives, or nearly.
fn pointer(world: &World, bytes: &mut Bytes<'_>) -> *mut c_void {
    let choice = usize::from(bytes.byte());
    let blocks = &world.torch.blocks;
    match choice {
        0..=219 if !blocks.is_empty() => blocks[choice % blocks.len()],
        220..=229 if !blocks.is_empty() => blocks[0].wrapping_byte_add(512),
        _ => std::ptr::without_provenance_mut([0, 1, 0xdead, usize::MAX][choice % 4]),
    }
}

fn free(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let pointer = pointer(world, bytes);
    let (size, ordinal) = (World::size(bytes) as usize, ordinal(bytes));
    vbar_torch_free(pointer, size, ordinal, world.torch.stream(bytes));
    world.torch.blocks.retain(|block| *block != pointer);
    if bytes.byte() > 230 {
        // Once more: it is nobody's by now.
        vbar_torch_free(pointer, size, ordinal, 0);
    }
    None
}

fn pool(bytes: &mut Bytes<'_>) -> VbarTorchPool {
    let choice = bytes.byte();
    VbarTorchPool { first: u64::from(choice % 3), second: u64::from(choice % 2) }
}

extern "C" fn manage(_data: *mut [usize; 2], _source: *const [usize; 2], _what: i32) -> bool {
    false
}

extern "C" fn admits(data: *const [usize; 2], _stream: *const usize) -> bool {
    !data.is_null()
}

/// What libstdc++ has for a function, a filter that admits all streams.
fn begin_pool(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (ordinal, pool) = (ordinal(bytes), pool(bytes));
    let mut words: [usize; 4] = [
        0,
        0,
        (manage as extern "C" fn(_, _, _) -> _ as *const c_void).expose_provenance(),
        (admits as extern "C" fn(_, _) -> _ as *const c_void).expose_provenance(),
    ];
    let filter: *mut c_void = match bytes.byte() {
        250..=251 => std::ptr::null_mut(),
        252..=253 => std::ptr::without_provenance_mut(1),
        254..=255 => {
            words[2] = 0;
            words.as_mut_ptr().cast()
        }
        _ => words.as_mut_ptr().cast(),
    };
    let before = super::message();
    vbar_torch_begin_pool(ordinal, pool, filter);
    let begun = words[2] == 0 && super::message() == before && (0..2).contains(&ordinal);
    if begun {
        world.torch.pools.push((ordinal, pool));
    }
    None
}
