//! `--tail`: how long calls take when the ranks do not start together, and how long at worst.
//!
//! A graph of [`CALLS`] calls is replayed without synchronising the GPUs before. In each replay the GPU of another rank is late
//! by the skew. The reported time is the time beyond the skew: from the start of the late rank to its end. Ours and
//! NCCL's replays take turns, in the same processes. Behind NCCL's all-reduce a separate kernel does the other operations of
//! our fused call. Forms of dispatch and combine that NCCL has no calls for are ours alone.

use antiphon::{
    collectives::all_reduce::{Algorithm, AllReduceOptions},
    device::{
        ReduceOp,
        cuda::{Event, Function, GraphExec, LaunchConfig, Stream, StreamRef},
    },
    operation::Operation,
    tensor::{DType, bf16},
};

use super::{Contenders, Families, OnStream, Rank, collectives, forms, fused, tensors::Tensor, timing};
use crate::{
    Found, Quantiles, Result, Settings, Subject, Tail as Options, TailRow,
    case::{Case, Collective},
    host::total,
};

/// The arguments that nothing is measured for.
pub(crate) const REFUSED: &str = "--tail measures all-reduce, all-gather, all-to-all, mixed, dispatch and combine at its own sizes, and draws nothing";
/// The most rows of a tensor.
pub const MOST_ROWS: u64 = 2048;
/// The elements of a row: as wide as large models are.
pub const HIDDEN: usize = 7168;
/// Their kind.
pub const DTYPE: DType = DType::BF16;
/// Calls in one graph.
pub const CALLS: u32 = 10;
/// The driver takes the highest that there is.
pub(super) const HIGHEST_PRIORITY: i32 = i32::MIN;
/// Replays that are submitted at a time.
const BATCH: usize = 50;
/// Between two replays, so that a rank's calls never wait for its host.
const PAUSE_NS: u64 = 20_000;
const HEAD_START_NS: u64 = 400_000;
/// Products in one graph, and what a replay takes more beside them at most, in microseconds.
const GEMMS: u32 = 50;
const BESIDE_US: f64 = 1500.0;

/// The side of the matrices that are multiplied, as in kernels.cuh.
const SIDE: usize = 2048;
const DEPTH: usize = 256;

/// The call that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// All-reduce, on registered memory or not.
    Sum { registered: bool },
    /// All-reduce with what follows it in a model.
    Fused { fp8: bool },
    /// A collective that the table of times measures too, by the same contenders.
    Of(Collective),
    /// A form of dispatch or combine of its own.
    Form(Operation),
}

