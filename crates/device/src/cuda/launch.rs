//! Launches.
//!
//! A launch allocates nothing and takes no lock of ours: the configuration and the arguments are on the caller's
//! stack. Arguments are checked against the kernel's parameters by number and size, which costs a few nanoseconds.

use std::{ffi::c_void, marker::PhantomData, ptr};

use cudarc::driver::sys::{self, CUlaunchAttributeID as Id};

use super::{CudaError, DevicePointer, Function, StreamRef, driver::call};

/// The most parameters that a kernel may have here. A kernel that needs more takes a struct.
pub const MAX_ARGUMENTS: usize = 32;

/// The shape of a launch and its attributes.
///
/// ```
/// use antiphon_device::cuda::LaunchConfig;
///
/// let config = LaunchConfig::new(132, 512).shared_bytes(4096).cluster(4).programmatic();
/// assert_eq!(config.threads(), 132 * 512);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    cluster: Option<[u32; 3]>,
    cooperative: bool,
    programmatic: bool,
}

impl LaunchConfig {
    /// `blocks` blocks of `threads` threads each, in one dimension.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self::with_dimensions([blocks, 1, 1], [threads, 1, 1])
    }

    /// A grid and a block in up to three dimensions, x first.
    pub const fn with_dimensions(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, shared_bytes: 0, cluster: None, cooperative: false, programmatic: false }
    }

    /// Bytes of dynamic shared memory of a block. See [`Function::allow_dynamic_shared`] for more than 48 KiB.
    #[must_use]
    pub const fn shared_bytes(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// Groups neighbouring blocks into clusters of `blocks` blocks, which run together and reach each other's shared memory.
    /// Needs Hopper or newer. The number of blocks of the grid must be a multiple of `blocks`.
    #[must_use]
    pub const fn cluster(mut self, blocks: u32) -> Self {
        self.cluster = Some([blocks, 1, 1]);
        self
    }

    /// Refuses the launch unless all blocks run at once, so that they may wait for each other.
    #[must_use]
    pub const fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// Programmatic dependent launch: lets the kernel start while the one before it in the stream still runs. It must
    /// call `pdl_wait` of the prelude before it touches anything that an earlier kernel wrote or reads.
    #[must_use]
    pub const fn programmatic(mut self) -> Self {
        self.programmatic = true;
        self
    }

    /// How many threads there are in all.
    pub fn threads(&self) -> u64 {
        [self.grid, self.block].as_flattened().iter().map(|&extent| u64::from(extent)).product()
    }
}

/// A type that can be passed to a kernel by value.
///
/// # Safety
/// The type is plain data, and has the same size and layout in Rust as the parameter's type in the kernel: a primitive,
/// or `#[repr(C)]`. A `#[repr(C)]` struct is passed as a struct.
pub unsafe trait KernelArgument: Copy {}

macro_rules! kernel_arguments {
    ($($t:ty),*) => {$(
        // SAFETY: a primitive of the same size and layout in CUDA.
        unsafe impl KernelArgument for $t {}
    )*};
}

kernel_arguments!(u8, u16, u32, u64, i8, i16, i32, i64, usize, isize, f32, f64);

// SAFETY: transparent over u64: the kernel's parameter is a pointer.
unsafe impl KernelArgument for DevicePointer {}
// SAFETY: an array in a struct of the kernel's, as C has no array parameters.
unsafe impl<T: KernelArgument, const N: usize> KernelArgument for [T; N] {}

/// A value to pass to a kernel, by reference until the launch has copied it.
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    value: *const c_void,
    size: usize,
    borrowed: PhantomData<&'a ()>,
}

impl<'a> Argument<'a> {
    /// Passes this value.
    #[inline(always)]
    pub fn new<T: KernelArgument>(value: &'a T) -> Self {
        Self { value: ptr::from_ref(value).cast(), size: size_of::<T>(), borrowed: PhantomData }
    }
}

impl<'a, T: KernelArgument> From<&'a T> for Argument<'a> {
    #[inline(always)]
    fn from(value: &'a T) -> Self {
        Self::new(value)
    }
}

