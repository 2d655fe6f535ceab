//! What holds for every call.

use antiphon_collectives::ReduceOp;
use antiphon_tensor::DType;
use antiphon_testing::{Alignment, backend::HostThreads};
use proptest::{prelude::*, sample::select};

use crate::{
    harness::CollectiveBackend,
    operations::{Rank, Way},
};

fn config() -> ProptestConfig {
    ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() }
}

fn an_all_reduce_gives_the_bits_of_a_single_process<B: CollectiveBackend>(
    world: usize,
    count: usize,
    dtype: DType,
    op: ReduceOp,
    way: Way,
    alignment: Alignment,
) {
    B::run(world, |comm| {
        Rank::<B>::new(&comm, dtype).at(alignment).seeded(count as u64).all_reduce(count, op, way);
    });
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn all_reduces_on_host_threads(
        world in 1..=6usize,
        count in 0..=5000usize,
        dtype in select(DType::NUMERIC),
        op in select(&ReduceOp::ARITHMETIC[..]),
        way in select(&Way::ALL[..]),
        alignment in select(&[Alignment::Aligned, Alignment::Odd][..]),
    ) {
        an_all_reduce_gives_the_bits_of_a_single_process::<HostThreads>(world, count, dtype, op, way, alignment);
    }
}
