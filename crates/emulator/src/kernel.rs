//! NVRTC: kernels become C++ for the processor, and a shared library.

use std::{
    ffi::{CStr, c_char, c_int},
    fs,
    path::Path,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{mutant, ptx, races};

/// The device side of the emulator, ahead of every program.
const DEVICE: &str = concat!(
    include_str!("device/fibers.hpp"),
    include_str!("device/memory.hpp"),
    include_str!("device/functions.hpp")
);

/// Calls a function at each access, and has the lines of the program.
const CHECKED: [&str; 5] =
    ["-DANTIPHON_EMULATOR_CHECKED", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1", "-g1"];

pub struct Program {
    source: String,
    library: Vec<u8>,
    log: String,
}

/// Compiles a program of CUDA into a shared library.
pub(crate) fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let source = match mutant::wanted() {
        Some(mutant) => mutant::apply(source, &mutant)?,
        None => source.to_owned(),
    };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("antiphon-emulator-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
    let result = compile_in(&folder, &source, options);
    if std::env::var_os("ANTIPHON_EMULATOR_KEEP").is_none() {
        let _ = fs::remove_dir_all(&folder);
    }
    result
}

fn compile_in(folder: &Path, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = |error: std::io::Error| error.to_string();
    let [cuda, cpp, library] = ["program.cu", "program.cpp", "program.so"].map(|name| folder.join(name));
    fs::write(&cuda, source).map_err(text)?;
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
    let program = translate(&expanded)?;
    let allowed = allowed_races(source);
    fs::write(&cpp, format!("{DEVICE}\n{allowed}\n#line 1 \"program\"\n{program}")).map_err(text)?;
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
        // Some distributions check the sizes of objects, of which shared memory's anchor is none.
        .args(["-U_FORTIFY_SOURCE", "-fmax-errors=20", "-o"])
        .args([&object, &cpp]))?;
    // Apart, so that g++ does not add the sanitizer's own library.
    run(Command::new("g++").args(["-shared", "-Wl,-Bsymbolic", "-o"]).args([&library, &object]))?;
    fs::read(&library).map_err(text)
}

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

/// Replaces what only CUDA has: assembly, shared memory of dynamic size; and registers the kernels.
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
                "__global__" => {
                    if let Some((name, parameters)) = kernel_signature(rest) {
                        let address = format!("static_cast<void (*){parameters}>(&{name})");
                        kernels.push((
                            depth,
                            format!("static emulator::registration<{address}> emulated_{name};"),
                        ));
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

/// The name and the parameters of the kernel that is defined behind `__global__`.
fn kernel_signature(text: &str) -> Option<(&str, &str)> {
    let mut at = 0;
    loop {
        let open = at + text[at..].find('(')?;
        let before = text[..open].trim_end();
        let name = &before[before.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))? + 1..];
        let end = open + closing(&text[open..])?;
        if name != "__launch_bounds__" {
            return text[end..].trim_start().starts_with('{').then(|| (name, &text[open..end]));
        }
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

const COMPILATION: c_int = 6;

/// A number of this emulator: the cache of compiled kernels asks for NVRTC's version.
fn build() -> c_int {
    let mutant = mutant::wanted().unwrap_or_default();
    let sources = [
        &mutant,
        DEVICE,
        include_str!("kernel.rs"),
        include_str!("ptx/mod.rs"),
        include_str!("ptx/meaning.rs"),
    ];
    let mode = if races::is_on() { 1 } else { 0 };
    let hash = sources
        .iter()
        .flat_map(|text| text.bytes())
        .chain([mode])
        .fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
    1000 + (hash % 1_000_000) as c_int
}

/// # Safety
/// As nvrtc.h says; so for all functions of this module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    // SAFETY: two places for a number.
    unsafe { (*major, *minor) = (13, build()) };
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    // SAFETY: a text that ends with NUL, and a place for a pointer.
    unsafe {
        let source = CStr::from_ptr(source).to_string_lossy().into_owned();
        *program = Box::into_raw(Box::new(Program { source, library: Vec::new(), log: String::new() }));
    }
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> c_int {
    // SAFETY: made above.
    unsafe { drop(Box::from_raw(*program)) };
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: as many texts as said.
    let (program, options) = unsafe {
        let options = (0..count as usize).map(|index| CStr::from_ptr(*options.add(index)));
        (&mut *program, options.map(|text| text.to_string_lossy().into_owned()).collect::<Vec<_>>())
    };
    match compile(&program.source, &options) {
        Ok(library) => {
            program.library = library;
            0
        }
        Err(log) => {
            program.log = log;
            COMPILATION
        }
    }
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *mut Program, size: *mut usize) -> c_int {
    // SAFETY: a program and a place for a size.
    unsafe {
        let library = &(*program).library;
        *size = library.len();
    }
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *mut Program, to: *mut c_char) -> c_int {
    // SAFETY: room for as many bytes as were announced.
    unsafe {
        let library = &(*program).library;
        library.as_ptr().copy_to(to.cast(), library.len());
    }
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(program: *mut Program, size: *mut usize) -> c_int {
    // SAFETY: a program and a place for a size.
    unsafe {
        let log = &(*program).log;
        *size = log.len() + 1;
    }
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *mut Program, to: *mut c_char) -> c_int {
    // SAFETY: room for as many bytes as were announced, with a NUL.
    unsafe {
        let log = &(*program).log;
        log.as_ptr().copy_to(to.cast(), log.len());
        *to.add(log.len()) = 0;
    }
    0
}

/// # Safety
/// See [`nvrtcVersion`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetErrorString(result: c_int) -> *const c_char {
    match result {
        0 => c"NVRTC_SUCCESS".as_ptr(),
        COMPILATION => c"NVRTC_ERROR_COMPILATION".as_ptr(),
        _ => c"NVRTC_ERROR".as_ptr(),
    }
}
