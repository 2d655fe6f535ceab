//! A family for tests: every rank's bytes go to the next rank.

use antiphon_device::cuda::{DevicePointer, StreamRef};
use antiphon_fabric::{
    FabricError, Operation, Signature,
    gpu::{Family, Grid, Launch, NoArguments, Pieces, Source, Tenant, Work, kernels},
};

kernels! {
    /// The kernel of rotate.cuh.
    pub enum Kernel {
        /// Sends a rank's bytes to the next rank.
        Rotate = "rotate",
    }
}

/// The family; its program is rotate.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation;

impl Family for Rotation {
    type Kernel = Kernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "rotation.cuh";
    const SOURCES: &'static [Source] = &[Source::new("rotate.cuh", include_str!("rotate.cuh"))];
}

/// Puts a rotation into the stream: `output` gets the bytes that the rank before has at `input`.
///
/// # Errors
/// If a call of the tenant has failed, or the kernel cannot be loaded or launched.
///
/// # Safety
/// Both addresses are valid for `bytes` bytes, a multiple of 16, until the stream has passed this call.
pub unsafe fn rotate(
    tenant: &Tenant,
    [input, output]: [DevicePointer; 2],
    bytes: usize,
    stream: StreamRef<'_>,
) -> Result<(), FabricError> {
    let loaded = tenant.ready(Rotation, stream)?;
    let signature = Signature { count: bytes as u64, ..Signature::new(Operation::AllToAll) };
    let launch = |start: usize, len: usize, _channels| {
        let (input, output) = (input.0 as usize + start, output.0 as usize + start);
        let work = Work { input, output, count: len, ..Work::new(signature) };
        Launch { kernel: Kernel::Rotate, grid: Grid::Items(len / 16), work, arguments: NoArguments }
    };
    // SAFETY: the caller's promise; a launch sends what fits a lane.
    unsafe { tenant.run(&loaded, Pieces::bytes(bytes, tenant.lane_bytes()), stream, launch) }
}
