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

    /// Puts an event behind the work of the stream; or waits for all work, if another stream has got the handle of this one, which is
    /// gone, or which is the default stream of another thread.
    pub(super) fn record(&self, context: &Context, event: &Event) -> Result<(), FabricError> {
        let stream = self.borrow(context);
        if self.kept.is_none() && stream.id()? != self.id {
            relaxed(|| context.synchronize())??;
        }
        Ok(event.record(stream)?)
    }

    fn borrow<'a>(&self, context: &'a Context) -> StreamRef<'a> {
        // SAFETY: the stream is kept here, or by a caller who keeps a framework's stream until the next call.
        unsafe { context.borrow_stream(self.raw) }
    }
}
