//! The operations that move data: their chunks, the places of the bytes, and the work on them.

use std::ops::Range;

use antiphon_plan::{
    BufferType, ChannelType, Copy, CopyKind, Get, GroupShare, LocalChunk, OpKind, Put, PutKind, Rank,
    RankChunk, Reduce, ReduceOp, RemoteChunk, SwitchBroadcast, SwitchChunk, SwitchReduce,
    SwitchReduceBroadcast,
};

use super::super::{
    placement::{Base, Piece},
    program::{Frame, Operand, Reduction, Step, Steps, Work},
};
use super::{Compiler, Scope};
use crate::error::Result;

/// Chunks that an operation is about.
struct Chunks {
    rank: Rank,
    buffer: BufferType,
    chunks: Range<u64>,
    packets: bool,
}

impl<'a> Compiler<'a> {
    pub(super) fn copy(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        copy: &Copy,
        steps: &mut Steps,
    ) -> Result<()> {
        let rank = scope.block.rank();
        let src = local(rank, copy.src, copy.kind == CopyKind::Unpack);
        let dst = local(rank, copy.dst, copy.kind == CopyKind::Pack);
        self.data(scope, op, copy.group, vec![src, dst], steps, |operands| {
            let (from, to) = (operands[0], operands[1]);
            match copy.kind {
                CopyKind::Plain => Work::Copy { from, to: vec![to] },
                CopyKind::Pack => Work::Pack { from, to: vec![to] },
                CopyKind::Unpack => Work::Unpack { from, to },
            }
        })
    }

    pub(super) fn put(&mut self, scope: Scope<'a>, op: &OpKind, put: &Put, steps: &mut Steps) -> Result<()> {
        let rank = scope.block.rank();
        if put.channel_type == ChannelType::Port {
            self.push(scope, Step::Meet, steps)?; // a port does one thing after the other
        }
        let reads_packets = put.kind == PutKind::ReadPackets;
        let packets = reads_packets || put.kind == PutKind::Packets;
        let to = |chunk: &RemoteChunk| remote(scope, put.channel_type, chunk, packets);
        let forward = |operands: &[Operand]| Work::Forward { from: operands[0], to: operands[1..].to_vec() };
        if reads_packets {
            let mut operands = vec![local(rank, put.src[0], true)];
            operands.extend(put.dst.iter().map(to));
            return self.data(scope, op, put.group, operands, steps, forward);
        }
        // A port moves bytes as they are: what it puts as packets was packed before.
        let packed = packets && put.channel_type == ChannelType::Port;
        let signals = matches!(put.kind, PutKind::WithSignal | PutKind::WithSignalAndFlush);
        let by_engine = !packets && self.is_by_engine(put.channel_type);
        // Destinations of one source are one step, which loads it once; but a signal or a request to an engine follows each.
        let pairs: Vec<_> = put.src.iter().zip(&put.dst).collect();
        let is_together = |a: &(&LocalChunk, _), b: &(&LocalChunk, _)| a.0 == b.0 && !signals && !by_engine;
        for (at, group) in pairs.chunk_by(is_together).enumerate() {
            let first = steps.steps.len();
            let mut operands = vec![local(rank, *group[0].0, packed)];
            operands.extend(group.iter().map(|(_, chunk)| to(chunk)));
            self.data(scope, op, put.group, operands, steps, |operands| {
                let (from, to) = (operands[0], operands[1..].to_vec());
                match (packets, packed) {
                    (false, _) => Work::Copy { from, to },
                    (true, false) => Work::Pack { from, to },
                    (true, true) => Work::Forward { from, to },
                }
            })?;
            if by_engine {
                let copies = steps.steps.drain(first..).map(Step::by_engine).collect::<Vec<_>>();
                steps.steps.extend(copies);
            }
            if signals {
                let Some(channel) = put.channels.get(at) else {
                    return Err(scope.refuse(op, "does not say through which channel it signals"));
                };
                self.push(scope, Step::Meet, steps)?;
                self.signal(scope, op, put.channel_type, &[*channel], false, steps)?;
            }
        }
        if by_engine && put.kind == PutKind::WithSignalAndFlush {
            self.flush(scope, steps)?;
        }
        Ok(())
    }

    pub(super) fn get(&mut self, scope: Scope<'a>, op: &OpKind, get: &Get, steps: &mut Steps) -> Result<()> {
        for (src, dst) in get.src.iter().zip(&get.dst) {
            let operands =
                vec![remote(scope, get.channel_type, src, false), local(scope.block.rank(), *dst, false)];
            let work = |operands: &[Operand]| Work::Copy { from: operands[0], to: vec![operands[1]] };
            self.data(scope, op, get.group, operands, steps, work)?;
        }
        Ok(())
    }

