//! The numbers of counters.

use crate::ids::{ChannelId, Rank, SemaphoreId};
use crate::op::ChannelType;
use crate::plan::Plan;

use super::program::{Counted, Counter};

/// Where the counters of each rank begin: signals that arrive through memory and port channels, then semaphores.
pub(super) struct Counters {
    first: Vec<[u32; 3]>,
}

impl Counters {
    pub fn new(plan: &Plan) -> Self {
        let mut next = 0;
        let mut take = |count: usize| {
            next += count as u32;
            next - count as u32
        };
        let first = plan.gpus.iter().map(|gpu| {
            [gpu.peers(ChannelType::Memory).len(), gpu.peers(ChannelType::Port).len(), gpu.semaphores.len()]
                .map(&mut take)
        });
        Counters { first: first.collect() }
    }

    pub fn list(&self, plan: &Plan) -> Vec<Counter> {
        let mut list = Vec::new();
        let mut add = |counted, initial| {
            list.push(Counter { counted, initial, releasers: Vec::new(), acquirers: Vec::new() });
        };
        for gpu in &plan.gpus {
            let rank = gpu.id;
            for channel_type in [ChannelType::Memory, ChannelType::Port] {
                for id in 0..gpu.peers(channel_type).len() {
                    add(Counted::Channel { rank, channel_type, channel: ChannelId(id as u32) }, 0);
                }
            }
            for (id, semaphore) in gpu.semaphores.iter().enumerate() {
                let counted = Counted::Semaphore { rank, semaphore: SemaphoreId(id as u32) };
                add(counted, semaphore.init_value);
            }
        }
        list
    }

    pub fn channel(&self, rank: Rank, channel_type: ChannelType, channel: ChannelId) -> u32 {
        self.first[rank.index()][usize::from(channel_type == ChannelType::Port)] + channel.0
    }

    pub fn semaphore(&self, rank: Rank, semaphore: SemaphoreId) -> u32 {
        self.first[rank.index()][2] + semaphore.0
    }
}
