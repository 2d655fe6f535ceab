//! The checks of each operation by itself: sizes, bounds, types, and the ends of channels.

use crate::ids::{ChannelIndex, Rank};
use crate::op::{
    BufferType, ChannelType, CopyKind, LocalChunk, NotifyKind, OpKind, Put, PutKind, RankChunk, Reduce,
    RemoteChunk, SwitchChunk,
};
use crate::plan::{Plan, Protocol};
use crate::resolve::{Access, Block, Wiring};

use super::finding::{Finding, Kind};

/// Everything of that sort, in the plan's order, but no more than `limit`.
pub(super) fn check(plan: &Plan, wiring: &Wiring, limit: usize) -> Vec<Finding> {
    let mut found = Vec::new();
    for block in Block::all(plan) {
        for (at, op) in block.get().ops.iter().enumerate() {
            let mut check = |inner, kind: &OpKind| {
                if let Some(kind) = wrong(plan, wiring, &block, kind) {
                    found.push(Finding::new(plan, kind, vec![block.place(at, inner)]));
                }
            };
            check(None, &op.kind);
            if let OpKind::Pipeline(pipeline) = &op.kind {
                pipeline.ops.iter().enumerate().for_each(|(inner, op)| check(Some(inner), &op.kind));
            }
            if found.len() >= limit {
                return found;
            }
        }
    }
    found
}

/// The error in an operation, if any.
fn wrong(plan: &Plan, wiring: &Wiring, block: &Block<'_>, op: &OpKind) -> Option<Kind> {
    if let Err(why) = possible(block, op) {
        return Some(Kind::Operation { why: format!("{}: {why}", op.name()) });
    }
    if let alone @ Some(_) = alone(wiring, block, op) {
        return alone;
    }
    let mut outside = None;
    block.accesses(op, |access| {
        if outside.is_none() {
            outside = bounds(plan, access);
        }
    });
    outside
}

/// A channel that signals or waits and leads nowhere. For data alone it needs no counterpart.
fn alone(wiring: &Wiring, block: &Block<'_>, op: &OpKind) -> Option<Kind> {
    let (channel_type, channels) = match op {
        OpKind::Notify(notify) if notify.kind != NotifyKind::Flush => (notify.channel_type, &notify.channels),
        OpKind::Put(put) if matches!(put.kind, PutKind::WithSignal | PutKind::WithSignalAndFlush) => {
            (put.channel_type, &put.channels)
        }
        _ => return None,
    };
    channels.iter().find_map(|&index| {
        let channel = block.channel(channel_type, index);
        let there = wiring.counterpart(block.rank(), channel_type, channel);
        let peer = block.peer(channel_type, index);
        there.is_none().then_some(Kind::NoCounterpart { channel_type, channel, peer })
    })
}

fn bounds(plan: &Plan, access: Access) -> Option<Kind> {
    let Access { rank, buffer, chunks, packets, .. } = access;
    let there = plan.gpus[rank.index()].chunks(buffer);
    let have = if packets && plan.protocol == Protocol::Simple { there / 2 } else { there };
    (chunks.end > have).then_some(Kind::Bounds { chunks, rank, buffer, have })
}

fn possible(block: &Block<'_>, op: &OpKind) -> Result<(), String> {
    match op {
        OpKind::Nop
        | OpKind::Barrier { .. }
        | OpKind::Notify(_)
        | OpKind::Semaphore(_)
        | OpKind::Pipeline(_) => Ok(()),
        OpKind::Copy(copy) => {
            sizes(copy.src.size, [copy.dst.size])?;
            match copy.kind {
                CopyKind::Plain => Ok(()),
                CopyKind::Pack => scratch(copy.dst.buffer),
                CopyKind::Unpack => scratch(copy.src.buffer),
            }
        }
        OpKind::Put(put) => possible_put(block, put),
        OpKind::Get(get) => {
            memory(get.channel_type)?;
            for (src, dst) in get.src.iter().zip(&get.dst) {
                sizes(src.size, [dst.size])?;
            }
            reaches(block, get.channel_type, &get.src, &get.channels)
        }
        OpKind::Reduce(reduce) => possible_reduce(block, reduce),
        OpKind::SwitchReduce(op) => {
            sizes(op.size, [op.dst.size])?;
            local(block, op.dst)?;
            member(block, op.channels[0])?;
            match block.switch(op.channels[0]).0 {
                bound if bound == op.buffer => Ok(()),
                bound => Err(format!("reduces {:?}, and its channel binds {bound:?}", op.buffer)),
            }
        }
        OpKind::SwitchBroadcast(op) => {
            sizes(op.src.size, [op.dst.size])?;
            local(block, op.src)?;
            member(block, op.dst.switch_channel_id)?;
            match op.packets {
                true => {
                    scratch(op.src.buffer)?;
                    scratch(block.switch(op.dst.switch_channel_id).0)
                }
                false => Ok(()),
            }
        }
        OpKind::SwitchReduceBroadcast(op) => {
            let SwitchChunk { switch_channel_id, size, .. } = op.src;
            sizes(size, [op.dst.size])?;
            member(block, switch_channel_id)?;
            member(block, op.dst.switch_channel_id)
        }
    }
}

