//! Calls that are refused, and the texts of their errors.

mod plans;

use std::time::Duration;

use antiphon_executor::{AlgorithmCollection, ExecutorError, LoadedPlan, Options, PacketKind, Waiting};
use antiphon_fabric::{Communicator, FabricError, LocalWorld};
use antiphon_plan::{
    OpKind, Plan, Rank, ReduceOp,
    verify::{Options as Proof, VerifiedPlan},
};
use antiphon_tensor::{DType, Device, TensorError, TensorView, TensorViewMut};

fn proved(plan: Plan) -> VerifiedPlan {
    VerifiedPlan::new(plan, &Proof::default()).unwrap_or_else(|report| panic!("{report}"))
}

fn two_shot(ranks: u32) -> VerifiedPlan {
    proved(plans::two_shot(ranks, ReduceOp::Sum, false).unwrap())
}

/// The texts of what every rank gets.
fn errors<T>(ranks: usize, run: impl Fn(Communicator) -> Result<T, ExecutorError> + Sync) -> Vec<String> {
    let texts = LocalWorld::run(ranks, |comm| run(comm).err().expect("an error").to_string());
    texts.into_iter().collect()
}

#[test]
fn ranks_with_different_plans_hear_of_it_and_go_on() {
    let results = LocalWorld::run(3, |comm| {
        let op = if comm.rank() == 2 { ReduceOp::Max } else { ReduceOp::Sum };
        let plan = proved(plans::two_shot(3, op, false).unwrap());
        let error = LoadedPlan::load(&comm, &plan, Options::default()).unwrap_err();
        // The communicator is as good as before.
        LoadedPlan::load(&comm, &two_shot(3), Options::default()).unwrap();
        error
    });
    for (rank, error) in results.into_iter().enumerate() {
        let ExecutorError::PlansDiffer { rank: mine, peer, .. } = error else { panic!("{error}") };
        assert_eq!((mine, peer), (rank, if rank == 2 { 0 } else { 2 }));
    }
}

#[test]
fn a_plan_for_another_world_is_refused() {
    let texts = errors(2, |comm| LoadedPlan::load(&comm, &two_shot(3), Options::default()));
    assert_eq!(texts[0], r#"plan "two_shot" is for 3 ranks, and there are 2"#);
}

#[test]
fn sizes_are_refused_with_the_numbers() {
    LocalWorld::run(2, |comm| {
        let mut plan = LoadedPlan::load(&comm, &two_shot(2), Options::default()).unwrap();
        let error = plan.execute(&comm, &[0u8; 40], &mut [0u8; 40]).unwrap_err().to_string();
        assert!(error.contains("40 bytes") && error.contains("2 chunks") && error.contains("16"), "{error}");
        let error = plan.execute(&comm, &[0f32; 8], &mut [0f32; 16]).unwrap_err().to_string();
        assert!(error.contains("16 bytes") && error.contains("32"), "{error}");
        let error = plan.execute(&comm, &[0f32; 8], &mut [0i32; 8]).unwrap_err().to_string();
        assert_eq!(error, "the input is f32, the output is i32");
        // And all the same it works afterwards.
        let mut output = [0f32; 8];
        plan.execute(&comm, &[1f32; 8], &mut output).unwrap();
        assert_eq!(output, [2.0; 8]);
    });
}

#[test]
fn limits_of_the_message_are_kept() {
    let mut plan = plans::two_shot(2, ReduceOp::Sum, false).unwrap();
    (plan.min_message_size, plan.max_message_size) = (64, 128);
    let plan = proved(plan);
    LocalWorld::run(2, |comm| {
        let mut plan = LoadedPlan::load(&comm, &plan, Options::default()).unwrap();
        for (count, fits) in [(8, false), (16, true), (32, true), (40, false)] {
            let done = plan.execute(&comm, &vec![0f32; count], &mut vec![0f32; count]);
            assert_eq!(done.is_ok(), fits, "{count} elements: {done:?}");
        }
    });
}

/// A reduction may write to a source, but not to another part of it.
#[test]
fn a_reduction_onto_a_part_of_its_source_is_refused() {
    let run = |at: u32| {
        let text = format!(
            r#"{{"name": "shifted", "collective": "test", "gpus": [{{"id": 0, "input_chunks": 4, "output_chunks": 4,
                "scratch_chunks": 0, "channels": [], "threadblocks": [{{"id": 0, "ops": [{{"name": "re",
                "src_buff": [{{"type": "i", "index": 0, "size": 2}}, {{"type": "o", "index": 1, "size": 2}}],
                "dst_buff": [{{"type": "o", "index": {at}, "size": 2}}], "reduce_op": "sum"}}]}}]}}]}}"#
        );
        let plan = Plan::from_json(text.as_bytes()).unwrap();
        let done = LocalWorld::run(1, |comm| {
            // SAFETY: there is one rank.
            let mut loaded = unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default())? };
            loaded.execute(&comm, &[1f32; 16], &mut [2f32; 16])
        });
        done[0].as_ref().map_err(ToString::to_string).copied()
    };
    assert_eq!(run(1), Ok(()));
    for at in [0, 2] {
        let error = run(at).unwrap_err();
        assert!(error.contains("source 1..3") && error.contains("overlap in part"), "{error}");
    }
}

