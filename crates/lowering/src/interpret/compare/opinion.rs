//! A second look at a lowered program, when it is compiled.

use super::{Difference, compare, elements, world};
use crate::{graph::Graph, numerics::Numerics, op::Kind, sym::Sym};

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

/// Runs a program and what it was lowered to, as [`compare`] does, on integers and on fractions. Symbols are once as small as they may
/// be, and once have small values that differ. Products of matrices are other linear functions, which no rule looks into.
///
/// A program that computes more than 2²⁰ elements, or whose symbols cannot be small, is not run.
pub fn second_opinion(before: &Graph, after: &Graph, numerics: Numerics) -> Opinion {
    let mut reason = None;
    let mut is_run = false;
    let sizes: [fn(usize, &Sym) -> i64; 2] = [least, distinct];
    let sizes = if before.syms.is_empty() { &sizes[..1] } else { &sizes[..] };
    for size in sizes {
        let [before, after] = [before, after].map(|graph| shrunk(graph, size));
        match run(&before, &after, numerics) {
            Opinion::Equal => is_run = true,
            Opinion::None(why) => reason = reason.or(Some(why)),
            different @ Opinion::Different(_) => return different,
        }
    }
    match reason.filter(|_| !is_run) {
        Some(reason) => Opinion::None(reason),
        None => Opinion::Equal,
    }
}

fn run(before: &Graph, after: &Graph, numerics: Numerics) -> Opinion {
    let work = |graph: &Graph| elements(graph)?.checked_mul(world(graph).ok()?);
    match work(before).zip(work(after)).map(|(before, after)| before.saturating_add(after)) {
        Some(elements) if elements <= MOST_LOOKED_AT => {}
        Some(elements) => {
            return Opinion::None(format!(
                "{elements} elements, of at most {MOST_LOOKED_AT} that are computed twice"
            ));
        }
        None => return Opinion::None("a size that has no small value, or too many elements".into()),
    }
    for seed in [2, 3] {
        match compare(before, after, numerics, seed) {
            Ok(Some(found)) if found.is_too_large() => return Opinion::Different(found),
            Ok(_) => {}
            Err(reason) => return Opinion::None(reason),
        }
    }
    Opinion::Equal
}

/// The least value of a symbol.
fn least(_: usize, sym: &Sym) -> i64 {
    sym.min
}

/// A small value, which is that of no other symbol where the bounds allow it.
fn distinct(index: usize, sym: &Sym) -> i64 {
    sym.max.unwrap_or(i64::MAX).min(index as i64 + 3).max(sym.min)
}

/// The same program with other values of its symbols, and without products of matrices.
fn shrunk(graph: &Graph, size: &fn(usize, &Sym) -> i64) -> Graph {
    let mut graph = graph.clone();
    for (index, sym) in graph.syms.iter_mut().enumerate() {
        sym.hint = Some(size(index, sym));
    }
    for op in &mut graph.ops {
        if op.kind == Kind::MatMul {
            let (target, attributes, aliases) = ("matmul".into(), String::new(), Vec::new());
            op.kind = Kind::Opaque { target, attributes, aliases, effect: false, communicates: false };
        }
    }
    graph
}
