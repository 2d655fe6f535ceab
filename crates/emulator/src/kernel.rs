//! Kernels become C++ for the processor, and a shared library.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{mutant, nvrtc, ptx, races, schedule};

/// The device side of the emulator, ahead of every program.
pub(crate) const DEVICE: &str = concat!(
    include_str!("device/types.hpp"),
    include_str!("device/fibers.hpp"),
    include_str!("device/blocks.hpp"),
    include_str!("device/memory.hpp"),
    include_str!("device/functions.hpp")
);

/// Behind a program that calls NVSHMEM's device library.
pub(crate) const DEVICE_OF_NVSHMEM: &str = include_str!("device/nvshmem.hpp");

/// Calls a function at each access, and has the lines of the program.
const CHECKED: [&str; 5] =
    ["-DANTIPHON_EMULATOR_CHECKED", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1", "-g1"];

/// Compiles a program of CUDA into a shared library.
pub(crate) fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let Some(mutant) = mutant::wanted() else { return compile_anew(source, options) };
    // Most programs do not have the mutant's file, and are those of other mutants, too.
    let source = mutant::apply(source, &mutant)?;
    let mut key = DefaultHasher::new();
    (nvrtc::build(""), &source, options).hash(&mut key);
    let folder = std::env::var_os("ANTIPHON_CACHE_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    let kept = folder.join(format!("emulated-{:016x}.so", key.finish()));
    if let Ok(library) = fs::read(&kept) {
        return Ok(library);
    }
    let library = compile_anew(&source, options)?;
    let part = kept.with_extension(std::process::id().to_string());
    if fs::write(&part, &library).is_ok() {
        let _ = fs::rename(part, kept);
    }
    Ok(library)
}

fn compile_anew(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("antiphon-emulator-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let result = compile_in(&folder, source, options);
    if std::env::var_os("ANTIPHON_EMULATOR_KEEP").is_none() {
        let _ = fs::remove_dir_all(&folder);
    }
    result
}

/// Whether NVRTC has such an option. All but definitions and the architecture say how a GPU's code is made.
fn is_known(option: &str) -> bool {
    const KNOWN: [&str; 9] = [
        "-D",
        "--gpu-architecture=",
        "-std=",
        "-default-device",
        "-fmad=",
        "-diag-suppress=",
        "--ptxas-options=",
        "-lineinfo",
        "-rdc=true",
    ];
    KNOWN.iter().any(|known| option.starts_with(known))
}

fn compile_in(folder: &Path, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = |error: std::io::Error| error.to_string();
    let [cuda, cpp, library] = ["program.cu", "program.cpp", "program.so"].map(|name| folder.join(name));
    fs::write(&cuda, source).map_err(text)?;
    if let Some(unknown) = options.iter().find(|option| !is_known(option)) {
        return Err(format!("unrecognized option {unknown}"));
    }
    let gpu = options.iter().filter_map(|option| option.strip_prefix("--gpu-architecture=sm_"));
    let architecture: String = gpu.flat_map(|name| name.chars().take_while(char::is_ascii_digit)).collect();
    let run = |command: &mut Command| {
        let output = command.output().map_err(|error| format!("g++: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    };
    let defines = options.iter().filter(|option| option.starts_with("-D"));
    let expanded = run(Command::new("g++")
        .args(["-std=c++17", "-E", "-x", "c++", "-DANTIPHON_SOFTWARE_FLOATS"])
        .arg(format!("-D__CUDA_ARCH__={architecture}0"))
        .args(defines)
        .arg(&cuda))?;
    let program = translate(&with_fewer_polls(&expanded))?;
    let allowed = allowed_races(source);
    let linked = if options.iter().any(|option| option == "-rdc=true") { DEVICE_OF_NVSHMEM } else { "" };
    fs::write(&cpp, format!("{DEVICE}\n{allowed}\n#line 1 \"program\"\n{program}\n{linked}"))
        .map_err(text)?;
    let object = folder.join("program.o");
    run(Command::new("g++")
        .args(["-std=c++17", "-O1", "-w", "-fPIC", "-c", "-mavx", "-mfma", "-mf16c", "-ffp-contract=off"])
        .args([
            "-fno-strict-aliasing",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-gnu-unique",
            "-fno-threadsafe-statics",
            "-fno-ipa-reference",
        ])
        .args(if races::is_on() { &CHECKED[..] } else { &[] })
        // Some distributions check the sizes of objects, which shared memory has only as a part of a block's.
        .args(["-U_FORTIFY_SOURCE", "-fmax-errors=20", "-o"])
        .args([&object, &cpp]))?;
    // Apart, so that g++ does not add the sanitizer's own library.
    run(Command::new("g++").args(["-shared", "-Wl,-Bsymbolic", "-o"]).args([&library, &object]))?;
    fs::read(&library).map_err(text)
}

/// A poll costs a GPU half a microsecond, and the emulator a switch between fibers. A wait that polls as often as on a GPU before it looks
/// at the time and at the host's word would notice its deadline minutes later.
fn with_fewer_polls(source: &str) -> String {
    // Where time is virtual, it goes on in steps between polls.
    let polls = if schedule::is_on() { 2 } else { 16 };
    source.replace(POLLS_ON_GPUS, &format!("constexpr u32 POLLS_PER_LOOK = {polls};"))
}

/// The line of crates/device's prelude.
const POLLS_ON_GPUS: &str = "constexpr u32 POLLS_PER_LOOK = 1024;";

/// The lines that may race, because the text says why behind `// races:`; of such a pair no race is reported.
fn allowed_races(source: &str) -> String {
    let (mut file, mut number) = ("", 0);
    let mut places = String::new();
    for line in source.lines() {
        if let Some((from, name)) = line.strip_prefix("#line ").and_then(|rest| rest.split_once(' ')) {
            (file, number) = (name.trim_matches('"'), from.parse::<usize>().unwrap_or(1) - 1);
            continue;
        }
        number += 1;
        if line.contains("// races:") {
            let name = file.rsplit('/').next().unwrap_or(file);
            places.push_str(&format!("{name}:{number} "));
        }
    }
    format!(
        "extern \"C\" __attribute__((visibility(\"default\"))) const char emulator_allowed_races[] = \"{places}\";"
    )
}

/// Replaces what only CUDA has: assembly and shared memory; and registers the kernels.
fn translate(source: &str) -> Result<String, String> {
    let mut result = String::new();
    let mut rest = source;
    // Kernels whose bodies have not ended: the depth of their braces, and what follows.
    let (mut depth, mut kernels) = (0usize, Vec::new());
    while let Some(next) = rest.chars().next() {
        let at = source.len() - rest.len();
        if next == '"' || next == '\'' {
            let len = literal(rest);
            result.push_str(&rest[..len]);
            rest = &rest[len..];
        } else if next == '#' {
            let len = rest.find('\n').unwrap_or(rest.len());
            result.push_str(&rest[..len]);
            rest = &rest[len..];
        } else if next.is_ascii_alphanumeric() || next == '_' {
            let len = word(rest);
            let (this, after) = rest.split_at(len);
            rest = after;
            match this {
                "asm" => {
                    let open = rest.find('(').ok_or("assembly without operands")?;
                    let len = closing(&rest[open..]).ok_or("assembly without an end")?;
                    let code = instruction(&rest[open + 1..open + len - 1]);
                    result.push_str(&code.map_err(|error| format!("{}: {error}", place(&source[..at])))?);
                    rest = &rest[open + len..];
                }
                "extern" if rest.trim_start().starts_with("__shared__") => {
                    let end = rest.find(';').ok_or("a declaration without an end")?;
                    let words: Vec<&str> = rest[..end].split_whitespace().collect();
                    let (name, of) = (words[words.len() - 1].trim_end_matches("[]"), words[words.len() - 2]);
                    result.push_str(&format!("{of}* {name} = ({of}*)emulator::dynamic()"));
                    rest = &rest[end..];
                }
                "__shared__" => {
                    let end = rest.find(';').ok_or("a declaration without an end")?;
                    result.push_str(&shared(&rest[..end], at)?);
                    rest = &rest[end + 1..];
                }
                "__global__" => {
                    if let Some((name, parameters, bounds)) = kernel_signature(rest) {
                        let address = format!("static_cast<void (*){parameters}>(&{name})");
                        let kernel = format!("emulator::registration<{address}> emulated_{name}");
                        kernels.push((depth, format!("static {kernel}(\"{name}\"{bounds});")));
                    }
                    result.push_str(this);
                }
                _ => result.push_str(this),
            }
        } else {
            depth = match next {
                '{' => depth + 1,
                '}' => depth.saturating_sub(1),
                _ => depth,
            };
            result.push(next);
            rest = &rest[next.len_utf8()..];
            if next == '}' && kernels.last().is_some_and(|(of, _)| *of == depth) {
                result.push_str(&kernels.pop().unwrap_or_default().1);
            }
        }
    }
    Ok(result)
}

/// What a function declares in shared memory: members of a structure that has a place in the memory of each block. `number` is
/// no other declaration's.
fn shared(declaration: &str, number: usize) -> Result<String, String> {
    let place = format!("emulated_shared_{number}");
    let mut code = format!("struct {place} {{ {declaration}; }};");
    let (mut depth, mut start) = (0usize, 0);
    // The commas outside of brackets part the variables, whose names stand ahead of the first bracket.
    for (at, next) in declaration.char_indices().chain([(declaration.len(), ',')]) {
        match next {
            '(' | '[' | '{' | '<' => depth += 1,
            ')' | ']' | '}' | '>' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                let variable = &declaration[start..at];
                let name = variable.split('[').next().unwrap_or(variable).trim_end();
                let from =
                    name.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map_or(0, |at| at + 1);
                let name = Some(&name[from..]).filter(|name| !name.is_empty());
                let name = name.ok_or_else(|| format!("shared memory without a name: {declaration}"))?;
                code.push_str(&format!(" auto& {name} = emulator::shared_place<{place}>::here().{name};"));
                start = at + 1;
            }
            _ => {}
        }
    }
    Ok(code)
}

/// The file and the line at which a text of `g++ -E` ends.
fn place(text: &str) -> String {
    let (mut file, mut line) = ("program", 1);
    for this in text.split_inclusive('\n') {
        // `# 12 "name"` is about the line behind it.
        let marker = this.strip_prefix("# ").and_then(|rest| rest.split_once(' '));
        match marker.and_then(|(number, name)| Some((number.parse().ok()?, name.split('"').nth(1)?))) {
            Some((number, name)) => (line, file) = (number, name),
            None if this.ends_with('\n') => line += 1,
            None => {}
        }
    }
    format!("{file}:{line}")
}

fn word(text: &str) -> usize {
    text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(text.len())
}

/// The length of a literal of a string or a character.
fn literal(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    for (at, &byte) in text.as_bytes().iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The length of a text in parentheses, which it begins with.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut at) = (0usize, 0);
    while at < text.len() {
        match text.as_bytes()[at] {
            b'"' | b'\'' => at += literal(&text[at..]) - 1,
            b'(' => depth += 1,
            b')' if depth == 1 => return Some(at + 1),
            b')' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    None
}

/// The name and the parameters of the kernel that is defined behind `__global__`, and what `__launch_bounds__` says behind a comma.
fn kernel_signature(text: &str) -> Option<(&str, &str, String)> {
    let (mut at, mut bounds) = (0, String::new());
    loop {
        let open = at + text[at..].find('(')?;
        let before = text[..open].trim_end();
        let name = &before[before.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))? + 1..];
        let end = open + closing(&text[open..])?;
        if name != "__launch_bounds__" {
            return text[end..].trim_start().starts_with('{').then(|| (name, &text[open..end], bounds));
        }
        bounds = format!(", {}", &text[open + 1..end - 1]);
        at = end;
    }
}

/// The C++ of assembly, whose text and operands are these.
fn instruction(text: &str) -> Result<String, String> {
    let mut sections = vec![vec![String::new()]];
    let mut at = 0;
    while at < text.len() {
        let rest = &text[at..];
        let len = match rest.as_bytes()[0] {
            b'"' => literal(rest),
            b'(' => closing(rest).ok_or("an operand without an end")?,
            _ => rest.chars().next().map_or(1, char::len_utf8),
        };
        let section = sections.last_mut().ok_or("no section")?;
        match &rest[..len] {
            ":" => sections.push(vec![String::new()]),
            "," => section.push(String::new()),
            piece => section.last_mut().ok_or("no operand")?.push_str(piece),
        }
        at += len;
    }
    let strings = sections[0].concat();
    let template: String = strings.split('"').skip(1).step_by(2).collect();
    let template = template.split_whitespace().collect::<Vec<_>>().join(" ");
    let operands: Vec<&str> = sections[1..]
        .iter()
        .take(2)
        .flatten()
        .filter_map(|operand| operand.find('(').map(|open| operand[open..].trim()))
        .collect();
    let mut code = ptx::translate(&template)?;
    for (index, operand) in operands.iter().enumerate().rev() {
        code = code.replace(&format!("${index}"), operand);
    }
    Ok(format!("do {{ emulator::other_threads run; {code} }} while (0)"))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_prelude_has_the_line_of_polls() {
        assert!(include_str!("../../device/kernels/prelude.cuh").contains(super::POLLS_ON_GPUS));
    }
}
