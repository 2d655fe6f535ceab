//! libnvrtc: the functions, as nvrtc.h documents them.

use std::ffi::{CStr, c_char, c_int};

use crate::{kernel, mutant, races, schedule};

pub struct Program {
    source: String,
    library: Vec<u8>,
    log: String,
}

const COMPILATION: c_int = 6;

/// A number of this emulator: the cache of compiled kernels asks for NVRTC's version.
pub(crate) fn build(mutant: &str) -> c_int {
    let sources = [
        mutant,
        kernel::DEVICE,
        kernel::DEVICE_OF_NVSHMEM,
        include_str!("kernel.rs"),
        include_str!("ptx/mod.rs"),
        include_str!("ptx/meaning.rs"),
        include_str!("ptx/copies.rs"),
    ];
    let mode = u8::from(races::is_on()) | u8::from(schedule::is_on()) << 1;
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
    unsafe { (*major, *minor) = (13, build(&mutant::wanted().unwrap_or_default())) };
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
    let _busy = schedule::Compiling::new();
    match kernel::compile(&program.source, &options) {
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
