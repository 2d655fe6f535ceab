//! Plans between GPUs against the host's executor, bit by bit. Ranks are threads with a GPU each, or as many to a GPU as
//! `ANTIPHON_TEST_RANKS_PER_GPU` says; where there are too few GPUs a test is recorded as skipped.

mod back_to_back;
mod collection;
mod compiled;
mod engines;
mod failures;
mod graphs;
mod harness;
#[path = "../plans/mod.rs"]
mod plans;
mod refused;
mod registered;
mod slices;
mod soak;
mod ways;

use antiphon_executor::{PacketKind, cuda::CudaOptions};
use antiphon_language::library::{ALGORITHMS, Algorithm, Setting};
use antiphon_plan::{Plan, ReduceOp};
use antiphon_tensor::{DType, bf16, with_dtype};
use harness::{Both, INTERPRETED, on_gpus, proved};

/// Plans may move between threads.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<antiphon_executor::cuda::CudaPlan>();
};

/// The algorithms of the library, or those of one collective, out of place and, where it works, in place, for chunks of any number of
/// 4 bytes.
fn library(collective: Option<&str>, ranks: u32) -> Vec<(&'static Algorithm, Setting)> {
    let mut all = Vec::new();
    for algorithm in
        ALGORITHMS.iter().filter(|algorithm| collective.is_none_or(|of| algorithm.collective == of))
    {
        for inplace in [false, true] {
            let mut setting = Setting { inplace, unit_size: 48, ..Setting::new(ranks) };
            setting.options.buffer_alignment = 4;
            let has_nodes = !algorithm.nodes || ranks.is_multiple_of(2);
            if has_nodes && (algorithm.inplace || !inplace) {
                all.push((algorithm, setting));
            }
        }
    }
    all
}

fn all_reduces(world_size: usize, chunks: &[usize], options: CudaOptions) {
    for (algorithm, setting) in library(Some("allreduce"), world_size as u32) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            for (seed, &chunk) in chunks.iter().enumerate() {
                both.compare::<f32>(chunk, 0, seed)?;
                both.compare::<f32>(chunk, 1, seed)?;
                both.compare::<bf16>(2 * chunk, 3, seed)?;
            }
            Ok(both.gpu.free(&rank.comm)?)
        });
    }
}

#[test]
fn all_reduces_have_the_hosts_bits_on_2() {
    all_reduces(2, &[4096, 4, 1000, 13, 0], INTERPRETED);
}

#[test]
fn all_reduces_have_the_hosts_bits_on_3() {
    all_reduces(3, &[600, 13, 1], INTERPRETED);
}

#[test]
fn all_reduces_have_the_hosts_bits_on_4() {
    all_reduces(4, &[600, 13, 1], INTERPRETED);
}

#[test]
fn all_reduces_have_the_hosts_bits_on_8() {
    all_reduces(8, &[200, 5], INTERPRETED);
}

fn alone(options: CudaOptions) {
    let text = r#"{"name": "copy", "collective": "test", "gpus": [{
        "id": 0, "input_chunks": 1, "output_chunks": 1, "scratch_chunks": 0, "channels": [],
        "threadblocks": [{"id": 0, "channels": [], "remote_buffer_refs": [], "ops": [
            {"name": "copy", "src_buff": [{"type": "i", "index": 0, "size": 1}],
             "dst_buff": [{"type": "o", "index": 0, "size": 1}]}]}]}]}"#;
    let plan = proved(Plan::from_json(text.as_bytes()).unwrap());
    on_gpus(1, |rank| {
        let mut both = Both::load(rank, &plan, options)?;
        both.compare::<f32>(100, 0, 0)?;
        both.compare::<bf16>(104, 1, 1)
    });
}

#[test]
fn a_rank_that_is_alone_on_1_gpus() {
    alone(INTERPRETED);
}

fn whole_library(world_size: usize, chunks: &[usize], options: CudaOptions) {
    for (algorithm, setting) in library(None, world_size as u32) {
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            chunks
                .iter()
                .enumerate()
                .try_for_each(|(seed, &chunk)| both.compare::<f32>(chunk, seed % 2, seed))
        });
    }
}

#[test]
fn every_plan_of_the_library_has_the_hosts_bits_on_2() {
    whole_library(2, &[4, 36, 1001], INTERPRETED);
}

#[test]
fn every_plan_of_the_library_has_the_hosts_bits_on_4() {
    whole_library(4, &[36, 101], INTERPRETED);
}

/// More thread blocks, with a part of every chunk each.
fn instances(options: CudaOptions) {
    for (algorithm, mut setting) in library(None, 2) {
        setting.options.instances = 3;
        let plan = proved(algorithm.plan(&setting).unwrap());
        on_gpus(2, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            both.compare::<f32>(40, 0, 0)?;
            both.compare::<f32>(1001, 1, 1)
        });
    }
}

#[test]
fn instances_share_the_work_on_2() {
    instances(INTERPRETED);
}

fn every_operation(options: CudaOptions) {
    for plan in plans::all(3, ReduceOp::Sum) {
        let plan = proved(plan);
        on_gpus(3, |rank| {
            let mut both = Both::load(rank, &plan, options)?;
            [16, 4, 64]
                .into_iter()
                .enumerate()
                .try_for_each(|(seed, chunk)| both.compare::<f32>(chunk, seed, seed))
        });
    }
}

/// Inputs that each rank writes in its stream behind the call before, while no host waits; peers read them at once.
fn inputs_of_streams(world_size: usize) {
    let plan = proved(plans::get_at_once(world_size as u32).unwrap());
    on_gpus(world_size, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        both.prepare::<f32>(64)?;
        let inputs =
            (0..4).map(|seed| both.call::<f32>(64, 0, seed)).collect::<harness::Outcome<Vec<_>>>()?;
        let mut call = both.call::<f32>(64, 0, 4)?;
        rank.comm.barrier()?;
        for input in &inputs {
            both.take_input(&mut call, input)?;
            both.queue(&call)?;
        }
        both.check(&call, "with inputs of the stream")
    });
}

#[test]
fn inputs_are_those_of_their_streams_on_2() {
    inputs_of_streams(2);
}

#[test]
fn inputs_are_those_of_their_streams_on_3() {
    inputs_of_streams(3);
}

#[test]
fn every_operation_has_the_hosts_bits_on_3() {
    every_operation(INTERPRETED);
}

fn every_dtype_and_operator(options: CudaOptions) {
    use plans::Relay;
    for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
        for plan in [
            plans::two_shot(2, op, false),
            plans::packets_two_shot(2, op, Relay::Sent),
            plans::local_reduce(2, op),
        ] {
            let plan = proved(plan.unwrap());
            for packets in [PacketKind::LL8, PacketKind::LL16] {
                on_gpus(2, |rank| {
                    let mut both = Both::load(rank, &plan, CudaOptions { packets, ..options })?;
                    for &dtype in DType::NUMERIC {
                        with_dtype!(dtype, T => both.compare::<T>(96 / size_of::<T>(), 1, 5)?);
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn every_dtype_and_operator_has_the_hosts_bits_on_2() {
    every_dtype_and_operator(INTERPRETED);
}
