//! Operators of torch, and of vLLM, that are several operations here.
//!
//! The operation that gives an operator's first result has the node's name, the others `NODE/WHAT`.

use serde_json::Value as Json;

use super::{
    Importer, Node, Result, Result_,
    operator::{number, tensor},
};
use crate::{
    ids::{TokenId, ValueId},
    op::{Binary, Kind, Quantize, Reduction, Unary},
    types::{Element, Type},
    verify::F32,
};

/// What an operator is given by name, or by place.
struct Given<'n> {
    node: &'n Node,
    /// The names or places of its arguments, in the order that the spelling has.
    names: &'n [&'n str],
}

impl<'n> Given<'n> {
    fn argument(&self, index: usize) -> Option<&'n Json> {
        let name = *self.names.get(index)?;
        match name.parse::<usize>() {
            Ok(place) => self.node.args.get(place),
            Err(_) => self.node.kwargs.get(name),
        }
    }

    fn tensor(&self, index: usize) -> Option<&'n str> {
        tensor(self.argument(index)?)
    }

    fn number(&self, index: usize) -> Option<f64> {
        number(self.argument(index)?)
    }
}

impl Importer {
    /// Adds the operations of an operator, if it is one of these and its arguments are of the usual forms.
    pub(super) fn compound(&mut self, at: &str, node: &Node, words: &[&str]) -> Result<bool> {
        let Some((what, names)) = words.split_first() else { return Ok(false) };
        let given = Given { node, names };
        match *what {
            "clamp" => self.clamp(at, node),
            "blocking" => self.blocking(at, node, names),
            "rms_norm" => self.rms_norm(at, &given),
            "add_rms_norm" => self.add_rms_norm(at, &given),
            "fp8" => self.fp8(at, &given),
            "fp8_tokens" => self.fp8_tokens(at, &given),
            _ => Ok(false),
        }
    }

    /// An operation with one result, whose name the node has, or one of its own.
    fn emit(&mut self, at: &str, name: &str, kind: Kind, args: &[ValueId], ty: Type) -> Result<ValueId> {
        let out = Result_ { name: name.to_owned(), ty };
        self.add(at, name.to_owned(), kind, args.to_vec(), vec![out])?;
        self.value(at, name)
    }

    /// The operation that gives a node's result.
    fn give(&mut self, at: &str, op: String, out: &Result_, kind: Kind, args: &[ValueId]) -> Result<()> {
        let out = Result_ { name: out.name.clone(), ty: out.ty.clone() };
        self.add(at, op, kind, args.to_vec(), vec![out])
    }

    /// Two bounds are two operations.
    fn clamp(&mut self, at: &str, node: &Node) -> Result<bool> {
        let [out] = &node.outs[..] else { return Ok(false) };
        let bound = |index: usize| node.args.get(index).and_then(number);
        let (Some(x), Some(low), Some(high)) = (node.args.first().and_then(tensor), bound(1), bound(2))
        else {
            return Ok(false);
        };
        if !node.kwargs.is_empty() {
            return Ok(false);
        }
        let value = self.value(at, x)?;
        let middle = self.emit(
            at,
            &format!("{}/low", node.name),
            with(Binary::Maximum, low),
            &[value],
            out.ty.dense(),
        )?;
        self.give(at, node.name.clone(), out, with(Binary::Minimum, high), &[middle])?;
        Ok(true)
    }

    /// A collective that is complete when it returns: one that is started and waited for.
    fn blocking(&mut self, at: &str, node: &Node, words: &[&str]) -> Result<bool> {
        let ([prim, roles @ ..], [x, rest @ ..], [out]) = (words, &node.args[..], &node.outs[..]) else {
            return Ok(false);
        };
        let (Some(name), Some(coll)) = (tensor(x), self.coll(node, prim, roles, rest)) else {
            return Ok(false);
        };
        let (value, token) = (self.value(at, name)?, TokenId(self.tokens));
        let start = Kind::Start { coll, token };
        if !self.suits(&start, &[value], &[&out.ty.dense()]) {
            return Ok(false);
        }
        self.tokens += 1;
        let name = format!("{}/started", node.name);
        let started = self.emit(at, &name, start, &[value], out.ty.dense())?;
        let out = Result_ { name: out.name.clone(), ty: out.ty.dense() };
        self.give(at, node.name.clone(), &out, Kind::Wait { tokens: vec![token] }, &[started])?;
        Ok(true)
    }

    /// `input weight epsilon`: rounded, then weighted.
    fn rms_norm(&mut self, at: &str, given: &Given<'_>) -> Result<bool> {
        let (Some(x), Some(weight), Some(eps), [out]) =
            (given.tensor(0), given.tensor(1), given.number(2), &given.node.outs[..])
        else {
            return Ok(false);
        };
        let (x, weight) = (self.value(at, x)?, self.value(at, weight)?);
        self.normed(at, given.node, x, weight, eps, out)?;
        Ok(true)
    }

    /// `input residual weight epsilon`: the norm of the sum, and the sum.
    fn add_rms_norm(&mut self, at: &str, given: &Given<'_>) -> Result<bool> {
        let (Some(x), Some(residual), Some(weight), Some(eps), [norm, sum]) =
            (given.tensor(0), given.tensor(1), given.tensor(2), given.number(3), &given.node.outs[..])
        else {
            return Ok(false);
        };
        let [x, residual, weight] = [self.value(at, x)?, self.value(at, residual)?, self.value(at, weight)?];
        let add = Kind::Binary { op: Binary::Add, scalar: None, swapped: false };
        self.give(at, format!("{}/sum", given.node.name), sum, add, &[x, residual])?;
        let sum = self.value(at, &sum.name)?;
        self.normed(at, given.node, sum, weight, eps, norm)?;
        Ok(true)
    }

