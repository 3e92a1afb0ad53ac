//! Devices, VBARs, allocations and tokens.

use std::ffi::{CStr, c_char, c_void};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use vbar::ffi::allocation::VbarAllocation;
use vbar::ffi::bar::{VbarBar, VbarBindSegment};
use vbar::ffi::device::{VbarDevice, VbarDeviceInfo, VbarDeviceOptions};
use vbar::ffi::fault::{VbarFault, VbarRange};
use vbar::ffi::model::VbarModel;
use vbar::ffi::sim::VbarSim;
use vbar::ffi::sim_graph::VbarSimGraph;
use vbar::ffi::source::VbarBindSource;
use vbar::ffi::token::VbarToken;

use super::abi::*;
use super::world::{Kind, Live, PAGE_BYTES, RELEASED, World, files, path, zeroed};
use super::{Bytes, Came, Op};

pub(super) const OPS: &[Op] = &[
    ("vbar_device_open", |w, b| open(w, b)),
    ("vbar_device_close", |w, b| {
        // Its streams could not be destroyed any more.
        let device = w.device(b);
        if w.streams.has(device) { None } else { Some(vbar_device_close(device)) }
    }),
    ("vbar_device_info", |w, b| Some(vbar_device_info(w.device(b), w.growing(0, b)))),
    ("vbar_device_set_budget", |w, b| Some(vbar_device_set_budget(w.device(b), World::size(b)))),
    ("vbar_device_set_headroom", |w, b| {
        Some(vbar_device_set_headroom(w.device(b), World::size(b)))
    }),
    ("vbar_device_budget", |w, b| Some(vbar_device_budget(w.device(b), w.out(0, b), w.out(1, b)))),
    ("vbar_device_refresh", |w, b| Some(vbar_device_refresh(w.device(b)))),
    ("vbar_device_trim", |w, b| Some(vbar_device_trim(w.device(b), World::size(b), w.out(0, b)))),
    ("vbar_device_trim_host", |w, b| {
        Some(vbar_device_trim_host(w.device(b), World::size(b), w.out(0, b)))
    }),
    ("vbar_device_trim_host_frames", |w, b| {
        Some(vbar_device_trim_host_frames(w.device(b), w.out(0, b)))
    }),
    ("vbar_device_free_memory", |w, b| {
        Some(vbar_device_free_memory(w.device(b), World::size(b), w.out(0, b)))
    }),
    ("vbar_device_statistics", |w, b| Some(vbar_device_statistics(w.device(b), w.growing(0, b)))),
    ("vbar_device_fault_many", |w, b| fault_many(w, b)),
    ("vbar_device_fault_many", |w, b| fault_many(w, b)),
    ("vbar_bar_create", |w, b| create(w, b)),
    ("vbar_bar_create", |w, b| create(w, b)),
    ("vbar_bar_destroy", |w, b| {
        let bar = bar(w, b);
        if w.is_torchs(bar.id) { None } else { Some(vbar_bar_destroy(bar)) }
    }),
    ("vbar_bar_destroy_wait", |w, b| {
        let bar = bar(w, b);
        if w.is_torchs(bar.id) { None } else { Some(vbar_bar_destroy_wait(bar)) }
    }),
    ("vbar_bar_info", |w, b| Some(vbar_bar_info(bar(w, b), w.growing(0, b)))),
    ("vbar_bar_bind", |w, b| bind(w, b)),
    ("vbar_bar_bind", |w, b| bind(w, b)),
    ("vbar_bar_prioritise", |w, b| Some(vbar_bar_prioritise(bar(w, b)))),
    ("vbar_bar_deprioritise", |w, b| Some(vbar_bar_deprioritise(bar(w, b)))),
    ("vbar_bar_set_class", |w, b| {
        Some(vbar_bar_set_class(bar(w, b), b.one_of(&[0, 1, -1, i32::MAX, i32::MIN])))
    }),
    ("vbar_bar_set_floor", |w, b| Some(vbar_bar_set_floor(bar(w, b), pages(b)))),
    ("vbar_bar_set_watermark", |w, b| Some(vbar_bar_set_watermark(bar(w, b), pages(b)))),
    ("vbar_bar_free_memory", |w, b| {
        Some(vbar_bar_free_memory(bar(w, b), World::size(b), w.out(0, b)))
    }),
    ("vbar_bar_end_of_run", |w, b| end_of_run(w, b)),
    ("vbar_bar_residency", |w, b| residency(w, b)),
    ("vbar_bar_fault", |w, b| fault(w, b)),
    ("vbar_bar_fault", |w, b| fault(w, b)),
    ("vbar_bar_fault", |w, b| fault(w, b)),
    ("vbar_bar_allocate", |w, b| allocate(w, b)),
    ("vbar_allocation_place", |w, b| {
        let allocation = allocation(w, b);
        Some(vbar_allocation_place(allocation, w.out(0, b), w.out(1, b), w.out(2, b)))
    }),
    ("vbar_allocation_fault", |w, b| fault_allocation(w, b, vbar_allocation_fault)),
    ("vbar_allocation_fault", |w, b| fault_allocation(w, b, vbar_allocation_fault)),
    ("vbar_allocation_fault_wait", |w, b| fault_allocation(w, b, vbar_allocation_fault_wait)),
    ("vbar_allocation_invalidate", |w, b| {
        // Tokens are given back first.
        let allocation = allocation(w, b);
        let held = w.tokens.iter().any(|live| live.of == allocation.id);
        if held { None } else { Some(vbar_allocation_invalidate(allocation)) }
    }),
    ("vbar_token_unpin", |w, b| unpin(w, b)),
    ("vbar_token_unpin", |w, b| unpin(w, b)),
    ("vbar_tokens_unpin", |w, b| unpin_many(w, b)),
    ("vbar_token_also_used_on", |w, b| {
        let token = token(w, b);
        Some(vbar_token_also_used_on(token, w.streams.draw(b)))
    }),
    ("vbar_token_commit", |w, b| commit(w, b)),
    ("vbar_flag_raise", |w, b| {
        // Not aligned is left alone, as NULL is.
        vbar_flag_raise(w.out(0, b));
        None
    }),
];

