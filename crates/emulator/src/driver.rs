//! libcuda: the functions, as cuda.h documents them.
#![allow(clippy::missing_safety_doc)] // as cuda.h says

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{self, CUlaunchAttributeID as Attribute};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{
    Code,
    execution::{Grid, Parameter, Run},
    lock,
    memory::{self, Kind},
    races::{self, order},
    stream::{self, Event, Graph, Stream, Work},
};

const MULTIPROCESSORS: u32 = 132;
const SHARED_BYTES_PER_BLOCK: u32 = 232_448;
const SHARED_BYTES_PER_MULTIPROCESSOR: u32 = 233_472;
const THREADS_PER_MULTIPROCESSOR: u32 = 2048;

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

// ------------------------------------------------------------------------------------------- the driver, its devices, contexts

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

fn current() -> usize {
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
            75 => 9,
            16 => MULTIPROCESSORS as c_int,
            38 => 50 << 20,
            97 => SHARED_BYTES_PER_BLOCK as c_int,
            39 => THREADS_PER_MULTIPROCESSOR as c_int,
            95 | 120 | 102 | 103 => 1, // cooperative launches, clusters, virtual memory, file descriptors
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

functions! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        total.write(memory::TOTAL);
        answer(free, Ok(memory::free_bytes()))
    }
    fn cuMemAlloc_v2(to: *mut u64, len: usize) {
        let fails = lock(&FAILING).iter_mut().any(|(device, left)| {
            *left = left.wrapping_sub((*device == current()).into());
            *left == 0 && *device == current()
        });
        lock(&FAILING).retain(|(_, left)| *left != 0);
        answer(to, if fails { Err(Code::OUT_OF_MEMORY) } else { memory::allocate(current(), len, Kind::Plain) })
    }
    // Not of CUDA: the `nth` allocation from now on fails on a device.
    fn antiphon_emulator_fail_allocation(device: usize, nth: usize) {
        lock(&FAILING).push((device, nth));
        Code::OK
    }
    fn cuMemFree_v2(at: u64) { code(stream::synchronize_device(current()).and_then(|()| memory::free(at))) }
    fn cuMemHostAlloc(to: *mut u64, len: usize, _flags: c_uint) {
        answer(to, memory::allocate(current(), len, Kind::Host))
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
        answer(handle, if kind == 8 { Err(Code::NOT_SUPPORTED) } else { memory::create(len, kind == 1) })
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

// ------------------------------------------------------------------------------------------------- streams, events and graphs

/// A handle is a pointer to one reference.
fn handle<T>(value: Arc<T>) -> *const T {
    Arc::into_raw(value)
}

/// The object of a handle.
unsafe fn object<T>(handle: *const T) -> Arc<T> {
    // SAFETY: made by `handle`, and not destroyed.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

/// The stream of a handle; null is the device's own.
unsafe fn stream_of(handle: *const Stream) -> Arc<Stream> {
    static DEFAULT: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
    // cudaStreamLegacy and cudaStreamPerThread are numbers.
    if handle as usize > 2 {
        // SAFETY: a stream that was created here.
        return unsafe { object(handle) };
    }
    let mut all = lock(&DEFAULT);
    while all.len() < device_count() {
        let stream = Stream::new(all.len());
        all.push(stream);
    }
    all[current()].clone()
}

unsafe fn submit(stream: *const Stream, work: impl Fn() + Send + Sync + 'static) -> Code {
    let work: Work = Arc::new(work);
    // SAFETY: passed on to the caller.
    unsafe { stream_of(stream) }.submit(work);
    Code::OK
}

fn copy(to: u64, from: u64, len: usize) {
    // SAFETY: ranges that the caller keeps until the stream is done.
    unsafe { ptr::copy(from as *const u8, to as *mut u8, len) }
    order::copied(0, to, Some(from), len);
}

functions! {
    fn cuStreamCreateWithPriority(to: *mut *const Stream, _flags: c_uint, _priority: c_int) {
        answer(to, Ok(handle(Stream::new(current()))))
    }
    fn cuStreamDestroy_v2(stream: *const Stream) {
        let stream = Arc::from_raw(stream);
        stream.close();
        Code::OK
    }
    fn cuStreamQuery(stream: *const Stream) { code(stream_of(stream).query()) }
    fn cuStreamSynchronize(stream: *const Stream) { code(stream_of(stream).synchronize()) }
    fn cuStreamGetGreenCtx(_stream: *const Stream, green: *mut usize) { answer(green, Ok(0)) }
    fn cuGreenCtxGetDevResource(_green: usize, _resource: *mut c_void, _kind: u32) { Code::NOT_SUPPORTED }
    fn cuStreamIsCapturing(stream: *const Stream, status: *mut u32) {
        answer(status, Ok(stream_of(stream).capture().is_some().into()))
    }
    // It ends a capture, as the driver does.
    fn cuStreamGetId(stream: *const Stream, id: *mut u64) {
        let stream = stream_of(stream);
        answer(id, if stream.spoil_capture() { Err(Code::CAPTURE_UNSUPPORTED) } else { Ok(stream.id) })
    }
    fn cuStreamGetCaptureInfo_v2(stream: *const Stream, status: *mut u32, number: *mut u64,
            _graph: usize, _nodes: usize, _count: usize) {
        let capture = stream_of(stream).capture();
        number.write(capture.unwrap_or(0));
        answer(status, Ok(capture.is_some().into()))
    }
    fn cuStreamBeginCapture_v2(stream: *const Stream, _mode: u32) {
        if stream.is_null() { Code::CAPTURE_UNSUPPORTED } else { code(stream_of(stream).begin_capture()) }
    }
    fn cuStreamEndCapture(stream: *const Stream, graph: *mut *const Graph) {
        answer(graph, stream_of(stream).end_capture().map(|graph| handle(Arc::new(graph))))
    }
    fn cuStreamWaitEvent(stream: *const Stream, event: *const Event, flags: c_uint) {
        code(stream_of(stream).wait_for(&object(event), flags & 1 != 0))
    }
    fn cuEventCreate(to: *mut *const Event, flags: c_uint) { answer(to, Ok(handle(Event::new(flags & 2 == 0)))) }
    fn cuEventDestroy_v2(event: *const Event) {
        drop(Arc::from_raw(event));
        Code::OK
    }
    fn cuEventRecordWithFlags(event: *const Event, stream: *const Stream, flags: c_uint) {
        stream_of(stream).record(&object(event), flags & 1 != 0);
        Code::OK
    }
    fn cuEventQuery(event: *const Event) { code(object(event).query()) }
    fn cuEventSynchronize(event: *const Event) { code(object(event).synchronize()) }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: *const Event, end: *const Event) {
        answer(milliseconds, object(end).milliseconds_since(&object(start)))
    }
    fn cuGraphGetNodes(graph: *const Graph, _nodes: usize, count: *mut usize) { answer(count, Ok(object(graph).len())) }
    fn cuGraphInstantiateWithFlags(to: *mut *const Graph, graph: *const Graph, _flags: u64) {
        answer(to, Ok(handle(object(graph))))
    }
    fn cuGraphLaunch(graph: *const Graph, stream: *const Stream) {
        stream_of(stream).launch(&object(graph));
        Code::OK
    }
    fn cuGraphDestroy(graph: *const Graph) {
        drop(Arc::from_raw(graph));
        Code::OK
    }
    fn cuGraphExecDestroy(graph: *const Graph) {
        drop(Arc::from_raw(graph));
        Code::OK
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        // Pageable memory is read before the call returns.
        if memory::region_of(from).is_none() {
            let bytes = std::slice::from_raw_parts(from as *const u8, len).to_vec();
            return submit(stream, move || copy(to, bytes.as_ptr() as u64, len));
        }
        submit(stream, move || copy(to, from, len))
    }
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        submit(stream, move || copy(to, from, len))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        submit(stream, move || copy(to, from, len))
    }
    fn cuMemsetD8Async(to: u64, value: u8, len: usize, stream: *const Stream) {
        submit(stream, move || {
            ptr::write_bytes(to as *mut u8, value, len);
            order::copied(0, to, None, len);
        })
    }
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: *const Stream) {
        submit(stream, move || {
            std::slice::from_raw_parts_mut(to as *mut u32, count).fill(value);
            order::copied(0, to, None, 4 * count);
        })
    }
}

