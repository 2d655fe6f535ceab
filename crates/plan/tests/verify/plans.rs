//! Right plans of every kind.

use antiphon_language::{
    BufferType, Collective, DataSync, MemoryChannel, Options, Plan, Program, Protocol, ReduceOp, Result,
    ThreadBlockGroup,
};

const NONE: DataSync = DataSync::NONE;
const BOTH: DataSync = DataSync::BOTH;
const BEFORE: DataSync = DataSync { before: true, after: false };
const AFTER: DataSync = DataSync { before: false, after: true };

fn peers(ranks: u32, own: u32) -> impl Iterator<Item = u32> {
    (1..ranks).map(move |step| (own + step) % ranks)
}

/// Memory channels from a rank to all others.
fn to_all(program: &Program, ranks: u32, own: u32) -> Result<Vec<(u32, MemoryChannel<'_>)>> {
    peers(ranks, own).map(|peer| Ok((peer, program.memory_channel(peer, own)?))).collect()
}

/// Every rank puts its input into every rank's output.
pub fn all_gather(ranks: u32) -> Result<Plan> {
    let program = Program::new("all_gather", &Collective::all_gather(ranks, 1), Options::default());
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let (input, part) = (rank.input().chunk(0)?, u64::from(own));
        rank.copy(rank.output().chunk(part)?, input, 0)?;
        let channels = to_all(&program, ranks, own)?;
        channels.iter().try_for_each(|(_, channel)| channel.relaxed_signal(0, NONE))?;
        channels.iter().try_for_each(|(_, channel)| channel.relaxed_wait(0, AFTER))?;
        for (peer, channel) in &channels {
            channel.put(program.rank(*peer)?.output().chunk(part)?, input, 0)?;
            channel.signal(0, BEFORE)?;
        }
        channels.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
    }
    program.plan()
}

/// In place: every rank reduces one part, and gives the result to all.
pub fn two_shot(ranks: u32, op: ReduceOp) -> Result<Plan> {
    let collective = Collective::all_reduce(ranks, 1).inplace(true);
    let program = Program::new("two_shot", &collective, Options::default());
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let part = rank.input().chunk(u64::from(own))?;
        let channels = to_all(&program, ranks, own)?;
        channels.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        channels.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
        for (peer, channel) in &channels {
            let there = program.rank(*peer)?.input().chunk(u64::from(own))?;
            channel.reduce(part, &[there], 0, part, op)?;
        }
        for (peer, channel) in &channels {
            channel.put(program.rank(*peer)?.input().chunk(u64::from(own))?, part, 0)?;
        }
        channels.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        channels.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
    }
    program.plan()
}

/// Packets, in two steps: parts to the ranks that reduce them, results back, straight over the input. No signal anywhere, and
/// nowhere do threads meet.
pub fn packets(ranks: u32) -> Result<Plan> {
    let collective = Collective::all_reduce(ranks, 1).inplace(true);
    let options = Options {
        protocol: Protocol::LL,
        auto_sync: false,
        use_double_scratch_buffer: true,
        ..Options::default()
    };
    let program = Program::new("packets", &collective, options);
    let all = u64::from(ranks);
    let scratch: Vec<_> =
        (0..ranks).map(|rank| program.rank(rank)?.scratch(2 * all)).collect::<Result<_>>()?;
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let input = |part: u32| rank.input().chunk(u64::from(part));
        let channels = to_all(&program, ranks, own)?;
        for (peer, channel) in &channels {
            channel.put_packets(scratch[*peer as usize].chunk(u64::from(own))?, input(*peer)?, 0)?;
        }
        let arrived: Vec<_> = peers(ranks, own)
            .map(|peer| scratch[own as usize].chunk(u64::from(peer)))
            .collect::<Result<_>>()?;
        rank.reduce_packets(input(own)?, &arrived, 0, input(own)?, ReduceOp::Sum)?;
        for (peer, channel) in &channels {
            channel.put_packets(scratch[*peer as usize].chunk(all + u64::from(own))?, input(own)?, 0)?;
        }
        for peer in peers(ranks, own) {
            rank.unpack_packets(input(peer)?, scratch[own as usize].chunk(all + u64::from(peer))?, 0)?;
        }
    }
    program.plan()
}

