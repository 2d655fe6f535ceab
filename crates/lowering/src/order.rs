//! Orders of operations.

use std::{cmp::Reverse, collections::BinaryHeap};

/// The items in an order in which each comes after those that `before` lists for it, and which is otherwise the given one.
///
/// # Errors
/// The items as they were, and the indices of those that would have to come before themselves.
pub(crate) fn stable<T>(items: Vec<T>, before: &[Vec<usize>]) -> Result<Vec<T>, (Vec<T>, Vec<usize>)> {
    let mut after: Vec<Vec<usize>> = vec![Vec::new(); items.len()];
    let mut open: Vec<usize> = before.iter().map(Vec::len).collect();
    for (index, before) in before.iter().enumerate() {
        before.iter().for_each(|&earlier| after[earlier].push(index));
    }
    let mut ready: BinaryHeap<Reverse<usize>> =
        (0..items.len()).filter(|&i| open[i] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(items.len());
    while let Some(Reverse(next)) = ready.pop() {
        order.push(next);
        for &later in &after[next] {
            open[later] -= 1;
            if open[later] == 0 {
                ready.push(Reverse(later));
            }
        }
    }
    if order.len() < items.len() {
        let stuck = (0..items.len()).filter(|&index| open[index] > 0).collect();
        return Err((items, stuck));
    }
    let mut items: Vec<Option<T>> = items.into_iter().map(Some).collect();
    Ok(order.into_iter().map(|index| items[index].take().expect("each index once")).collect())
}
