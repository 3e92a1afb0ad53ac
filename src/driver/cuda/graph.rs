//! Ties a callback to the life of the graph that a stream captures into.
//!
//! The driver's *user object* counts who may still run the graph and calls a destructor when nobody
//! may. It owns one share of a slot that holds the callback. The slot is why a failure can be
//! undone: once the object exists only its destructor can free it, but we empty the slot first, so
//! that the destructor finds nothing to call.

#![expect(unsafe_code, reason = "hands a pointer to the driver and gets it back in a destructor")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{check, output, present, real};
use crate::driver::sys::{
    Api, CU_GRAPH_USER_OBJECT_MOVE, CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_CAPTURE_STATUS_NONE,
    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CUgraph, CUstream,
};
use crate::driver::{DriverCode, DriverError, DriverResult, GraphRelease};
use crate::units::Stream;

/// Empty once the callback has been called, or once it must not be.
type Slot = Mutex<Option<GraphRelease>>;

/// Makes the graph that `stream` captures into own `release`. Returning an error drops it uncalled.
pub(super) fn retain(api: &Api, stream: Stream, release: GraphRelease) -> DriverResult<()> {
    const CREATE: &str = "cuUserObjectCreate";
    const RETAIN: &str = "cuGraphRetainUserObject";
    let graph = capturing_graph(api, real("cuStreamGetCaptureInfo", stream)?)?;
    let create = present(CREATE, api.cuUserObjectCreate)?;
    let retain = present(RETAIN, api.cuGraphRetainUserObject)?;
    let release_object = present("cuUserObjectRelease", api.cuUserObjectRelease)?;

    let slot: Arc<Slot> = Arc::new(Mutex::new(Some(release)));
    let shared = Arc::into_raw(Arc::clone(&slot)).cast_mut().cast::<c_void>();
    let created = output(CREATE, |object| {
        // SAFETY: `object` is a valid place; `shared` is the share that `run` takes back, once.
        unsafe { create(object, shared, run, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) }
    });
    let object = created.inspect_err(|_| {
        // SAFETY: no object was made, so its destructor never takes the share back.
        drop(unsafe { Arc::from_raw(shared.cast_const().cast::<Slot>()) });
    })?;
    // SAFETY: the graph is being captured, the object is ours, and our only reference moves.
    let code = unsafe { retain(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE) };
    check(RETAIN, code).inspect_err(|_| {
        let uncalled = slot.lock().take();
        drop(uncalled);
        // SAFETY: the reference has not moved, so it is ours to give up. Should this fail too, an
        // empty slot is leaked.
        unsafe { release_object(object, 1) };
    })
}

/// The graph of an active capture.
fn capturing_graph(api: &Api, stream: CUstream) -> DriverResult<CUgraph> {
    const CALL: &str = "cuStreamGetCaptureInfo";
    let (mut status, mut id, mut graph) = (CU_STREAM_CAPTURE_STATUS_NONE, 0, 0);
    // The nodes and edges are not asked for.
    let (nodes, edges, count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    let code = if let Some(get) = api.cuStreamGetCaptureInfo_v2 {
        // SAFETY: valid places for three results; null where a result may be left out.
        unsafe { get(stream, &mut status, &mut id, &mut graph, nodes, count) }
    } else {
        let get = present(CALL, api.cuStreamGetCaptureInfo_v3)?;
        // SAFETY: as above.
        unsafe { get(stream, &mut status, &mut id, &mut graph, nodes, edges, count) }
    };
    check(CALL, code)?;
    match status {
        CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(graph),
        CU_STREAM_CAPTURE_STATUS_NONE => Err(DriverError::new(CALL, DriverCode::INVALID_VALUE)),
        _ => Err(DriverError::new(CALL, DriverCode::STREAM_CAPTURE_INVALIDATED)),
    }
}

/// The user object's destructor. A panic ends here: behind it is a thread of the driver.
unsafe extern "C" fn run(shared: *mut c_void) {
    // SAFETY: the share that `retain` handed over; the driver calls a destructor once.
    let slot = unsafe { Arc::from_raw(shared.cast_const().cast::<Slot>()) };
    let release = slot.lock().take();
    if catch_unwind(AssertUnwindSafe(|| release.map(|release| release()))).is_err() {
        log::error!("a callback of a destroyed graph panicked");
    }
}