impl Call {
    /// Those that are measured where these collectives were asked for.
    fn all(settings: &Settings) -> Vec<Self> {
        use Operation::*;
        let sums = [
            Self::Sum { registered: false },
            Self::Fused { fp8: false },
            Self::Fused { fp8: true },
            Self::Sum { registered: true },
        ];
        let plain = [AllGather, AllToAll].map(Collective::Of);
        let forms =
            |of, forms: [Operation; 2]| [Self::Of(of)].into_iter().chain(forms.map(Self::Form)).collect();
        match settings.subject {
            Subject::All => sums.into_iter().chain(plain.map(Self::Of)).collect(),
            Subject::Mixed => settings.collectives().into_iter().map(Self::Of).collect(),
            Subject::One(Collective::ALL_REDUCE) => sums.into(),
            Subject::One(of @ Collective::DISPATCH) => forms(of, [DispatchToSlots, DispatchByExpert]),
            Subject::One(of @ Collective::COMBINE) => forms(of, [CombineFromSlots, CombineByExpert]),
            Subject::One(of) => plain.into_iter().filter(|&plain| plain == of).map(Self::Of).collect(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sum { registered: false } => "sum",
            Self::Sum { registered: true } => "registered",
            Self::Fused { fp8: false } => "norm",
            Self::Fused { fp8: true } => "fp8",
            Self::Of(collective) => collective.name(),
            Self::Form(operation) => operation.name(),
        }
    }

    /// Its contenders for `rows` rows; `None` for too many.
    fn contenders<'a>(self, families: &'a Families<'a>, rows: usize) -> Result<Option<Contenders<'a>>> {
        let rank = families.rank;
        let case = |collective| {
            let bytes = (rows * HIDDEN * DTYPE.size()) as u64;
            Case { dtype: DTYPE, ..rank.settings.case(collective, bytes) }
        };
        Ok(Some(match self {
            Self::Sum { registered } => {
                let algorithm = registered.then_some(Algorithm::TwoShot);
                let how = AllReduceOptions { algorithm, registered };
                let case = Case { op: ReduceOp::Sum, how, ..case(Collective::ALL_REDUCE) };
                collectives::contenders::<bf16>(rank, &[case])?
            }
            Self::Fused { fp8 } => fused::contenders(rank, fp8, DTYPE, [rows, HIDDEN])?,
            Self::Of(collective) => families.contenders(&[case(collective)])?,
            Self::Form(operation) => return forms::contenders(rank, operation, [rows, HIDDEN]),
        }))
    }
}

/// Whether something is measured for these settings.
pub(crate) fn measures(settings: &Settings) -> bool {
    !Call::all(settings).is_empty()
}

pub(super) fn run(rank: &Rank<'_>, options: &Options) -> Result<()> {
    let tail = Tail::new(rank, options)?;
    let families = Families::new(rank)?;
    for call in Call::all(rank.settings) {
        for &rows in &options.rows {
            if let Some(contenders) = call.contenders(&families, rows as usize)? {
                tail.measure(contenders, call, rows as usize)?;
            }
        }
    }
    Ok(())
}

/// The resources of a rank for measuring.
struct Tail<'a> {
    rank: &'a Rank<'a>,
    options: &'a Options,
    second: Stream,
    delay: Function,
    gemms: GraphExec,
    gemm_us: f64,
    events: Vec<(Event, Event)>,
    /// What is multiplied, while the graph lives.
    _matrices: Tensor,
}

impl<'a> Tail<'a> {
    fn new(rank: &'a Rank<'a>, options: &'a Options) -> Result<Self> {
        let context = rank.context;
        let [delay, gemm] = timing::kernels(context, ["delay", "gemm"])?;
        let events = (0..BATCH).map(|_| Ok((Event::with_time(context)?, Event::with_time(context)?)));
        let second = context.stream()?;
        let shape = [2 * SIDE * DEPTH + SIDE * SIDE];
        let matrices = Tensor::zeros(context, &second, DType::F32, &shape)?;
        let gemms = timing::graph(&second, GEMMS, |stream| launch_gemm(&gemm, &matrices, stream))?;
        let events = events.collect::<Result<_>>()?;
        let mut tail =
            Self { rank, options, second, delay, gemms, gemm_us: 1.0, events, _matrices: matrices };
        tail.gemm_us = tail.time_gemm()?;
        rank.note(format!("a product of {SIDE} × {DEPTH} × {SIDE} takes {:.0} µs", tail.gemm_us));
        Ok(tail)
    }

