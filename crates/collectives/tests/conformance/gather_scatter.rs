//! The operations that move tensors between ranks: each gives what its row in the table of operations says.

use antiphon_collectives::{Call, ReduceOp};
use antiphon_operation::Operation;
use antiphon_tensor::DType;

use crate::{
    all_reduce::small_counts,
    harness::{Backend, Place},
    operations::{Rank, calls_of, operations},
};

conformance! {
    every_operation_gives_what_its_row_says: every_dtype, every_world;
    reductions_are_by_any_operator: every_dtype, [world_1 world_3 world_8];
    any_rank_may_be_the_root: [f32], every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_3];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_2 world_3];
    rows_may_fill_a_mailbox: [bf16], [world_9];
}

fn every_operation_gives_what_its_row_says<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &small_counts(dtype)));
}

fn reductions_are_by_any_operator<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for operation in operations().filter(|operation| operation.row().reduces) {
            for op in ReduceOp::ARITHMETIC {
                let calls = calls_of(operation, 65, world);
                rank.calls(|rank| calls[rank].clone().with_op(op), 65);
            }
        }
    });
}

fn any_rank_may_be_the_root<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for operation in operations().filter(|operation| operation.row().root.is_some()) {
            for root in 0..world {
                rank.call(&Call::new(operation).with_root(root), 17);
            }
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
fn cut(dtype: DType, world: usize) -> usize {
    (128 << 10).min((1 << 20) / world / 64 * 64) / dtype.size()
}

/// Every operation of the table, with every count and with some root for each.
fn every_operation<B: Backend>(rank: &Rank<'_, B>, counts: &[usize]) {
    for operation in operations().filter(|&operation| operation != Operation::AllReduce) {
        for (i, &count) in counts.iter().enumerate() {
            let calls = calls_of(operation, count, rank.world());
            rank.calls(|me| calls[me].clone().with_root(i % rank.world()), count);
        }
    }
}
