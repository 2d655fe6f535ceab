//! Groups of ranks, and worlds of many.

use antiphon_collectives::{Collectives, ReduceOp};
use antiphon_operation::{Call, Operation};
use antiphon_tensor::DType;

use crate::{
    harness::CollectiveBackend,
    operations::{Rank, Way},
};

conformance! {
    each_group_reduces_for_itself: any_dtype, [world_1 world_2 world_5 world_8];
    groups_split_further: any_dtype, [world_8];
    the_key_orders_a_group: any_dtype, [world_3 world_4];
    a_rank_without_colour_joins_no_group: any_dtype, [world_1 world_3 world_4];
    a_group_that_fails_leaves_the_others_working: any_dtype, [world_4];
    many_ranks_work_together: any_dtype, [world_64];
}

fn each_group_reduces_for_itself<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let color = comm.rank() % 2;
        let group = comm.group(Some(color as u64), 0).expect("a group");
        let members: Vec<usize> = (0..world).filter(|rank| rank % 2 == color).collect();
        assert_eq!((group.rank(), group.world_size()), (comm.rank() / 2, members.len()));

        let mut sum = [comm.rank() as i64];
        group.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [members.iter().sum::<usize>() as i64]);

        // The groups make different calls, a different number of times, while the world goes on too.
        let in_group = Rank::<B>::new(&group, DType::F32).seeded(color as u64);
        for i in 0..10 * (color + 1) {
            in_group.all_reduce(i * 100, ReduceOp::Sum, Way::Automatic);
            in_group.call(&Call::all_gather(), i + color);
        }
        Rank::<B>::new(&comm, DType::F32).all_reduce(1000, ReduceOp::Sum, Way::Automatic);
    });
}

fn groups_split_further<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let half = comm.group(Some(comm.rank() as u64 / 4), 0).expect("a half");
        let pair = half.group(Some(half.rank() as u64 / 2), 0).expect("a pair");
        let sums = [&comm, &half, &pair].map(|group| {
            let mut sum = [comm.rank() as i64];
            group.all_reduce_in_place(&mut sum, ReduceOp::Sum).unwrap();
            sum[0]
        });
        let sum_of = |size: usize| {
            let first = comm.rank() / size * size;
            (first..first + size).sum::<usize>() as i64
        };
        assert_eq!(sums, [sum_of(8), sum_of(4), sum_of(2)]);
        // A group outlives what it was split from.
        drop((comm, half));
        Rank::<B>::new(&pair, DType::F32).call(&Call::all_to_all(), 5000);
    });
}

fn the_key_orders_a_group<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let reversed = comm.group(Some(0), -(comm.rank() as i64)).expect("a group");
        assert_eq!(reversed.rank(), world - 1 - comm.rank());
        let mut all = vec![0u8; world];
        reversed.all_gather(&[comm.rank() as u8], &mut all).unwrap();
        assert_eq!(all, (0..world as u8).rev().collect::<Vec<_>>());
    });
}

fn a_rank_without_colour_joins_no_group<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let color = (comm.rank() % 2 == 0).then_some(u64::MAX);
        let group = comm.group(color, 0);
        assert_eq!(group.is_some(), color.is_some());
        if let Some(group) = group {
            assert_eq!(group.world_size(), world.div_ceil(2));
            Rank::<B>::new(&group, DType::F32).all_reduce(1000, ReduceOp::Sum, Way::Automatic);
        }
        Rank::<B>::new(&comm, DType::F32).call(&Call::all_gather(), 10);
    });
}

fn a_group_that_fails_leaves_the_others_working<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let color = comm.rank() / 2;
        let group = comm.group(Some(color as u64), 0).expect("a group");
        if color == 0 {
            // They disagree about the count.
            group.broadcast(&mut vec![0u8; 1 + group.rank()], 0).unwrap_err();
            group.barrier().unwrap_err();
        } else {
            Rank::<B>::new(&group, DType::F32).call(&Call::all_gather(), 10);
        }
        Rank::<B>::new(&comm, DType::F32).call(&Call::all_gather(), 10);
    });
}

fn many_ranks_work_together<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, DType::F32);
        comm.barrier().unwrap();
        for way in Way::ALL {
            rank.all_reduce(1000, ReduceOp::Sum, way);
        }
        rank.call(&Call::all_to_all(), 3);
        rank.call(&Call::new(Operation::ReduceScatter), 300);
        let octet = comm.group(Some(comm.rank() as u64 % 8), 0).expect("a group");
        assert_eq!((octet.rank(), octet.world_size()), (comm.rank() / 8, 8));
        Rank::<B>::new(&octet, DType::F32).all_reduce(1000, ReduceOp::Sum, Way::Automatic);
        comm.barrier().unwrap();
    });
}
