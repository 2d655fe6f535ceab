//! Sums over tensor parallel ranks fused with a gather or a scatter over data parallel ranks.

use antiphon_collectives::{
    CollectiveError, Communicator, ReduceOp,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, operation_of, reference},
};
use antiphon_fabric::FabricError;
use antiphon_tensor::DType;

use crate::{
    harness::{Backend, Place, Tensor},
    operations::succeeded,
    values::{Values, special_combinations},
};

conformance! {
    every_layout_gives_the_sums_in_every_mode: every_dtype, [world_2 world_3 world_4 world_5 world_6 world_7 world_8];
    special_values_are_summed_as_elsewhere: [f32 f16 bf16], [world_4 world_6];
    blocks_may_be_uneven_and_empty: [f64 bf16 u8], [world_4 world_6 world_8];
    gathers_and_scatters_may_be_uneven: [bf16 i32], [world_2 world_4];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_4 world_6];
    tensors_may_begin_anywhere: every_dtype, [world_4];
    a_batch_may_be_split: [f32 f16 bf16], [world_4];
    composed_gives_almost_the_same: [f32 bf16 i32], [world_4 world_6];
    a_tensor_may_be_the_block_in_the_other: every_dtype, [world_4 world_6];
    what_makes_no_sense_is_refused: any_dtype, [world_4];
    ranks_that_disagree_hear_of_it: any_dtype, [world_6];
    the_choice_of_mode_is_equal_on_all_ranks: any_dtype, [world_4];
}

const FUSED: [MixedOp; 2] = [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce];
/// The modes that give the same bits; `None` chooses among them.
const MODES: [Option<MixedMode>; 3] = [Some(MixedMode::Waits), Some(MixedMode::Bytes1), None];

fn layouts(world: usize) -> impl Iterator<Item = usize> {
    (1..=world).filter(move |tp| world.is_multiple_of(*tp))
}

fn handler(comm: &Communicator, tp: usize) -> MixedHandler {
    let layout = MixedLayout::builder(comm.world_size(), comm.rank()).local_tp(tp).build().unwrap();
    MixedHandler::new(comm, layout).unwrap()
}

/// What all ranks pass, and what this one gets, for blocks of these lengths.
struct Case {
    inputs: Vec<Values>,
    expected: Values,
}

impl Case {
    fn new(op: MixedOp, tp: usize, counts: &[usize], rank: usize, inputs: Vec<Values>) -> Self {
        let groups = counts.len();
        let start = |group: usize| counts[..group].iter().sum::<usize>();
        let block = |group: usize| {
            let sources: Vec<Values> = match op {
                MixedOp::AllReduceAllGather => inputs[group * tp..][..tp].to_vec(),
                _ => inputs.iter().map(|row| row.part(start(group)..start(group) + counts[group])).collect(),
            };
            Values::reduced(ReduceOp::Sum, &sources)
        };
        let expected = match op {
            MixedOp::AllReduceAllGather => Values::concat(&Vec::from_iter((0..groups).map(block))),
            _ => block(rank / tp),
        };
        Self { inputs, expected }
    }

    fn any_bits(op: MixedOp, tp: usize, counts: &[usize], rank: usize, dtype: DType, seed: u64) -> Self {
        let of = |rank| Values::any_bits(dtype, seed << 8 | rank as u64, input_len(op, tp, counts, rank));
        Self::new(op, tp, counts, rank, (0..tp * counts.len()).map(of).collect())
    }
}

fn input_len(op: MixedOp, tp: usize, counts: &[usize], rank: usize) -> usize {
    match op {
        MixedOp::AllReduceAllGather => counts[rank / tp],
        _ => counts.iter().sum(),
    }
}

/// Runs a call on tensors that begin at `place`, and compares every bit of the output and of the input.
fn check<B: Backend>(
    comm: &Communicator,
    mixed: &MixedHandler,
    call: MixedCall<'_>,
    case: &Case,
    place: Place,
) {
    let mine = &case.inputs[comm.rank()];
    let (layout, operation) = (mixed.layout(), operation_of(call.op));
    let what = format!(
        "{operation} of {} × {} on rank {} of tp {} × dp {}, {:?}",
        mine.len(),
        mine.dtype(),
        comm.rank(),
        layout.tp_size(),
        layout.dp_size(),
        call.mode
    );
    let mut input = Tensor::<B>::holding(mine, place);
    let mut output = Tensor::<B>::unwritten(mine.dtype(), case.expected.len(), place);
    succeeded(mixed.run(comm, call, input.view(), output.view_mut()), &what);
    output.assert_holds(&case.expected, &what);
    input.assert_holds(mine, format_args!("the input of {what}"));
}

