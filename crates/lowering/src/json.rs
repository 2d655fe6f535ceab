//! Graphs as JSON.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::{
    build::{Builder, Out, check_length, class_of, kind, telling},
    error::LoweringError,
    graph::{Graph, Group},
    sym::Sym,
    types::{Class, Type},
};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    syms: Vec<Sym>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    groups: Vec<Group>,
    ops: Vec<OpWire>,
    outputs: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpWire {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(rename = "do")]
    kind: Map<String, Json>,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    outs: Vec<OutWire>,
}

#[derive(Serialize, Deserialize)]
struct OutWire {
    name: String,
    #[serde(flatten)]
    ty: Type,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    class: Option<Class>,
}

impl Graph {
    /// Reads what [`to_json`](Self::to_json) writes.
    ///
    /// # Errors
    /// Where in the text, what was found there and what was wanted. Whether the graph makes sense is for
    /// [`verify`](crate::verify) to say.
    pub fn from_json(text: &[u8]) -> Result<Self, LoweringError> {
        check_length(text)?;
        let file: File = serde_json::from_slice(text).map_err(|error| {
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
        for (index, op) in file.ops.into_iter().enumerate() {
            let at = format!("ops[{index}]");
            let find = |(arg, name): (usize, &String)| graph.find(&format!("{at}.args[{arg}]"), name);
            let args = op.args.iter().enumerate().map(find).collect::<Result<_, _>>()?;
            let out = |out: OutWire| Out { name: out.name, ty: out.ty, class: out.class };
            let kind = kind(&format!("{at}.do"), Json::Object(op.kind))?;
            graph.op(&at, op.name, kind, args, op.outs.into_iter().map(out).collect())?;
        }
        let find = |(index, name): (usize, &String)| graph.find(&format!("outputs[{index}]"), name);
        let outputs = file.outputs.iter().enumerate().map(find).collect::<Result<_, _>>()?;
        graph.returns(outputs);
        Ok(graph.finish())
    }

    /// The graph as JSON: `{"syms", "groups", "ops": [{"name", "do", "args", "outs"}], "outputs"}`. Equal graphs have equal
    /// texts.
    pub fn to_json(&self) -> String {
        let names =
            |ids: &[crate::ValueId]| ids.iter().map(|id| self.name(*id).to_owned()).collect::<Vec<_>>();
        let ops = self.ops.iter().map(|op| {
            let out = |id: &crate::ValueId| {
                let value = self.value(*id);
                let class = Some(&value.class).filter(|class| **class != class_of(&op.kind)).cloned();
                OutWire { name: value.name.clone(), ty: value.ty.clone(), class }
            };
            let outs: Vec<OutWire> = op.outs.iter().map(out).collect();
            let name =
                Some(&op.name).filter(|name| outs.first().is_none_or(|out| out.name != **name)).cloned();
            OpWire { name, kind: telling(&op.kind), args: names(&op.args), outs }
        });
        let file = File {
            syms: self.syms.clone(),
            groups: self.groups.clone(),
            ops: ops.collect(),
            outputs: names(&self.outputs),
        };
        serde_json::to_string(&file).expect("plain values with names")
    }
}
