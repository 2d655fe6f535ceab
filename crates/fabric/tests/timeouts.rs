//! Time-outs are symmetric: a rank that ends a call after another rank gave up in it raises too, whatever the delays.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use antiphon_fabric::{Communicator, FabricError, LocalWorld};

const TIMEOUT: Duration = Duration::from_millis(80);
/// Around the deadline, in milliseconds.
const DELAYS: [u64; 7] = [0, 50, 76, 80, 84, 110, 200];

/// The call of one rank.
#[derive(Debug)]
struct Call {
    began: Instant,
    ended: Instant,
    outcome: Result<(), FabricError>,
}

type Operation = fn(&Communicator) -> Result<(), FabricError>;

/// Every rank calls `operation` after its delay; ranks beyond the delays have none.
fn call_late(world_size: usize, delays: &[u64], operation: Operation) -> Vec<Call> {
    let together = Barrier::new(world_size);
    LocalWorld::run_with(world_size, Duration::from_secs(20), |comm| {
        operation(&comm).expect("the ranks are in time");
        comm.set_timeout(TIMEOUT);
        together.wait();
        thread::sleep(Duration::from_millis(delays.get(comm.rank()).copied().unwrap_or(0)));
        let began = Instant::now();
        let outcome = operation(&comm);
        Call { began, ended: Instant::now(), outcome }
    })
}

/// How many ranks failed because another rank had given up before they began.
fn check(calls: &[Call]) -> usize {
    let mut late = 0;
    for (rank, call) in calls.iter().enumerate() {
        if let Err(FabricError::Timeout { waited, .. }) = &call.outcome {
            assert!(*waited >= TIMEOUT, "rank {rank} gave up after {waited:?}");
        }
        let gave_up = |other: &&Call| other.outcome.is_err() && other.ended < call.began;
        if let Some(first) = calls.iter().find(gave_up) {
            let error =
                call.outcome.as_ref().expect_err("a rank that gave up has no result, nor have later ones");
            assert!(!error.to_string().is_empty(), "{first:?}");
            late += 1;
        }
    }
    late
}

/// Worlds of sleeping ranks need no core: they run at once.
fn every_pair_of_delays(world_size: usize, operation: Operation) {
    let late: usize = thread::scope(|scope| {
        let pairs = DELAYS.into_iter().flat_map(|first| DELAYS.map(|second| [first, second]));
        let run = |delays: [u64; 2]| scope.spawn(move || check(&call_late(world_size, &delays, operation)));
        let worlds: Vec<_> = pairs.map(run).collect();
        worlds.into_iter().map(|world| world.join().unwrap()).sum()
    });
    assert!(late > 0, "no rank came after another one gave up");
}

#[test]
fn of_two_ranks() {
    every_pair_of_delays(2, Communicator::barrier);
}

#[test]
fn of_three_ranks() {
    every_pair_of_delays(3, Communicator::barrier);
}

#[test]
fn of_four_ranks() {
    every_pair_of_delays(4, Communicator::barrier);
}

#[test]
fn of_eight_ranks() {
    every_pair_of_delays(8, Communicator::barrier);
}

fn messages_around_the_ring(comm: &Communicator) -> Result<(), FabricError> {
    let (rank, size, mut received) = (comm.rank(), comm.world_size(), [0u8]);
    comm.send_recv(&[1u8], (rank + 1) % size, &mut received, (rank + size - 1) % size)
}

#[test]
fn of_every_operation_on_a_late_rank() {
    let operations: [(&str, Operation); 6] = [
        ("barrier", Communicator::barrier),
        ("exchange_bytes", |comm| comm.exchange_bytes(&[1, 2, 3]).map(drop)),
        ("agree", |comm| comm.agree("has failed", Ok(()))),
        ("split", |comm| comm.split(Some(0), 0).map(drop)),
        ("shared memory", |comm| comm.symmetric(64).map(drop)),
        ("send_recv", messages_around_the_ring),
    ];
    for world_size in [2, 3] {
        for (name, operation) in operations {
            for late in 0..world_size {
                let delays: Vec<u64> =
                    (0..world_size).map(|rank| if rank == late { 250 } else { 0 }).collect();
                let calls = call_late(world_size, &delays, operation);
                assert!(calls[late].outcome.is_err(), "{name} of {world_size}: {calls:#?}");
            }
        }
    }
}

/// The error of the late rank says who gave up, and waiting for whom.
#[test]
fn the_late_rank_learns_who_gave_up() {
    let calls = call_late(3, &[0, 250, 0], Communicator::barrier);
    let errors: Vec<String> =
        calls.iter().map(|call| call.outcome.as_ref().unwrap_err().to_string()).collect();
    assert!(errors[0].contains("ranks [1]"), "{errors:?}");
    assert!(errors[1].contains("gave up waiting for rank 1"), "{errors:?}");
}

/// A rank sends to one that gave up waiting for it, and learns that nobody will take the message.
#[test]
fn a_message_to_a_rank_that_gave_up_is_refused() {
    let calls = call_late(2, &[0, 250], |comm| match comm.rank() {
        0 => comm.recv(&mut [0u8], 1),
        _ => comm.send(&[1u8], 0),
    });
    assert!(matches!(calls[0].outcome, Err(FabricError::Timeout { .. })), "{calls:?}");
    assert!(matches!(calls[1].outcome, Err(FabricError::Aborted { by: 0, .. })), "{calls:?}");
}

/// A rank that fails in a later call has had the result of this one, and so have all others.
#[test]
fn a_failure_of_a_later_call_changes_no_earlier_one() {
    for _ in 0..50 {
        let outcomes = LocalWorld::run(3, |comm| {
            let first = comm.barrier();
            if comm.rank() == 0 {
                comm.set_timeout(Duration::ZERO);
                return (first, comm.exchange_bytes(&[0]).map(drop));
            }
            thread::yield_now();
            (first, Ok(()))
        });
        assert!(outcomes.iter().all(|(first, _)| first.is_ok()), "{outcomes:?}");
    }
}