fn bar(world: &World, bytes: &mut Bytes<'_>) -> VbarBar {
    VbarBar { id: world.id(Kind::Bar, bytes) }
}

fn allocation(world: &World, bytes: &mut Bytes<'_>) -> VbarAllocation {
    VbarAllocation { id: world.id(Kind::Allocation, bytes) }
}

fn token(world: &World, bytes: &mut Bytes<'_>) -> VbarToken {
    VbarToken { id: world.id(Kind::Token, bytes) }
}

fn pages(bytes: &mut Bytes<'_>) -> u32 {
    match bytes.byte() {
        choice @ 0..=249 => u32::from(choice) % 20,
        choice => u32::MAX - u32::from(choice % 2),
    }
}

/// Options as a program that works well has them.
fn usual(driver: *const c_char) -> VbarDeviceOptions {
    VbarDeviceOptions {
        size: size_of::<VbarDeviceOptions>(),
        driver,
        page_bytes: PAGE_BYTES,
        wait_timeout_ms: 5,
        headroom_bytes: u64::MAX,
        ..zeroed()
    }
}

/// Draws what differs from the usual options.
pub(super) fn vary(options: &mut VbarDeviceOptions, bytes: &mut Bytes<'_>) {
    let flags = bytes.byte();
    if flags & 1 != 0 {
        options.budget_bytes = World::size(bytes);
    }
    if flags & 2 != 0 {
        options.eviction = bytes.one_of(&[1, 0, 1, 2, u32::MAX]);
        options.context_waits = bytes.one_of(&[1, 0, 1, 2, u32::MAX]);
    }
    if flags & 4 != 0 {
        options.host_mapped = bytes.one_of(&[1, 1, 1, 0, 2]);
        options.prefer = bytes.one_of(&[1, 2, 0, 1, 2, 3]);
    }
    if flags & 8 != 0 {
        options.poison = bytes.one_of(&[1, 1, 0, 2]);
        options.host_allowance_bytes = World::size(bytes);
    }
    if flags & 0x18 == 0x18 {
        options.budget_ppm = bytes.one_of(&[1, 500_000, 1_000_000, 3_000_000, u32::MAX]);
    }
    if flags & 16 != 0 {
        options.staging_slot_count = bytes.one_of(&[1, 2, 64, 65, u32::MAX]);
    }
    if flags & 0xE0 == 0xE0 {
        match bytes.byte() % 8 {
            0 => options.page_bytes = World::size(bytes),
            1 => options.headroom_bytes = World::size(bytes),
            2 => options.ordinal = bytes.one_of(&[1, 2, 64, u32::MAX]),
            3 => options.context = std::ptr::without_provenance_mut(0xdead),
            4 => options.threads = bytes.one_of(&[1, 2, 3, u32::MAX]),
            5 => options.driver = bytes.one_of(&ODD_DRIVERS).as_ptr(),
            _ => options.page_bytes = 0,
        }
    }
}

