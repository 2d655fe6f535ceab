//! Surviving ranks continue: they agree on which ranks survive, however many ranks are killed, and at any time.

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Communicator, FabricError, LocalWorld,
    engine::{EngineError, Ucx},
};
use antiphon_testing::{Machines, Need, need};
use antiphon_testing::{World, role, say};
use rustix::process::{Signal, getpid, kill_process};

const LONG: Duration = Duration::from_secs(30);

/// What a rank does when this binary is started as one: it goes on until only as many ranks are left as its role says.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let words: Vec<&str> = role.split(',').collect();
    let [left, moment] = [words[1], words[2]].map(|word| word.parse::<u64>().unwrap());
    let comm = Communicator::from_env().unwrap();
    let first = comm.rank();
    say("ready");
    if words[0] == "shrinks and dies" {
        comm.barrier().unwrap();
        comm.abort();
        if first as u64 >= left {
            thread::spawn(move || {
                thread::sleep(Duration::from_micros(moment * first as u64));
                kill_process(getpid(), Signal::KILL)
            });
        }
    }
    let mut comm = comm;
    loop {
        let error = match work(&comm, first) {
            Ok(members) if members.len() as u64 == left || words[0] == "is cut off" && members.len() < 3 => {
                say(format_args!("{members:?}"));
                return;
            }
            Ok(_) => continue,
            Err(error) => error,
        };
        // A failed test shows it.
        eprintln!("{error}");
        assert!(error.lost_world_rank().is_some() || error.to_string().contains("called abort"), "{error}");
        let start = Instant::now();
        comm = comm.shrink().unwrap();
        let took = start.elapsed();
        eprintln!("{} ranks after {took:?}", comm.world_size());
        // Losses behind a cut link are noticed by each side in its own time.
        assert!(took < Duration::from_secs(if words[0] == "is cut off" { 4 } else { 1 }), "{took:?}");
    }
}

/// The ranks that take part, by their first numbers, after some calls of all kinds.
fn work(comm: &Communicator, first: usize) -> Result<Vec<usize>, FabricError> {
    let (next, before) = ((comm.rank() + 1) % comm.world_size(), comm.rank() + comm.world_size() - 1);
    comm.send_recv(&[1f32; 100], next, &mut [0f32; 100], before % comm.world_size())?;
    comm.spawn(|comm| comm.barrier())?.wait()?;
    if comm.nodes().count() == 1 {
        let buffer = comm.symmetric(10_000)?;
        comm.free(buffer)?;
    }
    let half = comm.split(Some(comm.rank() as u64 % 2), 0)?.expect("a colour was given");
    half.barrier()?;
    let members = comm.exchange_objects(&first)?;
    comm.barrier()?;
    Ok(members)
}

/// The same numbers in every run.
fn random(seed: u32) -> u32 {
    seed.wrapping_add(1).wrapping_mul(0x9E37_79B1) >> 12
}

/// More of them: `KILLS=200 cargo test -p antiphon-fabric --test shrink`.
fn rounds() -> u32 {
    std::env::var("KILLS").map_or(12, |kills| kills.parse().unwrap())
}

#[test]
fn ranks_killed_one_after_the_other_are_left_behind() {
    for seed in 0..rounds() {
        let (world_size, chance) = (4, random(seed));
        let world = World::start(world_size, "works,2,0", false, LONG);
        let first = chance as usize % world_size;
        let second = (first + 1 + chance as usize / 4 % (world_size - 1)) % world_size;
        thread::sleep(Duration::from_micros(u64::from(chance >> 4 & 0x3FFF)));
        world.signal(first, Signal::KILL);
        // Often while the others shrink.
        thread::sleep(Duration::from_micros(u64::from(chance >> 2 & 0xFFF)));
        let killed = world.signal(second, Signal::KILL);
        let left: Vec<usize> = (0..world_size).filter(|rank| ![first, second].contains(rank)).collect();
        for &rank in &left {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("{left:?}"), "rank {rank}, seed {seed}");
            assert!(
                heard - killed < Duration::from_secs(2),
                "rank {rank} went on after {:?}",
                heard - killed
            );
        }
        world.end(&[first, second]);
    }
}

