//! Fused calls beside each other and beside plain ones: in graphs, between eager calls, from two communicators.

use antiphon_collectives::{
    ReduceOp,
    cuda::{Algorithm, CudaCollectives},
    fusion::Accumulation,
};
use antiphon_device::cuda::Graph;
use antiphon_tensor::{DType, ScaleLayout, quantize::TokenRule};

use crate::{
    fused::{Case, Form, From, Fused, Norm},
    graphs::GraphError,
    harness::{Outcome, Random, Rank, on_gpus},
};

/// Patterns, shapes and algorithms of different kinds.
fn mix(seed: usize) -> Vec<Case> {
    let (one, two) = (Some(Algorithm::OneShot), Some(Algorithm::TwoShot));
    let bf16 = |tokens, hidden| Case { seed, ..Case::new(DType::BF16, tokens, hidden) };
    let quantized = |tokens, form| Case { seed, ..Case::quantized(DType::BF16, tokens, 7168, form) };
    let plain = |tokens, algorithm| Case { seed, algorithm, ..Case::plain(DType::BF16, tokens, 7168) };
    vec![
        bf16(1, 7168),
        plain(1, one),
        Case { algorithm: two, ..bf16(1, 16_384) },
        quantized(64, Form::Fp8),
        Case { algorithm: one, ..quantized(16, Form::Fp8Tokens(TokenRule::Quotient)) },
        plain(100, two),
        Case { algorithm: two, ..quantized(129, Form::Fp8Groups(128)) },
        quantized(3, Form::NvFp4(ScaleLayout::Swizzled128x4)),
        Case { from: From::Experts(8), ..bf16(7, 4096) },
        Case {
            from: From::Rows { top_k: 8, weighted: true, shared: true },
            algorithm: two,
            ..bf16(33, 7168)
        },
        Case { accumulation: Accumulation::Rounded, algorithm: two, ..bf16(64, 1040) },
        plain(300, None),
        Case { pre_norm: Norm::Weighted, bias: true, algorithm: one, ..bf16(600, 1024) },
        Case { seed, ..Case::new(DType::F32, 2, 16) },
    ]
}

/// Every case has been called once, which loads its kernels.
fn prepared(rank: &Rank, seed: usize) -> Outcome<Vec<Fused<'_>>> {
    rank.collectives.prepare(DType::BF16, ReduceOp::Sum)?;
    let prepared: Vec<_> =
        mix(seed).into_iter().map(|case| Fused::new(rank, case)).collect::<Outcome<_>>()?;
    prepared.iter().try_for_each(|fused| fused.queue())?;
    prepared.iter().try_for_each(Fused::check)?;
    Ok(prepared)
}

fn graphs_between_eager_calls(world_size: usize) {
    on_gpus(world_size, |rank| {
        let mix = prepared(rank, 0)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            mix.iter().try_for_each(|fused| Ok(fused.queue()?))
        })?;
        let graph = graph.instantiate()?;
        rank.meet()?;
        for replay in 0..100 {
            // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
            unsafe { graph.launch(&rank.stream) }?;
            mix[replay % mix.len()].queue()?;
            if replay % 25 == 0 {
                mix.iter().try_for_each(Fused::check)?;
                mix.iter().try_for_each(Fused::reset)?;
            }
        }
        mix.iter().try_for_each(Fused::check)
    });
}

#[test]
fn graphs_of_fused_calls_are_replayed_between_eager_calls() {
    graphs_between_eager_calls(2);
}

#[test]
fn graphs_of_fused_calls_are_replayed_between_eager_calls_on_4_gpus() {
    graphs_between_eager_calls(4);
}

fn many_mixed_calls(world_size: usize) {
    on_gpus(world_size, |rank| {
        let mixes = [prepared(rank, 0)?, prepared(rank, 1)?];
        let mut random = Random(1);
        for call in 0..20_000 {
            let which = random.below(2);
            mixes[which][random.below(mixes[which].len())].queue()?;
            random.delay(&rank.comm);
            if call % 2_000 == 1_999 {
                let all = || mixes.iter().flatten();
                all().try_for_each(Fused::reset)?;
                all().try_for_each(|fused| fused.queue())?;
                all().try_for_each(Fused::check)?;
            }
        }
        Ok(())
    });
}

#[test]
fn many_fused_and_plain_calls_with_delays() {
    many_mixed_calls(2);
}

#[test]
fn many_fused_and_plain_calls_with_delays_on_4_gpus() {
    many_mixed_calls(4);
}

fn second(rank: &Rank) -> Outcome<Rank> {
    let other = rank.comm.split(Some(0), 0)?.ok_or("everybody is in the group")?;
    let context = rank.collectives.context();
    let collectives = CudaCollectives::new(&other, context)?;
    Ok(Rank { comm: other, stream: context.stream()?, collectives })
}

#[test]
fn two_communicators_fuse_at_once() {
    on_gpus(2, |rank| {
        let second = second(rank)?;
        let (mine, others) = (prepared(rank, 0)?, prepared(&second, 1)?);
        for call in 0..2000 {
            mine[call % mine.len()].queue()?;
            others[(call + 5) % others.len()].queue()?;
        }
        mine.iter().chain(&others).try_for_each(Fused::check)
    });
}

/// Each fills the device as far as one may: clusters of the one must not wait for room that the other has.
#[test]
fn two_communicators_fuse_large_tensors() {
    on_gpus(2, |rank| {
        let second = second(rank)?;
        let case = |seed| Case {
            seed,
            ..Case::quantized(DType::BF16, 2500, 16_384, Form::Fp8Tokens(TokenRule::Quotient))
        };
        let turns = [Fused::new(rank, case(0))?, Fused::new(&second, case(1))?];
        let few = [
            Fused::new(rank, Case::new(DType::BF16, 64, 7168))?,
            Fused::new(&second, Case::new(DType::BF16, 64, 7168))?,
        ];
        for call in 0..20 {
            turns[call % 2].queue()?;
            few[(call + 1) % 2].queue()?;
        }
        turns.iter().chain(&few).try_for_each(Fused::check)
    });
}

#[test]
fn pairs_fuse_on_4_gpus() {
    on_gpus(4, |rank| {
        let me = rank.comm.rank();
        let pair = rank.comm.split(Some(me as u64 % 2), me as i64)?.ok_or("everybody is in a group")?;
        let context = rank.collectives.context();
        let collectives = CudaCollectives::new(&pair, context)?;
        let paired = Rank { stream: context.stream()?, collectives, comm: pair };
        let mix = prepared(&paired, 0)?;
        (0..100).try_for_each(|call| mix[call % mix.len()].queue())?;
        mix.iter().try_for_each(Fused::check)
    });
}
