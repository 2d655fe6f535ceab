//! The terms of a program's values.

use antiphon_operation::ReduceOp;

use super::{Conversion, Facts, Node, Part, Term, Terms, identities::Identity};
use crate::{
    analysis::Analysis,
    faults::Fault,
    graph::{Graph, Op},
    hash::HashMap,
    ids::{StoreId, ValueId},
    numerics::rounded,
    op::{Alias, Coll, Kind, Prim, ResultMemory, View},
    places::Places,
    sym::SymExpr,
    types::{Element, Type},
    verify::arithmetic::computed,
};

/// All that the result of a collective depends on but its operand's elements. Reductions and broadcasts of all elements do not
/// depend on the shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    prim: Prim,
    group: String,
    red: Option<ReduceOp>,
    root: Option<u32>,
    sends: Option<Vec<SymExpr>>,
    receives: Option<Vec<SymExpr>>,
    dims: Option<[usize; 2]>,
    /// The shapes of the operand and of the result.
    shapes: Option<[Vec<SymExpr>; 2]>,
    element: Element,
}

/// All that an operation that is not known depends on but its operands' elements.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Unknown {
    target: String,
    attributes: String,
    aliases: Vec<Option<(usize, bool)>>,
    args: Vec<Type>,
    outs: Vec<Type>,
    /// How many operations with effects come before, if it has any.
    turn: Option<u32>,
}

/// What a value means.
#[derive(Debug, Clone, Copy)]
struct Meaning {
    value: Term,
    /// All elements of the memory in which it lies.
    memory: Term,
}

/// The terms of a program.
pub(crate) struct Meanings(Vec<Option<Meaning>>);

impl Meanings {
    /// The elements of a value.
    pub(crate) fn value(&self, value: ValueId) -> Option<Term> {
        Some(self.0[value.index()]?.value)
    }

    /// All elements of the memory in which a value lies, when it is the latest.
    pub(crate) fn memory(&self, value: ValueId) -> Option<Term> {
        Some(self.0[value.index()]?.memory)
    }
}

/// How many elements of a value's type the memory has in which it lies; none if that is no whole number.
fn elements(graph: &Graph, analysis: &Analysis, value: ValueId) -> Option<SymExpr> {
    let (root, own) = (graph.ty(analysis.root(value)?), graph.ty(value).dtype.size());
    match root.dtype.size() == own {
        true => root.reach(),
        false => root.reach()?.times(&(root.dtype.size() as i64).into())?.divided(&(own as i64).into()),
    }
}

impl Terms {
    /// The terms of all values of a graph that makes sense.
    pub(crate) fn of(&mut self, graph: &Graph, analysis: &Analysis) -> Meanings {
        let mut meanings: Vec<Option<Meaning>> = vec![None; graph.values.len()];
        self.reserve(graph.ops.len().saturating_sub(self.nodes.len()));
        let (mut args, mut effects) = (Vec::new(), 0u32);
        for op in &graph.ops {
            args.clear();
            args.extend(op.args.iter().filter_map(|arg| meanings[arg.index()]));
            if args.len() < op.args.len() {
                continue;
            }
            if op.kind.has_effect() && matches!(op.kind, Kind::Opaque { .. }) {
                effects += 1;
            }
            // If results lie in one storage, each is written into what the result before it has left.
            let is_chain = op.outs.len() > 1 && op.kind.coll().is_some_and(|coll| coll.in_place);
            let mut left: HashMap<Option<StoreId>, Term> = HashMap::default();
            for (index, out) in op.outs.iter().enumerate() {
                let value = self.result(graph, analysis, op, &args, index, effects);
                let store = analysis.store[out.index()];
                if let Some(memory) = left.get(&store) {
                    args[index].memory = *memory;
                }
                let memory = self.memory_of(graph, analysis, op, &args, index, value);
                meanings[out.index()] = Some(Meaning { value, memory });
                if is_chain {
                    left.insert(store, memory);
                }
            }
            for out in op.outs.iter().filter(|_| is_chain) {
                let memory = left.get(&analysis.store[out.index()]).copied();
                if let Some((meaning, memory)) = meanings[out.index()].as_mut().zip(memory) {
                    meaning.memory = memory;
                }
            }
        }
        Meanings(meanings)
    }

