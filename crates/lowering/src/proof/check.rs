//! Whether one graph is another.

use std::{collections::BTreeSet, fmt};

use super::{
    race,
    roundings::Roundings,
    terms::{Meanings, Term, Terms},
};
use crate::{
    analysis::Analysis,
    decisions::{Choice, Decisions, PlannedCall, Signatures, digest},
    error::{Finding, FindingKind},
    graph::{Graph, Op},
    hash::HashMap,
    ids::{StoreId, ValueId},
    lowered::choice,
    op::{FusedOutput, Kind, ResultMemory},
    sym::SymExpr,
    types::Type,
    verify::verify,
};

/// Why `after` is not shown to compute what `before` does under these decisions; nothing if it is.
///
/// This trusts no rule. From the two graphs alone it works out what every output means, as a function of the inputs, and
/// compares:
///
/// * both graphs make sense ([`verify`](crate::verify));
/// * outputs have equal types, mean the same under the decisions' [`Numerics`](crate::Numerics), and share memory with each
///   other and with inputs as before;
/// * effects, and what is written into the caller's memory, are the same in the same order;
/// * each call stands for calls of the same group that it computes, all of them are stood for, and no group's order is
///   turned round;
/// * slots are large enough, are apart while they are in use, belong to the storages that ask for them, and no two ranks
///   race for one ([`race::detect`]).
pub fn check(before: &Graph, decisions: &Decisions, after: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (which, graph) in [("before", before), ("after", after)] {
        let of_graph = verify(graph).into_iter();
        findings.extend(
            of_graph.map(|finding| Finding { text: format!("{which}: {}", finding.text), ..finding }),
        );
    }
    if !findings.is_empty() {
        return findings;
    }
    if decisions.version != Decisions::VERSION || decisions.graph != digest(before) {
        let text = format!("the decisions of version {} are of another graph", decisions.version);
        return vec![Finding::new(FindingKind::Decisions, text)];
    }
    compare(before, decisions, after)
}

/// The same for decisions that were just made of `before`, which makes sense.
pub(crate) fn prove(before: &Graph, decisions: &Decisions, after: &Graph) -> Vec<Finding> {
    let findings = verify(after);
    if findings.is_empty() { compare(before, decisions, after) } else { findings }
}

fn compare(before: &Graph, decisions: &Decisions, after: &Graph) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut terms = Terms::new(decisions.numerics, &before.syms);
    let (before, after) = (Program::new(before, &mut terms), Program::new(after, &mut terms));
    outputs(&before, &after, &mut findings);
    declarations(before.graph, after.graph, &mut findings);
    effects(&before, &after, &mut findings);
    planned(&after, decisions, &mut findings);
    calls(&before, &after, decisions, &mut terms, &mut findings);
    findings.extend(race::slots(after.graph, decisions));
    findings.extend(race::detect(after.graph, decisions));
    findings
}

/// The program before or after, with what is known of it.
struct Program<'g> {
    graph: &'g Graph,
    analysis: Analysis,
    meanings: Meanings,
    roundings: Roundings,
}

impl<'g> Program<'g> {
    fn new(graph: &'g Graph, terms: &mut Terms) -> Self {
        let analysis = graph.analyse();
        let meanings = terms.of(graph, &analysis);
        Self { graph, analysis, meanings, roundings: Roundings::of(graph) }
    }

    fn term(&self, value: ValueId) -> Option<Term> {
        self.meanings.value(value)
    }

    /// The caller's memory that a value lies in, by the name of its input.
    fn external(&self, value: ValueId) -> Option<&str> {
        let root = self.analysis.root(value)?;
        let op = self.analysis.op_of(self.graph, root)?;
        matches!(op.kind, Kind::Input | Kind::Constant).then(|| self.graph.name(root))
    }
}

