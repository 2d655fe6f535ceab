//! The definition of a layout, word for word.

use super::Layout;

/// The layout of `ids`, of shape `[T, top_k]`.
pub fn layout(ids: &[i64], top_k: usize, num_experts: usize, world_size: usize) -> Layout {
    let local = (num_experts / world_size) as i64;
    let tokens = ids.len().checked_div(top_k).unwrap_or(0);
    let goes = |token: usize, rank: usize| {
        let first = rank as i64 * local;
        ids[token * top_k..][..top_k].iter().any(|id| (first..first + local).contains(id))
    };
    Layout {
        num_experts,
        top_k,
        tokens_per_rank: (0..world_size)
            .map(|rank| (0..tokens).filter(|&token| goes(token, rank)).count() as i32)
            .collect(),
        tokens_per_expert: (0..num_experts)
            .map(|expert| ids.iter().filter(|&&id| id == expert as i64).count() as i32)
            .collect(),
        is_token_in_rank: (0..tokens)
            .flat_map(|token| (0..world_size).map(move |rank| u8::from(goes(token, rank))))
            .collect(),
    }
}
