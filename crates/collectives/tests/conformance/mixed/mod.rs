//! Sums over tensor parallel ranks fused with a gather or a scatter over data parallel ranks.

mod on_host;
mod on_nodes;

use antiphon_collectives::{
    Communicator, ReduceOp,
    mixed::{MixedCall, MixedLayout, MixedMode, MixedOp, operation_of},
};
use antiphon_tensor::DType;
use antiphon_testing::Alignment;
use antiphon_topology::MixedGroup;

use crate::{
    all_reduce::seams,
    harness::{CollectiveBackend, Mixed, Tensor},
    operations::succeeded,
    values::{Values, special_combinations},
};

conformance_of_layouts! {
    every_layout_gives_the_sums_in_every_mode: every_dtype, [world_2 world_3 world_4 world_5 world_6 world_7 world_8];
    special_values_are_summed_as_elsewhere: [f32 f16 bf16], [world_4 world_6];
    blocks_may_be_uneven_and_empty: [f64 bf16 u8], [world_4 world_6 world_8];
    gathers_and_scatters_may_be_uneven: [bf16 i32], [world_2 world_4];
    pieces_join_without_a_seam: [f64 bf16 u8], [world_4 world_6];
    tensors_may_begin_anywhere: every_dtype, [world_4];
    a_batch_may_be_split: [f32 f16 bf16], [world_4];
    a_tensor_may_be_the_block_in_the_other: every_dtype, [world_4 world_6];
    the_choice_of_mode_is_equal_on_all_ranks: any_dtype, [world_4];
}

const FUSED: [MixedOp; 2] = [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce];

/// The modes that give the same bits; `None` chooses among them.
fn modes<B: CollectiveBackend>(mixed: &B::Mixed) -> impl Iterator<Item = Option<MixedMode>> + use<B> {
    let fused = mixed.valid_modes().iter().filter(|&&mode| mode != MixedMode::Composed);
    [None].into_iter().chain(fused.map(|&mode| Some(mode)))
}

/// The layouts of a world on its nodes: tensor parallel ranks of a node, and tensor parallel nodes.
fn layouts<B: CollectiveBackend>(world: usize) -> Vec<[usize; 2]> {
    let local_size = local_size::<B>(world);
    let divisors = |of: usize| (1..=of).filter(move |tp| of.is_multiple_of(*tp));
    divisors(local_size)
        .flat_map(|local| divisors(world / local_size).map(move |inter| [local, inter]))
        .collect()
}

fn local_size<B: CollectiveBackend>(world: usize) -> usize {
    B::nodes(world).iter().filter(|&&node| node == 0).count()
}

/// Those with fused operations.
fn mixed_layouts<B: CollectiveBackend>(world: usize) -> impl Iterator<Item = [usize; 2]> {
    let layouts = layouts::<B>(world).into_iter();
    layouts.filter(move |[local, inter]| local * inter > 1 && local * inter < world)
}

/// Those of them whose groups have two ranks.
fn pairs<B: CollectiveBackend>(world: usize) -> impl Iterator<Item = [usize; 2]> {
    mixed_layouts::<B>(world).filter(|[local, inter]| local * inter == 2)
}

fn layout<B: CollectiveBackend>(comm: &Communicator, [local_tp, inter_tp]: [usize; 2]) -> MixedLayout {
    let world = comm.world_size();
    let layout = MixedLayout::builder(world, comm.rank()).local_size(local_size::<B>(world));
    layout.local_tp(local_tp).inter_tp(inter_tp).build().unwrap()
}

fn handler<B: CollectiveBackend>(comm: &B, tp: [usize; 2]) -> B::Mixed {
    Mixed::new(comm, layout::<B>(comm, tp)).unwrap()
}

/// What all ranks pass, and what this one gets, for blocks of these lengths.
struct Case {
    inputs: Vec<Values>,
    expected: Values,
}

