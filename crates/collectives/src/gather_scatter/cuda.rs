//! The collectives that move data, on GPUs; `kernels.cuh` and `reduce_scatter.cuh` have the algorithms.

use antiphon_device::{ReduceOp, cuda::StreamRef};
use antiphon_fabric::{FabricError, Operation, Signature};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    arguments::block,
    cuda::{
        CudaCollectives,
        kernels::{Family, Kernel},
        launch::{Cut, Grid, Launch, More, Work},
        signature,
    },
    error::Result,
};

/// Bytes that a row takes in a lane, and those of them that are data; see `ROW` in kernels.cuh.
const ROW_BYTES: usize = 512;
const ROW_DATA: usize = 496;
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
        let signature = signature(Operation::AllGather, input.dtype(), input.numel());
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let bytes = count * input.dtype.size();
        let work = Work {
            input: input.data.addr(),
            output: output.data.addr(),
            count: bytes,
            stride: bytes,
            root: 0,
            signature,
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
        let signature = signature(Operation::AllToAll, input.dtype(), input.numel());
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let bytes = count * input.dtype.size();
        let work = Work {
            input: input.data.addr(),
            output: output.data.addr(),
            count: bytes,
            stride: bytes,
            root: 0,
            signature,
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
        let mut signature = signature(Operation::ReduceScatter, input.dtype(), input.numel());
        signature.reduce = Some(op);
        let (input, output) = (self.input(&signature, input)?, self.output(&signature, output)?);
        let count = block(signature.operation, &input, &output, self.world_size())?;
        let loaded = self.ready(Family::Reduction(input.dtype, op), stream)?;
        let size = input.dtype.size();
        let bytes = count * size;
        let (from, to) = (input.data.addr(), output.data.addr());
        let of = |start: usize, len: usize, _| {
            let work = Work {
                input: from + start,
                output: to + start,
                count: len / size,
                stride: bytes,
                root: 0,
                signature,
            };
            let plain = (work.input | work.output | bytes | len).is_multiple_of(16);
            let kernel = if plain { Kernel::ReduceScatterPlain } else { Kernel::ReduceScatter };
            Launch { kernel, grid: Grid::ItemsByPeer(len.div_ceil(16)), work, more: More::Nothing }
        };
        // SAFETY: passed on.
        unsafe { self.run(&loaded, Cut::bytes(bytes, self.lane_bytes()), stream, of) }
    }

    /// Waits, in the order of the stream, until the streams of all ranks have come here.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn barrier(&self, stream: StreamRef<'_>) -> Result<()> {
        let loaded = self.ready(Family::Movement, stream)?;
        let signature = Signature::new(Operation::Barrier);
        let work = Work { input: 0, output: 0, count: 0, stride: 0, root: 0, signature };
        let barrier =
            |_, _, _| Launch { kernel: Kernel::Barrier, grid: Grid::Items(1), work, more: More::Nothing };
        // SAFETY: it uses no memory of the caller's.
        unsafe { self.run(&loaded, Cut::bytes(1, 1), stream, barrier) }
    }

    /// Moves blocks of `work.count` bytes by a kernel that works in rows.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn move_rows(&self, kernel: Kernel, work: &Work, stream: StreamRef<'_>) -> Result<()> {
        let loaded = self.ready(Family::Movement, stream)?;
        // Of a part, a peer gets one and passes it on.
        let parts = if kernel == Kernel::BroadcastParts { self.world_size() - 1 } else { 1 };
        let of = |start: usize, len: usize, _| {
            let work = Work { input: work.input + start, output: work.output + start, count: len, ..*work };
            let items = len.div_ceil(ROW_DATA * parts) * 32;
            let grid = match kernel {
                Kernel::AllToAll | Kernel::BroadcastParts => Grid::ItemsByPeer(items),
                _ => Grid::Items(items),
            };
            Launch { kernel, grid, work, more: More::Nothing }
        };
        let piece = self.lane_bytes() / ROW_BYTES * ROW_DATA * parts;
        // SAFETY: passed on.
        unsafe { self.run(&loaded, Cut::bytes(work.count, piece), stream, of) }
    }
}