    /// Ours, and the same by NCCL, by each of the skews.
    fn measure(&self, contenders: Contenders<'_>, call: Call, rows: usize) -> Result<()> {
        let stream = self.rank.stream.borrow();
        let graph = |contender: &mut OnStream<'_>| -> Result<GraphExec> {
            contender.call(stream)?; // what is loaded and connected at the first call is not captured
            stream.synchronize()?;
            self.rank.comm.barrier()?;
            timing::graph(self.rank.stream, CALLS, |stream| contender.call(stream))
        };
        let Contenders { ours, nccl } = contenders;
        let mut contenders: Vec<OnStream<'_>> = ours.into_iter().chain(nccl).collect();
        let graphs = contenders.iter_mut().map(graph).collect::<Result<Vec<_>>>()?;
        let warm_up = self.batch(&graphs[graphs.len() - 1], 0, false, 0.0)?;
        let alone_us = Quantiles::of(warm_up).p50;
        self.batch(&graphs[0], 0, false, 0.0)?;
        for &beside_gemm in if self.options.alone { &[false][..] } else { &[false, true] } {
            for &skew_us in &self.options.skews {
                let batches = self.batches(skew_us, if beside_gemm { BESIDE_US } else { alone_us });
                let mut times = vec![Vec::new(); graphs.len()];
                for _ in 0..batches {
                    for (times, graph) in times.iter_mut().zip(&graphs) {
                        times.extend(self.batch(graph, skew_us, beside_gemm, alone_us)?);
                    }
                }
                let replays = times[0].len();
                let mut times = times.into_iter().map(Quantiles::of);
                self.rank.report(Found::Tail(TailRow {
                    operation: call.name().to_owned(),
                    rows,
                    skew_us,
                    beside_gemm,
                    replays,
                    ours: times.next().expect("ours is always there"),
                    nccl: times.next(),
                }));
            }
        }
        drop(graphs); // before the memory that they read and write
        contenders.into_iter().zip(["ours", "NCCL"]).try_for_each(|(mut contender, whose)| {
            let wrong = total(self.rank.comm, contender.check(stream)?)?;
            self.rank.note_wrong(whose, call.name(), wrong);
            contender.finish()
        })
    }

    /// How many batches of replays a row gets, for each contender: as many as were asked for, if they are done in time.
    fn batches(&self, skew_us: u64, replay_us: f64) -> usize {
        let replays = self.rank.settings.pace.iterations.unwrap_or(u32::MAX).max(1);
        let one_us = skew_us as f64 + replay_us + PAUSE_NS as f64 / 1000.0;
        let in_time = (self.rank.settings.pace.seconds.as_secs_f64() * 1e6 / one_us) as usize;
        (replays as usize).min(in_time).div_ceil(BATCH).max(1)
    }

    /// Replays a graph [`BATCH`] times; the microseconds of each beyond the skew.
    /// `alone_us`: what a replay takes alone, about.
    fn batch(&self, graph: &GraphExec, skew_us: u64, beside_gemm: bool, alone_us: f64) -> Result<Vec<f64>> {
        let (rank, world_size) = (self.rank.comm.rank(), self.rank.comm.world_size());
        let late = |replay: usize| replay % world_size;
        self.rank.comm.barrier()?;
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
            start.record(self.rank.stream)?;
            // SAFETY: the tensors and the collectives outlive the streams.
            unsafe { graph.launch(self.rank.stream) }?;
            end.record(self.rank.stream)?;
        }
        self.rank.stream.borrow().synchronize()?;
        self.second.borrow().synchronize()?;
        self.rank.ours.check()?;
        let times = self.events.iter().map(|(start, end)| Ok(end.elapsed_since(start)?.as_secs_f64() * 1e6));
        let times = self.rank.comm.exchange_objects(&times.collect::<Result<Vec<f64>>>()?)?;
        // Without a skew no rank is known to start last, and the slowest one counts.
        let beyond = |replay: usize| match skew_us {
            0 => times.iter().map(|of_rank| of_rank[replay]).fold(0.0, f64::max),
            _ => times[late(replay)][replay],
        };
        Ok((0..BATCH).map(beyond).collect())
    }

    fn wait_on_gpu(&self, ns: u64) -> Result<()> {
        // SAFETY: the kernel takes one number and touches no memory.
        Ok(unsafe { self.delay.launch(self.rank.stream, &LaunchConfig::new(1, 1), &[(&ns).into()]) }?)
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

fn launch_gemm(gemm: &Function, matrices: &Tensor, stream: StreamRef<'_>) -> Result<()> {
    let tiles = (SIDE / 64) as u32;
    let config = LaunchConfig::with_dimensions([tiles, tiles, 1], [256, 1, 1]);
    let a = matrices.pointer();
    let (b, c) = (a.offset((SIDE * DEPTH * 4) as u64), a.offset((2 * SIDE * DEPTH * 4) as u64));
    // SAFETY: three matrices of the kernel's sizes, which nothing else uses.
    Ok(unsafe { gemm.launch(stream, &config, &[(&a).into(), (&b).into(), (&c).into()]) }?)
}
