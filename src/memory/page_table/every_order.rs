//! Page words in every order that threads can take, and with every value that their orderings let
//! a load return. Each test says what it holds, and which changes of the code it has caught.

#![expect(unsafe_code, reason = "loom's cell, which tells who reaches it, gives pointers")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::sync::model;

const READY: u64 = 5;
const FRAME: u32 = 7;

/// A page and what its frame holds, which loom watches: an access that nothing orders after the
/// last one fails the test.
struct Watched {
    page: Page,
    bytes: UnsafeCell<u64>,
}

impl Watched {
    fn absent() -> Arc<Self> {
        Arc::new(Self { page: Page::default(), bytes: UnsafeCell::new(0) })
    }

    fn in_state(state: PageState) -> Arc<Self> {
        let page = Self::absent();
        page.page.claim().unwrap();
        page.page.publish(state, 0, Ticket::NONE);
        page
    }

    /// As a kernel reads it, under a pin.
    #[track_caller]
    fn read(&self) -> u64 {
        self.bytes.with(|bytes| {
            // SAFETY: loom's own cell is alive, and says itself when somebody writes meanwhile.
            unsafe { *bytes }
        })
    }

    /// As the frame's next owner does.
    #[track_caller]
    fn write(&self, value: u64) {
        self.bytes.with_mut(|bytes| {
            // SAFETY: as above.
            unsafe { *bytes = value }
        });
    }
}

/// Runs `work` on the page in another thread.
fn spawn<R: 'static>(
    page: &Arc<Watched>,
    work: impl FnOnce(&Watched) -> R + 'static,
) -> thread::JoinHandle<R> {
    let page = Arc::clone(page);
    thread::spawn(move || work(&page))
}

fn never(_: Ticket) -> bool {
    false
}

/// Whoever has a pin reads a frame that nobody takes meanwhile, and whoever takes it finds the
/// stamps of all who used it.
///
/// Caught: `unpin` that is relaxed; `evict_if` without its look at the pins, or with its look
/// before the exchange only; `pin_if` that adds to the word without comparing.
#[test]
fn a_pin_or_an_eviction_and_the_stamp_is_there() {
    model(Some(2), || {
        let page = Watched::in_state(PageState::Resident);
        let use_it = |slot: u16| {
            move |page: &Watched| {
                let Pin::Pinned(word) = page.page.pin() else { return false };
                assert_eq!(page.read(), 0, "the frame was taken under a pin");
                assert!(page.page.stamp(Ticket::new(slot, 1), never));
                page.page.unpin(word.generation).unwrap();
                true
            }
        };
        let users = [spawn(&page, use_it(1)), spawn(&page, use_it(2))];
        let evictor = spawn(&page, |page| {
            page.page.start_evicting().ok()?;
            let found = page.page.users();
            page.write(1);
            page.page.settle(PageState::Absent);
            Some(found)
        });
        let found = evictor.join().unwrap();
        for (slot, user) in (1..).zip(users) {
            let used = user.join().unwrap();
            let stamped = found.as_ref().map(|found| found.contains(&Ticket::new(slot, 1)));
            assert!(stamped.is_none_or(|stamped| used == stamped), "stream {slot}: {used}");
        }
    });
}

/// Whoever pins a page sees the frame, the ready ticket and the bytes of whoever published it, and
/// no stamp of the page's last life.
///
/// Caught: `update` that is relaxed; `pin_if` whose loads and exchange are relaxed; `publish` that
/// stores the ticket, or takes the readers away, after the word.
#[test]
fn what_is_published_is_seen_by_who_pins_it() {
    model(None, || {
        let page = Watched::absent();
        page.page.stamp(Ticket::new(3, 9), never);
        let publisher = spawn(&page, |page| {
            page.page.claim().unwrap();
            page.write(1);
            page.page.set_frame(FRAME);
            page.page.publish(PageState::Issued, 0, Ticket::new(1, READY))
        });
        let reader = spawn(&page, |page| match page.page.pin() {
            Pin::Pinned(word) => {
                assert_eq!((page.read(), page.page.frame()), (1, FRAME));
                assert_eq!(page.page.ready(), Ticket::new(1, READY));
                assert_eq!(page.page.users(), [Ticket::new(1, READY)]);
                Some(word.generation)
            }
            Pin::Absent(_) => None,
            Pin::Full => panic!("nobody else pins"),
        });
        let (generation, seen) = (publisher.join().unwrap(), reader.join().unwrap());
        assert!(seen.is_none_or(|seen| seen == generation));
    });
}

/// Of those who claim an absent page one does, and has it to itself until it settles it.
///
/// Caught: `claim` that stores what it would exchange; `exchange` whose success is relaxed.
#[test]
fn one_of_many_claims_a_page() {
    model(Some(3), || {
        let page = Watched::absent();
        let claim = |page: &Watched| {
            let claimed = page.page.claim().is_ok();
            if claimed {
                page.write(page.read() + 1);
                page.page.settle(PageState::Absent);
            }
            u64::from(claimed)
        };
        let others = [spawn(&page, claim), spawn(&page, claim)];
        let own = claim(&page);
        let claimed = own + others.map(|other| other.join().unwrap()).iter().sum::<u64>();
        // One after the other, each may.
        assert!(claimed >= 1);
        assert_eq!((page.read(), page.page.word().state), (claimed, PageState::Absent));
    });
}

