//! The simulated device: streams, kernels, captures, and the troubles that a test asks for.

use std::ffi::{CStr, c_void};
use std::os::fd::AsRawFd;
use std::sync::{Mutex, OnceLock};

use vbar::ffi::device::VbarDevice;
use vbar::ffi::sim::VbarSim;
use vbar::ffi::sim_graph::VbarSimGraph;

use super::abi::*;
use super::world::{Kind, Live, PAGE_BYTES, STREAM_NONE, World, check_violations, files};
use super::{Bytes, Came, Op};

pub(super) const OPS: &[Op] = &[
    ("vbar_sim_open", |w, b| {
        // Nobody disturbs PyTorch's, which outlives the input.
        let device = w.device(b);
        if device.id == w.torch.device.id {
            return None;
        }
        let status = vbar_sim_open(device, w.out(0, b));
        if status == 0 {
            let sim = w.read::<VbarSim>(0).id;
            w.keep(Kind::Sim, sim);
        }
        Some(status)
    }),
    ("vbar_sim_close", |w, b| {
        let sim = sim(w, b);
        // Those that the end looks at stay.
        let kept = w.sims.values().any(|own| own.id == sim.id);
        if kept { None } else { Some(vbar_sim_close(sim)) }
    }),
    ("vbar_sim_stream_create", |w, b| create(w, b)),
    ("vbar_sim_stream_create", |w, b| create(w, b)),
    ("vbar_sim_stream_destroy", |w, b| destroy(w, b)),
    ("vbar_stream_retire", |w, b| {
        let (device, stream) = w.streams.draw_with_device(w, b);
        Some(vbar_stream_retire(device, stream))
    }),
    ("vbar_sim_stream_synchronize", |w, b| {
        let (device, stream) = w.streams.draw_with_device(w, b);
        Some(vbar_sim_stream_synchronize(device, stream))
    }),
    ("vbar_sim_stream_wait", |w, b| {
        let (device, stream) = w.streams.draw_with_device(w, b);
        Some(vbar_sim_stream_wait(device, stream, w.streams.draw(b)))
    }),
    ("vbar_sim_stream_hold", |w, b| {
        // Never those of CUDA: everything else waits for them.
        let own = w.streams.of_program(b)?;
        let status = vbar_sim_stream_hold(VbarDevice { id: own.0 }, own.1);
        if status == 0 {
            w.streams.held = Some(own);
        }
        Some(status)
    }),
    ("vbar_sim_stream_release", |w, b| {
        let (device, stream) = w.streams.draw_with_device(w, b);
        Some(vbar_sim_stream_release(device, stream))
    }),
    ("vbar_sim_launch_checksum", |w, b| {
        // Refused whatever is there: not aligned, or longer than memory.
        let stream = w.streams.draw(b);
        let (source, bytes, target) =
            b.one_of(&[(8, u64::MAX, 8), (9, 8, 8), (8, 8, 9), (u64::MAX, 8, 8)]);
        Some(vbar_sim_launch_checksum(w.device(b), source, bytes, target, 0, stream))
    }),
    ("vbar_sim_launch_pattern", |w, b| write(w, b)),
    ("vbar_sim_launch_pattern", |w, b| write(w, b)),
    ("vbar_sim_launch_sleep", |w, b| {
        let stream = w.streams.draw(b);
        let delay_us = u64::from(b.byte() % 32);
        Some(vbar_sim_launch_sleep(w.device(b), delay_us, stream))
    }),
    ("vbar_sim_copy_to_device", |w, b| copy_to_device(w, b)),
    ("vbar_sim_copy_to_host", |w, b| copy_to_host(w, b)),
    ("vbar_sim_copy_to_host", |w, b| copy_to_host(w, b)),
    ("vbar_device_read_file", |w, b| read_file(w, b)),
    ("vbar_device_write_file", |w, b| write_file(w, b)),
    ("vbar_device_copy_from_host", |w, b| copy_from_host(w, b)),
    ("vbar_device_lock_host", |w, b| lock(w, b)),
    ("vbar_device_unlock_host", |w, b| {
        // Nothing is locked there by now.
        let memory = b.one_of(&[std::ptr::null_mut(), target(), target().wrapping_byte_add(1)]);
        Some(vbar_device_unlock_host(w.device(b), memory))
    }),
    ("vbar_sim_peek", |w, b| {
        let sim = sim(w, b);
        if b.byte() > 200 {
            return Some(vbar_sim_peek(sim, World::size(b) & 0xFFFF, w.out(0, b), usize::MAX));
        }
        // What the host knows to be there.
        let live = live(w, b)?;
        let device = VbarDevice { id: live.device };
        if !usable(w, &live) || vbar_sim_stream_synchronize(device, live.stream) != 0 {
            return None;
        }
        let bytes = live.bytes.min(60_000) as usize;
        Some(vbar_sim_peek(sim, live.address, w.out(0, b), bytes))
    }),
    ("vbar_sim_checksum", |w, b| {
        let bytes = b.one_of(&[0, 1, 7, 8, 1000]);
        let base: *mut c_void = w.out(0, &mut Bytes(&[]));
        let _ = vbar_sim_checksum(base, bytes);
        None
    }),
    ("vbar_sim_pattern", |w, b| {
        let bytes = b.one_of(&[0, 1, 7, 8, 1000, 60_000, usize::MAX]);
        Some(vbar_sim_pattern(w.out(0, b), bytes, 1))
    }),
    ("vbar_sim_set_outside_bytes", |w, b| {
        let sim = sim(w, b);
        Some(vbar_sim_set_outside_bytes(sim, World::size(b)))
    }),
    ("vbar_sim_fail", |w, b| fail(w, b)),
    ("vbar_sim_fail", |w, b| fail(w, b)),
    ("vbar_sim_fail_rate", |w, b| {
        let sim = sim(w, b);
        let rate = b.one_of(&[0.0, 0.01, 0.1, 1.0, -1.0, f64::NAN, f64::INFINITY]);
        w.disturbed |= rate > 0.0;
        Some(vbar_sim_fail_rate(sim, rate, u64::from(b.byte())))
    }),
    ("vbar_sim_heal", |w, b| Some(vbar_sim_heal(sim(w, b)))),
    ("vbar_sim_heal", |w, b| Some(vbar_sim_heal(sim(w, b)))),
    ("vbar_sim_lose_device", |w, b| {
        // Rarely: not much can happen afterwards.
        let sim = if b.byte() > 200 { sim(w, b) } else { VbarSim { id: 0 } };
        w.disturbed |= sim.id != 0;
        Some(vbar_sim_lose_device(sim, b.one_of(&[700, 0, 1, 719, -1, i32::MIN])))
    }),
    ("vbar_sim_calls", |w, b| {
        let (sim, verb) = (sim(w, b), verb(b));
        Some(vbar_sim_calls(sim, verb, w.out(0, b)))
    }),
    ("vbar_sim_live", |w, b| Some(vbar_sim_live(sim(w, b), w.growing(0, b)))),
    ("vbar_sim_violation_count", |w, b| {
        w.sims.values().for_each(|sim| check_violations(*sim));
        Some(vbar_sim_violation_count(sim(w, b), w.out(0, b)))
    }),
    ("vbar_sim_violation", |w, b| {
        let capacity = b.one_of(&[0, 1, 100, usize::MAX]);
        Some(vbar_sim_violation(sim(w, b), World::size(b), w.out(0, b), capacity))
    }),
    ("vbar_sim_stream_begin_capture", |w, b| {
        let (device, stream) = w.streams.of_program(b)?;
        // Another mode than the relaxed one denies the library calls; a global one others too.
        let mode = b.one_of(&[2, 2, 2, 1, 3, u32::MAX]);
        let status = vbar_sim_stream_begin_capture(VbarDevice { id: device }, stream, mode);
        if status == 0 {
            w.streams.capturing.push((device, stream));
            w.disturbed |= mode != 2;
        }
        Some(status)
    }),
    ("vbar_sim_stream_end_capture", |w, b| {
        let (device, stream) = w.streams.capturing.pop()?;
        let status = vbar_sim_stream_end_capture(VbarDevice { id: device }, stream, w.out(0, b));
        match status {
            0 => {
                let graph = w.read::<VbarSimGraph>(0).id;
                w.keep(Kind::Graph, graph);
            }
            // An argument was refused before the capture was ended.
            1 | 2 => w.streams.capturing.push((device, stream)),
            _ => {}
        }
        Some(status)
    }),
    ("vbar_sim_graph_launch", |w, b| {
        let (graph, stream) = (VbarSimGraph { id: w.id(Kind::Graph, b) }, w.streams.draw(b));
        Some(vbar_sim_graph_launch(w.device(b), graph, stream))
    }),
    ("vbar_sim_graph_destroy", |w, b| {
        Some(vbar_sim_graph_destroy(VbarSimGraph { id: w.id(Kind::Graph, b) }))
    }),
];

