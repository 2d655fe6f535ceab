//! The operations in which one rank, the root, gives or gets for all.

use antiphon_collectives::{Collectives, ReduceOp};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use crate::{
    all_reduce::small_counts,
    gather_scatter::cut,
    harness::{Backend, Place},
    operations::Rank,
};

conformance! {
    broadcast_gives_everyone_what_the_root_has: every_dtype, every_world;
    reduce_gives_the_root_the_reduction: every_dtype, every_world;
    gather_puts_every_input_in_its_place_at_the_root: every_dtype, every_world;
    scatter_gives_each_rank_its_block_of_the_roots: every_dtype, every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_3];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_2 world_3];
    rows_may_fill_a_mailbox: [bf16], [world_9];
    what_others_than_the_root_pass_does_not_matter: any_dtype, [world_2 world_3];
}

fn broadcast_gives_everyone_what_the_root_has<B: Backend>(dtype: DType, world: usize) {
    for_every_root::<B>(dtype, world, |rank, count, root| {
        rank.broadcast(count, root);
        rank.broadcast_from(count, root);
    });
}

fn reduce_gives_the_root_the_reduction<B: Backend>(dtype: DType, world: usize) {
    for_every_root::<B>(dtype, world, |rank, count, root| {
        for op in ReduceOp::ARITHMETIC {
            rank.reduce(count, op, root);
            rank.reduce_in_place(count, op, root);
        }
    });
}

fn gather_puts_every_input_in_its_place_at_the_root<B: Backend>(dtype: DType, world: usize) {
    for_every_root::<B>(dtype, world, |rank, count, root| rank.gather(count, root));
}

fn scatter_gives_each_rank_its_block_of_the_roots<B: Backend>(dtype: DType, world: usize) {
    for_every_root::<B>(dtype, world, |rank, count, root| rank.scatter(count, root));
}

/// Every root with some count and every count with some root.
fn for_every_root<B: Backend>(dtype: DType, world: usize, call: impl Fn(&Rank<'_, B>, usize, usize) + Sync) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for (i, count) in small_counts(dtype).into_iter().enumerate() {
            call(&rank, count, i % world);
        }
        for root in 0..world {
            call(&rank, 17, root);
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

fn every_operation<B: Backend>(rank: &Rank<'_, B>, counts: &[usize]) {
    for (i, &count) in counts.iter().enumerate() {
        let root = i % rank.world();
        rank.broadcast(count, root);
        rank.broadcast_from(count, root);
        rank.reduce(count, ReduceOp::Sum, root);
        rank.reduce_in_place(count, ReduceOp::Sum, root);
        rank.gather(count, root);
        rank.scatter(count, root);
    }
}

/// Where only the root's tensor counts, the others may pass one of another dtype, of another length, strided.
fn what_others_than_the_root_pass_does_not_matter<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let (root, mine) = (world - 1, [comm.rank() as i32; 4]);
        let (bytes, mut more_bytes) = ([7u8; 9], [7u8; 9]);
        let strange = TensorView::with_strides(&bytes, &[3], &[3]).unwrap();
        let is_root = comm.rank() == root;

        let mut got = [0i32; 4];
        let input = if is_root { (&mine).into() } else { strange };
        comm.broadcast_from(Some(input), &mut got, root).unwrap();
        assert_eq!(got, [root as i32; 4]);

        let row: Vec<i32> = (0..4 * world as i32).collect();
        let input = if is_root { (&row).into() } else { strange };
        comm.scatter(Some(input), &mut got, root).unwrap();
        assert_eq!(got, row[4 * comm.rank()..][..4]);

        let mut sum = [0i32; 4];
        let output = if is_root { (&mut sum).into() } else { every_third(&mut more_bytes) };
        comm.reduce(&mine, Some(output), ReduceOp::Max, root).unwrap();
        assert_eq!(sum, if is_root { mine } else { [0; 4] });

        let mut all = vec![0i32; 4 * world];
        let output = if is_root { (&mut all).into() } else { every_third(&mut more_bytes) };
        comm.gather(&mine, Some(output), root).unwrap();
        assert_eq!(all[4 * root..], if is_root { mine } else { [0; 4] });
        assert_eq!(more_bytes, [7; 9]);
    });
}

fn every_third(bytes: &mut [u8; 9]) -> TensorViewMut<'_> {
    TensorViewMut::with_strides(bytes, &[3], &[3]).unwrap()
}
