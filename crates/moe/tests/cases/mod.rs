//! Sets of calls: the inputs of all ranks, and what the definitions say must come of them.

pub mod by_expert;
pub mod by_token;
pub mod slots;
pub mod tensor;

/// A number that looks random, the same on every rank.
pub fn hash(seed: u64, what: &str, place: [usize; 3]) -> u64 {
    let bytes = what.bytes().map(u64::from);
    bytes.chain(place.map(|number| number as u64 + 1)).fold(seed, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    })
}

/// The rank that a token chooses whose rank's first half of tokens goes to the next rank, and its second half to the one behind: each rank
/// is sent two runs of tokens, of two sources, in the other order than its neighbours.
fn in_halves(rank: usize, token: usize, tokens: usize, world: usize) -> usize {
    (rank + if 2 * token < tokens { 1 } else { 2 }) % world
}

/// Numbers of tokens that differ by rank: of rank `r` the `r + shift`-th.
pub fn ragged(world: usize, shift: usize) -> Vec<usize> {
    (0..world).map(|rank| [0, 33, 1, 128][(rank + shift) % 4]).collect()
}

/// The bytes of some f32.
pub fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_ne_bytes).collect()
}
