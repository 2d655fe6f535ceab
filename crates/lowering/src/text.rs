//! Graphs as text: an operation a line.

use std::fmt::Write;

use serde_json::{Map, Value as Json};

use crate::{
    build::{Builder, Out, attributes_of, check_length, class_of, is_of_a_group, is_of_a_name, kind},
    error::LoweringError,
    graph::{Graph, Group},
    ids::ValueId,
    json::Once,
    sym::{Sym, SymExpr},
    types::Type,
};

type Result<T> = std::result::Result<T, LoweringError>;

impl Graph {
    /// The graph as text, an operation a line. [`from_text`](Self::from_text) reads it.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        self.write(&mut text).expect("a string takes everything");
        text
    }

    fn write(&self, text: &mut String) -> std::fmt::Result {
        for Sym { name, min, max, hint } in &self.syms {
            write!(text, "sym {name} min {min}")?;
            max.map_or(Ok(()), |max| write!(text, " max {max}"))?;
            hint.map_or(Ok(()), |hint| write!(text, " hint {hint}"))?;
            writeln!(text)?;
        }
        for Group { name, size, domain } in &self.groups {
            write!(text, "group {name} size {size}")?;
            domain.as_ref().map_or(Ok(()), |domain| write!(text, " domain {domain}"))?;
            writeln!(text)?;
        }
        for op in &self.ops {
            for (index, out) in op.outs.iter().enumerate() {
                let value = self.value(*out);
                write!(text, "{}%{}: {}", if index == 0 { "" } else { "; " }, value.name, value.ty)?;
                if value.class != class_of(&op.kind) {
                    write!(text, " class {}", serde_json::to_string(&value.class).expect("plain values"))?;
                }
            }
            let operation = operation(&attributes_of(&op.kind), &self.list(&op.args));
            write!(text, "{} = {operation}", if op.outs.is_empty() { "_" } else { "" })?;
            if op.outs.first().is_none_or(|out| self.name(*out) != op.name) {
                write!(text, " name={}", op.name)?;
            }
            writeln!(text)?;
        }
        writeln!(text, "return {}", self.list(&self.outputs))
    }

    fn list(&self, ids: &[ValueId]) -> String {
        ids.iter().map(|id| format!("%{}", self.name(*id))).collect::<Vec<_>>().join(", ")
    }

    /// Reads what [`to_text`](Self::to_text) writes. Empty lines and what follows `//` at a line's beginning mean nothing.
    ///
    /// # Errors
    /// The line, what was found there and what was wanted. Whether the graph makes sense is for [`verify`](crate::verify) to
    /// say.
    pub fn from_text(text: &str) -> Result<Self> {
        check_length(text.as_bytes())?;
        let mut graph = Builder::default();
        let mut returned = false;
        for mut line in lines(text) {
            if returned {
                return Err(line.wanted("nothing after `return`"));
            }
            if line.take("sym ") {
                graph.sym(&line.at(), line.clone().sym()?)?;
            } else if line.take("group ") {
                graph.group(&line.at(), line.clone().group()?)?;
            } else if line.rest == "return" || line.take("return ") {
                line.take("return");
                let outputs = line.values(&graph)?;
                graph.returns(outputs);
                returned = true;
                line.end()?;
            } else {
                line.op(&mut graph)?;
            }
        }
        match returned {
            true => Ok(graph.finish()),
            false => Err(LoweringError::unexpected("the end", "no more lines", "`return`")),
        }
    }

    /// The line of a text, of which the first is 1, that has the operation with an index in [`ops`](Self::ops); none if
    /// [`from_text`](Self::from_text) reads no such operation there.
    pub fn line_of(text: &str, op: usize) -> Option<usize> {
        let is_op = |line: &Line<'_>| line.rest.starts_with(['%', '_']);
        lines(text).filter(is_op).nth(op).map(|line| line.number)
    }
}

/// The lines that say something.
fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let lines = text.lines().enumerate().map(|(index, line)| Line { rest: line.trim(), number: index + 1 });
    lines.filter(|line| !line.rest.is_empty() && !line.rest.starts_with("//"))
}

/// An operation as text: its kind, its operands, its other attributes.
pub(crate) fn operation(attributes: &Map<String, Json>, operands: &str) -> String {
    let kind = attributes.get("kind").and_then(Json::as_str).expect("its tag");
    let mut text = format!("{kind}({operands})");
    for (key, value) in attributes.iter().filter(|(key, _)| *key != "kind") {
        match value {
            Json::String(word) if is_word(word) => write!(text, " {key}={word}"),
            value => write!(text, " {key}={value}"),
        }
        .expect("a string takes everything");
    }
    text
}

/// Whether a text reads as itself without quotes.
fn is_word(text: &str) -> bool {
    let starts = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    starts && text.chars().all(is_of_a_name) && !matches!(text, "true" | "false" | "null")
}

/// What is left of a line.
#[derive(Clone)]
struct Line<'t> {
    rest: &'t str,
    number: usize,
}

impl<'t> Line<'t> {
    fn at(&self) -> String {
        format!("line {}", self.number)
    }

