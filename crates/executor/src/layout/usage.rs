//! The parts of every rank's input and output that the plan accesses, and how: this decides where they are placed.

use std::ops::Range;

use antiphon_plan::{Access, Block, BufferType, Mode, OpKind, Plan, Rank};

/// A set of chunks as ascending ranges that do not touch.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Chunks(Vec<Range<u64>>);

impl Chunks {
    fn new(mut ranges: Vec<Range<u64>>) -> Self {
        ranges.retain(|range| !range.is_empty());
        ranges.sort_by_key(|range| range.start);
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in ranges {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Chunks(merged)
    }

    /// Whether a chunk is in the set, and up to which chunk that answer holds.
    pub(crate) fn at(&self, chunk: u64) -> (bool, u64) {
        let next = self.0.partition_point(|range| range.end <= chunk);
        match self.0.get(next) {
            Some(range) if range.start <= chunk => (true, range.end),
            Some(range) => (false, range.start),
            None => (false, u64::MAX),
        }
    }
}

/// The accesses to a tensor of one rank.
#[derive(Debug, Default, Clone)]
pub(crate) struct Usage {
    /// Touched by other ranks.
    pub(crate) remote: Chunks,
    /// Written, by any block.
    pub(crate) written: Chunks,
    /// Surely written as a whole, so that what was there before does not matter.
    pub(crate) overwritten: Chunks,
}

#[derive(Default)]
struct Collected {
    remote: Vec<Range<u64>>,
    written: Vec<Range<u64>>,
    overwritten: Vec<Range<u64>>,
}

/// The usage of every rank's input and output. `place` says where chunks of a buffer lie if the two share memory.
pub(crate) fn usage(
    plan: &Plan,
    place: impl Fn(Rank, BufferType, &Range<u64>) -> (BufferType, Range<u64>),
) -> Vec<[Usage; 2]> {
    let mut all: Vec<[Collected; 2]> = plan.gpus.iter().map(|_| Default::default()).collect();
    let mut note = |by: Rank, access: Access, sure: bool| {
        if access.buffer == BufferType::Scratch {
            return;
        }
        let (buffer, chunks) = place(access.rank, access.buffer, &access.chunks);
        let of = &mut all[access.rank.index()][usize::from(buffer == BufferType::Output)];
        if access.rank != by {
            of.remote.push(chunks.clone());
        }
        if access.mode == Mode::Write {
            if sure && access.group.is_none() {
                of.overwritten.push(chunks.clone());
            }
            of.written.push(chunks);
        }
    };
    for block in Block::all(plan) {
        for op in &block.get().ops {
            block.accesses(&op.kind, |access| note(block.rank(), access, true));
            if let OpKind::Pipeline(pipeline) = &op.kind {
                for inner in &pipeline.ops {
                    block.accesses(&inner.kind, |access| note(block.rank(), access, false));
                }
            }
        }
    }
    let usage = |of: Collected| Usage {
        remote: Chunks::new(of.remote),
        written: Chunks::new(of.written),
        overwritten: Chunks::new(of.overwritten),
    };
    all.into_iter().map(|tensors| tensors.map(usage)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_says_how_far_its_answer_holds() {
        let set = Chunks::new(vec![6..8, 1..3, 2..4, 5..5, 8..9]);
        assert_eq!(set, Chunks(vec![1..4, 6..9]));
        let answers: Vec<_> = [0, 1, 3, 4, 6, 8, 9].map(|chunk| set.at(chunk)).into();
        assert_eq!(
            answers,
            [(false, 1), (true, 4), (true, 4), (false, 6), (true, 9), (true, 9), (false, u64::MAX)]
        );
    }
}
