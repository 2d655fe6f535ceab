//! GPUs: ours beside NCCL, in the same processes, size by size in turn.
//!
//! * `collectives`, `mixed`, `moe`, `forms` and `fused` have the contenders of their families.
//! * [`plan`] verifies and times execution plans, beside our all-reduce if that is asked for.
//! * `tensors` has the memory that contenders share.
//! * `timing` has graphs of many calls, with the ranks' GPUs synchronised before.
//! * `table` verifies and times each size; `tail` measures ranks that do not start together, and the slowest of many replays.

mod collectives;
mod forms;
mod fused;
mod mixed;
mod moe;
pub mod plan;
mod table;
pub(crate) mod tail;
mod tensors;
mod timing;

use antiphon::{
    collectives::{Communicator, cuda::CudaCollectives, nccl::NcclCollectives},
    device::cuda::{Context, Driver, Stream, StreamRef},
    tensor::with_dtype,
};

use crate::{
    Contender, Found, Result, Settings, Subject, Wrong,
    case::{Case, Collective},
};

/// What is called in a stream. The driver that puts its calls there waits for the stream before it drops the contender.
type OnStream<'a> = Box<dyn for<'s> Contender<StreamRef<'s>> + 'a>;

/// The contenders of a case: ours, and NCCL where it is.
struct Contenders<'a> {
    ours: Vec<OnStream<'a>>,
    nccl: Option<OnStream<'a>>,
}

/// All that a rank measures with.
struct Rank<'a> {
    settings: &'a Settings,
    report: &'a dyn Fn(Found),
    comm: &'a Communicator,
    context: &'a Context,
    ours: &'a CudaCollectives,
    nccl: Option<&'a NcclCollectives>,
    stream: &'a Stream,
}

impl Rank<'_> {
    /// Tells something, from one rank.
    fn report(&self, found: Found) {
        if self.comm.rank() == 0 {
            (self.report)(found);
        }
    }

    fn note(&self, text: String) {
        self.report(Found::Note(text));
    }

    /// Says how many elements are wrong of those that have no column of errors.
    fn note_wrong(&self, whose: &str, name: &str, Wrong { elements, .. }: Wrong) {
        if elements > 0 {
            self.note(format!("{whose}: {elements} elements of {name} are not as expected"));
        }
    }
}

/// What makes the contenders of all cases.
struct Families<'a> {
    rank: &'a Rank<'a>,
    /// The handler of the mixed layout, if one is measured.
    mixed: Option<mixed::Handler>,
    /// The mixture of experts, if one is measured.
    experts: Option<moe::Experts>,
}

impl<'a> Families<'a> {
    fn new(rank: &'a Rank<'a>) -> Result<Self> {
        let mixed = rank.settings.subject == Subject::Mixed;
        let experts = rank.settings.collectives().into_iter().any(Collective::is_of_experts);
        Ok(Self {
            rank,
            mixed: mixed.then(|| mixed::Handler::new(rank)).transpose()?,
            experts: experts.then(|| moe::Experts::new(rank.comm, rank.context)).transpose()?,
        })
    }

    /// The contenders of some cases that differ in how they are done alone, and so share their tensors.
    fn contenders(&self, cases: &[Case]) -> Result<Contenders<'_>> {
        let case = cases[0];
        with_dtype!(case.dtype, T => match (&self.experts, &self.mixed, case.collective) {
            (Some(experts), ..) => moe::contenders::<T>(self.rank, experts, case),
            (_, Some(handler), Collective::Mixed(mixed)) => {
                mixed::contenders::<T>(self.rank, handler, mixed, cases)
            }
            _ => collectives::contenders::<T>(self.rank, cases),
        })
    }
}

/// Ours, with as much staging as was asked for.
fn ours(settings: &Settings, comm: &Communicator, context: &Context) -> Result<CudaCollectives> {
    let builder = CudaCollectives::builder(comm, context);
    let builder = match settings.staging {
        // More than the address space is more than there is.
        Some(bytes) => builder.staging_bytes(usize::try_from(bytes).unwrap_or(usize::MAX)),
        None => builder,
    };
    Ok(builder.build()?)
}

pub(crate) fn run(settings: &Settings, report: &dyn Fn(Found)) -> Result<()> {
    let comm = &Communicator::from_env()?;
    let context = &Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let ours = &ours(settings, comm, context)?;
    let nccl = NcclCollectives::new(comm, context);
    let has_priority = settings.tail.as_ref().is_some_and(|tail| tail.priority);
    let stream = &Stream::with_priority(context, if has_priority { tail::HIGHEST_PRIORITY } else { 0 })?;
    let rank = Rank { settings, report, comm, context, ours, nccl: nccl.as_ref().ok(), stream };
    if let Err(error) = &nccl {
        rank.note(format!("without NCCL beside it: {error}"));
    }
    match &settings.tail {
        Some(tail) => tail::run(&rank, tail),
        None => table::run(&rank),
    }
}
