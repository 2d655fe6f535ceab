//! NVRTC: kernels become C++ for the processor, and a shared library.

use std::{
    ffi::{CStr, c_char, c_int},
    fs,
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

/// The device side of the emulator, ahead of every program.
const DEVICE: &str = include_str!("device.hpp");

/// What the instructions do that kernels contain as assembly: the text, and C++ in which `$0` is the first operand.
#[rustfmt::skip]
const INSTRUCTIONS: &[(&str, &str)] = &[
    ("", ""),
    // Conversions.
    ("cvt.rn.f16x2.f32 %0, %1, %2;", "$0 = emulator::pair<uint32_t>(emulator::narrow_f16($2), emulator::narrow_f16($1));"),
    ("cvt.rn.bf16x2.f32 %0, %1, %2;", "$0 = emulator::pair<uint32_t>(emulator::narrow_bf16($2), emulator::narrow_bf16($1));"),
    ("cvt.rn.f16.f32 %0, %1;", "$0 = emulator::narrow_f16($1);"),
    ("cvt.rn.bf16.f32 %0, %1;", "$0 = emulator::narrow_bf16($1);"),
    ("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }",
     "$0 = emulator::widen_f16($2 & 0xFFFF); $1 = emulator::widen_f16($2 >> 16);"),
    ("min.NaN.f32 %0, %1, %2;", "$0 = emulator::minimum($1, $2);"),
    ("max.NaN.f32 %0, %1, %2;", "$0 = emulator::maximum($1, $2);"),
    // Vectors.
    ("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];", "emulator::split(emulator::get16($4), $0, $1, $2, $3);"),
    ("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];", "emulator::split(emulator::get16($4), $0, $1, $2, $3);"),
    ("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];", "emulator::split(emulator::poll16($4), $0, $1, $2, $3);"),
    ("st.global.v4.u32 [%0], {%1,%2,%3,%4};", "emulator::put16($0, make_uint4($1, $2, $3, $4));"),
    ("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};", "emulator::put16($0, make_uint4($1, $2, $3, $4));"),
    ("{ .reg .b128 v; mov.b128 v, {%1, %2}; st.relaxed.sys.global.b128 [%0], v; }", "emulator::put16($0, emulator::join($1, $2));"),
    ("{ .reg .b128 v; ld.relaxed.sys.global.b128 v, [%2]; mov.b128 {%0, %1}, v; }", "emulator::split(emulator::poll16($2), $0, $1);"),
    ("st.global.u8 [%0], %1;", "*(unsigned char*)$0 = (unsigned char)$1;"),
    // Words.
    ("ld.acquire.sys.global.u32 %0, [%1];", "$0 = emulator::poll<uint32_t>($1);"),
    ("ld.acquire.sys.global.u64 %0, [%1];", "$0 = emulator::poll<uint64_t>($1);"),
    ("ld.acquire.gpu.global.u32 %0, [%1];", "$0 = emulator::poll<uint32_t>($1);"),
    ("ld.acquire.gpu.global.u64 %0, [%1];", "$0 = emulator::poll<uint64_t>($1);"),
    ("ld.relaxed.sys.global.u32 %0, [%1];", "$0 = emulator::poll<uint32_t>($1);"),
    ("ld.relaxed.sys.global.u64 %0, [%1];", "$0 = emulator::poll<uint64_t>($1);"),
    ("st.release.sys.global.u32 [%0], %1;", "emulator::put<uint32_t>($0, $1);"),
    ("st.release.sys.global.u64 [%0], %1;", "emulator::put<uint64_t>($0, $1);"),
    ("st.relaxed.sys.global.u32 [%0], %1;", "emulator::put<uint32_t>($0, $1);"),
    ("st.relaxed.sys.global.u64 [%0], %1;", "emulator::put<uint64_t>($0, $1);"),
    ("red.release.sys.global.add.u32 [%0], %1;", "emulator::add<uint32_t>($0, $1);"),
    ("red.release.sys.global.add.u64 [%0], %1;", "emulator::add<uint64_t>($0, $1);"),
    ("red.relaxed.sys.global.add.u32 [%0], %1;", "emulator::add<uint32_t>($0, $1);"),
    ("red.relaxed.sys.global.add.u64 [%0], %1;", "emulator::add<uint64_t>($0, $1);"),
    ("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;", "$0 = emulator::add<uint32_t>($1, $2);"),
    ("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;", "$0 = emulator::add<uint64_t>($1, $2);"),
    ("fence.acq_rel.sys;", "__threadfence();"),
    ("fence.acq_rel.gpu;", "__threadfence();"),
    // Shared memory, clusters, bulk copies.
    ("ld.acquire.cta.shared.u32 %0, [%1];", "$0 = emulator::poll<uint32_t>(emulator::shared($1));"),
    ("st.release.cta.shared.u32 [%0], %1;", "emulator::put<uint32_t>(emulator::shared($0), $1);"),
    ("ld.volatile.shared.u64 %0, [%1];", "$0 = emulator::poll<uint64_t>(emulator::shared($1));"),
    ("st.volatile.shared.u64 [%0], %1;", "emulator::put<uint64_t>(emulator::shared($0), $1);"),
    ("ld.relaxed.cluster.shared.u64 %0, [%1];", "$0 = emulator::poll<uint64_t>(emulator::shared($1));"),
    ("{ .reg .b32 place; mapa.shared::cluster.u32 place, %0, %1; st.relaxed.cluster.shared::cluster.u64 [place], %2; }",
     "emulator::put<uint64_t>(emulator::shared_of_block($0, $1), $2);"),
    ("mov.u32 %0, %%cluster_ctarank;", "$0 = emulator::cluster_rank();"),
    ("mov.u32 %0, %%cluster_nctaid.x;", "$0 = emulator::cluster_size();"),
    ("mov.u32 %0, %%clusterid.x;", "$0 = emulator::cluster_index();"),
    ("mov.u32 %0, %%nclusterid.x;", "$0 = emulator::cluster_count();"),
    ("barrier.cluster.arrive.release.aligned;", "emulator::cluster_arrive();"),
    ("barrier.cluster.wait.acquire.aligned;", "emulator::cluster_wait();"),
    ("cp.async.cg.shared.global [%0], [%1], 16;", "emulator::current->small.begin(emulator::shared($0), $1, 16);"),
    ("cp.async.commit_group;", "emulator::current->small.end_group();"),
    ("cp.async.wait_all;", "emulator::current->small.wait_all();"),
    ("cp.async.wait_group %0;", "emulator::current->small.wait($0, false);"),
    ("mbarrier.init.shared::cta.b64 [%0], 1;", "emulator::barrier_init($0, 1);"),
    ("fence.mbarrier_init.release.cluster;", ""),
    ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "emulator::barrier_expect($0, $1);"),
    ("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }",
     "$0 = emulator::barrier_try_wait($1, $2);"),
    ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];", "emulator::bulk_load($0, $1, $2, $3);"),
    ("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;", "emulator::bulk_store($0, $1, $2);"),
    ("cp.async.bulk.commit_group;", "emulator::current->bulk.end_group();"),
    ("cp.async.bulk.wait_group %0;", "emulator::current->bulk.wait($0, false);"),
    ("cp.async.bulk.wait_group.read %0;", "emulator::current->bulk.wait($0, true);"),
    ("fence.proxy.async;", ""),
    ("fence.proxy.async.global;", ""),
    ("fence.proxy.async.shared::cta;", ""),
    ("mov.u64 %0, %%gridid;", "$0 = emulator::grid_number();"),
    // Time.
    ("mov.u64 %0, %%globaltimer;", "$0 = emulator::global_timer();"),
    ("griddepcontrol.wait;", ""),
    ("griddepcontrol.launch_dependents;", ""),
];

