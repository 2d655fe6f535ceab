//! Mixed collectives of GPUs on several nodes.
//!
//! The ranks of a node share memory, as on one node, and the ranks at one place of their nodes, a *rail*, write into each other's symmetric
//! memory: by stores where NVSHMEM finds a way, otherwise by puts with signals, which kernels start themselves, so that calls can be captured.
//! The five operations are two kernels: an all-gather is a gather in which nobody shares tensors, a reduce-scatter such a scatter, and an
//! all-reduce a gather of one group.
//!
//! In [`Waits`](MixedMode::Waits) each rank of a node adds up all that it needs, and in the other modes they divide it; in
//! [`Bytes2`](MixedMode::Bytes2) the ranks of a rail divide its sums as well. All modes have the host's bits.
//!
//! between.cuh says how the ranks wait for each other and why that ends; `model` goes through the orders, and `shape` divides calls.

#[cfg(test)]
mod model;
mod shape;

use std::fmt;

use antiphon_device::{
    ReduceOp,
    cuda::{Context, Program, StreamRef},
};
use antiphon_fabric::{
    Communicator, FabricError, Operation, Signature,
    gpu::{
        Family, Grid, Launch, OnFailure, Pieces, REDUCE, Rails, Reduction, Runtime, Source, Tenant, Work,
        kernel_call, kernels,
    },
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_tuning::Key;

use super::{
    MixedCall, MixedLayout, MixedMode, MixedOp,
    call::{Blocks, CheckedMixedCall, agree_on_layout, check_call, check_nodes, check_op, check_rank},
    choice::{FEWEST_BYTES_FROM, Tables, fewest_bytes, of_layout},
    operation_of,
};
use crate::{
    arguments::{Input, Output, check_reduction, reduction},
    error::Result,
};

use shape::{Kind, MAIL_BYTES, MAX_BLOCKS, MAX_GROUPS, MAX_NODES, Shape};

kernels! {
    /// The kernels of between.cuh.
    pub(crate) enum Kernel {
        Gather = "gather_between",
        Scatter = "scatter_between",
    }
}

/// The kernels for elements of a type, or without one those that move bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exchange {
    pub(crate) sum: Option<Reduction>,
}

impl Family for Exchange {
    type Kernel = Kernel;
    type Arguments = Between;
    const NAME: &'static str = "between.cuh";
    const SOURCES: &'static [Source] =
        &[REDUCE, Between::SOURCE, Source::new("rails/between.cuh", include_str!("between.cuh"))];
    const PUTS: bool = true;

    fn define(&self, program: Program, _world_size: usize) -> Program {
        let program = match self.sum {
            Some(sum) => sum.define(program),
            // Bytes, of which reduce.cuh needs to know something.
            None => [
                ("ELEMENT", "u8"),
                ("NAN_PAIR", "0"),
                ("OPERATOR", "sum_of"),
                ("AVERAGE", "0"),
                ("ROUND_EACH", "0"),
            ]
            .into_iter()
            .fold(program, |program, (name, value)| program.define(name, value)),
        };
        program
            .define("COPIES", u8::from(self.sum.is_none()))
            .define("MAIL_BYTES", MAIL_BYTES)
            .define("MAX_NODES", MAX_NODES)
            .define("MAX_GROUPS", MAX_GROUPS)
    }

