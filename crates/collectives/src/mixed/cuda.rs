//! Mixed collectives on GPUs; `kernels.cuh` has the modes.

use std::ops::RangeInclusive;

use antiphon_device::{
    ReduceOp,
    cuda::{DeviceMemory, Program, StreamRef},
};
use antiphon_fabric::{
    Communicator, FabricError, Operation,
    gpu::{
        Family, Grid, Launch, MAX_WORLD, Pieces, REDUCE, Reduction, Source, THREADS, Work, kernel_call,
        kernels,
    },
};
use antiphon_tensor::{DType, TensorView, TensorViewMut};
use antiphon_tuning::Key;

use super::{
    MixedCall, MixedLayout, MixedMode, MixedOp,
    call::{CheckedMixedCall, agree_on_layout, check_call, check_op, check_rank, plain_call},
    choice::{Tables, fused, names, of_layout},
    operation_of,
};
use crate::{
    AlgorithmTable, StreamCollectives,
    all_reduce::Algorithm,
    arguments::{Input, Output, check_reduction, reduction},
    cuda::{CudaCollectives, choice::Clock},
    error::Result,
};

kernels! {
    /// The kernels of `kernels.cuh`. A plain one needs whole vectors at multiples of 16 bytes.
    pub(crate) enum Kernel {
        GatherWaits = "gather_waits",
        GatherWaitsPlain = "gather_waits_plain",
        GatherBytes1 = "gather_bytes1",
        GatherBytes1Plain = "gather_bytes1_plain",
        ScatterWaits = "scatter_waits",
        ScatterWaitsPlain = "scatter_waits_plain",
        ScatterBytes1 = "scatter_bytes1",
        ScatterBytes1Plain = "scatter_bytes1_plain",
    }
}

impl Kernel {
    fn of(gathers: bool, mode: MixedMode, plain: bool) -> Self {
        let [any, whole] = match (gathers, mode) {
            (true, MixedMode::Waits) => [Self::GatherWaits, Self::GatherWaitsPlain],
            (true, _) => [Self::GatherBytes1, Self::GatherBytes1Plain],
            (false, MixedMode::Waits) => [Self::ScatterWaits, Self::ScatterWaitsPlain],
            (false, _) => [Self::ScatterBytes1, Self::ScatterBytes1Plain],
        };
        if plain { whole } else { any }
    }
}

/// The kernels that sum elements of a type over groups of `tp` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mixing {
    pub(crate) sum: Reduction,
    pub(crate) tp: usize,
}

/// Groups of a mixed layout: each has two ranks at least.
const MAX_GROUPS: usize = MAX_WORLD / 2;

impl Family for Mixing {
    type Kernel = Kernel;
    type Arguments = Blocks;
    const NAME: &'static str = "mixed.cuh";
    const SOURCES: &'static [Source] =
        &[REDUCE, Blocks::SOURCE, Source::new("mixed/kernels.cuh", include_str!("kernels.cuh"))];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.sum.define(program).define("TP", self.tp).define("MAX_GROUPS", MAX_GROUPS)
    }
}

kernel_call! {
    /// The blocks of the groups, of a launch.
    #[derive(Debug, Default)]
    pub(crate) struct Blocks = "blocks" {
        /// Bytes from the start of the row of blocks.
        at: [u64; MAX_GROUPS],
        /// Elements.
        count: [u32; MAX_GROUPS],
        /// Whether all blocks have as many.
        even: u32,
        /// Elements of the longest.
        most: u32,
    }
}

/// The mixed collectives of a layout, on the GPUs of [`CudaCollectives`] of all its ranks. All ranks make the same calls in the same
/// order, mixed with other calls as they like.
///
/// [`MixedMode::Composed`] is not among its modes: two collectives in the groups need communicators of the groups, with memory of
/// their own.
pub struct CudaMixedHandler {
    layout: MixedLayout,
    tables: Tables,
    /// Blocks of a grid, at most.
    most_blocks: usize,
}

