//! Descriptors go from every rank to every rank.

use std::{fs::File, os::fd::AsFd, time::Duration};

use antiphon_fabric::{FabricError, LocalWorld};

/// A file that is known by its length.
fn file(length: usize) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(length as u64).unwrap();
    file
}

#[test]
fn every_rank_gets_every_descriptor() {
    const CALLS: usize = 3;
    for world_size in [1, 2, 5, 24] {
        let results = LocalWorld::run(world_size, |comm| {
            let exchange = |call: usize| -> Result<Vec<u64>, FabricError> {
                let mine = file(100 * call + comm.rank());
                let all = comm.exchange_descriptors(mine.as_fd())?;
                Ok(all.into_iter().map(|fd| File::from(fd).metadata().unwrap().len()).collect())
            };
            (0..CALLS).map(exchange).collect::<Result<Vec<_>, _>>()
        });
        let expected: Vec<Vec<u64>> =
            (0..CALLS).map(|call| (0..world_size).map(|rank| (100 * call + rank) as u64).collect()).collect();
        for lengths in results {
            assert_eq!(lengths.unwrap(), expected);
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let results = LocalWorld::run_with(2, Duration::from_millis(300), |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(600));
            return Ok(());
        }
        comm.exchange_descriptors(file(1).as_fd()).map(drop)
    });
    assert!(results[0].as_ref().unwrap_err().to_string().contains("[1]"));
}
