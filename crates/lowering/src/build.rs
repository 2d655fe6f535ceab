//! Graphs from what was read, by name: what the text, the JSON and the importer have in common.

use std::fmt::Display;

use serde::Deserialize;
use serde_json::Value as Json;

use crate::{
    error::LoweringError,
    graph::{Graph, Group, MAX_OPS, Op, Value},
    hash::{HashMap, HashSet},
    ids::ValueId,
    json::Once,
    op::Kind,
    sym::Sym,
    types::{Class, Type},
};

/// The longest graph that is read, in bytes.
pub const MAX_TEXT_BYTES: usize = 256 << 20;
/// The longest name of a value, an operation, a group or a symbol, in bytes.
pub(crate) const MAX_NAME: usize = 256;
/// The most dimensions that a value may have.
const MAX_DIMS: usize = 64;
/// The most ranks that a group may have.
const MAX_RANKS: u32 = 1 << 20;

type Result<T> = std::result::Result<T, LoweringError>;

/// A graph that is being read.
#[derive(Default)]
pub(crate) struct Builder {
    graph: Graph,
    values: HashMap<String, ValueId>,
    /// Names of operations that are not those of their first results.
    ops: HashSet<String>,
    /// For each value, whether its operation has its name.
    names_op: Vec<bool>,
}

/// A result of an operation that is being read.
#[derive(Deserialize)]
#[serde(from = "crate::json::NamedType")]
pub(crate) struct Out {
    pub(crate) name: String,
    pub(crate) ty: Type,
    /// Unless given it follows from the operation.
    pub(crate) class: Option<Class>,
}

impl Builder {
    pub(crate) fn sym(&mut self, at: &(impl Display + ?Sized), sym: Sym) -> Result<()> {
        check_name(at, &sym.name, is_of_a_name)?;
        if sym.min < 0
            || sym.max.is_some_and(|max| max < sym.min)
            || self.graph.syms.iter().any(|other| other.name == sym.name)
        {
            let found = format!("{} from {} to {:?}", sym.name, sym.min, sym.max);
            return Err(LoweringError::unexpected(
                at.to_string(),
                found,
                "a new symbol whose least value is not negative, and not above its greatest",
            ));
        }
        check_count("symbols", self.graph.syms.len() + 1, 1 << 16)?;
        self.graph.syms.push(sym);
        Ok(())
    }

    pub(crate) fn group(&mut self, at: &(impl Display + ?Sized), group: Group) -> Result<()> {
        check_name(at, &group.name, is_of_a_group)?;
        check_name(at, group.domain(), is_of_a_group)?;
        if !(1..=MAX_RANKS).contains(&group.size) || self.graph.group(&group.name).is_some() {
            let found = format!("{} of {} ranks", group.name, group.size);
            return Err(LoweringError::unexpected(
                at.to_string(),
                found,
                format!("a new group of 1 to {MAX_RANKS} ranks"),
            ));
        }
        check_count("groups", self.graph.groups.len() + 1, 1 << 12)?;
        self.graph.groups.push(group);
        Ok(())
    }

    /// The number of a group's ranks, if there is the group.
    pub(crate) fn group_size(&self, name: &str) -> Option<u32> {
        self.graph.group(name).map(|group| group.size)
    }

    /// The symbols that have been declared.
    pub(crate) fn syms(&self) -> &[Sym] {
        &self.graph.syms
    }

    /// The value of this name.
    pub(crate) fn find(&self, at: &(impl Display + ?Sized), name: &str) -> Result<ValueId> {
        let found = self.values.get(name).copied();
        found.ok_or_else(|| {
            LoweringError::unexpected(at.to_string(), name, "the name of a value that is defined before")
        })
    }

    pub(crate) fn op(
        &mut self,
        at: &(impl Display + ?Sized),
        name: Option<String>,
        kind: Kind,
        args: Vec<ValueId>,
        outs: Vec<Out>,
    ) -> Result<()> {
        check_count("operations", self.graph.ops.len() + 1, MAX_OPS)?;
        check_count("operands", args.len(), 1 << 16)?;
        let name = match name.or_else(|| outs.first().map(|out| out.name.clone())) {
            Some(name) => name,
            None => format!("op{}", self.graph.ops.len()),
        };
        check_name(at, &name, is_of_a_name)?;
        let is_first = outs.first().is_some_and(|out| out.name == name);
        let is_taken =
            self.ops.contains(&name) || self.values.get(&name).is_some_and(|id| self.names_op[id.index()]);
        if is_taken || (!is_first && !self.ops.insert(name.clone())) {
            return Err(LoweringError::unexpected(
                at.to_string(),
                name,
                "a name that no other operation has",
            ));
        }
        let mut ids = Vec::with_capacity(outs.len());
        for out in outs {
            ids.push(self.value(at, &kind, out)?);
            self.names_op.push(is_first && ids.len() == 1);
        }
        self.graph.ops.push(Op { name, kind, args, outs: ids });
        Ok(())
    }

