//! Starts come early and waits late, so that collectives run beside computation.
//!
//! Applies where [`Options::overlap`](crate::Options::overlap) asks for it. All calls keep their order, and so do effects and
//! accesses of memory that is written. A call of a group that the pass leaves alone keeps its place among all operations, and so does
//! its wait. There are three orders to begin with: the present one; all starts as early and all waits as
//! late as possible; and a list schedule by the longest path that an operation leads to ([`list`]). The one that is predicted to
//! end first is improved by single moves as long as one of them is predicted to make it faster ([`Search`]). If the result is not
//! predicted to end before the present order does, nothing changes.

mod memory;
mod search;

use std::{cmp::Reverse, collections::BinaryHeap};

use super::context::Context;
use crate::{
    analysis::Analysis,
    costs::{Clock, Costs},
    graph::{Graph, Op},
    hash::HashSet,
    ids::TokenId,
    lists::Lists,
    lowered::Rewrite,
    op::Kind,
    order::{self, Edge},
    verify::verify,
};
use memory::{Memory, peak};
use search::Search;

pub(super) fn apply(cx: &mut Context<'_>) {
    if !cx.options.overlap || !cx.graph.ops.iter().any(|op| matches!(op.kind, Kind::Start { .. })) {
        return;
    }
    let before = cx.costs.predict(&cx.graph);
    let improved = improved(&cx.graph, cx.costs, cx.options.overlap_bytes, &|group| cx.is_ours(group));
    if let Some((after, graph)) = improved {
        let text = format!("{before} ns are predicted to become {after} ns");
        let is_ours = |op: &&Op| op.kind.group().is_some_and(|group| cx.is_ours(group));
        let starts = graph.ops.iter().filter(|op| matches!(op.kind, Kind::Start { .. })).filter(is_ours);
        let ops = starts.flat_map(|op| cx.covered(&op.name)).collect();
        cx.rewrites.push(Rewrite { rule: "schedule".into(), ops, text, bound: None });
        cx.graph = graph;
    }
}

/// The graph in the best order that was found, with its predicted time, if that is less than the graph's own. Its tensors take at
/// most `more_bytes` bytes more at once than the graph's.
fn improved(
    graph: &Graph,
    costs: &Costs,
    more_bytes: u64,
    is_ours: &impl Fn(&str) -> bool,
) -> Option<(u64, Graph)> {
    let analysis = graph.analyse();
    let mut edges = order::needs(graph, &analysis);
    edges.extend(fences(graph, is_ours));
    let budget = peak(graph, &analysis, graph.ops.iter()).saturating_add(more_bytes);
    let search = Search::new(graph, &analysis, costs, &edges, budget);
    let present: Order = (0..graph.ops.len() as u32).collect();
    let before = search.predicted(&present);
    let made = [outward(graph, &edges), list(graph, &analysis, costs, &edges, budget)];
    let made = made.into_iter().flatten().filter(|order| search.fits(order));
    let best = made.chain([present]).min_by_key(|order| search.predicted(order))?;
    let (time, order) = search.improved(best);
    let ops = order.iter().map(|place| graph.ops[*place as usize].clone()).collect();
    let graph = Graph { ops, ..graph.clone() };
    (time < before && verify(&graph).is_empty()).then_some((time, graph))
}

/// An order, by the places in the present one.
type Order = Vec<u32>;

/// What keeps the places of starts and waits of other groups: all operations up to one come before it, and all others behind it.
fn fences(graph: &Graph, is_ours: impl Fn(&str) -> bool) -> Vec<Edge> {
    let mut foreign: HashSet<TokenId> = HashSet::default();
    let (mut edges, mut last, mut since) = (Vec::new(), None, Vec::new());
    for (place, op) in (0u32..).zip(&graph.ops) {
        let is_foreign = match &op.kind {
            Kind::Start { coll, token } if !is_ours(&coll.group) => foreign.insert(*token),
            Kind::Wait { tokens } => tokens.iter().any(|token| foreign.contains(token)),
            _ => false,
        };
        edges.extend(last.map(|fence| (fence, place)));
        if is_foreign {
            edges.extend(since.drain(..).map(|before| (before, place)));
            last = Some(place);
        } else {
            since.push(place);
        }
    }
    edges
}

/// Every start as early as its operands allow, and every wait as late as its results do; the rest as it is.
fn outward(graph: &Graph, edges: &[Edge]) -> Option<Order> {
    let class = |op: &Op| match op.kind {
        Kind::Input | Kind::Constant => 0,
        Kind::Start { .. } => 1,
        Kind::Wait { .. } => 3,
        _ => 2,
    };
    let mut places: Order = (0..graph.ops.len() as u32).collect();
    places.sort_by_key(|place| (class(&graph.ops[*place as usize]), *place));
    let mut position = vec![0; places.len()];
    places.iter().enumerate().for_each(|(new, old)| position[*old as usize] = new as u32);
    let edges: Vec<Edge> =
        edges.iter().map(|(a, b)| (position[*a as usize], position[*b as usize])).collect();
    order::stable(places, &edges).ok()
}