    fn wanted(&self, what: &str) -> LoweringError {
        let found = if self.rest.is_empty() { "the end of the line" } else { self.rest };
        LoweringError::unexpected(self.at(), found.chars().take(40).collect::<String>(), what)
    }

    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, prefix: &str) -> bool {
        self.skip();
        let rest = self.rest.strip_prefix(prefix);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, prefix: &str) -> Result<()> {
        if self.take(prefix) { Ok(()) } else { Err(self.wanted(&format!("`{prefix}`"))) }
    }

    fn end(&mut self) -> Result<()> {
        self.skip();
        if self.rest.is_empty() { Ok(()) } else { Err(self.wanted("the end of the line")) }
    }

    /// Characters up to the first that does not belong.
    fn word(&mut self, belongs: impl Fn(char) -> bool, what: &str) -> Result<&'t str> {
        self.skip();
        let end = self.rest.find(|c| !belongs(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(self.wanted(what));
        }
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(word)
    }

    fn name(&mut self) -> Result<&'t str> {
        self.word(is_of_a_name, "a name")
    }

    fn number<T: std::str::FromStr>(&mut self) -> Result<T> {
        let line = self.clone();
        let digits = self.word(|c| c.is_ascii_digit() || c == '-', "a number")?;
        digits.parse().map_err(|_| line.wanted("a smaller number"))
    }

    fn sym(mut self) -> Result<Sym> {
        let mut sym = Sym { name: self.name()?.to_owned(), min: 0, max: None, hint: None };
        loop {
            if self.take("min ") {
                sym.min = self.number()?;
            } else if self.take("max ") {
                sym.max = Some(self.number()?);
            } else if self.take("hint ") {
                sym.hint = Some(self.number()?);
            } else {
                return self.end().map(|()| sym);
            }
        }
    }

    fn group(mut self) -> Result<Group> {
        let name = self.word(is_of_a_group, "a name")?.to_owned();
        self.expect("size ")?;
        let size = self.number()?;
        let domain = match self.take("domain ") {
            true => Some(self.word(is_of_a_group, "a name")?.to_owned()),
            false => None,
        };
        self.end().map(|()| Group { name, size, domain })
    }

    /// Names of values with `%`, separated by commas.
    fn values(&mut self, graph: &Builder) -> Result<Vec<ValueId>> {
        let mut values = Vec::new();
        while self.take("%") {
            let at = self.at();
            values.push(graph.find(&at, self.name()?)?);
            if !self.take(",") {
                break;
            }
        }
        Ok(values)
    }

    fn op(mut self, graph: &mut Builder) -> Result<()> {
        let mut outs = Vec::new();
        if !self.take("_ ") {
            loop {
                outs.push(self.out()?);
                if !self.take(";") {
                    break;
                }
            }
        }
        self.expect("=")?;
        let mut attributes = Map::new();
        attributes.insert("kind".into(), self.name()?.into());
        self.expect("(")?;
        let args = self.values(graph)?;
        self.expect(")")?;
        let mut name = None;
        loop {
            self.skip();
            if self.rest.is_empty() {
                break;
            }
            let key = self.word(|c| c.is_ascii_alphanumeric() || c == '_', "an attribute")?;
            self.expect("=")?;
            if key == "name" && name.is_none() {
                name = Some(self.name()?.to_owned());
                continue;
            }
            let value = self.json()?;
            if key == "name" || attributes.insert(key.to_owned(), value).is_some() {
                return Err(self.wanted("each attribute once"));
            }
        }
        let at = self.at();
        graph.op(&at, name, kind(&at, Json::Object(attributes))?, args, outs)
    }

    fn out(&mut self) -> Result<Out> {
        self.expect("%")?;
        let name = self.name()?.to_owned();
        self.expect(":")?;
        let line = self.clone();
        let dtype = self.word(|c| c.is_ascii_alphanumeric() || c == '_', "an element type")?;
        let dtype = dtype.parse().map_err(|error: String| line.wanted(&error))?;
        let mut ty = Type { dtype, shape: self.sizes()?, strides: None, offset: 0.into() };
        if self.take("strides ") {
            ty.strides = Some(self.sizes()?);
        }
        if self.take("offset ") {
            let word = self.word(|c| !c.is_whitespace(), "an offset")?;
            ty.offset = self.size(word)?;
        }
        let class = if self.take("class ") { Some(self.json()?) } else { None };
        let class = class.map(|class| {
            serde_json::from_value(class)
                .map_err(|error| LoweringError::unexpected(self.at(), error, "a class"))
        });
        Ok(Out { name, ty, class: class.transpose()? })
    }

    fn size(&self, text: &str) -> Result<SymExpr> {
        SymExpr::parse(text).map_err(|error| LoweringError::unexpected(self.at(), error, "a size"))
    }

    /// `[2,8*s0]`.
    fn sizes(&mut self) -> Result<Vec<SymExpr>> {
        self.expect("[")?;
        let (mut depth, mut sizes, mut start) = (0usize, Vec::new(), 0);
        for (index, c) in self.rest.char_indices() {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                ',' | ']' if depth == 0 => {
                    let text = &self.rest[start..index];
                    start = index + 1;
                    if c == ',' || !text.trim().is_empty() || !sizes.is_empty() {
                        sizes.push(self.size(text)?);
                    }
                    if c == ']' {
                        self.rest = &self.rest[start..];
                        return Ok(sizes);
                    }
                }
                _ => {}
            }
        }
        Err(self.wanted("`]` behind the sizes"))
    }

    /// A word, or a value of JSON.
    fn json(&mut self) -> Result<Json> {
        self.skip();
        if self.rest.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            let word = self.name()?;
            return Ok(match word {
                "true" => true.into(),
                "false" => false.into(),
                "null" => Json::Null,
                word => word.into(),
            });
        }
        let mut stream = serde_json::Deserializer::from_str(self.rest).into_iter::<Once>();
        let value = match stream.next() {
            Some(Ok(Once(value))) => value,
            Some(Err(error)) if error.is_data() => {
                return Err(LoweringError::unexpected(self.at(), error, "a value of JSON"));
            }
            _ => return Err(self.wanted("a word or a value of JSON")),
        };
        let used = stream.byte_offset();
        self.rest = &self.rest[used..];
        Ok(value)
    }
}
