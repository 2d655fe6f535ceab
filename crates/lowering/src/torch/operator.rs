//! Operators of torch that this crate knows.

use antiphon_operation::ReduceOp;
use serde_json::Value as Json;

use super::{Importer, Node, Result, Result_};
use crate::{
    error::LoweringError,
    ids::{TokenId, ValueId},
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Quantize, Reduction, Unary, View},
    sym::SymExpr,
    types::Type,
    verify::suit,
};

/// An argument as a tensor's name.
pub(super) fn tensor(arg: &Json) -> Option<&str> {
    arg.as_object()?.get("value")?.as_str()
}

/// An argument as a number.
pub(super) fn number(arg: &Json) -> Option<f64> {
    match arg.as_object() {
        Some(map) => map.get("number")?.as_str()?.parse().ok(),
        None => arg.as_f64(),
    }
}

/// An argument as a size.
fn size(arg: &Json) -> Option<SymExpr> {
    match arg.as_object() {
        Some(map) => SymExpr::parse(map.get("sym")?.as_str()?).ok(),
        None => arg.as_i64().map(SymExpr::constant),
    }
}

fn parse<T: serde::de::DeserializeOwned>(word: &str) -> Option<T> {
    serde_json::from_value(Json::String(word.to_owned())).ok()
}

/// Whether words of the table of spellings say something.
pub(super) fn is_meaning(words: &[&str]) -> bool {
    match words {
        [
            "wait" | "fused" | "clamp" | "cast" | "reshape" | "expand" | "permute" | "strided" | "copy"
            | "matmul" | "full" | "assign",
        ] => true,
        ["unary", op] => parse::<Unary>(op).is_some(),
        ["binary", op] | ["binary", op, "swapped"] => parse::<Binary>(op).is_some(),
        ["reduce", op] => parse::<Reduction>(op).is_some(),
        ["start" | "start_" | "starts" | "sync" | "blocking", prim, ..] => parse::<Prim>(prim).is_some(),
        ["rms_norm" | "add_rms_norm" | "fp8" | "fp8_tokens", ..] => words.len() > 1,
        _ => false,
    }
}

impl Importer {
    /// Adds the operation of an operator, if its arguments are of the usual forms. Otherwise it is opaque.
    pub(super) fn known(&mut self, at: &str, node: &Node, spelling: &[String]) -> Result<bool> {
        let words: Vec<&str> = spelling.iter().map(String::as_str).collect();
        match words[..] {
            ["wait"] => self.wait(at, node),
            ["start" | "start_", ref rest @ ..] => self.start(at, node, rest, words[0] == "start_"),
            ["starts", ref rest @ ..] => self.starts(at, node, rest),
            ["sync", ref rest @ ..] => self.sync(at, node, rest),
            ["fused"] => self.fused(at, node),
            _ if self.compound(at, node, &words)? => Ok(true),
            _ => {
                let Some(kind) = self.kind(node, &words) else { return Ok(false) };
                let tensors: Vec<&str> = node.args.iter().filter_map(tensor).collect();
                let values = tensors.iter().map(|name| self.value(at, name)).collect::<Result<Vec<_>>>()?;
                let [out] = &node.outs[..] else { return Ok(false) };
                let mut out = Result_ { name: out.name.clone(), ty: out.ty.clone() };
                let kind = match kind {
                    // A reshape of what is not row-major copies.
                    Kind::View { view: View::Reshape } if !self.types[values[0].index()].is_contiguous() => {
                        Kind::Copy
                    }
                    Kind::View { view: View::Reshape } => {
                        out.ty =
                            Type { offset: self.types[values[0].index()].offset.clone(), ..out.ty.dense() };
                        Kind::View { view: View::Reshape }
                    }
                    kind => kind,
                };
                if !self.suits(&kind, &values, &[&out.ty]) {
                    return Ok(false);
                }
                self.add(at, node.name.clone(), kind, values, vec![out])?;
                if words[0] == "assign"
                    && let Some(name) = node.args.first().and_then(tensor)
                {
                    let value = self.value(at, &node.name)?;
                    self.latest.insert(name.to_owned(), value);
                }
                Ok(true)
            }
        }
    }

    /// Whether the results' sizes follow from those of the operands by what this crate knows of sizes: those of torch's own reasoning,
    /// as of `s0 // 2 * 2` where `s0` is even, may not.
    pub(super) fn suits(&self, kind: &Kind, args: &[ValueId], outs: &[&Type]) -> bool {
        let args: Vec<&Type> = args.iter().map(|value| &self.types[value.index()]).collect();
        let size = kind.group().and_then(|group| self.graph.group_size(group));
        suit(kind, &args, outs, size.unwrap_or(1), self.graph.syms()).is_ok()
    }

