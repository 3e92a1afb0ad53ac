//! The numbers of a run: a line a pass, a table, the totals, and the object for programs.

use std::collections::BTreeMap;

use serde::Serialize;
use vbar::ModelBar;
use vbar::copy::engine::EngineNumbers;
use vbar::driver::select::Opened;
use vbar::outcome::Reason;
use vbar::runtime::Statistics;
use vbar::units::format_bytes;

use super::pass::Counted;
use super::verify::Verifier;
use crate::arguments::argument_of_bytes;
use crate::doctor::has_virtual_memory;
use crate::output::{Output, rate};
use crate::sources::Sources;

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
    hit_rate: f64,
    pages_ahead: u64,
    sources: Sources,
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

/// Page-locked bytes at the end, by what holds them.
#[derive(Serialize, Clone, Copy)]
struct Locked {
    ring_bytes: u64,
    cache_bytes: u64,
    registered_bytes: u64,
}

/// What the engine knew at the end.
#[derive(Serialize, Clone, Copy)]
struct Engine {
    trust: u64,
    departures: u64,
    plans: u64,
    planned_pages: u64,
    kept_pages: u64,
}

impl From<EngineNumbers> for Engine {
    fn from(numbers: EngineNumbers) -> Self {
        let EngineNumbers { trust, departures, plans, planned_pages, kept_pages, .. } = numbers;
        Self { trust, departures, plans, planned_pages, kept_pages }
    }
}

/// What a run leaves behind.
pub(super) struct Done<'a> {
    pub(super) opened: &'a Opened,
    pub(super) bar: &'a ModelBar,
    pub(super) verifier: Option<&'a Verifier>,
    pub(super) budget_bytes: u64,
    /// In which each tensor fits.
    pub(super) least_budget: u64,
    pub(super) budget_changes: Vec<BudgetChange>,
    pub(super) passes: Vec<PassReport>,
    /// `None` without threads.
    pub(super) engine: Option<EngineNumbers>,
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
    /// Of all faults, the part that found every page resident.
    hit_rate: f64,
    /// Faults that had to fill a page.
    misses: u64,
    /// Pages that were fetched before a fault asked for them.
    pages_ahead: u64,
    /// Bytes copied to the device, by the time of all passes.
    copied_bytes_per_second: f64,
    /// Where the bytes of fills came from.
    sources: Sources,
    locked: Locked,
    /// None without threads.
    engine: Option<Engine>,
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
        let (ms, hit_rate) = (time.as_secs_f64() * 1e3, counted.hit_rate());
        let pages_ahead = counted.pages_ahead;
        Self {
            ms,
            resident,
            refilled,
            offloaded,
            bytes_copied,
            mismatches,
            hit_rate,
            pages_ahead,
            sources: counted.sources.into(),
            bytes_resident,
        }
    }
}

impl PassReport {
    /// One line of the table; without a rate where nothing was resident, and without a count of
    /// wrong tensors where nobody looked.
    pub(super) fn line(&self, verified: bool) -> String {
        let Self { ms, resident, refilled, offloaded, bytes_copied, mismatches, .. } = self;
        let (hits, pages_ahead) = (100.0 * self.hit_rate, self.pages_ahead);
        let rate = match self.bytes_resident {
            0 => String::new(),
            _ => rate(*bytes_copied, *ms),
        };
        let mismatches =
            if verified { format!("  mismatches {mismatches}") } else { String::new() };
        format!(
            "{ms:>9.1} ms  resident {resident:>5}  refilled {refilled:>5}  offloaded \
             {offloaded:>5}  hits {hits:>5.1} %  ahead {pages_ahead:>5}  copied {:>10}  \
             {rate:>12}{mismatches}",
            format_bytes(*bytes_copied),
        )
    }
}

