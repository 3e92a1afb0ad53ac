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
