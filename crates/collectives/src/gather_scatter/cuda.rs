//! The collectives that move data, on GPUs; `kernels.cuh` and `reduce_scatter.cuh` have the algorithms.

use antiphon_device::{
    ReduceOp,
    cuda::{Program, StreamRef},
};
use antiphon_fabric::{
    FabricError, Operation, Signature,
    gpu::{Family, Grid, Launch, NoArguments, Pieces, Source, Work, kernels},
};
use antiphon_operation::Call;
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    all_reduce::{ReduceKernel, Reducing},
    arguments::block,
    cuda::{CudaCollectives, reduction, signature},
    error::Result,
};

kernels! {
    /// The kernels of `kernels.cuh`.
    pub(crate) enum Kernel {
        Barrier = "barrier",
        AllGather = "all_gather",
        AllToAll = "all_to_all",
        Broadcast = "broadcast",
        BroadcastParts = "broadcast_parts",
    }
}

/// The kernels that move bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Movement;

impl Family for Movement {
    type Kernel = Kernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "movement.cuh";
    const SOURCES: &'static [Source] = &[
        Source { name: "gather_scatter/rows.cuh", text: include_str!("rows.cuh") },
        Source { name: "gather_scatter/kernels.cuh", text: include_str!("kernels.cuh") },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program
    }
}

/// Bytes that a row takes in a lane, and those of them that are data; see `ROW` in kernels.cuh.
pub(super) const ROW_BYTES: usize = 512;
pub(super) const ROW_DATA: usize = 496;
/// From how many bytes on a broadcast goes in parts: where (W − 1)·n bytes out of the root weigh more than a second hop.
const PARTS_FROM: usize = 256 << 10;

