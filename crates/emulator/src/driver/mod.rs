//! libcuda: the functions, as cuda.h documents them.
//!
//! | file | functions of |
//! | --- | --- |
//! | this one | the driver, devices, contexts and memory |
//! | [`streams`] | streams, events and graphs |
//! | [`launch`] | modules and launches |
//! | [`symbols`] | what programs say of their kernels |
#![allow(clippy::missing_safety_doc)] // as cuda.h says

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{Mutex, OnceLock},
};

use cudarc::driver::sys;

use crate::{
    Code, lock,
    memory::{self, Kind},
    room::{THREADS_PER_MULTIPROCESSOR, multiprocessors},
    stream,
};

const SHARED_BYTES_PER_BLOCK: u32 = 232_448;

fn device_count() -> usize {
    std::env::var("ANTIPHON_EMULATOR_GPUS").ok().and_then(|count| count.parse().ok()).unwrap_or(4)
}

/// The answer of a function: writes what it found.
unsafe fn answer<T>(to: *mut T, value: Result<T, Code>) -> Code {
    match value {
        Ok(value) => {
            // SAFETY: the caller's place.
            unsafe { to.write(value) };
            Code::OK
        }
        Err(code) => code,
    }
}

fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(Code::OK)
}

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $t:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(unused_unsafe)]
        pub unsafe extern "C" fn $name($($argument: $t),*) -> Code {
            // SAFETY: the callers keep to cuda.h.
            unsafe { $body }
        }
    )*};
}

mod launch;
mod streams;
mod symbols;

#[cfg(test)]
pub(crate) use launch::{Function, function, load};
pub(crate) use launch::{Module, set_puts};
use streams::cuStreamGetCaptureInfo_v2;

// ------------------------------------------------------------------------------------------- the driver, its devices, contexts

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn current() -> usize {
    CURRENT.with_borrow(|stack| stack.last().map_or(0, |context| context - 1))
}

fn set_text(to: *mut c_char, len: c_int, text: &str) -> Code {
    let text = CString::new(text).unwrap_or_default();
    let bytes = text.as_bytes_with_nul();
    if bytes.len() > len as usize {
        return Code::INVALID_VALUE;
    }
    // SAFETY: room for `len` bytes.
    unsafe { to.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len()) };
    Code::OK
}

/// The compute capability: `ANTIPHON_EMULATOR_CAPABILITY`, or that of an H100.
fn capability() -> [c_int; 2] {
    static CAPABILITY: OnceLock<[c_int; 2]> = OnceLock::new();
    *CAPABILITY.get_or_init(|| {
        let given = std::env::var("ANTIPHON_EMULATOR_CAPABILITY").unwrap_or_default();
        let parts =
            given.split_once('.').and_then(|(major, minor)| Some([major.parse().ok()?, minor.parse().ok()?]));
        parts.unwrap_or_else(|| {
            assert!(given.is_empty(), "ANTIPHON_EMULATOR_CAPABILITY is like 8.0, not {given}");
            [9, 0]
        })
    })
}

