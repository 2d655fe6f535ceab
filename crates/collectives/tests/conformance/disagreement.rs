//! Ranks that make different calls: everyone is told what both sides called, soon, and nobody hangs.
//!
//! In each case the last rank makes one call and the others another.

use std::{
    sync::Barrier,
    time::{Duration, Instant},
};

use antiphon_collectives::{
    CollectiveError, Collectives, Communicator, NonBlocking, ReduceOp,
    all_reduce::Algorithm,
    fusion::{Accumulation, FusedAllReduce},
};
use antiphon_fabric::{FabricError, LocalWorld, error::Loss};
use antiphon_tensor::{Element, TensorView};

use crate::harness::Backend;

conformance! {
    about_the_count: any_dtype, [world_2 world_3 world_5];
    about_the_dtype: any_dtype, [world_2 world_3 world_5];
    about_the_operator: any_dtype, [world_2 world_3 world_5];
    about_the_root: any_dtype, [world_2 world_3 world_5];
    about_the_algorithm: any_dtype, [world_2 world_3 world_5];
    about_the_operation: any_dtype, [world_2 world_3 world_5];
    about_the_order: any_dtype, [world_2 world_3 world_5];
    about_a_barrier: any_dtype, [world_2 world_3 world_5];
    about_a_fused_call: any_dtype, [world_2 world_3 world_5];
    in_the_very_first_call: any_dtype, [world_2];
    one_rank_in_the_background: any_dtype, [world_2];
    one_rank_that_leaves: any_dtype, [world_2 world_3 world_5];
    a_call_that_all_agreed_on_is_not_aborted_by_the_next: any_dtype, [world_8];
    after_a_mismatch_messages_fail_too: any_dtype, [world_2];
    after_a_mismatch_the_background_fails_too: any_dtype, [world_2];
    after_a_message_mismatch_collectives_fail_too: any_dtype, [world_2];
}

type Call<'c> = &'c (dyn Fn(&Communicator) -> Result<(), CollectiveError> + Sync);

/// A call with how its signature reads.
type Named<'c> = (Call<'c>, &'static str);

