//! `--tail`: how long calls take when the ranks do not start together, and how long at worst.
//!
//! A graph of [`CALLS`] calls is replayed without synchronising the GPUs before. In each replay the GPU of another rank is late
//! by the skew. The reported time is the time beyond the skew: from the start of the late rank to its end. Ours and
//! NCCL's replays take turns, in the same processes. Behind NCCL's all-reduce a separate kernel does the other operations of
//! our fused call. Forms of dispatch and combine that NCCL has no calls for are ours alone.

use std::{
    fs::File,
    io::{self, Write},
};

use antiphon::{
    collectives::{
        Communicator,
        cuda::{Algorithm, AllReduceOptions, CudaCollectives},
        fusion::{FusedAllReduce, Quantization, Scale},
        nccl::NcclCollectives,
    },
    device::{
        ReduceOp,
        cuda::{
            Context, DeviceMemory, Driver, Event, Function, GraphExec, LaunchConfig, Stream, StreamRef,
            memory,
        },
    },
    fabric::RegisteredMemory,
    operation::Operation,
    tensor::{DType, Device, TensorView, TensorViewMut},
};
use serde::{Deserialize, Serialize};

use super::{
    Result,
    contender::{self, Contender},
    forms::Form,
    mixed::{Handler, Variant},
    moe::{Experts, Routes},
    note, timing,
};
use crate::{
    ExitStatus, FAILURE, SUCCESS,
    bench::{Args, Collective, Which, case::Case, launch},
    launch::Stream as Output,
    report::Machine,
};

/// The most rows of a tensor, and what is in a row: bf16, as wide as large models are.
pub(in crate::bench) const MOST_ROWS: u64 = 2048;
const HIDDEN: usize = 7168;
const DTYPE: DType = DType::BF16;
const EPS: f32 = 1e-5;
/// The driver takes the highest that there is.
const HIGHEST_PRIORITY: i32 = i32::MIN;
/// Threads of a block of the kernels `add_norm` and `add_norm_fp8`, as kernels.cuh has them.
const NORM_THREADS: u32 = 448;
/// Calls in one graph.
const CALLS: u32 = 10;
/// Replays that are submitted at a time.
const BATCH: usize = 50;
/// Between two replays, so that a rank's calls never wait for its host.
const PAUSE_NS: u64 = 20_000;
const HEAD_START_NS: u64 = 400_000;
/// Products in one graph, and what a replay takes more beside them at most, in microseconds.
const GEMMS: u32 = 50;
const BESIDE_US: f64 = 1500.0;

/// The call that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// All-reduce with what else is done to the sum, or on registered memory.
    Sum,
    Norm,
    Fp8,
    Registered,
    /// A collective that the table of times measures too, by the same contenders.
    Of(Collective),
    /// A form of dispatch or combine of its own.
    Form(Operation),
}

impl Call {
    /// Those that are measured where these collectives were asked for.
    fn all(args: &Args) -> Vec<Self> {
        use Operation::{AllGather, AllToAll};
        let sums = [Self::Sum, Self::Norm, Self::Fp8, Self::Registered];
        let plain = [AllGather, AllToAll].map(Collective::Of);
        match args.collective {
            Which::All => sums.into_iter().chain(plain.map(Self::Of)).collect(),
            Which::Mixed => args.collectives().into_iter().map(Self::Of).collect(),
            Which::One(Collective::ALL_REDUCE) => sums.into(),
            Which::One(Collective::DISPATCH) => {
                let forms = [Operation::LowLatencyDispatch, Operation::HybridDispatch];
                [Self::Of(Collective::DISPATCH)].into_iter().chain(forms.map(Self::Form)).collect()
            }
            Which::One(Collective::COMBINE) => {
                let forms = [Operation::LowLatencyCombine, Operation::HybridCombine];
                [Self::Of(Collective::COMBINE)].into_iter().chain(forms.map(Self::Form)).collect()
            }
            Which::One(of) => plain.into_iter().filter(|&plain| plain == of).map(Self::Of).collect(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Norm => "norm",
            Self::Fp8 => "fp8",
            Self::Registered => "registered",
            Self::Of(collective) => collective.name(),
            Self::Form(operation) => operation.name(),
        }
    }
}

/// Whether something is measured for these arguments.
pub(super) fn measures(args: &Args) -> bool {
    !Call::all(args).is_empty()
}

/// Microseconds of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Quantiles {
    p50: f64,
    p99: f64,
    p999: f64,
    max: f64,
}

