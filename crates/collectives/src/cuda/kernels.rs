//! The programs, and what of them is loaded.

use std::sync::Arc;

use antiphon_device::{
    ReduceOp,
    cuda::{Architecture, Context, CudaError, Function, KernelCache, Module, Nvrtc, Program, relaxed},
};
use antiphon_fabric::{FabricError, Operation};
use antiphon_tensor::DType;

use super::{MAX_BLOCKS, MAX_WORLD, SLOTS_AT, THREADS, device, most_blocks};
use crate::{
    all_reduce::Algorithm,
    error::{CollectiveError, Result},
    fusion::{Accumulation, Shape, Teams},
};

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// What moves bytes.
    Movement,
    /// What reduces elements of a type.
    Reduction(DType, ReduceOp),
    /// What reduces those in registered memory.
    Registered(DType, ReduceOp),
    /// What sums rows and goes on with them.
    Fusion(Fusion),
}

/// A kernel of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    Barrier,
    AllGather,
    AllToAll,
    Broadcast,
    BroadcastParts,
    OneShot,
    OneShotPlain,
    OneShotPairs,
    TwoShot,
    TwoShotPlain,
    OneShotRegistered,
    OneShotRegisteredPlain,
    TwoShotRegistered,
    TwoShotRegisteredPlain,
    ReduceScatter,
    ReduceScatterPlain,
    FusedAllReduce,
}

/// What the kernels with an epilogue are specialised in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fusion {
    pub(crate) dtype: DType,
    pub(crate) accumulation: Accumulation,
    /// In the words of source.cuh.
    pub(crate) source: &'static str,
    pub(crate) quantization: &'static str,
    /// Which inputs and outputs there are; see source.cuh.
    pub(crate) has: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) shape: Shape,
}

impl Kernel {
    /// The name in the source.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::AllGather => "all_gather",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::BroadcastParts => "broadcast_parts",
            Self::OneShot => "one_shot",
            Self::OneShotPlain => "one_shot_plain",
            Self::OneShotPairs => "one_shot_pairs",
            Self::TwoShot => "two_shot",
            Self::TwoShotPlain => "two_shot_plain",
            Self::OneShotRegistered => "one_shot_registered",
            Self::OneShotRegisteredPlain => "one_shot_registered_plain",
            Self::TwoShotRegistered => "two_shot_registered",
            Self::TwoShotRegisteredPlain => "two_shot_registered_plain",
            Self::ReduceScatter => "reduce_scatter",
            Self::ReduceScatterPlain => "reduce_scatter_plain",
            Self::FusedAllReduce => "fused_all_reduce",
        }
    }
}

