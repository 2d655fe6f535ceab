//! The rewriting of a graph by all rules.

use std::{fmt, rc::Rc};

use serde::{Deserialize, Serialize};

use crate::{
    analysis::Analysis,
    check::{choice, prove},
    costs::{Costs, Device, Tables},
    error::Finding,
    graph::{Graph, Names},
    hash::HashMap,
    plan::{Plan, PlannedCall, Refusal, Rewrite, Signatures, Slot},
    rules,
    terms::{Term, Terms},
    verify::verify,
};

/// How much a rewrite may change what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Numerics {
    /// Every rounding stays where it was. Only the order in which a row is summed is free.
    Same,
    /// Roundings may be dropped, or come in another order; the report says by how much a result may differ.
    #[default]
    Close,
}

/// When tensors are placed in symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Realize {
    /// Where that was measured to be faster: nowhere, neither on the host nor between H200s.
    #[default]
    Measured,
    /// Wherever it is possible.
    Always,
    /// Nowhere.
    Never,
}

/// Where a graph runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct World {
    /// On what.
    pub device: Device,
    /// The groups whose calls may be changed; all of them unless given.
    pub groups: Option<Vec<String>>,
}

/// The options of [`lower`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How much a rewrite may change what is computed.
    pub numerics: Numerics,
    /// Whether sums are fused with residuals, norms and quantisation.
    pub fuse: bool,
    /// Whether a sum of sums becomes one.
    pub merge: bool,
    /// When tensors are placed in symmetric memory.
    pub realize: Realize,
    /// Whether collectives run beside computation: the rules `bucket` and `schedule`.
    pub overlap: bool,
    /// Which measurements [`Costs::new`] takes. [`lower`] itself is given costs.
    pub tables: Tables,
    /// The most bytes by which an overlapped program's live tensors may exceed those of the program before.
    pub overlap_bytes: u64,
    /// The most bytes that a tensor of unknown size may take where peers reach it.
    pub max_slot_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        let (numerics, realize) = Default::default();
        let (overlap_bytes, max_slot_bytes) = (1 << 30, 64 << 20);
        Self {
            numerics,
            fuse: true,
            merge: true,
            realize,
            overlap: false,
            tables: Tables::BuiltIn,
            overlap_bytes,
            max_slot_bytes,
        }
    }
}

/// The result of [`lower`].
#[derive(Debug, Clone, PartialEq)]
pub struct Lowered {
    /// The rewritten graph; the original, if the rewritten one was not proved.
    pub graph: Graph,
    /// What was decided.
    pub plan: Plan,
    /// The decisions with their reasons, as text.
    pub report: Report,
}

/// The rewrites, the refusals, and the predicted gain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What was rewritten.
    pub rewrites: Vec<Rewrite>,
    /// The rewrites that were not made, with their reasons.
    pub refusals: Vec<Refusal>,
    /// Why the graph is unchanged, if it is invalid or was not proved.
    pub findings: Vec<Finding>,
    /// Calls of groups, before and after.
    pub calls: [usize; 2],
    /// Predicted times in nanoseconds, before and after.
    pub nanoseconds: [u64; 2],
    /// The bytes of symmetric memory.
    pub comm_bytes: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "unchanged: {finding}")?;
        }
        for Rewrite { rule, ops, text, bound } in &self.rewrites {
            write!(f, "{rule}: {text} ({})", ops.join(", "))?;
            match bound {
                Some(bound) => writeln!(f, "; {bound}")?,
                None => writeln!(f)?,
            }
        }
        for Refusal { rule, op, reason } in &self.refusals {
            writeln!(f, "not {rule}: {op}: {reason}")?;
        }
        let [before, after] = self.calls;
        let [slow, fast] = self.nanoseconds.map(|ns| ns as f64 / 1000.0);
        write!(f, "{before} calls became {after}; {slow:.1} µs are predicted to become {fast:.1} µs; ")?;
        write!(f, "{} bytes of symmetric memory", self.comm_bytes)
    }
}

/// What the rules work on.
pub(crate) struct Context<'c> {
    pub(crate) graph: Graph,
    pub(crate) names: Names,
    pub(crate) world: &'c World,
    pub(crate) costs: &'c Costs,
    pub(crate) options: &'c Options,
    pub(crate) rewrites: Vec<Rewrite>,
    pub(crate) refusals: Vec<Refusal>,
    /// For calls that stand for others than themselves: which.
    pub(crate) covers: HashMap<String, Vec<String>>,
    /// What rewrites into fused calls say.
    pub(crate) told: Vec<rules::fuse::Told>,
    analysis: Option<Rc<Analysis>>,
    meanings: Option<(Terms, Vec<Option<Term>>)>,
}

