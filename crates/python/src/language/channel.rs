//! The classes `Channel` and `Switch`.

use std::collections::BTreeMap;

use antiphon_language::{ChannelId, MemoryChannel, PortChannel, SwitchChannel, SwitchEnds};
use pyo3::{exceptions::PyTypeError, prelude::*};

use super::{
    chunk::{Chunk, ThreadBlockGroup},
    convert::{self, Missing},
    program::Program,
};
use crate::error::Result;

#[doc = stub!("Channel")]
#[pyclass(frozen, module = "antiphon.language")]
pub(crate) struct Channel {
    pub port: bool,
    #[doc = stub!("Channel.dst")]
    #[pyo3(get)]
    pub dst: u32,
    #[doc = stub!("Channel.src")]
    #[pyo3(get)]
    pub src: u32,
    pub id: ChannelId,
}

#[pymethods]
impl Channel {
    #[doc = stub!("Channel.id")]
    #[getter]
    fn id(&self) -> u32 {
        self.id.0
    }

    #[doc = stub!("Channel.notify")]
    // `kind` is signal, wait or flush.
    #[allow(clippy::too_many_arguments)] // the method's
    fn notify(
        &self,
        program: &Bound<'_, Program>,
        kind: &str,
        tb: i64,
        data_sync: &Bound<'_, PyAny>,
        relaxed: bool,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = program.get().at(frame)?;
        let data_sync = convert::data_sync(data_sync)?;
        let tb = |count| convert::thread_block(tb, count);
        if self.port {
            let channel = PortChannel::existing(&program, self.dst, self.src, self.id)?;
            let tb = tb(program.num_thread_blocks(self.src)?)?;
            return Ok(match kind {
                "signal" => channel.signal(tb, data_sync),
                "wait" => channel.wait(tb, data_sync),
                _ => channel.flush(tb, data_sync),
            }?);
        }
        let channel = MemoryChannel::existing(&program, self.dst, self.src, self.id)?;
        let tb = tb(program.num_thread_blocks(self.src)?)?;
        Ok(match (kind, relaxed) {
            ("signal", false) => channel.signal(tb, data_sync),
            ("signal", true) => channel.relaxed_signal(tb, data_sync),
            (_, false) => channel.wait(tb, data_sync),
            (_, true) => channel.relaxed_wait(tb, data_sync),
        }?)
    }

    #[doc = stub!("Channel.put")]
    // `kind` is the method's name: put, put_with_signal, ...
    #[allow(clippy::too_many_arguments)] // the method's
    fn put(
        &self,
        program: &Bound<'_, Program>,
        kind: &str,
        dst: &Chunk,
        src: &Chunk,
        tb: Option<i64>,
        tb_group: Option<&Bound<'_, ThreadBlockGroup>>,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = program.get().at(frame)?;
        let missing = if kind == "read_put_packets" { Missing::Value } else { Missing::Runtime };
        let (dst, src) = (dst.chunk, src.chunk);
        let on = |count| convert::blocks(tb, tb_group, count, missing);
        if self.port {
            let channel = PortChannel::existing(&program, self.dst, self.src, self.id)?;
            let count = program.num_thread_blocks(self.src)?;
            if kind == "read_put_packets" {
                return Ok(channel.read_put_packets(dst, src, on(count)?)?);
            }
            let tb =
                tb.ok_or_else(|| PyTypeError::new_err("tb says which thread block does it: None does not"))?;
            let tb = convert::thread_block(tb, count)?;
            return Ok(match kind {
                "put_with_signal" => channel.put_with_signal(dst, src, tb),
                "put_with_signal_and_flush" => channel.put_with_signal_and_flush(dst, src, tb),
                "put_packets" => channel.put_packets(dst, src, tb),
                _ => channel.put(dst, src, tb),
            }?);
        }
        let channel = MemoryChannel::existing(&program, self.dst, self.src, self.id)?;
        let on = on(program.num_thread_blocks(self.src)?)?;
        Ok(match kind {
            "put_packets" => channel.put_packets(dst, src, on),
            "read_put_packets" => channel.read_put_packets(dst, src, on),
            "get" => channel.get(dst, src, on),
            _ => channel.put(dst, src, on),
        }?)
    }

