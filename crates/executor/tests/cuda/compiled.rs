//! Kernels that are compiled for their plans: the cases of the interpreter, and those that have ways of their own.

use antiphon_executor::{PacketKind, cuda::CudaOptions};
use antiphon_language::library::{Setting, find};
use antiphon_tensor::bf16;

use crate::{
    all_reduces, alone, every_dtype_and_operator, every_operation,
    harness::{Both, COMPILED, INTERPRETED, on_gpus, proved},
    instances, whole_library,
};

#[test]
fn a_rank_is_alone_on_1_gpus() {
    alone(COMPILED);
}

/// Packets of both forms, signals, and turns with semaphores. The chunks have whole rounds of a block, fewer, and ragged ends; and they
/// do not lie alike.
fn each_kind(world_size: usize) {
    let kinds = [
        ("packet-all-reduce", PacketKind::LL16),
        ("one-shot-all-reduce", PacketKind::LL8),
        ("two-shot-all-reduce", PacketKind::LL16),
        ("pipelined-all-to-all", PacketKind::LL16),
    ];
    for (name, packets) in kinds {
        let mut setting = Setting { unit_size: 4096, ..Setting::new(world_size as u32) };
        setting.options.buffer_alignment = 4;
        let plan = proved(find(name).unwrap().plan(&setting).unwrap());
        on_gpus(world_size, |rank| {
            let mut both = Both::load(rank, &plan, CudaOptions { packets, ..COMPILED })?;
            both.compare::<f32>(10_004, 0, 0)?;
            [(1001, 1), (36, 3), (1, 0), (0, 0)]
                .into_iter()
                .zip(1..)
                .try_for_each(|((chunk, offset), seed)| both.compare::<f32>(chunk, offset, seed))
        });
    }
}

#[test]
fn plans_of_each_kind_are_right_on_2() {
    each_kind(2);
}

#[test]
fn plans_of_each_kind_are_right_on_3() {
    each_kind(3);
}

#[test]
fn plans_of_each_kind_are_right_on_4() {
    each_kind(4);
}

#[test]
fn plans_of_each_kind_are_right_on_8() {
    each_kind(8);
}

/// What a plan sends does not depend on its form.
#[test]
fn ranks_of_both_forms_work_together_on_2() {
    for name in ["packet-all-reduce", "ring-all-reduce"] {
        let plan = proved(find(name).unwrap().plan(&Setting::new(2)).unwrap());
        on_gpus(2, |rank| {
            let mut both = Both::load(rank, &plan, [COMPILED, INTERPRETED][rank.comm.rank()])?;
            both.compare::<bf16>(1000, 0, 0)?;
            both.compare::<bf16>(8, 1, 1)
        });
    }
}

#[test]
fn all_reduces_are_right_on_2() {
    all_reduces(2, &[4096, 4, 1000, 13, 0], COMPILED);
}

#[test]
fn all_reduces_are_right_on_3() {
    all_reduces(3, &[600, 13, 1], COMPILED);
}

#[test]
fn all_reduces_are_right_on_4() {
    all_reduces(4, &[600, 13, 1], COMPILED);
}

#[test]
fn all_reduces_are_right_on_8() {
    all_reduces(8, &[200, 5], COMPILED);
}

#[test]
fn every_plan_of_the_library_is_right_on_2() {
    whole_library(2, &[4, 36, 1001], COMPILED);
}

#[test]
fn every_plan_of_the_library_is_right_on_4() {
    whole_library(4, &[36, 101], COMPILED);
}

#[test]
fn instances_share_a_case_on_2() {
    instances(COMPILED);
}

#[test]
fn every_operation_is_right_on_3() {
    every_operation(COMPILED);
}

#[test]
fn every_dtype_and_operator_is_right_on_2() {
    every_dtype_and_operator(COMPILED);
}