    /// The memory in which a result lies, when the operation is complete.
    fn memory_of(
        &mut self,
        graph: &Graph,
        analysis: &Analysis,
        op: &Op,
        args: &[Meaning],
        index: usize,
        value: Term,
    ) -> Term {
        let out = op.outs[index];
        let ty = graph.ty(out);
        let unknown = |terms: &mut Self| match terms.node(value) {
            Node::Unknown(what, operands, _) => {
                terms.opaque(Node::Unknown(what, operands, Part::Memory(index as u32)), ty.dtype)
            }
            _ => value,
        };
        match op.kind.result_memory(index) {
            ResultMemory::Fresh => {
                let is_given = matches!(op.kind, Kind::Input | Kind::Constant);
                // An unknown operation leaves the same between the elements wherever it gives the same elements.
                let between = match op.kind {
                    Kind::Opaque { .. } => Some(unknown(self)),
                    _ => is_given.then(|| self.gap(graph.name(out), ty.dtype)),
                };
                self.memory(between, ty, value)
            }
            ResultMemory::Alias(arg) if graph.ty(op.args[arg]).dtype == ty.dtype => args[arg].memory,
            ResultMemory::Alias(_) => unknown(self),
            // What a wait waits for is in its memory already.
            ResultMemory::Write(arg) if matches!(op.kind, Kind::Wait { .. }) => args[arg].memory,
            ResultMemory::Write(_) if matches!(op.kind, Kind::Opaque { .. }) => unknown(self),
            ResultMemory::Write(arg) => {
                let size = elements(graph, analysis, out);
                match Places::of(graph.ty(op.args[arg])) {
                    Some(places) => self.written(args[arg].memory, &places, size.as_ref(), value),
                    None => value,
                }
            }
        }
    }

    /// The elements of a result.
    fn result(
        &mut self,
        graph: &Graph,
        analysis: &Analysis,
        op: &Op,
        args: &[Meaning],
        index: usize,
        effects: u32,
    ) -> Term {
        let out = graph.ty(op.outs[index]);
        let types: Vec<&Type> = op.args.iter().map(|arg| graph.ty(*arg)).collect();
        let ty = |arg: usize| types[arg];
        let x = |arg: usize| args[arg].value;
        let element = || computed(&op.kind, &types).expect("of a verified graph");
        match &op.kind {
            Kind::Input | Kind::Constant => {
                let name = self.names.intern(graph.name(op.outs[index]));
                self.opaque(Node::Leaf(name, out.dtype), out.dtype)
            }
            Kind::Full { value } => {
                let value = match out.dtype {
                    Element::Number(dtype) => rounded(dtype, *value),
                    Element::Bool => f64::from(*value != 0.0),
                    _ => {
                        let number = self.number(*value);
                        return self.cast(Element::Number(antiphon_tensor::DType::F64), out.dtype, number);
                    }
                };
                self.number(value)
            }
            Kind::Unary { op } => {
                let element = element();
                let result = self.unary(*op, element, x(0));
                self.cast(element, out.dtype, result)
            }
            Kind::Binary { op, scalar, swapped } => {
                let element = element();
                let first = self.repeated(x(0), ty(0), out);
                let second = match scalar {
                    Some(number) => self.number_in(element, *number),
                    None => self.repeated(x(1), ty(1), out),
                };
                let (first, second) = if *swapped { (second, first) } else { (first, second) };
                let result = self.binary(*op, element, first, second);
                self.cast(element, out.dtype, result)
            }
            Kind::Cast => self.cast(ty(0).dtype, out.dtype, x(0)),
            // With the dimensions that are reduced behind the others. Whether they stay does not matter to a sequence.
            Kind::Reduce { op, dims, keepdim: _ } => {
                let shape = &ty(0).shape;
                let others = (0..shape.len()).filter(|dim| !dims.contains(dim));
                let order = Places::permuted(shape, others.chain(dims.iter().copied()));
                let extent = SymExpr::product(dims.iter().map(|dim| &shape[*dim]));
                let ((places, extent), count) =
                    order.zip(extent).zip(ty(0).numel()).expect("of a verified graph");
                let turned = self.moved(&places, &count, x(0));
                let element = if out.dtype.is_float() { element() } else { out.dtype };
                let result = self.rows(*op, element, &extent, turned);
                self.cast(element, out.dtype, result)
            }
            Kind::View { view } => match view {
                View::Reshape => x(0),
                View::Permute(dims) => {
                    let map = Places::permuted(&ty(0).shape, dims.iter().copied()).zip(ty(0).numel());
                    let (places, count) = map.expect("of a verified graph");
                    self.moved(&places, &count, x(0))
                }
                View::Expand => self.repeated(x(0), ty(0), out),
                View::Strided => {
                    // No view shows all of what is no whole number of such elements.
                    let size = elements(graph, analysis, op.outs[index]).unwrap_or(SymExpr::constant(-1));
                    self.shown(args[0].memory, &size, out)
                }
            },
            Kind::Copy => x(0),
            Kind::MatMul => {
                let sizes = [&ty(0).shape[0], &ty(0).shape[1], &ty(1).shape[1]].map(Clone::clone);
                let (element, sizes) = (element(), self.shapes.intern(&sizes[..]));
                let kept = self.kept(element);
                let result = self.opaque(Node::Matrix(kept, sizes, x(0), x(1)), element);
                self.cast(element, out.dtype, result)
            }
            Kind::Assign => {
                let value = self.repeated(x(1), ty(1), out);
                self.cast(ty(1).dtype, out.dtype, value)
            }
            Kind::Opaque { target, attributes, aliases, effect, communicates } => {
                let alias = |alias: &Option<Alias>| alias.map(|Alias { arg, writes }| (arg, writes));
                let forgotten = Fault::AttributesAreForgotten.is_present();
                let unknown = Unknown {
                    target: target.clone(),
                    attributes: if forgotten { String::new() } else { attributes.clone() },
                    aliases: aliases.iter().map(alias).collect(),
                    args: types.iter().copied().cloned().collect(),
                    outs: op.outs.iter().map(|out| graph.ty(*out).clone()).collect(),
                    turn: (*effect || *communicates).then_some(effects),
                };
                let operands: Vec<Term> = args.iter().flat_map(|arg| [arg.value, arg.memory]).collect();
                let (unknown, operands) = (self.unknown.intern(&unknown), self.lists.intern(&operands[..]));
                self.opaque(Node::Unknown(unknown, operands, Part::Result(index as u32)), out.dtype)
            }
            Kind::Wait { tokens: _ } => x(index),
            Kind::Start { coll, token: _ } | Kind::Sync { coll } => {
                self.collective(graph, coll, x(index), ty(index), out)
            }
            Kind::Fused { fused } => {
                let values: Vec<Term> = args.iter().map(|arg| arg.value).collect();
                self.fused(graph, fused, &values, ty(0), fused.outputs[index])
            }
        }
    }

