//! The fused all-reduce on GPUs; `kernels.cuh` has the algorithms, `epilogue.cuh` what is done with the sum.

use std::ptr::null;

use antiphon_device::{
    ReduceOp,
    cuda::{KernelArgument, Program, StreamRef},
};
use antiphon_fabric::{
    Operation,
    gpu::{Family, Grid, Launch, Pieces, REDUCE, Reduction, Source, Tenant, Work, kernels},
};
use antiphon_tensor::Device;

use super::{
    Accumulation, Checked, FusedAllReduce, Shape, Teams,
    checked::{CheckedNorm, CheckedQuantization, CheckedScale, CheckedSource},
    teams::Room,
};
use crate::{
    all_reduce::Algorithm,
    cuda::{CudaCollectives, reduction},
    error::{CollectiveError, Result},
};

kernels! {
    /// The kernel of `kernels.cuh`.
    pub(crate) enum Kernel {
        FusedAllReduce = "fused_all_reduce",
    }
}

/// What the kernel is specialised in.
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
    const SOURCES: &'static [Source] = &[
        REDUCE,
        Source { name: "fusion/source.cuh", text: include_str!("source.cuh") },
        Source { name: "fusion/team.cuh", text: include_str!("team.cuh") },
        Source { name: "fusion/quantize.cuh", text: include_str!("quantize.cuh") },
        Source { name: "fusion/epilogue.cuh", text: include_str!("epilogue.cuh") },
        Source { name: "fusion/kernels.cuh", text: include_str!("kernels.cuh") },
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

    fn shared_bytes(&self) -> u32 {
        Teams::most_shared_bytes()
    }
}

impl CudaCollectives {
    /// A sum with what a transformer layer does with it, in the order of the stream; see [`fusion`](crate::fusion).
    ///
    /// # Errors
    /// [`CollectiveError`] for arguments that make no sense; what an earlier call left behind, as
    /// [`check`](Self::check).
    ///
    /// # Safety
    /// The tensors stay valid, and are not used in another way, until the stream has passed this call.
    pub unsafe fn all_reduce_fused(&self, call: FusedAllReduce<'_>, stream: StreamRef<'_>) -> Result<()> {
        let call = Checked::new(Device::Cuda(self.context().device().ordinal()), &call)?;
        self.tenant.enter(stream)?;
        let (algorithm, teams) = self.plan(&call).ok_or_else(|| too_long(&call))?;
        let loaded = self.tenant.load(call.family(algorithm, teams.shape)?)?;
        let work = Work::new(call.signature(algorithm as u8));
        let of = |start: usize, rows: usize, channels: usize| {
            let room = Room::here(&self.tenant, channels);
            let of_piece = || Teams::of(teams.shape, &call, rows, algorithm, room).expect("a row fits");
            let teams = if rows == call.tokens { teams } else { of_piece() };
            let arguments = Fused::new(&call, start, rows, &teams);
            let grid = Grid::Exact { config: teams.config(), is_small: teams.is_small };
            Launch { kernel: Kernel::FusedAllReduce, grid, work, arguments }
        };
        let parts = if algorithm == Algorithm::OneShot { 1 } else { self.world_size() };
        let rows = self.tenant.lane_bytes() / call.row_bytes();
        if rows == 0 && call.tokens > 0 {
            return Err(too_long_for_staging(&call, self.tenant.lane_bytes()));
        }
        let pieces = Pieces { total: call.tokens, most: rows * parts, unit: parts };
        // SAFETY: passed on.
        unsafe { self.tenant.run(&loaded, pieces, stream, of) }?;
        Ok(())
    }

    /// Compiles and loads the program of calls like this one, of as many tokens, so that no call has to. From the cache on disk
    /// it takes some milliseconds, else about a third of a second. Not while a stream is being captured. Nothing is computed.
    ///
    /// # Errors
    /// As [`all_reduce_fused`](Self::all_reduce_fused).
    pub fn prepare_fused(&self, call: &FusedAllReduce<'_>) -> Result<()> {
        let call = Checked::new(Device::Cuda(self.context().device().ordinal()), call)?;
        let (algorithm, teams) = self.plan(&call).ok_or_else(|| too_long(&call))?;
        self.tenant.load(call.family(algorithm, teams.shape)?)?;
        Ok(())
    }

