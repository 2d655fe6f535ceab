//! Which values a norm may be made of: values with equal terms are taken for equal, however they are spelled.
//!
//! This finds what can be fused. It proves nothing: what is proposed for values that only look alike is refused by the proof,
//! which has a language of its own.
//!
//! A term is a value as a function of the program's inputs. It leaves out how the program is written: casts that change
//! nothing, reshapes that keep rows, the order of commuting operands. Under [`Numerics::Close`] it also leaves out where f32,
//! f16, bf16 and f64 are rounded, so that equal terms are equal real functions.

mod fused;
mod program;

use crate::{
    bag::{Bag, Bags},
    hash::HashMap,
    intern::{Id, Table},
    numerics::{Numerics, rounded},
    op::{Binary, Reduction, Unary},
    sym::SymExpr,
    types::{Element, Type},
    verify::F32,
};
use antiphon_tensor::DType;

/// A term: a place in [`Terms::nodes`].
pub(crate) type Term = u32;

/// What a term is made of. Texts, sizes and lists are numbers of tables, so that nodes are small and cheap to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    /// An input or a constant of the program, by its name.
    Leaf(Id<str>),
    /// A number, as the bits of an f64.
    Number(u64),
    /// Rounded, or converted, to these elements.
    Round(Element, Term),
    Unary(Unary, Term),
    /// The least power of two that is not less, of each element.
    PowerAbove(Term),
    Binary(Binary, Term, Term),
    /// Terms added in any order, and a number.
    Sum(Bag, Option<Term>),
    /// Terms multiplied in any order, and a number.
    Product(Bag, Option<Term>),
    /// Over the last dimension, of this extent.
    Rows(Reduction, Id<SymExpr>, Term),
    /// Over other dimensions; the text has them and the shape.
    Reduce(Reduction, Id<str>, Term),
    /// The same elements in the same order: rows of the first extent, seen as rows of the second.
    Reshaped(Id<SymExpr>, Id<SymExpr>, Term),
    /// Elements at other places; the text describes the move.
    Moved(Id<str>, Term),
    /// The sum over a group.
    GroupSum(Id<str>, Term),
    /// A result of an operation that is known by its name and types, which are the text.
    Result(Id<str>, Id<[Term]>, u32),
}

/// Terms of any number of graphs, which can be compared.
pub(crate) struct Terms {
    numerics: Numerics,
    nodes: Vec<Node>,
    /// The narrowest elements that a term's values are known to have.
    exact: Vec<Element>,
    table: HashMap<Node, Term>,
    bags: Bags,
    texts: Table<str>,
    sizes: Table<SymExpr>,
    lists: Table<[Term]>,
}

impl Terms {
    pub(crate) fn new(numerics: Numerics) -> Self {
        let (nodes, exact, table) = Default::default();
        let (bags, texts, sizes, lists) = Default::default();
        Self { numerics, nodes, exact, table, bags, texts, sizes, lists }
    }

    pub(crate) fn node(&self, term: Term) -> Node {
        self.nodes[term as usize]
    }

    /// How many terms there are.
    pub(crate) fn count(&self) -> usize {
        self.nodes.len()
    }

    fn reserve(&mut self, terms: usize) {
        self.nodes.reserve(terms);
        self.exact.reserve(terms);
        self.table.reserve(terms);
    }

    /// The extent that a node names.
    pub(crate) fn size(&self, id: Id<SymExpr>) -> &SymExpr {
        self.sizes.get(id)
    }

    fn is_close(&self) -> bool {
        self.numerics == Numerics::Close
    }

    fn intern(&mut self, node: Node, exact: Element) -> Term {
        let (nodes, kept) = (&mut self.nodes, &mut self.exact);
        *self.table.entry(node).or_insert_with(|| {
            nodes.push(node);
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
            Node::Number(bits) => Some(f64::from_bits(bits)),
            _ => None,
        }
    }

    /// The summands of a term, each as often as it occurs; the term itself if it is no sum, or one of very many.
    pub(crate) fn summands(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Sum(bag, number) => self.bags.listed(bag, number).unwrap_or_else(|| vec![term]),
            _ => vec![term],
        }
    }

