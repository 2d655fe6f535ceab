//! What a machine has.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use antiphon_device::{
    cuda::{Context, CudaError, Device, Driver, Nccl, NvJitLink, Nvrtc, Nvshmem},
    library::LibraryError,
};
use antiphon_sass::Disassembler;

use crate::{Need, need};

/// Codes of `cuInit` where there is no GPU, or a libcuda that is only there to link with.
const NO_DEVICE: u32 = 100;
const STUB_LIBRARY: u32 = 34;

/// The GPUs' driver, if there are at least `needed` GPUs.
///
/// # Panics
/// If the driver is there and does not work: no test may pass because a machine is broken.
pub fn gpus(needed: usize) -> Option<&'static Driver> {
    let driver = whole(Driver::load());
    need(
        Need::Gpus(needed),
        driver.and_then(|driver| {
            let count =
                driver.device_count().unwrap_or_else(|error| panic!("the CUDA driver is broken: {error}"))
                    as usize;
            if count < needed { Err(format!("{count} found")) } else { Ok(driver) }
        }),
    )
}

/// The GPUs' driver, if there are enough GPUs for as many ranks, of which [`ranks_per_gpu`] may share one.
pub fn gpus_for(world_size: usize) -> Option<&'static Driver> {
    gpus(world_size.div_ceil(ranks_per_gpu()))
}

/// How many ranks may share a GPU in tests whose ranks are threads: `ANTIPHON_TEST_RANKS_PER_GPU`, or 1. The GPU has room for the blocks of all
/// of them. They share a context, in which making and freeing memory or loading kernels waits for all that is under way: so they meet between that
/// and calls.
pub fn ranks_per_gpu() -> usize {
    std::env::var("ANTIPHON_TEST_RANKS_PER_GPU").map_or(1, |ranks| ranks.parse().expect("a number from 1"))
}

/// The device of a rank. As many ranks as there are GPUs have one each.
///
/// # Errors
/// [`CudaError`] of a driver that is broken.
pub fn device_of(driver: &'static Driver, rank: usize) -> Result<Device, CudaError> {
    driver.device(rank as u32 % driver.device_count()?)
}

/// The contexts of two GPUs that reach each other's memory.
pub fn link() -> Option<[Context; 2]> {
    let driver = gpus(2)?;
    let contexts = [0, 1].map(|ordinal| driver.device(ordinal).and_then(Context::primary).unwrap());
    let access = contexts[0].device().link_to(contexts[1].device()).unwrap().access;
    need(Need::Link, if access { Ok(contexts) } else { Err("peer access is not supported") })
}

/// Whether the GPUs are those of `antiphon-emulator`, where blocks are threads and speed says nothing.
pub fn is_emulated() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let properties = Driver::load().and_then(|driver| driver.device(0)?.properties());
        properties.is_ok_and(|properties| properties.name == "Emulated GPU")
    })
}

/// A size for GPUs, and the smaller one for the emulator.
pub fn sized<T>(real: T, emulated: T) -> T {
    if is_emulated() { emulated } else { real }
}

/// NVRTC, from wherever it is found, or from the workspace's virtual environment.
pub fn nvrtc() -> Option<&'static Nvrtc> {
    static PACKAGED: OnceLock<Option<Nvrtc>> = OnceLock::new();
    need(
        Need::Nvrtc,
        whole(Nvrtc::load()).or_else(|error| packaged(&PACKAGED, "cu13", Nvrtc::open).ok_or(error)),
    )
}

/// nvJitLink, found as [`nvrtc`].
pub fn nvjitlink() -> Option<&'static NvJitLink> {
    static PACKAGED: OnceLock<Option<NvJitLink>> = OnceLock::new();
    let packaged = |error| packaged(&PACKAGED, "cu13", NvJitLink::open).ok_or(error);
    need(Need::NvJitLink, whole(NvJitLink::load()).or_else(packaged))
}

/// NVSHMEM, found as [`nvrtc`].
pub fn nvshmem() -> Option<&'static Nvshmem> {
    static PACKAGED: OnceLock<Option<Nvshmem>> = OnceLock::new();
    let packaged = |error| packaged(&PACKAGED, "nvshmem", Nvshmem::open).ok_or(error);
    need(Need::Nvshmem, whole(Nvshmem::load()).or_else(packaged))
}

/// A library of a package of NVIDIA's in the workspace's virtual environment.
fn packaged<T, E>(
    opened: &'static OnceLock<Option<T>>,
    package: &str,
    open: impl FnOnce(&Path) -> Result<T, E>,
) -> Option<&'static T> {
    let open = || open(&packages()?.join("nvidia").join(package).join("lib")).ok();
    opened.get_or_init(open).as_ref()
}

/// The disassembler of kernels, which the emulator compiles for the processor.
pub fn disassembler() -> Option<Disassembler> {
    let found = Disassembler::find().map_err(|error| error.to_string());
    need(Need::Nvdisasm, if is_emulated() { Err("kernels are emulated".to_owned()) } else { found })
}

/// NCCL.
pub fn nccl() -> Option<&'static Nccl> {
    need(Need::Nccl, whole(Nccl::load()))
}

/// The right to become another user, which only root has.
pub fn root() -> Option<()> {
    // A process's folder belongs to its effective user, for whom the standard library has no call.
    let found = match fs::metadata("/proc/self").map(|process| process.uid()) {
        Ok(0) => Ok(()),
        Ok(user) => Err(format!("the user is {user}")),
        Err(error) => Err(error.to_string()),
    };
    need(Need::Root, found)
}

/// A program that says its version.
pub fn program(name: &'static str) -> Option<()> {
    let said = Command::new(name).arg("--version").stdin(Stdio::null()).output();
    let found = match said {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{name} --version: {}", output.status)),
        Err(error) => Err(error.to_string()),
    };
    need(Need::Program(name), found)
}

/// The workspace's folder: that of the checkout, or what holds the same files for the tests of a bundle.
///
/// `scripts/emulated.py` sets the variable as Cargo does, for programs that were built in another place.
pub fn workspace() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).join("../..")
}

/// The packages of the workspace's virtual environment, if it is there.
pub fn packages() -> Option<PathBuf> {
    let lib = workspace().join(".venv/lib");
    let python = std::fs::read_dir(lib).ok()?.flatten().map(|entry| entry.path().join("site-packages"));
    python.into_iter().find(|path| path.is_dir())
}

/// A library that is not there is an answer; one that is there and does not work is a defect.
fn whole<T>(loaded: Result<T, CudaError>) -> Result<T, String> {
    loaded.map_err(
        |error| if is_absent(&error) { error.to_string() } else { panic!("a library is broken: {error}") },
    )
}

fn is_absent(error: &CudaError) -> bool {
    match error {
        CudaError::Library(LibraryError::Missing { .. }) => true,
        CudaError::Call { function: "cuInit", code, .. } => [NO_DEVICE, STUB_LIBRARY].contains(code),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init_fails_with(code: u32) -> CudaError {
        CudaError::Call { function: "cuInit", code, name: "CUDA_ERROR_UNKNOWN", text: "unknown" }
    }

    #[test]
    fn a_machine_without_gpus_has_no_broken_driver() {
        assert!(is_absent(&init_fails_with(NO_DEVICE)));
        assert!(is_absent(&init_fails_with(STUB_LIBRARY)));
    }

    #[test]
    #[should_panic = "a library is broken: cuInit failed: CUDA_ERROR_UNKNOWN (999)"]
    fn a_broken_driver_fails_the_test() {
        let _ = whole::<()>(Err(init_fails_with(999)));
    }
}
