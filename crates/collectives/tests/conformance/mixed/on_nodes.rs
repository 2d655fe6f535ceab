//! Mixed collectives on several nodes of the host: what is refused, and ranks that disagree.

use std::{
    sync::{Barrier, OnceLock},
    time::Duration,
};

use antiphon_collectives::{
    CollectiveError, Communicator,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_fabric::{FabricError, LocalWorld, engine::Network};
use antiphon_testing::backend::TIMEOUT;

/// What each rank of a world on these nodes returns.
fn on_nodes<T: Send>(names: &[&str], run: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    LocalWorld::run_on_nodes(names, TIMEOUT, |_| (), run)
}

/// The layout of two nodes of two, with these tensor parallel sizes.
fn layout(comm: &Communicator, [local_tp, inter_tp]: [usize; 2]) -> MixedLayout {
    let layout = MixedLayout::builder(4, comm.rank()).local_size(2).local_tp(local_tp).inter_tp(inter_tp);
    layout.build().unwrap()
}

#[test]
fn the_nodes_of_a_layout_must_be_those_of_the_ranks() {
    for (names, theirs) in [
        (["a", "b", "b", "b"], "[0], [1, 2, 3]"),
        (["a", "b", "a", "b"], "[0, 2], [1, 3]"),
        (["a", "b", "c", "c"], "[0], [1], [2, 3]"),
    ] {
        on_nodes(&names, |comm| {
            for (local_size, inter_size) in [(4, 1), (2, 2), (1, 4)] {
                let layout = MixedLayout::builder(4, comm.rank()).local_size(local_size).build().unwrap();
                let refused = MixedHandler::new(&comm, layout).map(drop).unwrap_err().to_string();
                let ours = format!("the layout has local_size {local_size} and inter_size {inter_size}, ");
                let both = format!("{ours}the nodes of the communicator have the ranks {theirs}");
                assert!(refused.ends_with(&both), "{refused}");
            }
        });
    }
}

#[test]
fn ranks_whose_sizes_differ_hear_of_both() {
    let errors = on_nodes(&["a", "a", "b", "b"], |comm| {
        // Both have two groups of two ranks.
        let tp = if comm.rank() == 3 { [1, 2] } else { [2, 1] };
        MixedHandler::new(&comm, layout(&comm, tp)).map(drop).unwrap_err().to_string()
    });
    let first = "rank 0 has local_tp_size 2 × inter_tp_size 1 × local_dp_size 1 × inter_dp_size 2";
    let other = "rank 3 has local_tp_size 1 × inter_tp_size 2 × local_dp_size 2 × inter_dp_size 1";
    assert!(errors.iter().all(|error| error.contains(first) && error.contains(other)), "{errors:?}");
}

#[test]
fn modes_need_the_tensor_parallelism_that_they_divide() {
    on_nodes(&["a", "a", "b", "b"], |comm| {
        for (tp, mode, valid) in [
            ([2, 1], MixedMode::Bytes2, "waits, bytes1, composed, not bytes2"),
            ([1, 2], MixedMode::Bytes1, "waits, bytes2, composed, not bytes1"),
        ] {
            let mixed = MixedHandler::new(&comm, layout(&comm, tp)).unwrap();
            let call = MixedCall::from(MixedOp::AllReduceAllGather).mode(mode);
            let refused = mixed.run(&comm, call, &[1f32; 3], &mut [0f32; 6]).unwrap_err().to_string();
            assert!(refused.ends_with(&format!("the mode must be one of {valid}")), "{refused}");
        }
    });
}

/// Rank 3 makes another call than the others, of a layout of the same sizes or of other ones.
#[test]
fn ranks_that_disagree_hear_of_it_on_several_nodes() {
    let gather = |mode| MixedCall::from(MixedOp::AllReduceAllGather).mode(mode);
    let scatter = |mode| MixedCall::from(MixedOp::ReduceScatterAllReduce).mode(mode);
    let cases = [
        ("modes", [1, 2], gather(MixedMode::Waits)),
        ("operations", [1, 2], scatter(MixedMode::Bytes2)),
        ("two collectives", [1, 2], gather(MixedMode::Composed)),
        ("rows", [1, 2], gather(MixedMode::Bytes2).counts(&[4, 4][..])),
        ("layouts", [2, 1], gather(MixedMode::Waits)),
    ];
    for (about, tp, call) in cases {
        let errors = on_nodes(&["a", "a", "b", "b"], |comm| {
            let handlers = [[1, 2], tp].map(|tp| MixedHandler::new(&comm, layout(&comm, tp)).unwrap());
            let (mixed, call) = match comm.rank() {
                3 => (&handlers[1], call),
                _ => (&handlers[0], gather(MixedMode::Bytes2)),
            };
            let (block, mut row) = ([1f32; 4], [0f32; 8]);
            let done = match call.op {
                MixedOp::AllReduceAllGather => mixed.run(&comm, call, &block, &mut row),
                _ => mixed.run(&comm, call, &row, &mut [0f32; 4]),
            };
            done.unwrap_err().to_string()
        });
        let saw_both = |error: &&String| error.contains("bytes2") || error.contains("layout and rows");
        assert!(errors.iter().any(|error| saw_both(&error)), "{about}: {errors:?}");
    }
}

/// One call after the other, until one fails.
fn call_for_ever(
    comm: &Communicator,
    tp: [usize; 2],
    op: MixedOp,
    mode: MixedMode,
    ready: &Barrier,
) -> CollectiveError {
    comm.set_timeout(Duration::from_millis(1500)); // that of groups, too
    let layout = layout(comm, tp);
    let mixed = MixedHandler::new(comm, layout).unwrap();
    let block = vec![1f32; 50_000];
    let mut row = vec![1f32; block.len() * layout.dp_size()];
    let mut sum = block.clone();
    let call = MixedCall::from(op).mode(mode);
    let mut once = || match op {
        MixedOp::AllReduce => mixed.run(comm, call, &block, &mut sum),
        MixedOp::AllGather | MixedOp::AllReduceAllGather => mixed.run(comm, call, &block, &mut row),
        MixedOp::ReduceScatter | MixedOp::ReduceScatterAllReduce => mixed.run(comm, call, &row, &mut sum),
    };
    once().unwrap(); // groups have met, if there are any
    ready.wait();
    loop {
        if let Err(error) = once() {
            return error;
        }
    }
}

/// Every layout of two nodes of two, and every operation in every mode.
fn every_call() -> impl Iterator<Item = ([usize; 2], MixedOp, MixedMode)> {
    let layouts = [[1, 1], [1, 2], [2, 1], [2, 2]];
    layouts.into_iter().flat_map(|tp @ [local_tp, inter_tp]| {
        let layout =
            MixedLayout::builder(4, 0).local_size(2).local_tp(local_tp).inter_tp(inter_tp).build().unwrap();
        let ops = layout.valid_ops().iter();
        ops.flat_map(move |&op| MixedMode::valid_in(&layout).iter().map(move |&mode| (tp, op, mode)))
    })
}

/// What each rank gets while every rank makes calls and something happens to the network.
fn disturbed(
    (tp, op, mode): ([usize; 2], MixedOp, MixedMode),
    happens: impl Fn(&Network) + Sync,
) -> Vec<CollectiveError> {
    let (network, ready) = (OnceLock::new(), Barrier::new(5));
    let keep = |net: &Network| drop(network.set(net.clone()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ready.wait();
            std::thread::sleep(Duration::from_millis(3));
            happens(network.get().expect("the ranks have met"));
        });
        LocalWorld::run_on_nodes(&["a", "a", "b", "b"], TIMEOUT, keep, |comm| {
            call_for_ever(&comm, tp, op, mode, &ready)
        })
    })
}

#[test]
fn a_rank_whose_connections_end_is_an_error_on_all_ranks_in_every_call() {
    for call in every_call() {
        for error in disturbed(call, |network| network.kill(2)) {
            let is_typed = matches!(
                error,
                CollectiveError::Fabric(
                    FabricError::PeerLost { .. }
                        | FabricError::Aborted { .. }
                        | FabricError::Timeout { .. }
                        | FabricError::Engine(_)
                )
            );
            assert!(is_typed, "{call:?}: {error:?}");
        }
    }
}

#[test]
fn a_cut_link_is_an_error_on_all_ranks_in_every_call() {
    let cut = |network: &Network| {
        [0, 1].into_iter().for_each(|a| [2, 3].into_iter().for_each(|b| network.cut(a, b)))
    };
    for call in every_call() {
        for error in disturbed(call, cut) {
            let is_typed = matches!(
                error,
                CollectiveError::Fabric(
                    FabricError::PeerLost { .. } | FabricError::Aborted { .. } | FabricError::Timeout { .. }
                )
            );
            assert!(is_typed, "{call:?}: {error:?}");
        }
    }
}
