//! Graphs as JSON.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::{Map, Value as Json, map::Entry, value::RawValue};

use crate::{
    build::{Builder, Out, check_length, class_of, kind_of_text},
    error::LoweringError,
    graph::{Graph, Group},
    hash::HashMap,
    ids::ValueId,
    op::Kind,
    sym::{Sym, SymExpr},
    types::{Class, Element, Type},
};

/// A graph that is read. Names are parts of the text, and so are operations: most of them occur many times.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File<'t> {
    #[serde(default)]
    syms: Vec<Sym>,
    #[serde(default)]
    groups: Vec<Group>,
    #[serde(borrow)]
    ops: Vec<OpText<'t>>,
    outputs: Vec<Name<'t>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OpText<'t> {
    #[serde(default, borrow)]
    name: Option<Name<'t>>,
    #[serde(rename = "do", borrow)]
    kind: &'t RawValue,
    #[serde(default, borrow)]
    args: Vec<Name<'t>>,
    #[serde(default)]
    outs: Vec<Out>,
}

/// A name, copied only where the text escapes a character.
struct Name<'t>(std::borrow::Cow<'t, str>);

impl<'de: 't, 't> Deserialize<'de> for Name<'t> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Name<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E>(self, name: &'de str) -> Result<Name<'de>, E> {
                Ok(Name(name.into()))
            }

            fn visit_str<E>(self, name: &str) -> Result<Name<'de>, E> {
                Ok(Name(name.to_owned().into()))
            }
        }

        deserializer.deserialize_str(Visitor)
    }
}

/// A value of JSON in which no table has a key twice.
pub(crate) struct Once(pub(crate) Json);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value of JSON")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(value.into())
            }

            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(value.into())
            }

            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(value.into())
            }

            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(value.into())
            }

            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(value.into())
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
                let mut list = Vec::new();
                while let Some(Once(item)) = items.next_element()? {
                    list.push(item);
                }
                Ok(list.into())
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
                let mut map = Map::new();
                while let Some((key, Once(value))) = entries.next_entry::<String, Once>()? {
                    match map.entry(key) {
                        Entry::Vacant(entry) => drop(entry.insert(value)),
                        Entry::Occupied(entry) => {
                            return Err(de::Error::custom(format!("{} twice", entry.key())));
                        }
                    }
                }
                Ok(map.into())
            }
        }

        deserializer.deserialize_any(Visitor).map(Self)
    }
}

/// A name with a type, which is not flattened: serde would keep each field until it has seen all.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedType {
    name: String,
    dtype: Element,
    shape: Vec<SymExpr>,
    #[serde(default)]
    strides: Option<Vec<SymExpr>>,
    #[serde(default)]
    offset: Option<SymExpr>,
    #[serde(default)]
    class: Option<Class>,
}

impl From<NamedType> for Out {
    fn from(NamedType { name, dtype, shape, strides, offset, class }: NamedType) -> Self {
        let offset = offset.unwrap_or(SymExpr::constant(0));
        Self { name, ty: Type { dtype, shape, strides, offset }, class }
    }
}

/// A graph that is written.
#[derive(Serialize)]
struct Written<'g> {
    #[serde(skip_serializing_if = "<[Sym]>::is_empty")]
    syms: &'g [Sym],
    #[serde(skip_serializing_if = "<[Group]>::is_empty")]
    groups: &'g [Group],
    #[serde(serialize_with = "write_ops")]
    ops: &'g Graph,
    outputs: Names<'g>,
}

#[derive(Serialize)]
struct WrittenOp<'g> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'g str>,
    #[serde(rename = "do")]
    kind: &'g Kind,
    args: Names<'g>,
    outs: Outs<'g>,
}

#[derive(Serialize)]
struct WrittenOut<'g> {
    name: &'g str,
    #[serde(flatten)]
    ty: &'g Type,
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<&'g Class>,
}

