//! The fused all-reduce: what its page says to the bit, whatever is asked for, on every rank.

mod accuracy;
mod case;
mod data;
mod definition;
mod refusals;

use antiphon_collectives::{
    Collectives, ReduceOp,
    all_reduce::Algorithm,
    fusion::{Accumulation, FusedAllReduce, InPlace},
};
use antiphon_tensor::{DType, TensorView, TensorViewMut, quantize::TokenRule};
use antiphon_testing::{
    Alignment,
    backend::{Backend, HostThreads},
};

use crate::{
    harness::{CollectiveBackend, Tensor, assert_same_bits},
    values::Values,
};
use case::{Case, Form, Kind, Outcome, Residual};
use data::{Data, Parts};

conformance_on_host_and_nodes! {
    every_call_gives_what_its_page_says: [f32 f16 bf16], [world_1 world_2 world_3 world_4];
    troublesome_numbers_follow_the_rules: [f32 f16 bf16], [world_1 world_2 world_3 world_4];
    the_sum_has_the_bits_of_an_all_reduce: [f32 f16 bf16], [world_1 world_2 world_3 world_4];
    a_row_has_the_same_bits_alone_as_among_others: [f32 f16 bf16], [world_1 world_2];
    a_call_that_is_repeated_finds_nothing_of_the_last: [f16], [world_2];
}

/// What needs memory that all ranks map.
mod symmetric {
    use super::symmetric_memory_serves_too;

    conformance_on_host! {
        symmetric_memory_serves_too: [bf16], [world_1 world_2 world_3];
    }
}

const TOKENS: [usize; 5] = [0, 1, 3, 17, 64];
const HIDDEN: [usize; 4] = [16, 1024, 1040, 7168];

/// Calls it, and compares every byte with the definition.
fn check<B: CollectiveBackend>(comm: &B, case: &Case, data: &Data) -> Outcome {
    let (outcome, expected) =
        (case.run::<B>(comm, data), definition::outcome(case, data, comm.nodes().of_ranks()));
    let tensors = [
        (&outcome.sum, &expected.sum, "sum_out"),
        (&outcome.residual, &expected.residual, "residual_out"),
        (&outcome.norm, &expected.norm, "norm_out"),
        (&outcome.inverse_rms, &expected.inverse_rms, "inverse_rms_out"),
    ];
    for (actual, expected, which) in tensors {
        assert_eq!(actual.is_some(), expected.is_some(), "{which}");
        if let (Some(actual), Some(expected)) = (actual, expected) {
            assert_same_bits(actual, expected, format_args!("{case:?}: {which}"));
        }
    }
    assert_same_bits(&outcome.codes, &expected.codes, format_args!("{case:?}: codes"));
    assert_same_bits(&outcome.scales, &expected.scales, format_args!("{case:?}: scales"));
    outcome
}

/// All sources, norms, forms of quantisation, outputs, in combinations that follow from a number. What is not for all
/// ranks to agree on is another on each.
fn every_call_gives_what_its_page_says<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let mut seed = world as u64 * 10_000;
        for (tokens, hidden) in TOKENS.into_iter().flat_map(|tokens| HIDDEN.map(|hidden| (tokens, hidden))) {
            for _ in 0..(30_000 / (tokens * hidden + 1)).clamp(1, 24) {
                seed += 1;
                let case = Case::any(dtype, tokens, hidden, seed, comm.rank());
                let data = Data::moderate(&case, world, comm.rank());
                let outcome = check::<B>(&comm, &case, &data);
                // The slower comparison by one rank.
                if seed as usize % world == comm.rank() {
                    accuracy::check(&case, &data, comm.nodes().of_ranks(), &outcome);
                }
            }
        }
    });
}

/// Signed zeros, subnormals, numbers whose squares overflow, infinities, NaN: in the sum and in the residual.
fn troublesome_numbers_follow_the_rules<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for seed in 0..30 {
            let hidden = [16, 1024][seed as usize % 2];
            let case = Case::any(dtype, 27, hidden, seed, comm.rank());
            let case = Case { source: Kind::Tensor, ..case };
            check::<B>(&comm, &case, &Data::troublesome(&case, world, comm.rank()));
        }
    });
}

