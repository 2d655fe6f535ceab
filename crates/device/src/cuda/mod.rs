//! CUDA: the driver, memory that peers share, kernels compiled at run time, launches.
//!
//! A thin layer: every type is one object of the driver with its lifetime, and every function is one call of the driver with
//! its error. This layer exists because a program must start without CUDA and report what is missing, because processes
//! must exchange memory, and because a launch may neither allocate nor lock.
//!
//! | type | meaning |
//! | --- | --- |
//! | [`Driver`] | libcuda, found and initialised once; everything else is made from it |
//! | [`Device`] | one GPU: its properties, its capabilities, its links to the others |
//! | [`Context`] | the device's primary context, shared with PyTorch, and making it current |
//! | [`Stream`], [`StreamRef`] | a queue of work, ours or borrowed from a framework by its integer |
//! | [`Event`] | a point in a stream, with or without a time |
//! | [`DeviceMemory`], [`PinnedMemory`] | memory of this process, on the device and on the host |
//! | [`Allocation`], [`Mapping`] | memory for peers: exported and imported as file descriptors |
//! | [`IpcExport`], [`IpcMemory`] | memory that a framework allocated, opened by peers; [`PointerInfo`] tells which kind |
//! | [`Nvrtc`], [`Program`], [`KernelCache`] | CUDA C++ to machine code, remembered on disk |
//! | [`NvJitLink`], [`DeviceLibrary`] | kernels linked with functions that a library of machine code has |
//! | [`Module`], [`Function`] | machine code loaded, and launched with a [`LaunchConfig`] |
//! | [`Graph`], [`GraphExec`] | work recorded once and launched many times |
//! | [`WaitBoard`], [`WaitReport`] | the wait of a kernel that gave up, and the means to make kernels give up |
//! | [`Survey`], [`Capabilities`], [`Nvml`] | the GPUs and libraries of a machine, and the ways of sharing memory that work |
//! | [`Nccl`], [`NcclCommunicator`] | NCCL, if it is installed: the yardstick, and the fallback for whole collectives |
//! | [`Nvshmem`] | NVSHMEM, if it is installed: memory of GPUs on other machines, to which kernels write |
//! | [`PRELUDE`], [`FORMATS`], [`PUT_SIGNAL`] | the code that every kernel includes; quantising in kernels; NVSHMEM's functions for kernels |
//!
//! ```no_run
//! use antiphon_device::cuda::{
//!     Architecture, Context, CudaError, DeviceMemory, Driver, KernelCache, LaunchConfig, Module, Nvrtc, Program,
//! };
//!
//! # fn main() -> Result<(), CudaError> {
//! let context = Context::primary(Driver::load()?.device(0)?)?;
//! let source = "extern \"C\" __global__ void fill(u32* to, u32 value) { to[threadIdx.x] = value; }";
//! let program = Program::new("fill.cu", source, context.device().architecture()?);
//! let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
//! let fill = Module::load(&context, &cubin.bytes)?.function("fill")?;
//!
//! let (stream, memory) = (context.stream()?, DeviceMemory::allocate(&context, 128)?);
//! let (to, value) = (memory.pointer(), 7u32);
//! // SAFETY: the kernel takes a pointer and a number, and writes 32 words of 4 bytes.
//! unsafe { fill.launch(&stream, &LaunchConfig::new(1, 32), &[(&to).into(), (&value).into()]) }?;
//! let mut words = [0; 128];
//! memory.read(&stream, 0, &mut words)?;
//! assert_eq!(words, [7, 0, 0, 0].repeat(32)[..]);
//! # Ok(())
//! # }
//! ```
//!
//! # Where libraries are found
//!
//! Nothing of CUDA is linked. libcuda is where the dynamic loader looks, or nowhere. [NVRTC, nvJitLink, NCCL and NVSHMEM are looked for](crate::library) in
//! this order: at the path in `ANTIPHON_NVRTC`, `ANTIPHON_NVJITLINK`, `ANTIPHON_NCCL` or `ANTIPHON_NVSHMEM` (a file, or its folder; one that is wrong is an
//! error); in this process, where PyTorch may have loaded them; where the dynamic loader looks (`LD_LIBRARY_PATH`, the
//! system's folders); among the packages of Python, where pip puts them (this process's Python, `VIRTUAL_ENV`,
//! `CONDA_PREFIX`, the `python3` in `PATH`, `~/.local`); in a CUDA toolkit (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`).
//! NVRTC gets the options in `ANTIPHON_NVRTC_OPTIONS` besides its own, for every kernel: `-lineinfo` for a profiler, say.
//!
//! ```
//! // On a machine without a GPU this prints what is missing and what to install, and nothing panics.
//! match antiphon_device::cuda::Driver::load() {
//!     Ok(driver) => println!("CUDA {}, {:?} devices", driver.version(), driver.device_count()),
//!     Err(error) => println!("{error}"),
//! }
//! ```
//!
//! # Threads and the current context
//!
//! Everything may be used from any thread. A call that needs the context current makes it so for its own duration and
//! restores what was there, so a framework in the same thread notices nothing. Errors of asynchronous work come with
//! whatever call notices them first.

mod cache;
mod capabilities;
mod context;
mod device;
mod driver;
mod error;
mod event;
mod graph;
mod ipc;
mod launch;
mod libraries;
pub mod memory;
mod module;
mod nccl;
mod nvjitlink;
mod nvml;
mod nvrtc;
mod nvshmem;
mod program;
mod report;
mod stream;
mod survey;
mod vmm;

pub use cache::{Cubin, KernelCache, Origin};
pub use capabilities::{Answer, Capabilities};
pub use context::{Context, Current, MemoryUse};
pub use device::{Device, DeviceProperties, PeerLink};
pub use driver::Driver;
pub use error::{CudaError, CudaVersion, LibraryVersion};
pub use event::Event;
pub use graph::{Graph, GraphExec, relaxed};
pub use ipc::{IpcExport, IpcHandle, IpcMemory, MemoryKind, PointerInfo};
pub use launch::{Argument, KernelArgument, LaunchConfig, MAX_ARGUMENTS};
pub use memory::{DeviceMemory, DevicePointer, PinnedMemory};
pub use module::{Function, FunctionAttributes, Module};
pub use nccl::{Nccl, NcclCommunicator, UniqueId};
pub use nvjitlink::{DeviceLibrary, NvJitLink};
pub use nvml::Nvml;
pub use nvrtc::{Compiled, Nvrtc};
pub use nvshmem::Nvshmem;
pub use program::{Architecture, FORMATS, PRELUDE, PUT_SIGNAL, Program};
pub use report::{GaveUp, WaitBoard, WaitReport};
pub use stream::{Stream, StreamRef};
pub use survey::{DeviceSurvey, Finding, Survey};
pub use vmm::{Allocation, Mapping};
