//! One collective as a value.

use antiphon::{
    collectives::all_reduce::Algorithm,
    operation::Operation,
    prelude::{CollectiveError, Collectives, Communicator, DType, FabricError, ReduceOp},
    tensor::TensorError,
};

use crate::{cuda::ordinal, mixed::Mixed, operand::Tensor};

/// What to do.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    AllReduce(ReduceOp, Option<Algorithm>),
    /// Of registered memory on GPUs; in place by two-shot and else by one-shot, unless given.
    AllReduceRegistered(ReduceOp, Option<Algorithm>),
    AllGather,
    ReduceScatter(ReduceOp),
    AllToAll,
    /// Elements that go to, and come from, each rank.
    AllToAllV(Vec<usize>, Vec<usize>),
    /// Of the root's rank, as all below.
    Broadcast(usize),
    Reduce(ReduceOp, usize),
    Gather(usize),
    Scatter(usize),
    Barrier,
    /// Between tensor and data parallel ranks.
    Mixed(Mixed),
}

impl Kind {
    /// The operation, whose row says how its tensors must be.
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::AllReduce(..) | Self::AllReduceRegistered(..) => Operation::AllReduce,
            Self::AllGather => Operation::AllGather,
            Self::ReduceScatter(_) => Operation::ReduceScatter,
            Self::AllToAll => Operation::AllToAll,
            Self::AllToAllV(..) => Operation::AllToAllV,
            Self::Broadcast(_) => Operation::Broadcast,
            Self::Reduce(..) => Operation::Reduce,
            Self::Gather(_) => Operation::Gather,
            Self::Scatter(_) => Operation::Scatter,
            Self::Barrier => Operation::Barrier,
            Self::Mixed(mixed) => mixed.operation(),
        }
    }

    /// The name of the method.
    pub(crate) fn name(&self) -> &'static str {
        self.operation().name()
    }

    /// Whether there are kernels for it.
    pub(crate) fn is_on_cuda(&self) -> bool {
        matches!(
            self,
            Self::AllReduce(..)
                | Self::AllReduceRegistered(..)
                | Self::AllGather
                | Self::ReduceScatter(_)
                | Self::AllToAll
                | Self::Broadcast(_)
                | Self::Mixed(_)
        )
    }

    /// What combines the elements, if they are not only moved.
    pub(crate) fn op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op, _)
            | Self::AllReduceRegistered(op, _)
            | Self::ReduceScatter(op)
            | Self::Reduce(op, _) => Some(*op),
            _ => None,
        }
    }
}

/// Where to do it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// Nothing to read or write.
    Nowhere,
    /// One buffer for input and output.
    Shared(Tensor),
    /// Two that do not overlap; some ranks lack one.
    Apart(Option<Tensor>, Option<Tensor>),
}

/// A collective with its operands.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) place: Place,
}

impl Call {
    /// A tensor of the call, which all are like.
    fn tensor(&self) -> Option<&Tensor> {
        match &self.place {
            Place::Nowhere => None,
            Place::Shared(tensor) => Some(tensor),
            Place::Apart(input, output) => input.as_ref().or(output.as_ref()),
        }
    }

    /// The GPU that it is on.
    pub(crate) fn cuda_device(&self) -> Option<u32> {
        self.tensor().and_then(|tensor| ordinal(tensor.device))
    }

    /// What it works on.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.tensor().map(|tensor| tensor.dtype)
    }

    /// Takes part in the collective.
    ///
    /// # Safety
    /// The operands are valid until this returns; nobody writes the input, or uses the output, meanwhile.
    pub(crate) unsafe fn run(&self, comm: &Communicator) -> Result<(), CollectiveError> {
        if matches!(self.kind, Kind::AllReduceRegistered(..)) {
            let text = "all_reduce: registered is for tensors on CUDA; on the host, those of shared buffers are reduced \
                        where they lie without being asked";
            return Err(FabricError::invalid(text).into());
        }
        // SAFETY: the caller answers for the memory.
        unsafe {
            match self.place {
                Place::Nowhere => Ok(comm.barrier()?),
                Place::Shared(buffer) => self.in_place(comm, buffer),
                Place::Apart(input, output) => self.apart(comm, input, output),
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn in_place(&self, comm: &Communicator, buffer: Tensor) -> Result<(), CollectiveError> {
        // SAFETY: the caller answers for the memory.
        let view = unsafe { buffer.view_mut() }.map_err(refused)?;
        match &self.kind {
            &Kind::AllReduce(op, None) => comm.all_reduce_in_place(view, op),
            Kind::AllGather => comm.all_gather_in_place(view),
            &Kind::ReduceScatter(op) => comm.reduce_scatter_in_place(view, op),
            Kind::AllToAll => comm.all_to_all_in_place(view),
            &Kind::Broadcast(root) => comm.broadcast(view, root),
            &Kind::Reduce(op, root) => comm.reduce_in_place(view, op, root),
            Kind::Mixed(mixed) => mixed.run_in_place(comm, view),
            Kind::AllReduce(_, Some(_))
            | Kind::AllReduceRegistered(..)
            | Kind::AllToAllV(..)
            | Kind::Gather(_)
            | Kind::Scatter(_)
            | Kind::Barrier => {
                Err(FabricError::invalid("this does not work in place: input and output overlap").into())
            }
        }
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn apart(
        &self,
        comm: &Communicator,
        input: Option<Tensor>,
        output: Option<Tensor>,
    ) -> Result<(), CollectiveError> {
        // SAFETY: the caller answers for the memory.
        let read = input.map(|tensor| unsafe { tensor.view() }).transpose().map_err(refused)?;
        // SAFETY: as above.
        let write = output.map(|tensor| unsafe { tensor.view_mut() }).transpose().map_err(refused)?;
        match (&self.kind, read, write) {
            (Kind::AllReduce(op, None), Some(input), Some(output)) => comm.all_reduce(input, output, *op),
            (Kind::AllReduce(op, Some(algorithm)), Some(input), Some(output)) => {
                comm.all_reduce_with(input, output, *op, *algorithm)
            }
            (Kind::AllGather, Some(input), Some(output)) => comm.all_gather(input, output),
            (Kind::ReduceScatter(op), Some(input), Some(output)) => comm.reduce_scatter(input, output, *op),
            (Kind::AllToAll, Some(input), Some(output)) => comm.all_to_all(input, output),
            (Kind::AllToAllV(sends, receives), Some(input), Some(output)) => {
                comm.all_to_all_v(input, sends, output, receives)
            }
            (Kind::Broadcast(root), input, Some(output)) => comm.broadcast_from(input, output, *root),
            (Kind::Reduce(op, root), Some(input), output) => comm.reduce(input, output, *op, *root),
            (Kind::Gather(root), Some(input), output) => comm.gather(input, output, *root),
            (Kind::Scatter(root), input, Some(output)) => comm.scatter(input, output, *root),
            (Kind::Mixed(mixed), Some(input), Some(output)) => mixed.run(comm, input, output),
            (kind, ..) => Err(FabricError::invalid(format!("{kind:?} lacks an operand")).into()),
        }
    }
}

pub(crate) fn refused(error: TensorError) -> CollectiveError {
    FabricError::invalid(error.to_string()).into()
}
