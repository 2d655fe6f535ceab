//! Mixed collectives on the host: composed of two, refused, and called differently by ranks.

use antiphon_collectives::{
    CollectiveError,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp, reference},
};
use antiphon_fabric::{Communicator, FabricError};
use antiphon_tensor::DType;
use antiphon_testing::Alignment;

use super::{FUSED, input_len, layout, mixed_layouts};
use crate::{
    harness::{CollectiveBackend, Tensor},
    values::Values,
};

conformance_on_host! {
    what_makes_no_sense_is_refused: any_dtype, [world_4];
    ranks_that_disagree_hear_of_it: any_dtype, [world_6];
}

mod composed {
    use super::*;

    conformance_of_layouts_on_host! {
        composed_gives_almost_the_same: [f32 bf16 i32], [world_4 world_6];
    }
}

fn handler(comm: &Communicator, tp: usize) -> MixedHandler {
    let layout = MixedLayout::builder(comm.world_size(), comm.rank()).local_tp(tp).build().unwrap();
    MixedHandler::new(comm, layout).unwrap()
}

/// Against the obvious version in f64: two collectives may round twice.
fn composed_gives_almost_the_same<B: CollectiveBackend>(dtype: DType, world: usize) {
    B::run(world, |comm| {
        mixed_layouts::<B>(world).for_each(|tp| composed_is_almost_the_same(&comm, dtype, tp))
    });
}

fn composed_is_almost_the_same<B: CollectiveBackend>(comm: &B, dtype: DType, tp: [usize; 2]) {
    let (layout, world) = (layout::<B>(comm, tp), comm.world_size());
    let (mixed, groups) = (MixedHandler::new(comm, layout).unwrap(), layout.dp_size());
    for counts in [vec![50; groups], (0..groups).map(|group| 20 * group).collect()] {
        for op in FUSED {
            let inputs: Vec<Values> = (0..world)
                .map(|rank| Values::moderate(dtype, rank as u64, input_len(op, &layout, &counts, rank)))
                .collect();
            let numbers: Vec<Vec<f64>> = inputs.iter().map(Values::to_f64).collect();
            let sum = |all: &[Vec<f64>]| all.concat().iter().sum();
            let exact = reference::outputs(op, &layout, &counts, &numbers, sum);
            let exact = &exact[comm.rank()];
            let input = Tensor::<B>::holding(comm, &inputs[comm.rank()], Alignment::Aligned);
            let mut output = Tensor::<B>::unwritten(comm, dtype, exact.len(), Alignment::Aligned);
            let call = MixedCall::from(op).mode(MixedMode::Composed).counts(&*counts);
            mixed.run(comm, call, input.view(), output.view_mut()).unwrap();
            // Two roundings of at most 2⁻⁹ each, of partial sums below 4 · world.
            let tolerance = if dtype == DType::BF16 { world as f64 * 4.0 / 128.0 } else { 1e-4 };
            for (index, (&exact, actual)) in exact.iter().zip(output.values().to_f64()).enumerate() {
                let wrapped = if dtype == DType::I32 { f64::from(exact as i64 as i32) } else { exact };
                assert!(
                    (actual - wrapped).abs() <= tolerance,
                    "{op:?}, element {index}: {actual}, not {wrapped}"
                );
            }
        }
    }
}

fn text(outcome: Result<(), CollectiveError>) -> String {
    outcome.unwrap_err().to_string()
}

fn what_makes_no_sense_is_refused<B: CollectiveBackend>(world: usize) {
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
        let refused = text(MixedHandler::new(&comm, nodes).map(drop));
        let both = "local_size 2 and inter_size 2, the nodes of the communicator have the ranks [0, 1, 2, 3]";
        assert!(refused.ends_with(both), "{refused}");
        // What is wrong on one rank is an error on all.
        let mine = match comm.rank() {
            1 => MixedLayout::builder(world, 0).local_tp(2).build().unwrap(),
            _ => layout(2),
        };
        let refused = text(MixedHandler::new(&comm, mine).map(drop));
        let wrong = "the layout is of rank 0 of 4, the communicator of rank 1 of 4";
        let told = format!("rank 1 refuses its layout: {wrong}");
        assert!(refused.ends_with(if comm.rank() == 1 { wrong } else { &told }), "{refused}");
        // No rank has made a call, so all ranks are still in step.
        mixed.run(&comm, gather, &block, &mut out).unwrap();
    });
}

fn ranks_that_disagree_hear_of_it<B: CollectiveBackend>(world: usize) {
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
            .map_err(|error| match error {
                CollectiveError::Fabric(FabricError::Mismatch { .. }) => "saw both",
                CollectiveError::Fabric(FabricError::Aborted { .. }) => "told",
                other => panic!("{about}: {other:?}"),
            })
            .unwrap_err()
            .to_owned()
        });
        assert!(errors.iter().any(|error| error == "saw both"), "{about}: {errors:?}");
    }
    let errors = B::run(world, |comm| {
        let tp = if comm.rank() == 0 { 2 } else { 3 };
        let layout = MixedLayout::builder(world, comm.rank()).local_tp(tp).build().unwrap();
        text(MixedHandler::new(&comm, layout).map(drop))
    });
    let sizes =
        |tp, dp| format!("local_tp_size {tp} × inter_tp_size 1 × local_dp_size {dp} × inter_dp_size 1");
    let expected = format!("rank 0 has {}, rank 1 has {}", sizes(2, 3), sizes(3, 2));
    assert!(errors.iter().all(|error| error.contains(&expected)), "{errors:?}");
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
