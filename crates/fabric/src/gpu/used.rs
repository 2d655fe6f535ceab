//! The streams of earlier calls.

use antiphon_device::cuda::{Context, Event, Stream, StreamRef, relaxed};

use crate::FabricError;

/// The stream of an earlier call, behind which later ones come.
pub(super) struct Used {
    /// [`StreamRef::id`] at that call.
    pub(super) id: u64,
    raw: usize,
    /// The stream, if this process made it. Otherwise its owner keeps it until the next call.
    kept: Option<Stream>,
}

impl Used {
    pub(super) fn new(stream: StreamRef<'_>, id: u64) -> Self {
        Self { id, raw: stream.as_raw(), kept: stream.owner().cloned() }
    }

    /// Whether the stream lives as long as this.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The number of the capture that the stream is in.
    pub(super) fn capture(&self, context: &Context) -> Result<Option<u64>, FabricError> {
        Ok(self.borrow(context).capture()?)
    }

    /// Whether an event can be put behind the work of the stream now: it is not captured, nor the legacy default stream while another
    /// stream that waits for that one is.
    pub(super) fn can_be_recorded(&self, context: &Context) -> Result<bool, FabricError> {
        match self.borrow(context).capture() {
            Ok(capture) => Ok(capture.is_none()),
            Err(error) if error.is_implicit_capture() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether all work of the stream is done.
    pub(super) fn is_done(&self, context: &Context) -> Result<bool, FabricError> {
        Ok(self.borrow(context).is_done()?)
    }

    /// Puts an event behind the work of the stream; or waits for all work, if another stream has got the handle of this one, which is
    /// gone, or which is the default stream of another thread.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] if a capture that is open forbids that wait; [`FabricError::Device`].
    pub(super) fn record(&self, context: &Context, event: &Event) -> Result<(), FabricError> {
        let stream = self.borrow(context);
        if self.kept.is_none() && stream.id()? != self.id {
            relaxed(|| context.synchronize())?.map_err(|error| {
                FabricError::invalid(format!(
                    "the stream of an earlier call is gone, and its work cannot be waited for now: {error}"
                ))
            })?;
        }
        Ok(event.record(stream)?)
    }

    fn borrow<'a>(&self, context: &'a Context) -> StreamRef<'a> {
        // SAFETY: the stream is kept here, or by a caller who keeps a framework's stream until the next call.
        unsafe { context.borrow_stream(self.raw) }
    }
}