    fn threads(&self) -> u32 {
        256
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}

kernel_call! {
    /// A call between nodes.
    pub(crate) struct Between = "between" {
        /// This rank's symmetric memory.
        heap: *mut u8,
        /// That of the rail's other ranks, where stores reach it.
        near: [*mut u8; MAX_NODES],
        /// Bytes from the start of the row of blocks.
        at: [u64; MAX_GROUPS],
        /// Bytes from the start of an arena.
        region: u64,
        /// Elements.
        count: [u32; MAX_GROUPS],
        nodes: u32,
        node: u32,
        local_tp: u32,
        inter_tp: u32,
        groups: u32,
        /// Elements of the longest block.
        most: u32,
        adders: u32,
        /// Ranks of a rail that divide its sums.
        owners: u32,
        /// Vectors of a piece.
        step: u32,
        rounds: u32,
        whole: u32,
        /// Whether there are RESULTS.
        hears_results: u32,
    }
}

/// The mixed collectives of a layout on several nodes, on the GPUs of all its ranks, each in a process of its own. All ranks make the
/// same calls in the same order.
///
/// What NVSHMEM carries between nodes was tried on no machine with several: see docs/guide/cluster.md.
pub struct CudaMixedNodes {
    layout: MixedLayout,
    tables: Tables,
    /// Blocks of a grid, at most.
    most_blocks: usize,
    tenant: Tenant,
    rails: Rails,
    // Behind the tenant, whose memory is that of the node's ranks.
    _node: Communicator,
}

impl fmt::Debug for CudaMixedNodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMixedNodes").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl CudaMixedNodes {
    /// The handler of a layout, on the GPU of each rank's context. All ranks call it together. It takes 16 MiB of each GPU and 2 MiB for
    /// each rank of the node, and of `N` nodes `3 N + 1` MiB of symmetric memory, which [`close`](Self::close) gives back.
    ///
    /// # Errors
    /// As [`MixedHandler::new`](super::MixedHandler::new), [`Rails::new`] and [`Tenant::between_nodes`]. [`FabricError::InvalidArgument`]
    /// for a layout of one node, which [`CudaMixedHandler`](super::CudaMixedHandler) serves, of more than 32 nodes, and of more
    /// than 64 groups.
    pub fn new(
        comm: &Communicator,
        context: &Context,
        layout: MixedLayout,
        runtime: Runtime,
    ) -> Result<Self> {
        let checked = check_rank(&layout, comm.rank(), comm.world_size())
            .and_then(|()| check_nodes(&layout, &comm.nodes()))
            .and_then(|()| check_size(&layout));
        agree_on_layout(comm, &layout, checked)?;
        let device = context.device();
        let machine =
            device.properties().map(|found| format!("{}, CUDA {}", found.name, device.driver().version()));
        let machine = comm.agree("cannot tell its GPU", machine.map_err(FabricError::from))?;
        let key = |operation| {
            let nodes = std::iter::repeat_n(layout.local_size(), layout.inter_size());
            Key::new(of_layout(operation, &layout), "", layout.world_size(), &machine).on_nodes(nodes)
        };
        let tables = Tables::load_with(comm, &layout, key, FEWEST_BYTES_FROM)?;
        let node = comm.node_group()?;
        let tenant = Tenant::between_nodes(comm, &node, context, shape::region_bytes(layout.local_size()))?;
        let rails = Rails::new(comm, context, shape::heap_bytes(layout.inter_size()), runtime)?;
        Ok(Self { layout, tables, most_blocks: MAX_BLOCKS, tenant, rails, _node: node })
    }

    /// Limits each launch to `blocks` blocks. All ranks pass the same number.
    #[must_use]
    pub fn most_blocks(self, blocks: usize) -> Self {
        Self { most_blocks: blocks.clamp(1, MAX_BLOCKS), ..self }
    }

    /// The layout.
    pub fn layout(&self) -> &MixedLayout {
        &self.layout
    }

