//! The choice between the mirrored and the hierarchical form of a collective.

use std::cell::Cell;

use antiphon_fabric::{Communicator, Nodes};

use super::Kind;
use crate::error::{CollectiveError, Result};

/// What the hierarchical form adds to the number of an algorithm in a signature: ranks that choose differently disagree about the call.
pub(crate) const HIERARCHICAL: u8 = 0x40;

/// The number of bytes from which on a reduce, a reduce-scatter or a broadcast goes by nodes: below, the round that this takes more costs more than it
/// saves.
const WORTH: usize = 1 << 20;

/// How a reduction or a broadcast of ranks on several nodes goes. The result has the same bits in both forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// What a rank posts for all ranks goes to all nodes.
    Mirrored,
    /// The ranks of a node add up first, and the nodes exchange their sums; of a broadcast, each rank of the root's node sends a share.
    Hierarchical,
}

/// The caller's choice.
#[derive(Default)]
struct Preferred(Cell<Option<Form>>);

/// Carries reductions and broadcasts of this communicator out in a form, from now on, or again in the one that is expected to be faster. All ranks choose the
/// same. Where all ranks are on one node there is nothing to choose. An all-reduce that is one-shot is always mirrored.
///
/// # Errors
/// None at present.
pub fn prefer(comm: &Communicator, form: impl Into<Option<Form>>) -> Result<()> {
    preferred(comm)?.0.set(form.into());
    Ok(())
}

fn preferred(comm: &Communicator) -> Result<&Preferred> {
    comm.extension(|_| Ok::<_, CollectiveError>(Preferred::default()))
}

/// The nodes, if a reduction goes by them, of elements of `size` bytes whose unrounded sums have `sum_size`. `suggested` is what its size
/// suggests, if that matters.
#[inline]
pub(crate) fn form(
    comm: &Communicator,
    kind: Kind,
    suggested: Option<Form>,
    size: usize,
    sum_size: impl FnOnce() -> usize,
) -> Result<Option<&Nodes>> {
    let by_default =
        |nodes: &Nodes| suggested != Some(Form::Mirrored) && sends_less(nodes, kind, size, sum_size());
    chosen(comm, by_default)
}

/// The nodes, if a broadcast of this number of bytes goes by them. It sends no fewer bytes so, but from all ranks of the root's node.
#[inline]
pub(crate) fn broadcast_form(comm: &Communicator, root: usize, bytes: usize) -> Result<Option<&Nodes>> {
    chosen(comm, |nodes| nodes.ranks(nodes.of(root)).len() > 1 && suggested(bytes) == Form::Hierarchical)
}

/// The nodes, if there are several, and the caller or the default chooses the hierarchical form.
#[inline]
fn chosen(comm: &Communicator, by_default: impl FnOnce(&Nodes) -> bool) -> Result<Option<&Nodes>> {
    let Some(nodes) = comm.several_nodes() else { return Ok(None) };
    let preferred = preferred(comm)?.0.get();
    let is_chosen = preferred.map_or_else(|| by_default(nodes), |form| form == Form::Hierarchical);
    Ok(is_chosen.then_some(nodes))
}

/// What the size in bytes suggests for a reduce, a reduce-scatter or a broadcast.
pub(crate) fn suggested(bytes: usize) -> Form {
    if bytes < WORTH { Form::Mirrored } else { Form::Hierarchical }
}

/// Whether the hierarchical form sends fewer bytes through the busiest link.
///
/// Of `n` bytes, a mirrored two-shot sends `L·n` from a node of `L` ranks to each other, and a reduction for some of the ranks sends `L` times
/// what is for the other node. In the hierarchical form it is once the sums of what is owned there and the own results, of which each rank
/// owns `n/W`.
pub(crate) fn sends_less(nodes: &Nodes, kind: Kind, size: usize, sum_size: usize) -> bool {
    let most = (0..nodes.count()).map(|node| nodes.ranks(node).len()).max().unwrap_or(1);
    match kind {
        Kind::AllReduce => sum_size + size < nodes.world_size() * size,
        Kind::Reduce(_) | Kind::ReduceScatter => sum_size < most * size,
    }
}