/// Every mode of both fused operations, for blocks of equal length.
fn check_even<B: Backend>(comm: &Communicator, tp: usize, dtype: DType, lengths: &[usize], place: Place) {
    let mixed = handler(comm, tp);
    for &count in lengths {
        let counts = vec![count; comm.world_size() / tp];
        for op in FUSED {
            let case = Case::any_bits(op, tp, &counts, comm.rank(), dtype, count as u64);
            for mode in MODES {
                check::<B>(comm, &mixed, MixedCall::from(op).mode(mode), &case, place);
            }
        }
    }
}

fn every_layout_gives_the_sums_in_every_mode<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in layouts(world) {
            let mixed = handler(&comm, tp);
            let all_sum = Values::reduced(ReduceOp::Sum, &every_input(dtype, world, 5 * world));
            match mixed.valid_ops() {
                [MixedOp::AllReduce] => {
                    for &mode in mixed.valid_modes() {
                        let inputs = every_input(dtype, world, 5 * world);
                        let case = Case { inputs, expected: all_sum.clone() };
                        check::<B>(
                            &comm,
                            &mixed,
                            MixedCall::from(MixedOp::AllReduce).mode(mode),
                            &case,
                            Place::Aligned,
                        );
                    }
                }
                [MixedOp::AllGather, MixedOp::ReduceScatter] => {
                    let inputs = every_input(dtype, world, 5);
                    let case = Case { expected: Values::concat(&inputs), inputs };
                    check::<B>(&comm, &mixed, MixedOp::AllGather.into(), &case, Place::Aligned);
                    let inputs = every_input(dtype, world, 5 * world);
                    let case = Case { inputs, expected: all_sum.block(comm.rank(), world) };
                    check::<B>(&comm, &mixed, MixedOp::ReduceScatter.into(), &case, Place::Aligned);
                }
                _ => check_even::<B>(&comm, tp, dtype, &[0, 1, tp, 67, 300], Place::Aligned),
            }
        }
    });
}

fn every_input(dtype: DType, world: usize, count: usize) -> Vec<Values> {
    (0..world).map(|rank| Values::any_bits(dtype, rank as u64, count)).collect()
}

/// Infinities, NaNs, zeros of both signs and subnormals, in every combination of three ranks.
fn special_values_are_summed_as_elsewhere<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let (tp, mixed) = (2, handler(&comm, 2));
        for op in FUSED {
            let inputs = special_combinations(dtype, world);
            let count = inputs[0].len();
            let counts: Vec<usize> = match op {
                MixedOp::AllReduceAllGather => vec![count; world / tp],
                _ => (0..world / tp).map(|group| if group == 0 { count } else { 0 }).collect(),
            };
            let case = Case::new(op, tp, &counts, comm.rank(), inputs);
            for mode in MODES {
                check::<B>(
                    &comm,
                    &mixed,
                    MixedCall::from(op).mode(mode).counts(&*counts),
                    &case,
                    Place::Aligned,
                );
            }
        }
    });
}

fn blocks_may_be_uneven_and_empty<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in layouts(world).filter(|&tp| tp > 1 && tp < world) {
            let (mixed, groups) = (handler(&comm, tp), world / tp);
            let lists = [
                vec![0; groups],
                (0..groups).map(|group| group * 7).collect(),
                (0..groups).map(|group| if group + 1 == groups { 40_000 } else { 3 }).collect(),
                (0..groups).map(|group| (group + 1) * 150 % 11).collect::<Vec<usize>>(),
            ];
            for (seed, counts) in lists.iter().enumerate() {
                for op in FUSED {
                    let case = Case::any_bits(op, tp, counts, comm.rank(), dtype, seed as u64);
                    for mode in MODES {
                        let call = MixedCall::from(op).mode(mode).counts(&**counts);
                        check::<B>(&comm, &mixed, call, &case, Place::Aligned);
                    }
                }
            }
        }
    });
}

