//! Small algorithms that together use every operation.
#![allow(dead_code, unused_imports)] // each test file uses its part

mod in_turns;

use antiphon_language::{
    Collective, DataSync, MemoryChannel, Options, Plan, PortChannel, Program, Protocol, Rank, ReduceOp,
    Result, ThreadBlockGroup,
};

pub use in_turns::in_turns;

const BOTH: DataSync = DataSync::BOTH;

/// Every ordered pair of ranks.
fn pairs(ranks: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..ranks)
        .flat_map(move |rank| (0..ranks).filter(move |&peer| peer != rank).map(move |peer| (rank, peer)))
}

/// Memory channels between all ranks: `[rank][peer]`.
struct Mesh<'p>(Vec<Vec<Option<MemoryChannel<'p>>>>);

impl<'p> Mesh<'p> {
    fn new(program: &'p Program) -> Result<Self> {
        let ranks = program.num_ranks();
        let mut mesh: Vec<Vec<_>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
        for (rank, peer) in pairs(ranks) {
            mesh[rank as usize][peer as usize] = Some(program.memory_channel(peer, rank)?);
        }
        Ok(Mesh(mesh))
    }

    fn at(&self, rank: u32, peer: u32) -> &MemoryChannel<'p> {
        self.0[rank as usize][peer as usize].as_ref().expect("two ranks")
    }

    /// Ranks have begun, and nothing is said of what they did before.
    fn begin(&self, tb: u32) -> Result<()> {
        for (rank, peer) in pairs(self.0.len() as u32) {
            self.at(rank, peer).relaxed_signal(tb, DataSync::NONE)?;
        }
        for (rank, peer) in pairs(self.0.len() as u32) {
            self.at(rank, peer).relaxed_wait(tb, BOTH)?;
        }
        Ok(())
    }

    /// Ranks meet: what each did before is done before any goes on.
    fn meet(&self, tb: u32) -> Result<()> {
        for (rank, peer) in pairs(self.0.len() as u32) {
            self.at(rank, peer).signal(tb, BOTH)?;
        }
        for (rank, peer) in pairs(self.0.len() as u32) {
            self.at(rank, peer).wait(tb, BOTH)?;
        }
        Ok(())
    }
}

/// Each rank reduces its chunk of every rank's input and puts it into every rank's output (`rres`), or input if in place.
pub fn two_shot(ranks: u32, op: ReduceOp, inplace: bool) -> Result<Plan> {
    let collective = Collective::all_reduce(ranks, 1).inplace(inplace);
    let program = Program::new("two_shot", &collective, Options::default());
    let mesh = Mesh::new(&program)?;
    let result = |rank: &Rank| if inplace { rank.input() } else { rank.output() };
    mesh.meet(0)?;
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let (src, dst) = (rank.input().chunk(own.into())?, result(&rank).chunk(own.into())?);
        for peer in (0..ranks).filter(|&peer| peer != own) {
            let there = program.rank(peer)?.input().chunk(own.into())?;
            mesh.at(own, peer).reduce(src, &[there], 0, dst, op)?;
        }
        for peer in (0..ranks).filter(|&peer| peer != own) {
            mesh.at(own, peer).put(result(&program.rank(peer)?).chunk(own.into())?, dst, 0)?;
        }
    }
    mesh.meet(0)?;
    program.plan()
}

/// Every rank sends packets to every rank and reduces what comes (`ppkt`, `repkt`); calls take turns between two scratches.
pub fn packets(ranks: u32, op: ReduceOp, reuse_resources: bool) -> Result<Plan> {
    let options = Options {
        protocol: Protocol::LL,
        use_double_scratch_buffer: true,
        reuse_resources,
        ..Options::default()
    };
    let program = Program::new("packets", &Collective::all_reduce(ranks, 1), options);
    let mesh = Mesh::new(&program)?;
    let n = u64::from(ranks);
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(n * n)).collect::<Result<_>>()?;
    for (own, peer) in pairs(ranks) {
        let (rank, place) = (program.rank(own)?, u64::from(own) * n);
        let there = scratch[peer as usize].chunks(place..place + n)?;
        mesh.at(own, peer).put_packets(there, rank.input().chunks(..n)?, peer % 2)?;
    }
    for own in 0..ranks {
        let rank = program.rank(own)?;
        let others = (0..ranks).filter(|&peer| peer != own).map(u64::from);
        let come = others.map(|peer| scratch[own as usize].chunks(peer * n..peer * n + n));
        let come = come.collect::<Result<Vec<_>>>()?;
        rank.reduce_packets(rank.input().chunks(..n)?, &come, 2, rank.output().chunks(..n)?, op)?;
    }
    program.plan()
}

