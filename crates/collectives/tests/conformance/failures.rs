//! What the host promises beyond the suite of all backends: which ranks learn of a mismatch, however late, and that no later
//! call works.

use std::time::{Duration, Instant};

use antiphon_collectives::{
    CollectiveError, Collectives, NonBlocking,
    fusion::{Accumulation, FusedAllReduce},
};
use antiphon_fabric::{FabricError, error::Loss};
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{DType, TensorView};

use crate::{
    disagreement::{disagree, every_operation_fails, make, plain},
    harness::CollectiveBackend,
    operations::Rank,
};

conformance_on_host_and_nodes! {
    about_the_root_of_messages: any_dtype, [world_2 world_3 world_5];
    about_even_and_uneven_blocks: any_dtype, [world_2 world_3 world_5];
    about_a_fused_call: any_dtype, [world_2 world_3 world_5];
    about_some_elements_or_none: any_dtype, [world_2 world_3 world_5];
    in_the_very_first_call: any_dtype, [world_2];
    one_rank_in_the_background: any_dtype, [world_2];
    one_rank_that_leaves: any_dtype, [world_2 world_3 world_5];
    a_call_that_all_agreed_on_is_not_aborted_by_the_next: any_dtype, [world_8];
    after_a_mismatch_everything_fails: any_dtype, [world_2];
    after_a_message_mismatch_collectives_fail_too: any_dtype, [world_2];
    counts_that_do_not_match_are_named_on_every_rank: any_dtype, [world_2 world_3 world_5];
    ranks_that_list_other_counts_are_told: any_dtype, [world_2 world_3];
}

/// Ranks that give to another root, or get from one, by messages: no rank that needs nothing of the others waits for them.
fn about_the_root_of_messages<B: CollectiveBackend>(world: usize) {
    use Operation::{Gather, Scatter};
    for operation in [Gather, Scatter] {
        let to = |root| move |comm: &B| make(comm, &Call::new(operation).with_root(root), DType::I8, 5);
        let texts = [0, 1].map(|root| format!("{operation}(5 × i8, root {root})"));
        disagree::<B>(world, (&to(0), &texts[0]), (&to(1), &texts[1]));
    }
    let [gather, scatter] =
        [Gather, Scatter].map(|operation| move |comm: &B| plain(comm, operation, DType::I8, 3));
    disagree::<B>(world, (&gather, "gather(3 × i8, root 0)"), (&scatter, "scatter(3 × i8, root 0)"));
}

/// An even and an uneven all-to-all are not the same call, even when they move the same blocks.
fn about_even_and_uneven_blocks<B: CollectiveBackend>(world: usize) {
    let even = |comm: &B| plain(comm, Operation::AllToAll, DType::I64, 1);
    let ones = vec![1; world];
    let uneven = |comm: &B| {
        let call = Call::all_to_all_v(&ones, &ones);
        make(comm, &call, DType::I64, 1)
    };
    disagree::<B>(world, (&even, "all_to_all(1 × i64)"), (&uneven, "all_to_all_v("));
}

/// Many pieces against none.
fn about_some_elements_or_none<B: CollectiveBackend>(world: usize) {
    let of = |count| move |comm: &B| plain(comm, Operation::Broadcast, DType::U8, count);
    disagree::<B>(world, (&of(1 << 20), "broadcast(1048576 × u8"), (&of(0), "broadcast(0 × u8"));
}

type Fused<'c, B> = &'c (dyn Fn(&B) -> Result<(), CollectiveError> + Sync);

fn about_a_fused_call<B: CollectiveBackend>(world: usize) {
    let fused = |comm: &B, tokens, hidden, accumulation| {
        let (input, mut sum) = (vec![0f32; tokens * hidden], vec![0f32; tokens * hidden]);
        let input = TensorView::new(&input, &[tokens, hidden]).unwrap();
        comm.all_reduce_fused(FusedAllReduce::of(input).accumulation(accumulation).sum_out(&mut sum))
    };
    let rows_of_8: Fused<'_, B> = &|comm| fused(comm, 4, 8, Accumulation::F32);
    let rows_of_16: Fused<'_, B> = &|comm| fused(comm, 2, 16, Accumulation::F32);
    let rounded: Fused<'_, B> = &|comm| fused(comm, 4, 8, Accumulation::Rounded);
    let no_rows: Fused<'_, B> = &|comm| fused(comm, 0, 8, Accumulation::F32);
    let bare: Fused<'_, B> = &|comm| plain(comm, Operation::AllReduce, DType::F32, 32);
    let text = "all_reduce_fused(32 × f32, sum, rows of 8, one-shot)";
    for (other, other_text) in [
        (rows_of_16, "all_reduce_fused(32 × f32, sum, rows of 16, one-shot)"),
        (rounded, "all_reduce_fused(32 × f32, sum, rows of 8, one-shot, rounded)"),
        (no_rows, "all_reduce_fused(0 × f32, sum, rows of 8, one-shot)"),
        (bare, "all_reduce(32 × f32, sum, one-shot)"),
    ] {
        disagree::<B>(world, (rows_of_8, text), (other, other_text));
    }
}