impl Quantiles {
    /// The statistics of one or more times.
    fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |part: f64| times[((part * times.len() as f64) as usize).min(times.len() - 1)];
        Self { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// A line of the table.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    operation: String,
    rows: usize,
    skew_us: u64,
    /// Whether products of matrices run on a second stream.
    beside_gemm: bool,
    replays: usize,
    ours: Quantiles,
    nccl: Option<Quantiles>,
}

/// The content of the file.
#[derive(Serialize)]
struct Report<'a> {
    machine: &'a Machine,
    calls: u32,
    hidden: usize,
    rows: Vec<Row>,
}

const HEADER: &str = "operation                    rows  skew beside |  ours p50      p99    p99.9      max |  NCCL p50      p99    p99.9      max | replays";

fn line(row: &Row) -> String {
    let quantiles = |q: &Quantiles| format!("{:9.1}{:9.1}{:9.1}{:9.1}", q.p50, q.p99, q.p999, q.max);
    format!(
        "{:26}{:7}{:6} {:6} | {} | {} | {:7}",
        row.operation,
        row.rows,
        row.skew_us,
        if row.beside_gemm { "gemm" } else { "" },
        quantiles(&row.ours),
        row.nccl.as_ref().map_or_else(|| format!("{:36}", "-"), quantiles),
        row.replays
    )
}

/// The command: it starts the ranks and shows their rows.
pub(in crate::bench) fn measure(args: &Args, machine: &Machine, json: Option<File>) -> Result<ExitStatus> {
    println!("microseconds beyond the skew of graphs of {CALLS} calls, {DTYPE}, rows of {HIDDEN}\n{HEADER}");
    let mut rows: Vec<Row> = Vec::new();
    let outcome = launch(args, machine).run(|rank, stream, text| {
        match serde_json::from_slice(text) {
            Ok(row) if rank == 0 && stream == Output::Stdout => {
                writeln!(io::stdout(), "{}", line(&row))?;
                rows.push(row);
            }
            _ => io::stderr().write_all(&[format!("[{rank}] ").as_bytes(), text].concat())?,
        }
        Ok(())
    })?;
    if !outcome.success() {
        eprint!("{}", outcome.report());
        return Ok(outcome.exit_code());
    }
    if let Some(file) = json {
        file.set_len(0)?;
        serde_json::to_writer_pretty(file, &Report { machine, calls: CALLS, hidden: HIDDEN, rows })?;
    }
    Ok(SUCCESS)
}

/// The work of a rank.
pub(in crate::bench) fn execute(args: &Args) -> ExitStatus {
    match measure_all(args) {
        Ok(()) => SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            FAILURE
        }
    }
}

fn measure_all(args: &Args) -> Result<()> {
    let comm = Communicator::from_env()?;
    let context = Context::primary(Driver::load()?.device(comm.rank() as u32)?)?;
    let ours = super::collectives(args, &comm, &context)?;
    let nccl = NcclCollectives::new(&comm, &context);
    let nccl = nccl.map_err(|error| note(comm.rank(), format_args!("without NCCL beside it: {error}"))).ok();
    let tensors = Tensors::new(&context)?;
    for memory in [&tensors.input, &tensors.output] {
        ours.register(RegisteredMemory::new(&comm, &context, memory.pointer(), memory.len() as u64)?)?;
    }
    ours.prepare(DTYPE, ReduceOp::Sum)?;
    let priority = if args.priority { HIGHEST_PRIORITY } else { 0 };
    let stream = Stream::with_priority(&context, priority)?;
    let mut tail = Tail::new(&comm, &ours, nccl.as_ref(), &tensors, stream)?;
    (tail.replays, tail.seconds) = (args.iterations.unwrap_or(u32::MAX).max(1), args.seconds.as_secs_f64());
    let mixed = (args.collective == Which::Mixed)
        .then(|| Handler::new(args, &comm, &ours, nccl.as_ref(), &context))
        .transpose()?;
    let calls = Call::all(args);
    let is_of_experts = calls.iter().any(|&call| matches!(call, Call::Of(of) if of.is_of_experts()));
    let experts = is_of_experts.then(|| Experts::new(&comm, &context)).transpose()?;
    for call in calls {
        for &rows in &args.rows {
            tail.measure_call(call, rows as usize, (mixed.as_ref(), experts.as_ref()), args)?;
        }
    }
    Ok(())
}

