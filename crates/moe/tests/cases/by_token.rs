//! One set of calls: the inputs of all ranks, and what the definition says must come of it.

use antiphon_moe::{RowFormat, by_token::reference::Rank};
use antiphon_tensor::DType;

use super::{
    floats, hash, in_halves,
    tensor::{Array, element},
};

/// Which experts tokens choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Any, each at most once.
    Spread,
    /// Only those of one rank.
    AllTo(usize),
    /// None: all ids are −1.
    Nobody,
    /// Any number whatever: the same one twice, and numbers that are no expert's.
    Wild,
    /// As [`in_halves`] says.
    InHalves,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub seed: u64,
    pub num_experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub dtype: DType,
    pub scales: Option<DType>,
    /// The tokens of each rank.
    pub tokens: Vec<usize>,
    pub choice: Choice,
    /// The capacity of each rank; `None` for a call without one.
    pub capacity: Option<Vec<usize>>,
    /// Whether values are NaN, infinite, −0 and subnormal, too.
    pub special: bool,
    pub biases: usize,
    pub ids: DType,
}

impl Case {
    pub fn new(world_size: usize, num_experts: usize, top_k: usize) -> Self {
        Self {
            seed: 1,
            num_experts,
            top_k,
            hidden: 16,
            dtype: DType::F32,
            scales: None,
            tokens: vec![17; world_size],
            choice: Choice::Spread,
            capacity: None,
            special: false,
            biases: 0,
            ids: DType::I64,
        }
    }

    pub fn format(&self) -> RowFormat {
        RowFormat { hidden: self.hidden, dtype: self.dtype, scales: self.scales }
    }

    fn world_size(&self) -> usize {
        self.tokens.len()
    }

    fn hash(&self, what: &str, place: [usize; 3]) -> u64 {
        hash(self.seed, what, place)
    }

    fn value(&self, what: &str, place: [usize; 3]) -> f64 {
        let hash = self.hash(what, place);
        const SPECIAL: [f64; 6] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1e-42];
        match self.special && hash % 4 < 3 {
            true => SPECIAL[(hash >> 8) as usize % SPECIAL.len()],
            false => (hash >> 40) as f64 / f64::from(1 << 20) - 8.0,
        }
    }

    pub fn rows(&self, what: &str, rank: usize, rows: usize) -> Vec<Vec<u8>> {
        let cell = |row, column| element(self.dtype, self.value(what, [rank, row, column]));
        (0..rows).map(|row| (0..self.hidden).flat_map(|column| cell(row, column)).collect()).collect()
    }

    fn ids(&self, rank: usize) -> Vec<i64> {
        let local = self.num_experts / self.world_size();
        let id = |token: usize, k: usize| {
            let hash = self.hash("id", [rank, token, k]) as usize >> 7;
            // Different for different k: steps of an odd multiple through a power of two would not do for any number.
            let spread =
                (self.hash("first", [rank, token, 0]) as usize % self.num_experts + k) % self.num_experts;
            match self.choice {
                Choice::Spread if k >= self.num_experts || hash.is_multiple_of(8) => -1,
                Choice::Spread => (spread * self.stride() % self.num_experts) as i64,
                Choice::AllTo(to) => (to * local + hash % local) as i64,
                Choice::Nobody => -1,
                Choice::InHalves => {
                    let to = in_halves(rank, token, self.tokens[rank], self.world_size());
                    (to * local + hash % local) as i64
                }
                Choice::Wild if hash.is_multiple_of(5) => {
                    [i64::from(i32::MIN), -7, self.num_experts as i64, 1 << 30][hash / 5 % 4]
                }
                Choice::Wild => (hash % self.num_experts) as i64,
            }
        };
        (0..self.tokens[rank])
            .flat_map(|token| (0..self.top_k).map(move |k| (token, k)))
            .map(|(t, k)| id(t, k))
            .collect()
    }

    /// A step through all experts.
    fn stride(&self) -> usize {
        (self.num_experts / 2 + 1..).find(|&step| gcd(step, self.num_experts) == 1).unwrap()
    }

    /// What all ranks bring.
    pub fn ranks(&self) -> Vec<Rank<u8>> {
        let rank = |rank: usize| {
            let ids = self.ids(rank);
            let weight = |place: usize| self.value("weight", [rank, place, 0]) as f32;
            Rank {
                x: self.rows("x", rank, self.tokens[rank]),
                weights: (0..ids.len()).map(weight).collect(),
                ids,
                capacity: self.capacity.as_ref().map_or(usize::MAX, |rows| rows[rank]),
            }
        };
        (0..self.world_size()).map(rank).collect()
    }

    /// Some ids, of rows that each have `top_k`.
    pub fn id_array(&self, ids: &[i64]) -> Array {
        let bytes = |&id: &i64| match self.ids {
            DType::I32 => (id as i32).to_ne_bytes().to_vec(),
            _ => id.to_ne_bytes().to_vec(),
        };
        let content: Vec<u8> = ids.iter().flat_map(bytes).collect();
        Array::holding(self.ids, &[ids.len() / self.top_k, self.top_k], &content)
    }

    /// The rows, ids and weights of what a rank brings.
    pub fn arrays(&self, Rank { x, ids, weights, .. }: &Rank<u8>) -> [Array; 3] {
        let tokens = x.len();
        [
            Array::holding(self.dtype, &[tokens, self.hidden], &x.concat()),
            self.id_array(ids),
            Array::holding(DType::F32, &[tokens, self.top_k], &floats(weights.iter().copied())),
        ]
    }

    /// Bytes that look like scales, one after the other, of a token.
    pub fn scale_bytes(&self, (rank, token): (usize, usize)) -> Vec<u8> {
        (0..self.format().num_scales() * 4).map(|i| self.hash("scale", [rank, token, i]) as u8).collect()
    }

    /// What a rank made of the row of a token of another.
    pub fn made(&self, holder: usize, source: (usize, usize)) -> Vec<u8> {
        let cell = |column| self.value("made", [holder * 64 + source.0, source.1, column]);
        (0..self.hidden).flat_map(|column| element(self.dtype, cell(column))).collect()
    }

    pub fn made_weights(&self, holder: usize, source: (usize, usize)) -> Vec<f32> {
        (0..self.top_k).map(|k| self.value("grad", [holder * 64 + source.0, source.1, k]) as f32).collect()
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
