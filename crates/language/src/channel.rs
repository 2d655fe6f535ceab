//! Channels between two ranks.

use std::panic::Location;

use antiphon_plan::{
    ChannelId, ChannelType, DataSync, Get, LocalChunk, Notify, NotifyKind, OpKind, Put, PutKind, Reduce,
    ReduceOp,
};

use crate::blocks::Blocks;
use crate::buffer::Chunk;
use crate::check::Check;
use crate::error::{LanguageError, Result};
use crate::program::Program;

/// A channel through which its source rank accesses memory of its destination rank.
///
/// Operations are the source's. Those that take chunks check whose they are and that their sizes agree
/// ([`LanguageError::WrongRank`], [`LanguageError::SizesDiffer`]), and that packets are in scratch
/// ([`LanguageError::NotScratch`]).
#[derive(Clone, Copy)]
pub struct MemoryChannel<'p>(pub(crate) PeerChannel<'p>);

/// A channel through which an engine moves bytes from its source rank to its destination rank.
///
/// Operations are the source's, and check their chunks as those of a [`MemoryChannel`] do.
#[derive(Clone, Copy)]
pub struct PortChannel<'p>(pub(crate) PeerChannel<'p>);

/// The part that both kinds share.
#[derive(Clone, Copy)]
pub(crate) struct PeerChannel<'p> {
    pub program: &'p Program,
    pub channel_type: ChannelType,
    pub src: u32,
    pub dst: u32,
    pub id: ChannelId,
}

impl<'p> MemoryChannel<'p> {
    /// The channel of this number that the program has made before.
    ///
    /// # Errors
    /// [`LanguageError::ForeignChannel`] if it has not.
    pub fn existing(program: &'p Program, dst: u32, src: u32, id: ChannelId) -> Result<Self> {
        Ok(MemoryChannel(PeerChannel::existing(program, ChannelType::Memory, dst, src, id)?))
    }

    /// Its number at the source rank.
    pub fn id(&self) -> ChannelId {
        self.0.id
    }

    /// One is added to the peer's count. What this rank wrote before is there when the peer sees it.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn signal(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Signal, false, tb, data_sync)
    }

    /// Waits for one more signal of the peer. What the peer wrote before it can be read then.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn wait(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Wait, false, tb, data_sync)
    }

    /// A signal that orders no data: it only says that this rank got here.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn relaxed_signal(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Signal, true, tb, data_sync)
    }

    /// A wait that orders no data: the peer got there, and that is all.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn relaxed_wait(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Wait, true, tb, data_sync)
    }

    /// Writes chunks of the source rank into the destination rank's memory.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        self.0.put(PutKind::Plain, dst, src, on.into())
    }

    /// Writes chunks as packets into the destination rank's scratch; their readers wait for each packet.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put_packets<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        self.0.put(PutKind::Packets, dst, src, on.into())
    }

    /// Reads packets in the source rank's scratch as they arrive, and writes them to the destination rank's scratch.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn read_put_packets<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        self.0.put(PutKind::ReadPackets, dst, src, on.into())
    }

    /// Reads chunks of the destination rank's memory (`src`) into the source rank's (`dst`). Sizes are not compared.
    ///
    /// # Errors
    /// [`LanguageError::WrongRank`].
    #[track_caller]
    pub fn get<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        let PeerChannel { program, channel_type, src: own, dst: peer, id } = self.0;
        let check = Check { op: "get" };
        check.rank("dst_chunk", dst, own)?;
        check.rank("src_chunk", src, peer)?;
        let mut state = program.state.borrow_mut();
        state.called_from(Location::caller());
        on.into().each(|tb, group| {
            let remote = state.remote(own, tb, channel_type, src)?;
            let channel = state.channel(own, tb, channel_type, id)?;
            let (src, dst, channels) = (vec![remote], vec![local(dst)], vec![channel]);
            state.push(own, tb, OpKind::Get(Get { src, dst, channels, channel_type, group }))
        })
    }

    /// Reduces chunks of the source rank with those of the destination rank, into `dst`.
    ///
    /// # Errors
    /// See [`MemoryChannel`]; whose `dst` is, is not checked: it is taken to be the source rank's.
    #[track_caller]
    pub fn reduce<'a>(
        &self,
        src: Chunk,
        remote_src: &[Chunk],
        on: impl Into<Blocks<'a>>,
        dst: Chunk,
        op: ReduceOp,
    ) -> Result<()> {
        let PeerChannel { program, channel_type, src: own, dst: peer, id } = self.0;
        let check = Check { op: "reduce" };
        check.rank("local_src_chunk", src, own)?;
        check.size("local_dst_chunk", dst, src.size)?;
        for &chunk in remote_src {
            check.rank("a remote source", chunk, peer)?;
            check.size("a remote source", chunk, src.size)?;
        }
        let mut state = program.state.borrow_mut();
        state.called_from(Location::caller());
        on.into().each(|tb, group| {
            let remote = remote_src.iter().map(|&chunk| state.remote(own, tb, channel_type, chunk));
            let remote_src = remote.collect::<Result<_>>()?;
            state.channel(own, tb, channel_type, id)?;
            let reduce = Reduce {
                packets: false,
                src: vec![local(src)],
                remote_src,
                dst: local(dst),
                packet_dst: None,
                remote_dst: Vec::new(),
                channel_type: Some(channel_type),
                op,
                group,
            };
            state.push(own, tb, OpKind::Reduce(Box::new(reduce)))
        })
    }
}

