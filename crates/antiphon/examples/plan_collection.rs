//! Plans from which each call takes one: between GPUs, one for each rank, the fastest beside this library's own all-reduce; on the host
//! the first that serves the message.
//!
//! Ranks as threads: `cargo run --release --example plan_collection`
//! Ranks as processes: `antiphon run -n 4 -- target/release/examples/plan_collection`

use antiphon::{
    cuda::CudaCollectives,
    device::cuda::{Context, DeviceMemory, Driver},
    executor::{
        self, Options,
        cuda::{AlgorithmCollection, CudaOptions},
    },
    language::library::{Setting, find},
    plan::verify::{Memory, Options as Proof, VerifiedPlan},
    prelude::*,
};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A small and a large message in bytes, each a block for every rank. Packets are for the first.
fn sizes(comm: &Communicator) -> [usize; 2] {
    [1 << 10, 256 << 10].map(|block| block * comm.world_size())
}

fn main() -> Outcome {
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(4, rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Outcome {
    let [small, large] = sizes(&comm);
    let plan = |name: &str, most: u64| -> Outcome<VerifiedPlan> {
        let mut setting = Setting::new(comm.world_size() as u32);
        setting.options.max_message_size = most;
        let plan = find(name).ok_or("the library lacks it")?.plan(&setting)?;
        let proof = Proof { memory: Memory::Device, ..Proof::default() };
        Ok(VerifiedPlan::new(plan, &proof).map_err(|report| report.to_string())?)
    };
    let plans = [plan("packet-all-reduce", small as u64)?, plan("push-two-shot-all-reduce", u64::MAX)?];
    let gpus = Driver::load().and_then(Driver::device_count).unwrap_or(0) as usize;
    let chosen = if gpus >= comm.world_size() { on_gpu(&comm, &plans)? } else { on_host(&comm, &plans)? };
    let (rank, world_size) = (comm.rank(), comm.world_size());
    println!("rank {rank} of {world_size}: {small} bytes by {}, {large} by {}", chosen[0], chosen[1]);
    Ok(())
}

fn on_host(comm: &Communicator, plans: &[VerifiedPlan]) -> Outcome<Vec<String>> {
    let mut collection = executor::AlgorithmCollection::new();
    for plan in plans {
        collection.add(comm, plan, &[], Options::default())?;
    }
    let mut chosen = Vec::new();
    for bytes in sizes(comm) {
        let mine = vec![1.0 + comm.rank() as f32; bytes / 4];
        let mut sum = vec![0f32; bytes / 4];
        collection.execute(comm, "allreduce", &mine[..], &mut sum[..])?;
        check(comm, &sum);
        let plan = collection.select(comm, "allreduce", [bytes; 2], DType::F32)?;
        chosen.push(format!("{:?}", plan.plan().name.as_deref().unwrap_or_default()));
    }
    collection.free(comm)?;
    Ok(chosen)
}

fn on_gpu(comm: &Communicator, plans: &[VerifiedPlan]) -> Outcome<Vec<String>> {
    let gpu = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let (stream, collectives) = (gpu.stream()?, CudaCollectives::new(comm, &gpu)?);
    let mut collection = AlgorithmCollection::new(comm);
    collection.add_built_in(&collectives, ReduceOp::Sum)?;
    for plan in plans {
        collection.add(comm, &gpu, plan, &[], CudaOptions::default())?;
    }
    let [small, large] = sizes(comm);
    collection.tune(comm, &collectives, "allreduce", DType::F32, small..=large)?;
    let mut chosen = Vec::new();
    for bytes in sizes(comm) {
        let mine = vec![1.0 + comm.rank() as f32; bytes / 4];
        let (input, mut output) =
            (DeviceMemory::allocate(&gpu, bytes)?, DeviceMemory::allocate(&gpu, bytes)?);
        input.write(&stream, 0, TensorView::from(&mine[..]).as_bytes()?)?;
        collection.prepare(comm, &collectives, "allreduce", DType::F32, bytes)?;
        let (read, write) =
            (input.view(DType::F32, &[bytes / 4])?, output.view_mut(DType::F32, &[bytes / 4])?);
        // SAFETY: no other work uses the memory, which lives until `read` below has waited for the stream.
        unsafe { collection.execute(&collectives, "allreduce", read, write, &stream) }?;
        let mut sum = vec![0f32; bytes / 4];
        output.read(&stream, 0, TensorViewMut::from(&mut sum[..]).as_mut_bytes()?)?;
        check(comm, &sum);
        let explained = collection.explain("allreduce", DType::F32, bytes);
        let fastest = explained.iter().find(|each| each.why_not.is_none()).ok_or("nothing does it")?;
        chosen.push(format!("{:?} in {:?}", fastest.name, fastest.time.unwrap_or_default()));
    }
    collection.check()?;
    collectives.check()?;
    collection.free(comm)?;
    Ok(chosen)
}

fn check(comm: &Communicator, sum: &[f32]) {
    let expected = (comm.world_size() * (comm.world_size() + 1) / 2) as f32;
    assert!(sum.iter().all(|&x| x == expected));
}