    fn normed(
        &mut self,
        at: &str,
        node: &Node,
        x: ValueId,
        weight: ValueId,
        eps: f64,
        out: &Result_,
    ) -> Result<()> {
        let own = self.types[x.index()].dense();
        let (wide, column) = (Type::new(F32, own.shape.clone()), column(&own));
        let name = |what: &str| format!("{}/{what}", node.name);
        let last = own.shape.len().saturating_sub(1);
        let mean = Kind::Reduce { op: Reduction::Mean, dims: vec![last], keepdim: true };
        let x = self.emit(at, &name("wide"), Kind::Cast, &[x], wide.clone())?;
        let squares = self.emit(at, &name("squares"), with(Binary::Pow, 2.0), &[x], wide.clone())?;
        let mean = self.emit(at, &name("mean"), mean, &[squares], column.clone())?;
        let mean = self.emit(at, &name("eps"), with(Binary::Add, eps), &[mean], column.clone())?;
        let inverse = self.emit(at, &name("inverse"), Kind::Unary { op: Unary::Rsqrt }, &[mean], column)?;
        let product = Kind::Binary { op: Binary::Mul, scalar: None, swapped: false };
        let scaled = self.emit(at, &name("scaled"), product.clone(), &[x, inverse], wide)?;
        let rounded = self.emit(at, &name("rounded"), Kind::Cast, &[scaled], own)?;
        self.give(at, node.name.clone(), out, product, &[rounded, weight])
    }

    /// `input scale`: codes of `input / scale`.
    fn fp8(&mut self, at: &str, given: &Given<'_>) -> Result<bool> {
        let (Some(x), Some(scale), [out]) = (given.tensor(0), given.tensor(1), &given.node.outs[..]) else {
            return Ok(false);
        };
        let one = self.types[self.value(at, scale)?.index()].numel() == Some(1.into());
        if out.ty.dtype != Element::E4m3 || !one || !are_none(given, 2) {
            return Ok(false);
        }
        let (x, scale) = (self.value(at, x)?, self.value(at, scale)?);
        self.codes(at, given.node, x, scale, out)?;
        Ok(true)
    }

    /// `input`: codes, and a scale for each row.
    fn fp8_tokens(&mut self, at: &str, given: &Given<'_>) -> Result<bool> {
        let (Some(x), [out, scales]) = (given.tensor(0), &given.node.outs[..]) else { return Ok(false) };
        if out.ty.dtype != Element::E4m3 || scales.ty.dtype != F32 || !are_none(given, 1) {
            return Ok(false);
        }
        let x = self.value(at, x)?;
        let own = self.types[x.index()].dense();
        let (wide, column) = (Type::new(F32, own.shape.clone()), column(&own));
        if scales.ty.shape != column.shape {
            return Ok(false);
        }
        let node = given.node;
        let name = |what: &str| format!("{}/{what}", node.name);
        let last = own.shape.len().saturating_sub(1);
        let amax = Kind::Reduce { op: Reduction::Amax, dims: vec![last], keepdim: true };
        let plain = self.emit(at, &name("plain"), Kind::Cast, &[x], wide.clone())?;
        let magnitudes = self.emit(at, &name("abs"), Kind::Unary { op: Unary::Abs }, &[plain], wide)?;
        let amax = self.emit(at, &name("amax"), amax, &[magnitudes], column.clone())?;
        let raw = self.emit(at, &name("raw"), with(Binary::Div, Quantize::MOST), &[amax], column)?;
        let least = with(Binary::Maximum, Quantize::LEAST_OF_ROW);
        self.give(at, name("scales"), scales, least, &[raw])?;
        let scales = self.value(at, &scales.name)?;
        self.codes(at, node, x, scales, out)?;
        Ok(true)
    }

    fn codes(&mut self, at: &str, node: &Node, x: ValueId, scale: ValueId, out: &Result_) -> Result<()> {
        let wide = Type::new(F32, self.types[x.index()].shape.clone());
        let name = |what: &str| format!("{}/{what}", node.name);
        let by = Kind::Binary { op: Binary::Div, scalar: None, swapped: false };
        let x = self.emit(at, &name("float"), Kind::Cast, &[x], wide.clone())?;
        let scaled = self.emit(at, &name("divided"), by, &[x, scale], wide.clone())?;
        let low = with(Binary::Maximum, -Quantize::MOST);
        let low = self.emit(at, &name("low"), low, &[scaled], wide.clone())?;
        let high = self.emit(at, &name("high"), with(Binary::Minimum, Quantize::MOST), &[low], wide)?;
        self.give(at, node.name.clone(), out, Kind::Cast, &[high])
    }
}

/// A function of an element and a number.
fn with(op: Binary, number: f64) -> Kind {
    Kind::Binary { op, scalar: Some(number), swapped: false }
}

/// The same rows of one f32.
fn column(ty: &Type) -> Type {
    let mut shape = ty.shape.clone();
    if let Some(last) = shape.last_mut() {
        *last = 1.into();
    }
    Type::new(F32, shape)
}

/// Whether an operator has its default for all arguments that its spelling names from one on.
fn are_none(given: &Given<'_>, from: usize) -> bool {
    (from..given.names.len()).all(|index| given.argument(index).is_none_or(Json::is_null))
}