#[test]
fn ranks_killed_while_they_shrink_are_left_behind() {
    for seed in 0..rounds() {
        let (world_size, left) = (5, 2);
        let moment = random(seed) & 0x1FF;
        let world = World::start(world_size, &format!("shrinks and dies,{left},{moment}"), false, LONG);
        for rank in 0..left {
            assert_eq!(world.hear(rank).1, "[0, 1]", "rank {rank}, seed {seed}");
        }
        world.end(&[2, 3, 4]);
    }
}

/// Whether UCX is there, which carries what passes between nodes.
fn has_ucx() -> bool {
    let found = match Ucx::open(0, 1) {
        Err(error @ EngineError::Library(_)) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    need(Need::Ucx, found).is_some()
}

/// A world of processes on these nodes of one machine, which meet over TCP.
fn on_nodes(nodes: &[&str], role: &str) -> World {
    let port = antiphon_testing::free_port();
    let command = |rank: usize, program: &Path| {
        let mut command = Command::new(program);
        command
            .env("ANTIPHON_NODE", nodes[rank])
            .env("MASTER_ADDR", "127.0.0.1")
            .env("ANTIPHON_PORT", port.to_string())
            .env("ANTIPHON_SECRET", "of the test")
            .env("UCX_TLS", "tcp");
        command
    };
    World::start_by(command, nodes.len(), role, LONG)
}

/// Ranks at random, whole nodes, and always soon rank 0: the machine at which the ranks met is no better than others.
#[test]
fn ranks_of_several_nodes_are_left_behind() {
    if !has_ucx() {
        return;
    }
    let worlds: [(&[&str], &[usize]); 6] = [
        (&["a", "b"], &[0]),
        (&["a", "b", "c"], &[0, 2]),
        (&["a", "a", "b", "b"], &[0, 1]),
        (&["a", "b", "b", "a"], &[2, 0]),
        (&["a", "b", "b", "b"], &[0]),
        (&["a", "a", "b", "b", "a", "b", "c", "c"], &[1, 6, 7, 0]),
    ];
    for (seed, (nodes, victims)) in (0..rounds().max(6)).zip(worlds.into_iter().cycle()) {
        let left: Vec<usize> = (0..nodes.len()).filter(|rank| !victims.contains(rank)).collect();
        let world = on_nodes(nodes, &format!("works,{},0", left.len()));
        thread::sleep(Duration::from_micros(u64::from(random(seed) & 0x7FFF)));
        let mut killed = Instant::now();
        for &victim in victims {
            killed = world.signal(victim, Signal::KILL);
            thread::sleep(Duration::from_micros(u64::from(random(seed + victim as u32) & 0xFFF)));
        }
        for &rank in &left {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("{left:?}"), "rank {rank} of {nodes:?}, seed {seed}");
            let took = heard - killed;
            assert!(took < Duration::from_secs(3), "rank {rank} of {nodes:?} went on after {took:?}");
        }
        world.end(victims);
    }
}

#[test]
fn each_side_of_a_cut_link_goes_on() {
    let Some(machines) = has_ucx().then(Machines::make).flatten() else { return };
    let command = |rank: usize, program: &Path| {
        let machine = usize::from(rank > 0);
        let mut command = machines.command(machine, program);
        command
            .env("LOCAL_WORLD_SIZE", (machine + 1).to_string())
            .env("GROUP_RANK", machine.to_string())
            .env("MASTER_ADDR", Machines::address(0).to_string())
            .env("MASTER_PORT", "29500")
            .env("ANTIPHON_SECRET", "of the test")
            .env("ANTIPHON_LINK_TIMEOUT", "1.5")
            .env("UCX_TLS", "tcp")
            .env("UCX_NET_DEVICES", Machines::CABLE);
        command
    };
    // The role is the same for all ranks, and the sides are of different sizes: a side is done that has lost a rank.
    let world = World::start_by(command, 3, "is cut off,0,0", LONG);
    thread::sleep(Duration::from_millis(50));
    machines.cut();
    for (rank, left) in ["[0]", "[1, 2]", "[1, 2]"].into_iter().enumerate() {
        assert_eq!(world.hear(rank).1, left, "rank {rank}");
    }
    world.end(&[]);
}

