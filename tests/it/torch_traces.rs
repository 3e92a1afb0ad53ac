//! Records of what PyTorch's allocator is asked for: what is in them, and their replay.

use std::collections::BTreeSet;
use std::path::PathBuf;

use vbar::torch::Allocator;
use vbar::units::{MIB, PageSize, Stream};
use vbar::{ErrorCode, RuntimeOptions};

use crate::torch::{Random, Torch};
use crate::world::{DEVICE, P, World, options};
use trace::Event;

#[path = "../../benches/torch_traces/trace.rs"]
pub(crate) mod trace;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A folder that goes with the test.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("trace.txt")
    }

    fn events(&self) -> Vec<Event> {
        trace::parse(&std::fs::read_to_string(self.path()).unwrap()).unwrap()
    }
}

fn recorded(allocator: &Allocator, folder: &Folder, work: impl FnOnce()) -> Vec<Event> {
    allocator.start_recording(&folder.path()).unwrap();
    work();
    let count = allocator.stop_recording().unwrap();
    let events = folder.events();
    assert_eq!(events.len() as u64, count);
    events
}

#[test]
fn a_record_has_what_was_asked_for_in_its_order() {
    let (torch, folder) = (Torch::budget(64), Folder::new());
    let other = torch.world.another_stream();
    let (small, large) = (torch.malloc(100), torch.malloc_on(3 * P + 5, Stream::DEFAULT));
    torch.allocator.record_stream(small, other);
    let gone = torch.malloc(P);
    torch.allocator.free(gone);
    let events = recorded(&torch.allocator, &folder, || {
        let one = torch.malloc_on(700, other);
        assert_eq!(torch.allocator.malloc(0, other).unwrap(), 0);
        torch.allocator.free(0);
        torch.allocator.free(one + 512);
        torch.allocator.record_stream(one, torch.world.stream);
        torch.allocator.record_stream(large, other);
        torch.allocator.free(one);
        torch.allocator.free(one);
        torch.allocator.free(large);
        torch.malloc_on(P, Stream::LEGACY);
    });
    // What lived comes first, in order of address, which is not that of the requests.
    let lived = |stream: usize, bytes: u64| {
        let same = |event: &&Event| match event {
            Event::Malloc { bytes: found, stream: on, .. } => (*found, *on) == (bytes, stream),
            _ => false,
        };
        match events[..3].iter().find(same) {
            Some(Event::Malloc { id, .. }) => *id,
            _ => panic!("{bytes} bytes are not in {events:?}"),
        }
    };
    let (large_id, other_number) = (lived(0, 3 * P + 5), 2);
    let small_id = 3 - large_id;
    let text: String = events.iter().map(|event| format!("{event}; ")).collect();
    assert!(text.contains(&format!("malloc {small_id} 100 1; record {small_id} {other_number}; ")));
    let then = format!(
        "malloc 3 700 {other_number}; record 3 1; record {large_id} {other_number}; free 3; \
         free {large_id}; malloc 4 {P} 0; "
    );
    assert!(text.ends_with(&then), "{text}");
    assert_eq!(events.len(), 9);
    torch.check();
}

#[test]
fn a_device_without_mappings_is_recorded_too() {
    let world = World::with("capacity=4M,granularity=64K,vmm=0", options());
    let allocator = world.runtime.torch_allocator().unwrap();
    let lives = allocator.malloc(700, world.stream).unwrap();
    let events = recorded(&allocator, &Folder::new(), || {
        // In no record on any device: its caller caches by itself.
        let segment = allocator.segment_malloc(1 << 20, world.stream).unwrap();
        allocator.record_stream(lives, Stream::DEFAULT);
        allocator.free(lives);
        allocator.segment_free(segment);
    });
    let text: String = events.iter().map(|event| format!("{event}; ")).collect();
    assert_eq!(text, "malloc 1 700 1; record 1 0; free 1; ");
}

