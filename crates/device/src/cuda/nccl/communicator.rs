//! One rank's end of a communicator of NCCL's, and its collectives.

use std::{
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
};

use antiphon_tensor::DType;

use super::{From, LibraryVersion, Nccl, To, UniqueId};
use crate::{
    ReduceOp,
    cuda::{Context, CudaError, DevicePointer, StreamRef},
};

/// One rank's end of a communicator of NCCL's.
///
/// Calls go to the caller's stream and may be captured in a graph (after one call that was not: NCCL connects the ranks on
/// the first). All ranks make the same calls in the same order. NCCL has no deadline: a rank that does not come keeps the
/// others' kernels waiting until [`abort`](Self::abort).
///
/// Dropping waits for the work under way and for graphs that captured calls, which must be dropped first; after an
/// [error](Self::check) it aborts instead.
#[derive(Debug)]
pub struct NcclCommunicator {
    nccl: &'static Nccl,
    context: Context,
    handle: NonNull<c_void>,
    rank: usize,
    world_size: usize,
}

// SAFETY: a communicator may move between threads. It is not Sync: calls on it must come one at a time.
unsafe impl Send for NcclCommunicator {}

impl NcclCommunicator {
    /// Meets the other ranks, each on a device of its own: from a second to several, and without a deadline. All ranks
    /// pass the same id and size.
    ///
    /// # Errors
    /// As [`Nccl::load`]; [`CudaError::Nccl`] when ranks share a device or disagree, or a rank was lost.
    pub fn new(context: &Context, id: &UniqueId, rank: usize, world_size: usize) -> Result<Self, CudaError> {
        let nccl = Nccl::load()?;
        let _current = context.current()?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle; the device of the communicator is that of the current context.
        let made =
            unsafe { (nccl.functions.init_rank)(&mut handle, world_size as c_int, *id, rank as c_int) };
        nccl.functions.check("ncclCommInitRank", made)?;
        let handle = NonNull::new(handle).expect("ncclCommInitRank does not return null on success");
        Ok(Self { nccl, context: context.clone(), handle, rank, world_size })
    }

    /// The version of the library.
    pub fn version(&self) -> LibraryVersion {
        self.nccl.version()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Fails if work in a stream has failed, or NCCL has lost a rank. After an error only dropping is of use.
    ///
    /// # Errors
    /// [`CudaError::Nccl`].
    pub fn check(&self) -> Result<(), CudaError> {
        let mut code = 0;
        // SAFETY: the communicator lives; writes one integer.
        let asked = unsafe { (self.nccl.functions.async_error)(self.handle.as_ptr(), &mut code) };
        self.done("ncclCommGetAsyncError", asked)?;
        self.done("a call of NCCL's under way", code)
    }

    /// Gives up: kernels that wait for other ranks end, with results that mean nothing.
    ///
    /// # Errors
    /// [`CudaError::Nccl`], after which there is nothing left either.
    pub fn abort(self) -> Result<(), CudaError> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: never used again: moved out once, and its own drop does not run.
        let (context, nccl) = (unsafe { ptr::read(&this.context) }, this.nccl);
        let _current = context.current()?;
        // SAFETY: ended once.
        nccl.functions.check("ncclCommAbort", unsafe { (nccl.functions.abort)(this.handle.as_ptr()) })
    }

