//! Dispatch and combine by token as they are defined, with the data of all ranks in one place.

use crate::layout::reference::layout;

/// What a rank brings to a dispatch: rows as any values that can be copied.
#[derive(Debug, Clone)]
pub struct Rank<T> {
    /// `[T][H]`
    pub x: Vec<Vec<T>>,
    /// `[T, K]`
    pub ids: Vec<i64>,
    /// `[T, K]`
    pub weights: Vec<f32>,
    /// How many rows the rank has room for.
    pub capacity: usize,
}

/// A row that arrives.
#[derive(Debug, Clone, PartialEq)]
pub struct Row<T> {
    /// The rank that it comes from, and the token there.
    pub source: (usize, usize),
    /// The token's row.
    pub x: Vec<T>,
    /// `[K]`: experts of the receiving rank, or −1.
    pub ids: Vec<i64>,
    /// `[K]`: their weights, or 0.
    pub weights: Vec<f32>,
}

/// The rows of every rank, in order, up to its capacity.
pub fn dispatch<T: Clone>(ranks: &[Rank<T>], num_experts: usize, top_k: usize) -> Vec<Vec<Row<T>>> {
    let local = (num_experts / ranks.len()) as i64;
    let rows_of = |to: usize| {
        let mut rows = Vec::new();
        for (from, rank) in ranks.iter().enumerate() {
            let goes = layout(&rank.ids, top_k, num_experts, ranks.len()).is_token_in_rank;
            for token in (0..rank.x.len()).filter(|token| goes[token * ranks.len() + to] == 1) {
                let own = |id: i64| {
                    (0..local).contains(&(id - to as i64 * local)).then_some(id - to as i64 * local)
                };
                let choices = || rank.ids[token * top_k..][..top_k].iter().map(|&id| own(id));
                let weights = rank.weights[token * top_k..][..top_k].iter();
                rows.push(Row {
                    source: (from, token),
                    x: rank.x[token].clone(),
                    ids: choices().map(|id| id.unwrap_or(-1)).collect(),
                    weights: choices().zip(weights).map(|(id, &weight)| id.map_or(0.0, |_| weight)).collect(),
                });
            }
        }
        rows.truncate(ranks[to].capacity);
        rows
    };
    (0..ranks.len()).map(rows_of).collect()
}

/// For each rank and token, what `made` of its rows is left when `add` has gone through them: `made(rank, row)` is what a rank
/// made of one of the rows that [`dispatch`] gave it. `None` for tokens without rows and without a start.
pub fn combine<T, A: Clone>(
    received: &[Vec<Row<T>>],
    (rank, token): (usize, usize),
    start: Option<A>,
    made: impl Fn(usize, usize) -> A,
    add: impl Fn(A, A) -> A,
) -> Option<A> {
    let mut sum = start;
    for (holder, rows) in received.iter().enumerate() {
        if let Some(index) = rows.iter().position(|row| row.source == (rank, token)) {
            sum = Some(match sum {
                None => made(holder, index),
                Some(sum) => add(sum, made(holder, index)),
            });
        }
    }
    sum
}
