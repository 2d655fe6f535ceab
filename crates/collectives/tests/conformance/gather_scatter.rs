//! The operations in which all ranks give and get alike.

use antiphon_collectives::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    all_reduce::small_counts,
    harness::{Backend, Place},
    operations::Rank,
};

conformance! {
    all_gather_puts_every_input_in_its_place: every_dtype, every_world;
    reduce_scatter_gives_each_rank_the_reduction_of_its_blocks: every_dtype, every_world;
    all_to_all_exchanges_blocks: every_dtype, every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_3];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_2 world_3];
    rows_may_fill_a_mailbox: [bf16], [world_9];
}

fn all_gather_puts_every_input_in_its_place<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype) {
            rank.all_gather(count);
            rank.all_gather_in_place(count);
        }
    });
}

fn reduce_scatter_gives_each_rank_the_reduction_of_its_blocks<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype) {
            for op in ReduceOp::ARITHMETIC {
                rank.reduce_scatter(count, op);
                rank.reduce_scatter_in_place(count, op);
            }
        }
    });
}

fn all_to_all_exchanges_blocks<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype) {
            rank.all_to_all(count);
            rank.all_to_all_in_place(count);
        }
    });
}

fn tensors_may_begin_anywhere<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype).at(Place::Odd), &[0, 3, 65, 4099]));
}

fn pieces_join_without_a_seam<B: Backend>(dtype: DType, world: usize) {
    let cut = cut(dtype, world);
    let counts = [cut - 1, cut, cut + 1, 2 * cut, 2 * cut + 1, 8 * cut + 1];
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &counts));
}

/// So many ranks that what goes in one round is bounded by the mailbox.
fn rows_may_fill_a_mailbox<B: Backend>(dtype: DType, world: usize) {
    let cut = cut(dtype, world);
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &[cut - 1, cut, cut + 1]));
}

/// How many elements of a block go in one round: 128 KiB, or a whole number of cache lines of a row of 1 MiB.
pub fn cut(dtype: DType, world: usize) -> usize {
    (128 << 10).min((1 << 20) / world / 64 * 64) / dtype.size()
}

fn every_operation<B: Backend>(rank: &Rank<'_, B>, counts: &[usize]) {
    for &count in counts {
        rank.all_gather(count);
        rank.all_gather_in_place(count);
        rank.reduce_scatter(count, ReduceOp::Sum);
        rank.reduce_scatter_in_place(count, ReduceOp::Sum);
        rank.all_to_all(count);
        rank.all_to_all_in_place(count);
    }
}
