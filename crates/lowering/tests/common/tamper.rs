//! Changes of a lowered program or of its decisions, each of which the proof must refuse where results differ.

use antiphon_lowering::{
    Binary, Choice, Class, CommReq, Decisions, Element, Graph, Kind, Reduction, Roles, Unary, ValueId,
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use super::Chance;

type Tamper = fn(&mut Graph, &mut Decisions, &mut Chance) -> Option<()>;

/// All kinds of changes, by name.
pub const KINDS: &[(&str, Tamper)] = &[
    ("an operation goes", |graph, _, chance| {
        let at = chance.below(graph.ops.len());
        graph.ops.remove(at);
        Some(())
    }),
    ("an operand is another", |graph, _, chance| {
        let by = any_value(graph, chance)?;
        *any_operand(graph, chance)? = by;
        Some(())
    }),
    ("an operand is another of its type", |graph, _, chance| {
        let at = chance.below(graph.ops.len());
        let place = chance.below(graph.ops[at].args.len().max(1));
        let old = *graph.ops[at].args.get(place)?;
        let by = alike(graph, old, at, chance)?;
        graph.ops[at].args[place] = by;
        Some(())
    }),
    ("an output is another", |graph, _, chance| {
        let by = any_value(graph, chance)?;
        let at = chance.below(graph.outputs.len());
        graph.outputs[at] = by;
        Some(())
    }),
    ("an output is another of its type", |graph, _, chance| {
        let at = chance.below(graph.outputs.len());
        graph.outputs[at] = alike(graph, graph.outputs[at], graph.ops.len(), chance)?;
        Some(())
    }),
    ("two operands change places", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| {
            matches!(kind, Kind::Binary { .. } | Kind::MatMul | Kind::Opaque { .. })
        })?;
        (graph.ops[op].args.len() > 1).then(|| graph.ops[op].args.swap(0, 1))
    }),
    ("a number comes on the other side", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::Binary { .. }))?;
        let Kind::Binary { swapped, .. } = &mut graph.ops[op].kind else { return None };
        *swapped = !*swapped;
        Some(())
    }),
    ("a number is another", |graph, _, chance| {
        let by = [1.0, -1.0, 0.5][chance.below(3)];
        any_number(graph, chance).map(|number| *number += by)
    }),
    ("a number is the next one", |graph, _, chance| {
        any_number(graph, chance).map(|number| *number = f64::from_bits(number.to_bits() ^ 1))
    }),
    ("a function is another", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| {
            matches!(kind, Kind::Unary { .. } | Kind::Binary { .. } | Kind::Reduce { .. })
        })?;
        match &mut graph.ops[op].kind {
            Kind::Unary { op } => *op = [Unary::Neg, Unary::Abs, Unary::Relu][chance.below(3)],
            Kind::Binary { op, .. } => {
                *op = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Maximum, Binary::Minimum]
                    [chance.below(5)];
            }
            Kind::Reduce { op, .. } => {
                *op = [Reduction::Sum, Reduction::Amax, Reduction::Mean][chance.below(3)]
            }
            _ => return None,
        }
        Some(())
    }),
    ("a reduction is over another dimension", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::Reduce { .. }))?;
        let rank = graph.ty(graph.ops[op].args[0]).shape.len();
        let Kind::Reduce { dims, .. } = &mut graph.ops[op].kind else { return None };
        let at = chance.below(dims.len());
        dims[at] = chance.below(rank);
        dims.sort_unstable();
        Some(())
    }),
    ("an offset is another", |graph, _, chance| {
        let value = any_value(graph, chance)?;
        let offset = &mut graph.values[value.index()].ty.offset;
        *offset = offset.plus(&[1.into(), 4.into(), 8.into()][chance.below(3)])?;
        Some(())
    }),
    ("a stride is another", |graph, _, chance| {
        let value = any_value(graph, chance)?;
        let ty = &mut graph.values[value.index()].ty;
        let mut strides = ty.strides.clone().or_else(|| ty.row_major())?;
        let at = chance.below(strides.len().max(1));
        *strides.get_mut(at)? = [0, 1, 2, 4, 8][chance.below(5)].into();
        ty.strides = Some(strides);
        Some(())
    }),
    ("strides change places", |graph, _, chance| {
        let value = any_value(graph, chance)?;
        let ty = &mut graph.values[value.index()].ty;
        let mut strides = ty.strides.clone().or_else(|| ty.row_major())?;
        strides.reverse();
        ty.strides = Some(strides);
        Some(())
    }),
    ("a shape is another", |graph, _, chance| {
        let is_any = chance.below(2) == 0;
        let op = any_op(graph, chance, |kind| kind.coll().is_some() || (is_any && *kind != Kind::Input))?;
        let value = *graph.ops[op].outs.first()?;
        let shape = &mut graph.values[value.index()].ty.shape;
        let (from, to) = (chance.below(shape.len().max(1)), chance.below(shape.len().max(1)));
        let half = shape.get(from)?.as_constant().filter(|size| size % 2 == 0)? / 2;
        shape[from] = half.into();
        shape[to] = shape[to].times(&2.into())?;
        Some(())
    }),
    ("dimensions are turned otherwise", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| {
            matches!(kind, Kind::View { view: antiphon_lowering::View::Permute(_) })
        })?;
        let Kind::View { view: antiphon_lowering::View::Permute(dims) } = &mut graph.ops[op].kind else {
            return None;
        };
        dims.reverse();
        Some(())
    }),
    ("a view is a copy", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::View { .. }))?;
        graph.ops[op].kind = Kind::Copy;
        Some(())
    }),
    ("a write goes elsewhere", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| *kind == Kind::Assign)?;
        let old = graph.ops[op].args[0];
        let by = alike(graph, old, op, chance)?;
        graph.ops[op].args[0] = by;
        Some(())
    }),
    ("a write is left out", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| *kind == Kind::Assign)?;
        let (old, new) = (graph.ops[op].args[0], graph.ops[op].outs[0]);
        graph.ops.remove(op);
        let uses = graph.ops.iter_mut().flat_map(|op| &mut op.args);
        uses.chain(&mut graph.outputs).filter(|value| **value == new).for_each(|value| *value = old);
        Some(())
    }),
    ("a value has other elements", |graph, _, chance| {
        let value = any_value(graph, chance)?;
        let others = [DType::F32, DType::BF16, DType::F64, DType::F16, DType::I32, DType::I8];
        graph.values[value.index()].ty.dtype = Element::Number(others[chance.below(6)]);
        Some(())
    }),
    ("a cast goes through other elements", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| *kind == Kind::Cast)?;
        let (x, mut ty) = (graph.ops[op].args[0], graph.ty(graph.ops[op].outs[0]).dense());
        ty.dtype = Element::Number([DType::BF16, DType::F16, DType::I8, DType::F32][chance.below(4)]);
        let mut names = graph.names();
        let between = graph.add_value(&mut names, "between", ty);
        graph.ops[op].args[0] = between;
        let cast = antiphon_lowering::Op {
            name: "between".into(),
            kind: Kind::Cast,
            args: vec![x],
            outs: vec![between],
        };
        graph.ops.insert(op, cast);
        Some(())
    }),
    ("an unknown operation is given other text", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::Opaque { .. }))?;
        let Kind::Opaque { target, attributes, .. } = &mut graph.ops[op].kind else { return None };
        if chance.below(2) == 0 {
            target.push('x')
        } else {
            attributes.push('x')
        }
        Some(())
    }),
    ("a norm is another", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::Fused { .. }))?;
        let Kind::Fused { fused } = &mut graph.ops[op].kind else { return None };
        match chance.below(3) {
            0 => fused.eps = fused.eps.map(|eps| eps + 0.5),
            1 => fused.weight_bias += 1.0,
            _ => fused.args.reverse(),
        }
        Some(())
    }),
    ("a call reduces otherwise", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| kind.coll().is_some())?;
        let (Kind::Start { coll, .. } | Kind::Sync { coll }) = &mut graph.ops[op].kind else { return None };
        coll.red = Some([ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Prod][chance.below(4)]);
        Some(())
    }),
    ("a call is another group's", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| kind.coll().is_some())?;
        let by = graph.groups[chance.below(graph.groups.len())].name.clone();
        let (Kind::Start { coll, .. } | Kind::Sync { coll }) = &mut graph.ops[op].kind else { return None };
        coll.group = by;
        Some(())
    }),
    ("two calls change places", |graph, _, chance| {
        let [a, b] = [0, 1].map(|_| any_op(graph, chance, Kind::communicates));
        graph.ops.swap(a?, b?);
        Some(())
    }),
    ("a start has another token", |graph, _, chance| {
        let op = any_op(graph, chance, |kind| matches!(kind, Kind::Start { .. }))?;
        let Kind::Start { token, .. } = &mut graph.ops[op].kind else { return None };
        token.0 += 100;
        Some(())
    }),
    ("a value lies where peers reach it", |graph, _, chance| {
        let value = any_value(graph, chance)?;
        let req = CommReq { domain: "tp".into(), groups: vec!["tp".into()], roles: Roles::In };
        graph.values[value.index()].class = Class::Comm(req);
        Some(())
    }),
    ("a call stands for one less", |_, decisions, chance| {
        any_call(decisions, chance)?.covers.pop().map(drop)
    }),
    ("a call is made in another way", |_, decisions, chance| {
        let call = any_call(decisions, chance)?;
        call.choice = if call.choice == Choice::Async { Choice::Sync } else { Choice::Async };
        Some(())
    }),
    ("a call has another signature", |_, decisions, chance| {
        let call = any_call(decisions, chance)?;
        call.signature = call.signature.replace("sum", "max");
        Some(())
    }),
    ("a slot is smaller", |_, decisions, _| {
        let slot = decisions.slots.first_mut()?;
        let old = slot.bytes;
        slot.bytes -= 256.min(old);
        let new = slot.bytes;
        say_otherwise(decisions, &format!("in {old} bytes"), &format!("in {new} bytes"));
        Some(())
    }),
    ("a slot goes", |_, decisions, _| decisions.slots.pop().map(drop)),
    ("a slot ends earlier", |_, decisions, _| {
        let slot = decisions.slots.first_mut()?;
        slot.last.clone_from(&slot.first);
        Some(())
    }),
    ("two slots share bytes", |_, decisions, _| {
        let [first, second, ..] = &mut decisions.slots[..] else { return None };
        let (old, new) = (first.offset, second.offset);
        first.offset = new;
        say_otherwise(decisions, &format!("bytes at {old}"), &format!("bytes at {new}"));
        Some(())
    }),
];

