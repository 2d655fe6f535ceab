//! The routes of a dispatch by expert: the rows that each rank sends to each other rank, and the places of the rows there.

use std::sync::{Arc, OnceLock};

use super::{ByExpertOrder, RouteSizes, Segments, Sizes};
use crate::routes::{Source, Token, Traffic};

/// The routes of a dispatch by expert: which rank gets which rows from which. [`Moe::notify_by_expert`](crate::Moe::notify_by_expert)
/// makes them, and any number of dispatches and combines use them.
#[derive(Debug, Clone)]
pub struct ByExpertRoutes {
    pub(crate) owner: Arc<()>,
    /// The number is equal on all ranks, and no other routes of the communicator have it.
    pub(crate) number: u32,
    pub(crate) sizes: Sizes,
    pub(crate) order: ByExpertOrder,
    pub(crate) traffic: Traffic,
    /// For each of this rank's tokens.
    pub(crate) tokens: Vec<Token>,
    /// The routing map: `[T, E]`.
    pub(crate) map: Vec<u8>,
    /// How often the tokens of all ranks chose each of this rank's experts: `[L]`.
    pub(crate) chosen: Vec<usize>,
    /// The segments of the experts, where rows come by expert.
    pub(crate) segments: Option<Segments>,
    /// The first dispatch sets this.
    pub(crate) received: OnceLock<Received>,
}

/// What the first dispatch finds of the received tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Received {
    /// `[N]`
    pub(crate) sources: Vec<Source>,
    /// `[N, L]`: the row of a token for each expert, −1 where there is none.
    pub(crate) places: Vec<i32>,
}

impl ByExpertRoutes {
    /// How many rows received tensors have: `P` by expert, `N` by token.
    pub fn rows(&self) -> usize {
        self.segments.as_ref().map_or(self.num_received(), |segments| segments.rows)
    }

    /// `N`: how many tokens arrive.
    pub fn num_received(&self) -> usize {
        self.traffic.kept_at(self.traffic.rank)
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.sizes.tokens
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.sizes.num_experts
    }

    /// How received rows are ordered.
    pub fn order(&self) -> ByExpertOrder {
        self.order
    }

    /// Whether rows were dropped because a capacity has no room for them.
    pub fn overflow(&self) -> bool {
        self.segments.as_ref().is_some_and(|segments| segments.overflow)
    }

    /// How many rows by expert there would be without a capacity, with the padding.
    pub fn rows_needed(&self) -> usize {
        self.segments.as_ref().map_or_else(|| self.chosen.iter().sum(), |segments| segments.needed)
    }

    /// How many tokens each of this rank's experts gets, those that are dropped not included: `[L]`.
    pub fn tokens_per_expert(&self) -> &[usize] {
        self.segments.as_ref().map_or(&self.chosen, |segments| &segments.kept)
    }

    /// How many rows each of this rank's experts has, with the padding: `[L]`.
    pub fn rows_per_expert(&self) -> &[usize] {
        self.segments.as_ref().map_or(&self.chosen, |segments| &segments.padded)
    }

    /// `[T, R]`: the number of a token among those that a rank receives, or −1.
    pub fn received_as(&self) -> Vec<i32> {
        let Traffic { rank, world_size, .. } = self.traffic;
        let mut next: Vec<usize> = (0..world_size).map(|to| self.traffic.block(rank, to).start).collect();
        let mut numbers = vec![-1; self.tokens.len() * world_size];
        for (row, token) in numbers.chunks_exact_mut(world_size).zip(&self.tokens) {
            for to in crate::routes::ranks(token.kept) {
                row[to] = next[to] as i32;
                next[to] += 1;
            }
        }
        numbers
    }

    /// `[N, L]`: the row that each received token has for each expert, or −1. `None` before the first dispatch.
    pub fn places(&self) -> Option<&[i32]> {
        self.received.get().map(|received| &*received.places)
    }

    /// The sizes that calls along these routes must fit.
    pub(crate) fn route_sizes(&self) -> RouteSizes {
        RouteSizes { sizes: self.sizes, order: self.order, rows: self.rows(), number: self.number }
    }
}
