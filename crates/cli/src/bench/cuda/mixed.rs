//! The libraries that carry out the operations of a mixed layout on GPUs.

use antiphon::{
    collectives::{
        CollectiveError, Communicator,
        cuda::CudaCollectives,
        mixed::{CudaMixedHandler, MixedMode, MixedOp},
        nccl::NcclCollectives,
    },
    device::{
        ReduceOp,
        cuda::{Context, DeviceMemory, StreamRef},
    },
    tensor::{Device, TensorView, TensorViewMut},
};

use super::{
    super::{Args, case::Case, mixed::Mixed},
    Result, collectives, note,
};
use crate::bench::case::Collective;

/// How an operation is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Variant {
    /// The handler carries it out, in a given mode or as it chooses.
    Fused(Option<MixedMode>),
    /// Our own collectives carry it out: one of all ranks, or one in each kind of group.
    Composed,
    /// The same by NCCL.
    Nccl,
}

impl Variant {
    /// All of ours.
    pub(super) fn all(mixed: Mixed) -> impl Iterator<Item = Self> {
        let fused = mixed.modes().filter(|mode| *mode != Some(MixedMode::Composed));
        fused.map(Self::Fused).chain([Self::Composed])
    }
}

/// The communicators of the two collectives of a composed operation: the group of tensor parallel ranks, and that of data
/// parallel ones.
struct Groups<C> {
    tp: C,
    dp: C,
}

/// The operations of a layout on a rank.
pub(super) struct Handler<'a> {
    fused: CudaMixedHandler,
    ours: &'a CudaCollectives,
    nccl: Option<&'a NcclCollectives>,
    ours_in_groups: Option<Groups<CudaCollectives>>,
    nccl_in_groups: Option<Groups<NcclCollectives>>,
    /// Between two collectives.
    middle: DeviceMemory,
}

impl<'a> Handler<'a> {
    pub(super) fn new(
        args: &Args,
        comm: &Communicator,
        ours: &'a CudaCollectives,
        nccl: Option<&'a NcclCollectives>,
        context: &Context,
    ) -> Result<Self> {
        let layout = args.layout.layout(comm.rank());
        let fused = CudaMixedHandler::new(comm, ours, layout)?;
        fused.prepare(ours, args.dtype)?;
        ours.prepare(args.dtype, ReduceOp::Sum)?;
        let (mut ours_in_groups, mut nccl_in_groups) = (None, None);
        if layout.use_mixed() {
            let group =
                |color: usize| comm.split(Some(color as u64), 0).map(|group| group.expect("it has a colour"));
            let (tp, dp) = (group(layout.dp_rank())?, group(layout.tp_rank())?);
            let groups =
                Groups { tp: collectives(args, &tp, context)?, dp: collectives(args, &dp, context)? };
            groups.tp.prepare(args.dtype, ReduceOp::Sum)?;
            groups.dp.prepare(args.dtype, ReduceOp::Sum)?;
            ours_in_groups = Some(groups);
            if nccl.is_some() {
                let (tp, dp) = (NcclCollectives::new(&tp, context)?, NcclCollectives::new(&dp, context)?);
                nccl_in_groups = Some(Groups { tp, dp });
            }
            note(
                comm.rank(),
                "nccl: a collective of the tensor parallel group and one of the data parallel group",
            );
        }
        let largest = args.sizes().into_iter().max().unwrap_or(0) as usize;
        let middle = DeviceMemory::allocate(context, largest.max(args.dtype.size()))?;
        Ok(Self { fused, ours, nccl, ours_in_groups, nccl_in_groups, middle })
    }

    /// The name in the table.
    pub(super) fn name(&self, case: &Case, variant: Variant) -> String {
        match variant {
            Variant::Fused(mode) => {
                let mixed = operation(case);
                let layout = self.fused.layout();
                let (input, output) = case.counts(layout.world_rank(), layout.world_size());
                let block = input.min(output) * case.dtype.size();
                let name = mixed.name(mode, || self.fused.select(self.ours, mixed.op, block));
                name.unwrap_or_else(|error| error.to_string())
            }
            Variant::Composed => "composed".into(),
            Variant::Nccl => "nccl".into(),
        }
    }

