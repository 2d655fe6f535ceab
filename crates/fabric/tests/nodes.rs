//! Ranks on several nodes, as threads: an engine between threads carries what passes between nodes, and disturbs it.

use std::{
    collections::BTreeSet,
    sync::{Barrier, Mutex, OnceLock},
    time::{Duration, Instant},
};

use antiphon_fabric::{
    Communicator, FabricError, LocalWorld, Operation, Signature, Written,
    engine::{EngineError, Network, Ucx},
    error::Loss,
    rendezvous::{Address, RendezvousError, Secret, Ticket},
};
use antiphon_testing::{Need, free_port, need};

const TIMEOUT: Duration = Duration::from_secs(30);
/// Pairs, uneven nodes, ranks that are not neighbours, a node each.
const LAYOUTS: &[&[&str]] = &[
    &["a", "b"],
    &["a", "a", "b", "b"],
    &["a", "b", "a", "b"],
    &["a", "b", "b", "b"],
    &["b", "b", "b", "a"],
    &["a", "b", "c"],
];

fn run<T: Send>(nodes: &[&str], run: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    LocalWorld::run_on_nodes(nodes, TIMEOUT, |_| (), run)
}

/// One round after the other, each with other lengths, against what every rank must have posted.
fn exchange_rounds(comm: &Communicator, rounds: u64) -> Result<(), FabricError> {
    let lengths = [8, 40, 41, 1000, 64 << 10, 200_000, 1 << 20];
    for round in 0..rounds {
        let len = lengths[round as usize % lengths.len()];
        let signature = Signature { count: round, ..Signature::new(Operation::AllGather) };
        let byte = |rank: usize| (round as usize * 31 + rank * 7 + 1) as u8;
        // SAFETY: all ranks post payloads of one length, of which they read what was written.
        unsafe {
            let mut open = comm.rounds()?;
            open.outbox(len).write_bytes(byte(comm.rank()), len);
            // A hole in the middle, which does not travel.
            let hole = if len > 1000 { len / 3..len / 2 } else { 0..0 };
            open.exchange(&signature, Written::nothing(len).and(0..hole.start).and(hole.end..len))?;
            for rank in 0..comm.world_size() {
                let inbox = std::slice::from_raw_parts(open.inbox(rank, len), len);
                let is_right = |range: std::ops::Range<usize>| inbox[range].iter().all(|&b| b == byte(rank));
                assert!(
                    is_right(0..hole.start) && is_right(hole.end..len),
                    "round {round}, rank {rank}, {len} bytes"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn every_rank_reads_what_every_rank_has_posted() {
    for nodes in LAYOUTS {
        let results = run(nodes, |comm| {
            let names: Vec<String> = comm
                .nodes()
                .of_ranks()
                .iter()
                .map(|&node| comm.nodes().name(node as usize).to_owned())
                .collect();
            assert_eq!(names, *nodes);
            comm.barrier()?;
            let objects = comm.exchange_objects(&format!("rank {}", comm.rank()))?;
            let expected: Vec<_> = (0..nodes.len()).map(|rank| format!("rank {rank}")).collect();
            assert_eq!(objects, expected);
            let long = vec![comm.rank() as u8; 2_500_000 + comm.rank()];
            for (rank, bytes) in comm.exchange_bytes(&long)?.into_iter().enumerate() {
                assert_eq!(bytes, vec![rank as u8; 2_500_000 + rank]);
            }
            exchange_rounds(&comm, 100)
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn order_and_delay_of_messages_do_not_matter() {
    for (seed, nodes) in LAYOUTS.iter().enumerate() {
        let disturb = |network: &Network| {
            network.reorder(seed as u64 + 1);
            network.delay(0, nodes.len() - 1, Duration::from_micros(300));
        };
        let results = LocalWorld::run_on_nodes(nodes, TIMEOUT, disturb, |comm| exchange_rounds(&comm, 60));
        results.into_iter().for_each(|result| result.unwrap());
    }
}

/// The last round of a rank that leaves says that it has read all before, also if the engine says later that this was sent.
#[test]
fn a_rank_that_left_with_all_it_needs_fails_no_other() {
    for nodes in LAYOUTS {
        let disturb = |network: &Network| {
            for (from, to) in (0..nodes.len()).flat_map(|from| (0..nodes.len()).map(move |to| (from, to))) {
                let late = if from == 0 { 30 } else { 0 };
                network.delay_completions(from, to, Duration::from_millis(late));
            }
        };
        let results = LocalWorld::run_on_nodes(nodes, TIMEOUT, disturb, |comm| exchange_rounds(&comm, 6));
        results.into_iter().for_each(|result| result.unwrap());
    }
}

/// A rank that leaves a call computes, while what it has posted may be under way.
#[test]
fn a_rank_that_computes_holds_up_no_other() {
    const COMPUTES: Duration = Duration::from_millis(300);
    let ends = run(&["a", "b", "b"], |comm| {
        let mut ends = Vec::new();
        for _ in 0..5 {
            comm.barrier()?;
            ends.push(Instant::now());
            if comm.rank() == 0 {
                std::thread::sleep(COMPUTES);
            }
        }
        comm.barrier()?;
        Ok::<_, FabricError>(ends)
    });
    let ends: Vec<Vec<Instant>> = ends.into_iter().map(Result::unwrap).collect();
    for others in &ends[1..] {
        for (end, first) in others.iter().zip(&ends[0]) {
            let late = end.saturating_duration_since(*first);
            assert!(late < COMPUTES * 5 / 6, "{late:?}");
        }
    }
}

#[test]
fn a_post_reaches_each_other_node_once() {
    let nodes = ["a", "a", "b", "b"];
    let (sender, receiver) = std::sync::mpsc::channel();
    let share = |network: &Network| sender.send(network.clone()).unwrap();
    const LEN: usize = 300_000;
    LocalWorld::run_on_nodes(&nodes, TIMEOUT, share, |comm| {
        comm.barrier().unwrap();
        let signature = Signature::new(Operation::AllGather);
        // SAFETY: all ranks post payloads of one length, which none reads.
        let mut rounds = unsafe { comm.rounds() }.unwrap();
        rounds.exchange(&signature, Written::all(LEN)).unwrap();
        rounds.exchange(&signature, Written::nothing(0)).unwrap();
    });
    let network = receiver.recv().unwrap();
    for from in 0..4 {
        for to in 0..4 {
            let bytes = network.traffic(from, to).bytes;
            let expected = if (from / 2 != to / 2) && from % 2 == to % 2 { LEN as u64 } else { 0 };
            assert_eq!(bytes, expected, "from {from} to {to}");
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named_on_all_nodes_and_has_sent_all_before() {
    for nodes in LAYOUTS {
        for leaves in 0..nodes.len() {
            let disturb = |network: &Network| network.reorder(leaves as u64 + 9);
            let results = LocalWorld::run_on_nodes(nodes, TIMEOUT, disturb, |comm| {
                exchange_rounds(&comm, 10)?;
                match comm.rank() == leaves {
                    true => Ok(()),
                    false => comm.barrier(),
                }
            });
            for (rank, result) in results.into_iter().enumerate().filter(|(rank, _)| *rank != leaves) {
                match result {
                    Err(FabricError::PeerLost {
                        rank: lost,
                        how: Loss::Left | Loss::Reported { .. },
                        ..
                    }) => {
                        assert_eq!(lost, leaves, "on rank {rank} of {nodes:?}");
                    }
                    other => panic!("rank {rank} of {nodes:?}, when {leaves} left: {other:?}"),
                }
            }
        }
    }
}

/// Rank 2 takes for its node what rank 3 posts, and goes before it has it: rank 1 does not wait for that until its time is over.
#[test]
fn what_was_lost_with_the_rank_that_takes_it_is_not_waited_for() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let share = |network: &Network| sender.send(network.clone()).unwrap();
    let receiver = Mutex::new(receiver);
    let all = Barrier::new(4);
    let ends = LocalWorld::run_on_nodes(&["a", "b", "b", "a"], TIMEOUT, share, |comm| {
        // Every rank has what the barrier posted before anything is cut.
        let begun = comm.barrier();
        all.wait();
        begun?;
        if comm.rank() == 3 {
            receiver.lock().unwrap().recv().unwrap().cut(2, 3);
        }
        if comm.rank() == 2 {
            comm.set_timeout(Duration::from_millis(300));
        }
        let start = Instant::now();
        while comm.barrier().is_ok() {}
        Ok::<_, FabricError>(start.elapsed())
    });
    let took = *ends[1].as_ref().unwrap();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn abort_and_disagreement_travel() {
    let results = run(&["a", "b", "a", "b"], |comm| match comm.rank() {
        3 => {
            std::thread::sleep(Duration::from_millis(50));
            comm.abort();
            Ok(())
        }
        _ => comm.barrier(),
    });
    for result in &results[..3] {
        assert!(matches!(result, Err(FabricError::AbortCalled { by: 3, .. })), "{result:?}");
    }
    let results = run(&["a", "b", "b"], |comm| match comm.rank() {
        1 => comm.exchange_bytes(&[1]).map(drop),
        _ => comm.barrier(),
    });
    for (rank, result) in results.iter().enumerate() {
        let other = if rank == 1 { &[0, 2][..] } else { &[1][..] };
        match result {
            Err(FabricError::Mismatch { peer, .. }) => assert!(other.contains(peer), "{rank}: {result:?}"),
            Err(FabricError::Aborted { .. }) => {}
            _ => panic!("{rank}: {result:?}"),
        }
    }
}

#[test]
fn a_rank_that_gives_up_gives_no_other_one_a_result() {
    let results = LocalWorld::run_on_nodes(
        &["a", "a", "b"],
        Duration::from_millis(300),
        |_| (),
        |comm| {
            comm.barrier()?;
            if comm.rank() == 2 {
                std::thread::sleep(Duration::from_millis(900));
            }
            comm.barrier()
        },
    );
    for result in &results[..2] {
        assert!(
            matches!(result, Err(FabricError::Timeout { .. } | FabricError::Aborted { .. })),
            "{result:?}"
        );
    }
    assert!(results[2].is_err(), "it came after the others had given up: {results:?}");
}

/// What a killed rank sent last reaches one node and not another. If one of two ranks has their group then, and the other has not, the group
/// fails although both live.
#[test]
fn a_group_that_a_rank_lacks_does_not_wait_for_it() {
    // A split takes twelve messages.
    let has_group = [0, 5, 10, 11, 12].map(|messages| {
        let (network, at_once, end) = (OnceLock::new(), Barrier::new(3), Barrier::new(2));
        let keep = |net: &Network| drop(network.set(net.clone()));
        let results = LocalWorld::run_on_nodes(&["a", "b", "c"], TIMEOUT, keep, |comm| {
            comm.barrier().unwrap();
            at_once.wait();
            let network: &Network = network.get().unwrap();
            if comm.rank() == 0 {
                network.lose_after(0, 1, messages);
                let (network, monitor) = (network.clone(), comm.monitor());
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(100));
                    network.kill(0);
                    monitor.abort();
                });
            }
            at_once.wait();
            let pair = comm.split(Some(u64::from(comm.rank() > 0)), 0);
            if comm.rank() == 0 {
                return (false, Ok(()));
            }
            let start = Instant::now();
            let (has_group, ended) = (pair.is_ok(), pair.and_then(|pair| pair.unwrap().barrier()));
            assert!(start.elapsed() < Duration::from_secs(5), "{ended:?}");
            // Both keep the communicator until both have ended.
            end.wait();
            (has_group, ended)
        });
        let has_group = [1, 2].map(|rank: usize| results[rank].0);
        for (has_it, ended) in &results[1..] {
            match ended {
                Ok(()) => assert_eq!(has_group, [true; 2]),
                Err(FabricError::PeerLost { rank: 0, how: Loss::Followed { world_rank: 0 }, .. }) => {
                    assert!(has_it)
                }
                Err(error) => assert_eq!(error.lost_world_rank(), Some(0), "{error}"),
            }
        }
        has_group
    });
    assert_eq!(has_group, [[false; 2], [false; 2], [false; 2], [false, true], [true; 2]]);
}

#[test]
fn what_needs_one_memory_is_refused_and_the_communicator_stays_usable() {
    let results = run(&["a", "b", "b"], |comm| {
        let text = |error: FabricError| error.to_string();
        let refused = [
            comm.symmetric(64).map(drop).map_err(text).unwrap_err(),
            comm.exchange_descriptors(std::os::fd::AsFd::as_fd(&std::io::stdin()))
                .map(drop)
                .map_err(text)
                .unwrap_err(),
        ];
        comm.barrier()?;
        Ok::<_, FabricError>(refused)
    });
    let refused = results[0].as_ref().unwrap();
    assert!(refused[0].contains("symmetric") && refused[0].contains("[1, 2] of 3"), "{refused:?}");
    assert!(refused[1].contains("exchange_descriptors"), "{refused:?}");
}

#[test]
fn messages_of_any_length_go_between_nodes_in_order() {
    for (seed, nodes) in LAYOUTS.iter().enumerate() {
        let disturb = |network: &Network| network.reorder(seed as u64 + 5);
        let results = LocalWorld::run_on_nodes(nodes, TIMEOUT, disturb, |comm| {
            let (rank, world) = (comm.rank(), comm.world_size());
            for (i, len) in [0usize, 1, 40, 41, 32 << 10, (32 << 10) + 1, 1_000_000].into_iter().enumerate() {
                let content = |from: usize| vec![(from * 50 + i) as u8; len];
                let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
                let mut received = vec![0; len];
                comm.send_recv(&content(rank), to, &mut received, from)?;
                assert_eq!(received, content(from), "{len} bytes");
            }
            // More than a ring holds, before the receiver asks.
            let pending: Vec<_> =
                (0..20u8).map(|i| comm.start_send(vec![i; 100_000], (rank + 1) % world)).collect();
            for i in 0..20u8 {
                let mut received = vec![0; 100_000];
                comm.recv(&mut received, (rank + world - 1) % world)?;
                assert_eq!(received, vec![i; 100_000]);
            }
            pending.into_iter().try_for_each(|sent| sent?.wait().map(drop))
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn a_message_that_was_sent_before_its_sender_left_arrives() {
    for seed in 1..20 {
        let disturb = |network: &Network| network.reorder(seed);
        let results = LocalWorld::run_on_nodes(&["a", "b", "b"], TIMEOUT, disturb, |comm| {
            comm.barrier()?;
            match comm.rank() {
                0 => comm.send(&[7u8; 1000], 1)?,
                1 => {
                    std::thread::sleep(Duration::from_millis(3));
                    let mut received = [0u8; 1000];
                    comm.recv(&mut received, 0)?;
                    assert_eq!(received, [7; 1000]);
                }
                _ => {}
            }
            Ok::<_, FabricError>(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn groups_lie_within_nodes_and_across_them() {
    let nodes = ["a", "b", "a", "b"];
    let results = run(&nodes, |comm| {
        let rank = comm.rank();
        let within = comm.split(Some(rank as u64 % 2), 0)?.unwrap();
        let across = comm.split(Some(rank as u64 / 2), 0)?.unwrap();
        let reversed = comm.split(Some(0), -(rank as i64))?.unwrap();
        assert_eq!((within.nodes().count(), across.nodes().count(), reversed.nodes().count()), (1, 2, 2));
        assert_eq!(reversed.nodes().ranks(0), [0, 2]);
        within.symmetric(64)?;
        let (mates, rail) = (comm.node_group()?, comm.rail_group()?);
        assert_eq!((mates.world_size(), mates.nodes().count(), mates.rank()), (2, 1, rank / 2));
        assert_eq!((rail.world_size(), rail.nodes().count(), rail.rank()), (2, 2, rank % 2));
        for group in [&within, &across, &reversed] {
            exchange_rounds(group, 20)?;
        }
        let pair = reversed.split(Some(reversed.rank() as u64 / 2), 0)?.unwrap();
        exchange_rounds(&pair, 20)?;
        // Groups go on without their world.
        drop(comm);
        exchange_rounds(&across, 20)?;
        reversed.barrier()
    });
    results.into_iter().for_each(|result| result.unwrap());
}

/// A channel between threads, as MPI or torch's store is one between processes.
struct Blackboard {
    written: Mutex<Vec<Vec<u8>>>,
    all: Barrier,
}

impl Blackboard {
    fn of(ranks: usize) -> Self {
        Self { written: Mutex::new(vec![Vec::new(); ranks]), all: Barrier::new(ranks) }
    }

    fn all_gather(&self, rank: usize, mine: Vec<u8>) -> Result<Vec<Vec<u8>>, String> {
        self.written.lock().unwrap()[rank] = mine;
        self.all.wait();
        let all = self.written.lock().unwrap().clone();
        self.all.wait();
        Ok(all)
    }
}

#[test]
fn groups_of_some_ranks_meet_by_an_exchange() {
    for nodes in LAYOUTS {
        let world = nodes.len();
        let (pair, rest, whole) = (Blackboard::of(2), Blackboard::of(world - 2), Blackboard::of(world));
        let results = run(nodes, |comm| {
            let rank = comm.rank();
            // The first and the last, the others, and all of them backwards.
            let (board, place, size) = match rank {
                0 => (&pair, 0, 2),
                rank if rank == world - 1 => (&pair, 1, 2),
                rank => (&rest, rank - 1, world - 2),
            };
            for (board, place, size) in [(board, place, size), (&whole, world - 1 - rank, world)] {
                let mut exchange = |mine| board.all_gather(place, mine);
                let builder = Communicator::builder().parent(comm.messenger()).timeout(TIMEOUT);
                let group = builder.by_exchange(place, size, &mut exchange)?;
                let ranks: Vec<usize> = (0..size).map(|rank| group.members().world_rank(rank)).collect();
                assert_eq!(ranks[place], rank);
                for (one, other) in ranks.iter().zip(&ranks[1..]) {
                    let same =
                        group.nodes().share_memory(group_rank(&ranks, *one), group_rank(&ranks, *other));
                    assert_eq!(same, nodes[*one] == nodes[*other], "{ranks:?} of {nodes:?}");
                }
                exchange_rounds(&group, 20)?;
            }
            comm.barrier()
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn groups_meet_at_an_address_of_tcp() {
    for nodes in LAYOUTS {
        let world = nodes.len();
        let ports = [(); 3].map(|()| free_port());
        let results = run(nodes, |comm| {
            let rank = comm.rank();
            // The first and the last, the others, and all of them backwards.
            let (pair, rest) = (ticket("127.0.0.1", ports[0], "pair"), ticket("127.0.0.1", ports[1], "rest"));
            let whole = ticket("127.0.0.1", ports[2], "whole");
            let (some, place, size) = match rank {
                0 => (&pair, 0, 2),
                rank if rank == world - 1 => (&pair, 1, 2),
                rank => (&rest, rank - 1, world - 2),
            };
            // The same address serves again.
            for (ticket, place, size) in
                [(some, place, size), (&whole, world - 1 - rank, world), (&whole, rank, world)]
            {
                let builder = Communicator::builder().parent(comm.messenger()).timeout(TIMEOUT);
                let group = builder.with_ticket(place, size, ticket)?;
                let ranks: Vec<usize> = (0..size).map(|rank| group.members().world_rank(rank)).collect();
                assert_eq!(ranks[place], rank);
                assert_eq!(group.nodes().count(), {
                    let names: BTreeSet<_> = ranks.iter().map(|&rank| nodes[rank]).collect();
                    names.len()
                });
                exchange_rounds(&group, 20)?;
            }
            comm.barrier()
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

/// Ranks of one node may meet at a path; those of several hear what to do.
#[test]
fn groups_meet_at_a_path_if_they_are_on_one_node() {
    let (folder, nodes) = (tempfile::tempdir().unwrap(), ["a", "a", "b", "b"]);
    let results = run(&nodes, |comm| {
        let at = |name: &str, place: usize| {
            let builder = Communicator::builder().parent(comm.messenger()).timeout(TIMEOUT);
            builder.at_path(place, 2, folder.path().join(name), "secret")
        };
        let (node, place) = (comm.rank() / 2, comm.rank() % 2);
        let group = at(nodes[comm.rank()], place)?;
        assert_eq!(group.nodes().count(), 1);
        exchange_rounds(&group, 20)?;
        // Ranks 0 and 2, and ranks 1 and 3.
        let refused = at(&format!("rail {place}"), node).unwrap_err().to_string();
        let remedy =
            "is on another node: ranks of several nodes meet at an address of TCP, or by an exchange";
        assert_eq!(refused, format!("rank {} of the group {remedy}", 1 - node));
        comm.barrier()
    });
    results.into_iter().for_each(|result| result.unwrap());
}

fn group_rank(ranks: &[usize], rank: usize) -> usize {
    ranks.iter().position(|&other| other == rank).unwrap()
}

/// Worlds that meet over TCP and by an exchange, whose messages UCX carries.
#[test]
fn ucx_carries_what_passes_between_nodes() {
    let found = match Ucx::open(0, 1) {
        Err(error @ EngineError::Library(_)) => Err(error),
        opened => Ok(opened.unwrap()),
    };
    if need(Need::Ucx, found).is_none() {
        return;
    }
    for nodes in LAYOUTS {
        let (world, port, board) = (nodes.len(), free_port(), Blackboard::of(nodes.len()));
        for by_exchange in [false, true] {
            let join = |rank: usize| {
                let builder = Communicator::builder().node(nodes[rank]).timeout(TIMEOUT);
                match by_exchange {
                    true => builder.by_exchange(rank, world, &mut |mine| board.all_gather(rank, mine)),
                    false => builder.with_ticket(rank, world, &ticket("127.0.0.1", port, "secret")),
                }
            };
            let results: Vec<_> = std::thread::scope(|scope| {
                let run = |rank| {
                    let join = &join;
                    scope.spawn(move || {
                        let comm = join(rank)?;
                        assert_eq!(comm.nodes().name(comm.nodes().of(rank)), nodes[rank]);
                        let mut received = vec![0; 100_000];
                        let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
                        comm.send_recv(&vec![rank as u8; 100_000], to, &mut received, from)?;
                        assert_eq!(received, vec![from as u8; 100_000]);
                        exchange_rounds(&comm, 30)
                    })
                };
                let ranks: Vec<_> = (0..world).map(run).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            results.into_iter().for_each(|result: Result<(), FabricError>| result.unwrap());
        }
    }
}

fn ticket(host: &str, port: u16, secret: &str) -> Ticket {
    Ticket { address: Address::Tcp { host: host.into(), port }, secret: Secret::new(secret) }
}

#[test]
fn ranks_meet_over_tcp_whoever_else_connects() {
    for host in ["127.0.0.1", "::1"] {
        let port = free_port();
        let results = std::thread::scope(|scope| {
            let join = |rank: usize, secret: &'static str, timeout: f64| {
                scope.spawn(move || {
                    let builder = Communicator::builder().node("a").arena_bytes(4096);
                    let builder = builder.timeout(Duration::from_secs_f64(timeout));
                    builder.with_ticket(rank, 3, &ticket(host, port, secret))?.exchange_objects(&rank)
                })
            };
            let stranger = join(1, "guessed", 10.0);
            let first = join(0, "right", 20.0);
            let refused = stranger.join().unwrap();
            assert!(
                matches!(
                    refused,
                    Err(FabricError::Rendezvous(
                        RendezvousError::Refused { .. } | RendezvousError::Impostor { .. }
                    ))
                ),
                "{refused:?}"
            );
            // One that says nothing, and one that speaks another protocol.
            let _silent = std::net::TcpStream::connect((host, port)).unwrap();
            let mut other = std::net::TcpStream::connect((host, port)).unwrap();
            std::io::Write::write_all(&mut other, b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let others = [join(2, "right", 20.0), join(1, "right", 20.0)];
            let others = others.map(|rank| rank.join().unwrap());
            [vec![first.join().unwrap()], others.into()].concat()
        });
        for result in results {
            assert_eq!(result.unwrap(), [0, 1, 2], "at {host}");
        }
    }
}

#[test]
fn ranks_that_never_come_are_named() {
    let error = Communicator::builder()
        .node("a")
        .timeout(Duration::from_millis(300))
        .with_ticket(0, 2, &ticket("127.0.0.1", free_port(), "s"))
        .unwrap_err();
    assert!(error.to_string().contains("ranks [1] never arrived"), "{error}");
    let error = Communicator::builder()
        .node("a")
        .timeout(Duration::from_millis(300))
        .with_ticket(1, 2, &ticket("127.0.0.1", free_port(), "s"))
        .unwrap_err();
    assert!(error.to_string().contains("ranks [0] never arrived"), "{error}");
}
