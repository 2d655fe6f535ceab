//! Times fused all-reduces on the GPUs of this machine, beside the all-reduce alone and the all-reduce with a separate kernel
//! behind it (`cuda_fusion/norm.cuh`), which fusion is to beat.

#[path = "cuda_fusion/buffers.rs"]
mod buffers;
#[path = "cuda_fusion/separate.rs"]
mod separate;
mod timing;

use std::time::Instant;

use antiphon_collectives::{
    CollectiveError, ReduceOp, StreamCollectives,
    cuda::{Algorithm, CudaCollectives},
    fusion::{FusedAllReduce, Quantization, Scale, Source},
};
use antiphon_device::{
    DeviceError,
    cuda::{Context, CudaError, Driver, Stream},
};
use antiphon_fabric::{Communicator, FabricError, LocalWorld};
use antiphon_tensor::{DType, ScaleLayout, quantize::TokenRule};
use buffers::{Buffers, EXPERTS};
use separate::{PER_THREAD, Rows, Separate};
use timing::{Error, REPLAYS};

const USAGE: &str = "cuda_fusion [RANKS] [--tokens 1,4,…] [--only all_reduce,norm,…] [--algorithms] [--early]

  --tokens      numbers of tokens, of 7168 elements of bf16
  --only        of: all_reduce norm fp8 fp4 fp8-tokens fp8-groups moe finalize separate-norm separate-fp8
  --algorithms  each by one-shot and by two-shot too
  --early       kernels let the kernel behind them begin at once (`start_dependents_early`)";
const TOKENS: [usize; 7] = [1, 4, 16, 64, 256, 512, 2048];
const HIDDEN: usize = 7168;
const EPS: f32 = 1e-6;
const SCALE: f32 = 1.0 / 64.0;
/// One-shot takes ages with more.
const ONE_SHOT_BYTES: usize = 8 << 20;

/// What is timed. All but the first add a residual, keep the sum, and norm.
#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    AllReduce,
    Norm,
    Fp8,
    Fp4,
    Fp8Tokens,
    Fp8Groups,
    Moe,
    Finalize,
    /// The first, then a kernel that does what `Norm` or `Fp8` does.
    SeparateNorm,
    SeparateFp8,
}

impl What {
    const ALL: [(&str, Self); 10] = [
        ("all_reduce", Self::AllReduce),
        ("norm", Self::Norm),
        ("fp8", Self::Fp8),
        ("fp4", Self::Fp4),
        ("fp8-tokens", Self::Fp8Tokens),
        ("fp8-groups", Self::Fp8Groups),
        ("moe", Self::Moe),
        ("finalize", Self::Finalize),
        ("separate-norm", Self::SeparateNorm),
        ("separate-fp8", Self::SeparateFp8),
    ];

    fn is_separate(self) -> bool {
        matches!(self, Self::SeparateNorm | Self::SeparateFp8)
    }

    fn norms_to_memory(self) -> bool {
        matches!(self, Self::Norm | Self::Moe | Self::Finalize | Self::SeparateNorm)
    }
}

struct Options {
    ranks: usize,
    tokens: Vec<usize>,
    columns: Vec<(&'static str, What)>,
    algorithms: Vec<Option<Algorithm>>,
    early: bool,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>, gpus: usize) -> Option<Self> {
        let mut options = Self {
            ranks: gpus,
            tokens: TOKENS.into(),
            columns: What::ALL.into(),
            algorithms: vec![None],
            early: false,
        };
        while let Some(word) = words.next() {
            match &*word {
                "--algorithms" => options.algorithms.extend(Algorithm::ALL.map(Some)),
                "--early" => options.early = true,
                "--tokens" => {
                    options.tokens =
                        words.next()?.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
                }
                "--only" => {
                    let of = |name: &str| What::ALL.into_iter().find(|(known, _)| *known == name);
                    options.columns = words.next()?.split(',').map(of).collect::<Option<_>>()?;
                }
                ranks => options.ranks = ranks.parse().ok()?,
            }
        }
        Some(options)
    }
}

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let Some(options) = Options::parse(std::env::args().skip(1), driver.device_count()? as usize) else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    println!(
        "{HIDDEN} bf16 for a token, {} GPUs; µs per call in a graph, median of {REPLAYS} replays, slowest rank",
        options.ranks
    );
    for outcome in LocalWorld::run(options.ranks, |comm| rank_main(&comm, driver, &options)) {
        outcome?;
    }
    Ok(())
}

