//! All-to-all with a length of its own for every pair of ranks.

use antiphon_collectives::Call;
use antiphon_operation::Operation;
use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use crate::{harness::CollectiveBackend, operations::Rank};

conformance! {
    blocks_may_have_any_lengths: every_dtype, every_world;
    blocks_may_be_longer_than_a_mailbox: [f64 bf16 u8], [world_1 world_2 world_3];
    rows_may_be_as_long_as_what_goes_with_the_counts: [f64 u8], [world_1 world_2 world_3];
    one_rank_may_have_all_and_the_others_nothing: every_dtype, every_world;
}

fn blocks_may_have_any_lengths<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for alignment in [Alignment::Aligned, Alignment::Odd] {
            let rank = Rank::<B>::new(&comm, dtype).at(alignment);
            rank.all_to_all_v(|_, _| 0);
            rank.all_to_all_v(|_, _| 7); // as all_to_all
            rank.all_to_all_v(|from, to| if from == to { 5 } else { 0 }); // only to themselves
            rank.all_to_all_v(|from, to| if from == to { 0 } else { 5 }); // only to others
            rank.all_to_all_v(|from, _| if from == 0 { 9 } else { 0 }); // a scatter
            rank.all_to_all_v(|_, to| if to + 1 == world { 9 } else { 0 }); // a gather
            rank.all_to_all_v(|from, to| from * 10 + to);
            rank.all_to_all_v(|from, to| (from * 31 + to * 17) % 7 * 150);
        }
    });
}

fn blocks_may_be_longer_than_a_mailbox<B: CollectiveBackend>(dtype: DType, world: usize) {
    let slot = (1 << 20) / world / dtype.size();
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for long in [slot - 1, slot, slot + 1, 3 * slot + 1] {
            rank.all_to_all_v(|from, to| if (from, to) == (0, world - 1) { long } else { 3 });
            rank.all_to_all_v(|_, _| long);
        }
    });
}

/// Around what travels with the counts, also on one rank alone.
fn rows_may_be_as_long_as_what_goes_with_the_counts<B: CollectiveBackend>(dtype: DType, world: usize) {
    let block = (64 << 10) / world / dtype.size();
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in [block - 1, block, block + 1] {
            rank.all_to_all_v(|_, _| count);
            rank.all_to_all_v(|from, _| if from + 1 == world { count } else { block });
        }
    });
}

fn one_rank_may_have_all_and_the_others_nothing<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for operation in [Operation::AllGatherV, Operation::ReduceScatterV] {
            for owner in 0..world {
                let counts: Vec<usize> = (0..world).map(|rank| if rank == owner { 70 } else { 0 }).collect();
                rank.call(&Call::new(operation).with_counts(counts), 0);
            }
        }
    });
}
