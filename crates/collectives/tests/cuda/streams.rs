//! Calls on several streams, and kernels that want the same room.

use antiphon_collectives::{ReduceOp, StreamCollectives, cuda::CudaCollectives, nccl::NcclCollectives};
use antiphon_device::cuda::{
    Architecture, Context, Function, Graph, KernelCache, LaunchConfig, Module, Nvrtc, Program, Stream,
    StreamRef,
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::{gpus_for, nccl};

use crate::{
    captured::tensor,
    harness::{At, Outcome, Rank, What, on_gpus, values},
};

const SUM: What = What::AllReduce(ReduceOp::Sum, None);

/// Kernels that keep a GPU busy: alone for so long; and on all of it, behind whatever is ahead in the stream.
const SOURCE: &str = r#"
DEVICE void spin(u64 ns) { for (const u64 start = global_ns(); global_ns() - start < ns;) {} }
extern "C" __global__ void delay(u64 ns) { spin(ns); }
extern "C" __global__ void __launch_bounds__(1024, 2) fill(u64 ns) { pdl_wait(); spin(ns); }
"#;

pub fn kernels(context: &Context) -> Outcome<[Function; 2]> {
    let architecture: Architecture = context.device().architecture()?;
    let cubin =
        KernelCache::open().compile(Nvrtc::load()?, &Program::new("streams.cu", SOURCE, architecture))?;
    let module = Module::load(context, &cubin.bytes)?;
    Ok([module.function("delay")?, module.function("fill")?])
}

fn sum<'s>(rank: &Rank, on: &CudaCollectives, at: At, stream: impl Into<StreamRef<'s>>) -> Outcome {
    let (input, mut output) = views(rank, at)?;
    // SAFETY: the tests keep the memory until they have synchronised with the stream.
    Ok(unsafe { on.all_reduce(input, &mut output, ReduceOp::Sum, stream.into()) }?)
}

/// The same memory to read from and to write to.
fn views<'a>(rank: &Rank, at: At) -> Outcome<(TensorView<'a>, TensorViewMut<'a>)> {
    let device = Device::Cuda(rank.collectives.context().device().ordinal());
    let pointer = at.0 as usize as *mut u8;
    // SAFETY: as in `sum`; kernels use it in the order of a stream.
    unsafe {
        Ok((
            TensorView::from_raw_parts(pointer, at.1, &[at.2], None, device)?,
            TensorViewMut::from_raw_parts(pointer, at.1, &[at.2], None, device)?,
        ))
    }
}

/// A stream that is dropped with its call still under way: the call behind, on a stream that may have got the same handle, waits.
#[test]
fn a_stream_may_be_dropped_between_two_calls() {
    on_gpus(2, |rank| {
        let context = rank.collectives.context();
        let [delay, _] = kernels(context)?;
        let memory = rank.upload(&vec![1.0f32; 50_000])?;
        let mut expected = 1.0f32;
        for round in 0..20 {
            let stream = context.stream()?;
            if round % 2 == rank.comm.rank() {
                // SAFETY: the kernel takes one number and touches no memory.
                unsafe { delay.launch(&stream, &LaunchConfig::new(1, 1), &[(&200_000u64).into()]) }?;
            }
            sum(rank, &rank.collectives, At(memory.pointer().0, DType::F32, 50_000), &stream)?;
            expected *= 2.0;
        }
        context.synchronize()?;
        rank.collectives.check()?;
        rank.same("dropped streams", &rank.download(&memory, 0, 4 * 50_000)?, &vec![expected; 50_000])
    });
}

/// Two streams without an order between them: the calls are ordered, because they would use each other's slots otherwise.
#[test]
fn calls_on_two_streams_follow_each_other() {
    on_gpus(2, |rank| {
        let [delay, _] = kernels(rank.collectives.context())?;
        let streams = [rank.collectives.context().stream()?, rank.collectives.context().stream()?];
        let counts = [1000, 50_000];
        let memories = counts.map(|count| rank.upload(&vec![1.0f32; count]));
        let [first, second] = memories;
        let (memories, rounds) = ([first?, second?], 20);
        for round in 0..rounds {
            for (index, stream) in streams.iter().enumerate() {
                // One of the streams is late, another one on the other rank.
                if (round + index + rank.comm.rank()) % 2 == 0 {
                    let ns = 300_000u64;
                    // SAFETY: the kernel takes one number and touches no memory.
                    unsafe { delay.launch(stream, &LaunchConfig::new(1, 1), &[(&ns).into()]) }?;
                }
                sum(
                    rank,
                    &rank.collectives,
                    At(memories[index].pointer().0, DType::F32, counts[index]),
                    stream,
                )?;
            }
        }
        for (memory, count) in memories.iter().zip(counts) {
            streams.iter().try_for_each(|stream| stream.borrow().synchronize())?;
            let got = rank.download(memory, 0, count * 4)?;
            rank.same::<f32>("after all rounds", &got, &vec![(1u64 << rounds) as f32; count])?;
        }
        Ok(())
    });
}