fn rank_main(comm: &Communicator, driver: &'static Driver, options: &Options) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32)?)?;
    let collectives = CudaCollectives::new(comm, &context)?;
    collectives.prepare(DType::BF16, ReduceOp::Sum)?;
    collectives.start_dependents_early(options.early);
    let stream = context.stream()?;
    let most = options.tokens.iter().copied().max().unwrap_or(1);
    let buffers = Buffers::new(&collectives, &stream, HIDDEN, most)?;
    let separate = Separate::new(&context, HIDDEN)?;
    let say = |text: String| {
        if comm.rank() == 0 {
            println!("{text}");
        }
    };
    let names: String = options.columns.iter().map(|(name, _)| format!(" {name:>13}")).collect();
    say(format!("{:>6} {:>9}{names}", "tokens", "algorithm"));
    let (mut ratios, mut checked) = (Vec::new(), 0);
    for &tokens in &options.tokens {
        buffers.index_rows(&stream, tokens)?;
        let layer = Layer {
            comm,
            collectives: &collectives,
            stream: &stream,
            buffers: &buffers,
            separate: &separate,
            tokens,
        };
        for &algorithm in &options.algorithms {
            let mut times = Vec::new();
            for &(_, what) in &options.columns {
                let skip = algorithm == Some(Algorithm::OneShot) && layer.bytes() > ONE_SHOT_BYTES;
                times.push(if skip { f64::NAN } else { layer.check_and_time(what, algorithm)? });
                checked += usize::from(!skip);
            }
            let row: String = times.iter().map(|time| format!(" {time:>13.2}")).collect();
            say(format!("{tokens:>6} {:>9}{row}", algorithm.map_or("", Algorithm::name)));
            let of =
                |wanted| options.columns.iter().position(|(_, what)| *what == wanted).map(|at| times[at]);
            for (name, fused, separate) in
                [("norm", What::Norm, What::SeparateNorm), ("fp8", What::Fp8, What::SeparateFp8)]
            {
                if let (None, Some(fused), Some(separate)) = (algorithm, of(fused), of(separate)) {
                    ratios.push(format!("{name} of {tokens}: {:.2}", fused / separate));
                }
            }
        }
    }
    say(format!("fused / separate: {}", ratios.join(", ")));
    say(format!("checked: the results of {checked} calls are finite and complete"));
    let one = Layer {
        comm,
        collectives: &collectives,
        stream: &stream,
        buffers: &buffers,
        separate: &separate,
        tokens: 1,
    };
    let of = |what| one.host_time(|| one.call(what, 0, None));
    let (all_reduce, norm, fp8) = (of(What::AllReduce)?, of(What::Norm)?, of(What::Fp8)?);
    let launch = one.host_time(|| one.norm_separately(false, 0).map_err(device))?;
    say(format!(
        "host time of an eager call, µs: all_reduce {all_reduce:.2}, norm {norm:.2}, fp8 {fp8:.2}; \
         of a launch alone {launch:.2}"
    ));
    Ok(())
}

struct Layer<'a> {
    comm: &'a Communicator,
    collectives: &'a CudaCollectives,
    stream: &'a Stream,
    buffers: &'a Buffers,
    separate: &'a Separate,
    tokens: usize,
}

