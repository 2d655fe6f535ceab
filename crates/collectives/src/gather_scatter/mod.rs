//! The collectives that move data between ranks, with or without reducing it on the way.
//!
//! They have one model: a row consists of blocks, one for each rank.
//!
//! | operation | contributions | results |
//! | --- | --- | --- |
//! | all-gather | every rank a block | every rank gets all blocks |
//! | gather | every rank a block | the root gets all blocks |
//! | broadcast | the root a block | every rank gets this block |
//! | scatter | the root a row | rank `r` gets the root's `r`-th block |
//! | all-to-all | every rank a row | rank `r` gets all ranks' `r`-th blocks |
//! | reduce-scatter | every rank a row | rank `r` gets the reduction of all ranks' `r`-th blocks |
//! | reduce | every rank a block | the root gets the reduction of all blocks |
//!
//! All-gather, reduce-scatter and all-to-all also have a form for parts of uneven lengths, which a call lists: `…_v`.
//!
//! Between nodes each byte goes to the nodes that need it, once. Reductions and broadcasts of some size go [by nodes](crate::hierarchical).
//!
//! Every rank takes part in every round, even if it neither sends nor receives data. So all ranks notice calls that disagree and
//! lost ranks.

mod blocks;
mod lists;
mod messages;
mod parts;

use antiphon_device::host::reduce::Reducer;
use antiphon_fabric::{Communicator, Nodes, Operation};
use antiphon_operation::Extent;

pub(crate) use blocks::cuda;
pub(crate) use messages::Messaging;
#[cfg(test)]
pub(crate) use {
    lists::{MovingLists, ReducingLists},
    parts::ReducingParts,
};

use blocks::host;
use parts::uneven;

use crate::{
    arguments::CheckedCall,
    error::Result,
    hierarchical::{self, Kind},
};

/// Carries out a call on host memory.
pub(crate) fn run(comm: &Communicator, call: &CheckedCall<'_>) -> Result<()> {
    // SAFETY: every rank runs the operation that the signature names, which posts the same layouts everywhere: two counts for
    // each rank where they must be agreed on, and then parts of one length.
    let mut rounds = unsafe { comm.rounds()? };
    let row = call.signature.operation.row();
    let longest = match (row.input, row.output) {
        (Extent::Parts, Extent::Parts) => match uneven::agree_on_counts(&mut rounds, call)? {
            Some(longest) => longest,
            None => return Ok(()), // the pieces came along
        },
        _ => call.input_layout().longest(),
    };
    if call.signature.operation == Operation::Broadcast
        && let Some(nodes) = hierarchical::broadcast_form(comm, call.call.root, longest * call.dtype.size())?
    {
        return Ok(host::broadcast_by_nodes(&mut rounds, call, longest, nodes)?);
    }
    match hierarchical_form(comm, call, longest)? {
        Some((kind, nodes)) => host::run_by_nodes(comm, &mut rounds, call, longest, kind, nodes),
        None => Ok(host::run(comm, &mut rounds, call, longest)?),
    }
}

/// The nodes, if a reduction goes by them.
#[inline]
fn hierarchical_form<'c>(
    comm: &'c Communicator,
    call: &CheckedCall<'_>,
    longest: usize,
) -> Result<Option<(Kind, &'c Nodes)>> {
    let row = call.signature.operation.row();
    if !row.reduces || comm.several_nodes().is_none() {
        return Ok(None);
    }
    let (kind, pieces) = match row.root {
        Some(_) => (Kind::Reduce(call.call.root), 1),
        None => (Kind::ReduceScatter, call.world_size),
    };
    let size = call.dtype.size();
    let sum_size = || Reducer::new(call.dtype, call.call.op).accumulator_size();
    let suggested = hierarchical::suggested(longest * pieces * size);
    let nodes = hierarchical::form(comm, kind, Some(suggested), size, sum_size)?;
    Ok(nodes.map(|nodes| (kind, nodes)))
}