    #[doc = stub!("Channel.reduce")]
    #[allow(clippy::too_many_arguments)] // the method's
    fn reduce(
        &self,
        program: &Bound<'_, Program>,
        local_src: &Chunk,
        remote_src: Vec<PyRef<'_, Chunk>>,
        tb: Option<i64>,
        tb_group: Option<&Bound<'_, ThreadBlockGroup>>,
        local_dst: Option<&Chunk>,
        reduce_op: &Bound<'_, PyAny>,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = program.get().at(frame)?;
        let channel = MemoryChannel::existing(&program, self.dst, self.src, self.id)?;
        let count = program.num_thread_blocks(self.src)?;
        let on = convert::blocks(tb, tb_group, count, Missing::Runtime)?;
        let remote: Vec<_> = remote_src.iter().map(|chunk| chunk.chunk).collect();
        let dst = local_dst.unwrap_or(local_src).chunk;
        Ok(channel.reduce(local_src.chunk, &remote, on, dst, convert::reduce_op(reduce_op)?)?)
    }
}

#[doc = stub!("Switch")]
#[pyclass(frozen, module = "antiphon.language")]
pub(crate) struct Switch {
    #[doc = stub!("Switch.ranks")]
    #[pyo3(get)]
    pub ranks: Vec<u32>,
    pub ends: SwitchEnds,
}

#[pymethods]
impl Switch {
    #[doc = stub!("Switch.ids")]
    // Its number at each rank.
    #[getter]
    fn ids(&self) -> BTreeMap<u32, u32> {
        self.ends.ids.iter().map(|(&rank, &id)| (rank, id.0)).collect()
    }

    #[doc = stub!("Switch.member")]
    // A member by its number.
    fn member(&self, program: &Bound<'_, Program>, rank: i64) -> Result<u32> {
        let program = program.get().lock();
        let rank = convert::rank(rank, program.num_ranks())?;
        SwitchChannel::existing(&program, &self.ends)?.at_rank(rank)?;
        Ok(rank)
    }

    #[doc = stub!("Switch.reduce")]
    #[allow(clippy::too_many_arguments)] // the method's
    fn reduce(
        &self,
        program: &Bound<'_, Program>,
        rank: i64,
        buffer_offset: u64,
        size: u64,
        dst: &Chunk,
        tb: i64,
        reduce_op: &Bound<'_, PyAny>,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = program.get().at(frame)?;
        let channel = SwitchChannel::existing(&program, &self.ends)?;
        let rank = convert::rank(rank, program.num_ranks())?;
        // The channel refuses a rank that is not in the program.
        let tb = convert::thread_block(tb, program.num_thread_blocks(rank).unwrap_or(0))?;
        let from = buffer_offset..buffer_offset.saturating_add(size);
        Ok(channel.reduce(rank, dst.chunk, from, tb, convert::reduce_op(reduce_op)?)?)
    }

    #[doc = stub!("Switch.broadcast")]
    #[allow(clippy::too_many_arguments)] // the method's
    fn broadcast(
        &self,
        program: &Bound<'_, Program>,
        packets: bool,
        rank: i64,
        src: &Chunk,
        buffer_offset: u64,
        size: u64,
        tb: i64,
        frame: &Bound<'_, PyAny>,
    ) -> Result<()> {
        let program = program.get().at(frame)?;
        let channel = SwitchChannel::existing(&program, &self.ends)?;
        let rank = convert::rank(rank, program.num_ranks())?;
        // As in `reduce`.
        let tb = convert::thread_block(tb, program.num_thread_blocks(rank).unwrap_or(0))?;
        let to = buffer_offset..buffer_offset.saturating_add(size);
        Ok(match packets {
            false => channel.broadcast(rank, src.chunk, to, tb),
            true => channel.broadcast_packets(rank, src.chunk, to, tb),
        }?)
    }
}