    /// By which algorithm, the same on all ranks, and in which teams, if a row fits any.
    fn plan(&self, call: &Checked) -> Option<(Algorithm, Teams)> {
        let (everywhere, here) = (Room::everywhere(&self.tenant, 1), Room::here(&self.tenant, 1));
        let of = |algorithm| Some((algorithm, Teams::new(call, algorithm, everywhere)?));
        let best = of(call.algorithm.unwrap_or_else(|| self.algorithm_for(call.num_bytes())))?;
        let (algorithm, teams) = match best {
            // A plain sum of this size would be faster so, but here whole rows wait for each other.
            (Algorithm::OneShot, teams)
                if call.algorithm.is_none() && !teams.have_a_row_each(call.tokens) =>
            {
                of(Algorithm::TwoShot)?
            }
            _ => best,
        };
        let teams = if here == everywhere { teams } else { Teams::new(call, algorithm, here)? };
        Some((algorithm, teams))
    }
}

#[cold]
fn too_long(call: &Checked) -> CollectiveError {
    let expected =
        format!("small enough for a row to fit the shared memory of its blocks, not {}", call.hidden);
    CollectiveError::Refused { operation: Operation::FusedAllReduce.name(), which: "hidden size", expected }
}

#[cold]
fn too_long_for_staging(call: &Checked, lane_bytes: usize) -> CollectiveError {
    let expected = format!(
        "small enough for a row of {} bytes to fit a lane of {lane_bytes} bytes, or more staging",
        call.row_bytes()
    );
    CollectiveError::Refused { operation: Operation::FusedAllReduce.name(), which: "hidden size", expected }
}

impl Checked {
    /// Which inputs and outputs there are, by the bits of source.cuh.
    fn has(&self) -> u32 {
        let weight = |norm: Option<CheckedNorm>| norm.is_some_and(|norm| !norm.weight.is_null());
        let there = [
            !self.sum_out.is_null(),
            !self.bias.is_null(),
            self.pre_norm.is_some(),
            weight(self.pre_norm),
            !self.residual.is_null(),
            !self.residual_out.is_null(),
            self.norm.is_some(),
            weight(self.norm),
            !self.norm_out.is_null(),
        ];
        there.iter().enumerate().map(|(bit, &is_there)| u32::from(is_there) << bit).sum()
    }

    /// The program that serves it.
    fn family(&self, algorithm: Algorithm, shape: Shape) -> Result<Fusion> {
        let reduction = reduction(Operation::FusedAllReduce, self.dtype, ReduceOp::Sum)?;
        Ok(Fusion {
            reduction: reduction.round_each(self.accumulation == Accumulation::Rounded),
            source: match self.source {
                CheckedSource::Tensor { .. } => "TENSOR",
                CheckedSource::MoeReduction { .. } => "MOE_REDUCTION",
                CheckedSource::MoeFinalize { .. } => "MOE_FINALIZE",
            },
            quantization: match self.quantization {
                None => "NONE",
                Some(CheckedQuantization::Fp8 { .. }) => "FP8",
                Some(CheckedQuantization::Fp8Tokens) => "FP8_TOKENS",
                Some(CheckedQuantization::Fp8Groups { .. }) if self.odd_groups().is_some() => {
                    "FP8_ODD_GROUPS"
                }
                Some(CheckedQuantization::Fp8Groups { .. }) => "FP8_GROUPS",
                Some(CheckedQuantization::NvFp4 { .. }) => "NVFP4",
            },
            has: self.has(),
            algorithm,
            shape,
        })
    }
}

impl Room {
    /// What a call with an epilogue may use of every rank's GPU, in one of so many channels.
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

/// `fused` of source.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fused {
    input: *const u8,
    shared: *const u8,
    weights: *const u8,
    index: *const u8,
    bias: *const u8,
    pre_weight: *const u8,
    residual: *const u8,
    weight: *const u8,
    sum_out: *mut u8,
    residual_out: *mut u8,
    norm_out: *mut u8,
    codes: *mut u8,
    scales: *mut u8,
    scale: *const u8,
    tokens: u32,
    first: u32,
    count: u32,
    vectors: u32,
    experts: u32,
    rows: u32,
    group: u32,
    layout: u32,
    slices: u32,
    rounds: u32,
    reducing: u32,
    inverse_hidden: f32,
    scale_value: f32,
    eps: f32,
    pre_eps: f32,
    weight_bias: f32,
    routed_scaling: f32,
}

