//! What the compiled module takes from its stub `_core.pyi`, so that it stands once:
//!
//! * the docstrings, so that `help` shows what editors show: `stub!("Pending")`, `stub!(Communicator.barrier)` is the text;
//! * the keywords of the methods with many: `keywords!(method => define)` calls `define!` with them.

use std::{env, fmt::Write as _, fs, path::Path};

const STUB: &str = "../../python/antiphon/_core.pyi";

fn main() {
    println!("cargo:rerun-if-changed={STUB}");
    println!("cargo:rerun-if-changed=build.rs");
    let stub = fs::read_to_string(STUB).unwrap_or_else(|error| panic!("{STUB}: {error}"));
    let mut texts = String::new();
    for (name, text) in docstrings(&stub) {
        writeln!(texts, "    ({name:?}) => {{ {text:?} }};").expect("strings take everything");
        if name.contains('.') {
            writeln!(texts, "    ({name}) => {{ {text:?} }};").expect("strings take everything");
        }
    }
    let fused = keywords(&stub, "all_reduce_fused");
    let rms_norm = keywords(&stub, "all_reduce_rms_norm");
    let same = rms_norm.iter().filter(|keyword| fused.contains(keyword));
    let same: Vec<&str> = same.filter_map(Keyword::name).collect();
    // Type checkers want both signatures written out: a keyword of both must not mean two things.
    for name in rms_norm.iter().filter_map(Keyword::name).filter(|name| *name != "x" && !same.contains(name))
    {
        let differs = fused.iter().any(|keyword| keyword.name() == Some(name));
        assert!(
            !differs,
            "{STUB}: {name} has another type or default in all_reduce_rms_norm than in all_reduce_fused"
        );
    }
    let rules = format!(
        "    (all_reduce_fused => $define:ident) => {{ $define! {{ {} }} }};\n    \
         (all_reduce_rms_norm => $define:ident) => {{ $define! {{ {} [{}] }} }};\n",
        definition(&fused),
        definition(&rms_norm),
        same.join(" ")
    );
    let text = format!("macro_rules! stub {{\n{texts}}}\nmacro_rules! keywords {{\n{rules}}}\n");
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&folder).join("stub.rs"), text).expect("the folder is for this");
}

/// A parameter of a method, as the stub writes it.
#[derive(PartialEq)]
enum Keyword<'a> {
    Named {
        name: &'a str,
        annotation: &'a str,
        default: Option<&'a str>,
    },
    /// The `*` behind which arguments have names.
    Star,
}

impl<'a> Keyword<'a> {
    fn new(line: &'a str) -> Self {
        let Some((name, rest)) = line.split_once(": ") else { return Self::Star };
        match rest.split_once(" = ") {
            Some((annotation, default)) => Self::Named { name, annotation, default: Some(default) },
            None => Self::Named { name, annotation: rest, default: None },
        }
    }

    fn name(&self) -> Option<&'a str> {
        match self {
            Self::Named { name, .. } => Some(name),
            Self::Star => None,
        }
    }

    /// As in PyO3's signature.
    fn signature(&self) -> String {
        match self {
            Self::Star => "*".into(),
            Self::Named { name, default: None, .. } => (*name).into(),
            Self::Named { name, default: Some(value), .. } => {
                let value = match *value {
                    "True" => "true",
                    "False" => "false",
                    value => value,
                };
                format!("{name} = {value}")
            }
        }
    }

    /// As a field or a parameter in Rust.
    fn field(&self) -> Option<String> {
        let Self::Named { name, annotation, .. } = self else { return None };
        let of_rust = match *annotation {
            "bool" => "bool",
            "float" => "f32",
            "int" => "usize",
            "int | None" if *name == "stream" => "Option<RawStream>",
            "int | None" => "Option<usize>",
            "Quantize | None" | "Algorithm | None" => "Option<&'a str>",
            "_Array" | "_A" => "Argument<'a, 'py>",
            "_Array | None" | "float | _Array | None" | "ScaleLayout | int | None" => "Given<'a, 'py>",
            other => panic!("{STUB}: {name} is {other}, of which build.rs does not know the type in Rust"),
        };
        Some(format!("{name}: {of_rust},"))
    }
}

/// The parameters of a method behind `self`, one a line in the stub.
fn keywords<'a>(stub: &'a str, method: &str) -> Vec<Keyword<'a>> {
    let start = stub.find(&format!("    def {method}(\n")).expect("the stub has the method");
    let lines = stub[start..].lines().skip(2).map(str::trim);
    lines
        .take_while(|line| !line.starts_with(')'))
        .map(|line| Keyword::new(line.trim_end_matches(',')))
        .collect()
}

/// The signature, then the fields.
fn definition(keywords: &[Keyword<'_>]) -> String {
    let signature: Vec<String> = keywords.iter().map(Keyword::signature).collect();
    let fields: Vec<String> = keywords.iter().filter_map(Keyword::field).collect();
    format!("({}) [{}]", signature.join(", "), fields.join(" "))
}

/// The names with their texts: classes, functions, and methods as `Class.method`.
fn docstrings(stub: &str) -> Vec<(String, String)> {
    let (mut found, mut class, mut name) = (Vec::new(), String::new(), String::new());
    let mut lines = stub.lines();
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        if let Some(rest) = code.strip_prefix("class ") {
            class = identifier(rest);
            name.clone_from(&class);
        } else if let Some(rest) = code.strip_prefix("def ") {
            let function = identifier(rest);
            name = if indent == 0 { function } else { format!("{class}.{function}") };
        } else if let Some(rest) = code.strip_prefix("\"\"\"").filter(|_| !name.is_empty()) {
            found.push((std::mem::take(&mut name), docstring(rest, indent, &mut lines)));
        }
    }
    found
}

fn identifier(code: &str) -> String {
    code.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect()
}

/// The text between the opening quotes and the closing ones, without the indentation.
fn docstring<'a>(first: &'a str, indent: usize, lines: &mut impl Iterator<Item = &'a str>) -> String {
    let (mut text, mut line) = (String::new(), first);
    loop {
        if let Some((last, _)) = line.split_once("\"\"\"") {
            return (text + last).trim_end().to_owned();
        }
        text += line;
        text.push('\n');
        let next = lines.next().expect("a docstring ends");
        line = next.get(indent..).unwrap_or_default();
    }
}