/// The program's streams: the id of their device, and the handle.
#[derive(Default)]
pub(super) struct Streams {
    made: Vec<(u64, usize)>,
    pub(super) held: Option<(u64, usize)>,
    pub(super) capturing: Vec<(u64, usize)>,
}

impl Streams {
    /// A stream of any device, one of CUDA's, or none; rarely what is no stream.
    pub(super) fn draw(&self, bytes: &mut Bytes<'_>) -> usize {
        match (bytes.byte(), self.made.len()) {
            (choice @ 0..=179, count @ 1..) => self.made[usize::from(choice) % count].1,
            (0..=219, _) => 0,
            (220..=239, _) => STREAM_NONE,
            (240..=245, _) => 2,
            (246..=251, _) => 1,
            (choice, _) => [0xdead, 3, usize::MAX - 1][usize::from(choice) % 3],
        }
    }

    fn draw_with_device(&self, world: &World, bytes: &mut Bytes<'_>) -> (VbarDevice, usize) {
        match self.of_program(bytes) {
            Some((device, stream)) if bytes.byte() < 200 => (VbarDevice { id: device }, stream),
            _ => (world.device(bytes), self.draw(bytes)),
        }
    }

    pub(super) fn has(&self, device: VbarDevice) -> bool {
        self.made.iter().any(|(other, _)| *other == device.id)
    }

