//! All-to-all: every rank gets its part of each input.

use super::Setting;
use super::channels::{BLOCK, Mesh, others, scratch, slot};
use crate::{Collective, DataSync, MemoryChannel, Program, Rank, Result};

/// The thread block that takes out what has come.
const TAKER: u32 = 1;

/// A rank's own part of its input is its own part of its output.
fn keep(setting: &Setting, rank: &Rank) -> Result<()> {
    let part = rank.id().into();
    match setting.inplace {
        true => Ok(()),
        false => rank.copy(rank.output().chunk(part)?, rank.input().chunk(part)?, BLOCK),
    }
}

/// Every rank writes each part of its input to its place in the receiver's output; not in place.
///
/// 1. When all have begun, a rank writes to all others.
/// 2. It tells them, and waits for them.
///
/// (n − 1)/n S bytes leave a rank, and there is no copy: the right one for large messages.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn direct(setting: &Setting) -> Result<Program> {
    let program = setting.program("direct-all-to-all", |n| Collective::all_to_all(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    for own in 0..n {
        let rank = program.rank(own)?;
        mesh.begin(own)?;
        for (peer, channel) in mesh.at(own) {
            let there = program.rank(peer)?.output().chunk(own.into())?;
            channel.put(there, rank.input().chunk(peer.into())?, BLOCK)?;
        }
        keep(setting, &rank)?;
        mesh.end(own)?;
    }
    Ok(program)
}

/// Pieces go into the others' scratch, from where a second thread block takes them out while the next ones come.
///
/// In each turn ([`Setting::unit_size`] bytes of each part):
///
/// 1. A rank's first block writes a piece of each part to the scratch of the rank where it belongs, tells that rank, waits for
///    the others' pieces, and releases a semaphore.
/// 2. Its second block acquires it and copies the pieces to the output: in place, where the pieces were that have left.
///
/// (n − 1)/n S bytes leave a rank. The right one for large messages in place, where [`direct`] would overwrite what has not
/// been sent.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn pipelined(setting: &Setting) -> Result<Program> {
    let program = setting.program("pipelined-all-to-all", |n| Collective::all_to_all(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let scratch = scratch(&program, u64::from(n) - 1)?;
    let come = |own: u32, peer: u32| scratch[own as usize].chunk(slot(own, peer, n));
    for own in 0..n {
        mesh.begin(own)?;
        keep(setting, &program.rank(own)?)?;
    }
    program.pipeline(setting.unit_size, 1, || {
        for own in 0..n {
            let (rank, ready) = (program.rank(own)?, program.semaphore(own, 0)?);
            for (peer, channel) in mesh.at(own) {
                channel.put(come(peer, own)?, rank.input().chunk(peer.into())?, BLOCK)?;
            }
            mesh.end(own)?;
            ready.release(BLOCK, DataSync::BEFORE)?;
            ready.acquire(TAKER, DataSync::AFTER)?;
            for peer in others(own, n) {
                rank.copy(setting.result(&rank).chunk(peer.into())?, come(own, peer)?, TAKER)?;
            }
        }
        Ok(())
    })?;
    Ok(program)
}

/// Every rank sends packets to all ranks, and unpacks what it receives.
///
/// One step without a signal, 2 (n − 1)/n S bytes from each rank, also in place: for small messages, where signals and the
/// fences before them cost more than to unpack. On H200s, the simulator says, [`direct`] is faster.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn packets(setting: &Setting) -> Result<Program> {
    let program = setting.packet_program("packet-all-to-all", |n| Collective::all_to_all(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let scratch = scratch(&program, u64::from(n) - 1)?;
    let come = |own: u32, peer: u32| scratch[own as usize].chunk(slot(own, peer, n));
    for own in 0..n {
        let rank = program.rank(own)?;
        for (peer, channel) in mesh.at(own) {
            channel.put_packets(come(peer, own)?, rank.input().chunk(peer.into())?, BLOCK)?;
        }
        keep(setting, &rank)?;
        for peer in others(own, n) {
            rank.unpack_packets(setting.result(&rank).chunk(peer.into())?, come(own, peer)?, BLOCK)?;
        }
    }
    Ok(program)
}