fn possible_put(block: &Block<'_>, put: &Put) -> Result<(), String> {
    for (at, dst) in put.dst.iter().enumerate() {
        sizes(put.src[if put.src.len() == 1 { 0 } else { at }].size, [dst.size])?;
    }
    match put.kind {
        PutKind::Plain => {}
        PutKind::WithSignal | PutKind::WithSignalAndFlush if put.channel_type != ChannelType::Port => {
            return Err(format!("goes through a port, not a {:?} channel", put.channel_type));
        }
        PutKind::WithSignal | PutKind::WithSignalAndFlush => {}
        PutKind::Packets | PutKind::ReadPackets => {
            for dst in &put.dst {
                scratch(block.remote(put.channel_type, dst.buffer_id).buffer)?;
            }
            // A port moves packets as they are.
            if put.kind == PutKind::ReadPackets || put.channel_type == ChannelType::Port {
                put.src.iter().try_for_each(|src| scratch(src.buffer))?;
            }
        }
    }
    if put.channel_type == ChannelType::Switch {
        return Err("a switch channel has no put".into());
    }
    reaches(block, put.channel_type, &put.dst, &put.channels)
}

fn possible_reduce(block: &Block<'_>, reduce: &Reduce) -> Result<(), String> {
    let local = reduce.src.iter().chain(&reduce.packet_dst).map(|chunk: &LocalChunk| chunk.size);
    let remote = reduce.remote_src.iter().chain(&reduce.remote_dst);
    sizes(reduce.dst.size, local.chain(remote.map(|chunk| chunk.size)))?;
    let channel_type = reduce.channel_type.unwrap_or(ChannelType::Memory);
    if reduce.packets {
        if !reduce.remote_src.is_empty() {
            return Err("packets come to the reader, and are not read from another rank".into());
        }
        reduce.src[1..].iter().chain(&reduce.packet_dst).try_for_each(|chunk| scratch(chunk.buffer))?;
        for dst in &reduce.remote_dst {
            scratch(block.remote(channel_type, dst.buffer_id).buffer)?;
        }
    }
    memory(channel_type)?;
    reaches(block, channel_type, &reduce.remote_src, &[])?;
    reaches(block, channel_type, &reduce.remote_dst, &[])
}

fn sizes(first: u64, others: impl IntoIterator<Item = u64>) -> Result<(), String> {
    match others.into_iter().find(|&other| other != first) {
        Some(other) => Err(format!("{first} chunks meet {other}")),
        None => Ok(()),
    }
}

fn scratch(buffer: BufferType) -> Result<(), String> {
    match buffer {
        BufferType::Scratch => Ok(()),
        other => Err(format!("packets in {other:?}, and not in Scratch")),
    }
}

fn memory(channel_type: ChannelType) -> Result<(), String> {
    match channel_type {
        ChannelType::Memory => Ok(()),
        other => Err(format!("needs a memory channel, not {other:?}")),
    }
}

fn local(block: &Block<'_>, chunk: RankChunk) -> Result<(), String> {
    match chunk.rank == block.rank() {
        true => Ok(()),
        false => Err(format!("the chunk on this side of the switch is rank {}'s", chunk.rank)),
    }
}

/// The switch reaches the members of its group, and only they reach the switch.
fn member(block: &Block<'_>, channel: ChannelIndex) -> Result<(), String> {
    let (_, members) = block.switch(channel);
    let twice = (1..members.len()).find(|&at| members[..at].contains(&members[at]));
    match twice {
        Some(at) => Err(format!("rank {} is in the switch channel's group twice", members[at])),
        None if members.contains(&block.rank()) => Ok(()),
        None => Err("its rank is not in the switch channel's group".into()),
    }
}

/// Remote chunks lie where the channels lead: each where its own leads, if they are named, else where any does that the
/// thread block lists.
fn reaches(
    block: &Block<'_>,
    channel_type: ChannelType,
    chunks: &[RemoteChunk],
    channels: &[ChannelIndex],
) -> Result<(), String> {
    for (at, chunk) in chunks.iter().enumerate() {
        let remote = block.remote(channel_type, chunk.buffer_id);
        if !remote.access_channel_types.contains(&channel_type) {
            let (rank, buffer) = (remote.rank, remote.buffer);
            return Err(format!("rank {rank}'s {buffer:?} is not for {channel_type:?} channels"));
        }
        match channels.get(at) {
            Some(&index) => leads(block.peer(channel_type, index), remote.rank)?,
            None if connected(block, channel_type, remote.rank) => {}
            None => {
                return Err(format!(
                    "no {channel_type:?} channel of its block leads to rank {}",
                    remote.rank
                ));
            }
        }
    }
    Ok(())
}

fn leads(to: Rank, buffers: Rank) -> Result<(), String> {
    match to == buffers {
        true => Ok(()),
        false => Err(format!("its channel leads to rank {to}, the buffer is rank {buffers}'s")),
    }
}

fn connected(block: &Block<'_>, channel_type: ChannelType, rank: Rank) -> bool {
    let refs = block.get().channels.iter().find(|refs| refs.channel_type == channel_type);
    let peers = block.gpu().peers(channel_type);
    refs.is_some_and(|refs| refs.channel_ids.iter().any(|id| peers[id.index()] == rank))
}
