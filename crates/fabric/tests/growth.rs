//! Nothing grows: neither descriptors nor memory, however often things are made and dropped.
//!
//! One test, so that nothing else goes on in this process while it counts.

use std::{
    sync::{Barrier, Mutex},
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Communicator, LocalWorld,
    engine::{EngineError, Network, Ucx},
    rendezvous::Ticket,
};
use antiphon_testing::{Need, need};

#[derive(Debug, Clone, Copy)]
struct Usage {
    descriptors: usize,
    threads: usize,
    resident_kib: usize,
}

fn usage() -> Usage {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let number = |name| -> usize {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    Usage {
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        threads: number("Threads:"),
        resident_kib: number("VmRSS:"),
    }
}

/// Allocators keep a few megabytes for later; a leak of what is done here would be a hundred at least.
#[track_caller]
fn assert_no_growth(before: Usage, what: &str) {
    // A thread that has been joined may be seen for a moment longer; the background ends by itself, soon after its
    // communicator.
    let deadline = Instant::now() + Duration::from_secs(5);
    while usage().threads > before.threads && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let after = usage();
    assert_eq!(after.descriptors, before.descriptors, "{what}");
    assert!(after.threads <= before.threads, "{what}: {before:?}, now {after:?}");
    assert!(after.resident_kib < before.resident_kib + (32 << 10), "{what}: {before:?}, now {after:?}");
}

/// 1,000 buffers of a quarter of a megabyte on each rank: a leak would take half a gigabyte.
fn buffers(comm: &Communicator) {
    for _ in 0..1000 {
        let buffer = comm.symmetric(256 << 10).unwrap();
        // SAFETY: each rank writes to its own copy, once per page.
        (0..buffer.len())
            .step_by(4096)
            .for_each(|at| unsafe { buffer.as_mut_ptr(comm.rank()).add(at).write(1) });
        comm.free(buffer).unwrap();
    }
}

/// What a rank does whose only peer is on another node.
fn between_nodes(comm: &Communicator) {
    let group = comm.split(Some(0), 0).unwrap().unwrap();
    group.exchange_bytes(&[1; 100_000]).unwrap();
    let sent = comm.start_send(vec![1u8; 100_000], 1 - comm.rank()).unwrap();
    comm.recv(&mut vec![0u8; 100_000], 1 - comm.rank()).unwrap();
    sent.wait().unwrap();
}

/// A world of two nodes, whose messages UCX carries.
fn world_by_ucx() {
    let (board, all) = (Mutex::new(vec![Vec::new(); 2]), Barrier::new(2));
    let join = |rank: usize| {
        let mut exchange = |mine: Vec<u8>| -> Result<_, String> {
            board.lock().unwrap()[rank] = mine;
            all.wait();
            let written = board.lock().unwrap().clone();
            all.wait();
            Ok(written)
        };
        let comm = Communicator::builder().node(["a", "b"][rank]).by_exchange(rank, 2, &mut exchange);
        let comm = comm.unwrap();
        between_nodes(&comm);
        comm.abort();
        let again = comm.shrink().unwrap();
        drop(comm);
        between_nodes(&again);
        if rank == 0 {
            again.barrier().unwrap_err();
            assert_eq!(again.shrink().unwrap().world_size(), 1);
        }
    };
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            let join = &join;
            scope.spawn(move || join(rank));
        }
    });
}

/// Worlds of three nodes that lose a rank at a random step, which is killed or leaves; the others go on without it.
fn worlds_that_lose_a_rank(seeds: std::ops::Range<usize>) {
    for seed in seeds {
        let (sender, receiver) = std::sync::mpsc::channel();
        let receiver = Mutex::new(receiver);
        let share = |network: &Network| {
            network.reorder(seed as u64 + 1);
            sender.send(network.clone()).unwrap();
        };
        let nodes = ["a", "b", "c", "c"];
        let (victim, step, is_killed) = (seed % 2, seed * 7 % 5, seed % 3 > 0);
        let sizes = LocalWorld::run_on_nodes(&nodes, Duration::from_secs(30), share, |comm| {
            for round in 0.. {
                if comm.rank() == victim && round == step {
                    if is_killed {
                        receiver.lock().unwrap().recv().unwrap().kill(victim);
                    }
                    return 0;
                }
                // So short that nothing is lent to the network: a killed rank would wait for it when it is dropped.
                let Err(error) = comm.exchange_bytes(&[1; 3000]) else { continue };
                assert_eq!(error.lost_world_rank(), Some(victim), "seed {seed}: {error}");
                break;
            }
            let left = comm.shrink().unwrap();
            drop(comm);
            left.exchange_bytes(&[1; 100_000]).unwrap();
            left.world_size()
        });
        assert_eq!(sizes.iter().sum::<usize>(), 3 * 3, "seed {seed}: {sizes:?}");
    }
}

#[test]
fn nothing_grows() {
    LocalWorld::run(2, |comm| comm.barrier().unwrap()); // what is made once is made
    std::thread::sleep(Duration::from_millis(50));
    let before = usage();

    LocalWorld::run(2, |comm| buffers(&comm));
    assert_no_growth(before, "buffers");

    for _ in 0..50 {
        LocalWorld::run(2, |comm| {
            let group = comm.split(Some(0), 0).unwrap().unwrap();
            group.exchange_bytes(&[1; 100_000]).unwrap();
            comm.spawn(|comm| comm.barrier()).unwrap().wait().unwrap();
            let sent = comm.start_send(vec![1u8; 1 << 20], 1 - comm.rank()).unwrap();
            comm.recv(&mut vec![0u8; 1 << 20], 1 - comm.rank()).unwrap();
            sent.wait().unwrap();
        });
    }
    assert_no_growth(before, "worlds");

    let hasty = || Communicator::builder().timeout(Duration::from_millis(1));
    for rank in (0..200).map(|i| i % 2) {
        hasty().with_ticket(rank, 2, &Ticket::random()).unwrap_err();
    }
    assert_no_growth(before, "meetings that fail");

    for _ in 0..20 {
        LocalWorld::run_on_nodes(&["a", "b"], Duration::from_secs(60), |_| (), |comm| between_nodes(&comm));
    }
    assert_no_growth(before, "worlds of two nodes");

    worlds_that_lose_a_rank(0..100);
    assert_no_growth(before, "worlds that lose a rank");

    let found = match Ucx::open(0, 1) {
        Err(error @ EngineError::Library(_)) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    if need(Need::Ucx, found).is_some() {
        world_by_ucx(); // UCX keeps what it made once
        let before = usage();
        (0..10).for_each(|_| world_by_ucx());
        assert_no_growth(before, "worlds over UCX");
    }
}
