//! Started collectives and messages, which run in other streams than the caller's.

use antiphon_device::cuda::{Context, Event};

use crate::{GpuStream, Result};

/// A collective or a message in a stream of the session. [`finish`](Self::finish) makes a stream of the caller's wait for its end.
///
/// When it is dropped before that, it waits for the end on this thread: kernels use the memory of the tensors, of which `K` is the
/// owner.
#[derive(Debug)]
pub struct Started<K> {
    context: Context,
    end: Event,
    /// Absent once the end has been waited for.
    kept: Option<K>,
}

impl<K> Started<K> {
    pub(crate) fn new(context: Context, end: Event, kept: K) -> Self {
        Self { context, end, kept: Some(kept) }
    }

    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.context.device().ordinal()
    }

    /// Whether the GPU is done with it.
    pub fn is_passed(&self) -> bool {
        self.end.is_passed().unwrap_or(true) // `finish` or the next call returns what went wrong
    }

    /// Has a stream wait for the end, after which the memory may be used in the order of that stream; returns what was kept.
    ///
    /// # Errors
    /// [`SessionError::Fabric`](crate::SessionError::Fabric) as the driver's.
    pub fn finish<'s>(mut self, stream: impl Into<GpuStream<'s>>) -> Result<K> {
        stream.into().on(&self.context).wait(&self.end)?;
        Ok(self.kept.take().expect("only this takes it"))
    }
}

impl<K> Drop for Started<K> {
    fn drop(&mut self) {
        // The kernels use the memory, which goes with what is kept. They end by their deadline.
        if self.kept.is_some() {
            let _ = self.end.synchronize();
        }
    }
}