    /// The operations that [`run`](Self::run) takes.
    pub fn valid_ops(&self) -> &'static [MixedOp] {
        self.layout.valid_ops()
    }

    /// The modes that [`run`](Self::run) takes.
    pub fn valid_modes(&self) -> &'static [MixedMode] {
        MixedMode::fused_in(&self.layout)
    }

    /// The mode of a call that names no mode, for blocks of `bytes` bytes.
    ///
    /// # Errors
    /// [`CollectiveError::Refused`](crate::CollectiveError::Refused) for an operation that is not valid.
    pub fn select(&self, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        check_op(&self.layout, op)?;
        Ok(match op {
            MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce => {
                self.tables.choose(operation_of(op), bytes)
            }
            MixedOp::AllReduce if bytes >= FEWEST_BYTES_FROM => {
                self.valid_modes()[fewest_bytes(op, &self.layout)]
            }
            _ => MixedMode::Waits,
        })
    }

    /// Compiles, links and loads the kernels of all operations that take a dtype, so that no call has to. Not while a stream is being
    /// captured. All ranks call it together.
    ///
    /// # Errors
    /// As [`Tenant::load_together`]; [`CollectiveError`](crate::CollectiveError) for a dtype that no operation takes.
    pub fn prepare(&self, comm: &Communicator, dtype: DType) -> Result<()> {
        let families = self.valid_ops().iter().map(|&op| family(op, dtype));
        let (taken, refused): (Vec<_>, Vec<_>) = families.partition(Result::is_ok);
        let taken = if taken.is_empty() { refused } else { taken };
        let families = taken.into_iter().collect::<Result<Vec<_>>>();
        for family in comm.agree("cannot prepare its kernels", families)? {
            self.tenant.load_together(comm, family)?;
        }
        Ok(())
    }

    /// Runs a call in the order of the stream: an all-gather of any dtype, and the others of f32, f16 and bf16, with as many elements as for
    /// [`MixedHandler::run`](super::MixedHandler::run). The input may be the group's own block of the output, or the output that of the
    /// input.
    ///
    /// # Errors
    /// As [`MixedHandler::run`](super::MixedHandler::run), but what goes wrong between the ranks is returned by a later call, as
    /// [`check`](Self::check) says.
    ///
    /// # Safety
    /// The tensors are of this rank's device, and live until the stream has passed the call; nobody else uses them meanwhile.
    pub unsafe fn run<'a>(
        &self,
        call: impl Into<MixedCall<'a>>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let call = call.into();
        check_call(&self.layout, &call, self.valid_modes())?;
        let (operation, device) =
            (operation_of(call.op), Device::Cuda(self.tenant.context().device().ordinal()));
        let input = Input::on(device, operation, input)?;
        let output = Output::on(device, operation, output)?;
        if call.op != MixedOp::AllGather {
            check_reduction((operation, ReduceOp::Sum), Some(&input), Some(&output))?;
        }
        let checked = CheckedMixedCall::new(&self.layout, &call, input, output)?;
        let mode = call.mode.map_or_else(|| self.select(call.op, checked.bytes()), Ok)?;
        let loaded = self.tenant.ready(family(call.op, input.dtype)?, stream)?;
        if checked.blocks.longest() == 0 {
            return Ok(());
        }
        let (grid, arguments) = self.arguments(&checked, mode)?;
        let launch = |_, _, _| Launch {
            kernel: if checked.gathers { Kernel::Gather } else { Kernel::Scatter },
            grid: Grid::Exact {
                config: FAMILY.blocks(grid as u32, self.layout.local_size()),
                is_small: false,
            },
            work: Work {
                input: checked.input.data.addr(),
                output: checked.output.data.addr(),
                ..Work::new(signature(&checked, mode))
            },
            arguments,
        };
        // SAFETY: passed on; a grid has no more blocks than multiprocessors, and goes by its rounds through its own mailboxes.
        unsafe { self.tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream, launch) }?;
        Ok(())
    }

    /// Whether all calls that are over have done what they should; see [`Tenant::check`].
    ///
    /// # Errors
    /// As [`Tenant::check`].
    pub fn check(&self) -> Result<()> {
        Ok(self.tenant.check()?)
    }

    /// Sets the action after a kernel has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.tenant.on_failure(action);
    }

    /// Ends the handler on all ranks, and gives its memory back. All ranks call it together.
    ///
    /// # Errors
    /// As [`Rails::free`].
    pub fn close(self, comm: &Communicator) -> Result<()> {
        drop(self.tenant);
        Ok(self.rails.free(comm)?)
    }

    /// The blocks of the grid, and what the kernel needs to know of the call.
    fn arguments(&self, call: &CheckedMixedCall<'_>, mode: MixedMode) -> Result<(usize, Between)> {
        let (layout, size) = (&self.layout, call.input.dtype.size());
        let copies = call.operation == Operation::AllGather;
        // What the kernel counts as elements: bytes, where it moves them.
        let scale = if copies { size } else { 1 };
        let lanes = if copies { 16 } else { 16 / size };
        let longest = call.blocks.longest() * scale;
        if u32::try_from(longest).is_err() {
            let text = format!("a block of {longest} elements or bytes, at most {} are possible", u32::MAX);
            return Err(FabricError::InvalidArgument(text).into());
        }
        let most = self.most_blocks.min(self.tenant.multiprocessors_here() as usize);
        let shape = Shape::new(layout, Kind { gathers: call.gathers, copies, mode, lanes }, longest, most);
        let (nodes, local_size) = (layout.inter_size(), layout.local_size());
        let rank_on = |node: usize| node * local_size + layout.local_rank();
        let mut arguments = Between {
            heap: self.rails.pointer().0,
            near: [0; MAX_NODES],
            at: [0; MAX_GROUPS],
            region: self.tenant.region_at(),
            count: [0; MAX_GROUPS],
            nodes: nodes as u32,
            node: layout.inter_rank() as u32,
            local_tp: layout.local_tp_size() as u32,
            inter_tp: layout.inter_tp_size() as u32,
            groups: layout.dp_size() as u32,
            most: longest as u32,
            adders: shape.adders as u32,
            owners: shape.owners as u32,
            step: shape.step as u32,
            rounds: shape.rounds as u32,
            whole: shape.is_whole.into(),
            hears_results: shape.hears_results.into(),
        };
        for node in (0..nodes).filter(|&node| node != layout.inter_rank()) {
            arguments.near[node] = self.rails.peer(rank_on(node)).map_or(0, |at| at.0);
        }
        for group in 0..layout.dp_size() {
            arguments.at[group] = (call.blocks.start(group) * size) as u64;
            arguments.count[group] = (call.blocks.len(group) * scale) as u32;
        }
        Ok((shape.blocks, arguments))
    }
}

