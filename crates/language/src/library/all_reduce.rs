//! All-reduce: every rank gets the reduction of all inputs.

use super::Setting;
use super::channels::{BLOCK, Mesh, Ring, behind, others, scratch, slot};
use crate::{BufferType, Collective, DataSync, MemoryChannel, PortChannel, Program, Result};

/// Every rank sends its whole input to all ranks as packets, and reduces what it receives.
///
/// 1. A rank sends its input to each other rank, which has a slot for every sender.
/// 2. It reduces all contributions in rank order, so that the bits are those of every other rank.
///
/// One step without a signal: the fastest for small messages; on 8 H200, the simulator says, up to 8 KiB with 8 instances.
/// 2 (n − 1) S bytes leave a rank.
/// Also called all-pairs, or one-stage as in TensorRT-LLM's custom all-reduce; packets are those of NCCL's LL protocol.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn one_shot(setting: &Setting) -> Result<Program> {
    let program =
        setting.packet_program("one-shot-all-reduce", |n| Collective::custom("allreduce", n, 1, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let scratch = scratch(&program, n.into())?;
    for own in 0..n {
        let (rank, slots) = (program.rank(own)?, scratch[own as usize]);
        let (mine, result) = (rank.input().chunk(0)?, setting.result(&rank).chunk(0)?);
        for (peer, channel) in mesh.at(own) {
            channel.put_packets(scratch[peer as usize].chunk(own.into())?, mine, BLOCK)?;
        }
        let first = match own {
            0 => mine,
            _ => {
                rank.copy_packets(slots.chunk(own.into())?, mine, BLOCK)?;
                rank.unpack_packets(result, slots.chunk(0)?, BLOCK)?;
                result
            }
        };
        let rest = (1..n.into()).map(|sender| slots.chunk(sender)).collect::<Result<Vec<_>>>()?;
        rank.reduce_packets(first, &rest, BLOCK, result, setting.op)?;
    }
    Ok(program)
}

/// Each rank reduces its part of all inputs and sends the result to all ranks, all as packets.
///
/// 1. A rank sends each other rank that one's part of its input.
/// 2. It reduces what comes with its own, beginning with its own, and sends the result to all others.
/// 3. It unpacks the others' results.
///
/// Two steps without a signal, 4 (n − 1)/n S bytes from each rank: for messages too large for [`one_shot`], where signals
/// and the fences before them cost more than twice the bytes do. On H200s, the simulator says, [`two_shot`] is faster.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn packet_two_shot(setting: &Setting) -> Result<Program> {
    let program = setting.packet_program("packet-all-reduce", |n| Collective::all_reduce(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let scratch = scratch(&program, 2 * (u64::from(n) - 1))?;
    // A slot for each other rank's contribution, and behind them one for its result.
    let given = |own: u32, peer: u32| scratch[own as usize].chunk(slot(own, peer, n));
    let reduced = |own: u32, peer: u32| scratch[own as usize].chunk(u64::from(n) - 1 + slot(own, peer, n));
    for own in 0..n {
        let (rank, part) = (program.rank(own)?, own.into());
        let result = setting.result(&rank);
        for (peer, channel) in mesh.at(own) {
            channel.put_packets(given(peer, own)?, rank.input().chunk(peer.into())?, BLOCK)?;
        }
        let come = others(own, n).map(|peer| given(own, peer)).collect::<Result<Vec<_>>>()?;
        rank.reduce_packets(rank.input().chunk(part)?, &come, BLOCK, result.chunk(part)?, setting.op)?;
        for (peer, channel) in mesh.at(own) {
            channel.put_packets(reduced(peer, own)?, result.chunk(part)?, BLOCK)?;
        }
        for peer in others(own, n) {
            rank.unpack_packets(result.chunk(peer.into())?, reduced(own, peer)?, BLOCK)?;
        }
    }
    Ok(program)
}

/// Each rank reduces its part of all inputs and writes the result to all ranks.
///
/// 1. When all have begun, a rank reads its part of all inputs, reduces it, beginning with its own, and writes the result
///    to all outputs: one pass.
/// 2. It tells all others, and waits for them.
///
/// Every byte crosses a link twice, which is the least there can be: (n − 1)/n S read and as much written. The right one for
/// large messages wherever all ranks reach each other at full speed. A reduce-scatter and an all-gather in one; also called
/// two-stage.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn two_shot(setting: &Setting) -> Result<Program> {
    let program = setting.program("two-shot-all-reduce", |n| Collective::all_reduce(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    for own in 0..n {
        let (rank, part) = (program.rank(own)?, own.into());
        let (mine, result) = (rank.input().chunk(part)?, setting.result(&rank).chunk(part)?);
        mesh.begin(own)?;
        for (peer, channel) in mesh.at(own) {
            channel.reduce(mine, &[program.rank(peer)?.input().chunk(part)?], BLOCK, result, setting.op)?;
        }
        for (peer, channel) in mesh.at(own) {
            channel.put(setting.result(&program.rank(peer)?).chunk(part)?, result, BLOCK)?;
        }
        mesh.end(own)?;
    }
    Ok(program)
}

/// Each rank gets its part of all inputs, reduces it in the order of the ranks, and writes the result to all ranks.
///
/// 1. When all have begun, a rank writes each other rank that one's part of its input, into a slot for every sender but itself.
/// 2. When all parts have come, it reduces them, its own among them in its place, and writes the result to all outputs.
/// 3. It tells all others, and waits for them.
///
/// As many bytes as [`two_shot`] moves, all of them written: a write crosses a link once, where a read waits for its way back. The order of the
/// sums is that of Antiphon's own all-reduce, so the bits are, too.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn push_two_shot(setting: &Setting) -> Result<Program> {
    let program = setting.program("push-two-shot-all-reduce", |n| Collective::all_reduce(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let scratch = scratch(&program, u64::from(n) - 1)?;
    let given = |own: u32, peer: u32| scratch[own as usize].chunk(slot(own, peer, n));
    for own in 0..n {
        let (rank, part) = (program.rank(own)?, own.into());
        let (input, result) = (rank.input(), setting.result(&rank).chunk(part)?);
        mesh.begin(own)?;
        for (peer, channel) in mesh.at(own) {
            channel.put(given(peer, own)?, input.chunk(peer.into())?, BLOCK)?;
        }
        mesh.end(own)?;
        let contribution = |sender: u32| match sender == own {
            true => input.chunk(part),
            false => given(own, sender),
        };
        let rest = (1..n).map(contribution).collect::<Result<Vec<_>>>()?;
        rank.reduce(contribution(0)?, &rest, BLOCK, result, setting.op)?;
        for (peer, channel) in mesh.at(own) {
            channel.put(setting.result(&program.rank(peer)?).chunk(part)?, result, BLOCK)?;
        }
        mesh.end(own)?;
    }
    Ok(program)
}

/// Parts travel around a ring twice: first they are reduced, then they are distributed.
///
/// 1. Part r sets out from rank r. Each rank adds its own to what comes and sends it to the next one, for n − 1 steps; then
///    rank r − 1 has all of part r.
/// 2. From there the result goes round for n − 1 steps more.
///
/// 2 (n − 1)/n S bytes leave a rank, all to its one neighbour: for large messages where links are a ring, or where links to
/// several ranks share one path. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
/// workstations" (2009).
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn ring(setting: &Setting) -> Result<Program> {
    let program = setting.program("ring-all-reduce", |n| Collective::all_reduce(n, 1))?;
    let n = setting.ranks;
    let ring = Ring::of_memory(&program)?;
    let scratch = scratch(&program, u64::from(n) - 1)?;
    for own in 0..n {
        let (rank, next) = (program.rank(own)?, (own + 1) % n);
        let (input, result) = (rank.input(), setting.result(&rank));
        let (slots, there) = (scratch[own as usize], scratch[next as usize]);
        let handed = setting.result(&program.rank(next)?);
        ring.next(own).put(there.chunk(0)?, input.chunk(own.into())?, BLOCK)?;
        ring.send(own)?;
        for step in 1..n {
            ring.receive(own)?;
            let part = behind(own, step, n);
            let (come, sum) = (slots.chunk(u64::from(step) - 1)?, result.chunk(part)?);
            rank.reduce(input.chunk(part)?, &[come], BLOCK, sum, setting.op)?;
            let to = if step < n - 1 { there.chunk(step.into())? } else { handed.chunk(part)? };
            ring.next(own).put(to, sum, BLOCK)?;
            ring.send(own)?;
        }
        for step in 0..n - 1 {
            ring.receive(own)?;
            let part = behind(own, step, n);
            if step < n - 2 {
                ring.next(own).put(handed.chunk(part)?, result.chunk(part)?, BLOCK)?;
                ring.send(own)?;
            }
        }
    }
    Ok(program)
}

/// Inside each node, between nodes, and inside each node again.
///
/// The message has a part for each of the k ranks of a node.
///
/// 1. A rank reads its part of all inputs of its node and reduces it.
/// 2. Through ports it sends what it has to the ranks of the same place in the other m − 1 nodes, and reduces what comes from
///    them with its own, in the order of nodes.
/// 3. It writes the result to all outputs of its node.
///
/// A rank reads and writes (k − 1)/k S bytes each inside its node; (m − 1)/k S bytes go through its network
/// card. The right one for few nodes, with a card for each GPU.
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn hierarchical(setting: &Setting) -> Result<Program> {
    let program = setting.program("hierarchical-all-reduce", |n| {
        let chunks = (n / setting.nodes).into();
        Collective::custom("allreduce", n, chunks, chunks)
    })?;
    let (n, k) = (setting.ranks, setting.ranks / setting.nodes);
    let node = Mesh::<MemoryChannel>::of(&program, |own, peer| own / k == peer / k)?;
    let rail = Mesh::<PortChannel>::of(&program, |own, peer| own % k == peer % k)?;
    let scratch = scratch(&program, setting.nodes.into())?;
    for own in 0..n {
        let (rank, part, slots) = (program.rank(own)?, u64::from(own % k), scratch[own as usize]);
        let from = u64::from(own / k);
        let (mine, sum) = (rank.input().chunk(part)?, slots.chunk(from)?);
        rail.at(own).try_for_each(|(_, port)| port.signal(BLOCK, DataSync::NONE))?;
        node.begin(own)?;
        if k == 1 {
            rank.copy(sum, mine, BLOCK)?;
        }
        for (peer, channel) in node.at(own) {
            channel.reduce(mine, &[program.rank(peer)?.input().chunk(part)?], BLOCK, sum, setting.op)?;
        }
        // The others have begun, so their slots are free.
        rail.at(own).try_for_each(|(_, port)| port.wait(BLOCK, DataSync::BOTH))?;
        for (peer, port) in rail.at(own) {
            port.put_with_signal(scratch[peer as usize].chunk(from)?, sum, BLOCK)?;
        }
        rail.at(own).try_for_each(|(_, port)| port.wait(BLOCK, DataSync::AFTER))?;
        let sums = (1..setting.nodes.into()).map(|node| slots.chunk(node)).collect::<Result<Vec<_>>>()?;
        let result = setting.result(&rank).chunk(part)?;
        rank.reduce(slots.chunk(0)?, &sums, BLOCK, result, setting.op)?;
        for (peer, channel) in node.at(own) {
            channel.put(setting.result(&program.rank(peer)?).chunk(part)?, result, BLOCK)?;
        }
        node.end(own)?;
    }
    Ok(program)
}

/// The switch reduces each rank's part and stores it everywhere.
///
/// 1. When all have begun, a rank has the switch reduce its part of all inputs, and store the result in all outputs; in
///    place that is one operation.
/// 2. It tells all others, and waits for them.
///
/// About S bytes leave a rank, half of [`two_shot`]'s: the fastest for large messages where the switch can reduce (NVLink
/// SHARP, `multimem`). Where it cannot, executors load and store for it, and it is [`two_shot`].
///
/// # Errors
/// As [`Algorithm::program`](super::Algorithm::program).
pub fn switch(setting: &Setting) -> Result<Program> {
    let program = setting.program("switch-all-reduce", |n| Collective::all_reduce(n, 1))?;
    let n = setting.ranks;
    let mesh = Mesh::<MemoryChannel>::all(&program)?;
    let everybody: Vec<u32> = (0..n).collect();
    let inputs = program.switch_channel(&everybody, BufferType::Input)?;
    let outputs = match setting.inplace {
        true => inputs.clone(),
        false => program.switch_channel(&everybody, BufferType::Output)?,
    };
    for own in 0..n {
        let (rank, part) = (program.rank(own)?, u64::from(own));
        let result = setting.result(&rank).chunk(part)?;
        mesh.begin(own)?;
        inputs.at_rank(own)?.reduce(result, part..part + 1, BLOCK, setting.op)?;
        if !setting.inplace {
            rank.barrier(&[BLOCK])?;
        }
        outputs.at_rank(own)?.broadcast(result, part..part + 1, BLOCK)?;
        mesh.end(own)?;
    }
    Ok(program)
}
