//! What values mean, whoever computes them: equal values have equal terms.
//!
//! A term says what a value is as a function of the program's inputs. It leaves out how the program is written: casts that
//! change nothing, reshapes that keep rows, the order of commuting operands. Under [`Numerics::Close`] it also leaves out
//! where f32, f16, bf16 and f64 are rounded, so that equal terms are equal real functions. [`check`](mod@crate::check) compares the terms
//! of two graphs; the rule `fuse` finds norms by theirs.

use std::collections::HashMap;

use antiphon_operation::ReduceOp;
use antiphon_tensor::{DType, Element as _, bf16, f16};

use crate::{
    graph::{Graph, Op},
    lower::Numerics,
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Quantize, Reduction, Unary, View},
    sym::SymExpr,
    types::{Element, Type},
    verify::F32,
};

/// A term: a place in [`Terms::nodes`].
pub(crate) type Term = u32;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    /// An input or a constant of the program, by its name.
    Leaf(String),
    /// A number, as the bits of an f64.
    Number(u64),
    /// Rounded, or converted, to these elements.
    Round(Element, Term),
    Unary(Unary, Term),
    Binary(Binary, Term, Term),
    /// Several terms added in no order.
    Sum(Vec<Term>),
    /// Several terms multiplied in no order.
    Product(Vec<Term>),
    /// Over the last dimension of this extent.
    Rows(Reduction, String, Term),
    /// Over other dimensions; the text has them and the shape.
    Reduce(Reduction, String, Term),
    /// The same elements in the same order: rows of the first extent, seen as rows of the second.
    Reshaped(String, String, Term),
    /// Elements at other places; the text says how.
    Moved(String, Term),
    /// The sum over a group.
    GroupSum(String, Term),
    /// A result of an operation that is known by its name and types, which are the text.
    Result(String, Vec<Term>, u32),
}

/// Terms of any number of graphs, which can be compared.
pub(crate) struct Terms {
    numerics: Numerics,
    nodes: Vec<Node>,
    /// The narrowest elements that a term's values are known to have.
    exact: Vec<Element>,
    table: HashMap<Node, Term>,
}

impl Terms {
    pub(crate) fn new(numerics: Numerics) -> Self {
        Self { numerics, nodes: Vec::new(), exact: Vec::new(), table: HashMap::new() }
    }

    pub(crate) fn node(&self, term: Term) -> &Node {
        &self.nodes[term as usize]
    }

    fn is_close(&self) -> bool {
        self.numerics == Numerics::Close
    }

    fn intern(&mut self, node: Node, exact: Element) -> Term {
        let (nodes, kept) = (&mut self.nodes, &mut self.exact);
        *self.table.entry(node).or_insert_with_key(|node| {
            nodes.push(node.clone());
            kept.push(exact);
            Term::try_from(nodes.len() - 1).expect("graphs are bounded")
        })
    }

    fn exact(&self, term: Term) -> Element {
        self.exact[term as usize]
    }

    /// A number as f32 arithmetic has it: `eps` is the same number in f32 and in f64 then.
    pub(crate) fn number(&mut self, value: f64) -> Term {
        let value = f64::from(value as f32);
        self.intern(Node::Number(value.to_bits()), F32)
    }

    pub(crate) fn as_number(&self, term: Term) -> Option<f64> {
        match self.node(term) {
            Node::Number(bits) => Some(f64::from_bits(*bits)),
            _ => None,
        }
    }