    fn of_program(&self, bytes: &mut Bytes<'_>) -> Option<(u64, usize)> {
        let at = usize::from(bytes.byte());
        (!self.made.is_empty()).then(|| self.made[at % self.made.len()])
    }

    /// No stream is held any more.
    pub(super) fn let_go(&mut self) {
        if let Some((device, stream)) = self.held.take() {
            vbar_sim_stream_release(VbarDevice { id: device }, stream);
        }
    }

    pub(super) fn end_captures(&mut self) {
        for (device, stream) in std::mem::take(&mut self.capturing) {
            let mut graph = VbarSimGraph { id: 0 };
            vbar_sim_stream_end_capture(VbarDevice { id: device }, stream, &raw mut graph);
            vbar_sim_graph_destroy(graph);
        }
    }

    /// Everything that was enqueued has run.
    pub(super) fn synchronize(&self) {
        for (device, stream) in &self.made {
            for stream in [*stream, 0, 2] {
                vbar_sim_stream_synchronize(VbarDevice { id: *device }, stream);
            }
        }
    }

    pub(super) fn destroy(&mut self) {
        for (device, stream) in std::mem::take(&mut self.made) {
            vbar_stream_retire(VbarDevice { id: device }, stream);
            vbar_sim_stream_destroy(VbarDevice { id: device }, stream);
        }
    }
}

