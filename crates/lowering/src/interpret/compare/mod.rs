//! Two graphs run on the same numbers.

mod inputs;
mod opinion;

use std::fmt;

use antiphon_tensor::DType;

use super::{Arithmetic, Tensor, interpret};
use crate::{
    graph::{Graph, Op},
    numerics::Numerics,
    op::{Kind, Quantize, Unary},
    sym::SymExpr,
    types::Element,
};
use inputs::{Draw, STEP, inputs, moved};
pub use opinion::{Opinion, second_opinion};

/// The most elements that all operations of all ranks compute together.
const MOST_ELEMENTS: usize = 1 << 26;

/// A difference of two graphs' results.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The output, by its place among them.
    pub output: usize,
    /// The output's name in the graph before.
    pub name: String,
    /// The rank.
    pub rank: usize,
    /// The element, in row-major order.
    pub element: usize,
    /// What the graph before gives there, and the one after.
    pub values: [f64; 2],
    /// How much they differ; NaN if the outputs have other elements or shapes.
    pub apart: f64,
    /// How much they may differ.
    pub allowed: f64,
}

impl Difference {
    /// Whether it is more than the numerics allow.
    pub fn is_too_large(&self) -> bool {
        self.apart.is_nan() || self.apart > self.allowed
    }

    /// How much it is of what is allowed.
    fn excess(&self) -> f64 {
        match (self.apart, self.allowed) {
            (0.0, _) => 0.0,
            (apart, _) if apart.is_nan() => f64::INFINITY,
            (_, f64::INFINITY) => 0.0,
            (apart, allowed) => apart / allowed,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, name, rank, element, values: [before, after], apart, allowed } = self;
        write!(f, "output {output} ({name}), rank {rank}, element {element}: {after}, was {before}; ")?;
        write!(f, "a difference of {apart:.1e}, where {allowed:.1e} is allowed")
    }
}

/// Runs two graphs on numbers that follow from a seed. The result is the largest difference of an element, measured by what the
/// numerics allow; none if there is no output, or no element. Symbols have their hints.
///
/// Once both compute with real numbers, of small integers for even seeds and of fractions for odd ones, so that a difference is one
/// of the functions. Of each floating-point element 10⁻⁶ is allowed, which constants rounded to f32 need, and as much more as the
/// element of the graph before moves when its inputs move by so little. Integers and truth values must be equal, unless a move of
/// an input by a bf16's rounding changes them.
///
/// Once both compute as kernels do, on numbers of as many bits as their types have. Under [`Numerics::Same`] all bits must be equal. A
/// fused norm adds a row up in another order; with one, and under [`Numerics::Close`], the graphs may differ by 8 times the error
/// that the graph before itself has in that output, and by 16 roundings to f32 (of f64 by fewer). Outputs behind a function that
/// jumps, such as a conversion to integers or codes, are then compared as functions only.
///
/// # Errors
/// What [`interpret`] refuses, or that there is too much to compute, with the number of elements.
pub fn compare(
    before: &Graph,
    after: &Graph,
    numerics: Numerics,
    seed: u64,
) -> Result<Option<Difference>, String> {
    let world = world(before)?;
    for graph in [before, after] {
        let elements = elements(graph).and_then(|elements| elements.checked_mul(world));
        if elements.is_none_or(|elements| elements > MOST_ELEMENTS) {
            let found = elements.map_or("too many".into(), |elements| elements.to_string());
            return Err(format!("{found} elements of {world} ranks; at most {MOST_ELEMENTS} are computed"));
        }
    }
    let pair = Pair { before, after, world, seed };
    let found = [pair.as_kernels(numerics)?, pair.as_functions()?];
    Ok(found.into_iter().flatten().max_by(|a, b| a.excess().total_cmp(&b.excess())))
}

/// What every rank returns.
type Results = Vec<Vec<Tensor>>;

/// Two graphs, on the same numbers.
struct Pair<'g> {
    before: &'g Graph,
    after: &'g Graph,
    world: usize,
    seed: u64,
}

