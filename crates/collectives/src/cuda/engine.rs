//! What carries collectives between GPUs: our kernels within a node, NCCL between nodes.

use antiphon_device::{
    ReduceOp,
    cuda::{Context, StreamRef},
};
use antiphon_fabric::{Communicator, FabricError, Nodes};
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use super::{CudaCollectives, OnFailure};
use crate::{
    StreamCollectives,
    error::Result,
    fusion::{FusedAllReduce, Operand},
    nccl::NcclCollectives,
};

/// Collectives between the GPUs of all ranks of a communicator, wherever the ranks are.
///
/// The ranks of one node have [`CudaCollectives`], with the host's bits, deadlines and every call. The ranks of several nodes have
/// [`NcclCollectives`], since a kernel cannot reach the memory of another machine's GPU: with NCCL's bits, without a deadline, and
/// without the calls that [`nvlink`](Self::nvlink) guards.
#[derive(Debug)]
pub enum CudaEngine {
    /// Our kernels, over NVLink or PCIe.
    NvLink(Box<CudaCollectives>),
    /// NCCL's kernels, over whatever links it finds.
    Nccl(NcclCollectives),
}

impl CudaEngine {
    /// The engine of a communicator's ranks, each on its `context`'s device. Where all ranks are on one node, `staging_bytes` bytes of
    /// each GPU serve data under way. All ranks call it together.
    ///
    /// # Errors
    /// As [`CudaBuilder::build`](super::CudaBuilder::build) on one node, and as [`NcclCollectives::new`] on several.
    pub fn new(comm: &Communicator, context: &Context, staging_bytes: usize) -> Result<Self> {
        Ok(match comm.several_nodes() {
            None => {
                let builder = CudaCollectives::builder(comm, context);
                Self::NvLink(Box::new(builder.staging_bytes(staging_bytes).build()?))
            }
            Some(_) => Self::Nccl(NcclCollectives::new(comm, context)?),
        })
    }

    /// The name of the engine that ranks on these nodes have: `nvlink` on one node, `nccl` on several.
    pub fn name_on(nodes: &Nodes) -> &'static str {
        if nodes.count() == 1 { "nvlink" } else { "nccl" }
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        match self {
            Self::NvLink(peers) => peers.world_size(),
            Self::Nccl(peers) => peers.world_size(),
        }
    }

    /// Our kernels, for what only they do; `what` names it.
    ///
    /// # Errors
    /// [`FabricError::NotImplemented`] if the ranks are on several nodes.
    pub fn nvlink(&self, what: &str) -> Result<&CudaCollectives> {
        match self {
            Self::NvLink(peers) => Ok(peers),
            Self::Nccl(_) => Err(FabricError::NotImplemented(format!(
                "{what} between GPUs of several nodes (NCCL, which serves them, does not have it: call it on node_group(), or with \
                 tensors on the host)"
            ))
            .into()),
        }
    }

    /// Sets the action after a kernel has given up; see [`OnFailure`]. NCCL's kernels do not give up.
    pub fn on_failure(&self, action: OnFailure) {
        if let Self::NvLink(peers) = self {
            peers.on_failure(action);
        }
    }

    /// Whether the calls that are over did what they should. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// As [`CudaCollectives::check`] and [`NcclCollectives::check`].
    pub fn check(&self) -> Result<()> {
        match self {
            Self::NvLink(peers) => peers.check(),
            Self::Nccl(peers) => peers.check(),
        }
    }

    /// Loads the kernels that reduce a dtype, so that no call has to. NCCL has its kernels loaded.
    ///
    /// # Errors
    /// As [`CudaCollectives::prepare`].
    pub fn prepare(&self, dtype: DType, op: ReduceOp) -> Result<()> {
        match self {
            Self::NvLink(peers) => peers.prepare(dtype, op),
            Self::Nccl(_) => Ok(()),
        }
    }

    /// An all-gather or a reduce-scatter of each tensor of a list.
    ///
    /// # Errors
    /// As [`call`](StreamCollectives::call); [`CollectiveError::Refused`](crate::CollectiveError::Refused) if there is not an output for each
    /// input.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn call_list(
        &self,
        call: &Call<'_>,
        inputs: &[TensorView<'_>],
        outputs: &mut [TensorViewMut<'_>],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::NvLink(peers) => match call.operation {
                    Operation::ReduceScatter => peers.reduce_scatter_list(inputs, outputs, call.op, stream),
                    _ => peers.all_gather_list(inputs, outputs, stream),
                },
                Self::Nccl(peers) => peers.call_list(call, inputs, outputs, stream),
            }
        }
    }

    /// A message to a rank and one from a rank, at once.
    ///
    /// # Errors
    /// As [`CudaCollectives::send_recv`] and [`NcclCollectives::send_recv`].
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call); and the tensors do not overlap.
    pub unsafe fn send_recv(
        &self,
        input: &TensorView<'_>,
        to: usize,
        output: &mut TensorViewMut<'_>,
        from: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::NvLink(peers) => peers.send_recv(input, to, output, from, stream),
                Self::Nccl(peers) => peers.send_recv(input, to, output, from, stream),
            }
        }
    }

    /// A message to a rank alone, for which NCCL would keep the stream waiting until the peer receives.
    ///
    /// # Errors
    /// As [`CudaCollectives::send`]; as [`nvlink`](Self::nvlink) with the remedy: two ranks that send before they receive would wait
    /// for each other without an end, and [`send_recv`](Self::send_recv) is one call of NCCL.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn send(&self, input: &TensorView<'_>, to: usize, stream: StreamRef<'_>) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.messages("send")?.send(input, to, stream) }
    }

    /// A message from a rank alone; see [`send`](Self::send).
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn recv(
        &self,
        output: &mut TensorViewMut<'_>,
        from: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.messages("recv")?.recv(output, from, stream) }
    }

    fn messages(&self, call: &str) -> Result<&CudaCollectives> {
        match self {
            Self::NvLink(peers) => Ok(peers),
            Self::Nccl(_) => Err(FabricError::NotImplemented(format!(
                "{call} alone between GPUs of several nodes (NCCL's messages wait for each other in the order of the streams, so ranks \
                 that send before they receive would hang: send_recv does both at once, and tensors on the host wait for nothing)"
            ))
            .into()),
        }
    }
}

impl StreamCollectives for CudaEngine {
    unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::NvLink(peers) => peers.call(call, input, output, stream),
                Self::Nccl(peers) => peers.call(call, input, output, stream),
            }
        }
    }

    unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::NvLink(peers) => peers.call_in_place(call, buffer, stream),
                Self::Nccl(peers) => peers.call_in_place(call, buffer, stream),
            }
        }
    }

    /// As [`nvlink`](Self::nvlink) if the ranks are on several nodes.
    unsafe fn all_reduce_fused<'s>(
        &self,
        call: FusedAllReduce<Operand<'_>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.nvlink("all_reduce_fused")?.all_reduce_fused(call, stream) }
    }
}