impl Case {
    fn new(op: MixedOp, layout: &MixedLayout, counts: &[usize], inputs: Vec<Values>) -> Self {
        let start = |group: usize| counts[..group].iter().sum::<usize>();
        let groups = layout.groups(MixedGroup::Tp);
        let block = |group: usize| {
            let (ranks, sources): (Vec<usize>, Vec<Values>) = match op {
                MixedOp::AllReduceAllGather => {
                    groups[group].iter().map(|&rank| (rank, inputs[rank].clone())).unzip()
                }
                _ => {
                    let part = start(group)..start(group) + counts[group];
                    inputs.iter().map(|row| row.part(part.clone())).enumerate().unzip()
                }
            };
            let nodes: Vec<u32> = ranks.iter().map(|rank| (rank / layout.local_size()) as u32).collect();
            Values::reduced(ReduceOp::Sum, &sources, &nodes)
        };
        let expected = match op {
            MixedOp::AllReduceAllGather => Values::concat(&Vec::from_iter((0..groups.len()).map(block))),
            _ => block(layout.dp_rank()),
        };
        Self { inputs, expected }
    }

    fn any_bits(op: MixedOp, layout: &MixedLayout, counts: &[usize], dtype: DType, seed: u64) -> Self {
        let of = |rank| Values::any_bits(dtype, seed << 8 | rank as u64, input_len(op, layout, counts, rank));
        Self::new(op, layout, counts, (0..layout.world_size()).map(of).collect())
    }
}

fn input_len(op: MixedOp, layout: &MixedLayout, counts: &[usize], rank: usize) -> usize {
    match op {
        MixedOp::AllReduceAllGather => counts[layout.partition(MixedGroup::Tp).index_of(rank)],
        _ => counts.iter().sum(),
    }
}

/// Runs a call on tensors that begin at `alignment`, and compares every bit of the output and of the input.
fn check<B: CollectiveBackend>(
    comm: &B,
    mixed: &B::Mixed,
    call: MixedCall<'_>,
    case: &Case,
    alignment: Alignment,
) {
    let mine = &case.inputs[comm.rank()];
    let (layout, operation) = (mixed.layout(), operation_of(call.op));
    let what = format!(
        "{operation} of {} × {} on rank {} of tp {} × {} and dp {} × {}, {:?}",
        mine.len(),
        mine.dtype(),
        comm.rank(),
        layout.local_tp_size(),
        layout.inter_tp_size(),
        layout.local_dp_size(),
        layout.inter_dp_size(),
        call.mode
    );
    let input = Tensor::<B>::holding(comm, mine, alignment);
    let mut output = Tensor::<B>::unwritten(comm, mine.dtype(), case.expected.len(), alignment);
    let reduces = (call.op != MixedOp::AllGather).then_some(ReduceOp::Sum);
    let refusal = reduces.and_then(|op| B::refusal(mine.dtype(), op, alignment));
    if refusal.is_none() && reduces.is_some() {
        mixed.prepare(comm, mine.dtype());
    }
    comm.before(mine.dtype(), reduces);
    let outcome = mixed.run(comm, call, input.view(), output.view_mut());
    comm.behind();
    match refusal {
        None => {
            succeeded(outcome, &what);
            output.assert_holds(&case.expected, &what);
        }
        Some(text) => {
            let error = outcome.expect_err(&what).to_string();
            assert!(error.contains(text), "{what}: {error:?} does not say {text:?}");
        }
    }
    input.assert_holds(mine, format_args!("the input of {what}"));
}

/// Every mode of both fused operations, for blocks of equal length.
fn check_even<B: CollectiveBackend>(
    comm: &B,
    tp: [usize; 2],
    dtype: DType,
    lengths: &[usize],
    alignment: Alignment,
) {
    let mixed = handler(comm, tp);
    for &count in lengths {
        let counts = vec![count; mixed.layout().dp_size()];
        for op in FUSED {
            let case = Case::any_bits(op, mixed.layout(), &counts, dtype, count as u64);
            for mode in modes::<B>(&mixed) {
                check::<B>(comm, &mixed, MixedCall::from(op).mode(mode), &case, alignment);
            }
        }
    }
}

