//! The libraries of CUDA, all of which may be missing.

use std::ffi::{CStr, c_char};

use crate::library::Wanted;

/// A text of a library, or nothing for a null pointer.
///
/// # Safety
/// The pointer is null, or to a text that ends with NUL and is never freed.
pub(super) unsafe fn text_of(pointer: *const c_char) -> Option<&'static CStr> {
    // SAFETY: passed on.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) })
}

/// Where CUDA toolkits are, and the folders of their libraries.
const TOOLKITS: &[&str] = &["$CUDA_HOME", "$CUDA_PATH", "/usr/local/cuda"];
const TOOLKIT_FOLDERS: &[&str] = &["lib64", "targets/x86_64-linux/lib"];

pub(super) const DRIVER: Wanted = Wanted {
    what: "CUDA driver (libcuda)",
    variable: None,
    names: &["libcuda.so.1"],
    packages: &[],
    roots: &[],
    folders: &[],
    companions: None,
    install: "install the NVIDIA driver, or start the container with access to its GPUs",
};

pub(super) const NVML: Wanted = Wanted {
    what: "NVML (libnvidia-ml)",
    variable: None,
    names: &["libnvidia-ml.so.1"],
    packages: &[],
    roots: &[],
    folders: &[],
    companions: None,
    install: "it comes with the NVIDIA driver: let the container have the driver's `utility` capability",
};

pub(super) const NVRTC: Wanted = Wanted {
    what: "NVRTC (libnvrtc)",
    variable: Some("ANTIPHON_NVRTC"),
    names: &["libnvrtc.so.13", "libnvrtc.so.12"],
    packages: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    roots: TOOLKITS,
    folders: TOOLKIT_FOLDERS,
    companions: Some("libnvrtc-builtins.so."),
    install: "`pip install nvidia-cuda-nvrtc`, or install the CUDA toolkit, or set ANTIPHON_NVRTC to libnvrtc.so.13",
};

pub(super) const NCCL: Wanted = Wanted {
    what: "NCCL (libnccl)",
    variable: Some("ANTIPHON_NCCL"),
    names: &["libnccl.so.2"],
    packages: &["nvidia/nccl/lib"],
    roots: TOOLKITS,
    folders: TOOLKIT_FOLDERS,
    companions: None,
    install: "`pip install nvidia-nccl-cu13`, or install libnccl2, or set ANTIPHON_NCCL to libnccl.so.2",
};

pub(super) const NVJITLINK: Wanted = Wanted {
    what: "nvJitLink (libnvJitLink)",
    variable: Some("ANTIPHON_NVJITLINK"),
    names: &["libnvJitLink.so.13"],
    packages: &["nvidia/cu13/lib"],
    roots: TOOLKITS,
    folders: TOOLKIT_FOLDERS,
    companions: None,
    install: "`pip install nvidia-nvjitlink`, or install the CUDA toolkit, or set ANTIPHON_NVJITLINK to libnvJitLink.so.13",
};

pub(super) const NVSHMEM: Wanted = Wanted {
    what: "NVSHMEM (libnvshmem_host)",
    variable: Some("ANTIPHON_NVSHMEM"),
    names: &["libnvshmem_host.so.3"],
    packages: &["nvidia/nvshmem/lib"],
    roots: &["$NVSHMEM_HOME", "/usr/local/nvshmem"],
    folders: &["lib"],
    // Its bootstrap and its transports, which it opens by name.
    companions: Some("nvshmem_"),
    install: "`pip install nvidia-nvshmem-cu13`, or set ANTIPHON_NVSHMEM to libnvshmem_host.so.3",
};