#[test]
fn abort_from_another_thread_ends_all_waits_and_all_go_on() {
    let start = Instant::now();
    let results = LocalWorld::run_with(3, LONG, |comm| {
        let watchdog = comm.monitor();
        let aborts = comm.rank() == 2;
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            if aborts {
                watchdog.abort();
            }
        });
        // Rank 0 and the one that aborts wait for a message that never comes; rank 1 for rank 0, which did not abort.
        let error = match comm.rank() {
            0 => comm.recv(&mut [0u8], 1).unwrap_err(),
            1 => comm.recv(&mut [0u8], 0).unwrap_err(),
            _ => comm.spawn(|comm| comm.barrier())?.wait().unwrap_err(),
        };
        thread.join().unwrap();
        let again = comm.barrier().unwrap_err();
        let comm = comm.shrink()?;
        comm.barrier()?;
        Ok::<_, FabricError>((error.to_string(), again.to_string(), comm.rank(), comm.world_size()))
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (error, again, new_rank, world_size) = result.unwrap();
        assert!(error.ends_with("was aborted: rank 2 called abort"), "rank {rank}: {error}");
        assert!(
            again.contains("failed earlier") && again.contains("rank 2 called abort"),
            "rank {rank}: {again}"
        );
        assert_eq!((new_rank, world_size), (rank, 3));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn an_abort_is_a_typed_error_everywhere_and_stays_in_its_group() {
    let results = LocalWorld::run_with(4, LONG, |comm| {
        let pair = comm.split(Some(comm.rank() as u64 % 2), 0)?.expect("a colour was given");
        match comm.rank() {
            3 => pair.abort(),
            1 => match pair.barrier().unwrap_err() {
                FabricError::AbortCalled { operation: Some(_), by: 1, members, .. } => {
                    assert_eq!(members.world_rank(1), 3);
                }
                other => panic!("{other:?}"),
            },
            _ => pair.barrier()?,
        }
        comm.barrier()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_group_shrinks_and_names_its_ranks_as_a_world() {
    let results = LocalWorld::run_with(4, LONG, |comm| {
        let three = comm.split((comm.rank() > 0).then_some(0), 0)?;
        if comm.rank() == 2 {
            return Ok(None); // leaves both
        }
        let Some(three) = three else { return Ok(None) };
        three.barrier().unwrap_err();
        let two = three.shrink()?;
        drop(three);
        drop(comm);
        if two.rank() == 0 {
            return Ok(None);
        }
        Ok::<_, FabricError>(Some(two.barrier().unwrap_err().to_string()))
    });
    let text = results.into_iter().nth(3).unwrap().unwrap().unwrap();
    assert!(text.starts_with("rank 0 was lost during barrier: it dropped its communicator"), "{text}");
}

#[test]
fn a_rank_that_does_not_join_is_named_and_no_rank_waits_twice() {
    let results = LocalWorld::run_with(3, Duration::from_millis(300), |comm| {
        match comm.rank() {
            0 => {}
            1 => thread::sleep(Duration::from_millis(100)),
            _ => thread::sleep(Duration::from_millis(600)),
        }
        let start = Instant::now();
        let error = comm.shrink().unwrap_err();
        (error, start.elapsed())
    });
    match &results[0].0 {
        FabricError::ShrinkTimeout { missing, .. } => assert_eq!(missing, &[2]),
        other => panic!("{other:?}"),
    }
    assert_eq!(results[0].0.to_string().split(": ").last(), Some("still waiting for ranks [2] of 3"));
    for (error, took) in &results[1..] {
        assert!(matches!(error, FabricError::ShrinkAborted { by: 0 | 1, .. }), "{error:?}");
        assert!(took < &Duration::from_millis(290), "{took:?}");
    }
}