impl Pair<'_> {
    /// The difference as functions of real numbers.
    fn as_functions(&self) -> Result<Option<Difference>, String> {
        let draw = if self.seed.is_multiple_of(2) { Draw::Integers } else { Draw::Fractions };
        let inputs = inputs(self.before, self.world, self.seed, draw)?;
        let run = |graph: &Graph, inputs: &[Vec<Tensor>]| interpret(graph, inputs, Arithmetic::Exact);
        let (old, new) = (run(self.before, &inputs)?, run(self.after, &inputs)?);
        let largest = greatest(inputs.iter().flatten());
        let is_real = |at: At| {
            let dtype = old[at.rank][at.output].dtype;
            dtype.is_float() || dtype == Element::E4m3
        };
        let plain = |at: At, x: f64, y: f64| match is_real(at) {
            // An f64 is rounded as well.
            true => 1e-6 * finite(x).max(finite(y)) + 2f64.powi(-44) * largest,
            false => 0.0,
        };
        let found = self.worst(&old, &new, plain);
        if !found.as_ref().is_some_and(Difference::is_too_large) {
            return Ok(found);
        }
        let moved: Vec<Results> = (0..2)
            .map(|turn| run(self.before, &moved(&inputs, self.seed ^ turn)))
            .collect::<Result<_, _>>()?;
        Ok(self.worst(&old, &new, |at, x, y| {
            let reach = moved.iter().map(|moved| (moved[at.rank][at.output].data[at.element] - x).abs());
            let reach = reach.filter(|reach| reach.is_finite()).fold(0.0, f64::max);
            plain(at, x, y) + if is_real(at) { reach / STEP * 2f64.powi(-20) } else { reach }
        }))
    }

    /// The difference as kernels compute.
    fn as_kernels(&self, numerics: Numerics) -> Result<Option<Difference>, String> {
        let draw = |turn: u64| inputs(self.before, self.world, self.seed ^ turn << 32, Draw::AllBits);
        let given = draw(0)?;
        let run = |graph: &Graph, inputs: &[Vec<Tensor>]| interpret(graph, inputs, Arithmetic::Kernels);
        let (old, new) = (run(self.before, &given)?, run(self.after, &given)?);
        let bits = self.worst(&old, &new, |_, _, _| 0.0);
        if !bits.as_ref().is_some_and(Difference::is_too_large) {
            return Ok(bits);
        }
        if numerics == Numerics::Same && ![self.before, self.after].into_iter().any(has_norm) {
            return Ok(bits);
        }
        let error = |given: &[Vec<Tensor>], old: &Results| -> Result<Vec<f64>, String> {
            let exact = interpret(self.before, given, Arithmetic::Exact)?;
            Ok((0..self.before.outputs.len()).map(|output| error(output, old, &exact)).collect())
        };
        let mut errors = error(&given, &old)?;
        let jumps = jumps(self.before);
        let scales: Vec<f64> = (0..self.before.outputs.len())
            .map(|output| greatest(old.iter().filter_map(|rank| rank.get(output))))
            .collect();
        let worst = |errors: &[f64]| {
            self.worst(&old, &new, |at, x, _| match old[at.rank][at.output].dtype {
                // The graph before went beyond its elements by itself.
                dtype if dtype.is_float() && !x.is_finite() => f64::INFINITY,
                _ if jumps[at.output] => f64::INFINITY,
                Element::Number(DType::F64) => 8.0 * errors[at.output] + 2f64.powi(-44) * scales[at.output],
                dtype if dtype.is_float() => 8.0 * errors[at.output] + 2f64.powi(-20) * scales[at.output],
                _ => 0.0,
            })
        };
        let mut found = worst(&errors);
        // The errors of a few elements may be small by chance. So the comparison looks at other elements before it reports a difference.
        for turn in 1..5 {
            if !found.as_ref().is_some_and(Difference::is_too_large) {
                break;
            }
            let given = draw(turn)?;
            let more = error(&given, &run(self.before, &given)?)?;
            errors.iter_mut().zip(more).for_each(|(error, more)| *error = error.max(more));
            found = worst(&errors);
        }
        Ok(found)
    }

    /// The largest difference, by what is allowed of two elements at a place.
    fn worst(
        &self,
        old: &Results,
        new: &Results,
        allowed: impl Fn(At, f64, f64) -> f64,
    ) -> Option<Difference> {
        // The name follows at the end: few of many differences are told.
        let (mut worst, name): (Option<Difference>, String) = (None, String::new());
        let mut tell = |found: Difference| {
            if worst.as_ref().is_none_or(|worst| found.excess() > worst.excess()) {
                worst = Some(found);
            }
        };
        for (rank, (old, new)) in old.iter().zip(new).enumerate() {
            for (output, (x, y)) in old.iter().zip(new).enumerate() {
                if (x.dtype, &x.shape, x.data.len()) != (y.dtype, &y.shape, y.data.len()) {
                    let values = [x.data.len() as f64, y.data.len() as f64];
                    let (apart, allowed) = (f64::NAN, 0.0);
                    tell(Difference { output, name: name.clone(), rank, element: 0, values, apart, allowed });
                    continue;
                }
                for (element, (x, y)) in x.data.iter().zip(&y.data).enumerate() {
                    let is_same = x == y || (x.is_nan() && y.is_nan());
                    if is_same && element > 0 {
                        continue;
                    }
                    let apart = if is_same { 0.0 } else { (x - y).abs() };
                    let apart = if apart.is_nan() { f64::INFINITY } else { apart };
                    let allowed = allowed(At { rank, output, element }, *x, *y);
                    let values = [*x, *y];
                    tell(Difference { output, name: name.clone(), rank, element, values, apart, allowed });
                }
            }
        }
        worst.map(|found| Difference {
            name: self.before.name(self.before.outputs[found.output]).to_owned(),
            ..found
        })
    }
}