/// Around a ring through ports, each step with a signal behind its data, the last flushed.
pub fn port_ring(ranks: u32) -> Result<Plan> {
    let program = Program::new("port_ring", &Collective::all_gather(ranks, 1), Options::default());
    let next: Vec<_> =
        (0..ranks).map(|own| program.port_channel((own + 1) % ranks, own)).collect::<Result<_>>()?;
    // With two ranks, the one channel leads both ways.
    let previous: Vec<_> = match ranks {
        2 => Vec::new(),
        _ => (0..ranks)
            .map(|own| program.port_channel((own + ranks - 1) % ranks, own))
            .collect::<Result<_>>()?,
    };
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let (to, from) = (&next[own as usize], previous.get(own as usize).unwrap_or(&next[own as usize]));
        rank.copy(rank.output().chunk(u64::from(own))?, rank.input().chunk(0)?, 0)?;
        from.signal(0, BOTH)?;
        to.wait(0, BOTH)?;
        for step in 0..ranks - 1 {
            let part = u64::from((own + ranks - step) % ranks);
            let there = program.rank((own + 1) % ranks)?.output().chunk(part)?;
            to.put_with_signal(there, rank.output().chunk(part)?, 0)?;
            from.wait(0, AFTER)?;
        }
        to.flush(0, BOTH)?;
    }
    program.plan()
}

/// Three thread blocks, each a stage: in to scratch, reduce with the peer's, out to both; semaphores hand pieces on.
pub fn pipeline() -> Result<Plan> {
    let program = Program::new("pipeline", &Collective::all_reduce(2, 1), Options::default());
    let scratch: Vec<_> = (0..2).map(|rank| program.rank(rank)?.scratch(4)).collect::<Result<_>>()?;
    let channels: Vec<_> = (0..2).map(|own| program.memory_channel(1 - own, own)).collect::<Result<_>>()?;
    let staged: Vec<_> = (0..2).map(|rank| program.semaphore(rank, 0)).collect::<Result<_>>()?;
    let reduced: Vec<_> = (0..2).map(|rank| program.semaphore(rank, 0)).collect::<Result<_>>()?;
    program.pipeline(1 << 10, 2, || {
        for own in 0..2 {
            let (rank, at) = (program.rank(own)?, own as usize);
            let (here, there) = (scratch[at], scratch[1 - at]);
            rank.copy(here.chunks(0..2)?, rank.input().chunks(0..2)?, 0)?;
            staged[at].release(0, BOTH)?;
            staged[at].acquire(1, BOTH)?;
            channels[at].signal(1, BOTH)?;
            channels[at].wait(1, BOTH)?;
            channels[at].reduce(
                here.chunks(0..2)?,
                &[there.chunks(0..2)?],
                1,
                here.chunks(2..4)?,
                ReduceOp::Sum,
            )?;
            reduced[at].release(1, BOTH)?;
            reduced[at].acquire(2, BOTH)?;
            rank.copy(rank.output().chunks(0..2)?, here.chunks(2..4)?, 2)?;
        }
        Ok(())
    })?;
    program.plan()
}

/// A group of three thread blocks shares every copy; a barrier of theirs stands between two of them.
pub fn group() -> Result<Plan> {
    let program = Program::new("group", &Collective::all_gather(1, 2), Options::default());
    let (rank, group) = (program.rank(0)?, ThreadBlockGroup::new([0, 1, 2])?);
    let scratch = rank.scratch(2)?;
    rank.copy(scratch.chunks(..)?, rank.input().chunks(..)?, &group)?;
    rank.barrier(&[0, 1, 2])?;
    rank.copy(rank.output().chunks(..)?, scratch.chunks(..)?, 1)?;
    program.plan()
}

/// Each rank has the switch reduce one part of all inputs, and store it in all.
pub fn switch(ranks: u32) -> Result<Plan> {
    let collective = Collective::all_reduce(ranks, 1).inplace(true);
    let program = Program::new("switch", &collective, Options::default());
    let all: Vec<_> = (0..ranks).collect();
    let switch = program.switch_channel(&all, BufferType::Input)?;
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let part = u64::from(own);
        let channels = to_all(&program, ranks, own)?;
        channels.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        channels.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
        let chunk = rank.input().chunk(part)?;
        switch.at_rank(own)?.reduce(chunk, part..part + 1, 0, ReduceOp::Sum)?;
        switch.at_rank(own)?.broadcast(chunk, part..part + 1, 0)?;
        channels.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        channels.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
    }
    program.plan()
}