    /// The summands of a term, of which there may be one.
    pub(crate) fn summands(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Sum(terms) => terms.clone(),
            _ => vec![term],
        }
    }

    /// The factors of a term, of which there may be one.
    pub(crate) fn factors(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Product(terms) => terms.clone(),
            _ => vec![term],
        }
    }

    /// A value rounded to other elements.
    pub(crate) fn round(&mut self, to: Element, term: Term) -> Term {
        let from = self.exact(term);
        if from == to || is_wider(to, from) || (self.is_close() && to.is_float() && from.is_float()) {
            return term;
        }
        if let Node::Reshaped(from, last, x) = self.node(term).clone() {
            let x = self.round(to, x);
            return self.seen_as(from, last, x);
        }
        if let (Some(value), Some(dtype)) =
            (self.as_number(term), to.number().filter(|dtype| dtype.is_float()))
        {
            let value = rounded(dtype, value);
            return self.intern(Node::Number(value.to_bits()), to);
        }
        self.intern(Node::Round(to, term), to)
    }

    pub(crate) fn sum(&mut self, terms: impl IntoIterator<Item = Term>) -> Term {
        let mut all: Vec<Term> = terms.into_iter().flat_map(|term| self.summands(term)).collect();
        let exact = self.widest(&all);
        if exact.is_float() {
            let number: f64 = all.iter().filter_map(|term| self.as_number(*term)).sum();
            all.retain(|term| self.as_number(*term).is_none());
            if number != 0.0 || all.is_empty() {
                all.push(self.number(number));
            }
        }
        all.sort_unstable();
        if all.len() == 1 { all[0] } else { self.intern(Node::Sum(all), computed(exact)) }
    }

    pub(crate) fn product(&mut self, terms: impl IntoIterator<Item = Term>) -> Term {
        let mut all: Vec<Term> = terms.into_iter().flat_map(|term| self.factors(term)).collect();
        let exact = self.widest(&all);
        let number: f64 = all.iter().filter_map(|term| self.as_number(*term)).product();
        all.retain(|term| self.as_number(*term).is_none());
        if number != 1.0 || all.is_empty() {
            all.push(self.number(number));
        }
        all.sort_unstable();
        if all.len() == 1 { all[0] } else { self.intern(Node::Product(all), computed(exact)) }
    }

    /// The elements that arithmetic on these terms, of which numbers have none of their own, is done in.
    fn widest(&self, terms: &[Term]) -> Element {
        let own = terms.iter().find(|term| self.as_number(**term).is_none());
        own.map_or(F32, |term| self.exact(*term))
    }

    /// A number that stands beside a tensor.
    fn scalar(&mut self, value: f64, beside: &Type, out: &Type) -> Term {
        let plain = [beside, out].iter().all(|ty| !ty.dtype.is_float() || ty.dtype == DType::F64.into());
        if plain { self.intern(Node::Number(value.to_bits()), F32) } else { self.number(value) }
    }

    pub(crate) fn unary(&mut self, op: Unary, x: Term) -> Term {
        if let Node::Reshaped(from, to, x) = self.node(x).clone() {
            let x = self.unary(op, x);
            return self.seen_as(from, to, x);
        }
        let exact = computed(self.exact(x));
        if self.is_close() && exact.is_float() {
            match (op, self.node(x).clone()) {
                (Unary::Neg, _) => {
                    let minus = self.number(-1.0);
                    return self.product([minus, x]);
                }
                (Unary::Reciprocal, Node::Number(bits)) => return self.number(1.0 / f64::from_bits(bits)),
                (Unary::Reciprocal, Node::Unary(Unary::Reciprocal, inner)) => return inner,
                (Unary::Reciprocal, Node::Unary(Unary::Sqrt, inner)) => {
                    return self.unary(Unary::Rsqrt, inner);
                }
                (Unary::Reciprocal, Node::Unary(Unary::Rsqrt, inner)) => {
                    return self.unary(Unary::Sqrt, inner);
                }
                (Unary::Reciprocal, Node::Product(factors)) => {
                    let factors: Vec<Term> =
                        factors.into_iter().map(|factor| self.unary(Unary::Reciprocal, factor)).collect();
                    return self.product(factors);
                }
                _ => {}
            }
        }
        self.intern(Node::Unary(op, x), exact)
    }

    /// A function of two terms, not yet rounded to the result's elements.
    pub(crate) fn binary(&mut self, op: Binary, x: Term, y: Term) -> Term {
        match (self.node(x).clone(), self.node(y).clone()) {
            (Node::Reshaped(from, to, x), Node::Number(_)) => {
                let x = self.binary(op, x, y);
                return self.seen_as(from, to, x);
            }
            (Node::Number(_), Node::Reshaped(from, to, y)) => {
                let y = self.binary(op, x, y);
                return self.seen_as(from, to, y);
            }
            _ => {}
        }
        let exact = computed(if self.as_number(x).is_some() { self.exact(y) } else { self.exact(x) });
        if let (Binary::Pow, Some(exponent)) = (op, self.as_number(y)) {
            match exponent {
                1.0 => return x,
                2.0 => return self.binary(Binary::Mul, x, x),
                0.5 if self.is_close() => return self.unary(Unary::Sqrt, x),
                -0.5 if self.is_close() => return self.unary(Unary::Rsqrt, x),
                -1.0 if self.is_close() => return self.unary(Unary::Reciprocal, x),
                _ => {}
            }
        }
        if self.is_close() && exact.is_float() {
            match op {
                Binary::Add => return self.sum([x, y]),
                Binary::Sub => {
                    let minus = self.unary(Unary::Neg, y);
                    return self.sum([x, minus]);
                }
                Binary::Mul => return self.product([x, y]),
                Binary::Div => {
                    let inverse = self.unary(Unary::Reciprocal, y);
                    return self.product([x, inverse]);
                }
                _ => {}
            }
        }
        // Integers wrap, so their sums have no order.
        if op == Binary::Add && exact.number().is_some_and(|dtype| !dtype.is_float()) {
            return self.sum([x, y]);
        }
        let commutes = matches!(op, Binary::Add | Binary::Mul | Binary::Maximum | Binary::Minimum);
        let (x, y) = if commutes && y < x { (y, x) } else { (x, y) };
        self.intern(Node::Binary(op, x, y), exact)
    }

    /// The mean, or the sum, over rows of this type.
    pub(crate) fn rows(&mut self, op: Reduction, of: &Type, x: Term) -> Term {
        let exact = computed(self.exact(x));
        let last = of.last();
        match (op, last.as_constant()) {
            (Reduction::Mean, Some(extent)) if self.is_close() && extent > 0 => {
                let sum = self.rows(Reduction::Sum, of, x);
                let inverse = self.number(1.0 / extent as f64);
                self.product([inverse, sum])
            }
            _ => self.intern(Node::Rows(op, last.to_string(), x), exact),
        }
    }

    /// The sum over a group of so many ranks.
    pub(crate) fn group_sum(&mut self, group: &str, size: u32, of: Element, x: Term) -> Term {
        if size == 1 {
            return x;
        }
        let is_linear =
            (self.is_close() && of.is_float()) || of.number().is_some_and(|dtype| !dtype.is_float());
        let (node, minus) = (self.node(x).clone(), self.number(-1.0));
        match node {
            Node::Sum(terms) if is_linear => {
                let sums: Vec<Term> =
                    terms.into_iter().map(|term| self.group_sum(group, size, of, term)).collect();
                self.sum(sums)
            }
            Node::Product(factors) if is_linear && factors.contains(&minus) => {
                let rest = self.product(factors.into_iter().filter(|factor| *factor != minus));
                let sum = self.group_sum(group, size, of, rest);
                self.product([minus, sum])
            }
            _ => self.intern(Node::GroupSum(group.to_owned(), x), of),
        }
    }

    /// `x` at the places of `to`, whose rows it may share.
    fn aligned(&mut self, x: Term, from: &Type, to: &Type) -> Term {
        let one = crate::SymExpr::constant(1);
        let same_rows = from.rows() == to.rows() && (from.last() == to.last() || from.last() == one);
        let is_row = from.rows().as_ref() == Some(&one) && from.last() == to.last();
        if same_rows || is_row || from.numel().as_ref() == Some(&one) {
            return x;
        }
        let text = format!("expand {:?} {:?}", sizes(from), sizes(to));
        let exact = self.exact(x);
        self.intern(Node::Moved(text, x), exact)
    }

    /// The same elements in row-major order under another shape.
    fn reshaped(&mut self, x: Term, from: &Type, to: &Type) -> Term {
        if from.last() == to.last() && from.numel() == to.numel() {
            return x;
        }
        self.rows_of(x, &from.last(), &to.last())
    }

    /// The same elements in the same order, seen as rows of another extent.
    fn rows_of(&mut self, x: Term, from: &SymExpr, to: &SymExpr) -> Term {
        let (mut x, mut from) = (x, from.to_string());
        if let Node::Reshaped(first, _, inner) = self.node(x) {
            (from, x) = (first.clone(), *inner);
        }
        if from == to.to_string() {
            return x;
        }
        self.seen_as(from, to.to_string(), x)
    }

    fn seen_as(&mut self, from: String, to: String, x: Term) -> Term {
        let exact = self.exact(x);
        self.intern(Node::Reshaped(from, to, x), exact)
    }

    /// A function of the elements of two tensors of one shape: before a reshape, where both have it.
    fn elementwise(&mut self, op: Binary, x: Term, y: Term) -> Term {
        match (self.node(x).clone(), self.node(y).clone()) {
            (Node::Reshaped(from, to, x), Node::Reshaped(other, last, y))
                if (&from, &to) == (&other, &last) =>
            {
                let z = self.binary(op, x, y);
                self.seen_as(from, to, z)
            }
            _ => self.binary(op, x, y),
        }
    }

    /// A term for each value of a graph that is defined.
    pub(crate) fn of(&mut self, graph: &Graph) -> Vec<Option<Term>> {
        let mut terms = vec![None; graph.values.len()];
        let mut effects = 0u32;
        for op in &graph.ops {
            let args: Option<Vec<Term>> = op.args.iter().map(|arg| terms[arg.index()]).collect();
            let Some(args) = args else { continue };
            if op.kind.has_effect() && matches!(op.kind, Kind::Opaque { .. }) {
                effects += 1;
            }
            for (index, out) in op.outs.iter().enumerate() {
                let term = self.result(graph, op, &args, index, effects);
                let to = graph.ty(*out).dtype;
                terms[out.index()] = Some(self.round(to, term));
            }
        }
        terms
    }

    fn result(&mut self, graph: &Graph, op: &Op, args: &[Term], index: usize, effects: u32) -> Term {
        let out = graph.ty(op.outs[index]);
        let ty = |arg: usize| graph.ty(op.args[arg]);
        match &op.kind {
            Kind::Input | Kind::Constant => {
                self.intern(Node::Leaf(graph.name(op.outs[index]).to_owned()), out.dtype)
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
                    let text = format!("{dims:?} {:?}", sizes(ty(0)));
                    self.intern(Node::Reduce(*op, text, args[0]), computed(out.dtype))
                }
            },
            Kind::View { view: View::Reshape } | Kind::Copy => self.reshaped(args[0], ty(0), out),
            Kind::View { view: View::Expand } => self.aligned(args[0], ty(0), out),
            Kind::View { view } => {
                let text = format!("{view:?} {} {out}", ty(0));
                self.intern(Node::Moved(text, args[0]), out.dtype)
            }
            Kind::MatMul => {
                let text = format!("matmul {:?} {:?}", sizes(ty(0)), sizes(ty(1)));
                self.intern(Node::Result(text, args.to_vec(), 0), computed(out.dtype))
            }
            Kind::Assign => self.aligned(args[1], ty(1), out),
            Kind::Opaque { target, attributes, effect, communicates, .. } => {
                let types: Vec<String> = op.args.iter().map(|arg| graph.ty(*arg).to_string()).collect();
                let turn = if *effect || *communicates { effects } else { 0 };
                let text = format!("{target} {attributes} {types:?} {turn}");
                self.intern(Node::Result(text, args.to_vec(), index as u32), out.dtype)
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
        self.intern(Node::Result(text, vec![x], 0), to.dtype)
    }

    /// What a fused all-reduce gives, by its definition.
    pub(crate) fn fused(
        &mut self,
        graph: &Graph,
        fused: &Fused,
        args: &[Term],
        input: &Type,
        output: FusedOutput,
    ) -> Term {
        let operand = |role: FusedArg| fused.args.iter().position(|arg| *arg == role).map(|at| args[at + 1]);
        let size = graph.group(&fused.group).map_or(0, |group| group.size);
        let sum = self.group_sum(&fused.group, size, input.dtype, args[0]);
        let parts = NormParts {
            residual: operand(FusedArg::Residual),
            weight: operand(FusedArg::Weight),
            weight_bias: fused.weight_bias,
            eps: fused.eps.unwrap_or(0.0),
            round_before_weight: fused.round_before_weight,
        };
        let row = self.norm(sum, &parts, input);
        match output {
            FusedOutput::Sum => sum,
            FusedOutput::Residual => row.residual,
            FusedOutput::InverseRms => row.inverse_rms,
            FusedOutput::Norm => row.norm,
            FusedOutput::Codes | FusedOutput::Scales => {
                let given = match operand(FusedArg::Scale) {
                    Some(scale) => scale,
                    None => self.number(fused.scale.unwrap_or(1.0)),
                };
                let [codes, scales] = self.quantized(fused.quantize, row.norm, given, input);
                if output == FusedOutput::Codes { codes } else { scales }
            }
        }
    }

    /// Codes of a norm, and their scales: those that are given, or what follows from the norm.
    pub(crate) fn quantized(&mut self, how: Quantize, norm: Term, given: Term, ty: &Type) -> [Term; 2] {
        match how {
            Quantize::Fp8 => [self.codes(norm, given), given],
            Quantize::Fp8Tokens => {
                let scales = self.scales(norm, ty, Quantize::LEAST_OF_ROW);
                [self.divided(norm, scales), scales]
            }
            Quantize::Fp8Groups(group) => {
                let last = ty.last();
                let count = last.as_constant().and_then(|hidden| how.scales_of(hidden)).unwrap_or(1);
                let mut shape = ty.shape.clone();
                shape.pop();
                shape.extend([count.into(), i64::from(group).into()]);
                let groups = Type::new(ty.dtype, shape);
                let split = self.reshaped(norm, ty, &groups);
                let scales = self.scales(split, &groups, Quantize::LEAST_OF_GROUP);
                let scales = self.unary(Unary::Log2, scales);
                let scales = self.unary(Unary::Ceil, scales);
                let scales = self.unary(Unary::Exp2, scales);
                let codes = self.divided(split, scales);
                let [one, many] = [1.into(), count.into()];
                [self.rows_of(codes, &groups.last(), &last), self.rows_of(scales, &one, &many)]
            }
        }
    }

    /// `max(amax / 448, least)` over the rows of a type.
    fn scales(&mut self, x: Term, ty: &Type, least: f64) -> Term {
        let magnitudes = self.unary(Unary::Abs, x);
        let amax = self.rows(Reduction::Amax, ty, magnitudes);
        let (most, least) = (self.number(Quantize::MOST), self.number(least));
        let scale = self.binary(Binary::Div, amax, most);
        self.binary(Binary::Maximum, scale, least)
    }

    /// FP8 codes of `x / scale`, saturated.
    fn divided(&mut self, x: Term, scale: Term) -> Term {
        let scaled = self.binary(Binary::Div, x, scale);
        self.saturated(scaled)
    }

    fn saturated(&mut self, scaled: Term) -> Term {
        let (low, high) = (self.number(-Quantize::MOST), self.number(Quantize::MOST));
        let clamped = self.binary(Binary::Maximum, scaled, low);
        let clamped = self.binary(Binary::Minimum, clamped, high);
        self.round(Element::E4m3, clamped)
    }

    /// FP8 codes of a norm: of `n · (1 / scale)`, saturated.
    pub(crate) fn codes(&mut self, norm: Term, scale: Term) -> Term {
        let one = self.number(1.0);
        let inverse = self.binary(Binary::Div, one, scale);
        let scaled = self.binary(Binary::Mul, norm, inverse);
        self.saturated(scaled)
    }

    /// What is made of a sum, with every rounding where the kernels have it.
    pub(crate) fn norm(&mut self, sum: Term, parts: &NormParts, input: &Type) -> NormTerms {
        let residual = match parts.residual {
            Some(residual) => self.binary(Binary::Add, sum, residual),
            None => sum,
        };
        let residual = self.round(input.dtype, residual);
        let squares = self.binary(Binary::Mul, residual, residual);
        let mean = self.rows(Reduction::Mean, input, squares);
        let eps = self.number(parts.eps);
        let with_eps = self.binary(Binary::Add, mean, eps);
        let inverse_rms = self.unary(Unary::Rsqrt, with_eps);
        let weight = parts.weight.map(|weight| match parts.weight_bias {
            0.0 => weight,
            bias => {
                let bias = self.number(bias);
                self.binary(Binary::Add, bias, weight)
            }
        });
        let norm = match (weight, parts.round_before_weight) {
            (None, _) => self.binary(Binary::Mul, residual, inverse_rms),
            (Some(weight), false) => {
                let weighted = self.binary(Binary::Mul, residual, weight);
                self.binary(Binary::Mul, weighted, inverse_rms)
            }
            (Some(weight), true) => {
                let plain = self.binary(Binary::Mul, residual, inverse_rms);
                let plain = self.round(input.dtype, plain);
                self.binary(Binary::Mul, plain, weight)
            }
        };
        NormTerms { residual, inverse_rms, norm: self.round(input.dtype, norm) }
    }
}

