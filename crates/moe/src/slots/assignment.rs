//! Which slots the choices of all ranks get.

use super::Sizes;

/// The entry of [`Assignment::places`] for a choice without a row.
pub(crate) const NOWHERE: i32 = -1;

/// The slots that the choices of all ranks get at this rank. Every rank computes its own from the choices, without asking another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// `[R]`
    pub(crate) tokens: Vec<usize>,
    /// `[R, M, K]`: the row of each choice at this rank, `expert · R·M + slot`, or [`NOWHERE`]. If a token names an expert twice,
    /// the first of the choices has the row.
    pub(crate) places: Vec<i32>,
    /// `[L, R]`: the number of slots that the tokens of each rank fill.
    pub(crate) filled: Vec<usize>,
    /// `[M, K]` of this rank's tokens: for each choice the first one of its token that names the same expert; [`NOWHERE`] for one
    /// that names none.
    pub(crate) first: Vec<i32>,
}

impl Assignment {
    /// The assignment that follows from all ranks' choices, `[R, M, K]`, of which each rank has the first `tokens`.
    pub(crate) fn new(rank: usize, sizes: &Sizes, tokens: Vec<usize>, ids: &[Option<usize>]) -> Self {
        let Sizes { world_size, max_tokens, top_k, .. } = *sizes;
        let (local, slots) = (sizes.local(), sizes.slots());
        let mut next = vec![0; local];
        let mut filled = vec![0; local * world_size];
        let mut places = vec![NOWHERE; world_size * max_tokens * top_k];
        let mut first = vec![NOWHERE; max_tokens * top_k];
        for (from, &tokens) in tokens.iter().enumerate() {
            for token in 0..tokens {
                let start = (from * max_tokens + token) * top_k;
                let choices = &ids[start..][..top_k];
                for (k, &choice) in choices.iter().enumerate() {
                    let Some(expert) = choice else { continue };
                    let earliest = choices.iter().position(|&other| other == choice).unwrap_or(k);
                    if from == rank {
                        first[token * top_k + k] = earliest as i32;
                    }
                    if earliest < k || expert / local != rank {
                        continue;
                    }
                    let expert = expert % local;
                    places[start + k] = (expert * slots + next[expert]) as i32;
                    next[expert] += 1;
                    filled[expert * world_size + from] += 1;
                }
            }
        }
        Self { tokens, places, filled, first }
    }

    /// The rows that the choices of a rank's tokens have at this one, each with its choice (`token · K + k`), ascending.
    pub(crate) fn rows_of(&self, sizes: &Sizes, from: usize) -> impl Iterator<Item = (usize, usize)> {
        let choices = sizes.max_tokens * sizes.top_k;
        let places = self.places[from * choices..][..choices].iter().enumerate();
        places.filter_map(|(choice, &row)| Some((choice, usize::try_from(row).ok()?)))
    }
}
