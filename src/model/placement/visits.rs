//! When pages come in and when they may go: touches that are close together are one visit.

use std::collections::HashMap;

use super::Cycle;
use crate::model::schedule::PageRef;

/// Steps for which a page between two touches is kept: it is wanted by the step in use or the next.
const KEPT_STEPS: usize = 1;

/// A stretch of steps during which a streamed page is held, loaded once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Visit {
    /// Index of the first step that touches it, less than the number of steps.
    pub first: usize,
    /// Index of the last one, counted on across the end of the cycle.
    pub last: usize,
}

/// A page of a cycle.
#[derive(Clone, Debug)]
pub(super) struct VisitedPage {
    pub(super) page: PageRef,
    pub(super) class: i32,
    /// Index of the step at whose place it is ranked.
    pub(super) home: usize,
    /// Mean compute time of the steps at which its visits begin.
    pub(super) compute_ns: u64,
    /// By rising first step.
    pub(super) visits: Vec<Visit>,
}

impl VisitedPage {
    /// Loads in each cycle when it is streamed. A page that never goes is worth keeping most.
    pub(super) fn loads(&self) -> u32 {
        self.visits.len() as u32
    }
}

/// All pages of a cycle, in no order that means anything, but always the same.
pub(super) fn visits_of(cycle: &Cycle) -> Vec<VisitedPage> {
    let mut numbers: HashMap<PageRef, usize> = HashMap::new();
    let mut touches: Vec<(PageRef, Vec<usize>)> = Vec::new();
    for (index, step) in cycle.steps.iter().enumerate() {
        for page in &step.pages {
            let number = *numbers.entry(*page).or_insert_with(|| {
                touches.push((*page, Vec::new()));
                touches.len() - 1
            });
            touches[number].1.push(index);
        }
    }
    touches.into_iter().map(|(page, touches)| visited(cycle, page, &touches)).collect()
}

fn visited(cycle: &Cycle, page: PageRef, touches: &[usize]) -> VisitedPage {
    let visits = joined(touches, cycle.steps.len());
    let firsts = || visits.iter().map(|visit| &cycle.steps[visit.first]);
    let compute_ns = firsts().map(|step| step.compute_ns).sum::<u64>() / visits.len() as u64;
    // The same wherever the cycle is cut.
    let home = visits.iter().map(|visit| visit.first);
    let home = home.min_by_key(|first| (cycle.steps[*first].ordinal, *first)).unwrap_or(0);
    let class = touches.iter().map(|index| cycle.steps[*index].class).max().unwrap_or(0);
    VisitedPage { page, class, home, compute_ns, visits }
}

/// Touches by rising index, at least one, as visits.
fn joined(touches: &[usize], steps: usize) -> Vec<Visit> {
    let mut visits: Vec<Visit> = Vec::new();
    for touch in touches {
        match visits.last_mut() {
            Some(visit) if touch - visit.last <= KEPT_STEPS => visit.last = *touch,
            _ => visits.push(Visit { first: *touch, last: *touch }),
        }
    }
    // Across the end of the cycle.
    let (first, last) = (visits[0], visits[visits.len() - 1]);
    if visits.len() > 1 && first.first + steps - last.last <= KEPT_STEPS {
        visits.remove(0);
        let end = visits.len() - 1;
        visits[end].last = first.last + steps;
    }
    visits
}
