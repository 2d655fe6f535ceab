//! The engine of the GPUs with two small families. Ranks are threads, with a GPU each; without enough GPUs a test is
//! recorded as skipped.

mod late;
mod order;
mod rails;
mod room;
use std::time::Duration;

use antiphon_device::cuda::{
    Architecture, Context, DeviceMemory, DevicePointer, Graph, Program, Stream, StreamRef,
};
use antiphon_fabric::{
    Communicator, FabricError, LocalWorld, Operation, Signature,
    gpu::{
        Family, Grid, Launch, NoArguments, Pieces, REDUCE, Reduction, Source, Tenant, Work, kernels, program,
    },
};
use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;
use antiphon_testing::rotation::{Rotation, rotate};
use antiphon_testing::{gpus, nvrtc};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

kernels! {
    enum SumKernel {
        Sum = "sum",
    }
}

kernels! {
    enum DelayedKernel {
        Delayed = "delayed",
        Divided = "divided",
    }
}

/// Blocks that are late between two steps of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Delayed;

impl Family for Delayed {
    type Kernel = DelayedKernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "delays.cuh";
    const SOURCES: &'static [Source] = &[Source { name: "delayed.cuh", text: include_str!("delayed.cuh") }];
}

/// Sums of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum;

impl Family for Sum {
    type Kernel = SumKernel;
    type Arguments = NoArguments;
    const NAME: &'static str = "sums.cuh";
    const SOURCES: &'static [Source] = &[REDUCE, Source { name: "sum.cuh", text: include_str!("sum.cuh") }];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        Reduction::new(DType::F32, ReduceOp::Sum).expect("f32 is summed").define(program)
    }
}

/// # Safety
/// Both addresses are valid for `count` f32, a multiple of 4, until the stream has passed this call.
unsafe fn sum(
    tenant: &Tenant,
    [input, output]: [DevicePointer; 2],
    count: usize,
    stream: StreamRef<'_>,
) -> Result<(), FabricError> {
    let loaded = tenant.ready(Sum, stream)?;
    let signature = Signature {
        dtype: Some(DType::F32),
        reduce: Some(ReduceOp::Sum),
        count: count as u64,
        ..Signature::new(Operation::AllReduce)
    };
    let launch = |start: usize, len: usize, _channels| {
        let (input, output) = (input.0 as usize + start, output.0 as usize + start);
        let work = Work { input, output, count: len / 4, ..Work::new(signature) };
        Launch { kernel: SumKernel::Sum, grid: Grid::Items(len / 16), work, arguments: NoArguments }
    };
    // SAFETY: the caller's promise; a launch sends what fits a lane.
    unsafe { tenant.run(&loaded, Pieces::bytes(4 * count, tenant.lane_bytes()), stream, launch) }
}

#[test]
fn families_compile_without_a_warning() {
    let Some(nvrtc) = nvrtc() else { return };
    for architecture in [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A] {
        for world_size in [2, 8] {
            for program in
                [program(&Rotation, architecture, world_size), program(&Sum, architecture, world_size)]
            {
                let log = nvrtc.compile(&program).unwrap().log;
                assert!(log.is_empty(), "{} on {architecture}: {log}", program.name());
            }
        }
    }
}

/// What a rank of a test has: two tenants, and a stream for each.
struct Rank {
    comm: Communicator,
    rotations: Tenant,
    sums: Tenant,
    streams: [Stream; 2],
}

impl Rank {
    fn new(comm: Communicator, context: &Context) -> Outcome<Self> {
        let rotations = Tenant::new(&comm, context, Tenant::LEAST_STAGING_BYTES)?;
        rotations.load_together(&comm, Rotation)?;
        let sums = Tenant::new(&comm, context, 2 * Tenant::LEAST_STAGING_BYTES)?;
        sums.load_together(&comm, Sum)?;
        Ok(Self { rotations, sums, streams: [context.stream()?, context.stream()?], comm })
    }

    fn upload(&self, values: &[f32]) -> Outcome<DeviceMemory> {
        let memory = DeviceMemory::allocate(self.sums.context(), size_of_val(values))?;
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        memory.write(&self.streams[0], 0, &bytes)?;
        Ok(memory)
    }