/// A graph comes and a guard goes while pins are taken back by force. `earlier`: a graph had the
/// page before.
fn check_forced(earlier: bool) {
    model(Some(2), move || {
        let page = Watched::in_state(PageState::Resident);
        if earlier {
            page.page.enter_graph();
            page.page.leave_graph();
        }
        let Pin::Pinned(guard) = page.page.pin() else { panic!("it is resident") };
        let graph = spawn(&page, |page| {
            page.page.enter_graph();
            let Pin::Pinned(word) = page.page.pin() else { panic!("it is resident") };
            word.generation
        });
        let unpinning = spawn(&page, move |page| page.page.unpin(guard.generation));
        let forcing = spawn(&page, |page| page.page.force_unpin());
        let (graph, forced) = (graph.join().unwrap(), forcing.join().unwrap());
        let released = unpinning.join().unwrap();
        let word = page.page.word();
        assert_eq!((word.pins, word.generation), (1, graph), "{forced} pins, {released:?}");
        page.page.unpin(graph).unwrap();
        page.page.leave_graph();
        // A mark that it has left does not keep later pins.
        assert!(matches!(page.page.pin(), Pin::Pinned(_)));
        assert_eq!((page.page.force_unpin(), page.page.word().pins), (1, 0));
    });
}

/// A pin that is taken back by force is told so, and a graph's is not taken.
///
/// Caught: a graph that only counts itself (as the code once did: a pin and somebody's unpin left
/// the word as it was, and the exchange took the graph's pin); `force_unpin` that does not ask for
/// graphs at each attempt; `unpin` that does not compare generations.
#[test]
fn a_forced_release_takes_the_pins_of_guards_and_none_of_a_graph() {
    check_forced(false);
}

/// The same on a page that a graph has marked before, and left.
///
/// Caught: `force_unpin` that takes pins of a word with an old mark, which the next graph does not
/// change.
#[test]
fn a_forced_release_sees_a_graph_behind_the_mark_of_another() {
    check_forced(true);
}

/// A stamp is never lost: not when two streams take places at once, nor when one stream's earlier
/// stamp comes late.
///
/// Caught: `stamp` that stores what it would exchange, or does not look at the sequence.
#[test]
fn stamps_of_several_streams_are_all_kept() {
    model(Some(2), || {
        let page = Watched::in_state(PageState::Resident);
        let stamp = |slot: u16, sequence: u64| {
            move |page: &Watched| assert!(page.page.stamp(Ticket::new(slot, sequence), never))
        };
        let others = [spawn(&page, stamp(1, 1)), spawn(&page, stamp(2, 1))];
        spawn(&page, stamp(1, 2)).join().unwrap();
        others.into_iter().for_each(|other| other.join().unwrap());
        let users = page.page.users();
        let of_first: Vec<_> = users.iter().filter(|ticket| ticket.slot() == 1).collect();
        assert!(users.contains(&Ticket::new(2, 1)), "{users:?}");
        assert!(of_first.contains(&&Ticket::new(1, 2)), "{users:?}");
    });
}

/// A stamp that comes while its stream's older one is joined to another stream's is not lost, nor
/// is the joined one.
///
/// Caught: `replace_stamp` that stores.
#[test]
fn a_stamp_that_is_joined_and_a_newer_one_are_both_kept() {
    model(None, || {
        let page = Watched::in_state(PageState::Resident);
        page.page.stamp(Ticket::new(2, 1), never);
        let joined =
            spawn(&page, |page| page.page.replace_stamp(Ticket::new(2, 1), Ticket::new(3, 1)));
        let newer = spawn(&page, |page| page.page.stamp(Ticket::new(2, 2), never));
        let (replaced, kept) = (joined.join().unwrap(), newer.join().unwrap());
        let users = page.page.users();
        assert!(kept && users.contains(&Ticket::new(2, 2)), "{users:?}");
        assert_eq!(replaced, users.contains(&Ticket::new(3, 1)), "{users:?}");
    });
}

/// Who has seen the ready fence pass does not bring a page back that is on its way out.
///
/// Caught: `note_ready` that does not look at the state again after a failed exchange, or stores.
#[test]
fn noting_that_a_page_is_ready_does_not_bring_it_back() {
    model(Some(2), || {
        let page = Watched::in_state(PageState::Issued);
        let noted = spawn(&page, |page| page.page.note_ready());
        let evicted = spawn(&page, |page| {
            let evicted = page.page.start_evicting().is_ok();
            if evicted {
                page.page.settle(PageState::Absent);
            }
            evicted
        });
        let pinned = spawn(&page, |page| match page.page.pin() {
            Pin::Pinned(word) => {
                assert!(page.page.word().state.is_mapped(), "it went under a pin");
                page.page.unpin(word.generation).unwrap();
                true
            }
            _ => false,
        });
        noted.join().unwrap();
        let pinned = pinned.join().unwrap();
        let evicted = evicted.join().unwrap();
        assert!(pinned || evicted);
        let expected = if evicted { PageState::Absent } else { PageState::Resident };
        assert_eq!((page.page.word().state, page.page.word().pins), (expected, 0));
    });
}
