//! Ranks that are lost or give up at chosen steps.

use std::{thread, time::Duration};

use super::*;
use crate::LocalWorld;

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
