//! The errors of ranks when one of them fails: they name the cause, soon, and again in every further call.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Barrier,
    time::{Duration, Instant},
};

use antiphon_fabric::{Builder, Communicator, FabricError, LocalWorld, error::Loss, rendezvous::Ticket};

type Result<T = ()> = std::result::Result<T, FabricError>;

/// A wait that this long a timeout ends was not ended by the news that should have.
const LONG: Duration = Duration::from_secs(20);
/// News travel faster than this.
const SOON: Duration = Duration::from_secs(1);

/// Runs ranks whose waits should not be ended by the deadline.
fn run<T: Send>(world_size: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let start = Instant::now();
    let results = LocalWorld::run_with(world_size, LONG, rank);
    assert!(start.elapsed() < LONG / 2, "the news came by the deadline only");
    results
}

/// The lost rank, if the error names one.
#[track_caller]
fn lost(result: Result) -> (usize, Loss) {
    match result {
        Err(FabricError::PeerLost { rank, how, .. }) => (rank, how),
        other => panic!("expected a lost peer, got {other:?}"),
    }
}

#[test]
fn a_panic_loses_the_peer_for_the_others_and_goes_on_in_the_caller() {
    let heard = std::sync::Mutex::new(Vec::new());
    let world = || {
        run(3, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                std::panic::panic_any("rank 1 is done for");
            }
            let start = Instant::now();
            let loss = lost(comm.barrier());
            heard.lock().unwrap().push((loss.0, start.elapsed() < SOON));
        })
    };
    let panic = catch_unwind(AssertUnwindSafe(world)).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"rank 1 is done for"));
    assert_eq!(heard.into_inner().unwrap(), [(1, true); 2]);
}

#[test]
fn a_rank_that_leaves_is_lost_to_ranks_that_need_it() {
    let results = run(3, |comm| {
        comm.barrier()?;
        match comm.rank() {
            2 => Ok(()),
            _ => comm.barrier(),
        }
    });
    let mut ways = Vec::new();
    for result in &results[..2] {
        let (rank, how) = lost(result.clone());
        assert_eq!(rank, 2);
        ways.push(how);
    }
    assert!(ways.contains(&Loss::Left), "somebody saw it: {ways:?}");
}

#[test]
fn a_rank_that_leaves_is_lost_even_if_its_buffer_lives_on() {
    let (both, over) = (Barrier::new(2), Barrier::new(2));
    let results = run(2, |comm| {
        let buffer = comm.symmetric(4096)?;
        // SAFETY: each rank writes to its own copy.
        unsafe { buffer.as_mut_ptr(comm.rank()).write(comm.rank() as u8 + 1) };
        both.wait();
        if comm.rank() == 1 {
            drop(comm);
            over.wait();
            // SAFETY: the buffer keeps both copies mapped, and no rank writes any more.
            let values = [0, 1].map(|rank| unsafe { buffer.as_mut_ptr(rank).read() });
            assert_eq!(values, [1, 2]);
            return Ok(());
        }
        let result = comm.barrier();
        over.wait();
        result
    });
    assert_eq!(lost(results[0].clone()), (1, Loss::Left));
}

#[test]
fn what_was_sent_before_leaving_arrives() {
    let results = run(2, |comm| {
        if comm.rank() == 0 {
            return comm.send(&[7u8; 1000], 1);
        }
        std::thread::sleep(Duration::from_millis(50));
        let mut message = [0u8; 1000];
        comm.recv(&mut message, 0)?;
        assert_eq!(message, [7; 1000]);
        comm.recv(&mut message, 0)
    });
    assert!(results[0].is_ok());
    assert_eq!(lost(results[1].clone()), (0, Loss::Left));
}

#[test]
fn a_flush_after_which_something_is_unsent_is_an_error() {
    let results = run(2, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            return Ok(());
        }
        let sent = comm.start_send(vec![1u8; 1 << 20], 1)?; // more than is buffered
        assert_eq!(lost(sent.wait().map(drop)).0, 1);
        comm.messenger().flush()
    });
    assert!(matches!(results[0], Err(FabricError::Failed(_))), "{results:?}");
}

/// Ranks 0 ← 1 ← 2 wait in a chain, and each leaves as soon as it has an error: none but the last is to blame.
#[test]
fn the_cause_spreads_and_not_its_consequences() {
    let results = run(4, |comm| {
        comm.barrier()?;
        match comm.rank() {
            3 => Ok(()),
            rank => comm.recv(&mut [0u8], rank + 1),
        }
    });
    for result in &results[..3] {
        assert_eq!(lost(result.clone()).0, 3);
    }
}

