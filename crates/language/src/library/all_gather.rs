//! All-gather: every rank gets all inputs, one behind the other.

use super::Setting;
use super::channels::{BLOCK, Mesh, Ring, behind};
use crate::{Chunk, Collective, MemoryChannel, Program, Rank, Result};

/// The chunks that a rank gives; in place, its part of the output.
fn given(setting: &Setting, rank: &Rank) -> Result<Chunk> {
    if setting.inplace { rank.output().chunk(rank.id().into()) } else { rank.input().chunk(0) }
}

/// A rank's input becomes its part of its own output.
fn keep(setting: &Setting, rank: &Rank) -> Result<()> {
    match setting.inplace {
        true => Ok(()),
        false => rank.copy(rank.output().chunk(rank.id().into())?, rank.input().chunk(0)?, BLOCK),
    }
}

/// Every rank writes its input to the outputs of all ranks.
///
/// 1. When all have begun, a rank writes to all others.
/// 2. It tells them, and waits for them.
///
/// (n − 1)/n S bytes leave a rank. The right one where all ranks reach each other directly.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn direct(setting: &Setting) -> Result<Program> {
    let program = setting.program("direct-all-gather", |n| Collective::all_gather(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    for own in 0..n {
        let rank = program.rank(own)?;
        mesh.begin(own)?;
        for (peer, channel) in mesh.at(own) {
            let there = program.rank(peer)?.output().chunk(own.into())?;
            channel.put(there, given(setting, &rank)?, BLOCK)?;
        }
        keep(setting, &rank)?;
        mesh.end(own)?;
    }
    Ok(program)
}

/// Inputs go round a ring.
///
/// A rank writes its input to the next one's output, and then, for n − 2 steps, what has come from the one before.
/// (n − 1)/n S bytes leave a rank, all to its neighbour: for large messages where links are a ring.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn ring(setting: &Setting) -> Result<Program> {
    let program = setting.program("ring-all-gather", |n| Collective::all_gather(n, 1))?;
    let n = setting.ranks;
    let ring = Ring::of_memory(&program)?;
    for own in 0..n {
        let (rank, there) = (program.rank(own)?, program.rank((own + 1) % n)?.output());
        ring.begin(own)?;
        ring.next(own).put(there.chunk(own.into())?, given(setting, &rank)?, BLOCK)?;
        ring.send(own)?;
        keep(setting, &rank)?;
        for step in 1..n {
            ring.receive(own)?;
            let part = behind(own, step, n);
            if step < n - 1 {
                ring.next(own).put(there.chunk(part)?, rank.output().chunk(part)?, BLOCK)?;
                ring.send(own)?;
            }
        }
    }
    Ok(program)
}
