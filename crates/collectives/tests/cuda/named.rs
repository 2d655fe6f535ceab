//! The methods that are named after operations, of both engines: each is the call of its operation.

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp, StreamCollectives,
    cuda::{CudaBuilder, CudaEngine},
    fusion::FusedAllReduce,
    nccl::NcclCollectives,
};
use antiphon_operation::{InPlace, Operation};
use antiphon_tensor::{DType, Device, TensorViewMut};
use antiphon_testing::{gpus_for, nccl};

use crate::{
    captured::{calls_of, tensor},
    harness::{Outcome, Rank, on_gpus, values},
};

const COUNT: usize = 1003;

/// What memory that held `before` holds after a call with a tensor of it, or why there was no call.
fn after(
    rank: &Rank,
    before: &[f32],
    call: impl FnOnce(TensorViewMut<'_>) -> Result<(), CollectiveError>,
) -> Outcome<Result<Vec<u8>, String>> {
    let device = Device::Cuda(rank.collectives.context().device().ordinal());
    let memory = rank.upload(before)?;
    // SAFETY: the memory lives until it has been read, behind the call.
    let called = call(unsafe { tensor::<f32>(&memory, 0, before.len(), device) });
    let read = rank.download(&memory, 0, size_of_val(before))?;
    Ok(called.map(|()| read).map_err(|error| error.to_string()))
}

fn named_methods_are_calls(rank: &Rank, on: &CudaEngine) -> Outcome {
    let (me, world, stream) = (rank.comm.rank(), rank.comm.world_size(), rank.stream.borrow());
    on.prepare(DType::F32, ReduceOp::Max)?;
    for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
        let call = &calls_of(operation, COUNT, world, 1)[me].clone().with_op(ReduceOp::Max);
        let input = values::<f32>(me, call.input_layout(COUNT, me, world).elements());
        let unwritten = vec![7.0; call.output_layout(COUNT, me, world).elements()];
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let from = rank.upload(&input)?;
        // SAFETY: the memory lives until the output has been read.
        let from = unsafe { tensor::<f32>(&from, 0, input.len(), device) };
        // SAFETY: as above.
        let called = after(rank, &unwritten, |mut output| unsafe {
            on.call(call, Some(&from.as_view()), Some(&mut output), stream)
        })?;
        // SAFETY: as above.
        let named = after(rank, &unwritten, |output| unsafe {
            by_name!(on, call, Some(from.as_view()), Some(output), stream)
        })?;
        assert!(called.is_ok(), "{called:?}");
        assert!(called == named, "{operation} is not the call of its name");

        let uneven = matches!(operation, Operation::AllGatherV | Operation::ReduceScatterV);
        if operation.row().in_place != InPlace::Never && !uneven {
            let before = values::<f32>(me, world * COUNT);
            // SAFETY: as above.
            let called =
                after(rank, &before, |mut buffer| unsafe { on.call_in_place(call, &mut buffer, stream) })?;
            // SAFETY: as above.
            let named =
                after(rank, &before, |buffer| unsafe { by_name_in_place!(on, call, buffer, stream) })?;
            assert!(called == named, "{operation} in place is not the call of its name: {:?}", named.err());
        }
    }
    on.barrier(stream)?;
    Ok(on.check()?)
}

#[test]
fn named_methods_are_calls_by_our_kernels() {
    on_gpus(2, |rank| {
        let context = rank.collectives.context();
        let engine = CudaEngine::new(&rank.comm, context, CudaBuilder::LEAST_STAGING_BYTES)?;
        named_methods_are_calls(rank, &engine)
    });
}

#[test]
fn named_methods_are_calls_by_nccl() {
    if gpus_for(2).and_then(|_| nccl()).is_none() {
        return;
    }
    on_gpus(2, |rank| {
        let nccl = NcclCollectives::new(&rank.comm, rank.collectives.context())?;
        let mine = values::<f32>(rank.comm.rank(), 2 * COUNT);
        let mut expected = mine.clone();
        rank.comm.all_reduce_in_place(&mut expected, ReduceOp::Max)?;
        // SAFETY: the memory lives until it has been read, behind the call.
        let reduced = after(rank, &mine, |buffer| unsafe {
            nccl.all_reduce_in_place(buffer, ReduceOp::Max, &rank.stream)
        })??;
        rank.same("all_reduce_in_place by NCCL", &reduced, &expected)?;
        // SAFETY: as above.
        let refused = after(rank, &mine, |buffer| unsafe { nccl.all_to_all_in_place(buffer, &rank.stream) })?;
        assert!(refused.unwrap_err().contains("pass another output"));
        let refused = after(rank, &mine, |buffer| {
            let fused = FusedAllReduce::of_in_place(buffer, antiphon_collectives::fusion::InPlace::Sum);
            // SAFETY: as above.
            unsafe { nccl.all_reduce_fused(fused, &rank.stream) }
        })?;
        assert!(refused.unwrap_err().contains("call all_reduce and compute the rest"));
        named_methods_are_calls(rank, &CudaEngine::Nccl(nccl))
    });
}
