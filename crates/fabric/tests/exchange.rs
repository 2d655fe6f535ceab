//! Exchanging bytes and objects, and splitting the world.

use antiphon_fabric::{Communicator, FabricError, LocalWorld, Operation, Rounds, error::Loss};
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

/// Bytes that tell whose they are and how many.
fn bytes_of(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + len * 7 + rank * 101) as u8).collect()
}

/// Rank `r` gives `lengths[r]` bytes, twice, and every rank gets every rank's.
fn assert_exchanged(lengths: &[usize]) {
    let all: Vec<_> = lengths.iter().enumerate().map(|(rank, &len)| bytes_of(rank, len)).collect();
    LocalWorld::run(lengths.len(), |comm| {
        for _ in 0..2 {
            // Not by assert_eq, whose message would be megabytes.
            assert!(comm.exchange_bytes(&all[comm.rank()]).unwrap() == all, "{lengths:?}");
        }
    });
}

#[test]
fn bytes_of_any_length_arrive() {
    const CAPACITY: usize = Rounds::CAPACITY;
    for len in [0, 1, 40, 41, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 1] {
        assert_exchanged(&[len; 3]);
    }
    assert_exchanged(&[0, CAPACITY, 3 * CAPACITY + 1, 1]);
    assert_exchanged(&[2 * CAPACITY]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn bytes_of_uneven_lengths_arrive(
        lengths in proptest::collection::vec(prop_oneof![0..100usize, 0..3 * Rounds::CAPACITY], 1..5)
    ) {
        assert_exchanged(&lengths);
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Shape {
    name: String,
    sides: Vec<u32>,
}

#[test]
fn objects_arrive_as_they_are() {
    let shape = |rank: usize| Shape { name: format!("№ {rank}"), sides: vec![7; rank] };
    let results = LocalWorld::run(3, |comm| comm.exchange_objects(&shape(comm.rank())));
    for result in results {
        assert_eq!(result.unwrap(), [shape(0), shape(1), shape(2)]);
    }
}

#[test]
fn an_object_of_another_type_is_an_error_that_names_its_rank() {
    let results = LocalWorld::run(2, |comm| {
        let result = match comm.rank() {
            0 => comm.exchange_objects(&Shape { name: "triangle".into(), sides: vec![3] }).map(drop),
            _ => comm.exchange_objects(&17).map(drop),
        };
        comm.barrier().expect("all bytes arrived: the ranks are still in step");
        result
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(FabricError::Object { rank: other, .. }) => assert_eq!(other, 1 - rank),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_object_that_cannot_be_serialised_keeps_no_rank_waiting() {
    use std::collections::HashMap;
    let results = LocalWorld::run(2, |comm| {
        // JSON knows no maps whose keys are lists.
        let odd = HashMap::from([(vec![1, 2], 3)]);
        let even = HashMap::new();
        let result = comm.exchange_objects(if comm.rank() == 0 { &odd } else { &even }).map(drop);
        comm.barrier().unwrap();
        result
    });
    assert!(matches!(&results[0], Err(FabricError::InvalidArgument(why)) if why.contains("serialised")));
    assert!(matches!(&results[1], Err(FabricError::Object { rank: 0, .. })));
}

#[test]
fn exchanging_and_something_else_is_a_mismatch() {
    let results = LocalWorld::run(2, |comm| match comm.rank() {
        0 => comm.exchange_bytes(b"hello").map(drop),
        _ => comm.barrier(),
    });
    match &results[0] {
        Err(FabricError::Mismatch { mine, theirs, .. }) => {
            assert_eq!(mine.operation, Operation::ExchangeObjects);
            assert_eq!(theirs.operation, Operation::Barrier);
        }
        other => panic!("{other:?}"),
    }
}

/// This rank's number in its group, and the group's members as ranks of the world.
fn members(comm: &Communicator, color: Option<u64>, key: i64) -> Option<(usize, Vec<usize>)> {
    let group = comm.split(color, key).unwrap()?;
    Some((group.rank(), group.exchange_objects(&comm.rank()).unwrap()))
}

#[test]
fn a_colour_makes_a_group_and_keys_its_order() {
    let groups = LocalWorld::run(5, |comm| {
        // Evens in reverse order, odds in the order of the world; all at the same time.
        let (color, key) = [(0, -(comm.rank() as i64)), (1, 7)][comm.rank() % 2];
        members(&comm, Some(color), key).unwrap()
    });
    assert_eq!(
        groups,
        [(2, vec![4, 2, 0]), (0, vec![1, 3]), (1, vec![4, 2, 0]), (1, vec![1, 3]), (0, vec![4, 2, 0]),]
    );
}

#[test]
fn a_rank_without_a_colour_is_in_no_group() {
    let groups = LocalWorld::run(3, |comm| members(&comm, (comm.rank() != 1).then_some(9), 0));
    assert_eq!(groups, [Some((0, vec![0, 2])), None, Some((1, vec![0, 2]))]);
    let groups = LocalWorld::run(2, |comm| members(&comm, None, 0));
    assert_eq!(groups, [None, None]);
}

#[test]
fn groups_can_be_split_again() {
    let groups = LocalWorld::run(8, |comm| {
        let half = comm.split(Some(comm.rank() as u64 / 4), 0).unwrap().unwrap();
        members(&half, Some(half.rank() as u64 / 2), 0).unwrap()
    });
    let expected: Vec<_> =
        (0..8).map(|rank| (rank % 2, vec![rank % 4 / 2 * 2, rank % 4 / 2 * 2 + 1])).collect();
    assert_eq!(groups, expected);
}

#[test]
fn a_group_fails_alone() {
    LocalWorld::run(4, |comm| {
        let pair = comm.split(Some(comm.rank() as u64 / 2), 0).unwrap().unwrap();
        if comm.rank() == 3 {
            drop(pair);
        } else {
            match (comm.rank(), pair.barrier()) {
                (2, Err(FabricError::PeerLost { rank: 1, how: Loss::Left, .. })) => {}
                (_, result) => result.unwrap(),
            }
        }
        comm.barrier().expect("the world is whole");
    });
}