impl Family {
    pub(super) fn kernels(self) -> &'static [Kernel] {
        match self {
            Self::Movement => &[
                Kernel::Barrier,
                Kernel::AllGather,
                Kernel::AllToAll,
                Kernel::Broadcast,
                Kernel::BroadcastParts,
            ],
            Self::Reduction(..) => &[
                Kernel::OneShot,
                Kernel::OneShotPlain,
                Kernel::OneShotPairs,
                Kernel::TwoShot,
                Kernel::TwoShotPlain,
                Kernel::ReduceScatter,
                Kernel::ReduceScatterPlain,
            ],
            Self::Registered(..) => &[
                Kernel::OneShotRegistered,
                Kernel::OneShotRegisteredPlain,
                Kernel::TwoShotRegistered,
                Kernel::TwoShotRegisteredPlain,
            ],
            Self::Fusion(_) => &[Kernel::FusedAllReduce],
        }
    }

    /// Its program for a world of this size.
    pub(crate) fn program(self, architecture: Architecture, world_size: usize) -> Result<Program> {
        const MOVEMENT: &str =
            concat!(include_str!("slots.cuh"), "\n", include_str!("../gather_scatter/kernels.cuh"));
        const REDUCTION: &str = concat!(
            include_str!("slots.cuh"),
            "\n",
            include_str!("reduce.cuh"),
            "\n",
            include_str!("../all_reduce/kernels.cuh"),
            "\n",
            include_str!("../gather_scatter/reduce_scatter.cuh")
        );
        const REGISTERED: &str = concat!(
            include_str!("slots.cuh"),
            "\n",
            include_str!("reduce.cuh"),
            "\n",
            include_str!("../all_reduce/registered.cuh")
        );
        const FUSION: &str = concat!(
            include_str!("slots.cuh"),
            "\n",
            include_str!("reduce.cuh"),
            "\n",
            include_str!("../fusion/source.cuh"),
            "\n",
            include_str!("../fusion/team.cuh"),
            "\n",
            include_str!("../fusion/quantize.cuh"),
            "\n",
            include_str!("../fusion/epilogue.cuh"),
            "\n",
            include_str!("../fusion/kernels.cuh")
        );
        let program = match self {
            Self::Movement => Program::new("movement.cuh", MOVEMENT, architecture),
            Self::Reduction(dtype, op) | Self::Registered(dtype, op) => {
                let (element, nan_pair) = element(dtype)?;
                let operator = match op {
                    ReduceOp::Sum | ReduceOp::Avg => "sum_of",
                    ReduceOp::Prod => "prod_of",
                    ReduceOp::Min => "min_of",
                    ReduceOp::Max => "max_of",
                    ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => {
                        let operation = Operation::AllReduce.name();
                        return Err(CollectiveError::NotBits { operation, dtype, op });
                    }
                };
                let (name, source) = match self {
                    Self::Registered(..) => ("registered.cuh", REGISTERED),
                    _ => ("reduction.cuh", REDUCTION),
                };
                Program::new(name, source, architecture)
                    .define("ELEMENT", element)
                    .define("NAN_PAIR", nan_pair)
                    .define("OPERATOR", operator)
                    .define("AVERAGE", u8::from(op == ReduceOp::Avg))
                    .define("ROUND_EACH", 0)
            }
            Self::Fusion(fusion) => {
                let (element, nan_pair) = element(fusion.dtype)?;
                Program::new("fusion.cuh", FUSION, architecture)
                    .define("ELEMENT", element)
                    .define("NAN_PAIR", nan_pair)
                    .define("OPERATOR", "sum_of")
                    .define("AVERAGE", 0)
                    .define("ROUND_EACH", u8::from(fusion.accumulation == Accumulation::Rounded))
                    .define("SOURCE", fusion.source)
                    .define("QUANTIZATION", fusion.quantization)
                    .define("HAS", fusion.has)
                    .define("ALGORITHM", fusion.algorithm.name().replace('-', "_"))
                    .define("IS_ONE_SHOT", u8::from(fusion.algorithm == Algorithm::OneShot))
                    .define("SHORT", u8::from(fusion.shape.is_short()))
                    .define("AT_ONCE", Shape::at_once(world_size))
                    .define("SPLIT", u8::from(fusion.shape.is_split()))
            }
        };
        Ok(program
            .define("WORLD", world_size)
            .define("THREADS", self.threads())
            .define("RESIDENT", 2 * self.most_blocks(world_size))
            .define("MAX_WORLD", MAX_WORLD)
            .define("MAX_BLOCKS", MAX_BLOCKS)
            .define("SLOTS_AT", SLOTS_AT))
    }
}

impl Family {
    /// The most threads of a block.
    pub(super) fn threads(self) -> u32 {
        match self {
            Self::Fusion(fusion) => fusion.shape.threads() as u32,
            _ => THREADS,
        }
    }

    /// Blocks for each multiprocessor, at most.
    pub(super) fn most_blocks(self, world_size: usize) -> u32 {
        match self {
            Self::Fusion(fusion) => fusion.shape.most_blocks(world_size, fusion.algorithm),
            _ => most_blocks(world_size),
        }
    }

    /// Blocks for each multiprocessor, at least: of teams as many as they are made for.
    fn least_blocks(self, world_size: usize) -> u32 {
        match self {
            Self::Fusion(_) => self.most_blocks(world_size),
            _ => 1,
        }
    }

