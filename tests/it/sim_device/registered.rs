//! Registered host memory on the simulated device, where it is stricter than a real one.
#![expect(unsafe_code, reason = "copies through the trait take raw pointers")]

use std::ptr::NonNull;

use vbar::driver::sim::Sim;
use vbar::driver::{Driver, DriverCode};
use vbar::units::Stream;

use super::{check_clean, open};
use crate::door::Rig;

const LEN: usize = 4096;
const LISTED: &str = "capacity=4M,granularity=64K,on_violation=record";
const READ_ONLY: &str = "capacity=4M,granularity=64K,on_violation=record,read_only=1";

/// A shared mapping of a file of so many bytes, all 7.
pub(super) fn file_pages(bytes: usize) -> memmap2::MmapRaw {
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &vec![7; bytes]).unwrap();
    memmap2::MmapOptions::new().len(bytes).map_raw_read_only(&file).unwrap()
}

fn register_read_only(sim: &Sim, at: NonNull<u8>, bytes: usize) -> DriverCode {
    // SAFETY: every caller keeps the memory until the device is gone, or says that it does not.
    let registered = unsafe { sim.mem_host_register_read_only(at, bytes) };
    registered.map_or_else(|error| error.code, |()| DriverCode::SUCCESS)
}

fn register(sim: &Sim, memory: NonNull<u8>, bytes: usize) -> Result<(), DriverCode> {
    // SAFETY: every caller keeps the memory until the device is gone.
    unsafe { sim.mem_host_register(memory, bytes) }.map_err(|error| error.code)
}

fn copy(sim: &Sim, rig: &Rig, source: NonNull<u8>, bytes: usize, stream: Stream) -> DriverCode {
    let pages = rig.pages(1);
    // SAFETY: the memory stays until the device is gone.
    let copied = unsafe { sim.memcpy_htod_async(pages.address, source.as_ptr(), bytes, stream) };
    copied.map_or_else(|error| error.code, |()| DriverCode::SUCCESS)
}

#[test]
fn what_is_not_mapped_cannot_be_registered() {
    let (sim, _) = open(LISTED);
    let mut memory = memmap2::MmapMut::map_anon(LEN).unwrap();
    let at = NonNull::new(memory.as_mut_ptr()).unwrap();
    drop(memory);
    // SAFETY: nothing is read; the call finds that nothing is mapped.
    let refused = unsafe { sim.mem_host_register(at, LEN) }.unwrap_err();
    assert_eq!(refused.code, DriverCode::INVALID_VALUE);
    check_clean(&sim);
}

#[test]
fn unregistering_what_is_being_copied_is_a_breach() {
    let (sim, rig) = open(LISTED);
    let stream = rig.stream();
    let mut memory = memmap2::MmapMut::map_anon(2 * LEN).unwrap();
    let at = NonNull::new(memory.as_mut_ptr()).unwrap();
    register(&sim, at, LEN).unwrap();
    let pages = rig.pages(1);
    rig.write_late(pages.address, 8, 50, stream);
    // SAFETY: the memory stays until the device is gone.
    unsafe { sim.memcpy_htod_async(pages.address, at.as_ptr(), 16, stream) }.unwrap();
    sim.mem_host_unregister(at).unwrap();
    let found = sim.violations();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("was unregistered while"), "{found:?}");
    drop(sim);
}

#[test]
fn a_copy_does_not_cross_the_end_of_what_is_registered() {
    let (sim, rig) = open(LISTED);
    let stream = rig.stream();
    let mut memory = memmap2::MmapMut::map_anon(3 * LEN).unwrap();
    let at = NonNull::new(memory.as_mut_ptr()).unwrap();
    let second = NonNull::new(memory[LEN..].as_mut_ptr()).unwrap();
    register(&sim, at, LEN).unwrap();
    register(&sim, second, LEN).unwrap();
    assert_eq!(copy(&sim, &rig, at, LEN, stream), DriverCode::SUCCESS);
    assert_eq!(copy(&sim, &rig, at, LEN + 1, stream), DriverCode::INVALID_VALUE);
    assert_eq!(copy(&sim, &rig, second, LEN + 1, stream), DriverCode::INVALID_VALUE);
    assert_eq!(sim.violations(), Vec::<String>::new());
    sim.ctx_synchronize().unwrap();
    for part in [at, second] {
        sim.mem_host_unregister(part).unwrap();
    }
    assert_eq!((sim.violations(), sim.locked_bytes()), (vec![], 0));
}

#[test]
fn pages_of_files_are_registered_for_reading_only() {
    let (sim, rig) = open(READ_ONLY);
    let stream = rig.stream();
    let pages = file_pages(2 * LEN);
    let at = NonNull::new(pages.as_mut_ptr()).unwrap();
    assert_eq!(register(&sim, at, LEN), Err(DriverCode::INVALID_VALUE));
    assert_eq!(register_read_only(&sim, at, 2 * LEN), DriverCode::SUCCESS);
    assert_eq!(copy(&sim, &rig, at, 2 * LEN, stream), DriverCode::SUCCESS);
    let source = rig.pages(1);
    // SAFETY: it is refused.
    let written = unsafe { sim.memcpy_dtoh_async(at.as_ptr(), source.address, 8, stream) };
    assert_eq!(written.unwrap_err().code, DriverCode::INVALID_VALUE);
    sim.ctx_synchronize().unwrap();
    sim.mem_host_unregister(at).unwrap();
    assert_eq!((sim.violations(), sim.locked_bytes()), (vec![], 0));
    // Without the attribute, and memory of one's own.
    let (without, _) = open(LISTED);
    assert_eq!(register_read_only(&without, at, LEN), DriverCode::NOT_SUPPORTED);
}

#[test]
fn a_private_mapping_of_a_file_is_never_registered() {
    let (sim, _) = open(READ_ONLY);
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &[7; LEN]).unwrap();
    // SAFETY: nobody cuts the file short.
    let mut private = unsafe { memmap2::MmapOptions::new().len(LEN).map_copy(&file) }.unwrap();
    let at = NonNull::new(private.as_mut_ptr()).unwrap();
    assert_eq!(register_read_only(&sim, at, LEN), DriverCode::INVALID_VALUE);
    let found = sim.violations();
    assert!(found.len() == 1 && found[0].contains("private mapping"), "{found:?}");
}

#[test]
fn a_registered_range_that_is_unmapped_is_a_breach() {
    let (sim, _) = open(READ_ONLY);
    let pages = file_pages(LEN);
    let at = NonNull::new(pages.as_mut_ptr()).unwrap();
    assert_eq!(register_read_only(&sim, at, LEN), DriverCode::SUCCESS);
    drop(pages);
    sim.mem_host_unregister(at).unwrap();
    let found = sim.violations();
    assert!(found.len() == 1 && found[0].contains("was unmapped while"), "{found:?}");
}

#[test]
fn a_call_that_hangs_goes_on_when_it_is_healed() {
    let (sim, _) = open("capacity=4M,granularity=64K,hang=mem_get_info");
    let asked = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let answer = sim.mem_get_info();
            asked.store(true, std::sync::atomic::Ordering::Relaxed);
            answer.map(drop).map_err(|error| error.code)
        });
        while sim.calls(vbar::driver::sim::Verb::MemGetInfo) == 0 {
            std::thread::yield_now();
        }
        assert!(!asked.load(std::sync::atomic::Ordering::Relaxed));
        sim.heal();
        // That thread has no context; it has come back all the same.
        assert_eq!(asking.join().unwrap(), Err(DriverCode::INVALID_CONTEXT));
    });
}
