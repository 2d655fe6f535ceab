//! What values mean, independent of the program that computes them: values with equal terms are equal.
//!
//! A term is a sequence of elements, as a function of the program's inputs. A tensor is the sequence of its elements in row-major
//! order, so that a reshape is nothing, and every other move of elements is an affine map of indices ([`Places`]). A node of a term
//! holds all that its meaning depends on. Two different terms may be equal all the same; which of those are made one is written
//! in the table of [`identities`].
//!
//! Under [`Numerics::Close`] a term is a function of real numbers, without the roundings of floating-point numbers. Which
//! roundings a value has is for [`roundings`](super::roundings) to say.

mod arithmetic;
mod fused;
pub(crate) mod identities;
mod moves;
mod program;
#[cfg(test)]
mod tests;

use antiphon_tensor::DType;

use crate::{
    bag::{Bag, Bags},
    faults::Fault,
    hash::HashMap,
    intern::{Id, Table},
    numerics::{Numerics, rounded, wrapped},
    op::{Binary, Reduction, Unary},
    places::Places,
    sym::{Sym, SymExpr},
    types::Element,
    verify::arithmetic::has_all,
};
use arithmetic::Chain;
use identities::{Enabled, Identity};
pub(crate) use program::Meanings;
use program::{Call, Unknown};

/// A term: a place in [`Terms::nodes`].
pub(crate) type Term = u32;

/// How elements are converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Conversion {
    /// To floating-point numbers, to nearest.
    Rounded,
    /// Floating-point numbers to integers, towards zero, or to what is nearest.
    Truncated,
    /// Integers to integers, which wrap.
    Wrapped,
    /// To truth values: whether it is not zero.
    NonZero,
    /// To codes of FP8.
    Coded,
}

/// What a term is made of. Names, sizes, maps and lists are numbers of tables, so that nodes are small and cheap to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Node {
    /// An input or a constant of the program: its name, and its elements.
    Leaf(Id<str>, Element),
    /// Memory beside the elements of an input or a constant, by its name; of what the program computed, which nobody wrote, by
    /// a number that no other has. Also what no operation of a program gives.
    Gap(Option<Id<str>>, u32),
    /// The bits of an f64, repeated as often as it takes.
    Number(u64),
    /// Elements converted.
    Cast(Conversion, Element, Term),
    /// A function of each element, computed in these elements.
    Unary(Unary, Element, Term),
    /// A function of elements at equal places, computed in these elements.
    Binary(Binary, Element, Term, Term),
    /// The least power of two that is not less, of each element, in these elements.
    PowerAbove(Element, Term),
    /// Terms added in any order, and a number.
    Sum(Element, Bag, Option<Term>),
    /// Terms multiplied in any order, and a number.
    Product(Element, Bag, Option<Term>),
    /// A reduction of each group of this number of neighbours, computed in these elements.
    Rows(Reduction, Element, Id<SymExpr>, Term),
    /// The elements at these places of a sequence of this number of elements.
    Moved(Id<Places>, Id<SymExpr>, Term),
    /// Memory in which elements at some places have been replaced.
    Written(Term, Id<Places>, Term),
    /// A product of two matrices, `m × k` and `k × n`, computed in these elements.
    Matrix(Element, Id<[SymExpr]>, Term, Term),
    /// The sum over a group, of such elements.
    GroupSum(Id<str>, Element, Term),
    /// What another collective gives.
    Call(Id<Call>, Term),
    /// A result, or memory, of an operation that this crate does not know, by its operands and the memory in which they lie.
    Unknown(Id<Unknown>, Id<[Term]>, Part),
}

/// What is taken of an operation that is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Result(u32),
    Memory(u32),
}

/// Terms of any number of graphs, which can be compared.
pub(crate) struct Terms {
    numerics: Numerics,
    enabled: Enabled,
    syms: Vec<Sym>,
    nodes: Vec<Node>,
    facts: Vec<Facts>,
    table: HashMap<Node, Term>,
    bags: Bags,
    names: Table<str>,
    sizes: Table<SymExpr>,
    places: Table<Places>,
    shapes: Table<[SymExpr]>,
    lists: Table<[Term]>,
    calls: Table<Call>,
    unknown: Table<Unknown>,
    gaps: u32,
}