/// Any family: all have as many threads.
const FAMILY: Exchange = Exchange { sum: None };

fn family(op: MixedOp, dtype: DType) -> Result<Exchange> {
    let sum = match op {
        MixedOp::AllGather => None,
        _ => Some(reduction(operation_of(op), dtype, ReduceOp::Sum)?),
    };
    Ok(Exchange { sum })
}

/// What ranks agree on.
fn signature(call: &CheckedMixedCall<'_>, mode: MixedMode) -> Signature {
    let signature = call.signature(mode as u8);
    let (algorithm, detail) = match (call.operation, call.blocks) {
        (Operation::AllReduce, _) if mode != MixedMode::Bytes1 => (mode.of_all_reduce() as u8, 0),
        // Which have one mode, and nothing to tell of it.
        (Operation::AllGather | Operation::ReduceScatter, Blocks::Even { .. }) => (0, 0),
        (Operation::AllGather | Operation::ReduceScatter, _) => (0, signature.detail),
        _ => return signature,
    };
    let reduce = signature.reduce.filter(|_| call.operation != Operation::AllGather);
    Signature { algorithm, detail, reduce, ..signature }
}

/// Checks that the layout has several nodes, and no more nodes and groups than a kernel can be told of.
fn check_size(layout: &MixedLayout) -> Result<()> {
    let (nodes, groups) = (layout.inter_size(), layout.dp_size());
    let text = match (nodes, groups) {
        (1, _) => "the layout has one node, and this is for several".to_owned(),
        _ if nodes > MAX_NODES => {
            format!("mixed collectives of GPUs work among up to {MAX_NODES} nodes, not {nodes}")
        }
        _ if groups > MAX_GROUPS => {
            format!("mixed collectives of GPUs on several nodes have up to {MAX_GROUPS} groups, not {groups}")
        }
        _ => return Ok(()),
    };
    Err(FabricError::InvalidArgument(text).into())
}

#[cfg(test)]
mod tests {
    use antiphon_device::cuda::Architecture;
    use antiphon_fabric::gpu::program;
    use antiphon_testing::{nvjitlink, nvrtc, nvshmem};

    use super::*;

    /// For every dtype and the copies, nodes of 1, 2 and 8 ranks, and every architecture.
    #[test]
    fn kernels_compile_without_a_warning_and_link() {
        let (Some(nvrtc), Some(linker), Some(nvshmem)) = (nvrtc(), nvjitlink(), nvshmem()) else { return };
        let library = nvshmem.device_library().unwrap();
        let sums = [DType::F32, DType::F16, DType::BF16].map(|dtype| Reduction::new(dtype, ReduceOp::Sum));
        let families = sums.into_iter().chain([None]).map(|sum| Exchange { sum });
        for (index, family) in families.enumerate() {
            for architecture in [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A] {
                for local_size in if index == 0 { &[1, 2, 8][..] } else { &[2] } {
                    let program = program(&family, architecture, *local_size);
                    let compiled = nvrtc.compile(&program).unwrap();
                    assert_eq!(compiled.log, "", "{family:?} for {architecture}, {local_size} ranks");
                    linker.link(&program, &compiled.cubin, library).unwrap();
                }
            }
        }
    }
}
