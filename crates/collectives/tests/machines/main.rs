//! Ranks on two machines, which are network namespaces with a link between them: they meet over TCP, and UCX carries what passes.

use std::{path::Path, process::Command, time::Duration};

use antiphon_collectives::{
    Collectives, Communicator, ReduceOp,
    all_reduce::{Algorithm, AllReduceOptions},
};
use antiphon_fabric::{
    FabricError,
    engine::{EngineError, Ucx},
};
use antiphon_testing::{Machines, Need, need};
use rustix::process::Signal;

mod mixed;

use antiphon_testing::{World, role, say, say_error};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Two machines, if they can be made and there is UCX.
fn machines() -> Option<Machines> {
    let found = match Ucx::open(0, 1) {
        Err(error @ EngineError::Library(_)) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    need(Need::Ucx, found)?;
    Machines::make()
}

/// A rank as torchrun starts it, on two machines that have `of_each` ranks.
fn command(machines: &Machines, of_each: [usize; 2], rank: usize, program: &Path) -> Command {
    let machine = usize::from(rank >= of_each[0]);
    let mut command = machines.command(machine, program);
    command
        .env("LOCAL_WORLD_SIZE", of_each[machine].to_string())
        .env("GROUP_RANK", machine.to_string())
        .env("MASTER_ADDR", Machines::address(0).to_string())
        .env("MASTER_PORT", "29500")
        .env("ANTIPHON_SECRET", "of the test")
        .env("ANTIPHON_LINK_TIMEOUT", "1.5")
        // Both machines are one host, which has a shared memory to offer.
        .env("UCX_TLS", "tcp")
        .env("UCX_NET_DEVICES", Machines::CABLE);
    command
}

/// A world on two machines that have `of_each` ranks.
fn world(machines: &Machines, of_each: [usize; 2], role: &str) -> World {
    let command = |rank: usize, program: &Path| command(machines, of_each, rank, program);
    World::start_by(command, of_each.iter().sum(), role, TIMEOUT)
}

#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let comm = match Communicator::from_env() {
        Ok(comm) => comm,
        Err(error) => {
            say(error);
            return;
        }
    };
    say("ready");
    let ended = match role.as_str() {
        "sums" => sums(&comm),
        "mixed" => mixed::every_layout(&comm),
        "mixed calls" => mixed::call_for_ever(&comm),
        "barriers" => loop {
            if let Err(error) = comm.barrier() {
                break Err(error);
            }
        },
        other => panic!("no such role: {other}"),
    };
    match ended {
        Ok(()) => say("done"),
        Err(error) => say_error(&error),
    }
}

/// Sums of any size by both algorithms, against those of the nodes' sums.
fn sums(comm: &Communicator) -> Result<(), FabricError> {
    let nodes = comm.nodes();
    assert_eq!(nodes.count(), 2);
    let value = |rank: usize, i: usize| (i as f32 * 0.37 + rank as f32 * 1e3).sin() * (rank as f32 + 0.1);
    for count in [1, 10, 11, 1000, 70_000, 500_000] {
        let mine: Vec<f32> = (0..count).map(|i| value(comm.rank(), i)).collect();
        let of_node = |node: usize, i: usize| {
            nodes.ranks(node).iter().map(|&rank| value(rank, i)).reduce(|sum, next| sum + next).unwrap()
        };
        let expected: Vec<f32> = (0..count).map(|i| of_node(0, i) + of_node(1, i)).collect();
        for algorithm in Algorithm::ALL {
            let mut sum = vec![0f32; count];
            let options = AllReduceOptions::from(algorithm);
            comm.all_reduce_with(&mine, &mut sum, ReduceOp::Sum, options).unwrap();
            assert!(
                sum.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{count} elements by {algorithm}"
            );
        }
    }
    comm.barrier()
}

#[test]
fn sums_have_the_bits_of_their_nodes() {
    let Some(machines) = machines() else { return };
    for of_each in [[1, 1], [2, 2], [1, 2]] {
        let world = world(&machines, of_each, "sums");
        for rank in 0..world.size() {
            assert_eq!(world.hear(rank).1, "done", "rank {rank} of {of_each:?}");
        }
        world.end(&[]);
    }
}

#[test]
fn mixed_collectives_have_the_bits_of_the_order_of_sums() {
    let Some(machines) = machines() else { return };
    let world = world(&machines, [2, 2], "mixed");
    for rank in 0..world.size() {
        assert_eq!(world.hear(rank).1, "done", "rank {rank}");
    }
    world.end(&[]);
}

#[test]
fn a_rank_that_is_killed_in_mixed_collectives_is_named_on_both_machines() {
    let Some(machines) = machines() else { return };
    let world = world(&machines, [2, 2], "mixed calls");
    std::thread::sleep(Duration::from_millis(50));
    let killed = world.signal(2, Signal::KILL);
    for rank in world.others(2) {
        let (heard, said) = world.hear(rank);
        assert_eq!(said, "lost 2", "rank {rank}");
        assert!(heard - killed < Duration::from_secs(2), "rank {rank} knew after {:?}", heard - killed);
    }
    world.end(&[2]);
}

#[test]
fn a_killed_rank_is_named_on_both_machines() {
    let Some(machines) = machines() else { return };
    for (of_each, victim) in [([1, 1], 1), ([1, 2], 0), ([2, 1], 1)] {
        let world = world(&machines, of_each, "barriers");
        std::thread::sleep(Duration::from_millis(50));
        let killed = world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("lost {victim}"), "rank {rank} of {of_each:?}");
            assert!(heard - killed < Duration::from_secs(2), "rank {rank} knew after {:?}", heard - killed);
        }
        world.end(&[victim]);
    }
}

#[test]
fn ranks_behind_a_cut_link_are_unreachable() {
    let Some(machines) = machines() else { return };
    let world = world(&machines, [1, 2], "barriers");
    std::thread::sleep(Duration::from_millis(50));
    machines.cut();
    for rank in 0..world.size() {
        let said = world.hear(rank).1;
        let elsewhere: &[&str] = if rank == 0 { &["lost 1", "lost 2"] } else { &["lost 0"] };
        assert!(elsewhere.contains(&said.as_str()), "rank {rank}: {said}");
    }
    world.end(&[]);
}