const ODD_DRIVERS: [&CStr; 8] = [
    c"",
    c"gpu",
    c"sim:",
    c"sim:capacity=0",
    c"sim:granularity=3",
    c"\xff",
    c"auto:1",
    c"sim:capacity=1,granularity=4K,on_violation=record",
];

/// A device as most programs open it.
pub(super) fn open_usual(world: &mut World, bytes: &mut Bytes<'_>) {
    let mut options = usual(world.driver(bytes));
    let flags = bytes.byte();
    options.budget_bytes = u64::from(flags % 16) * PAGE_BYTES;
    options.context_waits = u32::from(flags & 16 != 0);
    options.host_mapped = u32::from(flags & 32 != 0);
    options.eviction = u32::from(flags & 64 != 0);
    options.poison = u32::from(flags & 128 != 0);
    let mut device = VbarDevice { id: 0 };
    let status = vbar_device_open(&raw const options, &raw mut device);
    super::check_status("vbar_device_open", Some(status));
    if status == 0 {
        keep_device(world, device);
    }
}

fn keep_device(world: &mut World, device: VbarDevice) {
    world.keep(Kind::Device, device.id);
    let mut sim = VbarSim { id: 0 };
    // A real one is an `UNSUPPORTED`: there is none here.
    assert_eq!(vbar_sim_open(device, &raw mut sim), 0, "{}", super::message());
    world.sims.insert(device.id, sim);
    let mut info = VbarDeviceInfo { size: size_of::<VbarDeviceInfo>(), ..zeroed() };
    // A failure that was asked for may be its first call.
    if vbar_device_info(device, &raw mut info) == 0 {
        world.contexts.insert(device.id, info.context.expose_provenance());
    }
}

fn open(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let place: *mut VbarDeviceOptions = world.growing(0, bytes);
    let size = world.read::<usize>(0);
    let mut options = VbarDeviceOptions { size, ..usual(world.driver(bytes)) };
    vary(&mut options, bytes);
    world.write(0, 0, options);
    let out = world.out(1, bytes);
    // No options are those of a real device.
    if place.is_null() {
        return None;
    }
    let status = vbar_device_open(place, out);
    if status == 0 {
        let device = world.read::<VbarDevice>(1);
        // Whatever time it was opened with: nothing waits for long.
        assert_eq!(vbar_device_set_wait_timeout(device, 5), 0);
        keep_device(world, device);
    }
    Some(status)
}

fn create(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let device = world.device(bytes);
    let status = vbar_bar_create(device, World::size(bytes), world.out(0, bytes));
    if status == 0 {
        let id = world.read::<VbarBar>(0).id;
        world.keep(Kind::Bar, id);
        world.owners.insert(id, (id, device.id));
    }
    Some(status)
}

extern "C" fn released(_context: *mut c_void) {
    RELEASED.fetch_add(1, Ordering::SeqCst);
}

/// Memory that lives for ever and is never written.
static MEMORY: [u8; 3 * PAGE_BYTES as usize] = [7; 3 * PAGE_BYTES as usize];

