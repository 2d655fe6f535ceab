//! Two graphs run on the same numbers.

use std::fmt;

use antiphon_tensor::DType;

use super::{Arithmetic, Tensor, interpret, numbers::full};
use crate::{
    graph::{Graph, Op},
    numerics::Numerics,
    op::Kind,
    sym::SymExpr,
    types::Element,
};

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
    /// By how much they differ, relative to the greatest magnitude of the output, or to 1 if that is less.
    pub relative: f64,
    /// By how much they may.
    pub bound: f64,
}

impl Difference {
    /// Whether it is more than the numerics allow.
    pub fn is_too_large(&self) -> bool {
        self.relative.is_nan() || self.relative > self.bound
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { output, name, rank, element, values: [before, after], relative, bound } = self;
        write!(f, "output {output} ({name}), rank {rank}, element {element}: {after}, was {before}; ")?;
        write!(f, "a difference of {relative:.1e}, where {bound:.1e} is allowed")
    }
}

/// Runs two graphs on numbers that follow from a seed: small integers for even seeds, and fractions for odd ones. The result is the
/// largest difference of an output, measured by what the numerics allow; none if there is no output, or no element.
///
/// Real numbers are computed under both numerics, so that a difference is one of the functions: 10⁻⁶ is allowed, which constants
/// rounded to f32 need. Under [`Numerics::Same`] the graphs are also run as kernels compute: 16 roundings to an output's elements
/// are allowed, as the order of rows' sums is free. Symbols have their hints.
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
    let inputs = inputs(before, world, seed)?;
    let mut worst: Option<Difference> = None;
    let kernels = (numerics == Numerics::Same).then_some(Arithmetic::Kernels);
    for arithmetic in [Some(Arithmetic::Exact), kernels].into_iter().flatten() {
        let old = interpret(before, &inputs, arithmetic)?;
        let new = interpret(after, &inputs, arithmetic)?;
        for (rank, (old, new)) in old.iter().zip(&new).enumerate() {
            for (output, (x, y)) in old.iter().zip(new).enumerate() {
                let name = before.name(before.outputs[output]);
                let found = difference(x, y, bound(arithmetic, x.dtype)).map(|found| Difference {
                    output,
                    name: name.to_owned(),
                    rank,
                    ..found
                });
                let excess = |found: &Option<Difference>| {
                    found.as_ref().map_or(-1.0, |found| {
                        if found.relative.is_nan() { f64::MAX } else { found.relative / found.bound }
                    })
                };
                worst = if excess(&found) > excess(&worst) { found } else { worst };
            }
        }
    }
    Ok(worst)
}

/// What a second look at a lowered program says.
#[derive(Debug, Clone, PartialEq)]
pub enum Opinion {
    /// The results are equal, as far as the numerics go.
    Equal,
    /// They are not.
    Different(Difference),
    /// The programs were not run, for this reason.
    None(String),
}

/// The most elements that a second look computes, of all ranks together: a fraction of a second.
const MOST_LOOKED_AT: usize = 1 << 20;

/// Runs a program and what it was lowered to, as [`compare`] does, on integers and on fractions. Symbols are as small as they may
/// be, and products of matrices are other linear functions, which no rule looks into.
///
/// A program that computes more than 2²⁰ elements, or whose symbols cannot be small, is not run.
pub fn second_opinion(before: &Graph, after: &Graph, numerics: Numerics) -> Opinion {
    let [before, after] = [before, after].map(shrunk);
    let work = |graph: &Graph| elements(graph)?.checked_mul(world(graph).ok()?);
    match work(&before).zip(work(&after)).map(|(before, after)| before.saturating_add(after)) {
        Some(elements) if elements <= MOST_LOOKED_AT => {}
        Some(elements) => {
            return Opinion::None(format!(
                "{elements} elements, of at most {MOST_LOOKED_AT} that are computed twice"
            ));
        }
        None => return Opinion::None("a size that has no small value, or too many elements".into()),
    }
    for seed in [2, 3] {
        match compare(&before, &after, numerics, seed) {
            Ok(Some(found)) if found.is_too_large() => return Opinion::Different(found),
            Ok(_) => {}
            Err(reason) => return Opinion::None(reason),
        }
    }
    Opinion::Equal
}