    fn download(&self, memory: &DeviceMemory, stream: &Stream) -> Outcome<Vec<f32>> {
        let mut bytes = vec![0; memory.len()];
        memory.read(stream, 0, &mut bytes)?;
        Ok(bytes.chunks(4).map(|word| f32::from_ne_bytes(word.try_into().unwrap())).collect())
    }
}

/// Runs `body` on `world_size` GPUs.
fn on_gpus<T: Send>(
    world_size: usize,
    timeout: Duration,
    body: impl Fn(Rank) -> Outcome<T> + Sync,
) -> Vec<T> {
    let Some(driver) = gpus(world_size) else { return Vec::new() };
    let outcomes = LocalWorld::run_with(world_size, timeout, |comm| -> Outcome<T> {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        body(Rank::new(comm, &context)?)
    });
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|error| panic!("{error}"))).collect()
}

/// Values that tell ranks, rounds and places apart.
fn values(rank: usize, round: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + round * 11 + rank * 1009) % 4093) as f32).collect()
}

/// One rank is late between the two calls, so both kernels of the other rank wait at once. With slots or tags in common they
/// would take each other's data, or disagree; with an order in common the second would not begin.
#[test]
fn two_tenants_work_beside_each_other() {
    on_gpus(2, Duration::from_secs(20), |rank| {
        let me = rank.comm.rank();
        // Some are larger than the staging of either tenant, and go in pieces.
        for (round, count) in [4, 1000, 400_000, 64, 8_000_000, 12].into_iter().enumerate() {
            let (mine, theirs) = (values(me, round, count), values(1 - me, round, count));
            let input = rank.upload(&mine)?;
            let outputs = [rank.upload(&vec![-1.0; count])?, rank.upload(&vec![-1.0; count])?];
            rank.comm.barrier()?;
            let [to_rotated, to_summed] =
                outputs.each_ref().map(|output| [input.pointer(), output.pointer()]);
            // SAFETY: the memory lives until both streams have been read from.
            unsafe { rotate(&rank.rotations, to_rotated, 4 * count, rank.streams[0].borrow()) }?;
            if round % 2 == me {
                std::thread::sleep(Duration::from_millis(5));
            }
            // SAFETY: as above.
            unsafe { sum(&rank.sums, to_summed, count, rank.streams[1].borrow()) }?;
            let rotated = rank.download(&outputs[0], &rank.streams[0])?;
            let summed = rank.download(&outputs[1], &rank.streams[1])?;
            rank.rotations.check()?;
            rank.sums.check()?;
            let expected: Vec<f32> = mine.iter().zip(&theirs).map(|(a, b)| a + b).collect();
            assert!(rotated == theirs, "rank {me}, round {round}: {count} elements rotated");
            assert!(summed == expected, "rank {me}, round {round}: {count} elements summed");
        }
        Ok(())
    });
}

/// One tenant's ranks disagree; the other tenant gets the error too.
#[test]
fn a_failure_of_one_tenant_is_one_of_all() {
    let texts = on_gpus(2, Duration::from_secs(10), |rank| {
        let me = rank.comm.rank();
        let memory = rank.upload(&vec![1.0; 1024])?;
        let at = [memory.pointer(); 2];
        // SAFETY: the memory lives until the stream has been waited for.
        unsafe { rotate(&rank.rotations, at, 1024 + 1024 * me, rank.streams[0].borrow()) }?;
        rank.streams[0].borrow().synchronize()?;
        let first = rank.sums.check().expect_err("the other tenant's call failed");
        // SAFETY: nothing is launched.
        let later = unsafe { sum(&rank.sums, at, 1024, rank.streams[1].borrow()) };
        assert!(matches!(later, Err(FabricError::Failed(_))), "{later:?}");
        assert!(matches!(rank.rotations.check(), Err(FabricError::Failed(_))));
        rank.comm.barrier().expect_err("the communicator has failed");
        Ok(first.to_string())
    });
    for text in texts {
        assert!(text.contains("ranks disagree") && text.contains("all_to_all(1024 bytes)"), "{text}");
    }
}