impl<'p> PortChannel<'p> {
    /// The channel of this number that the program has made before.
    ///
    /// # Errors
    /// [`LanguageError::ForeignChannel`] if it has not.
    pub fn existing(program: &'p Program, dst: u32, src: u32, id: ChannelId) -> Result<Self> {
        Ok(PortChannel(PeerChannel::existing(program, ChannelType::Port, dst, src, id)?))
    }

    /// Its number at the source rank.
    pub fn id(&self) -> ChannelId {
        self.0.id
    }

    /// One is added to the peer's count, behind everything that was put through the channel before.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn signal(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Signal, false, tb, data_sync)
    }

    /// Waits for one more signal of the peer. What the peer put before it can be read then.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn wait(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Wait, false, tb, data_sync)
    }

    /// Waits until what was put has left, so that its source may be written again.
    ///
    /// # Errors
    /// [`LanguageError::TooMany`] for an impossible thread block.
    #[track_caller]
    pub fn flush(&self, tb: u32, data_sync: DataSync) -> Result<()> {
        self.0.notify(NotifyKind::Flush, false, tb, data_sync)
    }

    /// Has chunks of the source rank written into the destination rank's memory.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put(&self, dst: Chunk, src: Chunk, tb: u32) -> Result<()> {
        self.0.put(PutKind::Plain, dst, src, tb.into())
    }

    /// The same with a signal behind it.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put_with_signal(&self, dst: Chunk, src: Chunk, tb: u32) -> Result<()> {
        self.0.put(PutKind::WithSignal, dst, src, tb.into())
    }

    /// The same with a signal and a flush behind it.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put_with_signal_and_flush(&self, dst: Chunk, src: Chunk, tb: u32) -> Result<()> {
        self.0.put(PutKind::WithSignalAndFlush, dst, src, tb.into())
    }

    /// Has chunks written as packets into the destination rank's scratch; their readers wait for each packet.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn put_packets(&self, dst: Chunk, src: Chunk, tb: u32) -> Result<()> {
        self.0.put(PutKind::Packets, dst, src, tb.into())
    }

    /// Waits for packets in the source rank's scratch, and has them written to the destination rank's scratch.
    ///
    /// # Errors
    /// See [`MemoryChannel`].
    #[track_caller]
    pub fn read_put_packets<'a>(&self, dst: Chunk, src: Chunk, on: impl Into<Blocks<'a>>) -> Result<()> {
        self.0.put(PutKind::ReadPackets, dst, src, on.into())
    }
}

impl<'p> PeerChannel<'p> {
    fn existing(
        program: &'p Program,
        channel_type: ChannelType,
        dst: u32,
        src: u32,
        id: ChannelId,
    ) -> Result<Self> {
        let state = program.state.borrow();
        let peer = state.gpus.get(src as usize).and_then(|gpu| gpu.peers(channel_type).get(id.index()));
        match peer {
            Some(peer) if peer.0 == dst => Ok(PeerChannel { program, channel_type, src, dst, id }),
            _ => Err(LanguageError::ForeignChannel { rank: src }),
        }
    }

    #[track_caller]
    fn notify(&self, kind: NotifyKind, relaxed: bool, tb: u32, data_sync: DataSync) -> Result<()> {
        let PeerChannel { program, channel_type, src, id, .. } = *self;
        let mut state = program.state.borrow_mut();
        state.called_from(Location::caller());
        let channels = vec![state.channel(src, tb, channel_type, id)?];
        let notify = Notify { kind, relaxed, channels, channel_type, data_sync };
        state.push(src, tb, OpKind::Notify(notify))
    }

    #[track_caller]
    fn put(&self, kind: PutKind, dst: Chunk, src: Chunk, on: Blocks) -> Result<()> {
        let PeerChannel { program, channel_type, src: own, dst: peer, id } = *self;
        let check = Check { op: put_name(kind) };
        check.rank("src_chunk", src, own)?;
        check.rank("dst_chunk", dst, peer)?;
        if kind == PutKind::ReadPackets {
            check.scratch("src_chunk", src)?;
        }
        if matches!(kind, PutKind::Packets | PutKind::ReadPackets) {
            check.scratch("dst_chunk", dst)?;
        }
        check.size("dst_chunk", dst, src.size)?;
        let mut state = program.state.borrow_mut();
        state.called_from(Location::caller());
        on.each(|tb, group| {
            let remote = state.remote(own, tb, channel_type, dst)?;
            let channel = state.channel(own, tb, channel_type, id)?;
            let (src, dst, channels) = (vec![local(src)], vec![remote], vec![channel]);
            state.push(own, tb, OpKind::Put(Put { kind, src, dst, channels, channel_type, group }))
        })
    }
}

fn put_name(kind: PutKind) -> &'static str {
    match kind {
        PutKind::Plain => "put",
        PutKind::WithSignal => "put_with_signal",
        PutKind::WithSignalAndFlush => "put_with_signal_and_flush",
        PutKind::Packets => "put_packets",
        PutKind::ReadPackets => "read_put_packets",
    }
}

/// A chunk as an operation of its own rank names it.
pub(crate) fn local(chunk: Chunk) -> LocalChunk {
    LocalChunk { buffer: chunk.buffer, index: chunk.index, size: chunk.size }
}
