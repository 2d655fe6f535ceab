//! Started collectives and messages, which run in other streams than the current one.

use antiphon::{
    device::cuda::{Context, Event},
    fabric::Queue,
    prelude::CollectiveError,
};
use pyo3::prelude::*;

use super::{Gpu, Gpus, Order, Outcome};
use crate::{
    arguments::Operands,
    call::Call,
    error::Error,
    operand::Tensor,
    stream::{RawStream, stream_or_current},
};

/// A collective or a message in a stream of the communicator. `finish` makes the current stream wait for its end.
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
            gpu.start(Order::Collectives, stream, operands, |gpu, side| unsafe { gpu.run(call, side) })
        })
    }

    /// Puts a message to a rank, or one from a rank, into a stream of the communicator, as [`start`](Self::start).
    ///
    /// Started sends have a stream of their own, and so have started receives: a receive that waits for its message delays no
    /// send, and so no peer that waits for one.
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub(crate) unsafe fn start_message(
        &self,
        queue: &Queue,
        device: u32,
        stream: RawStream,
        sent: Option<(Tensor, usize)>,
        received: Option<(Tensor, usize)>,
        operands: Operands,
    ) -> Outcome<Started> {
        let order = if sent.is_some() { Order::Sends } else { Order::Receives };
        self.with(queue, device, Some(stream), |gpu| {
            // SAFETY: passed on.
            gpu.start(order, stream, operands, |gpu, side| unsafe { gpu.exchange(sent, received, side) })
        })
    }
}

impl Gpu {
    /// Begins work in the side stream of an order, behind what the caller's stream has now.
    fn start(
        &mut self,
        order: Order,
        stream: RawStream,
        operands: Operands,
        work: impl FnOnce(&mut Self, RawStream) -> Outcome,
    ) -> Outcome<Started> {
        let context = self.context.clone();
        let (begin, end) = (Event::new(&context)?, Event::new(&context)?);
        // SAFETY: the caller's stream.
        begin.record(unsafe { context.borrow_stream(stream) })?;
        let side = match &self.sides[order as usize] {
            Some(side) => side.borrow().as_raw(),
            None => self.sides[order as usize].insert(context.stream()?).borrow().as_raw(),
        };
        // SAFETY: the stream lives as long as this GPU's part of the communicator.
        let beside = unsafe { context.borrow_stream(side) };
        beside.wait(&begin)?;
        work(self, side)?;
        end.record(beside)?;
        Ok(Started { context, end, is_waited_for: false, operands })
    }
}

impl Started {
    /// Whether the GPU is done with it.
    pub(crate) fn is_passed(&self) -> bool {
        self.end.is_passed().unwrap_or(true) // `finish` or the next call raises what went wrong
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