/// A rank's tensors, for as many rows as there may be.
struct Tensors {
    device: Device,
    input: DeviceMemory,
    output: DeviceMemory,
    residual: DeviceMemory,
    residual_out: DeviceMemory,
    weight: DeviceMemory,
    codes: DeviceMemory,
    matrices: DeviceMemory,
}

/// The side of the matrices that are multiplied, as in kernels.cuh.
const SIDE: usize = 2048;
const DEPTH: usize = 256;

impl Tensors {
    fn new(context: &Context) -> Result<Self> {
        let stream = context.stream()?;
        let zeros = |bytes: usize| -> Result<DeviceMemory> {
            let made = DeviceMemory::allocate(context, bytes)?;
            // SAFETY: `made` has `bytes` bytes, and the stream is waited for below.
            unsafe { memory::fill(stream.borrow(), made.pointer(), 0, bytes) }?;
            Ok(made)
        };
        let bytes = MOST_ROWS as usize * HIDDEN * DTYPE.size();
        let tensors = Self {
            device: Device::Cuda(context.device().ordinal()),
            input: zeros(bytes)?,
            output: zeros(bytes)?,
            residual: zeros(bytes)?,
            residual_out: zeros(bytes)?,
            weight: zeros(HIDDEN * DTYPE.size())?,
            codes: zeros(bytes)?,
            matrices: zeros((2 * SIDE * DEPTH + SIDE * SIDE) * 4)?,
        };
        stream.borrow().synchronize()?;
        Ok(tensors)
    }

    /// The beginning of some memory.
    fn view(&self, memory: &DeviceMemory, dtype: DType, shape: &[usize]) -> TensorView<'_> {
        let at = memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory has room for the most rows, and lives until all streams are done.
        unsafe { TensorView::from_raw_parts(at, dtype, shape, None, self.device) }.expect("plain")
    }

    /// [`view`](Self::view), to write into.
    fn view_mut(&self, memory: &DeviceMemory, dtype: DType, shape: &[usize]) -> TensorViewMut<'_> {
        let at = memory.pointer().0 as usize as *mut u8;
        // SAFETY: as for `view`; the stream keeps calls apart.
        unsafe { TensorViewMut::from_raw_parts(at, dtype, shape, None, self.device) }.expect("plain")
    }

    /// Puts a call of ours into the stream.
    fn ours(&self, ours: &CudaCollectives, call: Call, rows: usize, stream: StreamRef<'_>) -> Result<()> {
        let whole = [rows, HIDDEN];
        let matrix = |memory| self.view(memory, DTYPE, &whole);
        let matrix_mut = |memory| self.view_mut(memory, DTYPE, &whole);
        let mut output = matrix_mut(&self.output);
        let normed = || {
            FusedAllReduce::of(matrix(&self.input))
                .residual(matrix(&self.residual))
                .residual_out(matrix_mut(&self.residual_out))
                .rms_norm(Some(self.view(&self.weight, DTYPE, &[HIDDEN])), EPS)
        };
        // SAFETY: the tensors outlive all streams and graphs.
        unsafe {
            match call {
                Call::Norm => ours.all_reduce_fused(normed().norm_out(output), stream)?,
                Call::Fp8 => {
                    let codes = self.view_mut(&self.codes, DType::U8, &whole);
                    let form = Quantization::Fp8 { scale: Scale::Value(1.0) };
                    ours.all_reduce_fused(normed().quantize(form, codes, None), stream)?
                }
                Call::Registered => {
                    let options = AllReduceOptions::registered(Algorithm::TwoShot);
                    ours.all_reduce_with(matrix(&self.input), &mut output, ReduceOp::Sum, options, stream)?
                }
                _ => ours.all_reduce(matrix(&self.input), &mut output, ReduceOp::Sum, stream)?,
            }
        }
        Ok(())
    }

    /// Puts NCCL's call into the stream, and behind it what else a fused call does.
    fn nccl(
        &self,
        nccl: &NcclCollectives,
        norms: &Norms,
        call: Call,
        rows: usize,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let input = self.view(&self.input, DTYPE, &[rows, HIDDEN]);
        let mut output = self.view_mut(&self.output, DTYPE, &[rows, HIDDEN]);
        // SAFETY: the tensors outlive all streams and graphs.
        unsafe { nccl.all_reduce(input, &mut output, ReduceOp::Sum, stream) }?;
        let (function, out) = match call {
            Call::Norm => (&norms.norm, self.output.pointer()),
            Call::Fp8 => (&norms.fp8, self.codes.pointer()),
            _ => return Ok(()),
        };
        let [sum, residual, weight] =
            [&self.output, &self.residual_out, &self.weight].map(DeviceMemory::pointer);
        let config = LaunchConfig::new(rows as u32, NORM_THREADS);
        let arguments = [(&sum).into(), (&residual).into(), (&weight).into(), (&EPS).into(), (&out).into()];
        // SAFETY: the kernel's five arguments: tensors of as many rows, which outlive all streams and graphs.
        Ok(unsafe { function.launch(stream, &config, &arguments) }?)
    }
}