fn outputs(before: &Program<'_>, after: &Program<'_>, findings: &mut Vec<Finding>) {
    let (old, new) = (&before.graph.outputs, &after.graph.outputs);
    if old.len() != new.len() {
        let text = format!("{} outputs became {}", old.len(), new.len());
        findings.push(Finding::new(FindingKind::Meaning, text).numbers([old.len() as i64, new.len() as i64]));
        return;
    }
    let mut lying: HashMap<Option<StoreId>, usize> = HashMap::default();
    old.iter().for_each(|x| *lying.entry(before.analysis.store[x.index()]).or_default() += 1);
    for (index, (x, y)) in old.iter().zip(new).enumerate() {
        let (ty, now) = (before.graph.ty(*x), after.graph.ty(*y));
        let same_type =
            ty.dtype == now.dtype && ty.shape == now.shape && ty.is_contiguous() == now.is_contiguous();
        if !same_type || (!ty.is_contiguous() && ty.strides != now.strides) {
            let text = format!("output {index} is {now}, was {ty}");
            findings.push(Finding::new(FindingKind::Meaning, text).value(after.graph.name(*y)));
        }
        if before.term(*x).is_none() || before.term(*x) != after.term(*y) {
            let text = format!("output {index} has another meaning than {}", before.graph.name(*x));
            findings.push(Finding::new(FindingKind::Meaning, text).value(after.graph.name(*y)));
        }
        if let Some(text) = new_rounding(before, after, *x, *y) {
            let text = format!("output {index}: {text}");
            findings.push(Finding::new(FindingKind::Meaning, text).value(after.graph.name(*y)));
        }
        // Where others see the memory, its places count too.
        let is_shared = |store| lying.get(&store).is_some_and(|count| *count > 1);
        let is_seen = before.external(*x).is_some() || is_shared(before.analysis.store[x.index()]);
        if is_seen && ty.offset != now.offset {
            let text = format!("output {index} begins at element {}, began at {}", now.offset, ty.offset);
            findings.push(Finding::new(FindingKind::Meaning, text).value(after.graph.name(*y)));
        }
        if before.external(*x) != after.external(*y) {
            let text =
                format!("output {index} lies in {:?}, lay in {:?}", after.external(*y), before.external(*x));
            findings.push(Finding::new(FindingKind::Meaning, text).value(after.graph.name(*y)));
        }
    }
    let shared = |program: &Program<'_>, outputs: &[ValueId]| -> Vec<usize> {
        let mut first = HashMap::default();
        let stores = outputs.iter().map(|output| program.analysis.store[output.index()]);
        stores.enumerate().map(|(index, store)| *first.entry(store).or_insert(index)).collect()
    };
    if shared(before, old) != shared(after, new) {
        findings.push(Finding::new(FindingKind::Meaning, "other outputs than before share memory"));
    }
}

/// A rounding that a value has now, and which is narrower than those that it had.
fn new_rounding(before: &Program<'_>, after: &Program<'_>, x: ValueId, y: ValueId) -> Option<String> {
    let new = after.roundings.value(y).narrower_than(before.roundings.value(x))?;
    Some(format!("it is rounded to {new}, which {} was not", before.graph.name(x)))
}

/// Inputs, constants, groups and symbols are the program's, not a pass's.
fn declarations(before: &Graph, after: &Graph, findings: &mut Vec<Finding>) {
    let leaves = |graph: &Graph| {
        let leaf = |op: &&Op| matches!(op.kind, Kind::Input | Kind::Constant);
        let name =
            |op: &Op| (op.kind.clone(), graph.name(op.outs[0]).to_owned(), graph.ty(op.outs[0]).clone());
        graph.ops.iter().filter(leaf).map(name).collect::<Vec<_>>()
    };
    let inputs =
        |graph: &Graph| leaves(graph).into_iter().filter(|leaf| leaf.0 == Kind::Input).collect::<Vec<_>>();
    let known = leaves(before);
    if inputs(before) != inputs(after) || !leaves(after).iter().all(|leaf| known.contains(leaf)) {
        findings.push(Finding::new(
            FindingKind::Meaning,
            "the program has other inputs or constants than before",
        ));
    }
    if before.groups != after.groups || before.syms != after.syms {
        findings
            .push(Finding::new(FindingKind::Group, "the program has other groups or symbols than before"));
    }
}

/// Something that the rest of the world sees: what it is, and the values that it is given.
#[derive(PartialEq)]
struct Effect<'g> {
    what: Seen<'g>,
    terms: Vec<Option<Term>>,
}

#[derive(PartialEq)]
enum Seen<'g> {
    /// An operation that is not known, with the types of its operands and results.
    Opaque { kind: &'g Kind, args: Vec<&'g Type>, outs: Vec<&'g Type> },
    /// A write of the caller's memory, which is all of it afterwards.
    Write { input: &'g str, ty: &'g Type },
}

impl fmt::Display for Seen<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Opaque { kind: Kind::Opaque { target, .. }, .. } => f.write_str(target),
            Self::Opaque { .. } => f.write_str("an operation"),
            Self::Write { input, ty } => write!(f, "write {input} {ty}"),
        }
    }
}

