//! The libraries that carry out the operations of a mixed layout on GPUs.

use std::rc::Rc;

use antiphon::{
    collectives::{
        cuda::CudaCollectives,
        mixed::{CudaMixedHandler, MixedMode, MixedOp},
        nccl::NcclCollectives,
    },
    device::{ReduceOp, cuda::StreamRef},
    operation::{Call, Operation},
    tensor::Element,
};

use super::{
    Contenders, Rank,
    collectives::Library,
    ours,
    tensors::{Plain, Tensor, Tensors},
};
use crate::{Result, case::Case, host::mixed::Mixed, pattern::Reference};

/// The collectives of a group, ours and NCCL's.
type Group = (CudaCollectives, Option<NcclCollectives>);

/// The operations of a layout on a rank.
pub(super) struct Handler {
    fused: CudaMixedHandler,
    /// Where an operation may be composed of two collectives: the group of tensor parallel ranks, and that of data parallel ones.
    groups: Option<[Group; 2]>,
}

impl Handler {
    pub(super) fn new(rank: &Rank<'_>) -> Result<Self> {
        let Rank { comm, context, settings, .. } = rank;
        let layout = settings.layout.layout(comm.rank());
        let fused = CudaMixedHandler::new(comm, rank.ours, layout)?;
        fused.prepare(rank.ours, settings.dtype)?;
        rank.ours.prepare(settings.dtype, ReduceOp::Sum)?;
        let group = |color: usize| -> Result<Group> {
            let comm = comm.split(Some(color as u64), 0)?.expect("it has a colour");
            let ours = ours(settings, &comm, context)?;
            ours.prepare(settings.dtype, ReduceOp::Sum)?;
            Ok((ours, rank.nccl.map(|_| NcclCollectives::new(&comm, context)).transpose()?))
        };
        let mut groups = None;
        if layout.use_mixed() {
            groups = Some([group(layout.dp_rank())?, group(layout.tp_rank())?]);
            rank.note(
                "nccl: a collective of the tensor parallel group and one of the data parallel group".into(),
            );
        }
        Ok(Self { fused, groups })
    }
}

/// The contenders of cases that differ in the mode alone. [`MixedMode::Composed`] is by our own collectives: one of all ranks, or
/// one in each kind of group.
pub(super) fn contenders<'a, T: Element>(
    rank: &'a Rank<'a>,
    handler: &'a Handler,
    mixed: Mixed,
    cases: &[Case],
) -> Result<Contenders<'a>> {
    let case = cases[0];
    let reference = Reference::new::<T>(rank.comm, case);
    let tensors = Rc::new(Tensors::new::<T>(rank, &case, move |output| Ok(reference.compare(output)))?);
    let elements = case.ordered_counts(rank.comm).0;
    let block = elements * case.dtype.size();
    let middle = Tensor::zeros(rank.context, rank.stream, case.dtype, &[elements])?;
    let middle = Rc::new(middle);
    let composed = |name: &str, all: Library<'a>, groups: Option<[Library<'a>; 2]>| {
        let middle = middle.clone();
        Plain::on(&tensors, name, move |tensors, stream| {
            // SAFETY: the driver waits for the stream before it drops the contender, which has the tensors.
            unsafe { compose(mixed.op, all, groups, tensors, &middle, stream) }
        })
    };
    let ours = |case: &Case| {
        if case.mode == Some(MixedMode::Composed) {
            let groups = handler.groups.as_ref();
            let groups = groups.map(|groups| groups.each_ref().map(|(ours, _)| Library::Ours(ours)));
            return composed("composed", Library::Ours(rank.ours), groups);
        }
        let name = mixed.name(case.mode, || handler.fused.select(rank.ours, mixed.op, block));
        let mode = case.mode;
        let name = name.unwrap_or_else(|error| error.to_string());
        Plain::on(&tensors, name, move |tensors, stream| {
            let (input, mut output) = (tensors.input.view(), tensors.output.view_mut());
            // SAFETY: as above.
            Ok(unsafe { handler.fused.run(rank.ours, mixed.call(mode), &input, &mut output, stream) }?)
        })
    };
    let by_nccl = rank.nccl.map(|nccl| {
        let of_group = |(_, nccl): &'a Group| Library::Nccl(nccl.as_ref().expect("all ranks have it"));
        let groups = handler.groups.as_ref().map(|groups| groups.each_ref().map(of_group));
        composed("nccl", Library::Nccl(nccl), groups)
    });
    Ok(Contenders { ours: cases.iter().map(ours).collect(), nccl: by_nccl })
}

/// An operation as one collective of all ranks, or as one in each kind of group.
///
/// # Safety
/// As [`Library::call`]; `middle` has a block.
unsafe fn compose(
    op: MixedOp,
    all: Library<'_>,
    groups: Option<[Library<'_>; 2]>,
    tensors: &Tensors<'_>,
    middle: &Tensor,
    stream: StreamRef<'_>,
) -> Result<()> {
    let (input, mut output) = (tensors.input.view(), tensors.output.view_mut());
    let [sum, gather, scatter] =
        [Operation::AllReduce, Operation::AllGather, Operation::ReduceScatter].map(Call::new);
    // SAFETY: the caller's promise.
    unsafe {
        match (op, groups) {
            (MixedOp::AllReduce, _) => all.call(&sum, &input, &mut output, stream)?,
            (MixedOp::AllGather, _) => all.call(&gather, &input, &mut output, stream)?,
            (MixedOp::ReduceScatter, _) => all.call(&scatter, &input, &mut output, stream)?,
            (_, None) => unreachable!("a layout with fused operations has groups"),
            (MixedOp::AllReduceAllGather, Some([tp, dp])) => {
                tp.call(&sum, &input, &mut middle.view_mut(), stream)?;
                dp.call(&gather, &middle.view(), &mut output, stream)?;
            }
            (MixedOp::ReduceScatterAllReduce, Some([tp, dp])) => {
                dp.call(&scatter, &input, &mut middle.view_mut(), stream)?;
                tp.call(&sum, &middle.view(), &mut output, stream)?;
            }
        }
    }
    Ok(())
}
