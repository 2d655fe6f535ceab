//! Calls of all operations.

use antiphon_collectives::Call;
use antiphon_operation::{Extent, Operation};

/// An operation of about `count` elements as this rank calls it; parts have lengths around that.
pub fn call_of(operation: Operation, count: usize, rank: usize, world: usize) -> Call<'static> {
    let length = |index: usize| count * (index % 3) / 2;
    let lengths = |of: &dyn Fn(usize) -> usize| (0..world).map(of).collect::<Vec<_>>();
    let call = Call::new(operation).with_root(world - 1);
    match (operation.row().input, operation.row().output) {
        (Extent::Parts, Extent::Parts) => call
            .with_counts(lengths(&|to| length(rank + 2 * to)))
            .with_receives(lengths(&|from| length(from + 2 * rank))),
        _ => call.with_counts(lengths(&length)),
    }
}
