//! Captures of the simulated device, and the graphs that they come to.
//!
//! A graph keeps what the library retained for it until it is destroyed and its launches are done.

#![expect(unsafe_code, reason = "exported symbols must keep their names")]

use std::sync::Arc;

use super::call::{call, invalid, stale};
use super::device::{self, VbarDevice, VbarStream};
use super::sim::{load_kernels, of_device, on_device};
use super::status::VbarStatus;
use super::tag;
use super::value::{Out, Plain};
use crate::driver::CaptureMode;
use crate::driver::sim::{Sim, SimGraph};
use crate::error::Result;
use crate::slots::{Handles, Ref, Spread};
use crate::units::Stream;

/// What was captured on a simulated device, ready to be launched: a `CUgraphExec`. 0 is none; ids
/// are never used again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct VbarSimGraph {
    /// The id.
    pub id: u64,
}

// SAFETY: integers.
unsafe impl Plain for VbarSimGraph {}

struct GraphEntry {
    graph: SimGraph,
    sim: Arc<Sim>,
}

static GRAPHS: Handles<GraphEntry> = Handles::new(tag::SIM_GRAPH, Spread::One);

fn find(graph: VbarSimGraph) -> Result<Ref<GraphEntry>> {
    GRAPHS.get(graph.id).ok_or_else(|| stale("graph", graph.id))
}

/// Begins a capture, as `cuStreamBeginCapture`: until its end, what is enqueued on the stream is
/// recorded and does not run. `mode` is a `CUstreamCaptureMode`: 0 global, 1 thread-local, 2
/// relaxed. Faults of a stream that is captured see only what is resident already, and those of
/// bound VBARs; everything else is offloaded with `VBAR_REASON_CAPTURE`. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_stream_begin_capture(
    device: VbarDevice,
    stream: VbarStream,
    mode: u32,
) -> VbarStatus {
    call(|| {
        let mode = match mode {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => return Err(invalid(format!("mode is {mode}: 0 to 2 are expected"))),
        };
        on_device(device, |sim| {
            // The first launch would load them, which breaks captures.
            load_kernels(sim)?;
            sim.begin_capture(Stream(stream), mode)
        })
    })
}

/// Ends a capture, as `cuStreamEndCapture` and `cuGraphInstantiate`. What was faulted for the
/// stream, used by what was recorded and unpinned, stays resident until the graph is destroyed. A
/// capture that was broken ends with a status, and leaves no graph. Thread-safe.
///
/// # Safety
/// `graph` is NULL or can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vbar_sim_stream_end_capture(
    device: VbarDevice,
    stream: VbarStream,
    graph: *mut VbarSimGraph,
) -> VbarStatus {
    call(|| {
        let out = Out::new(graph)?;
        let graph = on_device(device, |sim| sim.end_capture(Stream(stream)))?;
        let entry = GraphEntry { graph, sim: of_device(device)?.0 };
        let id = GRAPHS.insert(entry).map_err(|_| device::too_many("graphs"))?;
        out.write(VbarSimGraph { id });
        Ok(())
    })
}

/// Enqueues everything that was captured, in the order of its recording, as `cuGraphLaunch`.
/// Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_graph_launch(
    device: VbarDevice,
    graph: VbarSimGraph,
    stream: VbarStream,
) -> VbarStatus {
    call(|| {
        let sim = of_device(device)?.0;
        let entry = find(graph)?;
        if !Arc::ptr_eq(&sim, &entry.sim) {
            return Err(invalid("the graph was captured on another device"));
        }
        on_device(device, |_| entry.graph.launch(Stream(stream)))
    })
}

/// Destroys a graph, as `cuGraphExecDestroy`: launches that are under way still run, then what it
/// kept resident may be evicted. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn vbar_sim_graph_destroy(graph: VbarSimGraph) -> VbarStatus {
    call(|| match GRAPHS.close(graph.id) {
        true => Ok(()),
        false => Err(stale("graph", graph.id)),
    })
}