impl Context<'_> {
    /// As before the first rule.
    pub(crate) fn start_again(&mut self, graph: &Graph) {
        (self.graph, self.names) = (graph.clone(), graph.names());
        (self.rewrites, self.refusals, self.covers, self.told) = Default::default();
        self.changed();
    }

    /// What follows from the graph, computed once for each state of the graph.
    pub(crate) fn analysis(&mut self) -> Rc<Analysis> {
        let graph = &self.graph;
        Rc::clone(self.analysis.get_or_insert_with(|| Rc::new(graph.analyse())))
    }

    /// The meaning of each value with every rounding, which is computed once for each state of the graph.
    pub(crate) fn meanings(&mut self) -> &mut (Terms, Vec<Option<Term>>) {
        let graph = &self.graph;
        self.meanings.get_or_insert_with(|| {
            let mut terms = Terms::new(Numerics::Same);
            let of = terms.of(graph);
            (terms, of)
        })
    }

    /// [`meanings`](Self::meanings), for a rule that adds terms.
    pub(crate) fn take_meanings(&mut self) -> (Terms, Vec<Option<Term>>) {
        self.meanings();
        self.meanings.take().expect("just computed")
    }

    /// The graph is another one by now.
    pub(crate) fn changed(&mut self) {
        (self.analysis, self.meanings) = (None, None);
    }

    /// Whether the calls of a group may be changed.
    pub(crate) fn is_ours(&self, group: &str) -> bool {
        self.world.groups.as_ref().is_none_or(|groups| groups.iter().any(|name| name == group))
    }

    pub(crate) fn refuse(&mut self, rule: &str, op: &str, reason: impl Into<String>) {
        self.refusals.push(Refusal { rule: rule.into(), op: op.into(), reason: reason.into() });
    }

    /// The calls of the graph before that a call stands for.
    pub(crate) fn covered(&self, op: &str) -> Vec<String> {
        self.covers.get(op).cloned().unwrap_or_else(|| vec![op.to_owned()])
    }
}

/// Rewrites a graph into a faster one that computes the same, or returns it unchanged.
///
/// The result depends on the arguments alone: equal arguments, equal bytes. [`check`](crate::check()) has proved it.
pub fn lower(graph: &Graph, world: &World, costs: &Costs, options: &Options) -> Lowered {
    let unchanged = |findings: Vec<Finding>, refusals: Vec<Refusal>| {
        let mut plan = Plan::new(graph, options.numerics);
        plan.calls = calls(graph, costs, &[], |op| vec![op.to_owned()]);
        let report = report(graph, graph, &plan, costs, refusals, findings);
        Lowered { graph: graph.clone(), plan, report }
    };
    let findings = verify(graph);
    if !findings.is_empty() {
        return unchanged(findings, Vec::new());
    }
    let (rewrites, refusals, covers, told) = Default::default();
    let names = graph.names();
    let mut cx = Context {
        graph: graph.clone(),
        names,
        world,
        costs,
        options,
        rewrites,
        refusals,
        covers,
        told,
        analysis: None,
        meanings: None,
    };
    rules::apply(&mut cx, graph);
    let mut plan = Plan::new(graph, options.numerics);
    plan.slots = rules::realize::place(&cx.graph);
    plan.calls = calls(&cx.graph, costs, &plan.slots, |op| cx.covered(op));
    plan.rewrites = cx.rewrites;
    let findings = prove(graph, &plan, &cx.graph);
    if !findings.is_empty() {
        return unchanged(findings, cx.refusals);
    }
    let report = report(graph, &cx.graph, &plan, costs, cx.refusals, Vec::new());
    Lowered { graph: cx.graph, plan, report }
}

fn report(
    before: &Graph,
    after: &Graph,
    plan: &Plan,
    costs: &Costs,
    refusals: Vec<Refusal>,
    findings: Vec<Finding>,
) -> Report {
    let count = |graph: &Graph| graph.ops.iter().filter(|op| op.kind.communicates()).count();
    Report {
        rewrites: plan.rewrites.clone(),
        refusals,
        findings,
        calls: [count(before), count(after)],
        nanoseconds: [costs.predict(before), costs.predict(after)],
        comm_bytes: plan.peak_bytes(),
    }
}

/// How each call of a graph is made.
fn calls(
    graph: &Graph,
    costs: &Costs,
    slots: &[Slot],
    covered: impl Fn(&str) -> Vec<String>,
) -> Vec<PlannedCall> {
    let analysis = graph.analyse();
    let signatures = Signatures::new(graph, &analysis, slots);
    let call = |op: &crate::Op| {
        let group = op.kind.group()?.to_owned();
        let (choice, signature) = (choice(graph, &analysis, op), signatures.of(op));
        let (op, covers, nanoseconds) = (op.name.clone(), covered(&op.name), costs.op(graph, op));
        Some(PlannedCall { op, group, choice, covers, signature, nanoseconds })
    };
    graph.ops.iter().filter_map(call).collect()
}
