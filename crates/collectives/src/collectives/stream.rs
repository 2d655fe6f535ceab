//! The operations between GPUs, in the order of a stream.

use antiphon_device::cuda::StreamRef;
use antiphon_operation::{Call, Operation};
use antiphon_tensor::{TensorView, TensorViewMut};

use crate::{
    ReduceOp,
    all_reduce::AllReduceOptions,
    error::Result,
    fusion::{FusedAllReduce, Operand},
};

/// Defines a named operation of [`StreamCollectives`].
macro_rules! in_stream {
    ([$($doc:tt)*] $name:ident<$($lifetime:lifetime),+>($($parameter:ident: $type:ty),+)
        $make:ident($call:expr, $($tensor:expr),+)) => {
        $($doc)*
        ///
        /// # Safety
        /// As [`call`](Self::call).
        #[inline]
        unsafe fn $name<$($lifetime,)+ 's>(
            &self,
            $($parameter: $type,)+
            stream: impl Into<StreamRef<'s>>,
        ) -> Result<()> {
            made!(self, $make($call, $($tensor),+), stream)
        }
    };
}

/// Makes the call of a named operation.
macro_rules! made {
    ($self:ident, call($call:expr, $input:expr, $output:expr), $stream:ident) => {{
        let (call, input, mut output) = ($call, $input, $output);
        // SAFETY: passed on.
        unsafe { $self.call(&call, input.as_ref(), output.as_mut(), $stream.into()) }
    }};
    ($self:ident, call_in_place($call:expr, $buffer:expr), $stream:ident) => {{
        let (call, mut buffer) = ($call, $buffer);
        // SAFETY: passed on.
        unsafe { $self.call_in_place(&call, &mut buffer, $stream.into()) }
    }};
}

/// The collective operations between the GPUs of the ranks: those of [`Collectives`](crate::Collectives), of the same names and
/// arguments, with a stream behind them. They are enqueued in the stream, do not wait, and may be captured in a graph.
///
/// `W` is the world size. All ranks make the same calls in the same order, and pass the same dtype, counts, operator and root. An
/// operation that is called `…_in_place` takes one buffer for input and output.
///
/// Tensors are contiguous, in the memory of the rank's GPU, and of any shape: each method says how many elements they have. Input
/// and output have one dtype, any where elements only move. The backends differ in the rest:
///
/// | | [`CudaCollectives`] | [`NcclCollectives`] |
/// | --- | --- | --- |
/// | what they reduce | f32, f16 and bf16 at multiples of their size, by all operators but those of bits | numbers, by all operators but those of bits |
/// | the bits of a reduction | the host's | NCCL's |
/// | [options](AllReduceOptions) of an all-reduce | followed | not looked at: NCCL chooses |
/// | [`all_to_all_in_place`](Self::all_to_all_in_place), [`all_reduce_fused`](Self::all_reduce_fused) | yes | [`NotImplemented`] with the remedy |
/// | ranks that call different things | [`Mismatch`] | they wait, without a deadline |
///
/// [`CudaEngine`](crate::cuda::CudaEngine) has the first where all ranks are on one node, else the second.
///
/// A backend implements [`call`](Self::call), [`call_in_place`](Self::call_in_place) and
/// [`all_reduce_fused`](Self::all_reduce_fused); every other method makes one of these calls.
///
/// ```no_run
/// use antiphon_collectives::{ReduceOp, StreamCollectives};
/// use antiphon_device::cuda::{DeviceMemory, Stream};
/// use antiphon_tensor::DType;
///
/// /// Shards of a gradient, one for each of `world_size` ranks.
/// fn shard(
///     collectives: &impl StreamCollectives,
///     (gradient, shard): (&mut DeviceMemory, &mut DeviceMemory),
///     (elements, world_size): (usize, usize),
///     stream: &Stream,
/// ) -> Result<(), Box<dyn std::error::Error>> {
///     let whole = gradient.view(DType::BF16, &[elements])?;
///     let part = shard.view_mut(DType::BF16, &[elements / world_size])?;
///     // SAFETY: no other work uses the memory until the stream has been waited for.
///     unsafe { collectives.reduce_scatter(whole, part, ReduceOp::Avg, stream) }?;
///     Ok(stream.borrow().synchronize()?)
/// }
/// ```
///
/// # Errors
/// Every operation returns [`CollectiveError`](crate::CollectiveError): arguments that make no sense are found before
/// anything is enqueued. What goes wrong in the stream is returned by the backend's `check` ([`CudaCollectives::check`],
/// [`NcclCollectives::check`]), and by the next call of [`CudaCollectives`].
///
/// [`CudaCollectives`]: crate::cuda::CudaCollectives
/// [`CudaCollectives::check`]: crate::cuda::CudaCollectives::check
/// [`NcclCollectives`]: crate::nccl::NcclCollectives
/// [`NcclCollectives::check`]: crate::nccl::NcclCollectives::check
/// [`Mismatch`]: antiphon_fabric::FabricError::Mismatch
/// [`NotImplemented`]: antiphon_fabric::FabricError::NotImplemented
pub trait StreamCollectives {
    /// Any of the operations below, as a value. A rank need not pass a tensor that is the root's alone. A broadcast without an
    /// input takes place in the output.
    ///
    /// # Safety
    /// Here and in the other methods: the tensors stay valid, and are not used in another way, until the stream, which is of the
    /// backend's context, has passed the call. An output may lie where the backend's [`call_in_place`](Self::call_in_place) would
    /// put it; else it is apart from the input. Tensors in [registered](AllReduceOptions::registered) memory are left alone after
    /// an error, until all ranks have met or left: slower peers may still use them.
    unsafe fn call(
        &self,
        call: &Call<'_>,
        input: Option<&TensorView<'_>>,
        output: Option<&mut TensorViewMut<'_>>,
        stream: StreamRef<'_>,
    ) -> Result<()>;

    /// [`call`](Self::call) with one buffer for input and output, where the operation and the backend allow that.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn call_in_place(
        &self,
        call: &Call<'_>,
        buffer: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()>;

    /// A sum with what a transformer layer does with it: residual, RMS norm, quantisation. See [`fusion`](crate::fusion).
    ///
    /// # Safety
    /// As [`call`](Self::call), of all tensors of the call.
    unsafe fn all_reduce_fused<'s>(
        &self,
        call: FusedAllReduce<Operand<'_>>,
        stream: impl Into<StreamRef<'s>>,
    ) -> Result<()>;

    /// Makes the stream wait until the streams of all ranks have reached this call.
    #[inline]
    fn barrier<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<()> {
        // SAFETY: it has no tensors.
        unsafe { self.call(&Call::new(Operation::Barrier), None, None, stream.into()) }
    }

    named_operations!(in_stream);
}
