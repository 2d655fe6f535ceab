//! Reduce-scatter: every rank gets its part of the reduction of all inputs.

use super::Setting;
use super::channels::{BLOCK, Mesh, Ring, behind, scratch};
use crate::{Chunk, Collective, MemoryChannel, Program, Rank, Result};

/// The chunks that a rank gets; in place, its part of the input.
fn result(setting: &Setting, rank: &Rank) -> Result<Chunk> {
    if setting.inplace { rank.input().chunk(rank.id().into()) } else { rank.output().chunk(0) }
}

/// Every rank reads its part of all inputs.
///
/// 1. When all have begun, a rank reads its part of all inputs and reduces it, beginning with its own: one pass.
/// 2. It tells all others, and waits for them, since they read its input.
///
/// (n − 1)/n S bytes come to a rank. The right one where all ranks reach each other directly.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn direct(setting: &Setting) -> Result<Program> {
    let program = setting.program("direct-reduce-scatter", |n| Collective::reduce_scatter(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    for own in 0..n {
        let (rank, part) = (program.rank(own)?, own.into());
        let (mine, result) = (rank.input().chunk(part)?, result(setting, &rank)?);
        mesh.begin(own)?;
        for (peer, channel) in mesh.at(own) {
            channel.reduce(mine, &[program.rank(peer)?.input().chunk(part)?], BLOCK, result, setting.op)?;
        }
        mesh.end(own)?;
    }
    Ok(program)
}

/// Parts go round a ring to where they belong.
///
/// Part r sets out from rank r + 1. Each rank adds its own to what comes and sends it to the next one; after n − 1 steps
/// rank r has all of it. (n − 1)/n S bytes leave a rank, all to its neighbour: for large messages where links are a ring.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn ring(setting: &Setting) -> Result<Program> {
    let program = setting.program("ring-reduce-scatter", |n| Collective::reduce_scatter(n, 1))?;
    let n = setting.ranks;
    let ring = Ring::of_memory(&program)?;
    let scratch = scratch(&program, u64::from(n) - 1)?;
    for own in 0..n {
        let (rank, slots) = (program.rank(own)?, scratch[own as usize]);
        let there = scratch[((own + 1) % n) as usize];
        ring.begin(own)?;
        ring.next(own).put(there.chunk(0)?, rank.input().chunk(behind(own, 1, n))?, BLOCK)?;
        ring.send(own)?;
        for step in 1..n {
            ring.receive(own)?;
            let (mine, come) =
                (rank.input().chunk(behind(own, step + 1, n))?, slots.chunk(u64::from(step) - 1)?);
            let sum = if step < n - 1 { come } else { result(setting, &rank)? };
            rank.reduce(mine, &[come], BLOCK, sum, setting.op)?;
            if step < n - 1 {
                ring.next(own).put(there.chunk(step.into())?, sum, BLOCK)?;
                ring.send(own)?;
            }
        }
    }
    Ok(program)
}
