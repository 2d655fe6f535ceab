//! The fused all-reduce on GPUs; `kernels.cuh` has the algorithms, `epilogue.cuh` the operations on the sum.

mod teams;

use antiphon_device::{
    ReduceOp,
    cuda::{Program, StreamRef},
};
use antiphon_fabric::{
    Operation,
    gpu::{
        self, FORMATS, Family, Grid, Launch, Pieces, REDUCE, Reduction, Tenant, Work, kernel_call, kernels,
    },
};
use antiphon_tensor::quantize::TokenRule;

use super::{Accumulation, Quantization, RmsNorm, Scale, Source, Validated, call::validated::Counts};
use crate::{
    AlgorithmTable,
    all_reduce::Algorithm,
    arguments::reduction,
    error::{CollectiveError, Result},
};
use teams::Room;
pub(crate) use teams::Shape;
use teams::Teams;

kernels! {
    /// The kernel of `kernels.cuh`.
    pub(crate) enum Kernel {
        FusedAllReduce = "fused_all_reduce",
    }
}

/// The properties of a call for which the kernel is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fusion {
    pub(crate) reduction: Reduction,
    /// In the words of source.cuh.
    pub(crate) source: &'static str,
    pub(crate) quantization: &'static str,
    /// Which inputs and outputs there are; see source.cuh.
    pub(crate) has: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) shape: Shape,
}

impl Family for Fusion {
    type Kernel = Kernel;
    type Arguments = Fused;
    const NAME: &'static str = "fusion.cuh";
    const SOURCES: &'static [gpu::Source] = &[
        REDUCE,
        FORMATS,
        Fused::SOURCE,
        gpu::Source::new("fusion/gpu/source.cuh", include_str!("source.cuh")),
        gpu::Source::new("fusion/gpu/team.cuh", include_str!("team.cuh")),
        gpu::Source::new("fusion/gpu/quantize.cuh", include_str!("quantize.cuh")),
        gpu::Source::new("fusion/gpu/epilogue.cuh", include_str!("epilogue.cuh")),
        gpu::Source::new("fusion/gpu/kernels.cuh", include_str!("kernels.cuh")),
    ];

    fn define(&self, program: Program, world_size: usize) -> Program {
        self.reduction
            .define(program)
            .define("SOURCE", self.source)
            .define("QUANTIZATION", self.quantization)
            .define("HAS", self.has)
            .define("ALGORITHM", self.algorithm.name().replace('-', "_"))
            .define("IS_ONE_SHOT", u8::from(self.algorithm == Algorithm::OneShot))
            .define("SHORT", u8::from(self.shape.is_short()))
            .define("AT_ONCE", Shape::at_once(world_size))
            .define("SPLIT", u8::from(self.shape.is_split()))
    }

    fn threads(&self) -> u32 {
        self.shape.threads() as u32
    }

    fn most_blocks(&self, world_size: usize) -> u32 {
        self.shape.most_blocks(world_size, self.algorithm)
    }

    /// Teams are made for as many.
    fn least_blocks(&self, world_size: usize) -> u32 {
        self.most_blocks(world_size)
    }

    fn shared_bytes(&self, world_size: usize) -> u32 {
        Teams::most_shared_bytes(self.most_blocks(world_size))
    }
}

/// A sum with what a transformer layer does with it, in the order of the stream.
///
/// # Safety
/// The tensors stay valid, and are not used in another way, until the stream has passed this call.
pub(crate) unsafe fn run(
    tenant: &Tenant,
    table: &AlgorithmTable,
    call: Validated,
    stream: StreamRef<'_>,
) -> Result<()> {
    let parts_of = |algorithm| if algorithm == Algorithm::OneShot { 1 } else { tenant.world_size() };
    let rows = tenant.lane_bytes() / call.row_bytes();
    if rows == 0 && call.tokens > 0 {
        return Err(too_long_for_staging(&call, tenant.lane_bytes()));
    }
    // What is refused has not taken its turn. Another stream may have other multiprocessors.
    let before = tenant.multiprocessors_here();
    let planned = plan(tenant, table, &call)?;
    tenant.enter(stream)?;
    let is_planned = tenant.multiprocessors_here() == before;
    let (algorithm, teams) = if is_planned { planned } else { plan(tenant, table, &call)? };
    let loaded = tenant.load_entered(call.family(algorithm, teams.shape)?, stream)?;
    let work = Work::new(call.signature(algorithm as u8));
    let launch = |start: usize, rows: usize, channels: usize| {
        let room = Room::here(tenant, channels);
        let of_piece = || Teams::of(teams.shape, &call, rows, algorithm, room).expect("a row fits");
        let teams = if rows == call.tokens { teams } else { of_piece() };
        let arguments = Fused::new(&call, start, rows, &teams);
        let grid = Grid::Exact { config: teams.config(), is_small: teams.is_small };
        Launch { kernel: Kernel::FusedAllReduce, grid, work, arguments }
    };
    let parts = parts_of(algorithm);
    let pieces = Pieces { total: call.tokens, most: rows * parts, unit: parts };
    // SAFETY: passed on.
    unsafe { tenant.run(&loaded, pieces, stream, launch) }?;
    Ok(())
}

