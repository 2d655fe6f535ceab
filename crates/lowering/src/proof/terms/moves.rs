//! Elements at other places, and memory.

use super::{Facts, Node, Term, Terms, identities::Identity};
use crate::{
    faults::Fault,
    places::Places,
    sym::SymExpr,
    types::{Element, Type},
};

/// The most operations on elements that a move goes through.
const MAX_WEIGHT: u32 = 256;

impl Terms {
    /// The elements of `x`, of which there are `count`, at some places.
    pub(super) fn moved(&mut self, places: &Places, count: &SymExpr, x: Term) -> Term {
        let stays = self.enabled.has(Identity::MoveToItself) && places.is_all(count);
        if stays || Fault::RowsAreColumns.is_present() {
            return x;
        }
        let node = self.node(x);
        match node {
            Node::Number(_) if self.enabled.has(Identity::MoveOfNumber) => return x,
            Node::Moved(inner, from, y) if self.enabled.has(Identity::MoveOfMove) => {
                if let Some(both) = places.of_places(self.places.get(inner), &self.syms) {
                    let from = self.sizes.get(from).clone();
                    return self.moved(&both, &from, y);
                }
            }
            Node::Written(_, at, value) if self.enabled.has(Identity::ReadOfWrite) => {
                let at = self.places.get(at);
                if let (Some(inside), Some(count)) = (places.within(at, &self.syms), at.count()) {
                    return self.moved(&inside, &count, value);
                }
            }
            _ if self.weight(x) <= MAX_WEIGHT && self.enabled.has(Identity::MoveOfFunction) => {
                if let Some(term) = self.moved_inside(node, places, count) {
                    return term;
                }
            }
            _ => {}
        }
        let (places, count) = (self.places.intern(places), self.sizes.intern(count));
        let elements = self.facts[x as usize].elements;
        self.intern(Node::Moved(places, count, x), Facts { elements, weight: 1 })
    }

    /// A function of elements is one of the moved elements.
    fn moved_inside(&mut self, node: Node, places: &Places, count: &SymExpr) -> Option<Term> {
        let part = |terms: &mut Self, x: Term| terms.moved(places, count, x);
        Some(match node {
            Node::Cast(conversion, to, x) => {
                let x = part(self, x);
                let weight = self.weight(x).saturating_add(1);
                self.intern(Node::Cast(conversion, to, x), Facts { elements: Some(to), weight })
            }
            Node::Unary(op, element, x) => {
                let x = part(self, x);
                self.unary(op, element, x)
            }
            Node::PowerAbove(element, x) => {
                let x = part(self, x);
                self.power_above(element, x)
            }
            Node::Binary(op, element, x, y) => {
                let (x, y) = (part(self, x), part(self, y));
                self.binary(op, element, x, y)
            }
            Node::Sum(element, bag, number) => {
                let parts: Vec<Term> =
                    self.bags.listed(bag, number)?.into_iter().map(|term| part(self, term)).collect();
                parts.into_iter().reduce(|x, y| self.sum(element, x, y))?
            }
            Node::Product(element, bag, number) => {
                let parts: Vec<Term> =
                    self.bags.listed(bag, number)?.into_iter().map(|term| part(self, term)).collect();
                parts.into_iter().reduce(|x, y| self.product(element, x, y))?
            }
            _ => return None,
        })
    }

    /// `x` repeated to the shape of another type.
    pub(super) fn repeated(&mut self, x: Term, from: &Type, to: &Type) -> Term {
        // Elements are those of the term; where they lie is for views to say, which are moves of their own.
        let Type { dtype: _, shape, strides: _, offset: _ } = from;
        if *shape == to.shape {
            return x;
        }
        let map = Places::broadcast(shape, &to.shape).zip(from.numel());
        let (places, count) = map.expect("of a verified graph");
        self.moved(&places, &count, x)
    }

    /// Elements of which nothing is known, and which no other term is.
    pub(super) fn fresh(&mut self, elements: Element) -> Term {
        self.gaps += 1;
        self.opaque(Node::Gap(None, self.gaps), elements)
    }

    /// What lies between the elements of a program's own value of this name.
    pub(super) fn gap(&mut self, name: &str, elements: Element) -> Term {
        let name = self.names.intern(name);
        self.opaque(Node::Gap(Some(name), 0), elements)
    }

    /// Memory in which a new value lies, of that type and as large as its type needs. `between` lies between the elements, if that is known.
    pub(super) fn memory(&mut self, between: Option<Term>, ty: &Type, value: Term) -> Term {
        let (Some(places), Some(count)) = (Places::of(ty), ty.numel()) else { return value };
        if places.is_all(&count) {
            return value;
        }
        let between = between.unwrap_or_else(|| self.fresh(ty.dtype));
        self.written(between, &places, None, value)
    }

    /// Memory in which the elements at `places` have been replaced. If the memory has `size` elements and these are all of its places,
    /// it is the new value.
    pub(super) fn written(
        &mut self,
        old: Term,
        places: &Places,
        size: Option<&SymExpr>,
        value: Term,
    ) -> Term {
        if self.enabled.has(Identity::WriteOfAll) && size.is_some_and(|size| places.is_all(size)) {
            return value;
        }
        let old = if Fault::WritesCoverAll.is_present() { value } else { old };
        let places = self.places.intern(places);
        let [elements, others] = [value, old].map(|term| self.facts[term as usize].elements);
        let elements = elements.filter(|_| elements == others);
        self.intern(Node::Written(old, places, value), Facts { elements, weight: 1 })
    }

    /// The elements that a view shows of memory of `size` elements.
    pub(super) fn shown(&mut self, memory: Term, size: &SymExpr, ty: &Type) -> Term {
        let Some(mut places) = Places::of(ty) else { return memory };
        if Fault::OffsetsAreForgotten.is_present() {
            places = places.with_offset_zero();
        }
        self.moved(&places, size, memory)
    }
}
