//! The collectives between GPUs through NCCL: the yardstick, and the fallback.
//!
//! [`NcclCollectives`] has the methods of [`CudaCollectives`](crate::cuda::CudaCollectives), and puts NCCL's kernels into
//! the stream instead of ours. It is there to be compared with, and for devices that do not reach each other's memory and
//! dtypes that the kernels do not reduce. Two promises of this crate are not NCCL's:
//!
//! * **The bits are its own.** It reduces in an order that depends on the size, the number of ranks, the links and its
//!   version, and may round at every step: results are the same on every rank, but not those of the host.
//! * **It has no deadline.** A rank that does not come keeps the others' kernels waiting, and nothing compares what the
//!   ranks call. [`check`](NcclCollectives::check) tells what NCCL has noticed.
//!
//! libnccl is opened at run time; [`antiphon_device::cuda`] says where it is looked for.

use antiphon_device::{
    ReduceOp,
    cuda::{Context, DevicePointer, Nccl, NcclCommunicator, NcclVersion, StreamRef, UniqueId},
};
use antiphon_fabric::{Communicator, FabricError, Operation};
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use crate::{
    arguments::{Input, Output, block},
    error::{CollectiveError, Result},
};

/// Collectives between the GPUs of a communicator's ranks, through NCCL.
///
/// All ranks make the same calls in the same order. Calls go to the caller's stream and may be captured in a graph, after
/// one call that was not captured (NCCL connects the ranks on the first). Such graphs are dropped before this is.
#[derive(Debug)]
pub struct NcclCollectives {
    nccl: NcclCommunicator,
}

impl NcclCollectives {
    /// Makes a communicator of NCCL's of the same ranks, each on its `context`'s device: a second to several. All ranks
    /// call it together.
    ///
    /// NCCL uses NVLink multicast (NVLS) where it finds it, unless `NCCL_NVLS_ENABLE=0` is in the environment.
    ///
    /// # Errors
    /// On every rank, if one has no libnccl or NCCL refuses it: its own error there ([`FabricError::Device`], which says what
    /// to install), [`FabricError::InvalidArgument`] that names it elsewhere; as [`Communicator::barrier`]. A rank that
    /// ends while they meet in NCCL leaves the others there: NCCL has no deadline.
    pub fn new(comm: &Communicator, context: &Context) -> Result<Self> {
        // Only rank 0 makes an id, but nobody waits for a rank that cannot follow.
        let id = Nccl::load().and_then(|nccl| (comm.rank() == 0).then(|| nccl.unique_id()).transpose());
        let id = comm.agree("has no NCCL", id.map_err(CollectiveError::from))?.map(|id| id.to_bytes());
        let ids = comm.exchange_bytes(id.as_ref().map_or(&[], |id| &id[..]))?;
        let made = UniqueId::from_bytes(&ids[0])
            .and_then(|id| NcclCommunicator::new(context, &id, comm.rank(), comm.world_size()));
        Ok(Self {
            nccl: comm.agree("cannot meet the others through NCCL", made.map_err(CollectiveError::from))?,
        })
    }

    /// The version of the library.
    pub fn version(&self) -> NcclVersion {
        self.nccl.version()
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.nccl.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.nccl.world_size()
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        self.nccl.context()
    }

    /// Whether NCCL has noticed that something failed. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// [`FabricError::Device`], after which this is of no more use.
    pub fn check(&self) -> Result<()> {
        self.nccl.check().map_err(CollectiveError::from)
    }

    /// `output[i] = op over all ranks of input[i]`, on every rank, in the order of the stream. `output` may be `input`.
    ///
    /// # Errors
    /// [`CollectiveError`] for arguments that make no sense; [`FabricError::Device`].
    ///
    /// # Safety
    /// Here and in the other methods: the tensors stay valid, and are not used in another way, until the stream, which
    /// is of this [`context`](Self::context), has passed the call.
    pub unsafe fn all_reduce<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        const OPERATION: Operation = Operation::AllReduce;
        let (from, to, _) = self.pair(OPERATION, input, output)?;
        let (start, end) = ends(&from, &to);
        // SAFETY: as many elements on both sides; the rest is passed on.
        unsafe { self.nccl.all_reduce(start, end, from.count, from.dtype, op, stream.into()) }
            .map_err(CollectiveError::from)
    }

    /// All ranks' `input`, one behind the other by rank, to the `output` of every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        const OPERATION: Operation = Operation::AllGather;
        let (from, to, block) = self.pair(OPERATION, input, output)?;
        let (start, end) = ends(&from, &to);
        // SAFETY: the output has a block of the input's size for each rank; the rest is passed on.
        unsafe { self.nccl.all_gather(start, end, block, from.dtype, stream.into()) }
            .map_err(CollectiveError::from)
    }

    /// Reduces the inputs, which have one block for each rank, and gives every rank its block.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        const OPERATION: Operation = Operation::ReduceScatter;
        let (from, to, block) = self.pair(OPERATION, input, output)?;
        let (start, end) = ends(&from, &to);
        // SAFETY: the input has a block of the output's size for each rank; the rest is passed on.
        unsafe { self.nccl.reduce_scatter(start, end, block, to.dtype, op, stream.into()) }
            .map_err(CollectiveError::from)
    }

    /// Block `r` of every rank's `input` to rank r's `output`, where the blocks lie in the order of their senders.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce); and the tensors do not overlap.
    pub unsafe fn all_to_all<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        const OPERATION: Operation = Operation::AllToAll;
        let (from, to, block) = self.pair(OPERATION, input, output)?;
        let (start, end) = ends(&from, &to);
        // SAFETY: both have a block for each rank; the rest is passed on.
        unsafe { self.nccl.all_to_all(start, end, block, from.dtype, stream.into()) }
            .map_err(CollectiveError::from)
    }

    /// The root's `buffer` to the `buffer` of every rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`FabricError::InvalidArgument`] when there is no rank `root`.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        root: usize,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        if root >= self.world_size() {
            let text = format!("root rank {root} is not below the world size {}", self.world_size());
            return Err(FabricError::InvalidArgument(text).into());
        }
        let to = Output::on(self.serves(), Operation::Broadcast, &mut buffer.into())?;
        let (start, end) = ends(&to.as_input(), &to);
        // SAFETY: passed on.
        unsafe { self.nccl.broadcast(start, end, to.count, to.dtype, root, stream.into()) }
            .map_err(CollectiveError::from)
    }

    fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }

    /// The operands of a call, checked, and the elements of a block.
    fn pair<'i, 'o>(
        &self,
        operation: Operation,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
    ) -> Result<(Input, Output, usize)> {
        let from = Input::on(self.serves(), operation, &input.into())?;
        let to = Output::on(self.serves(), operation, &mut output.into())?;
        let block = block(operation, &from, &to, self.world_size())?;
        Ok((from, to, block))
    }
}

fn ends(from: &Input, to: &Output) -> (DevicePointer, DevicePointer) {
    (DevicePointer(from.data.addr() as u64), DevicePointer(to.data.addr() as u64))
}
