//! The driver on the host: it verifies, times and verifies again, case by case.

mod collectives;
pub(crate) mod engine;
pub(crate) mod mixed;
pub(crate) mod moe;
pub mod plan;

use std::time::{Duration, Instant};

use antiphon::{
    collectives::Communicator,
    fabric::{FabricError, SymmetricBuffer},
    tensor::{Element, with_dtype},
};

use crate::{
    BenchError, Contender, Found, Result, Row, Settings, Wrong, algbw_gbs,
    case::{Case, Collective},
    pattern::{self, Reference},
};

/// Batches of calls; their median is the time.
pub(crate) const BATCHES: usize = 11;
/// Calls before the timing, which also tell how many make a batch.
const WARM_UP: u32 = 3;
const MOST_ITERATIONS: f64 = 100_000.0;

/// How long is measured. The default is a quarter of a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// About how long all batches take.
    pub seconds: Duration,
    /// Calls in a batch, or in a graph; `None` for as many as the seconds allow.
    pub iterations: Option<u32>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { seconds: Duration::from_millis(250), iterations: None }
    }
}

impl Pace {
    /// The microseconds of a call in batches, of the slowest rank, ascending. All ranks do it together.
    fn time<E: From<FabricError>>(
        self,
        comm: &Communicator,
        mut call: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<f64>, E> {
        let mut batch = |calls: u32| -> Result<f64, E> {
            comm.barrier()?;
            let start = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
        };
        // All ranks must make the same number of calls, so the slowest says how many.
        let one_us = slowest(comm, &[batch(WARM_UP)?])?[0].max(0.01);
        let allowed = self.seconds.as_secs_f64() * 1e6 / BATCHES as f64 / one_us;
        let calls = self.iterations.unwrap_or(allowed.clamp(1.0, MOST_ITERATIONS) as u32).max(1);
        let times = (0..BATCHES).map(|_| batch(calls)).collect::<Result<Vec<f64>, E>>()?;
        Ok(sorted(comm, &times)?)
    }
}

/// What a contender was found to be.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Its name in the table.
    pub name: String,
    /// Microseconds of a call in batches, of the slowest rank, ascending.
    pub times: Vec<f64>,
    /// The wrong elements of all ranks, before and after the timing.
    pub wrong: Wrong,
}

impl Measured {
    /// The median of the times, in microseconds.
    pub fn latency_us(&self) -> f64 {
        self.times[self.times.len() / 2]
    }

    /// The row of a case, whose larger tensor has `count` elements.
    pub(crate) fn row(self, comm: &Communicator, case: Case, count: usize) -> Row {
        let ranks = comm.world_size();
        let (bytes, latency_us) = ((count * case.dtype.size()) as u64, self.latency_us());
        let algbw_gbs = algbw_gbs(bytes, latency_us);
        Row {
            collective: case.collective.name().into(),
            bytes,
            count: count as u64,
            dtype: case.dtype.name().into(),
            op: case.collective.reduces().then(|| case.op.name().into()),
            algorithm: self.name,
            ranks,
            latency_us,
            min_us: self.times[0],
            max_us: self.times[self.times.len() - 1],
            algbw_gbs,
            busbw_gbs: algbw_gbs * case.collective.bus_factor(ranks).unwrap_or(1.0),
            errors: self.wrong.elements,
            max_error: self.wrong.worst,
            gpu: None,
        }
    }
}

/// Verifies and times a contender by the host's clock, and verifies it again. All ranks measure theirs together.
///
/// # Errors
/// Those of the contender, and of the ranks' meeting between batches.
pub fn measure<'c>(
    comm: &'c Communicator,
    contender: &mut dyn Contender<&'c Communicator>,
    pace: Pace,
) -> Result<Measured> {
    contender.prepare(comm)?;
    contender.call(comm)?;
    let first = contender.check(comm)?;
    let times = pace.time(comm, || contender.call(comm))?;
    let wrong = total(comm, first.and(contender.check(comm)?))?;
    Ok(Measured { name: contender.name()?, times, wrong })
}

pub(crate) fn run(settings: &Settings, report: &dyn Fn(Found)) -> Result<()> {
    let comm = Communicator::from_env()?;
    let ranks = comm.world_size();
    if ranks < 2 && settings.collectives().contains(&Collective::SEND_RECV) {
        return Err(BenchError::TooFewRanks { ranks });
    }
    for case in settings.cases() {
        let row = match case.collective {
            Collective::Engine => engine::measure(&comm, case, settings.pace)?,
            _ => with_dtype!(case.dtype, T => {
                let mut contender: Box<dyn Contender<&Communicator>> = match case.collective {
                    Collective::Mixed(mixed) => {
                        Box::new(mixed::contender::<T>(&comm, mixed, case, settings.symmetric)?)
                    }
                    of if of.is_of_experts() => Box::new(moe::Routed::<T>::new(&comm, case)?),
                    _ => Box::new(collectives::contender::<T>(&comm, case, settings.symmetric)?),
                };
                let measured = measure(&comm, &mut *contender, settings.pace)?;
                contender.finish()?;
                let (smaller, larger) = case.ordered_counts(&comm);
                // Of experts the tokens count, and not what may come of them.
                measured.row(&comm, case, if case.collective.is_of_experts() { smaller } else { larger })
            }),
        };
        if comm.rank() == 0 {
            report(Found::Row(row));
        }
    }
    Ok(())
}

