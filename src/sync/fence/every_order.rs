//! Fences in every order that threads can take, on a device that gets on when the model says so.
//! There are two slots for streams here, so that streams take slots over from one another. Each
//! test says what it holds, and which changes of the code it has caught.

use loom::thread;

use super::*;
use crate::driver::modelled::{CONTEXT, Modelled};
use crate::sync::{self, spawn};

const A: Stream = Stream(10);
const B: Stream = Stream(11);
const C: Stream = Stream(12);

struct World {
    device: Arc<Modelled>,
    fences: Fences,
}

impl World {
    fn slot(&self, stream: Stream) -> StreamSlot {
        self.fences.slot_of(stream).unwrap().unwrap()
    }

    fn has_passed(&self, ticket: Ticket) -> bool {
        self.fences.cover(ticket).unwrap() == Cover::Passed
    }
}

/// Runs of a model in which threads interrupt one another at most so often.
fn model(interruptions: usize, run: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    sync::model(Some(interruptions), move || {
        let device = Modelled::new();
        let driver: Arc<dyn Driver> = Arc::clone(&device) as _;
        let fences = Fences::new(driver, CONTEXT, Duration::MAX);
        run(&Arc::new(World { device, fences }));
    });
}

/// A ticket that has passed says that the work it was stamped for is done, whoever recorded what
/// passed it; and some later record passes it.
///
/// Caught: a sequence that is raised after the driver's record; `drain` that counts what is not
/// ready; `cover` without its look at what is recorded.
#[test]
fn a_ticket_passes_after_the_work_that_it_was_stamped_for() {
    model(3, |world| {
        let slot = world.slot(A);
        let published = Arc::new(AtomicU64::new(0));
        let page = Arc::clone(&published);
        let user = spawn(world, move |world| {
            let number = world.device.launch(A);
            page.store(world.fences.stamp(slot).to_bits(), Release);
            number
        });
        let other = spawn(world, move |world| world.fences.record(A, slot).map(drop));
        let page = Arc::clone(&published);
        let asker = spawn(world, move |world| {
            world.device.get_on(A);
            let ticket = Ticket::from_bits(page.load(Acquire));
            if !ticket.is_none() && world.has_passed(ticket) {
                assert!(world.device.is_done(A, 1), "it passed before its work was done");
            }
        });
        asker.join().unwrap();
        user.join().unwrap();
        other.join().unwrap().unwrap();
        let ticket = Ticket::from_bits(published.load(Acquire));
        world.fences.record(A, slot).unwrap();
        world.device.get_on(A);
        assert!(world.has_passed(ticket));
    });
}

/// A stream that another one takes the slot from, since all of its work is known to be done, while
/// it stamps a use: either the other one does not get the slot, or the stamp is made again.
///
/// Caught: a take-over that looks for stamps only before it gives the slot away (as the code once
/// did), or not at all; `confirm` that always says yes, or (as it once did) does not see that the
/// slot was another stream's in between; a `stamp` that raises nothing.
#[test]
fn a_use_that_is_stamped_as_its_slot_changes_hands_is_not_lost() {
    model(2, |world| {
        let (slot, busy) = (world.slot(A), world.slot(B));
        world.device.launch(B);
        let _busy = world.fences.stamp(busy);
        let use_it = move |world: &World| {
            world.device.launch(A);
            let mut own = slot;
            loop {
                let ticket = world.fences.stamp(own);
                match world.fences.confirm(own, ticket) {
                    Ok(None) => return Some(ticket),
                    Ok(Some(slot)) => own = slot,
                    // Neither slot is to be had: nothing will say that it is done.
                    Err(_) => return None,
                }
            }
        };
        let users = [spawn(world, use_it), spawn(world, use_it)];
        let taker = spawn(world, |world| {
            let slot = world.fences.slot_of(C).ok().flatten();
            slot.map(|slot| world.fences.record(C, slot).unwrap())
        });
        let tickets = users.map(|user| user.join().unwrap());
        let taken = taker.join().unwrap();
        world.device.get_on(C);
        if let Some(taken) = taken {
            assert!(world.has_passed(taken));
        }
        for ticket in tickets.into_iter().flatten() {
            assert!(!world.has_passed(ticket), "another stream's fence covers work of this one");
        }
    });
}