/// What a norm is made with.
pub(crate) struct NormParts {
    pub(crate) residual: Option<Term>,
    pub(crate) weight: Option<Term>,
    pub(crate) weight_bias: f64,
    pub(crate) eps: f64,
    pub(crate) round_before_weight: bool,
}

/// What comes of it.
pub(crate) struct NormTerms {
    pub(crate) residual: Term,
    pub(crate) inverse_rms: Term,
    pub(crate) norm: Term,
}

fn sizes(ty: &Type) -> Vec<String> {
    ty.shape.iter().map(ToString::to_string).collect()
}

/// The elements that arithmetic on these is done in.
fn computed(element: Element) -> Element {
    match element {
        Element::Number(DType::F16 | DType::BF16) => F32,
        element => element,
    }
}

/// Whether arithmetic on `narrow` is done in `wide`, whose values all of its are. (Arithmetic on integers of different
/// sizes wraps differently, and on f64 rounds differently, so that their conversions mean something.)
fn is_wider(wide: Element, narrow: Element) -> bool {
    wide == F32 && matches!(narrow, Element::Number(DType::F16 | DType::BF16))
}

/// A number rounded to a type.
pub(crate) fn rounded(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::F32 => f64::from(value as f32),
        DType::F16 => <f16 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::BF16 => <bf16 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I64 => <i64 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I32 => <i32 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::I8 => <i8 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        DType::U8 => <u8 as antiphon_tensor::Element>::from_f64(value).to_f64(),
        _ => value,
    }
}
