//! Functions of elements.

use super::{Bag, Facts, Node, Term, Terms, identities::Identity};
use crate::{
    faults::Fault,
    numerics::wrapped,
    op::{Binary, Unary},
    types::Element,
};

/// A sum or a product, whose parts have no order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Chain {
    Sum,
    Product,
}

impl Chain {
    fn op(self) -> Binary {
        if self == Self::Sum { Binary::Add } else { Binary::Mul }
    }

    /// The number that changes nothing.
    fn neutral(self) -> f64 {
        if self == Self::Sum { 0.0 } else { 1.0 }
    }

    /// Two numbers as one, in these elements. Integers wrap; one that no f64 has is none. Of floating-point numbers the result is
    /// exact, and zero or an ordinary number of f32, so that a program that computes it loses nothing on the way: of more
    /// elements than f32 nothing is assumed.
    pub(super) fn of(self, element: Element, x: f64, y: f64) -> Option<f64> {
        if element.is_float() {
            let (value, lost) = match self {
                Self::Sum => {
                    let sum = x + y;
                    let second = sum - x;
                    (sum, (x - (sum - second)) + (y - second))
                }
                Self::Product => (x * y, x.mul_add(y, -(x * y))),
            };
            let is_zero = value == 0.0 && (self == Self::Sum || x == 0.0 || y == 0.0);
            return (lost == 0.0 && (is_zero || is_ordinary(value))).then_some(value);
        }
        let (x, y) = (x as i64, y as i64);
        let wide = if self == Self::Sum { x.wrapping_add(y) } else { x.wrapping_mul(y) };
        let value = wrapped(element.number()?, wide);
        (value as f64 as i64 == value && value.unsigned_abs() <= 1 << 53).then_some(value as f64)
    }

    fn node(self, element: Element, bag: Bag, number: Option<Term>) -> Node {
        match self {
            Self::Sum => Node::Sum(element, bag, number),
            Self::Product => Node::Product(element, bag, number),
        }
    }
}

/// Whether f32 has numbers of this magnitude with all their bits.
fn is_ordinary(value: f64) -> bool {
    (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&value.abs())
}

impl Terms {
    /// The sum of two terms in any order and grouping, computed in these elements.
    pub(super) fn sum(&mut self, element: Element, x: Term, y: Term) -> Term {
        self.chain(Chain::Sum, element, x, y)
    }

    /// The product of two terms in any order and grouping.
    pub(super) fn product(&mut self, element: Element, x: Term, y: Term) -> Term {
        self.chain(Chain::Product, element, x, y)
    }

    fn chain(&mut self, chain: Chain, element: Element, x: Term, y: Term) -> Term {
        let kept = self.kept(element);
        let split = |terms: &mut Self, term: Term| match (chain, terms.node(term)) {
            (_, Node::Number(_)) => (None, Some(term)),
            (Chain::Sum, Node::Sum(own, bag, number)) if own == kept => (Some(bag), number),
            (Chain::Product, Node::Product(own, bag, number)) if own == kept => (Some(bag), number),
            _ => (Some(terms.bags.one(term, 1)), None),
        };
        let ((a, p), (b, q)) = (split(self, x), split(self, y));
        let value = |terms: &Self, number: Option<Term>| number.and_then(|number| terms.as_number(number));
        let number = match (value(self, p), value(self, q)) {
            (Some(p), Some(q)) => {
                let joined = self.may(Identity::NumbersJoin, element).then(|| chain.of(element, p, q));
                match joined.flatten() {
                    Some(number) => Some(number),
                    None => return self.ordered(chain.op(), kept, x, y),
                }
            }
            (p, q) => p.or(q),
        };
        let is_neutral = number == Some(chain.neutral()) && self.may(Identity::NeutralNumber, element);
        let number =
            number.filter(|_| !is_neutral || (a, b) == (None, None)).map(|number| self.number(number));
        match (a, b) {
            (None, None) => number.expect("of two numbers"),
            (Some(a), Some(b)) => match self.bags.union(a, b) {
                Some(bag) => self.of_bag_weighing(chain.node(kept, bag, number), [x, y]),
                None => self.ordered(chain.op(), kept, x, y),
            },
            (Some(bag), None) | (None, Some(bag)) => {
                self.of_bag_weighing(chain.node(kept, bag, number), [x, y])
            }
        }
    }

    /// A sum or product that may have one part alone, which it is then.
    pub(super) fn of_bag(&mut self, node: Node) -> Term {
        self.of_bag_weighing(node, [])
    }

    /// The same, which is as heavy as the terms that it is made of. (The weight is that of the parts, and so the same however it
    /// came to be.)
    fn of_bag_weighing<const N: usize>(&mut self, node: Node, of: [Term; N]) -> Term {
        if let Node::Sum(_, bag, None) | Node::Product(_, bag, None) = node {
            let mut parts = self.bags.iter(bag);
            if let (Some((term, 1)), None) = (parts.next(), parts.next()) {
                return term;
            }
        }
        let weight = match of.is_empty() {
            true => u32::MAX,
            false => of.iter().fold(0u32, |sum, term| sum.saturating_add(self.weight(*term))),
        };
        let (Node::Sum(element, ..) | Node::Product(element, ..)) = node else { unreachable!("it is a bag") };
        self.intern(node, Facts { elements: Some(element), weight })
    }

