//! The machine code of the kernels: every variant, for every architecture, on any machine that has NVRTC.

use std::thread;

use antiphon_device::{
    ReduceOp,
    cuda::{Architecture, Nvrtc, Program},
};
use antiphon_fabric::gpu::{Family, Kernel as _, Reduction, most_registers, most_shared_bytes, program};
use antiphon_sass::{Disassembler, Kernel as Code, Rules};
use antiphon_tensor::DType;
use antiphon_testing::{disassembler, nvrtc};

use super::MAX_WORLD;
use crate::{
    all_reduce::{Algorithm, Reducing, Registered},
    fusion::gpu::{Fusion, Shape},
    gather_scatter::{Messaging, MovingLists, ReducingLists, ReducingParts, cuda::Movement},
    mixed::Mixing,
};

const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

/// A family for a world of some size.
struct Variant {
    family: String,
    world_size: usize,
    program: Box<dyn Fn(Architecture) -> Program + Sync>,
    kernels: Vec<&'static str>,
    /// Registers that a thread may have.
    registers: u32,
    /// Bytes of static shared memory that a block may have.
    shared_bytes: Box<dyn Fn(Architecture) -> u32 + Sync>,
    is_fused: bool,
}

impl Variant {
    fn of<F: Family + Copy + Sync>(family: F, world_size: usize) -> Self {
        Self {
            family: format!("{family:?}"),
            world_size,
            program: Box::new(move |architecture| program(&family, architecture, world_size)),
            kernels: F::Kernel::ALL.iter().map(|kernel| kernel.name()).collect(),
            registers: most_registers(&family, world_size),
            // A launch adds the dynamic shared memory. A grid takes the whole of a multiprocessor whose half has too little for that.
            shared_bytes: Box::new(move |architecture| {
                let (half, dynamic) =
                    (most_shared_bytes(&family, architecture, world_size), family.shared_bytes(world_size));
                let most = if dynamic <= half { half } else { 2 * half + (1 << 10) };
                most - dynamic
            }),
            is_fused: F::NAME == Fusion::NAME,
        }
    }
}

/// Families and world sizes, such that every line of the sources is compiled for every type, operator and world size.
fn variants() -> Vec<Variant> {
    let reduction = |dtype, op| Reduction::new(dtype, op).unwrap();
    let worlds = [2, 4, MAX_WORLD];
    let mut variants = Vec::from(worlds.map(|world_size| Variant::of(Movement, world_size)));
    variants.extend([2, 3, 4, MAX_WORLD].map(|world_size| Variant::of(Messaging, world_size)));
    variants.extend(worlds.map(|world_size| Variant::of(MovingLists, world_size)));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let sum = reduction(dtype, ReduceOp::Sum);
        variants.extend(ReduceOp::ARITHMETIC.map(|op| Variant::of(Reducing(reduction(dtype, op)), 2)));
        variants.extend(worlds.map(|world_size| Variant::of(Registered(sum), world_size)));
        variants.extend([4, MAX_WORLD].map(|world_size| Variant::of(Reducing(sum), world_size)));
        variants.extend(worlds.map(|world_size| Variant::of(ReducingParts(sum), world_size)));
        variants.extend(worlds.map(|world_size| Variant::of(ReducingLists(sum), world_size)));
    }
    variants.extend(fusions());
    variants.extend(mixes());
    variants
}

/// Mixed collectives: every dtype, and every number of groups and of ranks of a group.
fn mixes() -> Vec<Variant> {
    let mixing = |dtype, tp, world_size| {
        Variant::of(Mixing { sum: Reduction::new(dtype, ReduceOp::Sum).unwrap(), tp }, world_size)
    };
    let layouts = [(2, 4), (2, 6), (3, 6), (2, 8), (4, 8)];
    let mut mixes = Vec::from(layouts.map(|(tp, world_size)| mixing(DType::BF16, tp, world_size)));
    mixes.extend([DType::F32, DType::F16].map(|dtype| mixing(dtype, 2, 4)));
    mixes
}

/// Calls with an epilogue: every algorithm and shape, every source, every quantisation, every input and output, each of
/// them with some of the others.
fn fusions() -> Vec<Variant> {
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
    fusions.into_iter().map(|(fusion, world_size)| Variant::of(fusion, world_size)).collect()
}

/// What is wrong with a kernel.
fn broken(code: &Code, variant: &Variant) -> Vec<String> {
    let registers = variant.registers;
    // Vectors (and tags) come and go whole, and past every cache.
    let needed = &["LDG.128.STRONG.SYS", "STG.128.STRONG.SYS"];
    let rules = match variant.is_fused {
        // IEEE's division and root are made of such instructions; and some words are kept in the first cache.
        true => Rules { registers, needed, local_bytes: 128, ..Rules::default() },
        // Sums are rounded one by one; a division by 2, 4 or 8 is a product. The search for launches that overlap takes two to four
        // registers, which some kernels do not have left.
        false => Rules { registers, needed, local_bytes: 24, forbidden: &["FFMA", "DFMA"] },
    };
    let mut broken = code.broken(&rules);
    // Those into another block's shared memory are such, in machine code.
    let may_be_any = variant.is_fused;
    if !may_be_any
        && code.instructions.keys().any(|words| words.starts_with("LD.") || words.starts_with("ST."))
    {
        broken.push(format!(
            "{}: accesses of which the compiler does not know that they are global",
            code.name
        ));
    }
    broken
}

/// What is wrong with the kernels for an architecture.
fn check(architecture: Architecture, nvrtc: &Nvrtc, disassembler: Option<&Disassembler>) -> Vec<String> {
    let variants = variants();
    let (mut cubins, mut wrong) = (Vec::new(), Vec::new());
    for variant in &variants {
        let Variant { family, world_size, program, .. } = variant;
        let compiled = nvrtc.compile(&program(architecture));
        let compiled =
            compiled.unwrap_or_else(|e| panic!("{family} on {architecture} for {world_size} ranks: {e}"));
        if !compiled.log.is_empty() {
            wrong.push(format!("{family} on {architecture} for {world_size} ranks: {}", compiled.log));
        }
        cubins.push(compiled.cubin);
    }
    let codes = disassembler.map_or_else(Vec::new, |disassembler| disassembler.read(&cubins).unwrap());
    for (variant, code) in variants.iter().zip(&codes) {
        for name in &variant.kernels {
            let kernel = code.kernel(name).unwrap();
            let (mut found, most) = (broken(kernel, variant), (variant.shared_bytes)(architecture));
            if kernel.shared_bytes > most {
                found.push(format!("{name}: {} bytes of shared memory, of {most}", kernel.shared_bytes));
            }
            let place = format!("{} on {architecture} for {} ranks", variant.family, variant.world_size);
            wrong.extend(found.iter().map(|what| format!("{place}: {what}")));
        }
    }
    wrong
}

#[test]
fn every_kernel_is_compiled_to_what_was_meant() {
    let Some(nvrtc) = nvrtc() else { return };
    // Without it kernels are compiled, but not looked at.
    let disassembler = disassembler();
    let disassembler = disassembler.as_ref();
    let wrong: Vec<String> = thread::scope(|scope| {
        let checks = ARCHITECTURES.map(|to| scope.spawn(move || check(to, nvrtc, disassembler)));
        checks.into_iter().flat_map(|check| check.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
