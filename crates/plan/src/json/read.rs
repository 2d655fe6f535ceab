//! Reading a plan from JSON.

use serde::Deserialize;

use super::read_op::WireOp;
use crate::error::PlanError;
use crate::ids::{Rank, ThreadBlockId};
use crate::op::{BufferType, ChannelType};
use crate::place::Place;
use crate::plan::{
    ChannelRefs, Gpu, GpuChannels, Plan, Protocol, RemoteBuffer, RemoteBufferRefs, Semaphore, ThreadBlock,
};

/// Reads a plan, of whose numbers nothing has been checked.
pub(super) fn plan(text: &[u8]) -> Result<Plan, PlanError> {
    let wire: WirePlan = serde_json::from_slice(text).map_err(|error| PlanError::json(&error))?;
    let gpus = wire.gpus.into_iter().enumerate().map(|(rank, gpu)| gpu.read(Rank(rank as u32)));
    Ok(Plan {
        name: wire.name,
        collective: wire.collective,
        protocol: wire.protocol,
        inplace: wire.inplace,
        reuse_resources: wire.reuse_resources,
        gpus: gpus.collect::<Result<_, _>>()?,
        num_threads_per_block: wire.num_threads_per_block,
        use_double_scratch_buffer: wire.use_double_scratch_buffer,
        buffer_alignment: wire.buffer_alignment,
        min_message_size: wire.min_message_size,
        max_message_size: wire.max_message_size,
        origins: Vec::new(),
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WirePlan {
    name: Option<String>,
    collective: String,
    #[serde(default = "simple")]
    protocol: Protocol,
    #[serde(default)]
    inplace: bool,
    #[serde(default)]
    reuse_resources: bool,
    gpus: Vec<WireGpu>,
    #[serde(default = "threads")]
    num_threads_per_block: u64,
    #[serde(default)]
    use_double_scratch_buffer: bool,
    #[serde(default = "alignment")]
    buffer_alignment: u64,
    #[serde(default)]
    min_message_size: u64,
    #[serde(default = "unlimited")]
    max_message_size: u64,
}

fn simple() -> Protocol {
    Protocol::Simple
}

fn threads() -> u64 {
    1024
}

fn alignment() -> u64 {
    16
}

fn unlimited() -> u64 {
    u64::MAX
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireGpu {
    id: Rank,
    input_chunks: u64,
    output_chunks: u64,
    scratch_chunks: u64,
    threadblocks: Vec<WireThreadBlock>,
    channels: Vec<WireChannels>,
    #[serde(default)]
    remote_buffers: Vec<RemoteBuffer>,
    #[serde(default)]
    semaphores: Vec<Semaphore>,
}

impl WireGpu {
    fn read(self, rank: Rank) -> Result<Gpu, PlanError> {
        let channels = self.channels.into_iter().map(|entry| entry.read(rank)).collect::<Result<_, _>>()?;
        let threadblocks = self.threadblocks.into_iter().enumerate().map(|(at, block)| {
            let ops = block.ops.into_iter().enumerate().map(|(op, wire)| {
                wire.read(Place { rank, threadblock: ThreadBlockId(at as u32), op: op as u32, inner: None })
            });
            Ok(ThreadBlock {
                id: block.id,
                ops: ops.collect::<Result<_, PlanError>>()?,
                channels: block.channels,
                remote_buffer_refs: block.remote_buffer_refs,
            })
        });
        Ok(Gpu {
            id: self.id,
            input_chunks: self.input_chunks,
            output_chunks: self.output_chunks,
            scratch_chunks: self.scratch_chunks,
            threadblocks: threadblocks.collect::<Result<_, PlanError>>()?,
            channels,
            remote_buffers: self.remote_buffers,
            semaphores: self.semaphores,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireThreadBlock {
    id: u32,
    ops: Vec<WireOp>,
    #[serde(default)]
    channels: Vec<ChannelRefs>,
    #[serde(default)]
    remote_buffer_refs: Vec<RemoteBufferRefs>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireChannels {
    channel_type: ChannelType,
    connected_to: Option<Vec<Rank>>,
    buffer_type: Option<BufferType>,
    rank_groups: Option<Vec<WireRankGroup>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireRankGroup {
    size: u64,
    ranks: Vec<Rank>,
}

impl WireChannels {
    fn read(self, rank: Rank) -> Result<GpuChannels, PlanError> {
        let malformed =
            |what: String| PlanError::Malformed { what: format!("channels of rank {rank}: {what}") };
        match (self.channel_type, self.connected_to, self.buffer_type, self.rank_groups) {
            (ChannelType::Switch, None, Some(buffer), Some(groups)) => {
                let groups = groups.into_iter().map(|group| match group.size == group.ranks.len() as u64 {
                    true => Ok(group.ranks),
                    false => Err(malformed(format!(
                        "a group of size {} with {} ranks",
                        group.size,
                        group.ranks.len()
                    ))),
                });
                Ok(GpuChannels::Switch { buffer, rank_groups: groups.collect::<Result<_, _>>()? })
            }
            (channel_type @ (ChannelType::Memory | ChannelType::Port), Some(connected_to), None, None) => {
                Ok(GpuChannels::Peers { channel_type, connected_to })
            }
            (ChannelType::Switch, ..) => {
                Err(malformed("a switch channel has buffer_type and rank_groups".into()))
            }
            (..) => Err(malformed("a memory or port channel has connected_to".into())),
        }
    }
}