/// Streams of one capture are ordered in the graph; a capture beside eager calls is not joined to them.
#[test]
fn captured_calls_on_two_streams_follow_each_other() {
    on_gpus(2, |rank| {
        let context = rank.collectives.context();
        let (other, eager) = (context.stream()?, context.stream()?);
        let memory = rank.upload(&[1.0f32; 5000])?;
        let at = At(memory.pointer().0, DType::F32, 5000);
        sum(rank, &rank.collectives, at, &eager)?;
        eager.borrow().synchronize()?;
        let (forked, joined) =
            (antiphon_device::cuda::Event::new(context)?, antiphon_device::cuda::Event::new(context)?);
        let graph = Graph::capture(&rank.stream, |stream| -> Outcome {
            forked.record(stream)?;
            other.borrow().wait(&forked)?;
            for _ in 0..3 {
                sum(rank, &rank.collectives, at, stream)?;
                sum(rank, &rank.collectives, at, &other)?;
            }
            joined.record(&other)?;
            Ok(stream.wait(&joined)?)
        })?;
        let graph = graph.instantiate()?;
        for _ in 0..2 {
            // SAFETY: what the graph uses lives until the stream is done.
            unsafe { graph.launch(&rank.stream) }?;
        }
        let got = rank.download(&memory, 0, 5000 * 4)?;
        rank.same::<f32>("after two replays", &got, &vec![(1u64 << 13) as f32; 5000])
    });
}

/// The library whose calls are on a stream.
enum Caller<'a> {
    Ours(&'a CudaCollectives),
    Nccl(&'a NcclCollectives),
}

/// Behind every call of two communicators a kernel is launched that takes a whole GPU as soon as it may. If calls let it come
/// before they are certain to end, each GPU soon holds the room that the other communicator's call needs.
fn fill_the_gpu_behind(rank: &Rank, callers: [Caller<'_>; 2]) -> Outcome {
    const ROUNDS: usize = 10_000;
    let context = rank.collectives.context();
    let [_, fill] = kernels(context)?;
    let config = LaunchConfig::new(2 * context.multiprocessors()?, 1024).programmatic();
    let streams: [Stream; 2] = [context.stream()?, context.stream()?];
    let memories = [rank.upload(&[1.0f32; 64])?, rank.upload(&[1.0f32; 64])?];
    for round in 0..ROUNDS {
        for index in 0..2 {
            // The ranks begin with different communicators.
            let which = (index + rank.comm.rank() + round) % 2;
            let at = At(memories[which].pointer().0, DType::F32, 64);
            match callers[which] {
                Caller::Ours(ours) => sum(rank, ours, at, &streams[which])?,
                Caller::Nccl(nccl) => {
                    let (input, mut output) = views(rank, at)?;
                    // SAFETY: the memory lives until the streams are done.
                    unsafe { nccl.all_reduce(input, &mut output, ReduceOp::Sum, streams[which].borrow()) }?;
                }
            }
            let ns = 2_000u64;
            // SAFETY: the kernel takes one number and touches no memory.
            unsafe { fill.launch(&streams[which], &config, &[(&ns).into()]) }?;
        }
        if round % 100 == 99 {
            let limit = std::time::Duration::from_secs(15);
            streams.iter().try_for_each(|stream| stream.borrow().synchronize_within(limit))?;
            rank.collectives.check()?;
        }
    }
    Ok(())
}

#[test]
fn kernels_that_fill_the_gpu_behind_two_communicators() {
    on_gpus(2, |rank| {
        let second = CudaCollectives::new(&rank.comm, rank.collectives.context())?;
        second.prepare(DType::F32, ReduceOp::Sum)?;
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        fill_the_gpu_behind(rank, [Caller::Ours(&rank.collectives), Caller::Ours(&second)])?;
        Ok(second.check()?)
    });
}

#[test]
fn kernels_that_fill_the_gpu_behind_ours_and_nccls() {
    if gpus_for(2).and_then(|_| nccl()).is_none() {
        return;
    }
    on_gpus(2, |rank| {
        let nccl = NcclCollectives::new(&rank.comm, rank.collectives.context())?;
        rank.collectives.prepare(DType::F32, ReduceOp::Sum)?;
        fill_the_gpu_behind(rank, [Caller::Ours(&rank.collectives), Caller::Nccl(&nccl)])
    });
}

#[test]
fn a_call_that_lets_its_dependents_start_at_once_has_the_same_bits() {
    on_gpus(2, |rank| {
        rank.collectives.start_dependents_early(true);
        for count in [1, 1000, 300_001] {
            rank.compare(SUM, &values::<f32>(rank.comm.rank(), count), 0)?;
        }
        rank.collectives.start_dependents_early(false);
        Ok(())
    });
}

/// On streams of their own, so that neither rank receives only once it has sent.
#[test]
fn both_ranks_may_send_before_they_receive() {
    on_gpus(2, |rank| {
        let (me, count) = (rank.comm.rank(), 20_000_000);
        let device = Device::Cuda(rank.collectives.context().device().ordinal());
        let receives = rank.collectives.context().stream()?;
        let (from, to) = (rank.upload(&values::<f32>(me, count))?, rank.allocate(4 * count)?);
        rank.stream.borrow().synchronize()?;
        for _ in 0..3 {
            // SAFETY: the memory lives until both streams have been waited for.
            unsafe {
                let input = tensor::<f32>(&from, 0, count, device);
                let mut output = tensor::<f32>(&to, 0, count, device);
                rank.collectives.send(&input.as_view(), 1 - me, rank.stream.borrow())?;
                rank.collectives.recv(&mut output, 1 - me, receives.borrow())?;
            }
        }
        receives.borrow().synchronize()?;
        rank.same("sent both ways", &rank.download(&to, 0, 4 * count)?, &values::<f32>(1 - me, count))
    });
}
