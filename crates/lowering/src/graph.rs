//! The graph, and what follows from it: storages, versions, uses.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use crate::{
    analysis::Analysis,
    build::MAX_NAME,
    hash::{HashMap, HashSet},
    ids::{OpId, TokenId, ValueId},
    op::Kind,
    order,
    sym::Sym,
    types::{Class, Type},
};

/// The most operations that a graph may have, and the most values.
pub const MAX_OPS: usize = 1 << 20;

/// What a program does, in order: operations on values, some of them collectives.
///
/// A value is a version of a storage, seen through a type. It is defined once, by one operation. Which storage and which
/// version follows from the operations ([`Graph::analyse`]): each result lies in memory of its own or in an operand's
/// ([`Kind::result_memory`]).
///
/// ```
/// use antiphon_lowering::Graph;
///
/// let text = "
/// group tp size 2
/// %x: bf16[4,8] = input()
/// %sum: bf16[4,8] = start(%x) prim=all_reduce group=tp red=sum token=0
/// %ready: bf16[4,8] = wait(%sum) tokens=[0]
/// return %ready
/// ";
/// let graph = Graph::from_text(text)?;
/// assert_eq!(graph.ops.len(), 3);
/// assert_eq!(antiphon_lowering::verify(&graph), []);
/// assert_eq!(Graph::from_text(&graph.to_text())?, graph);
/// assert_eq!(Graph::from_json(graph.to_json().as_bytes())?, graph);
/// # Ok::<(), antiphon_lowering::LoweringError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    /// The symbols that sizes depend on.
    pub syms: Vec<Sym>,
    /// The groups of ranks.
    pub groups: Vec<Group>,
    /// All values. A value that no operation defines, and none uses, may remain of a rewrite.
    pub values: Vec<Value>,
    /// The operations, in the order in which they are issued.
    pub ops: Vec<Op>,
    /// What the program returns.
    pub outputs: Vec<ValueId>,
}

/// A group of ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// What collectives call it.
    pub name: String,
    /// How many ranks it has.
    pub size: u32,
    /// The heap that its ranks share; the group's own name unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl Group {
    /// The heap that its ranks share.
    pub fn domain(&self) -> &str {
        self.domain.as_deref().unwrap_or(&self.name)
    }
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Its name, which no other has.
    pub name: String,
    /// Its elements, and where they stand.
    pub ty: Type,
    /// The class of its memory, if it has its own.
    pub class: Class,
}

/// An operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// Its name, which no other operation has.
    pub name: String,
    /// What it does.
    pub kind: Kind,
    /// What it reads.
    pub args: Vec<ValueId>,
    /// What it defines.
    pub outs: Vec<ValueId>,
}

impl Graph {
    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// An operation.
    pub fn op(&self, id: OpId) -> &Op {
        &self.ops[id.index()]
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }

    /// The name of a value.
    pub fn name(&self, id: ValueId) -> &str {
        &self.value(id).name
    }