    /// Bytes of shared memory that a block may have, if that must be said.
    fn shared_bytes(self) -> Option<u32> {
        matches!(self, Self::Fusion(_)).then_some(Teams::most_shared_bytes())
    }
}

/// The type's name in the prelude, and a word of its canonical NaNs.
fn element(dtype: DType) -> Result<(&'static str, &'static str)> {
    match dtype {
        DType::F32 => Ok(("float", "0x7FC00000u")),
        DType::F16 => Ok(("f16", "0x7E007E00u")),
        DType::BF16 => Ok(("bf16", "0x7FC07FC0u")),
        _ => Err(CollectiveError::NotNumeric { operation: Operation::AllReduce.name(), dtype }),
    }
}

/// A kernel that is loaded on a device.
pub(crate) struct Resident {
    kernel: Kernel,
    pub(crate) function: Function,
    /// Blocks of a grid for each multiprocessor: they run at once, beside as many of another communicator's where there is room.
    pub(crate) blocks: u32,
}

/// A family's kernels, loaded on a device.
#[derive(Clone)]
pub(crate) struct Loaded(Arc<[Resident]>);

impl Loaded {
    #[inline]
    pub(crate) fn get(&self, kernel: Kernel) -> &Resident {
        let found = self.0.iter().find(|known| known.kernel == kernel);
        found.expect("asked of the family that has the kernel")
    }
}

/// The families that are loaded on a device.
pub(super) struct Kernels {
    context: Context,
    world_size: usize,
    loaded: Vec<(Family, Loaded)>,
}

impl Kernels {
    pub(super) fn new(context: &Context, world_size: usize) -> Self {
        Self { context: context.clone(), world_size, loaded: Vec::new() }
    }

    /// The kernels of a family, compiled and loaded if they are not yet.
    #[inline]
    pub(super) fn load(&mut self, family: Family) -> Result<Loaded> {
        match self.loaded.iter().find(|(known, _)| *known == family) {
            Some((_, loaded)) => Ok(loaded.clone()),
            None => self.load_now(family),
        }
    }

    #[cold]
    fn load_now(&mut self, family: Family) -> Result<Loaded> {
        let architecture = self.context.device().architecture().map_err(device)?;
        let program = family.program(architecture, self.world_size)?;
        let load = || -> std::result::Result<_, CudaError> {
            let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
            // So that a graph may have the first call of its kind.
            let module = relaxed(|| Module::load(&self.context, &cubin.bytes))??;
            let function = |&kernel: &Kernel| {
                let function = module.function(kernel.name())?;
                if let Some(bytes) = family.shared_bytes() {
                    function.allow_dynamic_shared(bytes)?;
                }
                let most = function.blocks_per_multiprocessor(family.threads(), 0)?;
                Ok((
                    Resident { kernel, function, blocks: family.most_blocks(self.world_size).min(most / 2) },
                    most,
                ))
            };
            family.kernels().iter().map(function).collect::<std::result::Result<Vec<_>, CudaError>>()
        };
        let loaded = load().map_err(device)?;
        let needed = family.least_blocks(self.world_size);
        if let Some((kernel, most)) = loaded.iter().find(|(kernel, _)| kernel.blocks < needed) {
            let (kernel, threads) = (kernel.kernel.name(), family.threads());
            let text = format!(
                "a multiprocessor of the GPU runs {most} blocks of {threads} threads of the kernel {kernel} at once, and \
                 {} are needed: {needed} for each of two communicators",
                2 * needed
            );
            return Err(FabricError::invalid(text).into());
        }
        let loaded = Loaded(loaded.into_iter().map(|(kernel, _)| kernel).collect());
        self.loaded.push((family, loaded.clone()));
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_types_are_refused() {
        let family = Family::Reduction(DType::I32, ReduceOp::Sum);
        let error = family.program(Architecture::SM_90A, 2).unwrap_err();
        assert!(error.to_string().contains("i32 cannot be reduced"));
    }
}
