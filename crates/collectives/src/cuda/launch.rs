//! Putting kernels into a stream.

use antiphon_device::cuda::{DevicePointer, KernelArgument, LaunchConfig, StreamRef};
use antiphon_fabric::Signature;
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use super::{
    CudaCollectives, THREADS, device,
    kernels::{Family, Kernel, Loaded},
};
use crate::{
    arguments::{Input, Output},
    error::Result,
};

/// What differs from kernel to kernel; see `arguments` in slots.cuh.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) input: usize,
    pub(crate) output: usize,
    /// Elements, or bytes where nothing is reduced: of the tensor, or of one block of it.
    pub(crate) count: usize,
    /// Bytes from block to block.
    pub(crate) stride: usize,
    pub(crate) root: usize,
    /// What the ranks must agree on.
    pub(crate) signature: Signature,
}

/// `arguments` of slots.cuh.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Arguments<const W: usize> {
    doing: [u64; 2],
    arena: [DevicePointer; W],
    lane_stride: u64,
    limit_ns: u64,
    abort: DevicePointer,
    report: DevicePointer,
    input: u64,
    output: u64,
    count: u64,
    stride: u64,
    rank: u32,
    root: u32,
}

// SAFETY: the layout of the kernel's struct: 64-bit words, then two of 32, all aligned to 16.
unsafe impl<const W: usize> KernelArgument for Arguments<W> {}

impl CudaCollectives {
    pub(crate) fn input(&self, signature: &Signature, tensor: &TensorView<'_>) -> Result<Input> {
        Input::on(self.serves(), signature.operation, tensor)
    }

    pub(crate) fn output(&self, signature: &Signature, tensor: &mut TensorViewMut<'_>) -> Result<Output> {
        Output::on(self.serves(), signature.operation, tensor)
    }

    fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }

    /// The kernels of a family, and that nothing has failed before.
    #[inline]
    pub(crate) fn ready(&self, family: Family) -> Result<Loaded> {
        self.check_ready()?;
        self.kernels.borrow_mut().load(family)
    }

    /// The most bytes of one rank that a lane takes.
    #[inline]
    pub(crate) fn lane_bytes(&self) -> usize {
        self.lane_stride
    }

    /// How many blocks serve so many items, one for a thread.
    #[inline]
    pub(crate) fn blocks_for(&self, items: usize) -> u32 {
        (items as u64).div_ceil(u64::from(THREADS)).clamp(1, u64::from(self.max_blocks)) as u32
    }

    /// As [`blocks_for`](Self::blocks_for), where every block serves one peer: `items` of each.
    #[inline]
    pub(crate) fn blocks_for_peers(&self, items: usize) -> u32 {
        let peers = self.world_size() as u32 - 1;
        let most = u64::from(self.max_blocks / peers);
        (items as u64).div_ceil(u64::from(THREADS)).clamp(1, most) as u32 * peers
    }

    /// # Safety
    /// As the operation that this is of: the addresses are of this rank's device, and good for `work.count` (and blocks
    /// of `work.stride`) until the stream has passed.
    pub(crate) unsafe fn launch(
        &self,
        loaded: &Loaded,
        kernel: Kernel,
        blocks: u32,
        work: &Work,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let config = LaunchConfig::new(blocks, THREADS).programmatic();
        macro_rules! launch {
            ($($world:literal)*) => {
                match self.world_size() {
                    $($world => {
                        let arguments = Arguments::<$world> {
                            doing: work.signature.to_words(),
                            arena: std::array::from_fn(|rank| self.arena.pointer(rank)),
                            lane_stride: self.lane_stride as u64,
                            limit_ns: self.monitor.timeout().as_nanos().min(u128::from(u64::MAX)) as u64,
                            abort: self.board.abort_pointer(),
                            report: self.board.report_pointer(),
                            input: work.input as u64,
                            output: work.output as u64,
                            count: work.count as u64,
                            stride: work.stride as u64,
                            rank: self.rank() as u32,
                            root: work.root as u32,
                        };
                        // SAFETY: the kernel's own arguments; the arenas live as long as `self`, whose drop waits.
                        unsafe { loaded.get(kernel).launch(stream, &config, &[(&arguments).into()]) }
                    })*
                    world => unreachable!("a world of {world} was refused"),
                }
            };
        }
        launch!(2 3 4 5 6 7 8).map_err(device)
    }
}
