//! Times the collectives on the GPUs of this machine: `cuda_collectives [RANKS]`, on bf16 tensors. `antiphon bench --device
//! cuda` has NCCL beside it.

mod timing;

use antiphon_collectives::{
    CollectiveError, ReduceOp, StreamCollectives,
    cuda::{Algorithm, AllReduceOptions, CudaCollectives},
};
use antiphon_device::cuda::{Context, DeviceMemory, Driver, Stream};
use antiphon_fabric::{Communicator, LocalWorld, RegisteredMemory};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use timing::{Error, REPLAYS};

const SIZES: [usize; 15] = [
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
    16_777_216,
    29_360_128,
    67_108_864,
    268_435_456,
];

#[derive(Debug, Clone, Copy)]
enum What {
    AllReduce(Algorithm),
    Registered(Algorithm),
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
}

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let ranks =
        std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(driver.device_count()? as usize);
    println!("bf16, {ranks} GPUs; µs per call in a graph, median of {REPLAYS} replays, slowest rank");
    for outcome in LocalWorld::run(ranks, |comm| rank_main(&comm, driver)) {
        outcome?;
    }
    Ok(())
}

fn rank_main(comm: &Communicator, driver: &'static Driver) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32)?)?;
    let collectives = CudaCollectives::new(comm, &context)?;
    collectives.prepare(DType::BF16, ReduceOp::Sum)?;
    let mut columns = Vec::from(Algorithm::ALL.map(What::AllReduce));
    columns.extend(Algorithm::ALL.map(What::Registered));
    if std::env::var("MOST").is_err() {
        columns.extend([What::AllGather, What::ReduceScatter, What::AllToAll, What::Broadcast]);
    }
    if comm.rank() == 0 {
        print!("{:>10}", "bytes");
        columns.iter().for_each(|what| print!(" {:>18}", format!("{what:?}")));
        println!();
    }
    let most = std::env::var("MOST").ok().and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
    for bytes in SIZES.into_iter().filter(|&b| b <= most) {
        let mut row = Vec::new();
        for &what in &columns {
            let skip = format!("{what:?}").contains("OneShot") && bytes > 8 << 20;
            row.push(if skip { f64::NAN } else { Timing::new(comm, &collectives, bytes)?.time(what)? });
        }
        if comm.rank() == 0 {
            print!("{bytes:>10}");
            row.iter().for_each(|time| print!(" {time:>18.2}"));
            println!();
        }
    }
    Ok(())
}

struct Timing<'a> {
    comm: &'a Communicator,
    collectives: &'a CudaCollectives,
    stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
    bytes: usize,
}

impl<'a> Timing<'a> {
    fn new(comm: &'a Communicator, collectives: &'a CudaCollectives, bytes: usize) -> Result<Self, Error> {
        let context = collectives.context();
        let allocate = || DeviceMemory::allocate(context, bytes);
        let (stream, input, output) = (context.stream()?, allocate()?, allocate()?);
        let pattern: Vec<u8> = (0..bytes).map(|i| (i % 61) as u8).collect();
        input.write(&stream, 0, &pattern)?;
        for memory in [&input, &output] {
            let memory = RegisteredMemory::new(comm, context, memory.pointer(), bytes as u64)?;
            collectives.register(memory)?;
        }
        Ok(Self { comm, collectives, stream, input, output, bytes })
    }

    fn call(&self, what: What, bytes: usize) -> Result<(), CollectiveError> {
        let device = Device::Cuda(self.collectives.context().device().ordinal());
        let block = bytes / self.comm.world_size();
        let (from, to) = match what {
            What::AllReduce(_) | What::Registered(_) | What::AllToAll | What::Broadcast => (bytes, bytes),
            What::AllGather => (block, block * self.comm.world_size()),
            What::ReduceScatter => (block * self.comm.world_size(), block),
        };
        let at = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory lives until the stream is done, in `time`.
        unsafe {
            let x = TensorView::from_raw_parts(at(&self.input), DType::BF16, &[from / 2], None, device)
                .expect("plain");
            let mut y = TensorViewMut::from_raw_parts(at(&self.output), DType::BF16, &[to / 2], None, device)
                .expect("plain");
            let (collectives, stream) = (self.collectives, self.stream.borrow());
            match what {
                What::AllReduce(algorithm) => {
                    collectives.all_reduce_with(x, &mut y, ReduceOp::Sum, algorithm, stream)
                }
                What::Registered(algorithm) => {
                    let options = AllReduceOptions::registered(algorithm);
                    collectives.all_reduce_with(x, &mut y, ReduceOp::Sum, options, stream)
                }
                What::AllGather => collectives.all_gather(x, &mut y, stream),
                What::ReduceScatter => collectives.reduce_scatter(x, &mut y, ReduceOp::Sum, stream),
                What::AllToAll => collectives.all_to_all(x, &mut y, stream),
                What::Broadcast => collectives.broadcast(&mut y, 0, stream),
            }
        }
    }

    fn time(&self, what: What) -> Result<f64, Error> {
        let calls = match self.bytes {
            0..1_000_000 => 100,
            1_000_000..10_000_000 => 45,
            _ => 15,
        };
        let time =
            timing::time(self.comm, self.collectives, &self.stream, calls, || self.call(what, self.bytes))?;
        for memory in [&self.input, &self.output] {
            self.collectives.unregister(self.comm, memory.pointer())?;
        }
        Ok(time)
    }
}