/// What is known of a term.
#[derive(Debug, Clone, Copy)]
struct Facts {
    /// Elements that have all its values.
    elements: Option<Element>,
    /// How many operations on elements it is made of, until something else.
    weight: u32,
}

/// Up to here an f64 has every integer.
const MOST_EXACT: f64 = (1u64 << 53) as f64;

impl Terms {
    /// Terms of graphs with these symbols.
    pub(crate) fn new(numerics: Numerics, syms: &[Sym]) -> Self {
        Self::with(numerics, syms, Enabled::all(numerics))
    }

    /// The same where only some identities are used.
    pub(crate) fn with(numerics: Numerics, syms: &[Sym], enabled: Enabled) -> Self {
        let (nodes, facts, table, bags) = Default::default();
        let (names, sizes, places, shapes, lists, calls, unknown) = Default::default();
        let (syms, gaps) = (syms.to_vec(), 0);
        Self {
            numerics,
            enabled,
            syms,
            nodes,
            facts,
            table,
            bags,
            names,
            sizes,
            places,
            shapes,
            lists,
            calls,
            unknown,
            gaps,
        }
    }

    fn node(&self, term: Term) -> Node {
        self.nodes[term as usize]
    }

    fn reserve(&mut self, terms: usize) {
        self.nodes.reserve(terms);
        self.facts.reserve(terms);
        self.table.reserve(terms);
    }

    /// Whether an identity holds for such elements.
    fn may(&self, identity: Identity, element: Element) -> bool {
        self.enabled.may(identity, element)
    }

    /// Elements as a node has them: real numbers where no rounding counts.
    fn kept(&self, element: Element) -> Element {
        let is_real = element.is_float() && self.numerics == Numerics::Close;
        match element {
            _ if is_real => Element::Number(DType::F64),
            Element::Number(_) if Fault::SumsAreEndless.is_present() => Element::Number(DType::I64),
            element => element,
        }
    }

    fn intern(&mut self, node: Node, facts: Facts) -> Term {
        let (nodes, kept) = (&mut self.nodes, &mut self.facts);
        *self.table.entry(node).or_insert_with(|| {
            nodes.push(node);
            kept.push(facts);
            Term::try_from(nodes.len() - 1).expect("graphs are bounded")
        })
    }

    /// A term that moves do not go into.
    fn opaque(&mut self, node: Node, elements: Element) -> Term {
        self.intern(node, Facts { elements: Some(elements), weight: 1 })
    }

    fn weight(&self, term: Term) -> u32 {
        self.facts[term as usize].weight
    }

    /// A number.
    fn number(&mut self, value: f64) -> Term {
        let value = if Fault::NumbersAreSingle.is_present() { f64::from(value as f32) } else { value };
        self.intern(Node::Number(value.to_bits()), Facts { elements: None, weight: 0 })
    }

    /// A number as arithmetic on such elements has it.
    fn number_in(&mut self, element: Element, value: f64) -> Term {
        let value = element.number().map_or(value, |dtype| rounded(dtype, value));
        self.number(value)
    }

    fn as_number(&self, term: Term) -> Option<f64> {
        match self.node(term) {
            Node::Number(bits) => Some(f64::from_bits(bits)),
            _ => None,
        }
    }

    /// Whether elements have all values of a term.
    fn fits(&self, term: Term, elements: Element) -> bool {
        match self.as_number(term) {
            Some(value) => {
                elements.number().is_some_and(|dtype| rounded(dtype, value).to_bits() == value.to_bits())
            }
            None => self.facts[term as usize].elements.is_some_and(|own| has_all(elements, own)),
        }
    }

