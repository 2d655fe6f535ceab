//! Which roundings of floating-point numbers a value has on its way.
//!
//! [`Numerics::Close`](crate::Numerics::Close) leaves roundings out of what a value means: they may be dropped, or come elsewhere. But
//! none may be new. So for every value this lists the element types to which it, or what it is made of, was rounded.

use antiphon_tensor::DType;

use crate::{
    faults::Fault,
    graph::{Graph, Op},
    ids::ValueId,
    op::{FusedOutput, Kind},
    types::{Element, Type},
    verify::{
        F32,
        arithmetic::{computed, has_all},
    },
};

/// The types that are told apart.
const TYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// A set of [`TYPES`], a bit for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Set(u8);

impl Set {
    fn of(element: Element) -> Self {
        let at = TYPES.iter().position(|dtype| element == Element::Number(*dtype));
        Self(at.map_or(0, |at| 1 << at))
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn types(self) -> impl Iterator<Item = DType> {
        TYPES.into_iter().enumerate().filter(move |(at, _)| self.0 & (1 << at) != 0).map(|(_, dtype)| dtype)
    }

    /// A type of these that is narrower than all of some others: one to which nothing was rounded before.
    pub(crate) fn narrower_than(self, others: Self) -> Option<DType> {
        let is_covered = |new: &DType| others.types().any(|old| has_all((*new).into(), old.into()));
        if Fault::RoundingsAreFree.is_present() {
            return None;
        }
        self.types().find(|new| !is_covered(new))
    }
}

/// The roundings of all values of a graph.
pub(crate) struct Roundings(Vec<Set>);

impl Roundings {
    pub(crate) fn of(graph: &Graph) -> Self {
        let mut sets = vec![Set::default(); graph.values.len()];
        for op in &graph.ops {
            let of =
                |args: &[ValueId]| args.iter().fold(Set::default(), |set, arg| set.and(sets[arg.index()]));
            // The results of collectives and waits each have one operand.
            let is_apart = op.args.len() == op.outs.len()
                && matches!(op.kind, Kind::Wait { .. } | Kind::Start { .. } | Kind::Sync { .. });
            let found: Vec<Set> = (0..op.outs.len())
                .map(|index| {
                    let args = if is_apart { &op.args[index..=index] } else { &op.args[..] };
                    of(args).and(own(graph, op, index))
                })
                .collect();
            op.outs.iter().zip(found).for_each(|(out, set)| sets[out.index()] = set);
        }
        Self(sets)
    }

    pub(crate) fn value(&self, value: ValueId) -> Set {
        self.0[value.index()]
    }
}

/// What an operation itself rounds to.
fn own(graph: &Graph, op: &Op, index: usize) -> Set {
    let out = graph.ty(op.outs[index]).dtype;
    let types: Vec<&Type> = op.args.iter().map(|arg| graph.ty(*arg)).collect();
    match &op.kind {
        Kind::Unary { .. } | Kind::Binary { .. } | Kind::Reduce { .. } | Kind::MatMul => {
            let element = computed(&op.kind, &types).map_or(Set::default(), Set::of);
            if types[0].dtype.is_float() { element.and(rounded(types[0].dtype, out)) } else { Set::default() }
        }
        Kind::Cast => rounded(types[0].dtype, out),
        Kind::Assign => rounded(types[1].dtype, out),
        Kind::Start { coll, .. } | Kind::Sync { coll } if coll.red.is_some() => Set::of(out),
        Kind::Fused { fused } => {
            let sum = Set::of(types[0].dtype);
            match fused.outputs[index] {
                FusedOutput::Sum | FusedOutput::Residual => sum,
                _ => sum.and(Set::of(F32)),
            }
        }
        _ => Set::default(),
    }
}

/// A conversion between floating-point numbers, where it rounds.
fn rounded(from: Element, to: Element) -> Set {
    if from.is_float() && !has_all(to, from) { Set::of(to) } else { Set::default() }
}
