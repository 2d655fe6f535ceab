//! Gives the docstrings of `_core.pyi` to the compiled module, so that `help` shows what editors show: a macro `stub!` that has the
//! text for each name, such as `stub!("Communicator.barrier")`.

use std::{env, fmt::Write as _, fs, path::Path};

const STUB: &str = "../../python/antiphon/_core.pyi";

fn main() {
    println!("cargo:rerun-if-changed={STUB}");
    println!("cargo:rerun-if-changed=build.rs");
    let stub = fs::read_to_string(STUB).unwrap_or_else(|error| panic!("{STUB}: {error}"));
    let mut rules = String::new();
    for (name, text) in docstrings(&stub) {
        writeln!(rules, "    ({name:?}) => {{ {text:?} }};").expect("strings take everything");
    }
    let folder = env::var_os("OUT_DIR").expect("cargo sets it");
    let text = format!("macro_rules! stub {{\n{rules}}}\n");
    fs::write(Path::new(&folder).join("stub.rs"), text).expect("the folder is for this");
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

/// From behind the opening quotes up to the closing ones, without the indentation.
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
