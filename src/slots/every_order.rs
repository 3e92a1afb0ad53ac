//! Tables of tokens and of handles in every order that threads can take. The cells of the values
//! are loom's: an access that nothing orders after the last one fails the test. Each test says what
//! it holds, and which changes of the code it has caught.

use std::sync::atomic::AtomicU32 as Count;
use std::sync::atomic::Ordering::SeqCst as Now;

use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::sync::model;

fn put(tokens: &Tokens<u64>, value: u64) -> u64 {
    let cache = SlotCache::new();
    tokens.put(tokens.refill(&cache).unwrap(), || value)
}

/// Takes a value out, and gives its slot to all.
fn take(tokens: &Tokens<u64>, id: u64) -> Option<u64> {
    let (value, slot) = tokens.end(id)?.take();
    tokens.overflow(&SlotCache::new(), slot.unwrap());
    Some(value)
}

/// A value comes out once, as it was put in.
///
/// Caught: `claim` that is relaxed, or stores.
#[test]
fn a_token_ends_once() {
    model(Some(3), || {
        let tokens = Arc::new(Tokens::new(1));
        let id = put(&tokens, 40);
        let user = Arc::clone(&tokens);
        let ending = thread::spawn(move || take(&user, id));
        let looked = tokens.with(id, |value| *value);
        let own = take(&tokens, id);
        let other = ending.join().unwrap();
        assert!(looked.is_none_or(|value| value == 40));
        assert_eq!((own.or(other), own.and(other)), (Some(40), None));
    });
}

/// Whoever looks at a value is alone with it, and whoever ends it meanwhile waits for the look.
///
/// Caught: `Unclaim` that is relaxed; `claim_later` that gives up while another looks.
#[test]
fn a_token_that_is_looked_at_ends_afterwards() {
    model(Some(3), || {
        let tokens = Arc::new(Tokens::new(1));
        let id = put(&tokens, 40);
        let user = Arc::clone(&tokens);
        let look = move |tokens: &Tokens<u64>| {
            tokens.with(id, |value| {
                *value += 1;
                *value
            })
        };
        let looking = thread::spawn(move || look(&user));
        let own = look(&tokens);
        let ended = take(&tokens, id);
        let looks = own.iter().count() + looking.join().unwrap().iter().count();
        // A look that comes after the end finds nothing.
        assert_eq!(ended, Some(40 + looks as u64));
        assert!(own.is_some());
    });
}

/// An id that is learned from no lock finds the value that it was given for, in a slot that had
/// another one before, and an old id finds nothing.
///
/// Caught: `put` that publishes relaxed; an end that leaves the generation as it was.
#[test]
fn a_slot_that_is_used_again_has_another_id() {
    model(Some(3), || {
        let tokens = Arc::new(Tokens::new(1));
        let old = put(&tokens, 1);
        // What `put` is going to return: ids can be guessed.
        let (generation, index) = parts_of(1, old).unwrap();
        let next = id_of(1, generation + 1, index as u32);
        let user = Arc::clone(&tokens);
        let guessing = thread::spawn(move || (take(&user, next), take(&user, old)));
        let ended = take(&tokens, old);
        let renewed = ended.is_some().then(|| put(&tokens, 2));
        let (guessed, stale) = guessing.join().unwrap();
        assert!(guessed.is_none_or(|value| value == 2));
        assert_eq!(ended.or(stale), Some(1));
        assert!(ended.is_none() || stale.is_none());
        assert!(renewed.is_none_or(|id| id == next));
    });
}

/// Counts how often it is dropped, and knows whether it was.
struct Thing(std::sync::Arc<Count>);

impl Drop for Thing {
    fn drop(&mut self) {
        self.0.fetch_add(1, Now);
    }
}

/// A table that lives for one run: loom tells its locks and words apart by run.
fn table(spread: Spread) -> &'static Handles<Thing> {
    Box::leak(Box::new(Handles::new(2, spread)))
}

fn check_closing(spread: Spread, interruptions: usize) {
    model(Some(interruptions), move || {
        let table = table(spread);
        let drops = std::sync::Arc::new(Count::new(0));
        let id = table.insert(Thing(std::sync::Arc::clone(&drops))).ok().unwrap();
        let use_it = move |number: usize| {
            let thread = Thread::numbered(number);
            let Some(used) = table.get_on(&thread, id) else { return false };
            assert_eq!(used.0.load(Now), 0, "it was dropped in use");
            used.end_on(&thread);
            true
        };
        let others = [thread::spawn(move || use_it(1)), thread::spawn(move || use_it(0))];
        assert!(table.close(id));
        others.into_iter().for_each(|other| assert!(other.join().is_ok()));
        // Whoever came last has dropped it: nobody comes again.
        assert_eq!(drops.load(Now), 1);
        assert!(!use_it(0));
    });
}

/// A thing that is closed under its users is dropped once, by whoever is the last, and not before.
///
/// Caught: `get_on`, `end_use` or `heavy` without its barrier; a count of a use after the look at
/// the word; `drop_unused` that stores what it would exchange.
#[test]
fn a_closed_handle_is_dropped_once_and_in_nobodys_hands() {
    check_closing(Spread::Threads, 3);
}

/// The same where all threads count in one cell.
#[test]
fn a_closed_handle_with_one_cell_is_dropped_once_too() {
    check_closing(Spread::One, 3);
}

/// Of two who close a thing one does, a use that goes on keeps it, and its slot then has another
/// id.
///
/// Caught: `mark_closed` that stores; `drop_unused` that leaves the generation as it was.
#[test]
fn a_handle_is_closed_once_while_it_is_used() {
    model(Some(3), || {
        let table = table(Spread::Threads);
        let drops = std::sync::Arc::new(Count::new(0));
        let id = table.insert(Thing(std::sync::Arc::clone(&drops))).ok().unwrap();
        let thread = Thread::numbered(0);
        let used = table.get_on(&thread, id).unwrap();
        let closing = thread::spawn(move || table.close(id));
        let own = used.close();
        assert_eq!(used.0.load(Now), 0);
        used.end_on(&thread);
        assert!(closing.join().unwrap() != own, "closed once");
        assert_eq!(drops.load(Now), 1);
        let next = table.insert(Thing(std::sync::Arc::clone(&drops))).ok().unwrap();
        assert!(next != id && table.get_on(&thread, id).is_none());
    });
}
