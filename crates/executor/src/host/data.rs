//! The steps that access data.

use std::ops::Range;

use antiphon_plan::REDUCE_OPS;

use super::{
    machine::{Launch, Machine, State},
    packet::{flag_at, pack, unpack},
};
use crate::layout::{Base, Operand, Reduction, Work};

/// Bytes that are reduced before the result is sent on: they stay in L1.
const PIECE: usize = 8 << 10;
/// Bytes of packets' data that are looked at together.
pub(super) const TILE: usize = 2 << 10;

impl Launch<'_> {
    /// Where byte `at` of an operand lies; as packets, the packet that holds it.
    fn address(&self, operand: Operand, at: usize) -> *mut u8 {
        let (chunks, chunk) = (&self.addresses[operand.slot], self.program.layout.chunk);
        let scale = if operand.slot % Base::COUNT == Base::Packets as usize { 2 } else { 1 };
        let offset = operand.chunk.wrapping_add(at / chunk) * chunks.stride + at % chunk * scale;
        debug_assert!(!chunks.base.is_null());
        chunks.base.wrapping_add(offset)
    }

    fn ring(&self, operands: &[Operand]) {
        for operand in operands.iter().filter(|operand| operand.rank() != self.rank) {
            self.sync.bell(operand.rank()).ring();
        }
    }
}

impl Machine {
    /// Works on a window of bytes; whether all of it is done. If not, `state.done` bytes of it are.
    pub(super) fn data(
        &mut self,
        launch: &Launch<'_>,
        work: &Work,
        window: Range<usize>,
        state: &mut State,
    ) -> bool {
        if let Some(place) = state.missing {
            // SAFETY: it is a place in this launch's packets.
            if unsafe { flag_at(place) } != launch.flag {
                return false;
            }
            state.missing = None;
        }
        let most = work.piece();
        let mut at = window.start + state.done;
        while at < window.end {
            let mut end = window.end.min(at.saturating_add(most));
            if launch.program.layout.cut {
                let chunk = launch.program.layout.chunk;
                end = end.min((at / chunk + 1) * chunk);
            }
            if let Err(missing) = self.piece(launch, work, at, end - at) {
                state.missing = Some(missing);
                break;
            }
            at = end;
        }
        state.done = at.saturating_sub(window.start);
        work.sent_packets().iter().for_each(|to| launch.ring(to));
        at >= window.end
    }

    /// Works on `len` bytes from `at` on, or says which packet word is not there yet.
    fn piece(&mut self, launch: &Launch<'_>, work: &Work, at: usize, len: usize) -> Result<(), *const u8> {
        let address = |operand: &Operand| launch.address(*operand, at);
        let (kind, flag) = (launch.packets, launch.flag);
        // SAFETY: compiling has checked that the operands' chunks lie in their buffers, whose addresses begin where `len`
        // bytes and their packets fit from `at` on; a piece that is cut does not leave its chunk. The plan's
        // signals order the accesses.
        unsafe {
            match work {
                Work::Copy { from, to } => {
                    to.iter().for_each(|to| move_bytes(address(from), address(to), len))
                }
                Work::Pack { from, to } => {
                    to.iter().for_each(|to| pack(kind, address(from), address(to), len, flag))
                }
                Work::Unpack { from, to } => {
                    let from = address(from);
                    unpack(kind, from, address(to), len, flag)
                        .map_err(|missing| from.add(missing).cast_const())?;
                }
                Work::Forward { from, to } => {
                    let (from, tile) = (address(from), self.tile.as_mut_ptr());
                    unpack(kind, from, tile, len, flag).map_err(|missing| from.add(missing).cast_const())?;
                    to.iter().for_each(|to| pack(kind, tile, address(to), len, flag));
                }
                Work::Reduce(reduction) => self.reduce(launch, reduction, at, len)?,
            }
        }
        Ok(())
    }

    /// # Safety
    /// As in [`piece`](Self::piece).
    unsafe fn reduce(
        &mut self,
        launch: &Launch<'_>,
        reduction: &Reduction,
        at: usize,
        len: usize,
    ) -> Result<(), *const u8> {
        let address = |operand: &Operand| launch.address(*operand, at);
        let (kind, flag) = (launch.packets, launch.flag);
        self.sources.clear();
        self.sources.extend(reduction.plain.iter().map(|operand| address(operand).cast_const()));
        for (operand, tile) in reduction.packets.iter().zip(self.tile.chunks_exact_mut(TILE)) {
            let from = address(operand);
            // SAFETY: the tile holds as many bytes as a piece with packets has.
            unsafe {
                unpack(kind, from, tile.as_mut_ptr(), len, flag)
                    .map_err(|missing| from.add(missing).cast_const())?
            };
            self.sources.push(tile.as_ptr());
        }
        let at = REDUCE_OPS.iter().position(|&op| op == reduction.op);
        let reducer = &launch.reducers[at.expect("the plan was checked")];
        let result = address(&reduction.to);
        // SAFETY: all are valid for `len` bytes, whole elements, and the result is one of the sources or apart from them.
        unsafe {
            reducer.run(result, &self.sources, len / launch.element);
            reduction.copies.iter().for_each(|to| move_bytes(result, address(to), len));
            reduction.packed.iter().for_each(|to| pack(kind, result, address(to), len, flag));
        }
        Ok(())
    }
}

impl Work {
    /// The most bytes to work on at once.
    fn piece(&self) -> usize {
        match self {
            Work::Copy { to, .. } if to.len() > 1 => PIECE,
            Work::Copy { .. } => usize::MAX,
            Work::Reduce(reduction) if reduction.packets.is_empty() && reduction.packed.is_empty() => {
                if reduction.copies.is_empty() {
                    usize::MAX
                } else {
                    PIECE
                }
            }
            _ => TILE,
        }
    }

    /// The destination of packets, for which a rank may sleep.
    fn sent_packets(&self) -> Option<&[Operand]> {
        match self {
            Work::Pack { to, .. } | Work::Forward { to, .. } => Some(to),
            Work::Reduce(reduction) => Some(&reduction.packed),
            Work::Copy { .. } | Work::Unpack { .. } => None,
        }
    }
}

/// Moves bytes between places that may overlap, or be one.
///
/// # Safety
/// Both are valid for `len` bytes.
unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    if !std::ptr::eq(from, to) {
        // SAFETY: as the caller says.
        unsafe { std::ptr::copy(from, to, len) }
    }
}
