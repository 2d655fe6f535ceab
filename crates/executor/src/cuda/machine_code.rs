//! What the kernel is compiled to, every variant for every architecture, on any machine that has NVRTC.

use antiphon_device::cuda::Architecture;
use antiphon_fabric::gpu::{Kernel as _, MAX_WORLD, most_registers, most_shared_bytes, program};
use antiphon_sass::Rules;
use antiphon_tensor::DType;
use antiphon_testing::{disassembler, nvrtc};

use super::family::{Interpreter, InterpreterKernel};
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
                local_bytes: if architecture == Architecture::SM_90A { 8 } else { 0 }, // a register outside the loops
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
