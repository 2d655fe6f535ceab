//! The programs, and what of them is loaded.

use std::sync::Arc;

use antiphon_device::{
    ReduceOp,
    cuda::{Architecture, Context, CudaError, Function, KernelCache, Module, Nvrtc, Program},
};
use antiphon_fabric::Operation;
use antiphon_tensor::DType;

use super::{MAX_BLOCKS, SLOTS_AT, THREADS, device, most_blocks};
use crate::error::{CollectiveError, Result};

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    /// What moves bytes.
    Movement,
    /// What reduces elements of a type.
    Reduction(DType, ReduceOp),
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
    ReduceScatter,
    ReduceScatterPlain,
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
            Self::ReduceScatter => "reduce_scatter",
            Self::ReduceScatterPlain => "reduce_scatter_plain",
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
        let program = match self {
            Self::Movement => Program::new("movement.cuh", MOVEMENT, architecture),
            Self::Reduction(dtype, op) => {
                let (element, nan_pair) = element(dtype)?;
                let operator = match op {
                    ReduceOp::Sum | ReduceOp::Avg => "sum_of",
                    ReduceOp::Prod => "prod_of",
                    ReduceOp::Min => "min_of",
                    ReduceOp::Max => "max_of",
                };
                Program::new("reduction.cuh", REDUCTION, architecture)
                    .define("ELEMENT", element)
                    .define("NAN_PAIR", nan_pair)
                    .define("OPERATOR", operator)
                    .define("AVERAGE", u8::from(op == ReduceOp::Avg))
            }
        };
        Ok(program
            .define("WORLD", world_size)
            .define("THREADS", THREADS)
            .define("RESIDENT", 2 * most_blocks(world_size))
            .define("MAX_BLOCKS", MAX_BLOCKS)
            .define("SLOTS_AT", SLOTS_AT))
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

/// A family's kernels, loaded on a device.
#[derive(Clone)]
pub(crate) struct Loaded(Arc<[(Kernel, Function)]>);

impl Loaded {
    #[inline]
    pub(crate) fn get(&self, kernel: Kernel) -> &Function {
        let found = self.0.iter().find(|(known, _)| *known == kernel);
        &found.expect("asked of the family that has the kernel").1
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
        let load = || {
            let cubin = KernelCache::open().compile(Nvrtc::load()?, &program)?;
            let module = Module::load(&self.context, &cubin.bytes)?;
            let function = |&kernel: &Kernel| Ok((kernel, module.function(kernel.name())?));
            family.kernels().iter().map(function).collect::<std::result::Result<_, CudaError>>()
        };
        let loaded = Loaded(load().map_err(device)?);
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
