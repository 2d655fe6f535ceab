//! The obvious version of the mixed operations, with which tests compare.

use antiphon_topology::MixedGroup;

use super::{MixedLayout, MixedOp};

/// The outputs of all ranks of a layout, in rank order, for the inputs of all ranks. `counts` has the elements of each group's block.
/// `sum` makes the result of the contributions to one element: a list for each node, in the order of the nodes, of those of its ranks in
/// ascending order.
///
/// # Panics
/// Unless there is a count for each group and an input for each rank, of the operation's length; for an operation that is not mixed.
pub fn outputs<T: Copy>(
    op: MixedOp,
    layout: &MixedLayout,
    counts: &[usize],
    inputs: &[Vec<T>],
    sum: impl Fn(&[Vec<T>]) -> T,
) -> Vec<Vec<T>> {
    let (groups, nodes) = (layout.groups(MixedGroup::Tp), layout.groups(MixedGroup::Local));
    assert_eq!((counts.len(), inputs.len()), (groups.len(), layout.world_size()), "one for each");
    let start = |group: usize| -> usize { counts[..group].iter().sum() };
    let gathers = match op {
        MixedOp::AllReduceAllGather => true,
        MixedOp::ReduceScatterAllReduce => false,
        _ => panic!("{op:?} is not mixed"),
    };
    // The block of a group: of its own ranks' inputs, or of this block in all ranks' rows.
    let block = |group: usize| -> Vec<T> {
        let contributes = |rank: &&usize| !gathers || groups[group].contains(rank);
        let first = if gathers { 0 } else { start(group) };
        let of_node = |ranks: &Vec<usize>, index: usize| -> Vec<T> {
            ranks.iter().filter(contributes).map(|&rank| inputs[rank][first + index]).collect()
        };
        let element = |index: usize| {
            let by_node =
                nodes.iter().map(|ranks| of_node(ranks, index)).filter(|of_node| !of_node.is_empty());
            sum(&by_node.collect::<Vec<_>>())
        };
        (0..counts[group]).map(element).collect()
    };
    let blocks: Vec<Vec<T>> = (0..counts.len()).map(block).collect();
    let group_of = |rank: usize| groups.iter().position(|ranks| ranks.contains(&rank)).expect("it has one");
    let output = |rank: usize| if gathers { blocks.concat() } else { blocks[group_of(rank)].clone() };
    (0..layout.world_size()).map(output).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(inter_tp: usize, nodes: usize) -> MixedLayout {
        let layout = MixedLayout::builder(4, 0).inter_size(nodes).local_tp(2 / inter_tp).inter_tp(inter_tp);
        layout.build().unwrap()
    }

    #[test]
    fn the_tables_of_the_operations() {
        // Two groups of two ranks; blocks of one and two elements.
        let sum = |contributions: &[Vec<i32>]| contributions.concat().iter().sum();
        let inputs = [vec![1], vec![10], vec![2, 3], vec![20, 30]];
        let gathered = outputs(MixedOp::AllReduceAllGather, &layout(1, 1), &[1, 2], &inputs, sum);
        assert_eq!(gathered, [[11, 22, 33]; 4]);
        let inputs = [1, 10, 100, 1000].map(|digit| vec![digit, 2 * digit, 3 * digit]);
        let scattered = outputs(MixedOp::ReduceScatterAllReduce, &layout(1, 1), &[1, 2], &inputs, sum);
        assert_eq!(scattered, [vec![1111], vec![1111], vec![2222, 3333], vec![2222, 3333]]);
    }

    #[test]
    fn groups_may_be_on_several_nodes() {
        // Ranks 0 and 2 share tensors, and 1 and 3.
        let sum = |contributions: &[Vec<i32>]| {
            assert!(contributions.len() == 2);
            contributions.concat().iter().sum()
        };
        let inputs = [vec![1], vec![2, 3], vec![10], vec![20, 30]];
        let gathered = outputs(MixedOp::AllReduceAllGather, &layout(2, 2), &[1, 2], &inputs, sum);
        assert_eq!(gathered, [[11, 22, 33]; 4]);
        let inputs = [1, 10, 100, 1000].map(|digit| vec![digit, 2 * digit, 3 * digit]);
        let scattered = outputs(MixedOp::ReduceScatterAllReduce, &layout(2, 2), &[1, 2], &inputs, sum);
        assert_eq!(scattered, [vec![1111], vec![2222, 3333], vec![1111], vec![2222, 3333]]);
    }
}