fn every_layout_gives_the_sums_in_every_mode<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in layouts::<B>(world) {
            let mixed = handler(&comm, tp);
            let all_sum =
                Values::reduced(ReduceOp::Sum, &every_input(dtype, world, 5 * world), &B::nodes(world));
            match mixed.layout().valid_ops() {
                [MixedOp::AllReduce] => {
                    for &mode in mixed.valid_modes() {
                        let inputs = every_input(dtype, world, 5 * world);
                        let case = Case { inputs, expected: all_sum.clone() };
                        check::<B>(
                            &comm,
                            &mixed,
                            MixedCall::from(MixedOp::AllReduce).mode(mode),
                            &case,
                            Alignment::Aligned,
                        );
                    }
                }
                [MixedOp::AllGather, MixedOp::ReduceScatter] => {
                    let inputs = every_input(dtype, world, 5);
                    let case = Case { expected: Values::concat(&inputs), inputs };
                    check::<B>(&comm, &mixed, MixedOp::AllGather.into(), &case, Alignment::Aligned);
                    let inputs = every_input(dtype, world, 5 * world);
                    let case = Case { inputs, expected: all_sum.block(comm.rank(), world) };
                    check::<B>(&comm, &mixed, MixedOp::ReduceScatter.into(), &case, Alignment::Aligned);
                }
                _ => check_even::<B>(&comm, tp, dtype, &[0, 1, tp[0] * tp[1], 67, 300], Alignment::Aligned),
            }
        }
    });
}

fn every_input(dtype: DType, world: usize, count: usize) -> Vec<Values> {
    (0..world).map(|rank| Values::any_bits(dtype, rank as u64, count)).collect()
}

/// Infinities, NaNs, zeros of both signs and subnormals, in every combination of three ranks.
fn special_values_are_summed_as_elsewhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in pairs::<B>(world) {
            let mixed = handler(&comm, tp);
            for op in FUSED {
                let (inputs, groups) = (special_combinations(dtype, world), mixed.layout().dp_size());
                let count = inputs[0].len();
                let counts: Vec<usize> = match op {
                    MixedOp::AllReduceAllGather => vec![count; groups],
                    _ => (0..groups).map(|group| if group == 0 { count } else { 0 }).collect(),
                };
                let case = Case::new(op, mixed.layout(), &counts, inputs);
                for mode in modes::<B>(&mixed) {
                    let call = MixedCall::from(op).mode(mode).counts(&*counts);
                    check::<B>(&comm, &mixed, call, &case, Alignment::Aligned);
                }
            }
        }
    });
}

fn blocks_may_be_uneven_and_empty<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in mixed_layouts::<B>(world) {
            let mixed = handler(&comm, tp);
            let groups = mixed.layout().dp_size();
            let lists = [
                vec![0; groups],
                (0..groups).map(|group| group * 7).collect(),
                (0..groups).map(|group| if group + 1 == groups { 40_000 } else { 3 }).collect(),
                (0..groups).map(|group| (group + 1) * 150 % 11).collect::<Vec<usize>>(),
            ];
            for (seed, counts) in lists.iter().enumerate() {
                for op in FUSED {
                    let case = Case::any_bits(op, mixed.layout(), counts, dtype, seed as u64);
                    for mode in modes::<B>(&mixed) {
                        let call = MixedCall::from(op).mode(mode).counts(&**counts);
                        check::<B>(&comm, &mixed, call, &case, Alignment::Aligned);
                    }
                }
            }
        }
    });
}

/// Without tensor parallelism: what the fused operations are for groups of one.
fn gathers_and_scatters_may_be_uneven<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        let mixed = handler(&comm, [1, 1]);
        let lists = [vec![0; world], (0..world).map(|rank| rank * 7 % 5).collect::<Vec<usize>>()];
        for counts in &lists {
            for (op, fused) in [
                (MixedOp::AllGather, MixedOp::AllReduceAllGather),
                (MixedOp::ReduceScatter, MixedOp::ReduceScatterAllReduce),
            ] {
                let len = |rank| input_len(fused, mixed.layout(), counts, rank);
                let inputs = (0..world).map(|rank| Values::moderate(dtype, rank as u64, len(rank)));
                let case = Case::new(fused, mixed.layout(), counts, inputs.collect());
                let call = MixedCall::from(op).counts(&**counts);
                check::<B>(&comm, &mixed, call, &case, Alignment::Aligned);
            }
        }
    });
}

/// Blocks around the lengths at which a second round begins, in either mode.
fn pieces_join_without_a_seam<B: CollectiveBackend>(dtype: DType, world: usize) {
    let mut lengths = seams::<B>(dtype);
    lengths.retain(|count| count * dtype.size() < 1 << 20);
    B::run(world, |comm| {
        for tp in pairs::<B>(world) {
            check_even::<B>(&comm, tp, dtype, &lengths, Alignment::Aligned);
        }
    });
}

fn tensors_may_begin_anywhere<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        for tp in pairs::<B>(world) {
            for alignment in [Alignment::Shifted, Alignment::Odd] {
                check_even::<B>(&comm, tp, dtype, &[1, 65, 4099], alignment);
            }
        }
    });
}