    /// `to[i] = op over all ranks of from[i]`, for `count` elements. In place where `to == from`.
    ///
    /// # Errors
    /// [`CudaError::Nccl`]; [`CudaError::Unsupported`] for a dtype that NCCL does not know.
    ///
    /// # Safety
    /// Here and in the other calls: both ranges are valid, and not used in another way, until the stream, which is of
    /// this communicator's context, has passed the call. All ranks make the same call. Ranges that are neither the same
    /// nor, where a call says so, one within the other do not overlap.
    pub unsafe fn all_reduce(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, op, _current) = (self.dtype(dtype)?, self.operator(op)?, self.context.current()?);
        let (from, to, comm) = (from.0 as From, to.0 as To, self.handle.as_ptr());
        let call = self.nccl.functions.all_reduce;
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclAllReduce", unsafe { call(from, to, count, dtype, op, comm, stream.raw()) })
    }

    /// Block `rank` of the reduction of all ranks' `from`, which has one block of `count` elements for each rank, to
    /// `to`. In place where `to` is that block of `from`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn reduce_scatter(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, op, _current) = (self.dtype(dtype)?, self.operator(op)?, self.context.current()?);
        let (from, to, comm) = (from.0 as From, to.0 as To, self.handle.as_ptr());
        let call = self.nccl.functions.reduce_scatter;
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclReduceScatter", unsafe { call(from, to, count, dtype, op, comm, stream.raw()) })
    }

    /// All ranks' `count` elements of `from` to the blocks of `to`, by rank. In place where `from` is this rank's block.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn all_gather(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, _current) = (self.dtype(dtype)?, self.context.current()?);
        let (from, to, comm) = (from.0 as From, to.0 as To, self.handle.as_ptr());
        let call = self.nccl.functions.all_gather;
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclAllGather", unsafe { call(from, to, count, dtype, comm, stream.raw()) })
    }

    /// The root's `count` elements of `from` to the `to` of all ranks. In place where `to == from`; `from` is read on the root
    /// only.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn broadcast(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        root: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, root, _current) = (self.dtype(dtype)?, root as c_int, self.context.current()?);
        let (from, to, comm) = (from.0 as From, to.0 as To, self.handle.as_ptr());
        let call = self.nccl.functions.broadcast;
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclBroadcast", unsafe { call(from, to, count, dtype, root, comm, stream.raw()) })
    }

    /// `to[i] = op over all ranks of from[i]`, on the root alone, for `count` elements. In place where `to == from`; `to` is
    /// written on the root only.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    #[allow(clippy::too_many_arguments)] // those of NCCL
    pub unsafe fn reduce(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        root: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, op, _current) = (self.dtype(dtype)?, self.operator(op)?, self.context.current()?);
        let (from, to, root, comm) = (from.0 as From, to.0 as To, root as c_int, self.handle.as_ptr());
        let call = self.nccl.functions.reduce;
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclReduce", unsafe { call(from, to, count, dtype, op, root, comm, stream.raw()) })
    }

    /// `count` elements of `from` to rank `peer`, which receives them. A send and a receive that wait for each other are
    /// [grouped](Self::grouped).
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn send(
        &self,
        from: DevicePointer,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, peer, _current) = (self.dtype(dtype)?, peer as c_int, self.context.current()?);
        let (call, comm) = (self.nccl.functions.send, self.handle.as_ptr());
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclSend", unsafe { call(from.0 as From, count, dtype, peer, comm, stream.raw()) })
    }

    /// `count` elements that rank `peer` sends, to `to`.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn recv(
        &self,
        to: DevicePointer,
        count: usize,
        dtype: DType,
        peer: usize,
        stream: StreamRef<'_>,
    ) -> Result<(), CudaError> {
        let (dtype, peer, _current) = (self.dtype(dtype)?, peer as c_int, self.context.current()?);
        let (call, comm) = (self.nccl.functions.recv, self.handle.as_ptr());
        // SAFETY: the communicator lives; the rest is passed on.
        self.done("ncclRecv", unsafe { call(to.0 as To, count, dtype, peer, comm, stream.raw()) })
    }

    /// Makes calls one operation: none waits for another of them.
    ///
    /// # Errors
    /// The first that `calls` returns; [`CudaError::Nccl`].
    pub fn grouped(&self, calls: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let functions = &self.nccl.functions;
        // SAFETY: ended below, whatever happens in between.
        self.done("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let made = calls();
        // SAFETY: started above.
        let ended = self.done("ncclGroupEnd", unsafe { (functions.group_end)() });
        made.and(ended)
    }

    fn done(&self, function: &'static str, result: c_int) -> Result<(), CudaError> {
        self.nccl.functions.check(function, result)
    }

    fn dtype(&self, dtype: DType) -> Result<c_int, CudaError> {
        let device = self.context.device().ordinal();
        data_type(dtype).ok_or(CudaError::Unsupported { device, what: "elements of this dtype through NCCL" })
    }

    fn operator(&self, op: ReduceOp) -> Result<c_int, CudaError> {
        let device = self.context.device().ordinal();
        operator(op).ok_or(CudaError::Unsupported { device, what: "operators on bits through NCCL" })
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let healthy = self.check().is_ok();
        let _current = self.context.current();
        let end = if healthy { self.nccl.functions.destroy } else { self.nccl.functions.abort };
        // SAFETY: made once and ended once. An error leaves nothing to do.
        unsafe { end(self.handle.as_ptr()) };
    }
}

/// `ncclDataType_t`.
fn data_type(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

/// `ncclRedOp_t`.
fn operator(op: ReduceOp) -> Option<c_int> {
    Some(match op {
        ReduceOp::Sum => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_and_operator_has_nccls_number() {
        let numbers: Vec<_> = DType::NUMERIC.iter().map(|&dtype| data_type(dtype).unwrap()).collect();
        assert_eq!(numbers, [8, 7, 6, 9, 4, 2, 0, 1]); // f64 f32 f16 bf16 i64 i32 i8 u8, by nccl.h
        assert_eq!(ReduceOp::ARITHMETIC.map(operator), [0, 1, 3, 2, 4].map(Some)); // sum prod min max avg
    }
}
