//! Long sequences of calls by ranks that are early now and late then.

use std::time::Duration;

use antiphon_collectives::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    harness::{Backend, Place},
    operations::{Rank, Way},
    values::Bits,
};

conformance! {
    two_thousand_calls_in_random_order_with_random_delays: any_dtype, [world_2 world_3 world_4];
}

fn two_thousand_calls_in_random_order_with_random_delays<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let kinds = DType::NUMERIC.iter().flat_map(|&dtype| [(dtype, Place::Aligned), (dtype, Place::Odd)]);
        let make = |(i, (dtype, place))| Rank::<B>::new(&comm, dtype).at(place).seeded(i as u64);
        let ranks: Vec<_> = kinds.enumerate().map(make).collect();
        let mut order = Bits::new(world as u64); // the same on all ranks
        let mut delays = Bits::new((world * 100 + comm.rank()) as u64); // not
        for _ in 0..2_000 {
            if delays.below(8) == 0 {
                std::thread::sleep(Duration::from_micros(delays.below(300) as u64));
            }
            any_call(&ranks[order.below(ranks.len())], &mut order);
        }
    });
}

fn any_call<B: Backend>(rank: &Rank<'_, B>, order: &mut Bits) {
    let count = match order.below(20) {
        0 => 0,
        1..16 => order.below(100),
        16..19 => order.below(3_000),
        _ => order.below(100_000),
    };
    let (op, root) = (ReduceOp::ARITHMETIC[order.below(5)], order.below(rank.world()));
    let salt = order.below(1000);
    match order.below(17) {
        0..4 => rank.all_reduce(count, op, Way::ALL[salt % 4]),
        4 => rank.all_gather(count),
        5 => rank.all_gather_in_place(count),
        6 => rank.reduce_scatter(count, op),
        7 => rank.reduce_scatter_in_place(count, op),
        8 => rank.all_to_all(count),
        9 => rank.all_to_all_in_place(count),
        10 => rank.all_to_all_v(|from, to| (salt + from * 31 + to * 17) % (count + 1)),
        11 => rank.broadcast(count, root),
        12 => rank.broadcast_from(count, root),
        13 => rank.reduce(count, op, root),
        14 => rank.gather(count, root),
        15 => rank.scatter(count, root),
        _ => rank.ring(count),
    }
}