fn source(bytes: &mut Bytes<'_>) -> VbarBindSource {
    let mut source = VbarBindSource { ..zeroed() };
    match bytes.byte() {
        0..=99 => {
            source.memory = MEMORY.as_ptr().cast();
            source.memory_bytes = MEMORY.len() as u64;
            source.release = Some(released);
        }
        100..=179 => source.path = files().raw.path.as_ptr(),
        180..=199 => source.descriptor = files().raw.file.as_raw_fd(),
        200..=209 => source.descriptor = bytes.one_of(&[-1, i32::MAX, i32::MIN]),
        210..=219 => source.path = path(bytes),
        220..=229 => {
            source.path = files().raw.path.as_ptr();
            source.release = Some(released);
        }
        _ => {
            source.memory = MEMORY.as_ptr().cast();
            source.memory_bytes = bytes.one_of(&[0, u64::MAX, 1 << 63, 1]);
            source.host_lock = bytes.one_of(&[0, 1, 2]);
            source.release = Some(released);
        }
    }
    source
}

fn bind(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    const COUNT: usize = 6;
    let bar = bar(world, bytes);
    let (sources, segments) = (usize::from(bytes.byte()) % 4, usize::from(bytes.byte()) % COUNT);
    let mut leases = 0;
    for at in 0..sources {
        let source = source(bytes);
        leases += u32::from(source.release.is_some());
        world.write(0, at, source);
    }
    let mut next = 0;
    for at in 0..segments {
        let mut segment = VbarBindSegment {
            bar_offset: next,
            source_offset: 0,
            bytes: u64::from(bytes.byte()) * 300,
            source: u32::from(bytes.byte()) % sources.max(1) as u32,
            encoding: 0,
        };
        next += segment.bytes;
        if bytes.byte() > 220 {
            match bytes.byte() % 4 {
                0 => segment.bar_offset = World::size(bytes),
                1 => segment.source_offset = World::size(bytes),
                2 => segment.bytes = World::size(bytes),
                _ => (segment.source, segment.encoding) = (u32::MAX, u32::from(bytes.byte())),
            }
        }
        world.write(1, at, segment);
    }
    let array: *const VbarBindSource = world.out(0, bytes);
    let is_read = array.is_aligned() && !array.is_null() || sources == 0;
    let segments_array = world.out(1, bytes);
    let status = vbar_bar_bind(bar, array, sources, segments_array, segments);
    world.leases += if is_read { leases } else { 0 };
    Some(status)
}

fn end_of_run(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (bar, stream) = (bar(world, bytes), world.streams.draw(bytes));
    let mut held = bytes.one_of(&[0, 0, 1, 1, 2, u32::MAX]);
    // Pins that are taken by force end behind the work on that stream alone.
    let elsewhere = |live: &Live| live.bar == bar.id && live.is_used && live.stream != stream;
    if held == 1 && world.tokens.iter().any(elsewhere) {
        held = 0;
    }
    let status = vbar_bar_end_of_run(bar, stream, held, world.out(0, bytes));
    if held == 1 {
        for live in world.tokens.iter_mut().filter(|live| live.bar == bar.id) {
            (live.to_write, live.to_read) = (false, false);
        }
    }
    Some(status)
}

fn residency(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    // A place has room for so many.
    let count = bytes.one_of(&[0, 1, 8, 20, 2000, 4000, usize::MAX, usize::MAX / 16]);
    let (bar, first) = (bar(world, bytes), pages(bytes));
    Some(vbar_bar_residency(bar, first, count, world.out(0, bytes)))
}

fn fault(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (bar, stream) = (bar(world, bytes), world.streams.draw(bytes));
    let (offset, length) = (World::size(bytes), World::size(bytes));
    let status = vbar_bar_fault(bar, offset, length, stream, world.out(0, bytes));
    if status == 0 {
        world.keep_fault(world.read(0), bar.id, stream, false);
    }
    Some(status)
}