#[test]
fn a_record_of_threads_can_be_replayed() {
    const THREADS: u64 = 4;
    let (torch, folder) = (Torch::budget(64), Folder::new());
    let events = recorded(&torch.allocator, &folder, || {
        std::thread::scope(|scope| {
            for seed in 1..=THREADS {
                let torch = &torch;
                scope.spawn(move || {
                    let mut random = Random(seed);
                    let stream = torch.world.stream;
                    let mut held = Vec::new();
                    for _ in 0..500 {
                        let bytes = 1 + random.below(P / 4);
                        held.push(torch.allocator.malloc(bytes as usize, stream).unwrap());
                        if held.len() > 4 {
                            let at = random.below(held.len() as u64) as usize;
                            torch.allocator.free(held.swap_remove(at));
                        }
                    }
                    held.into_iter().for_each(|address| {
                        torch.allocator.free(address);
                    });
                });
            }
        });
    });
    // Each block is asked for once, then freed once.
    let (mut live, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for event in &events {
        match event {
            Event::Malloc { id, .. } => assert!(live.insert(*id) && seen.insert(*id)),
            Event::Free { id } => assert!(live.remove(id)),
            Event::Record { .. } => panic!("no block was recorded for another stream"),
        }
    }
    assert!(live.is_empty());
    assert_eq!(events.len() as u64, THREADS * 500 * 2);
    let again = Torch::budget(64);
    let made = trace::replay(&again.allocator, &events, || Ok(again.world.stream)).unwrap();
    assert!(made.live_peak > P && made.live_peak <= made.reserved_peak);
    again.check();
}

/// What was asked for over what was held, at their largest, in pages as on a GPU.
fn utilisation(events: &[Event]) -> f64 {
    let page_size = PageSize::new(16 * MIB).unwrap();
    let options = RuntimeOptions { page_size, ..options() };
    let world = World::with("capacity=64G", options);
    let allocator = world.runtime.torch_allocator().unwrap();
    let made = trace::replay(&allocator, events, || Ok(world.another_stream())).unwrap();
    let device_bytes = world.sim.used_bytes(DEVICE);
    assert_eq!(made.reserved_peak, device_bytes, "what is held is what the device lacks");
    let peak_pages = made.reserved_peak / (16 * MIB);
    let text = format!("{} mappings for {peak_pages} pages", made.mapped_pages);
    assert!(made.mapped_pages <= 2 * peak_pages, "{text}");
    println!("{:.2} %, {text}, {:.0} ns an event", made.utilisation() * 100.0, made.nanos_an_event);
    made.utilisation()
}

#[test]
fn programs_hold_little_more_than_they_have_live() {
    let (training, sampling) = (trace::training(7), trace::sampling(7));
    let (training, sampling) = (utilisation(&training), utilisation(&sampling));
    assert!(training >= 0.97 && sampling >= 0.95, "{training} {sampling}");
}

/// Recorded on a GPU, by `benches/torch_replay.py`: PyTorch's own allocator holds 6240 and 5402
/// MiB for them, its expandable segments 5428 and 3270.
#[test]
fn recorded_programs_hold_little_more_than_they_have_live() {
    for name in ["training", "sampling"] {
        let path =
            format!("{}/benches/torch_traces/traces/{name}.txt.gz", env!("CARGO_MANIFEST_DIR"));
        let events = trace::parse(&trace::read(std::path::Path::new(&path)).unwrap()).unwrap();
        let found = utilisation(&events);
        assert!(found >= 0.95, "{name}: {found}");
    }
}

#[test]
fn a_record_ends_and_says_what_went_wrong() {
    let (torch, folder) = (Torch::budget(8), Folder::new());
    let code = |done: vbar::Result<u64>| done.unwrap_err().code();
    assert_eq!(code(torch.allocator.stop_recording()), ErrorCode::InvalidArgument);
    let nowhere = folder.path().join("nowhere");
    let refused = torch.allocator.start_recording(&nowhere).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::Io);
    torch.allocator.start_recording(&folder.path()).unwrap();
    let twice = torch.allocator.start_recording(&nowhere).unwrap_err();
    assert_eq!(twice.code(), ErrorCode::InvalidArgument);
    assert!(twice.to_string().contains("trace.txt"), "{twice}");
    let block = torch.malloc(5);
    assert_eq!(torch.allocator.stop_recording().unwrap(), 1);
    // What comes after it is not in it, and what is freed then is in no later one.
    torch.allocator.free(block);
    assert_eq!(folder.events(), [Event::Malloc { id: 1, bytes: 5, stream: 1 }]);
    torch.allocator.start_recording(std::path::Path::new("/dev/full")).unwrap();
    torch.allocator.free(torch.malloc(5));
    assert_eq!(code(torch.allocator.stop_recording()), ErrorCode::Io);
    assert_eq!(code(torch.allocator.stop_recording()), ErrorCode::InvalidArgument);
    torch.check();
}
