//! Channels through the switch between ranks.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::Location;

use antiphon_plan::{
    BufferType, ChannelId, ChannelType, OpKind, ReduceOp, SwitchBroadcast, SwitchChunk, SwitchReduce,
};

use crate::buffer::Chunk;
use crate::check::Check;
use crate::error::{LanguageError, Result};
use crate::program::Program;

/// Where a switch channel ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchEnds {
    /// The buffer that it binds, the same of every member.
    pub buffer: BufferType,
    /// Its number at each member.
    pub ids: BTreeMap<u32, ChannelId>,
}

impl SwitchEnds {
    fn members(&self) -> Vec<u32> {
        self.ids.keys().copied().collect()
    }
}

impl From<SwitchEnds> for Cow<'_, SwitchEnds> {
    fn from(ends: SwitchEnds) -> Self {
        Cow::Owned(ends)
    }
}

/// A channel through which the switch between some ranks reduces and broadcasts one of their buffers.
#[derive(Clone)]
pub struct SwitchChannel<'p> {
    pub(crate) program: &'p Program,
    pub(crate) ends: Cow<'p, SwitchEnds>,
}

/// One rank's end of a switch channel.
#[derive(Clone, Copy)]
pub struct SwitchView<'c> {
    channel: &'c SwitchChannel<'c>,
    rank: u32,
}

impl<'p> SwitchChannel<'p> {
    /// The channel with these ends that the program has made before.
    ///
    /// # Errors
    /// [`LanguageError::ForeignChannel`] if it has not.
    pub fn existing(program: &'p Program, ends: &'p SwitchEnds) -> Result<Self> {
        let state = program.state.borrow();
        let unknown = ends.ids.iter().find(|(rank, id)| {
            let gpu = state.gpus.get(**rank as usize);
            gpu.is_none_or(|gpu| gpu.switches().count() <= id.index())
        });
        match unknown {
            Some((&rank, _)) => Err(LanguageError::ForeignChannel { rank }),
            None => Ok(SwitchChannel { program, ends: Cow::Borrowed(ends) }),
        }
    }

    /// Where it ends.
    pub fn ends(&self) -> &SwitchEnds {
        &self.ends
    }

