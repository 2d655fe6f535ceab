//! Programs of torch: a graph of ATen operators as JSON, which `antiphon.lowering` exports.

mod compound;
mod operator;
mod spelling;

use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::{
    build::{Builder, Out, check_length},
    error::LoweringError,
    graph::{Graph, Group},
    ids::ValueId,
    op::{Alias, Kind},
    sym::Sym,
    types::{Class, CommReq, Type},
};
use spelling::Spelling;
pub use spelling::spelled;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    syms: Vec<Sym>,
    #[serde(default)]
    groups: Vec<Group>,
    /// Operators that are spelled otherwise: as lines of the table are.
    #[serde(default)]
    spellings: Vec<String>,
    /// Tensors whose storage lies in symmetric memory, by name, and what communication needs of it.
    #[serde(default)]
    comm: HashMap<String, CommReq>,
    nodes: Vec<Node>,
}

/// A node of torch's graph.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    name: String,
    op: String,
    #[serde(default)]
    target: String,
    #[serde(default)]
    args: Vec<Json>,
    #[serde(default)]
    kwargs: Map<String, Json>,
    /// Its tensors; of several, the names of those that take them apart.
    #[serde(default)]
    outs: Vec<Result_>,
    /// For each tensor that it returns, the operand whose memory that is.
    #[serde(default)]
    aliases: Vec<Option<Alias>>,
    /// Operands that it writes without returning them, counted among its tensors.
    #[serde(default)]
    writes: Vec<usize>,
    /// Whether it does more than to compute.
    #[serde(default)]
    effect: bool,
}

#[derive(Deserialize)]
#[serde(from = "Out")]
struct Result_ {
    name: String,
    ty: Type,
}

impl From<Out> for Result_ {
    fn from(Out { name, ty, .. }: Out) -> Self {
        Self { name, ty }
    }
}

type Result<T> = std::result::Result<T, LoweringError>;

impl Graph {
    /// Reads a program of torch: `{"syms", "groups", "spellings", "comm", "nodes"}`, a node being `{"name", "op", "target", "args",
    /// "kwargs", "outs", "aliases", "writes", "effect"}` as `torch.fx` has them. Among arguments a tensor is
    /// `{"value": name}`, a size `{"sym": expression}`, a dtype `{"dtype": name}`.
    ///
    /// An operator that the table of spellings lacks becomes [`Kind::Opaque`], whose results alias its operands as the node
    /// says.
    ///
    /// # Errors
    /// The node, what was found there and what was wanted.
    pub fn from_torch(text: &[u8]) -> Result<Self> {
        check_length(text)?;
        let file: File = serde_json::from_slice(text).map_err(|error| {
            let at = format!("line {} column {}", error.line(), error.column());
            LoweringError::unexpected(at, error, "a program of torch")
        })?;
        let mut importer = Importer {
            graph: Builder::default(),
            latest: HashMap::new(),
            types: Vec::new(),
            in_flight: HashMap::new(),
            ready: HashSet::new(),
            lists: HashMap::new(),
            waits: HashMap::new(),
            spellings: spelling::table(&file.spellings)?,
            comm: file.comm,
            tokens: 0,
        };
        for (index, sym) in file.syms.into_iter().enumerate() {
            importer.graph.sym(&format!("syms[{index}]"), sym)?;
        }
        for (index, group) in file.groups.into_iter().enumerate() {
            importer.graph.group(&format!("groups[{index}]"), group)?;
        }
        for node in &file.nodes {
            if let (Some(name), [out]) = (importer.waited(node), &node.outs[..]) {
                importer.waits.entry(name.to_owned()).or_insert_with(|| out.name.clone());
            }
        }
        for (index, node) in file.nodes.into_iter().enumerate() {
            importer.node(format!("nodes[{index}] ({})", node.name), node)?;
        }
        Ok(importer.graph.finish())
    }
}

struct Importer {
    graph: Builder,
    /// What each name stands for by now: a tensor that is written has a new version under its old name.
    latest: HashMap<String, ValueId>,
    types: Vec<Type>,
    /// Tokens of the starts whose results have not been waited for.
    in_flight: HashMap<ValueId, u32>,
    /// Results of collectives that have been waited for, or are complete.
    ready: HashSet<ValueId>,
    /// The results of starts of several tensors, with their names.
    lists: HashMap<u32, Vec<(ValueId, String)>>,
    /// For each name, that of what waits for it.
    waits: HashMap<String, String>,
    spellings: HashMap<String, Spelling>,
    comm: HashMap<String, CommReq>,
    tokens: u32,
}

/// A node's tensors, in the order in which they stand among its arguments, and the rest of these as text.
struct Operands {
    values: Vec<ValueId>,
    names: Vec<String>,
    text: String,
}

impl Importer {
    fn node(&mut self, at: String, node: Node) -> Result<()> {
        match node.op.as_str() {
            "placeholder" | "get_attr" => {
                let kind = if node.op == "placeholder" { Kind::Input } else { Kind::Constant };
                match node.outs.len() {
                    0 => Ok(()), // a size, or a module
                    _ => self.add(&at, node.name, kind, Vec::new(), node.outs),
                }
            }
            "output" => {
                let operands = self.operands(&at, &node)?;
                self.graph.returns(operands.values);
                Ok(())
            }
            "call_function" => self.call(&at, node),
            other => {
                Err(LoweringError::unexpected(at, other, "placeholder, get_attr, call_function or output"))
            }
        }
    }

