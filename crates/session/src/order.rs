//! In which order calls wait for each other.

use antiphon_collectives::cuda::CudaCollectives;
use antiphon_operation::Operation;

/// The orders of calls on a GPU. A call waits for the last one of its order, on whatever stream that was; calls of different orders do
/// not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The collectives, but for those that are made of messages.
    Collectives,
    /// Messages to other ranks.
    Sends,
    /// Messages from other ranks.
    Receives,
    /// The executions of plans.
    Plans,
}

impl Order {
    /// How many there are.
    pub const COUNT: usize = 4;

    /// The orders in which an operation has its place.
    pub fn of(operation: Operation) -> &'static [Self] {
        match CudaCollectives::is_by_messages(operation) {
            true => &[Self::Sends, Self::Receives],
            false => &[Self::Collectives],
        }
    }
}