#[test]
fn elements_are_not_cut() {
    let mut plan = plans::two_shot(2, ReduceOp::Sum, false).unwrap();
    plan.buffer_alignment = 2;
    let plan = proved(plan);
    let texts = errors(2, |comm| {
        let mut plan = LoadedPlan::load(&comm, &plan, Options::default())?;
        plan.execute(&comm, &[0f32; 3], &mut [0f32; 3])
    });
    assert!(texts.iter().all(|text| text.contains("6 bytes") && text.contains("elements of 4")), "{texts:?}");
}

#[test]
fn elements_without_arithmetic_are_moved_and_not_reduced() {
    fn view(x: &[u32]) -> TensorView<'_> {
        // SAFETY: the slice is borrowed for as long as the view.
        unsafe { TensorView::from_raw_parts(x.as_ptr().cast(), DType::U32, &[x.len()], None, Device::Host) }
            .unwrap()
    }
    fn view_mut(x: &mut [u32]) -> TensorViewMut<'_> {
        let (data, shape) = (x.as_mut_ptr().cast(), [x.len()]);
        // SAFETY: as above.
        unsafe { TensorViewMut::from_raw_parts(data, DType::U32, &shape, None, Device::Host) }.unwrap()
    }
    let gather = proved(plans::ring_all_gather(2).unwrap());
    LocalWorld::run(2, |comm| {
        let (mut output, input) = ([0; 16], [u32::MAX - comm.rank() as u32; 8]);
        let mut plan = LoadedPlan::load(&comm, &gather, Options::default()).unwrap();
        plan.execute(&comm, view(&input), view_mut(&mut output)).unwrap();
        assert_eq!((output[7], output[8]), (u32::MAX, u32::MAX - 1));
        let mut plan = LoadedPlan::load(&comm, &two_shot(2), Options::default()).unwrap();
        let error = plan.execute(&comm, view(&input), view_mut(&mut output[..8])).unwrap_err();
        let ExecutorError::Tensor { source: TensorError::NotNumeric { dtype: DType::U32 }, .. } = error
        else {
            panic!("{error}")
        };
    });
}

#[test]
fn ranks_that_call_for_different_sizes_hear_of_it() {
    let texts = errors(2, |comm| {
        let mut plan = LoadedPlan::load(&comm, &two_shot(2), Options::default())?;
        let count = 8 * (1 + comm.rank());
        plan.execute(&comm, &vec![0f32; count], &mut vec![0f32; count])
    });
    let calls = |text: &String| text.contains("execute(8 × f32") && text.contains("execute(16 × f32");
    assert!(texts.iter().all(calls), "{texts:?}");
}

