//! CUDA, as far as the machine supports it. A test that needs a GPU, NVRTC or a disassembler says that it is skipped where
//! there is none. The binary contains everything that it needs, so it can be copied to a machine with a GPU:
//!
//! ```sh
//! cargo test --release -p antiphon-device --test cuda --no-run
//! ./cuda-0123456789abcdef --nocapture --test-threads 1
//! ```
#![cfg(not(loom))]

mod compile;
mod conversions;
mod device;
mod formats;
mod launch;
mod machine_code;
mod memory;
mod nccl;
mod reductions;
mod sharing;
mod survey;
mod waiting;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use antiphon_device::cuda::{Context, Driver, Function, KernelCache, Module, Nvrtc, Program};

/// Says why a test does not run here.
fn skip<T>(what: &str, why: impl std::fmt::Display) -> Option<T> {
    eprintln!("skipped: no {what}: {why}");
    None
}

/// The first device's context.
fn gpu() -> Option<Context> {
    let context = Driver::load().and_then(|driver| driver.device(0)).and_then(Context::primary);
    context.map_or_else(|error| skip("CUDA driver", error), Some)
}

/// The contexts of two devices that reach each other.
fn two_gpus() -> Option<(Context, Context)> {
    let first = gpu()?;
    let second = match first.device().driver().device(1).and_then(Context::primary) {
        Ok(second) => second,
        Err(error) => return skip("second GPU", error),
    };
    match first.device().link_to(second.device()).unwrap().access {
        true => Some((first, second)),
        false => skip("link between the GPUs", "peer access is not supported"),
    }
}

/// The packages of the workspace's virtual environment, if it is there.
fn packages() -> Option<PathBuf> {
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let python = std::fs::read_dir(lib).ok()?.flatten().map(|entry| entry.path().join("site-packages"));
    python.into_iter().find(|path| path.is_dir())
}

/// NVRTC, from wherever it is found, or from the virtual environment.
fn nvrtc() -> Option<&'static Nvrtc> {
    static NVRTC: OnceLock<Option<Nvrtc>> = OnceLock::new();
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) => {
            let folder = packages().map(|packages| packages.join("nvidia/cu13/lib"));
            let found = NVRTC.get_or_init(|| Nvrtc::open(&folder?).ok()).as_ref();
            if found.is_none() {
                return skip("NVRTC", error);
            }
            found
        }
    }
}

/// A kernel of one of the sources in `kernels/`, loaded for the context's device.
fn kernel(context: &Context, name: &str, source: &str, kernel: &str) -> Option<Function> {
    load(context, Program::new(name, source, context.device().architecture().unwrap()), kernel)
}

/// A kernel of a program, loaded.
fn load(context: &Context, program: Program, kernel: &str) -> Option<Function> {
    let folder = std::env::temp_dir().join("antiphon-test-kernels");
    let cubin = KernelCache::at(folder).compile(nvrtc()?, &program).unwrap();
    Some(Module::load(context, &cubin.bytes).unwrap().function(kernel).unwrap())
}