/// How a rank hands on what it has reduced from packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Relay {
    /// Packed and kept, and sent on at once (`recspkt`).
    Together,
    /// Sent on at once (`respkt`).
    Sent,
    /// Packed and kept (`recpkt`), and sent on by another thread block (`rppkt`).
    Apart,
}

/// Two-shot with packets both ways; what comes is unpacked (`upkt`).
pub fn packets_two_shot(ranks: u32, op: ReduceOp, relay: Relay) -> Result<Plan> {
    let options = Options { protocol: Protocol::LL, ..Options::default() };
    let program = Program::new("packets_two_shot", &Collective::all_reduce(ranks, 1), options);
    let mesh = Mesh::new(&program)?;
    let n = u64::from(ranks);
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(2 * n)).collect::<Result<_>>()?;
    for (own, peer) in pairs(ranks) {
        let there = scratch[peer as usize].chunk(own.into())?;
        mesh.at(own, peer).put_packets(there, program.rank(own)?.input().chunk(peer.into())?, 0)?;
    }
    for own in 0..ranks {
        let (rank, mine, place) = (program.rank(own)?, scratch[own as usize], u64::from(own));
        let peers = || (0..ranks).filter(move |&peer| peer != own);
        let come = peers().map(|peer| mine.chunk(peer.into())).collect::<Result<Vec<_>>>()?;
        let result = rank.output().chunk(place)?;
        rank.reduce_packets(rank.input().chunk(place)?, &come, 0, result, op)?;
        if relay != Relay::Sent {
            rank.copy_packets(mine.chunk(n + place)?, result, 0)?;
        }
        for peer in peers() {
            let (there, channel) = (scratch[peer as usize].chunk(n + place)?, mesh.at(own, peer));
            match relay {
                Relay::Together => channel.read_put_packets(there, mine.chunk(n + place)?, 0)?,
                Relay::Apart => channel.read_put_packets(there, mine.chunk(n + place)?, 2)?,
                Relay::Sent => channel.put_packets(there, result, 0)?,
            }
        }
        for peer in peers() {
            rank.unpack_packets(rank.output().chunk(peer.into())?, mine.chunk(n + u64::from(peer))?, 1)?;
        }
    }
    program.plan()
}

/// Each rank's port to the next one, and that one's port back. With two ranks, the first channel in each direction is rank 0's, and the
/// second is rank 1's.
fn there_and_back(program: &Program, ranks: u32) -> Result<(Vec<PortChannel<'_>>, Vec<PortChannel<'_>>)> {
    let next = |rank: u32| (rank + 1) % ranks;
    let channels =
        |rank| Ok((program.port_channel(next(rank), rank)?, program.port_channel(rank, next(rank))?));
    (0..ranks).map(channels).collect::<Result<Vec<_>>>().map(|all| all.into_iter().unzip())
}

/// A ring through ports: each hop puts a chunk on, with a signal and a flush (`pwsf`, `pws`, `put`, `flush`).
pub fn ring_all_gather(ranks: u32) -> Result<Plan> {
    let program = Program::new("ring_all_gather", &Collective::all_gather(ranks, 2), Options::default());
    let next = |rank: u32| (rank + 1) % ranks;
    let (ports, back) = there_and_back(&program, ranks)?;
    for own in 0..ranks {
        let (rank, place) = (program.rank(own)?, u64::from(own) * 2);
        rank.copy(rank.output().chunks(place..place + 2)?, rank.input().chunks(..2)?, 0)?;
        // The next one's output may be written from now on.
        back[((own + ranks - 1) % ranks) as usize].signal(0, BOTH)?;
        ports[own as usize].wait(0, BOTH)?;
    }
    for step in 0..ranks - 1 {
        for own in 0..ranks {
            let sent = u64::from((own + ranks - step) % ranks) * 2;
            let (here, there) = (program.rank(own)?.output(), program.rank(next(own))?.output());
            let port = &ports[own as usize];
            port.put(there.chunk(sent)?, here.chunk(sent)?, 0)?;
            match step % 2 {
                0 => port.put_with_signal_and_flush(there.chunk(sent + 1)?, here.chunk(sent + 1)?, 0)?,
                _ => port.put_with_signal(there.chunk(sent + 1)?, here.chunk(sent + 1)?, 0)?,
            }
            port.flush(0, BOTH)?;
        }
        for own in 0..ranks {
            back[((own + ranks - 1) % ranks) as usize].wait(0, BOTH)?;
        }
    }
    program.plan()
}

