//! The timing of calls.

use std::time::Instant;

use antiphon::{
    collectives::{Communicator, StreamCollectives, cuda::CudaCollectives},
    device::{
        ReduceOp,
        cuda::{
            Architecture, Context, Event, Function, Graph, GraphExec, KernelCache, LaunchConfig, Module,
            Nvrtc, Program, Stream, StreamRef,
        },
    },
    tensor::DType,
};

use super::tensors::Tensor;
use crate::Result;

/// How long the GPU is kept busy while the host submits what is timed.
const DELAY_NS: u64 = 200_000;
/// Elements of the all-reduce that lines the GPUs up.
const LINE_UP: usize = 64;
/// Calls that the host submits without waiting, for the time that it takes; a stream holds about a thousand.
const EAGER_CALLS: u32 = 200;
const EAGER_BATCHES: usize = 5;

/// The resources of a rank for timing.
pub(super) struct Clock<'a> {
    comm: &'a Communicator,
    ours: &'a CudaCollectives,
    stream: &'a Stream,
    start: Event,
    end: Event,
    delay: Function,
    empty: Function,
    line: [Tensor; 2],
}

impl<'a> Clock<'a> {
    pub(super) fn new(comm: &'a Communicator, ours: &'a CudaCollectives, stream: &'a Stream) -> Result<Self> {
        let context = ours.context();
        let [delay, empty] = kernels(context, ["delay", "empty"])?;
        ours.prepare(DType::F32, ReduceOp::Sum)?;
        let line = || Tensor::zeros(context, stream, DType::F32, &[LINE_UP]);
        let line = [line()?, line()?];
        let (start, end) = (Event::with_time(context)?, Event::with_time(context)?);
        Ok(Self { comm, ours, stream, start, end, delay, empty, line })
    }

    /// Replays a graph once and gives the microseconds that it took on this rank's GPU.
    ///
    /// Where GPUs are `lined_up`, the stream waits a moment, for the host to submit the rest, and then for all other ranks' streams,
    /// so that the GPUs start together: an early rank would count its wait for the others. Otherwise only the ranks' hosts meet
    /// before, and a GPU that starts early counts its waiting.
    ///
    /// # Safety
    /// The memory and the kernels of the graph are alive.
    pub(super) unsafe fn replay(&self, graph: &GraphExec, lined_up: bool) -> Result<f64> {
        // SAFETY: passed on.
        self.time(lined_up, |stream| Ok(unsafe { graph.launch(stream) }?))
    }

    /// Puts work into the stream and gives the microseconds that it took on this rank's GPU, as [`replay`](Self::replay).
    pub(super) fn time(&self, lined_up: bool, work: impl FnOnce(StreamRef<'_>) -> Result<()>) -> Result<f64> {
        self.comm.barrier()?;
        if lined_up {
            // SAFETY: the kernel takes one number and touches no memory.
            unsafe { self.delay.launch(self.stream, &LaunchConfig::new(1, 1), &[(&DELAY_NS).into()]) }?;
            self.line_up()?;
        }
        self.start.record(self.stream)?;
        work(self.stream.borrow())?;
        self.end.record(self.stream)?;
        self.stream.borrow().synchronize()?;
        self.ours.check()?;
        Ok(self.end.elapsed_since(&self.start)?.as_secs_f64() * 1e6)
    }

    fn line_up(&self) -> Result<()> {
        let [input, output] = &self.line;
        let mut output = output.view_mut();
        // SAFETY: the tensors live until the stream is done, which `replay` waits for.
        Ok(unsafe { self.ours.all_reduce(input.view(), &mut output, ReduceOp::Sum, self.stream.borrow()) }?)
    }

    /// Microseconds of the host's time for one call that is not captured: the median over batches of their means.
    pub(super) fn host(&self, mut call: impl FnMut(StreamRef<'_>) -> Result<()>) -> Result<f64> {
        let mut batch = || -> Result<f64> {
            self.comm.barrier()?;
            let start = Instant::now();
            for _ in 0..EAGER_CALLS {
                call(self.stream.borrow())?;
            }
            let took = start.elapsed();
            self.stream.borrow().synchronize()?;
            Ok(took.as_secs_f64() * 1e6 / f64::from(EAGER_CALLS))
        };
        batch()?; // warm-up
        let mut times = (0..EAGER_BATCHES).map(|_| batch()).collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[EAGER_BATCHES / 2])
    }

    /// The same for a bare launch of a kernel that does nothing.
    pub(super) fn host_launch(&self) -> Result<f64> {
        let config = LaunchConfig::new(1, 32);
        // SAFETY: the kernel has no parameters and touches no memory.
        self.host(|stream| Ok(unsafe { self.empty.launch(stream, &config, &[]) }?))
    }
}

fn program(architecture: Architecture) -> Program {
    Program::new("bench/kernels.cuh", include_str!("kernels.cuh"), architecture)
}

/// Captures a number of calls.
pub(super) fn graph(
    stream: &Stream,
    calls: u32,
    mut call: impl FnMut(StreamRef<'_>) -> Result<()>,
) -> Result<GraphExec> {
    let graph = Graph::capture(stream, |stream| (0..calls).try_for_each(|_| call(stream)))?;
    Ok(graph.instantiate()?)
}

/// Kernels of kernels.cuh.
pub(super) fn kernels<const COUNT: usize>(
    context: &Context,
    names: [&str; COUNT],
) -> Result<[Function; COUNT]> {
    let program = program(context.device().architecture()?);
    let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
    let module = Module::load(context, &cubin.bytes)?;
    let found: Vec<Function> = names.iter().map(|name| module.function(name)).collect::<Result<_, _>>()?;
    Ok(found.try_into().expect("one for each name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_compile() {
        let Some(nvrtc) = antiphon_testing::nvrtc() else { return };
        assert_eq!(nvrtc.compile(&program(Architecture::SM_90A)).unwrap().log, "");
    }
}
