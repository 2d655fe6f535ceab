//! An inference engine with a scheduler thread and a model thread, which share a rank's GPU: whichever needs it first opens it, and the
//! model thread captures its step in a graph.
//!
//! Ranks as threads: `cargo run --release --example session`
//! Ranks as processes: `antiphon run -n 2 -- target/release/examples/session`

use std::{
    sync::{Arc, mpsc},
    thread,
};

use antiphon::{
    device::cuda::{Context, DeviceMemory, Driver, Graph},
    operation::{Call, Operation},
    prelude::*,
    session::{FailureAction, Session},
};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const STEPS: usize = 5;
const HIDDEN: usize = 1 << 12;
const KERNELS: [(DType, ReduceOp); 1] = [(DType::F32, ReduceOp::Sum)];

fn main() -> Outcome {
    let gpus = Driver::load().and_then(Driver::device_count).unwrap_or(0) as usize;
    if gpus == 0 {
        println!("skipped: there is no GPU");
        return Ok(());
    }
    if std::env::var_os("RANK").is_some() {
        return rank(Communicator::from_env()?);
    }
    LocalWorld::run(gpus.min(2), rank).into_iter().collect()
}

fn rank(comm: Communicator) -> Outcome {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let session = Session::new(comm);
    let tell = move |error: &FabricError| eprintln!("rank {rank} drains its requests: {error}");
    session.on_failure(FailureAction::Call(Arc::new(tell)));
    let (batches, steps) = mpsc::channel();
    let sum = thread::scope(|scope| {
        let scheduler = scope.spawn(|| schedule(&session, rank, batches));
        let sum = model(&session, rank, &steps);
        drop(steps);
        scheduler.join().expect("the scheduler does not panic")?;
        sum
    })?;
    session.close();
    println!("rank {rank} of {world_size}: after {STEPS} steps each activation is {sum}");
    Ok(())
}

/// Agrees with the other ranks, on the host, about the size of each batch.
fn schedule(session: &Session, rank: usize, batches: mpsc::Sender<usize>) -> Outcome {
    session.prepare(rank as u32, &KERNELS, None)?; // the model thread may be faster, or not
    let queue = session.queue()?;
    for step in 0..STEPS {
        let mut batch = [(8 + rank + step) as i32];
        queue.run(|comm| comm.all_reduce_in_place(&mut batch, ReduceOp::Min))?;
        if batches.send(batch[0] as usize).is_err() {
            break; // the model thread has failed
        }
    }
    Ok(())
}

/// Replays the graph of a step for each batch; returns the activations.
fn model(session: &Session, rank: usize, steps: &mpsc::Receiver<usize>) -> Outcome<f32> {
    let device = rank as u32;
    // Without this the capture would have the first call, and be refused.
    session.prepare(device, &KERNELS, None)?;
    let context = Context::primary(Driver::load()?.device(device)?)?;
    let stream = context.stream()?;
    let mut memory = DeviceMemory::allocate(&context, 4 * HIDDEN)?;
    memory.write(&stream, 0, &1f32.to_ne_bytes().repeat(HIDDEN))?;
    let graph = Graph::capture(&stream, |stream| {
        let activations = memory.view_mut(DType::F32, &[HIDDEN]).expect("as large as the memory");
        // SAFETY: no other work uses the memory, which lives until the stream has finished.
        unsafe { session.call(stream, &Call::new(Operation::AllReduce), activations) }
    })?
    .instantiate()?;
    for _batch in steps {
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }?;
    }
    stream.borrow().synchronize()?;
    session.check()?;
    let mut bytes = vec![0; 4 * HIDDEN];
    memory.read(&stream, 0, &mut bytes)?;
    let sums: Vec<f32> =
        bytes.chunks_exact(4).map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect();
    assert!(sums.iter().all(|&sum| sum == sums[0]), "they are equal");
    Ok(sums[0])
}