/// The same program with small symbols, and without products of matrices.
fn shrunk(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    for sym in &mut graph.syms {
        sym.hint = Some(sym.max.map_or(3, |max| max.min(3)).max(sym.min));
    }
    for op in &mut graph.ops {
        if op.kind == Kind::MatMul {
            let (target, attributes, aliases) = ("matmul".into(), String::new(), Vec::new());
            op.kind = Kind::Opaque { target, attributes, aliases, effect: false, communicates: false };
        }
    }
    graph
}

/// How much an output may differ.
fn bound(arithmetic: Arithmetic, element: Element) -> f64 {
    let rounding = match element {
        Element::Number(DType::F64 | DType::F32) => 2f64.powi(-24),
        Element::Number(DType::F16) => 2f64.powi(-11),
        Element::Number(DType::BF16) => 2f64.powi(-8),
        Element::E4m3 => 2f64.powi(-4),
        _ => 2f64.powi(-24),
    };
    match arithmetic {
        Arithmetic::Exact => 1e-6,
        Arithmetic::Kernels => 16.0 * rounding,
    }
}

/// The largest difference of two tensors.
fn difference(x: &Tensor, y: &Tensor, bound: f64) -> Option<Difference> {
    if (x.dtype, &x.shape, x.data.len()) != (y.dtype, &y.shape, y.data.len()) {
        let values = [x.data.len() as f64, y.data.len() as f64];
        let (output, name, rank, element) = Default::default();
        return Some(Difference { output, name, rank, element, values, relative: f64::NAN, bound });
    }
    let finite =
        |data: &[f64]| data.iter().filter(|x| x.is_finite()).fold(1.0, |most: f64, x| most.max(x.abs()));
    let scale = finite(&x.data);
    let apart = |(element, (x, y)): (usize, (&f64, &f64))| {
        let relative = if x == y || (x.is_nan() && y.is_nan()) { 0.0 } else { (x - y).abs() / scale };
        let relative = if relative.is_nan() { f64::INFINITY } else { relative };
        let (output, name, rank) = Default::default();
        Difference { output, name, rank, element, values: [*x, *y], relative, bound }
    };
    x.data.iter().zip(&y.data).enumerate().map(apart).max_by(|a, b| a.relative.total_cmp(&b.relative))
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

/// Numbers for the inputs of every rank.
fn inputs(graph: &Graph, world: usize, seed: u64) -> Result<Vec<Vec<Tensor>>, String> {
    let mut state = seed ^ 0x9E37_79B9_7F4A_7C15;
    let mut number = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / f64::from(1u32 << 31)
    };
    let given = |op: &&Op| matches!(op.kind, Kind::Input | Kind::Constant);
    let mut rank = || {
        let tensors = graph.ops.iter().filter(given).map(|op| {
            let dtype = graph.ty(op.outs[0]).dtype;
            let shapes = sizes(graph, op).ok_or_else(|| format!("{}: a size without a hint", op.name))?;
            let shape = shapes.into_iter().next().unwrap_or_default();
            // All floating-point types have multiples of 1/16 up to 2, and integers their own bounds at times.
            let element = |number: f64| match dtype {
                Element::Number(dtype) if !dtype.is_float() && number > 0.9 => 100.0 * (number - 0.95) * 25.0,
                _ if seed.is_multiple_of(2) => (number * 9.0).floor() - 4.0,
                _ => (number * 64.0).round() / 16.0 - 2.0,
            };
            let data = (0..shape.iter().product()).map(|_| full(dtype, element(number()))).collect();
            Ok(Tensor { dtype, shape, data })
        });
        tensors.collect::<Result<Vec<_>, String>>()
    };
    (0..world).map(|_| rank()).collect()
}