    /// A function of two operands that commute.
    fn ordered(&mut self, op: Binary, element: Element, x: Term, y: Term) -> Term {
        self.function(op, element, x.min(y), x.max(y))
    }

    fn function(&mut self, op: Binary, element: Element, x: Term, y: Term) -> Term {
        let weight = self.weight(x).saturating_add(self.weight(y)).saturating_add(1);
        let element = self.kept(element);
        self.intern(Node::Binary(op, element, x, y), Facts { elements: Some(element), weight })
    }

    /// A function of each element, computed in these elements and not yet converted from them.
    pub(super) fn unary(&mut self, op: Unary, element: Element, x: Term) -> Term {
        let op = if Fault::SignsAreForgotten.is_present() && op == Unary::Neg { Unary::Abs } else { op };
        if self.may(Identity::NegIsProduct, element) && op == Unary::Neg {
            let minus = self.number(-1.0);
            return self.product(element, minus, x);
        }
        if op == Unary::Reciprocal
            && self.may(Identity::ReciprocalInside, element)
            && let Some(term) = self.reciprocal(element, x)
        {
            return term;
        }
        let is_exact =
            matches!(op, Unary::Neg | Unary::Abs | Unary::Relu) && self.may(Identity::ElementsStay, element);
        let kept = self.kept(element);
        let own = self.facts[x as usize].elements.filter(|_| is_exact);
        let weight = self.weight(x).saturating_add(1);
        self.intern(Node::Unary(op, kept, x), Facts { elements: Some(own.unwrap_or(kept)), weight })
    }

    /// The least power of two that is not less.
    pub(super) fn power_above(&mut self, element: Element, x: Term) -> Term {
        if self.may(Identity::PowerOfLogarithm, element) {
            return [Unary::Log2, Unary::Ceil, Unary::Exp2]
                .iter()
                .fold(x, |x, op| self.unary(*op, element, x));
        }
        let weight = self.weight(x).saturating_add(1);
        let element = self.kept(element);
        self.intern(Node::PowerAbove(element, x), Facts { elements: Some(element), weight })
    }

    /// The reciprocal of what has a simpler one.
    fn reciprocal(&mut self, element: Element, x: Term) -> Option<Term> {
        Some(match self.node(x) {
            Node::Number(bits) => {
                let inverse = self.number_in(element, 1.0 / f64::from_bits(bits));
                let is_usual = self.as_number(inverse).is_some_and(is_ordinary);
                return (is_usual && self.may(Identity::ReciprocalOfNumber, element)).then_some(inverse);
            }
            Node::Unary(Unary::Reciprocal, _, inner) => inner,
            Node::Unary(Unary::Sqrt, _, inner) => self.unary(Unary::Rsqrt, element, inner),
            Node::Unary(Unary::Rsqrt, _, inner) => self.unary(Unary::Sqrt, element, inner),
            Node::Product(_, bag, number) => {
                let factors = self.bags.listed(bag, number)?;
                let one = self.number(1.0);
                factors.into_iter().fold(one, |product, factor| {
                    let inverse = self.unary(Unary::Reciprocal, element, factor);
                    self.product(element, product, inverse)
                })
            }
            _ => return None,
        })
    }

    /// A function of two terms, computed in these elements and not yet converted from them.
    pub(super) fn binary(&mut self, op: Binary, element: Element, x: Term, y: Term) -> Term {
        if let (Binary::Pow, Some(exponent)) = (op, self.as_number(y))
            && let Some(term) = self.power(element, x, exponent)
        {
            return term;
        }
        match op {
            Binary::Add if self.may(Identity::SumsHaveNoOrder, element) => return self.sum(element, x, y),
            Binary::Mul if self.may(Identity::ProductsHaveNoOrder, element) => {
                return self.product(element, x, y);
            }
            Binary::Sub if self.may(Identity::DifferenceIsSum, element) => {
                let minus = self.unary(Unary::Neg, element, y);
                return self.sum(element, x, minus);
            }
            Binary::Div if self.may(Identity::QuotientIsProduct, element) => {
                let inverse = self.unary(Unary::Reciprocal, element, y);
                return self.product(element, x, inverse);
            }
            _ => {}
        }
        let commutes = match op {
            Binary::Add | Binary::Mul | Binary::Maximum | Binary::Minimum => {
                self.may(Identity::OperandsCommute, element)
            }
            Binary::Sub => Fault::SubtractionCommutes.is_present(),
            Binary::Div | Binary::Pow => false,
        };
        if commutes { self.ordered(op, element, x, y) } else { self.function(op, element, x, y) }
    }

    fn power(&mut self, element: Element, x: Term, exponent: f64) -> Option<Term> {
        let root = match exponent {
            1.0 if self.may(Identity::FirstPower, element) => return Some(x),
            2.0 if self.may(Identity::Square, element) => {
                return Some(self.binary(Binary::Mul, element, x, x));
            }
            0.5 => Unary::Sqrt,
            -0.5 => Unary::Rsqrt,
            -1.0 => Unary::Reciprocal,
            _ => return None,
        };
        self.may(Identity::PowerIsRoot, element).then(|| self.unary(root, element, x))
    }
}