    /// The factors of a term, each as often as it occurs; the term itself if it is no product, or one of very many.
    pub(crate) fn factors(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Product(bag, number) => self.bags.listed(bag, number).unwrap_or_else(|| vec![term]),
            _ => vec![term],
        }
    }

    /// A value rounded to other elements.
    pub(crate) fn round(&mut self, to: Element, term: Term) -> Term {
        let from = self.exact(term);
        if from == to || is_wider(to, from) || (self.is_close() && to.is_float() && from.is_float()) {
            return term;
        }
        if let Node::Reshaped(from, last, x) = self.node(term) {
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

    /// The sum of two terms in any order and grouping.
    pub(crate) fn sum(&mut self, x: Term, y: Term) -> Term {
        let exact = self.exact(if self.as_number(x).is_some() { y } else { x });
        let is_float = exact.is_float();
        let split = |terms: &mut Self, term: Term| match terms.node(term) {
            Node::Sum(bag, number) => (Some(bag), number),
            Node::Number(_) if is_float => (None, Some(term)),
            _ => (Some(terms.bags.one(term, 1)), None),
        };
        let ((a, p), (b, q)) = (split(self, x), split(self, y));
        let number = match (p.and_then(|p| self.as_number(p)), q.and_then(|q| self.as_number(q))) {
            (Some(p), Some(q)) => Some(p + q),
            (p, q) => p.or(q),
        };
        let number = number.filter(|number| *number != 0.0).map(|number| self.number(number));
        let exact = computed(exact);
        match (a, b) {
            (None, None) => number.unwrap_or_else(|| self.number(0.0)),
            (Some(a), Some(b)) => match self.bags.union(a, b) {
                Some(bag) => self.intern(Node::Sum(bag, number), exact),
                None => self.ordered(Binary::Add, x, y, exact),
            },
            (Some(bag), None) | (None, Some(bag)) => self.of_bag(Node::Sum(bag, number), exact),
        }
    }

    /// The product of two terms in any order and grouping.
    pub(crate) fn product(&mut self, x: Term, y: Term) -> Term {
        let exact = computed(self.exact(if self.as_number(x).is_some() { y } else { x }));
        let split = |terms: &mut Self, term: Term| match terms.node(term) {
            Node::Product(bag, number) => (Some(bag), number),
            Node::Number(_) => (None, Some(term)),
            _ => (Some(terms.bags.one(term, 1)), None),
        };
        let ((a, p), (b, q)) = (split(self, x), split(self, y));
        let number = match (p.and_then(|p| self.as_number(p)), q.and_then(|q| self.as_number(q))) {
            (Some(p), Some(q)) => Some(p * q),
            (p, q) => p.or(q),
        };
        let number = number.filter(|number| *number != 1.0).map(|number| self.number(number));
        match (a, b) {
            (None, None) => number.unwrap_or_else(|| self.number(1.0)),
            (Some(a), Some(b)) => match self.bags.union(a, b) {
                Some(bag) => self.intern(Node::Product(bag, number), exact),
                None => self.ordered(Binary::Mul, x, y, exact),
            },
            (Some(bag), None) | (None, Some(bag)) => self.of_bag(Node::Product(bag, number), exact),
        }
    }

    /// A sum or product that may have one part alone, which it is then.
    fn of_bag(&mut self, node: Node, exact: Element) -> Term {
        if let Node::Sum(bag, None) | Node::Product(bag, None) = node {
            let mut parts = self.bags.iter(bag);
            if let (Some((term, 1)), None) = (parts.next(), parts.next()) {
                return term;
            }
        }
        self.intern(node, exact)
    }

    /// A function of two operands that commute.
    fn ordered(&mut self, op: Binary, x: Term, y: Term, exact: Element) -> Term {
        self.intern(Node::Binary(op, x.min(y), x.max(y)), exact)
    }

    /// A number that stands beside a tensor.
    fn scalar(&mut self, value: f64, beside: &Type, out: &Type) -> Term {
        let plain = [beside, out].iter().all(|ty| !ty.dtype.is_float() || ty.dtype == DType::F64.into());
        if plain { self.intern(Node::Number(value.to_bits()), F32) } else { self.number(value) }
    }

    pub(crate) fn unary(&mut self, op: Unary, x: Term) -> Term {
        if let Node::Reshaped(from, to, x) = self.node(x) {
            let x = self.unary(op, x);
            return self.seen_as(from, to, x);
        }
        let exact = computed(self.exact(x));
        if self.is_close() && exact.is_float() {
            match (op, self.node(x)) {
                (Unary::Neg, _) => {
                    let minus = self.number(-1.0);
                    return self.product(minus, x);
                }
                (Unary::Reciprocal, Node::Number(bits)) => return self.number(1.0 / f64::from_bits(bits)),
                (Unary::Reciprocal, Node::Unary(Unary::Reciprocal, inner)) => return inner,
                (Unary::Reciprocal, Node::Unary(Unary::Sqrt, inner)) => {
                    return self.unary(Unary::Rsqrt, inner);
                }
                (Unary::Reciprocal, Node::Unary(Unary::Rsqrt, inner)) => {
                    return self.unary(Unary::Sqrt, inner);
                }
                (Unary::Reciprocal, Node::Product(bag, number)) => {
                    if let Some(factors) = self.bags.listed(bag, number) {
                        return factors.into_iter().fold(self.number(1.0), |product, factor| {
                            let inverse = self.unary(Unary::Reciprocal, factor);
                            self.product(product, inverse)
                        });
                    }
                }
                _ => {}
            }
        }
        self.intern(Node::Unary(op, x), exact)
    }

    /// A function of two terms, not yet rounded to the result's elements.
    pub(crate) fn binary(&mut self, op: Binary, x: Term, y: Term) -> Term {
        match (self.node(x), self.node(y)) {
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
                Binary::Add => return self.sum(x, y),
                Binary::Sub => {
                    let minus = self.unary(Unary::Neg, y);
                    return self.sum(x, minus);
                }
                Binary::Mul => return self.product(x, y),
                Binary::Div => {
                    let inverse = self.unary(Unary::Reciprocal, y);
                    return self.product(x, inverse);
                }
                _ => {}
            }
        }
        // Integers wrap, so their sums have no order.
        if op == Binary::Add && exact.number().is_some_and(|dtype| !dtype.is_float()) {
            return self.sum(x, y);
        }
        match op {
            Binary::Add | Binary::Mul | Binary::Maximum | Binary::Minimum => self.ordered(op, x, y, exact),
            _ => self.intern(Node::Binary(op, x, y), exact),
        }
    }

    /// The mean, or the sum, over rows of this type.
    pub(crate) fn rows(&mut self, op: Reduction, of: &Type, x: Term) -> Term {
        let exact = computed(self.exact(x));
        let last = of.last();
        match (op, last.as_constant()) {
            (Reduction::Mean, Some(extent)) if self.is_close() && extent > 0 => {
                let sum = self.rows(Reduction::Sum, of, x);
                let inverse = self.number(1.0 / extent as f64);
                self.product(inverse, sum)
            }
            _ => {
                let last = self.sizes.intern(&last);
                self.intern(Node::Rows(op, last, x), exact)
            }
        }
    }

    /// The sum over a group of `size` ranks. Under [`Numerics::Close`], and for integers, the sum over ranks of a sum becomes a sum of
    /// such sums, and a sign comes outside.
    pub(crate) fn group_sum(&mut self, group: &str, size: u32, of: Element, x: Term) -> Term {
        if size == 1 {
            return x;
        }
        let is_linear =
            (self.is_close() && of.is_float()) || of.number().is_some_and(|dtype| !dtype.is_float());
        let minus = self.number(-1.0);
        match self.node(x) {
            Node::Sum(bag, number) if is_linear => {
                if let Some(parts) = self.bags.listed(bag, number) {
                    let sums = parts.into_iter().map(|term| self.group_sum(group, size, of, term));
                    let sums: Vec<Term> = sums.collect();
                    return sums.into_iter().reduce(|x, y| self.sum(x, y)).expect("a sum is not empty");
                }
            }
            Node::Product(bag, Some(number)) if is_linear && number == minus => {
                let rest = self.of_bag(Node::Product(bag, None), self.exact(x));
                let sum = self.group_sum(group, size, of, rest);
                return self.product(minus, sum);
            }
            _ => {}
        }
        let group = self.texts.intern(group);
        self.intern(Node::GroupSum(group, x), of)
    }

    /// `x` at the places of `to`, whose rows it may share.
    fn aligned(&mut self, x: Term, from: &Type, to: &Type) -> Term {
        let one = SymExpr::constant(1);
        if from.shape == to.shape {
            return x;
        }
        let same_rows = from.rows() == to.rows() && (from.last() == to.last() || from.last() == one);
        let is_row = from.rows().as_ref() == Some(&one) && from.last() == to.last();
        if same_rows || is_row || from.numel().as_ref() == Some(&one) {
            return x;
        }
        let text = self.texts.intern(&format!("expand {:?} {:?}", sizes(from), sizes(to)));
        self.intern(Node::Moved(text, x), self.exact(x))
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
        let (from, to) = (self.sizes.intern(from), self.sizes.intern(to));
        let (from, x) = match self.node(x) {
            Node::Reshaped(first, _, inner) => (first, inner),
            _ => (from, x),
        };
        if from == to { x } else { self.seen_as(from, to, x) }
    }

    fn seen_as(&mut self, from: Id<SymExpr>, to: Id<SymExpr>, x: Term) -> Term {
        self.intern(Node::Reshaped(from, to, x), self.exact(x))
    }

    /// A function of the elements of two tensors of one shape: before a reshape, where both have it.
    fn elementwise(&mut self, op: Binary, x: Term, y: Term) -> Term {
        match (self.node(x), self.node(y)) {
            (Node::Reshaped(from, to, x), Node::Reshaped(other, last, y)) if (from, to) == (other, last) => {
                let z = self.binary(op, x, y);
                self.seen_as(from, to, z)
            }
            _ => self.binary(op, x, y),
        }
    }
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

/// Whether arithmetic on `narrow` is done in `wide`, which has all values of `narrow`. (Arithmetic on integers of different
/// sizes wraps differently, and on f64 rounds differently, so that their conversions mean something.)
fn is_wider(wide: Element, narrow: Element) -> bool {
    wide == F32 && matches!(narrow, Element::Number(DType::F16 | DType::BF16))
}
