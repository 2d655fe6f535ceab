//! Processes that are killed, stopped, or leave in the middle of anything: the others get an error at once.

use std::{
    fs::File,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use antiphon_fabric::{Communicator, FabricError};
use antiphon_testing::{Need, need};
use antiphon_testing::{VICTIMS, World, kill_each, role, say, say_error};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

/// The work of ranks that are about to lose one: one step of what goes on for ever.
fn step(comm: &Communicator, work: &str) -> Result<(), FabricError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    match work {
        "barrier" => comm.barrier(),
        "exchange" => comm.exchange_bytes(&vec![1; 3_000_000 >> rank]).map(drop),
        "ring" => {
            let (next, before) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
            comm.send_recv(&vec![1f32; 1 << 20], next, &mut vec![0f32; 1 << 20], before)
        }
        "messages" => {
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                comm.send(&[1u8; 30], peer)?;
            }
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                comm.recv(&mut [0u8; 30], peer)?;
            }
            Ok(())
        }
        "memory" => {
            let buffer = comm.symmetric(100_000)?;
            // SAFETY: each rank writes to its own copy, which it has not freed yet.
            unsafe { buffer.as_mut_ptr(rank).write_bytes(1, buffer.len()) };
            comm.free(buffer)
        }
        "background" => {
            let pending = comm.spawn(|comm| comm.exchange_bytes(&[1; 10_000]))?;
            comm.barrier()?;
            pending.wait().map(drop)
        }
        other => panic!("{other} is no work"),
    }
}

/// What a rank does when this binary is started as one.
#[test]
fn rank_process() {
    let Some(role) = role() else { return };
    let (work, end) = role.split_once(',').unwrap_or((&role, "never"));
    let error = match work {
        "meet" => {
            say("ready");
            Communicator::from_env().and_then(|comm| work_until(&comm, "barrier", usize::MAX)).unwrap_err()
        }
        "meet slowly" => {
            say("ready");
            if std::env::var("RANK").unwrap() == "2" {
                std::thread::sleep(Duration::from_secs(1));
            }
            Communicator::from_env().and_then(|comm| work_until(&comm, "barrier", usize::MAX)).unwrap_err()
        }
        "meet without files" => {
            if std::env::var("RANK").unwrap() == "0" {
                leave_descriptors(2);
            }
            say("ready");
            Communicator::from_env().unwrap_err()
        }
        _ => {
            let comm = Communicator::from_env().unwrap();
            say("ready");
            let leaves = comm.rank() == 1 && end != "never";
            match work_until(&comm, work, if leaves { 20 } else { usize::MAX }) {
                Err(error) => error,
                Ok(()) if end == "panics" => panic!("as planned"),
                Ok(()) if end == "exits" => std::process::exit(0),
                Ok(()) => return, // as a program that thinks it is done
            }
        }
    };
    say_error(&error);
}

/// Leaves this process no more than `left` descriptors to open.
fn leave_descriptors(left: usize) {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum }).unwrap();
    let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    files.truncate(files.len() - left);
    std::mem::forget(files);
}

fn work_until(comm: &Communicator, work: &str, steps: usize) -> Result<(), FabricError> {
    (0..steps).try_for_each(|_| step(comm, work))
}

#[test]
fn killed_while_ranks_meet() {
    for (seed, victim) in [0, 1, 2, 0, 1, 2].into_iter().enumerate() {
        // The socket of a killed rank 0 would stay, if it has a path, until the next run reclaims it.
        let world = World::start(3, "meet", victim != 0, Duration::from_secs(1));
        std::thread::sleep(Duration::from_micros(500) * seed as u32);
        world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let said = world.hear(rank).1;
            let root_ended = victim == 0 && said.starts_with("rank 0 ended");
            let named = [format!("lost {victim}"), format!("missing [{victim}]")].contains(&said);
            assert!(named || root_ended, "rank {rank} says {said:?} of rank {victim}");
        }
        world.end(&[victim]);
    }
}