impl std::fmt::Debug for CudaMixedHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaMixedHandler").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl CudaMixedHandler {
    /// The handler of a layout. All ranks call it together.
    ///
    /// # Errors
    /// As [`MixedHandler::new`](super::MixedHandler::new); [`FabricError::InvalidArgument`] for a layout of several nodes, which only the
    /// host serves.
    pub fn new(comm: &Communicator, collectives: &CudaCollectives, layout: MixedLayout) -> Result<Self> {
        let checked = check_rank(&layout, collectives.rank(), collectives.world_size());
        agree_on_layout(comm, &layout, checked.and_then(|()| check_one_node(&layout)))?;
        let machine = machine(collectives)?;
        let key = |operation| key(operation, &layout, &machine);
        let tables = Tables::load_with(comm, &layout, key, bytes1_from(&layout))?;
        Ok(Self { layout, tables, most_blocks: usize::MAX })
    }

    /// Limits each launch of a fused operation to `blocks` blocks (but at least one block for each peer), so that other kernels
    /// have more room beside it. All ranks pass the same number.
    #[must_use]
    pub fn most_blocks(self, blocks: usize) -> Self {
        Self { most_blocks: blocks, ..self }
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
    pub fn select(&self, collectives: &CudaCollectives, op: MixedOp, bytes: usize) -> Result<MixedMode> {
        check_op(&self.layout, op)?;
        Ok(match op {
            MixedOp::AllReduce if collectives.algorithm_for(bytes) == Algorithm::TwoShot => MixedMode::Bytes1,
            MixedOp::AllReduce | MixedOp::AllGather | MixedOp::ReduceScatter => MixedMode::Waits,
            MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce => {
                self.tables.choose(operation_of(op), bytes)
            }
        })
    }

    /// Measures the modes for every fused operation of the layout and blocks of `sizes` bytes, of bf16, in graphs; from then on
    /// [`select`](Self::select) goes by what was measured, here and in every handler of such a layout that is made on this machine. It
    /// takes twice a row of blocks of the largest size of each GPU's memory. All ranks call it together, with nothing under way on
    /// `collectives`.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`CollectiveError::Tuning`](crate::CollectiveError::Tuning) when the cache file cannot be written.
    pub fn tune(
        &mut self,
        comm: &Communicator,
        collectives: &CudaCollectives,
        sizes: RangeInclusive<usize>,
    ) -> Result<()> {
        const DTYPE: DType = DType::BF16;
        let (layout, machine) = (self.layout, machine(collectives)?);
        if !layout.use_mixed() {
            return Ok(());
        }
        self.prepare(collectives, DTYPE)?;
        let clock = Clock::new(collectives, sizes.end().saturating_mul(layout.dp_size()))?;
        for op in fused(&layout) {
            let (operation, handler) = (operation_of(op), &*self);
            let table = AlgorithmTable::measure(
                comm,
                &key(operation, &layout, &machine),
                &names(&layout),
                sizes.clone(),
                |candidate, bytes| {
                    let block = (bytes / DTYPE.size()).max(1);
                    let row = block * layout.dp_size();
                    let gathers = op == MixedOp::AllReduceAllGather;
                    let (from, to) = if gathers { (block, row) } else { (row, block) };
                    let tensor = |memory: &DeviceMemory, count| Output {
                        data: memory.pointer().0 as usize as *mut u8,
                        count,
                        dtype: DTYPE,
                    };
                    let call = MixedCall::from(op).mode(MixedMode::fused_in(&layout)[candidate]);
                    comm.barrier()?; // hosts in step, so that no GPU waits for long
                    let once = |stream: StreamRef<'_>| {
                        let input = tensor(&clock.input, from).as_input();
                        // SAFETY: both memories have a row, and live until the run has been waited for.
                        unsafe {
                            handler.run_fused(
                                collectives,
                                &call,
                                input,
                                tensor(&clock.output.borrow(), to),
                                stream,
                            )
                        }
                    };
                    clock.time(bytes, once).map(Some)
                },
            )?;
            self.tables.replace(operation, table);
        }
        Ok(())
    }

    /// Compiles and loads the kernels for a dtype, so that no call has to. Not while a stream is being captured.
    ///
    /// # Errors
    /// As [`CudaCollectives::prepare`].
    pub fn prepare(&self, collectives: &CudaCollectives, dtype: DType) -> Result<()> {
        if self.layout.use_mixed() {
            collectives.tenant.load(self.family(self.valid_ops()[0], dtype)?)?;
            return Ok(());
        }
        collectives.prepare(dtype, ReduceOp::Sum)
    }

    fn family(&self, op: MixedOp, dtype: DType) -> Result<Mixing> {
        Ok(Mixing { sum: reduction(operation_of(op), dtype, ReduceOp::Sum)?, tp: self.layout.tp_size() })
    }

    /// Runs a call in the order of the stream, on tensors of f32, f16 or bf16 with as many elements as for
    /// [`MixedHandler::run`](super::MixedHandler::run). The input may be the group's own block of the output, or the output that of the
    /// input.
    ///
    /// # Errors
    /// As [`MixedHandler::run`](super::MixedHandler::run), but what goes wrong between the ranks is returned by a later call, as
    /// [`CudaCollectives::check`] says.
    ///
    /// # Safety
    /// As [`StreamCollectives::call`].
    pub unsafe fn run<'a>(
        &self,
        collectives: &CudaCollectives,
        call: impl Into<MixedCall<'a>>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let call = call.into();
        check_call(&self.layout, &call, self.valid_modes())?;
        // SAFETY: passed on.
        unsafe {
            match (call.op, call.mode) {
                (MixedOp::AllReduce, None) => collectives.all_reduce(input, output, ReduceOp::Sum, stream),
                (MixedOp::AllReduce, Some(mode)) => {
                    let algorithm = mode.of_all_reduce();
                    collectives.all_reduce_with(input, output, ReduceOp::Sum, algorithm, stream)
                }
                (MixedOp::AllGather | MixedOp::ReduceScatter, _) => {
                    collectives.call(&plain_call(&call), Some(input), Some(output), stream)
                }
                (MixedOp::AllReduceAllGather | MixedOp::ReduceScatterAllReduce, _) => {
                    let (operation, device) = (operation_of(call.op), collectives.serves());
                    let input = Input::on(device, operation, input)?;
                    let output = Output::on(device, operation, output)?;
                    self.run_fused(collectives, &call, input, output, stream)
                }
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn run_fused(
        &self,
        collectives: &CudaCollectives,
        call: &MixedCall<'_>,
        input: Input,
        output: Output,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let (layout, tenant) = (&self.layout, &collectives.tenant);
        check_reduction((operation_of(call.op), ReduceOp::Sum), Some(&input), Some(&output))?;
        let checked = CheckedMixedCall::new(layout, call, input, output)?;
        let mode = call.mode.unwrap_or_else(|| self.tables.choose(checked.operation, checked.bytes()));
        let loaded = tenant.ready(self.family(call.op, input.dtype)?, stream)?;
        let signature = checked.signature(mode as u8);
        // Each rank of a group has a part of the group's block.
        let parts = if mode == MixedMode::Waits { 1 } else { layout.tp_size() };
        let launch = |start: usize, len: usize, _| {
            let (blocks, own) = clipped(layout, &checked, start, len);
            let (input, output) = (checked.input.data.addr(), checked.output.data.addr());
            let (input, output) = if checked.gathers { (input + own, output) } else { (input, output + own) };
            let work = Work { input, output, ..Work::new(signature) };
            let plain = blocks.are_plain(layout.dp_size(), input | output, checked.input.dtype.size());
            let items = len.div_ceil(16).div_ceil(parts);
            let most = self.most_blocks.saturating_mul(THREADS as usize);
            // In one hop a thread sends its vectors to every peer; in two, a block serves one.
            let grid = match mode {
                MixedMode::Waits => Grid::Items(items.min(most)),
                _ => Grid::ItemsByPeer(items.min(most / (layout.world_size() - 1)).max(1)),
            };
            Launch { kernel: Kernel::of(checked.gathers, mode, plain), grid, work, arguments: blocks }
        };
        let pieces = Pieces::bytes(checked.bytes(), tenant.lane_bytes() * parts);
        // SAFETY: passed on; a launch sends `len` bytes, or a part of them, to a lane.
        unsafe { tenant.run(&loaded, pieces, stream, launch) }?;
        Ok(())
    }
}

impl Blocks {
    /// Whether all blocks are whole vectors at multiples of 16 bytes from `base`.
    fn are_plain(&self, groups: usize, base: usize, size: usize) -> bool {
        let is_whole =
            |group: usize| (self.at[group] as usize | (self.count[group] as usize * size)).is_multiple_of(16);
        base.is_multiple_of(16) && (0..groups).all(is_whole)
    }
}

/// The part of every group's block that lies in these bytes of the longest block, and the start of that part in the rank's own block.
fn clipped(layout: &MixedLayout, call: &CheckedMixedCall<'_>, start: usize, len: usize) -> (Blocks, usize) {
    let size = call.input.dtype.size();
    let bytes = |group: usize| call.blocks.len(group) * size;
    let mut blocks = Blocks { most: (len / size) as u32, ..Blocks::default() };
    for group in 0..layout.dp_size() {
        let begin = start.min(bytes(group));
        blocks.at[group] = (call.blocks.start(group) * size + begin) as u64;
        blocks.count[group] = (((start + len).min(bytes(group)) - begin) / size) as u32;
    }
    blocks.even = blocks.count[..layout.dp_size()].iter().all(|&count| count == blocks.most).into();
    (blocks, start.min(bytes(layout.dp_rank())))
}

/// What a second hop costs, in bytes that a rank would store meanwhile: on H200s an all-reduce of 4 ranks, which saves 1.5·n of its
/// 3·n bytes by it, takes as long either way at 208 KiB.
const SECOND_HOP: usize = 312 << 10;

/// Checks that the layout has one node, as GPUs reach no others.
fn check_one_node(layout: &MixedLayout) -> Result<()> {
    match layout.inter_size() {
        1 => Ok(()),
        nodes => {
            let text = format!(
                "mixed collectives of GPUs need all ranks on one node, the layout has inter_size {nodes}"
            );
            Err(FabricError::invalid(text).into())
        }
    }
}

/// The bytes of a block from which on [`MixedMode::Bytes1`] is faster: there its second hop saves more bytes than it costs. `tune`
/// measures a machine's own number.
fn bytes1_from(layout: &MixedLayout) -> usize {
    let (mates, peers) = (layout.tp_size() - 1, layout.world_size() - 1);
    // The second hop leaves (mates + peers) / TP · n of peers·n bytes.
    SECOND_HOP * layout.tp_size() / (mates * (peers - 1)).max(1)
}

/// The machine, on which the times depend: the GPU, and the driver.
fn machine(collectives: &CudaCollectives) -> Result<String> {
    let device = collectives.context().device();
    Ok(format!("{}, CUDA {}", device.properties()?.name, device.driver().version()))
}

/// Tables are of bf16, and serve the other types: times depend on the bytes, and hardly on what they mean.
fn key(operation: Operation, layout: &MixedLayout, machine: &str) -> Key {
    Key::new(of_layout(operation, layout), "", layout.world_size(), machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call<'a>(
        counts: Option<&'a [usize]>,
        row: &mut [u16],
        block: &mut [u16],
    ) -> (MixedLayout, CheckedMixedCall<'a>) {
        let layout = MixedLayout::builder(4, 2).local_tp(2).build().unwrap();
        let tensor = |data: &mut [u16]| Output {
            data: data.as_mut_ptr().cast(),
            count: data.len(),
            dtype: DType::BF16,
        };
        let call = MixedCall::from(MixedOp::AllReduceAllGather).counts(counts);
        let checked = CheckedMixedCall::new(&layout, &call, tensor(block).as_input(), tensor(row)).unwrap();
        (layout, checked)
    }

    #[test]
    fn the_second_hop_pays_the_sooner_the_more_it_saves() {
        let from = |tp: usize, dp: usize| {
            bytes1_from(&MixedLayout::builder(tp * dp, 0).local_tp(tp).build().unwrap()) >> 10
        };
        // 3·n bytes become 2·n, then 7·n become 4·n, and 7·n become 2.5·n.
        assert_eq!([from(2, 2), from(2, 4), from(4, 2)], [312, 104, 69]);
    }

    #[test]
    fn a_piece_has_its_share_of_every_block() {
        let (mut row, mut block) = ([0; 48], [0; 24]);
        let (layout, even) = call(None, &mut row, &mut block);
        let (blocks, own) = clipped(&layout, &even, 16, 32);
        assert_eq!((blocks.at, blocks.count), ([16, 64, 0, 0], [16, 16, 0, 0]));
        assert_eq!((blocks.even, blocks.most, own), (1, 16, 16));
        assert!(blocks.are_plain(2, 4096, 2) && !blocks.are_plain(2, 4098, 2));
    }

    #[test]
    fn a_block_may_end_before_a_piece() {
        let (mut row, mut block) = ([0; 31], [0; 7]);
        let (layout, uneven) = call(Some(&[24, 7]), &mut row, &mut block);
        let (blocks, own) = clipped(&layout, &uneven, 0, 16);
        assert_eq!((blocks.at, blocks.count, blocks.even, own), ([0, 48, 0, 0], [8, 7, 0, 0], 0, 0));
        let (blocks, own) = clipped(&layout, &uneven, 16, 32);
        assert_eq!((blocks.at, blocks.count, blocks.most, own), ([16, 62, 0, 0], [16, 0, 0, 0], 16, 14));
        assert!(!blocks.are_plain(2, 0, 2), "an empty block begins anywhere");
    }
}
