//! The operations that move tensors between ranks: each gives what its row in the table of operations says.

use antiphon_collectives::Call;
use antiphon_operation::Operation;
use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use crate::{
    all_reduce::small_counts,
    harness::CollectiveBackend,
    operations::{Content, Rank, calls_of, operations},
    values::Values,
};

conformance! {
    every_operation_gives_what_its_row_says: every_dtype, every_world;
    reductions_are_by_any_operator: every_dtype, [world_1 world_3 world_8];
    any_rank_may_be_the_root: [f32], every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_3];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_2 world_3];
    words_that_mean_not_arrived_are_moved_like_others: [f32 u8], [world_2 world_3];
    what_others_than_the_root_pass_does_not_matter: [i32], [world_2 world_3];
    rows_may_fill_a_mailbox: [bf16], [world_9];
}

fn every_operation_gives_what_its_row_says<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &small_counts(dtype)));
}

fn reductions_are_by_any_operator<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for operation in operations().filter(|operation| operation.row().reduces) {
            for &op in B::operators(dtype) {
                let calls = calls_of(operation, 65, world);
                rank.calls(|rank| calls[rank].clone().with_op(op), 65);
            }
        }
    });
}

fn any_rank_may_be_the_root<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for operation in operations().filter(|operation| operation.row().root.is_some()) {
            for root in 0..world {
                rank.call(&Call::new(operation).with_root(root), 17);
            }
        }
    });
}

/// Words of ones, with which some kernels mark what has not come yet, alone and among others.
fn words_that_mean_not_arrived_are_moved_like_others<B: CollectiveBackend>(dtype: DType, world: usize) {
    fn bytes(dtype: DType, count: usize, byte: impl Fn(usize) -> u8) -> Values {
        Values::from_bytes(dtype, (0..count * dtype.size()).map(byte).collect())
    }
    let contents: [Content; 3] = [
        |dtype, _, count| bytes(dtype, count, |_| 0xFF),
        |dtype, _, count| bytes(dtype, count, |i| if i / 4 % 3 == 0 { 0xFF } else { i as u8 }),
        |dtype, _, count| bytes(dtype, count, |i| [0xFF, 0xFF, 0xFF, 0x7F][i % 4]),
    ];
    B::run(world, |comm| {
        for content in contents {
            every_operation::<B>(&Rank::new(&comm, dtype).holding(content), &[40_000 / dtype.size()]);
        }
    });
}

/// Where only the root's tensor counts, the others may pass one of another dtype, of another length, strided.
fn what_others_than_the_root_pass_does_not_matter<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype).with_strange_tensors();
        for operation in operations().filter(|operation| operation.row().root.is_some()) {
            rank.call(&Call::new(operation).with_root(world - 1), 4);
        }
    });
}

fn tensors_may_begin_anywhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for alignment in [Alignment::Shifted, Alignment::Odd] {
            every_operation::<B>(&Rank::new(&comm, dtype).at(alignment), &[0, 3, 65, 4099]);
        }
    });
}

fn pieces_join_without_a_seam<B: CollectiveBackend>(dtype: DType, world: usize) {
    let cut = cut(dtype, world);
    let counts = [cut - 1, cut, cut + 1, 2 * cut, 2 * cut + 1, 8 * cut + 1, 3_000_001 / dtype.size()];
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &counts));
}

/// So many ranks that what goes in one round is bounded by the mailbox.
fn rows_may_fill_a_mailbox<B: CollectiveBackend>(dtype: DType, world: usize) {
    let cut = cut(dtype, world);
    B::run(world, |comm| every_operation::<B>(&Rank::new(&comm, dtype), &[cut - 1, cut, cut + 1]));
}

/// How many elements of a block go in one round: 128 KiB, or a whole number of cache lines of a row of 1 MiB.
fn cut(dtype: DType, world: usize) -> usize {
    (128 << 10).min((1 << 20) / world / 64 * 64) / dtype.size()
}

/// Every operation of the table, with every count and with some root for each.
fn every_operation<B: CollectiveBackend>(rank: &Rank<'_, B>, counts: &[usize]) {
    for operation in operations().filter(|&operation| operation != Operation::AllReduce) {
        for (i, &count) in counts.iter().enumerate() {
            let calls = calls_of(operation, count, rank.world());
            rank.calls(|me| calls[me].clone().with_root(i % rank.world()), count);
        }
    }
}
