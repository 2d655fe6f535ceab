//! Where the bytes of a plan's buffers are placed.
//!
//! Chunks that only their own rank accesses stay in the caller's tensor. Chunks that other ranks access must be in
//! symmetric memory: they stay in the tensor if it is symmetric memory, and otherwise are placed in a staging area, with a
//! copy before and after. An input that the plan writes to is staged too, because the caller's input is only read.

use std::ops::Range;

use antiphon_plan::{BufferType, Plan, Rank};

use super::usage::{Usage, usage};

/// A region of one rank's memory that holds chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Base {
    /// The caller's tensor.
    Input,
    Output,
    /// The caller's tensor if it is symmetric memory, else staged.
    SharedInput,
    SharedOutput,
    StagedInput,
    StagedOutput,
    /// The plan's scratch, for plain data.
    Scratch,
    /// The plan's scratch, for packets.
    Packets,
}

impl Base {
    pub(crate) const ALL: [Self; 8] = [
        Base::Input,
        Base::Output,
        Base::SharedInput,
        Base::SharedOutput,
        Base::StagedInput,
        Base::StagedOutput,
        Base::Scratch,
        Base::Packets,
    ];
    pub(crate) const COUNT: usize = Self::ALL.len();

    fn of(buffer: BufferType, placement: Placement) -> Self {
        match (buffer, placement) {
            (BufferType::Scratch, _) => Base::Scratch,
            (BufferType::Input, Placement::Tensor) => Base::Input,
            (BufferType::Input, Placement::Shared) => Base::SharedInput,
            (BufferType::Input, Placement::Staged) => Base::StagedInput,
            (BufferType::Output, Placement::Tensor) => Base::Output,
            (BufferType::Output, Placement::Shared) => Base::SharedOutput,
            (BufferType::Output, Placement::Staged) => Base::StagedOutput,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placement {
    Tensor,
    Shared,
    Staged,
}

/// Consecutive chunks in one region.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    /// Their region.
    pub(crate) base: Base,
    /// Their indices in it.
    pub(crate) chunks: Range<u64>,
}

/// Chunks to copy before or after.
#[derive(Debug, Clone)]
pub(crate) struct Move {
    pub(crate) from: (Base, u64),
    pub(crate) to: (Base, u64),
    pub(crate) chunks: u64,
}

/// Where all ranks' chunks are placed, for calls in place or not.
pub(crate) struct Placements {
    /// Whether the caller passes one tensor.
    in_place: bool,
    /// Chunks of the input and of the output.
    chunks: [u64; 2],
    /// Whether the plan's input and output are the same memory; then that of the larger one.
    united: Option<BufferType>,
    usage: Vec<[Usage; 2]>,
}

impl Placements {
    /// The placements for a plan whose ranks all have the same numbers of chunks.
    pub(crate) fn new(plan: &Plan, in_place: bool) -> Self {
        let chunks = plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
        let larger = if chunks[0] > chunks[1] { BufferType::Input } else { BufferType::Output };
        let united = plan.inplace.then_some(larger);
        let mut placements = Placements { in_place, chunks, united, usage: Vec::new() };
        placements.usage = usage(plan, |rank, buffer, chunks| placements.unite(rank, buffer, chunks));
        placements
    }

    /// Where a rank's smaller tensor lies in its larger one: all-gather and reduce-scatter have it at the rank's own place.
    pub(crate) fn shift(&self, rank: Rank, buffer: BufferType) -> u64 {
        let [input, output] = self.chunks;
        match buffer {
            BufferType::Input if input < output => u64::from(rank.0) * input,
            BufferType::Output if output < input => u64::from(rank.0) * output,
            _ => 0,
        }
    }

    /// Whether the smaller tensor of every rank fits into the larger one.
    pub(crate) fn can_be_in_place(&self, ranks: usize) -> bool {
        let [input, output] = self.chunks;
        input == output || input.min(output).checked_mul(ranks as u64) == Some(input.max(output))
    }

    fn unite(&self, rank: Rank, buffer: BufferType, chunks: &Range<u64>) -> (BufferType, Range<u64>) {
        match self.united {
            None => (buffer, chunks.clone()),
            Some(larger) => {
                let shift = self.shift(rank, buffer);
                (larger, chunks.start + shift..chunks.end + shift)
            }
        }
    }

    /// Whether the plan may write to the tensor that holds a buffer.
    fn writable(&self, buffer: BufferType) -> bool {
        match (buffer, self.united.is_some()) {
            (BufferType::Input, true) => self.in_place,
            (BufferType::Input, false) => false,
            (..) => true,
        }
    }

    /// Where a chunk is placed, and up to which chunk that holds.
    fn placement(&self, rank: Rank, buffer: BufferType, chunk: u64) -> (Placement, u64) {
        let usage = &self.usage[rank.index()][usize::from(buffer == BufferType::Output)];
        let (remote, until) = usage.remote.at(chunk);
        let (written, also) = usage.written.at(chunk);
        // A tensor that is input and output, of a plan that takes them for separate ones, is the output's.
        let taken = self.in_place && self.united.is_none() && buffer == BufferType::Input;
        let placement = match (remote, written && !self.writable(buffer) || taken) {
            (_, true) => Placement::Staged,
            (true, false) => Placement::Shared,
            (false, false) => Placement::Tensor,
        };
        (placement, until.min(also))
    }

    /// The places of a range of chunks of input or output, in order.
    pub(crate) fn pieces(&self, rank: Rank, buffer: BufferType, chunks: &Range<u64>) -> Vec<Piece> {
        let (buffer, chunks) = self.unite(rank, buffer, chunks);
        let (mut pieces, mut start): (Vec<Piece>, u64) = (Vec::new(), chunks.start);
        while start < chunks.end {
            let (placement, until) = self.placement(rank, buffer, start);
            let (base, end) = (Base::of(buffer, placement), until.min(chunks.end));
            match pieces.last_mut() {
                Some(last) if last.base == base => last.chunks.end = end,
                _ => pieces.push(Piece { base, chunks: start..end }),
            }
            start = end;
        }
        pieces
    }

    /// Whether any chunk of any rank may have to be staged.
    pub(crate) fn may_stage(&self) -> bool {
        (0..self.usage.len()).any(|rank| {
            [BufferType::Input, BufferType::Output].into_iter().any(|buffer| {
                let pieces = self.pieces(Rank(rank as u32), buffer, &self.all(buffer));
                pieces.iter().any(|piece| !matches!(piece.base, Base::Input | Base::Output))
            })
        })
    }

    /// Whether peers touch any rank's input, and any rank's output.
    pub(crate) fn shares(&self) -> [bool; 2] {
        let of = |buffer, base| {
            (0..self.usage.len()).any(|rank| {
                let pieces = self.pieces(Rank(rank as u32), buffer, &self.all(buffer));
                pieces.iter().any(|piece| piece.base == base)
            })
        };
        [of(BufferType::Input, Base::SharedInput), of(BufferType::Output, Base::SharedOutput)]
    }

    /// What a rank copies before the plan's operations, so that every chunk's region has what the caller gave. (Where
    /// both ends turn out to be one place, there is nothing to do.)
    pub(crate) fn loads(&self, rank: Rank) -> Vec<Move> {
        let mut loads = Vec::new();
        for (buffer, tensor) in [(BufferType::Input, Base::Input), (BufferType::Output, Base::Output)] {
            for piece in self.pieces(rank, buffer, &self.all(buffer)) {
                self.load(rank, buffer, tensor, piece, &mut loads);
            }
        }
        loads
    }

    fn load(&self, rank: Rank, buffer: BufferType, tensor: Base, piece: Piece, loads: &mut Vec<Move>) {
        let shift = if self.united.is_some() { self.shift(rank, buffer) } else { 0 };
        if buffer == BufferType::Input {
            let from = (tensor, piece.chunks.start - shift);
            let chunks = piece.chunks.end - piece.chunks.start;
            return loads.push(Move { from, to: (piece.base, piece.chunks.start), chunks });
        }
        if self.united.is_some() && self.chunks[0] >= self.chunks[1] {
            return; // the input covers it
        }
        // What the plan may leave as it is must be there before it is copied back.
        let mut start = piece.chunks.start;
        while start < piece.chunks.end {
            let (sure, until) = self.usage[rank.index()][1].overwritten.at(start);
            let input = self.input_within_output(rank);
            let (loaded, also) = input.map_or((false, u64::MAX), |input| match start {
                _ if start < input.start => (false, input.start),
                _ if start < input.end => (true, input.end),
                _ => (false, u64::MAX),
            });
            let end = until.min(also).min(piece.chunks.end);
            if !sure && !loaded {
                loads.push(Move { from: (tensor, start), to: (piece.base, start), chunks: end - start });
            }
            start = end;
        }
    }

    /// The chunks of a united larger output that are the input.
    fn input_within_output(&self, rank: Rank) -> Option<Range<u64>> {
        self.united?;
        let start = self.shift(rank, BufferType::Input);
        Some(start..start + self.chunks[0])
    }

    /// What a rank copies after the plan's operations, so that the caller's output has every chunk.
    pub(crate) fn stores(&self, rank: Rank) -> Vec<Move> {
        let shift = if self.united.is_some() { self.shift(rank, BufferType::Output) } else { 0 };
        let pieces = self.pieces(rank, BufferType::Output, &self.all(BufferType::Output));
        let store = |piece: Piece| Move {
            from: (piece.base, piece.chunks.start),
            to: (Base::Output, piece.chunks.start - shift),
            chunks: piece.chunks.end - piece.chunks.start,
        };
        pieces.into_iter().map(store).collect()
    }

    fn all(&self, buffer: BufferType) -> Range<u64> {
        0..self.chunks[usize::from(buffer == BufferType::Output)]
    }
}