/// Without tensor parallelism: what the fused operations are for groups of one.
fn gathers_and_scatters_may_be_uneven<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let mixed = handler(&comm, 1);
        let lists = [vec![0; world], (0..world).map(|rank| rank * 7 % 5).collect::<Vec<usize>>()];
        for counts in &lists {
            for (op, fused) in [
                (MixedOp::AllGather, MixedOp::AllReduceAllGather),
                (MixedOp::ReduceScatter, MixedOp::ReduceScatterAllReduce),
            ] {
                let inputs = (0..world)
                    .map(|rank| Values::moderate(dtype, rank as u64, input_len(fused, 1, counts, rank)));
                let case = Case::new(fused, 1, counts, comm.rank(), inputs.collect());
                let call = MixedCall::from(op).counts(&**counts);
                check::<B>(&comm, &mixed, call, &case, Place::Aligned);
            }
        }
    });
}

/// Blocks around the lengths at which a second round begins, in either mode.
fn pieces_join_without_a_seam<B: Backend>(dtype: DType, world: usize) {
    let piece = (128 << 10) / dtype.size();
    B::run(world, |comm| {
        check_even::<B>(&comm, 2, dtype, &[piece - 1, piece, piece + 1, 2 * piece + 3], Place::Aligned)
    });
}

fn tensors_may_begin_anywhere<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| check_even::<B>(&comm, 2, dtype, &[1, 65, 4099], Place::Odd));
}

/// The rows of a batch get the same bits in one call and in two.
fn a_batch_may_be_split<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let (mixed, rows) = (handler(&comm, 2), 96);
        let sums = |count: usize, start: usize, mode| {
            let mine = Values::moderate(dtype, comm.rank() as u64, rows).part(start..start + count);
            let mut input = Tensor::<B>::holding(&mine, Place::Aligned);
            let mut output = Tensor::<B>::unwritten(dtype, count * 2, Place::Aligned);
            let call = MixedCall::from(MixedOp::AllReduceAllGather).mode(mode);
            mixed.run(&comm, call, input.view(), output.view_mut()).unwrap();
            output.values("a batch")
        };
        let whole = sums(rows, 0, Some(MixedMode::Waits));
        for mode in MODES {
            let (first, second) = (sums(31, 0, mode), sums(rows - 31, 31, mode));
            for group in 0..2 {
                let split = Values::concat(&[first.block(group, 2), second.block(group, 2)]);
                assert_eq!(split.bytes(), whole.block(group, 2).bytes(), "{mode:?}");
            }
        }
    });
}

/// Against the obvious version in f64: two collectives may round twice.
fn composed_gives_almost_the_same<B: Backend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let (tp, groups) = (2, world / 2);
        let mixed = handler(&comm, tp);
        for counts in [vec![50; groups], (0..groups).map(|group| 20 * group).collect()] {
            for op in FUSED {
                let inputs: Vec<Values> = (0..world)
                    .map(|rank| Values::moderate(dtype, rank as u64, input_len(op, tp, &counts, rank)))
                    .collect();
                let numbers: Vec<Vec<f64>> = inputs.iter().map(Values::to_f64).collect();
                let exact = reference::outputs(op, tp, &counts, &numbers, |all: &[f64]| all.iter().sum());
                let exact = &exact[comm.rank()];
                let mut input = Tensor::<B>::holding(&inputs[comm.rank()], Place::Aligned);
                let mut output = Tensor::<B>::unwritten(dtype, exact.len(), Place::Aligned);
                let call = MixedCall::from(op).mode(MixedMode::Composed).counts(&*counts);
                mixed.run(&comm, call, input.view(), output.view_mut()).unwrap();
                // Two roundings of at most 2⁻⁹ each, of partial sums below 4 · world.
                let tolerance = if dtype == DType::BF16 { world as f64 * 4.0 / 128.0 } else { 1e-4 };
                for (index, (&exact, actual)) in
                    exact.iter().zip(output.values("composed").to_f64()).enumerate()
                {
                    let wrapped = if dtype == DType::I32 { f64::from(exact as i64 as i32) } else { exact };
                    assert!(
                        (actual - wrapped).abs() <= tolerance,
                        "{op:?}, element {index}: {actual}, not {wrapped}"
                    );
                }
            }
        }
    });
}

