//! The terms of a program's values.

use antiphon_operation::ReduceOp;

use super::{Node, Term, Terms, computed, sizes};
use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    hash::HashSet,
    op::{Coll, Kind, Prim, ResultMemory, View},
    places::Places,
    types::{Element, Type},
};

impl Terms {
    /// A term for each value of a graph that is defined.
    pub(crate) fn of(&mut self, graph: &Graph, analysis: &Analysis) -> Vec<Option<Term>> {
        let mut terms = vec![None; graph.values.len()];
        let mut partly_written = HashSet::default();
        let expected = graph.ops.len().saturating_sub(self.count());
        self.reserve(expected);
        let (mut args, mut effects) = (Vec::new(), 0u32);
        for op in &graph.ops {
            args.clear();
            args.extend(op.args.iter().filter_map(|arg| terms[arg.index()]));
            if args.len() < op.args.len() {
                continue;
            }
            if op.kind.has_effect() && matches!(op.kind, Kind::Opaque { .. }) {
                effects += 1;
            }
            for (index, out) in op.outs.iter().enumerate() {
                let store = analysis.store[out.index()];
                if writes_a_part(graph, analysis, op, index) {
                    partly_written.insert(store);
                }
                // What such a view shows is not looked into.
                let is_mixed = matches!(op.kind, Kind::View { .. }) && partly_written.contains(&store);
                let term = match is_mixed {
                    true => self.of_operands(&format!("%{}", graph.name(*out)), &[], 0, graph.ty(*out).dtype),
                    false => self.result(graph, op, &args, index, effects),
                };
                let to = graph.ty(*out).dtype;
                terms[out.index()] = Some(self.round(to, term));
            }
        }
        terms
    }

    /// Result `index` of an operation that is known by this text.
    fn of_operands(&mut self, text: &str, args: &[Term], index: u32, exact: Element) -> Term {
        let (text, args) = (self.texts.intern(text), self.lists.intern(args));
        self.intern(Node::Result(text, args, index), exact)
    }

    fn result(&mut self, graph: &Graph, op: &Op, args: &[Term], index: usize, effects: u32) -> Term {
        let out = graph.ty(op.outs[index]);
        let ty = |arg: usize| graph.ty(op.args[arg]);
        match &op.kind {
            Kind::Input | Kind::Constant => {
                let name = self.texts.intern(graph.name(op.outs[index]));
                self.intern(Node::Leaf(name), out.dtype)
            }
            Kind::Full { value } => match out.dtype.is_float() {
                true => self.number(*value),
                false => self.intern(Node::Number(value.to_bits()), out.dtype),
            },
            Kind::Unary { op } => self.unary(*op, args[0]),
            Kind::Binary { op: function, scalar, swapped } => {
                let x = self.aligned(args[0], ty(0), out);
                let y = match scalar {
                    Some(number) => self.scalar(*number, ty(0), out),
                    None => self.aligned(args[1], ty(1), out),
                };
                let (x, y) = if *swapped { (y, x) } else { (x, y) };
                let is_even = scalar.is_none() && ty(0).shape == ty(1).shape;
                if is_even { self.elementwise(*function, x, y) } else { self.binary(*function, x, y) }
            }
            Kind::Cast => args[0],
            Kind::Reduce { op, dims, .. } => match dims.len() == 1 && dims[0] + 1 == ty(0).shape.len() {
                true => {
                    let rows = self.rows(*op, ty(0), args[0]);
                    self.rows_of(rows, &1.into(), &out.last())
                }
                false => {
                    let text = self.texts.intern(&format!("{dims:?} {:?} {:?}", sizes(ty(0)), sizes(out)));
                    self.intern(Node::Reduce(*op, text, args[0]), computed(out.dtype))
                }
            },
            Kind::View { view: View::Reshape } | Kind::Copy => self.reshaped(args[0], ty(0), out),
            Kind::View { view: View::Expand } => self.aligned(args[0], ty(0), out),
            Kind::View { view } => {
                let text = self.texts.intern(&format!("{view:?} {} {out}", ty(0)));
                self.intern(Node::Moved(text, args[0]), out.dtype)
            }
            Kind::MatMul => {
                let text = format!("matmul {:?} {:?}", sizes(ty(0)), sizes(ty(1)));
                self.of_operands(&text, args, 0, computed(out.dtype))
            }
            Kind::Assign => self.aligned(args[1], ty(1), out),
            Kind::Opaque { target, attributes, effect, communicates, .. } => {
                let types: Vec<String> = op.args.iter().map(|arg| graph.ty(*arg).to_string()).collect();
                let turn = if *effect || *communicates { effects } else { 0 };
                let text = format!("{target} {attributes} {types:?} {turn}");
                self.of_operands(&text, args, index as u32, out.dtype)
            }
            Kind::Wait { .. } => args[index],
            Kind::Start { coll, .. } | Kind::Sync { coll } => {
                self.collective(graph, coll, args[index], ty(index), out)
            }
            Kind::Fused { fused } => self.fused(graph, fused, args, ty(0), fused.outputs[index]),
        }
    }

    /// What one segment of a collective gives.
    pub(crate) fn collective(&mut self, graph: &Graph, coll: &Coll, x: Term, from: &Type, to: &Type) -> Term {
        let size = graph.group(&coll.group).map_or(0, |group| group.size);
        if size == 1 {
            return match coll.prim {
                Prim::AllReduce | Prim::Broadcast | Prim::ShardDimAllToAll => x,
                _ => self.reshaped(x, from, to),
            };
        }
        if coll.prim == Prim::AllReduce && coll.red == Some(ReduceOp::Sum) {
            return self.group_sum(&coll.group, size, from.dtype, x);
        }
        let Coll { prim, group, red, root, sends, receives, dims, .. } = coll;
        let text =
            format!("{prim:?} {group} {red:?} {root:?} {sends:?} {receives:?} {dims:?} {:?}", sizes(from));
        self.of_operands(&text, &[x], 0, to.dtype)
    }
}

/// Whether a result is written into a storage and leaves some of it as it was.
fn writes_a_part(graph: &Graph, analysis: &Analysis, op: &Op, index: usize) -> bool {
    let is_write = matches!(op.kind.result_memory(index), ResultMemory::Write(_));
    is_write && !matches!(op.kind, Kind::Wait { .. }) && {
        let out = op.outs[index];
        let size = analysis.root(out).and_then(|root| graph.ty(root).reach());
        !Places::of(graph.ty(out)).zip(size).is_some_and(|(places, size)| places.is_all(&size))
    }
}
