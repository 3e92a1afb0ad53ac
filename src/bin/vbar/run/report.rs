//! The numbers of a run: a line a pass, a table, the totals, and the object for programs.

use serde::Serialize;
use vbar::Runtime;
use vbar::driver::select::Opened;
use vbar::host::model_files::Model;
use vbar::runtime::Statistics;
use vbar::units::format_bytes;

use super::pass::Counted;
use crate::output::{Output, megabytes_a_second};

/// One pass.
#[derive(Serialize, Clone, Copy)]
pub(super) struct PassReport {
    ms: f64,
    resident: u64,
    refilled: u64,
    offloaded: u64,
    bytes_copied: u64,
    mismatches: u64,
}

/// The whole run. The serialized fields are part of the program's interface.
#[derive(Serialize)]
pub(super) struct Report {
    device: String,
    model_bytes: u64,
    tensor_count: usize,
    page_bytes: u64,
    budget_bytes: u64,
    peak_device_bytes: u64,
    peak_locked_bytes: u64,
    verified: bool,
    passes: Vec<PassReport>,
    pub(super) ok: bool,
    #[serde(skip)]
    statistics: Statistics,
}

impl From<Counted> for PassReport {
    fn from(counted: Counted) -> Self {
        let Counted { time, resident, refilled, offloaded, bytes_copied, mismatches } = counted;
        let ms = time.as_secs_f64() * 1e3;
        Self { ms, resident, refilled, offloaded, bytes_copied, mismatches }
    }
}

impl PassReport {
    /// One line of the table.
    pub(super) fn line(&self, number: u32, of: u32) -> String {
        let Self { ms, resident, refilled, offloaded, bytes_copied, mismatches } = self;
        format!(
            "pass {}/{of}  {ms:>9.1} ms  resident {resident:>5}  refilled {refilled:>5}  offloaded \
             {offloaded:>5}  copied {:>10}  {:>7.0} MB/s  mismatches {mismatches}",
            number + 1,
            format_bytes(*bytes_copied),
            megabytes_a_second(*bytes_copied, *ms),
        )
    }
}

impl Report {
    pub(super) fn new(
        opened: &Opened,
        runtime: &Runtime,
        model: &Model,
        budget_bytes: u64,
        scratch_locked_bytes: u64,
        verified: bool,
        passes: Vec<PassReport>,
    ) -> Self {
        let statistics = runtime.statistics();
        Self {
            device: opened.how.clone(),
            model_bytes: model.total_bytes(),
            tensor_count: model.tensors().len(),
            page_bytes: runtime.page_size().bytes(),
            budget_bytes,
            peak_device_bytes: statistics.memory.peak_bytes,
            peak_locked_bytes: statistics.locked_bytes + scratch_locked_bytes,
            verified,
            ok: passes.iter().all(|pass| pass.mismatches == 0),
            passes,
            statistics,
        }
    }

    /// The totals, for people; the passes have been shown one by one.
    pub(super) fn show(&self, output: &Output) {
        let sum = |of: fn(&PassReport) -> u64| self.passes.iter().map(of).sum::<u64>();
        let ms: f64 = self.passes.iter().map(|pass| pass.ms).sum();
        let (copied, used) =
            (sum(|pass| pass.bytes_copied), self.model_bytes * self.passes.len() as u64);
        output.line(format!(
            "total    {} used in {:.2} s ({:.0} MB/s), {} copied ({:.0} MB/s)",
            format_bytes(used),
            ms / 1e3,
            megabytes_a_second(used, ms),
            format_bytes(copied),
            megabytes_a_second(copied, ms)
        ));
        output.line(format!(
            "memory   at most {} of the device, {} page-locked",
            format_bytes(self.peak_device_bytes),
            format_bytes(self.peak_locked_bytes)
        ));
        self.show_statistics(output);
        let mismatches = sum(|pass| pass.mismatches);
        output.line(match (self.verified, self.ok) {
            (true, true) => "ok: every tensor of every pass was verified on the device".to_owned(),
            (false, true) => "ok (bytes were not verified: see --verify)".to_owned(),
            _ => format!("FAILED: {mismatches} tensors had other bytes than the file"),
        });
    }

    fn show_statistics(&self, output: &Output) {
        let Statistics { pages_mapped, pages_evicted, pages_aliased, .. } = self.statistics;
        output.line(format!(
            "pages    {pages_mapped} mapped, {pages_evicted} evicted ({pages_aliased} while still \
             in use)"
        ));
        let waits = self.statistics.waits.iter().map(|(kind, wait)| {
            format!("{kind} {} ({:.1} ms)", wait.count, wait.total.as_secs_f64() * 1e3)
        });
        output.line(format!("waits    {}", listed(waits.collect())));
        let refusals = self.statistics.refusals.iter();
        let refusals = refusals.map(|(reason, count)| format!("{reason} {count}"));
        output.line(format!("refused  {}", listed(refusals.collect())));
    }
}

fn listed(items: Vec<String>) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}
