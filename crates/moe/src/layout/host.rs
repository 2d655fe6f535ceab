//! One pass over the choices.

use super::Layout;
use crate::tensors::Ids;

pub(super) fn layout(
    ids: &Ids<'_>,
    tokens: usize,
    top_k: usize,
    num_experts: usize,
    world_size: usize,
) -> Layout {
    let local = num_experts / world_size;
    let mut layout = Layout {
        num_experts,
        top_k,
        tokens_per_rank: vec![0; world_size],
        tokens_per_expert: vec![0; num_experts],
        is_token_in_rank: vec![0; tokens * world_size],
    };
    for (token, row) in layout.is_token_in_rank.chunks_exact_mut(world_size).enumerate() {
        for expert in (0..top_k).filter_map(|k| ids.get(token * top_k + k)) {
            layout.tokens_per_expert[expert] += 1;
            row[expert / local] = 1;
        }
        for (count, &goes) in layout.tokens_per_rank.iter_mut().zip(&*row) {
            *count += i32::from(goes);
        }
    }
    layout
}