functions! {
    fn cuInit(_flags: c_uint) { Code::OK }
    fn cuDriverGetVersion(version: *mut c_int) { answer(version, Ok(13_000)) }
    fn cuDeviceGetCount(count: *mut c_int) { answer(count, Ok(device_count() as c_int)) }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        answer(device, if (ordinal as usize) < device_count() { Ok(ordinal) } else { Err(Code::INVALID_DEVICE) })
    }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, _device: c_int) { set_text(name, len, "Emulated GPU") }
    fn cuDeviceGetPCIBusId(name: *mut c_char, len: c_int, device: c_int) {
        set_text(name, len, &format!("0000:{device:02x}:00.0"))
    }
    fn cuDeviceGetUuid_v2(uuid: *mut sys::CUuuid, device: c_int) {
        let mut bytes = *b"antiphon-gpu-000";
        bytes[15] += device as u8;
        answer(uuid, Ok(sys::CUuuid { bytes: bytes.map(|byte| byte as c_char) }))
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, _device: c_int) { answer(bytes, Ok(memory::TOTAL)) }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, _device: c_int) {
        answer(value, Ok(match attribute {
            75 => capability()[0],
            76 => capability()[1],
            16 => multiprocessors() as c_int,
            38 => 50 << 20,
            97 => SHARED_BYTES_PER_BLOCK as c_int,
            39 => THREADS_PER_MULTIPROCESSOR as c_int,
            120 => (capability()[0] >= 9).into(), // clusters
            95 | 102 | 103 | 122 => 1, // cooperative launches, virtual memory, file descriptors, words that streams write
            _ => 0,
        }))
    }
    fn cuDeviceGetP2PAttribute(value: *mut c_int, attribute: u32, _from: c_int, _to: c_int) {
        answer(value, Ok((attribute != 1).into())) // all but the performance's rank
    }
    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) { answer(context, Ok(device as usize + 1)) }
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) { Code::OK }
    fn cuCtxGetCurrent(context: *mut usize) {
        answer(context, Ok(CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))))
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Code::OK
    }
    fn cuCtxPopCurrent_v2(context: *mut usize) {
        answer(context, CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_VALUE))
    }
    fn cuCtxSynchronize() { code(stream::synchronize_device(current())) }
    fn cuCtxEnablePeerAccess(_peer: usize, _flags: c_uint) { Code::PEER_ACCESS_ALREADY_ENABLED }
    fn cuCtxGetExecAffinity(_affinity: *mut c_void, _kind: u32) { Code::NOT_SUPPORTED }
    fn cuThreadExchangeStreamCaptureMode(_mode: *mut u32) { Code::OK }
    fn cuGetProcAddress_v2(name: *const c_char, function: *mut usize, _version: c_int, _flags: u64, _status: *mut u32) {
        match CStr::from_ptr(name).to_bytes() {
            b"cuStreamGetCaptureInfo" => answer(function, Ok(cuStreamGetCaptureInfo_v2 as *const () as usize)),
            _ => Code::NOT_FOUND,
        }
    }
    fn cuGetErrorName(error: u32, name: *mut *const c_char) {
        answer(name, Ok(match error {
            0 => c"CUDA_SUCCESS",
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            101 => c"CUDA_ERROR_INVALID_DEVICE",
            200 => c"CUDA_ERROR_INVALID_IMAGE",
            400 => c"CUDA_ERROR_INVALID_HANDLE",
            401 => c"CUDA_ERROR_ILLEGAL_STATE",
            500 => c"CUDA_ERROR_NOT_FOUND",
            600 => c"CUDA_ERROR_NOT_READY",
            701 => c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            720 => c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
            801 => c"CUDA_ERROR_NOT_SUPPORTED",
            900 => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            902 => c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            907 => c"CUDA_ERROR_CAPTURED_EVENT",
            _ => c"CUDA_ERROR_UNKNOWN",
        }.as_ptr()))
    }
    fn cuGetErrorString(_error: u32, text: *mut *const c_char) { answer(text, Ok(c"an error of the emulator".as_ptr())) }
}

// ---------------------------------------------------------------------------------------------------------------- memory

/// Devices, and how many allocations there are until one fails.
static FAILING: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

/// Counts an allocation of the current device, which may be the one that fails.
fn has_memory() -> Result<(), Code> {
    let mut failing = lock(&FAILING);
    let own = failing.iter_mut().filter(|(device, _)| *device == current());
    own.for_each(|(_, left)| *left -= 1);
    let before = failing.len();
    failing.retain(|(_, left)| *left != 0);
    if failing.len() < before { Err(Code::OUT_OF_MEMORY) } else { Ok(()) }
}

functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        total.write(memory::TOTAL);
        answer(free, Ok(memory::free_bytes()))
    }
    fn cuMemAlloc_v2(to: *mut u64, len: usize) {
        answer(to, has_memory().and_then(|()| memory::allocate(current(), len, Kind::Plain)))
    }
    // Not of CUDA: the `nth` allocation from now on fails on a device; with 0, none does that was to fail.
    fn antiphon_emulator_fail_allocation(device: usize, nth: usize) {
        let mut failing = lock(&FAILING);
        match nth {
            0 => failing.retain(|(other, _)| *other != device),
            _ => failing.push((device, nth)),
        }
        Code::OK
    }
    fn cuMemFree_v2(at: u64) { code(stream::synchronize_device(current()).and_then(|()| memory::free(at))) }
    fn cuMemHostAlloc(to: *mut u64, len: usize, _flags: c_uint) {
        answer(to, has_memory().and_then(|()| memory::allocate(current(), len, Kind::Host)))
    }
    fn cuMemFreeHost(at: u64) { code(memory::free(at)) }
    fn cuMemHostGetDevicePointer_v2(to: *mut u64, host: u64, _flags: c_uint) { answer(to, Ok(host)) }
    fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, at: u64) {
        match memory::region_of(at) {
            Some(region) => {
                if !base.is_null() {
                    base.write(region.base);
                }
                if !len.is_null() {
                    len.write(region.len);
                }
                Code::OK
            }
            None => Code::INVALID_VALUE,
        }
    }
    fn cuPointerGetAttributes(count: c_uint, asked: *mut u32, answers: *mut *mut c_void, at: u64) {
        let region = memory::region_of(at);
        for index in 0..count as usize {
            let to = *answers.add(index);
            let Some(region) = &region else {
                to.cast::<u32>().write(0);
                continue;
            };
            let word = |value: u32| to.cast::<u32>().write(value);
            match *asked.add(index) {
                2 => word(if region.kind == Kind::Host { 1 } else { 2 }),
                9 => word(region.device as u32),
                10 => word((region.kind == Kind::Plain).into()),
                11 => to.cast::<u64>().write(region.base),
                12 => to.cast::<u64>().write(region.len as u64),
                14 => to.cast::<u64>().write(match region.kind {
                    Kind::Mapped { posix_fd: true } => 1,
                    Kind::Mapped { posix_fd: false } => 8,
                    _ => 0,
                }),
                17 => to.cast::<u64>().write(0),
                _ => word(0),
            }
        }
        Code::OK
    }
    fn cuIpcGetMemHandle(handle: *mut [u64; 8], at: u64) {
        answer(handle, memory::export(at).map(|[a, b, c, d, e]| [a, b, c, d, e, 0, 0, 0]))
    }
    fn cuIpcOpenMemHandle_v2(to: *mut u64, handle: sys::CUipcMemHandle, _flags: c_uint) {
        let [a, b, c, d, e, ..] = ptr::from_ref(&handle.reserved).cast::<[u64; 8]>().read_unaligned();
        answer(to, memory::import(current(), [a, b, c, d, e]))
    }
    fn cuIpcCloseMemHandle(at: u64) { code(memory::free(at)) }
    fn cuMemGetAllocationGranularity(bytes: *mut usize, _properties: *const c_void, _which: u32) {
        answer(bytes, Ok(memory::GRANULARITY))
    }
    fn cuMemCreate(handle: *mut u64, len: usize, properties: *const sys::CUmemAllocationProp, _flags: u64) {
        let kind = (*properties).requestedHandleTypes.0;
        let create = |()| if kind == 8 { Err(Code::NOT_SUPPORTED) } else { memory::create(len, kind == 1) };
        answer(handle, has_memory().and_then(create))
    }
    fn cuMemRelease(handle: u64) { code(memory::release(handle)) }
    fn cuMemRetainAllocationHandle(handle: *mut u64, at: u64) { answer(handle, memory::retain(at)) }
    fn cuMemExportToShareableHandle(to: *mut c_int, handle: u64, kind: u32, _flags: u64) {
        answer(to, if kind == 1 { memory::descriptor(handle) } else { Err(Code::NOT_SUPPORTED) })
    }
    fn cuMemImportFromShareableHandle(handle: *mut u64, descriptor: usize, _kind: u32) {
        answer(handle, memory::from_descriptor(descriptor as c_int))
    }
    fn cuMemAddressReserve(to: *mut u64, len: usize, _alignment: usize, _address: u64, _flags: u64) {
        answer(to, memory::reserve(len))
    }
    fn cuMemAddressFree(at: u64, len: usize) {
        memory::unreserve(at, len);
        Code::OK
    }
    fn cuMemMap(at: u64, len: usize, _offset: usize, handle: u64, _flags: u64) {
        code(memory::map(current(), at, len, handle))
    }
    fn cuMemUnmap(at: u64, len: usize) { code(memory::unmap(at, len)) }
    fn cuMemSetAccess(_at: u64, _len: usize, _access: *const c_void, _count: usize) { Code::OK }
}