/// Compiles and loads the program of calls like this one.
pub(crate) fn prepare(tenant: &Tenant, table: &AlgorithmTable, call: &Validated) -> Result<()> {
    let (algorithm, teams) = plan(tenant, table, call)?;
    tenant.load(call.family(algorithm, teams.shape)?)?;
    Ok(())
}

/// The algorithm, which is the same on all ranks, and the teams, if a row fits any.
fn plan(tenant: &Tenant, table: &AlgorithmTable, call: &Validated) -> Result<(Algorithm, Teams)> {
    let (everywhere, here) = (Room::everywhere(tenant, 1), Room::here(tenant, 1));
    let of = |algorithm| -> Result<_> {
        let teams = Teams::new(call, algorithm, everywhere).ok_or_else(|| too_long(call))?;
        Ok((algorithm, teams))
    };
    let best = of(call.algorithm.unwrap_or_else(|| table.algorithm(call.num_bytes())))?;
    let (algorithm, teams) = match best {
        // A plain sum of this size would be faster so, but here whole rows wait for each other.
        (Algorithm::OneShot, teams) if call.algorithm.is_none() && !teams.have_a_row_each(call.tokens) => {
            of(Algorithm::TwoShot)?
        }
        _ => best,
    };
    let teams = match here == everywhere {
        true => teams,
        false => Teams::new(call, algorithm, here).ok_or_else(|| too_long(call))?,
    };
    Ok((algorithm, teams))
}

#[cold]
fn too_long(call: &Validated) -> CollectiveError {
    let expected =
        format!("small enough for a row to fit the shared memory of its blocks, not {}", call.hidden);
    CollectiveError::Refused { operation: Operation::FusedAllReduce.name(), which: "hidden size", expected }
}

#[cold]
fn too_long_for_staging(call: &Validated, lane_bytes: usize) -> CollectiveError {
    let expected = format!(
        "small enough for a row of {} bytes to fit a lane of {lane_bytes} bytes, or more staging",
        call.row_bytes()
    );
    CollectiveError::Refused { operation: Operation::FusedAllReduce.name(), which: "hidden size", expected }
}

impl Validated {
    /// Which inputs and outputs there are, by the bits of source.cuh.
    fn has(&self) -> u32 {
        let weight = |norm: Option<RmsNorm<_>>| norm.is_some_and(|norm| norm.weight.is_some());
        let there = [
            self.sum_out.is_some(),
            self.bias.is_some(),
            self.pre_norm.is_some(),
            weight(self.pre_norm),
            self.residual.is_some(),
            self.residual_out.is_some(),
            self.norm.is_some(),
            weight(self.norm),
            self.norm_out.is_some(),
            self.inverse_rms_out.is_some(),
            self.round_before_weight && weight(self.norm),
        ];
        there.iter().enumerate().map(|(bit, &is_there)| u32::from(is_there) << bit).sum()
    }

    /// The program that serves it.
    fn family(&self, algorithm: Algorithm, shape: Shape) -> Result<Fusion> {
        let reduction = reduction(Operation::FusedAllReduce, self.dtype, ReduceOp::Sum)?;
        Ok(Fusion {
            reduction: reduction.round_each(self.accumulation == Accumulation::Rounded),
            source: match self.source {
                Source::Tensor { .. } => "TENSOR",
                Source::MoeReduction { .. } => "MOE_REDUCTION",
                Source::MoeFinalize { .. } => "MOE_FINALIZE",
            },
            quantization: match self.quantization {
                None => "NONE",
                Some(Quantization::Fp8 { .. }) => "FP8",
                Some(Quantization::Fp8Tokens { .. }) => "FP8_TOKENS",
                Some(Quantization::Fp8Groups { .. }) if self.odd_groups().is_some() => "FP8_ODD_GROUPS",
                Some(Quantization::Fp8Groups { .. }) => "FP8_GROUPS",
                Some(Quantization::NvFp4 { .. }) => "NVFP4",
            },
            has: self.has(),
            algorithm,
            shape,
        })
    }
}

impl Room {
    /// The resources of every rank's GPU that a call with an epilogue may use, if it runs in one of `channels` channels.
    fn everywhere(tenant: &Tenant, channels: usize) -> Self {
        let (world_size, multiprocessors) = (tenant.world_size(), tenant.multiprocessors());
        Self { world_size, multiprocessors, has_clusters: tenant.has_clusters(), channels }
    }

    /// What it may use in the stream that the call comes on. Where that has a part of the GPU's multiprocessors, they may not
    /// be such as run clusters.
    fn here(tenant: &Tenant, channels: usize) -> Self {
        let (all, here) = (Self::everywhere(tenant, channels), tenant.multiprocessors_here());
        Self { multiprocessors: here, has_clusters: all.has_clusters && here == all.multiprocessors, ..all }
    }
}

