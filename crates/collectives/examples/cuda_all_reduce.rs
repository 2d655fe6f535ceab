//! Times all-reduce on the GPUs of this machine: `cuda_all_reduce [RANKS]`. Graphs of 15 to 45 calls on bf16 tensors, the
//! median of the replays, the slowest rank; the sums are checked.

use antiphon_collectives::{
    CollectiveError, ReduceOp,
    all_reduce::{Algorithm, CudaAllReduce},
};
use antiphon_device::cuda::{Context, CudaError, DeviceMemory, Driver, Event, Graph};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut, bf16};

const SIZES: [usize; 13] = [
    1 << 10,
    14_336,
    28_672,
    57_344,
    114_688,
    229_376,
    458_752,
    917_504,
    1_835_008,
    3_670_016,
    7_340_032,
    29_360_128,
    268_435_456,
];
const REPLAYS: usize = 9;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    #[error(transparent)]
    Fabric(#[from] antiphon_fabric::FabricError),
}

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let ranks =
        std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(driver.device_count()? as usize);
    println!("bf16 sum, {ranks} GPUs; µs per call in a graph, median of {REPLAYS} replays, slowest rank");
    println!("{:>10} {:>10} {:>10} {:>10}", "bytes", "chosen", "one-shot", "two-shot");
    for outcome in LocalWorld::run(ranks, |comm| rank_main(&comm, driver)) {
        outcome?;
    }
    Ok(())
}

fn rank_main(comm: &Communicator, driver: &'static Driver) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32)?)?;
    let all_reduce = CudaAllReduce::new(comm, &context)?;
    all_reduce.prepare(DType::BF16, ReduceOp::Sum)?;
    for bytes in SIZES {
        let mut row = Vec::new();
        for algorithm in [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)] {
            row.push(time(comm, &context, &all_reduce, bytes, algorithm)?);
        }
        if comm.rank() == 0 {
            println!("{bytes:>10} {:>10.2} {:>10.2} {:>10.2}", row[0], row[1], row[2]);
        }
    }
    Ok(())
}

fn time(
    comm: &Communicator,
    context: &Context,
    all_reduce: &CudaAllReduce<'_>,
    bytes: usize,
    algorithm: Option<Algorithm>,
) -> Result<f64, Error> {
    let (stream, count) = (context.stream()?, bytes / 2);
    let (input, output) = (DeviceMemory::allocate(context, bytes)?, DeviceMemory::allocate(context, bytes)?);
    let ones: Vec<bf16> = (0..count).map(|i| bf16::from_f32((i % 3) as f32)).collect();
    input.write(&stream, 0, TensorView::from(&ones).as_bytes().expect("contiguous"))?;
    let device = Device::Cuda(context.device().ordinal());
    let call = || {
        let at = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory lives until the stream is done, below.
        unsafe {
            let x =
                TensorView::from_raw_parts(at(&input), DType::BF16, &[count], None, device).expect("plain");
            let mut y = TensorViewMut::from_raw_parts(at(&output), DType::BF16, &[count], None, device)
                .expect("plain");
            all_reduce.all_reduce(&x, &mut y, ReduceOp::Sum, algorithm, stream.borrow())
        }
    };
    let calls = if bytes <= 4 << 20 { 45 } else { 15 };
    let graph = Graph::capture(&stream, |_| (0..calls).try_for_each(|_| call().map_err(Error::from)))?;
    let graph = graph.instantiate()?;
    let mut times = Vec::new();
    for _ in 0..=REPLAYS {
        let (start, end) = (Event::with_time(context)?, Event::with_time(context)?);
        comm.barrier()?;
        start.record(&stream)?;
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }?;
        end.record(&stream)?;
        stream.borrow().synchronize()?;
        times.push(end.elapsed_since(&start)?.as_secs_f64() * 1e6 / calls as f64);
    }
    let mut times = times.split_off(1); // the first is warm-up
    times.sort_by(f64::total_cmp);
    let mine = times[times.len() / 2];
    let mut result = vec![0; bytes];
    output.read(&stream, 0, &mut result)?;
    let scaled: Vec<bf16> =
        ones.iter().map(|x| bf16::from_f32(x.to_f32() * comm.world_size() as f32)).collect();
    assert_eq!(
        result,
        TensorView::from(&scaled).as_bytes().expect("contiguous"),
        "{bytes} bytes, {algorithm:?}"
    );
    Ok(comm.exchange_objects(&mine)?.into_iter().fold(0.0, f64::max))
}