impl Report {
    pub(super) fn new(done: Done<'_>) -> Self {
        let warning = done.warning();
        let Done { opened, bar, verifier, budget_bytes, budget_changes, passes, engine, .. } = done;
        let (model, runtime) = (bar.model(), bar.vbar().runtime());
        let statistics = runtime.statistics();
        let waits = statistics.waits.iter().map(|(kind, wait)| {
            (kind.word(), Wait { count: wait.count, ms: wait.total.as_secs_f64() * 1e3 })
        });
        let refusals = statistics.refusals.iter().map(|(reason, count)| (reason.word(), *count));
        let sum = |of: fn(&PassReport) -> u64| passes.iter().map(of).sum::<u64>();
        let (hits, misses) = (sum(|pass| pass.resident), sum(|pass| pass.refilled));
        let faults = hits + misses + sum(|pass| pass.offloaded);
        let seconds: f64 = passes.iter().map(|pass| pass.ms / 1e3).sum();
        Self {
            device: opened.how.clone(),
            model_bytes: model.total_bytes(),
            tensor_count: model.tensors().len(),
            page_bytes: runtime.page_size().bytes(),
            budget_bytes,
            peak_device_bytes: statistics.memory.peak_bytes,
            peak_locked_bytes: statistics.locked_bytes + verifier.map_or(0, Verifier::locked_bytes),
            verified: verifier.is_some(),
            ok: passes.iter().all(|pass| pass.mismatches == 0)
                && (verifier.is_some()
                    || model.total_bytes() == 0
                    || sum(|pass| pass.bytes_resident) > 0),
            budget_changes,
            evicted_pages: statistics.pages_evicted,
            refusals: refusals.collect(),
            waits: waits.collect(),
            hit_rate: hits as f64 / faults.max(1) as f64,
            misses,
            pages_ahead: statistics.pages_ahead,
            copied_bytes_per_second: sum(|pass| pass.bytes_copied) as f64 / seconds.max(1e-9),
            sources: statistics.sources.into(),
            locked: Locked {
                ring_bytes: statistics.locked.ring_bytes,
                cache_bytes: statistics.locked.cache_bytes,
                registered_bytes: statistics.locked.registered_bytes,
            },
            engine: engine.map(Engine::from),
            warning,
            statistics,
            passes,
        }
    }

    /// The totals, for people; the passes have been shown one by one.
    pub(crate) fn show(&self, output: &Output) {
        let sum = |of: fn(&PassReport) -> u64| self.passes.iter().map(of).sum::<u64>();
        let ms: f64 = self.passes.iter().map(|pass| pass.ms).sum();
        let (copied, all) =
            (sum(|pass| pass.bytes_copied), self.model_bytes * self.passes.len() as u64);
        // A verification uses what is offloaded too.
        let used = if self.verified { all } else { sum(|pass| pass.bytes_resident) };
        let of_all = if used < all { format!(" of {}", format_bytes(all)) } else { String::new() };
        let at = |bytes| match self.warning {
            // It would be the rate of something else.
            Some(_) => String::new(),
            None => format!(" ({})", rate(bytes, ms)),
        };
        output.labelled(
            "total",
            format!(
                "{}{of_all} used in {:.2} s{}, {} copied{}",
                format_bytes(used),
                ms / 1e3,
                at(used),
                format_bytes(copied),
                at(copied)
            ),
        );
        output.labelled(
            "memory",
            format!(
                "at most {} of the device, {} page-locked ({} of it a cache)",
                format_bytes(self.peak_device_bytes),
                format_bytes(self.peak_locked_bytes),
                format_bytes(self.locked.cache_bytes)
            ),
        );
        output.labelled("sources", self.sources.text());
        self.show_statistics(output);
        if let Some(warning) = &self.warning {
            output.labelled("warning", warning);
        }
        output.line(self.verdict());
    }

