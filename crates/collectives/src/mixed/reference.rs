//! The obvious version of the mixed operations, with which tests compare.

use super::MixedOp;

/// The outputs of all ranks, in rank order, for the inputs of all ranks. Ranks are in groups of `tp`; `counts` has the elements of each
/// group's block. `sum` makes the result of the contributions to one element, in ascending rank order.
pub fn outputs<T: Copy>(
    op: MixedOp,
    tp: usize,
    counts: &[usize],
    inputs: &[Vec<T>],
    sum: impl Fn(&[T]) -> T,
) -> Vec<Vec<T>> {
    let world_size = tp * counts.len();
    assert_eq!(inputs.len(), world_size, "an input for each rank");
    let start = |group: usize| -> usize { counts[..group].iter().sum() };
    let gathers = match op {
        MixedOp::AllReduceAllGather => true,
        MixedOp::ReduceScatterAllReduce => false,
        _ => panic!("{op:?} is not mixed"),
    };
    // The block of a group: of its own ranks' inputs, or of this block in all ranks' rows.
    let block = |group: usize| -> Vec<T> {
        let element = |index: usize| match gathers {
            true => sum(&Vec::from_iter((0..tp).map(|lane| inputs[group * tp + lane][index]))),
            false => sum(&Vec::from_iter(inputs.iter().map(|row| row[start(group) + index]))),
        };
        (0..counts[group]).map(element).collect()
    };
    let blocks: Vec<Vec<T>> = (0..counts.len()).map(block).collect();
    let output = |rank: usize| if gathers { blocks.concat() } else { blocks[rank / tp].clone() };
    (0..world_size).map(output).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_of_the_operations() {
        // Two groups of two ranks; blocks of one and two elements.
        let sum = |contributions: &[i32]| contributions.iter().sum();
        let inputs = [vec![1], vec![10], vec![2, 3], vec![20, 30]];
        let gathered = outputs(MixedOp::AllReduceAllGather, 2, &[1, 2], &inputs, sum);
        assert_eq!(gathered, [[11, 22, 33]; 4]);
        let inputs = [1, 10, 100, 1000].map(|digit| vec![digit, 2 * digit, 3 * digit]);
        let scattered = outputs(MixedOp::ReduceScatterAllReduce, 2, &[1, 2], &inputs, sum);
        assert_eq!(scattered, [vec![1111], vec![1111], vec![2222, 3333], vec![2222, 3333]]);
    }
}