/// A rank's input and output, its own or in symmetric memory.
pub(crate) struct Buffers<'a, T> {
    comm: &'a Communicator,
    own: (Vec<T>, Vec<T>),
    shared: Option<[SymmetricBuffer; 2]>,
}

impl<'a, T: Element> Buffers<'a, T> {
    fn new(comm: &'a Communicator, input: Vec<T>, output: Vec<T>, symmetric: bool) -> Result<Self> {
        let shared = || -> Result<[SymmetricBuffer; 2]> {
            let [first, second] = [&input, &output].map(|own| comm.symmetric(size_of_val(own.as_slice())));
            let shared = [first?, second?];
            // SAFETY: other ranks touch this rank's copies only within the collectives.
            unsafe { shared[0].slice_mut(comm.rank()) }.copy_from_slice(&input);
            Ok(shared)
        };
        let shared = symmetric.then(shared).transpose()?;
        Ok(Self { comm, own: (input, output), shared })
    }

    fn slices(&mut self) -> (&[T], &mut [T]) {
        match &self.shared {
            // SAFETY: as above, and `self` is borrowed as long as the slices.
            Some([input, output]) => unsafe {
                (input.slice_mut(self.comm.rank()), output.slice_mut(self.comm.rank()))
            },
            None => (&self.own.0, &mut self.own.1),
        }
    }

    fn give_back(self) -> Result<()> {
        let mut shared = self.shared.into_iter().flatten();
        Ok(shared.try_for_each(|buffer| self.comm.free(buffer))?)
    }
}

type Put<'a, T> = Box<dyn FnMut(&Communicator, &[T], &mut [T]) -> Result<()> + 'a>;

/// A call with one input and one output.
pub(crate) struct Plain<'a, T> {
    name: String,
    buffers: Buffers<'a, T>,
    reference: Reference,
    put: Put<'a, T>,
}

impl<'a, T: Element> Plain<'a, T> {
    fn new(
        comm: &'a Communicator,
        case: Case,
        symmetric: bool,
        name: String,
        put: impl FnMut(&Communicator, &[T], &mut [T]) -> Result<()> + 'a,
    ) -> Result<Self> {
        let (input, output) = case.counts(comm.rank(), comm.world_size());
        let input = pattern::input::<T>(case.op, comm.rank(), input);
        let buffers = Buffers::new(comm, input, vec![T::default(); output], symmetric)?;
        Ok(Self { name, buffers, reference: Reference::new::<T>(comm, case), put: Box::new(put) })
    }
}

impl<T: Element> Contender<&Communicator> for Plain<'_, T> {
    fn name(&self) -> Result<String> {
        Ok(self.name.clone())
    }

    fn prepare(&mut self, _: &Communicator) -> Result<()> {
        poison(self.buffers.slices().1);
        Ok(())
    }

    fn call(&mut self, comm: &Communicator) -> Result<()> {
        let (input, output) = self.buffers.slices();
        (self.put)(comm, input, output)
    }

    fn check(&mut self, _: &Communicator) -> Result<Wrong> {
        Ok(self.reference.compare(self.buffers.slices().1))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.buffers.give_back()
    }
}

/// Puts a value into every element that is no result (but, in 8 bits, of some sums).
fn poison<T: Element>(output: &mut [T]) {
    output.fill(T::from_f64(if T::DTYPE.is_float() { f64::NAN } else { 113.0 }));
}

/// The largest of every rank's times, one by one.
pub(crate) fn slowest(comm: &Communicator, times: &[f64]) -> Result<Vec<f64>, FabricError> {
    let all = comm.exchange_objects(&times.to_vec())?;
    Ok((0..times.len()).map(|i| all.iter().map(|theirs| theirs[i]).fold(0.0, f64::max)).collect())
}

/// The times of the slowest rank, in ascending order.
pub(crate) fn sorted(comm: &Communicator, times: &[f64]) -> Result<Vec<f64>, FabricError> {
    let mut times = slowest(comm, times)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// Over all ranks.
pub(crate) fn total(comm: &Communicator, mine: Wrong) -> Result<Wrong, FabricError> {
    let all = comm.exchange_objects(&(mine.elements, mine.worst.to_bits()))?;
    let of = |(elements, worst)| Wrong { elements, worst: f64::from_bits(worst) };
    Ok(all.into_iter().map(of).fold(Wrong::default(), Wrong::and))
}
