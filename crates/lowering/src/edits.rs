//! What has to be done to a framework's graph so that it becomes the one after.

use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::{
    build::attributes_of,
    graph::{Graph, Op},
    hash::{HashMap, HashSet},
    types::Type,
};

/// The difference of two graphs, by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Edits {
    /// Operations that are new, in order.
    pub new: Vec<NewOp>,
    /// For operations that stay: an operand's name, and that of the value that is in its place.
    pub inputs: Vec<(String, String, String)>,
    /// For outputs: the name before, and that of the value that is in its place.
    pub outputs: Vec<(String, String)>,
    /// Operations that are gone.
    pub removed: Vec<String>,
    /// All operations after, in order.
    pub order: Vec<String>,
}

/// An operation that is new.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NewOp {
    /// Its name.
    pub name: String,
    /// What it does, as in the graph's JSON.
    #[serde(rename = "do")]
    pub kind: Map<String, Json>,
    /// The names of its operands.
    pub args: Vec<String>,
    /// Its results.
    pub outs: Vec<NewValue>,
}

/// A value that is new.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NewValue {
    /// Its name.
    pub name: String,
    /// Its type.
    #[serde(flatten)]
    pub ty: Type,
}

impl Edits {
    /// The edits that lead from one graph to the other.
    pub fn between(before: &Graph, after: &Graph) -> Self {
        let old: HashMap<&str, &Op> = before.ops.iter().map(|op| (op.name.as_str(), op)).collect();
        let names = |graph: &Graph, ids: &[crate::ValueId]| {
            ids.iter().map(|id| graph.name(*id).to_owned()).collect::<Vec<_>>()
        };
        let new = after.ops.iter().filter(|op| !old.contains_key(op.name.as_str()));
        let made: HashSet<crate::ValueId> = new.flat_map(|op| op.outs.iter().copied()).collect();
        let mut edits = Self {
            new: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            removed: Vec::new(),
            order: Vec::new(),
        };
        // A new operation may give a value under its old name.
        let is_made = |value: &crate::ValueId| made.contains(value);
        for op in &after.ops {
            edits.order.push(op.name.clone());
            match old.get(op.name.as_str()) {
                Some(was) => {
                    for (was, is) in was.args.iter().zip(&op.args) {
                        let (was, name) = (before.name(*was), after.name(*is));
                        if was != name || is_made(is) {
                            edits.inputs.push((op.name.clone(), was.to_owned(), name.to_owned()));
                        }
                    }
                }
                None => {
                    let out = |id: &crate::ValueId| NewValue {
                        name: after.name(*id).to_owned(),
                        ty: after.ty(*id).clone(),
                    };
                    let outs = op.outs.iter().map(out).collect();
                    edits.new.push(NewOp {
                        name: op.name.clone(),
                        kind: attributes_of(&op.kind),
                        args: names(after, &op.args),
                        outs,
                    });
                }
            }
        }
        for (was, is) in before.outputs.iter().zip(&after.outputs) {
            let (was, name) = (before.name(*was), after.name(*is));
            if was != name || is_made(is) {
                edits.outputs.push((was.to_owned(), name.to_owned()));
            }
        }
        let left: HashSet<&str> = after.ops.iter().map(|op| op.name.as_str()).collect();
        let gone = before.ops.iter().filter(|op| !left.contains(op.name.as_str()));
        edits.removed.extend(gone.map(|op| op.name.clone()));
        edits
    }
}