/// A list schedule. Of the operations whose predecessors are done comes first a start; else a wait for a collective that has
/// ended; else the operation that leads to the longest path, if its results fit into the budget; else the wait for the
/// collective that ends first.
fn list(graph: &Graph, analysis: &Analysis, costs: &Costs, edges: &[Edge], budget: u64) -> Option<Order> {
    let count = graph.ops.len();
    let after = Lists::of(count, edges);
    let mut open = vec![0u32; count];
    edges.iter().for_each(|(_, later)| open[*later as usize] += 1);
    let times: Vec<u64> = graph.ops.iter().map(|op| costs.op(graph, op)).collect();
    let mut paths = times.clone();
    for place in (0..count).rev() {
        let longest = after.get(place).iter().map(|later| paths[*later as usize]).max().unwrap_or(0);
        paths[place] = paths[place].saturating_add(longest);
    }
    let (mut clock, mut memory) = (Clock::new(costs), Memory::of(graph, analysis));
    let (mut first, mut rest) = (BinaryHeap::new(), BinaryHeap::new());
    let mut waits: BinaryHeap<Reverse<(u64, u32)>> = BinaryHeap::new();
    let mut order = Vec::with_capacity(count);
    let mut ready: Vec<u32> = (0..count as u32).filter(|place| open[*place as usize] == 0).collect();
    loop {
        for place in ready.drain(..) {
            match &graph.ops[place as usize].kind {
                Kind::Input | Kind::Constant | Kind::Start { .. } => first.push(Reverse(place)),
                Kind::Wait { tokens } => waits.push(Reverse((clock.end_of(tokens), place))),
                _ => rest.push((paths[place as usize], Reverse(place))),
            }
        }
        let ended = waits.peek().is_some_and(|Reverse((end, _))| *end <= clock.now());
        let next = if let Some(Reverse(place)) = first.pop() {
            place
        } else if ended && let Some(Reverse((_, place))) = waits.pop() {
            place
        } else if let Some(place) = memory.pop(graph, &mut rest, budget, waits.is_empty()) {
            place
        } else if let Some(Reverse((_, place))) = waits.pop() {
            place
        } else {
            break;
        };
        let op = &graph.ops[next as usize];
        clock.run(op, times[next as usize]);
        memory.run(op);
        order.push(next);
        for later in after.get(next as usize) {
            open[*later as usize] -= 1;
            if open[*later as usize] == 0 {
                ready.push(*later);
            }
        }
    }
    (order.len() == count).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::Device;

    const ALL: fn(&str) -> bool = |_| true;

    /// A program of `operations` operations, or one more, on 512 × 512 elements: products, functions of elements, and sums over ranks.
    fn program(random: &mut impl FnMut(usize) -> usize, operations: usize) -> Graph {
        let mut text = String::from(
            "group tp size 2\ngroup dp size 2\n%x: f32[512,512] = input()\n%y: f32[512,512] = input()\n",
        );
        let (mut values, mut count, mut calls) = (vec!["x".to_owned(), "y".to_owned()], 0, 0);
        while count < operations {
            let [a, b] = [random(values.len()), random(values.len())].map(|index| values[index].clone());
            let new = format!("v{count}");
            text += &match random(5) {
                0 | 1 if 3 * calls < operations => {
                    (calls, count) = (calls + 1, count + 1);
                    let group = ["tp", "dp"][random(2)];
                    format!(
                        "%s{new}: f32[512,512] = start(%{a}) prim=all_reduce group={group} red=sum token={calls}\n\
                         %{new}: f32[512,512] = wait(%s{new}) tokens=[{calls}]\n"
                    )
                }
                2 | 3 => format!("%{new}: f32[512,512] = matmul(%{a}, %{b})\n"),
                _ => format!("%{new}: f32[512,512] = binary(%{a}, %{b}) op=add\n"),
            };
            values.push(new);
            count += 1;
        }
        let used =
            |name: &String| text.contains(&format!("(%{name}")) || text.contains(&format!(", %{name})"));
        let outputs: Vec<String> =
            values.iter().filter(|name| !used(name)).map(|name| format!("%{name}")).collect();
        let text = format!("{text}return {}\n", outputs.join(", "));
        Graph::from_text(&text).unwrap()
    }

    /// The least predicted time of all orders in which values are defined before they are used and calls keep their order.
    fn least(graph: &Graph, costs: &Costs) -> u64 {
        fn extend(graph: &Graph, costs: &Costs, order: &mut Vec<usize>, least: &mut u64) {
            if order.len() == graph.ops.len() {
                let ops = order.iter().map(|index| graph.ops[*index].clone()).collect();
                *least = costs.predict(&Graph { ops, ..graph.clone() }).min(*least);
                return;
            }
            for index in 0..graph.ops.len() {
                let op = &graph.ops[index];
                let defines = |done: &usize, arg: &crate::ValueId| graph.ops[*done].outs.contains(arg);
                let is_ready = op.args.iter().all(|arg| order.iter().any(|done| defines(done, arg)));
                let is_next = !op.kind.communicates()
                    || (0..index)
                        .all(|other| !graph.ops[other].kind.communicates() || order.contains(&other));
                if is_ready && is_next && !order.contains(&index) {
                    order.push(index);
                    extend(graph, costs, order, least);
                    order.pop();
                }
            }
        }
        let inputs = graph.ops.iter().take_while(|op| op.kind == Kind::Input).count();
        let mut least = u64::MAX;
        extend(graph, costs, &mut (0..inputs).collect(), &mut least);
        least
    }

    fn numbers(mut state: u64) -> impl FnMut(usize) -> usize {
        move |limit| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % limit
        }
    }

    #[test]
    fn orders_of_nine_operations_are_near_the_best_of_all() {
        let mut random = numbers(11);
        let costs = Costs::of(Device::Host);
        let (mut best, mut improvable, mut worst) = (0, 0, 0u64);
        for _ in 0..60 {
            let graph = program(&mut random, 8);
            assert_eq!(verify(&graph), [], "{}", graph.to_text());
            let (before, least) = (costs.predict(&graph), least(&graph, &costs));
            let after = improved(&graph, &costs, u64::MAX, &ALL).map_or(before, |(time, _)| time);
            assert!(least <= after && after <= before, "{least} {after} {before}\n{}", graph.to_text());
            improvable += u32::from(least < before);
            best += u32::from(after == least);
            worst = worst.max(after * 100 / least);
        }
        assert!(improvable >= 20, "{improvable} of 60 could be better");
        assert!(best >= 56 && worst <= 105, "{best} of 60 are the best, the worst takes {worst} % of it");
    }

    #[test]
    fn moves_find_an_order_where_the_two_orders_take_too_much_memory() {
        let mut random = numbers(11);
        let costs = Costs::of(Device::Host);
        let mut found = 0;
        for _ in 0..60 {
            let graph = program(&mut random, 40);
            let analysis = graph.analyse();
            let edges = order::needs(&graph, &analysis);
            let budget = peak(&graph, &analysis, graph.ops.iter());
            let search = Search::new(&graph, &analysis, &costs, &edges, budget);
            let orders = [outward(&graph, &edges), list(&graph, &analysis, &costs, &edges, budget)];
            if orders.iter().flatten().any(|order| search.fits(order)) {
                continue;
            }
            if let Some((time, after)) = improved(&graph, &costs, 0, &ALL) {
                assert!(time == costs.predict(&after) && time < costs.predict(&graph));
                assert!(peak(&after, &after.analyse(), after.ops.iter()) <= budget);
                found += 1;
            }
        }
        assert!(found >= 5, "{found}");
    }

    #[test]
    fn calls_of_other_groups_keep_their_places() {
        let mut random = numbers(5);
        let costs = Costs::of(Device::Host);
        let (mut found, mut moved) = (0, 0);
        for _ in 0..60 {
            let graph = program(&mut random, 20);
            moved += u32::from(improved(&graph, &costs, u64::MAX, &ALL).is_some());
            let Some((_, after)) = improved(&graph, &costs, u64::MAX, &|group| group == "tp") else {
                continue;
            };
            found += 1;
            // Each foreign start and wait has the same operations before it.
            let dp = |graph: &Graph| {
                let mut before: Vec<String> = Vec::new();
                let mut seen = Vec::new();
                for op in &graph.ops {
                    let of_dp = |value: &crate::ValueId| graph.name(*value).starts_with("sv");
                    let waits_for = match &op.kind {
                        Kind::Wait { .. } => op.args.iter().find(|value| of_dp(value)),
                        _ => None,
                    };
                    let start = waits_for.and_then(|value| {
                        graph.ops.iter().find(|op| op.outs.contains(value)).and_then(|op| op.kind.group())
                    });
                    if op.kind.group().or(start) == Some("dp") {
                        let mut names = before.clone();
                        names.sort();
                        seen.push((op.name.clone(), names));
                    }
                    before.push(op.name.clone());
                }
                seen
            };
            assert_eq!(dp(&graph), dp(&after), "{}", graph.to_text());
        }
        assert!(found >= 5 && moved > found, "{found} {moved}");
    }

    #[test]
    fn memory_is_bounded() {
        let text = "group tp size 2
            %x: f32[512,512] = input()
            %a: f32[512,512] = start(%x) prim=all_reduce group=tp red=sum token=0
            %b: f32[512,512] = wait(%a) tokens=[0]
            %c: f32[512,1] = reduce(%b) op=sum dims=[1] keepdim=true
            %m: f32[512,512] = matmul(%x, %x)
            %d: f32[512,1] = reduce(%m) op=sum dims=[1] keepdim=true
            return %c, %d";
        let graph = Graph::from_text(text).unwrap();
        let costs = Costs::of(Device::Host);
        assert!(improved(&graph, &costs, 1 << 20, &ALL).is_some(), "the product runs beside the sum");
        assert!(improved(&graph, &costs, 0, &ALL).is_none(), "there is no memory for both");
    }
}
