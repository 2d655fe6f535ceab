//! libnvJitLink: the functions, as nvJitLink.h documents them. What the emulator's NVRTC has compiled is complete, so linking checks
//! what it is given and changes nothing.
#![allow(clippy::missing_safety_doc)] // as nvJitLink.h says; so for all functions of this module

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

pub struct Linker {
    program: Vec<u8>,
    has_library: bool,
    log: String,
}

const INVALID_INPUT: c_int = 3;
const MISSING_ARCH: c_int = 2;
const CUBIN: c_int = 1;
const LIBRARY: c_int = 6;

/// The content of the emulator's libnvshmem_device.a.
const DEVICE_LIBRARY: &[u8] = b"!<arch>\n";

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvJitLinkVersion(major: *mut c_uint, minor: *mut c_uint) -> c_int {
    // SAFETY: two places for a number.
    unsafe { (*major, *minor) = (13, 0) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvJitLinkCreate(
    linker: *mut *mut Linker,
    count: u32,
    options: *const *const c_char,
) -> c_int {
    // SAFETY: as many texts as said.
    let has_architecture = (0..count as usize)
        .any(|index| unsafe { CStr::from_ptr(*options.add(index)) }.to_bytes().starts_with(b"-arch=sm_"));
    if !has_architecture {
        return MISSING_ARCH;
    }
    // SAFETY: a place for a pointer.
    unsafe {
        *linker =
            Box::into_raw(Box::new(Linker { program: Vec::new(), has_library: false, log: String::new() }));
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvJitLinkDestroy(linker: *mut *mut Linker) -> c_int {
    // SAFETY: made above.
    unsafe { drop(Box::from_raw(*linker)) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvJitLinkAddData(
    linker: *mut Linker,
    kind: c_int,
    data: *const c_void,
    size: usize,
    _name: *const c_char,
) -> c_int {
    // SAFETY: a linker, and as many bytes as said.
    let (linker, bytes) = unsafe { (&mut *linker, std::slice::from_raw_parts(data.cast::<u8>(), size)) };
    match kind {
        CUBIN if bytes.starts_with(b"\x7FELF") => linker.program = bytes.to_vec(),
        LIBRARY if bytes.starts_with(DEVICE_LIBRARY) => linker.has_library = true,
        _ => {
            linker.log = format!("error   : input of kind {kind} is not what it should be");
            return INVALID_INPUT;
        }
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvJitLinkComplete(linker: *mut Linker) -> c_int {
    // SAFETY: a linker.
    let linker = unsafe { &mut *linker };
    if linker.program.is_empty() || !linker.has_library {
        linker.log = "error   : nothing to link".to_owned();
        return INVALID_INPUT;
    }
    0
}

macro_rules! bytes {
    ($size:ident, $get:ident, $bytes:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(linker: *mut Linker, size: *mut usize) -> c_int {
            let bytes: fn(&Linker) -> &[u8] = $bytes;
            // SAFETY: a linker and a place for a size.
            unsafe { *size = bytes(&*linker).len() };
            0
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $get(linker: *mut Linker, to: *mut c_void) -> c_int {
            let bytes: fn(&Linker) -> &[u8] = $bytes;
            // SAFETY: room for as many bytes as were announced.
            unsafe {
                let bytes = bytes(&*linker);
                bytes.as_ptr().copy_to(to.cast(), bytes.len());
            }
            0
        }
    };
}

bytes!(nvJitLinkGetLinkedCubinSize, nvJitLinkGetLinkedCubin, |linker| &linker.program);
bytes!(nvJitLinkGetErrorLogSize, nvJitLinkGetErrorLog, |linker| linker.log.as_bytes());
