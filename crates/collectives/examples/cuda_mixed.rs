//! Times mixed collectives on the GPUs of this machine: `cuda_mixed [RANKS [TP]]`, on bf16 rows of 7168, beside two collectives of
//! ours in the groups. By default all GPUs, in groups of two.

mod timing;

use antiphon_collectives::{
    CollectiveError, ReduceOp, StreamCollectives,
    cuda::CudaCollectives,
    mixed::{CudaMixedHandler, MixedCall, MixedLayout, MixedMode, MixedOp},
};
use antiphon_device::cuda::{Context, DeviceMemory, Driver, Stream};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use timing::{Error, REPLAYS};

const HIDDEN: usize = 7168;
const ROWS: [usize; 7] = [1, 4, 16, 64, 256, 512, 2048];

#[derive(Debug, Clone, Copy)]
enum How {
    Fused(MixedMode),
    /// In the mode that the table names.
    Chosen,
    TwoCalls,
}

const HOWS: [How; 4] =
    [How::Fused(MixedMode::Waits), How::Fused(MixedMode::Bytes1), How::Chosen, How::TwoCalls];

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let number = |index: usize| std::env::args().nth(index).and_then(|n| n.parse().ok());
    let ranks = number(1).unwrap_or(driver.device_count()? as usize);
    let tp = number(2).unwrap_or(2);
    println!(
        "bf16, {ranks} GPUs in groups of {tp}, rows of {HIDDEN}; µs per call in a graph, median of {REPLAYS} replays, slowest rank"
    );
    for outcome in LocalWorld::run(ranks, |comm| rank_main(&comm, driver, tp)) {
        outcome?;
    }
    Ok(())
}

/// What a rank measures with.
struct Bench<'a> {
    comm: &'a Communicator,
    collectives: CudaCollectives,
    mixed: CudaMixedHandler,
    /// Those of the rank's groups, for two calls.
    tp: CudaCollectives,
    dp: CudaCollectives,
    stream: Stream,
    row: DeviceMemory,
    block: DeviceMemory,
    /// Between two calls.
    middle: DeviceMemory,
}

fn rank_main(comm: &Communicator, driver: &'static Driver, tp: usize) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32 % driver.device_count()?)?)?;
    let layout = MixedLayout::builder(comm.world_size(), comm.rank()).local_tp(tp).build()?;
    if !layout.use_mixed() {
        return Err(format!("{} ranks in groups of {tp} are not mixed", comm.world_size()).into());
    }
    let group = |color: usize| comm.split(Some(color as u64), 0).map(|group| group.expect("it has a colour"));
    let (tp_comm, dp_comm) = (group(layout.dp_rank())?, group(layout.tp_rank())?);
    let collectives = CudaCollectives::new(comm, &context)?;
    let mixed = CudaMixedHandler::new(comm, &collectives, layout)?;
    mixed.prepare(&collectives, DType::BF16)?;
    let (tp, dp) = (CudaCollectives::new(&tp_comm, &context)?, CudaCollectives::new(&dp_comm, &context)?);
    [&tp, &dp].into_iter().try_for_each(|group| group.prepare(DType::BF16, ReduceOp::Sum))?;
    let most = ROWS[ROWS.len() - 1] * HIDDEN * 2;
    let allocate = |bytes: usize| -> Result<_, Error> {
        let memory = DeviceMemory::allocate(&context, bytes)?;
        memory.write(&context.stream()?, 0, &vec![0; bytes])?;
        Ok(memory)
    };
    let (row, block, middle) = (allocate(most * layout.dp_size())?, allocate(most)?, allocate(most)?);
    let bench = Bench { comm, stream: context.stream()?, collectives, mixed, tp, dp, row, block, middle };
    for op in [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce] {
        if comm.rank() == 0 {
            print!("{op:?}\n{:>6} {:>10}", "rows", "bytes");
            HOWS.iter().for_each(|how| print!(" {:>14}", format!("{how:?}")));
            println!();
        }
        for rows in ROWS {
            let times: Vec<f64> =
                HOWS.into_iter().map(|how| bench.time(op, how, rows)).collect::<Result<_, _>>()?;
            if comm.rank() == 0 {
                print!("{rows:>6} {:>10}", rows * HIDDEN * 2);
                times.iter().for_each(|time| print!(" {time:>14.2}"));
                println!();
            }
        }
    }
    Ok(())
}

impl Bench<'_> {
    fn time(&self, op: MixedOp, how: How, rows: usize) -> Result<f64, Error> {
        let calls = if rows < 64 { 100 } else { 40 };
        timing::time(self.comm, &self.collectives, &self.stream, calls, || self.call(op, how, rows))
    }

    fn call(&self, op: MixedOp, how: How, rows: usize) -> Result<(), CollectiveError> {
        let device = Device::Cuda(self.collectives.context().device().ordinal());
        let count = rows * HIDDEN;
        let counts = [count, count * self.mixed.layout().dp_size()];
        let at = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory lives as long as `self`, whose stream `time` waits for.
        let read = |memory, count| unsafe {
            TensorView::from_raw_parts(at(memory), DType::BF16, &[count], None, device).expect("plain")
        };
        // SAFETY: as above.
        let write = |memory, count| unsafe {
            TensorViewMut::from_raw_parts(at(memory), DType::BF16, &[count], None, device).expect("plain")
        };
        let gathers = op == MixedOp::AllReduceAllGather;
        let (from, to) = if gathers { (&self.block, &self.row) } else { (&self.row, &self.block) };
        let (input, mut output) =
            (read(from, counts[usize::from(!gathers)]), write(to, counts[usize::from(gathers)]));
        let stream = self.stream.borrow();
        let mode = match how {
            How::Fused(mode) => Some(mode),
            How::Chosen | How::TwoCalls => None,
        };
        // SAFETY: as above.
        unsafe {
            match how {
                How::TwoCalls if gathers => {
                    let mut sum = write(&self.middle, count);
                    self.tp.all_reduce(input, &mut sum, ReduceOp::Sum, stream)?;
                    self.dp.all_gather(read(&self.middle, count), &mut output, stream)
                }
                How::TwoCalls => {
                    let mut part = write(&self.middle, count);
                    self.dp.reduce_scatter(input, &mut part, ReduceOp::Sum, stream)?;
                    self.tp.all_reduce(read(&self.middle, count), &mut output, ReduceOp::Sum, stream)
                }
                _ => {
                    let call = MixedCall::from(op).mode(mode);
                    self.mixed.run(&self.collectives, call, &input, &mut output, stream)
                }
            }
        }
    }
}
