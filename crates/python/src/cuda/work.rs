//! One collective, put into a stream.

use antiphon::{
    collectives::{StreamCollectives, cuda::CudaEngine},
    device::cuda::StreamRef,
    prelude::FabricError,
};

use super::{Gpu, Outcome, REDUCED};
use crate::{
    call::{Call, CallTensors, refused},
    fused::Fused,
    operand::Tensor,
    stream::RawStream,
};

impl Gpu {
    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn run(&mut self, call: &Call, stream: RawStream) -> Outcome {
        if call.what.operation.row().reduces
            && let Some(dtype) = call.dtype().filter(|dtype| REDUCED.contains(dtype))
        {
            self.load(dtype, call.what.op)?; // of others the call says that they cannot be reduced
        }
        // SAFETY: passed on.
        let stream = unsafe { self.context.borrow_stream(stream) };
        // SAFETY: passed on.
        unsafe { launch(&self.engine, call, stream) }
    }

    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn run_list(&mut self, calls: &[Call], stream: RawStream) -> Outcome {
        let Some(what) = calls.first().map(|call| &call.what) else { return Ok(()) };
        let all_apart = calls.iter().all(|call| matches!(call.tensors, CallTensors::Apart(Some(_), Some(_))));
        if !all_apart {
            // SAFETY: passed on.
            return calls.iter().try_for_each(|call| unsafe { self.run(call, stream) });
        }
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for call in calls {
            if let CallTensors::Apart(Some(input), Some(output)) = call.tensors {
                // SAFETY: the caller answers for the memory, which only the device touches.
                unsafe {
                    reads.push(input.view().map_err(refused)?);
                    writes.push(output.view_mut().map_err(refused)?);
                }
            }
        }
        // SAFETY: passed on.
        unsafe {
            let stream = self.context.borrow_stream(stream);
            self.engine.call_list(what, &reads, &mut writes, stream)
        }
    }

    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn exchange(
        &mut self,
        sent: Option<(Tensor, usize)>,
        received: Option<(Tensor, usize)>,
        stream: RawStream,
    ) -> Outcome {
        let engine = &self.engine;
        // SAFETY: the caller answers for the memory, which only the device touches, and for the stream.
        unsafe {
            let stream = self.context.borrow_stream(stream);
            let read = sent.map(|(tensor, _)| tensor.view()).transpose().map_err(refused)?;
            let mut write = received.map(|(tensor, _)| tensor.view_mut()).transpose().map_err(refused)?;
            match (read, sent, write.as_mut(), received) {
                (Some(read), Some((_, to)), Some(write), Some((_, from))) => {
                    engine.send_recv(&read, to, write, from, stream)
                }
                (Some(read), Some((_, to)), ..) => engine.send(&read, to, stream),
                (_, _, Some(write), Some((_, from))) => engine.recv(write, from, stream),
                _ => Ok(()),
            }
        }
    }

    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn run_fused(&mut self, fused: &Fused, stream: RawStream) -> Outcome {
        let peers = self.engine.nvlink("all_reduce_fused")?;
        if peers.world_size() == 1 {
            let text =
                "all_reduce_fused on CUDA needs 2 ranks or more: of one rank there is nothing to reduce";
            return Err(FabricError::invalid(text).into());
        };
        // SAFETY: passed on.
        let stream = unsafe { self.context.borrow_stream(stream) };
        // SAFETY: the caller answers for the memory, which only the device touches.
        unsafe { peers.all_reduce_fused(fused.bind(), stream) }
    }
}

/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn launch(engine: &CudaEngine, call: &Call, stream: StreamRef<'_>) -> Outcome {
    if let Some(mixed) = &call.mixed {
        let (input, output) = match call.tensors {
            CallTensors::Apart(Some(input), Some(output)) => (input, output),
            CallTensors::Shared(whole) => {
                let own = whole.piece(mixed.own_piece(&call.what, whole.count)?);
                if mixed.gathers() { (own, whole) } else { (whole, own) }
            }
            _ => return Err(FabricError::invalid(format!("{} lacks an operand", call.name())).into()),
        };
        // SAFETY: the caller answers for the memory, which only the device touches.
        unsafe {
            let (read, mut write) = (input.view().map_err(refused)?, output.view_mut().map_err(refused)?);
            return mixed.run_on(engine.nvlink(call.name())?, &read, &mut write, stream);
        }
    }
    // SAFETY: the caller answers for the memory, which only the device touches.
    unsafe {
        match call.tensors {
            CallTensors::Nowhere => engine.call(&call.what, None, None, stream),
            CallTensors::Shared(buffer) => {
                engine.call_in_place(&call.what, &mut buffer.view_mut().map_err(refused)?, stream)
            }
            CallTensors::Apart(input, output) => {
                let input = input.map(|tensor| tensor.view()).transpose().map_err(refused)?;
                let mut output = output.map(|tensor| tensor.view_mut()).transpose().map_err(refused)?;
                engine.call(&call.what, input.as_ref(), output.as_mut(), stream)
            }
        }
    }
}
