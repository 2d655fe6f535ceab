//! The operations, as methods of the collectives between GPUs: those of [`Collectives`](crate::Collectives), in a stream.

use antiphon_device::cuda::{DevicePointer, StreamRef};
use antiphon_fabric::{Communicator, Operation, RegisteredMemory};
use antiphon_operation::Call;
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use super::CudaCollectives;
#[cfg(doc)]
use crate::CollectiveError;
use crate::{
    ReduceOp,
    all_reduce::{Algorithm, AllReduceOptions, Reducing, Registered},
    arguments::reduction,
    error::Result,
    fusion::{self, FusedAllReduce, Operand, Validated},
    gather_scatter::cuda as gather_scatter,
};
#[cfg(doc)]
use antiphon_fabric::FabricError;

/// The operations. `W` is the world size. All ranks pass the same dtype, counts, operator and root. An operation that is called
/// `…_in_place` takes one buffer for input and output. Each happens in the order of the stream.
impl CudaCollectives {
    /// `output[i] = op over all ranks of input[i]`, on every rank; both of `n` elements of f32, f16 or bf16. `output` may be
    /// `input`.
    ///
    /// # Errors
    /// [`CollectiveError`] for arguments that make no sense; what an earlier call left behind, as [`check`](Self::check).
    ///
    /// # Safety
    /// Both tensors stay valid, and are not used in another way, until the stream has passed this call.
    #[inline]
    pub unsafe fn all_reduce<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.all_reduce_with(input, output, op, AllReduceOptions::default(), stream) }
    }

    /// [`all_reduce`](Self::all_reduce) where the result replaces the input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[inline]
    pub unsafe fn all_reduce_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::AllReduce).with_op(op);
        // SAFETY: passed on.
        unsafe { self.call_in_place(&call, &mut buffer.into(), stream.into()) }
    }

    /// [`all_reduce`](Self::all_reduce) by a given algorithm, or of tensors in [registered](Self::register) memory, which must
    /// be the same on all ranks.
    ///
    /// Registered tensors lie at the same place of the memory on all ranks: peers load the input where it lies, and nothing is
    /// staged. docs/design/cuda.md compares its speed with the staged form. One-shot's output is any other memory of this
    /// rank; two-shot's is registered too, and may be the input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce). With [`registered`](AllReduceOptions::registered), [`CollectiveError::Refused`] for
    /// tensors that are not in registered memory, and for an output that the input is in the way of. Ranks whose tensors are in
    /// different places of the memory find out, as all that disagree, but only at the end: until then each has stored where its
    /// own place is.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce). After an error slower peers may still use what is registered: such memory is left
    /// alone until all ranks have met or left.
    #[inline]
    pub unsafe fn all_reduce_with<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        options: impl Into<AllReduceOptions>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::AllReduce).with_op(op).with_algorithm(options.into().number());
        let (input, mut output) = (input.into(), output.into());
        // SAFETY: passed on.
        unsafe { self.call(&call, Some(&input), Some(&mut output), stream.into()) }
    }

    /// The algorithm that [`all_reduce`](Self::all_reduce) takes for a tensor of `bytes` bytes.
    pub fn algorithm_for(&self, bytes: usize) -> Algorithm {
        self.table.algorithm(bytes)
    }

    /// Lets [registered](AllReduceOptions::registered) all-reduces use some memory. All ranks register the same memories in the
    /// same order. They are kept until they are [taken back](Self::unregister), or these collectives are dropped.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for memory of another number of ranks or of another device.
    pub fn register(&self, memory: RegisteredMemory) -> Result<()> {
        let Self { registry, tenant, .. } = self;
        Ok(registry.borrow_mut().register(tenant.world_size(), tenant.context(), memory)?)
    }

    /// Gives registered memory back, when the work of every rank's device is over. All ranks call it together, each with the
    /// address of its own.
    ///
    /// # Errors
    /// On every rank: [`FabricError::InvalidArgument`] for an address at which no registered memory begins, and when ranks name
    /// different memory; [`FabricError::Device`] for what went wrong in earlier work; as [`Communicator::barrier`].
    pub fn unregister(&self, comm: &Communicator, address: DevicePointer) -> Result<()> {
        Ok(self.registry.borrow_mut().unregister(comm, self.tenant.context(), address)?)
    }

    /// Compiles and loads the kernels that reduce a dtype by an operator, so that no call has to; once memory is
    /// [registered](Self::register), those for that too. From the cache on disk it takes some milliseconds, else about a
    /// second. Not while a stream is being captured.
    ///
    /// # Errors
    /// [`CollectiveError::NotNumeric`] for dtypes other than f32, f16 and bf16; [`FabricError::Device`].
    pub fn prepare(&self, dtype: DType, op: ReduceOp) -> Result<()> {
        let reduction = reduction(Operation::AllReduce, dtype, op)?;
        if self.world_size() == 1 {
            return Ok(());
        }
        self.tenant.load(Reducing(reduction))?;
        if !self.registry.borrow().is_empty() {
            self.tenant.load(Registered(reduction))?;
        }
        Ok(())
    }

    /// A sum with what a transformer layer does with it; see [`fusion`].
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), of all tensors of the call.
    pub unsafe fn all_reduce_fused<'s>(
        &self,
        call: FusedAllReduce<Operand<'_>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Validated::new(self.serves(), &call)?;
        // SAFETY: passed on.
        unsafe { fusion::gpu::run(&self.tenant, &self.table, call, stream.into()) }
    }

    /// Compiles and loads the program of calls like this one, of as many tokens, so that no call has to. From the cache on disk
    /// it takes some milliseconds, else about a third of a second. Not while a stream is being captured. Nothing is computed.
    ///
    /// # Errors
    /// As [`all_reduce_fused`](Self::all_reduce_fused).
    pub fn prepare_fused(&self, call: &FusedAllReduce<Operand<'_>>) -> Result<()> {
        fusion::gpu::prepare(&self.tenant, &self.table, &Validated::new(self.serves(), call)?)
    }

    /// The inputs of all ranks, one after the other: `n` elements in, `W·n` out. The input may be this rank's block of the
    /// output.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[inline]
    pub unsafe fn all_gather<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (call, input, mut output) = (Call::new(Operation::AllGather), input.into(), output.into());
        // SAFETY: passed on.
        unsafe { self.call(&call, Some(&input), Some(&mut output), stream.into()) }
    }

    /// [`all_gather`](Self::all_gather) where each rank's input is its own block of the `W·n` elements.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::AllGather);
        // SAFETY: passed on.
        unsafe { self.call_in_place(&call, &mut buffer.into(), stream.into()) }
    }

    /// Rank `r` gets the reduction of all ranks' `r`-th blocks: `W·n` elements of f32, f16 or bf16 in, `n` out. The output may
    /// be this rank's block of the input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[inline]
    pub unsafe fn reduce_scatter<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (call, input, mut output) =
            (Call::new(Operation::ReduceScatter).with_op(op), input.into(), output.into());
        // SAFETY: passed on.
        unsafe { self.call(&call, Some(&input), Some(&mut output), stream.into()) }
    }

    /// [`reduce_scatter`](Self::reduce_scatter) where the result replaces this rank's own block of the `W·n` elements; the other
    /// blocks keep their values.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        op: ReduceOp,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::ReduceScatter).with_op(op);
        // SAFETY: passed on.
        unsafe { self.call_in_place(&call, &mut buffer.into(), stream.into()) }
    }

    /// Block `r` of the input goes to rank `r`, whose block comes to the same place of the output: `W·n` elements in, as many
    /// out. `output` may be `input`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[inline]
    pub unsafe fn all_to_all<'i, 'o, 's>(
        &self,
        input: impl Into<TensorView<'i>>,
        output: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let (call, input, mut output) = (Call::new(Operation::AllToAll), input.into(), output.into());
        // SAFETY: passed on.
        unsafe { self.call(&call, Some(&input), Some(&mut output), stream.into()) }
    }

    /// [`all_to_all`](Self::all_to_all) where the blocks that come replace those that go.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_to_all_in_place<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::AllToAll);
        // SAFETY: passed on.
        unsafe { self.call_in_place(&call, &mut buffer.into(), stream.into()) }
    }

    /// Every rank's buffer gets the root's content.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`FabricError::InvalidArgument`] for a root that does not exist.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[inline]
    pub unsafe fn broadcast<'o, 's>(
        &self,
        buffer: impl Into<TensorViewMut<'o>>,
        root: usize,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()> {
        let call = Call::new(Operation::Broadcast).with_root(root);
        // SAFETY: passed on.
        unsafe { self.call_in_place(&call, &mut buffer.into(), stream.into()) }
    }

    /// Makes the stream wait until the streams of all ranks have reached this call.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn barrier<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<()> {
        match self.world_size() {
            1 => Ok(self.tenant.check_ready()?),
            _ => gather_scatter::barrier(&self.tenant, stream.into()),
        }
    }
}
