//! Execution plans: `antiphon plan run`.

use antiphon::{
    collectives::Communicator,
    device::ReduceOp,
    executor::LoadedPlan,
    operation::Operation,
    plan::{Op, OpKind, Plan},
    tensor::{DType, Element, with_dtype},
};
use antiphon_collectives::reference::{Expected, reduce_element};

use super::{Buffers, Pace, measure as measure_contender};
use crate::{
    BenchError, Contender, Result, Wrong,
    pattern::{self, exactly, value},
};

/// A plan's time at a size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ran {
    /// Bytes of the larger tensor of a rank.
    pub bytes: u64,
    /// Microseconds of a call: the median of the slowest rank.
    pub latency_us: f64,
    /// Elements that are wrong on any rank; `None` if it is not known what is right.
    pub wrong: Option<u64>,
}

/// Verifies and times a plan on a rank, whose larger tensor has `bytes` bytes of a dtype.
///
/// # Errors
/// [`BenchError::Chunks`]; [`BenchError::Executor`].
pub fn measure(
    comm: &Communicator,
    plan: &Plan,
    loaded: &mut LoadedPlan,
    (bytes, dtype): (u64, DType),
    symmetric: bool,
    iterations: u32,
) -> Result<Ran> {
    with_dtype!(dtype, T => {
        let [input, output] = counts::<T>(plan, bytes)?;
        let larger = (input.max(output) * dtype.size()) as u64;
        let buffers = Buffers::new(
            comm,
            pattern::input::<T>(ReduceOp::Sum, comm.rank(), input),
            vec![T::default(); output],
            symmetric,
        )?;
        let mut contender = Planned { plan, loaded, buffers };
        let pace = Pace { iterations: Some(iterations), ..Pace::default() };
        let measured = measure_contender(comm, &mut contender, pace)?;
        contender.buffers.give_back()?;
        let wrong = plan.operation().map(|_| measured.wrong.elements);
        Ok(Ran { bytes: larger, latency_us: measured.latency_us(), wrong })
    })
}

struct Planned<'a, T> {
    plan: &'a Plan,
    loaded: &'a mut LoadedPlan,
    buffers: Buffers<'a, T>,
}

impl<T: Element> Contender<&Communicator> for Planned<'_, T> {
    fn name(&self) -> Result<String> {
        Ok(self.plan.name.clone().unwrap_or_default())
    }

    fn call(&mut self, comm: &Communicator) -> Result<()> {
        let (input, output) = self.buffers.slices();
        Ok(self.loaded.execute(comm, input, output)?)
    }

    fn check(&mut self, comm: &Communicator) -> Result<Wrong> {
        let (input, output) = self.buffers.slices();
        Ok(wrong(comm, self.plan, output, input.len()))
    }
}

/// Elements of input and output.
pub(crate) fn counts<T: Element>(plan: &Plan, bytes: u64) -> Result<[usize; 2]> {
    let chunks = plan.gpus.first().map_or([0, 0], |gpu| [gpu.input_chunks, gpu.output_chunks]);
    let larger = chunks[0].max(chunks[1]).max(1);
    let size = size_of::<T>() as u64;
    if !bytes.is_multiple_of(larger) || !(bytes / larger).is_multiple_of(size) {
        let dtype = T::DTYPE;
        return Err(BenchError::Chunks { bytes, chunks: larger, dtype });
    }
    let elements = bytes / larger / size;
    Ok(chunks.map(|chunks| (chunks * elements) as usize))
}

/// The elements of this rank's output that are not what the collective must give; none if that is not known.
pub(crate) fn wrong<T: Element>(comm: &Communicator, plan: &Plan, output: &[T], input: usize) -> Wrong {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let Some(operation) = plan.operation() else { return Wrong::default() };
    if operation == Operation::Message {
        return unlike_any(output, rank, ranks);
    }
    let op = reduction(plan);
    let reduced = |index: usize| {
        let column: Vec<T> = (0..ranks).map(|rank| value(ReduceOp::Sum, rank, index)).collect();
        let expected = reduce_element(op, &column);
        // A plan may round at each of its reductions, so at most once for each contribution.
        Expected { tolerance: expected.tolerance * ranks as f64, ..expected }
    };
    let copied = |from: usize, index| exactly(value::<T>(ReduceOp::Sum, from, index).to_f64());
    let block = (input / ranks).max(1);
    let expected = |index: usize| match operation {
        Operation::AllReduce => reduced(index),
        Operation::ReduceScatter => reduced(rank * block + index),
        Operation::AllGather => copied(index / input, index % input),
        _ => copied(index / block, rank * block + index % block),
    };
    Wrong::of(output, (0..).map(expected))
}

/// The elements that differ from the input that is most like the output. That it is the right rank's, and that a rank to
/// that no rank sends keeps its zeros, is for the proof.
fn unlike_any<T: Element>(output: &[T], rank: usize, ranks: usize) -> Wrong {
    let untouched = Wrong::of(output, std::iter::repeat_with(|| exactly(0.0)));
    let sent =
        |from| Wrong::of(output, (0..).map(|index| exactly(value::<T>(ReduceOp::Sum, from, index).to_f64())));
    let others = (0..ranks).filter(|&from| from != rank).map(sent);
    others.fold(untouched, |least, wrong| if wrong.elements < least.elements { wrong } else { least })
}

/// How the plan reduces. One that is proved does so in one way.
pub(crate) fn reduction(plan: &Plan) -> ReduceOp {
    let inner = |op: &Op| match &op.kind {
        OpKind::Reduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduce(reduce) => Some(reduce.op),
        OpKind::SwitchReduceBroadcast(reduce) => Some(reduce.op),
        _ => None,
    };
    let of = |op: &Op| match &op.kind {
        OpKind::Pipeline(pipeline) => pipeline.ops.iter().find_map(inner),
        _ => inner(op),
    };
    let mut ops = plan.gpus.iter().flat_map(|gpu| &gpu.threadblocks).flat_map(|block| &block.ops);
    ops.find_map(of).unwrap_or(ReduceOp::Sum)
}
