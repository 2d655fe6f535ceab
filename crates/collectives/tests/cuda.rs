//! All-reduce on GPUs against the host backend, bit by bit. Ranks are threads, one for each GPU; without a GPU for every
//! rank a test says so and skips.

use antiphon_collectives::{
    CollectiveError, Collectives, ReduceOp,
    all_reduce::{Algorithm, CudaAllReduce},
};
use antiphon_device::cuda::{Context, DeviceMemory, Driver, Graph, Stream};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, bf16, f16};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What a rank of a test has.
struct Rank<'a> {
    comm: &'a Communicator,
    context: Context,
    stream: Stream,
    all_reduce: CudaAllReduce<'a>,
}

/// Runs `body` on as many GPUs; skips where there are fewer.
fn on_gpus(world_size: usize, body: impl Fn(&Rank<'_>) -> Outcome + Sync) {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(error) => return eprintln!("skipped: no CUDA driver: {error}"),
    };
    let count = driver.device_count().unwrap() as usize;
    if count < world_size {
        return eprintln!("skipped: {count} GPUs, {world_size} needed");
    }
    let timeout = std::time::Duration::from_secs(20);
    let outcomes = LocalWorld::run_with(world_size, timeout, |comm| -> Outcome {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        let all_reduce = CudaAllReduce::new(&comm, &context)?;
        let stream = context.stream()?;
        body(&Rank { comm: &comm, context, stream, all_reduce })
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

impl Rank<'_> {
    fn upload<T: Element>(&self, values: &[T]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::allocate(&self.context, size_of_val(values).max(16))?;
        memory.write(&self.stream, 0, TensorView::from(values).as_bytes()?)?;
        Ok(memory)
    }

    fn download<T: Element>(&self, memory: &DeviceMemory, count: usize) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; count * size_of::<T>()];
        memory.read(&self.stream, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Queues an all-reduce of `count` elements from an element offset on.
    fn queue<T: Element>(
        &self,
        (from, to): (&DeviceMemory, &DeviceMemory),
        (offset, count): (usize, usize),
        op: ReduceOp,
        algorithm: Option<Algorithm>,
    ) -> Result<(), CollectiveError> {
        let device = Device::Cuda(self.comm.rank() as u32);
        let at = |memory: &DeviceMemory| (memory.pointer().0 as usize + offset * size_of::<T>()) as *mut u8;
        // SAFETY: the tests keep the memory until they have synchronised with the stream.
        unsafe {
            let input = TensorView::from_raw_parts(at(from), T::DTYPE, &[count], None, device).unwrap();
            let mut output = TensorViewMut::from_raw_parts(at(to), T::DTYPE, &[count], None, device).unwrap();
            self.all_reduce.all_reduce(&input, &mut output, op, algorithm, self.stream.borrow())
        }
    }

    /// All-reduces `values` on the GPU and on the host, and compares the bits.
    fn compare<T: Element>(&self, values: &[T], op: ReduceOp, algorithm: Option<Algorithm>) -> Outcome {
        let mut expected = values.to_vec();
        self.comm.all_reduce_in_place(&mut expected, op)?;
        let (input, output) = (self.upload(values)?, self.upload(values)?);
        self.queue::<T>((&input, &output), (0, values.len()), op, algorithm)?;
        let got = self.download::<T>(&output, values.len())?;
        let expected = TensorView::from(&expected).as_bytes()?.to_vec();
        let wrong = got.chunks(size_of::<T>()).zip(expected.chunks(size_of::<T>())).position(|(a, b)| a != b);
        match wrong {
            None => Ok(()),
            Some(at) => {
                let of = |bytes: &[u8]| bytes[at * size_of::<T>()..][..size_of::<T>()].to_vec();
                let (got, expected) = (of(&got), of(&expected));
                let what = format!("{} {op} {algorithm:?} of {}", T::DTYPE, values.len());
                Err(format!("{what}: element {at} is {got:x?}, on the host {expected:x?}").into())
            }
        }
    }
}

/// Values of every size and sign that differ between ranks.
fn values<T: Element>(rank: usize, count: usize) -> Vec<T> {
    let value = |i: usize| {
        let mixed = (i * 2_654_435_761 + rank * 40_503) % 65_521;
        (mixed as f64 - 32_760.0) / 1024.0
    };
    (0..count).map(|i| <T as Element>::from_f64(value(i))).collect()
}

const ALGORITHMS: [Option<Algorithm>; 3] = [None, Some(Algorithm::OneShot), Some(Algorithm::TwoShot)];
const COUNTS: [usize; 10] = [1, 3, 8, 9, 1000, 4096, 7168, 65_537, 300_001, 1_500_000];

fn every_count<T: Element>(rank: &Rank<'_>) -> Outcome {
    for count in COUNTS {
        for algorithm in ALGORITHMS {
            rank.compare(&values::<T>(rank.comm.rank(), count), ReduceOp::Sum, algorithm)?;
        }
    }
    Ok(())
}

fn every_type(world_size: usize) {
    on_gpus(world_size, every_count::<f32>);
    on_gpus(world_size, every_count::<f16>);
    on_gpus(world_size, every_count::<bf16>);
}

#[test]
fn sums_have_the_hosts_bits_on_2_gpus() {
    every_type(2);
}

#[test]
fn sums_have_the_hosts_bits_on_4_gpus() {
    every_type(4);
}

#[test]
fn every_operator_has_the_hosts_bits() {
    on_gpus(2, |rank| {
        for op in ReduceOp::ALL {
            for algorithm in ALGORITHMS {
                rank.compare(&values::<bf16>(rank.comm.rank(), 1001), op, algorithm)?;
                rank.compare(&values::<f32>(rank.comm.rank(), 1001), op, algorithm)?;
            }
        }
        Ok(())
    });
}

#[test]
fn every_pattern_of_16_bits_survives() {
    on_gpus(2, |rank| {
        let all = |of: fn(u16) -> u16| (0..=u16::MAX).map(of).collect::<Vec<_>>();
        // With zero, with itself, and with something else.
        let second = [all(|_| 0x8000), all(|bits| bits), all(|bits| bits.wrapping_mul(40_503))];
        for other in second {
            let bits = if rank.comm.rank() == 0 { all(|bits| bits) } else { other };
            for algorithm in ALGORITHMS {
                let halves: Vec<bf16> = bits.iter().map(|&bits| bf16::from_bits(bits)).collect();
                rank.compare(&halves, ReduceOp::Sum, algorithm)?;
                let halves: Vec<f16> = bits.iter().map(|&bits| f16::from_bits(bits)).collect();
                rank.compare(&halves, ReduceOp::Sum, algorithm)?;
                // The same patterns as the words that mean "not arrived", and their neighbours.
                let words = bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16 | 0xFFFF));
                rank.compare(&words.collect::<Vec<_>>(), ReduceOp::Sum, algorithm)?;
            }
        }
        Ok(())
    });
}