pub struct Program {
    source: String,
    library: Vec<u8>,
    log: String,
}

/// Compiles a program of CUDA into a shared library.
fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
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

fn compile_in(folder: &std::path::Path, source: &str, options: &[String]) -> Result<Vec<u8>, String> {
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
    fs::write(&cpp, format!("{DEVICE}\n#line 1 \"program\"\n{}", translate(&expanded)?)).map_err(text)?;
    run(Command::new("g++")
        .args([
            "-std=c++17",
            "-O1",
            "-w",
            "-fPIC",
            "-shared",
            "-mavx",
            "-mfma",
            "-mf16c",
            "-ffp-contract=off",
        ])
        .args([
            "-fno-strict-aliasing",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-gnu-unique",
            "-fno-threadsafe-statics",
            "-fno-ipa-reference",
        ])
        .args(["-fmax-errors=20", "-Wl,-Bsymbolic", "-o"])
        .args([&library, &cpp]))?;
    fs::read(&library).map_err(text)
}

/// Replaces what only CUDA has: assembly, shared memory of dynamic size; and registers the kernels.
fn translate(source: &str) -> Result<String, String> {
    let mut result = String::new();
    let mut rest = source;
    // Kernels whose bodies have not ended: the depth of their braces, and what follows.
    let (mut depth, mut kernels) = (0usize, Vec::new());
    while let Some(next) = rest.chars().next() {
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
                    result.push_str(&instruction(&rest[open + 1..open + len - 1])?);
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
    let known = INSTRUCTIONS.iter().find(|(ptx, _)| *ptx == template);
    let (_, cpp) = known.ok_or_else(|| format!("the emulator does not know the instruction: {template}"))?;
    let mut code = (*cpp).to_owned();
    for (index, operand) in operands.iter().enumerate().rev() {
        code = code.replace(&format!("${index}"), operand);
    }
    Ok(format!("do {{ emulator::other_threads run; {code} }} while (0)"))
}

const COMPILATION: c_int = 6;

/// A number of this emulator: the cache of compiled kernels asks for NVRTC's version.
fn build() -> c_int {
    let instructions = INSTRUCTIONS.iter().flat_map(|(ptx, cpp)| ptx.bytes().chain(cpp.bytes()));
    let hash = DEVICE.bytes().chain(instructions).fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
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
