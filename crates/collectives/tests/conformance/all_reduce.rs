//! All-reduce: the same bits on every rank, in every way, for every size.

use antiphon_collectives::{
    Collectives, ReduceOp,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_tensor::DType;
use antiphon_testing::{
    Alignment,
    backend::{Backend, HostThreads},
};

use crate::{
    harness::{CollectiveBackend, assert_same_bits},
    operations::{Rank, Way},
    values::{Values, any_bits, special_combinations},
};

conformance! {
    every_way_gives_the_reduction_in_rank_order: every_dtype, every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_2 world_3 world_5];
    results_are_as_close_to_f64_as_the_rule_says: every_dtype, every_world;
    special_values_follow_the_rules: every_dtype, [world_1 world_2 world_3 world_5];
    pieces_join_without_a_seam: [f64 f32 bf16 u8], [world_1 world_2 world_3 world_5];
    every_pattern_of_16_bits_is_reduced_alike: [f16 bf16], [world_2 world_3];
    operators_on_bits_go_every_way: [i64 i32 i8 u8], [world_1 world_2 world_3 world_5];
    the_choice_of_algorithm_is_equal_on_all_ranks: any_dtype, every_world;
}

/// Few elements, with those around what travels inside a packet's head (40 bytes).
pub fn small_counts(dtype: DType) -> Vec<usize> {
    let inline = 40 / dtype.size();
    let mut counts = vec![0, 1, 2, 3, 5, 7, 9, 10, 11, inline, inline + 1, 63, 64, 65, 1000];
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Counts whose bytes are around the sizes at which tensors are cut.
pub fn seams<B: CollectiveBackend>(dtype: DType) -> Vec<usize> {
    let around = |bytes: &usize| (bytes / dtype.size() - 1)..=(bytes / dtype.size() + 1);
    B::SEAMS.iter().flat_map(around).collect()
}

fn every_way_gives_the_reduction_in_rank_order<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype) {
            for &op in B::operators(dtype) {
                for way in Way::ALL {
                    rank.all_reduce(count, op, way);
                }
            }
        }
    });
}

fn operators_on_bits_go_every_way<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype).into_iter().chain([4099]) {
            for op in [ReduceOp::Band, ReduceOp::Bor, ReduceOp::Bxor] {
                for way in Way::ALL {
                    rank.all_reduce(count, op, way);
                }
            }
        }
    });
}

fn tensors_may_begin_anywhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for alignment in [Alignment::Shifted, Alignment::Odd] {
            let rank = Rank::<B>::new(&comm, dtype).at(alignment);
            for count in [0, 1, 10, 65, 4099, (256 << 10) / dtype.size() + 1] {
                for way in Way::ALL {
                    rank.all_reduce(count, ReduceOp::Sum, way);
                }
            }
        }
    });
}

fn results_are_as_close_to_f64_as_the_rule_says<B: CollectiveBackend>(dtype: DType, world: usize) {
    let inputs: Vec<Values> = (0..world).map(|rank| Values::moderate(dtype, rank as u64, 4099)).collect();
    let expected = expected::<B>(dtype, &inputs);
    for (op, expected) in &expected {
        expected.assert_is_reduction(*op, &inputs);
    }
    every_way_gives::<B>(dtype, &inputs, &expected);
}

/// Signed zeros, subnormals, infinities, NaNs with payloads, the ends of integers, in all combinations.
fn special_values_follow_the_rules<B: CollectiveBackend>(dtype: DType, world: usize) {
    let inputs = special_combinations(dtype, world);
    let expected = expected::<B>(dtype, &inputs);
    for (op, expected) in &expected {
        // No step of these leaves the range, but the reference takes i64 through f64.
        if matches!(op, ReduceOp::Min | ReduceOp::Max) && dtype != DType::I64 {
            expected.assert_is_reduction(*op, &inputs);
        }
    }
    every_way_gives::<B>(dtype, &inputs, &expected);
}

fn pieces_join_without_a_seam<B: CollectiveBackend>(dtype: DType, world: usize) {
    let longest = seams::<B>(dtype).into_iter().max().unwrap();
    let inputs: Vec<Values> = (0..world).map(|rank| Values::any_bits(dtype, rank as u64, longest)).collect();
    let expected = B::reduced(ReduceOp::Sum, &inputs, &B::nodes(world));
    for count in seams::<B>(dtype) {
        let inputs: Vec<Values> = inputs.iter().map(|input| input.first(count)).collect();
        every_way_gives::<B>(dtype, &inputs, &[(ReduceOp::Sum, expected.first(count))]);
    }
}

/// All 65,536 patterns meet others in another order on each rank.
fn every_pattern_of_16_bits_is_reduced_alike<B: CollectiveBackend>(dtype: DType, world: usize) {
    let pattern = |rank: usize, i: u64| i * [1, 40_503, 25_173][rank] + 99 * rank as u64;
    let inputs: Vec<Values> =
        (0..world).map(|rank| Values::from_bits(dtype, (0..1 << 16).map(|i| pattern(rank, i)))).collect();
    let expected = expected::<B>(dtype, &inputs);
    for (op, expected) in &expected {
        // Only what leaves the range of f32 on the way may differ from the reference.
        if dtype == DType::F16 || matches!(op, ReduceOp::Min | ReduceOp::Max) {
            expected.assert_is_reduction(*op, &inputs);
        }
    }
    every_way_gives::<B>(dtype, &inputs, &expected);
}

/// What each operator must give.
fn expected<B: CollectiveBackend>(dtype: DType, inputs: &[Values]) -> Vec<(ReduceOp, Values)> {
    B::operators(dtype).iter().map(|&op| (op, B::reduced(op, inputs, &B::nodes(inputs.len())))).collect()
}

fn every_way_gives<B: CollectiveBackend>(dtype: DType, inputs: &[Values], expected: &[(ReduceOp, Values)]) {
    B::run(inputs.len(), |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for (op, expected) in expected {
            for way in Way::ALL {
                rank.all_reduce_of(inputs, expected, *op, way);
            }
        }
    });
}

fn the_choice_of_algorithm_is_equal_on_all_ranks<B: CollectiveBackend>(world: usize) {
    let chosen = B::run(world, |comm| {
        (0..28).map(|power| comm.algorithm_for(1 << power).to_string()).collect::<Vec<String>>()
    });
    assert!(chosen.iter().all(|choice| *choice == chosen[0]), "{chosen:?}");
}

#[test]
fn registered_memory_is_of_gpus() {
    HostThreads::run(2, |comm| {
        let options = AllReduceOptions::registered(Algorithm::TwoShot);
        let error = Collectives::all_reduce_with(&*comm, &[1.0f32], &mut [0.0f32], ReduceOp::Sum, options);
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("all_reduce: the registration must be left out"), "{text}");
        assert!(text.contains("on the host"), "{text}");
    });
}

/// The promise, spelled out once.
#[test]
fn all_ranks_get_the_same_bits_from_both_algorithms() {
    let results = antiphon_fabric::LocalWorld::run(3, |comm| {
        let mine = any_bits::<f32>(comm.rank() as u64, 10_000);
        Algorithm::ALL.map(|algorithm| {
            let mut sum = vec![0f32; mine.len()];
            comm.all_reduce_with(&mine, &mut sum, ReduceOp::Sum, algorithm).unwrap();
            sum
        })
    });
    for sum in results.as_flattened() {
        assert_same_bits(sum, &results[0][0], "a sum");
    }
}
