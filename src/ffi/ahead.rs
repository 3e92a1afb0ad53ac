//! Advice for the engine: what the program will want soon, and in which order it will fault.
//!
//! Checked like a fault, as a whole and before anything is done with it; then it is the engine's,
//! and without threads nobody's.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::bar::{self, BarEntry, VbarBar};
use super::call::{call, invalid};
use super::device::{self, VbarDevice};
use super::fault::VbarRange;
use super::model::{self, VbarModel};
use super::status::VbarStatus;
use super::value::{byte_range, read_array};
use crate::error::Result;
use crate::runtime::{Vbar, check_hint};
use crate::slots::Ref;

/// Says that bytes of a bound VBAR, from `bar_offset` on, will be wanted soon, once. The device's
/// engine brings them in as far as there are frames that nothing needs earlier; a fault that comes
/// before helps itself. Advice: without `VBAR_THREADS_ON` it is checked and nothing comes of it.
/// Statuses: the common ones, `CLOSED`; `INVALID_ARGUMENT` outside the VBAR, and for one that is
/// not bound. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_bar_prefetch(bar: VbarBar, bar_offset: u64, bytes: u64) -> VbarStatus {
    call(|| bar::find(bar)?.vbar.prefetch(byte_range(bar_offset, bytes)?))
}

/// Says that a tensor will be wanted soon, once; see `vbar_bar_prefetch`. Statuses: those of
/// `vbar_bar_prefetch`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_model_prefetch(model: VbarModel, index: u64) -> VbarStatus {
    call(|| {
        let entry = model::find(model)?;
        let (number, _) = entry.tensor(index)?;
        entry.bar.prefetch(number)
    })
}

/// Says in which order the program will fault, from its next fault on; behind the last step comes
/// the first again. A step is what one fault, or one `vbar_device_fault_many`, makes resident
/// together: `range_counts[0]` ranges of bound VBARs of the device, then `range_counts[1]`, and so
/// on, one behind the other in `ranges`. Believed until the program does something else, and not
/// needed: an order is learned from its first pass. Advice as `vbar_bar_prefetch`; either all of it
/// is taken or none. Statuses: the common ones, `CLOSED`; `INVALID_ARGUMENT` for a
/// step of no ranges, a range outside its VBAR, and a VBAR that is not bound or of another device.
/// Thread-safe.
///
/// # Safety
/// `range_counts` has `step_count` elements, `ranges` as many as these come to together, and nobody
/// writes them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_device_schedule_hint(
    device: VbarDevice,
    ranges: *const VbarRange,
    range_counts: *const usize,
    step_count: usize,
) -> VbarStatus {
    call(|| {
        check_hint(step_count, step_count)?;
        let counts = read_array(range_counts, step_count)?;
        check_hint(step_count, total_of(counts)?)?;
        let ranges = read_array(ranges, total_of(counts)?)?;
        let entries: Vec<_> =
            ranges.iter().map(|range| bar::find(range.bar)).collect::<Result<_>>()?;
        let steps = steps_of(&entries, ranges, counts)?;
        device::find(device)?.runtime.schedule_hint(&steps)
    })
}

/// As `vbar_device_schedule_hint` for tensors of one model that are faulted one by one, by their
/// indexes. Statuses: those of `vbar_device_schedule_hint`; `INVALID_ARGUMENT` for an index that
/// the model does not have. Thread-safe.
///
/// # Safety
/// `indexes` has `count` elements, and nobody writes them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_model_schedule_hint(
    model: VbarModel,
    indexes: *const u64,
    count: usize,
) -> VbarStatus {
    call(|| {
        check_hint(count, count)?;
        let indexes = read_array(indexes, count)?;
        let entry = model::find(model)?;
        let number = |index: &u64| entry.tensor(*index).map(|(number, _)| number);
        let order: Vec<usize> = indexes.iter().map(number).collect::<Result<_>>()?;
        entry.bar.schedule_hint(&order)
    })
}

/// Ranges of all steps.
fn total_of(counts: &[usize]) -> Result<usize> {
    let mut total = 0usize;
    for (step, count) in counts.iter().enumerate() {
        if *count == 0 {
            return Err(invalid(format!("step {step} has no ranges")));
        }
        let sum = total.checked_add(*count);
        total = sum.ok_or_else(|| invalid("an array of all ranges is larger than memory"))?;
    }
    Ok(total)
}

type Step<'a> = Vec<(&'a Vbar, std::ops::Range<u64>)>;

fn steps_of<'a>(
    entries: &'a [Ref<BarEntry>],
    ranges: &[VbarRange],
    counts: &[usize],
) -> Result<Vec<Step<'a>>> {
    let mut all = entries.iter().zip(ranges);
    let mut steps = Vec::with_capacity(counts.len());
    for count in counts {
        let step = all
            .by_ref()
            .take(*count)
            .map(|(entry, range)| Ok((&entry.vbar, byte_range(range.bar_offset, range.bytes)?)));
        steps.push(step.collect::<Result<Step<'a>>>()?);
    }
    Ok(steps)
}
