//! CUDA, as far as the machine supports it. A test that needs a GPU, NVRTC or a disassembler is recorded as skipped where there
//! is none (`antiphon-testing`). The binary contains everything that it needs, so it can be copied to a machine with a GPU:
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
mod linking;
mod machine_code;
mod memory;
mod nccl;
mod reductions;
mod sharing;
mod survey;
mod waiting;

use antiphon_device::cuda::{Context, Function, KernelCache, Module, Program};
use antiphon_testing::{gpus, nvrtc};

/// The first device's context.
fn gpu() -> Option<Context> {
    Some(Context::primary(gpus(1)?.device(0).unwrap()).unwrap())
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
