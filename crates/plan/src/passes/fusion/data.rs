//! The data operations that one operation can replace.

use crate::op::{
    ChannelType, Copy, CopyKind, DataSync, Get, Notify, NotifyKind, OpKind, Put, PutKind, Reduce,
    SemaphoreOp, SwitchBroadcast, SwitchChunk, SwitchReduce, SwitchReduceBroadcast,
};

/// Adds the work of `next` to `current`, if one operation can do both.
pub(super) fn merge(current: &mut OpKind, next: &OpKind) -> bool {
    match (current, next) {
        (OpKind::Notify(current), OpKind::Notify(next)) => notify(current, next),
        (OpKind::Semaphore(current), OpKind::Semaphore(next)) => semaphore(current, next),
        (OpKind::Get(current), OpKind::Get(next)) => get(current, next),
        (OpKind::Put(current), OpKind::Put(next)) => put(current, next),
        (OpKind::Reduce(current), OpKind::Reduce(next)) => reduce(current, next),
        (OpKind::Reduce(current), OpKind::Put(next)) => send(current, next),
        (OpKind::Reduce(current), OpKind::Copy(next)) => pack(current, next),
        (current @ OpKind::SwitchReduce(_), OpKind::SwitchBroadcast(next)) => switch(current, next),
        _ => false,
    }
}

fn union(a: DataSync, b: DataSync) -> DataSync {
    DataSync { before: a.before || b.before, after: a.after || b.after }
}

/// Signals and waits of different channels happen at once; two of one channel must stay two. Flushes are idempotent.
fn notify(current: &mut Notify, next: &Notify) -> bool {
    let disjoint = next.channels.iter().all(|channel| !current.channels.contains(channel));
    let mergeable = (current.kind, current.relaxed, current.channel_type)
        == (next.kind, next.relaxed, next.channel_type)
        && (disjoint || current.kind == NotifyKind::Flush);
    if mergeable {
        current.channels.extend(&next.channels);
        current.channels.sort_unstable();
        current.channels.dedup();
        current.data_sync = union(current.data_sync, next.data_sync);
    }
    mergeable
}

fn semaphore(current: &mut SemaphoreOp, next: &SemaphoreOp) -> bool {
    let mergeable = current.acquire == next.acquire;
    if mergeable {
        current.semaphores.extend(&next.semaphores);
        current.data_sync = union(current.data_sync, next.data_sync);
    }
    mergeable
}

fn get(current: &mut Get, next: &Get) -> bool {
    let size = |get: &Get| get.src.first().map(|chunk| chunk.size);
    let mergeable = size(current) == size(next)
        && current.channel_type == next.channel_type
        && current.group == next.group;
    if mergeable {
        current.src.extend(&next.src);
        current.dst.extend(&next.dst);
        current.channels.extend(&next.channels);
    }
    mergeable
}

/// Packets that are read once can be put anywhere; other data each has its source.
fn put(current: &mut Put, next: &Put) -> bool {
    let size = |put: &Put| put.src.first().map(|chunk| chunk.size);
    let read_once = current.kind == PutKind::ReadPackets;
    let sources = if read_once { current.src == next.src } else { size(current) == size(next) };
    let mergeable = sources
        && (current.kind, current.channel_type, current.group) == (next.kind, next.channel_type, next.group);
    if mergeable {
        if !read_once {
            current.src.extend(&next.src);
        }
        current.dst.extend(&next.dst);
        current.channels.extend(&next.channels);
    }
    mergeable
}

/// Reductions of the same base into the same place take in each other's further sources. Not once the result is sent:
/// what was sent would lack them.
fn reduce(current: &mut Reduce, next: &Reduce) -> bool {
    let sent = |reduce: &Reduce| reduce.packet_dst.is_some() || !reduce.remote_dst.is_empty();
    let mergeable = !sent(current)
        && !sent(next)
        && current.name() == next.name()
        && (current.src.first(), current.dst, current.channel_type, current.op, current.group)
            == (next.src.first(), next.dst, next.channel_type, next.op, next.group);
    if mergeable {
        current.src.extend(next.src.iter().skip(1));
        current.remote_src.extend(&next.remote_src);
    }
    mergeable
}

/// A reduction sends its result: plain data, or packets, which it may also take from the copy that it keeps in scratch.
fn send(current: &mut Reduce, next: &Put) -> bool {
    let from = match (next.kind, current.packets) {
        (PutKind::Plain, false) | (PutKind::Packets, true) => Some(current.dst),
        (PutKind::ReadPackets, true) => current.packet_dst,
        _ => None,
    };
    let mergeable = next.channel_type == ChannelType::Memory
        && from.is_some()
        && from.as_ref() == next.src.first()
        && current.group == next.group;
    if mergeable {
        current.remote_dst.extend(&next.dst);
        current.channel_type = Some(ChannelType::Memory);
    }
    mergeable
}

/// A reduction of packets keeps its result as packets too.
fn pack(current: &mut Reduce, next: &Copy) -> bool {
    let mergeable = next.kind == CopyKind::Pack
        && current.name() == "repkt"
        && current.dst == next.src
        && current.group == next.group;
    if mergeable {
        current.packet_dst = Some(next.dst);
    }
    mergeable
}

/// The switch hands the result on without a stay in memory.
fn switch(current: &mut OpKind, next: &SwitchBroadcast) -> bool {
    let OpKind::SwitchReduce(SwitchReduce { offset, size, dst, channels, op, .. }) = &*current else {
        return false;
    };
    let channel = next.dst.switch_channel_id;
    let mergeable = !next.packets && channels[..] == [channel] && *size == next.dst.size && *dst == next.src;
    if mergeable {
        let src = SwitchChunk { switch_channel_id: channel, index: *offset, size: *size };
        *current = OpKind::SwitchReduceBroadcast(SwitchReduceBroadcast { src, dst: next.dst, op: *op });
    }
    mergeable
}
