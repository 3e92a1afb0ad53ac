//! Records of what PyTorch's allocator is asked for: what is in them, and that they can be replayed.

use std::collections::BTreeSet;
use std::path::PathBuf;

use vbar::ErrorCode;
use vbar::torch::Allocator;
use vbar::units::Stream;

use crate::torch::{Random, Torch};
use crate::world::P;
use trace::Event;

#[path = "../../benches/torch/trace.rs"]
mod trace;

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