    /// What it all came to, which agrees with the warning.
    fn verdict(&self) -> String {
        let sum = |of: fn(&PassReport) -> u64| self.passes.iter().map(of).sum::<u64>();
        let mismatches = sum(|pass| pass.mismatches);
        let little = self.warning.as_ref().map(|_| little(sum(|pass| pass.bytes_resident)));
        match (self.verified, self.ok, little) {
            (true, true, None) => {
                "ok: every tensor of every pass was verified on the device".to_owned()
            }
            (true, true, Some(little)) => format!(
                "ok, but {little} fitted: every tensor of every pass was verified, what was not \
                 resident by a copy for the check alone"
            ),
            (false, true, None) => "ok (bytes were not verified: see --verify)".to_owned(),
            (false, true, Some(little)) => {
                format!("ok, but {little} fitted (bytes were not verified: see --verify)")
            }
            _ if mismatches == 0 => "FAILED: no byte of the model was ever resident".to_owned(),
            _ => {
                let checks = self.tensor_count * self.passes.len();
                format!("FAILED: {mismatches} of {checks} checks found other bytes than the file's")
            }
        }
    }

    fn show_statistics(&self, output: &Output) {
        let Statistics { pages_mapped, pages_evicted, pages_aliased, .. } = self.statistics;
        let (hits, misses, pages_ahead) = (100.0 * self.hit_rate, self.misses, self.pages_ahead);
        output.labelled("faults", format!("{hits:.1} % hits, {misses} misses"));
        if let Some(Engine { plans, planned_pages, kept_pages, departures, .. }) = self.engine {
            output.labelled(
                "ahead",
                format!(
                    "{pages_ahead} pages fetched before they were asked for; {plans} plans, the \
                     last keeps {kept_pages} of {planned_pages} pages; {departures} departures \
                     from the order"
                ),
            );
        }
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

/// How little was resident, for a run of which that is to be told.
fn little(resident_bytes: u64) -> &'static str {
    if resident_bytes == 0 { "nothing" } else { "hardly anything" }
}

impl Done<'_> {
    fn warning(&self) -> Option<String> {
        let model_bytes = self.bar.model().total_bytes();
        let resident: u64 = self.passes.iter().map(|pass| pass.bytes_resident).sum();
        let used = model_bytes * self.passes.len() as u64;
        if resident >= used.div_ceil(HARDLY_PARTS) {
            return None;
        }
        Some(format!("{} fitted: {}", little(resident), self.why()))
    }

    /// Why so little was resident: what most refusals were for.
    fn why(&self) -> String {
        let (device, least) = (self.opened.device, self.least_budget);
        if !has_virtual_memory(&*self.opened.driver, device) {
            return format!("device {device} has no virtual memory management");
        }
        let refusals = self.bar.vbar().runtime().statistics().refusals;
        let most = refusals.into_iter().max_by_key(|(_, count)| *count);
        match most.map(|(reason, _)| reason) {
            Some(Reason::NoAddresses) => {
                format!("device {device} has no addresses left for a model of this size")
            }
            Some(Reason::Mappings) => {
                "the driver or the system allows no more mappings: use larger pages (--page-size), \
                 or raise vm.max_map_count"
                    .to_owned()
            }
            _ if self.total_bytes().is_some_and(|total| total < least) => format!(
                "the device has {} in all, and the largest tensor takes {}: use smaller pages \
                 (--page-size), or another device",
                format_bytes(self.total_bytes().unwrap_or_default()),
                format_bytes(least)
            ),
            _ if self.budget_bytes < least => {
                format!("raise --budget (at least {})", argument_of_bytes(least))
            }
            Some(Reason::TooLarge | Reason::Budget | Reason::DriverMemory) | None => {
                "the device has less free memory than the budget".to_owned()
            }
            Some(reason) => format!("faults were refused for {reason}"),
        }
    }

    fn total_bytes(&self) -> Option<u64> {
        self.opened.driver.device_total_mem(self.opened.device).ok()
    }
}

fn listed(items: Vec<String>) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}
