//! Numbers of values: values with one number are computed by one operation of the same operands.

use std::fmt::Write;

use crate::{
    analysis::Analysis,
    faults::Fault,
    graph::{Graph, Op},
    hash::HashMap,
    ids::ValueId,
    op::{Kind, View},
    types::Type,
};

/// The number of a value.
pub(super) type Number = u32;

/// What a value is computed by: an operation, its operands' numbers, which of its results, and the result's type. The operand of a
/// strided view is the storage that it shows, whatever the view before it was.
type Key = (u32, Vec<Number>, usize, u32);

/// A number for each value of a graph that is defined. Values that lie in storages which are written, and results of operations
/// that have effects, have numbers of their own.
pub(super) fn of(graph: &Graph, analysis: &Analysis) -> Vec<Option<Number>> {
    let mut numbering = Numbering::default();
    let mut numbers: Vec<Option<Number>> = vec![None; graph.values.len()];
    for op in &graph.ops {
        let args: Option<Vec<Number>> = op.args.iter().map(|arg| numbers[arg.index()]).collect();
        for (index, out) in op.outs.iter().enumerate() {
            let is_written =
                analysis.store[out.index()].is_none_or(|store| is_overwritten(graph, analysis, store));
            let is_own = is_written || matches!(op.kind, Kind::Input | Kind::Constant | Kind::Opaque { .. });
            numbers[out.index()] = Some(match (&args, is_own) {
                (Some(args), false) => {
                    let root = root_of_view(analysis, op).map(|root| (root, numbers[root.index()]));
                    match root {
                        None => numbering.number(graph, op, args, None, index),
                        Some((root, Some(number))) => {
                            numbering.number(graph, op, &[number], Some(graph.ty(root)), index)
                        }
                        Some((_, None)) => numbering.fresh(),
                    }
                }
                _ => numbering.fresh(),
            });
        }
    }
    numbers
}

/// The value that allocated the storage of which a strided view shows places.
fn root_of_view(analysis: &Analysis, op: &Op) -> Option<ValueId> {
    matches!(op.kind, Kind::View { view: View::Strided }).then(|| analysis.root(op.outs[0])).flatten()
}

/// Whether more than a wait writes a storage after its allocation.
pub(super) fn is_overwritten(graph: &Graph, analysis: &Analysis, store: crate::StoreId) -> bool {
    analysis.stores[store.index()].written
        && analysis.values(store).iter().filter(|value| analysis.version[value.index()] > 0).any(|value| {
            let op = analysis.op_of(graph, *value);
            op.is_some_and(|op| !matches!(op.kind, Kind::Wait { .. } | Kind::View { .. }))
        })
}

#[derive(Default)]
struct Numbering {
    next: Number,
    known: HashMap<Key, Number>,
    /// For reshapes, and copies in row-major order: what they show.
    shown: HashMap<Number, Number>,
    kinds: HashMap<String, u32>,
    types: HashMap<Type, u32>,
    text: String,
}

impl Numbering {
    fn fresh(&mut self) -> Number {
        self.next += 1;
        self.next
    }

    /// The number of a result. `root` is the type of the storage that a strided view shows.
    fn number(
        &mut self,
        graph: &Graph,
        op: &Op,
        args: &[Number],
        root: Option<&Type>,
        index: usize,
    ) -> Number {
        let out = graph.ty(op.outs[index]);
        let is_reshape = matches!(op.kind, Kind::View { view: View::Reshape } | Kind::Copy);
        // A reshape of a reshape is one of the first.
        let mut args = args.to_vec();
        if is_reshape {
            args[0] = self.shown.get(&args[0]).copied().unwrap_or(args[0]);
        }
        let places =
            root.map(|root| format!("{out} of {root}")).filter(|_| !Fault::PlacesAreForgotten.is_present());
        if Fault::OperandsAreForgotten.is_present() {
            args.iter_mut().for_each(|arg| *arg = 0);
        }
        let kind = self.kind(&op.kind, is_reshape, places.as_deref());
        let types = self.types.len() as u32;
        let ty = *self.types.entry(out.dense()).or_insert(types);
        let first = args.first().copied();
        let key = (kind, args, index, ty);
        if let Some(number) = self.known.get(&key) {
            return *number;
        }
        let number = self.fresh();
        self.known.insert(key, number);
        if let Some(first) = first.filter(|_| is_reshape) {
            self.shown.insert(number, first);
        }
        number
    }

    /// The number of an operation without its tokens, which every start has for itself. A strided view is told by its places in
    /// its storage.
    fn kind(&mut self, kind: &Kind, is_reshape: bool, places: Option<&str>) -> u32 {
        self.text.clear();
        match kind {
            Kind::Start { coll, token: _ } => write!(self.text, "start {coll:?}"),
            Kind::Wait { tokens: _ } => write!(self.text, "wait"),
            _ if is_reshape => write!(self.text, "reshape"),
            kind => write!(self.text, "{kind:?} {}", places.unwrap_or_default()),
        }
        .expect("a string takes everything");
        match self.kinds.get(&self.text) {
            Some(number) => *number,
            None => {
                let number = self.kinds.len() as u32;
                self.kinds.insert(self.text.clone(), number);
                number
            }
        }
    }
}