impl Layer<'_> {
    fn bytes(&self) -> usize {
        2 * self.tokens * HIDDEN
    }

    /// The variant counts where the kernel is a separate one.
    fn call(&self, what: What, variant: usize, algorithm: Option<Algorithm>) -> Result<(), CollectiveError> {
        if what == What::AllReduce || what.is_separate() {
            self.all_reduce(algorithm)?;
        }
        match what {
            What::AllReduce => Ok(()),
            What::SeparateNorm | What::SeparateFp8 => {
                self.norm_separately(what == What::SeparateFp8, variant).map_err(device)
            }
            _ => self.fused(what, algorithm),
        }
    }

    fn all_reduce(&self, algorithm: Option<Algorithm>) -> Result<(), CollectiveError> {
        let (buffers, stream) = (self.buffers, self.stream.borrow());
        let input = buffers.matrix(&buffers.input, self.tokens);
        let mut sum = buffers.matrix_mut(&buffers.sum, self.tokens);
        // SAFETY: the buffers live until the stream is done.
        unsafe {
            match algorithm {
                None => self.collectives.all_reduce(input, &mut sum, ReduceOp::Sum, stream),
                Some(given) => {
                    self.collectives.all_reduce_with(input, &mut sum, ReduceOp::Sum, given, stream)
                }
            }
        }
    }

    fn norm_separately(&self, fp8: bool, variant: usize) -> Result<(), CudaError> {
        let Buffers { sum, residual, gamma, residual_out, norm, codes, .. } = self.buffers;
        let rows = Rows {
            tokens: self.tokens,
            sum: sum.pointer(),
            residual: residual.pointer(),
            gamma: gamma.pointer(),
            residual_out: residual_out.pointer(),
            out: if fp8 { codes.pointer() } else { norm.pointer() },
            eps: EPS,
            factor: 1.0 / SCALE,
        };
        // SAFETY: as for the all-reduce.
        unsafe { self.separate.launch(fp8, variant, &rows, self.stream.borrow()) }
    }

    fn fused(&self, what: What, algorithm: Option<Algorithm>) -> Result<(), CollectiveError> {
        let (buffers, tokens) = (self.buffers, self.tokens);
        let matrix = |memory| buffers.matrix(memory, tokens);
        let source = match what {
            What::Moe => Source::MoeReduction {
                experts: buffers.view(&buffers.experts, DType::BF16, &[EXPERTS, tokens, HIDDEN]),
                scales: buffers.view(&buffers.expert_scales, DType::F32, &[EXPERTS, tokens]),
                shared: matrix(&buffers.input),
            },
            What::Finalize => Source::MoeFinalize {
                rows: buffers.view(&buffers.experts, DType::BF16, &[EXPERTS * tokens, HIDDEN]),
                index: buffers.view(&buffers.index, DType::I32, &[tokens, EXPERTS]),
                scales: Some(buffers.view(&buffers.weights, DType::BF16, &[tokens, EXPERTS])),
                shared: Some(matrix(&buffers.input)),
                routed_scaling: 1.0,
            },
            _ => Source::Tensor { input: matrix(&buffers.input) },
        };
        let call = FusedAllReduce::of_source(source)
            .algorithm(algorithm)
            .residual(matrix(&buffers.residual))
            .residual_out(buffers.matrix_mut(&buffers.residual_out, tokens))
            .rms_norm(Some(buffers.view(&buffers.gamma, DType::BF16, &[HIDDEN])), EPS);
        let quantization = match what {
            What::Fp8 => Some(Quantization::Fp8 { scale: Scale::Value(SCALE) }),
            What::Fp4 => {
                let layout = ScaleLayout::Swizzled128x4;
                Some(Quantization::NvFp4 { scale: Scale::Value(448.0), layout })
            }
            What::Fp8Tokens => Some(Quantization::Fp8Tokens { rule: TokenRule::default() }),
            What::Fp8Groups => Some(Quantization::Fp8Groups { group: 128 }),
            _ => None,
        };
        let bytes = |memory: &antiphon_device::cuda::DeviceMemory| {
            buffers.view_mut(memory, DType::U8, &[memory.len()])
        };
        let call = match quantization {
            None => call.norm_out(buffers.matrix_mut(&buffers.norm, tokens)),
            Some(form) => call.quantize(form, bytes(&buffers.codes), Some(bytes(&buffers.scales))),
        };
        // SAFETY: as for the all-reduce.
        unsafe { self.collectives.all_reduce_fused(call, self.stream.borrow()) }
    }

    /// Microseconds in a graph, of the fastest variant.
    fn check_and_time(&self, what: What, algorithm: Option<Algorithm>) -> Result<f64, Error> {
        let calls = match self.bytes() {
            0..1_000_000 => 100,
            1_000_000..10_000_000 => 45,
            _ => 15,
        };
        let variants = if what.is_separate() { PER_THREAD.len() } else { 1 };
        let mut best = f64::INFINITY;
        for variant in 0..variants {
            // Once by itself, which compiles what is missing: a capture could not.
            self.buffers.spoil(self.stream)?;
            self.call(what, variant, algorithm)?;
            self.check(what)?;
            let call = || self.call(what, variant, algorithm);
            best = best.min(timing::time(self.comm, self.collectives, self.stream, calls, call)?);
        }
        Ok(best)
    }

    /// That every element was written, and is finite. Codes begin as NaN of FP8, and as a pair of FP4 that is rare.
    fn check(&self, what: What) -> Result<(), Error> {
        let (buffers, count) = (self.buffers, self.tokens * HIDDEN);
        let mut written = Vec::new();
        match what {
            What::AllReduce => written.push(&buffers.sum),
            _ => written.push(&buffers.residual_out),
        }
        if what.norms_to_memory() {
            written.push(&buffers.norm);
        }
        for memory in written {
            let values = buffers.read(memory, self.stream, count)?;
            self.collectives.check()?;
            if let Some(at) = values.iter().position(|x| !x.is_finite()) {
                return Err(
                    format!("{what:?} of {} tokens: element {at} is {}", self.tokens, values[at]).into()
                );
            }
        }
        if what != What::AllReduce && !what.norms_to_memory() {
            let bytes = if what == What::Fp4 { count / 2 } else { count };
            let mut codes = vec![0; bytes];
            buffers.codes.read(self.stream, 0, &mut codes)?;
            let left = codes.iter().filter(|&&code| code == 0xFF).count();
            let most = if what == What::Fp4 { bytes / 8 } else { 0 };
            if left > most {
                return Err(format!("{what:?} of {} tokens: {left} codes are NaN", self.tokens).into());
            }
        }
        Ok(())
    }

    /// Microseconds of this thread for a call that is not in a graph: the median of batches that the stream has room for.
    fn host_time(&self, call: impl Fn() -> Result<(), CollectiveError>) -> Result<f64, Error> {
        const CALLS: u32 = 200;
        let mut times = Vec::new();
        for _ in 0..20 {
            self.comm.barrier()?;
            let start = Instant::now();
            (0..CALLS).try_for_each(|_| call())?;
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
            self.stream.borrow().synchronize()?;
        }
        self.collectives.check()?;
        Ok(timing::median(&mut times))
    }
}

fn device(error: CudaError) -> CollectiveError {
    FabricError::from(DeviceError::from(error)).into()
}
