//! Operations on everything but bytes: ranks, marks, budget, pressure, VBARs that come and go.

use vbar::memory::pager::{Freed, HeldPins};
use vbar::{Result, Vbar};

use super::choice::Choice;
use super::worker::Worker;
use super::world::{BARE_COUNT, Bare, Content};

/// Pages below the highest floor that is ever set.
pub(super) const FLOOR_MAX: u32 = 3;

impl Worker<'_> {
    /// A VBAR by a number: one of the bare ones or the bound one.
    fn any_vbar(&mut self) -> (usize, Vbar) {
        let number = self.choice.index(BARE_COUNT + 1);
        match number {
            BARE_COUNT => (number, self.world.bound().bar.vbar().clone()),
            _ => (number, self.world.bare(number).vbar.clone()),
        }
    }

    fn pages(&mut self, below: u64) -> u64 {
        self.choice.below(below)
    }

    pub(super) fn free_memory(&mut self) -> Result<()> {
        let (number, vbar) = self.any_vbar();
        let whole_device = self.choice.one_in(3);
        let bytes = self.pages(8) * self.world.page_bytes() + self.choice.below(2);
        self.tell(|| format!("free {bytes} bytes of VBAR {number}, device: {whole_device}"));
        let Freed { bytes: freed, shortfall } = match whole_device {
            true => self.world.runtime.free_memory(bytes)?,
            false => vbar.free_memory(bytes)?,
        };
        if freed % self.world.page_bytes() != 0 {
            self.world.journal.violation(format!("freed {freed} bytes: no whole pages"));
        }
        if freed < bytes && shortfall.is_none() && bytes > 0 {
            let text = format!("freed {freed} of {bytes} bytes and did not say why");
            self.world.journal.violation(text);
        }
        Ok(())
    }

    pub(super) fn set_rank(&mut self) -> Result<()> {
        let (number, vbar) = self.any_vbar();
        let (how, class) = (self.choice.below(4), self.choice.below(5) as i32 - 2);
        self.tell(|| format!("rank of VBAR {number}: {how} {class}"));
        match how {
            0 => vbar.deprioritise(),
            1 => vbar.set_class(class),
            _ => vbar.prioritise(),
        }
    }

    pub(super) fn set_marks(&mut self) -> Result<()> {
        let (number, vbar) = self.any_vbar();
        let (is_floor, pages) = (self.choice.one_in(2), self.pages(16) as u32);
        self.tell(|| format!("marks of VBAR {number}: floor {is_floor}, {pages} pages"));
        // A bound VBAR, the last, has no watermark.
        if is_floor || number == BARE_COUNT {
            return vbar.set_floor(pages % (FLOOR_MAX + 1));
        }
        vbar.set_watermark(pages)
    }

    /// Explicit budgets of half to twice the first one, an automatic one now and then; headroom.
    pub(super) fn set_budget(&mut self) -> Result<()> {
        let (full, page) = (self.world.budget_pages, self.world.page_bytes());
        let (how, drawn) = (self.choice.below(8), self.choice.next());
        self.tell(|| format!("budget {how} {drawn:#x}"));
        let runtime = &self.world.runtime;
        match how {
            0 => runtime.set_budget(None),
            1 => {
                // More than the device has is refused, as it should be.
                let device = runtime.device();
                let total = device.driver.device_total_mem(self.world.device)?;
                runtime.set_headroom((drawn % 8 * page).min(total))
            }
            _ => runtime.set_budget(Some((full / 2 + drawn % (full * 3 / 2)) * page)),
        }
    }

    pub(super) fn trim(&mut self) -> Result<()> {
        let (how, keep) = (self.choice.one_in(2), self.pages(8) * self.world.page_bytes());
        self.tell(|| format!("trim to {keep} or refresh: {how}"));
        match how {
            true => self.world.runtime.trim(keep).map(|_| ()),
            false => self.world.runtime.refresh(),
        }
    }

    /// Numbers that were taken together agree, and drawings have all pages.
    pub(super) fn look_at_numbers(&mut self) -> Result<()> {
        let (number, vbar) = self.any_vbar();
        self.tell(|| format!("numbers, and drawing of VBAR {number}"));
        let numbers = self.world.runtime.statistics().memory;
        if numbers.used_bytes > numbers.peak_bytes
            || numbers.free_bytes + numbers.quarantined_bytes > numbers.used_bytes
        {
            self.world.journal.violation(format!("numbers contradict themselves: {numbers:?}"));
        }
        let pages = vbar.marks().page_count as usize;
        let drawn = vbar.draw(u32::MAX).chars().count();
        if drawn != pages || vbar.residency().len() != pages {
            self.world.journal.violation(format!("{drawn} of {pages} pages are drawn"));
        }
        Ok(())
    }

    pub(super) fn replace_bar(&mut self) -> Result<()> {
        let number = self.choice.index(BARE_COUNT + 1);
        let shape = self.choice.next();
        self.tell(|| format!("replace VBAR {number}"));
        match number {
            BARE_COUNT => self.world.replace_bound(),
            _ => self.world.replace_bare(number, &mut Choice::new(shape, 0)),
        }
    }

    pub(super) fn end_of_run(&mut self) -> Result<()> {
        let (number, vbar) = self.any_vbar();
        let stream = self.any_stream();
        self.tell(|| format!("end of run of VBAR {number} on {stream:?}"));
        vbar.end_of_run(stream, HeldPins::Keep).map(|_| ())
    }

    /// Takes all pins of a VBAR back while nobody uses it; tokens on it are stale from then on.
    pub(super) fn release_by_force(&mut self) -> Result<()> {
        let number = self.choice.index(BARE_COUNT + 1);
        let stream = self.any_stream();
        self.tell(|| format!("release pins of VBAR {number} by force"));
        let (bare, bound);
        let (vbar, usage) = if number == BARE_COUNT {
            bound = self.world.bound();
            (bound.bar.vbar(), &bound.usage)
        } else {
            bare = self.world.bare(number);
            (&bare.vbar, &bare.usage)
        };
        let mut epoch = usage.0.write();
        vbar.end_of_run(stream, HeldPins::Release)?;
        *epoch += 1;
        if let Some(page) = vbar.residency().iter().position(|page| page.pins > 0) {
            let text = format!("page {page} of VBAR {number} is pinned after a forced release");
            self.world.journal.violation(text);
        }
        Ok(())
    }

    /// Another program takes device memory, or gives it back. On a real device there is none.
    pub(super) fn press_from_outside(&mut self) -> Result<()> {
        let (takes, drawn) = (self.choice.one_in(2), self.choice.next());
        let Some(sim) = &self.world.sim else { return Ok(()) };
        let left = drawn % (self.world.budget_pages * 2) * self.world.page_bytes();
        let bytes = if takes { sim.options().capacity.saturating_sub(left) } else { 0 };
        self.tell(|| format!("{bytes} bytes are used from outside"));
        sim.set_outside_bytes(self.world.device, bytes);
        Ok(())
    }

    /// Bytes are declared no good; nobody uses them, and all work on them is done.
    pub(super) fn invalidate(&mut self) -> Result<()> {
        let (number, drawn) = (self.choice.index(BARE_COUNT), self.choice.next());
        let bare = self.world.bare(number);
        let Bare { pieces, usage, .. } = &*bare;
        let index = (drawn % pieces.len() as u64) as usize;
        self.tell(|| format!("invalidate allocation {index} of VBAR {number}"));
        let _nobody = usage.0.write();
        let mut content = pieces[index].content.lock();
        self.world.runtime.device().driver.ctx_synchronize()?;
        pieces[index].allocation.invalidate();
        *content = Content::default();
        Ok(())
    }

    pub(super) fn cancel_waits(&mut self) -> Result<()> {
        self.tell(|| "cancel all waits".to_owned());
        self.world.runtime.cancel_waits();
        Ok(())
    }
}
