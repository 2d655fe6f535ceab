//! The choice of the all-reduce on GPUs, by size: measured, and equal on all ranks.

use std::{cell::RefCell, ops::RangeInclusive, time::Duration};

use antiphon_device::{
    ReduceOp,
    cuda::{CudaError, DeviceMemory, Event, Graph, Stream, StreamRef, memory},
};
use antiphon_fabric::Communicator;
use antiphon_tensor::DType;
use antiphon_tuning::Key;

use super::{Algorithm, CudaCollectives};
use crate::{
    AlgorithmTable, StreamCollectives,
    error::{CollectiveError, Result},
};

/// The number of bytes from which on two-shot is faster than one-shot, with more than two ranks: there one-shot's (W − 1)·n bytes
/// cost more than a second hop. With two ranks both send as many bytes, but two-shot sends them in longer bursts. Measured on H200s
/// (benches/results).
const TWO_SHOT_FROM: usize = 208 << 10;
const TWO_SHOT_FROM_BETWEEN_TWO: usize = 4 << 20;

/// The dtype of the measurement: the time depends on the number of bytes, and hardly on the dtype.
const DTYPE: DType = DType::BF16;
const OP: ReduceOp = ReduceOp::Sum;

/// The table in the cache if all ranks find the same there, else the built-in one.
pub(super) fn load(comm: &Communicator, gpu: &str) -> Result<AlgorithmTable> {
    let world_size = comm.world_size();
    AlgorithmTable::load(comm, &key(world_size, gpu), &names(), &built_in(world_size))
}

fn built_in(world_size: usize) -> [(usize, usize); 2] {
    let two_shot_from = if world_size == 2 { TWO_SHOT_FROM_BETWEEN_TWO } else { TWO_SHOT_FROM };
    [(0, Algorithm::OneShot), (two_shot_from, Algorithm::TwoShot)]
        .map(|(from, algorithm)| (from, algorithm as usize - Algorithm::ALL[0] as usize))
}

fn names() -> [&'static str; Algorithm::ALL.len()] {
    Algorithm::ALL.map(Algorithm::name)
}

fn key(world_size: usize, gpu: &str) -> Key {
    Key::new("all_reduce", "", world_size, gpu)
}

/// Measures all algorithms over `sizes` in bytes and writes the result to the cache file, from which the collectives of
/// every communicator of this world size between such GPUs take it that are made from then on. It takes some seconds, and
/// twice the largest size of each GPU's memory. All ranks call it together, with nothing under way on `collectives`.
///
/// # Errors
/// As an all-reduce; [`FabricError::Device`](antiphon_fabric::FabricError::Device);
/// [`CollectiveError::Tuning`](crate::CollectiveError::Tuning) when the file cannot be written.
pub fn tune(
    comm: &Communicator,
    collectives: &CudaCollectives,
    sizes: RangeInclusive<usize>,
) -> Result<AlgorithmTable> {
    let key = key(comm.world_size(), &collectives.context().device().properties()?.name);
    let clock = Clock::new(collectives, *sizes.end())?;
    AlgorithmTable::measure(comm, &key, &names(), sizes, |candidate, bytes| {
        comm.barrier()?; // hosts in step, so that no GPU waits for long
        let algorithm = Algorithm::ALL[candidate];
        clock.time(bytes, |stream| clock.all_reduce(algorithm, bytes, stream)).map(Some)
    })
}

/// Times calls on a GPU, as [`tune`] does: all ranks time the same calls together.
pub struct Clock<'a> {
    collectives: &'a CudaCollectives,
    stream: Stream,
    start: Event,
    end: Event,
    pub(crate) input: DeviceMemory,
    pub(crate) output: RefCell<DeviceMemory>,
}

impl<'a> Clock<'a> {
    /// A clock on a stream of its own, with an input and an output of `largest` bytes each for the collectives' own operations. All ranks
    /// make it together.
    ///
    /// # Errors
    /// [`FabricError::Device`](antiphon_fabric::FabricError::Device) without that memory; as
    /// [`CudaCollectives::prepare`](CudaCollectives::prepare).
    pub fn new(collectives: &'a CudaCollectives, largest: usize) -> Result<Self> {
        let context = collectives.context();
        let (stream, len) = (context.stream()?, largest.max(DTYPE.size()));
        let (input, output) = (DeviceMemory::allocate(context, len)?, DeviceMemory::allocate(context, len)?);
        // SAFETY: memory of that size, which no other code uses.
        unsafe { memory::fill(stream.borrow(), input.pointer(), 0, len) }?;
        collectives.prepare(DTYPE, OP)?;
        let (start, end) = (Event::with_time(context)?, Event::with_time(context)?);
        Ok(Self { collectives, stream, start, end, input, output: RefCell::new(output) })
    }

    /// The time of one call among several, of about `bytes` bytes: of a graph, so that the host's share is none of it, in which the GPUs
    /// wait for each other before the clock starts. `call` puts the call into a stream, and the memory that it uses lives until this
    /// returns.
    ///
    /// # Errors
    /// Those of `call`; of the GPU, and of a barrier for which ranks do not come.
    pub fn time<E: From<CollectiveError> + From<CudaError>>(
        &self,
        bytes: usize,
        call: impl Fn(StreamRef<'_>) -> Result<(), E>,
    ) -> Result<Duration, E> {
        let calls = (32 << 20) / (bytes + (512 << 10)) + 4;
        let graph = Graph::capture(&self.stream, |stream| -> Result<(), E> {
            self.collectives.barrier(stream)?;
            self.start.record_external(stream)?;
            (0..calls).try_for_each(|_| call(stream))?;
            Ok(self.end.record_external(stream)?)
        })?;
        let graph = graph.instantiate()?;
        // SAFETY: what the graph uses lives in `self`, and the run is waited for.
        unsafe { graph.launch(&self.stream) }?;
        self.stream.borrow().synchronize()?;
        self.collectives.check()?;
        Ok(self.end.elapsed_since(&self.start)? / calls as u32)
    }

    fn all_reduce(&self, algorithm: Algorithm, bytes: usize, stream: StreamRef<'_>) -> Result<()> {
        let shape = [(bytes / DTYPE.size()).max(1)];
        let input = self.input.view(DTYPE, &shape).expect("memory of the largest size");
        let mut output = self.output.borrow_mut();
        let output = output.view_mut(DTYPE, &shape).expect("memory of the largest size");
        // SAFETY: both memories live until the run has been waited for.
        unsafe { self.collectives.all_reduce_with(input, output, OP, algorithm, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon_fabric::LocalWorld;

    #[test]
    fn the_built_in_table_changes_where_the_second_hop_pays() {
        for (world_size, from) in [(2, TWO_SHOT_FROM_BETWEEN_TWO), (4, TWO_SHOT_FROM)] {
            let chosen = LocalWorld::run(world_size, |comm| -> Result<_> {
                let table = load(&comm, "a GPU that nobody has")?;
                assert_eq!(table.origin, "built in");
                Ok([1, from - 1, from, 1 << 30].map(|bytes| table.algorithm(bytes)))
            });
            use Algorithm::{OneShot, TwoShot};
            for rank in chosen {
                assert_eq!(rank.unwrap(), [OneShot, OneShot, TwoShot, TwoShot]);
            }
        }
    }
}
