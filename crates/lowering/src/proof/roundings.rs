//! Which roundings of floating-point numbers a value has on its way.
//!
//! [`Numerics::Close`](crate::Numerics::Close) leaves roundings out of what a value means: they may be dropped, or come elsewhere. But
//! none may be to a type that is narrower than all before. So for every value this lists the element types to which it, or what it
//! is made of, was rounded.
//!
//! The list is one of the value, not of each part of it: where bf16 sums are added to an f32 tensor, the tensor and the result may be
//! rounded to bf16 as well, and more than once. Fused calls need this: they round the residual together with the sum.

use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    faults::Fault,
    graph::{Graph, Op},
    ids::ValueId,
    numerics,
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Reduction, Unary, View},
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
        let mut elements: Vec<Element> = graph.values.iter().map(|value| value.ty.dtype).collect();
        for op in &graph.ops {
            let of =
                |args: &[ValueId]| args.iter().fold(Set::default(), |set, arg| set.and(sets[arg.index()]));
            // The results of collectives and waits each have one operand.
            let is_apart = op.args.len() == op.outs.len()
                && matches!(op.kind, Kind::Wait { .. } | Kind::Start { .. } | Kind::Sync { .. });
            let found: Vec<Set> = (0..op.outs.len())
                .map(|index| {
                    let args = if is_apart { &op.args[index..=index] } else { &op.args[..] };
                    of(args).and(own(graph, op, index, &elements))
                })
                .collect();
            if let (true, [x, ..], [out]) = (keeps_elements(&op.kind), &op.args[..], &op.outs[..])
                && elements[x.index()].is_float()
                && has_all(elements[out.index()], elements[x.index()])
            {
                elements[out.index()] = elements[x.index()];
            }
            op.outs.iter().zip(found).for_each(|(out, set)| sets[out.index()] = set);
        }
        Self(sets)
    }

    pub(crate) fn value(&self, value: ValueId) -> Set {
        self.0[value.index()]
    }
}

/// Whether all elements of the result, in their own type or another, are elements of the first operand or their negatives.
fn keeps_elements(kind: &Kind) -> bool {
    match kind {
        Kind::Unary { op } => matches!(op, Unary::Neg | Unary::Abs | Unary::Relu),
        Kind::View { view } => !matches!(view, View::Strided),
        Kind::Cast | Kind::Copy => true,
        _ => false,
    }
}

/// What an operation itself rounds to, where `elements` have all elements of each value. Too much is as wrong as too little: what is
/// listed for a program without being there may be added to it.
fn own(graph: &Graph, op: &Op, index: usize, elements: &[Element]) -> Set {
    let out = graph.ty(op.outs[index]).dtype;
    let types: Vec<&Type> = op.args.iter().map(|arg| graph.ty(*arg)).collect();
    // What is computed is rounded in the elements of the arithmetic, and then to the result's.
    let arithmetic = || match computed(&op.kind, &types) {
        Ok(element) if element.is_float() => Set::of(element).and(rounded(element, out)),
        Ok(_) | Err(_) => Set::default(),
    };
    // What is one of the operands' elements, or its negative, is rounded only if the result has others.
    let converted = |arg: &ValueId| rounded(elements[arg.index()], out);
    let chosen = || op.args.iter().fold(Set::default(), |set, arg| set.and(converted(arg)));
    let size = |group: &str| graph.group(group).map_or(0, |group| group.size);
    match &op.kind {
        Kind::Unary { op } => match op {
            Unary::Neg | Unary::Abs | Unary::Relu => chosen(),
            Unary::Sqrt
            | Unary::Rsqrt
            | Unary::Reciprocal
            | Unary::Exp
            | Unary::Exp2
            | Unary::Log2
            | Unary::Ceil
            | Unary::Sigmoid
            | Unary::Silu
            | Unary::Tanh => arithmetic(),
        },
        Kind::Binary { op, scalar, swapped: _ } => match op {
            Binary::Maximum | Binary::Minimum => match (scalar, out.number()) {
                (Some(number), Some(dtype)) if numerics::rounded(dtype, *number) != *number => {
                    chosen().and(Set::of(out))
                }
                (Some(_) | None, Some(_) | None) => chosen(),
            },
            Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Pow => arithmetic(),
        },
        Kind::Reduce { op, dims: _, keepdim: _ } => match op {
            Reduction::Amax => chosen(),
            Reduction::Sum | Reduction::Mean => arithmetic(),
        },
        Kind::MatMul => arithmetic(),
        Kind::Cast => converted(&op.args[0]),
        Kind::Assign => converted(&op.args[1]),
        Kind::Start { coll, token: _ } | Kind::Sync { coll } => {
            let Coll { prim: _, group, red, in_place: _, root: _, sends: _, receives: _, dims: _ } = coll;
            match red {
                Some(ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg) if size(group) > 1 => Set::of(out),
                Some(ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg) => Set::default(),
                Some(ReduceOp::Min | ReduceOp::Max | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor)
                | None => Set::default(),
            }
        }
        Kind::Fused { fused } => {
            let Fused {
                group,
                args,
                outputs,
                eps: _,
                weight_bias: _,
                round_before_weight: _,
                quantize: _,
                scale: _,
            } = fused;
            let own = Set::of(types[0].dtype);
            let sum = if size(group) > 1 { own } else { Set::default() };
            let residual = if args.contains(&FusedArg::Residual) { own } else { sum };
            match outputs[index] {
                FusedOutput::Sum => sum,
                FusedOutput::Residual => residual,
                FusedOutput::InverseRms => residual.and(Set::of(F32)),
                FusedOutput::Norm | FusedOutput::Codes | FusedOutput::Scales => own.and(Set::of(F32)),
            }
        }
        Kind::Input
        | Kind::Constant
        | Kind::Full { value: _ }
        | Kind::View { view: _ }
        | Kind::Copy
        | Kind::Wait { tokens: _ }
        | Kind::Opaque { target: _, attributes: _, aliases: _, effect: _, communicates: _ } => Set::default(),
    }
}

/// A conversion between floating-point numbers, where it rounds.
fn rounded(from: Element, to: Element) -> Set {
    if from.is_float() && !has_all(to, from) { Set::of(to) } else { Set::default() }
}