// --------------------------------------------------------------------------------------------------------- modules and launches

/// As in device/fibers.hpp.
#[repr(C)]
struct KernelEntry {
    address: *const c_void,
    call: unsafe extern "C" fn(*mut *mut c_void),
    sizes: *const usize,
    parameters: usize,
    launch_bounds: *const c_char,
    next: *const KernelEntry,
}

/// A module, which stays loaded.
pub struct Module {
    library: Library,
    run: Run,
    kernels: *const KernelEntry,
}

/// A kernel.
pub struct Function {
    pub(crate) run: Run,
    pub(crate) call: unsafe extern "C" fn(*mut *mut c_void),
    sizes: Vec<usize>,
    name: String,
    /// The largest dynamic shared memory that it was allowed.
    shared_bytes: AtomicU32,
}

pub(crate) unsafe fn load(image: *const u8) -> Result<*const Module, Code> {
    // SAFETY: an ELF file: the table of sections, at the offset in word 40, is its end.
    let len = unsafe {
        let number = |at: usize, len: usize| {
            (0..len).rev().fold(0usize, |number, byte| number << 8 | usize::from(*image.add(at + byte)))
        };
        number(40, 8) + number(58, 2) * number(60, 2)
    };
    // SAFETY: the emulator's NVRTC made the file, whose initialisers only register kernels.
    unsafe {
        let file = libc::memfd_create(c"module".as_ptr(), 0);
        let mut written = 0;
        while written < len {
            let now = libc::write(file, image.add(written).cast(), len - written);
            if now <= 0 {
                return Err(Code::OUT_OF_MEMORY);
            }
            written += now as usize;
        }
        let path = format!("/proc/self/fd/{file}");
        let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).map_err(|_| Code::INVALID_IMAGE)?;
        let run = *library.get::<Run>(b"emulator_run\0").map_err(|_| Code::INVALID_IMAGE)?;
        let kernels = *library
            .get::<unsafe extern "C" fn() -> *const KernelEntry>(b"emulator_kernels\0")
            .map_err(|_| Code::INVALID_IMAGE)?;
        if races::is_on() {
            let check = library.get::<unsafe extern "C" fn(*const races::Checks)>(b"emulator_check\0");
            check.map_err(|_| Code::INVALID_IMAGE)?(&raw const races::CHECKS);
            let allowed = library.get::<*const c_char>(b"emulator_allowed_races\0");
            let allowed = allowed.map_err(|_| Code::INVALID_IMAGE)?.into_raw();
            races::allow(&CStr::from_ptr(allowed.cast_const().cast()).to_string_lossy());
        }
        Ok(Box::into_raw(Box::new(Module { library, run, kernels: kernels() })))
    }
}