/// Every rank puts its input into the next one's output through a port, 16 bytes in each turn of a pipeline.
pub fn put_in_turns(ranks: u32) -> Result<Plan> {
    let program = Program::new("put_in_turns", &Collective::send_recv(ranks, 1), Options::default());
    let next = |rank: u32| (rank + 1) % ranks;
    let (ports, back) = there_and_back(&program, ranks)?;
    for own in 0..ranks as usize {
        back[(own + ranks as usize - 1) % ranks as usize].signal(0, DataSync::NONE)?;
        ports[own].wait(0, DataSync::AFTER)?;
    }
    program.pipeline(16, 1, || {
        for own in 0..ranks {
            let there = program.rank(next(own))?.output().chunk(0)?;
            ports[own as usize].put(there, program.rank(own)?.input().chunk(0)?, 0)?;
        }
        Ok(())
    })?;
    for own in 0..ranks as usize {
        ports[own].signal(0, DataSync::BEFORE)?;
        back[(own + ranks as usize - 1) % ranks as usize].wait(0, DataSync::AFTER)?;
    }
    program.plan()
}

/// Every rank fetches every rank's input (`get`), several thread blocks each a share of it.
pub fn get_all_gather(ranks: u32, blocks: u32) -> Result<Plan> {
    let program = Program::new("get_all_gather", &Collective::all_gather(ranks, 1), Options::default());
    let mesh = Mesh::new(&program)?;
    let group = ThreadBlockGroup::new((0..blocks).collect::<Vec<_>>())?;
    mesh.meet(0)?;
    for own in 0..ranks {
        let rank = program.rank(own)?;
        rank.barrier(group.blocks())?;
        rank.copy(rank.output().chunk(own.into())?, rank.input().chunk(0)?, &group)?;
        for peer in (0..ranks).filter(|&peer| peer != own) {
            let there = program.rank(peer)?.input().chunk(0)?;
            mesh.at(own, peer).get(rank.output().chunk(peer.into())?, there, &group)?;
        }
        rank.barrier(group.blocks())?;
    }
    mesh.meet(0)?;
    program.plan()
}

/// Every rank fetches every rank's input as soon as all have come; they meet behind it, so that no input changes before.
pub fn get_at_once(ranks: u32) -> Result<Plan> {
    let program = Program::new("get_at_once", &Collective::all_gather(ranks, 1), Options::default());
    let mesh = Mesh::new(&program)?;
    for own in 0..ranks {
        let rank = program.rank(own)?;
        rank.copy(rank.output().chunk(own.into())?, rank.input().chunk(0)?, 0)?;
        for peer in (0..ranks).filter(|&peer| peer != own) {
            let there = program.rank(peer)?.input().chunk(0)?;
            mesh.at(own, peer).get(rank.output().chunk(peer.into())?, there, 0)?;
        }
    }
    mesh.meet(0)?;
    program.plan()
}

/// All-gather in place: the input is a part of the output.
pub fn in_place_all_gather(ranks: u32) -> Result<Plan> {
    let collective = Collective::all_gather(ranks, 1).inplace(true);
    let program = Program::new("in_place_all_gather", &collective, Options::default());
    let mesh = Mesh::new(&program)?;
    mesh.begin(0)?;
    for (own, peer) in pairs(ranks) {
        let place = u64::from(own);
        let there = program.rank(peer)?.output().chunk(place)?;
        mesh.at(own, peer).put(there, program.rank(own)?.output().chunk(place)?, 0)?;
    }
    mesh.meet(0)?;
    program.plan()
}

/// Reduce-scatter in place: the output is a part of the input.
pub fn in_place_reduce_scatter(ranks: u32, op: ReduceOp) -> Result<Plan> {
    let collective = Collective::reduce_scatter(ranks, 1).inplace(true);
    let program = Program::new("in_place_reduce_scatter", &collective, Options::default());
    let mesh = Mesh::new(&program)?;
    mesh.meet(0)?;
    for (own, peer) in pairs(ranks) {
        let mine = program.rank(own)?.input().chunk(own.into())?;
        mesh.at(own, peer).reduce(mine, &[program.rank(peer)?.input().chunk(own.into())?], 0, mine, op)?;
    }
    mesh.meet(0)?;
    program.plan()
}

