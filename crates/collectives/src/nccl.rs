//! The collectives between GPUs through NCCL: the yardstick, and the fallback.
//!
//! [`NcclCollectives`] has the operations of [`StreamCollectives`] as
//! [`CudaCollectives`](crate::cuda::CudaCollectives) has, and puts NCCL's kernels into the stream instead of ours. It serves as a yardstick, for devices that do not reach each other's memory, and for
//! dtypes that our kernels do not reduce. Two promises of this crate are not NCCL's:
//!
//! * **The bits are its own.** It reduces in an order that depends on the size, the number of ranks, the links and its
//!   version, and may round at every step: results are the same on every rank, but not those of the host.
//! * **It has no deadline.** If a rank does not come, the others' kernels wait for ever, and nothing compares the calls of
//!   the ranks. [`check`](NcclCollectives::check) returns what NCCL has noticed.
//!
//! libnccl is opened at run time; [`antiphon_device::cuda`] says where it is looked for.

use std::ops::Range;

use antiphon_device::{
    ReduceOp,
    cuda::{
        Context, CudaError, DeviceMemory, DevicePointer, LibraryVersion, Nccl, NcclCommunicator, StreamRef,
        UniqueId,
    },
};
use antiphon_fabric::{Communicator, FabricError, Operation};
use antiphon_operation::{Call, Root};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::{
    StreamCollectives,
    arguments::{CheckedCall, Input, Output},
    error::{CollectiveError, Result},
    fusion::{FusedAllReduce, Operand},
};

/// Collectives between the GPUs of a communicator's ranks, through NCCL.
///
/// All ranks make the same calls in the same order. Calls go to the caller's stream and may be captured in a graph, after
/// one call that was not captured (NCCL connects the ranks on the first). Such graphs are dropped before this is.
#[derive(Debug)]
pub struct NcclCollectives {
    nccl: NcclCommunicator,
    /// The word whose sum is a barrier.
    word: DeviceMemory,
}