pub(crate) unsafe fn function(module: *const Module, name: *const c_char) -> Result<*const Function, Code> {
    // SAFETY: a module that was loaded, and its list of kernels, whose layout is that of fibers.hpp.
    unsafe {
        let module = &*module;
        let name = CStr::from_ptr(name);
        let address = module
            .library
            .get::<*const c_void>(name.to_bytes_with_nul())
            .map_err(|_| Code::NOT_FOUND)?
            .into_raw();
        let mut entry = module.kernels;
        while !entry.is_null() && (*entry).address != address.cast_const() {
            entry = (*entry).next;
        }
        let entry = entry.as_ref().ok_or(Code::NOT_FOUND)?;
        let sizes = std::slice::from_raw_parts(entry.sizes, entry.parameters).to_vec();
        let shared_bytes = AtomicU32::new(48 << 10);
        let name = name.to_string_lossy().into_owned();
        Ok(Box::into_raw(Box::new(Function { run: module.run, call: entry.call, sizes, name, shared_bytes })))
    }
}

fn blocks_per_multiprocessor(threads: u32, shared_bytes: u32) -> u32 {
    let by_threads = THREADS_PER_MULTIPROCESSOR / threads.max(1).next_multiple_of(32);
    by_threads.min(SHARED_BYTES_PER_MULTIPROCESSOR / (shared_bytes + 1024)).min(32)
}

unsafe fn attribute(config: &sys::CUlaunchConfig, id: Attribute) -> Option<&sys::CUlaunchAttributeValue> {
    // SAFETY: as many attributes as said.
    let mut attributes = (0..config.numAttrs as usize).map(|index| unsafe { &*config.attrs.add(index) });
    attributes.find(|attribute| attribute.id == id).map(|attribute| &attribute.value)
}

