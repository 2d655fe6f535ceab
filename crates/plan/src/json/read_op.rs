//! Reading operations from JSON.

use antiphon_operation::ReduceOp;
use serde::{Deserialize, Deserializer};

use crate::error::PlanError;
use crate::ids::{BarrierId, ChannelIndex, Rank, RemoteBufferIndex, SemaphoreId};
use crate::op::{
    BufferType, ChannelType, Copy, CopyKind, DataSync, Get, GroupShare, LocalChunk, Notify, NotifyKind, Op,
    OpKind, Pipeline, Put, PutKind, RankChunk, Reduce, RemoteChunk, SemaphoreOp, SwitchBroadcast,
    SwitchChunk, SwitchReduce, SwitchReduceBroadcast, reduce_op,
};
use crate::place::Place;

/// Any chunk: which keys it needs depends on where it stands.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireChunk {
    rank: Option<Rank>,
    #[serde(rename = "type")]
    buffer: Option<BufferType>,
    buffer_id: Option<RemoteBufferIndex>,
    switch_channel_id: Option<ChannelIndex>,
    index: u64,
    size: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireIterContext {
    unit_size: u64,
    num_chunks: u64,
}

/// Any operation: which keys it needs depends on its name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WireOp {
    name: String,
    barrier_id: Option<BarrierId>,
    num_threadblocks: Option<u32>,
    channel_ids: Option<Vec<ChannelIndex>>,
    channel_type: Option<ChannelType>,
    semaphore_ids: Option<Vec<SemaphoreId>>,
    src_buff: Option<Vec<WireChunk>>,
    dst_buff: Option<Vec<WireChunk>>,
    buffer_type: Option<BufferType>,
    buffer_offset: Option<u64>,
    size: Option<u64>,
    dst_chunk: Option<RankChunk>,
    #[serde(default, deserialize_with = "some_reduce_op")]
    reduce_op: Option<ReduceOp>,
    tbg_info: Option<GroupShare>,
    iter_context: Option<WireIterContext>,
    ops: Option<Vec<WireOp>>,
}

fn some_reduce_op<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ReduceOp>, D::Error> {
    reduce_op(deserializer).map(Some)
}

impl WireOp {
    pub(super) fn read(self, place: Place) -> Result<Op, PlanError> {
        let name = self.name.clone();
        let wrong = |what: String| PlanError::Operation { place, what: format!("{name}: {what}") };
        let mut fields = Fields { op: self, wrong: &wrong };
        let kind = match name.as_str() {
            "nop" => OpKind::Nop,
            "barrier" => OpKind::Barrier {
                barrier: fields.need("barrier_id", |op| op.barrier_id.take())?,
                num_threadblocks: fields.need("num_threadblocks", |op| op.num_threadblocks.take())?,
            },
            "signal" => fields.notify(NotifyKind::Signal, false)?,
            "rlxsignal" => fields.notify(NotifyKind::Signal, true)?,
            "wait" => fields.notify(NotifyKind::Wait, false)?,
            "rlxwait" => fields.notify(NotifyKind::Wait, true)?,
            "flush" => fields.notify(NotifyKind::Flush, false)?,
            "sem_acquire" => fields.semaphore(true)?,
            "sem_release" => fields.semaphore(false)?,
            "copy" => fields.copy(CopyKind::Plain)?,
            "cpkt" => fields.copy(CopyKind::Pack)?,
            "upkt" => fields.copy(CopyKind::Unpack)?,
            "put" => fields.put(PutKind::Plain)?,
            "pws" => fields.put(PutKind::WithSignal)?,
            "pwsf" => fields.put(PutKind::WithSignalAndFlush)?,
            "ppkt" => fields.put(PutKind::Packets)?,
            "rppkt" => fields.put(PutKind::ReadPackets)?,
            "get" => OpKind::Get(Get {
                src: fields.chunks("src_buff", Fields::remote)?,
                dst: fields.chunks("dst_buff", Fields::local)?,
                channels: fields.op.channel_ids.take().unwrap_or_default(),
                channel_type: fields.need("channel_type", |op| op.channel_type.take())?,
                group: fields.op.tbg_info.take(),
            }),
            "re" | "res" | "rre" | "rres" => fields.reduce(false, false)?,
            "repkt" | "respkt" => fields.reduce(true, false)?,
            "recpkt" | "recspkt" => fields.reduce(true, true)?,
            "glre" => OpKind::SwitchReduce(SwitchReduce {
                buffer: fields.need("buffer_type", |op| op.buffer_type.take())?,
                offset: fields.need("buffer_offset", |op| op.buffer_offset.take())?,
                size: fields.need("size", |op| op.size.take())?,
                dst: fields.need("dst_chunk", |op| op.dst_chunk.take())?,
                channels: fields.need("channel_ids", |op| op.channel_ids.take())?,
                op: fields.switch_op()?,
            }),
            "gstore" => fields.broadcast(false)?,
            "gstorepkt" => fields.broadcast(true)?,
            "glres" => OpKind::SwitchReduceBroadcast(SwitchReduceBroadcast {
                src: fields.one("src_buff", Fields::switch)?,
                dst: fields.one("dst_buff", Fields::switch)?,
                op: fields.switch_op()?,
            }),
            "pipeline" if place.inner.is_some() => return Err(wrong("a pipeline in a pipeline".into())),
            "pipeline" => {
                let context = fields.need("iter_context", |op| op.iter_context.take())?;
                let ops = fields.need("ops", |op| op.ops.take())?;
                let inner = |at: usize| Place { inner: Some(at as u32), ..place };
                OpKind::Pipeline(Pipeline {
                    unit_size: context.unit_size,
                    num_chunks: context.num_chunks,
                    ops: ops
                        .into_iter()
                        .enumerate()
                        .map(|(at, op)| op.read(inner(at)))
                        .collect::<Result<_, _>>()?,
                })
            }
            _ => return Err(wrong("there is no such operation".into())),
        };
        fields.nothing_left()?;
        if kind.name() != name {
            return Err(wrong(format!("its buffers are those of {}", kind.name())));
        }
        Ok(kind.into())
    }
}