/// A block that goes on behind another block's failure hands the call behind its state, and that it has failed.
#[test]
fn a_failure_is_not_undone_by_a_late_block() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let (tenant, stream) = (&rank.rotations, &rank.streams[0]);
        tenant.load_together(&rank.comm, Delayed)?;
        const BLOCKS: u32 = 40;
        let found = rank.upload(&[0.0; BLOCKS as usize])?;
        rank.comm.monitor().set_timeout(Duration::from_millis(300));
        let call = |root: usize| -> Result<(), FabricError> {
            let loaded = tenant.ready(Delayed, stream.borrow())?;
            let launch = |_, _, _| Launch {
                kernel: DelayedKernel::Delayed,
                grid: Grid::Exact { config: Delayed.blocks(BLOCKS, 2), is_small: false },
                work: Work {
                    output: found.pointer().0 as usize,
                    root,
                    ..Work::new(Signature::new(Operation::Barrier))
                },
                arguments: NoArguments,
            };
            let once = Pieces { total: 1, most: 1, unit: 1 };
            // SAFETY: the memory lives until the stream has been waited for, and has a word for each block.
            unsafe { tenant.run(&loaded, once, stream.borrow(), launch) }
        };
        let look = Graph::capture(stream, |_| call(1))?.instantiate()?;
        call(0)?;
        // SAFETY: as above.
        unsafe { look.launch(stream) }?;
        let words = rank.download(&found, stream)?;
        let late = words.iter().filter(|word| word.to_bits() != 1).count();
        assert_eq!(late, 0, "blocks of the call behind do not know of the failure");
        rank.rotations.check().expect_err("no rank sent anything");
        Ok(())
    });
}

/// A warp that went on without the others would wait for them.
#[test]
fn a_block_begins_a_call_as_a_whole() {
    on_gpus(2, Duration::from_secs(60), |rank| {
        let (tenant, stream) = (&rank.rotations, &rank.streams[0]);
        tenant.load_together(&rank.comm, Delayed)?;
        const WARPS: usize = 4;
        let found = rank.upload(&[0.0; WARPS])?;
        let loaded = tenant.ready(Delayed, stream.borrow())?;
        let launch = |_, _, _| Launch {
            kernel: DelayedKernel::Divided,
            grid: Grid::Exact { config: Delayed.blocks(1, 2), is_small: false },
            work: Work {
                output: found.pointer().0 as usize,
                ..Work::new(Signature::new(Operation::Barrier))
            },
            arguments: NoArguments,
        };
        let once = Pieces { total: 1, most: 1, unit: 1 };
        // SAFETY: the memory lives until the stream has been waited for, and has a word for each warp.
        unsafe { tenant.run(&loaded, once, stream.borrow(), launch) }?;
        let words: Vec<u32> = rank.download(&found, stream)?.into_iter().map(f32::to_bits).collect();
        assert_eq!(words, [2; WARPS], "some warps go on");
        Ok(())
    });
}

#[test]
fn staging_that_makes_no_sense_is_refused_everywhere() {
    on_gpus(2, Duration::from_secs(10), |rank| {
        let context = rank.sums.context();
        let least = Tenant::LEAST_STAGING_BYTES;
        let error = Tenant::new(&rank.comm, context, least - 1).unwrap_err().to_string();
        assert!(error.contains("16777215 bytes for staging, at least 16777216"), "{error}");
        let error = Tenant::new(&rank.comm, context, (4 + rank.comm.rank()) * least).unwrap_err().to_string();
        assert!(error.contains("rank 0 makes an arena of"), "{error}");
        // The other tenants go on.
        let memory = rank.upload(&[1.0; 4])?;
        // SAFETY: the memory lives until the stream has been read from.
        unsafe { sum(&rank.sums, [memory.pointer(); 2], 4, rank.streams[0].borrow()) }?;
        assert_eq!(rank.download(&memory, &rank.streams[0])?, [2.0; 4]);
        Ok(())
    });
}
