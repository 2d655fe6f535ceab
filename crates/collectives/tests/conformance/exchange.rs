//! Every rank sends to one and receives from another at once.

use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use crate::{
    all_reduce::{seams, small_counts},
    harness::CollectiveBackend,
    messages::PACKET,
    operations::Rank,
};

conformance! {
    everyone_passes_a_message_round_the_ring: every_dtype, every_world;
    tensors_may_begin_anywhere: every_dtype, [world_1 world_3];
    messages_of_any_size_go_both_ways_at_once: [f32 bf16 u8], [world_1 world_2 world_3 world_5];
}

fn everyone_passes_a_message_round_the_ring<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in small_counts(dtype).into_iter().chain([4099]) {
            rank.ring(count);
        }
    });
}

fn tensors_may_begin_anywhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for alignment in [Alignment::Shifted, Alignment::Odd] {
            let rank = Rank::<B>::new(&comm, dtype).at(alignment);
            for count in [0, 3, 65, PACKET / dtype.size() + 1] {
                rank.ring(count);
            }
        }
    });
}

fn messages_of_any_size_go_both_ways_at_once<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        let packet = PACKET / dtype.size();
        for count in [packet - 1, packet, packet + 1].into_iter().chain(seams::<B>(dtype)) {
            rank.ring(count);
        }
        rank.ring((8 << 20) / dtype.size());
    });
}
