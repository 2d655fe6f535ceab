//! Inserts synchronisations between operations of one thread block that access the same chunks: its threads divide the bytes of
//! each operation in another way.

use std::collections::BTreeMap;

use super::each_block;
use crate::op::{BufferType, CopyKind, LocalChunk, Op, OpKind, PutKind};
use crate::plan::Plan;
use crate::resolve::Mode;

/// Puts a [`OpKind::Nop`] before each operation that writes what an operation of the same thread block read or wrote
/// since the block's threads last met, or reads what one wrote.
///
/// It sees what MSCCL++ 0.9.0 sees, so that plans are the same: chunks of the block's own rank, and of these not those
/// behind a switch channel, nor packets (whose flags say when they are there) other than the further sources of a reduction,
/// which takes the place of its first source. A read is forgotten when a later operation reads the same, or when another
/// chunk of its operation conflicts; turns of a pipeline are not compared with each other.
pub fn insert_dependency_sync(plan: Plan) -> Plan {
    each_block(plan, insert)
}

fn insert(ops: Vec<Op>) -> Vec<Op> {
    let mut history = History::default();
    let mut done = Vec::with_capacity(ops.len());
    for (owner, mut op) in ops.into_iter().enumerate() {
        if matches!(op.kind, OpKind::Nop | OpKind::Barrier { .. }) {
            history.forget();
        }
        if let OpKind::Pipeline(pipeline) = &mut op.kind {
            pipeline.ops = insert(std::mem::take(&mut pipeline.ops));
        }
        let mut conflict = false;
        accesses(&op.kind, &mut |chunk, mode| {
            if history.conflicts(chunk, mode, owner) {
                history.forget();
                conflict = true;
            }
            history.record(chunk, mode, owner);
        });
        if conflict {
            done.push(Op { kind: OpKind::Nop, origin: op.origin });
        }
        done.push(op);
    }
    done
}

/// The accesses of an operation that are considered: sources, then destinations.
fn accesses(op: &OpKind, each: &mut impl FnMut(LocalChunk, Mode)) {
    match op {
        OpKind::Copy(copy) => {
            if copy.kind != CopyKind::Unpack {
                each(copy.src, Mode::Read);
            }
            if copy.kind != CopyKind::Pack {
                each(copy.dst, Mode::Write);
            }
        }
        OpKind::Put(put) if put.kind != PutKind::ReadPackets => {
            put.src.iter().for_each(|&chunk| each(chunk, Mode::Read));
        }
        OpKind::Get(get) => get.dst.iter().for_each(|&chunk| each(chunk, Mode::Write)),
        OpKind::Reduce(reduce) => {
            let unseen = usize::from(reduce.packets);
            reduce.src.iter().skip(unseen).for_each(|&chunk| each(chunk, Mode::Read));
            each(reduce.dst, Mode::Write);
        }
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().for_each(|op| accesses(&op.kind, each)),
        _ => {}
    }
}

/// The last accesses to each chunk.
#[derive(Default)]
struct History {
    /// For each buffer, disjoint spans by their first chunk.
    spans: [BTreeMap<u64, Span>; 3],
}

#[derive(Clone, Copy)]
struct Span {
    end: u64,
    owner: usize,
    mode: Mode,
}

impl History {
    fn forget(&mut self) {
        self.spans.iter_mut().for_each(BTreeMap::clear);
    }

    fn of(&mut self, buffer: BufferType) -> &mut BTreeMap<u64, Span> {
        &mut self.spans[match buffer {
            BufferType::Input => 0,
            BufferType::Output => 1,
            BufferType::Scratch => 2,
        }]
    }

    /// The first chunks of the spans that overlap some chunks.
    fn overlapping(spans: &BTreeMap<u64, Span>, chunk: LocalChunk) -> impl Iterator<Item = (u64, Span)> {
        let (start, end) = (chunk.index, chunk.index.saturating_add(chunk.size));
        let before = spans.range(..start).next_back().filter(|(_, span)| span.end > start);
        before.into_iter().chain(spans.range(start..end)).map(|(&at, &span)| (at, span))
    }

    fn conflicts(&mut self, chunk: LocalChunk, mode: Mode, owner: usize) -> bool {
        chunk.size > 0
            && Self::overlapping(self.of(chunk.buffer), chunk)
                .any(|(_, span)| span.owner != owner && (mode == Mode::Write || span.mode == Mode::Write))
    }

    /// The parts of older spans outside of the chunk remain.
    fn record(&mut self, chunk: LocalChunk, mode: Mode, owner: usize) {
        if chunk.size == 0 {
            return;
        }
        let spans = self.of(chunk.buffer);
        let (start, end) = (chunk.index, chunk.index.saturating_add(chunk.size));
        let older: Vec<_> = Self::overlapping(spans, chunk).collect();
        for (at, span) in older {
            spans.remove(&at);
            if at < start {
                spans.insert(at, Span { end: start, ..span });
            }
            if span.end > end {
                spans.insert(end, span);
            }
        }
        spans.insert(start, Span { end, owner, mode });
    }
}
