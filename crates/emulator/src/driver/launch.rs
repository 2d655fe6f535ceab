//! Modules and launches.
#![allow(clippy::missing_safety_doc)] // as cuda.h says

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{self, CUlaunchAttributeID as Attribute};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{
    MULTIPROCESSORS, SHARED_BYTES_PER_BLOCK, SHARED_BYTES_PER_MULTIPROCESSOR, THREADS_PER_MULTIPROCESSOR,
    answer, code, streams::stream_of,
};
use crate::{
    Code,
    execution::{Grid, Parameter, Run},
    races,
    stream::Stream,
};

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