    /// An operation on tensors, without communication.
    fn kind(&self, node: &Node, words: &[&str]) -> Option<Kind> {
        let plain = node.kwargs.is_empty();
        let tensors = node.args.iter().filter(|arg| tensor(arg).is_some()).count();
        let first = node.args.first();
        Some(match words {
            ["unary", op] if plain && node.args.len() == 1 && tensors == 1 => Kind::Unary { op: parse(op)? },
            ["binary", op, rest @ ..] if plain && node.args.len() == 2 => {
                let swapped = rest == ["swapped"];
                match (tensor(&node.args[0]), tensor(&node.args[1])) {
                    (Some(_), Some(_)) => Kind::Binary { op: parse(op)?, scalar: None, swapped },
                    (Some(_), None) => {
                        Kind::Binary { op: parse(op)?, scalar: Some(number(&node.args[1])?), swapped }
                    }
                    (None, Some(_)) => Kind::Binary {
                        op: parse(op)?,
                        scalar: Some(number(&node.args[0])?),
                        swapped: !swapped,
                    },
                    (None, None) => return None,
                }
            }
            // Everything but the dtype would be another device, or another order of dimensions.
            ["cast"] if tensors == 1 && node.kwargs.keys().all(|key| key == "dtype") => Kind::Cast,
            ["reduce", op] if tensors == 1 && plain => {
                let rank = self.types[self.latest.get(tensor(first?)?)?.index()].shape.len() as i64;
                let dims = node.args.get(1)?.as_array()?;
                let dims =
                    dims.iter().map(|dim| dim.as_i64().map(|dim| if dim < 0 { dim + rank } else { dim }));
                let mut dims = dims.map(|dim| usize::try_from(dim?).ok()).collect::<Option<Vec<usize>>>()?;
                dims.sort_unstable();
                let keepdim = node.args.get(2).and_then(Json::as_bool).unwrap_or(false);
                Kind::Reduce { op: parse(op)?, dims, keepdim }
            }
            ["reshape"] if tensors == 1 => Kind::View { view: View::Reshape },
            ["expand"] if tensors == 1 => Kind::View { view: View::Expand },
            ["permute"] if tensors == 1 => {
                let dims = node.args.get(1)?.as_array()?;
                let rank = dims.len() as i64;
                let dims =
                    dims.iter().map(|dim| dim.as_i64().map(|dim| if dim < 0 { dim + rank } else { dim }));
                let dims = dims.map(|dim| usize::try_from(dim?).ok()).collect::<Option<_>>()?;
                Kind::View { view: View::Permute(dims) }
            }
            ["strided"] if tensors == 1 => Kind::View { view: View::Strided },
            ["copy"] if tensors == 1 => Kind::Copy,
            ["matmul"] if tensors == 2 && plain => Kind::MatMul,
            ["full"] if tensors == 0 => Kind::Full { value: number(node.args.get(1)?)? },
            ["assign"] if tensors == 2 && node.outs.len() == 1 => Kind::Assign,
            _ => return None,
        })
    }

    fn wait(&mut self, at: &str, node: &Node) -> Result<bool> {
        let ([arg], [out]) = (&node.args[..], &node.outs[..]) else { return Ok(false) };
        let Some(name) = tensor(arg) else { return Ok(false) };
        // With another tensor of its call.
        if self.latest.contains_key(&out.name) {
            return Ok(true);
        }
        let value = self.value(at, name)?;
        match self.in_flight.remove(&value) {
            Some(token) if self.lists.contains_key(&token) => {
                let list = self.lists.remove(&token).unwrap_or_default();
                let mut outs = Vec::new();
                for (value, name) in &list {
                    let waited = self.waits.get(name).cloned().unwrap_or_else(|| format!("{name}/waited"));
                    outs.push(Result_ { name: waited, ty: self.types[value.index()].clone() });
                    self.in_flight.remove(value);
                }
                let values = list.iter().map(|(value, _)| *value).collect();
                let ready: Vec<String> = outs.iter().map(|out| out.name.clone()).collect();
                let kind = Kind::Wait { tokens: vec![TokenId(token)] };
                self.add(at, node.name.clone(), kind, values, outs)?;
                for ((_, name), ready) in list.into_iter().zip(ready) {
                    let value = self.value(at, &ready)?;
                    self.ready.insert(value);
                    self.latest.insert(name, value);
                }
                Ok(true)
            }
            Some(token) => {
                let out = Result_ { name: out.name.clone(), ty: self.types[value.index()].clone() };
                let kind = Kind::Wait { tokens: vec![TokenId(token)] };
                self.add(at, node.name.clone(), kind, vec![value], vec![out])?;
                let value = self.value(at, &node.name)?;
                self.ready.insert(value);
                self.latest.insert(name.to_owned(), value);
                Ok(true)
            }
            // Torch waits for nothing a second time, and gives the tensor back.
            None if self.ready.contains(&value) && self.types[value.index()].is_contiguous() => {
                let out = Result_ { name: out.name.clone(), ty: self.types[value.index()].clone() };
                let kind = Kind::View { view: View::Reshape };
                self.add(at, node.name.clone(), kind, vec![value], vec![out])?;
                let again = self.value(at, &node.name)?;
                self.ready.insert(again);
                Ok(true)
            }
            // What an earlier program may have started.
            None => Ok(false),
        }
    }

