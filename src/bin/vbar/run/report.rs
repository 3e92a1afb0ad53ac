//! The numbers of a run: a line a pass, a table, the totals, and the object for programs.

use std::collections::BTreeMap;

use serde::Serialize;
use vbar::ModelBar;
use vbar::driver::select::Opened;
use vbar::runtime::Statistics;
use vbar::units::format_bytes;

use super::pass::Counted;
use super::verify::Verifier;
use crate::arguments::argument_of_bytes;
use crate::doctor::has_virtual_memory;
use crate::output::{Output, megabytes_a_second};

/// A run whose resident part of the bytes used is below one of so many says little.
const HARDLY_PARTS: u64 = 100;

/// One pass.
#[derive(Serialize, Clone, Copy)]
pub(super) struct PassReport {
    ms: f64,
    resident: u64,
    refilled: u64,
    offloaded: u64,
    bytes_copied: u64,
    mismatches: u64,
    #[serde(skip)]
    bytes_resident: u64,
}

/// A budget that was set in mid-run.
#[derive(Serialize, Clone, Copy)]
pub(super) struct BudgetChange {
    /// The pass in whose middle it was, the first being 1.
    pub(super) pass: u32,
    /// None where there is no limit but what is free.
    pub(super) budget_bytes: Option<u64>,
}

/// Waits of one kind.
#[derive(Serialize, Clone, Copy)]
struct Wait {
    count: u64,
    ms: f64,
}

/// What a run leaves behind.
pub(super) struct Done<'a> {
    pub(super) opened: &'a Opened,
    pub(super) bar: &'a ModelBar,
    pub(super) verifier: Option<&'a Verifier>,
    pub(super) budget_bytes: u64,
    pub(super) budget_changes: Vec<BudgetChange>,
    pub(super) passes: Vec<PassReport>,
}

/// The whole run. The serialized fields are part of the program's interface.
#[derive(Serialize)]
pub(crate) struct Report {
    device: String,
    model_bytes: u64,
    tensor_count: usize,
    page_bytes: u64,
    budget_bytes: u64,
    peak_device_bytes: u64,
    peak_locked_bytes: u64,
    verified: bool,
    passes: Vec<PassReport>,
    budget_changes: Vec<BudgetChange>,
    evicted_pages: u64,
    refusals: BTreeMap<&'static str, u64>,
    waits: BTreeMap<&'static str, Wait>,
    /// That the numbers say little, and what to do.
    warning: Option<String>,
    pub(crate) ok: bool,
    #[serde(skip)]
    statistics: Statistics,
}

impl From<Counted> for PassReport {
    fn from(counted: Counted) -> Self {
        let Counted { time, resident, refilled, offloaded, .. } = counted;
        let Counted { bytes_copied, bytes_resident, mismatches, .. } = counted;
        let ms = time.as_secs_f64() * 1e3;
        Self { ms, resident, refilled, offloaded, bytes_copied, bytes_resident, mismatches }
    }
}

impl PassReport {
    /// One line of the table; without a rate where nothing was resident.
    pub(super) fn line(&self) -> String {
        let Self { ms, resident, refilled, offloaded, bytes_copied, mismatches, .. } = self;
        let rate = match self.bytes_resident {
            0 => String::new(),
            _ => format!("{:.0} MB/s", megabytes_a_second(*bytes_copied, *ms)),
        };
        format!(
            "{ms:>9.1} ms  resident {resident:>5}  refilled {refilled:>5}  offloaded \
             {offloaded:>5}  copied {:>10}  {rate:>12}  mismatches {mismatches}",
            format_bytes(*bytes_copied),
        )
    }
}

impl Report {
    pub(super) fn new(done: Done<'_>) -> Self {
        let warning = done.warning();
        let Done { opened, bar, verifier, budget_bytes, budget_changes, passes } = done;
        let (model, runtime) = (bar.model(), bar.vbar().runtime());
        let statistics = runtime.statistics();
        let waits = statistics.waits.iter().map(|(kind, wait)| {
            (kind.word(), Wait { count: wait.count, ms: wait.total.as_secs_f64() * 1e3 })
        });
        let refusals = statistics.refusals.iter().map(|(reason, count)| (reason.word(), *count));
        Self {
            device: opened.how.clone(),
            model_bytes: model.total_bytes(),
            tensor_count: model.tensors().len(),
            page_bytes: runtime.page_size().bytes(),
            budget_bytes,
            peak_device_bytes: statistics.memory.peak_bytes,
            peak_locked_bytes: statistics.locked_bytes + verifier.map_or(0, Verifier::locked_bytes),
            verified: verifier.is_some(),
            ok: passes.iter().all(|pass| pass.mismatches == 0),
            passes,
            budget_changes,
            evicted_pages: statistics.pages_evicted,
            refusals: refusals.collect(),
            waits: waits.collect(),
            warning,
            statistics,
        }
    }

