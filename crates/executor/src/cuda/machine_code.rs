//! What the kernel is compiled to, every variant for every architecture, on any machine that has NVRTC.

use antiphon_device::cuda::Architecture;
use antiphon_fabric::gpu::{Kernel as _, MAX_WORLD, most_registers, most_shared_bytes, program};
use antiphon_language::library::{Setting, find};
use antiphon_plan::verify::{self, Memory, VerifiedPlan};
use antiphon_sass::Rules;
use antiphon_tensor::DType;
use antiphon_testing::{disassembler, nvrtc};

use super::{
    PlanKernel,
    family::{Interpreter, InterpreterKernel},
};
use crate::PacketKind;

const ARCHITECTURES: [Architecture; 3] = [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

fn variants() -> Vec<(Interpreter, usize)> {
    let mut variants = Vec::new();
    for &dtype in DType::NUMERIC {
        variants.push((Interpreter::new(dtype, PacketKind::LL16, 1), MAX_WORLD));
    }
    for packets in [PacketKind::LL8, PacketKind::LL16] {
        for per_multiprocessor in [1, 2, 4] {
            variants.push((Interpreter::new(DType::BF16, packets, per_multiprocessor), 2));
        }
    }
    variants.push((Interpreter::new(DType::F64, PacketKind::LL8, 1), 4));
    variants.push((Interpreter::new(DType::F32, PacketKind::LL16, 1), 1));
    variants
}

/// What the compiler says of the kernel of a plan is what its machine code says.
#[test]
fn the_kernel_of_a_plan_needs_what_is_said() {
    let (Some(nvrtc), Some(disassembler)) = (nvrtc(), disassembler()) else { return };
    let plan = find("packet-all-reduce").unwrap().plan(&Setting::new(2)).unwrap();
    let options = verify::Options { memory: Memory::Device, ..verify::Options::default() };
    let plan = VerifiedPlan::new(plan, &options).unwrap_or_else(|report| panic!("{report}"));
    let kernel = PlanKernel::new(&plan, DType::BF16, PacketKind::LL16, 132).unwrap();
    assert_eq!((kernel.threads(), kernel.blocks_per_multiprocessor()), (512, 1));
    for architecture in ARCHITECTURES {
        let said = kernel.compile(nvrtc, architecture).unwrap().expect("ptxas says it");
        let cubin = nvrtc.compile(&kernel.program(architecture)).unwrap().cubin;
        let code = disassembler.read(&[cubin]).unwrap().remove(0);
        let found = code.kernel(InterpreterKernel::Interpret.name()).unwrap();
        assert_eq!(
            (said.registers, said.stack_bytes),
            (found.registers, found.local_bytes),
            "{architecture}"
        );
        // It does not count what is stored around calls.
        let spills = found.count("STL") + found.count("LDL");
        assert!(said.spilled_bytes == [0; 2] || spills > 0, "{said:?}");
        assert!(said.registers <= kernel.most_registers(), "{said:?}");
    }
}

#[test]
fn every_kernel_is_compiled_to_what_was_meant() {
    let Some(nvrtc) = nvrtc() else { return };
    // Without it kernels are compiled, but not looked at.
    let disassembler = disassembler();
    let mut wrong = Vec::new();
    for architecture in ARCHITECTURES {
        let variants = variants();
        let compile = |(family, world_size): &(Interpreter, usize)| {
            let compiled = nvrtc.compile(&program(family, architecture, *world_size));
            compiled.unwrap_or_else(|error| {
                panic!("{family:?} for {world_size} ranks on {architecture}: {error}")
            })
        };
        let compiled: Vec<_> = variants.iter().map(compile).collect();
        for ((family, world_size), compiled) in variants.iter().zip(&compiled) {
            if !compiled.log.is_empty() {
                wrong.push(format!("{family:?} for {world_size} ranks: {}", compiled.log));
            }
        }
        let Some(disassembler) = &disassembler else { continue };
        let cubins: Vec<_> = compiled.into_iter().map(|compiled| compiled.cubin).collect();
        for ((family, world_size), code) in variants.iter().zip(disassembler.read(&cubins).unwrap()) {
            let kernel = code.kernel(InterpreterKernel::Interpret.name()).unwrap();
            let mut found = kernel.broken(&Rules {
                registers: most_registers(family, *world_size),
                // Vectors come and go whole, and past every cache; packets in two words.
                needed: &["LDG.128.STRONG.SYS", "STG.128.STRONG.SYS"],
                // Sums are rounded one by one.
                forbidden: &["FFMA", "DFMA"],
                local_bytes: if architecture == Architecture::SM_80 { 0 } else { 8 }, // a register outside the loops
            });
            if kernel.shared_bytes > most_shared_bytes(family, architecture, *world_size) {
                found.push(format!("{} bytes of shared memory", kernel.shared_bytes));
            }
            let name = format!("{family:?} for {world_size} ranks on {architecture}");
            wrong.extend(found.iter().map(|what| format!("{name}: {what}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
