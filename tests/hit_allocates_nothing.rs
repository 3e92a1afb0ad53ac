//! A fault of a page that is resident, and its unpin, ask the host's allocator for nothing; nor do
//! a request of PyTorch's that is cached, and its free.

#![expect(unsafe_code, reason = "an allocator that counts, which is unsafe to write")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use vbar::driver::Driver;
use vbar::driver::sim::{Sim, SimOptions};
use vbar::units::{DeviceOrdinal, PageSize, Stream};
use vbar::{Runtime, RuntimeOptions};

/// One page.
const P: u64 = 64 << 10;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting what each thread asks of it.
struct Counting;

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from `System` by `alloc` above, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_hit_of_one_page_allocates_nothing() {
    let sim = Sim::new(SimOptions::parse("capacity=64M,granularity=64K").unwrap());
    let options = RuntimeOptions {
        page_size: PageSize::new(P).unwrap(),
        headroom_bytes: Some(0),
        budget_bytes: Some(4 * P),
        record_interval: Duration::from_secs(3600),
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(sim.driver(), DeviceOrdinal(0), options).unwrap();
    sim.ctx_set_current(Some(runtime.device().context)).unwrap();
    let stream = sim.stream_create().unwrap();
    let vbar = runtime.create_bar(4 * P).unwrap();
    let hit = || drop(vbar.fault(0..P, stream).unwrap().resident().unwrap());
    hit();
    sim.stream_synchronize(stream).unwrap();
    // The first hits make what the later ones keep.
    (0..1000).for_each(|_| hit());
    let before = ALLOCATIONS.get();
    assert!(before > 0, "the allocator does not count");
    (0..10_000).for_each(|_| hit());
    assert_eq!(ALLOCATIONS.get() - before, 0);
}

#[test]
fn a_cached_block_of_pytorchs_allocates_nothing() {
    let sim = Sim::new(SimOptions::parse("capacity=64M,granularity=64K").unwrap());
    let options = RuntimeOptions {
        page_size: PageSize::new(P).unwrap(),
        headroom_bytes: Some(0),
        record_interval: Duration::from_secs(3600),
        ..RuntimeOptions::default()
    };
    let runtime = Runtime::open(sim.driver(), DeviceOrdinal(0), options).unwrap();
    sim.ctx_set_current(Some(runtime.device().context)).unwrap();
    let allocator = runtime.torch_allocator().unwrap();
    for stream in [Stream::DEFAULT, sim.stream_create().unwrap()] {
        for bytes in [512, 40 << 10, 5 * P as usize] {
            let pair = || allocator.free(allocator.malloc(bytes, stream).unwrap());
            for _ in 0..1000 {
                std::hint::black_box(pair());
            }
            let before = ALLOCATIONS.get();
            for _ in 0..10_000 {
                std::hint::black_box(pair());
            }
            assert_eq!(ALLOCATIONS.get() - before, 0, "{bytes} bytes on {stream:?}");
        }
    }
}
