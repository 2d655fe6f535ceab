//! Machine code loaded into a context, and its kernels.

use std::{
    ffi::CString,
    ptr,
    sync::{Arc, OnceLock},
};

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};

use super::{
    Context, CudaError, CudaVersion, LaunchConfig, Nvshmem, StreamRef, driver::call, launch::Attributes,
};

/// Machine code in a context; unloaded with the last of its clones and functions.
#[derive(Debug, Clone)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    raw: sys::CUmodule,
    /// Which has been told of the module.
    nvshmem: OnceLock<&'static Nvshmem>,
}

// SAFETY: a module may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as for Send: the driver locks for itself.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads machine code: what [`KernelCache::compile`](super::KernelCache::compile) gives.
    ///
    /// # Errors
    /// [`CudaError::NotMachineCode`] for bytes that are no whole ELF file, since the driver would read beyond them;
    /// [`CudaError::Call`] when the code is for another architecture, or from an NVRTC of a newer major version than
    /// the driver's.
    pub fn load(context: &Context, cubin: &[u8]) -> Result<Self, CudaError> {
        check_elf(cubin).map_err(|reason| CudaError::NotMachineCode { len: cubin.len(), reason })?;
        let _current = context.current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the driver reads the ELF file, all of which is there; the module is unloaded in drop.
        unsafe { call!(cuModuleLoadData(&mut raw, cubin.as_ptr().cast())) }?;
        Ok(Self(Arc::new(Loaded { context: context.clone(), raw, nvshmem: OnceLock::new() })))
    }

    /// The context it is loaded into.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(super) fn raw(&self) -> sys::CUmodule {
        self.0.raw
    }

    /// NVSHMEM has been told of the module, and is told when it is unloaded.
    pub(super) fn keeps(&self, nvshmem: &'static Nvshmem) {
        self.0.nvshmem.get_or_init(|| nvshmem);
    }

    /// The kernel with this name, declared `extern "C" __global__`.
    ///
    /// The kernel is loaded at once and not at its first launch as is CUDA's default: a load waits for running
    /// kernels, and one of those may be waiting for the very launch.
    ///
    /// # Errors
    /// [`CudaError::Call`] when there is no such kernel.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let c_name = CString::new(name).map_err(|_| CudaError::Nul(name.to_owned()))?;
        let _current = self.0.context.current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the module lives, and the name ends with NUL; writes one handle that lives as long as the module.
        unsafe { call!(cuModuleGetFunction(&mut raw, self.0.raw, c_name.as_ptr())) }?;
        let mut parameters = None;
        if self.0.context.device().driver().supports(CudaVersion::new(12, 4)) {
            // SAFETY: the function lives as long as the module.
            unsafe { call!(cuFuncLoad(raw)) }?;
            parameters = Some(parameter_sizes(raw)?);
        }
        Ok(Function { module: self.clone(), raw, name: name.into(), parameters })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let _current = self.context.current();
        if let Some(nvshmem) = self.nvshmem.get() {
            // SAFETY: it is unloaded below.
            unsafe { nvshmem.finalize_module(self.raw) };
        }
        // SAFETY: loaded once and unloaded once, and no function of it is left.
        let _ = unsafe { call!(cuModuleUnload(self.raw)) };
    }
}

/// A kernel, ready to launch. Keeps its module loaded.
#[derive(Debug)]
pub struct Function {
    module: Module,
    raw: sys::CUfunction,
    name: Box<str>,
    /// The sizes of the parameters, where the driver tells them (CUDA 12.4).
    parameters: Option<Box<[usize]>>,
}

// SAFETY: a function may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as for Send: the driver locks for itself.
unsafe impl Sync for Function {}

/// The resources and limits of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FunctionAttributes {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: more than 0 means spilled registers or arrays that are indexed.
    pub local_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub shared_bytes: u32,
    /// Bytes of dynamic shared memory that a launch may ask for now.
    pub max_dynamic_shared_bytes: u32,
    /// Threads that a block may have.
    pub max_threads_per_block: u32,
    /// Ten times the compute capability that the code is for.
    pub binary_version: u32,
}

impl Function {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The context it is loaded into.
    #[inline]
    pub fn context(&self) -> &Context {
        &self.module.0.context
    }

    #[inline]
    pub(super) fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    #[inline]
    pub(super) fn parameters(&self) -> Option<&[usize]> {
        self.parameters.as_deref()
    }

