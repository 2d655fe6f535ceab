//! Plans on registered tensors have the host's bits, as often as their owner uses them in between; others are refused.

use antiphon_device::cuda::{Graph, StreamRef, memory};
use antiphon_executor::{ExecutorError, cuda::CudaOptions};
use antiphon_fabric::FabricError;
use antiphon_language::library::{Setting, find};
use antiphon_plan::{ReduceOp, verify::VerifiedPlan};
use antiphon_tensor::bf16;

use crate::{
    graphs::GraphError,
    harness::{Both, Call, Outcome, Rank, TIMEOUT, on_gpus, proved, run},
    library, plans,
};

fn registered(rank: &Rank, plan: &VerifiedPlan, chunks: &[usize]) -> Outcome {
    let mut both = Both::load(rank, plan, CudaOptions::default())?;
    for (seed, &chunk) in chunks.iter().enumerate() {
        both.compare_registered::<f32>(chunk, seed % 2, seed)?;
        both.compare_registered::<bf16>(2 * chunk, 3, seed)?;
        both.compare::<f32>(chunk, 1, seed)?; // by the same table
    }
    Ok(())
}

fn whole_library(world_size: usize, chunks: &[usize]) {
    for (algorithm, setting) in library(None, world_size as u32) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| registered(rank, &plan, chunks));
    }
}

#[test]
fn registered_tensors_have_the_hosts_bits_on_2() {
    whole_library(2, &[1001, 4, 0]);
}

#[test]
fn registered_tensors_have_the_hosts_bits_on_3() {
    whole_library(3, &[13, 64]);
}

#[test]
fn registered_tensors_have_the_hosts_bits_on_4() {
    whole_library(4, &[101]);
}

#[test]
fn every_operation_on_registered_tensors_has_the_hosts_bits_on_3() {
    for plan in plans::all(3, ReduceOp::Sum) {
        let plan = proved(plan);
        on_gpus(3, |rank| {
            let mut both = Both::load(rank, &plan, CudaOptions::default())?;
            [16, 4, 64]
                .into_iter()
                .enumerate()
                .try_for_each(|(seed, chunk)| both.compare_registered::<f32>(chunk, seed, seed))
        });
    }
}

/// Plans that are not made for it in place, and plans that are apart.
#[test]
fn places_that_a_plan_is_not_made_for_have_the_hosts_bits_on_3() {
    for (algorithm, setting) in library(None, 3) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        let [input, output] = [plan.plan().gpus[0].input_chunks, plan.plan().gpus[0].output_chunks];
        if !setting.inplace && input.min(output) * 3 != input.max(output) && input != output {
            continue;
        }
        on_gpus(3, |rank| {
            let mut both = Both::load(rank, &plan, CudaOptions::default())?;
            both.in_place = !setting.inplace;
            both.compare_registered::<f32>(36, 1, 0)?;
            both.compare::<f32>(36, 1, 0)
        });
    }
}

/// What a launch leaves is taken, and what it reads overwritten, as soon as it is over: peers have then done with both.
fn tensors_are_free_behind_a_call(world_size: usize) {
    const ROUNDS: usize = 6;
    for (algorithm, setting) in library(Some("allreduce"), world_size as u32) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, CudaOptions::default())?;
            both.prepare::<f32>(64)?;
            let all: Vec<Call<f32>> =
                (0..ROUNDS).map(|seed| both.call(64, 0, seed)).collect::<Result<_, _>>()?;
            let used = both.call::<f32>(64, 0, ROUNDS)?;
            let used = both.register(used)?;
            let stream = rank.stream.borrow();
            for call in &all {
                // SAFETY: all have as many bytes, and live until the results are read.
                unsafe { call.copy_to(&used, stream) }?;
                both.queue(&used)?;
                // SAFETY: as above.
                unsafe { used.copy_output_to(call, stream) }?;
            }
            all.iter().try_for_each(|call| both.check(call, "of tensors that are used in between"))?;
            both.unregister(&used)
        });
    }
}

impl<T> Call<T> {
    /// # Safety
    /// As [`memory::copy`].
    unsafe fn copy_to(&self, other: &Self, stream: StreamRef<'_>) -> Outcome {
        // SAFETY: passed on.
        unsafe {
            memory::copy(stream, other.input.pointer(), self.input.pointer(), self.input.len())?;
            self.copy_output_to(other, stream)
        }
    }

    /// # Safety
    /// As [`memory::copy`].
    unsafe fn copy_output_to(&self, other: &Self, stream: StreamRef<'_>) -> Outcome {
        // SAFETY: passed on.
        Ok(unsafe { memory::copy(stream, other.output.pointer(), self.output.pointer(), self.output.len()) }?)
    }
}

