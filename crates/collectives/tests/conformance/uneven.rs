//! All-to-all with a length of its own for every pair of ranks.

use antiphon_collectives::{Call, CollectiveError, Collectives};
use antiphon_operation::Operation;
use antiphon_tensor::DType;

use crate::{
    harness::{Backend, Place},
    operations::Rank,
};

conformance! {
    blocks_may_have_any_lengths: every_dtype, every_world;
    blocks_may_be_longer_than_a_mailbox: [f64 bf16 u8], [world_1 world_2 world_3];
    rows_may_be_as_long_as_what_goes_with_the_counts: [f64 u8], [world_1 world_2 world_3];
    counts_that_do_not_match_are_named_on_every_rank: any_dtype, [world_2 world_3 world_5];
    counts_whose_sum_overflows_are_refused: any_dtype, [world_2];
    ranks_that_list_other_counts_are_told: any_dtype, [world_2 world_3];
    one_rank_may_have_all_and_the_others_nothing: every_dtype, every_world;
}

fn blocks_may_have_any_lengths<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for place in [Place::Aligned, Place::Odd] {
            let rank = Rank::<B>::new(&comm, dtype).at(place);
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

fn blocks_may_be_longer_than_a_mailbox<B: Backend>(dtype: DType, world: usize) {
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
fn rows_may_be_as_long_as_what_goes_with_the_counts<B: Backend>(dtype: DType, world: usize) {
    let block = (64 << 10) / world / dtype.size();
    B::run(world, |comm| {
        let rank = Rank::<B>::new(&comm, dtype);
        for count in [block - 1, block, block + 1] {
            rank.all_to_all_v(|_, _| count);
            rank.all_to_all_v(|from, _| if from + 1 == world { count } else { block });
        }
    });
}

fn counts_that_do_not_match_are_named_on_every_rank<B: Backend>(world: usize) {
    let last = world - 1;
    B::run(world, |comm| {
        let me = comm.rank();
        // The last rank expects four elements of rank 0, which sends it three.
        let sends = vec![3; world];
        let receives: Vec<usize> =
            (0..world).map(|from| if (me, from) == (last, 0) { 4 } else { 3 }).collect();
        let (input, mut output) = (vec![1f32; 3 * world], vec![9f32; receives.iter().sum()]);
        let error = comm.all_to_all_v(&input, &sends, &mut output, &receives).unwrap_err();
        assert!(
            matches!(error, CollectiveError::SplitsDisagree { from: 0, to, sent: 3, expected: 4 } if to == last),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(text.contains("rank 0 sends 3 elements") && text.contains("expects 4"), "{text}");
        assert!(output.iter().all(|&x| x == 9.0), "an output was touched");
        // All ranks know, so all are still in step.
        Rank::<B>::new(&comm, DType::F32).all_to_all_v(|from, to| from + to);
    });
}

/// As many elements in all, cut in another way.
fn ranks_that_list_other_counts_are_told<B: Backend>(world: usize) {
    let errors = B::run(world, |comm| {
        let mut counts = vec![4; world];
        if comm.rank() == 0 {
            (counts[0], counts[1]) = (3, 5);
        }
        let mut all = vec![9f32; 4 * world];
        comm.all_gather_v(&vec![1f32; counts[comm.rank()]], &mut all, &counts).unwrap_err().to_string()
    });
    let mismatch = errors.iter().find(|error| error.contains("all_gather_v(") && error.contains("counts "));
    assert!(mismatch.is_some(), "{errors:?}");
}

fn one_rank_may_have_all_and_the_others_nothing<B: Backend>(dtype: DType, world: usize) {
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

/// The counts are right modulo 2⁶⁴.
fn counts_whose_sum_overflows_are_refused<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let counts = [usize::MAX, 1 + 4];
        let (input, mut output) = ([1u8; 4], [0u8; 4]);
        let error = comm.all_to_all_v(&input, &counts, &mut output, &counts).unwrap_err();
        assert!(matches!(error, CollectiveError::Count { .. }), "{error:?}");
        Rank::<B>::new(&comm, DType::U8).all_to_all_v(|from, to| from + to);
    });
}
