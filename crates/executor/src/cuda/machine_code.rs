//! What the kernel is compiled to, every variant for every architecture, on any machine that has NVRTC.

use std::time::Instant;

use antiphon_device::cuda::Architecture;
use antiphon_fabric::gpu::{Kernel as _, MAX_WORLD, most_registers, most_shared_bytes, program};
use antiphon_language::library::{ALGORITHMS, Algorithm, Setting, find};
use antiphon_plan::{
    Plan, Rank,
    verify::{self, Memory, VerifiedPlan},
};
use antiphon_sass::Rules;
use antiphon_tensor::DType;
use antiphon_testing::{disassembler, nvrtc};

use super::{
    CudaOptions, Form, PlanKernel,
    family::{Entry, PlanFamily},
};
use crate::PacketKind;

const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

/// The interpreter, with a number of ranks.
fn interpreters() -> Vec<(PlanFamily, usize)> {
    let interpreter = |dtype, packets, each| PlanFamily::new(dtype, packets, each, None);
    let mut variants = Vec::new();
    for &dtype in DType::NUMERIC {
        variants.push((interpreter(dtype, PacketKind::LL16, 1), MAX_WORLD));
    }
    for packets in [PacketKind::LL8, PacketKind::LL16] {
        for per_multiprocessor in [1, 2, 4] {
            variants.push((interpreter(DType::BF16, packets, per_multiprocessor), 2));
        }
    }
    variants.push((interpreter(DType::F64, PacketKind::LL8, 1), 4));
    variants.push((interpreter(DType::F32, PacketKind::LL16, 1), 1));
    variants
}

fn proved(plan: Plan) -> VerifiedPlan {
    let options = verify::Options { memory: Memory::Device, ..verify::Options::default() };
    VerifiedPlan::new(plan, &options).unwrap_or_else(|report| panic!("{report}"))
}

/// The compiled kernels of a rank of every algorithm in the library, of which each has another number of ranks and another dtype.
fn compiled() -> Vec<(&'static str, PlanKernel)> {
    let kernel = |(at, algorithm): (usize, &'static Algorithm)| {
        let ranks = [2, 8, 4][at % 3];
        let plan = proved(algorithm.plan(&Setting::new(ranks)).unwrap());
        let dtype = DType::NUMERIC[(at * 3 + 1) % DType::NUMERIC.len()];
        let packets = [PacketKind::LL16, PacketKind::LL8][at % 5 / 4];
        let options = CudaOptions { packets, form: Form::Compiled, ..CudaOptions::default() };
        (algorithm.name, PlanKernel::new(&plan, Rank(0), dtype, options, 132).unwrap())
    };
    ALGORITHMS.iter().enumerate().map(kernel).collect()
}

/// What the compiler says of the kernel of a plan is what its machine code says.
#[test]
fn the_kernel_of_a_plan_needs_what_is_said() {
    let (Some(nvrtc), Some(disassembler)) = (nvrtc(), disassembler()) else { return };
    let plan = proved(find("packet-all-reduce").unwrap().plan(&Setting::new(2)).unwrap());
    for form in [Form::Interpreted, Form::Compiled] {
        let options = CudaOptions { form, ..CudaOptions::default() };
        let kernel = PlanKernel::new(&plan, Rank(1), DType::BF16, options, 132).unwrap();
        assert_eq!((kernel.threads(), kernel.blocks_per_multiprocessor()), (512, 1));
        for architecture in ARCHITECTURES {
            let said = kernel.compile(nvrtc, architecture).unwrap().expect("ptxas says it");
            let cubin = nvrtc.compile(&kernel.program(architecture)).unwrap().cubin;
            let code = disassembler.read(&[cubin]).unwrap().remove(0);
            let found = code.kernel(Entry::Execute.name()).unwrap();
            let found_needs = (found.registers, found.local_bytes);
            assert_eq!((said.registers, said.stack_bytes), found_needs, "{form:?}, {architecture}");
            // It does not count what is stored around calls.
            let spills = found.count("STL") + found.count("LDL");
            assert!(said.spilled_bytes == [0; 2] || spills > 0, "{said:?}");
            assert!(said.registers <= kernel.most_registers(), "{said:?}");
        }
    }
}

/// What is wrong with the kernels for an architecture. Without a disassembler they are compiled, but not looked at.
fn wrong(architecture: Architecture, kernels: &[(String, PlanFamily, usize)]) -> Vec<String> {
    let Some(nvrtc) = nvrtc() else { return Vec::new() };
    let compile = |(name, family, world_size): &(String, PlanFamily, usize)| {
        let start = Instant::now();
        let compiled = nvrtc.compile(&program(family, architecture, *world_size));
        println!("{name} on {architecture}: {:.2} s", start.elapsed().as_secs_f64());
        compiled.unwrap_or_else(|error| panic!("{name} on {architecture}: {error}"))
    };
    let compiled: Vec<_> = kernels.iter().map(compile).collect();
    let warned = kernels.iter().zip(&compiled).filter(|(_, compiled)| !compiled.log.is_empty());
    let mut wrong: Vec<_> =
        warned.map(|((name, ..), compiled)| format!("{name}: {}", compiled.log)).collect();
    let Some(disassembler) = disassembler() else { return wrong };
    let cubins: Vec<_> = compiled.into_iter().map(|compiled| compiled.cubin).collect();
    for ((name, family, world_size), code) in kernels.iter().zip(disassembler.read(&cubins).unwrap()) {
        let kernel = code.kernel(Entry::Execute.name()).unwrap();
        let mut found = kernel.broken(&Rules {
            registers: most_registers(family, *world_size),
            // Vectors come and go whole, and past every cache; packets in two words.
            needed: &["LDG.128.STRONG.SYS", "STG.128.STRONG.SYS"],
            // Sums are rounded one by one.
            forbidden: &["FFMA", "DFMA"],
            // Registers around the call of `look_around`, which a wait makes when it is late.
            local_bytes: 56,
        });
        if kernel.shared_bytes > most_shared_bytes(family, architecture, *world_size) {
            found.push(format!("{} bytes of shared memory", kernel.shared_bytes));
        }
        wrong.extend(found.iter().map(|what| format!("{name} on {architecture}: {what}")));
    }
    wrong
}

#[test]
fn every_interpreter_is_compiled_to_what_was_meant() {
    let kernels: Vec<_> = interpreters()
        .into_iter()
        .map(|(family, world_size)| (format!("{family:?} for {world_size} ranks"), family, world_size))
        .collect();
    let wrong: Vec<_> =
        ARCHITECTURES.into_iter().flat_map(|architecture| wrong(architecture, &kernels)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Each for one of the architectures.
#[test]
fn every_plan_of_the_library_is_compiled_to_what_was_meant() {
    let mut of_architecture: [Vec<_>; 3] = Default::default();
    for (at, (name, kernel)) in compiled().into_iter().enumerate() {
        let PlanKernel { family, world_size, .. } = kernel;
        let name = format!("{name}, {family:?} for {world_size} ranks");
        of_architecture[at / 3 % 3].push((name, family, world_size));
    }
    let wrong: Vec<_> = ARCHITECTURES
        .into_iter()
        .zip(of_architecture)
        .flat_map(|(architecture, kernels)| wrong(architecture, &kernels))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
