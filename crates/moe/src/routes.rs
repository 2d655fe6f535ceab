//! The routes of a dispatch by token: the rows that each rank sends to each other rank.

use std::{
    ops::Range,
    sync::{Arc, OnceLock},
};

use crate::{layout::MAX_TOP_K, words::RouteWords};

/// The routes of a dispatch by token: which rank gets which rows from which. [`Moe::notify`](crate::Moe::notify) makes them, and any
/// number of dispatches and combines use them.
#[derive(Debug, Clone)]
pub struct ByTokenRoutes {
    pub(crate) owner: Arc<()>,
    /// The number is equal on all ranks, and no other routes of the communicator have it.
    pub(crate) number: u32,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) traffic: Traffic,
    /// For each of this rank's tokens.
    pub(crate) tokens: Vec<Token>,
    /// For each of this rank's experts, how often all ranks chose it.
    pub(crate) tokens_per_expert: Vec<usize>,
    /// For each row that arrived; set by the first dispatch.
    pub(crate) sources: OnceLock<Vec<Source>>,
}

/// Where a token goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    /// A bit for each rank that its routing names.
    pub(crate) routed: u32,
    /// A bit for each rank where there is room for it.
    pub(crate) kept: u32,
    /// How many rows of earlier tokens come back from other ranks. The rows of this token follow them.
    pub(crate) slot: u32,
}

/// Where a row came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    /// The token of its rank.
    pub(crate) token: u32,
    /// Its place among the rows that come back to that rank from others.
    pub(crate) slot: u32,
}

/// How many rows each rank sends to each other rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// How many tokens each rank has.
    pub(crate) tokens: Vec<usize>,
    /// How many rows each rank has room for, if it has a capacity.
    pub(crate) capacity: Vec<Option<usize>>,
    /// `[from, to]`: how many tokens are routed.
    pub(crate) routed: Vec<usize>,
}

impl Traffic {
    fn routed(&self, from: usize, to: usize) -> usize {
        self.routed[from * self.world_size + to]
    }

    /// How many rows would go to a rank if it had room for all.
    pub(crate) fn routed_to(&self, to: usize) -> usize {
        self.routed_before(self.world_size, to)
    }

    /// Rows of ranks below `from`.
    fn routed_before(&self, from: usize, to: usize) -> usize {
        (0..from).map(|source| self.routed(source, to)).sum()
    }

    /// The rows at `to` that come from `from`, of those for which there is room.
    pub(crate) fn block(&self, from: usize, to: usize) -> Range<usize> {
        let room = self.capacity[to].unwrap_or(usize::MAX);
        let start = self.routed_before(from, to);
        start.min(room)..(start + self.routed(from, to)).min(room)
    }

    /// How many rows arrive at a rank.
    pub(crate) fn kept_at(&self, to: usize) -> usize {
        self.routed_to(to).min(self.capacity[to].unwrap_or(usize::MAX))
    }

    /// How many rows come back to a rank from others.
    pub(crate) fn returning_to(&self, rank: usize) -> usize {
        (0..self.world_size).filter(|&other| other != rank).map(|other| self.block(rank, other).len()).sum()
    }

    /// The most of a number that any rank has.
    pub(crate) fn most(&self, of: impl Fn(usize) -> usize) -> usize {
        (0..self.world_size).map(of).max().unwrap_or(0)
    }

    /// Where each token of this rank goes, from the bits of its routing.
    pub(crate) fn place(&self, routed: impl Iterator<Item = u32>) -> Vec<Token> {
        let room: Vec<usize> = (0..self.world_size).map(|to| self.block(self.rank, to).len()).collect();
        let (mut sent, mut slot) = (vec![0; self.world_size], 0);
        let token = |routed: u32| {
            let mut token = Token { routed, kept: 0, slot };
            for to in ranks(routed) {
                if sent[to] < room[to] {
                    token.kept |= 1 << to;
                    slot += u32::from(to != self.rank);
                }
                sent[to] += 1;
            }
            token
        };
        routed.map(token).collect()
    }
}

/// The ranks whose bits are set, ascending.
pub(crate) fn ranks(mut bits: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let rank = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(rank)
    })
}

/// The number of words that [`ByTokenRoutes::to_words`] gives, for `world_size` ranks, `num_experts` experts of all ranks, `tokens` tokens of
/// this rank, and `rows` received rows.
pub fn route_words(world_size: usize, num_experts: usize, tokens: usize, rows: usize) -> usize {
    HEAD_WORDS + world_size * (2 + world_size) + num_experts / world_size.max(1) + tokens + 2 * rows
}

/// The choices per token.
const HEAD_WORDS: usize = 1;

impl ByTokenRoutes {
    /// All that there is to routes along which rows have been dispatched, for code that can keep tensors only. The words leave out the
    /// number of the routes, so that the same dispatch gives the same words.
    pub fn to_words(&self) -> Vec<u32> {
        let Traffic { tokens, capacity, routed, .. } = &self.traffic;
        let mut words = vec![self.top_k as u32];
        words.extend(tokens.iter().map(|&tokens| tokens as u32));
        words.extend(capacity.iter().map(|rows| rows.map_or(u32::MAX, |rows| rows as u32)));
        words.extend(routed.iter().chain(&self.tokens_per_expert).map(|&count| count as u32));
        words.extend(self.tokens.iter().map(|token| token.routed));
        let rows = self.sources.get().into_iter().flatten().flat_map(|source| [source.token, source.slot]);
        words.extend(rows.chain(std::iter::repeat(u32::MAX)).take(2 * self.rows()));
        words
    }

