//! Multisets of terms in which equal multisets are the same number. A term is a place in a table, of any kind.
//!
//! The residual stream of a model is a sum of as many terms as the model has layers, and each layer adds one. A multiset is
//! therefore a binary trie over the bits of its terms, whose subtries are shared: adding one term to a multiset of `n` makes
//! `O(log n)` new nodes. A trie has one shape for one content, and every node is kept once, so that two multisets are equal
//! exactly if their roots are.

use crate::hash::HashMap;

/// A place in the table of whoever has the multiset.
type Term = u32;

/// A multiset that is not empty: a place in [`Bags::nodes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bag(u32);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Node {
    /// A term and how often it occurs.
    One { term: Term, count: u32 },
    /// Terms that agree above `bit`, as `prefix` does: those without the bit, and those with it.
    Two { prefix: Term, bit: Term, low: Bag, high: Bag },
}

/// All multisets of one table of terms.
#[derive(Default)]
pub(crate) struct Bags {
    nodes: Vec<Node>,
    table: HashMap<Node, Bag>,
}

/// The most terms of a multiset that are looked at one by one.
const MAX_LISTED: usize = 512;

/// The most nodes that one union visits. A union of two large multisets that have no subtrie in common is not made: a
/// program of 2²⁰ such additions would take the memory of the machine.
const MAX_VISITS: usize = 4096;

impl Bags {
    fn intern(&mut self, node: Node) -> Bag {
        let nodes = &mut self.nodes;
        *self.table.entry(node).or_insert_with(|| {
            nodes.push(node);
            Bag(u32::try_from(nodes.len() - 1).expect("graphs are bounded"))
        })
    }

    /// The multiset of one term that occurs `count` times.
    pub(crate) fn one(&mut self, term: Term, count: u32) -> Bag {
        self.intern(Node::One { term, count })
    }

    /// The multiset in which each term occurs as often as in both together. `None` if a count overflows, or if the union has
    /// to visit too many nodes; both depend on the two contents alone.
    pub(crate) fn union(&mut self, a: Bag, b: Bag) -> Option<Bag> {
        self.merge(a, b, &mut { MAX_VISITS })
    }

    fn merge(&mut self, a: Bag, b: Bag, visits: &mut usize) -> Option<Bag> {
        *visits = visits.checked_sub(1)?;
        let (x, y) = (self.nodes[a.0 as usize], self.nodes[b.0 as usize]);
        match (x, y) {
            (Node::One { term, count }, Node::One { term: other, count: more }) if term == other => {
                Some(self.one(term, count.checked_add(more)?))
            }
            (Node::Two { prefix, bit, low, high }, Node::Two { prefix: p, bit: b, low: l, high: h })
                if (prefix, bit) == (p, b) =>
            {
                let (low, high) = (self.merge(low, l, visits)?, self.merge(high, h, visits)?);
                Some(self.intern(Node::Two { prefix, bit, low, high }))
            }
            (Node::Two { .. }, _) if x.holds(y) => self.insert(x, b, visits),
            (_, Node::Two { .. }) if y.holds(x) => self.insert(y, a, visits),
            _ => Some(self.join(a, b)),
        }
    }

    /// The union of a trie with one that belongs below its root.
    fn insert(&mut self, root: Node, inner: Bag, visits: &mut usize) -> Option<Bag> {
        let Node::Two { prefix, bit, mut low, mut high } = root else {
            unreachable!("only tries hold tries")
        };
        let side = if self.nodes[inner.0 as usize].first() & bit == 0 { &mut low } else { &mut high };
        *side = self.merge(*side, inner, visits)?;
        Some(self.intern(Node::Two { prefix, bit, low, high }))
    }

    /// The union of two tries neither of which belongs below the other's root.
    fn join(&mut self, a: Bag, b: Bag) -> Bag {
        let [p, q] = [a, b].map(|bag| self.nodes[bag.0 as usize].first());
        let bit = 1 << (p ^ q).ilog2();
        let (low, high) = if p & bit == 0 { (a, b) } else { (b, a) };
        self.intern(Node::Two { prefix: p & above(bit), bit, low, high })
    }

    /// The terms of a multiset and one more, each as often as it occurs, in ascending order. `None` if they are more than 512.
    pub(crate) fn listed(&self, bag: Bag, more: Option<Term>) -> Option<Vec<Term>> {
        let mut terms = Vec::new();
        for (term, count) in self.iter(bag) {
            if terms.len() + count as usize > MAX_LISTED {
                return None;
            }
            terms.extend(std::iter::repeat_n(term, count as usize));
        }
        terms.extend(more);
        terms.sort_unstable();
        Some(terms)
    }

    /// The terms with their counts, by ascending term.
    pub(crate) fn iter(&self, bag: Bag) -> impl Iterator<Item = (Term, u32)> + '_ {
        let mut open = vec![bag];
        std::iter::from_fn(move || {
            loop {
                match self.nodes[open.pop()?.0 as usize] {
                    Node::One { term, count } => return Some((term, count)),
                    Node::Two { low, high, .. } => open.extend([high, low]),
                }
            }
        })
    }
}

impl Node {
    /// A term of the trie, in all bits above the one at which it branches.
    fn first(self) -> Term {
        match self {
            Self::One { term, .. } => term,
            Self::Two { prefix, .. } => prefix,
        }
    }

    /// Whether `other` belongs below this trie's root: it branches at a lower bit, and agrees above this one's.
    fn holds(self, other: Self) -> bool {
        let Self::Two { prefix, bit, .. } = self else { return false };
        let lower = match other {
            Self::One { .. } => true,
            Self::Two { bit: other, .. } => other < bit,
        };
        lower && other.first() & above(bit) == prefix
    }
}

/// All bits above one.
fn above(bit: Term) -> Term {
    !(bit | (bit - 1))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn equal_contents_are_the_same_number() {
        let mut bags = Bags::default();
        let mut state = 7u64;
        let mut random = |limit: u32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u32 % limit
        };
        for _ in 0..200 {
            let mut terms: Vec<Term> = (0..1 + random(40)).map(|_| random(30) << random(20)).collect();
            let mut expected = BTreeMap::new();
            terms.iter().for_each(|term| *expected.entry(*term).or_insert(0) += 1);
            let mut build = |terms: &[Term]| {
                let all: Vec<Bag> = terms.iter().map(|term| bags.one(*term, 1)).collect();
                all.into_iter().reduce(|a, b| bags.union(a, b).unwrap()).unwrap()
            };
            let forward = build(&terms);
            terms.reverse();
            let half = terms.len() / 2;
            let backward = match half {
                0 => build(&terms),
                _ => {
                    let (a, b) = (build(&terms[..half]), build(&terms[half..]));
                    bags.union(a, b).unwrap()
                }
            };
            assert_eq!(forward, backward, "{terms:?}");
            assert_eq!(bags.iter(forward).collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn doubling_is_bounded() {
        let mut bags = Bags::default();
        let mut bag = bags.one(3, 1);
        for _ in 0..31 {
            bag = bags.union(bag, bag).unwrap();
        }
        assert_eq!(bags.union(bag, bag), None, "2³² does not fit");
    }
}
