//! Operations of the table and messages between two ranks, by ours and by NCCL.

use std::rc::Rc;

use antiphon::{
    collectives::{
        CollectiveError, StreamCollectives, all_reduce::AllReduceOptions, cuda::CudaCollectives,
        nccl::NcclCollectives,
    },
    device::cuda::StreamRef,
    operation::{Call, Operation},
    tensor::{Element, TensorView, TensorViewMut},
};

use super::{
    Contenders, Rank,
    tensors::{Plain, Tensors},
};
use crate::{
    Result,
    case::{Case, Collective},
    pattern::Reference,
};

/// The library that makes the collectives.
#[derive(Clone, Copy)]
pub(super) enum Library<'a> {
    Ours(&'a CudaCollectives),
    Nccl(&'a NcclCollectives),
}

macro_rules! each {
    ($self:expr, $library:ident => $body:expr) => {
        match $self {
            Library::Ours($library) => $body,
            Library::Nccl($library) => $body,
        }
    };
}

impl Library<'_> {
    /// Puts a call into the stream.
    ///
    /// # Safety
    /// The tensors live until the stream, and every graph that captured the call, is done with them.
    pub(super) unsafe fn call(
        self,
        call: &Call<'_>,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), CollectiveError> {
        // SAFETY: passed on.
        each!(self, library => unsafe { library.call(call, Some(input), Some(output), stream) })
    }

    /// Puts the call of a case into the stream.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn put(self, case: &Case, tensors: &Tensors<'_>, stream: StreamRef<'_>) -> Result<()> {
        let call = each!(self, library => case.call(library.rank(), library.world_size()));
        let (input, output) = (tensors.input.view(), &mut tensors.output.view_mut());
        // SAFETY: passed on.
        let done = unsafe {
            match (case.collective, self) {
                (Collective::SEND_RECV, _) => self.ping_pong(&input, output, stream),
                _ if case.is_list() => {
                    let (inputs, mut outputs) = tensors.lists(case);
                    match self {
                        Self::Nccl(nccl) => nccl.call_list(&call, &inputs, &mut outputs, stream),
                        Self::Ours(ours) if case.collective.reduces() => {
                            ours.reduce_scatter_list(&inputs, &mut outputs, case.op, stream)
                        }
                        Self::Ours(ours) => ours.all_gather_list(&inputs, &mut outputs, stream),
                    }
                }
                (Collective::Of(Operation::Broadcast), _) => {
                    each!(self, library => library.call_in_place(&call, output, stream))
                }
                _ => self.call(&call, &input, output, stream),
            }
        };
        Ok(done?)
    }

    /// Rank 0 sends to rank 1, which sends back; the other ranks do nothing.
    ///
    /// # Safety
    /// As [`call`](Self::call).
    unsafe fn ping_pong(
        self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), CollectiveError> {
        // SAFETY: passed on.
        each!(self, library => unsafe {
            match library.rank() {
                0 => {
                    library.send(input, 1, stream)?;
                    library.recv(output, 1, stream)
                }
                1 => {
                    library.recv(output, 0, stream)?;
                    library.send(&output.as_view(), 0, stream)
                }
                _ => Ok(()),
            }
        })
    }
}

/// The name in the table.
fn name(rank: &Rank<'_>, case: &Case) -> String {
    match case.how {
        AllReduceOptions { algorithm: Some(algorithm), registered: true } => {
            format!("{algorithm} registered")
        }
        AllReduceOptions { algorithm: Some(algorithm), .. } => algorithm.to_string(),
        _ if case.collective == Collective::ALL_REDUCE => {
            format!("auto={}", rank.ours.algorithm_for(case.ordered_counts(rank.comm).1 * case.dtype.size()))
        }
        _ if case.is_list() => format!("{} tensors", case.tensors),
        _ => "direct".into(),
    }
}

/// The contenders of cases that differ in the algorithm alone.
pub(super) fn contenders<'a, T: Element>(rank: &'a Rank<'a>, cases: &[Case]) -> Result<Contenders<'a>> {
    let case = cases[0];
    if case.collective.reduces() {
        rank.ours.prepare(case.dtype, case.op)?;
    }
    let reference = Reference::new::<T>(rank.comm, case);
    let mut tensors = Tensors::new::<T>(rank, &case, move |output| Ok(reference.compare(output)))?;
    if case.how.registered {
        tensors.register(rank)?;
    }
    let tensors = Rc::new(tensors);
    let contender = |case: Case, name: String, library: Library<'a>| {
        // SAFETY: the driver waits for the stream before it drops the contender, which has the tensors.
        Plain::on(&tensors, name, move |tensors, stream| unsafe { library.put(&case, tensors, stream) })
    };
    let plain = Case { how: AllReduceOptions::default(), ..case };
    Ok(Contenders {
        ours: cases.iter().map(|case| contender(*case, name(rank, case), Library::Ours(rank.ours))).collect(),
        nccl: rank.nccl.map(|nccl| contender(plain, "nccl".into(), Library::Nccl(nccl))),
    })
}
