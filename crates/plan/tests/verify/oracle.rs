//! A model checker for tiny plans, written from the memory model and not from the verifier: it tries every interleaving.
//!
//! Once as one thread per block would run: operations in order, each at once; nothing may get stuck. Then as many threads
//! would: between two meetings of its threads a block has its operations begin in any order, and each is under way for a
//! while; no two that conflict may be under way together, and none may touch a caller's buffers when their rank has ended.
//! What ports were given goes on behind the block's back, in order.

use std::collections::{HashSet, VecDeque};

use antiphon_plan::{
    Access, Block, BufferType, ChannelType, Mode, NotifyKind, OpKind, Plan, Put, PutKind, Rank, Wiring,
};

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    Deadlock,
    Race,
    Late,
    Unbalanced,
    Unwritten,
    /// Plain data taken for packets: they may equal the flag.
    Mistaken,
}

/// More states than these are not tried.
const STATES: usize = 300_000;

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// Of each block, the phase's first operation.
    from: Vec<usize>,
    /// Of each block, what operations of the phase are: 0 to do, 1 under way, 2 done.
    phase: Vec<Vec<u8>>,
    counts: Vec<i64>,
    /// Of each block, what its ports have to do: (port, operation, whether it is under way).
    ports: Vec<VecDeque<(u32, usize, bool)>>,
    /// Packets that have been written: rank and chunk.
    packets: Vec<(u32, u64)>,
    /// Plain bytes that have been written or given: rank, buffer, chunk.
    written: Vec<(u32, BufferType, u64)>,
    /// Where plain data lie in place of packets, perhaps of the launch before: rank and chunk.
    spoilt: Vec<(u32, u64)>,
}

pub struct Oracle<'a> {
    plan: &'a Plan,
    blocks: Vec<Block<'a>>,
    wiring: Wiring,
    /// Whether blocks have many threads.
    many: bool,
}

/// What can go wrong with a plan, if anything can; `Err` if it has too many states.
pub fn judge(plan: &Plan) -> Result<Option<Bad>, ()> {
    let oracle = |many| Oracle { plan, blocks: Block::all(plan).collect(), wiring: Wiring::new(plan), many };
    let mut spoilt = Vec::new();
    // What a launch leaves in place of packets, the next one finds.
    for launch in 0..2 {
        for many in [false, true] {
            if (launch == 0 || !spoilt.is_empty())
                && let bad @ Some(_) = oracle(many).explore(&mut spoilt)?
            {
                return Ok(bad);
            }
        }
    }
    Ok(None)
}