unsafe fn cluster_of(config: &sys::CUlaunchConfig) -> u32 {
    // SAFETY: the value of this attribute.
    unsafe {
        attribute(config, Attribute::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            .map_or(1, |value| value.clusterDim.x)
    }
}

unsafe fn is_cooperative(config: &sys::CUlaunchConfig) -> bool {
    // SAFETY: the value of this attribute.
    unsafe {
        attribute(config, Attribute::CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            .is_some_and(|value| value.cooperative != 0)
    }
}

unsafe fn is_programmatic(config: &sys::CUlaunchConfig) -> bool {
    // SAFETY: the value of this attribute.
    unsafe {
        attribute(config, Attribute::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            .is_some_and(|value| value.programmaticStreamSerializationAllowed != 0)
    }
}

unsafe fn launch(
    config: &sys::CUlaunchConfig,
    function: &Function,
    parameters: *mut *mut c_void,
) -> Result<(), Code> {
    let grid = [config.gridDimX, config.gridDimY, config.gridDimZ];
    let block = [config.blockDimX, config.blockDimY, config.blockDimZ];
    let threads: u32 = block.iter().product();
    // SAFETY: passed on to the caller.
    let (cluster_size, is_cooperative) = unsafe { (cluster_of(config), is_cooperative(config)) };
    let allowed = function.shared_bytes.load(Ordering::Relaxed);
    if grid.contains(&0)
        || threads == 0
        || threads > 1024
        || config.sharedMemBytes > allowed
        || !grid[0].is_multiple_of(cluster_size)
    {
        return Err(Code::INVALID_VALUE);
    }
    let capacity = MULTIPROCESSORS * blocks_per_multiprocessor(threads, config.sharedMemBytes);
    if is_cooperative && grid.iter().product::<u32>() > capacity {
        return Err(Code::COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    let copy = |(index, size): (usize, &usize)| {
        let mut parameter = Box::new(Parameter([0; 4096]));
        // SAFETY: each parameter has the size that the kernel says.
        unsafe { (*parameters.add(index)).cast::<u8>().copy_to(parameter.0.as_mut_ptr(), *size) };
        parameter
    };
    // SAFETY: passed on to the caller.
    let (stream, is_programmatic) =
        unsafe { (stream_of(config.hStream as *const Stream), is_programmatic(config)) };
    let grid = Arc::new(Grid {
        run: function.run,
        call: function.call,
        parameters: function.sizes.iter().enumerate().map(copy).collect(),
        grid,
        block,
        cluster_size,
        shared_bytes: config.sharedMemBytes,
        capacity,
        device: stream.device,
        name: function.name.clone(),
        is_programmatic,
    });
    stream.submit(Arc::new(move || grid.run()));
    Ok(())
}

functions! {
    fn cuModuleLoadData(to: *mut *const Module, image: *const u8) { answer(to, load(image)) }
    fn cuModuleUnload(_module: *const Module) { Code::OK }
    fn cuModuleGetFunction(to: *mut *const Function, module: *const Module, name: *const c_char) {
        answer(to, function(module, name))
    }
    fn cuFuncLoad(_function: *const Function) { Code::OK }
    fn cuFuncGetParamInfo(function: *const Function, index: usize, offset: *mut usize, size: *mut usize) {
        offset.write(0);
        let function = &*function;
        answer(size, function.sizes.get(index).copied().ok_or(Code::INVALID_VALUE))
    }
    fn cuFuncGetAttribute(value: *mut c_int, attribute: u32, function: *const Function) {
        answer(value, Ok(match attribute {
            0 => 1024,
            4 => 32,
            6 => 90,
            8 => (*function).shared_bytes.load(Ordering::Relaxed) as c_int,
            _ => 0,
        }))
    }
    fn cuFuncSetAttribute(function: *const Function, attribute: u32, value: c_int) {
        if attribute == 8 {
            if value as u32 > SHARED_BYTES_PER_BLOCK {
                return Code::INVALID_VALUE;
            }
            (*function).shared_bytes.store(value as u32, Ordering::Relaxed);
        }
        Code::OK
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, _function: *const Function, threads: c_int, shared: usize) {
        answer(blocks, Ok(blocks_per_multiprocessor(threads as u32, shared as u32) as c_int))
    }
    fn cuOccupancyMaxActiveClusters(count: *mut c_int, _function: *const Function, config: *const sys::CUlaunchConfig) {
        let config = &*config;
        let threads = config.blockDimX * config.blockDimY * config.blockDimZ;
        let blocks = MULTIPROCESSORS * blocks_per_multiprocessor(threads, config.sharedMemBytes);
        answer(count, Ok((blocks / cluster_of(config)) as c_int))
    }
    fn cuLaunchKernelEx(config: *const sys::CUlaunchConfig, function: *const Function, parameters: *mut *mut c_void, _extra: usize) {
        code(launch(&*config, &*function, parameters))
    }
}
