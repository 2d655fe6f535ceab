//! Collectives that go on beside the current stream.

use antiphon::{
    device::cuda::{Context, Event},
    fabric::Queue,
    prelude::CollectiveError,
};
use pyo3::prelude::*;

use super::{Gpu, Gpus, Outcome};
use crate::{
    arguments::Operands,
    call::Call,
    error::Error,
    stream::{RawStream, stream_or_current},
};

/// A collective in a stream of the communicator. `finish` makes the current stream wait for its end.
pub(crate) struct Started {
    context: Context,
    end: Event,
    is_waited_for: bool,
    /// Keeps the memory until then.
    operands: Operands,
}

impl Gpus {
    /// Puts a collective into a stream of the communicator, which first waits for a stream of the caller's.
    ///
    /// # Safety
    /// As [`run`](Self::run), until what this returns has been waited for or dropped: the operands keep the memory.
    pub(crate) unsafe fn start(
        &self,
        queue: &Queue,
        device: u32,
        stream: RawStream,
        call: &Call,
        operands: Operands,
    ) -> Outcome<Started> {
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            unsafe { gpu.start(call, stream, operands) }
        })
    }
}

impl Gpu {
    /// # Safety
    /// As [`Gpus::start`].
    unsafe fn start(&mut self, call: &Call, stream: RawStream, operands: Operands) -> Outcome<Started> {
        let context = self.context.clone();
        if self.side.is_none() {
            self.side = Some(context.stream()?);
        }
        let (begin, end) = (Event::new(&context)?, Event::new(&context)?);
        // SAFETY: the caller's stream.
        begin.record(unsafe { context.borrow_stream(stream) })?;
        let side = self.side.as_ref().map_or(stream, |side| side.borrow().as_raw());
        // SAFETY: the stream lives as long as this GPU's part of the communicator.
        let beside = unsafe { context.borrow_stream(side) };
        beside.wait(&begin)?;
        // SAFETY: passed on.
        unsafe { self.run(call, side) }?;
        end.record(beside)?;
        Ok(Started { context, end, is_waited_for: false, operands })
    }
}

impl Started {
    /// Whether the GPU is done with it.
    pub(crate) fn is_passed(&self) -> bool {
        self.end.is_passed().unwrap_or(true) // what went wrong is told by whoever waits
    }

    /// Has the current stream wait for the end, after which the memory may be used in the order of that stream.
    pub(crate) fn finish(mut self) -> Result<Operands, Error> {
        Python::attach(|py| {
            let stream = stream_or_current(py, self.context.device().ordinal(), None)?;
            // SAFETY: the current stream of the library, on this device.
            unsafe { self.context.borrow_stream(stream) }.wait(&self.end).map_err(CollectiveError::from)?;
            self.is_waited_for = true;
            Ok(std::mem::take(&mut self.operands))
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The kernels use the memory, which goes with the operands. They end by their deadline.
        if !self.is_waited_for {
            let _ = self.end.synchronize();
        }
    }
}
