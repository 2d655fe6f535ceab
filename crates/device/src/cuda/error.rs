//! The errors of CUDA.

use std::{fmt, path::PathBuf, time::Duration};

use cudarc::driver::sys;

use crate::library::LibraryError;

/// A version of CUDA, as the driver and NVRTC number themselves. Ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CudaVersion {
    /// The number before the dot.
    pub major: u32,
    /// The number after it.
    pub minor: u32,
}

impl CudaVersion {
    /// `major.minor`.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// A version of a library with three numbers: NCCL's, NVSHMEM's. Ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LibraryVersion {
    /// The number before the first dot.
    pub major: u32,
    /// The number between the dots.
    pub minor: u32,
    /// The number after the second dot.
    pub patch: u32,
}

impl fmt::Display for LibraryVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A CUDA call that failed, or that could not be made.
///
/// Cloning is cheap enough: an error is often reported to several waiting callers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that is opened at run time is missing, or cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A function of the driver or of NVRTC returned an error code.
    #[error("{function} failed: {name} ({code}): {text}")]
    Call {
        /// The function.
        function: &'static str,
        /// The number of the code.
        code: u32,
        /// The name of the code.
        name: &'static str,
        /// The library's text for the code.
        text: &'static str,
    },
    /// A function of NCCL returned an error code.
    #[error("{function} failed: {text} ({code}){}{detail}", if .detail.is_empty() { "" } else { ": " })]
    Nccl {
        /// The function.
        function: &'static str,
        /// The number of the code.
        code: u32,
        /// What the code means.
        text: &'static str,
        /// NCCL's last log line, which may be empty.
        detail: String,
    },
    /// A function of NVSHMEM returned a code, or what means that it failed.
    #[error("{function} of NVSHMEM {version} failed ({code}): NVSHMEM_DEBUG=INFO makes it tell why")]
    Nvshmem {
        /// The function.
        function: &'static str,
        /// The library's version.
        version: LibraryVersion,
        /// The number of the code.
        code: i32,
    },
    /// A version of NVSHMEM whose device code was not tried with this library's kernels, which call it by a name that is no
    /// stable interface.
    #[error("NVSHMEM {found} at {} was not tested, which version {tested} was: `pip install nvidia-nvshmem-cu13=={tested}`", .path.display())]
    UntestedNvshmem {
        /// The library's version.
        found: LibraryVersion,
        /// The version that was tested.
        tested: LibraryVersion,
        /// The file.
        path: PathBuf,
    },
    /// The driver is older than what was asked of it.
    #[error("{what} needs a driver for CUDA {needed}, and this one is for {found}: update the NVIDIA driver")]
    DriverTooOld {
        /// What was asked for.
        what: &'static str,
        /// The first version with this function.
        needed: CudaVersion,
        /// The driver's version.
        found: CudaVersion,
    },
    /// An ordinal that no visible device has.
    #[error("there is no CUDA device {ordinal}: this process sees {count} (see CUDA_VISIBLE_DEVICES)")]
    NoSuchDevice {
        /// The ordinal.
        ordinal: u32,
        /// How many devices are visible.
        count: u32,
    },
    /// The device lacks an optional ability.
    #[error("cuda:{device} does not support {what}")]
    Unsupported {
        /// The device's ordinal.
        device: u32,
        /// The ability.
        what: &'static str,
    },
    /// A pointer whose memory cannot be handed to another process in the way that was asked for.
    #[error("the memory at {pointer:#x} cannot be shared by {way}: {reason}")]
    NotShareable {
        /// The pointer.
        pointer: u64,
        /// The way.
        way: &'static str,
        /// The kind of the memory, and the kinds that are accepted.
        reason: &'static str,
    },
    /// Bytes that do not encode what they should.
    #[error("{found} bytes are not {what}, which has {expected}")]
    Encoding {
        /// What they should encode.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A range that does not lie in the memory.
    #[error("{len} bytes at offset {offset} do not lie in memory of {size} bytes")]
    OutOfBounds {
        /// Where the range begins.
        offset: usize,
        /// How long it is.
        len: usize,
        /// How large the memory is.
        size: usize,
    },
    /// A kernel did not compile.
    #[error("NVRTC {version} cannot compile {program} for {architecture}:\n{log}")]
    Compile {
        /// The program's name.
        program: String,
        /// For which architecture.
        architecture: String,
        /// NVRTC's version.
        version: CudaVersion,
        /// What NVRTC says.
        log: String,
    },
    /// Relocatable code could not be linked.
    #[error("nvJitLink {version} cannot link {program} with {library} for {architecture}:\n{log}")]
    Link {
        /// The program's name.
        program: String,
        /// The file of the device library.
        library: String,
        /// For which architecture.
        architecture: String,
        /// nvJitLink's version.
        version: CudaVersion,
        /// What nvJitLink says.
        log: String,
    },
    /// Bytes that are no machine code.
    #[error("{len} bytes are no machine code that a GPU can load: {reason}")]
    NotMachineCode {
        /// How many bytes there are.
        len: usize,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// A name with a NUL byte, which no C function can take.
    #[error("{0:?} contains a NUL byte")]
    Nul(String),
    /// A launch with another number of arguments than the kernel has parameters.
    #[error("kernel {kernel} has {expected} parameters and was given {given} arguments")]
    ArgumentCount {
        /// The kernel.
        kernel: String,
        /// How many parameters it has.
        expected: usize,
        /// How many arguments were given.
        given: usize,
    },
    /// A launch with an argument of another size than the kernel's parameter.
    #[error("parameter {index} of kernel {kernel} has {expected} bytes and was given {given}")]
    ArgumentSize {
        /// The kernel.
        kernel: String,
        /// Which parameter, from 0.
        index: usize,
        /// The parameter's size in bytes.
        expected: usize,
        /// The argument's size in bytes.
        given: usize,
    },
    /// Work that was not done in time.
    #[error("{what} was not done after {waited:?}")]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
}

impl CudaError {
    /// The driver's number for the failure, if the driver or NVRTC reported it.
    pub fn code(&self) -> Option<u32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the legacy default stream was used while a stream that waits for it is being captured.
    pub fn is_implicit_capture(&self) -> bool {
        self.code() == Some(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32)
    }

    /// Whether there was not enough device memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.code() == Some(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32)
    }
}
