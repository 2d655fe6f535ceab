//! Waits: signals, semaphores, barriers, packets.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;

use super::result::SpanId;
use crate::ids::{BarrierId, Rank};
use crate::op::ChannelType;
use crate::plan::Plan;

/// A thread block of the plan, counted over all ranks.
pub(super) type Worker = u32;

/// An arrival: its sender and its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token {
    pub from: SpanId,
    pub sent: f64,
}

/// One end of a channel: signals to it, and of a port what was put through it.
#[derive(Debug, Default)]
pub(super) struct Channel {
    /// Signals that no wait has taken, with their times of arrival.
    pub arrived: VecDeque<(Token, f64)>,
    pub waiting: VecDeque<Worker>,
    /// Transfers asked for, and those that have arrived.
    pub asked: u64,
    pub done: u64,
    /// The blocks that flush, each until this many have arrived.
    pub flushing: Vec<(u64, Worker)>,
}

/// A counting semaphore.
#[derive(Debug)]
pub(super) struct Counter {
    pub count: i64,
    pub waiting: VecDeque<Worker>,
}

/// The packets that a rank's scratch holds, as disjoint ranges of plain bytes that do not touch; and the waiting blocks.
#[derive(Debug, Default)]
pub(super) struct Packets {
    there: BTreeMap<u64, u64>,
    /// Each for one range, by its start; to its end.
    waiting: BTreeMap<(u64, Worker), u64>,
}

impl Packets {
    pub fn has(&self, range: &Range<u64>) -> bool {
        self.there.range(..=range.start).next_back().is_some_and(|(_, &end)| end >= range.end)
    }

    /// A thread block waits for one range at a time.
    pub fn wait(&mut self, range: Range<u64>, worker: Worker) {
        self.waiting.insert((range.start, worker), range.end);
    }

    /// Adds what arrived, and gives those whose range is there now.
    pub fn arrive(&mut self, range: Range<u64>) -> Vec<Worker> {
        let (mut start, mut end) = (range.start, range.end);
        while let Some((&from, &to)) = self.there.range(..=end).next_back().filter(|&(_, &to)| to >= start) {
            self.there.remove(&from);
            (start, end) = (start.min(from), end.max(to));
        }
        self.there.insert(start, end);
        let inside = self.waiting.range((start, 0)..(end, 0)).filter(|&(_, &wanted)| wanted <= end);
        let released: Vec<_> = inside.map(|(&key, _)| key).collect();
        released.iter().for_each(|key| _ = self.waiting.remove(key));
        released.into_iter().map(|(_, worker)| worker).collect()
    }
}

/// All of a plan.
#[derive(Debug)]
pub(super) struct Sync {
    /// For each rank, where its memory and its port channels begin in `channels`.
    bases: Vec<[u32; 2]>,
    pub channels: Vec<Channel>,
    semaphore_bases: Vec<u32>,
    pub semaphores: Vec<Counter>,
    /// The blocks at each barrier; only accessed by key.
    pub barriers: HashMap<(Rank, BarrierId), Vec<Worker>>,
    pub packets: Vec<Packets>,
}

impl Sync {
    pub fn new(plan: &Plan) -> Self {
        let (mut bases, mut channels) = (Vec::new(), Vec::new());
        let (mut semaphore_bases, mut semaphores) = (Vec::new(), Vec::new());
        for gpu in &plan.gpus {
            bases.push([ChannelType::Memory, ChannelType::Port].map(|of| {
                let base = channels.len() as u32;
                channels.extend(gpu.peers(of).iter().map(|_| Channel::default()));
                base
            }));
            semaphore_bases.push(semaphores.len() as u32);
            let counter = |of: &crate::Semaphore| Counter { count: of.init_value, waiting: VecDeque::new() };
            semaphores.extend(gpu.semaphores.iter().map(counter));
        }
        let packets = plan.gpus.iter().map(|_| Packets::default()).collect();
        Sync { bases, channels, semaphore_bases, semaphores, barriers: HashMap::new(), packets }
    }

    /// A channel's place in `channels`.
    pub fn channel(&self, rank: Rank, of: ChannelType, id: crate::ChannelId) -> u32 {
        self.bases[rank.index()][usize::from(of == ChannelType::Port)] + id.0
    }

    /// A semaphore's place in `semaphores`.
    pub fn semaphore(&self, rank: Rank, id: crate::SemaphoreId) -> u32 {
        self.semaphore_bases[rank.index()] + id.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_there_when_all_their_bytes_are() {
        let mut packets = Packets::default();
        packets.wait(0..8, 1);
        packets.wait(2..4, 2);
        assert!(packets.arrive(6..8).is_empty());
        assert_eq!(packets.arrive(2..4), [2]);
        assert!(packets.arrive(0..2).is_empty());
        assert!(packets.has(&(0..4)) && !packets.has(&(3..5)));
        assert_eq!(packets.arrive(3..7), [1]);
        assert!(packets.has(&(0..8)) && !packets.has(&(0..9)));
    }
}