#[test]
fn a_signal_that_never_comes_is_named() {
    let mut plan = plans::two_shot(2, ReduceOp::Sum, false).unwrap();
    // Rank 1 forgets its last signal.
    let ops = &mut plan.gpus[1].threadblocks[0].ops;
    let last = ops.iter().rposition(|op| op.kind.name() == "signal").unwrap();
    ops[last].kind = OpKind::Nop;
    let results = LocalWorld::run_with(2, Duration::from_secs(1), |comm| {
        // SAFETY: what is missing is at the end, so nothing races before.
        let mut plan = unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default()) }.unwrap();
        plan.execute(&comm, &[0f32; 8], &mut [0f32; 8]).unwrap_err()
    });
    let ExecutorError::Stuck { place, waiting, reason } = &results[0] else { panic!("{}", results[0]) };
    assert_eq!((place.rank, place.threadblock.0), (Rank(0), 0));
    assert!(matches!(waiting, Waiting::Signal { peer: Rank(1), expected: 2, seen: 1, .. }), "{waiting}");
    // Rank 1 waits after its last operation; either may give up first.
    match &**reason {
        FabricError::Timeout { missing, .. } => assert_eq!(*missing, [1]),
        reason => assert!(matches!(reason, FabricError::Aborted { by: 1, .. }), "{reason}"),
    }
}

#[test]
fn a_rank_that_does_not_load_the_plan_is_named_with_the_call() {
    for ranks in [2, 3, 4, 8] {
        let texts = LocalWorld::run_with(ranks as usize, Duration::from_millis(200), |comm| {
            (comm.rank() != 1).then(|| {
                let loaded = LoadedPlan::load(&comm, &two_shot(ranks), Options::default());
                loaded.map(drop).unwrap_err().to_string()
            })
        });
        for text in texts.into_iter().flatten() {
            assert!(text.contains("rank 1") && text.contains("load_plan"), "{text}");
        }
    }
}

#[test]
fn a_range_outside_its_buffer_is_refused_when_the_plan_is_loaded() {
    let mut plan = plans::two_shot(2, ReduceOp::Sum, false).unwrap();
    for gpu in &mut plan.gpus {
        gpu.output_chunks = 1;
    }
    let texts = errors(2, |comm| {
        // SAFETY: it is not executed.
        unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default()) }
    });
    assert!(texts[0].contains("of the 1 of rank"), "{texts:?}");
}

#[test]
fn scratch_beyond_the_memory_is_refused() {
    let mut plan = plans::packets(2, ReduceOp::Sum, false).unwrap();
    for gpu in &mut plan.gpus {
        gpu.scratch_chunks = 1 << 30;
    }
    let texts = errors(2, |comm| {
        // SAFETY: it has no races.
        let mut plan = unsafe { LoadedPlan::load_unproved(&comm, plan.clone(), Options::default()) }?;
        plan.execute(&comm, &[0f32; 64], &mut [0f32; 64])
    });
    assert!(texts[0].contains("symmetric memory do not fit"), "{texts:?}");
}