    /// The summands of a term, each as often as it occurs; the term itself if it is no sum, or one of very many.
    pub(crate) fn summands(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Sum(_, bag, number) => self.bags.listed(bag, number).unwrap_or_else(|| vec![term]),
            _ => vec![term],
        }
    }

    /// Elements of one type converted to another, as a cast does.
    fn cast(&mut self, from: Element, to: Element, x: Term) -> Term {
        let conversion = match (from, to) {
            _ if Fault::CastsKeepAll.is_present() => return x,
            (_, Element::Bool) if from != Element::Bool => Conversion::NonZero,
            (_, Element::E4m3) if from != Element::E4m3 => Conversion::Coded,
            _ if self.may(Identity::CastThatKeeps, to) && (from == to || self.fits(x, to)) => return x,
            _ if Fault::SumsAreEndless.is_present() => return x,
            _ if to.is_float() => Conversion::Rounded,
            _ if from.is_float() || from == Element::E4m3 => Conversion::Truncated,
            _ => Conversion::Wrapped,
        };
        if conversion == Conversion::Rounded && from.is_float() && self.may(Identity::RoundingLess, to) {
            return x;
        }
        if let (Some(value), Some(dtype), Conversion::Rounded) = (self.as_number(x), to.number(), conversion)
            && self.may(Identity::CastOfNumber, to)
        {
            return self.number(rounded(dtype, value));
        }
        let weight = self.weight(x).saturating_add(1);
        self.intern(Node::Cast(conversion, to, x), Facts { elements: Some(to), weight })
    }

    /// A reduction of `extent` neighbours each.
    fn rows(&mut self, op: Reduction, element: Element, extent: &SymExpr, x: Term) -> Term {
        let one = SymExpr::constant(1);
        let extent = if Fault::ExtentsAreForgotten.is_present() { &one } else { extent };
        if let (Reduction::Mean, Some(count)) = (op, extent.as_constant())
            && count > 0
            && self.may(Identity::MeanIsSum, element)
        {
            let sum = self.rows(Reduction::Sum, element, extent, x);
            let inverse = self.number_in(element, 1.0 / count as f64);
            return self.product(element, inverse, sum);
        }
        let extent = self.sizes.intern(extent);
        let is_one_of_them = op == Reduction::Amax && self.may(Identity::ElementsStay, element);
        let own = self.facts[x as usize].elements.filter(|_| is_one_of_them);
        let element = self.kept(element);
        self.opaque(Node::Rows(op, element, extent, x), own.unwrap_or(element))
    }

    /// The sum of elements `of` over a group of `size` ranks.
    fn group_sum(&mut self, group: &str, size: u32, of: Element, x: Term) -> Term {
        if size == 1 && self.may(Identity::RankAlone, of) {
            return x;
        }
        if let (Some(value), Some(dtype)) = (self.as_number(x), of.number())
            && self.may(Identity::SumOfNumber, of)
        {
            let sum = value * f64::from(size);
            if let Some(sum) = Chain::Product.of(of, value, size.into()).filter(|_| dtype.is_float()) {
                return self.number(sum);
            }
            if !dtype.is_float() && sum.abs() <= MOST_EXACT {
                return self.number(wrapped(dtype, sum as i64) as f64);
            }
        }
        if self.may(Identity::SumOfSums, of) {
            let minus = self.number(-1.0);
            match self.node(x) {
                Node::Sum(element, bag, number) if element == self.kept(of) => {
                    if let Some(parts) = self.bags.listed(bag, number) {
                        let sums = parts.into_iter().map(|term| self.group_sum(group, size, of, term));
                        let sums: Vec<Term> = sums.collect();
                        return sums
                            .into_iter()
                            .reduce(|x, y| self.sum(of, x, y))
                            .expect("a sum is not empty");
                    }
                }
                Node::Product(element, bag, Some(number)) if element == self.kept(of) && number == minus => {
                    let rest = self.of_bag(Node::Product(element, bag, None));
                    let sum = self.group_sum(group, size, of, rest);
                    return self.product(of, minus, sum);
                }
                _ => {}
            }
        }
        let group = self.names.intern(group);
        let kept = self.kept(of);
        self.opaque(Node::GroupSum(group, kept, x), of)
    }
}
