//! The operations of a single rank.

use std::panic::Location;

use antiphon_plan::{
    BufferType, Copy, CopyKind, DataSync, OpKind, Reduce, ReduceOp, SemaphoreId, SemaphoreOp,
};

use crate::blocks::Blocks;
use crate::buffer::{Buffer, Chunk};
use crate::channel::local;
use crate::check::Check;
use crate::error::{LanguageError, Result};
use crate::program::Program;

/// A rank: its buffers, and what it does in its own memory.
///
/// Operations check that chunks are the rank's and agree in size ([`LanguageError::WrongRank`],
/// [`LanguageError::SizesDiffer`]), and that packets are in scratch ([`LanguageError::NotScratch`]).
#[derive(Clone, Copy)]
pub struct Rank<'p> {
    pub(crate) program: &'p Program,
    pub(crate) rank: u32,
}

impl<'p> Rank<'p> {
    /// Its number.
    pub fn id(&self) -> u32 {
        self.rank
    }

    /// The rank's input buffer.
    pub fn input(&self) -> Buffer {
        self.buffer(BufferType::Input)
    }

    /// The rank's output buffer.
    pub fn output(&self) -> Buffer {
        self.buffer(BufferType::Output)
    }

    fn buffer(&self, buffer: BufferType) -> Buffer {
        let size = self.program.state.borrow_mut().gpu(self.rank).chunks(buffer);
        Buffer { rank: self.rank, buffer, offset: 0, size }
    }

    /// Sets aside `size` further chunks of scratch.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] if there would be more than 2⁶⁴.
    pub fn scratch(&self, size: u64) -> Result<Buffer> {
        let mut state = self.program.state.borrow_mut();
        let chunks = &mut state.gpu(self.rank).scratch_chunks;
        let offset = *chunks;
        let too_many =
            LanguageError::TooMany { what: "scratch chunks beyond", number: offset, limit: u64::MAX };
        *chunks = offset.checked_add(size).ok_or(too_many)?;
        Ok(Buffer { rank: self.rank, buffer: BufferType::Scratch, offset, size })
    }

