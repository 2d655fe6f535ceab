//! Modules and launches.
#![allow(clippy::missing_safety_doc)] // as cuda.h says

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::{self, CUlaunchAttributeID as Attribute};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::{SHARED_BYTES_PER_BLOCK, answer, code, streams::stream_of, symbols};
use crate::{
    Code,
    execution::{Grid, Parameter, Run},
    races,
    room::Needs,
    schedule,
    stream::Stream,
};

const MAX_THREADS: u32 = 1024;
const FEW_REGISTERS: u32 = 32;

/// As in device/memory.hpp.
#[repr(C)]
struct KernelEntry {
    address: *const c_void,
    call: unsafe extern "C" fn(*mut *mut c_void),
    sizes: *const usize,
    parameters: usize,
    name: *const c_char,
    bounds: [u32; 2],
    next: *const KernelEntry,
}

/// A module, which stays loaded.
pub struct Module {
    library: Library,
    run: Run,
    scheduled: schedule::Device,
    kernels: *const KernelEntry,
    /// The static shared memory of each.
    shared_bytes: Vec<(*const KernelEntry, u32)>,
}

/// A kernel.
pub struct Function {
    pub(crate) run: Run,
    pub(crate) scheduled: schedule::Device,
    pub(crate) call: unsafe extern "C" fn(*mut *mut c_void),
    sizes: Vec<usize>,
    name: String,
    /// The threads of the largest block, and the registers of a thread.
    threads: u32,
    registers: u32,
    static_shared_bytes: u32,
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
        let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).map_err(|error| {
            eprintln!("emulator: a program cannot be loaded: {error}");
            Code::INVALID_IMAGE
        })?;
        let run = *library.get::<Run>(b"emulator_run\0").map_err(|_| Code::INVALID_IMAGE)?;
        macro_rules! entry {
            ($name:literal) => {
                *library.get($name).map_err(|_| Code::INVALID_IMAGE)?
            };
        }
        let scheduled = schedule::Device {
            begin: entry!(b"emulator_begin\0"),
            resume: entry!(b"emulator_resume\0"),
            end: entry!(b"emulator_end\0"),
        };
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
        let kernels = kernels();
        let all: Vec<_> = std::iter::successors(kernels.as_ref(), |kernel| kernel.next.as_ref()).collect();
        let names: Vec<_> = all.iter().map(|kernel| CStr::from_ptr(kernel.name).to_string_lossy()).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).collect();
        let bytes = symbols::shared_bytes(std::slice::from_raw_parts(image, len), &names);
        let shared_bytes = all.into_iter().map(ptr::from_ref).zip(bytes).collect();
        Ok(Box::into_raw(Box::new(Module { library, run, scheduled, kernels, shared_bytes })))
    }
}

/// What a module's kernels call to put.
pub(crate) type PutSignal =
    unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, u64, u32, c_int, bool);

/// Tells a module how to put. False for one whose program does not.
pub(crate) unsafe fn set_puts(module: *const Module, put: PutSignal) -> bool {
    // SAFETY: a module that was loaded, and a function of device/nvshmem.hpp.
    unsafe {
        let set = (*module).library.get::<unsafe extern "C" fn(PutSignal)>(b"emulator_puts_by\0");
        set.map(|set| set(put)).is_ok()
    }
}

pub(crate) unsafe fn function(module: *const Module, name: *const c_char) -> Result<*const Function, Code> {
    // SAFETY: a module that was loaded, and its list of kernels, whose layout is that of memory.hpp.
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
        let known = module.shared_bytes.iter().find(|(kernel, _)| ptr::eq(*kernel, entry));
        let [threads, _] = entry.bounds;
        Ok(Box::into_raw(Box::new(Function {
            run: module.run,
            scheduled: module.scheduled,
            call: entry.call,
            sizes,
            name: name.to_string_lossy().into_owned(),
            threads: if threads == 0 { MAX_THREADS } else { threads },
            registers: registers(entry.bounds),
            static_shared_bytes: known.map_or(0, |(_, bytes)| *bytes),
            shared_bytes: AtomicU32::new(48 << 10),
        })))
    }
}

/// The registers of a thread, which nobody knows without NVRTC: 32, or as many as the bounds leave with
/// `ANTIPHON_EMULATOR_REGISTERS=most`, and in any case no more.
fn registers(bounds: [u32; 2]) -> u32 {
    let most = match bounds {
        [_, 0] | [0, _] => return FEW_REGISTERS,
        [threads, blocks] => ((64 << 10) / (threads.next_multiple_of(32) * blocks) / 8 * 8).min(255),
    };
    match std::env::var("ANTIPHON_EMULATOR_REGISTERS").as_deref() {
        Ok("most") => most,
        Ok("few" | "") | Err(_) => most.min(FEW_REGISTERS),
        Ok(other) => panic!("ANTIPHON_EMULATOR_REGISTERS is few or most, not {other}"),
    }
}

impl Function {
    fn needs(&self, threads: u32, dynamic_shared_bytes: u32, cluster_size: u32) -> Needs {
        let shared_bytes = self.static_shared_bytes + dynamic_shared_bytes;
        Needs { threads, registers: self.registers, shared_bytes, cluster_size }
    }
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
        || threads > MAX_THREADS
        || config.sharedMemBytes > allowed
        || !grid[0].is_multiple_of(cluster_size)
    {
        return Err(Code::INVALID_VALUE);
    }
    let needs = function.needs(threads, config.sharedMemBytes, cluster_size);
    if threads > function.threads || needs.clusters() == 0 {
        return Err(Code::LAUNCH_OUT_OF_RESOURCES);
    }
    if is_cooperative && grid.iter().product::<u32>() > needs.clusters() * cluster_size {
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
        scheduled: function.scheduled,
        call: function.call,
        parameters: function.sizes.iter().enumerate().map(copy).collect(),
        grid,
        block,
        cluster_size,
        shared_bytes: config.sharedMemBytes,
        needs,
        device: stream.device,
        stream: (stream.id, stream.priority),
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
            0 => (*function).threads as c_int,
            1 => (*function).static_shared_bytes as c_int,
            4 => (*function).registers as c_int,
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
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: *const Function, threads: c_int, shared: usize) {
        answer(blocks, Ok((*function).needs(threads as u32, shared as u32, 1).blocks_per_multiprocessor() as c_int))
    }
    fn cuOccupancyMaxActiveClusters(count: *mut c_int, function: *const Function, config: *const sys::CUlaunchConfig) {
        let config = &*config;
        let threads = config.blockDimX * config.blockDimY * config.blockDimZ;
        answer(count, Ok((*function).needs(threads, config.sharedMemBytes, cluster_of(config)).clusters() as c_int))
    }
    fn cuLaunchKernelEx(config: *const sys::CUlaunchConfig, function: *const Function, parameters: *mut *mut c_void, _extra: usize) {
        code(launch(&*config, &*function, parameters))
    }
}
