//! Single moves that make an order faster.

use super::{Order, memory::peak};
use crate::{
    analysis::Analysis,
    costs::{Clock, Costs},
    graph::{Graph, Op},
    lists::Lists,
    op::Kind,
    order::Edge,
    rules::most_trials,
};

/// A search among the orders of a graph in which tensors take at most `budget` bytes at once.
pub(super) struct Search<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    costs: &'g Costs,
    budget: u64,
    times: Vec<u64>,
    /// How many inputs come first, and stay there.
    inputs: usize,
    /// For each operation those that come before it, and those that come after it.
    before: Lists<u32>,
    after: Lists<u32>,
}

impl<'g> Search<'g> {
    pub(super) fn new(
        graph: &'g Graph,
        analysis: &'g Analysis,
        costs: &'g Costs,
        edges: &[Edge],
        budget: u64,
    ) -> Self {
        let count = graph.ops.len();
        let reversed: Vec<Edge> = edges.iter().map(|(before, after)| (*after, *before)).collect();
        let times = graph.ops.iter().map(|op| costs.op(graph, op)).collect();
        let (before, after) = (Lists::of(count, &reversed), Lists::of(count, edges));
        let inputs = graph.ops.iter().take_while(|op| op.kind == Kind::Input).count();
        Self { graph, analysis, costs, budget, times, inputs, before, after }
    }

    /// An order that no single move makes faster, or what was found when the search ends, with its predicted time. A move puts an
    /// operation as early or as late as the order of data allows, or exchanges it with its neighbour.
    pub(super) fn improved(&self, mut order: Order) -> (u64, Order) {
        let count = order.len();
        let mut places = vec![0; count];
        order.iter().enumerate().for_each(|(place, op)| places[*op as usize] = place);
        let (mut best, mut trials) = (self.predicted(&order), most_trials(self.graph));
        loop {
            let before = best;
            for op in self.inputs..count {
                let is = places[op];
                let earliest = self.before.get(op).iter().map(|other| places[*other as usize] + 1).max();
                let latest = self.after.get(op).iter().map(|other| places[*other as usize] - 1).min();
                let (earliest, latest) =
                    (earliest.unwrap_or(0).max(self.inputs), latest.unwrap_or(count - 1));
                let near = [is.saturating_sub(1).max(earliest), (is + 1).min(latest)];
                for to in [earliest, latest, near[0], near[1]] {
                    if to == is {
                        continue;
                    }
                    if trials == 0 {
                        return (best, order);
                    }
                    trials -= 1;
                    shift(&mut order, is, to);
                    let time = self.predicted(&order);
                    if time < best && self.fits(&order) {
                        best = time;
                        let (first, last) = (is.min(to), is.max(to));
                        (first..=last).for_each(|place| places[order[place] as usize] = place);
                        break;
                    }
                    shift(&mut order, to, is);
                }
            }
            if best == before {
                return (best, order);
            }
        }
    }

    pub(super) fn fits(&self, order: &Order) -> bool {
        peak(self.graph, self.analysis, self.ops(order)) <= self.budget
    }

    /// The predicted time of an order, in nanoseconds.
    pub(super) fn predicted(&self, order: &Order) -> u64 {
        let mut clock = Clock::new(self.costs);
        order.iter().for_each(|op| clock.run(&self.graph.ops[*op as usize], self.times[*op as usize]));
        clock.now()
    }

    fn ops(&self, order: &Order) -> impl Iterator<Item = &'g Op> {
        order.iter().map(|op| &self.graph.ops[*op as usize])
    }
}

/// Moves what is at a place to another place, past what is between.
fn shift(order: &mut Order, from: usize, to: usize) {
    if from < to {
        order[from..=to].rotate_left(1);
    } else {
        order[to..=from].rotate_right(1);
    }
}
