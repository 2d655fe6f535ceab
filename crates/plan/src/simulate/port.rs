//! Port channels: requests of transfers, and the engines that do them.

use std::collections::VecDeque;
use std::ops::Range;

use super::cluster::PortEngine;
use super::cost::Turn;
use super::engine::{ENGINE_FLOWS, Engine, Event, Phase};
use super::result::{Arrow, ArrowKind, Lane, Span, SpanId};
use super::sync::{Token, Worker};
use crate::ids::Rank;
use crate::op::{ChannelType, OpKind, Put, PutKind};

/// A transfer, or a signal that goes the same way.
#[derive(Clone, Debug)]
pub(super) struct Transfer {
    pub from: Rank,
    pub to: Rank,
    pub bytes: u64,
    /// The packets that it brings.
    pub packets: Option<Range<u64>>,
    /// The channel to the peer.
    pub channel: u32,
    /// The peer's channel that gets a signal behind the bytes.
    pub signal: Option<u32>,
    /// The requesting block.
    pub asked_by: SpanId,
    /// When the engine has heard of it.
    pub ready: f64,
}

/// An engine: what it does and what waits.
#[derive(Debug, Default)]
struct Queue {
    busy: Option<(Transfer, Option<SpanId>)>,
    waiting: VecDeque<Transfer>,
    last: Option<SpanId>,
}

/// For each rank a copy engine, then its way through the network card.
#[derive(Debug)]
pub(super) struct Ports(Vec<Queue>);

impl Ports {
    pub fn new(ranks: usize) -> Self {
        Ports((0..2 * ranks).map(|_| Queue::default()).collect())
    }
}

/// Whether an operation puts through a port.
pub(super) fn is_put(op: Option<(&OpKind, Option<Turn>)>) -> Option<&Put> {
    match op {
        Some((OpKind::Put(put), _)) if put.channel_type == ChannelType::Port => Some(put),
        _ => None,
    }
}