#[test]
fn in_place_and_misaligned() {
    on_gpus(2, |rank| {
        for (offset, count) in [(0, 5000), (1, 4999), (3, 70_001)] {
            for algorithm in ALGORITHMS {
                let mine = values::<bf16>(rank.comm.rank(), offset + count);
                let mut expected = mine.clone();
                rank.comm.all_reduce_in_place(&mut expected[offset..], ReduceOp::Sum)?;
                let buffer = rank.upload(&mine)?;
                rank.queue::<bf16>((&buffer, &buffer), (offset, count), ReduceOp::Sum, algorithm)?;
                let got = rank.download::<bf16>(&buffer, mine.len())?;
                assert_eq!(got, TensorView::from(&expected).as_bytes()?, "{offset} {count} {algorithm:?}");
            }
        }
        Ok(())
    });
}

#[test]
fn graphs_are_replayed_between_eager_calls() {
    on_gpus(2, |rank| {
        const SIZES: [(usize, usize); 5] = [(7168, 0), (100, 1), (200_000, 1), (57_344, 0), (8, 0)];
        let mine = values::<bf16>(rank.comm.rank(), 200_000);
        let input = rank.upload(&mine)?;
        let outputs = SIZES.map(|_| rank.upload(&mine)).into_iter().collect::<Outcome<Vec<_>>>()?;
        let queue = |which: usize| {
            let (count, algorithm) = SIZES[which];
            let algorithm = [Algorithm::OneShot, Algorithm::TwoShot][algorithm];
            rank.queue::<bf16>((&input, &outputs[which]), (0, count), ReduceOp::Sum, Some(algorithm))
        };
        let expected = |count: usize| -> Outcome<Vec<u8>> {
            let mut expected = mine[..count].to_vec();
            rank.comm.all_reduce_in_place(&mut expected, ReduceOp::Sum)?;
            Ok(TensorView::from(&expected).as_bytes()?.to_vec())
        };
        rank.all_reduce.prepare(DType::BF16, ReduceOp::Sum)?;
        let graph = Graph::capture(&rank.stream, |_| -> Result<(), GraphError> {
            (0..SIZES.len()).try_for_each(|which| queue(which).map_err(GraphError::from))
        })?;
        let graph = graph.instantiate()?;
        for replay in 0..200 {
            // SAFETY: all memory of the graph lives until the end of the test, which synchronises.
            unsafe { graph.launch(&rank.stream) }?;
            queue(replay % SIZES.len())?;
        }
        for (which, (count, _)) in SIZES.into_iter().enumerate() {
            assert_eq!(rank.download::<bf16>(&outputs[which], count)?, expected(count)?, "{which}");
        }
        Ok(())
    });
}