fn write_ops<S: Serializer>(graph: &Graph, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(graph.ops.iter().map(|op| WrittenOp {
        name:
            Some(op.name.as_str()).filter(|name| op.outs.first().is_none_or(|out| graph.name(*out) != *name)),
        kind: &op.kind,
        args: Names(graph, &op.args),
        outs: Outs(graph, &op.kind, &op.outs),
    }))
}

/// The names of values.
struct Names<'g>(&'g Graph, &'g [ValueId]);

impl Serialize for Names<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.1.iter().map(|id| self.0.name(*id)))
    }
}

/// The results of an operation.
struct Outs<'g>(&'g Graph, &'g Kind, &'g [ValueId]);

impl Serialize for Outs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let usual = class_of(self.1);
        serializer.collect_seq(self.2.iter().map(|id| {
            let value = self.0.value(*id);
            let class = Some(&value.class).filter(|class| **class != usual);
            WrittenOut { name: &value.name, ty: &value.ty, class }
        }))
    }
}

impl Graph {
    /// Reads what [`to_json`](Self::to_json) writes.
    ///
    /// # Errors
    /// Where in the text, what was found there and what was wanted. Whether the graph makes sense is for
    /// [`verify`](crate::verify) to say.
    pub fn from_json(text: &[u8]) -> Result<Self, LoweringError> {
        check_length(text)?;
        let file: File<'_> = serde_json::from_slice(text).map_err(|error| {
            let at = format!("line {} column {}", error.line(), error.column());
            LoweringError::unexpected(at, error, "a graph")
        })?;
        let mut graph = Builder::default();
        for (index, sym) in file.syms.into_iter().enumerate() {
            graph.sym(&format!("syms[{index}]"), sym)?;
        }
        for (index, group) in file.groups.into_iter().enumerate() {
            graph.group(&format!("groups[{index}]"), group)?;
        }
        let mut kinds: HashMap<&str, Kind> = HashMap::default();
        for (index, op) in file.ops.into_iter().enumerate() {
            let at = Path { list: "ops", index };
            let find =
                |(arg, Name(name)): (usize, &Name<'_>)| graph.find(&format_args!("{at}.args[{arg}]"), name);
            let args = op.args.iter().enumerate().map(find).collect::<Result<_, _>>()?;
            let kind = match kinds.get(op.kind.get()) {
                Some(kind) => kind.clone(),
                None => {
                    let kind = kind_of_text(&format_args!("{at}.do"), op.kind.get())?;
                    kinds.insert(op.kind.get(), kind.clone());
                    kind
                }
            };
            graph.op(&at, op.name.map(|Name(name)| name.into_owned()), kind, args, op.outs)?;
        }
        let find =
            |(index, Name(name)): (usize, &Name<'_>)| graph.find(&format_args!("outputs[{index}]"), name);
        let outputs = file.outputs.iter().enumerate().map(find).collect::<Result<_, _>>()?;
        graph.returns(outputs);
        Ok(graph.finish())
    }

    /// The graph as JSON: `{"syms", "groups", "ops": [{"name", "do", "args", "outs"}], "outputs"}`. Equal graphs have equal
    /// texts.
    pub fn to_json(&self) -> String {
        let mut text = Vec::with_capacity(128 * self.ops.len());
        self.write_json(&mut text);
        String::from_utf8(text).expect("JSON is UTF-8")
    }

    /// Writes [`to_json`](Self::to_json) to something that takes all bytes.
    pub(crate) fn write_json(&self, to: impl std::io::Write) {
        let (syms, groups, outputs) = (&self.syms[..], &self.groups[..], Names(self, &self.outputs));
        let written = Written { syms, groups, ops: self, outputs };
        serde_json::to_writer(to, &written).expect("plain values with names");
    }
}

/// A place in the JSON, whose text is made where an error needs it.
struct Path {
    list: &'static str,
    index: usize,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.list, self.index)
    }
}