    /// The resources and limits of the kernel.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn attributes(&self) -> Result<FunctionAttributes, CudaError> {
        use Attribute::*;
        let _current = self.context().current()?;
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: the function lives; writes one integer.
            unsafe { call!(cuFuncGetAttribute(&mut value, attribute, self.raw)) }?;
            Ok::<_, CudaError>(value as u32)
        };
        Ok(FunctionAttributes {
            registers: ask(CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            local_bytes: ask(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            shared_bytes: ask(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            max_dynamic_shared_bytes: ask(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)?,
            max_threads_per_block: ask(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            binary_version: ask(CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
        })
    }

    /// Lets launches ask for up to `bytes` bytes of dynamic shared memory. Without this call they may ask for up to 48 KiB.
    ///
    /// # Errors
    /// [`CudaError::Call`] when the device has less
    /// ([`shared_bytes_per_block`](super::DeviceProperties::shared_bytes_per_block)).
    pub fn allow_dynamic_shared(&self, bytes: u32) -> Result<(), CudaError> {
        self.set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)
    }

    /// Asks multiprocessors that run the kernel to have as much shared memory as they can, and as little first-level cache.
    ///
    /// A multiprocessor divides its memory between the two while no block runs on it. By default it takes what its kernel needs, and a
    /// kernel that needs more shared memory begins on it when that one has ended. A kernel that waits for one behind it would wait
    /// for ever. Kernels that all have asked begin beside each other.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn prefer_shared(&self) -> Result<(), CudaError> {
        const MOST: i32 = 100; // percent
        self.set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, MOST)
    }

    /// Lets launches use clusters of more than eight blocks, which not every device has.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn allow_large_clusters(&self) -> Result<(), CudaError> {
        self.set(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    }

    fn set(&self, attribute: Attribute, value: i32) -> Result<(), CudaError> {
        let _current = self.context().current()?;
        // SAFETY: the function lives.
        unsafe { call!(cuFuncSetAttribute(self.raw, attribute, value)) }
    }

    /// The number of blocks that one multiprocessor runs at once, if a block has `threads` threads and `shared_bytes` bytes of dynamic
    /// shared memory. Times the number of multiprocessors it is the largest cooperative grid, and the largest grid whose blocks
    /// may wait for each other.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let _current = self.context().current()?;
        let mut blocks = 0;
        let shared = shared_bytes as usize;
        // SAFETY: the function lives; writes one integer.
        unsafe {
            call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, threads as i32, shared))
        }?;
        Ok(blocks as u32)
    }

    /// How many clusters of this shape the device runs at once.
    ///
    /// # Errors
    /// [`CudaError::Call`] when it can run none.
    pub fn active_clusters(&self, config: &LaunchConfig) -> Result<u32, CudaError> {
        let _current = self.context().current()?;
        let mut attributes = Attributes::of(config);
        let stream = StreamRef::borrowed(self.context(), ptr::null_mut());
        let config = attributes.raw_config(config, stream);
        let mut clusters = 0;
        // SAFETY: the function lives, and `config` points to `attributes`, which outlives the call.
        unsafe { call!(cuOccupancyMaxActiveClusters(&mut clusters, self.raw, &config)) }?;
        Ok(clusters as u32)
    }
}

/// Whether a file of the ELF format for 64 bits has all the parts that its header speaks of.
fn check_elf(file: &[u8]) -> Result<(), &'static str> {
    if !file.starts_with(b"\x7FELF\x02\x01") || file.len() < 64 {
        return Err("it is not an ELF file");
    }
    let number = |at: usize, len: usize| {
        file[at..at + len].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    // Where the tables of segments and of sections are, the size of an entry, and how many there are.
    for (at, entry, count) in [(32, 54, 56), (40, 58, 60)] {
        let end = number(entry, 2) * number(count, 2);
        if number(at, 8).checked_add(end).is_none_or(|end| end > file.len() as u64) {
            return Err("it is truncated");
        }
    }
    Ok(())
}

/// The sizes of a kernel's parameters in bytes.
fn parameter_sizes(function: sys::CUfunction) -> Result<Box<[usize]>, CudaError> {
    const NO_MORE: u32 = sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32;
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function lives; writes two sizes, or nothing for an index that is too large.
        match unsafe { call!(cuFuncGetParamInfo(function, sizes.len(), &mut offset, &mut size)) } {
            Ok(()) => sizes.push(size),
            Err(CudaError::Call { code: NO_MORE, .. }) => return Ok(sizes.into()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_elf_file_must_be_whole() {
        // A header, then one segment of 56 bytes and one section of 64.
        let mut file = vec![0u8; 64 + 56 + 64];
        file[..6].copy_from_slice(b"\x7FELF\x02\x01");
        (file[32], file[54], file[56]) = (64, 56, 1);
        (file[40], file[58], file[60]) = (64 + 56, 64, 1);
        assert_eq!(check_elf(&file), Ok(()));
        assert_eq!(check_elf(&file[..file.len() - 1]), Err("it is truncated"));
        assert_eq!(check_elf(&file[..63]), Err("it is not an ELF file"));
        file[47] = 0xFF;
        assert_eq!(check_elf(&file), Err("it is truncated"));
        assert_eq!(check_elf(b"// PTX"), Err("it is not an ELF file"));
    }
}
