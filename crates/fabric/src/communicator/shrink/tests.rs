//! Ranks that are lost or give up at chosen steps.

use std::{
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use super::*;
use crate::{
    LocalWorld,
    engine::{Network, Twin},
    rendezvous::Ticket,
};

const LONG: Duration = Duration::from_secs(20);

/// The part of a rank that has lost nobody.
fn agreement(endpoint: &Endpoint) -> Agreement {
    Agreement::new(endpoint.rank, vec![false; endpoint.world_size], None)
}

/// The rank `victim` of 4 arrives with the others and leaves when they all wait for it; the others continue in another view.
#[test]
fn a_rank_that_arrives_and_is_lost_is_left_out_in_the_next_view() {
    for nodes in [["a"; 4], ["a", "a", "b", "b"], ["a", "b", "c", "a"]] {
        for victim in 0..4 {
            let results = LocalWorld::run_on_nodes(
                &nodes,
                LONG,
                |_| (),
                |comm| {
                    let endpoint = comm.endpoint();
                    if comm.rank() == victim {
                        let _survivor = Survivor::new(endpoint, agreement(endpoint))?;
                        while !(0..4).all(|rank| notice(endpoint, rank).said().state.is_some()) {
                            endpoint.poll();
                            thread::yield_now();
                        }
                        thread::sleep(Duration::from_millis(20));
                        return Ok(None);
                    }
                    let left = comm.shrink()?;
                    left.barrier()?;
                    Ok::<_, FabricError>(Some(left.exchange_objects(&comm.rank())?))
                },
            );
            let others: Vec<usize> = (0..4).filter(|&rank| rank != victim).collect();
            for &rank in &others {
                assert_eq!(results[rank].clone().unwrap(), Some(others.clone()), "without {victim}");
            }
        }
    }
}

/// What was decided is not taken back: a rank that has decided and leaves is in, and missed by the first call.
#[test]
fn a_rank_that_is_lost_when_it_has_decided_is_lost_to_the_new_communicator() {
    for nodes in [["a"; 3], ["a", "b", "b"], ["a", "b", "c"]] {
        let results = LocalWorld::run_on_nodes(
            &nodes,
            LONG,
            |_| (),
            |comm| {
                let three = comm.shrink()?;
                if three.rank() == 0 {
                    return Ok((three.world_size(), None));
                }
                thread::sleep(Duration::from_millis(20));
                Ok::<_, FabricError>((three.world_size(), three.barrier().err()))
            },
        );
        for (rank, result) in results.into_iter().enumerate() {
            let (size, error) = result.unwrap();
            assert_eq!(size, 3);
            let is_lost = matches!(error, Some(FabricError::PeerLost { rank: 0, .. }));
            assert!(rank == 0 || is_lost, "{error:?}");
        }
    }
}

#[test]
fn a_rank_that_gives_up_ends_it_for_all_and_for_good() {
    for nodes in [["a", "a"], ["a", "b"]] {
        let results = LocalWorld::run_on_nodes(
            &nodes,
            LONG,
            |_| (),
            |comm| {
                let endpoint = comm.endpoint();
                if comm.rank() == 0 {
                    let view = agreement(endpoint).view();
                    say(endpoint, Said { state: Some((Step::GaveUp, view)), decided: None }, None);
                    let again = comm.shrink();
                    comm.barrier()?; // it stays until the other has seen it
                    return again.map(drop);
                }
                let first = comm.shrink();
                comm.barrier()?;
                first.map(drop)
            },
        );
        for result in results {
            assert!(matches!(result, Err(FabricError::ShrinkAborted { by: 0, .. })), "{result:?}");
        }
    }
}

/// Also if nothing was lost; each time it is a world of its own.
#[test]
fn a_communicator_shrinks_again_and_again() {
    for nodes in [["a"; 4], ["a", "b", "b", "a"]] {
        let results = LocalWorld::run_on_nodes(
            &nodes,
            LONG,
            |_| (),
            |comm| {
                let first = comm.shrink()?;
                let second = comm.shrink()?;
                if comm.rank() == 2 {
                    return Ok(vec![]);
                }
                let third = comm.shrink()?;
                let fourth = comm.shrink()?.shrink()?;
                third.barrier()?;
                first.barrier().unwrap_err();
                Ok::<_, FabricError>(
                    [&first, &second, &third, &fourth].map(Communicator::world_size).to_vec(),
                )
            },
        );
        for rank in [0, 1, 3] {
            assert_eq!(results[rank].as_ref().unwrap(), &[4, 4, 3, 3]);
        }
    }
}

/// Runs ranks on these nodes, which notice within a moment that they hear nothing of others.
fn run_with_short_links<T: Send>(nodes: &[&str], run: impl Fn(Communicator, &Network) -> T + Sync) -> Vec<T> {
    let (network, ends) = Twin::network(nodes.len());
    let (ticket, run, network) = (&Ticket::random(), &run, &network);
    thread::scope(|scope| {
        let spawn = |(rank, end): (usize, Twin)| {
            scope.spawn(move || {
                let builder = Communicator::builder().node(nodes[rank]).engine(Arc::new(end)).timeout(LONG);
                let builder = builder.link_timeout(Duration::from_millis(500));
                run(builder.with_ticket(rank, nodes.len(), ticket).unwrap(), network)
            })
        };
        let ranks: Vec<_> = ends.into_iter().enumerate().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Rank 0 cuts the links between two halves at a random moment; each half goes on.
#[test]
fn each_side_of_a_cut_network_goes_on() {
    for (seed, nodes) in [&["a", "b"][..], &["a", "b", "b"], &["a", "a", "b", "b"], &["a", "b", "c", "d"]]
        .into_iter()
        .enumerate()
    {
        let size = nodes.len();
        let side = |rank: usize| usize::from(rank >= size / 2);
        let results = run_with_short_links(nodes, |comm, network| {
            let rank = comm.rank();
            // The cut may meet a rank in its first barrier.
            let _ = comm.barrier();
            if rank == 0 {
                thread::sleep(Duration::from_micros(seed as u64 * 700));
                let across = |other: &usize| side(*other) != 0;
                for (one, other) in
                    (0..size / 2).flat_map(|one| (0..size).filter(across).map(move |other| (one, other)))
                {
                    network.cut(one, other);
                }
            }
            while comm.barrier().is_ok() {}
            let left = comm.shrink()?;
            left.barrier()?;
            left.exchange_objects(&rank)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let expected: Vec<usize> = (0..size).filter(|&other| side(other) == side(rank)).collect();
            assert_eq!(result.unwrap(), expected, "rank {rank} of {nodes:?}");
        }
    }
}

/// Two nodes of three are cut off from each other: whatever the third does, ranks that have each other have the same world.
#[test]
fn a_node_between_two_that_are_cut_off_goes_with_one_or_with_none() {
    let worlds = Mutex::new(vec![]);
    let results = run_with_short_links(&["a", "b", "c"], |comm, network| {
        // The cut may meet a rank in its first barrier.
        let _ = comm.barrier();
        if comm.rank() == 2 {
            network.cut(0, 1);
        }
        let rank = comm.rank();
        while comm.barrier().is_ok() {}
        let left = comm.shrink()?;
        let world = left.exchange_objects(&rank)?;
        worlds.lock().unwrap().push(world.clone());
        // It stays until all have what they asked for.
        left.barrier()?;
        Ok::<_, FabricError>(world)
    });
    let worlds: Vec<Vec<usize>> = results.into_iter().map(Result::unwrap).collect();
    for (rank, world) in worlds.iter().enumerate() {
        assert!(world.contains(&rank) && (!world.contains(&0) || !world.contains(&1)), "{worlds:?}");
        assert!(world.iter().all(|&other| worlds[other] == *world), "{worlds:?}");
    }
}

/// Every rank is alone on its node; some are killed at random steps, without a word.
#[test]
fn ranks_that_are_killed_at_any_step_are_left_behind() {
    for (size, seed) in [2, 3, 4, 8].into_iter().flat_map(|size| (0..6).map(move |seed| (size, seed))) {
        let is_killed = |rank: usize| rank != (seed + 1) % size && (rank * 5 + seed) % 3 < 2;
        let nodes = &["a", "b", "c", "d", "e", "f", "g", "h"][..size];
        let left: Vec<usize> = (0..size).filter(|&rank| !is_killed(rank)).collect();
        let results = run_with_short_links(nodes, |comm, network| {
            let rank = comm.rank();
            let (mut comm, mut steps) = (comm, (rank * 11 + seed * 5) % 17);
            loop {
                if is_killed(rank) && steps == 0 {
                    network.kill(rank);
                    return Ok(vec![]);
                }
                steps = steps.saturating_sub(1);
                match comm.exchange_objects(&rank) {
                    Ok(members) if members == left => return comm.barrier().map(|()| members),
                    Ok(_) => {}
                    Err(_) => comm = comm.shrink()?,
                }
            }
        });
        for &rank in &left {
            let members = results[rank].as_ref().unwrap_or_else(|e| panic!("{rank} of {size}, {seed}: {e}"));
            assert_eq!(*members, left, "rank {rank} of {size}, seed {seed}");
        }
    }
}