// SAFETY: the layout of the kernel's struct: addresses, then words of 32 bits.
unsafe impl KernelArgument for Fused {}

impl Fused {
    /// Of `count` tokens from `first` on.
    fn new(call: &Checked, first: usize, count: usize, teams: &Teams) -> Self {
        let (mut scale, mut group, mut layout) = (CheckedScale { at: null(), value: 0.0 }, 0, 0);
        match call.quantization {
            None | Some(CheckedQuantization::Fp8Tokens) => {}
            Some(CheckedQuantization::Fp8 { scale: given }) => scale = given,
            Some(CheckedQuantization::Fp8Groups { group: elements, .. }) => {
                let lanes = if call.odd_groups().is_some() { 1 } else { 16 / call.dtype.size() };
                group = (elements / lanes) as u32;
            }
            Some(CheckedQuantization::NvFp4 { scale: given, layout: code, .. }) => {
                (scale, layout) = (given, u32::from(code.code()));
            }
        }
        let mut fused = Self {
            input: null(),
            shared: null(),
            weights: null(),
            index: null(),
            bias: call.bias,
            pre_weight: call.pre_norm.map_or(null(), |norm| norm.weight),
            residual: call.residual,
            weight: call.norm.map_or(null(), |norm| norm.weight),
            sum_out: call.sum_out,
            residual_out: call.residual_out,
            norm_out: call.norm_out,
            codes: call.codes,
            scales: call.scales,
            scale: scale.at,
            tokens: call.tokens as u32,
            first: first as u32,
            count: count as u32,
            vectors: call.vectors() as u32,
            experts: 0,
            rows: 0,
            group,
            layout,
            slices: call.slices() as u32,
            rounds: teams.rounds,
            reducing: teams.reducing,
            inverse_hidden: 1.0 / call.hidden as f32,
            scale_value: scale.value,
            eps: call.norm.map_or(0.0, |norm| norm.eps),
            pre_eps: call.pre_norm.map_or(0.0, |norm| norm.eps),
            weight_bias: call.weight_bias,
            routed_scaling: 1.0,
        };
        match call.source {
            CheckedSource::Tensor { input } => fused.input = input,
            CheckedSource::MoeReduction { experts, count, scales, shared } => {
                (fused.input, fused.experts) = (experts, count as u32);
                (fused.weights, fused.shared) = (scales, shared);
            }
            CheckedSource::MoeFinalize { rows, count, index, top_k, scales, shared, routed_scaling } => {
                (fused.input, fused.rows, fused.index) = (rows, count.min(1 << 31) as u32, index);
                (fused.experts, fused.weights) = (top_k as u32, scales);
                (fused.shared, fused.routed_scaling) = (shared, routed_scaling);
            }
        }
        fused
    }
}

#[cfg(test)]
mod tests {
    /// As `quotient` of quantize.cuh.
    fn quotient(x: f32, divisor: f32) -> f32 {
        let inverse = 1.0 / divisor;
        let q = x * inverse;
        (-q).mul_add(divisor, x).mul_add(inverse, q)
    }

    /// A code depends on which side of a boundary a quotient is: halfway between two codes of e4m3, a number of five bits.
    /// Exponents make no difference, so all fractions of a dividend with all divisors that bring it near a boundary are a proof.
    #[test]
    fn a_quotient_is_on_the_right_side_of_every_boundary_between_codes() {
        // bf16, f16, and of f32 each 509th, as all would be a thousand million cases; they have been tried.
        for (bits, step) in [(8, 1), (11, 1), (24, 509)] {
            for fraction in (0..1_u32 << (bits - 1)).step_by(step) {
                let x = f32::from_bits(1.0_f32.to_bits() | fraction << (24 - bits));
                for boundary in (16..32).map(|sixteenths| sixteenths as f32 / 16.0) {
                    let near = (x / boundary).to_bits();
                    for divisor in (near - 4..=near + 4).map(f32::from_bits) {
                        let (found, exact) = (quotient(x, divisor), x / divisor);
                        let side = |q: f32| q.partial_cmp(&boundary);
                        assert_eq!(side(found), side(exact), "{x} / {divisor} near {boundary}");
                    }
                }
            }
        }
    }
}