impl Oracle<'_> {
    fn explore(&self, spoilt: &mut Vec<(u32, u64)>) -> Result<Option<Bad>, ()> {
        let mut start = self.start();
        start.spoilt.clone_from(spoilt);
        let mut seen = HashSet::from([start.clone()]);
        let mut todo = vec![start.clone()];
        while let Some(state) = todo.pop() {
            if let Some(bad) = self.bad(&state) {
                return Ok(Some(bad));
            }
            let next = match self.next(&state) {
                Ok(next) => next,
                Err(bad) => return Ok(Some(bad)),
            };
            if next.is_empty() {
                if (0..self.blocks.len()).any(|block| !self.ended(&state, block)) {
                    return Ok(Some(Bad::Deadlock));
                }
                if state.counts != start.counts {
                    return Ok(Some(Bad::Unbalanced));
                }
                spoilt.extend(&state.spoilt);
            }
            for state in next {
                if seen.insert(state.clone()) {
                    todo.push(state);
                }
            }
            if seen.len() > STATES {
                return Err(());
            }
        }
        Ok(None)
    }

    fn start(&self) -> State {
        let mut counts = Vec::new();
        let mut written = Vec::new();
        for gpu in &self.plan.gpus {
            counts.extend(gpu.peers(ChannelType::Memory).iter().map(|_| 0));
            counts.extend(gpu.peers(ChannelType::Port).iter().map(|_| 0));
            counts.extend(gpu.semaphores.iter().map(|semaphore| semaphore.init_value));
            written.extend((0..gpu.input_chunks).map(|chunk| (gpu.id.0, BufferType::Input, chunk)));
        }
        let blocks = self.blocks.len();
        State {
            from: vec![0; blocks],
            phase: (0..blocks).map(|block| vec![0; self.phase_len(block, 0)]).collect(),
            counts,
            ports: vec![VecDeque::new(); blocks],
            packets: Vec::new(),
            written,
            spoilt: Vec::new(),
        }
    }

    fn ops(&self, block: usize) -> impl Iterator<Item = &OpKind> {
        self.blocks[block].get().ops.iter().map(|op| &op.kind)
    }

    /// How many operations stand before the next meeting; alone, one.
    fn phase_len(&self, block: usize, from: usize) -> usize {
        let meets = |op: &OpKind| matches!(op, OpKind::Nop | OpKind::Barrier { .. });
        self.ops(block).skip(from).take_while(|op| !meets(op)).count()
    }

    fn ended(&self, state: &State, block: usize) -> bool {
        let all = self.ops(block).count();
        let done = state.phase[block].iter().all(|&op| op == 2);
        state.from[block] + state.phase[block].len() == all && done && state.ports[block].is_empty()
    }

    /// Everything under way: who does it, and which operation.
    fn under_way(&self, state: &State) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for block in 0..self.blocks.len() {
            let phase = state.phase[block].iter().enumerate().filter(|(_, op)| **op == 1);
            all.extend(phase.map(|(at, _)| (block, state.from[block] + at)));
            let ports = state.ports[block].iter().filter(|(.., under_way)| *under_way);
            all.extend(ports.map(|&(_, op, _)| (block, op)));
        }
        all
    }

    fn accesses(&self, block: usize, op: usize) -> Vec<Access> {
        let mut all = Vec::new();
        let kind = self.ops(block).nth(op).expect("an operation");
        self.blocks[block].accesses(kind, |access| all.push(access));
        all
    }

    fn bad(&self, state: &State) -> Option<Bad> {
        let under_way = self.under_way(state);
        for (at, &(block, op)) in under_way.iter().enumerate() {
            let accesses = self.accesses(block, op);
            for access in &accesses {
                let own = access.rank == self.blocks[block].rank();
                if !own && access.buffer != BufferType::Scratch && self.rank_ended(state, access.rank) {
                    return Some(Bad::Late);
                }
                if accesses.iter().any(|other| other.packets != access.packets && conflict(access, other)) {
                    return Some(Bad::Race);
                }
            }
            for &(other_block, other_op) in &under_way[..at] {
                let others = self.accesses(other_block, other_op);
                if accesses.iter().any(|one| others.iter().any(|other| conflict(one, other))) {
                    return Some(Bad::Race);
                }
            }
        }
        None
    }

    fn rank_ended(&self, state: &State, rank: Rank) -> bool {
        (0..self.blocks.len())
            .filter(|&block| self.blocks[block].rank() == rank)
            .all(|block| self.ended(state, block))
    }

    /// All states that one step leads to.
    fn next(&self, state: &State) -> Result<Vec<State>, Bad> {
        let mut next = Vec::new();
        for block in 0..self.blocks.len() {
            for at in 0..state.phase[block].len() {
                next.extend(self.step(state, block, at)?);
            }
            self.meet(state, block, &mut next);
            self.drain(state, block, &mut next)?;
        }
        Ok(next)
    }

    /// An operation begins, or ends.
    fn step(&self, state: &State, block: usize, at: usize) -> Result<Option<State>, Bad> {
        let mut after = state.clone();
        let op = state.from[block] + at;
        let kind = self.ops(block).nth(op).expect("an operation");
        match state.phase[block][at] {
            1 => {
                after.phase[block][at] = 2;
                self.write(&mut after, block, op);
                return Ok(Some(after));
            }
            2 => return Ok(None),
            _ => {}
        }
        if !self.many && state.phase[block][..at].iter().any(|&op| op != 2) {
            return Ok(None);
        }
        after.phase[block][at] = 2;
        match kind {
            OpKind::Notify(notify) if notify.kind == NotifyKind::Flush => {
                let done = state.ports[block].iter().all(|&(port, pushed, _)| {
                    pushed > op || notify.channels.iter().all(|index| index.0 != port)
                });
                // In order with what is pushed before and after.
                if !done || !self.pushes_before_begun(state, block, at) {
                    return Ok(None);
                }
            }
            OpKind::Notify(notify) if notify.kind == NotifyKind::Signal => {
                for &index in &notify.channels {
                    if notify.channel_type == ChannelType::Port {
                        if !self.pushes_before_begun(state, block, at) {
                            return Ok(None);
                        }
                        after.ports[block].push_back((index.0, op, false));
                    } else {
                        after.counts[self.peers_count(block, notify.channel_type, index)] += 1;
                    }
                }
            }
            OpKind::Notify(notify) => {
                for &index in &notify.channels {
                    let of = notify.channel_type;
                    let channel = self.blocks[block].channel(of, index);
                    let count = &mut after.counts[self.count(self.blocks[block].rank(), of, channel.index())];
                    *count -= 1;
                    if *count < 0 {
                        return Ok(None);
                    }
                }
            }
            OpKind::Semaphore(op) => {
                let gpu = self.blocks[block].gpu();
                let first = self.count(gpu.id, ChannelType::Port, gpu.peers(ChannelType::Port).len());
                for id in &op.semaphores {
                    let count = &mut after.counts[first + id.index()];
                    *count += if op.acquire { -1 } else { 1 };
                    if op.acquire && *count < 0 {
                        return Ok(None);
                    }
                }
            }
            OpKind::Put(put) if put.channel_type == ChannelType::Port => {
                if !self.pushes_before_begun(state, block, at) {
                    return Ok(None);
                }
                let waiting = state.ports[block].iter().any(|&(_, pushed, _)| pushed == op);
                match put.kind {
                    PutKind::WithSignalAndFlush if waiting => return Ok(None),
                    _ => after.ports[block].push_back((put.channels[0].0, op, false)),
                }
            }
            _ => {
                let reads = self.accesses(block, op);
                let missing = |access: &&Access| {
                    let packet = |chunk| state.packets.contains(&(access.rank.0, chunk));
                    access.mode == Mode::Read && access.packets && !access.chunks.clone().all(packet)
                };
                let spoilt = |access: &Access| {
                    let there = |chunk| state.spoilt.contains(&(access.rank.0, chunk));
                    access.mode == Mode::Read && access.packets && access.chunks.clone().any(there)
                };
                if reads.iter().any(spoilt) {
                    return Err(Bad::Mistaken);
                }
                if reads.iter().any(|access| missing(&access)) {
                    return Ok(None);
                }
                self.read(state, block, op)?;
                after.phase[block][at] = 1;
            }
        }
        Ok(Some(after))
    }

    /// What a block gives its ports is in order.
    fn pushes_before_begun(&self, state: &State, block: usize, at: usize) -> bool {
        (0..at).all(|before| {
            let pushes = match self.ops(block).nth(state.from[block] + before) {
                Some(OpKind::Put(Put { channel_type: ChannelType::Port, .. })) => true,
                Some(OpKind::Notify(notify)) => {
                    notify.kind == NotifyKind::Signal && notify.channel_type == ChannelType::Port
                }
                _ => false,
            };
            !pushes || state.phase[block][before] != 0
        })
    }

    /// The head of a port's queue begins, or ends.
    fn drain(&self, state: &State, block: usize, next: &mut Vec<State>) -> Result<(), Bad> {
        let mut heads = HashSet::new();
        for at in 0..state.ports[block].len() {
            let (port, op, under_way) = state.ports[block][at];
            if !heads.insert(port) {
                continue;
            }
            let mut after = state.clone();
            let kind = self.ops(block).nth(op).expect("an operation");
            match kind {
                OpKind::Put(_) if !under_way => {
                    self.read(state, block, op)?;
                    after.ports[block][at].2 = true;
                }
                OpKind::Put(put) => {
                    self.write(&mut after, block, op);
                    after.ports[block].remove(at);
                    if put.kind != PutKind::Plain {
                        after.counts[self.peers_count(block, ChannelType::Port, put.channels[0])] += 1;
                    }
                }
                _ => {
                    let index = antiphon_plan::ChannelIndex(port);
                    after.ports[block].remove(at);
                    after.counts[self.peers_count(block, ChannelType::Port, index)] += 1;
                }
            }
            next.push(after);
        }
        Ok(())
    }

    /// The block's threads meet, if all of the phase is done; at a barrier, those of all its blocks.
    fn meet(&self, state: &State, block: usize, next: &mut Vec<State>) {
        let at = |block: usize| {
            let done = state.phase[block].iter().enumerate().all(|(at, &op)| {
                let id = state.from[block] + at;
                // A push with a flush is done when the port has done it.
                let flushes = matches!(
                    self.ops(block).nth(id),
                    Some(OpKind::Put(Put { kind: PutKind::WithSignalAndFlush, .. }))
                );
                op == 2 && !(flushes && state.ports[block].iter().any(|&(_, pushed, _)| pushed == id))
            });
            done.then(|| self.ops(block).nth(state.from[block] + state.phase[block].len())).flatten()
        };
        let all: Vec<usize> = match at(block) {
            Some(OpKind::Nop) => vec![block],
            Some(&OpKind::Barrier { barrier, num_threadblocks }) => {
                let same = |other: &usize| {
                    let of = |block: usize| self.blocks[block].rank();
                    of(*other) == of(block)
                        && matches!(at(*other), Some(&OpKind::Barrier { barrier: id, .. }) if id == barrier)
                };
                let all: Vec<_> = (0..self.blocks.len()).filter(same).collect();
                match all.len() == num_threadblocks as usize && all[0] == block {
                    true => all,
                    false => return,
                }
            }
            _ => return,
        };
        let mut after = state.clone();
        for block in all {
            after.from[block] += state.phase[block].len() + 1;
            after.phase[block] = vec![0; self.phase_len(block, after.from[block])];
        }
        next.push(after);
    }

    fn read(&self, state: &State, block: usize, op: usize) -> Result<(), Bad> {
        for access in self.accesses(block, op) {
            let plain = access.mode == Mode::Read && !access.packets;
            let there = |chunk| state.written.contains(&(access.rank.0, access.buffer, chunk));
            if plain && !access.chunks.clone().all(there) {
                return Err(Bad::Unwritten);
            }
        }
        Ok(())
    }

    fn write(&self, after: &mut State, block: usize, op: usize) {
        for access in self.accesses(block, op).into_iter().filter(|access| access.mode == Mode::Write) {
            for chunk in access.chunks {
                let rank = access.rank.0;
                let scratch = access.buffer == BufferType::Scratch;
                match access.packets {
                    true => {
                        after.packets.push((rank, chunk));
                        after.spoilt.retain(|other| *other != (rank, chunk));
                        after.written.retain(|&(of, buffer, plain)| {
                            of != rank || buffer != BufferType::Scratch || plain / 2 != chunk
                        });
                    }
                    false => {
                        after.written.push((rank, access.buffer, chunk));
                        if scratch {
                            after.packets.retain(|other| *other != (rank, chunk / 2));
                            after.spoilt.push((rank, chunk / 2));
                        }
                    }
                }
            }
        }
        after.packets.sort_unstable();
        after.packets.dedup();
        after.spoilt.sort_unstable();
        after.spoilt.dedup();
        after.written.sort_unstable();
        after.written.dedup();
    }

    fn count(&self, rank: Rank, of: ChannelType, at: usize) -> usize {
        let before: usize = (self.plan.gpus[..rank.index()].iter())
            .map(|gpu| {
                gpu.peers(ChannelType::Memory).len()
                    + gpu.peers(ChannelType::Port).len()
                    + gpu.semaphores.len()
            })
            .sum();
        let ports = if of == ChannelType::Port {
            self.plan.gpus[rank.index()].peers(ChannelType::Memory).len()
        } else {
            0
        };
        before + ports + at
    }

    fn peers_count(&self, block: usize, of: ChannelType, index: antiphon_plan::ChannelIndex) -> usize {
        let block = &self.blocks[block];
        let peer = block.peer(of, index);
        let channel = self.wiring.counterpart(block.rank(), of, block.channel(of, index));
        self.count(peer, of, channel.expect("wired").index())
    }
}

/// Packets take twice the bytes of plain data, from twice as far.
fn conflict(one: &Access, other: &Access) -> bool {
    let times = |access: &Access| if access.packets && one.packets != other.packets { 2 } else { 1 };
    let (left, right) = (times(one), times(other));
    one.rank == other.rank
        && one.buffer == other.buffer
        && left * one.chunks.start < right * other.chunks.end
        && right * other.chunks.start < left * one.chunks.end
        && (one.mode == Mode::Write || other.mode == Mode::Write)
}
