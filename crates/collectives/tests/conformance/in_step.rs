//! Long sequences of calls by ranks that are early now and late then.

use std::time::Duration;

use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use crate::{
    harness::CollectiveBackend,
    operations::{Rank, Way, calls_of, operations},
    values::Bits,
};

conformance! {
    two_thousand_calls_in_random_order_with_random_delays: any_dtype, [world_2 world_3 world_4];
}

fn two_thousand_calls_in_random_order_with_random_delays<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        let kinds =
            DType::NUMERIC.iter().flat_map(|&dtype| [(dtype, Alignment::Aligned), (dtype, Alignment::Odd)]);
        let make = |(i, (dtype, alignment))| Rank::<B>::new(&comm, dtype).at(alignment).seeded(i as u64);
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

fn any_call<B: CollectiveBackend>(rank: &Rank<'_, B>, order: &mut Bits) {
    let count = match order.below(20) {
        0 => 0,
        1..16 => order.below(100),
        16..19 => order.below(3_000),
        _ => order.below(100_000),
    };
    let operators = B::operators(rank.dtype());
    let (op, root) = (operators[order.below(60) % operators.len()], order.below(rank.world()));
    let salt = order.below(1000);
    let operations: Vec<_> = operations().collect();
    match order.below(4 + operations.len()) {
        0..3 => rank.all_reduce(count, op, Way::ALL[salt % 4]),
        3 => rank.ring(count),
        other => {
            let calls = calls_of(operations[other - 4], count, rank.world());
            rank.calls(|me| calls[me].clone().with_op(op).with_root(root), count);
        }
    }
}
