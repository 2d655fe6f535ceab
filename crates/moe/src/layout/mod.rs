//! The layout of a dispatch: which tokens go to which rank, and how many each rank and each expert gets.

pub(crate) mod cuda;
mod host;
#[cfg(any(test, feature = "reference"))]
pub mod reference;

use antiphon_tensor::TensorView;

use crate::{
    error::{Result, refused},
    tensors::{Ids, Name},
};

/// The most experts of one rank.
pub const MAX_LOCAL_EXPERTS: usize = 1024;
/// The most experts that a token chooses.
pub const MAX_TOP_K: usize = 32;
/// The most ranks.
pub const MAX_WORLD: usize = 8;

/// What a rank's choices of experts come to; see [`layout()`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// How many experts there are.
    pub num_experts: usize,
    /// How many each token chooses.
    pub top_k: usize,
    /// How many of the tokens go to each rank: `[R]`.
    pub tokens_per_rank: Vec<i32>,
    /// How often each expert was chosen: `[E]`. A token that chooses one twice counts twice.
    pub tokens_per_expert: Vec<i32>,
    /// 1 where a token goes to a rank, else 0: `[T, R]`.
    pub is_token_in_rank: Vec<u8>,
}

/// Counts what the experts that tokens choose, `ids` of shape `[T, K]` (i64 or i32), come to. Numbers outside `0..E` choose
/// nothing.
///
/// # Errors
/// [`Refused`](crate::MoeError::Refused) for experts that cannot be divided among the ranks, or numbers beyond
/// [`MAX_LOCAL_EXPERTS`], [`MAX_TOP_K`] and [`MAX_WORLD`]; [`Shape`](crate::MoeError::Shape),
/// [`DType`](crate::MoeError::DType), [`Device`](crate::MoeError::Device).
pub fn layout(ids: &TensorView<'_>, num_experts: usize, world_size: usize) -> Result<Layout> {
    let name = Name { call: "layout", which: "ids" };
    let (tokens, top_k) = name.matrix(ids, "[T, K]")?;
    check_limits(name.call, num_experts, top_k, world_size)?;
    Ok(host::layout(&Ids::new(name, ids, num_experts)?, tokens, top_k, num_experts, world_size))
}

/// Refuses numbers that no call can have; how many experts a rank has.
pub(crate) fn check_limits(
    call: &'static str,
    num_experts: usize,
    top_k: usize,
    world_size: usize,
) -> Result<usize> {
    let problem = match () {
        () if world_size > MAX_WORLD => format!("{world_size} ranks; at most {MAX_WORLD} are served"),
        () if num_experts == 0 || !num_experts.is_multiple_of(world_size) => {
            format!("{num_experts} experts cannot be divided among {world_size} ranks")
        }
        () if num_experts / world_size > MAX_LOCAL_EXPERTS => format!(
            "{num_experts} experts among {world_size} ranks are {} for each; at most {MAX_LOCAL_EXPERTS} are served",
            num_experts / world_size
        ),
        () if top_k > MAX_TOP_K => format!("a token chooses {top_k} experts; at most {MAX_TOP_K} are served"),
        () => return Ok(num_experts / world_size),
    };
    Err(refused(call, problem))
}