    /// The totals, for people; the passes have been shown one by one.
    pub(crate) fn show(&self, output: &Output) {
        let sum = |of: fn(&PassReport) -> u64| self.passes.iter().map(of).sum::<u64>();
        let ms: f64 = self.passes.iter().map(|pass| pass.ms).sum();
        let (copied, used) =
            (sum(|pass| pass.bytes_copied), self.model_bytes * self.passes.len() as u64);
        let rate = |bytes| match self.warning {
            // It would be the rate of something else.
            Some(_) => String::new(),
            None => format!(" ({:.0} MB/s)", megabytes_a_second(bytes, ms)),
        };
        output.labelled(
            "total",
            format!(
                "{} used in {:.2} s{}, {} copied{}",
                format_bytes(used),
                ms / 1e3,
                rate(used),
                format_bytes(copied),
                rate(copied)
            ),
        );
        output.labelled(
            "memory",
            format!(
                "at most {} of the device, {} page-locked",
                format_bytes(self.peak_device_bytes),
                format_bytes(self.peak_locked_bytes)
            ),
        );
        self.show_statistics(output);
        if let Some(warning) = &self.warning {
            output.labelled("warning", warning);
        }
        let mismatches = sum(|pass| pass.mismatches);
        output.line(match (self.verified, self.ok) {
            (true, true) => "ok: every tensor of every pass was verified on the device".to_owned(),
            (false, true) => "ok (bytes were not verified: see --verify)".to_owned(),
            _ => format!("FAILED: {mismatches} tensors had other bytes than the file"),
        });
    }

    fn show_statistics(&self, output: &Output) {
        let Statistics { pages_mapped, pages_evicted, pages_aliased, .. } = self.statistics;
        output.labelled(
            "pages",
            format!(
                "{pages_mapped} mapped, {pages_evicted} evicted ({pages_aliased} while still \
             in use)"
            ),
        );
        let waits = self.statistics.waits.iter().map(|(kind, wait)| {
            format!("{kind} {} ({:.1} ms)", wait.count, wait.total.as_secs_f64() * 1e3)
        });
        output.labelled("waits", listed(waits.collect()));
        let refusals = self.statistics.refusals.iter();
        let refusals = refusals.map(|(reason, count)| format!("{reason} {count}"));
        output.labelled("refused", listed(refusals.collect()));
    }
}

impl Done<'_> {
    fn warning(&self) -> Option<String> {
        let model_bytes = self.bar.model().total_bytes();
        let resident: u64 = self.passes.iter().map(|pass| pass.bytes_resident).sum();
        let used = model_bytes * self.passes.len() as u64;
        if resident >= used.div_ceil(HARDLY_PARTS) {
            return None;
        }
        let what = if resident == 0 { "nothing" } else { "hardly anything" };
        let least = self.least_budget();
        Some(if !has_virtual_memory(&*self.opened.driver, self.opened.device) {
            let device = self.opened.device;
            format!("{what} fitted: device {device} has no virtual memory management")
        } else if self.budget_bytes < least {
            format!("{what} fitted: raise --budget (at least {})", argument_of_bytes(least))
        } else {
            format!("{what} fitted: the device has less free memory than the budget")
        })
    }

    /// Where each tensor fits, one at a time.
    fn least_budget(&self) -> u64 {
        let page_size = self.bar.vbar().runtime().page_size();
        let places = (0..self.bar.model().tensors().len()).map(|tensor| self.bar.range(tensor));
        let pages = places
            .filter(|place| !place.is_empty())
            .map(|place| page_size.pages_for(place.end) - place.start / page_size.bytes());
        let scratch_bytes = self.verifier.map_or(0, Verifier::scratch_bytes);
        pages.max().unwrap_or(0) * page_size.bytes() + scratch_bytes
    }
}

fn listed(items: Vec<String>) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}