/// What the rest of the world sees, in order, with the value whose roundings count.
fn seen<'s>(program: &'s Program<'_>) -> Vec<(Effect<'s>, Vec<ValueId>)> {
    let types = |ids: &[ValueId]| ids.iter().map(|id| program.graph.ty(*id)).collect::<Vec<_>>();
    let mut list = Vec::new();
    for op in &program.graph.ops {
        if matches!(op.kind, Kind::Opaque { .. }) && op.kind.has_effect() {
            let what = Seen::Opaque { kind: &op.kind, args: types(&op.args), outs: types(&op.outs) };
            let memory = op.args.iter().flat_map(|arg| [program.term(*arg), program.meanings.memory(*arg)]);
            list.push((Effect { what, terms: memory.collect() }, op.args.clone()));
        }
        for (index, out) in op.outs.iter().enumerate() {
            // A wait writes what its start wrote.
            let waits = matches!(op.kind, Kind::Wait { .. });
            let writes = matches!(op.kind.result_memory(index), ResultMemory::Write(_)) && !waits;
            if let Some(input) = program.external(*out).filter(|_| writes) {
                let what = Seen::Write { input, ty: program.graph.ty(*out) };
                let terms = vec![program.term(*out), program.meanings.memory(*out)];
                list.push((Effect { what, terms }, vec![*out]));
            }
        }
    }
    list
}

fn effects(before: &Program<'_>, after: &Program<'_>, findings: &mut Vec<Finding>) {
    let (old, new) = (seen(before), seen(after));
    for index in 0..old.len().max(new.len()) {
        let (was, is) = (old.get(index), new.get(index));
        let name = |effect: Option<&(Effect<'_>, Vec<ValueId>)>| {
            effect.map_or("nothing".into(), |(effect, _)| effect.what.to_string())
        };
        let text = match (was, is) {
            (Some((was, x)), Some((is, y))) if was == is => {
                let mut pairs = x.iter().zip(y);
                pairs.find_map(|(x, y)| new_rounding(before, after, *x, *y))
            }
            _ => Some(format!("it is {}, was {}", name(is), name(was))),
        };
        if let Some(text) = text {
            let text = format!("effect {index}: {text}");
            findings.push(Finding::new(FindingKind::Order, text).numbers([index as i64]));
            return;
        }
    }
}

/// The decisions list the calls of groups that the graph makes, in their order and with their groups, ways and signatures.
fn planned(after: &Program<'_>, decisions: &Decisions, findings: &mut Vec<Finding>) {
    let signatures = Signatures::new(after.graph, &after.analysis, &decisions.slots);
    let calls = after.graph.ops.iter().filter_map(|op| Some((op, op.kind.group()?)));
    let made: Vec<(&str, &str, Choice, String)> = calls
        .map(|(op, group)| {
            (op.name.as_str(), group, choice(after.graph, &after.analysis, op), signatures.of(op))
        })
        .collect();
    for index in 0..made.len().max(decisions.calls.len()) {
        let is = made.get(index).map(|(op, group, choice, signature)| (*op, *group, *choice, signature));
        let told = decisions.calls.get(index);
        let told = told.map(|call| (call.op.as_str(), call.group.as_str(), call.choice, &call.signature));
        if is != told {
            let text = format!("call {index} of the decisions is {told:?}, the program's is {is:?}");
            findings.push(Finding::new(FindingKind::Decisions, text).numbers([index as i64]));
            return;
        }
    }
}

/// What a segment of a call gives, and how many elements those are.
type Segment = (Term, Option<SymExpr>);

/// What a call gives, segment by segment, with the numbers of elements.
fn meaning(program: &Program<'_>, op: &Op, terms: &mut Terms) -> Option<Vec<Segment>> {
    let args: Vec<Term> = op.args.iter().map(|arg| program.term(*arg)).collect::<Option<_>>()?;
    let ty = |index: usize| program.graph.ty(op.args[index]);
    Some(match &op.kind {
        Kind::Fused { fused } => {
            vec![(terms.fused(program.graph, fused, &args, ty(0), FusedOutput::Sum), ty(0).numel())]
        }
        kind => {
            let coll = kind.coll()?;
            let segment = |(index, x): (usize, &Term)| {
                let out = program.graph.ty(op.outs[index]);
                (terms.collective(program.graph, coll, *x, ty(index), out), out.numel())
            };
            args.iter().enumerate().map(segment).collect()
        }
    })
}

