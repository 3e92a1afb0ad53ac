//! Memory graphs: scopes around requests of PyTorch's that repeat.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use super::super::call::{call, invalid, stale};
use super::super::device::{VbarStream, too_many};
use super::super::status::VbarStatus;
use super::super::tag;
use super::super::value::{Growing, Out, OutGrowing, Plain};
use super::table;
use crate::error::Result;
use crate::slots::{Handles, Ref, Spread};
use crate::torch::{MemoryGraph, Pass};
use crate::units::Stream;

/// A memory graph. 0 is none; ids are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarTorchGraph {
    /// The id.
    pub id: u64,
}

/// What a program does with a memory graph.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum VbarTorchGraphStep {
    /// Begins a scope within those that are open: with the first one the calling thread's requests
    /// for the graph's stream become the graph's. Scopes end with their thread, too.
    Enter = 1,
    /// Ends the innermost scope.
    Leave = 2,
    /// Ends a pass of the innermost scope and begins another in its place.
    Next = 3,
    /// Requests are ordinary, until as many `VBAR_TORCH_GRAPH_STEP_RESUME`.
    Pause = 4,
    /// Ends a pause.
    Resume = 5,
    /// Ends all scopes, from any thread. What lives stays.
    Abort = 6,
}

/// What a memory graph has.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct VbarTorchGraphStatistics {
    /// `sizeof(VbarTorchGraphStatistics)`, set by the caller.
    pub size: usize,
    /// Bytes of its live blocks, rounded up as they are.
    pub used_bytes: u64,
    /// The most that this was.
    pub peak_used_bytes: u64,
    /// Bytes of its pages: their addresses and their frames come and go together.
    pub pool_bytes: u64,
    /// Live blocks whose scope has ended.
    pub rogue_count: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarTorchGraph {}
// SAFETY: integers, of which every pattern is a value; the size first.
unsafe impl Plain for VbarTorchGraphStatistics {}
// SAFETY: as above.
unsafe impl Growing for VbarTorchGraphStatistics {
    const FIRST_BYTES: usize =
        std::mem::offset_of!(VbarTorchGraphStatistics, rogue_count) + size_of::<u64>();
}

static GRAPHS: Handles<MemoryGraph> = Handles::new(tag::TORCH_GRAPH, Spread::One);

fn find(graph: VbarTorchGraph) -> Result<Ref<MemoryGraph>> {
    GRAPHS.get(graph.id).ok_or_else(|| stale("memory graph", graph.id))
}

/// Makes a memory graph, for work on a stream of a device, opening the device as an allocation
/// would. A pass of a scope that asks for what an earlier one of its name did gets the same
/// addresses: nothing is mapped, and no driver is called. Statuses: those of `vbar_device_open`;
/// `INVALID_ARGUMENT` also for no stream, `UNSUPPORTED` also on a device without virtual memory
/// management. Thread-safe.
///
/// # Safety
/// `graph` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_graph_create(
    ordinal: i32,
    stream: VbarStream,
    graph: *mut VbarTorchGraph,
) -> VbarStatus {
    call(|| {
        let out = Out::new(graph)?;
        let allocator = &table::device(ordinal)?.allocator;
        let made = MemoryGraph::new(allocator, Stream(stream))?;
        let id = GRAPHS.insert(made).map_err(|_| too_many("memory graphs"))?;
        out.write(VbarTorchGraph { id });
        Ok(())
    })
}

/// Does a step with a graph, a `VbarTorchGraphStep`. `name` is that of the scope which begins, and
/// tells which earlier passes it is compared with; other steps do not look at it. `broken` is NULL,
/// or gets 1 where a pass ended that was not as an earlier one, else 0: the next one that goes the
/// same way is not broken. Statuses: the common ones; `INVALID_ARGUMENT` also where no scope of the
/// graph is open on the calling thread (all but `ENTER` and `ABORT`), for `ENTER` while scopes of
/// another graph are open on the thread or the graph's on another thread, and for `RESUME` where
/// nothing is paused. Nothing has changed then. Thread-safe.
///
/// # Safety
/// `broken` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_graph_step(
    graph: VbarTorchGraph,
    step: u32,
    name: u64,
    broken: *mut u32,
) -> VbarStatus {
    call(|| {
        let out = if broken.is_null() { None } else { Some(Out::new(broken)?) };
        let graph = find(graph)?;
        let pass = take(&graph, of_number(step)?, name)?;
        if let Some(out) = out {
            out.write(u32::from(pass == Some(Pass::Broken)));
        }
        Ok(())
    })
}

fn of_number(step: u32) -> Result<VbarTorchGraphStep> {
    use VbarTorchGraphStep::{Abort, Enter, Leave, Next, Pause, Resume};
    let all = [Enter, Leave, Next, Pause, Resume, Abort];
    let known = all.into_iter().find(|known| *known as u32 == step);
    known.ok_or_else(|| invalid(format!("step is {step}: 1 to 6 are expected")))
}

/// The pass that ended with the step.
fn take(graph: &MemoryGraph, step: VbarTorchGraphStep, name: u64) -> Result<Option<Pass>> {
    match step {
        VbarTorchGraphStep::Enter => graph.enter(name).map(|()| None),
        VbarTorchGraphStep::Leave => graph.leave().map(Some),
        VbarTorchGraphStep::Next => graph.next(name).map(Some),
        VbarTorchGraphStep::Pause => graph.pause().map(|()| None),
        VbarTorchGraphStep::Resume => graph.resume().map(|()| None),
        VbarTorchGraphStep::Abort => graph.abort().map(|()| None),
    }
}

/// Gives a graph another stream: what it does there comes after all that the old one was given by
/// now. Statuses: the common ones, the driver's, `CLOSED`; `INVALID_ARGUMENT` also for no stream,
/// while scopes of the graph are open on another thread, and while either stream is being captured.
/// The graph has its old stream then. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_graph_use_stream(
    graph: VbarTorchGraph,
    stream: VbarStream,
) -> VbarStatus {
    call(|| find(graph)?.use_stream(Stream(stream)))
}

/// Tells what a graph has. Statuses: the common ones. Thread-safe.
///
/// # Safety
/// `statistics` is NULL or points to as many bytes as its size field says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_torch_graph_statistics(
    graph: VbarTorchGraph,
    statistics: *mut VbarTorchGraphStatistics,
) -> VbarStatus {
    call(|| {
        let out = OutGrowing::new(statistics)?;
        let from = find(graph)?.statistics();
        out.write(VbarTorchGraphStatistics {
            size: 0,
            used_bytes: from.used_bytes,
            peak_used_bytes: from.peak_used_bytes,
            pool_bytes: from.pool_bytes,
            rogue_count: from.rogue_count,
        });
        Ok(())
    })
}

/// Destroys a graph. Its scopes end, what lives stays as if it had been asked for without, and what
/// it has free is anybody's after the work that used it. Statuses: the common ones. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_torch_graph_destroy(graph: VbarTorchGraph) -> VbarStatus {
    call(|| match GRAPHS.close(graph.id) {
        true => Ok(()),
        false => Err(stale("memory graph", graph.id)),
    })
}
