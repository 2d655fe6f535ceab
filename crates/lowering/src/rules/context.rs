//! What the rules work on.

use std::rc::Rc;

use super::fuse::FusedNote;
use crate::{
    analysis::Analysis,
    costs::Costs,
    graph::{Graph, Names},
    hash::HashMap,
    lowered::{Refusal, Rewrite},
    options::{Options, World},
};

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
    pub(crate) told: Vec<FusedNote>,
    analysis: Option<Rc<Analysis>>,
}

impl<'c> Context<'c> {
    /// Before the first rule.
    pub(crate) fn new(graph: &Graph, world: &'c World, costs: &'c Costs, options: &'c Options) -> Self {
        let (rewrites, refusals, covers, told) = Default::default();
        let (graph, names) = (graph.clone(), graph.names());
        Self { graph, names, world, costs, options, rewrites, refusals, covers, told, analysis: None }
    }

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

    /// The graph is another one by now.
    pub(crate) fn changed(&mut self) {
        self.analysis = None;
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