/// The kernel that does the rest of a fused call behind an all-reduce.
struct Norms {
    norm: Function,
    fp8: Function,
}

impl Norms {
    fn new(context: &Context) -> Result<Self> {
        let [norm, fp8] = timing::kernels(context, ["add_norm", "add_norm_fp8"])?;
        Ok(Self { norm, fp8 })
    }
}

/// Puts one call into a stream.
type Put<'a> = &'a dyn Fn(StreamRef<'_>) -> Result<()>;

/// The resources of a rank for measuring.
struct Tail<'a> {
    comm: &'a Communicator,
    ours: &'a CudaCollectives,
    nccl: Option<&'a NcclCollectives>,
    tensors: &'a Tensors,
    /// The most replays of each contender for a row of the table, and the most seconds that they take.
    replays: u32,
    seconds: f64,
    stream: Stream,
    second: Stream,
    delay: Function,
    norms: Norms,
    gemms: GraphExec,
    gemm_us: f64,
    events: Vec<(Event, Event)>,
}

impl<'a> Tail<'a> {
    fn new(
        comm: &'a Communicator,
        ours: &'a CudaCollectives,
        nccl: Option<&'a NcclCollectives>,
        tensors: &'a Tensors,
        stream: Stream,
    ) -> Result<Self> {
        let context = ours.context();
        let [delay, gemm] = timing::kernels(context, ["delay", "gemm"])?;
        let events = (0..BATCH).map(|_| Ok((Event::with_time(context)?, Event::with_time(context)?)));
        let second = context.stream()?;
        let gemms = timing::graph(&second, GEMMS, |stream| launch_gemm(&gemm, tensors, stream))?;
        let mut tail = Self {
            comm,
            ours,
            nccl,
            tensors,
            replays: u32::MAX,
            seconds: 1.0,
            stream,
            second,
            delay,
            norms: Norms::new(context)?,
            gemms,
            gemm_us: 1.0,
            events: events.collect::<Result<_>>()?,
        };
        tail.gemm_us = tail.time_gemm()?;
        note(
            comm.rank(),
            format_args!("a product of {SIDE} × {DEPTH} × {SIDE} takes {:.0} µs", tail.gemm_us),
        );
        Ok(tail)
    }