    /// Waits for these tensors would wait for nothing.
    fn is_ready<'n>(&mut self, at: &str, names: impl IntoIterator<Item = &'n String>) -> Result<()> {
        for name in names {
            let value = self.value(at, name)?;
            self.ready.insert(value);
        }
        Ok(())
    }

    pub(super) fn coll(&self, node: &Node, prim: &str, roles: &[&str], args: &[Json]) -> Option<Coll> {
        let mut coll = Coll::new(parse::<Prim>(prim)?, "");
        for (role, arg) in roles.iter().zip(args) {
            match *role {
                "group" => coll.group = arg.as_str()?.to_owned(),
                "op" => coll.red = Some(if arg == "product" { "prod" } else { arg.as_str()? }.parse().ok()?),
                "root" => coll.root = Some(u32::try_from(arg.as_u64()?).ok()?),
                "sends" => coll.sends = Some(arg.as_array()?.iter().map(size).collect::<Option<_>>()?),
                "receives" => coll.receives = Some(arg.as_array()?.iter().map(size).collect::<Option<_>>()?),
                "gather" => coll.dims = Some([usize::try_from(arg.as_u64()?).ok()?, 0]),
                // vLLM's operators gather along any dimension; those along the first are known.
                "dim" if arg.as_i64() != Some(0) => return None,
                "shard" => coll.dims = Some([coll.dims?[0], usize::try_from(arg.as_u64()?).ok()?]),
                _ => {}
            }
        }
        let reduces = matches!(coll.prim, Prim::AllReduce | Prim::ReduceScatter);
        coll.red = if reduces { coll.red.or(Some(ReduceOp::Sum)) } else { None };
        let known = !coll.group.is_empty() && node.kwargs.is_empty();
        known.then_some(coll)
    }

    fn start(&mut self, at: &str, node: &Node, words: &[&str], in_place: bool) -> Result<bool> {
        let ([prim, roles @ ..], [x, rest @ ..], [out]) = (words, &node.args[..], &node.outs[..]) else {
            return Ok(false);
        };
        let (Some(name), Some(mut coll)) = (tensor(x), self.coll(node, prim, roles, rest)) else {
            return Ok(false);
        };
        coll.in_place = in_place;
        let value = self.value(at, name)?;
        let token = TokenId(self.tokens);
        self.tokens += 1;
        let ty = if in_place { self.types[value.index()].clone() } else { out.ty.dense() };
        let kind = Kind::Start { coll, token };
        if !self.suits(&kind, &[value], &[&ty]) {
            return Ok(false);
        }
        let out = Result_ { name: out.name.clone(), ty };
        self.add(at, node.name.clone(), kind, vec![value], vec![out])?;
        let started = self.value(at, &node.name)?;
        self.in_flight.insert(started, token.0);
        if in_place {
            self.latest.insert(name.to_owned(), started);
        }
        Ok(true)
    }

    /// A collective of several tensors.
    fn starts(&mut self, at: &str, node: &Node, words: &[&str]) -> Result<bool> {
        let ([prim, roles @ ..], [Json::Array(xs), rest @ ..]) = (words, &node.args[..]) else {
            return Ok(false);
        };
        let names: Option<Vec<&str>> = xs.iter().map(tensor).collect();
        let (Some(names), Some(coll)) = (names, self.coll(node, prim, roles, rest)) else { return Ok(false) };
        if names.is_empty() || names.len() != node.outs.len() {
            return Ok(false);
        }
        let values = names.iter().map(|name| self.value(at, name)).collect::<Result<Vec<_>>>()?;
        let token = self.tokens;
        self.tokens += 1;
        let out = |out: &Result_| Result_ { name: out.name.clone(), ty: out.ty.dense() };
        let kind = Kind::Start { coll, token: TokenId(token) };
        let outs: Vec<Result_> = node.outs.iter().map(out).collect();
        if !self.suits(&kind, &values, &outs.iter().map(|out| &out.ty).collect::<Vec<_>>()) {
            return Ok(false);
        }
        self.add(at, node.name.clone(), kind, values, outs)?;
        let mut list = Vec::new();
        for out in &node.outs {
            let started = self.value(at, &out.name)?;
            self.in_flight.insert(started, token);
            list.push((started, out.name.clone()));
        }
        self.lists.insert(token, list);
        Ok(true)
    }

    /// A call that this crate put in, which its site tells: `(ticket, x, …)` to `(ticket, result)`.
    fn sync(&mut self, at: &str, node: &Node, words: &[&str]) -> Result<bool> {
        let ([prim, roles @ ..], [_, x, rest @ ..], [_, out]) = (words, &node.args[..], &node.outs[..])
        else {
            return Ok(false);
        };
        let site = roles.iter().position(|role| *role == "site").and_then(|index| rest.get(index));
        let ours = site.and_then(Json::as_str).is_some_and(|site| !site.is_empty());
        let (true, Some(name), Some(coll)) = (ours, tensor(x), self.coll(node, prim, roles, rest)) else {
            return Ok(false);
        };
        let value = self.value(at, name)?;
        let name = out.name.clone();
        let out = Result_ { name: name.clone(), ty: out.ty.dense() };
        self.add(at, node.name.clone(), Kind::Sync { coll }, vec![value], vec![out])?;
        self.is_ready(at, [&name])?;
        Ok(true)
    }

    /// The same of a fused call: `(ticket, x, group, outputs, residual, weight, eps, weight_bias, round_before_weight, quantize,
    /// scale, scale_value, group_size, site)` to `(ticket, results)`.
    fn fused(&mut self, at: &str, node: &Node) -> Result<bool> {
        let [
            _,
            x,
            Json::String(group),
            outputs,
            residual,
            weight,
            eps,
            bias,
            Json::Bool(round_before_weight),
            quantize,
            scale,
            value,
            group_size,
            site,
        ] = &node.args[..]
        else {
            return Ok(false);
        };
        let ours = site.as_str().is_some_and(|site| !site.is_empty());
        let outputs: Option<Vec<FusedOutput>> = serde_json::from_value(outputs.clone()).ok();
        let (true, Some(x), Some(outputs), Some(eps), Some(weight_bias), Some(value)) =
            (ours, tensor(x), outputs, number(eps), number(bias), number(value))
        else {
            return Ok(false);
        };
        if node.outs.len() != outputs.len() + 1 {
            let wanted = format!("{} and a ticket", outputs.len());
            return Err(LoweringError::unexpected(at, format!("{} results", node.outs.len()), wanted));
        }
        let roles = [(FusedArg::Residual, residual), (FusedArg::Weight, weight), (FusedArg::Scale, scale)];
        let operands: Vec<(FusedArg, &str)> =
            roles.into_iter().filter_map(|(role, arg)| Some((role, tensor(arg)?))).collect();
        let quantize = match (quantize.as_str(), group_size.as_u64().map(u32::try_from)) {
            (Some("fp8"), _) => Quantize::Fp8,
            (Some("fp8-tokens"), _) => Quantize::Fp8Tokens,
            (Some("fp8-groups"), Some(Ok(group))) => Quantize::Fp8Groups(group),
            _ => return Ok(false),
        };
        let has_norm = outputs.iter().any(|output| output.needs_norm());
        let has_codes = outputs.iter().any(|output| matches!(output, FusedOutput::Codes));
        let has_number = quantize == Quantize::Fp8 && has_codes && tensor(scale).is_none();
        let names = std::iter::once(x).chain(operands.iter().map(|(_, name)| *name));
        let values = names.map(|name| self.value(at, name)).collect::<Result<Vec<_>>>()?;
        let fused = Fused {
            group: group.clone(),
            args: operands.iter().map(|(role, _)| *role).collect(),
            eps: has_norm.then_some(eps),
            weight_bias,
            round_before_weight: *round_before_weight,
            quantize,
            scale: has_number.then_some(value),
            outputs,
        };
        let outs = node.outs[1..].iter().map(|out| Result_ { name: out.name.clone(), ty: out.ty.dense() });
        self.add(at, node.name.clone(), Kind::Fused { fused }, values, outs.collect())?;
        self.is_ready(at, node.outs[1..].iter().map(|out| &out.name))?;
        Ok(true)
    }
}
