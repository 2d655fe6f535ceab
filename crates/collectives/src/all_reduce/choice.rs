//! The choice of the algorithm on the host, by size: measured, and equal on all ranks.

use std::{ops::RangeInclusive, time::Instant};

use antiphon_device::ReduceOp;
use antiphon_fabric::{Communicator, Signature, Written};
use antiphon_operation::Call;
use antiphon_tensor::DType;
use antiphon_tuning::Key;

use super::{Algorithm, AllReduceOptions, run};
use crate::{
    AlgorithmTable,
    algorithm_table::host_key,
    arguments::{CheckedCall, Output},
    error::Result,
    hierarchical::{Form, prefer},
};

/// The algorithm for a call of this signature, which names none yet, and its form where ranks are on several nodes. The first call loads the
/// table. Ranks that disagree about that call must get an error that names the call and not the table, so they first compare the call.
#[inline]
pub(super) fn choose(
    comm: &Communicator,
    call: &Signature,
    bytes: usize,
) -> Result<(Algorithm, Option<Form>)> {
    let meet_and_load = |comm: &Communicator| {
        // SAFETY: a round without payload.
        unsafe { comm.rounds()? }.exchange(call, Written::nothing(0))?;
        comm.as_part_of(call, || load(comm))
    };
    Ok(CANDIDATES[comm.extension(meet_and_load)?.choose(bytes)])
}

/// The algorithm for a size, without a call.
pub(super) fn look_up(comm: &Communicator, bytes: usize) -> Result<Algorithm> {
    Ok(CANDIDATES[comm.extension(load)?.choose(bytes)].0)
}

/// What a table chooses from. The last one is for several nodes only, which have tables of their own.
const CANDIDATES: [(Algorithm, Option<Form>); 3] = [
    (Algorithm::OneShot, None),
    (Algorithm::TwoShot, Some(Form::Mirrored)),
    (Algorithm::TwoShot, Some(Form::Hierarchical)),
];
const NAMES: [&str; 3] = ["one-shot", "two-shot", "two-shot, hierarchical"];

/// The candidates of a communicator.
fn names(comm: &Communicator) -> &'static [&'static str] {
    if comm.several_nodes().is_some() { &NAMES } else { &NAMES[..2] }
}

/// The table of a communicator: kept in it, found there by every call.
fn load(comm: &Communicator) -> Result<AlgorithmTable> {
    let thresholds = match comm.several_nodes() {
        None => vec![(0, 0), (two_shot_from(comm.world_size()), 1)],
        // Two ranks send each other as much either way, and a one-shot has fewer rounds.
        Some(nodes) if nodes.world_size() == 2 => vec![(0, 0)],
        Some(_) => vec![(0, 0), (TWO_SHOT_FROM, 1), (HIERARCHICAL_FROM, 2)],
    };
    AlgorithmTable::load(comm, &key(comm), names(comm), &thresholds)
}

/// The same of several nodes: below, a one-shot is faster, as it has one round. Measured on two nodes of two ranks over TCP (benches/results).
const TWO_SHOT_FROM: usize = 128 << 10;
/// The number of bytes from which on a two-shot goes by nodes: below, the round that this takes more costs more than it saves.
const HIERARCHICAL_FROM: usize = 512 << 10;

/// Measured on machines with 2 and 16 cores (benches/results); `tune` measures other machines.
fn two_shot_from(world_size: usize) -> usize {
    match world_size {
        0..=2 => 32 << 10,
        3..=4 => 4 << 10,
        _ => 1 << 10,
    }
}

fn key(comm: &Communicator) -> Key {
    let key = host_key("all_reduce", comm.world_size());
    match comm.several_nodes() {
        None => key,
        Some(nodes) => key.on_nodes((0..nodes.count()).map(|node| nodes.ranks(node).len())),
    }
}

/// Measures the algorithms, on several nodes with both forms of the two-shot, over `sizes` in bytes and writes the result to the cache file, from which every
/// communicator of this world size and these nodes that is made on this machine from then on takes it. All ranks call it together.
///
/// # Errors
/// As an all-reduce; [`CollectiveError::Tuning`](crate::CollectiveError::Tuning) when the file cannot be written.
pub fn tune(comm: &Communicator, sizes: RangeInclusive<usize>) -> Result<AlgorithmTable> {
    let mut buffer = vec![1f32; sizes.end() / size_of::<f32>() + 1];
    let table = AlgorithmTable::measure(comm, &key(comm), names(comm), sizes, |candidate, bytes| {
        let (algorithm, form) = CANDIDATES[candidate];
        let count = (bytes / size_of::<f32>()).max(1);
        let output = Output { data: buffer.as_mut_ptr().cast(), count, dtype: DType::F32 };
        let calls = (1 << 20) / (bytes + 1024) + 1; // about a megabyte, so that small calls are timed in numbers
        let algorithm = AllReduceOptions::from(algorithm).number();
        let call = Call::all_reduce(ReduceOp::Max).with_algorithm(algorithm);
        let ranks = (comm.rank(), comm.world_size());
        prefer(comm, form)?;
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            run(comm, &CheckedCall::new(&call, ranks, Some(output.as_input()), Some(output))?)?;
        }
        Ok(Some(start.elapsed() / calls as u32))
    });
    prefer(comm, None)?;
    table
}
