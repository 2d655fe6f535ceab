//! What the kernels are compiled to, every variant for every architecture, on any machine that has NVRTC.

use antiphon_device::cuda::Architecture;
use antiphon_fabric::gpu::{Family, MAX_WORLD, Staging};
use antiphon_tensor::DType;
use antiphon_testing::{
    machine_code::{SLOTS, Variant, assert_as_meant},
    nvrtc,
};

use crate::{
    by_expert::family::{ByExpertMoving, ByExpertSumming, Experts, Listing, Placing},
    by_token::family::{Moving, Notifying, Summing},
    layout::cuda::Counting,
    slots::{
        CombineFormat, SlotFormat,
        family::{Combining, Dispatching, Marks, Phases},
    },
};

fn variant<F: Family>(
    family: F,
    world_size: usize,
    architecture: Architecture,
    needed: &'static [&'static str],
) -> Variant {
    Variant::of(&family, world_size, architecture, needed)
}

fn variants(architecture: Architecture) -> Vec<Variant> {
    // Rows come and go whole, and past every cache; or in bulk.
    let (staging, rows): (_, &[&str]) = match architecture == Architecture::SM_80 {
        true => (Staging::Registers, &["LDG.128.STRONG.SYS", "STG.128"]),
        false => (Staging::Bulk, &["UBLKCP"]),
    };
    // Vectors that are summed stream through shared memory.
    const STREAMS: &[&str] = &["LDGSTS.E.BYPASS.128"];
    let summing = |dtype, world_size, blocks| {
        let family = Summing::new(dtype, staging, world_size, blocks).unwrap();
        let mut summing = variant(family, world_size, architecture, STREAMS);
        // The places of a token's rows, of which each rank has one: with fewer warps they would be in registers, but sums take longer.
        summing.rules.local_bytes = 16 * world_size as u32;
        summing
    };
    let mut variants = Vec::new();
    for world_size in [2, 4, MAX_WORLD] {
        variants.push(variant(Counting, world_size, architecture, &[]));
        variants.push(variant(Notifying, world_size, architecture, SLOTS));
        let mut moving = variant(Moving { staging }, world_size, architecture, rows);
        moving.rules.local_bytes = 24; // registers outside the loops
        variants.push(moving);
        for blocks in [24, 48] {
            variants.push(summing(DType::BF16, world_size, blocks));
        }
    }
    for world_size in [2, 4, MAX_WORLD] {
        variants.push(variant(Listing, world_size, architecture, &[]));
        variants.push(variant(Placing, world_size, architecture, &[]));
        let experts = if world_size == MAX_WORLD { Experts::Many } else { Experts::Few };
        let mut moving = variant(ByExpertMoving { staging }, world_size, architecture, rows);
        moving.rules.local_bytes = if world_size == MAX_WORLD { 88 } else { 48 }; // registers outside the loops
        variants.push(moving);
        let dtype = if world_size == 4 { DType::F32 } else { DType::BF16 };
        let summing = ByExpertSumming::new(dtype, staging, experts).unwrap();
        let mut summing = variant(summing, world_size, architecture, STREAMS);
        summing.rules.local_bytes = 56; // registers outside the loops
        variants.push(summing);
    }
    let of_phases = |phases| match phases {
        Phases::Send => &SLOTS[1..],
        Phases::Receive => &SLOTS[..1],
        Phases::Both => SLOTS,
    };
    let mut dispatching = |phases, format, world_size| {
        let family = Dispatching::new(phases, format, world_size, Marks::Few);
        let mut dispatching = variant(family, world_size, architecture, of_phases(phases));
        dispatching.rules.forbidden = &[]; // a correctly rounded division is made of them
        if phases == Phases::Both && format == SlotFormat::Fp8 {
            dispatching.rules.local_bytes = 8; // a register outside the loops
        }
        variants.push(dispatching);
    };
    dispatching(Phases::Both, SlotFormat::Fp8Packed, 2);
    for world_size in [2, MAX_WORLD] {
        dispatching(Phases::Both, SlotFormat::Bf16, world_size);
        dispatching(Phases::Both, SlotFormat::Fp8, world_size);
        dispatching(Phases::Send, SlotFormat::Fp8, world_size);
        dispatching(Phases::Receive, SlotFormat::Fp8, world_size);
    }
    for world_size in [2, MAX_WORLD] {
        for (phases, format) in [Phases::Both, Phases::Send, Phases::Receive]
            .into_iter()
            .flat_map(|phases| [CombineFormat::Bf16, CombineFormat::LogFmt].map(|format| (phases, format)))
        {
            let family = Combining { phases, format };
            let mut combining = variant(family, world_size, architecture, of_phases(phases));
            // Registers outside the loops.
            combining.rules.local_bytes = if architecture == Architecture::SM_80 { 24 } else { 16 };
            if format == CombineFormat::LogFmt {
                combining.rules.forbidden = &[]; // a correctly rounded division is made of them
            }
            variants.push(combining);
        }
    }
    for dtype in [DType::F32, DType::F16] {
        variants.push(summing(dtype, 4, 24));
    }
    variants
}

#[test]
fn every_kernel_is_compiled_to_what_was_meant() {
    assert_as_meant(variants);
}

/// The kernels of a rank that is alone, whose arrays have no element for a peer, and whose loops none to serve.
#[test]
fn every_kernel_compiles_for_a_rank_that_is_alone() {
    let Some(nvrtc) = nvrtc() else { return };
    fn alone<F: Family>(family: F) -> Variant {
        variant(family, 1, Architecture::SM_90A, &[])
    }
    let (staging, experts) = (Staging::Bulk, Experts::Few);
    let variants = [
        alone(Counting),
        alone(Notifying),
        alone(Moving { staging }),
        alone(Summing::new(DType::BF16, staging, 1, 24).unwrap()),
        alone(Listing),
        alone(Placing),
        alone(ByExpertMoving { staging }),
        alone(ByExpertSumming::new(DType::BF16, staging, experts).unwrap()),
        alone(Dispatching::new(Phases::Both, SlotFormat::Fp8, 1, Marks::Few)),
        alone(Dispatching::new(Phases::Send, SlotFormat::Bf16, 1, Marks::Many)),
        alone(Combining { phases: Phases::Both, format: CombineFormat::Bf16 }),
        alone(Combining { phases: Phases::Both, format: CombineFormat::LogFmt }),
        alone(Combining { phases: Phases::Receive, format: CombineFormat::LogFmt }),
    ];
    for variant in variants {
        let program = variant.program();
        let compiled = nvrtc.compile(program).unwrap_or_else(|error| panic!("{}: {error}", program.name()));
        assert_eq!(compiled.log, "", "{}", program.name());
    }
}