/// One block sends pieces into scratch, another takes them out, in step by semaphores inside a pipeline.
pub fn pipelined_all_to_all(ranks: u32, unit_size: u64) -> Result<Plan> {
    let program = Program::new("pipelined_all_to_all", &Collective::all_to_all(ranks, 1), Options::default());
    let mesh = Mesh::new(&program)?;
    let n = u64::from(ranks);
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(n)).collect::<Result<_>>()?;
    let semaphores = (0..ranks).map(|rank| program.semaphore(rank, 0)).collect::<Result<Vec<_>>>()?;
    mesh.meet(0)?;
    for own in 0..ranks {
        let (rank, place) = (program.rank(own)?, u64::from(own));
        rank.copy(rank.output().chunk(place)?, rank.input().chunk(place)?, 2)?;
    }
    program.pipeline(unit_size, 1, || {
        for (own, peer) in pairs(ranks) {
            let (from, to) = (program.rank(own)?.input(), scratch[peer as usize]);
            mesh.at(own, peer).put(to.chunk(own.into())?, from.chunk(peer.into())?, 0)?;
            mesh.at(own, peer).signal(0, BOTH)?;
        }
        for (own, peer) in pairs(ranks) {
            mesh.at(own, peer).wait(0, BOTH)?;
        }
        for own in 0..ranks {
            semaphores[own as usize].release(0, BOTH)?;
            semaphores[own as usize].acquire(1, BOTH)?;
        }
        for (own, peer) in pairs(ranks) {
            let rank = program.rank(own)?;
            let come = scratch[own as usize].chunk(peer.into())?;
            rank.copy(rank.output().chunk(peer.into())?, come, 1)?;
        }
        Ok(())
    })?;
    program.plan()
}

/// The switch reduces each rank's chunk and stores it everywhere (`glres`), or in two operations (`glre`, `gstore`).
pub fn switch_all_reduce(ranks: u32, op: ReduceOp, fused: bool) -> Result<Plan> {
    let options = Options { instr_fusion: fused, ..Options::default() };
    let collective = Collective::all_reduce(ranks, 1).inplace(true);
    let program = Program::new("switch_all_reduce", &collective, options);
    let mesh = Mesh::new(&program)?;
    let everybody: Vec<u32> = (0..ranks).collect();
    let switch = program.switch_channel(&everybody, antiphon_language::BufferType::Input)?;
    mesh.meet(0)?;
    for own in 0..ranks {
        let (view, place) = (switch.at_rank(own)?, u64::from(own));
        let mine = program.rank(own)?.input().chunk(place)?;
        view.reduce(mine, place..place + 1, 0, op)?;
        if !fused {
            program.rank(own)?.barrier(&[0])?;
        }
        view.broadcast(mine, place..place + 1, 0)?;
    }
    mesh.meet(0)?;
    program.plan()
}

/// Each rank packs its input, and the switch hands the packets to every rank (`cpkt`, `gstorepkt`, `upkt`).
pub fn switch_packets(ranks: u32) -> Result<Plan> {
    let options = Options { protocol: Protocol::LL, ..Options::default() };
    let program = Program::new("switch_packets", &Collective::all_gather(ranks, 1), options);
    let n = u64::from(ranks);
    let scratch: Vec<_> = (0..ranks).map(|rank| program.rank(rank)?.scratch(2 * n)).collect::<Result<_>>()?;
    let everybody: Vec<u32> = (0..ranks).collect();
    let switch = program.switch_channel(&everybody, antiphon_language::BufferType::Scratch)?;
    for own in 0..ranks {
        let (rank, place, mine) = (program.rank(own)?, u64::from(own), scratch[own as usize]);
        rank.copy_packets(mine.chunk(place)?, rank.input().chunk(0)?, 0)?;
        switch.at_rank(own)?.broadcast_packets(mine.chunk(place)?, n + place..n + place + 1, 0)?;
        rank.unpack_packets(rank.output().chunks(..n)?, mine.chunks(n..2 * n)?, 1)?;
    }
    program.plan()
}

/// Each rank reduces parts of its own input, shared by a group of thread blocks (`re`); even ranks send the result
/// (`res`).
pub fn local_reduce(ranks: u32, op: ReduceOp) -> Result<Plan> {
    let program = Program::new("local_reduce", &Collective::custom("test", ranks, 3, 2), Options::default());
    let mesh = Mesh::new(&program)?;
    let group = ThreadBlockGroup::new([0, 1, 2])?;
    mesh.meet(0)?;
    for own in 0..ranks {
        let (rank, peer) = (program.rank(own)?, (own + 1) % ranks);
        rank.barrier(group.blocks())?;
        let input = rank.input();
        let mine = rank.output().chunk(0)?;
        rank.reduce(input.chunk(2)?, &[input.chunk(0)?, input.chunk(1)?], &group, mine, op)?;
        if own % 2 == 0 {
            mesh.at(own, peer).put(program.rank(peer)?.output().chunk(1)?, mine, &group)?;
        }
        rank.barrier(group.blocks())?;
    }
    mesh.meet(0)?;

    program.plan()
}

