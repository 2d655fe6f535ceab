//! The machine code of the kernels: every variant, for every architecture, on any machine that has NVRTC.

use antiphon_device::{ReduceOp, cuda::Architecture};
use antiphon_fabric::gpu::{Family, Reduction};
use antiphon_sass::Rules;
use antiphon_tensor::DType;
use antiphon_testing::machine_code::{SLOTS, Variant, assert_as_meant};

use super::MAX_WORLD;
use crate::{
    all_reduce::{Algorithm, Reducing, Registered},
    fusion::gpu::{Fusion, Shape},
    gather_scatter::{Messaging, MovingLists, ReducingLists, ReducingParts, cuda::Movement},
    mixed::Mixing,
};

/// A family for a world of some size.
fn variant<F: Family>(family: F, world_size: usize, architecture: Architecture) -> Variant {
    let mut variant = Variant::of(&family, world_size, architecture, SLOTS);
    if F::NAME == Fusion::NAME {
        // IEEE's division and root are made of such instructions; and some words are kept in the first cache.
        variant.rules = Rules { local_bytes: 128, forbidden: &[], ..variant.rules };
    } else {
        // A division by 2, 4 or 8 is a product. The search for launches that overlap takes two to four registers, which some kernels do
        // not have left.
        variant.rules.local_bytes = 24;
        // Accesses of another block's shared memory, which a fused call has, are to any space in machine code.
        variant.knows_spaces = true;
    }
    variant
}

/// Families and world sizes, such that every line of the sources is compiled for every type, operator and world size.
fn variants(to: Architecture) -> Vec<Variant> {
    let reduction = |dtype, op| Reduction::new(dtype, op).unwrap();
    let worlds = [2, 4, MAX_WORLD];
    let mut variants = Vec::from(worlds.map(|world_size| variant(Movement, world_size, to)));
    variants.extend([2, 3, 4, MAX_WORLD].map(|world_size| variant(Messaging, world_size, to)));
    variants.extend(worlds.map(|world_size| variant(MovingLists, world_size, to)));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let sum = reduction(dtype, ReduceOp::Sum);
        variants.extend(ReduceOp::ARITHMETIC.map(|op| variant(Reducing(reduction(dtype, op)), 2, to)));
        variants.extend(worlds.map(|world_size| variant(Registered(sum), world_size, to)));
        variants.extend([4, MAX_WORLD].map(|world_size| variant(Reducing(sum), world_size, to)));
        variants.extend(worlds.map(|world_size| variant(ReducingParts(sum), world_size, to)));
        variants.extend(worlds.map(|world_size| variant(ReducingLists(sum), world_size, to)));
    }
    variants.extend(fusions(to));
    variants.extend(mixes(to));
    variants
}

/// Mixed collectives: every dtype, and every number of groups and of ranks of a group.
fn mixes(to: Architecture) -> Vec<Variant> {
    let mixing = |dtype, tp, world_size| {
        variant(Mixing { sum: Reduction::new(dtype, ReduceOp::Sum).unwrap(), tp }, world_size, to)
    };
    let layouts = [(2, 4), (2, 6), (3, 6), (2, 8), (4, 8)];
    let mut mixes = Vec::from(layouts.map(|(tp, world_size)| mixing(DType::BF16, tp, world_size)));
    mixes.extend([DType::F32, DType::F16].map(|dtype| mixing(dtype, 2, 4)));
    mixes
}

/// Calls with an epilogue: every algorithm and shape, every source, every quantisation, every input and output, each of
/// them with some of the others.
fn fusions(to: Architecture) -> Vec<Variant> {
    const NORM: u32 = 0x1F0; // residual and norm, in and out
    const ALL: u32 = 0x1FF;
    const ROUND: u32 = 0x600; // before the weight, and one over the root mean square
    let sum = |dtype| Reduction::new(dtype, ReduceOp::Sum).unwrap();
    let usual = Fusion {
        reduction: sum(DType::BF16),
        source: "TENSOR",
        quantization: "NONE",
        has: NORM,
        algorithm: Algorithm::OneShot,
        shape: Shape::Short,
    };
    let mut fusions = Vec::new();
    for algorithm in Algorithm::ALL {
        for shape in [Shape::Short, Shape::ShortWide, Shape::Long, Shape::LongWide, Shape::LongOnce] {
            fusions.push((Fusion { algorithm, shape, ..usual }, 4));
        }
    }
    let (two_shot, long) = (Algorithm::TwoShot, Shape::Long);
    fusions.push((usual, 2));
    fusions.push((usual, MAX_WORLD));
    fusions.push((Fusion { algorithm: two_shot, shape: long, ..usual }, MAX_WORLD));
    for quantization in ["FP8", "FP8_TOKENS", "FP8_GROUPS", "NVFP4"] {
        fusions.push((Fusion { quantization, ..usual }, 4));
    }
    fusions.push((Fusion { quantization: "NVFP4", has: ALL, algorithm: two_shot, shape: long, ..usual }, 4));
    fusions.push((Fusion { quantization: "FP8_ODD_GROUPS", shape: Shape::LongWide, ..usual }, 4));
    for world_size in [2, 3] {
        let wide = Fusion { algorithm: two_shot, shape: Shape::LongWide, ..usual };
        fusions.push((Fusion { quantization: "FP8_GROUPS", ..wide }, world_size));
    }
    for source in ["MOE_REDUCTION", "MOE_FINALIZE"] {
        fusions.push((Fusion { source, reduction: usual.reduction.round_each(true), ..usual }, 4));
        fusions.push((Fusion { source, algorithm: two_shot, shape: long, ..usual }, 4));
    }
    for dtype in [DType::F32, DType::F16] {
        fusions.push((Fusion { reduction: sum(dtype), quantization: "FP8_TOKENS", has: ALL, ..usual }, 4));
    }
    fusions.push((Fusion { has: 1, ..usual }, 4));
    for (quantization, has) in [("NONE", NORM | ROUND), ("FP8_TOKENS", ALL | ROUND)] {
        fusions.push((Fusion { quantization, has, ..usual }, 4));
        fusions.push((Fusion { quantization, has, algorithm: two_shot, shape: long, ..usual }, 4));
    }
    fusions.into_iter().map(|(fusion, world_size)| variant(fusion, world_size, to)).collect()
}

#[test]
fn every_kernel_is_compiled_to_what_was_meant() {
    assert_as_meant(variants);
}