/// A slot that is held is not taken over, and a stamp that is made anyhow is of the slot that the
/// stream has, or of none: no other stream's fence covers what it stands for.
///
/// Caught: a take-over that looks for holds before it gives the slot away, or after it has looked
/// for stamps.
#[test]
fn a_held_slot_and_a_stamp_made_anyhow_are_no_other_streams() {
    model(2, |world| {
        let (slot, busy) = (world.slot(A), world.slot(B));
        world.device.launch(B);
        let _busy = world.fences.stamp(busy);
        let holder = spawn(world, move |world| {
            world.device.launch(A);
            let held = world.fences.hold_if_still(slot);
            held.map(|held| world.fences.stamp(held.slot()))
        });
        let user = spawn(world, move |world| {
            world.device.launch(A);
            world.fences.stamp_anyhow(slot)
        });
        let taker = spawn(world, |world| {
            let slot = world.fences.slot_of(C).ok().flatten();
            slot.map(|slot| world.fences.record(C, slot).unwrap())
        });
        let (held, anyhow) = (holder.join().unwrap(), user.join().unwrap());
        let taken = taker.join().unwrap();
        world.device.get_on(C);
        if let Some(taken) = taken {
            assert!(world.has_passed(taken));
        }
        for ticket in held.into_iter().chain([anyhow]) {
            assert!(!world.has_passed(ticket), "another stream's fence covers work of this one");
        }
    });
}

/// A stream that takes a slot over waits for nothing yet, however the stream before it waited.
///
/// Caught: a slot that gets its new stream before what the old one waited for is forgotten (as the
/// code once did).
#[test]
fn a_stream_does_not_inherit_what_another_waited_for() {
    model(3, |world| {
        let (slot, other) = (world.slot(A), world.slot(B));
        world.device.launch(B);
        let ticket = world.fences.record(B, other).unwrap();
        assert!(world.fences.stream_wait(A, slot, ticket).unwrap());
        // Whoever writes is spawned first: loom, which remembers the last access to a word, then
        // comes to what the other one reads in between.
        let taker = spawn(world, |world| world.slot(C));
        let finder = spawn(world, move |world| {
            let found = world.fences.find(NonZeroU64::new(C.0 as u64 + 1).unwrap());
            assert!(!found.is_some_and(|own| world.fences.ordered_before(ticket, own)));
            found
        });
        let (taken, found) = (taker.join().unwrap(), finder.join().unwrap());
        assert!(taken.index() == slot.index() && found.is_none_or(|found| found == taken));
    });
}

/// A stream that was told to wait for a ticket does not get on before the ticket's work is done,
/// though others ask what has passed, record anew and use events again meanwhile.
///
/// Caught: `stream_wait` that takes a ticket for passed when no record in the ring covers it;
/// `drain` that takes what is not ready for passed.
#[test]
fn a_stream_waits_for_the_ticket_that_it_was_told() {
    model(2, |world| {
        let (slot, waiting) = (world.slot(A), world.slot(B));
        let first = world.device.launch(A);
        let ticket = world.fences.stamp(slot);
        let recorder = spawn(world, move |world| {
            world.fences.record_in_passing(A, slot).unwrap();
            world.device.launch(A);
            world.fences.record_in_passing(A, slot).unwrap();
        });
        let waiter = spawn(world, move |world| {
            if world.fences.stream_wait(B, waiting, ticket).unwrap() {
                let own = world.device.launch(B);
                world.device.get_on(B);
                let waited = !world.device.is_done(B, own) || world.device.is_done(A, first);
                assert!(waited, "it did not wait");
            }
        });
        let asker = spawn(world, move |world| {
            world.device.get_on(A);
            if world.has_passed(ticket) {
                assert!(world.device.is_done(A, first), "it passed before its work was done");
            }
        });
        recorder.join().unwrap();
        waiter.join().unwrap();
        asker.join().unwrap();
        // Those that were left out since others were at the stream's events.
        world.fences.record(A, slot).unwrap();
        world.device.get_on(A);
        assert!(world.has_passed(ticket));
    });
}