/// The signatures of calls follow what has changed.
fn say_otherwise(decisions: &mut Decisions, old: &str, new: &str) {
    decisions.calls.iter_mut().for_each(|call| call.signature = call.signature.replace(old, new));
}

/// A changed graph and decisions, if the change changes anything, and the kind of change.
pub fn tampered(
    graph: &Graph,
    decisions: &Decisions,
    chance: &mut Chance,
) -> Option<(Graph, Decisions, usize)> {
    let (mut new, mut other, kind) = (graph.clone(), decisions.clone(), chance.below(KINDS.len()));
    KINDS[kind].1(&mut new, &mut other, chance)?;
    ((&new, &other) != (graph, decisions)).then_some((new, other, kind))
}

fn any_op(graph: &Graph, chance: &mut Chance, suits: impl Fn(&Kind) -> bool) -> Option<usize> {
    let found: Vec<usize> = (0..graph.ops.len()).filter(|op| suits(&graph.ops[*op].kind)).collect();
    (!found.is_empty()).then(|| found[chance.below(found.len())])
}

fn any_value(graph: &Graph, chance: &mut Chance) -> Option<ValueId> {
    graph.ops[chance.below(graph.ops.len())].outs.first().copied()
}

fn any_operand<'g>(graph: &'g mut Graph, chance: &mut Chance) -> Option<&'g mut ValueId> {
    let op = any_op(graph, chance, |_| true)?;
    let args = &mut graph.ops[op].args;
    let at = chance.below(args.len().max(1));
    args.get_mut(at)
}

