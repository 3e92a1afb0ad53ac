//! The staging ring in every order that threads can take, on a device that gets on when the model
//! says so. A wait has no time-out here: a wake-up that is lost is a deadlock, which fails the
//! test. Each test says what it holds, and which changes of the code it has caught.

#![expect(unsafe_code, reason = "loom's cell, which tells who reaches it, gives pointers")]

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;
use crate::driver::Driver;
use crate::driver::modelled::{CONTEXT, Modelled};
use crate::options::RuntimeOptions;
use crate::sync::{self, spawn};
use crate::units::{DeviceOrdinal, Stream};

const STREAM: Stream = Stream(10);

struct World {
    driver: Arc<Modelled>,
    device: Device,
    staging: Staging,
    /// What the slot holds; loom tells two who write at once.
    bytes: UnsafeCell<u64>,
}

impl World {
    fn write(&self) {
        self.bytes.with_mut(|bytes| {
            // SAFETY: loom's own cell is alive, and says itself when somebody else is there.
            unsafe { *bytes += 1 }
        });
    }

    /// Fills the slot and enqueues its copy. Returns the copy's number.
    fn stream_through(&self, slot: StagingSlot) -> usize {
        self.write();
        let known = self.device.fences.slot_of(STREAM).unwrap().unwrap();
        let copy = self.driver.launch(STREAM);
        slot.give_back(self.device.fences.record(STREAM, known).unwrap());
        copy
    }
}

/// A ring of one slot, and runs in which threads interrupt one another at most so often.
fn model(interruptions: usize, run: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    sync::model(Some(interruptions), move || {
        let driver = Modelled::new();
        let door: Arc<dyn Driver> = Arc::clone(&driver) as _;
        let options = RuntimeOptions {
            record_interval: std::time::Duration::MAX,
            wait_timeout: std::time::Duration::MAX,
            ..RuntimeOptions::default()
        };
        let slot = locked::map_window(&door, 4096).unwrap();
        let device = Device::new(door, DeviceOrdinal(0), CONTEXT, options);
        let (staging, bytes) = (Staging::of(vec![slot], 4096), UnsafeCell::new(0));
        run(&Arc::new(World { driver, device, staging, bytes }));
    });
}

/// Whoever takes the slot has it alone, after the copy of whoever had it before; and whoever waits
/// for it gets it.
///
/// Caught: `take` without its wait for the ticket; `give_back` that wakes nobody, or wakes before
/// the slot is there; `take_any` that does not look again under the lock that it sleeps with.
#[test]
fn a_slot_is_one_threads_and_its_last_copy_is_done() {
    model(2, |world| {
        let turn = |world: &World| {
            let slot = world.staging.take(&world.device).unwrap().expect("the ring has a slot");
            let before = world.bytes.with(|bytes| {
                // SAFETY: as in `write`.
                unsafe { *bytes }
            });
            assert!(world.driver.is_done(STREAM, before as usize), "its copy is not done");
            world.stream_through(slot);
            world.driver.get_on(STREAM);
        };
        let others = [spawn(world, turn), spawn(world, turn)];
        turn(world);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(world.driver.is_done(STREAM, 3));
    });
}

/// Whoever tries for the slot gets it when its copy is done, and one of several at a time.
///
/// Caught: `try_take` that takes the slot that is next by then, whose ticket it did not ask for.
#[test]
fn a_slot_that_is_tried_for_is_one_threads_and_its_last_copy_is_done() {
    model(2, |world| {
        let turn = |world: &World| {
            let Some(slot) = world.staging.try_take(&world.device).unwrap() else { return 0 };
            let before = world.bytes.with(|bytes| {
                // SAFETY: as in `write`.
                unsafe { *bytes }
            });
            assert!(world.driver.is_done(STREAM, before as usize), "its copy is not done");
            world.stream_through(slot);
            1
        };
        let others = [spawn(world, turn), spawn(world, turn)];
        world.driver.get_on(STREAM);
        let own = turn(world);
        let turns = own + others.map(|other| other.join().unwrap()).iter().sum::<usize>();
        assert!(turns >= 1);
        world.driver.get_on(STREAM);
        assert!(world.driver.is_done(STREAM, turns));
        assert!(world.staging.try_take(&world.device).unwrap().is_some());
    });
}

/// When the last slot is taken out for good, whoever waits for one is told that there is none.
///
/// Caught: `take_out` that wakes nobody, or without the ring's lock.
#[test]
fn who_waits_for_a_slot_that_is_taken_out_is_told() {
    model(3, |world| {
        let held = world.staging.take(&world.device).unwrap().expect("the ring has a slot");
        let waiting = spawn(world, |world| {
            let slot = world.staging.take(&world.device).unwrap();
            slot.map(|_| world.write()).is_some()
        });
        let taking_out = spawn(world, |world| {
            let out = world.staging.take_out(&world.device, 1, 0).unwrap();
            if !out.is_empty() {
                world.write();
            }
            out.len()
        });
        world.write();
        drop(held);
        // Those that are out once the slot is back.
        let late = world.staging.take_out(&world.device, 1, 0).unwrap().len();
        let (took, out) = (waiting.join().unwrap(), taking_out.join().unwrap());
        assert!(late + out <= 1);
        assert_eq!(world.staging.slot_count(), 1 - (late + out) as u64);
        assert!(took || late + out == 1);
    });
}