fn fault_many(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let (device, stream) = (world.device(bytes), world.streams.draw(bytes));
    let count = usize::from(bytes.byte()) % 5;
    let mut bars = Vec::new();
    for at in 0..count {
        let range = VbarRange {
            bar: bar(world, bytes),
            bar_offset: World::size(bytes),
            bytes: World::size(bytes),
        };
        bars.push(range.bar.id);
        world.write(0, at, range);
    }
    let told = if bytes.byte() > 250 { usize::MAX - 3 } else { count };
    let ranges = world.out(0, bytes);
    let status = vbar_device_fault_many(device, ranges, told, stream, world.out(1, bytes));
    if status == 0 {
        let faults: [VbarFault; 5] = world.read(1);
        for (fault, bar) in faults.into_iter().zip(bars) {
            world.keep_fault(fault, bar, stream, false);
        }
    }
    Some(status)
}

fn allocate(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let bar = bar(world, bytes);
    let status = vbar_bar_allocate(bar, World::size(bytes), world.out(0, bytes));
    if status == 0 {
        let id = world.read::<VbarAllocation>(0).id;
        world.keep(Kind::Allocation, id);
        let owner = world.owner(bar.id);
        world.owners.insert(id, owner);
    }
    Some(status)
}

type Fault = extern "C" fn(VbarAllocation, usize, *mut VbarFault) -> i32;

fn fault_allocation(world: &mut World, bytes: &mut Bytes<'_>, call: Fault) -> Came {
    let (allocation, stream) = (allocation(world, bytes), world.streams.draw(bytes));
    let status = call(allocation, stream, world.out(0, bytes));
    if status == 0 {
        world.keep_fault(world.read(0), allocation.id, stream, true);
    }
    Some(status)
}

fn unpin(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let token = token(world, bytes);
    let stream = world.stream_of(token.id, bytes);
    let status = vbar_token_unpin(token, stream);
    // Given back whatever the status.
    world.forget_token(token.id);
    Some(status)
}

fn unpin_many(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let count = usize::from(bytes.byte()) % 6;
    let mut given = Vec::new();
    for at in 0..count {
        let token = token(world, bytes);
        world.write(0, at, token);
        given.push(token.id);
    }
    let stream = world.stream_of(given.first().copied().unwrap_or(0), bytes);
    // Uses on several streams are told one by one.
    let streams = world.tokens.iter().filter(|live| given.contains(&live.token));
    let one = streams.map(|live| live.stream).all(|other| other == stream);
    let told = if one { count } else { 0 };
    let array: *const VbarToken = world.out(0, bytes);
    let told = if bytes.byte() > 250 { usize::MAX } else { told };
    let status = vbar_tokens_unpin(array, told, stream);
    if told == count && array.is_aligned() && !array.is_null() {
        for token in given {
            world.forget_token(token);
        }
    }
    Some(status)
}

fn commit(world: &mut World, bytes: &mut Bytes<'_>) -> Came {
    let token = token(world, bytes);
    let own = world.tokens.iter().find(|live| live.token == token.id).map(|live| live.stream);
    let stream = own.unwrap_or_else(|| world.streams.draw(bytes));
    let status = vbar_token_commit(token, stream);
    if status == 0
        && let Some(live) = world.tokens.iter_mut().find(|it| it.token == token.id)
    {
        (live.to_write, live.to_read) = (false, true);
    }
    Some(status)
}

/// Closes every model, VBAR and graph, whatever was closed before.
pub(super) fn close_all(ids: &[Vec<u64>]) {
    let of = |kind: Kind| ids[kind as usize].iter().copied();
    for id in of(Kind::Bar) {
        // Covers uses that nobody named a stream for.
        let mut pinned = 0;
        vbar_bar_end_of_run(VbarBar { id }, 0, 1, &raw mut pinned);
    }
    for id in of(Kind::Model) {
        vbar_model_close(VbarModel { id });
    }
    for id in of(Kind::Bar) {
        vbar_bar_destroy(VbarBar { id });
    }
    for id in of(Kind::Graph) {
        vbar_sim_graph_destroy(VbarSimGraph { id });
    }
}