/// A rank that has joined, and is stopped before the last one comes: the others do not wait for it until the deadline.
#[test]
fn a_rank_that_joined_and_stays_silent_is_named_in_seconds() {
    let world = World::start(3, "meet slowly", false, Duration::from_secs(120));
    std::thread::sleep(Duration::from_millis(300));
    world.signal(1, Signal::STOP);
    for rank in [0, 2] {
        let said = world.hear(rank).1;
        assert!(said == "timeout [1]" || said.contains("gave up waiting for rank 1"), "rank {rank}: {said}");
    }
    world.signal(1, Signal::CONT);
    world.hear(1);
    world.end(&[]);
}

#[test]
fn a_root_without_descriptors_tells_all() {
    let start = Instant::now();
    let world = World::start(3, "meet without files", false, Duration::from_secs(120));
    for rank in 0..3 {
        let said = world.hear(rank).1;
        assert!(said.contains("Too many open files"), "rank {rank}: {said}");
    }
    assert!(start.elapsed() < Duration::from_secs(10));
    world.end(&[]);
}

#[test]
fn killed_in_a_barrier() {
    kill_each(&VICTIMS, "barrier", Duration::from_millis(20));
}

#[test]
fn killed_in_an_exchange() {
    kill_each(&VICTIMS, "exchange", Duration::from_millis(50));
}

#[test]
fn killed_in_a_ring_of_large_messages() {
    kill_each(&VICTIMS, "ring", Duration::from_millis(50));
}

#[test]
fn killed_among_many_small_messages() {
    kill_each(&VICTIMS, "messages", Duration::from_millis(20));
}

#[test]
fn killed_while_memory_comes_and_goes() {
    kill_each(&VICTIMS, "memory", Duration::from_millis(20));
}

#[test]
fn killed_while_the_background_works() {
    kill_each(&VICTIMS, "background", Duration::from_millis(20));
}

#[test]
fn a_rank_that_ends_otherwise_is_lost_too() {
    for (end, failed) in [("returns", &[][..]), ("exits", &[]), ("panics", &[1])] {
        for work in ["barrier", "ring"] {
            let world = World::start(3, &format!("{work},{end}"), false, Duration::from_secs(30));
            for rank in world.others(1) {
                assert_eq!(world.hear(rank).1, "lost 1", "it {end} in {work}");
            }
            world.end(failed);
        }
    }
}

#[test]
fn a_stopped_rank_is_named_by_the_deadline_and_learns_of_it() {
    let timeout = Duration::from_millis(500);
    for (world_size, victim) in [(2, 0), (3, 2)] {
        let world = World::start(world_size, "barrier", false, timeout);
        let stopped = world.signal(victim, Signal::STOP);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("timeout [{victim}]"));
            let took = heard - stopped;
            // They may have begun to wait a little before it was stopped.
            assert!(took > timeout / 2 && took < timeout + Duration::from_secs(1), "{took:?}");
        }
        world.signal(victim, Signal::CONT);
        let said = world.hear(victim).1;
        assert!(said.contains(&format!("gave up waiting for rank {victim}")), "{said}");
        world.end(&[]);
    }
}

/// How a process is started in a PID namespace of its own, if this user may.
fn own_namespace() -> Option<Vec<&'static str>> {
    let ways = [
        &["unshare", "--pid", "--fork", "--kill-child"][..],
        &["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"],
    ];
    let works = |way: &&[&str]| {
        let tried = Command::new(way[0]).args(&way[1..]).arg("true").stderr(Stdio::null()).status();
        tried.is_ok_and(|status| status.success())
    };
    ways.into_iter().find(works).map(<[_]>::to_vec)
}

/// As in containers: no rank knows the process number of another.
#[test]
fn ranks_of_different_pid_namespaces_meet_and_hear_of_each_others_end() {
    let launcher =
        own_namespace().ok_or("`unshare --pid` is not permitted, with or without a user namespace");
    let Some(launcher) = need(Need::Namespaces, launcher) else { return };
    for (victim, by_path) in [(0, false), (2, true)] {
        let world = World::start_under(&launcher, 3, "barrier", by_path, Duration::from_secs(30));
        let killed = world.signal(victim, Signal::KILL);
        for rank in world.others(victim) {
            let (heard, said) = world.hear(rank);
            assert_eq!(said, format!("lost {victim}"), "rank {rank}");
            assert!(heard - killed < Duration::from_secs(1), "rank {rank} knew after {:?}", heard - killed);
        }
        world.end(&[victim]);
    }
}
