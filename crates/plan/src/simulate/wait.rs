//! Waiting thread blocks, and the events that end their waits.

use std::ops::Range;

use super::engine::{Engine, Event, Phase};
use super::error::Waiting;
use super::result::{Arrow, ArrowKind};
use super::sync::{Token, Worker};
use crate::ids::{BarrierId, Rank};
use crate::op::{ChannelType, Notify, NotifyKind, OpKind, SemaphoreOp};

impl Engine<'_> {
    /// Begins a signal, a wait or a flush.
    pub fn notify(&mut self, worker: Worker, notify: &Notify) {
        let cluster = self.costs.cluster;
        let block = self.states[worker as usize].block;
        let peers = || notify.channels.iter().map(|&channel| block.peer(notify.channel_type, channel));
        match (notify.kind, notify.channel_type) {
            (NotifyKind::Signal, ChannelType::Port) => {
                let issue = peers().map(|to| self.port_engine(block.rank(), to).issue_ns).fold(0.0, f64::max);
                self.ends_after(worker, cluster.block.op_ns + issue);
            }
            (NotifyKind::Signal, _) if notify.relaxed => self.ends_after(worker, cluster.block.op_ns),
            (NotifyKind::Signal, _) => self.ends_after(worker, cluster.link.fence_ns),
            (NotifyKind::Flush, _) => self.flush(worker, &notify.channels),
            (NotifyKind::Wait, _) => self.wait(worker, notify),
        }
    }

    /// The effect of a signal that has ended.
    pub fn signal(&mut self, own: Rank, worker: Worker, notify: &Notify, token: Token) {
        if notify.kind != NotifyKind::Signal {
            return;
        }
        let block = self.states[worker as usize].block;
        for &channel in &notify.channels {
            let id = block.channel(notify.channel_type, channel);
            if notify.channel_type == ChannelType::Port {
                self.transfer(own, id, true, token.from, |_| {});
                continue;
            }
            let peer = block.peer(notify.channel_type, channel);
            // Nobody waits on a channel that the peer does not have.
            let Some(end) = self.wiring.counterpart(own, notify.channel_type, id) else { continue };
            let end = self.sync.channel(peer, notify.channel_type, end);
            self.after(self.costs.cluster.link.latency_ns, Event::Signal(end, token));
        }
    }

    fn wait(&mut self, worker: Worker, notify: &Notify) {
        let block = self.states[worker as usize].block;
        let mut missing = 0;
        for &channel in &notify.channels {
            let id = block.channel(notify.channel_type, channel);
            let id = self.sync.channel(block.rank(), notify.channel_type, id);
            let channel = &mut self.sync.channels[id as usize];
            match channel.arrived.pop_front() {
                Some((token, arrived)) => self.arrow(ArrowKind::Signal, worker, token, arrived),
                None => {
                    channel.waiting.push_back(worker);
                    missing += 1;
                }
            }
        }
        self.states[worker as usize].phase = Phase::Waits(missing);
        if missing == 0 {
            self.ends_after(worker, self.costs.cluster.block.op_ns);
        }
    }

    pub fn signalled(&mut self, channel: u32, token: Token) {
        let now = self.now;
        let channel = &mut self.sync.channels[channel as usize];
        match channel.waiting.pop_front() {
            Some(worker) => {
                self.arrow(ArrowKind::Signal, worker, token, now);
                self.satisfied(worker, token);
            }
            None => channel.arrived.push_back((token, now)),
        }
    }

    pub fn acquire(&mut self, worker: Worker, op: &SemaphoreOp) {
        let rank = self.states[worker as usize].block.rank();
        let mut missing = 0;
        for &id in &op.semaphores {
            let id = self.sync.semaphore(rank, id);
            let semaphore = &mut self.sync.semaphores[id as usize];
            if semaphore.count > 0 {
                semaphore.count -= 1;
            } else {
                semaphore.waiting.push_back(worker);
                missing += 1;
            }
        }
        self.states[worker as usize].phase = Phase::Waits(missing);
        if missing == 0 {
            self.ends_after(worker, self.costs.cluster.block.op_ns);
        }
    }

    pub fn release(&mut self, own: Rank, op: &SemaphoreOp, token: Token) {
        for &id in &op.semaphores {
            let id = self.sync.semaphore(own, id);
            self.after(self.costs.cluster.block.atomic_ns, Event::Release(id, token));
        }
    }

    pub fn released(&mut self, semaphore: u32, token: Token) {
        let semaphore = &mut self.sync.semaphores[semaphore as usize];
        semaphore.count = semaphore.count.saturating_add(1);
        if semaphore.count <= 0 {
            return;
        }
        if let Some(worker) = semaphore.waiting.pop_front() {
            semaphore.count -= 1;
            self.arrow(ArrowKind::Semaphore, worker, token, self.now);
            self.satisfied(worker, token);
        }
    }

    /// A block comes to a barrier; the last one lets all go.
    pub fn meet(&mut self, worker: Worker, barrier: BarrierId, num_threadblocks: u32) {
        let state = &mut self.states[worker as usize];
        state.phase = Phase::Waits(1);
        let (key, last) = ((state.block.rank(), barrier), state.span);
        let there = self.sync.barriers.entry(key).or_default();
        there.push(worker);
        if there.len() < num_threadblocks as usize {
            return;
        }
        for there in std::mem::take(there) {
            let span = self.states[there as usize].span;
            self.spans[span.index()].cause = (span != last).then_some(last);
            self.ends_after(there, self.costs.cluster.block.atomic_ns);
        }
    }

    /// Packets have arrived at a rank.
    pub fn packets(&mut self, rank: Rank, range: Range<u64>, token: Token) {
        for worker in self.sync.packets[rank.index()].arrive(range) {
            self.arrow(ArrowKind::Packets, worker, token, self.now);
            self.blame(worker, token);
            self.read_packets(worker);
        }
    }

    /// One of the things that a block waits for is there.
    pub fn satisfied(&mut self, worker: Worker, token: Token) {
        let Phase::Waits(missing) = &mut self.states[worker as usize].phase else { return };
        *missing = missing.saturating_sub(1);
        if *missing == 0 {
            self.blame(worker, token);
            self.ends_after(worker, self.costs.cluster.block.op_ns);
        }
    }

    /// The block's operation could not go on before this.
    fn blame(&mut self, worker: Worker, token: Token) {
        let span = self.states[worker as usize].span;
        self.spans[span.index()].cause = (span != token.from).then_some(token.from);
    }

    fn arrow(&mut self, kind: ArrowKind, worker: Worker, token: Token, arrived_ns: f64) {
        let state = &self.states[worker as usize];
        let (rank, to) = (state.block.rank(), Some(state.span));
        self.arrows.push(Arrow { kind, from: token.from, rank, to, sent_ns: token.sent, arrived_ns });
    }

    /// The thread blocks that have not ended, and why.
    pub fn waiting(&self) -> Vec<Waiting> {
        let stuck =
            (0..self.states.len() as Worker).filter(|&at| self.states[at as usize].phase != Phase::Done);
        stuck
            .map(|worker| Waiting { place: self.states[worker as usize].place(), what: self.missing(worker) })
            .collect()
    }

    fn missing(&self, worker: Worker) -> String {
        let state = &self.states[worker as usize];
        let (block, rank) = (state.block, state.block.rank());
        match state.now().map(|(op, _)| op) {
            Some(OpKind::Notify(notify)) => {
                let missing = notify.channels.iter().find(|&&channel| {
                    let id = block.channel(notify.channel_type, channel);
                    let id = self.sync.channel(rank, notify.channel_type, id);
                    self.sync.channels[id as usize].waiting.contains(&worker)
                });
                let of = match notify.channel_type {
                    ChannelType::Port => "port",
                    _ => "memory",
                };
                missing.map_or("its transfers".into(), |&channel| {
                    let peer = block.peer(notify.channel_type, channel);
                    format!("a signal of rank {peer} through {of} channel {channel}")
                })
            }
            Some(OpKind::Semaphore(op)) => {
                let waits = |id| &self.sync.semaphores[self.sync.semaphore(rank, id) as usize].waiting;
                let missing = op.semaphores.iter().find(|&&id| waits(id).contains(&worker));
                missing.map_or("a semaphore".into(), |id| format!("a release of semaphore {id}"))
            }
            Some(OpKind::Barrier { barrier, num_threadblocks }) => {
                let there = self.sync.barriers.get(&(rank, *barrier)).map_or(0, Vec::len);
                format!("barrier {barrier}, where {there} of {num_threadblocks} thread blocks are")
            }
            _ => match state.work.reads.get(state.read) {
                Some((rank, range)) => {
                    format!("packets in bytes {} to {} of rank {rank}'s scratch", range.start, range.end)
                }
                None => "nothing".into(),
            },
        }
    }
}
