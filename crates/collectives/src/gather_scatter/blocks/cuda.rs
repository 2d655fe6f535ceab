//! The collectives that move data, on GPUs; `kernels.cuh` and `reduce_scatter.cuh` have the algorithms.

use antiphon_device::cuda::StreamRef;
use antiphon_fabric::{
    Operation, Signature,
    gpu::{Family, Grid, Launch, NoArguments, Pieces, ROWS, Source, Tenant, Work, kernels},
};

use crate::{
    all_reduce::{ReduceKernel, Reducing},
    arguments::CheckedCall,
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

/// Bytes as rows, for all kernels that move them. Behind [`ROWS`].
pub(in crate::gather_scatter) const BYTES: Source =
    Source::new("gather_scatter/blocks/bytes.cuh", include_str!("bytes.cuh"));

/// The kernels that move bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Movement;

impl Family for Movement {
    type Kernel = Kernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "movement.cuh";
    const SOURCES: &'static [Source] =
        &[ROWS, BYTES, Source::new("gather_scatter/blocks/kernels.cuh", include_str!("kernels.cuh"))];
}

/// Bytes that a row takes in a lane, and those of them that are data; see `ROW` in rows.cuh.
pub(in crate::gather_scatter) const ROW_BYTES: usize = 512;
pub(in crate::gather_scatter) const ROW_DATA: usize = 496;
/// The number of bytes from which on a broadcast is sent in parts: there (W − 1)·n bytes out of the root cost more than a second hop.
const PARTS_FROM: usize = 256 << 10;

/// Carries out an all-gather or an all-to-all.
///
/// # Safety
/// The tensors stay valid, and are not used in another way, until the stream has passed this call.
pub(crate) unsafe fn move_blocks(
    tenant: &Tenant,
    call: &CheckedCall<'_>,
    stream: StreamRef<'_>,
) -> Result<()> {
    let kernel = match call.signature.operation {
        Operation::AllGather => Kernel::AllGather,
        _ => Kernel::AllToAll,
    };
    let ((input, output), bytes) = (call.addresses(), call.block_bytes());
    let work = Work { input, output, count: bytes, stride: bytes, ..Work::new(call.signature) };
    // SAFETY: passed on.
    unsafe { move_rows(tenant, kernel, &work, stream) }
}

/// Carries out a broadcast in the output, which at the root holds the block already.
///
/// # Safety
/// As [`move_blocks`].
pub(crate) unsafe fn broadcast(tenant: &Tenant, call: &CheckedCall<'_>, stream: StreamRef<'_>) -> Result<()> {
    let ((_, at), bytes, root) = (call.addresses(), call.block_bytes(), call.call.root);
    let work = Work { input: at, output: at, count: bytes, stride: bytes, root, signature: call.signature };
    let kernel = match bytes < PARTS_FROM || call.world_size == 2 {
        true => Kernel::Broadcast,
        false => Kernel::BroadcastParts,
    };
    // SAFETY: passed on.
    unsafe { move_rows(tenant, kernel, &work, stream) }
}

/// Carries out a reduce-scatter.
///
/// # Safety
/// As [`move_blocks`].
pub(crate) unsafe fn reduce_scatter(
    tenant: &Tenant,
    call: &CheckedCall<'_>,
    stream: StreamRef<'_>,
) -> Result<()> {
    let loaded = tenant.ready(Reducing(call.reduction()?), stream)?;
    let ((from, to), bytes, size) = (call.addresses(), call.block_bytes(), call.dtype.size());
    let launch = |start: usize, len: usize, _| {
        let (input, output) = (from + start, to + start);
        let work = Work { input, output, count: len / size, stride: bytes, ..Work::new(call.signature) };
        let plain = (input | output | bytes | len).is_multiple_of(16);
        let kernel = if plain { ReduceKernel::ReduceScatterPlain } else { ReduceKernel::ReduceScatter };
        Launch { kernel, grid: Grid::ItemsByPeer(len.div_ceil(16)), work, arguments: NoArguments }
    };
    // SAFETY: the caller's promise; a launch sends what fits a lane.
    unsafe { tenant.run(&loaded, Pieces::bytes(bytes, tenant.lane_bytes()), stream, launch) }?;
    Ok(())
}

/// Makes the stream wait until the streams of all ranks have reached this call.
pub(crate) fn barrier(tenant: &Tenant, stream: StreamRef<'_>) -> Result<()> {
    let loaded = tenant.ready(Movement, stream)?;
    let work = Work::new(Signature::new(Operation::Barrier));
    let launch =
        |_, _, _| Launch { kernel: Kernel::Barrier, grid: Grid::Items(1), work, arguments: NoArguments };
    // SAFETY: it uses no memory of the caller's.
    unsafe { tenant.run(&loaded, Pieces::bytes(1, 1), stream, launch) }?;
    Ok(())
}

/// Moves blocks of `work.count` bytes by a kernel that works in rows.
///
/// # Safety
/// As [`Tenant::run`].
unsafe fn move_rows(tenant: &Tenant, kernel: Kernel, work: &Work, stream: StreamRef<'_>) -> Result<()> {
    let loaded = tenant.ready(Movement, stream)?;
    // A peer gets one part and forwards it to the others.
    let parts = if kernel == Kernel::BroadcastParts { tenant.world_size() - 1 } else { 1 };
    let launch = |start: usize, len: usize, _| {
        let work = Work { input: work.input + start, output: work.output + start, count: len, ..*work };
        let items = len.div_ceil(ROW_DATA * parts) * 32;
        let grid = match kernel {
            Kernel::AllToAll | Kernel::BroadcastParts => Grid::ItemsByPeer(items),
            _ => Grid::Items(items),
        };
        Launch { kernel, grid, work, arguments: NoArguments }
    };
    let piece = tenant.lane_bytes() / ROW_BYTES * ROW_DATA * parts;
    // SAFETY: passed on.
    unsafe { tenant.run(&loaded, Pieces::bytes(work.count, piece), stream, launch) }?;
    Ok(())
}