    /// What one segment of a collective gives.
    pub(crate) fn collective(&mut self, graph: &Graph, coll: &Coll, x: Term, from: &Type, to: &Type) -> Term {
        // Where the result lies is for the memory to say.
        let Coll { prim, group, red, in_place: _, root, sends, receives, dims } = coll;
        let size = graph.group(group).map_or(0, |group| group.size);
        if size == 1 && from.numel() == to.numel() && self.may(Identity::RankAlone, from.dtype) {
            return x;
        }
        if *prim == Prim::AllReduce && *red == Some(ReduceOp::Sum) {
            return self.group_sum(group, size, from.dtype, x);
        }
        let is_even = matches!(prim, Prim::AllReduce | Prim::Broadcast | Prim::AllGather);
        let call = Call {
            prim: *prim,
            group: group.clone(),
            red: *red,
            root: *root,
            sends: sends.clone(),
            receives: receives.clone(),
            dims: *dims,
            shapes: (!is_even).then(|| [from.shape.clone(), to.shape.clone()]),
            element: self.kept(from.dtype),
        };
        let call = self.calls.intern(&call);
        self.intern(Node::Call(call, x), Facts { elements: Some(from.dtype), weight: 1 })
    }

    /// The sum of some terms of such elements; none of no terms.
    pub(crate) fn added(&mut self, element: Element, terms: impl Iterator<Item = Term>) -> Option<Term> {
        terms.reduce(|x, y| self.sum(element, x, y))
    }

    /// A conversion to the codes of FP8.
    pub(super) fn coded(&mut self, x: Term) -> Term {
        let weight = self.weight(x).saturating_add(1);
        let facts = Facts { elements: Some(Element::E4m3), weight };
        self.intern(Node::Cast(Conversion::Coded, Element::E4m3, x), facts)
    }
}