impl CudaCollectives {
    /// The inputs of all ranks, one after the other: `n` elements in, `W·n` out, in the order of the stream. The input may
    /// be this rank's block of the output.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.world_size() == 1 {
            // SAFETY: passed on.
            return unsafe {
                self.alone(&Call::new(Operation::AllGather), Some(input), Some(output), stream)
            };
        }
        let signature = signature(Operation::AllGather, input.dtype(), input.numel());
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let bytes = count * input.dtype.size();
        let work = Work {
            input: input.data.addr(),
            output: output.data.addr(),
            count: bytes,
            stride: bytes,
            ..Work::new(signature)
        };
        // SAFETY: passed on.
        unsafe { self.move_rows(Kernel::AllGather, &work, stream) }
    }

    /// Block `r` of the input goes to rank `r`, whose block comes to the same place of the output: `W·n` elements in, as
    /// many out, in the order of the stream. `output` may be `input`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_to_all(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.world_size() == 1 {
            // SAFETY: passed on.
            return unsafe { self.alone(&Call::new(Operation::AllToAll), Some(input), Some(output), stream) };
        }
        let signature = signature(Operation::AllToAll, input.dtype(), input.numel());
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let bytes = count * input.dtype.size();
        let work = Work {
            input: input.data.addr(),
            output: output.data.addr(),
            count: bytes,
            stride: bytes,
            ..Work::new(signature)
        };
        // SAFETY: passed on.
        unsafe { self.move_rows(Kernel::AllToAll, &work, stream) }
    }

    /// Everybody's buffer becomes the root's, in the order of the stream.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`FabricError::InvalidArgument`] for a root that does not exist.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast(
        &self,
        buffer: &mut TensorViewMut<'_>,
        root: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let mut signature = signature(Operation::Broadcast, buffer.dtype(), buffer.numel());
        if root >= self.world_size() {
            let text = format!("root rank {root} is not below the world size {}", self.world_size());
            return Err(FabricError::InvalidArgument(text).into());
        }
        if self.world_size() == 1 {
            return Ok(self.tenant.check_ready()?);
        }
        signature.detail = root as u32;
        let buffer = self.output(&signature, buffer)?;
        let (at, bytes) = (buffer.data.addr(), buffer.count * buffer.dtype.size());
        let work = Work { input: at, output: at, count: bytes, stride: bytes, root, signature };
        let kernel = match bytes < PARTS_FROM || self.world_size() == 2 {
            true => Kernel::Broadcast,
            false => Kernel::BroadcastParts,
        };
        // SAFETY: passed on.
        unsafe { self.move_rows(kernel, &work, stream) }
    }

    /// Rank `r` gets the reduction of everybody's `r`-th block: `W·n` elements of f32, f16 or bf16 in, `n` out, in the order
    /// of the stream. The output may be this rank's block of the input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.world_size() == 1 {
            // SAFETY: passed on.
            return unsafe {
                self.alone(
                    &Call::new(Operation::ReduceScatter).with_op(op),
                    Some(input),
                    Some(output),
                    stream,
                )
            };
        }
        let mut signature = signature(Operation::ReduceScatter, input.dtype(), input.numel());
        signature.reduce = Some(op);
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let family = Reducing(reduction(signature.operation, input.dtype, op)?);
        let loaded = self.tenant.ready(family, stream)?;
        let size = input.dtype.size();
        let bytes = count * size;
        let (from, to) = (input.data.addr(), output.data.addr());
        let of = |start: usize, len: usize, _| {
            let work = Work {
                input: from + start,
                output: to + start,
                count: len / size,
                stride: bytes,
                ..Work::new(signature)
            };
            let plain = (work.input | work.output | bytes | len).is_multiple_of(16);
            let kernel = if plain { ReduceKernel::ReduceScatterPlain } else { ReduceKernel::ReduceScatter };
            Launch { kernel, grid: Grid::ItemsByPeer(len.div_ceil(16)), work, arguments: NoArguments }
        };
        // SAFETY: passed on.
        unsafe { self.tenant.run(&loaded, Pieces::bytes(bytes, self.tenant.lane_bytes()), stream, of) }?;
        Ok(())
    }

    /// Waits, in the order of the stream, until the streams of all ranks have come here.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn barrier(&self, stream: StreamRef<'_>) -> Result<()> {
        if self.world_size() == 1 {
            return Ok(self.tenant.check_ready()?);
        }
        let loaded = self.tenant.ready(Movement, stream)?;
        let work = Work::new(Signature::new(Operation::Barrier));
        let barrier =
            |_, _, _| Launch { kernel: Kernel::Barrier, grid: Grid::Items(1), work, arguments: NoArguments };
        // SAFETY: it uses no memory of the caller's.
        unsafe { self.tenant.run(&loaded, Pieces::bytes(1, 1), stream, barrier) }?;
        Ok(())
    }

    /// Moves blocks of `work.count` bytes by a kernel that works in rows.
    ///
    /// # Safety
    /// As [`Tenant::run`](antiphon_fabric::gpu::Tenant::run).
    unsafe fn move_rows(&self, kernel: Kernel, work: &Work, stream: StreamRef<'_>) -> Result<()> {
        let loaded = self.tenant.ready(Movement, stream)?;
        // Of a part, a peer gets one and passes it on.
        let parts = if kernel == Kernel::BroadcastParts { self.world_size() - 1 } else { 1 };
        let of = |start: usize, len: usize, _| {
            let work = Work { input: work.input + start, output: work.output + start, count: len, ..*work };
            let items = len.div_ceil(ROW_DATA * parts) * 32;
            let grid = match kernel {
                Kernel::AllToAll | Kernel::BroadcastParts => Grid::ItemsByPeer(items),
                _ => Grid::Items(items),
            };
            Launch { kernel, grid, work, arguments: NoArguments }
        };
        let piece = self.tenant.lane_bytes() / ROW_BYTES * ROW_DATA * parts;
        // SAFETY: passed on.
        unsafe { self.tenant.run(&loaded, Pieces::bytes(work.count, piece), stream, of) }?;
        Ok(())
    }
}