fn the_sum_has_the_bits_of_an_all_reduce<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        // 40 rows in one piece; and more pieces than one, with rows across their ends.
        for (tokens, hidden) in [(40, 16), (150, 1040)] {
            let input = Values::any_bits(dtype, comm.rank() as u64, tokens * hidden);
            let mut reduced = Tensor::<B>::unwritten(&comm, dtype, input.len(), Alignment::Aligned);
            comm.all_reduce(&input, reduced.view_mut(), ReduceOp::Sum).unwrap();
            let reduced = reduced.values();
            for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)] {
                let mut sum = Tensor::<B>::unwritten(&comm, dtype, input.len(), Alignment::Odd);
                let view = TensorView::from(&input).reshape(&[tokens, hidden]).unwrap();
                let call = FusedAllReduce::of(view).sum_out(sum.view_mut()).algorithm(algorithm);
                comm.all_reduce_fused(call).unwrap();
                sum.assert_holds(&reduced, format_args!("by {algorithm:?}"));
            }
        }
    });
}

/// Batch invariance, spelled out: the result of a token depends neither on the tokens beside it nor on the algorithm.
fn a_row_has_the_same_bits_alone_as_among_others<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for hidden in [1040, 7168] {
            let all = Case {
                residual: Residual::Apart,
                gamma: true,
                residual_out: true,
                norm_out: true,
                form: Some(Form::Fp8Tokens { rule: TokenRule::default() }),
                ..Case::new(dtype, 17, hidden)
            };
            let data = Data::moderate(&all, world, comm.rank());
            let together = all.run::<B>(&comm, &data);
            for token in 0..all.tokens {
                let algorithm = Algorithm::ALL[token % 2];
                let alone = Case { tokens: 1, algorithm: Some(algorithm), ..all.clone() };
                let row = |values: &Values| values.block(token, all.tokens);
                let contributions = data.contributions.iter().map(|parts| match parts {
                    Parts::Tensor(input) => Parts::Tensor(row(input)),
                    _ => unreachable!("the source is a tensor"),
                });
                let data = Data {
                    contributions: contributions.collect(),
                    residual: row(&data.residual),
                    bias: data.bias.clone(),
                    pre_weight: data.pre_weight.clone(),
                    gamma: data.gamma.clone(),
                };
                let alone = alone.run::<B>(&comm, &data);
                let of = |outcome: &Outcome| {
                    let tensors =
                        [&outcome.sum, &outcome.residual, &outcome.norm].map(|tensor| tensor.clone());
                    tensors.map(Option::unwrap)
                };
                let outputs = of(&alone).into_iter().zip(of(&together));
                let quantized =
                    [(alone.codes, together.codes.clone()), (alone.scales, together.scales.clone())];
                for (i, (alone, together)) in outputs.chain(quantized).enumerate() {
                    assert_same_bits(&alone, &row(&together), format_args!("token {token}, output {i}"));
                }
            }
        }
    });
}

