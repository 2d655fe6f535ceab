//! The graph, and what follows from it: storages, versions, uses.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Finding, FindingKind},
    ids::{OpId, StoreId, ValueId},
    op::{Kind, ResultMemory},
    sym::{Sym, SymExpr},
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
    /// Whose memory it is, if it has its own.
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
        let values = self.values.iter().map(|value| value.name.clone());
        let taken = values.chain(self.ops.iter().map(|op| op.name.clone())).collect();
        Names { taken, last: HashMap::new() }
    }

    /// Puts `by` where `value` is used, among operands and outputs.
    pub fn substitute(&mut self, by: &HashMap<ValueId, ValueId>) {
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
        let mut needed: HashSet<ValueId> = self.outputs.iter().copied().collect();
        let mut keep = vec![false; self.ops.len()];
        for (index, op) in self.ops.iter().enumerate().rev() {
            keep[index] = op.kind.has_effect() || op.outs.iter().any(|out| needed.contains(out));
            if keep[index] {
                needed.extend(&op.args);
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
        let analysis = self.analyse();
        let mut before: Vec<Vec<usize>> = vec![Vec::new(); self.ops.len()];
        let (mut last_call, mut last_effect) = (None, None);
        // Of storages that are written: the last write, and what has read it since.
        let mut writes: HashMap<StoreId, (Option<usize>, Vec<usize>)> = HashMap::new();
        for (index, op) in self.ops.iter().enumerate() {
            let defined = op.args.iter().filter_map(|arg| analysis.def[arg.index()]);
            before[index].extend(defined.map(|(op, _)| op.index()));
            if op.kind.communicates() {
                before[index].extend(last_call.replace(index));
            }
            if matches!(op.kind, Kind::Opaque { effect: true, .. }) {
                before[index].extend(last_effect.replace(index));
            }
            for arg in &op.args {
                let Some(store) = analysis.store[arg.index()] else { continue };
                if !analysis.stores[store.index()].written {
                    continue;
                }
                let (write, reads) = writes.entry(store).or_default();
                before[index].extend(*write);
                reads.push(index);
            }
            for (out, value) in op.outs.iter().enumerate() {
                let store = analysis.store[value.index()];
                if let (ResultMemory::Write(_), Some(store)) = (op.kind.result_memory(out), store) {
                    let (write, reads) = writes.entry(store).or_default();
                    before[index].extend(reads.drain(..).filter(|read| *read != index));
                    *write = Some(index);
                }
            }
        }
        self.ops = crate::order::stable(std::mem::take(&mut self.ops), &before).map_err(|(ops, stuck)| {
            self.ops = ops;
            stuck.into_iter().map(|index| self.ops[index].name.clone()).collect::<Vec<_>>()
        })?;
        Ok(())
    }

    /// What follows from the graph.
    pub fn analyse(&self) -> Analysis {
        Analysis::of(self)
    }
}

/// Names that are taken.
#[derive(Debug, Clone)]
pub struct Names {
    taken: HashSet<String>,
    /// The last number of each wish.
    last: HashMap<String, u64>,
}

impl Names {
    /// `wish`, or where that is taken `wish` with a number; it is taken from then on.
    pub fn fresh(&mut self, wish: &str) -> String {
        if self.taken.insert(wish.to_owned()) {
            return wish.to_owned();
        }
        let last = self.last.entry(wish.to_owned()).or_default();
        loop {
            *last += 1;
            let name = format!("{wish}_{last}");
            if self.taken.insert(name.clone()) {
                return name;
            }
        }
    }
}

/// A storage: memory that one operation brought, and values lie in.
#[derive(Debug, Clone)]
pub struct Storage {
    /// The value that brought it.
    pub root: ValueId,
    /// The values that lie in it, in the order of their definitions.
    pub values: Vec<ValueId>,
    /// Whether any operation writes it after it was brought.
    pub written: bool,
    /// Whether an output lies in it.
    pub escapes: bool,
    /// How many bytes it has, unless that overflows.
    pub bytes: Option<SymExpr>,
}

/// What follows from a graph. Lists of values have an entry for each value of the graph.
#[derive(Debug, Clone)]
pub struct Analysis {
    /// The operation that defines each value, and which of its results the value is.
    pub def: Vec<Option<(OpId, usize)>>,
    /// The storage of each value.
    pub store: Vec<Option<StoreId>>,
    /// Which version of its storage each value is: the number of writes before.
    pub version: Vec<u32>,
    /// The operations that use each value, in order, each once.
    pub uses: Vec<Vec<OpId>>,
    /// All storages.
    pub stores: Vec<Storage>,
    /// Values that are outputs.
    pub is_output: Vec<bool>,
    /// Where the graph's form is wrong: values that are defined twice or used before.
    pub findings: Vec<Finding>,
}

impl Analysis {
    fn of(graph: &Graph) -> Self {
        let count = graph.values.len();
        let mut analysis = Self {
            def: vec![None; count],
            store: vec![None; count],
            version: vec![0; count],
            uses: vec![Vec::new(); count],
            stores: Vec::new(),
            is_output: vec![false; count],
            findings: Vec::new(),
        };
        for (index, op) in graph.ops.iter().enumerate() {
            analysis.add(graph, OpId::from(index), op);
        }
        for output in &graph.outputs {
            analysis.is_output[output.index()] = true;
            match analysis.store[output.index()] {
                Some(store) => analysis.stores[store.index()].escapes = true,
                None => analysis.undefined("return", graph.name(*output)),
            }
        }
        analysis
    }

    fn add(&mut self, graph: &Graph, id: OpId, op: &Op) {
        for arg in &op.args {
            if self.def[arg.index()].is_none() {
                self.undefined(&op.name, graph.name(*arg));
            }
            let uses = &mut self.uses[arg.index()];
            if uses.last() != Some(&id) {
                uses.push(id);
            }
        }
        for (index, out) in op.outs.iter().enumerate() {
            let place = op.kind.result_memory(index);
            let source = match place {
                ResultMemory::Fresh => None,
                ResultMemory::Alias(arg) | ResultMemory::Write(arg) => op.args.get(arg).copied(),
            };
            if self.def[out.index()].replace((id, index)).is_some() {
                let text = format!("{} is defined twice", graph.name(*out));
                self.findings.push(Finding::new(FindingKind::Undefined, text).op(&op.name));
                continue;
            }
            let store = source.and_then(|source| self.store[source.index()]);
            let version = source.map_or(0, |source| self.version[source.index()]);
            match (place, store) {
                (ResultMemory::Fresh, _) => {
                    let bytes = graph.ty(*out).bytes();
                    self.stores.push(Storage {
                        root: *out,
                        values: Vec::new(),
                        written: false,
                        escapes: false,
                        bytes,
                    });
                    self.store[out.index()] = Some(StoreId::from(self.stores.len() - 1));
                }
                (_, None) => {
                    let text = format!("{} lies in an operand's memory, which is nowhere", graph.name(*out));
                    self.findings.push(Finding::new(FindingKind::Undefined, text).op(&op.name));
                    continue;
                }
                (ResultMemory::Alias(_), store) => {
                    self.store[out.index()] = store;
                    self.version[out.index()] = version;
                }
                (ResultMemory::Write(_), Some(store)) => {
                    self.stores[store.index()].written = true;
                    self.store[out.index()] = Some(store);
                    self.version[out.index()] = version + 1;
                }
            }
            if let Some(store) = self.store[out.index()] {
                self.stores[store.index()].values.push(*out);
            }
        }
    }

    fn undefined(&mut self, op: &str, value: &str) {
        let text = format!("{value} is used before it is defined");
        self.findings.push(Finding::new(FindingKind::Undefined, text).op(op).value(value));
    }

    /// The operation that defines a value. Graphs that are [verified](crate::verify) have one for each value that is used.
    pub fn op_of<'g>(&self, graph: &'g Graph, value: ValueId) -> Option<&'g Op> {
        self.def[value.index()].map(|(op, _)| graph.op(op))
    }

    /// The value that brought the storage of a value.
    pub fn root(&self, value: ValueId) -> Option<ValueId> {
        self.store[value.index()].map(|store| self.stores[store.index()].root)
    }

    /// Whether only this operation uses a value, and no output is it.
    pub fn is_used_by_only(&self, value: ValueId, op: OpId) -> bool {
        self.uses[value.index()] == [op] && !self.is_output[value.index()]
    }
}
