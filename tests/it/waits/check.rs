//! The check of a waiting thread: when it is called, and what it may do.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::{Duration, Instant};

use vbar::options::RuntimeOptions;
use vbar::{ErrorCode, set_wait_check};

use super::{SHORT, stuck_on_context, stuck_on_release};
use crate::logs;
use crate::world::{World, budget_options, resident};

/// Sets a check that counts its calls and says what it is told to say.
fn counted(answer: ControlFlow<()>) -> Rc<Cell<u32>> {
    let calls = Rc::new(Cell::new(0));
    let counter = Rc::clone(&calls);
    set_wait_check(Some(Box::new(move || {
        counter.set(counter.get() + 1);
        answer
    })));
    calls
}

#[test]
fn it_is_called_only_while_the_thread_waits() {
    let calls = counted(ControlFlow::Break(()));
    let world = World::with(crate::world::ROOMY, RuntimeOptions { ..budget_options(4) });
    let vbar = world.vbar(4);
    for _ in 0..3 {
        for page in 0..4 {
            drop(resident(&world, &vbar, page..page + 1));
        }
    }
    vbar.free_memory(u64::MAX).unwrap();
    assert_eq!(calls.get(), 0, "nothing waited");
    world.check();

    let stuck = stuck_on_context();
    stuck.ends_with(ErrorCode::Cancelled);
    assert_eq!(calls.get(), 1);
    // Another thread's waits are none of its.
    stuck.world.runtime.set_wait_timeout(SHORT);
    let runtime = stuck.world.runtime.clone();
    let other = std::thread::spawn(move || runtime.set_budget(Some(0)).unwrap_err().code());
    assert_eq!(other.join().unwrap(), ErrorCode::TimedOut);
    assert_eq!(calls.get(), 1);
    set_wait_check(None);
    stuck.world.runtime.set_budget(Some(crate::world::P)).unwrap();
    stuck.check_goes_on();
}

#[test]
fn it_is_called_at_most_every_five_milliseconds() {
    let stuck = stuck_on_context();
    stuck.world.runtime.set_wait_timeout(Duration::from_millis(200));
    let calls = counted(ControlFlow::Continue(()));
    let begun = Instant::now();
    stuck.ends_with(ErrorCode::TimedOut);
    let most = begun.elapsed().as_millis() / 5 + 1;
    let calls = calls.get();
    assert!(calls >= 2 && u128::from(calls) <= most, "{calls} calls, at most {most}");
    set_wait_check(None);
    stuck.check_goes_on();
}

#[test]
fn it_may_wait_itself_and_is_not_called_for_that() {
    let outer = stuck_on_context();
    let inner = stuck_on_release();
    inner.world.runtime.set_wait_timeout(SHORT);
    let (calls, depth) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (counter, own_depth) = (Rc::clone(&calls), Rc::clone(&depth));
    let runtime = inner.world.runtime.clone();
    set_wait_check(Some(Box::new(move || {
        assert_eq!(own_depth.replace(own_depth.get() + 1), 0, "it was called for its own wait");
        counter.set(counter.get() + 1);
        // Waits, to the end of its time.
        let freed = runtime.free_memory(u64::MAX).unwrap();
        assert!(freed.shortfall.is_some());
        own_depth.set(0);
        if counter.get() == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })));
    outer.ends_with(ErrorCode::Cancelled);
    assert_eq!((calls.get(), depth.get()), (2, 0));
    set_wait_check(None);
    outer.check_goes_on();
    inner.check_goes_on();
}

#[test]
fn it_may_replace_and_remove_itself() {
    let stuck = stuck_on_context();
    let last = Rc::new(Cell::new(0));
    let counter = Rc::clone(&last);
    let mut second = Some(Box::new(move || {
        counter.set(counter.get() + 1);
        // Taken away while it is called, it answers once more, and then no more.
        assert!(set_wait_check(None).is_none(), "it is out of its place while it is called");
        ControlFlow::Continue(())
    }) as vbar::WaitCheck);
    set_wait_check(Some(Box::new(move || {
        set_wait_check(second.take());
        ControlFlow::Continue(())
    })));
    stuck.world.runtime.set_wait_timeout(Duration::from_millis(60));
    stuck.ends_with(ErrorCode::TimedOut);
    assert_eq!(last.get(), 1);
    assert!(set_wait_check(None).is_none());
    stuck.check_goes_on();
}

#[test]
fn its_panic_ends_the_wait_and_nothing_else() {
    logs::collect();
    let stuck = stuck_on_context();
    let calls = Rc::new(Cell::new(0));
    let counter = Rc::clone(&calls);
    set_wait_check(Some(Box::new(move || {
        counter.set(counter.get() + 1);
        panic!("expected by this test")
    })));
    stuck.ends_with(ErrorCode::Cancelled);
    stuck.world.runtime.set_wait_timeout(SHORT);
    stuck.ends_with(ErrorCode::TimedOut);
    assert_eq!(calls.get(), 1);
    assert!(set_wait_check(None).is_none());
    assert_eq!(logs::count(&logs::this_thread(), "check panicked"), 1);
    stuck.check_goes_on();
}