    /// The end of the channel at one of its ranks.
    ///
    /// # Errors
    /// [`LanguageError::NotAMember`].
    pub fn at_rank(&self, rank: u32) -> Result<SwitchView<'_>> {
        self.member("at_rank", rank)?;
        Ok(SwitchView { channel: self, rank })
    }

    /// See [`SwitchView::reduce`].
    ///
    /// # Errors
    /// The same; [`LanguageError::NoSwitchEnd`] if the rank is none of the channel's.
    #[track_caller]
    pub fn reduce(&self, rank: u32, dst: Chunk, from: Range<u64>, tb: u32, op: ReduceOp) -> Result<()> {
        let check = Check { op: "reduce" };
        self.member(check.op, dst.rank.0)?;
        check.size("dst_chunk", dst, from.end.saturating_sub(from.start))?;
        self.fits(check.op, &from)?;
        let (buffer, id) = (self.ends.buffer, self.end_at(check.op, rank)?);
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        let channels = vec![state.channel(rank, tb, ChannelType::Switch, id)?];
        let reduce = SwitchReduce { buffer, offset: from.start, size: dst.size, dst, channels, op };
        state.push(rank, tb, OpKind::SwitchReduce(reduce))
    }

    /// See [`SwitchView::broadcast`].
    ///
    /// # Errors
    /// The same; [`LanguageError::NoSwitchEnd`] if the rank is none of the channel's.
    #[track_caller]
    pub fn broadcast(&self, rank: u32, src: Chunk, to: Range<u64>, tb: u32) -> Result<()> {
        self.broadcast_as(false, Check { op: "broadcast" }, rank, src, to, tb)
    }

    /// See [`SwitchView::broadcast_packets`].
    ///
    /// # Errors
    /// The same; [`LanguageError::NoSwitchEnd`] if the rank is none of the channel's.
    #[track_caller]
    pub fn broadcast_packets(&self, rank: u32, src: Chunk, to: Range<u64>, tb: u32) -> Result<()> {
        let check = Check { op: "broadcast_packets" };
        check.scratch("src_chunk", src)?;
        check.scratch_buffer("the channel's buffer", self.ends.buffer)?;
        self.broadcast_as(true, check, rank, src, to, tb)
    }

    #[track_caller]
    fn broadcast_as(
        &self,
        packets: bool,
        check: Check,
        rank: u32,
        src: Chunk,
        to: Range<u64>,
        tb: u32,
    ) -> Result<()> {
        self.member(check.op, src.rank.0)?;
        check.size("src_chunk", src, to.end.saturating_sub(to.start))?;
        self.fits(check.op, &to)?;
        let id = self.end_at(check.op, rank)?;
        let mut state = self.program.state.borrow_mut();
        state.called_from(Location::caller());
        let switch_channel_id = state.channel(rank, tb, ChannelType::Switch, id)?;
        let dst = SwitchChunk { switch_channel_id, index: to.start, size: src.size };
        state.push(rank, tb, OpKind::SwitchBroadcast(SwitchBroadcast { packets, src, dst }))
    }

    fn member(&self, op: &'static str, rank: u32) -> Result<()> {
        match self.ends.ids.contains_key(&rank) {
            true => Ok(()),
            false => Err(LanguageError::NotAMember { op, rank, members: self.ends.members() }),
        }
    }

    fn end_at(&self, op: &'static str, rank: u32) -> Result<ChannelId> {
        let missing = || LanguageError::NoSwitchEnd { op, rank, members: self.ends.members() };
        self.ends.ids.get(&rank).copied().ok_or_else(missing)
    }

    /// Whether every member's buffer has these chunks.
    fn fits(&self, op: &'static str, chunks: &Range<u64>) -> Result<()> {
        let buffer = self.ends.buffer;
        let state = self.program.state.borrow();
        for &rank in self.ends.ids.keys() {
            let size = state.gpus[rank as usize].chunks(buffer);
            if chunks.end > size {
                let (start, end) = (chunks.start, chunks.end);
                return Err(LanguageError::BeyondSwitchBuffer { op, rank, buffer, start, end, size });
            }
        }
        Ok(())
    }
}

impl SwitchView<'_> {
    /// The switch reduces chunks `from` of every member's buffer into `dst`, a chunk of a member.
    ///
    /// # Errors
    /// [`LanguageError::NotAMember`], [`LanguageError::SizesDiffer`] or [`LanguageError::BeyondSwitchBuffer`].
    #[track_caller]
    pub fn reduce(&self, dst: Chunk, from: Range<u64>, tb: u32, op: ReduceOp) -> Result<()> {
        self.channel.reduce(self.rank, dst, from, tb, op)
    }

    /// The switch stores `src`, a chunk of a member, as chunks `to` of every member's buffer.
    ///
    /// # Errors
    /// [`LanguageError::NotAMember`], [`LanguageError::SizesDiffer`] or [`LanguageError::BeyondSwitchBuffer`].
    #[track_caller]
    pub fn broadcast(&self, src: Chunk, to: Range<u64>, tb: u32) -> Result<()> {
        self.channel.broadcast(self.rank, src, to, tb)
    }

    /// The same of packets: from scratch, as they arrive, to every member's scratch.
    ///
    /// # Errors
    /// As [`broadcast`](Self::broadcast), and [`LanguageError::NotScratch`].
    #[track_caller]
    pub fn broadcast_packets(&self, src: Chunk, to: Range<u64>, tb: u32) -> Result<()> {
        self.channel.broadcast_packets(self.rank, src, to, tb)
    }
}