    /// The routes of which [`to_words`](Self::to_words) gave these words.
    pub(crate) fn from_words(
        words: &[u32],
        owner: &Arc<()>,
        (rank, world_size): (usize, usize),
        num_experts: usize,
    ) -> Option<Self> {
        let (head, rest) = words.split_at_checked(HEAD_WORDS)?;
        let sizes = |words: &[u32]| words.iter().map(|&word| word as usize).collect::<Vec<_>>();
        let (tokens, rest) = rest.split_at_checked(world_size)?;
        let (capacity, rest) = rest.split_at_checked(world_size)?;
        let (routed, rest) = rest.split_at_checked(world_size * world_size)?;
        let (tokens_per_expert, rest) = rest.split_at_checked(num_experts / world_size)?;
        let (bits, rows) = rest.split_at_checked(tokens[rank] as usize)?;
        let traffic = Traffic {
            rank,
            world_size,
            tokens: sizes(tokens),
            capacity: capacity.iter().map(|&rows| (rows != u32::MAX).then_some(rows as usize)).collect(),
            routed: sizes(routed),
        };
        // Numbers that no routes have are refused before they are summed.
        let are_small = words[HEAD_WORDS..][..world_size * (2 + world_size)]
            .iter()
            .all(|&n| n >> 31 == 0 || n == u32::MAX);
        let of_token = |to: usize| bits.iter().filter(|&&bits| bits >> to & 1 != 0).count();
        let is_routed = (0..world_size).all(|to| of_token(to) == traffic.routed(rank, to));
        let is_plausible = are_small
            && is_routed
            && bits.iter().all(|&bits| bits >> world_size == 0)
            && head[0] as usize <= MAX_TOP_K
            && traffic.routed.iter().all(|&rows| rows <= i32::MAX as usize);
        if !is_plausible
            || rows.len() != 2 * traffic.capacity[rank].unwrap_or_else(|| traffic.routed_to(rank))
        {
            return None;
        }
        let sources: Vec<Source> = rows
            .chunks_exact(2)
            .take(traffic.kept_at(rank))
            .map(|row| Source { token: row[0], slot: row[1] })
            .collect();
        // A combine writes rows where the slots say.
        let is_in_place = (0..world_size).filter(|&from| from != rank).all(|from| {
            let slots = traffic.returning_to(from);
            sources[traffic.block(from, rank)].iter().all(|source| (source.slot as usize) < slots)
        });
        is_in_place.then(|| Self {
            owner: owner.clone(),
            number: 0,
            num_experts,
            top_k: head[0] as usize,
            tokens: traffic.place(bits.iter().copied()),
            traffic,
            tokens_per_expert: sizes(tokens_per_expert),
            sources: OnceLock::from(sources),
        })
    }

    /// What [`RouteWords`] names.
    pub fn parts(&self) -> Vec<i32> {
        let Traffic { rank, world_size, .. } = self.traffic;
        let layout = RouteWords::new(world_size, self.num_experts, self.num_tokens());
        let ranks = || 0..world_size;
        let block = |from: usize, to: usize| self.traffic.block(from, to);
        let counts = ranks().flat_map(|from| ranks().map(move |to| block(from, to).len() as i32));
        let starts = ranks().map(|from| block(from, rank).start as i32);
        let words: Vec<i32> = counts
            .chain(starts)
            .chain(self.rank_prefix_matrix())
            .chain(self.routed_to_each())
            .chain([i32::from(self.overflow())])
            .chain(self.tokens_per_expert.iter().map(|&count| count as i32))
            .chain(self.send_head())
            .collect();
        debug_assert_eq!(words.len(), layout.total());
        words
    }

    /// How many rows the received tensors have: those that arrive, or the capacity.
    pub fn rows(&self) -> usize {
        let Traffic { rank, capacity, .. } = &self.traffic;
        capacity[*rank].unwrap_or_else(|| self.num_received())
    }

    /// How many rows arrive.
    pub fn num_received(&self) -> usize {
        self.traffic.kept_at(self.traffic.rank)
    }

    /// Whether more rows are routed here than the capacity holds: those beyond it are dropped.
    pub fn overflow(&self) -> bool {
        self.traffic.routed_to(self.traffic.rank) > self.num_received()
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// How many experts each token chooses.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// How often all ranks' tokens chose each of this rank's experts, rows that are dropped included: `[L]`.
    pub fn tokens_per_expert(&self) -> &[usize] {
        &self.tokens_per_expert
    }

    /// `[R, R]`: how many tokens the ranks up to and with the row's route to the column's.
    fn rank_prefix_matrix(&self) -> Vec<i32> {
        let Traffic { world_size, .. } = self.traffic;
        let cell = |from: usize, to: usize| self.traffic.routed_before(from + 1, to) as i32;
        (0..world_size).flat_map(|from| (0..world_size).map(move |to| cell(from, to))).collect()
    }

    /// `[R]`: how many tokens this rank routes to each.
    fn routed_to_each(&self) -> Vec<i32> {
        let Traffic { rank, world_size, .. } = self.traffic;
        (0..world_size).map(|to| self.traffic.routed(rank, to) as i32).collect()
    }

    /// `[T, R]`: the number of a token among those that this rank routes to a rank, or −1.
    fn send_head(&self) -> Vec<i32> {
        let world_size = self.traffic.world_size;
        let mut heads = vec![-1; self.tokens.len() * world_size];
        let mut sent = vec![0; world_size];
        for (row, token) in heads.chunks_exact_mut(world_size).zip(&self.tokens) {
            for to in ranks(token.routed) {
                row[to] = sent[to];
                sent[to] += 1;
            }
        }
        heads
    }

    /// For each row that arrived, the number of its token on its source rank. `None` before the first dispatch.
    pub fn source_tokens(&self) -> Option<Vec<i32>> {
        Some(self.sources.get()?.iter().map(|source| source.token as i32).collect())
    }
}
