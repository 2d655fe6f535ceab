//! Messages that take several launches, each of which does a slice of every chunk, have the host's bits.

use antiphon_device::cuda::Graph;
use antiphon_executor::{
    ExecutorError,
    cuda::{CudaOptions, CudaPlan},
};
use antiphon_plan::ReduceOp;
use antiphon_tensor::{DType, bf16};

use crate::{
    graphs::GraphError,
    harness::{Both, on_gpus, proved},
    library, plans,
};

fn little_scratch(world_size: usize, most_scratch: usize, chunk: usize) {
    let options = CudaOptions { most_scratch, ..CudaOptions::default() };
    for (algorithm, setting) in library(None, world_size as u32) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            both.compare::<f32>(chunk, 1, 0)?;
            both.compare_registered::<f32>(chunk, 0, 1)?;
            both.compare::<bf16>(2 * chunk, 3, 2)
        });
    }
}

#[test]
fn scratch_that_is_too_small_is_used_again_on_2() {
    little_scratch(2, 8 << 10, 1601);
}

#[test]
fn scratch_that_is_too_small_is_used_again_on_3() {
    little_scratch(3, 8 << 10, 601);
}

#[test]
fn every_operation_in_slices_has_the_hosts_bits_on_3() {
    let options = CudaOptions { most_scratch: 4 << 10, ..CudaOptions::default() };
    for plan in plans::all(3, ReduceOp::Sum) {
        let plan = proved(plan);
        on_gpus(3, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            both.compare::<f32>(1200, 1, 0)?;
            both.compare_registered::<f32>(1204, 0, 1)
        });
    }
}

#[test]
fn messages_beyond_the_proof_are_done_in_parts_on_1_gpus() {
    let plan = proved(plans::in_turns(16, 16, 1, 40));
    let largest = plan.report().largest_chunk.unwrap() as usize / 4;
    on_gpus(1, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        for (seed, chunk) in [4, largest, largest + 4, 3 * largest - 4, 4096].into_iter().enumerate() {
            both.compare::<f32>(chunk, 0, seed)?;
        }
        both.compare_registered::<f32>(4096, 1, 7)
    });
}

#[test]
fn slices_are_captured_in_one_go_on_2() {
    let plan = proved(plans::packets_two_shot(2, ReduceOp::Sum, plans::Relay::Sent).unwrap());
    on_gpus(2, |rank| {
        let options = CudaOptions { most_scratch: 8 << 10, ..CudaOptions::default() };
        let mut both = Both::load(rank, &plan, options)?;
        both.prepare::<f32>(3001 * 4)?;
        both.prepare::<f32>(64)?;
        let (large, small) = (both.call::<f32>(3001 * 4, 0, 1)?, both.call::<f32>(64, 1, 2)?);
        let graph = Graph::capture(&rank.stream, |_| Ok::<_, GraphError>(both.queue(&large)?))?;
        let graph = graph.instantiate()?;
        rank.meet()?;
        for _ in 0..3 {
            // SAFETY: the memory lives until the results are read, behind the last launch.
            unsafe { graph.launch(&rank.stream) }?;
            both.queue(&small)?;
        }
        both.check(&large, "replayed")?;
        both.check(&small, "eager")
    });
}

#[test]
fn slices_that_are_too_small_are_refused_on_2() {
    let plan = proved(plans::packets(2, ReduceOp::Sum, false).unwrap());
    on_gpus(2, |rank| {
        let load = |most_scratch| {
            let options = CudaOptions { most_scratch, ..CudaOptions::default() };
            CudaPlan::load(&rank.comm, &rank.context, &plan, options)
        };
        let error = load(1)?.prepare(&rank.comm, DType::F32, 1 << 16).unwrap_err();
        assert!(error.to_string().contains("exceed the 1 bytes that are allowed"), "{error}");
        let error = load(2 << 10)?.prepare(&rank.comm, DType::F32, 4 << 20).unwrap_err();
        assert!(error.to_string().contains("and a call has at most 1024"), "{error}");
        let error = load(1 << (20 + rank.comm.rank())).unwrap_err();
        assert!(matches!(error, ExecutorError::PlansDiffer { .. }), "{error:?}");
        Both::load(rank, &plan, CudaOptions::default())?.compare::<f32>(64, 0, 0)
    });
}
