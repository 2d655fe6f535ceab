//! One collective, put into a stream.

use antiphon::{
    collectives::cuda::{Algorithm, CudaCollectives},
    device::cuda::{DevicePointer, StreamRef, memory},
    prelude::{CollectiveError, FabricError},
};

use super::{Gpu, Outcome, REDUCED, RawStream, failed};
use crate::{
    call::{Call, Place, refused},
    fused::Fused,
    operand::Tensor,
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
        match &self.peers {
            // SAFETY: passed on.
            Some(peers) => unsafe { between(peers, call, stream) },
            // SAFETY: passed on.
            None => unsafe { alone(call, stream) },
        }
    }

    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn run_fused(&mut self, fused: &Fused, stream: RawStream) -> Outcome {
        let Some(peers) = &self.peers else {
            let text =
                "all_reduce_fused on CUDA needs 2 ranks or more: of one rank there is nothing to reduce";
            return Err(FabricError::invalid(text).into());
        };
        // SAFETY: passed on.
        let stream = unsafe { self.context.borrow_stream(stream) };
        // SAFETY: the caller answers for the memory, which only the device touches.
        unsafe { peers.all_reduce_fused(fused.call().map_err(refused)?, stream) }
    }
}

/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn between(peers: &CudaCollectives, call: &Call, stream: StreamRef<'_>) -> Outcome {
    let mut what = call.what.clone();
    if call.registered {
        let usual = match call.place {
            Place::Shared(_) => Algorithm::TwoShot,
            _ => Algorithm::OneShot,
        };
        let by = Algorithm::ALL.into_iter().find(|by| by.number(false) == what.algorithm).unwrap_or(usual);
        what.algorithm = by.number(true);
    }
    // SAFETY: the caller answers for the memory, which only the device touches.
    unsafe {
        match call.place {
            Place::Nowhere => peers.call(&what, None, None, stream),
            Place::Shared(buffer) => {
                peers.call_in_place(&what, &mut buffer.view_mut().map_err(refused)?, stream)
            }
            Place::Apart(input, output) => {
                let input = input.map(|tensor| tensor.view()).transpose().map_err(refused)?;
                let mut output = output.map(|tensor| tensor.view_mut()).transpose().map_err(refused)?;
                peers.call(&what, input.as_ref(), output.as_mut(), stream)
            }
        }
    }
}

/// What a world of one rank does: every collective gives back what it is given.
///
/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn alone(call: &Call, stream: StreamRef<'_>) -> Outcome {
    let (Some(input), Some(output)) = (match call.place {
        Place::Nowhere => (None, None),
        Place::Shared(buffer) => (Some(buffer), Some(buffer)),
        Place::Apart(input, output) => (input, output),
    }) else {
        return Ok(());
    };
    if call.what.operation.row().reduces && !REDUCED.contains(&input.dtype) {
        return Err(CollectiveError::NotNumeric { operation: call.name(), dtype: input.dtype });
    }
    // SAFETY: passed on.
    unsafe { copy(&input, &output, stream) }
}

/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn copy(from: &Tensor, to: &Tensor, stream: StreamRef<'_>) -> Outcome {
    if from.data == to.data {
        return Ok(());
    }
    if from.bytes() != to.bytes() {
        let text = format!("the input has {} bytes, the output {}", from.bytes(), to.bytes());
        return Err(FabricError::invalid(text).into());
    }
    let at = |tensor: &Tensor| DevicePointer(tensor.data.addr() as u64);
    match from.bytes() {
        0 => Ok(()),
        // SAFETY: both are of one size and, being different, do not overlap; the caller answers for the rest.
        bytes => unsafe { memory::copy(stream, at(to), at(from), bytes) }.map_err(failed),
    }
}