    /// Puts one call into the stream.
    ///
    /// # Safety
    /// As [`Contender::call`](super::contender::Contender::call).
    pub(super) unsafe fn call(
        &self,
        case: &Case,
        variant: Variant,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(), CollectiveError> {
        let Mixed { op, .. } = operation(case);
        // SAFETY: passed on; what lies in between lives as long as the handler.
        unsafe {
            match variant {
                Variant::Fused(mode) => {
                    self.fused.run(self.ours, operation(case).call(mode), input, output, stream)
                }
                Variant::Composed => {
                    compose(op, self.ours, self.ours_in_groups.as_ref(), input, output, &self.middle, stream)
                }
                Variant::Nccl => {
                    let nccl = self.nccl.expect("it is compared where it is");
                    compose(op, nccl, self.nccl_in_groups.as_ref(), input, output, &self.middle, stream)
                }
            }
        }
    }
}

fn operation(case: &Case) -> Mixed {
    match case.collective {
        Collective::Mixed(mixed) => mixed,
        other => unreachable!("{} is of no mixed layout", other.name()),
    }
}

/// The parts of a composed operation.
trait PlainCollectives {
    /// # Safety
    /// As [`Contender::call`](super::contender::Contender::call); of the other methods too.
    unsafe fn sum(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Outcome;
    unsafe fn gather(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Outcome;
    unsafe fn scatter(
        &self,
        input: &TensorView<'_>,
        output: &mut TensorViewMut<'_>,
        stream: StreamRef<'_>,
    ) -> Outcome;
}

type Outcome = Result<(), CollectiveError>;

macro_rules! plain_collectives {
    ($Collectives:ty) => {
        impl PlainCollectives for $Collectives {
            unsafe fn sum(
                &self,
                input: &TensorView<'_>,
                output: &mut TensorViewMut<'_>,
                stream: StreamRef<'_>,
            ) -> Outcome {
                // SAFETY: passed on.
                unsafe { self.all_reduce(input, output, ReduceOp::Sum, stream) }
            }

            unsafe fn gather(
                &self,
                input: &TensorView<'_>,
                output: &mut TensorViewMut<'_>,
                stream: StreamRef<'_>,
            ) -> Outcome {
                // SAFETY: passed on.
                unsafe { self.all_gather(input, output, stream) }
            }

            unsafe fn scatter(
                &self,
                input: &TensorView<'_>,
                output: &mut TensorViewMut<'_>,
                stream: StreamRef<'_>,
            ) -> Outcome {
                // SAFETY: passed on.
                unsafe { self.reduce_scatter(input, output, ReduceOp::Sum, stream) }
            }
        }
    };
}

plain_collectives!(CudaCollectives);
plain_collectives!(NcclCollectives);

/// An operation as one collective of all ranks, or as one in each kind of group.
///
/// # Safety
/// As [`Contender::call`](super::contender::Contender::call); `middle` has a block.
unsafe fn compose<C: PlainCollectives>(
    op: MixedOp,
    all: &C,
    groups: Option<&Groups<C>>,
    input: &TensorView<'_>,
    output: &mut TensorViewMut<'_>,
    middle: &DeviceMemory,
    stream: StreamRef<'_>,
) -> Outcome {
    let (at, dtype, device): (_, _, Device) =
        (middle.pointer().0 as usize as *mut u8, input.dtype(), input.device());
    let shape = [input.numel().min(output.numel())];
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let between = || TensorViewMut::from_raw_parts(at, dtype, &shape, None, device).expect("plain");
        match (op, groups) {
            (MixedOp::AllReduce, _) => all.sum(input, output, stream),
            (MixedOp::AllGather, _) => all.gather(input, output, stream),
            (MixedOp::ReduceScatter, _) => all.scatter(input, output, stream),
            (_, None) => unreachable!("a layout with fused operations has groups"),
            (MixedOp::AllReduceAllGather, Some(Groups { tp, dp })) => {
                tp.sum(input, &mut between(), stream)?;
                dp.gather(&between().as_view(), output, stream)
            }
            (MixedOp::ReduceScatterAllReduce, Some(Groups { tp, dp })) => {
                dp.scatter(input, &mut between(), stream)?;
                tp.sum(&between().as_view(), output, stream)
            }
        }
    }
}
