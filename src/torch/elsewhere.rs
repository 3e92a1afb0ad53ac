//! Uses of a block on streams of other contexts: of other devices, which reach its memory as peers.
//!
//! An event belongs to the context of the stream that it is recorded on, and the fences here are
//! those of one context. So such a use is fenced in two steps: an event of its own context is
//! recorded behind it, and a stream of ours, which does nothing else, waits for that event; a fence
//! behind the wait is a ticket as any other. Waits are in one row: a use that lasts holds up those
//! that were fenced later, and nothing but them.

use super::Allocator;
use super::pending::{Of, Used};
use crate::driver::{CaptureState, Context};
use crate::error::{Error, Result};
use crate::sync::ticket::Ticket;
use crate::units::Stream;

impl Allocator {
    /// The context that a stream is of, which is not being captured.
    pub(super) fn context_of(&self, stream: Stream) -> Result<Context> {
        let device = &self.pager.device;
        if stream.is_implicit() {
            return Ok(device.context);
        }
        let context = device.retry(|| device.driver.stream_get_context(stream));
        context.map_err(|error| device.note(error.into()))
    }

    /// A stream as it is fenced later; `None` where nothing is known of it. Our context is current.
    pub(super) fn what_it_is(&self, stream: Stream) -> Result<Option<Used>> {
        let device = &self.pager.device;
        if device.capture_state(stream)? == CaptureState::None {
            let context = self.context_of(stream)?;
            if context != device.context {
                return Ok(Some(Used { stream, of: Of::Another(context) }));
            }
        }
        Ok(match device.inspect(stream)? {
            (CaptureState::None, Some(slot)) => Some(Used::ours(stream, slot)),
            (_, Some(slot)) => Some(Used { stream, of: Of::Unknown(slot) }),
            (_, None) => None,
        })
    }

    /// The same stream, with what can be said of it when it is not being captured any more. Our
    /// context's where the driver does not say.
    pub(super) fn known_by_now(&self, used: Used) -> Used {
        let Of::Unknown(slot) = used.of else { return used };
        let device = &self.pager.device;
        let context = device.enter().and_then(|_scope| {
            let capture = device.capture_state(used.stream)?;
            let runs = capture == CaptureState::None;
            runs.then(|| self.context_of(used.stream)).transpose()
        });
        match context {
            Ok(None) => used,
            Ok(Some(context)) if context != device.context => {
                // Nothing is stamped there, and nobody here sees it run.
                device.fences.note_capture(slot, false);
                Used { of: Of::Another(context), ..used }
            }
            Ok(Some(_)) => Used::ours(used.stream, slot),
            Err(error) => {
                log::debug!("what {:?} is of: {error}", used.stream);
                Used::ours(used.stream, slot)
            }
        }
    }

    /// The default stream of another context that is current on the calling thread: its handle
    /// names that one too, and nothing says which is meant.
    pub(super) fn default_elsewhere(&self, stream: Stream) -> Option<Used> {
        let device = &self.pager.device;
        if !matches!(stream, Stream::DEFAULT | Stream::LEGACY) {
            return None;
        }
        let current = device.driver.ctx_get_current().ok().flatten();
        let context = current.filter(|context| *context != device.context)?;
        Some(Used { stream: Stream::LEGACY, of: Of::Another(context) })
    }

    /// A ticket behind what is enqueued on a stream of another context; `None` while it is being
    /// captured.
    ///
    /// # Errors
    /// What the driver says. Nothing is known of the use then.
    pub(super) fn fence_elsewhere(
        &self,
        stream: Stream,
        context: Context,
    ) -> Result<Option<Ticket>> {
        let device = &self.pager.device;
        let driver = &device.driver;
        let _scope = device.enter()?;
        let row = self.row()?;
        let (_, slot) = device.inspect(row)?;
        let Some(slot) = slot else { return Ok(None) };
        driver.ctx_set_current(Some(context))?;
        let event = (|| {
            if device.driver.stream_is_capturing(stream)? != CaptureState::None {
                return Ok(None);
            }
            let event = device.retry(|| driver.event_create())?;
            if let Err(error) = device.retry(|| driver.event_record(event, stream)) {
                let _unused = driver.event_destroy(event);
                return Err(Error::from(error));
            }
            Ok(Some(event))
        })();
        driver.ctx_set_current(Some(device.context)).map_err(|error| device.note(error.into()))?;
        let Some(event) = event? else { return Ok(None) };
        let ordered = device.retry(|| driver.stream_wait_event(row, event));
        // What waits for its record goes on doing so.
        if let Err(error) = driver.event_destroy(event) {
            log::debug!("an event of another context: {error}");
        }
        ordered.map_err(|error| device.note(error.into()))?;
        device.retry(|| device.fences.record(row, slot)).map(Some)
    }

    /// The stream that waits.
    fn row(&self) -> Result<Stream> {
        let device = &self.pager.device;
        let mut row = self.elsewhere.lock();
        if let Some(stream) = *row {
            return Ok(stream);
        }
        let made = device.driver.stream_create().map_err(|error| device.note(error.into()))?;
        Ok(*row.insert(made))
    }

    /// Ends it, when the device is about to be closed.
    pub(super) fn end_row(&self) {
        let Some(stream) = self.elsewhere.lock().take() else { return };
        let device = &self.pager.device;
        let ended = device.enter().and_then(|_scope| {
            device.driver.stream_destroy(stream).map_err(|error| device.note(error.into()))
        });
        if let Err(error) = ended {
            log::debug!("a stream stays: {error}");
        }
    }
}
