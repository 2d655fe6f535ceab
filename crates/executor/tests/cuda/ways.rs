//! Every way to execute a plan has the host's bits: forms, packets, and places of tensors. And the plans that MSCCL++ prints.

use std::fs;

use antiphon_executor::{
    PacketKind,
    cuda::{CudaOptions, Form},
};
use antiphon_language::library::{Setting, find};
use antiphon_plan::{
    Plan,
    verify::{Memory, Options, VerifiedPlan},
};

use crate::harness::{Both, on_gpus, proved};

/// Plans of each kind of synchronisation, on two tensors and in place, at sizes that nothing divides, and at odd addresses.
fn every_way(ranks: usize) {
    for name in ["packet-all-reduce", "two-shot-all-reduce", "ring-all-gather", "pipelined-all-to-all"] {
        let algorithm = find(name).unwrap();
        for inplace in [false, true].into_iter().filter(|&inplace| algorithm.inplace || !inplace) {
            let mut setting = Setting { inplace, unit_size: 48, ..Setting::new(ranks as u32) };
            setting.options.buffer_alignment = 4;
            let plan = proved(algorithm.plan(&setting).unwrap());
            for form in [Form::Compiled, Form::Interpreted] {
                for packets in PacketKind::ALL {
                    on_gpus(ranks, |rank| {
                        let options = CudaOptions { form, packets, ..CudaOptions::default() };
                        let mut both = Both::load(rank, &plan, options)?;
                        for (seed, (chunk, offset)) in [(101, 1), (36, 0)].into_iter().enumerate() {
                            both.compare::<f32>(chunk, offset, seed)?;
                            both.compare_registered::<f32>(chunk, offset, seed)?;
                        }
                        Ok(both.gpu.free(&rank.comm)?)
                    });
                }
            }
        }
    }
}

#[test]
fn every_way_has_the_hosts_bits_on_2() {
    every_way(2);
}

#[test]
fn every_way_has_the_hosts_bits_on_3() {
    every_way(3);
}

#[test]
fn every_way_has_the_hosts_bits_on_4() {
    every_way(4);
}

/// Those plans of MSCCL++'s own tests, each an operation or two, that are right by themselves for so many ranks.
fn golden(ranks: usize) -> Vec<VerifiedPlan> {
    let folder = antiphon_testing::workspace().join("tests/golden/mscclpp/plans");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let plans = files.iter().map(|path| Plan::from_json(&fs::read(path).unwrap()).unwrap());
    let options = Options { memory: Memory::Device, ..Options::default() };
    plans
        .filter(|plan| plan.num_ranks() == ranks)
        .filter_map(|plan| VerifiedPlan::new(plan, &options).ok())
        .collect()
}

#[test]
fn plans_of_mscclpp_have_the_hosts_bits_on_2() {
    let plans = golden(2);
    assert!(plans.len() >= 4, "{} plans are right", plans.len());
    for plan in plans {
        for form in [Form::Compiled, Form::Interpreted] {
            on_gpus(2, |rank| {
                let mut both = Both::load(rank, &plan, CudaOptions { form, ..CudaOptions::default() })?;
                both.compare::<f32>(64, 0, 0)?;
                both.compare::<f32>(1028, 1, 1)
            });
        }
    }
}