/// A world whose ranks have timeouts of their own.
fn run_each<T: Send>(builders: &[Builder], rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let (ticket, world_size, rank) = (&Ticket::random(), builders.len(), &rank);
    std::thread::scope(|scope| {
        let start = |(place, builder): (usize, &Builder)| {
            let builder = builder.clone().arena_bytes(4096);
            scope.spawn(move || rank(builder.with_ticket(place, world_size, ticket).unwrap()))
        };
        let threads: Vec<_> = builders.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn who_gave_up_says_on_whom() {
    let (long, short) = (Communicator::builder().timeout(LONG), Duration::from_millis(200));
    let over = Barrier::new(2);
    let results = run_each(&[long.clone(), long.clone().timeout(short), long], |comm| match comm.rank() {
        2 => {
            over.wait();
            Ok(())
        }
        rank => {
            let result = comm.recv(&mut [0u8], rank + 1);
            drop(comm);
            if rank == 0 {
                over.wait();
            }
            result
        }
    });
    match &results[1] {
        Err(FabricError::Timeout { missing, waited, world_size: 3, .. }) => {
            assert!(missing == &[2] && *waited >= short && *waited < short + SOON, "{results:?}");
        }
        other => panic!("{other:?}"),
    }
    let error = results[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("rank 1 gave up waiting for rank 2"), "{error}");
}

#[test]
fn a_deadline_names_all_missing_ranks() {
    let timeout = Duration::from_millis(200);
    let over = Barrier::new(4);
    let results = LocalWorld::run_with(4, timeout, |comm| {
        let result = if comm.rank() % 2 == 0 { comm.barrier() } else { Ok(()) };
        over.wait();
        result
    });
    for result in [&results[0], &results[2]] {
        match result {
            Err(FabricError::Timeout { missing, waited, .. }) => {
                assert!(missing == &[1, 3] && *waited >= timeout && *waited < timeout + SOON, "{result:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn every_rank_sees_both_sides_of_a_mismatch() {
    let results = run(3, |comm| match comm.rank() {
        1 => comm.symmetric(4096).map(drop),
        rank => {
            std::thread::sleep(Duration::from_millis(20) * rank as u32);
            comm.barrier()
        }
    });
    for (rank, result) in results.iter().enumerate() {
        let error = result.as_ref().unwrap_err();
        assert!(matches!(error, FabricError::Mismatch { .. }), "rank {rank}: {error:?}");
        let text = error.to_string();
        assert!(text.contains("barrier") && text.contains("symmetric(4096 bytes)"), "{text}");
    }
}

#[test]
fn both_ends_of_a_message_see_both_calls_in_any_order() {
    for receiver_first in [false, true] {
        let results = run(2, |comm| {
            if receiver_first == (comm.rank() == 0) {
                std::thread::sleep(Duration::from_millis(50));
            }
            match comm.rank() {
                0 => comm.send(&vec![0f32; 1 << 20], 1),
                _ => comm.recv(&mut [0f64; 2], 0),
            }
        });
        let error = results[1].as_ref().unwrap_err();
        assert!(matches!(error, FabricError::Mismatch { rank: 1, peer: 0, .. }), "{error:?}");
        assert!(error.to_string().contains("send/recv(1048576 × f32)"), "{error}");
        let error = results[0].as_ref().unwrap_err().to_string();
        // The sender's error has both sides too.
        assert!(error.contains("1048576 × f32") && error.contains("2 × f64"), "{error}");
    }
}

#[test]
fn a_failed_communicator_answers_every_further_call_with_the_first_error() {
    type Call = fn(&Communicator) -> Result;
    let calls: [(&str, Call); 6] = [
        ("barrier", |comm| comm.barrier()),
        ("exchange_bytes", |comm| comm.exchange_bytes(b"x").map(drop)),
        ("symmetric", |comm| comm.symmetric(1).map(drop)),
        ("send", |comm| comm.send(&[1u8], 0)),
        ("recv", |comm| comm.recv(&mut [1u8], 0)),
        ("spawn", |comm| comm.spawn(|comm| comm.barrier())?.wait()),
    ];
    let failures: [(&str, Call); 3] = [
        ("barrier", |comm| comm.barrier()),
        ("recv", |comm| comm.recv(&mut [0u8], 2)),
        ("spawn", |comm| comm.spawn(|comm| comm.barrier())?.wait()),
    ];
    for (what_failed, fail) in failures {
        run(3, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 2 {
                return;
            }
            assert_eq!(lost(fail(&comm)).0, 2);
            for (name, call) in calls {
                match call(&comm) {
                    Err(FabricError::Failed(first)) => assert_eq!(lost(Err((*first).clone())).0, 2),
                    other => panic!("{name} after a failed {what_failed}: {other:?}"),
                }
            }
        });
    }
}

#[test]
fn a_panic_in_the_background_is_heard_by_all() {
    let results = run(2, |comm| {
        let rank = comm.rank();
        let pending = comm.spawn(move |comm| match rank {
            0 => std::panic::panic_any("the work in the background fails"),
            _ => comm.barrier(),
        })?;
        let result = pending.wait();
        let more = comm.spawn(|comm| comm.barrier()).and_then(|pending| pending.wait());
        assert!(matches!(more, Err(FabricError::Failed(_))), "{more:?}");
        assert!(matches!(comm.barrier(), Err(FabricError::Failed(_))));
        result
    });
    let error = results[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("panicked"), "{error}");
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("aborted: rank 0 failed"), "{error}");
}