    /// Copies chunks.
    ///
    /// # Errors
    /// See [`Rank`].
    #[track_caller]
    pub fn copy<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        self.copy_as(CopyKind::Plain, "copy", dst, src, on.into())
    }

    /// Reads packets in scratch as they arrive, and writes what is in them.
    ///
    /// # Errors
    /// See [`Rank`].
    #[track_caller]
    pub fn unpack_packets<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        Check { op: "unpack_packets" }.scratch("src_chunk", src)?;
        self.copy_as(CopyKind::Unpack, "unpack_packets", dst, src, on.into())
    }

    /// Writes chunks as packets into scratch.
    ///
    /// # Errors
    /// See [`Rank`].
    #[track_caller]
    pub fn copy_packets<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        Check { op: "copy_packets" }.scratch("dst_chunk", dst)?;
        self.copy_as(CopyKind::Pack, "copy_packets", dst, src, on.into())
    }

    #[track_caller]
    fn copy_as(&self, kind: CopyKind, op: &'static str, dst: Chunk, src: Chunk, on: Blocks) -> Result<()> {
        let check = Check { op };
        check.rank("dst_chunk", dst, self.rank)?;
        check.rank("src_chunk", src, self.rank)?;
        check.size("dst_chunk", dst, src.size)?;
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        on.each(|tb, group| {
            let (src, dst) = (local(src), local(dst));
            state.push(self.rank, tb, OpKind::Copy(Copy { kind, src, dst, group }))
        })
    }

    /// Reduces chunks into `dst`, which may be `src`.
    ///
    /// # Errors
    /// See [`Rank`]; [`LanguageError::NothingToReduce`] if there are no others.
    #[track_caller]
    pub fn reduce<'a>(
        &self,
        src: Chunk,
        others: &[Chunk],
        on: impl Into<Blocks<'a>>,
        dst: Chunk,
        op: ReduceOp,
    ) -> Result<()> {
        self.reduce_as(false, src, others, on.into(), dst, op)
    }

    /// Reduces `src` with packets in scratch, as they arrive, into `dst`.
    ///
    /// # Errors
    /// See [`Rank`]; [`LanguageError::NothingToReduce`] if there are no packets.
    #[track_caller]
    pub fn reduce_packets<'a>(
        &self,
        src: Chunk,
        packets: &[Chunk],
        on: impl Into<Blocks<'a>>,
        dst: Chunk,
        op: ReduceOp,
    ) -> Result<()> {
        self.reduce_as(true, src, packets, on.into(), dst, op)
    }

    #[track_caller]
    fn reduce_as(
        &self,
        packets: bool,
        src: Chunk,
        others: &[Chunk],
        on: Blocks,
        dst: Chunk,
        op: ReduceOp,
    ) -> Result<()> {
        let check = Check { op: "reduce" };
        check.rank("dst_chunk", dst, self.rank)?;
        check.rank("src_chunk", src, self.rank)?;
        check.size("dst_chunk", dst, src.size)?;
        if others.is_empty() {
            return Err(LanguageError::NothingToReduce);
        }
        for &other in others {
            check.rank("another source", other, self.rank)?;
            check.size("another source", other, src.size)?;
            if packets {
                check.scratch("another source", other)?;
            }
        }
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        on.each(|tb, group| {
            let reduce = Reduce {
                packets,
                src: [&src].into_iter().chain(others).map(|&chunk| local(chunk)).collect(),
                remote_src: Vec::new(),
                dst: local(dst),
                packet_dst: None,
                remote_dst: Vec::new(),
                channel_type: None,
                op,
                group,
            };
            state.push(self.rank, tb, OpKind::Reduce(Box::new(reduce)))
        })
    }

    /// These thread blocks synchronise: no block continues before all have done their earlier operations.
    ///
    /// # Errors
    /// [`LanguageError::EmptyBarrier`] if there are none.
    #[track_caller]
    pub fn barrier(&self, blocks: &[u32]) -> Result<()> {
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        match blocks {
            [] => Err(LanguageError::EmptyBarrier { rank: self.rank }),
            &[tb] => state.push(self.rank, tb, OpKind::Nop),
            _ => {
                let barrier = state.barrier(self.rank, blocks);
                let num_threadblocks = blocks.len() as u32;
                blocks.iter().try_for_each(|&tb| {
                    state.push(self.rank, tb, OpKind::Barrier { barrier, num_threadblocks })
                })
            }
        }
    }
}

/// A counting semaphore between thread blocks of one rank.
#[derive(Clone, Copy)]
pub struct Semaphore<'p> {
    program: &'p Program,
    rank: u32,
    id: SemaphoreId,
}

impl<'p> Semaphore<'p> {
    pub(crate) fn new(program: &'p Program, rank: u32, init_value: i64) -> Self {
        let mut state = program.state.borrow_mut();
        let semaphores = &mut state.gpu(rank).semaphores;
        semaphores.push(antiphon_plan::Semaphore { init_value });
        Semaphore { program, rank, id: SemaphoreId(semaphores.len() as u32 - 1) }
    }

    /// The semaphore of this number that the program has made before.
    ///
    /// # Errors
    /// [`LanguageError::ForeignChannel`] if it has not.
    pub fn existing(program: &'p Program, rank: u32, id: SemaphoreId) -> Result<Self> {
        let state = program.state.borrow();
        match state.gpus.get(rank as usize).is_some_and(|gpu| id.index() < gpu.semaphores.len()) {
            true => Ok(Semaphore { program, rank, id }),
            false => Err(LanguageError::ForeignChannel { rank }),
        }
    }

    /// Its number at the rank.
    pub fn id(&self) -> SemaphoreId {
        self.id
    }

    /// Waits until the count is positive, and takes one.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn acquire(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.push(true, tb, data_sync)
    }

    /// Adds one to the count.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn release(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.push(false, tb, data_sync)
    }

    #[track_caller]
    fn push(&self, acquire: bool, tb: u32, data_sync: DataSync) -> Result<()> {
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        let op = SemaphoreOp { acquire, semaphores: vec![self.id], data_sync };
        state.push(self.rank, tb, OpKind::Semaphore(op))
    }
}