/// The place of an element among results.
#[derive(Clone, Copy)]
struct At {
    rank: usize,
    output: usize,
    element: usize,
}

/// The magnitude of a number that has one.
fn finite(x: f64) -> f64 {
    if x.is_finite() { x.abs() } else { 0.0 }
}

/// The greatest magnitude of finite elements.
fn greatest<'t>(tensors: impl Iterator<Item = &'t Tensor>) -> f64 {
    tensors.flat_map(|tensor| &tensor.data).map(|x| finite(*x)).fold(0.0, f64::max)
}

/// The greatest error of an output, among elements that are finite.
fn error(output: usize, found: &Results, exact: &Results) -> f64 {
    let pairs = found.iter().zip(exact).filter_map(|(x, y)| Some((x.get(output)?, y.get(output)?)));
    let apart = pairs.flat_map(|(x, y)| x.data.iter().zip(&y.data)).map(|(x, y)| (x - y).abs());
    apart.filter(|apart| apart.is_finite()).fold(0.0, f64::max)
}

/// For each output, whether a rounding on its way may decide between two values that are far apart.
fn jumps(graph: &Graph) -> Vec<bool> {
    let mut jumps = vec![false; graph.values.len()];
    for op in &graph.ops {
        let is_after = op.args.iter().any(|arg| jumps[arg.index()]);
        for out in &op.outs {
            let dtype = graph.ty(*out).dtype;
            let decides = match &op.kind {
                Kind::Unary { op } => *op == Unary::Ceil,
                Kind::Cast | Kind::Assign => {
                    !dtype.is_float() && op.args.iter().any(|arg| graph.ty(*arg).dtype.is_float())
                }
                Kind::Fused { fused } => fused.quantize != Quantize::Fp8 || dtype == Element::E4m3,
                _ => false,
            };
            jumps[out.index()] = is_after || decides;
        }
    }
    graph.outputs.iter().map(|output| jumps[output.index()]).collect()
}

/// Whether a graph has a fused norm.
fn has_norm(graph: &Graph) -> bool {
    graph.ops.iter().any(|op| matches!(&op.kind, Kind::Fused { fused } if fused.eps.is_some()))
}

/// The least number of ranks of which each group has a part.
fn world(graph: &Graph) -> Result<usize, String> {
    let common = |a: usize, b: usize| {
        let (mut x, mut y) = (a, b);
        while y > 0 {
            (x, y) = (y, x % y);
        }
        (a / x).checked_mul(b).filter(|ranks| *ranks <= 1 << 20)
    };
    let ranks = graph.groups.iter().try_fold(1, |ranks, group| common(ranks, group.size as usize));
    ranks.ok_or_else(|| "the groups have too many ranks together".into())
}

fn sizes(graph: &Graph, op: &Op) -> Option<Vec<Vec<usize>>> {
    let hint = |name: &str| graph.syms.iter().find(|sym| sym.name == name)?.hint;
    let size = |size: &SymExpr| size.value(&hint).and_then(|size| usize::try_from(size).ok());
    op.outs.iter().map(|out| graph.ty(*out).shape.iter().map(size).collect()).collect()
}

/// How many elements all operations compute; those of a product of matrices as often as they are added up.
fn elements(graph: &Graph) -> Option<usize> {
    graph.ops.iter().try_fold(0usize, |sum, op| {
        let depth = match op.kind {
            Kind::MatMul => graph.ty(op.args[0]).shape.get(1)?.as_constant().map_or(1, |k| k.max(1) as usize),
            _ => 1,
        };
        sizes(graph, op)?.iter().try_fold(sum, |sum, shape| {
            let count = shape.iter().try_fold(depth, |count, size| count.checked_mul(*size))?;
            sum.checked_add(count.max(1))
        })
    })
}
