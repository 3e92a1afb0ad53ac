//! How much room a run needs: its page size, its headroom, and the least budget that suffices.
//!
//! Computes from the model's table and the device's granularity; nothing is opened or made. The
//! page size follows from the budget, so a budget suffices when it does so in the pages that it
//! itself leads to.

use vbar::Result;
use vbar::driver::select::Opened;
use vbar::host::model_files::Model;
use vbar::model::binding::lay_out;
use vbar::options::HEADROOM_DEFAULT;
use vbar::units::PageSize;

use super::verify;

/// Pages that a budget should have at least, unless the page size was given.
const BUDGET_PAGES_MIN: u64 = 16;

/// At most this part of a device is left free.
const HEADROOM_PARTS: u64 = 16;

/// What decides how much room a run needs.
pub(super) struct Room<'a> {
    model: &'a Model,
    /// The least that can be mapped.
    granularity: u64,
    /// The page size, where it was given.
    given: Option<PageSize>,
    verifies: bool,
}

impl<'a> Room<'a> {
    pub(super) fn new(
        opened: &Opened,
        model: &'a Model,
        given: Option<PageSize>,
        verifies: bool,
    ) -> Self {
        let granularity = opened.driver.mem_get_allocation_granularity(opened.device);
        // Without virtual memory management there is none, and no page either.
        let granularity = granularity.unwrap_or(u64::MAX);
        Self { model, granularity, given, verifies }
    }

    /// The page size that was given; else 16 MiB, or the largest that gives the budget a few pages
    /// to work with.
    pub(super) fn page_size(&self, budget: Option<u64>) -> PageSize {
        if let Some(given) = self.given {
            return given;
        }
        let mut page_size = PageSize::DEFAULT;
        while let Some(smaller) = PageSize::new(page_size.bytes() / 2)
            && smaller.bytes() >= self.granularity
            && budget.is_some_and(|budget| budget / page_size.bytes() < BUDGET_PAGES_MIN)
        {
            page_size = smaller;
        }
        page_size
    }

    /// The budget above `budget` in which each tensor fits, one at a time, beside the scratch of a
    /// verification.
    ///
    /// # Errors
    /// Those of laying the model out.
    pub(super) fn least_budget(&self, budget: Option<u64>) -> Result<u64> {
        let mut least = self.needed_bytes(self.page_size(budget))?;
        // A larger budget has larger pages, which may take more. They do not grow for ever.
        loop {
            let needed = self.needed_bytes(self.page_size(Some(least)))?;
            if needed <= least {
                return Ok(least);
            }
            least = needed;
        }
    }

    fn needed_bytes(&self, page_size: PageSize) -> Result<u64> {
        let layout = lay_out(&self.model.layout_items(), page_size, 0)?;
        let pages = (layout.places.iter())
            .filter(|place| !place.is_empty())
            .map(|place| page_size.pages_for(place.end) - place.start / page_size.bytes());
        let largest = pages.max().unwrap_or(0).saturating_mul(page_size.bytes());
        let scratch = match self.verifies {
            true => verify::scratch_bytes(self.model, page_size).unwrap_or(u64::MAX),
            false => 0,
        };
        Ok(largest.saturating_add(scratch))
    }
}

/// The usual headroom, less on a device so small that little would be left of it.
pub(super) fn fitting_headroom(opened: &Opened) -> Result<u64> {
    let total = opened.driver.device_total_mem(opened.device)?;
    Ok(HEADROOM_DEFAULT.min(total / HEADROOM_PARTS))
}

#[cfg(test)]
mod tests {
    use vbar::model::synth::SyntheticModel;
    use vbar::units::MIB;

    use super::*;

    #[test]
    fn the_least_budget_suffices_in_its_own_pages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        SyntheticModel { total_bytes: 64 * MIB, seed: 3, shards: 1 }.write(&path, &|_| {}).unwrap();
        let model = Model::open(&path).unwrap();
        for granularity in [64 << 10, 2 * MIB] {
            for verifies in [false, true] {
                let room = Room { model: &model, granularity, given: None, verifies };
                for budget in [None, Some(0), Some(granularity), Some(40 * MIB)] {
                    let least = room.least_budget(budget).unwrap();
                    let again = room.least_budget(Some(least)).unwrap();
                    assert!(again <= least, "{again} of {least}");
                    assert_eq!(least % granularity, 0);
                }
            }
        }
    }

    #[test]
    fn a_given_page_size_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.safetensors");
        SyntheticModel { total_bytes: MIB, seed: 3, shards: 1 }.write(&path, &|_| {}).unwrap();
        let model = Model::open(&path).unwrap();
        let given = PageSize::new(4 * MIB);
        let room = Room { model: &model, granularity: 64 << 10, given, verifies: true };
        assert_eq!(Some(room.page_size(Some(0))), given);
        // A page of the model, and one of scratch.
        assert_eq!(room.least_budget(None).unwrap(), 8 * MIB);
    }
}