fn a_tensor_may_be_the_block_in_the_other<B: Backend>(dtype: DType, world: usize) {
    let (tp, counts) = (2, Vec::from_iter((0..world / 2).map(|group| 70 + group)));
    B::run(world, |comm| {
        let (mixed, group) = (handler(&comm, tp), comm.rank() / tp);
        let start: usize = counts[..group].iter().sum();
        for mode in [MixedMode::Waits, MixedMode::Bytes1, MixedMode::Composed] {
            for op in FUSED {
                let dtype = if mode == MixedMode::Composed { DType::I32 } else { dtype }; // no rounding
                let case = Case::any_bits(op, tp, &counts, comm.rank(), dtype, 1);
                let mine = &case.inputs[comm.rank()];
                let row = match op {
                    MixedOp::AllReduceAllGather => {
                        let row = Values::any_bits(dtype, 99, counts.iter().sum());
                        row.with_part(start, mine)
                    }
                    _ => mine.clone(),
                };
                let mut buffer = Tensor::<B>::holding(&row, Place::Aligned);
                let call = MixedCall::from(op).mode(mode).counts(&*counts);
                let done = mixed.run_in_place(&comm, call, buffer.view_mut());
                succeeded(done, format_args!("{op:?} in place, {mode}"));
                let expected = match op {
                    MixedOp::AllReduceAllGather => case.expected.clone(),
                    _ => row.with_part(start, &case.expected),
                };
                buffer.assert_holds(&expected, format_args!("{op:?} in place, {mode}"));
            }
        }
    });
}

fn text(outcome: Result<(), CollectiveError>) -> String {
    outcome.unwrap_err().to_string()
}

fn what_makes_no_sense_is_refused<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let layout = |tp| MixedLayout::builder(world, comm.rank()).local_tp(tp).build().unwrap();
        let of_tp = |tp| MixedHandler::new(&comm, layout(tp)).unwrap();
        let (mixed, pure) = (of_tp(2), of_tp(world));
        let (block, row) = ([1f32; 6], [1f32; 12]);
        let gather = MixedOp::AllReduceAllGather;
        let scatter = MixedCall::from(MixedOp::ReduceScatterAllReduce);
        let mut out = [0f32; 12];
        let cases = [
            (
                text(mixed.run(&comm, MixedOp::AllReduce, &block, &mut out[..6])),
                "all_reduce: the operation must be one of all_reduce_all_gather, reduce_scatter_all_reduce, as \
                 tp_size is 2 and dp_size is 2",
            ),
            (
                text(pure.run(
                    &comm,
                    MixedCall::from(MixedOp::AllReduce).mode(MixedMode::Composed),
                    &block,
                    &mut out[..6],
                )),
                "all_reduce: the mode must be one of waits, bytes1, not composed",
            ),
            (
                text(mixed.run(&comm, gather, &block, &mut out[..11])),
                "all_reduce_all_gather: the output has 11 elements, expected 12 (dp_size 2 × 6 elements)",
            ),
            (
                text(mixed.run(&comm, scatter.counts(&[6][..]), &row, &mut out[..6])),
                "reduce_scatter_all_reduce: the counts must be one for each of dp_size 2, not 1",
            ),
            (
                text(mixed.run(&comm, scatter.counts(&[usize::MAX, 13][..]), &row, &mut out[..6])),
                "reduce_scatter_all_reduce: the input has 12 elements, expected",
            ),
            (
                text(mixed.run(&comm, gather, &block, &mut [0f64; 12])),
                "all_reduce_all_gather: the input is f32, the output is f64",
            ),
        ];
        for (actual, expected) in cases {
            assert!(actual.starts_with(expected), "{actual}");
        }
        let refused = text(mixed.run_in_place(&comm, gather, &mut out[..11]));
        assert!(
            refused.contains("the buffer has 11 elements, expected 10 (a multiple of dp_size 2)"),
            "{refused}"
        );
        let elsewhere = MixedLayout::builder(world + 1, comm.rank()).build().unwrap();
        let refused = text(MixedHandler::new(&comm, elsewhere).map(drop));
        assert!(refused.contains("of 5") && refused.contains("of 4"), "{refused}");
        let nodes = MixedLayout::builder(world, comm.rank()).local_size(2).build().unwrap();
        assert!(text(MixedHandler::new(&comm, nodes).map(drop)).contains("inter_size 2"));
        // Nobody has called anything, so all are still in step.
        mixed.run(&comm, gather, &block, &mut out).unwrap();
    });
}

