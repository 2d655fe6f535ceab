//! Processes that are killed in the middle of a collective: the others get an error at once, whatever it was.

use std::time::Duration;

use antiphon_collectives::{
    CollectiveError, Collectives, Communicator, NonBlocking, ReduceOp,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_testing::{VICTIMS, kill_each, role, say, say_error};

/// Elements of the larger tensor of an operation: 64 MiB where all of it is reduced, 16 MiB where it is moved.
fn length(work: &str) -> usize {
    let bytes = if work.contains("reduce") || work.contains("mixed") { 64 << 20 } else { 16 << 20 };
    bytes / size_of::<f32>() / 12 * 12 // divisible by the world sizes
}

/// The work of ranks that are about to lose one: one step of what goes on for ever.
fn step(comm: &Communicator, work: &str, buffer: &mut Vec<f32>) -> Result<(), CollectiveError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    match work {
        "all_reduce" => comm.all_reduce_in_place(buffer, ReduceOp::Max),
        "all_reduce of little" => comm.all_reduce_in_place(&mut buffer[..100], ReduceOp::Max),
        "all_gather" => comm.all_gather(&vec![1f32; buffer.len() / world_size], buffer),
        "reduce_scatter" => {
            comm.reduce_scatter(&*buffer, &mut vec![0f32; buffer.len() / world_size], ReduceOp::Max)
        }
        "all_to_all" => comm.all_to_all_in_place(buffer),
        "broadcast" => comm.broadcast(buffer, 0),
        "broadcast from the last" => comm.broadcast(buffer, world_size - 1),
        "gather" => {
            let block = vec![1f32; buffer.len() / world_size];
            comm.gather(&block, (rank == 0).then_some(buffer.into()), 0)
        }
        "scatter" => {
            let mut block = vec![0f32; buffer.len() / world_size];
            comm.scatter((rank == 0).then_some((&*buffer).into()), &mut block, 0)
        }
        "reduce to the last" => comm.reduce_in_place(buffer, ReduceOp::Max, world_size - 1),
        "uneven all_to_all" => {
            // Rank r gets r + 1 shares from every rank.
            let share = buffer.len() / 24;
            let sends: Vec<usize> = (1..=world_size).map(|shares| shares * share).collect();
            let receives = vec![(rank + 1) * share; world_size];
            let mut output = vec![0f32; receives.iter().sum()];
            comm.all_to_all_v(&buffer[..sends.iter().sum()], &sends, &mut output, &receives)
        }
        "symmetric all_reduce" => {
            let shared = comm.symmetric(12 << 20)?; // the worlds of these tests have 16 MiB
            // SAFETY: the others access this copy only within the collective, and after an error no rank here does.
            comm.all_reduce_in_place(unsafe { shared.slice_mut::<f32>(rank) }, ReduceOp::Max)?;
            Ok(comm.free(shared)?)
        }
        mixed if mixed.starts_with("mixed") => {
            let layout = MixedLayout::builder(world_size, rank).local_tp(2).build();
            // A handler for each step: a rank may be killed where ranks agree on it, too.
            let handler = MixedHandler::new(comm, layout.expect("there are four ranks"))?;
            let mode = if mixed.ends_with("one hop") { MixedMode::Waits } else { MixedMode::Bytes1 };
            let call = |op| MixedCall::from(op).mode(mode);
            let mut block = vec![1f32; buffer.len() / 2];
            handler.run(comm, call(MixedOp::ReduceScatterAllReduce), &*buffer, &mut block)?;
            block.fill(1.0);
            handler.run(comm, call(MixedOp::AllReduceAllGather), &block, buffer)
        }
        "non-blocking" => {
            let pending = comm.start_all_reduce(std::mem::take(buffer), ReduceOp::Max)?;
            comm.barrier()?;
            *buffer = pending.wait()?;
            Ok(())
        }
        other => panic!("{other} is no work"),
    }
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(work) = role() else { return };
    let comm = Communicator::from_env().unwrap();
    let mut buffer = vec![1f32; length(&work)];
    say("ready");
    let error = loop {
        if let Err(error) = step(&comm, &work, &mut buffer) {
            break error;
        }
    };
    match error {
        CollectiveError::Fabric(error) => say_error(&error),
        other => say(other),
    }
}

macro_rules! killed_in {
    ($($test:ident: $work:literal;)*) => {$(
        #[test]
        fn $test() {
            kill_each(&VICTIMS[..4], $work, Duration::from_millis(100));
        }
    )*};
}

killed_in! {
    killed_in_all_reduce: "all_reduce";
    killed_in_a_small_all_reduce: "all_reduce of little";
    killed_in_all_gather: "all_gather";
    killed_in_reduce_scatter: "reduce_scatter";
    killed_in_all_to_all: "all_to_all";
    killed_in_broadcast: "broadcast";
    killed_in_a_broadcast_by_the_last_rank: "broadcast from the last";
    killed_in_gather: "gather";
    killed_in_scatter: "scatter";
    killed_in_reduce: "reduce to the last";
    killed_in_an_uneven_all_to_all: "uneven all_to_all";
    killed_in_a_symmetric_all_reduce: "symmetric all_reduce";
    killed_in_non_blocking_all_reduce: "non-blocking";
}

/// The number of ranks and the rank that is killed. With two groups of two ranks, the killed rank is in rank 0's group or in the other.
const MIXED_VICTIMS: [(usize, usize); 2] = [(4, 1), (4, 2)];

#[test]
fn killed_in_a_mixed_collective_of_one_hop() {
    kill_each(&MIXED_VICTIMS, "mixed, one hop", Duration::from_millis(100));
}

#[test]
fn killed_in_a_mixed_collective_of_two_hops() {
    kill_each(&MIXED_VICTIMS, "mixed, two hops", Duration::from_millis(100));
}