/// Another value of the same elements and sizes that is defined before an operation.
fn alike(graph: &Graph, old: ValueId, before: usize, chance: &mut Chance) -> Option<ValueId> {
    let ty = graph.ty(old);
    let suits = |value: &ValueId| {
        let other = graph.ty(*value);
        *value != old && other.dtype == ty.dtype && other.shape == ty.shape
    };
    let found: Vec<ValueId> =
        graph.ops[..before].iter().flat_map(|op| &op.outs).copied().filter(suits).collect();
    (!found.is_empty()).then(|| found[chance.below(found.len())])
}

fn any_number<'g>(graph: &'g mut Graph, chance: &mut Chance) -> Option<&'g mut f64> {
    let op = any_op(graph, chance, |kind| {
        matches!(kind, Kind::Full { .. } | Kind::Binary { scalar: Some(_), .. })
    })?;
    match &mut graph.ops[op].kind {
        Kind::Full { value } | Kind::Binary { scalar: Some(value), .. } => Some(value),
        _ => None,
    }
}

fn any_call<'p>(
    decisions: &'p mut Decisions,
    chance: &mut Chance,
) -> Option<&'p mut antiphon_lowering::PlannedCall> {
    let count = decisions.calls.len();
    decisions.calls.get_mut(chance.below(count.max(1)))
}
