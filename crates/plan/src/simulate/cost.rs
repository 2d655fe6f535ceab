//! The cost of an operation: the bytes that it moves over each link.

use std::ops::Range;

use super::cluster::Cluster;
use super::error::SimulateError;
use super::network::ResourceId;
use super::resources::Links;
use crate::extent::Extent;
use crate::ids::Rank;
use crate::op::{ChannelType, OpKind};
use crate::place::Place;
use crate::resolve::{Access, Block, Mode};

/// Bytes that move while a thread block does an operation.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub resources: Vec<ResourceId>,
    /// Bytes per ns that it gets at most.
    pub cap: f64,
    pub bytes: f64,
}

/// Plain bytes of a rank's scratch that packets hold, however large the packets are.
pub(super) type PacketRange = (Rank, Range<u64>);

/// The work of an operation that moves data.
#[derive(Clone, Debug, Default)]
pub(super) struct Work {
    /// Before bytes flow.
    pub latency_ns: f64,
    /// Within the rank: both what is read and what is written.
    pub local: Option<Flow>,
    /// Over links.
    pub remote: Vec<Flow>,
    /// Packets that it waits for.
    pub reads: Vec<PacketRange>,
    /// Packets that it leaves.
    pub writes: Vec<PacketRange>,
    /// The ranks whose memory it writes, each with the number of bytes.
    pub sends: Vec<(Rank, u64)>,
    /// All bytes that it moves; those within the rank only if there are no others.
    pub bytes: u64,
}

/// A piece of the bytes: turn `turn` of a pipeline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub turn: u64,
    pub unit: u64,
}

/// Knows what operations cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs<'a> {
    pub cluster: &'a Cluster,
    pub links: Links,
    pub extent: Extent,
}

impl Costs<'_> {
    /// The bytes of an access: of a pipeline the turn's piece, except of packets, and of that the block's share.
    pub fn bytes(
        &self,
        chunks: &Range<u64>,
        group: Option<crate::GroupShare>,
        turn: Option<Turn>,
    ) -> Range<u64> {
        let whole = self.extent.bytes(chunks).expect("checked before the start");
        let piece = match turn {
            Some(Turn { turn, unit }) => {
                let from = whole.start.saturating_add(turn.saturating_mul(unit)).min(whole.end);
                from..from.saturating_add(unit).min(whole.end)
            }
            None => whole,
        };
        match group {
            Some(group) => self.extent.share(&piece, group),
            None => piece,
        }
    }

    /// The loads and stores of an operation. For an operation on a port, only its reads from its own rank.
    pub fn work(&self, block: Block<'_>, op: &OpKind, turn: Option<Turn>) -> Work {
        let mut accesses = Vec::new();
        block.accesses(op, |access| accesses.push(access));
        let turn = turn.filter(|_| !accesses.iter().any(|access| access.packets));
        let mut work = Work::default();
        let mut sides = Sides::default();
        let by_port = matches!(op, OpKind::Put(put) if put.channel_type == ChannelType::Port);
        for access in accesses {
            let range = self.bytes(&access.chunks, access.group, turn);
            if range.is_empty() || (by_port && access.mode == Mode::Write) {
                continue;
            }
            self.add(block.rank(), access, range, &mut work, &mut sides);
        }
        if by_port {
            // The engine reads the bytes; of packets the block has only to see that they are there.
            sides.local = 0;
        }
        self.flows(block, op, sides, &mut work);
        work
    }

    fn add(&self, own: Rank, access: Access, range: Range<u64>, work: &mut Work, sides: &mut Sides) {
        let bytes = (range.end - range.start) * if access.packets { 2 } else { 1 };
        match (access.rank == own, access.mode) {
            (true, mode) => {
                sides.local = sides.local.saturating_add(bytes);
                sides.reads_local |= mode == Mode::Read;
            }
            (false, Mode::Read) => sides.loads.push((access.rank, bytes)),
            (false, Mode::Write) => sides.stores.push((access.rank, bytes)),
        }
        if access.packets {
            let list = if access.mode == Mode::Read { &mut work.reads } else { &mut work.writes };
            list.push((access.rank, range));
        }
    }

    fn flows(&self, block: Block<'_>, op: &OpKind, sides: Sides, work: &mut Work) {
        let (costs, link, own) = (&self.cluster.block, &self.cluster.link, block.rank());
        if sides.local > 0 {
            let resources = self.links.memory(own).to_vec();
            work.local = Some(Flow { resources, cap: costs.local_gb_s, bytes: sides.local as f64 });
        }
        if sides.reads_local {
            work.latency_ns = costs.memory_ns;
        }
        if !sides.loads.is_empty() {
            work.latency_ns = work.latency_ns.max(2.0 * link.latency_ns);
        }
        let total =
            |list: &[(Rank, u64)]| list.iter().fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
        let (stored, loaded) = (total(&sides.stores), total(&sides.loads));
        work.bytes = if stored + loaded > 0 { stored.saturating_add(loaded) } else { sides.local };
        let in_switch = link.multicast
            && matches!(
                op,
                OpKind::SwitchReduce(_) | OpKind::SwitchBroadcast(_) | OpKind::SwitchReduceBroadcast(_)
            );
        for (list, reduce) in [(&sides.loads, true), (&sides.stores, false)] {
            if in_switch && !list.is_empty() {
                let members: Vec<Rank> = list.iter().map(|(rank, _)| *rank).collect();
                let cap = if reduce { costs.load_gb_s } else { costs.store_gb_s };
                let resources = self.links.switch(own, &members, reduce);
                work.remote.push(Flow { resources, cap, bytes: list[0].1 as f64 });
                continue;
            }
            for &(peer, bytes) in list {
                let (resources, cap) = match reduce {
                    true => (self.links.load(own, peer), costs.load_gb_s),
                    false => (self.links.store(own, peer), costs.store_gb_s * bytes as f64 / stored as f64),
                };
                work.remote.push(Flow { resources: resources.to_vec(), cap, bytes: bytes as f64 });
            }
        }
        work.sends = sides.stores;
    }
}

/// The bytes of an operation by where they are.
#[derive(Debug, Default)]
struct Sides {
    local: u64,
    reads_local: bool,
    loads: Vec<(Rank, u64)>,
    stores: Vec<(Rank, u64)>,
}

/// Whether the ranks that an operation is about have the link that it needs.
pub(super) fn reachable(
    links: &Links,
    cluster: &Cluster,
    block: Block<'_>,
    place: Place,
    op: &OpKind,
) -> Result<(), SimulateError> {
    let from = block.rank();
    let port = match op {
        OpKind::Put(put) => put.channel_type == ChannelType::Port,
        OpKind::Notify(notify) => notify.channel_type == ChannelType::Port,
        _ => false,
    };
    let link = if port { "network card" } else { "mapped memory (another node)" };
    let reaches = |to: Rank| to == from || links.same_node(from, to) || (port && cluster.nic.is_some());
    let mut missing = None;
    if let OpKind::Notify(notify) = op {
        let peers = notify.channels.iter().map(|&channel| block.peer(notify.channel_type, channel));
        missing = peers.into_iter().find(|&to| !reaches(to));
    }
    block.accesses(op, |access| {
        if !reaches(access.rank) {
            missing.get_or_insert(access.rank);
        }
    });
    match missing {
        Some(to) => Err(SimulateError::Unreachable { place, from, to, link }),
        None => Ok(()),
    }
}
