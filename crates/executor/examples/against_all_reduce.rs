//! A plan beside the hand-written two-shot all-reduce, in the same run, size by size in turn.
//!
//! `cargo run --release -p antiphon-executor --example against_all_reduce` (ranks are threads; 2 of them, or as many as the
//! first argument says; the plan is the two-shot one, or with `packets` behind it the one-shot one with packets). Times are
//! medians over rounds of the slowest rank, in microseconds.

#[path = "../tests/plans/mod.rs"]
mod plans;

use std::time::Instant;

use antiphon_collectives::{Collectives, ReduceOp as Op, all_reduce::Algorithm};
use antiphon_executor::{LoadedPlan, Options};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_plan::{
    ReduceOp,
    verify::{Options as Proof, VerifiedPlan},
};

type Failure = Box<dyn std::error::Error>;

/// Rounds, in each of which both take part.
const ROUNDS: usize = 21;

/// Microseconds of a call, by the slowest rank.
fn time(
    comm: &Communicator,
    calls: u32,
    mut call: impl FnMut() -> Result<(), Failure>,
) -> Result<f64, Failure> {
    comm.barrier()?;
    let start = Instant::now();
    (0..calls).try_for_each(|_| call())?;
    let mine = start.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
    Ok(comm.exchange_objects(&mine)?.into_iter().fold(0.0, f64::max))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(comm: &Communicator, proved: &VerifiedPlan) -> Result<(), Failure> {
    let mut plan = LoadedPlan::load(comm, proved, Options::default())?;
    if comm.rank() == 0 {
        println!("{:>10} {:>10} {:>12} {:>12} {:>6}", "bytes", "tensors", "plan µs", "by hand µs", "ratio");
    }
    for bytes in [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20] {
        let buffers = [comm.symmetric(bytes)?, comm.symmetric(bytes)?];
        let (mut input, mut output) = (vec![1f32; bytes / 4], vec![0f32; bytes / 4]);
        for symmetric in [false, true] {
            let (from, to): (&[f32], &mut [f32]) = match symmetric {
                // SAFETY: the others touch this rank's copies only within the calls.
                true => unsafe {
                    let from = buffers[0].slice_mut::<f32>(comm.rank());
                    from.copy_from_slice(&input);
                    (from, buffers[1].slice_mut(comm.rank()))
                },
                false => (&mut input, &mut output),
            };
            let calls = (32 << 20 >> bytes.ilog2()).clamp(1, 50);
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                ours.push(time(comm, calls, || Ok(plan.execute(comm, from, &mut *to)?))?);
                assert!(to.iter().all(|&sum| sum == comm.world_size() as f32));
                let by_hand = || Ok(comm.all_reduce_with(from, &mut *to, Op::Sum, Algorithm::TwoShot)?);
                theirs.push(time(comm, calls, by_hand)?);
            }
            let (ours, theirs) = (median(ours), median(theirs));
            if comm.rank() == 0 {
                let tensors = if symmetric { "symmetric" } else { "private" };
                println!("{bytes:>10} {tensors:>10} {ours:>12.1} {theirs:>12.1} {:>6.2}", ours / theirs);
            }
        }
        buffers.into_iter().try_for_each(|buffer| comm.free(buffer))?;
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let ranks = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let plan = match std::env::args().nth(2).as_deref() {
        Some("packets") => plans::packets(ranks, ReduceOp::Sum, false)?,
        None => plans::two_shot(ranks, ReduceOp::Sum, false)?,
        Some(other) => return Err(format!("no plan {other:?}").into()),
    };
    let proved = VerifiedPlan::new(plan, &Proof::default()).map_err(|report| report.to_string())?;
    LocalWorld::run(ranks as usize, |comm| measure(&comm, &proved).unwrap_or_else(|error| panic!("{error}")));
    Ok(())
}