impl Function {
    /// Puts a run of the kernel into a stream. The values are copied before this returns; what they point to is not.
    ///
    /// # Errors
    /// [`CudaError::ArgumentCount`], [`CudaError::ArgumentSize`]; [`CudaError::Call`], for instance for a shape that
    /// the device or the kernel does not have. An error of work before it may be reported too.
    ///
    /// # Safety
    /// The arguments are of the kernel's types, in its order, and whatever the kernel does with them is sound: its
    /// pointers are valid until it is done, for the elements that it uses, and no other code uses them in a way that races.
    #[inline]
    pub unsafe fn launch<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        config: &LaunchConfig,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        let stream = stream.into();
        let mut values = self.check(arguments)?;
        let _current = self.context().current()?;
        let mut attributes = Attributes::of(config);
        let config = attributes.raw_config(config, stream);
        // SAFETY: `config` points to `attributes`, and `values` to as many arguments of the right sizes as the kernel
        // has, all of which outlive the call; the rest is passed on to the caller.
        unsafe { call!(cuLaunchKernelEx(&config, self.raw(), values.as_mut_ptr(), ptr::null_mut())) }
    }

    /// The arguments' addresses as the driver takes them.
    #[inline]
    fn check(&self, arguments: &[Argument<'_>]) -> Result<[*mut c_void; MAX_ARGUMENTS], CudaError> {
        let expected = self.parameters();
        if arguments.len() > MAX_ARGUMENTS || expected.is_some_and(|sizes| sizes.len() != arguments.len()) {
            return Err(wrong_count(self.name(), expected, arguments.len()));
        }
        let mut values = [ptr::null_mut(); MAX_ARGUMENTS];
        for (index, (value, argument)) in values.iter_mut().zip(arguments).enumerate() {
            if let Some(sizes) = expected
                && sizes[index] != argument.size
            {
                return Err(wrong_size(self.name(), index, sizes[index], argument.size));
            }
            *value = argument.value.cast_mut();
        }
        Ok(values)
    }
}

#[cold]
fn wrong_count(kernel: &str, expected: Option<&[usize]>, given: usize) -> CudaError {
    let expected = expected.map_or(MAX_ARGUMENTS, <[usize]>::len);
    CudaError::ArgumentCount { kernel: kernel.to_owned(), expected, given }
}

#[cold]
fn wrong_size(kernel: &str, index: usize, expected: usize, given: usize) -> CudaError {
    CudaError::ArgumentSize { kernel: kernel.to_owned(), index, expected, given }
}

/// The attributes of one launch.
pub(super) struct Attributes {
    list: [sys::CUlaunchAttribute; 3],
    len: u32,
}

impl Attributes {
    #[inline]
    pub(super) fn of(config: &LaunchConfig) -> Self {
        let ignored = sys::CUlaunchAttribute {
            id: Id::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let mut attributes = Self { list: [ignored; 3], len: 0 };
        if let Some([x, y, z]) = config.cluster {
            attributes.add(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, |value| {
                value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            });
        }
        if config.cooperative {
            attributes.add(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, |value| value.cooperative = 1);
        }
        if config.programmatic {
            attributes.add(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, |value| {
                value.programmaticStreamSerializationAllowed = 1;
            });
        }
        attributes
    }

    #[inline(always)]
    fn add(&mut self, id: Id, set: impl FnOnce(&mut sys::CUlaunchAttributeValue)) {
        let attribute = &mut self.list[self.len as usize];
        attribute.id = id;
        set(&mut attribute.value);
        self.len += 1;
    }

    /// The configuration as the driver takes it; it points to `self`.
    #[inline]
    pub(super) fn raw_config(&mut self, config: &LaunchConfig, stream: StreamRef<'_>) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: config.grid[0],
            gridDimY: config.grid[1],
            gridDimZ: config.grid[2],
            blockDimX: config.block[0],
            blockDimY: config.block[1],
            blockDimZ: config.block[2],
            sharedMemBytes: config.shared_bytes,
            hStream: stream.raw(),
            attrs: self.list.as_mut_ptr(),
            numAttrs: self.len,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_those_that_were_asked_for() {
        let ids = |config| {
            let attributes = Attributes::of(&config);
            attributes.list[..attributes.len as usize].iter().map(|a| a.id).collect::<Vec<_>>()
        };
        let plain = LaunchConfig::new(4, 32);
        assert_eq!(ids(plain), []);
        assert_eq!(ids(plain.cooperative()), [Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE]);
        let all = [
            Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        ];
        assert_eq!(ids(plain.cluster(2).cooperative().programmatic()), all);
        let attributes = Attributes::of(&plain.cluster(2));
        // SAFETY: the value was set as this field.
        let cluster = unsafe { attributes.list[0].value.clusterDim };
        assert_eq!((cluster.x, cluster.y, cluster.z), (2, 1, 1));
    }

    #[test]
    fn an_argument_knows_its_size() {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Peers([DevicePointer; 8]);
        // SAFETY: plain data in C's layout.
        unsafe impl KernelArgument for Peers {}
        let peers = Peers([DevicePointer(0); 8]);
        let arguments = [Argument::new(&peers), (&3u32).into(), (&1.0f64).into()];
        assert_eq!(arguments.map(|argument| argument.size), [64, 4, 8]);
    }
}
