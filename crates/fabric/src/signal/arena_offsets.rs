//! The payload by which ranks tell each other where their tensors lie in symmetric memory.

use super::rounds::Rounds;
use crate::Written;

/// The offsets of `N` tensors of one rank in its arena, as the payload of a round. After the round every rank reaches the tensors
/// through [`Rounds::arenas`].
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaOffsets<const N: usize>(
    /// An offset plus one; 0 stands for a tensor outside the arena.
    [u64; N],
);

impl<const N: usize> Default for ArenaOffsets<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> ArenaOffsets<N> {
    /// The offsets of tensors of this rank, each given by its address and its length in bytes.
    #[inline]
    pub fn of(rounds: &Rounds, tensors: [(*const u8, usize); N]) -> Self {
        let offset = |(pointer, len)| rounds.arena_offset(pointer, len).map_or(0, |offset| offset as u64 + 1);
        Self(tensors.map(offset))
    }

    /// The offset of a tensor, if it lies in the arena.
    #[inline]
    pub fn get(&self, tensor: usize) -> Option<usize> {
        self.0[tensor].checked_sub(1).map(|offset| offset as usize)
    }

    /// Whether all of the tensors lie in the arena.
    #[inline]
    pub fn all_symmetric(&self) -> bool {
        self.0.iter().all(|&offset| offset > 0)
    }

    /// Makes these the payload of the next round, which is posted with what this returns.
    #[inline]
    pub fn put(self, rounds: &Rounds) -> Written {
        // SAFETY: the outbox has room for the payload.
        unsafe { rounds.outbox(size_of::<Self>()).cast::<Self>().write_unaligned(self) };
        Written::all(size_of::<Self>())
    }

    /// The offsets that a rank has posted in this round.
    ///
    /// # Safety
    /// The round has been waited for, and its payload on every rank is `ArenaOffsets<N>`.
    #[inline]
    pub unsafe fn of_rank(rounds: &Rounds, rank: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::read(rounds.inbox(rank, size_of::<Self>())) }
    }

    /// The offsets in an inbox: [`of_rank`](Self::of_rank) for one of [`Rounds::inboxes`].
    ///
    /// # Safety
    /// The inbox holds `ArenaOffsets<N>`.
    #[inline]
    pub unsafe fn read(inbox: *const u8) -> Self {
        // SAFETY: the caller's promise.
        unsafe { inbox.cast::<Self>().read_unaligned() }
    }
}
