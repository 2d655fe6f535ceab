//! The sum of what all ranks have, on every rank.
//!
//! Ranks as threads: `cargo run --release --example all_reduce`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/all_reduce`

use antiphon::prelude::*;

fn main() -> Result<(), CollectiveError> {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Result<(), CollectiveError> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mine: Vec<f32> = (0..1_000_000).map(|i| (rank * 1000 + i % 10) as f32).collect();
    let mut sum = vec![0.0f32; mine.len()];
    comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;

    // Every rank knows what it must be: the ranks sum up to W(W − 1)/2.
    let ranks = (world_size * (world_size - 1) / 2 * 1000) as f32;
    assert!(sum.iter().enumerate().all(|(i, &x)| x == ranks + (world_size * (i % 10)) as f32));
    println!("rank {rank} of {world_size}: sum[7] = {}", sum[7]);
    Ok(())
}