/// Then a two-shot stages nothing: ranks write each other's outputs.
fn symmetric_memory_serves_too<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for hidden in [1024, 7168] {
            let case = Case {
                residual: Residual::Apart,
                norm_out: true,
                sum_out: false,
                residual_out: true,
                alignment: Alignment::Aligned,
                ..Case::new(dtype, 33, hidden)
            };
            let data = Data::moderate(&case, world, comm.rank());
            let expected = definition::outcome(&case, &data, comm.nodes().of_ranks());
            let Parts::Tensor(input) = &data.contributions[comm.rank()] else { unreachable!() };
            let bytes = input.bytes().len();
            let buffer = comm.symmetric(2 * bytes).unwrap();
            let (base, shape) = (buffer.as_mut_ptr(comm.rank()), [case.tokens, hidden]);
            let mut norm = Tensor::<B>::unwritten(&comm, dtype, case.count(), Alignment::Odd);
            // SAFETY: the buffer has room for both, apart, and peers touch them only in the call.
            let (source, mut residual) = unsafe {
                std::ptr::copy_nonoverlapping(input.bytes().as_ptr(), base, bytes);
                let source = TensorView::from_raw_parts(base, dtype, &shape, None, comm.device());
                let at = base.add(bytes);
                (
                    source.unwrap(),
                    TensorViewMut::from_raw_parts(at, dtype, &shape, None, comm.device()).unwrap(),
                )
            };
            let call = FusedAllReduce::of(source)
                .algorithm(Algorithm::TwoShot)
                .residual(&data.residual)
                .residual_out(residual.reborrow())
                .rms_norm(None, case.eps)
                .norm_out(norm.view_mut());
            comm.all_reduce_fused(call).unwrap();
            let flat = residual.as_view().reshape(&[case.count()]).unwrap();
            assert_same_bits(flat, expected.residual.as_ref().unwrap(), "residual_out");
            norm.assert_holds(expected.norm.as_ref().unwrap(), "norm_out");

            // The sum lies where peers read the input, and in the end the sum with the residual.
            // SAFETY: as above.
            let place = unsafe { TensorViewMut::from_raw_parts(base, dtype, &shape, None, comm.device()) };
            let call = FusedAllReduce::of_in_place(place.unwrap(), InPlace::Residual)
                .algorithm(Algorithm::TwoShot)
                .residual(&data.residual)
                .rms_norm(None, case.eps)
                .norm_out(norm.view_mut());
            comm.all_reduce_fused(call).unwrap();
            // SAFETY: as above.
            let place =
                unsafe { TensorView::from_raw_parts(base, dtype, &[case.count()], None, comm.device()) };
            assert_same_bits(place.unwrap(), &expected.residual.unwrap(), "residual_out in place");
            norm.assert_holds(&expected.norm.unwrap(), "norm_out");
            comm.free(buffer).unwrap();
        }
    });
}

/// The memory that a communicator keeps is large from one call when the next is small.
fn a_call_that_is_repeated_finds_nothing_of_the_last<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for (seed, tokens) in [64, 1, 3, 64, 0, 17].into_iter().enumerate() {
            let case = Case {
                source: Kind::MoeReduction { experts: 2 },
                accumulation: [Accumulation::F32, Accumulation::Rounded][seed % 2],
                residual: Residual::InPlace,
                sum_out: false,
                form: Some(Form::Fp8Groups { group: 208 }),
                seed: seed as u64,
                ..Case::new(dtype, tokens, 1040)
            };
            check::<B>(&comm, &case, &Data::moderate(&case, world, comm.rank()));
        }
    });
}

/// The promise, spelled out once.
#[test]
fn one_call_does_what_three_do() {
    HostThreads::run(2, |comm| {
        let input = (0..8).map(|i| (i * 3 % 8 + comm.rank()) as f32).collect::<Vec<_>>();
        let (residual, mut norm) = ([0.5f32; 8], [0f32; 8]);
        let mut sum = residual;
        comm.all_reduce_fused(
            FusedAllReduce::of(TensorView::new(&input, &[1, 8]).unwrap())
                .residual_in_place(&mut sum)
                .rms_norm(None, 1e-5)
                .norm_out(&mut norm),
        )
        .unwrap();

        let mut by_hand = input;
        comm.all_reduce_in_place(&mut by_hand, ReduceOp::Sum).unwrap();
        by_hand.iter_mut().for_each(|x| *x += 0.5);
        assert_eq!(sum.as_slice(), by_hand);
        let mean = by_hand.iter().map(|x| x * x).sum::<f32>() / 8.0;
        for (norm, x) in norm.iter().zip(&by_hand) {
            assert!((norm - x / (mean + 1e-5).sqrt()).abs() < 1e-6);
        }
    });
}