/// Takes keys out of an operation, and says which are missing or too many.
struct Fields<'a> {
    op: WireOp,
    wrong: &'a dyn Fn(String) -> PlanError,
}

impl Fields<'_> {
    fn need<T>(&mut self, key: &str, take: impl FnOnce(&mut WireOp) -> Option<T>) -> Result<T, PlanError> {
        take(&mut self.op).ok_or_else(|| (self.wrong)(format!("has no {key}")))
    }

    fn notify(&mut self, kind: NotifyKind, relaxed: bool) -> Result<OpKind, PlanError> {
        Ok(OpKind::Notify(Notify {
            kind,
            relaxed,
            channels: self.need("channel_ids", |op| op.channel_ids.take())?,
            channel_type: self.need("channel_type", |op| op.channel_type.take())?,
            data_sync: DataSync::NONE,
        }))
    }

    fn semaphore(&mut self, acquire: bool) -> Result<OpKind, PlanError> {
        let semaphores = self.need("semaphore_ids", |op| op.semaphore_ids.take())?;
        Ok(OpKind::Semaphore(SemaphoreOp { acquire, semaphores, data_sync: DataSync::NONE }))
    }

    fn copy(&mut self, kind: CopyKind) -> Result<OpKind, PlanError> {
        Ok(OpKind::Copy(Copy {
            kind,
            src: self.one("src_buff", Fields::local)?,
            dst: self.one("dst_buff", Fields::local)?,
            group: self.op.tbg_info.take(),
        }))
    }

    fn put(&mut self, kind: PutKind) -> Result<OpKind, PlanError> {
        Ok(OpKind::Put(Put {
            kind,
            src: self.chunks("src_buff", Fields::local)?,
            dst: self.chunks("dst_buff", Fields::remote)?,
            channels: self.op.channel_ids.take().unwrap_or_default(),
            channel_type: self.need("channel_type", |op| op.channel_type.take())?,
            group: self.op.tbg_info.take(),
        }))
    }

    fn reduce(&mut self, packets: bool, packet_dst: bool) -> Result<OpKind, PlanError> {
        let (src, remote_src) = self.local_then_remote("src_buff")?;
        let (dst, remote_dst) = self.local_then_remote("dst_buff")?;
        let mut dst = dst.into_iter();
        let (Some(first), second, None) = (dst.next(), dst.next(), dst.next()) else {
            return Err((self.wrong)("dst_buff needs one chunk of this rank, or two with packets".into()));
        };
        if second.is_some() != packet_dst {
            return Err((self.wrong)(format!(
                "dst_buff has {} chunks of this rank",
                1 + u8::from(!packet_dst)
            )));
        }
        Ok(OpKind::Reduce(Box::new(Reduce {
            packets,
            src,
            remote_src,
            dst: first,
            packet_dst: second,
            remote_dst,
            channel_type: self.op.channel_type.take(),
            op: self.need("reduce_op", |op| op.reduce_op.take())?,
            group: self.op.tbg_info.take(),
        })))
    }

    fn broadcast(&mut self, packets: bool) -> Result<OpKind, PlanError> {
        self.switch_type()?;
        Ok(OpKind::SwitchBroadcast(SwitchBroadcast {
            packets,
            src: self.one("src_buff", |fields, key, chunk| match chunk {
                WireChunk {
                    rank: Some(rank),
                    buffer: Some(buffer),
                    buffer_id: None,
                    switch_channel_id: None,
                    ..
                } => Ok(RankChunk { rank, buffer, index: chunk.index, size: chunk.size }),
                _ => Err((fields.wrong)(format!("a chunk of {key} needs rank and type, and nothing else"))),
            })?,
            dst: self.one("dst_buff", Fields::switch)?,
        }))
    }

    fn switch_op(&mut self) -> Result<ReduceOp, PlanError> {
        self.switch_type()?;
        self.need("reduce_op", |op| op.reduce_op.take())
    }

    fn switch_type(&mut self) -> Result<(), PlanError> {
        match self.need("channel_type", |op| op.channel_type.take())? {
            ChannelType::Switch => Ok(()),
            other => Err((self.wrong)(format!("its channel_type is {other:?}"))),
        }
    }

    /// The list of chunks under a key.
    fn list(&mut self, key: &str) -> Result<Vec<WireChunk>, PlanError> {
        self.need(key, |op| if key == "src_buff" { op.src_buff.take() } else { op.dst_buff.take() })
    }

    fn chunks<T>(
        &mut self,
        key: &str,
        read: impl Fn(&Self, &str, WireChunk) -> Result<T, PlanError>,
    ) -> Result<Vec<T>, PlanError> {
        let list = self.list(key)?;
        list.into_iter().map(|chunk| read(self, key, chunk)).collect()
    }

    fn one<T>(
        &mut self,
        key: &str,
        read: impl Fn(&Self, &str, WireChunk) -> Result<T, PlanError>,
    ) -> Result<T, PlanError> {
        let mut list = self.chunks(key, read)?;
        match (list.pop(), list.len()) {
            (Some(chunk), 0) => Ok(chunk),
            (chunk, others) => Err((self.wrong)(format!(
                "{key} needs one chunk and has {}",
                others + usize::from(chunk.is_some())
            ))),
        }
    }

    fn local_then_remote(&mut self, key: &str) -> Result<(Vec<LocalChunk>, Vec<RemoteChunk>), PlanError> {
        let (mut local, mut remote) = (Vec::new(), Vec::new());
        for chunk in self.list(key)? {
            match chunk.buffer_id {
                Some(_) => remote.push(self.remote(key, chunk)?),
                None if remote.is_empty() => local.push(self.local(key, chunk)?),
                None => {
                    return Err((self.wrong)(format!(
                        "{key} has a chunk of this rank behind one of another rank"
                    )));
                }
            }
        }
        Ok((local, remote))
    }

    fn local(&self, key: &str, chunk: WireChunk) -> Result<LocalChunk, PlanError> {
        match chunk {
            WireChunk {
                buffer: Some(buffer),
                rank: None,
                buffer_id: None,
                switch_channel_id: None,
                index,
                size,
            } => Ok(LocalChunk { buffer, index, size }),
            _ => Err((self.wrong)(format!(
                "a chunk of {key} needs type, and neither rank, buffer_id nor switch_channel_id"
            ))),
        }
    }

    fn remote(&self, key: &str, chunk: WireChunk) -> Result<RemoteChunk, PlanError> {
        match chunk {
            WireChunk {
                buffer_id: Some(buffer_id),
                buffer: None,
                rank: None,
                switch_channel_id: None,
                index,
                size,
            } => Ok(RemoteChunk { buffer_id, index, size }),
            _ => Err((self.wrong)(format!(
                "a chunk of {key} needs buffer_id, and neither rank, type nor switch_channel_id"
            ))),
        }
    }

    fn switch(&self, key: &str, chunk: WireChunk) -> Result<SwitchChunk, PlanError> {
        match chunk {
            WireChunk {
                switch_channel_id: Some(id),
                buffer: None,
                rank: None,
                buffer_id: None,
                index,
                size,
            } => Ok(SwitchChunk { switch_channel_id: id, index, size }),
            _ => Err((self.wrong)(format!(
                "a chunk of {key} needs switch_channel_id, and neither rank, type nor buffer_id"
            ))),
        }
    }

    /// A key that an operation of this name does not have would be ignored otherwise, whatever it was meant to do.
    fn nothing_left(&self) -> Result<(), PlanError> {
        let op = &self.op;
        let left = [
            ("barrier_id", op.barrier_id.is_some()),
            ("num_threadblocks", op.num_threadblocks.is_some()),
            ("channel_ids", op.channel_ids.is_some()),
            ("channel_type", op.channel_type.is_some()),
            ("semaphore_ids", op.semaphore_ids.is_some()),
            ("src_buff", op.src_buff.is_some()),
            ("dst_buff", op.dst_buff.is_some()),
            ("buffer_type", op.buffer_type.is_some()),
            ("buffer_offset", op.buffer_offset.is_some()),
            ("size", op.size.is_some()),
            ("dst_chunk", op.dst_chunk.is_some()),
            ("reduce_op", op.reduce_op.is_some()),
            ("tbg_info", op.tbg_info.is_some()),
            ("iter_context", op.iter_context.is_some()),
            ("ops", op.ops.is_some()),
        ];
        match left.iter().find(|(_, left)| *left) {
            Some((key, _)) => Err((self.wrong)(format!("does not have {key}"))),
            None => Ok(()),
        }
    }
}