/// Also when nothing was called before, the error speaks of what the user called.
fn in_the_very_first_call<B: CollectiveBackend>(world: usize) {
    let errors = B::run(world, |comm| {
        let operation = if comm.rank() == 0 { Operation::AllReduce } else { Operation::Broadcast };
        plain(&comm, operation, DType::F32, 9).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("all_reduce"), "{error}");
    }
}

/// The background has an order of its own, so no mismatch is found; but no rank waits longer than the timeout.
fn one_rank_in_the_background<B: CollectiveBackend>(world: usize) {
    let errors = B::run(world, |comm| {
        comm.set_timeout(Duration::from_millis(300)); // of this behaviour alone, which runs into it
        let start = Instant::now();
        let error = match comm.rank() {
            0 => comm.start_barrier().unwrap().wait().unwrap_err(),
            _ => comm.barrier().unwrap_err(),
        };
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
        (matches!(error, FabricError::Timeout { .. }), error.to_string())
    });
    let named = |(timed_out, text): &(bool, String)| *timed_out && text.contains("barrier");
    assert!(errors.iter().any(named), "{errors:?}");
}

fn one_rank_that_leaves<B: CollectiveBackend>(world: usize) {
    let last = world - 1;
    B::run(world, |comm| {
        if comm.rank() == last {
            return;
        }
        let start = Instant::now();
        let CollectiveError::Fabric(error) = plain(&comm, Operation::AllGather, DType::F32, 9).unwrap_err()
        else {
            panic!("not between ranks")
        };
        assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
        assert!(
            matches!(error, FabricError::PeerLost { rank, how: Loss::Left | Loss::Reported { .. }, .. } if rank == last),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(text.contains(&format!("rank {last} was lost during all_gather(9 × f32)")), "{text}");
        every_operation_fails(&comm, &error);
    });
}

/// Some ranks disagree while others still wake up to find that they agreed just before: those that rank 0, which is
/// late, wakes after rank 1.
fn a_call_that_all_agreed_on_is_not_aborted_by_the_next<B: CollectiveBackend>(world: usize) {
    for _ in 0..10 {
        B::run(world, |comm| {
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let agreed = comm.barrier();
            comm.broadcast(&mut [0u8], usize::from(comm.rank() == 1)).unwrap_err();
            agreed.unwrap();
        });
    }
}

/// After any error but a refusal "the communicator answers every further call with `Failed`".
fn is_failed<R>(result: Result<R, FabricError>) -> bool {
    matches!(result, Err(FabricError::Failed(_)))
}

fn after_a_mismatch_everything_fails<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        comm.broadcast(&mut vec![0u8; 1 + comm.rank()], 0).unwrap_err();
        assert!(is_failed(comm.send(&[1u8], 1 - comm.rank())), "send");
        assert!(is_failed(comm.recv(&mut [0u8], 1 - comm.rank())), "recv");
        assert!(is_failed(comm.start_send(vec![0u8], 0)), "start_send");
        assert!(is_failed(comm.exchange_objects(&1)), "exchange_objects");
        assert!(is_failed(comm.split(Some(0), 0)), "split");
        match comm.start_barrier().map(|handle| handle.wait()) {
            Err(CollectiveError::Fabric(error)) | Ok(Err(error)) => {
                assert!(matches!(error, FabricError::Failed(_)), "start_barrier: {error:?}");
            }
            other => panic!("start_barrier: {other:?}"),
        }
    });
}

fn after_a_message_mismatch_collectives_fail_too<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        match comm.rank() {
            0 => comm.send(&vec![0f32; 1 << 20], 1).unwrap_err(),
            _ => comm.recv(&mut [0f32], 0).unwrap_err(),
        };
        let result = comm.barrier();
        assert!(is_failed(result.clone()), "barrier: {result:?}");
    });
}

fn counts_that_do_not_match_are_named_on_every_rank<B: CollectiveBackend>(world: usize) {
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
fn ranks_that_list_other_counts_are_told<B: CollectiveBackend>(world: usize) {
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