fn sim(world: &World, bytes: &mut Bytes<'_>) -> VbarSim {
    let choice = usize::from(bytes.byte());
    match world.sims.len() {
        count if choice < 200 && count > 0 => {
            *world.sims.values().nth(choice % count).expect("there are so many")
        }
        _ => VbarSim { id: world.id(Kind::Sim, bytes) },
    }
}

fn live(world: &World, bytes: &mut Bytes<'_>) -> Option<Live> {
    let at = usize::from(bytes.byte());
    (!world.tokens.is_empty()).then(|| world.tokens[at % world.tokens.len()])
}

fn create(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let device = world.device(bytes);
    // PyTorch's device stays; its streams are those that its end knows.
    if device.id == world.torch.device.id {
        return None;
    }
    let status = vbar_sim_stream_create(device, world.out(0, bytes));
    if status == 0 {
        let stream = world.read(0);
        world.streams.made.push((device.id, stream));
    }
    Some(status)
}

fn destroy(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (device, stream) = world.streams.of_program(bytes)?;
    let used = world.tokens.iter().any(|live| live.stream == stream)
        || world.torch.uses(stream)
        || world.streams.capturing.iter().any(|other| other.1 == stream);
    // A stream with that number may be another device's too.
    if used || world.streams.made.iter().filter(|other| other.1 == stream).count() > 1 {
        return None;
    }
    if vbar_stream_retire(VbarDevice { id: device }, stream) != 0 {
        return None;
    }
    let status = vbar_sim_stream_destroy(VbarDevice { id: device }, stream);
    if status == 0 {
        world.streams.made.retain(|other| other.1 != stream);
    }
    Some(status)
}

/// Whether what a token says may be used by a kernel of the program now: its stream is one that
/// takes work which is not to be repeated.
fn usable(world: &World, live: &Live) -> bool {
    let captured = world.streams.capturing.iter().any(|(_, stream)| *stream == live.stream);
    let of_its_device = live.stream <= 2
        || world.streams.made.iter().any(|(device, stream)| {
            *stream == live.stream && world.contexts.get(device) == world.contexts.get(&live.device)
        });
    of_its_device && !captured && live.bytes >= 8 && world.contexts.contains_key(&live.device)
}

fn note_use(world: &mut World, live: &Live) {
    for own in world.tokens.iter_mut().filter(|own| own.token == live.token) {
        own.is_used = true;
    }
}

/// A kernel of the program writes what is to be written.
fn write(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let live = live(world, bytes)?;
    if !live.to_write || !usable(world, &live) {
        return None;
    }
    let device = VbarDevice { id: live.device };
    let length = live.bytes & !7;
    note_use(world, &live);
    Some(vbar_sim_launch_pattern(device, live.address, length, 1, 0, live.stream))
}

/// Where copies to the host go: nobody looks.
fn target() -> *mut c_void {
    static TARGET: OnceLock<Mutex<&'static mut [u8]>> = OnceLock::new();
    let target = TARGET.get_or_init(|| Mutex::new(vec![0; 32 * PAGE_BYTES as usize].leak()));
    target.lock().expect("nobody panics in there").as_mut_ptr().cast()
}

/// A copy of the program reads what is promised to be there.
fn copy_to_host(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let live = live(world, bytes)?;
    if !live.to_read || !usable(world, &live) || live.bytes > 32 * PAGE_BYTES {
        return None;
    }
    let (device, length) = (VbarDevice { id: live.device }, live.bytes as usize);
    note_use(world, &live);
    Some(vbar_sim_copy_to_host(device, target(), live.address, length, live.stream))
}

fn copy_to_device(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    static SOURCE: [u8; 4096] = [3; 4096];
    if bytes.byte() > 240 {
        let length = bytes.one_of(&[usize::MAX, 8]);
        return Some(vbar_sim_copy_to_device(world.device(bytes), 8, std::ptr::null(), length, 0));
    }
    let live = live(world, bytes)?;
    if !live.to_write || !usable(world, &live) {
        return None;
    }
    let length = live.bytes.min(4096) as usize;
    let source = SOURCE.as_ptr().cast();
    note_use(world, &live);
    let device = VbarDevice { id: live.device };
    Some(vbar_sim_copy_to_device(device, live.address, source, length, live.stream))
}

