//! An all-gather by hand: blocks travel round a ring, each rank passing on what it got last.
//!
//! Ranks as threads: `cargo run --release --example ring_send_recv`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/ring_send_recv`

use antiphon::prelude::*;

const BLOCK: usize = 300_000; // 1.2 MB: more than a message ring holds, so sending and receiving must go together

fn main() -> Result<(), CollectiveError> {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Result<(), CollectiveError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (next, previous) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let mine = vec![rank as i32; BLOCK];
    let mut ring = vec![-1i32; BLOCK * world_size];
    ring[rank * BLOCK..][..BLOCK].copy_from_slice(&mine);

    let mut travelling = mine.clone();
    for step in 1..world_size {
        let mut arriving = vec![0i32; BLOCK];
        comm.send_recv(&travelling, next, &mut arriving, previous)?;
        let origin = (rank + world_size - step) % world_size;
        ring[origin * BLOCK..][..BLOCK].copy_from_slice(&arriving);
        travelling = arriving;
    }

    let mut gathered = vec![0i32; BLOCK * world_size];
    comm.all_gather(&mine, &mut gathered)?;
    assert_eq!(ring, gathered);
    println!(
        "rank {rank} of {world_size}: {} steps round the ring give what all_gather gives",
        world_size - 1
    );
    Ok(())
}