#[test]
fn a_collection_takes_the_first_plan_that_serves() {
    let mut small = plans::packets(2, ReduceOp::Sum, false).unwrap();
    small.max_message_size = 1024;
    let (small, large) = (proved(small), two_shot(2));
    LocalWorld::run(2, |comm| {
        let mut plans = AlgorithmCollection::new();
        plans.add(&comm, &small, &[DType::F32], Options { packets: PacketKind::LL8 }).unwrap();
        plans.add(&comm, &large, &[], Options::default()).unwrap();
        let mut name = |bytes: usize, dtype| {
            let plan = plans.select(&comm, "allreduce", [bytes; 2], dtype);
            plan.map(|plan| plan.plan().name.clone().unwrap()).map_err(|error| error.to_string())
        };
        assert_eq!(name(512, DType::F32).unwrap(), "packets");
        assert_eq!(name(512, DType::BF16).unwrap(), "two_shot");
        assert_eq!(name(2048, DType::F32).unwrap(), "two_shot");
        let error = name(40, DType::F32).unwrap_err();
        assert!(error.contains("allreduce of 40 bytes of f32 on 2 ranks"), "{error}");
        assert!(error.contains(r#""packets" does allreduce of 0 to 1024 bytes of f32"#), "{error}");
        let mut output = [0f32; 16];
        plans.execute(&comm, "allreduce", &[1f32; 16], &mut output).unwrap();
        assert_eq!(output, [2.0; 16]);
        let why_not = |collective, bytes: usize, dtype| -> Vec<_> {
            let explained = plans.explain(collective, [bytes; 2], dtype).into_iter();
            explained.map(|(_, why_not)| why_not.unwrap_or_else(|| "does it".into())).collect()
        };
        assert_eq!(why_not("allreduce", 512, DType::F32), ["does it", "\"packets\" was added before it"]);
        assert_eq!(why_not("allreduce", 512, DType::I32), ["it was added for f32", "does it"]);
        assert_eq!(why_not("allgather", 512, DType::F32), ["it does allreduce"; 2]);
        assert!(why_not("allreduce", 2048, DType::F32)[0].contains("1024"));
        plans.free(&comm).unwrap();
    });
}

/// Each reduction rounds once, to the tensors' dtype, in the order of its sources.
#[test]
fn a_reduction_rounds_once() {
    use antiphon_tensor::bf16;
    let plan = proved(plans::two_shot(3, ReduceOp::Sum, true).unwrap());
    let outputs = LocalWorld::run(3, |comm| {
        let mut plan = LoadedPlan::load(&comm, &plan, Options::default()).unwrap();
        // 256 + 1 + 1 is 258 in one rounding; 256 + 1 would round back to 256 twice.
        let mine = bf16::from_f32(if comm.rank() == 0 { 256.0 } else { 1.0 });
        let mut buffer = vec![mine; 24];
        plan.execute_in_place(&comm, &mut buffer).unwrap();
        buffer
    });
    assert!(outputs.iter().flatten().all(|sum| sum.to_f32() == 258.0), "{outputs:?}");
}

#[test]
fn messages_beyond_the_proof_are_done_in_parts_of_what_is_proved() {
    let plan = proved(plans::in_turns(16, 16, 1, 40));
    let largest = plan.report().largest_chunk.unwrap() as usize;
    assert!((256..4 << 10).contains(&largest), "{}", plan.report());
    LocalWorld::run(1, |comm| {
        let mut plan = LoadedPlan::load(&comm, &plan, Options::default()).unwrap();
        for bytes in [16, largest, largest + 16, 3 * largest - 16, 1 << 20] {
            let input: Vec<f32> = (0..bytes / 4).map(|at| at as f32).collect();
            let mut output = vec![0f32; input.len()];
            plan.execute(&comm, &input, &mut output).unwrap();
            assert_eq!(input, output);
        }
    });
}

#[test]
fn messages_beyond_the_proof_that_have_no_parts_are_refused() {
    let plan = proved(plans::in_turns(1, 1, 64, 100));
    assert_eq!(plan.report().largest_chunk, Some(1), "{}", plan.report());
    LocalWorld::run(1, |comm| {
        let mut loaded = LoadedPlan::load(&comm, &plan, Options::default()).unwrap();
        let error = loaded.execute(&comm, &[0f32; 2], &mut [0f32; 2]).unwrap_err();
        let ExecutorError::Unproved { largest_chunk: 1, chunk: 8, multiple: 4, .. } = error else {
            panic!("{error}")
        };
        let mut plans = AlgorithmCollection::new();
        plans.add(&comm, &plan, &[], Options::default()).unwrap();
        let fits = |plans: &mut AlgorithmCollection, dtype, bytes| {
            plans.select(&comm, "copy", [bytes, bytes], dtype).is_ok()
        };
        assert!(fits(&mut plans, DType::U8, 1) && fits(&mut plans, DType::U8, 8));
        assert!(!fits(&mut plans, DType::F32, 8));
        let mut output = [0u8; 5];
        loaded.execute(&comm, &[1u8, 2, 3, 4, 5], &mut output).unwrap();
        assert_eq!(output, [1, 2, 3, 4, 5]);
    });
}