    /// A call at a size, by each of the skews.
    fn measure_call(
        &self,
        call: Call,
        rows: usize,
        (mixed, experts): (Option<&Handler<'_>>, Option<&Experts>),
        args: &Args,
    ) -> Result<()> {
        let shown = (call, rows, args);
        match call {
            Call::Of(collective) => {
                let case =
                    Case { dtype: DTYPE, ..args.case(collective, (rows * HIDDEN * DTYPE.size()) as u64) };
                let routes = experts.filter(|_| collective.is_of_experts());
                let routes =
                    routes.map(|experts| Routes::new(experts, self.nccl, (self.comm, &self.stream), &case));
                let routes = routes.transpose()?;
                let zeros = |case: &Case| {
                    contender::Tensors::zeros(self.comm, self.ours.context(), &self.stream, case)
                };
                if let Some(routes) = &routes {
                    // A combine needs a dispatch before it.
                    let dispatch = Case { collective: Collective::DISPATCH, ..case };
                    let sent = zeros(&dispatch)?;
                    // SAFETY: the tensors live until the stream has been waited for.
                    unsafe { Contender::Experts(routes).call(&dispatch, &sent, self.stream.borrow()) }?;
                    self.stream.borrow().synchronize()?;
                }
                let tensors = zeros(&case)?;
                let [ours, nccl] = match (&routes, mixed) {
                    (Some(routes), _) => {
                        [Contender::Experts(routes), Contender::ExpertsByNccl(routes)].map(Some)
                    }
                    (None, Some(handler)) => {
                        [Variant::Fused(None), Variant::Nccl].map(|of| Some(Contender::Mixed(handler, of)))
                    }
                    (None, None) => [Some(Contender::Ours(self.ours, None)), self.nccl.map(Contender::Nccl)],
                };
                let put = |by: Contender<'_>, stream: StreamRef<'_>| {
                    // SAFETY: the tensors and routes live until the streams are done with the graphs of `measure`.
                    unsafe { by.call(&case, &tensors, stream) }
                };
                let ours = |stream: StreamRef<'_>| put(ours.expect("there is always one"), stream);
                match nccl.filter(|_| self.nccl.is_some()) {
                    Some(nccl) => {
                        self.measure(&ours, Some(&|stream: StreamRef<'_>| put(nccl, stream)), shown)?
                    }
                    None => self.measure(&ours, None, shown)?,
                }
                routes.map_or(Ok(()), |routes| routes.check())
            }
            Call::Form(operation) => {
                let form =
                    Form::new(operation, self.comm, self.ours.context(), &self.stream, [rows, HIDDEN])?;
                let Some(form) = form else { return Ok(()) };
                self.measure(&|stream| form.call(operation, stream), None, shown)?;
                form.check()
            }
            _ => {
                let ours = |stream: StreamRef<'_>| self.tensors.ours(self.ours, call, rows, stream);
                match self.nccl {
                    Some(nccl) => {
                        let nccl =
                            |stream: StreamRef<'_>| self.tensors.nccl(nccl, &self.norms, call, rows, stream);
                        self.measure(&ours, Some(&nccl), shown)
                    }
                    None => self.measure(&ours, None, shown),
                }
            }
        }
    }

    /// A call of ours, and the same by NCCL, by each of the skews.
    fn measure(
        &self,
        ours: Put<'_>,
        nccl: Option<Put<'_>>,
        (call, rows, args): (Call, usize, &Args),
    ) -> Result<()> {
        let graph = |put: Put<'_>| -> Result<GraphExec> {
            put(self.stream.borrow())?; // what is loaded and connected at the first call is not captured
            self.stream.borrow().synchronize()?;
            self.comm.barrier()?;
            timing::graph(&self.stream, CALLS, put)
        };
        let (ours, nccl) = (graph(ours)?, nccl.map(graph).transpose()?);
        let warm_up = self.batch(nccl.as_ref().unwrap_or(&ours), 0, false, 0.0)?;
        let alone_us = Quantiles::of(warm_up).p50;
        self.batch(&ours, 0, false, 0.0)?;
        for &beside_gemm in if args.alone { &[false][..] } else { &[false, true] } {
            for &skew_us in &args.skews {
                let batches = self.batches(skew_us, if beside_gemm { BESIDE_US } else { alone_us });
                let (mut mine, mut theirs) = (Vec::new(), Vec::new());
                for _ in 0..batches {
                    mine.extend(self.batch(&ours, skew_us, beside_gemm, alone_us)?);
                    if let Some(nccl) = &nccl {
                        theirs.extend(self.batch(nccl, skew_us, beside_gemm, alone_us)?);
                    }
                }
                if self.comm.rank() == 0 {
                    let row = Row {
                        operation: call.name().to_owned(),
                        rows,
                        skew_us,
                        beside_gemm,
                        replays: mine.len(),
                        ours: Quantiles::of(mine),
                        nccl: (!theirs.is_empty()).then(|| Quantiles::of(theirs)),
                    };
                    let row = serde_json::to_string(&row).expect("a row is plain data");
                    // When no process reads any more, the launcher has ended, and this process ends too.
                    let _ = writeln!(io::stdout(), "{row}");
                }
            }
        }
        Ok(())
    }

    /// How many batches of replays a row gets, for each contender: as many as were asked for, if they are done in time.
    fn batches(&self, skew_us: u64, replay_us: f64) -> usize {
        let one_us = skew_us as f64 + replay_us + PAUSE_NS as f64 / 1000.0;
        let in_time = (self.seconds * 1e6 / one_us) as usize;
        (self.replays as usize).min(in_time).div_ceil(BATCH).max(1)
    }

    /// Replays a graph [`BATCH`] times; the microseconds of each beyond the skew.
    /// `alone_us`: what a replay takes alone, about.
    fn batch(&self, graph: &GraphExec, skew_us: u64, beside_gemm: bool, alone_us: f64) -> Result<Vec<f64>> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        let late = |replay: usize| replay % world_size;
        self.comm.barrier()?;
        if beside_gemm {
            // Longer than the replays, which last longer beside it.
            let lasts = BATCH as f64 * (skew_us as f64 + alone_us + BESIDE_US);
            for _ in 0..(lasts / self.gemm_us / f64::from(GEMMS)).ceil() as usize {
                // SAFETY: three matrices of the kernel's sizes, which nothing else uses and which outlive the streams.
                unsafe { self.gemms.launch(&self.second) }?;
            }
        }
        self.wait_on_gpu(HEAD_START_NS)?;
        for (replay, (start, end)) in self.events.iter().enumerate() {
            let skew_ns = if late(replay) == rank { skew_us * 1000 } else { 0 };
            self.wait_on_gpu(PAUSE_NS + skew_ns)?;
            start.record(&self.stream)?;
            // SAFETY: the tensors and the collectives outlive the streams.
            unsafe { graph.launch(&self.stream) }?;
            end.record(&self.stream)?;
        }
        self.stream.borrow().synchronize()?;
        self.second.borrow().synchronize()?;
        self.ours.check()?;
        let times = self.events.iter().map(|(start, end)| Ok(end.elapsed_since(start)?.as_secs_f64() * 1e6));
        let times = self.comm.exchange_objects(&times.collect::<Result<Vec<f64>>>()?)?;
        // Without a skew no rank is known to start last, and the slowest one counts.
        let beyond = |replay: usize| match skew_us {
            0 => times.iter().map(|of_rank| of_rank[replay]).fold(0.0, f64::max),
            _ => times[late(replay)][replay],
        };
        Ok((0..BATCH).map(beyond).collect())
    }

    fn wait_on_gpu(&self, ns: u64) -> Result<()> {
        // SAFETY: the kernel takes one number and touches no memory.
        Ok(unsafe { self.delay.launch(&self.stream, &LaunchConfig::new(1, 1), &[(&ns).into()]) }?)
    }

    /// Microseconds of a product.
    fn time_gemm(&self) -> Result<f64> {
        let (start, end) = &self.events[0];
        for event in [start, end] {
            // SAFETY: as in `batch`. The first one warms up.
            unsafe { self.gemms.launch(&self.second) }?;
            event.record(&self.second)?;
        }
        self.second.borrow().synchronize()?;
        Ok(end.elapsed_since(start)?.as_secs_f64() * 1e6 / f64::from(GEMMS))
    }
}

fn launch_gemm(gemm: &Function, tensors: &Tensors, stream: StreamRef<'_>) -> Result<()> {
    let tiles = (SIDE / 64) as u32;
    let config = LaunchConfig::with_dimensions([tiles, tiles, 1], [256, 1, 1]);
    let a = tensors.matrices.pointer();
    let (b, c) = (a.offset((SIDE * DEPTH * 4) as u64), a.offset((2 * SIDE * DEPTH * 4) as u64));
    // SAFETY: three matrices of the kernel's sizes, which nothing else uses.
    Ok(unsafe { gemm.launch(stream, &config, &[(&a).into(), (&b).into(), (&c).into()]) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_sorted_times() {
        let times: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        assert_eq!(Quantiles::of(times), Quantiles { p50: 500.0, p99: 990.0, p999: 999.0, max: 999.0 });
        assert_eq!(Quantiles::of(vec![3.0]), Quantiles { p50: 3.0, p99: 3.0, p999: 3.0, max: 3.0 });
    }

    #[test]
    fn lines_stand_under_their_header() {
        let ours = Quantiles { p50: 23.4, p99: 25.0, p999: 26.0, max: 1234.5 };
        let row = Row {
            operation: "reduce_scatter_all_reduce".into(),
            rows: 2048,
            skew_us: 5000,
            beside_gemm: true,
            replays: 2000,
            ours,
            nccl: None,
        };
        for row in [Row { nccl: Some(ours), ..row.clone() }, row] {
            let (line, header) = (line(&row), HEADER);
            let bars = |text: &str| text.match_indices('|').map(|(at, _)| at).collect::<Vec<_>>();
            assert_eq!(bars(&line), bars(header), "{line}\n{header}");
        }
    }
}
