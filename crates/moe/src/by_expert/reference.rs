//! Dispatch and combine by expert as they are defined, with the data of all ranks in one place.

/// A token of all ranks: its rank, and its number there.
pub type Source = (usize, usize);

/// What one rank receives by the routing maps of all ranks.
#[derive(Debug, Clone)]
pub struct Received {
    /// The tokens that come, in order.
    pub tokens: Vec<Source>,
    /// The token and the expert (of this rank) of each row; `None` for padding and the rest of a capacity.
    pub rows: Vec<Option<(Source, usize)>>,
    /// How many rows each expert has, with the padding.
    pub rows_per_expert: Vec<usize>,
    /// How many rows there would be without a capacity.
    pub needed: usize,
    /// Whether a row was dropped.
    pub overflow: bool,
}

/// What rank `to` receives: the tokens whose map, `[T, E]` of each rank, has an expert there.
pub fn received(
    maps: &[Vec<bool>],
    num_experts: usize,
    to: usize,
    pad_multiple: usize,
    capacity: Option<usize>,
) -> Received {
    let local = num_experts / maps.len();
    let chooses =
        |(rank, token): Source, expert: usize| maps[rank][token * num_experts + to * local + expert];
    let all = maps
        .iter()
        .enumerate()
        .flat_map(|(rank, map)| (0..map.len() / num_experts).map(move |token| (rank, token)));
    let tokens: Vec<Source> =
        all.filter(|&source| (0..local).any(|expert| chooses(source, expert))).collect();
    let mut rows = Vec::new();
    let mut ends = Vec::new();
    for expert in 0..local {
        rows.extend(tokens.iter().filter(|&&source| chooses(source, expert)).map(|&s| Some((s, expert))));
        ends.push(rows.len());
        rows.resize(rows.len().next_multiple_of(pad_multiple), None);
    }
    let needed = rows.len();
    let limit = capacity.unwrap_or(needed);
    let overflow = *ends.last().unwrap_or(&0) > limit;
    rows.resize(limit, None);
    let of_expert = |expert: usize| rows.iter().flatten().filter(|row| row.1 == expert).count();
    let rows_per_expert = (0..local).map(|expert| of_expert(expert).next_multiple_of(pad_multiple)).collect();
    Received { tokens, rows, rows_per_expert, needed, overflow }
}

/// The sum of a token: of each rank to which it goes, the rounded sum of its rows there, in their order; of these, in the order of
/// ranks, the sum. `made(rank, row)` is what a rank made of one of its rows. `None` for a token that goes nowhere.
pub fn combine<A>(
    received: &[Received],
    source: Source,
    zero: impl Fn() -> A,
    made: impl Fn(usize, usize) -> A,
    add: impl Fn(A, A) -> A,
    round: impl Fn(A) -> A,
) -> Option<A> {
    let of_rank = |(rank, received): (usize, &Received)| {
        if !received.tokens.contains(&source) {
            return None;
        }
        let is_its = |row: &Option<(Source, usize)>| row.is_some_and(|(token, _)| token == source);
        let rows = received.rows.iter().enumerate().filter(|(_, row)| is_its(row));
        Some(round(rows.map(|(row, _)| made(rank, row)).reduce(&add).unwrap_or_else(&zero)))
    };
    received.iter().enumerate().filter_map(of_rank).reduce(&add)
}
