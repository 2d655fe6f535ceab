//! One mixed collective as a value.

use std::{
    fmt,
    ops::Range,
    sync::{Arc, PoisonError},
};

use antiphon::device::sync::Mutex;
use antiphon::{
    collectives::mixed::{self, MixedCall, MixedMode, MixedOp, operation_of},
    operation::Operation,
    prelude::{CollectiveError, Communicator as Comm, FabricError, MixedLayout, TensorView, TensorViewMut},
    session::{self, SessionError},
};

use super::What;

/// The mixed collectives of one layout, on the host and on at most one GPU. A thread locks the host's only in a turn of the
/// communicator's queue.
#[derive(Clone)]
pub(crate) struct Handler {
    pub(crate) host: Arc<Mutex<mixed::MixedHandler>>,
    pub(crate) gpu: Option<Arc<session::MixedHandler>>,
}

impl Handler {
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut mixed::MixedHandler) -> T) -> T {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut host)
    }
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MixedHandler")
    }
}

/// A mixed collective without its tensors.
#[derive(Debug, Clone)]
pub(crate) struct Mixed {
    pub(crate) handler: Handler,
    pub(crate) layout: MixedLayout,
    pub(crate) op: MixedOp,
    pub(crate) mode: Option<MixedMode>,
    /// Elements of each group's block.
    pub(crate) counts: Option<Vec<usize>>,
}

impl Mixed {
    pub(crate) fn operation(&self) -> Operation {
        match self.layout.use_mixed() {
            true => operation_of(self.op),
            false => half_of(self.op, self.counts.is_some()),
        }
    }

    pub(crate) fn call(&self) -> MixedCall<'_> {
        MixedCall::from(self.op).mode(self.mode).counts(self.counts.as_deref())
    }

    /// On host memory.
    pub(crate) fn run(
        &self,
        comm: &Comm,
        input: TensorView<'_>,
        output: TensorViewMut<'_>,
    ) -> Result<(), CollectiveError> {
        self.handler.with(|handler| handler.run(comm, self.call(), input, output))
    }

    /// The rank's own block of a row of `count` elements; an all-reduce has one block. `half` comes from [`half_of`].
    pub(crate) fn own_piece(&self, half: &What, count: usize) -> Result<Range<usize>, CollectiveError> {
        if self.op == MixedOp::AllReduce {
            return Ok(0..count);
        }
        Ok(half.own_piece(count, self.layout.dp_rank(), self.layout.dp_size())?)
    }

    /// Whether the output is the row of blocks, and not the input.
    pub(crate) fn gathers(&self) -> bool {
        matches!(self.op, MixedOp::AllGather | MixedOp::AllReduceAllGather)
    }

    /// Those of the layout on a GPU.
    pub(crate) fn on_gpu(&self) -> Result<&session::MixedHandler, SessionError> {
        self.handler.gpu.as_deref().ok_or_else(|| {
            let text = "the mixed handler was made for the host, and the tensors are on a GPU";
            FabricError::invalid(text).into()
        })
    }

    /// On host memory, in one buffer.
    pub(crate) fn run_in_place(&self, comm: &Comm, buffer: TensorViewMut<'_>) -> Result<(), CollectiveError> {
        self.handler.with(|handler| handler.run_in_place(comm, self.call(), buffer))
    }
}

/// The half of a mixed operation that moves data between the groups, along the first dimension.
pub(crate) fn half_of(op: MixedOp, is_uneven: bool) -> Operation {
    match (op, is_uneven) {
        (MixedOp::AllReduce, _) => Operation::AllReduce,
        (MixedOp::AllGather | MixedOp::AllReduceAllGather, false) => Operation::AllGather,
        (MixedOp::AllGather | MixedOp::AllReduceAllGather, true) => Operation::AllGatherV,
        (MixedOp::ReduceScatter | MixedOp::ReduceScatterAllReduce, false) => Operation::ReduceScatter,
        (MixedOp::ReduceScatter | MixedOp::ReduceScatterAllReduce, true) => Operation::ReduceScatterV,
    }
}