fn ranks_that_disagree_hear_of_it<B: Backend>(world: usize) {
    let gather = MixedCall::from(MixedOp::AllReduceAllGather).mode(MixedMode::Waits);
    let scatter = MixedCall::from(MixedOp::ReduceScatterAllReduce).mode(MixedMode::Waits);
    // How the last rank's call differs from the others', and in which of two layouts it is made.
    let cases = [
        ("operations", 2, scatter),
        ("modes", 2, gather.mode(MixedMode::Bytes1)),
        ("two collectives", 2, gather.mode(MixedMode::Composed)),
        ("even and uneven blocks", 2, gather.counts(&[4, 4, 4][..])),
        ("layouts", 3, gather),
    ];
    for (about, last_tp, last) in cases {
        let errors = B::run(world, |comm| {
            let handlers = [2, 3].map(|tp| handler(&comm, tp));
            let (tp, call) = if comm.rank() + 1 == world { (last_tp, last) } else { (2, gather) };
            let (block, mut row) = ([1f32; 4], vec![0f32; 4 * world / tp]);
            match call.op {
                MixedOp::AllReduceAllGather => handlers[tp - 2].run(&comm, call, &block, &mut row),
                _ => handlers[tp - 2].run(&comm, call, &row, &mut [0f32; 4]),
            }
            .unwrap_err()
        });
        let is_mismatch =
            |error: &CollectiveError| matches!(error, CollectiveError::Fabric(FabricError::Mismatch { .. }));
        let is_told =
            |error: &CollectiveError| matches!(error, CollectiveError::Fabric(FabricError::Aborted { .. }));
        assert!(errors.iter().any(is_mismatch), "{about}: {errors:?}");
        assert!(errors.iter().all(|error| is_mismatch(error) || is_told(error)), "{about}: {errors:?}");
    }
    let errors = B::run(world, |comm| {
        let tp = if comm.rank() == 0 { 2 } else { 3 };
        let layout = MixedLayout::builder(world, comm.rank()).local_tp(tp).build().unwrap();
        text(MixedHandler::new(&comm, layout).map(drop))
    });
    let expected = "rank 0 has tp_size 2 × dp_size 3, rank 1 has tp_size 3 × dp_size 2";
    assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
}

/// Lists of which only the sum is equal.
#[test]
fn ranks_that_disagree_about_the_rows_hear_of_it() {
    let errors = antiphon_fabric::LocalWorld::run(4, |comm| {
        let counts = if comm.rank() < 2 { [4, 6] } else { [6, 4] };
        let call = MixedCall::from(MixedOp::AllReduceAllGather).counts(&counts[..]);
        let block = vec![1f32; counts[comm.rank() / 2]];
        handler(&comm, 2).run(&comm, call, &block, &mut [0f32; 10]).unwrap_err().to_string()
    });
    assert!(errors.iter().any(|error| error.contains("layout and rows")), "{errors:?}");
}

fn the_choice_of_mode_is_equal_on_all_ranks<B: Backend>(world: usize) {
    B::run(world, |comm| {
        let mixed = handler(&comm, 2);
        for op in FUSED {
            for bytes in [0, 1, 64, 1 << 20, usize::MAX] {
                let mode = mixed.select(&comm, op, bytes).unwrap();
                let same = comm.exchange_objects(&(mode as u8)).unwrap();
                assert!(same.iter().all(|&other| other == mode as u8), "{op:?} of {bytes} bytes: {same:?}");
                assert_ne!(mode, MixedMode::Composed, "a choice changes no bits");
            }
        }
    });
}