impl Engine<'_> {
    /// The engine that moves bytes from a rank to another one.
    pub fn port_engine(&self, from: Rank, to: Rank) -> &PortEngine {
        let cluster = self.costs.cluster;
        match &cluster.nic {
            Some(nic) if !self.costs.links.same_node(from, to) => nic,
            _ => &cluster.copy_engine,
        }
    }

    /// A block asks for the transfers of its put.
    pub fn ask(&mut self, worker: Worker) {
        let state = &self.states[worker as usize];
        let (block, span) = (state.block, state.span);
        let Some((put, turn)) = is_put(state.now()).zip(state.now().map(|(_, turn)| turn)) else { return };
        let packets = matches!(put.kind, PutKind::Packets | PutKind::ReadPackets);
        let signals = matches!(put.kind, PutKind::WithSignal | PutKind::WithSignalAndFlush);
        let mut asked = 0;
        for (chunk, &channel) in put.dst.iter().zip(&put.channels) {
            let to = block.remote(ChannelType::Port, chunk.buffer_id).rank;
            let turn = turn.filter(|_| !packets);
            let range = self.costs.bytes(&(chunk.index..chunk.index + chunk.size), put.group, turn);
            let plain = range.end - range.start;
            asked += plain;
            let bytes = if packets { plain.saturating_mul(2) } else { plain };
            let packets = (packets && plain > 0).then_some(range);
            self.transfer(
                block.rank(),
                block.channel(ChannelType::Port, channel),
                signals,
                span,
                |transfer| {
                    (transfer.to, transfer.bytes, transfer.packets) = (to, bytes, packets);
                },
            );
        }
        self.spans[span.index()].bytes = asked;
        match put.kind {
            PutKind::WithSignalAndFlush => self.flush(worker, &put.channels.clone()),
            _ => self.end(worker),
        }
    }

    /// Hands a transfer through one of a rank's channels to its engine: of no bytes to the channel's peer, unless `fill`
    /// says more.
    pub fn transfer(
        &mut self,
        from: Rank,
        channel: crate::ChannelId,
        signals: bool,
        asked_by: SpanId,
        fill: impl FnOnce(&mut Transfer),
    ) {
        let to = self.plan.gpus[from.index()].peers(ChannelType::Port)[channel.index()];
        let end = self.wiring.counterpart(from, ChannelType::Port, channel).filter(|_| signals);
        let signal = end.map(|end| self.sync.channel(to, ChannelType::Port, end));
        let own = self.sync.channel(from, ChannelType::Port, channel);
        let mut transfer =
            Transfer { from, to, bytes: 0, packets: None, channel: own, signal, asked_by, ready: 0.0 };
        fill(&mut transfer);
        transfer.ready = self.now + self.port_engine(from, transfer.to).start_ns;
        self.sync.channels[own as usize].asked += 1;
        let card = !self.costs.links.same_node(from, transfer.to);
        let engine = 2 * from.0 + u32::from(card);
        let (ready, queue) = (transfer.ready, &mut self.ports.0[engine as usize]);
        queue.waiting.push_back(transfer);
        self.at(ready, Event::Engine(engine));
    }

    /// Begins an engine's next transfer, if it is idle and has heard of one.
    pub fn next_transfer(&mut self, engine: u32) {
        let queue = &mut self.ports.0[engine as usize];
        if queue.busy.is_some() || queue.waiting.front().is_none_or(|transfer| transfer.ready > self.now) {
            return;
        }
        let Some(transfer) = queue.waiting.pop_front() else { return };
        let (from, to, bytes) = (transfer.from, transfer.to, transfer.bytes);
        if bytes == 0 {
            queue.busy = Some((transfer, None));
            return self.transferred(engine);
        }
        let card = engine % 2 == 1;
        let asked = self.spans[transfer.asked_by.index()];
        let span = SpanId(self.spans.len() as u32);
        self.spans.push(Span {
            lane: if card { Lane::Nic(to) } else { Lane::CopyEngine(to) },
            start_ns: self.now,
            end_ns: self.now,
            bytes,
            previous: queue.last.replace(span),
            cause: Some(transfer.asked_by),
            ..asked
        });
        queue.busy = Some((transfer, Some(span)));
        let cap = self.port_engine(from, to).gb_s;
        let flow = ENGINE_FLOWS + u64::from(engine);
        match card {
            true => self.network.begin(self.now, &self.costs.links.nic(from, to), cap, bytes as f64, flow),
            false => self.network.begin(self.now, &self.costs.links.copy(from, to), cap, bytes as f64, flow),
        }
    }

    /// An engine has sent the last byte of its transfer.
    pub fn transferred(&mut self, engine: u32) {
        let Some((transfer, span)) = self.ports.0[engine as usize].busy.take() else { return };
        let (now, from) = (self.now, span.unwrap_or(transfer.asked_by));
        let arrives = now + self.port_engine(transfer.from, transfer.to).latency_ns;
        let token = Token { from, sent: now };
        if let Some(span) = span {
            let sent_ns = self.spans[span.index()].start_ns;
            self.spans[span.index()].end_ns = now;
            let (kind, rank) = (ArrowKind::Data, transfer.to);
            self.arrows.push(Arrow { kind, from: span, rank, to: None, sent_ns, arrived_ns: arrives });
        }
        if let Some(range) = transfer.packets {
            self.at(arrives, Event::Packets(transfer.to, range, token));
        }
        if let Some(channel) = transfer.signal {
            self.at(arrives, Event::Signal(channel, token));
        }
        self.at(arrives, Event::Arrived(transfer.channel, token));
        self.at(now, Event::Engine(engine));
    }

    /// A block waits until all that was put through some channels has arrived.
    pub fn flush(&mut self, worker: Worker, channels: &[crate::ChannelIndex]) {
        let block = self.states[worker as usize].block;
        let mut missing = 0;
        for &channel in channels {
            let id =
                self.sync.channel(block.rank(), ChannelType::Port, block.channel(ChannelType::Port, channel));
            let channel = &mut self.sync.channels[id as usize];
            if channel.done < channel.asked {
                channel.flushing.push((channel.asked, worker));
                missing += 1;
            }
        }
        self.states[worker as usize].phase = Phase::Waits(missing);
        if missing == 0 {
            self.ends_after(worker, self.costs.cluster.block.op_ns);
        }
    }

    /// A transfer through a channel has arrived.
    pub fn arrived(&mut self, channel: u32, token: Token) {
        let channel = &mut self.sync.channels[channel as usize];
        channel.done += 1;
        let done = channel.done;
        let released: Vec<Worker> =
            channel.flushing.extract_if(.., |(until, _)| *until <= done).map(|(_, worker)| worker).collect();
        released.into_iter().for_each(|worker| self.satisfied(worker, token));
    }
}
