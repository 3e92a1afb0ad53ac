//! Which streamed page gives its frame up first: the one whose next use is farthest.

use std::collections::HashMap;

use crate::model::schedule::{PageRef, Upcoming};

/// `held` in the order in which they should be given up: pages that are not predicted first, then
/// the farthest. Among equals the one that stands first goes first, so give the oldest in front.
/// Residents must not be among them: they are not given up for a load, but by a new placement.
#[must_use]
pub fn victims<'a>(
    held: &[PageRef],
    upcoming: impl IntoIterator<Item = Upcoming<'a>>,
) -> Vec<PageRef> {
    let mut next: HashMap<PageRef, u64> = held.iter().map(|page| (*page, u64::MAX)).collect();
    let mut unseen = next.len();
    for step in upcoming {
        if unseen == 0 {
            break;
        }
        for page in step.spans.iter().flat_map(|span| span.pages()) {
            if let Some(distance) = next.get_mut(&page).filter(|distance| **distance == u64::MAX) {
                *distance = step.distance;
                unseen -= 1;
            }
        }
    }
    let mut order = held.to_vec();
    order.sort_by_key(|page| std::cmp::Reverse(next[page]));
    order
}

/// The first of [`victims`], unless it is wanted at or before `wanted_at`, the distance of the step
/// that the frame is for: then nothing is gained by taking it. `None` also where nothing is held.
#[must_use]
pub fn next_victim<'a>(
    held: &[PageRef],
    upcoming: impl IntoIterator<Item = Upcoming<'a>> + Clone,
    wanted_at: u64,
) -> Option<PageRef> {
    let victim = *victims(held, upcoming.clone()).first()?;
    let soon = upcoming.into_iter().take_while(|step| step.distance <= wanted_at);
    let is_wanted =
        soon.flat_map(|step| step.spans).any(|span| span.pages().any(|page| page == victim));
    (!is_wanted).then_some(victim)
}
