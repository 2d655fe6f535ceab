//! An algorithm of the library as a plan: proved, then executed between GPUs if there is one for each rank, else on the host.
//!
//! Ranks as threads: `cargo run --release --example plan`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/plan`

use antiphon::{
    device::cuda::{Context, CudaError, DeviceMemory, Driver},
    executor::{
        LoadedPlan, Options,
        cuda::{CudaOptions, CudaPlan},
    },
    language::library::{Setting, find},
    plan::verify::{Memory, Options as Proof, VerifiedPlan},
    prelude::*,
};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Outcome {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Outcome {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let algorithm = find("two-shot-all-reduce").ok_or("the library lacks it")?;
    let plan = algorithm.plan(&Setting::new(world_size as u32))?;
    // What is proved for the memory of GPUs may run on a host, too.
    let options = Proof { memory: Memory::Device, ..Proof::default() };
    let proved = VerifiedPlan::new(plan, &options).map_err(|report| report.to_string())?;

    let mine: Vec<f32> = (0..world_size * 4096).map(|i| (rank * 1000 + i % 10) as f32).collect();
    let gpus = Driver::load().and_then(Driver::device_count).unwrap_or(0) as usize;
    let (place, sum) = match gpus >= world_size {
        true => ("its GPU", on_gpu(&comm, &proved, &mine)?),
        false => ("the host", on_host(&comm, &proved, &mine)?),
    };

    let ranks = (world_size * (world_size - 1) / 2 * 1000) as f32;
    assert!(sum.iter().enumerate().all(|(i, &x)| x == ranks + (world_size * (i % 10)) as f32));
    println!("rank {rank} of {world_size}: sum[7] = {} on {place}", sum[7]);
    Ok(())
}

fn on_host(comm: &Communicator, plan: &VerifiedPlan, mine: &[f32]) -> Outcome<Vec<f32>> {
    let mut plan = LoadedPlan::load(comm, plan, Options::default())?;
    let mut sum = vec![0.0; mine.len()];
    plan.execute(comm, mine, &mut sum[..])?;
    plan.free(comm)?;
    Ok(sum)
}

fn on_gpu(comm: &Communicator, plan: &VerifiedPlan, mine: &[f32]) -> Outcome<Vec<f32>> {
    let gpu = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let stream = gpu.stream()?;
    let mut plan = CudaPlan::load(comm, &gpu, plan, CudaOptions::default())?;
    // The last step that allocates or waits for the other ranks' hosts: what follows could be captured in a graph.
    plan.prepare(comm, DType::F32, size_of_val(mine))?;

    let allocate = || -> Result<DeviceMemory, CudaError> { DeviceMemory::allocate(&gpu, size_of_val(mine)) };
    let [input, output] = [allocate()?, allocate()?];
    input.write(&stream, 0, TensorView::from(mine).as_bytes()?)?;
    let (shape, device) = ([mine.len()], Device::Cuda(gpu.device().ordinal()));
    let address = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
    // SAFETY: the memory has as many elements, and nothing else uses it until the stream is waited for.
    unsafe {
        let input = TensorView::from_raw_parts(address(&input), DType::F32, &shape, None, device)?;
        let output = TensorViewMut::from_raw_parts(address(&output), DType::F32, &shape, None, device)?;
        plan.execute(input, output, &stream)?;
    }
    let mut sum = vec![0.0f32; mine.len()];
    output.read(stream.borrow(), 0, TensorViewMut::from(&mut sum[..]).as_mut_bytes()?)?;
    plan.check()?; // the kernel has ended: whether it did what it should
    plan.free(comm)?;
    Ok(sum)
}
