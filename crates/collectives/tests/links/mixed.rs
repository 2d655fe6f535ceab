//! What the mixed collectives send through each link: what the ranks of a node need, once.

use antiphon_collectives::{
    Communicator,
    hierarchical::Form,
    mixed::{MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_tensor::{Element, bf16};

use super::World;

/// Two nodes of two ranks, of one and of four, and three nodes of two.
const NODES: [&[u32]; 4] = [&[0, 0, 1, 1], &[0, 1], &[0, 0, 0, 0, 1, 1, 1, 1], &[0, 0, 1, 1, 2, 2]];

/// Every layout of a world with tensor parallelism.
fn layouts(world: &World) -> Vec<MixedLayout> {
    let (local_size, nodes) = (world.ranks(0), world.nodes());
    let divisors = |of: usize| (1..=of).filter(move |tp| of.is_multiple_of(*tp));
    let layout = |local_tp: usize, inter_tp: usize| {
        let layout = MixedLayout::builder(local_size * nodes, 0).local_size(local_size);
        layout.local_tp(local_tp).inter_tp(inter_tp).build().unwrap()
    };
    let all = divisors(local_size).flat_map(|local| divisors(nodes).map(move |inter| layout(local, inter)));
    all.filter(MixedLayout::use_tp).collect()
}

/// The blocks of the groups that have ranks on a node, in elements.
fn blocks_on(layout: &MixedLayout, node: usize, counts: &[usize]) -> usize {
    let ranks = (0..layout.world_size()).filter(|rank| rank / layout.local_size() == node);
    let of_rank = |rank: usize| {
        layout
            .groups(antiphon_topology::MixedGroup::Tp)
            .iter()
            .position(|group| group.contains(&rank))
            .unwrap()
    };
    let groups: std::collections::BTreeSet<usize> = ranks.map(of_rank).collect();
    groups.into_iter().map(|group| counts[group]).sum()
}

/// The bytes that must go from a node to another, if what is needed there goes once.
fn needed(
    layout: &MixedLayout,
    op: MixedOp,
    mode: MixedMode,
    counts: &[usize],
    (from, to): (usize, usize),
    (size, sum_size): (usize, usize),
) -> usize {
    let (mine, theirs) = (blocks_on(layout, from, counts), blocks_on(layout, to, counts));
    let share_groups = from / layout.inter_tp_size() == to / layout.inter_tp_size();
    let (ranks, nodes_of_group) = (layout.local_size(), layout.inter_tp_size());
    let gathers = op != MixedOp::ReduceScatterAllReduce;
    match (mode, gathers) {
        // Every rank's contribution to what the node gathers, or to its blocks.
        (MixedMode::Waits, true) => layout.local_tp_size() * mine * size,
        (MixedMode::Waits, false) => ranks * theirs * size,
        // A group on one node sends its result, and one on several nodes each node's sums.
        (MixedMode::Bytes1, true) => mine * if nodes_of_group == 1 { size } else { sum_size },
        (MixedMode::Bytes1, false) => theirs * sum_size,
        // Of the node's sums, what the node owns; and the results that this node owns.
        (MixedMode::Bytes2, true) => {
            let sums = if share_groups { mine / nodes_of_group * sum_size } else { 0 };
            sums + mine / nodes_of_group * size
        }
        (MixedMode::Bytes2, false) => {
            let results = if share_groups { mine / nodes_of_group * size } else { 0 };
            theirs / nodes_of_group * sum_size + results
        }
        (MixedMode::Composed, _) => unreachable!("it is two collectives"),
    }
}

fn call<T: Element>(comm: &Communicator, layout: &MixedLayout, call: MixedCall<'_>, counts: &[usize]) {
    let layout = MixedLayout::builder(layout.world_size(), comm.rank())
        .local_size(layout.local_size())
        .local_tp(layout.local_tp_size())
        .inter_tp(layout.inter_tp_size())
        .build()
        .unwrap();
    // The rank's handler is made in the first call, and measured are those that follow.
    let mixed = comm.extension(|comm| MixedHandler::new(comm, layout)).unwrap();
    let (block, row) = (counts[layout.dp_rank()], counts.iter().sum::<usize>());
    let (from, to) = match call.op {
        MixedOp::AllReduce => (block, block),
        MixedOp::AllReduceAllGather => (block, row),
        _ => (row, block),
    };
    mixed.run(comm, call, &vec![T::default(); from], &mut vec![T::default(); to]).unwrap();
}

fn check<T: Element>(
    worlds: &[&'static [u32]],
    sum_size: usize,
    counts_of: impl Fn(&MixedLayout) -> Vec<usize>,
) {
    for &nodes in worlds {
        let world = World(nodes);
        for layout in layouts(&world) {
            let counts = counts_of(&layout);
            let modes = MixedMode::valid_in(&layout).iter().filter(|&&mode| mode != MixedMode::Composed);
            for (&op, &mode) in
                layout.valid_ops().iter().flat_map(|op| modes.clone().map(move |mode| (op, mode)))
            {
                // An all-reduce in these modes is that of `all_reduce`.
                if op == MixedOp::AllReduce && mode != MixedMode::Bytes1 {
                    continue;
                }
                let what = format!("{op:?} of {counts:?} × {} by {mode} in {layout:?}", T::DTYPE);
                let uneven = (op != MixedOp::AllReduce).then_some(&*counts);
                let mixed = MixedCall::from(op).mode(mode).counts(uneven);
                let expected =
                    |from, to| needed(&layout, op, mode, &counts, (from, to), (size_of::<T>(), sum_size));
                world.assert_sends(
                    &what,
                    Form::Mirrored,
                    |comm| call::<T>(comm, &layout, mixed, &counts),
                    expected,
                );
            }
        }
    }
}

#[test]
fn a_mixed_call_sends_to_a_node_what_it_needs_once() {
    check::<f32>(&NODES, 4, |layout| vec![240; layout.dp_size()]);
    // Sums are not rounded on the way.
    check::<bf16>(&NODES, 4, |layout| vec![480; layout.dp_size()]);
}

#[test]
fn blocks_of_unequal_length_are_not_filled_up() {
    let uneven = |layout: &MixedLayout| (0..layout.dp_size()).map(|group| group * 48).collect();
    check::<f32>(&NODES, 4, uneven);
}

#[test]
fn many_pieces_send_as_much_as_one() {
    // A third of a piece is no whole number of elements.
    check::<f32>(&NODES[..3], 4, |layout| vec![96_000; layout.dp_size()]);
}