/// What NCCL has no call for is made of its sends and receives in one group, or of one reduction to each rank. NCCL chooses its own
/// algorithms.
impl StreamCollectives for NcclCollectives {
    unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if call.operation == Operation::Barrier {
            return self.wait_for_all(stream);
        }
        let checked = CheckedCall::in_stream(self.serves(), call, self.ranks(), input, output)?;
        // SAFETY: passed on.
        Ok(unsafe { self.carry_out(&checked, stream) }?)
    }

    /// NCCL's messages, of which an all-to-all is made, may not overlap: [`FabricError::NotImplemented`].
    unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let checked = CheckedCall::of_buffer(self.serves(), call, self.ranks(), buffer)?;
        if call.operation == Operation::AllToAll {
            let text = "all_to_all in place by NCCL (whose messages may not overlap: pass another output)";
            return Err(FabricError::NotImplemented(text.into()).into());
        }
        // SAFETY: passed on.
        Ok(unsafe { self.carry_out(&checked, stream) }?)
    }

    /// NCCL fuses nothing: [`FabricError::NotImplemented`].
    unsafe fn all_reduce_fused<'s>(
        &self,
        _: FusedAllReduce<Operand<'_>>,
        _: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let text = "all_reduce_fused by NCCL (which fuses nothing: call all_reduce and compute the rest, or call it on \
                    CudaCollectives or with tensors on the host)";
        Err(FabricError::NotImplemented(text.into()).into())
    }
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
        // Only rank 0 makes an id, but all ranks learn of a rank that cannot load NCCL, and do not wait for it.
        let id = Nccl::load().and_then(|nccl| (comm.rank() == 0).then(|| nccl.unique_id()).transpose());
        let id = comm.agree("has no NCCL", id.map_err(CollectiveError::from))?.map(|id| id.to_bytes());
        let ids = comm.exchange_bytes(id.as_ref().map_or(&[], |id| &id[..]))?;
        let word = DeviceMemory::allocate(context, size_of::<i32>()).map_err(CollectiveError::from);
        let word = comm.agree("has no memory", word)?;
        let made = UniqueId::from_bytes(&ids[0])
            .and_then(|id| NcclCommunicator::new(context, &id, comm.rank(), comm.world_size()));
        let nccl = comm.agree("cannot meet the others through NCCL", made.map_err(CollectiveError::from))?;
        Ok(Self { nccl, word })
    }

    /// The version of the library.
    pub fn version(&self) -> LibraryVersion {
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

    /// The barrier, in the order of the stream.
    fn wait_for_all(&self, stream: StreamRef<'_>) -> Result<()> {
        let word = self.word.pointer();
        // SAFETY: the word lives as long as the communicator, which waits for its work when it is dropped; nobody reads it.
        Ok(unsafe { self.nccl.all_reduce(word, word, 1, DType::I32, ReduceOp::Sum, stream) }?)
    }

    /// # Safety
    /// As [`call`](StreamCollectives::call).
    unsafe fn carry_out(
        &self,
        call: &CheckedCall<'_>,
        stream: StreamRef<'_>,
    ) -> std::result::Result<(), CudaError> {
        let (nccl, rank, block, dtype) = (&self.nccl, call.rank, call.block, call.dtype);
        let (op, root, row) = (call.call.op, call.call.root, call.signature.operation.row());
        let (from, to) = call.addresses();
        let (from, to) = (DevicePointer(from as u64), DevicePointer(to as u64));
        let (sent, received) = (call.input_layout(), call.output_layout());
        let at = |base: DevicePointer, part: &Range<usize>| base.offset((part.start * dtype.size()) as u64);
        // SAFETY: the call was checked, so all parts lie in the tensors; the rest is passed on.
        unsafe {
            match call.signature.operation {
                Operation::AllReduce => nccl.all_reduce(from, to, block, dtype, op, stream),
                Operation::AllGather => nccl.all_gather(from, to, block, dtype, stream),
                Operation::ReduceScatter => nccl.reduce_scatter(from, to, block, dtype, op, stream),
                Operation::Broadcast => nccl.broadcast(from, to, block, dtype, root, stream),
                Operation::Reduce => nccl.reduce(from, to, block, dtype, op, root, stream),
                // Uneven parts: a reduction to each rank.
                _ if row.reduces => nccl.grouped(|| {
                    (0..call.world_size).try_for_each(|to_rank| {
                        let part = sent.piece(to_rank);
                        nccl.reduce(at(from, &part), to, part.len(), dtype, op, to_rank, stream)
                    })
                }),
                _ => nccl.grouped(|| {
                    (0..call.world_size).try_for_each(|peer| {
                        let (gives, gets) = match row.root {
                            None => (true, true),
                            Some(Root::Gives) => (rank == root, peer == root),
                            Some(Root::Gets) => (peer == root, rank == root),
                        };
                        let (part, place) = (sent.piece(peer), received.piece(peer));
                        if gives {
                            nccl.send(at(from, &part), part.len(), dtype, peer, stream)?;
                        }
                        if gets {
                            nccl.recv(at(to, &place), place.len(), dtype, peer, stream)?;
                        }
                        Ok(())
                    })
                }),
            }
        }
    }

    /// A tensor to another rank, which [receives](Self::recv) it.
    ///
    /// # Errors
    /// As [`call`](StreamCollectives::call); [`FabricError::InvalidArgument`] when there is no rank `to`.
    ///
    /// # Safety
    /// As [`call`](StreamCollectives::call).
    pub unsafe fn send(&self, input: &TensorView<'_>, to: usize, stream: StreamRef<'_>) -> Result<()> {
        self.check_peer("destination", to)?;
        let from = Input::on(self.serves(), Operation::Message, input)?;
        let at = DevicePointer(from.data.addr() as u64);
        // SAFETY: passed on.
        Ok(unsafe { self.nccl.send(at, from.count, from.dtype, to, stream) }?)
    }

    /// The tensor that another rank [sends](Self::send).
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
        self.check_peer("source", from)?;
        let to = Output::on(self.serves(), Operation::Message, output)?;
        let at = DevicePointer(to.data.addr() as u64);
        // SAFETY: passed on.
        Ok(unsafe { self.nccl.recv(at, to.count, to.dtype, from, stream) }?)
    }

    /// [`send`](Self::send) and [`recv`](Self::recv) at once, as one call of NCCL, so that ranks may send each other messages of any
    /// length.
    ///
    /// # Errors
    /// As [`send`](Self::send).
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
        self.check_peer("destination", to)?;
        self.check_peer("source", from)?;
        let sent = Input::on(self.serves(), Operation::Message, input)?;
        let received = Output::on(self.serves(), Operation::Message, output)?;
        let at = |address: usize| DevicePointer(address as u64);
        // SAFETY: passed on.
        Ok(self.nccl.grouped(|| unsafe {
            self.nccl.send(at(sent.data.addr()), sent.count, sent.dtype, to, stream)?;
            self.nccl.recv(at(received.data.addr()), received.count, received.dtype, from, stream)
        })?)
    }

    fn check_peer(&self, role: &str, peer: usize) -> Result<()> {
        match peer < self.world_size() {
            true => Ok(()),
            false => Err(FabricError::no_such_rank(role, peer, self.world_size()).into()),
        }
    }

    /// One call for each tensor of a list, in one group.
    ///
    /// # Errors
    /// As [`call`](StreamCollectives::call); [`CollectiveError::Refused`] if there is not an output for each input.
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
        let checked = CheckedCall::of_lists(self.serves(), call, self.ranks(), inputs, outputs)?;
        // SAFETY: passed on.
        let all = || checked.iter().try_for_each(|call| unsafe { self.carry_out(call, stream) });
        Ok(self.nccl.grouped(all)?)
    }

    /// This rank, and how many there are.
    fn ranks(&self) -> (usize, usize) {
        (self.rank(), self.world_size())
    }

    /// Where tensors must be.
    fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }
}