/// All-reduce over `nodes` nodes of `per_node` ranks, in place. Inside a node, each rank reduces its block of the chunks;
/// between nodes, the ranks with the same place reduce a chunk of their block each and give it to each other; then each gives
/// its block to its node.
pub fn hierarchical(nodes: u32, per_node: u32, instances: u32) -> Result<Plan> {
    let ranks = nodes * per_node;
    let collective = Collective::all_reduce(ranks, 1).inplace(true);
    let program = Program::new("hierarchical", &collective, Options { instances, ..Options::default() });
    let block = u64::from(nodes);
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(block)).collect::<Result<_>>()?;
    for own in 0..ranks {
        let (node, place) = (own / per_node, own % per_node);
        let rank = program.rank(own)?;
        let from = block * u64::from(place);
        let near_peers: Vec<_> = peers(per_node, place)
            .map(|peer| node * per_node + peer)
            .map(|peer| Ok((peer, program.memory_channel(peer, own)?)))
            .collect::<Result<_>>()?;
        let far_peers: Vec<_> = peers(nodes, node)
            .map(|node| (node, node * per_node + place))
            .map(|(node, peer)| Ok((node, peer, program.port_channel(peer, own)?)))
            .collect::<Result<_>>()?;

        near_peers.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        near_peers.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
        // One chunk at a time: instances divide chunks, not blocks of them.
        let chunk = |of: u32, node: u32| program.rank(of)?.input().chunk(from + u64::from(node));
        for node in 0..nodes {
            for (peer, channel) in &near_peers {
                channel.reduce(
                    chunk(own, node)?,
                    &[chunk(*peer, node)?],
                    0,
                    chunk(own, node)?,
                    ReduceOp::Sum,
                )?;
            }
        }
        rank.barrier(&[0])?;
        for (to, peer, channel) in &far_peers {
            let there = scratch[*peer as usize].chunk(u64::from(node))?;
            channel.put_with_signal(there, chunk(own, *to)?, 0)?;
        }
        far_peers.iter().try_for_each(|(_, _, channel)| channel.wait(0, AFTER))?;
        for (from, ..) in &far_peers {
            let arrived = scratch[own as usize].chunk(u64::from(*from))?;
            rank.reduce(chunk(own, node)?, &[arrived], 0, chunk(own, node)?, ReduceOp::Sum)?;
        }
        rank.barrier(&[0])?;
        for (_, peer, channel) in &far_peers {
            channel.put_with_signal(chunk(*peer, node)?, chunk(own, node)?, 0)?;
        }
        far_peers.iter().try_for_each(|(_, _, channel)| channel.wait(0, AFTER))?;

        for node in 0..nodes {
            for (peer, channel) in &near_peers {
                channel.put(chunk(*peer, node)?, chunk(own, node)?, 0)?;
            }
        }
        near_peers.iter().try_for_each(|(_, channel)| channel.signal(0, BEFORE))?;
        near_peers.iter().try_for_each(|(_, channel)| channel.wait(0, AFTER))?;
    }
    program.plan()
}

/// All of them, with their names.
pub fn all() -> Vec<(&'static str, Plan)> {
    let plans = [
        ("all_gather", all_gather(3)),
        ("two_shot", two_shot(3, ReduceOp::Sum)),
        ("two_shot max", two_shot(2, ReduceOp::Max)),
        ("packets", packets(3)),
        ("port_ring", port_ring(3)),
        ("port_ring of two", port_ring(2)),
        ("pipeline", pipeline()),
        ("hierarchical", hierarchical(2, 2, 2)),
        ("group", group()),
        ("stages", stages()),
        ("switch", switch(3)),
    ];
    plans.map(|(name, plan)| (name, plan.unwrap_or_else(|error| panic!("{name}: {error}")))).into()
}

/// Those that are small enough for every interleaving of theirs.
pub fn tiny() -> Vec<(&'static str, Plan)> {
    let plans = [
        ("all_gather", all_gather(2)),
        ("two_shot", two_shot(2, ReduceOp::Sum)),
        ("port_ring of two", port_ring(2)),
        ("port_ring", port_ring(3)),
        ("stages", stages()),
    ];
    plans.map(|(name, plan)| (name, plan.unwrap_or_else(|error| panic!("{name}: {error}")))).into()
}