fn disagree<B: Backend>(world: usize, others: Named<'_>, last: Named<'_>) {
    let (start, agreed) = (Instant::now(), Barrier::new(world));
    let errors = B::run(world, |comm| {
        // The table of algorithms is loaded by the first all-reduce; see `in_the_very_first_call`.
        comm.all_reduce_in_place(&mut [0u8], ReduceOp::Sum).unwrap();
        agreed.wait(); // see `a_call_that_all_agreed_on_is_not_aborted_by_the_next`
        let (call, text) = if comm.rank() == world - 1 { last } else { others };
        let error = match call(&comm) {
            Err(CollectiveError::Fabric(error)) => error,
            other => panic!("rank {} of {world} in {text}: {other:?}", comm.rank()),
        };
        every_collective_fails(&comm, &error);
        error
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    let texts = [others.1, last.1];
    for (rank, error) in errors.iter().enumerate() {
        let (message, own) = (error.to_string(), texts[usize::from(rank == world - 1)]);
        match error {
            FabricError::Mismatch { .. } => {
                assert!(texts.iter().all(|text| message.contains(text)), "{message} does not say {texts:?}");
            }
            // Someone else was faster to see it.
            FabricError::Aborted { .. } => assert!(message.contains(own), "{message} does not say {own}"),
            _ => panic!("rank {rank} of {world}: {error:?}"),
        }
    }
    assert!(errors.iter().any(|e| matches!(e, FabricError::Mismatch { .. })), "nobody saw both: {errors:?}");
}

/// The communicator answers with the first error from then on.
fn every_collective_fails(comm: &Communicator, first: &FabricError) {
    let (one, mut out, root, sum) = ([1f32], [0f32], 0, ReduceOp::Sum);
    let (row, mut row_out) = (vec![1f32; comm.world_size()], vec![0f32; comm.world_size()]);
    let ones = vec![1; comm.world_size()];
    let calls = [
        comm.all_reduce(&one, &mut out, sum),
        comm.all_reduce_with(&one, &mut out, sum, Algorithm::TwoShot),
        comm.all_reduce_in_place(&mut out, sum),
        comm.all_gather(&one, &mut row_out),
        comm.reduce_scatter(&row, &mut out, sum),
        comm.all_to_all(&row, &mut row_out),
        comm.all_to_all_v(&row, &ones, &mut row_out, &ones),
        comm.broadcast(&mut out, root),
        comm.broadcast_from(Some(TensorView::from(&one)), &mut out, root),
        comm.reduce(&one, Some((&mut out).into()), sum, root),
        comm.gather(&one, Some((&mut row_out).into()), root),
        comm.scatter(Some(TensorView::from(&row)), &mut out, root),
        comm.barrier().map_err(CollectiveError::from),
        comm.exchange_objects(&1).map(drop).map_err(CollectiveError::from),
        comm.split(Some(0), 0).map(drop).map_err(CollectiveError::from),
    ];
    for (i, call) in calls.into_iter().enumerate() {
        match call {
            Err(CollectiveError::Fabric(FabricError::Failed(cause))) => {
                assert_eq!(cause.to_string(), first.to_string(), "call {i}");
            }
            other => panic!("call {i} after {first}: {other:?}"),
        }
    }
}

fn all_reduce<T: Element>(comm: &Communicator, count: usize, op: ReduceOp) -> Result<(), CollectiveError> {
    comm.all_reduce_in_place(&mut vec![T::default(); count], op)
}

fn all_reduce_by(comm: &Communicator, algorithm: Algorithm) -> Result<(), CollectiveError> {
    comm.all_reduce_with(&[0f32; 100], &mut [0f32; 100], ReduceOp::Sum, algorithm)
}

fn all_gather<T: Element>(comm: &Communicator, count: usize) -> Result<(), CollectiveError> {
    comm.all_gather(&vec![T::default(); count], &mut vec![T::default(); count * comm.world_size()])
}

fn all_to_all(comm: &Communicator, count: usize) -> Result<(), CollectiveError> {
    comm.all_to_all_in_place(&mut vec![0i64; count * comm.world_size()])
}

fn reduce_scatter(comm: &Communicator, count: usize) -> Result<(), CollectiveError> {
    comm.reduce_scatter_in_place(&mut vec![0i64; count * comm.world_size()], ReduceOp::Sum)
}

fn broadcast(comm: &Communicator, count: usize, root: usize) -> Result<(), CollectiveError> {
    comm.broadcast(&mut vec![0u8; count], root)
}

fn reduce(comm: &Communicator, op: ReduceOp, root: usize) -> Result<(), CollectiveError> {
    comm.reduce_in_place(&mut [0i32; 6], op, root)
}

fn gather(comm: &Communicator, root: usize) -> Result<(), CollectiveError> {
    let mut all = vec![0i8; 3 * comm.world_size()];
    comm.gather(&[0i8; 3], Some((&mut all).into()), root)
}

fn scatter(comm: &Communicator, root: usize) -> Result<(), CollectiveError> {
    let row = vec![0i8; 3 * comm.world_size()];
    comm.scatter(Some((&row).into()), &mut [0i8; 3], root)
}

fn barrier(comm: &Communicator) -> Result<(), CollectiveError> {
    Ok(comm.barrier()?)
}

fn about_the_count<B: Backend>(world: usize) {
    const SUM: ReduceOp = ReduceOp::Sum;
    disagree::<B>(
        world,
        (&|comm| all_reduce::<f32>(comm, 7, SUM), "all_reduce(7 × f32, sum"),
        (&|comm| all_reduce::<f32>(comm, 8, SUM), "all_reduce(8 × f32, sum"),
    );
    // One travels in the packet's head, the other beside it.
    disagree::<B>(
        world,
        (&|comm| all_gather::<f32>(comm, 10), "all_gather(10 × f32)"),
        (&|comm| all_gather::<f32>(comm, 11), "all_gather(11 × f32)"),
    );
    // Many pieces against none.
    disagree::<B>(
        world,
        (&|comm| broadcast(comm, 1 << 20, 0), "broadcast(1048576 × u8"),
        (&|comm| broadcast(comm, 0, 0), "broadcast(0 × u8"),
    );
    // By one algorithm here, by the other there.
    disagree::<B>(
        world,
        (&|comm| all_reduce::<f32>(comm, 1 << 20, SUM), "all_reduce(1048576 × f32, sum"),
        (&|comm| all_reduce::<f32>(comm, 1, SUM), "all_reduce(1 × f32, sum"),
    );
}

fn about_the_dtype<B: Backend>(world: usize) {
    disagree::<B>(
        world,
        (&|comm| all_reduce::<f32>(comm, 9, ReduceOp::Max), "all_reduce(9 × f32, max"),
        (&|comm| all_reduce::<i32>(comm, 9, ReduceOp::Max), "all_reduce(9 × i32, max"),
    );
    disagree::<B>(
        world,
        (&|comm| all_gather::<f64>(comm, 9), "all_gather(9 × f64)"),
        (&|comm| all_gather::<i8>(comm, 9), "all_gather(9 × i8)"),
    );
}

fn about_the_operator<B: Backend>(world: usize) {
    disagree::<B>(
        world,
        (&|comm| all_reduce::<f32>(comm, 9, ReduceOp::Sum), "all_reduce(9 × f32, sum"),
        (&|comm| all_reduce::<f32>(comm, 9, ReduceOp::Avg), "all_reduce(9 × f32, avg"),
    );
    disagree::<B>(
        world,
        (&|comm| reduce(comm, ReduceOp::Min, 0), "reduce(6 × i32, min, root 0)"),
        (&|comm| reduce(comm, ReduceOp::Prod, 0), "reduce(6 × i32, prod, root 0)"),
    );
}

fn about_the_root<B: Backend>(world: usize) {
    let sum = ReduceOp::Sum;
    disagree::<B>(
        world,
        (&|comm| broadcast(comm, 5, 0), "broadcast(5 × u8, root 0)"),
        (&|comm| broadcast(comm, 5, 1), "broadcast(5 × u8, root 1)"),
    );
    disagree::<B>(
        world,
        (&|comm| reduce(comm, sum, 0), "reduce(6 × i32, sum, root 0)"),
        (&|comm| reduce(comm, sum, 1), "reduce(6 × i32, sum, root 1)"),
    );
    disagree::<B>(
        world,
        (&|comm| gather(comm, 0), "gather(3 × i8, root 0)"),
        (&|comm| gather(comm, 1), "gather(3 × i8, root 1)"),
    );
    disagree::<B>(
        world,
        (&|comm| scatter(comm, 0), "scatter(3 × i8, root 0)"),
        (&|comm| scatter(comm, 1), "scatter(3 × i8, root 1)"),
    );
}

fn about_the_algorithm<B: Backend>(world: usize) {
    disagree::<B>(
        world,
        (&|comm| all_reduce_by(comm, Algorithm::OneShot), "one-shot"),
        (&|comm| all_reduce_by(comm, Algorithm::TwoShot), "two-shot"),
    );
    // An even and an uneven all-to-all are not the same call, even when they move the same blocks.
    let uneven = |comm: &Communicator| {
        let (ones, mut out) = (vec![1usize; comm.world_size()], vec![0i64; comm.world_size()]);
        comm.all_to_all_v(&vec![0i64; comm.world_size()], &ones, &mut out, &ones)
    };
    disagree::<B>(world, (&|comm| all_to_all(comm, 1), "all_to_all(1 × i64)"), (&uneven, "all_to_all_v("));
}

fn about_the_operation<B: Backend>(world: usize) {
    disagree::<B>(
        world,
        (&|comm| all_reduce::<u8>(comm, 5, ReduceOp::Sum), "all_reduce(5 × u8, sum"),
        (&|comm| broadcast(comm, 5, 0), "broadcast(5 × u8, root 0)"),
    );
    disagree::<B>(
        world,
        (&|comm| all_to_all(comm, 4), "all_to_all(4 × i64)"),
        (&|comm| reduce_scatter(comm, 4), "reduce_scatter(4 × i64, sum)"),
    );
    disagree::<B>(
        world,
        (&|comm| gather(comm, 0), "gather(3 × i8, root 0)"),
        (&|comm| scatter(comm, 0), "scatter(3 × i8, root 0)"),
    );
}

fn about_the_order<B: Backend>(world: usize) {
    let broadcast_first = |comm: &Communicator| {
        broadcast(comm, 5, 0)?;
        all_gather::<u8>(comm, 5)
    };
    let gather_first = |comm: &Communicator| {
        all_gather::<u8>(comm, 5)?;
        broadcast(comm, 5, 0)
    };
    disagree::<B>(
        world,
        (&broadcast_first, "broadcast(5 × u8, root 0)"),
        (&gather_first, "all_gather(5 × u8)"),
    );
}

fn about_a_barrier<B: Backend>(world: usize) {
    let reduce_first = |comm: &Communicator| all_reduce::<f32>(comm, 9, ReduceOp::Sum);
    disagree::<B>(world, (&barrier, "barrier"), (&reduce_first, "all_reduce(9 × f32, sum"));
    disagree::<B>(world, (&reduce_first, "all_reduce(9 × f32, sum"), (&barrier, "barrier"));
}

fn about_a_fused_call<B: Backend>(world: usize) {
    let fused = |comm: &Communicator, tokens, hidden, accumulation| {
        let (input, mut sum) = (vec![0f32; tokens * hidden], vec![0f32; tokens * hidden]);
        let input = TensorView::new(&input, &[tokens, hidden]).unwrap();
        comm.all_reduce_fused(FusedAllReduce::of(input).accumulation(accumulation).sum_out(&mut sum))
    };
    let rows_of_8: Call<'_> = &|comm| fused(comm, 4, 8, Accumulation::F32);
    let rows_of_16: Call<'_> = &|comm| fused(comm, 2, 16, Accumulation::F32);
    let rounded: Call<'_> = &|comm| fused(comm, 4, 8, Accumulation::Rounded);
    let no_rows: Call<'_> = &|comm| fused(comm, 0, 8, Accumulation::F32);
    let bare: Call<'_> = &|comm| all_reduce::<f32>(comm, 32, ReduceOp::Sum);
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
fn in_the_very_first_call<B: Backend>(world: usize) {
    let errors = B::run(world, |comm| match comm.rank() {
        0 => all_reduce::<f32>(&comm, 9, ReduceOp::Sum).unwrap_err().to_string(),
        _ => broadcast(&comm, 5, 0).unwrap_err().to_string(),
    });
    for error in errors {
        assert!(error.contains("all_reduce"), "{error}");
    }
}

/// The background has an order of its own, so nothing tells them; but nobody waits longer than the timeout.
fn one_rank_in_the_background<B: Backend>(world: usize) {
    // Only this one runs into the timeout, so it has its own.
    let (start, timeout) = (Instant::now(), Duration::from_millis(300));
    let errors = LocalWorld::run_with(world, timeout, |comm| match comm.rank() {
        0 => comm.start_barrier().unwrap().wait().unwrap_err(),
        _ => comm.barrier().unwrap_err(),
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
    assert!(
        errors.iter().any(|e| matches!(e, FabricError::Timeout { .. }) && e.to_string().contains("barrier")),
        "{errors:?}"
    );
}

fn one_rank_that_leaves<B: Backend>(world: usize) {
    let start = Instant::now();
    B::run(world, |comm| {
        if comm.rank() == world - 1 {
            return;
        }
        let CollectiveError::Fabric(error) = all_gather::<f32>(&comm, 9).unwrap_err() else {
            panic!("not between ranks")
        };
        assert!(
            matches!(error, FabricError::PeerLost { rank, how: Loss::Left | Loss::Reported { .. }, .. } if rank == world - 1),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(text.contains(&format!("rank {} was lost during all_gather(9 × f32)", world - 1)), "{text}");
        every_collective_fails(&comm, &error);
    });
    assert!(start.elapsed() < Duration::from_secs(5), "took {:?}", start.elapsed());
}

/// Some ranks disagree while others still wake up to find that they agreed just before: those that rank 0, which is
/// late, wakes after rank 1.
fn a_call_that_all_agreed_on_is_not_aborted_by_the_next<B: Backend>(world: usize) {
    for _ in 0..10 {
        B::run(world, |comm| {
            if comm.rank() == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            let agreed = barrier(&comm);
            broadcast(&comm, 1, usize::from(comm.rank() == 1)).unwrap_err();
            agreed.unwrap();
        });
    }
}

/// After any error but a refusal "the communicator answers every further call with `Failed`".
fn is_failed<R>(result: Result<R, FabricError>) -> bool {
    matches!(result, Err(FabricError::Failed(_)))
}

fn after_a_mismatch_messages_fail_too<B: Backend>(world: usize) {
    B::run(world, |comm| {
        broadcast(&comm, 1 + comm.rank(), 0).unwrap_err();
        assert!(is_failed(comm.send(&[1u8], 1 - comm.rank())), "send");
        assert!(is_failed(comm.recv(&mut [0u8], 1 - comm.rank())), "recv");
        assert!(is_failed(comm.start_send(vec![0u8], 0)), "start_send");
    });
}

fn after_a_mismatch_the_background_fails_too<B: Backend>(world: usize) {
    B::run(world, |comm| {
        broadcast(&comm, 1 + comm.rank(), 0).unwrap_err();
        let result = comm.start_barrier().map(|handle| handle.wait());
        match result {
            Err(CollectiveError::Fabric(error)) | Ok(Err(error)) => {
                assert!(matches!(error, FabricError::Failed(_)), "start_barrier: {error:?}");
            }
            other => panic!("start_barrier: {other:?}"),
        }
    });
}

fn after_a_message_mismatch_collectives_fail_too<B: Backend>(world: usize) {
    B::run(world, |comm| {
        match comm.rank() {
            0 => comm.send(&vec![0f32; 1 << 20], 1).unwrap_err(),
            _ => comm.recv(&mut [0f32], 0).unwrap_err(),
        };
        let result = comm.barrier();
        assert!(is_failed(result.clone()), "barrier: {result:?}");
    });
}
