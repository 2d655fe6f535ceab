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

/// Everybody puts its input into everybody's output.
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

/// In place: everybody reduces one part, and gives the result to all.
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

/// Packets, in two steps: parts to those who reduce them, results back, straight over the input. No signal anywhere, and
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
        ("group", group()),
        ("switch", switch(3)),
    ];
    plans.map(|(name, plan)| (name, plan.unwrap_or_else(|error| panic!("{name}: {error}")))).into()
}