/// What turns of a pipeline do, told by a copy: the pipeline is about one chunk and its operations about two, of which
/// thread blocks of a group each have one, and packets all in every turn.
pub fn turns(ranks: u32) -> Result<Plan> {
    let options = Options { protocol: Protocol::LL, ..Options::default() };
    let program = Program::new("turns", &Collective::custom("test", ranks, 4, 4), options);
    let group = ThreadBlockGroup::new([0, 1])?;
    let scratch = (0..ranks).map(|rank| program.rank(rank)?.scratch(2)).collect::<Result<Vec<_>>>()?;
    program.pipeline(16, 1, || {
        for own in 0..ranks {
            let (rank, packets) = (program.rank(own)?, scratch[own as usize]);
            let (input, output) = (rank.input(), rank.output());
            rank.copy(output.chunks(..2)?, input.chunks(..2)?, &group)?;
            rank.copy_packets(packets.chunks(..)?, input.chunks(2..4)?, 2)?;
            rank.barrier(&[2])?;
            rank.unpack_packets(output.chunks(2..4)?, packets.chunks(..)?, 2)?;
            rank.barrier(&[2])?;
        }
        Ok(())
    })?;
    program.plan()
}

/// All-gather by packets that ranks pack and then put through ports as they are (`cpkt`, `ppkt`).
pub fn port_packets(ranks: u32) -> Result<Plan> {
    let options = Options { protocol: Protocol::LL, ..Options::default() };
    let program = Program::new("port_packets", &Collective::all_gather(ranks, 1), options);
    let n = u64::from(ranks);
    let scratch = (0..ranks).map(|rank| program.rank(rank)?.scratch(n)).collect::<Result<Vec<_>>>()?;
    for own in 0..ranks {
        let (rank, place) = (program.rank(own)?, u64::from(own));
        rank.copy_packets(scratch[own as usize].chunk(place)?, rank.input().chunk(0)?, 0)?;
        rank.barrier(&[0])?;
    }
    for (own, peer) in pairs(ranks) {
        let (port, place) = (program.port_channel(peer, own)?, u64::from(own));
        port.put_packets(scratch[peer as usize].chunk(place)?, scratch[own as usize].chunk(place)?, 0)?;
        port.flush(0, BOTH)?;
    }
    for own in 0..ranks {
        let rank = program.rank(own)?;
        rank.unpack_packets(rank.output().chunks(..n)?, scratch[own as usize].chunks(..n)?, 1)?;
    }
    program.plan()
}

/// One rank, two thread blocks: packets, a reduction, semaphores in a pipeline, a barrier.
pub fn alone() -> Result<Plan> {
    let program = Program::new("alone", &Collective::custom("test", 1, 3, 2), Options::default());
    let (rank, ready) = (program.rank(0)?, program.semaphore(0, 0)?);
    let (input, output, scratch) = (rank.input(), rank.output(), rank.scratch(2)?);
    rank.copy_packets(scratch.chunk(0)?, input.chunk(0)?, 0)?;
    rank.reduce_packets(input.chunk(1)?, &[scratch.chunk(0)?], 1, output.chunk(0)?, ReduceOp::Sum)?;
    program.pipeline(48, 1, || {
        rank.copy(scratch.chunk(1)?, input.chunk(2)?, 0)?;
        ready.release(0, BOTH)?;
        ready.acquire(1, BOTH)?;
        rank.copy(output.chunk(1)?, scratch.chunk(1)?, 1)
    })?;
    rank.barrier(&[0, 1])?;
    rank.reduce(output.chunk(1)?, &[output.chunk(0)?], 0, output.chunk(1)?, ReduceOp::Max)?;
    program.plan()
}

/// Plans that together have every operation.
pub fn all(ranks: u32, op: ReduceOp) -> Vec<Plan> {
    let plans = [
        two_shot(ranks, op, false),
        two_shot(ranks, op, true),
        packets(ranks, op, false),
        packets(ranks, op, true),
        packets_two_shot(ranks, op, Relay::Together),
        packets_two_shot(ranks, op, Relay::Sent),
        packets_two_shot(ranks, op, Relay::Apart),
        ring_all_gather(ranks),
        get_all_gather(ranks, 3),
        in_place_all_gather(ranks),
        in_place_reduce_scatter(ranks, op),
        pipelined_all_to_all(ranks, 48),
        switch_all_reduce(ranks, op, true),
        switch_all_reduce(ranks, op, false),
        switch_packets(ranks),
        local_reduce(ranks, op),
        turns(ranks),
        port_packets(ranks),
    ];
    plans.into_iter().map(Result::unwrap).collect()
}