    pub(super) fn reduce(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        reduce: &Reduce,
        steps: &mut Steps,
    ) -> Result<()> {
        let rank = scope.block.rank();
        let through = reduce.channel_type.unwrap_or(ChannelType::Memory);
        let (first, others) = reduce.src.split_first().expect("a checked reduction has a source");
        // Plain sources, packets, the result, plain copies of it, copies as packets.
        let mut lists: [Vec<Chunks>; 5] = Default::default();
        lists[0].push(local(rank, *first, false));
        let others = others.iter().map(|chunk| local(rank, *chunk, reduce.packets));
        lists[usize::from(reduce.packets)].extend(others);
        lists[0].extend(reduce.remote_src.iter().map(|chunk| remote(scope, through, chunk, false)));
        lists[2].push(local(rank, reduce.dst, false));
        lists[4].extend(reduce.packet_dst.iter().map(|chunk| local(rank, *chunk, true)));
        let sent = reduce.remote_dst.iter().map(|chunk| remote(scope, through, chunk, reduce.packets));
        lists[3 + usize::from(reduce.packets)].extend(sent);
        self.reduction(scope, op, reduce.op, reduce.group, lists, steps)
    }

    pub(super) fn switch_reduce(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        reduce: &SwitchReduce,
        steps: &mut Steps,
    ) -> Result<()> {
        let from = LocalChunk { buffer: reduce.buffer, index: reduce.offset, size: reduce.size };
        let members = scope.block.switch(reduce.channels[0]).1;
        let plain = members.iter().map(|&member| local(member, from, false)).collect();
        self.switch_reduction(scope, op, reduce.op, plain, vec![of_rank(reduce.dst, false)], steps)
    }

    pub(super) fn switch_reduce_broadcast(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        reduce: &SwitchReduceBroadcast,
        steps: &mut Steps,
    ) -> Result<()> {
        let (plain, to) = (members(scope, reduce.src, false), members(scope, reduce.dst, false));
        self.switch_reduction(scope, op, reduce.op, plain, to, steps)
    }

    pub(super) fn switch_broadcast(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        broadcast: &SwitchBroadcast,
        steps: &mut Steps,
    ) -> Result<()> {
        let packets = broadcast.packets;
        let mut operands = vec![of_rank(broadcast.src, packets)];
        operands.extend(members(scope, broadcast.dst, packets));
        self.data(scope, op, None, operands, steps, |operands| {
            let (from, to) = (operands[0], operands[1..].to_vec());
            if packets { Work::Forward { from, to } } else { Work::Copy { from, to } }
        })
    }

    fn switch_reduction(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        reduce: ReduceOp,
        plain: Vec<Chunks>,
        mut to: Vec<Chunks>,
        steps: &mut Steps,
    ) -> Result<()> {
        if plain.is_empty() || to.is_empty() {
            return Err(scope.refuse(op, "its switch channel has no members"));
        }
        let copies = to.split_off(1);
        self.reduction(scope, op, reduce, None, [plain, Vec::new(), to, copies, Vec::new()], steps)
    }

    fn reduction(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        reduce: ReduceOp,
        group: Option<GroupShare>,
        lists: [Vec<Chunks>; 5],
        steps: &mut Steps,
    ) -> Result<()> {
        let lens = lists.each_ref().map(Vec::len);
        let element = self.target.element as u64;
        let unit = scope.unit.filter(|_| lists[1].is_empty() && lists[4].is_empty());
        let cuts = [Some(self.chunk as u64), group.map(|_| self.target.extent.alignment()), unit];
        if let Some(cut) = cuts.into_iter().flatten().find(|cut| !cut.is_multiple_of(element)) {
            return Err(scope.refuse(op, format!("pieces of {cut} bytes cut elements of {element} bytes")));
        }
        self.no_partial_overlap(scope, op, &lists)?;
        self.sources = self.sources.max(lens[0] + lens[1]);
        self.packet_sources = self.packet_sources.max(lens[1]);
        self.data(scope, op, group, lists.into_iter().flatten().collect(), steps, |operands| {
            let mut rest = operands;
            let mut take = |len| {
                let (taken, left) = rest.split_at(len);
                rest = left;
                taken.to_vec()
            };
            let [plain, packets, to, copies, packed] = lens.map(&mut take);
            Work::Reduce(Box::new(Reduction { op: reduce, plain, packets, to: to[0], copies, packed }))
        })
    }

    /// A reduction may write to one of its sources, but not beside one.
    fn no_partial_overlap(&self, scope: Scope<'a>, op: &OpKind, lists: &[Vec<Chunks>; 5]) -> Result<()> {
        let to = &lists[2][0];
        let written = self.pieces(scope, op, to)?;
        for source in lists[0].iter().filter(|source| source.rank == to.rank) {
            let pieces = self.pieces(scope, op, source)?;
            let touches_another = |(at, piece): (usize, &Piece)| {
                let first = pieces.partition_point(|other| other.chunks.end <= piece.chunks.start);
                let mut near =
                    pieces[first..].iter().take_while(|other| other.chunks.start < piece.chunks.end);
                pieces.get(at) != Some(piece) && near.any(|other| other.base == piece.base)
            };
            if written.iter().enumerate().any(touches_another) {
                let (source, to) = (&source.chunks, &to.chunks);
                let what = format!("source {source:?} and destination {to:?} overlap in part");
                return Err(scope.refuse(op, what));
            }
        }
        Ok(())
    }