    fn value(&mut self, at: &(impl Display + ?Sized), kind: &Kind, out: Out) -> Result<ValueId> {
        check_name(at, &out.name, is_of_a_name)?;
        check_count("values", self.graph.values.len() + 1, MAX_OPS)?;
        check_count("dimensions", out.ty.shape.len(), MAX_DIMS)?;
        if let Some(strides) = out.ty.strides.as_ref().filter(|strides| strides.len() != out.ty.shape.len()) {
            let wanted = format!("{}, one for each dimension", out.ty.shape.len());
            return Err(LoweringError::unexpected(
                at.to_string(),
                format!("{} strides", strides.len()),
                wanted,
            ));
        }
        let class = out.class.unwrap_or_else(|| class_of(kind));
        let id = ValueId::from(self.graph.values.len());
        if self.values.insert(out.name.clone(), id).is_some() {
            return Err(LoweringError::unexpected(
                at.to_string(),
                out.name,
                "a name that no other value has",
            ));
        }
        self.graph.values.push(Value { name: out.name, ty: out.ty, class });
        Ok(id)
    }

    pub(crate) fn returns(&mut self, outputs: Vec<ValueId>) {
        self.graph.outputs = outputs;
    }

    pub(crate) fn finish(self) -> Graph {
        self.graph
    }
}

/// The class of memory that the results of an operation have.
pub(crate) fn class_of(kind: &Kind) -> Class {
    match kind {
        Kind::Input => Class::External,
        Kind::Constant => Class::Const,
        _ => Class::Owned,
    }
}

/// The operation of a text as [`Graph::to_json`] writes it, or in any other order of attributes.
pub(crate) fn kind_of_text(at: &(impl Display + ?Sized), text: &str) -> Result<Kind> {
    let refused = |error| LoweringError::unexpected(at.to_string(), error, OPERATION);
    // What is written again as it was read has no attribute that is not known, and none twice.
    if let Ok(kind) = serde_json::from_str::<Kind>(text)
        && serde_json::to_string(&kind).is_ok_and(|again| again == text)
    {
        return Ok(kind);
    }
    let Once(attributes) = serde_json::from_str(text).map_err(refused)?;
    kind(at, attributes)
}

/// What is wanted where an operation stands.
const OPERATION: &str = "an operation with its attributes";

/// The operation that its name and attributes say.
pub(crate) fn kind(at: &(impl Display + ?Sized), mut attributes: Json) -> Result<Kind> {
    let of = |attributes: &Json| Kind::deserialize(attributes);
    let kind =
        of(&attributes).map_err(|error| LoweringError::unexpected(at.to_string(), error, OPERATION))?;
    let known = attributes_of(&kind);
    let given: Vec<String> = attributes.as_object().into_iter().flat_map(|map| map.keys().cloned()).collect();
    for key in given.into_iter().filter(|key| !known.contains_key(key)) {
        // It is a default, or not known: then it may be anything.
        let value = attributes[&key].take();
        attributes[&key] = serde_json::json!({ "": null });
        if of(&attributes).is_ok() {
            let keys = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let (found, wanted) = (format!("the attribute {key}"), format!("one of {keys}"));
            return Err(LoweringError::unexpected(at.to_string(), found, wanted));
        }
        attributes[&key] = value;
    }
    Ok(kind)
}

/// The attributes of an operation that are not their defaults.
pub(crate) fn attributes_of(kind: &Kind) -> serde_json::Map<String, Json> {
    match serde_json::to_value(kind) {
        Ok(Json::Object(map)) => map,
        _ => unreachable!("an operation is a table of plain values"),
    }
}

pub(crate) fn check_count(what: &'static str, count: usize, limit: usize) -> Result<()> {
    if count <= limit { Ok(()) } else { Err(LoweringError::TooMany { what, count, limit }) }
}

pub(crate) fn check_length(text: &[u8]) -> Result<()> {
    match text.len() {
        bytes if bytes > MAX_TEXT_BYTES => Err(LoweringError::TooLong { bytes, limit: MAX_TEXT_BYTES }),
        _ => Ok(()),
    }
}

/// Whether a character may stand in a name.
pub(crate) fn is_of_a_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_.$#/-".contains(c)
}

/// Whether a character may stand in the name of a group: vLLM's are `tp:0`.
pub(crate) fn is_of_a_group(c: char) -> bool {
    is_of_a_name(c) || c == ':'
}

fn check_name(at: &(impl Display + ?Sized), name: &str, belongs: fn(char) -> bool) -> Result<()> {
    if !name.is_empty() && name.len() <= MAX_NAME && name.chars().all(belongs) {
        return Ok(());
    }
    let wanted = format!("a name: at most {MAX_NAME} letters, digits and _ . $ # / -");
    Err(LoweringError::unexpected(at.to_string(), format!("{name:?}"), wanted))
}