    /// The tensor that a node waits for, if that is what it does.
    fn waited<'n>(&self, node: &'n Node) -> Option<&'n str> {
        let spelling = self.spellings.get(&node.target)?;
        let [arg] = &node.args[..] else { return None };
        arg.as_object()?.get("value")?.as_str().filter(|_| spelling == &["wait"])
    }

    fn call(&mut self, at: &str, node: Node) -> Result<()> {
        if let Some(spelling) = self.spellings.get(&node.target).cloned()
            && self.known(at, &node, &spelling)?
        {
            return Ok(());
        }
        if node.outs.is_empty() && node.writes.is_empty() && !node.effect {
            return Ok(()); // sizes
        }
        let operands = self.operands(at, &node)?;
        let mut aliases = node.aliases;
        aliases.resize(node.outs.len(), None);
        let mut outs = node.outs;
        for written in node.writes {
            let (Some(value), Some(name)) = (operands.values.get(written), operands.names.get(written))
            else {
                return Err(LoweringError::unexpected(
                    at,
                    format!("a write of operand {written}"),
                    "one that there is",
                ));
            };
            aliases.push(Some(Alias { arg: written, writes: true }));
            outs.push(Result_ {
                name: format!("{}${name}", node.name),
                ty: self.types[value.index()].clone(),
            });
        }
        let communicates = ["_c10d_functional.", "c10d.", "symm_mem.", "antiphon.", "_dtensor."]
            .iter()
            .any(|namespace| node.target.starts_with(namespace));
        let (target, attributes, effect) = (node.target, operands.text, node.effect || communicates);
        // What waits for a tensor that is in flight takes part in its wait; nothing else may.
        let kind = Kind::Opaque { target, attributes, aliases, effect, communicates };
        self.add(at, node.name, kind, operands.values, outs)
    }

    /// The operation of a node, with its results.
    fn add(
        &mut self,
        at: &str,
        name: String,
        kind: Kind,
        args: Vec<ValueId>,
        outs: Vec<Result_>,
    ) -> Result<()> {
        let written: Vec<(String, String)> = outs
            .iter()
            .filter_map(|out| Some((out.name.clone(), out.name.split_once('$')?.1.to_owned())))
            .collect();
        let names: Vec<String> = outs.iter().map(|out| out.name.clone()).collect();
        self.types.extend(outs.iter().map(|out| out.ty.clone()));
        let class = |name: &str| self.comm.get(name).cloned().map(Class::Comm);
        let outs = outs.into_iter().map(|out| Out { class: class(&out.name), name: out.name, ty: out.ty });
        let outs = outs.collect();
        self.graph.op(at, Some(name), kind, args, outs)?;
        for name in names {
            let value = self.graph.find(at, &name)?;
            self.latest.insert(name, value);
        }
        for (value, name) in written {
            let value = self.graph.find(at, &value)?;
            self.latest.insert(name, value);
        }
        Ok(())
    }

    fn value(&self, at: &str, name: &str) -> Result<ValueId> {
        let value = self.latest.get(name).copied();
        value.ok_or_else(|| {
            LoweringError::unexpected(at, name, "the name of a tensor that is computed before")
        })
    }

    fn operands(&self, at: &str, node: &Node) -> Result<Operands> {
        let mut operands = Operands { values: Vec::new(), names: Vec::new(), text: String::new() };
        let all = node.args.iter().chain(node.kwargs.values());
        for arg in all {
            self.gather(at, arg, &mut operands, 0)?;
        }
        // Tensors are told by their place, so that the text does not depend on names.
        let mut place = 0;
        let args: Vec<Json> = node.args.iter().map(|arg| unnamed(arg, &mut place)).collect();
        let kwargs: Map<String, Json> =
            node.kwargs.iter().map(|(key, arg)| (key.clone(), unnamed(arg, &mut place))).collect();
        operands.text = format!("{} {}", Json::Array(args), Json::Object(kwargs));
        Ok(operands)
    }

    fn gather(&self, at: &str, arg: &Json, operands: &mut Operands, depth: usize) -> Result<()> {
        if depth > 32 {
            return Err(LoweringError::unexpected(at, "a list in more than 32 lists", "fewer"));
        }
        match arg {
            Json::Array(list) => list.iter().try_for_each(|arg| self.gather(at, arg, operands, depth + 1)),
            Json::Object(map) => match map.get("value").and_then(Json::as_str) {
                Some(name) => {
                    operands.values.push(self.value(at, name)?);
                    operands.names.push(name.to_owned());
                    Ok(())
                }
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

fn unnamed(arg: &Json, place: &mut usize) -> Json {
    match arg {
        Json::Array(list) => list.iter().map(|arg| unnamed(arg, place)).collect(),
        Json::Object(map) if map.contains_key("value") => {
            *place += 1;
            Json::String(format!("%{}", *place - 1))
        }
        other => other.clone(),
    }
}