#[test]
fn registered_tensors_are_free_behind_a_call_on_2() {
    tensors_are_free_behind_a_call(2);
}

#[test]
fn registered_tensors_are_free_behind_a_call_on_3() {
    tensors_are_free_behind_a_call(3);
}

#[test]
fn registered_tensors_are_free_behind_a_call_on_4() {
    tensors_are_free_behind_a_call(4);
}

#[test]
fn registered_tensors_are_free_behind_a_call_on_8() {
    tensors_are_free_behind_a_call(8);
}

fn two_shot(world_size: u32) -> VerifiedPlan {
    proved(find("two-shot-all-reduce").unwrap().plan(&Setting::new(world_size)).unwrap())
}

#[test]
fn graphs_of_registered_calls_are_replayed_on_2() {
    let plan = two_shot(2);
    on_gpus(2, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.prepare::<f32>(256)?;
        let call = both.call::<f32>(256, 0, 1)?;
        let (call, staged) = (both.register(call)?, both.call::<f32>(256, 0, 2)?);
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            both.queue(&call)?;
            both.queue(&staged)?;
            Ok(both.queue(&call)?)
        })?;
        let graph = graph.instantiate()?;
        rank.meet()?;
        for _ in 0..10 {
            // SAFETY: the memory lives until the results are read, behind the last launch.
            unsafe { graph.launch(&rank.stream) }?;
            both.queue(&call)?;
        }
        both.check(&call, "replayed, registered")?;
        both.check(&staged, "replayed, staged")
    });
}

#[test]
fn tensors_that_are_not_registered_are_refused_on_2() {
    let plan = two_shot(2);
    on_gpus(2, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.prepare::<f32>(64)?;
        let mut call = both.call::<f32>(64, 0, 0)?;
        call.registered = true;
        let error = both.queue(&call).unwrap_err();
        assert!(matches!(error, ExecutorError::Unregistered { which: "input", bytes: 512, .. }), "{error:?}");
        assert!(error.to_string().contains("the input is not in registered memory"), "{error}");
        let call = both.register(call)?;
        both.queue(&call)?;
        both.check(&call, "registered at last")?;
        both.unregister(&call)?;
        both.queue(&call).unwrap_err();
        let error = both.unregister(&call).unwrap_err().to_string();
        assert!(error.contains("no registered memory begins at"), "{error}");
        both.compare::<f32>(64, 0, 0)
    });
}

/// What peers do not touch need not be registered.
#[test]
fn tensors_that_peers_do_not_touch_are_taken_as_they_are_on_2() {
    let plan = proved(find("packet-all-reduce").unwrap().plan(&Setting::new(2)).unwrap());
    on_gpus(2, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.prepare::<f32>(64)?;
        let mut call = both.call::<f32>(64, 1, 0)?;
        call.registered = true;
        both.queue(&call)?;
        both.check(&call, "that peers do not touch")
    });
}

/// What ranks that disagree about a call's places get.
fn disagree(queue: impl Fn(&Rank, &mut Both<'_>) -> Outcome + Sync) {
    let plan = two_shot(2);
    let outcomes = run(2, TIMEOUT, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.prepare::<f32>(64)?;
        rank.comm.barrier()?;
        queue(rank, &mut both)?;
        rank.stream.borrow().synchronize()?;
        Ok(both.gpu.check().expect_err("the ranks disagree"))
    });
    for outcome in outcomes {
        let error = outcome.unwrap();
        assert!(matches!(error, ExecutorError::Fabric(FabricError::Mismatch { .. })), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(", places ") && text.contains("registered)"), "{text}");
    }
    on_gpus(2, |rank| Both::load(rank, &plan, CudaOptions::default())?.compare_registered::<f32>(64, 0, 0));
}

#[test]
fn ranks_whose_tensors_are_in_different_places_are_told_so_on_2() {
    disagree(|rank, both| {
        let call = both.call::<f32>(64, rank.comm.rank(), 0)?;
        let call = both.register(call)?;
        both.queue(&call)?;
        Ok(rank.stream.borrow().synchronize()?)
    });
}

#[test]
fn ranks_of_which_one_is_registered_are_told_so_on_2() {
    disagree(|rank, both| {
        let call = both.call::<f32>(64, 0, 0)?;
        let mut call = both.register(call)?;
        call.registered = rank.comm.rank() == 0;
        both.queue(&call)?;
        Ok(rank.stream.borrow().synchronize()?)
    });
}
