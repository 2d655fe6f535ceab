//! The choice of the algorithm on the host, by size: measured, and equal on all ranks.

use std::{ops::RangeInclusive, time::Instant};

use antiphon_device::ReduceOp;
use antiphon_fabric::{Communicator, Operation, Signature, Written};
use antiphon_operation::Call;
use antiphon_tensor::DType;
use antiphon_tuning::Key;

use super::{Algorithm, AllReduceOptions, run};
use crate::{
    AlgorithmTable,
    algorithm_table::host_key,
    arguments::{CheckedCall, Output},
    error::Result,
};

/// The algorithm for a call of this signature, which names none yet. The first call loads the table. Ranks that disagree
/// about that call must get an error that names the call and not the table, so they first compare the call.
#[inline]
pub(super) fn choose(comm: &Communicator, call: &Signature, bytes: usize) -> Result<Algorithm> {
    let meet_and_load = |comm: &Communicator| {
        // SAFETY: a round without payload.
        unsafe { comm.rounds()? }.exchange(call, Written::nothing(0))?;
        comm.as_part_of(call, || load(comm))
    };
    Ok(comm.extension(meet_and_load)?.algorithm(bytes))
}

/// The algorithm for a size, without a call.
pub(super) fn look_up(comm: &Communicator, bytes: usize) -> Result<Algorithm> {
    Ok(comm.extension(load)?.algorithm(bytes))
}

/// The table of a communicator: kept in it, found there by every call.
fn load(comm: &Communicator) -> Result<AlgorithmTable> {
    let world_size = comm.world_size();
    AlgorithmTable::load(comm, &key(world_size), &names(), &[(0, 0), (two_shot_from(world_size), 1)])
}

/// Measured on machines with 2 and 16 cores (benches/results); `tune` measures other machines.
fn two_shot_from(world_size: usize) -> usize {
    match world_size {
        0..=2 => 32 << 10,
        3..=4 => 4 << 10,
        _ => 1 << 10,
    }
}

fn names() -> [&'static str; 2] {
    Algorithm::ALL.map(Algorithm::name)
}

fn key(world_size: usize) -> Key {
    host_key("all_reduce", world_size)
}

/// Measures both algorithms over `sizes` in bytes and writes the result to the cache file, from which every
/// communicator of this world size that is made on this machine from then on takes it. All ranks call it together.
///
/// # Errors
/// As an all-reduce; [`CollectiveError::Tuning`](crate::CollectiveError::Tuning) when the file cannot be written.
pub fn tune(comm: &Communicator, sizes: RangeInclusive<usize>) -> Result<AlgorithmTable> {
    let mut buffer = vec![1f32; sizes.end() / size_of::<f32>() + 1];
    AlgorithmTable::measure(comm, &key(comm.world_size()), &names(), sizes, |candidate, bytes| {
        let count = (bytes / size_of::<f32>()).max(1);
        let output = Output { data: buffer.as_mut_ptr().cast(), count, dtype: DType::F32 };
        let calls = (1 << 20) / (bytes + 1024) + 1; // about a megabyte, so that small calls are timed in numbers
        let algorithm = AllReduceOptions::from(Algorithm::ALL[candidate]).number();
        let call = Call::new(Operation::AllReduce).with_op(ReduceOp::Max).with_algorithm(algorithm);
        let ranks = (comm.rank(), comm.world_size());
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            run(comm, &CheckedCall::new(&call, ranks, Some(output.as_input()), Some(output))?)?;
        }
        Ok(Some(start.elapsed() / calls as u32))
    })
}
