//! What follows from a graph: definitions, uses, storages and their versions.

use crate::{
    error::{Finding, FindingKind},
    graph::{Graph, Op},
    ids::{OpId, StoreId, ValueId},
    lists::Lists,
    op::ResultMemory,
    sym::SymExpr,
};

/// A storage: memory that one operation allocates, and in which values lie.
#[derive(Debug, Clone)]
pub struct Storage {
    /// The value whose operation allocates it.
    pub root: ValueId,
    /// Whether any operation writes it after its allocation.
    pub written: bool,
    /// Whether an output lies in it.
    pub escapes: bool,
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
    /// All storages.
    pub stores: Vec<Storage>,
    /// Whether each value is an output.
    pub is_output: Vec<bool>,
    /// Where the graph's form is wrong: values that are defined twice or used before their definition.
    pub findings: Vec<Finding>,
    uses: Lists<OpId>,
    values: Lists<ValueId>,
}

impl Analysis {
    pub(crate) fn of(graph: &Graph) -> Self {
        let count = graph.values.len();
        let mut analysis = Self {
            def: vec![None; count],
            store: vec![None; count],
            version: vec![0; count],
            stores: Vec::with_capacity(count),
            is_output: vec![false; count],
            findings: Vec::new(),
            uses: Lists::default(),
            values: Lists::default(),
        };
        let (mut uses, mut last_use) = (Vec::with_capacity(2 * count), vec![None; count]);
        let mut values = Vec::with_capacity(count);
        for (index, op) in graph.ops.iter().enumerate() {
            let id = OpId::from(index);
            for arg in &op.args {
                if analysis.def[arg.index()].is_none() {
                    analysis.undefined(&op.name, graph.name(*arg));
                }
                if last_use[arg.index()].replace(id) != Some(id) {
                    uses.push((arg.0, id));
                }
            }
            for (index, out) in op.outs.iter().enumerate() {
                if let Some(store) = analysis.define(graph, (id, op), index, *out) {
                    values.push((store.0, *out));
                }
            }
        }
        analysis.uses = Lists::of(count, &uses);
        analysis.values = Lists::of(analysis.stores.len(), &values);
        for output in &graph.outputs {
            analysis.is_output[output.index()] = true;
            match analysis.store[output.index()] {
                Some(store) => analysis.stores[store.index()].escapes = true,
                None => analysis.undefined("return", graph.name(*output)),
            }
        }
        analysis
    }

    /// The storage in which a result lies, unless the graph's form is wrong.
    fn define(
        &mut self,
        graph: &Graph,
        (id, op): (OpId, &Op),
        index: usize,
        out: ValueId,
    ) -> Option<StoreId> {
        if self.def[out.index()].replace((id, index)).is_some() {
            let text = format!("{} is defined twice", graph.name(out));
            self.findings.push(Finding::new(FindingKind::Undefined, text).op(&op.name));
            return None;
        }
        let place = op.kind.result_memory(index);
        let store = match place {
            ResultMemory::Fresh => {
                self.stores.push(Storage { root: out, written: false, escapes: false });
                StoreId::from(self.stores.len() - 1)
            }
            ResultMemory::Alias(arg) | ResultMemory::Write(arg) => {
                let source = op.args.get(arg).copied();
                let Some((source, store)) =
                    source.and_then(|source| Some((source, self.store[source.index()]?)))
                else {
                    let text = format!("{} lies in an operand's memory, which is nowhere", graph.name(out));
                    self.findings.push(Finding::new(FindingKind::Undefined, text).op(&op.name));
                    return None;
                };
                let writes = matches!(place, ResultMemory::Write(_));
                self.stores[store.index()].written |= writes;
                self.version[out.index()] = self.version[source.index()] + u32::from(writes);
                store
            }
        };
        self.store[out.index()] = Some(store);
        Some(store)
    }

    fn undefined(&mut self, op: &str, value: &str) {
        let text = format!("{value} is used before it is defined");
        self.findings.push(Finding::new(FindingKind::Undefined, text).op(op).value(value));
    }

    /// The operations that use a value, in order, each once.
    pub fn uses(&self, value: ValueId) -> &[OpId] {
        self.uses.get(value.index())
    }

    /// The values that lie in a storage, in the order of their definitions.
    pub fn values(&self, store: StoreId) -> &[ValueId] {
        self.values.get(store.index())
    }

    /// How many bytes a storage has, with its gaps, unless that overflows.
    pub fn bytes(&self, graph: &Graph, store: StoreId) -> Option<SymExpr> {
        let root = graph.ty(self.stores[store.index()].root);
        root.reach()?.times(&(root.dtype.size() as i64).into())
    }

    /// The operation that defines a value. Graphs that are [verified](crate::verify) have one for each value that is used.
    pub fn op_of<'g>(&self, graph: &'g Graph, value: ValueId) -> Option<&'g Op> {
        self.def[value.index()].map(|(op, _)| graph.op(op))
    }

    /// The value whose operation allocates the storage of a value.
    pub fn root(&self, value: ValueId) -> Option<ValueId> {
        self.store[value.index()].map(|store| self.stores[store.index()].root)
    }

    /// Whether this operation alone uses a value, and the value is no output.
    pub fn is_used_by_only(&self, value: ValueId, op: OpId) -> bool {
        self.uses(value) == [op] && !self.is_output[value.index()]
    }
}