fn calls(
    before: &Program<'_>,
    after: &Program<'_>,
    decisions: &Decisions,
    terms: &mut Terms,
    findings: &mut Vec<Finding>,
) {
    let planned: HashMap<&str, &PlannedCall> =
        decisions.calls.iter().map(|call| (call.op.as_str(), call)).collect();
    let old: HashMap<&str, (usize, &Op)> =
        before.graph.ops.iter().enumerate().map(|(index, op)| (op.name.as_str(), (index, op))).collect();
    let mut stood_for: BTreeSet<&str> = BTreeSet::new();
    // Opaque operations that communicate are calls of every group.
    let mut everywhere = 0usize;
    let mut order =
        |group: Option<&'_ str>, low: usize, high: usize, groups: &mut HashMap<String, usize>| -> bool {
            // The least place that keeps to the order, for a call that may be thought anywhere between two.
            let place = match group {
                Some(group) => groups.get(group).copied().unwrap_or(0).max(everywhere),
                None => groups.values().copied().fold(everywhere, usize::max),
            };
            let place = place.max(low + 1);
            match group {
                Some(group) => drop(groups.insert(group.to_owned(), place)),
                None => everywhere = place,
            }
            place <= high + 1
        };
    let mut groups: HashMap<String, usize> = HashMap::default();
    for op in after.graph.ops.iter().filter(|op| op.kind.communicates()) {
        let Some(group) = op.kind.group() else {
            match old.get(op.name.as_str()) {
                Some((index, other)) if other.kind == op.kind && order(None, *index, *index, &mut groups) => {
                }
                _ => findings.push(Finding::new(FindingKind::Order, "it is new, or has moved").op(&op.name)),
            }
            continue;
        };
        let own = std::slice::from_ref(&op.name);
        let covers: &[String] = planned.get(op.name.as_str()).map_or(own, |call| &call.covers);
        let covered: Option<Vec<(usize, &Op)>> = covers
            .iter()
            .map(|name| old.get(name.as_str()).copied().filter(|(_, op)| op.kind.group() == Some(group)))
            .collect();
        let Some(covered) = covered.filter(|covered| !covered.is_empty()) else {
            let text = format!("it stands for {covers:?}, which are no calls of {group}");
            findings.push(Finding::new(FindingKind::Order, text).op(&op.name));
            continue;
        };
        if let Some(name) = covers.iter().find(|name| !stood_for.insert(name.as_str())) {
            let text = format!("{name} is stood for twice");
            findings.push(Finding::new(FindingKind::Order, text).op(&op.name));
        }
        let places = || covered.iter().map(|(index, _)| *index);
        let (low, high) = (places().min().unwrap_or(0), places().max().unwrap_or(0));
        if !order(Some(group), low, high, &mut groups) {
            let text = format!("the calls of {group} come in another order");
            findings.push(Finding::new(FindingKind::Order, text).op(&op.name));
        }
        if !is_computed(op, &covered, (before, after), terms) {
            let text = format!("it computes something else than {covers:?}");
            findings.push(Finding::new(FindingKind::Meaning, text).op(&op.name));
        }
    }
    let alone = |name: &str| before.graph.group(name).is_some_and(|group| group.size == 1);
    for op in before.graph.ops.iter().filter(|op| op.kind.communicates()) {
        let is_left = match op.kind.group() {
            Some(group) => !alone(group) && !stood_for.contains(op.name.as_str()),
            None => !after.graph.ops.iter().any(|other| other.name == op.name),
        };
        if is_left {
            findings.push(Finding::new(FindingKind::Order, "nobody makes this call any more").op(&op.name));
        }
    }
}

/// Whether a call gives all that the calls give that it stands for: the same as each of them, all their results one behind the
/// other, or sums of their results.
fn is_computed(
    op: &Op,
    covered: &[(usize, &Op)],
    (before, after): (&Program<'_>, &Program<'_>),
    terms: &mut Terms,
) -> bool {
    let Some(new) = meaning(after, op, terms) else { return false };
    let old: Option<Vec<Vec<Segment>>> = covered.iter().map(|(_, op)| meaning(before, op, terms)).collect();
    let Some(old) = old else { return false };
    let results: BTreeSet<&Segment> = old.iter().flatten().collect();
    if old.iter().all(|old| *old == new) || results == new.iter().collect() {
        return true;
    }
    let parts = |segments: Vec<&Segment>| -> BTreeSet<(Term, Option<SymExpr>)> {
        let parts = segments.into_iter().flat_map(|(term, count)| {
            terms.summands(*term).into_iter().map(|part| (part, count.clone())).collect::<Vec<_>>()
        });
        parts.collect()
    };
    if parts(new.iter().collect()) == parts(old.iter().flatten().collect()) {
        return true;
    }
    // Summands may cancel each other out.
    let ([(sum, count)], dtype) = (&new[..], after.graph.ty(op.args[0]).dtype) else { return false };
    let results: Vec<&Segment> = old.iter().flatten().collect();
    let alike = results.iter().all(|(_, other)| other == count);
    alike && terms.added(dtype, results.iter().map(|(term, _)| *term)) == Some(*sum)
}