#[derive(Debug, thiserror::Error)]
enum GraphError {
    #[error(transparent)]
    Cuda(#[from] antiphon_device::cuda::CudaError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

#[test]
fn a_rank_that_does_not_come_ends_the_kernel_and_is_named() {
    let Ok(driver) = Driver::load() else { return eprintln!("skipped: no CUDA driver") };
    if driver.device_count().unwrap() < 2 {
        return eprintln!("skipped: 2 GPUs needed");
    }
    let timeout = std::time::Duration::from_millis(500);
    let texts = LocalWorld::run_with(2, timeout, |comm| -> Outcome<String> {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        let all_reduce = CudaAllReduce::new(&comm, &context)?;
        all_reduce.prepare(DType::F32, ReduceOp::Sum)?;
        let stream = context.stream()?;
        let rank = Rank { comm: &comm, context, stream, all_reduce };
        let memory = rank.upload(&[1.0f32; 64])?;
        let call = || rank.queue::<f32>((&memory, &memory), (0, 64), ReduceOp::Sum, None);
        let outcome = match comm.rank() {
            0 => {
                call()?;
                rank.stream.borrow().synchronize()?;
                call().unwrap_err().to_string()
            }
            _ => String::new(),
        };
        std::thread::sleep(timeout); // the other rank's kernel needs this one's memory until it has given up
        Ok(outcome)
    });
    let text = texts[0].as_ref().unwrap();
    assert!(text.contains("timed out") && text.contains("ranks [1] of 2"), "{text}");
}

#[test]
fn arguments_that_make_no_sense_are_refused() {
    on_gpus(2, |rank| {
        let refused = |outcome: Result<(), CollectiveError>| outcome.unwrap_err().to_string();
        let (host, mut written) = (vec![1.0f32; 4], vec![1.0f32; 4]);
        // SAFETY: nothing is queued.
        let error = unsafe {
            rank.all_reduce.all_reduce(
                &TensorView::from(&host),
                &mut TensorViewMut::from(&mut written),
                ReduceOp::Sum,
                None,
                rank.stream.borrow(),
            )
        };
        assert!(refused(error).contains("the input is on host"));
        let memory = rank.upload(&[0i32; 64])?;
        let error = rank.queue::<i32>((&memory, &memory), (0, 64), ReduceOp::Sum, None);
        assert!(refused(error).contains("i32 cannot be reduced"));
        rank.compare(&[1.0f32; 4], ReduceOp::Sum, None)
    });
}
