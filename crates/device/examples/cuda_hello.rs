//! The whole way, from the driver to a kernel's result: `cargo run -p antiphon-device --example cuda_hello`.
//!
//! If a library or the driver is missing, it prints which one and how to install it.

use antiphon_device::cuda::{
    Context, CudaError, Device, DeviceMemory, Driver, KernelCache, LaunchConfig, Module, Nvrtc, Program,
};

const SOURCE: &str = r#"
extern "C" __global__ void hello(u32* to) {
    work_range mine = work_of_block(64);
    for (u64 i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) to[i] = blockIdx.x;
}
"#;

fn main() {
    if let Err(error) = Driver::load().and_then(Driver::devices).and_then(|devices| hello(&devices)) {
        println!("no greeting from a GPU: {error}");
    }
}

fn hello(devices: &[Device]) -> Result<(), CudaError> {
    for device in devices {
        let properties = device.properties()?;
        println!(
            "{device}: {} ({}), {} multiprocessors",
            properties.name, properties.uuid, properties.multiprocessors
        );

        let context = Context::primary(*device)?;
        let program = Program::new("hello.cu", SOURCE, device.architecture()?);
        let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
        let hello = Module::load(&context, &cubin.bytes)?.function("hello")?;
        let (stream, memory) = (context.stream()?, DeviceMemory::allocate(&context, 4 * 64)?);
        let to = memory.pointer();
        // SAFETY: the kernel takes one pointer, and writes 64 words to it.
        unsafe { hello.launch(&stream, &LaunchConfig::new(4, 32), &[(&to).into()]) }?;
        let mut bytes = [0; 4 * 64];
        memory.read(&stream, 0, &mut bytes)?;
        let blocks: Vec<u8> = bytes.iter().step_by(4).copied().collect();
        println!("  {} by {:?}: blocks {blocks:?}", program.name(), cubin.origin);
    }
    Ok(())
}