    /// The pieces of some chunks, which exist; ascending.
    fn pieces(&self, scope: Scope<'a>, op: &OpKind, chunks: &Chunks) -> Result<Vec<Piece>> {
        let Chunks { rank, buffer, chunks: range, packets } = chunks;
        let there = self.target.plan.gpus[rank.index()].chunks(*buffer);
        if range.end > there {
            let what = format!("chunks {range:?} of the {there} of rank {rank}'s {buffer:?}");
            return Err(scope.refuse(op, what));
        }
        match (buffer, packets) {
            (BufferType::Scratch, true) => Ok(vec![Piece { base: Base::Packets, chunks: range.clone() }]),
            (BufferType::Scratch, false) => Ok(vec![Piece { base: Base::Scratch, chunks: range.clone() }]),
            (_, true) => {
                Err(scope.refuse(op, format!("packets in the {buffer:?}; they belong into scratch")))
            }
            (_, false) => Ok(self.target.placements.pieces(*rank, *buffer, range)),
        }
    }

    /// Emits the steps of an operation on chunks: one for each part whose operands lie in one place each.
    fn data(
        &mut self,
        scope: Scope<'a>,
        op: &OpKind,
        group: Option<GroupShare>,
        chunks: Vec<Chunks>,
        steps: &mut Steps,
        work: impl Fn(&[Operand]) -> Work,
    ) -> Result<()> {
        let size = chunks[0].chunks.end - chunks[0].chunks.start;
        if let Some(other) = chunks.iter().find(|other| other.chunks.end - other.chunks.start != size) {
            let other = other.chunks.end - other.chunks.start;
            return Err(scope.refuse(op, format!("{size} chunks here, {other} there")));
        }
        let by_turn = !chunks.iter().any(|chunks| chunks.packets);
        if !by_turn && group.is_some() {
            self.whole_packets(scope, op)?;
        }
        let pieces: Vec<Vec<Piece>> =
            chunks.iter().map(|chunks| self.pieces(scope, op, chunks)).collect::<Result<_>>()?;
        // Every range lies in a buffer whose bytes fit into memory.
        let all = 0..size * self.chunk as u64;
        let share = group.map_or(all.clone(), |group| self.target.extent.share(&all, group));
        let share = share.start as usize..share.end as usize;
        let (mut start, mut next) = (0, vec![(0usize, 0u64); pieces.len()]);
        while start < size {
            let ends = pieces.iter().zip(&next).map(|(list, &(at, done))| {
                let piece: &Piece = &list[at];
                done + (piece.chunks.end - piece.chunks.start)
            });
            let end = ends.min().unwrap_or(size);
            let mut operands = Vec::with_capacity(pieces.len());
            for ((list, next), chunks) in pieces.iter().zip(&mut next).zip(&chunks) {
                let piece = &list[next.0];
                // Where the operation's first chunk would lie if all of it were here.
                let first = (piece.chunks.start as usize).wrapping_sub(next.1 as usize);
                operands.push(Operand::new(chunks.rank.index(), piece.base, first));
                let until = next.1 + (piece.chunks.end - piece.chunks.start);
                if until == end {
                    *next = (next.0 + 1, until);
                }
            }
            let span = start as usize * self.chunk..end as usize * self.chunk;
            let frame = Frame { share: share.clone(), span, by_turn };
            self.push(scope, Step::Data { frame, work: work(&operands) }, steps)?;
            start = end;
        }
        Ok(())
    }

    /// Shares must not begin inside a packet.
    fn whole_packets(&self, scope: Scope<'a>, op: &OpKind) -> Result<()> {
        let (unit, payload) = (self.target.extent.alignment(), self.target.packets.payload());
        match unit.is_multiple_of(payload as u64) {
            true => Ok(()),
            false => Err(scope.refuse(op, format!("shares of {unit} bytes cut packets of {payload} bytes"))),
        }
    }
}

fn local(rank: Rank, chunk: LocalChunk, packets: bool) -> Chunks {
    Chunks { rank, buffer: chunk.buffer, chunks: chunk.index..chunk.index + chunk.size, packets }
}

fn remote(scope: Scope<'_>, through: ChannelType, chunk: &RemoteChunk, packets: bool) -> Chunks {
    let of = scope.block.remote(through, chunk.buffer_id);
    Chunks { rank: of.rank, buffer: of.buffer, chunks: chunk.index..chunk.index + chunk.size, packets }
}

fn of_rank(chunk: RankChunk, packets: bool) -> Chunks {
    let RankChunk { rank, buffer, index, size } = chunk;
    local(rank, LocalChunk { buffer, index, size }, packets)
}

/// The chunks of every member of a switch channel.
fn members(scope: Scope<'_>, chunk: SwitchChunk, packets: bool) -> Vec<Chunks> {
    let (buffer, members) = scope.block.switch(chunk.switch_channel_id);
    let chunk = LocalChunk { buffer, index: chunk.index, size: chunk.size };
    members.iter().map(|&member| local(member, chunk, packets)).collect()
}