    /// The group of this name.
    pub fn group(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// A new value, whose name is `wish` or, where that is taken, `wish` with a number.
    pub fn add_value(&mut self, names: &mut Names, wish: &str, ty: Type) -> ValueId {
        let name = names.fresh(wish);
        self.values.push(Value { name, ty, class: Class::Owned });
        ValueId::from(self.values.len() - 1)
    }

    /// The names that are taken.
    pub fn names(&self) -> Names {
        let values = self.values.iter().map(|value| value.name.as_str());
        let taken = values.chain(self.ops.iter().map(|op| op.name.as_str())).map(hash_of).collect();
        Names { taken, last: HashMap::default() }
    }

    /// Tokens that no start has.
    pub(crate) fn new_tokens(&self) -> impl Iterator<Item = TokenId> + use<> {
        let tokens = self.ops.iter().filter_map(|op| match &op.kind {
            Kind::Start { token, .. } => Some(token.0),
            _ => None,
        });
        let taken: HashSet<u32> = tokens.collect();
        let first = taken.iter().max().map_or(0, |token| token.wrapping_add(1));
        let all = (0..=u32::MAX).map(move |number| first.wrapping_add(number));
        all.filter(move |token| !taken.contains(token)).map(TokenId)
    }

    /// Puts `by` where `value` is used, among operands and outputs.
    pub(crate) fn substitute(&mut self, by: &HashMap<ValueId, ValueId>) {
        let last = |mut id: ValueId| {
            while let Some(next) = by.get(&id) {
                id = *next;
            }
            id
        };
        for id in self.ops.iter_mut().flat_map(|op| &mut op.args).chain(&mut self.outputs) {
            *id = last(*id);
        }
    }

    /// Removes operations that nobody needs, and says which.
    pub fn remove_dead(&mut self) -> Vec<String> {
        let mut needed = vec![false; self.values.len()];
        self.outputs.iter().for_each(|output| needed[output.index()] = true);
        let mut keep = vec![false; self.ops.len()];
        for (index, op) in self.ops.iter().enumerate().rev() {
            keep[index] = op.kind.has_effect() || op.outs.iter().any(|out| needed[out.index()]);
            if keep[index] {
                op.args.iter().for_each(|arg| needed[arg.index()] = true);
            }
        }
        let mut keep = keep.into_iter();
        let mut removed = Vec::new();
        self.ops.retain(|op| {
            let keep = keep.next().expect("one for each");
            if !keep {
                removed.push(op.name.clone());
            }
            keep
        });
        removed
    }

    /// Puts the operations into an order in which each value is defined before it is used, which is the present order as far
    /// as possible. Calls, effects, and accesses of storages that are written keep theirs. The names of those that would have
    /// to come before themselves are the error.
    pub fn sort(&mut self) -> Result<(), Vec<String>> {
        let edges = order::needs(self, &self.analyse());
        self.ops = order::stable(std::mem::take(&mut self.ops), &edges).map_err(|(ops, stuck)| {
            self.ops = ops;
            stuck.into_iter().map(|index| self.ops[index].name.clone()).collect::<Vec<_>>()
        })?;
        Ok(())
    }

    /// The value whose operation allocates the memory in which a value lies: views, waits and calls in place lead back to it.
    /// `None` if no operation defines the value. For several values, [`Analysis::root`] of one analysis is faster.
    pub fn root(&self, value: ValueId) -> Option<ValueId> {
        self.analyse().root(value)
    }

    /// What follows from the graph.
    pub fn analyse(&self) -> Analysis {
        Analysis::of(self)
    }
}

/// Names that are taken, as hashes: where two names have one, a new name gets a number that it would not need.
#[derive(Debug, Clone)]
pub struct Names {
    taken: HashSet<u64>,
    /// The last number of each wish.
    last: HashMap<String, u64>,
}

impl Names {
    /// `wish`, or where that is taken `wish` with a number; it is taken from then on.
    ///
    /// A wish that is longer than a name may be is shortened.
    pub fn fresh(&mut self, wish: &str) -> String {
        let wish = shortened(wish, MAX_NAME);
        if self.taken.insert(hash_of(wish)) {
            return wish.to_owned();
        }
        let last = self.last.entry(wish.to_owned()).or_default();
        loop {
            *last += 1;
            let number = format!("_{last}");
            let name = format!("{}{number}", shortened(wish, MAX_NAME - number.len()));
            if self.taken.insert(hash_of(&name)) {
                return name;
            }
        }
    }
}

/// The longest beginning of a text that has at most `most` bytes and ends between two characters.
fn shortened(text: &str, most: usize) -> &str {
    let is_end = |end: &usize| text.is_char_boundary(*end);
    &text[..(0..=most.min(text.len())).rev().find(is_end).unwrap_or(0)]
}

/// The hash has no key, so that equal graphs get equal names in all processes.
fn hash_of(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}