/// Reads of a file to what is to be written, or of nothing that can be read.
fn read_file(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    if bytes.byte() > 200 {
        let (offset, length) = bytes.one_of(&[(0, u64::MAX), (u64::MAX, 8), (u64::MAX, 0)]);
        let descriptor = bytes.one_of(&[-1, i32::MIN]);
        let device = world.device(bytes);
        return Some(vbar_device_read_file(device, descriptor, offset, length, 8, STREAM_NONE));
    }
    let live = live(world, bytes)?;
    if !live.to_write || !usable(world, &live) {
        return None;
    }
    note_use(world, &live);
    let device = VbarDevice { id: live.device };
    let length = live.bytes.min(4 * PAGE_BYTES);
    let file = files().raw.file.as_raw_fd();
    let offset = bytes.one_of(&[0, 0, 1, 4 * PAGE_BYTES]);
    Some(vbar_device_read_file(device, file, offset, length, live.address, live.stream))
}

fn write_file(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let live = live(world, bytes)?;
    if !live.to_read || !usable(world, &live) {
        return None;
    }
    note_use(world, &live);
    let device = VbarDevice { id: live.device };
    let file = bytes.one_of(&[files().written.file.as_raw_fd(), -1]);
    Some(vbar_device_write_file(device, file, 0, live.bytes, live.address, live.stream))
}

fn copy_from_host(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    static SOURCE: [u8; 4096] = [5; 4096];
    let live = live(world, bytes)?;
    if !live.to_write || !usable(world, &live) {
        return None;
    }
    note_use(world, &live);
    let device = VbarDevice { id: live.device };
    let memory = bytes.one_of(&[SOURCE.as_ptr().cast(), std::ptr::null()]);
    let length = live.bytes.min(4096);
    Some(vbar_device_copy_from_host(device, memory, length, live.address, live.stream))
}

/// Locks memory and ends that at once, so that no lock outlives the input.
fn lock(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let device = world.device(bytes);
    let memory = bytes.one_of(&[target(), target(), std::ptr::null_mut()]);
    let length = bytes.one_of(&[PAGE_BYTES, 8 * PAGE_BYTES, 0, u64::MAX, 1 << 63]);
    let status = vbar_device_lock_host(device, memory, length);
    if status == 0 {
        let ended = vbar_device_unlock_host(device, memory);
        assert!(ended == 0 || world.disturbed, "{}", super::message());
    }
    Some(status)
}

fn verb(bytes: &mut Bytes<'_>) -> *const std::ffi::c_char {
    const VERBS: [&CStr; 16] = [
        c"mem_map",
        c"mem_create",
        c"mem_set_access",
        c"mem_unmap",
        c"mem_release",
        c"event_record",
        c"event_create",
        c"stream_wait_event",
        c"memcpy_htod_async",
        c"mem_address_reserve",
        c"event_query",
        c"mem_host_alloc",
        c"cuMemMap",
        c"",
        c"mem_mop",
        c"\xff",
    ];
    match bytes.byte() {
        255 => std::ptr::null(),
        choice => VERBS[usize::from(choice) % VERBS.len()].as_ptr(),
    }
}

/// Some calls of a verb fail: those of tests that retry or give up, none that hang.
fn fail(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (sim, verb) = (sim(world, bytes), verb(bytes));
    let (skip, count) = (u64::from(bytes.byte() % 8), u64::from(bytes.byte() % 4));
    let code = bytes.one_of(&[2, 600, 1, 999, 0, -1, 700]);
    let status = vbar_sim_fail(sim, verb, skip, count, code);
    world.disturbed |= status == 0;
    Some(status)
}
