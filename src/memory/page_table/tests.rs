//! Page words and tables, by one thread.

use super::*;

fn resident() -> Page {
    let page = Page::default();
    page.claim().unwrap();
    page.publish(PageState::Resident, 0, Ticket::NONE);
    page
}

#[test]
fn only_mapped_pages_take_pins() {
    let page = Page::default();
    assert!(matches!(page.pin(), Pin::Absent(_)));
    let page = resident();
    let Pin::Pinned(word) = page.pin() else { panic!("a resident page takes a pin") };
    assert_eq!(page.start_evicting().unwrap_err().pins, 1);
    page.unpin(word.generation).unwrap();
    assert_eq!(page.unpin(word.generation).unwrap_err().code(), ErrorCode::StaleToken);
    page.start_evicting().unwrap();
    page.settle(PageState::Absent);
    assert_eq!(draw(page.word()), '.');
}

#[test]
fn a_page_in_the_hosts_memory_takes_its_own_pins_only() {
    let page = Page::default();
    page.claim().unwrap();
    page.publish(PageState::HostMapped, 0, Ticket::NONE);
    assert!(matches!(page.pin(), Pin::Absent(_)));
    let Pin::Pinned(word) = page.pin_readable() else { panic!("it is readable") };
    assert_eq!((word.state, draw(word)), (PageState::HostMapped, 'h'));
    assert!(page.start_leaving_host().is_err() && page.start_evicting().is_err());
    page.unpin(word.generation).unwrap();
    assert!(page.start_evicting().is_err(), "it has no device frame to give");
    page.start_leaving_host().unwrap();
    page.settle(PageState::Absent);
    assert!(matches!(page.pin_readable(), Pin::Absent(_)));
}

#[test]
fn pins_end_at_what_can_be_counted() {
    let page = resident();
    for _ in 0..PIN_MAX {
        assert!(matches!(page.pin(), Pin::Pinned(_)));
    }
    assert_eq!(page.pin(), Pin::Full);
    assert_eq!(page.word().state, PageState::Resident);
}

#[test]
fn a_forced_release_makes_old_pins_stale_and_new_ones_safe() {
    let page = resident();
    page.pin();
    let before = page.word().generation;
    assert_eq!(page.force_unpin(), 1);
    let after = page.word().generation;
    assert_ne!(after, before);
    page.pin();
    assert_eq!(page.unpin(before).unwrap_err().code(), ErrorCode::StaleToken);
    assert_eq!(page.word().pins, 1);
    page.unpin(after).unwrap();
}

#[test]
fn stamps_of_one_stream_share_a_place() {
    let page = resident();
    let never = |_| false;
    for sequence in 1..=9 {
        assert!(page.stamp(Ticket::new(1, sequence), never));
    }
    assert_eq!(page.users(), [Ticket::new(1, 9)]);
    for slot in 2..=4 {
        assert!(page.stamp(Ticket::new(slot, 1), never));
    }
    assert!(!page.stamp(Ticket::new(5, 1), never));
    assert!(page.stamp(Ticket::new(5, 1), |old| old.slot() == 3));
    assert!(page.replace_stamp(Ticket::new(5, 1), Ticket::new(6, 1)));
    assert!(page.users().contains(&Ticket::new(6, 1)));
}

#[test]
fn a_use_counts_until_the_page_is_filled_anew() {
    let page = resident();
    assert!(!page.is_used());
    assert!(page.stamp(Ticket::new(1, 1), |_| false));
    assert!(page.is_used());
    page.start_evicting().unwrap();
    page.settle(PageState::Absent);
    page.claim().unwrap();
    page.publish(PageState::Resident, 0, Ticket::new(2, 1));
    assert!(!page.is_used());
}

#[test]
fn a_large_table_is_made_only_where_it_is_touched() {
    let table = PageTable::new(1 << 20);
    let _ = table.page(PageIndex((1 << 20) - 1));
    assert_eq!(table.touched().count(), CHUNK);
}