/// The rows of a batch get the same bits in one call and in two.
fn a_batch_may_be_split<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| pairs::<B>(world).for_each(|tp| a_batch_is_split(&comm, dtype, tp)));
}

fn a_batch_is_split<B: CollectiveBackend>(comm: &B, dtype: DType, tp: [usize; 2]) {
    let (mixed, rows) = (handler(comm, tp), 96);
    let sums = |count: usize, start: usize, mode| {
        let mine = Values::moderate(dtype, comm.rank() as u64, rows).part(start..start + count);
        let input = Tensor::<B>::holding(comm, &mine, Alignment::Aligned);
        let mut output = Tensor::<B>::unwritten(comm, dtype, count * 2, Alignment::Aligned);
        let call = MixedCall::from(MixedOp::AllReduceAllGather).mode(mode);
        mixed.prepare(comm, dtype);
        comm.before(dtype, Some(ReduceOp::Sum));
        mixed.run(comm, call, input.view(), output.view_mut()).unwrap();
        comm.behind();
        output.values()
    };
    let whole = sums(rows, 0, Some(MixedMode::Waits));
    for mode in modes::<B>(&mixed) {
        let (first, second) = (sums(31, 0, mode), sums(rows - 31, 31, mode));
        for group in 0..2 {
            let split = Values::concat(&[first.block(group, 2), second.block(group, 2)]);
            assert_eq!(split.bytes(), whole.block(group, 2).bytes(), "{mode:?}");
        }
    }
}

fn a_tensor_may_be_the_block_in_the_other<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| pairs::<B>(world).for_each(|tp| a_tensor_is_the_block(&comm, dtype, tp)));
}

fn a_tensor_is_the_block<B: CollectiveBackend>(comm: &B, dtype: DType, tp: [usize; 2]) {
    let mixed = handler(comm, tp);
    let counts = Vec::from_iter((0..mixed.layout().dp_size()).map(|group| 70 + group));
    let start: usize = counts[..mixed.layout().dp_rank()].iter().sum();
    if B::refusal(dtype, ReduceOp::Sum, Alignment::Aligned).is_none() {
        mixed.prepare(comm, dtype);
    }
    for &mode in mixed.valid_modes() {
        for op in FUSED {
            let dtype = if mode == MixedMode::Composed { DType::I32 } else { dtype }; // no rounding
            let case = Case::any_bits(op, mixed.layout(), &counts, dtype, 1);
            let mine = &case.inputs[comm.rank()];
            let row = match op {
                MixedOp::AllReduceAllGather => {
                    let row = Values::any_bits(dtype, 99, counts.iter().sum());
                    row.with_part(start, mine)
                }
                _ => mine.clone(),
            };
            let mut buffer = Tensor::<B>::holding(comm, &row, Alignment::Aligned);
            let call = MixedCall::from(op).mode(mode).counts(&*counts);
            comm.before(dtype, Some(ReduceOp::Sum));
            let done = mixed.run_in_place(comm, call, buffer.view_mut());
            comm.behind();
            if let Some(text) = B::refusal(dtype, ReduceOp::Sum, Alignment::Aligned) {
                assert!(done.unwrap_err().to_string().contains(text), "{op:?} of {dtype}");
                continue;
            }
            succeeded(done, format_args!("{op:?} in place, {mode}"));
            let expected = match op {
                MixedOp::AllReduceAllGather => case.expected.clone(),
                _ => row.with_part(start, &case.expected),
            };
            buffer.assert_holds(&expected, format_args!("{op:?} in place, {mode}"));
        }
    }
}

fn the_choice_of_mode_is_equal_on_all_ranks<B: CollectiveBackend>(world: usize) {
    B::run(world, |comm| {
        for tp in pairs::<B>(world) {
            let mixed = handler(&comm, tp);
            for op in FUSED {
                for bytes in [0, 1, 64, 1 << 20, usize::MAX] {
                    let mode = mixed.select(&comm, op, bytes).unwrap();
                    let same = comm.exchange_objects(&(mode as u8)).unwrap();
                    assert!(
                        same.iter().all(|&other| other == mode as u8),
                        "{op:?} of {bytes} bytes: {same:?}"
                    );
                    assert!(modes::<B>(&mixed).any(|fused| fused == Some(mode)), "a choice changes no bits");
                }
            }
        }
    });
}