kernel_call! {
    /// A call for some of its tokens. An address is 0 if the tensor is absent.
    #[derive(Debug)]
    pub(crate) struct Fused = "fused" {
        /// The tensor; the experts' outputs; the rows.
        input: *const u8,
        /// The shared expert's output.
        shared: *const u8,
        /// Of the experts.
        weights: *const u8,
        /// Of the rows.
        index: *const i32,
        bias: *const u8,
        pre_weight: *const u8,
        residual: *const u8,
        weight: *const u8,
        sum_out: *mut u8,
        residual_out: *mut u8,
        norm_out: *mut u8,
        inverse_rms_out: *mut float,
        codes: *mut u8,
        scales: *mut u8,
        scale: *const float,
        /// Of the call.
        tokens: u32,
        /// Tokens of this piece.
        first: u32,
        count: u32,
        /// Vectors of a row.
        vectors: u32,
        /// Of the rank, or of a token.
        experts: u32,
        /// The rows that there are.
        rows: u32,
        /// Vectors that share a scale.
        group: u32,
        /// Of the scales.
        layout: u32,
        /// FP8_TOKENS: whether scales are products with 1/448, not quotients.
        reciprocal: u32,
        /// Slices of a row: 32 vectors each.
        slices: u32,
        /// Vectors of a row that a thread has at most.
        rounds: u32,
        /// Teams that reduce, where others do the rest.
        reducing: u32,
        inverse_hidden: f32 as float,
        scale_value: f32 as float,
        eps: f32 as float,
        pre_eps: f32 as float,
        weight_bias: f32 as float,
        routed_scaling: f32 as float,
    }
}

impl Fused {
    /// The part of the call for `count` tokens from `first` on.
    fn new(call: &Validated, first: usize, count: usize, teams: &Teams) -> Self {
        let (mut scale, mut group, mut layout) = (Scale::Value(0.0), 0, 0);
        let mut reciprocal = false;
        match call.quantization {
            None => {}
            Some(Quantization::Fp8Tokens { rule }) => reciprocal = rule == TokenRule::Reciprocal,
            Some(Quantization::Fp8 { scale: factor }) => scale = factor,
            Some(Quantization::Fp8Groups { group: elements }) => {
                let lanes = if call.odd_groups().is_some() { 1 } else { 16 / call.dtype.size() };
                group = (elements / lanes) as u32;
            }
            Some(Quantization::NvFp4 { scale: factor, layout: code }) => {
                (scale, layout) = (factor, u32::from(code.code()));
            }
        }
        let (scale, scale_value) = match scale {
            Scale::Value(value) => (0, value),
            Scale::Tensor(at) => (at as u64, 0.0),
        };
        let address = |tensor: Option<*mut u8>| tensor.map_or(0, |at| at as u64);
        let weight = |norm: Option<RmsNorm<_>>| address(norm.and_then(|norm| norm.weight));
        let eps = |norm: Option<RmsNorm<*mut u8>>| norm.map_or(0.0, |norm| norm.eps);
        let mut fused = Self {
            input: 0,
            shared: 0,
            weights: 0,
            index: 0,
            bias: address(call.bias),
            pre_weight: weight(call.pre_norm),
            residual: address(call.residual),
            weight: weight(call.norm),
            sum_out: address(call.sum_out),
            residual_out: address(call.residual_out),
            norm_out: address(call.norm_out),
            inverse_rms_out: address(call.inverse_rms_out),
            codes: address(call.codes),
            scales: address(call.scales),
            scale,
            tokens: call.tokens as u32,
            first: first as u32,
            count: count as u32,
            vectors: call.vectors() as u32,
            experts: 0,
            rows: 0,
            group,
            layout,
            reciprocal: reciprocal.into(),
            slices: call.slices() as u32,
            rounds: teams.rounds,
            reducing: teams.reducing,
            inverse_hidden: 1.0 / call.hidden as f32,
            scale_value,
            eps: eps(call.norm),
            pre_eps: eps(call.pre_norm),
            weight_bias: call.weight_bias,
            routed_scaling: 1.0,
        };
        let Counts { experts, rows, top_k } = call.counts;
        match call.source {
            Source::Tensor { input } => fused.input = input as u64,
            Source::MoeReduction { experts: outputs, scales, shared } => {
                (fused.input, fused.experts) = (outputs as u64, experts as u32);
                (fused.weights, fused.shared) = (scales as u64, shared as u64);
            }
            Source::MoeFinalize { rows: outputs, index, scales, shared, routed_scaling } => {
                (fused.input, fused.rows, fused.index) =
                    (outputs as u64, rows.min(1 << 31) as u32, index as u64);
                (fused.experts, fused.weights) = (top_k as u32, address(scales));
                (fused.shared, fused.routed_scaling) = (address(shared), routed_scaling);
            }
        }
        fused
    }
}
