//! The connections between ranks, and the signals that ranks are ready.

use std::collections::BTreeMap;

use crate::{Buffer, DataSync, MemoryChannel, PortChannel, Program, Result};

/// The thread block that does everything by default.
pub(super) const BLOCK: u32 = 0;

/// All ranks but one, from its successor on, so that not all turn to the same one first.
pub(super) fn others(own: u32, ranks: u32) -> impl Iterator<Item = u32> + Clone {
    (1..ranks).map(move |ahead| (own + ahead) % ranks)
}

/// The chunk that stands `back` chunks before chunk `part` in a ring of `ranks` chunks.
pub(super) fn behind(part: u32, back: u32, ranks: u32) -> u64 {
    u64::from((part + ranks - back % ranks) % ranks)
}

/// The index of a peer among a rank's slots, one for each other rank.
pub(super) fn slot(own: u32, peer: u32, ranks: u32) -> u64 {
    behind(peer, own + 1, ranks)
}

/// Sets aside `chunks` chunks of scratch at every rank.
pub(super) fn scratch(program: &Program, chunks: u64) -> Result<Vec<Buffer>> {
    (0..program.num_ranks()).map(|rank| program.rank(rank)?.scratch(chunks)).collect()
}

/// Channels between all ranks of each of some groups.
pub(super) struct Mesh<C> {
    channels: BTreeMap<(u32, u32), C>,
    /// The peers of each rank, from its successor on.
    peers: Vec<Vec<u32>>,
}

impl<C> Mesh<C> {
    /// With the channels that `connect` makes of a peer and a rank, which are in one group if `together` says so.
    fn new(
        program: &Program,
        together: impl Fn(u32, u32) -> bool,
        connect: impl Fn(u32, u32) -> Result<C>,
    ) -> Result<Self> {
        let ranks = program.num_ranks();
        let of = |own| others(own, ranks).filter(|&peer| together(own, peer)).collect();
        let peers: Vec<Vec<u32>> = (0..ranks).map(of).collect();
        let mut channels = BTreeMap::new();
        for own in 0..ranks {
            for &peer in &peers[own as usize] {
                channels.insert((own, peer), connect(peer, own)?);
            }
        }
        Ok(Mesh { channels, peers })
    }

    /// The peers of a rank.
    pub fn peers(&self, own: u32) -> &[u32] {
        &self.peers[own as usize]
    }

    /// A rank's channel to each of them.
    pub fn at(&self, own: u32) -> impl Iterator<Item = (u32, &C)> {
        self.peers(own).iter().map(move |&peer| (peer, &self.channels[&(own, peer)]))
    }
}

impl<'p> Mesh<MemoryChannel<'p>> {
    /// All ranks.
    pub fn all(program: &'p Program) -> Result<Self> {
        Self::of(program, |_, _| true)
    }

    /// Those that are in one group.
    pub fn of(program: &'p Program, together: impl Fn(u32, u32) -> bool) -> Result<Self> {
        Mesh::new(program, together, |peer, own| program.memory_channel(peer, own))
    }

    /// A rank's peers have begun: their buffers may be read and written.
    pub fn begin(&self, own: u32) -> Result<()> {
        self.at(own).try_for_each(|(_, channel)| channel.relaxed_signal(BLOCK, DataSync::NONE))?;
        self.at(own).try_for_each(|(_, channel)| channel.relaxed_wait(BLOCK, DataSync::AFTER))
    }

    /// A rank's peers are done with its buffers, and what they wrote is there.
    pub fn end(&self, own: u32) -> Result<()> {
        self.at(own).try_for_each(|(_, channel)| channel.signal(BLOCK, DataSync::BEFORE))?;
        self.at(own).try_for_each(|(_, channel)| channel.wait(BLOCK, DataSync::AFTER))
    }
}

impl<'p> Mesh<PortChannel<'p>> {
    /// Those that are in one group.
    pub fn of(program: &'p Program, together: impl Fn(u32, u32) -> bool) -> Result<Self> {
        Mesh::new(program, together, |peer, own| program.port_channel(peer, own))
    }
}

/// Channels from each rank to the next, and back.
pub(super) struct Ring<C> {
    ends: Vec<(C, C)>,
}

impl<C> Ring<C> {
    /// Between two ranks, the first channel each way is rank 0's, and the second one rank 1's: the waiting rank has the other end of
    /// the channel that is signalled.
    fn new(program: &Program, connect: impl Fn(u32, u32) -> Result<C>) -> Result<Self> {
        let ranks = program.num_ranks();
        let ends = (0..ranks).map(|own| {
            let next = (own + 1) % ranks;
            Ok((connect(next, own)?, connect(own, next)?))
        });
        Ok(Ring { ends: ends.collect::<Result<_>>()? })
    }

    /// A rank's channel to the next rank.
    pub fn next(&self, own: u32) -> &C {
        &self.ends[own as usize].0
    }

    /// A rank's channel to the rank before it.
    pub fn previous(&self, own: u32) -> &C {
        let ranks = self.ends.len();
        &self.ends[(own as usize + ranks - 1) % ranks].1
    }
}

impl<'p> Ring<MemoryChannel<'p>> {
    /// A ring of memory channels.
    pub fn of_memory(program: &'p Program) -> Result<Self> {
        Ring::new(program, |peer, own| program.memory_channel(peer, own))
    }

    /// The next rank has begun: its buffers may be written.
    pub fn begin(&self, own: u32) -> Result<()> {
        self.previous(own).relaxed_signal(BLOCK, DataSync::NONE)?;
        self.next(own).relaxed_wait(BLOCK, DataSync::AFTER)
    }

    /// Signals that the rank's data has arrived, for the next rank's [`receive`](Self::receive).
    pub fn send(&self, own: u32) -> Result<()> {
        self.next(own).signal(BLOCK, DataSync::BEFORE)
    }

    /// Waits until the previous rank's data has arrived.
    pub fn receive(&self, own: u32) -> Result<()> {
        self.previous(own).wait(BLOCK, DataSync::AFTER)
    }
}

impl<'p> Ring<PortChannel<'p>> {
    /// A ring of port channels.
    pub fn of_ports(program: &'p Program) -> Result<Self> {
        Ring::new(program, |peer, own| program.port_channel(peer, own))
    }
}
