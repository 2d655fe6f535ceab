//! One collective, put into a stream.

use antiphon::{
    collectives::cuda::{AllReduceOptions, CudaCollectives},
    device::cuda::{DevicePointer, StreamRef, memory},
    prelude::{CollectiveError, FabricError},
};

use super::{Gpu, Outcome, REDUCED, RawStream, failed};
use crate::{
    call::{Call, Kind, Place, refused},
    fused::Fused,
    operand::Tensor,
};

impl Gpu {
    /// # Safety
    /// As [`Gpus::run`](super::Gpus::run).
    pub(super) unsafe fn run(&mut self, call: &Call, stream: RawStream) -> Outcome {
        if let Kind::AllReduce(op, _) | Kind::AllReduceRegistered(op, _) | Kind::ReduceScatter(op) = call.kind
            && let Some(dtype) = call.dtype().filter(|dtype| REDUCED.contains(dtype))
        {
            self.load(dtype, op)?; // of others the call says that they cannot be reduced
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
        unsafe { peers.all_reduce_fused(fused.bind(), stream) }
    }
}

/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn between(peers: &CudaCollectives, call: &Call, stream: StreamRef<'_>) -> Outcome {
    let (input, output) = tensors(call, peers.rank(), peers.world_size())?;
    // SAFETY: the caller answers for the memory, which only the device touches.
    let (read, mut write) = unsafe { (input.view().map_err(refused)?, output.view_mut().map_err(refused)?) };
    // SAFETY: passed on.
    unsafe {
        match &call.kind {
            &Kind::AllReduce(op, None) => peers.all_reduce(read, &mut write, op, stream),
            &Kind::AllReduce(op, Some(algorithm)) => {
                peers.all_reduce_with(read, &mut write, op, algorithm, stream)
            }
            &Kind::AllReduceRegistered(op, algorithm) => {
                let options = AllReduceOptions::registered(algorithm);
                peers.all_reduce_with(read, &mut write, op, options, stream)
            }
            Kind::AllGather => peers.all_gather(read, &mut write, stream),
            &Kind::ReduceScatter(op) => peers.reduce_scatter(read, &mut write, op, stream),
            Kind::AllToAll => peers.all_to_all(read, &mut write, stream),
            Kind::Mixed(mixed) => mixed.run_on(peers, &read, &mut write, stream),
            &Kind::Broadcast(root) => {
                if root == peers.rank() {
                    copy(&input, &output, stream)?;
                }
                peers.broadcast(&mut write, root, stream)
            }
            _ => Err(missing(call)),
        }
    }
}

/// What a world of one rank does: every collective gives back what it is given.
///
/// # Safety
/// As [`Gpus::run`](super::Gpus::run).
unsafe fn alone(call: &Call, stream: StreamRef<'_>) -> Outcome {
    let (input, output) = tensors(call, 0, 1)?;
    if call.kind.op().is_some() && !REDUCED.contains(&input.dtype) {
        return Err(CollectiveError::NotNumeric { operation: "all_reduce", dtype: input.dtype });
    }
    // SAFETY: passed on.
    unsafe { copy(&input, &output, stream) }
}

/// Input and output, which may be the same, or a part of each other.
fn tensors(call: &Call, rank: usize, world_size: usize) -> Outcome<(Tensor, Tensor)> {
    match (call.place, &call.kind) {
        (Place::Shared(whole), Kind::AllGather) => Ok((whole.block(rank, world_size), whole)),
        (Place::Shared(whole), Kind::ReduceScatter(_)) => Ok((whole, whole.block(rank, world_size))),
        (Place::Shared(whole), Kind::Mixed(mixed)) => Ok(match (mixed.own_block(), mixed.gathers()) {
            (None, _) => (whole, whole),
            (Some((group, groups)), true) => (whole.block(group, groups), whole),
            (Some((group, groups)), false) => (whole, whole.block(group, groups)),
        }),
        (Place::Shared(buffer), _) => Ok((buffer, buffer)),
        (Place::Apart(Some(input), Some(output)), _) => Ok((input, output)),
        (Place::Apart(None, Some(output)), Kind::Broadcast(_)) => Ok((output, output)),
        _ => Err(missing(call)),
    }
}

fn missing(call: &Call) -> CollectiveError {
    FabricError::invalid(format!("{:?} on CUDA lacks an operand", call.kind)).into()
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