/// Two thread blocks, of which one hands the other its place in scratch and gets it back, twice.
pub fn stages() -> Result<Plan> {
    let program = Program::new("stages", &Collective::all_gather(1, 2), Options::default());
    let rank = program.rank(0)?;
    let scratch = rank.scratch(1)?.chunk(0)?;
    let (full, empty) = (program.semaphore(0, 0)?, program.semaphore(0, 1)?);
    for part in 0..2 {
        empty.acquire(0, BOTH)?;
        rank.copy(scratch, rank.input().chunk(part)?, 0)?;
        full.release(0, BOTH)?;
        full.acquire(1, BOTH)?;
        rank.copy(rank.output().chunk(part)?, scratch, 1)?;
        empty.release(1, BOTH)?;
    }
    program.plan()
}

/// Every rank puts a plain chunk into the next rank's scratch, and then another as packets. The next rank copies the plain chunk to its
/// output once the packets are there; or, with a `signal` behind the plain chunk, once that has come too. If it `overwrites`, it stores a
/// chunk of its own in the place of the plain one instead.
pub fn announced(ranks: u32, signal: bool, overwrites: bool) -> Result<Plan> {
    let program = Program::new("announced", &Collective::all_gather(ranks, 2), Options::default());
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(6)).collect::<Result<_>>()?;
    let channel = |from: u32| program.memory_channel((from + 1) % ranks, from);
    let there: Vec<_> = (0..ranks).map(channel).collect::<Result<_>>()?;
    // Between two ranks it is the same channel.
    let back = |own: u32| program.memory_channel((own + ranks - 1) % ranks, own);
    let back: Vec<_> = if ranks == 2 { Vec::new() } else { (0..ranks).map(back).collect::<Result<_>>()? };
    let back = if ranks == 2 { &there } else { &back };
    for own in 0..ranks {
        let (next, rank) = (&scratch[((own + 1) % ranks) as usize], program.rank(own)?);
        there[own as usize].put(next.chunk(5)?, rank.input().chunk(0)?, 0)?;
        rank.barrier(&[0])?;
        if signal {
            there[own as usize].signal(0, BOTH)?;
        }
        there[own as usize].put_packets(next.chunk(0)?, rank.input().chunk(1)?, 0)?;
    }
    for own in 0..ranks {
        let (rank, mine) = (program.rank(own)?, &scratch[own as usize]);
        let from = u64::from((own + ranks - 1) % ranks) * 2;
        rank.unpack_packets(rank.output().chunk(from + 1)?, mine.chunk(0)?, 0)?;
        rank.barrier(&[0])?;
        if signal {
            back[own as usize].wait(0, BOTH)?;
        }
        match overwrites {
            true => rank.copy(mine.chunk(5)?, rank.input().chunk(0)?, 0)?,
            false => rank.copy(rank.output().chunk(from)?, mine.chunk(5)?, 0)?,
        }
    }
    program.plan()
}

/// Rank 0 puts one chunk after the other into the same place of rank 1's scratch, and rank 1 copies each to its output.
/// `full` says whether the signal and the wait that tell that a chunk is there are relaxed; `empty`, of those that tell
/// that it has been copied, if there are any.
pub fn hand_over(full: [bool; 2], empty: Option<[bool; 2]>) -> Result<Plan> {
    let program = Program::new("hand_over", &Collective::all_gather(2, 2), Options::default());
    let scratch = program.rank(1)?.scratch(1)?.chunk(0)?;
    let (there, back) = (program.memory_channel(1, 0)?, program.memory_channel(0, 1)?);
    let signal = |channel: &MemoryChannel<'_>, relaxed| match relaxed {
        true => channel.relaxed_signal(0, BOTH),
        false => channel.signal(0, BOTH),
    };
    let wait = |channel: &MemoryChannel<'_>, relaxed| match relaxed {
        true => channel.relaxed_wait(0, BOTH),
        false => channel.wait(0, BOTH),
    };
    for part in 0..2 {
        if let Some([_, relaxed]) = empty
            && part > 0
        {
            wait(&there, relaxed)?;
        }
        there.put(scratch, program.rank(0)?.input().chunk(part)?, 0)?;
        signal(&there, full[0])?;
        wait(&back, full[1])?;
        program.rank(1)?.copy(program.rank(1)?.output().chunk(part)?, scratch, 0)?;
        if let Some([relaxed, _]) = empty
            && part == 0
        {
            signal(&back, relaxed)?;
        }
    }
    program.plan()
}
