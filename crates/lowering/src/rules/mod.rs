//! The rewrites, a file for each rule: when the rule applies, what it does, and why it is refused where it might have applied.
//!
//! | rule | what it does |
//! | --- | --- |
//! | `duplicate` | the same collective of the same value is made once |
//! | `world_of_one` | a collective of one rank is a copy |
//! | `merge` | Σa + Σb becomes Σ(a + b), if no other operation uses the sums |
//! | `fuse` | a sum, the residual that is added, the norm and its quantisation become one call |
//! | `bucket` | neighbouring calls of one kind become one of several tensors, where overlap is asked for |
//! | [`sync`] | a call that no computation runs beside is made in stream order, and its wait goes |
//! | [`realize`] | tensors lie where peers reach them, and share that memory |
//! | `schedule` | starts come early and waits late, where that is asked for |

mod bucket;
pub(crate) mod context;
mod duplicate;
pub(crate) mod fuse;
mod merge;
mod numbering;
pub mod realize;
mod schedule;
pub mod sync;
mod world_of_one;

use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    hash::{HashMap, HashSet},
    ids::{OpId, ValueId},
    op::{Coll, Kind, View},
    types::Type,
};
use context::Context;

type Rule = fn(&mut Context<'_>);

const RULES: [(&str, Rule); 8] = [
    ("world_of_one", world_of_one::apply),
    ("duplicate", duplicate::apply),
    ("merge", merge::apply),
    ("fuse", fuse::apply),
    ("schedule", schedule::apply),
    ("bucket", bucket::apply),
    ("sync", sync::apply),
    ("realize", realize::apply),
];

/// Applies all rules to the graph, but for those after which values would have to be there before they are computed.
pub(crate) fn apply(cx: &mut Context<'_>, graph: &Graph) {
    let mut without = Vec::new();
    while let Err((rule, op)) = try_all(cx, &without) {
        cx.start_again(graph);
        without.push((rule, op));
    }
    for (rule, op) in without {
        cx.refuse(rule, &op, "values would have to be there before they are computed");
    }
}

/// Applies all rules but some. The error is a rule that goes against the order, and what it is about.
fn try_all(cx: &mut Context<'_>, without: &[(&str, String)]) -> Result<(), (&'static str, String)> {
    for (name, rule) in RULES.into_iter().filter(|(name, _)| without.iter().all(|(other, _)| other != name)) {
        let rewrites = cx.rewrites.len();
        rule(cx);
        if cx.rewrites.len() == rewrites {
            continue;
        }
        cx.changed();
        cx.graph.sort().map_err(|stuck| (name, stuck.first().cloned().unwrap_or_default()))?;
        cx.graph.remove_dead();
        fuse::drop_unused_outputs(cx);
    }
    Ok(())
}

/// The most operations that a rule simulates in search of a faster program: each trial simulates all operations of the graph.
const MOST_SIMULATED: usize = 1 << 21;

/// How many changes of a graph a rule may try.
fn most_trials(graph: &Graph) -> usize {
    MOST_SIMULATED / graph.ops.len().max(1)
}

/// A collective that is started, of one tensor, and waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub(crate) start: OpId,
    pub(crate) wait: OpId,
    /// The wait's result for the start's.
    pub(crate) ready: ValueId,
}

/// The collective that a start begins, if it has one tensor, for which one operation waits, and nobody else uses what is in
/// flight.
pub(crate) fn flight(graph: &Graph, analysis: &Analysis, start: OpId) -> Option<(Flight, Coll)> {
    let op = graph.op(start);
    let Kind::Start { coll, .. } = &op.kind else { return None };
    let ([_], [out]) = (&op.args[..], &op.outs[..]) else { return None };
    let [wait] = analysis.uses(*out)[..] else { return None };
    let waits = graph.op(wait);
    if !matches!(waits.kind, Kind::Wait { .. }) {
        return None;
    }
    let at = waits.args.iter().position(|arg| arg == out)?;
    Some((Flight { start, wait, ready: waits.outs[at] }, coll.clone()))
}

/// Removes collectives with their waits, and inserts operations, each before the one at its place.
pub(crate) fn replace(graph: &mut Graph, flights: &[Flight], new: Vec<(OpId, Op)>) {
    if flights.is_empty() && new.is_empty() {
        return;
    }
    for Flight { start, wait, ready } in flights {
        let Kind::Start { token, .. } = graph.op(*start).kind else { continue };
        let waits = &mut graph.ops[wait.index()];
        if let Some(at) = waits.outs.iter().position(|out| out == ready) {
            waits.outs.remove(at);
            waits.args.remove(at);
        }
        if let Kind::Wait { tokens } = &mut waits.kind {
            tokens.retain(|other| *other != token);
        }
    }
    let gone: HashSet<usize> = flights.iter().map(|flight| flight.start.index()).collect();
    let mut at: HashMap<usize, Vec<Op>> = HashMap::default();
    new.into_iter().for_each(|(place, op)| at.entry(place.index()).or_default().push(op));
    for (index, op) in std::mem::take(&mut graph.ops).into_iter().enumerate() {
        graph.ops.extend(at.remove(&index).unwrap_or_default());
        let waits_for_nothing = matches!(&op.kind, Kind::Wait { tokens } if tokens.is_empty());
        if !gone.contains(&index) && !waits_for_nothing {
            graph.ops.push(op);
        }
    }
}

/// The value behind reshapes that keep rows, and copies into row-major order.
pub(crate) fn behind_reshapes(graph: &Graph, analysis: &Analysis, mut value: ValueId) -> ValueId {
    while let Some(op) = analysis.op_of(graph, value) {
        let is_reshape = matches!(op.kind, Kind::View { view: View::Reshape } | Kind::Copy);
        if !is_reshape || !keeps_rows(graph.ty(op.args[0]), graph.ty(value)) {
            break;
        }
        value = op.args[0];
    }
    value
}

/// Whether a reshape leaves rows as they are.
pub(crate) fn keeps_rows(from: &Type, to: &Type) -> bool {
    from.last() == to.last() && from.numel() == to.numel()
}
