//! The collectives that move data between ranks, with or without reducing it on the way.
//!
//! All are pieces of one picture: rank `r` has a row of blocks, one for each rank.
//!
//! | operation | who contributes | who gets what |
//! | --- | --- | --- |
//! | all-gather | every rank a block | every rank all blocks |
//! | gather | every rank a block | the root all blocks |
//! | broadcast | the root a block | every rank that block |
//! | scatter | the root a row | rank `r` the root's `r`-th block |
//! | all-to-all | every rank a row | rank `r` everybody's `r`-th block |
//! | reduce-scatter | every rank a row | rank `r` the reduction of everybody's `r`-th block |
//! | reduce | every rank a block | the root the reduction of all blocks |
//!
//! Every rank takes part in every round, also where it neither gives nor gets: that is how ranks that disagree find
//! out, and how a rank that is gone is noticed by all.

pub(crate) mod cuda;
mod host;
mod uneven;

use std::cell::RefMut;

use antiphon_device::{ReduceOp, host::reduce::Reducer};
use antiphon_fabric::{Communicator, Operation, Rounds, Signature};
use antiphon_tensor::DType;

pub(crate) use uneven::all_to_all_v;

use crate::{
    arguments::{Input, Output, block, reducible},
    error::{CollectiveError, Result},
};

/// The rounds for one of this module's operations.
fn rounds(comm: &Communicator) -> Result<RefMut<'_, Rounds>> {
    // SAFETY: every rank runs the operation that the signature names, in `host`, which posts the same layouts everywhere.
    Ok(unsafe { comm.rounds()? })
}

fn signature(
    operation: Operation,
    dtype: DType,
    count: usize,
    root: Option<usize>,
    reduce: Option<ReduceOp>,
) -> Signature {
    let detail = root.map_or(0, |root| root as u32);
    Signature { dtype: Some(dtype), count: count as u64, detail, reduce, ..Signature::new(operation) }
}

pub(crate) fn all_gather(comm: &Communicator, input: Input, output: Output) -> Result<()> {
    const OPERATION: Operation = Operation::AllGather;
    let count = block(OPERATION, &input, &output, comm.world_size())?;
    let signature = signature(OPERATION, input.dtype, count, None, None);
    Ok(host::all_gather(&mut *rounds(comm)?, &signature, &input, &output)?)
}

/// In place: the contribution of this rank is its own block of the buffer.
pub(crate) fn all_gather_in_place(comm: &Communicator, buffer: Output) -> Result<()> {
    let count = Operation::AllGather.part("buffer", buffer.count, comm.world_size())?;
    all_gather(comm, own_block(comm, &buffer, count).as_input(), buffer)
}

/// This rank's block of a row.
fn own_block(comm: &Communicator, row: &Output, count: usize) -> Output {
    let offset = comm.rank() * count * row.dtype.size();
    // SAFETY: the row holds one block of `count` elements for each rank.
    Output { data: unsafe { row.data.add(offset) }, count, dtype: row.dtype }
}

pub(crate) fn reduce_scatter(comm: &Communicator, input: Input, output: Output, op: ReduceOp) -> Result<()> {
    const OPERATION: Operation = Operation::ReduceScatter;
    let count = block(OPERATION, &input, &output, comm.world_size())?;
    reducible(OPERATION, input.dtype, op)?;
    let signature = signature(OPERATION, input.dtype, count, None, Some(op));
    let reducer = Reducer::new(input.dtype, op);
    Ok(host::reduce_scatter(&mut *rounds(comm)?, &signature, &input, &output, &reducer)?)
}

/// In place: the result is in this rank's own block of the buffer; the others are left as they are.
pub(crate) fn reduce_scatter_in_place(comm: &Communicator, buffer: Output, op: ReduceOp) -> Result<()> {
    let count = Operation::ReduceScatter.part("buffer", buffer.count, comm.world_size())?;
    reduce_scatter(comm, buffer.as_input(), own_block(comm, &buffer, count), op)
}

pub(crate) fn all_to_all(comm: &Communicator, input: Input, output: Output) -> Result<()> {
    const OPERATION: Operation = Operation::AllToAll;
    let count = block(OPERATION, &input, &output, comm.world_size())?;
    let signature = signature(OPERATION, input.dtype, count, None, None);
    Ok(host::all_to_all(&mut *rounds(comm)?, &signature, &input, &output)?)
}

/// Broadcast from the root's `input` to everybody's `output`; in place when they are the same.
pub(crate) fn broadcast(
    comm: &Communicator,
    input: Option<Input>,
    output: Output,
    root: usize,
) -> Result<()> {
    const OPERATION: Operation = Operation::Broadcast;
    comm.check_rank(root, "root")?;
    let input = match input.filter(|_| comm.rank() == root) {
        Some(input) => {
            block(OPERATION, &input, &output, comm.world_size())?;
            Some(input)
        }
        None => root_only(comm, OPERATION, "input", root, None)?,
    };
    let signature = signature(OPERATION, output.dtype, output.count, Some(root), None);
    Ok(host::broadcast(&mut *rounds(comm)?, &signature, input.as_ref(), &output, root)?)
}

/// What the root must pass and the others need not.
fn root_only<T>(
    comm: &Communicator,
    operation: Operation,
    which: &'static str,
    root: usize,
    tensor: Option<T>,
) -> Result<Option<T>> {
    if comm.rank() != root {
        return Ok(None);
    }
    let missing = CollectiveError::RootArgument { operation: operation.name(), which, rank: root };
    tensor.map(Some).ok_or(missing)
}

pub(crate) fn reduce(
    comm: &Communicator,
    input: Input,
    output: Option<Output>,
    op: ReduceOp,
    root: usize,
) -> Result<()> {
    const OPERATION: Operation = Operation::Reduce;
    comm.check_rank(root, "root")?;
    reducible(OPERATION, input.dtype, op)?;
    let output = root_only(comm, OPERATION, "output", root, output)?;
    if let Some(output) = &output {
        block(OPERATION, &input, output, comm.world_size())?;
    }
    let signature = signature(OPERATION, input.dtype, input.count, Some(root), Some(op));
    let reducer = Reducer::new(input.dtype, op);
    Ok(host::reduce(&mut *rounds(comm)?, &signature, &input, output.as_ref(), &reducer)?)
}

pub(crate) fn gather(comm: &Communicator, input: Input, output: Option<Output>, root: usize) -> Result<()> {
    const OPERATION: Operation = Operation::Gather;
    comm.check_rank(root, "root")?;
    let output = root_only(comm, OPERATION, "output", root, output)?;
    if let Some(output) = &output {
        block(OPERATION, &input, output, comm.world_size())?;
    }
    let signature = signature(OPERATION, input.dtype, input.count, Some(root), None);
    Ok(host::gather(&mut *rounds(comm)?, &signature, &input, output.as_ref())?)
}

pub(crate) fn scatter(comm: &Communicator, input: Option<Input>, output: Output, root: usize) -> Result<()> {
    const OPERATION: Operation = Operation::Scatter;
    comm.check_rank(root, "root")?;
    let input = root_only(comm, OPERATION, "input", root, input)?;
    if let Some(input) = &input {
        block(OPERATION, input, &output, comm.world_size())?;
    }
    let signature = signature(OPERATION, output.dtype, output.count, Some(root), None);
    Ok(host::scatter(&mut *rounds(comm)?, &signature, input.as_ref(), &output, root)?)
}
