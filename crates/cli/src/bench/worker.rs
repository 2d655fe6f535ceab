//! The work of a rank: it verifies, times and verifies again, case by case.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use antiphon::{
    collectives::{CollectiveError, Communicator, all_reduce::algorithm_for, mixed::MixedHandler},
    fabric::FabricError,
    tensor::{Element, with_dtype},
};

use super::{
    Args, Buffers,
    case::{Case, Collective},
    engine, moe,
    pattern::{self, Reference, Wrong},
};
use crate::report::{Row, algbw_gbs};
use crate::{ExitStatus, FAILURE, SUCCESS};

/// Batches of calls; their median is the time.
const BATCHES: usize = 11;
/// Calls before the timing, which also tell how many make a batch.
const WARM_UP: u32 = 3;
const MOST_ITERATIONS: f64 = 100_000.0;

pub(super) fn execute(args: &Args) -> ExitStatus {
    match measure_all(args) {
        Ok(()) => SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            FAILURE
        }
    }
}

fn measure_all(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    let comm = Communicator::from_env()?;
    if args.cases().iter().any(|case| case.collective == Collective::SEND_RECV) && comm.world_size() < 2 {
        return Err("send-recv needs at least 2 ranks, there is 1".into());
    }
    for case in args.cases() {
        let row = match case.collective {
            Collective::Engine => engine::measure(&comm, case, args)?,
            of if of.is_of_experts() => with_dtype!(case.dtype, T => moe::measure::<T>(&comm, case, args)?),
            _ => with_dtype!(case.dtype, T => measure::<T>(&comm, case, args)?),
        };
        if comm.rank() == 0 {
            let line = serde_json::to_string(&row).expect("a row is plain data");
            // When no process reads any more, the launcher has ended, and this process ends too.
            let _ = writeln!(io::stdout(), "{line}");
        }
    }
    Ok(())
}

fn measure<T: Element>(comm: &Communicator, case: Case, args: &Args) -> Result<Row, CollectiveError> {
    let (input_count, output_count) = case.counts(comm.rank(), comm.world_size());
    let input = pattern::input::<T>(case.op, comm.rank(), input_count);
    let output = poisoned::<T>(output_count);
    match args.buffers {
        Buffers::Private => measure_with(comm, case, args, &input, &mut { output }),
        Buffers::Symmetric => {
            let [shared_input, shared_output] =
                [input_count, output_count].map(|count| comm.create_shared_buffer(count * case.dtype.size()));
            let (shared_input, shared_output) = (shared_input?, shared_output?);
            // SAFETY: other ranks touch this rank's copies only within the collectives.
            let (in_slice, out_slice) =
                unsafe { (shared_input.slice_mut(comm.rank()), shared_output.slice_mut(comm.rank())) };
            in_slice.copy_from_slice(&input);
            out_slice.copy_from_slice(&output);
            let row = measure_with(comm, case, args, in_slice, out_slice)?;
            comm.free_shared_buffer(shared_input)?;
            comm.free_shared_buffer(shared_output)?;
            Ok(row)
        }
    }
}

fn measure_with<T: Element>(
    comm: &Communicator,
    case: Case,
    args: &Args,
    input: &[T],
    output: &mut [T],
) -> Result<Row, CollectiveError> {
    let reference = Reference::new::<T>(comm, case);
    let handler = match case.collective {
        Collective::Mixed(mixed) => Some(MixedHandler::new(comm, mixed.shape.layout(comm.rank()))?),
        _ => None,
    };
    let run = |output: &mut [T]| case.run(comm, handler.as_ref(), input, output);
    run(output)?;
    let first = reference.compare(output);
    let times = time(comm, args, || run(output))?;
    let last = reference.compare(output);
    let wrong = total(comm, &[first, last])?;
    let count = input.len().max(output.len());
    let bytes = |count: usize| count * case.dtype.size();
    let algorithm = match (case.collective, case.algorithm, handler) {
        (Collective::ALL_REDUCE, Some(algorithm), _) => algorithm.name().to_owned(),
        (Collective::ALL_REDUCE, None, _) => algorithm_for(comm, bytes(count))?.name().to_owned(),
        (Collective::Mixed(mixed), _, Some(handler)) => {
            mixed.name(case.mode, || handler.select(comm, mixed.op, bytes(input.len().min(output.len()))))?
        }
        _ => "direct".to_owned(),
    };
    Ok(row(comm, case, algorithm, count, &times, wrong))
}

/// The times of a call in batches, of the slowest rank, ascending. All ranks do it together.
pub(super) fn time<E: From<FabricError>>(
    comm: &Communicator,
    args: &Args,
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
    let one = slowest(comm, &[batch(WARM_UP)?])?[0];
    let calls = args.iterations.unwrap_or_else(|| iterations(args.seconds, one)).max(1);
    let times: Vec<f64> = (0..BATCHES).map(|_| batch(calls)).collect::<Result<_, _>>()?;
    let mut times = slowest(comm, &times)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// A value in every element that is no result (but, in 8 bits, of some sums).
pub(super) fn poisoned<T: Element>(count: usize) -> Vec<T> {
    vec![T::from_f64(if T::DTYPE.is_float() { f64::NAN } else { 113.0 }); count]
}

fn iterations(budget: Duration, one_us: f64) -> u32 {
    (budget.as_secs_f64() * 1e6 / BATCHES as f64 / one_us.max(0.01)).clamp(1.0, MOST_ITERATIONS) as u32
}

/// The largest of every rank's times, one by one.
pub(super) fn slowest(comm: &Communicator, times: &[f64]) -> Result<Vec<f64>, FabricError> {
    let all = comm.exchange_objects(&times.to_vec())?;
    Ok((0..times.len()).map(|i| all.iter().map(|theirs| theirs[i]).fold(0.0, f64::max)).collect())
}

/// Over all ranks and checks.
pub(super) fn total(comm: &Communicator, checks: &[Wrong]) -> Result<Wrong, FabricError> {
    let mine: Vec<(u64, u64)> = checks.iter().map(|w| (w.elements, w.worst.to_bits())).collect();
    let mut sum = Wrong::default();
    for (elements, worst) in comm.exchange_objects(&mine)?.into_iter().flatten() {
        sum.elements += elements;
        sum.worst = sum.worst.max(f64::from_bits(worst));
    }
    Ok(sum)
}

/// A row of sorted times.
pub(super) fn row(
    comm: &Communicator,
    case: Case,
    algorithm: String,
    count: usize,
    times: &[f64],
    wrong: Wrong,
) -> Row {
    let ranks = comm.world_size();
    let bytes = (count * case.dtype.size()) as u64;
    let latency_us = times[times.len() / 2];
    let algbw_gbs = algbw_gbs(bytes, latency_us);
    Row {
        collective: case.collective.name().into(),
        bytes,
        count: count as u64,
        dtype: case.dtype.name().into(),
        op: case.collective.reduces().then(|| case.op.name().into()),
        algorithm,
        ranks,
        latency_us,
        min_us: times[0],
        max_us: times[times.len() - 1],
        algbw_gbs,
        busbw_gbs: algbw_gbs * case.collective.bus_factor(ranks).unwrap_or(1.0),
        errors: wrong.elements,
        max_error: wrong.worst,
        gpu: None,
    }
}
