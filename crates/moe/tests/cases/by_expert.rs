//! One set of calls by expert.

use antiphon_moe::{
    ByExpertCapacity, ByExpertOrder, RowFormat,
    by_expert::reference::{self, Received, Source},
};
use antiphon_tensor::DType;

use super::{
    floats, hash, in_halves,
    tensor::{Array, element, value},
};

/// Which experts tokens choose.
#[derive(Debug, Clone, Copy)]
pub enum Choice {
    /// One expert in this number of experts.
    OneIn(u64),
    /// All those of one rank, and no others.
    AllTo(usize),
    Nobody,
    /// All those of the rank that [`in_halves`] says.
    InHalves,
}

#[derive(Debug, Clone)]
pub struct ByExpertCase {
    pub seed: u64,
    pub num_experts: usize,
    pub hidden: usize,
    pub dtype: DType,
    pub scales: Option<DType>,
    pub probs: bool,
    /// The tokens of each rank.
    pub tokens: Vec<usize>,
    pub choice: Choice,
    /// The padding of rows by expert; `None` for rows by token.
    pub pad_multiple: Option<usize>,
    /// The capacity of each rank; `None` for a call without one.
    pub capacity: Option<Vec<usize>>,
}

/// What a rank brings.
pub struct Inputs {
    pub map: Array,
    pub x: Array,
    pub probs: Array,
    pub scales: Option<Array>,
}

impl ByExpertCase {
    pub fn new(world: usize, local: usize) -> Self {
        Self {
            seed: 1,
            num_experts: local * world,
            hidden: 16,
            dtype: DType::BF16,
            scales: None,
            probs: true,
            tokens: vec![17; world],
            choice: Choice::OneIn(3),
            pad_multiple: Some(4),
            capacity: None,
        }
    }

    pub fn format(&self) -> RowFormat {
        RowFormat { hidden: self.hidden, dtype: self.dtype, scales: self.scales }
    }

    pub fn local(&self) -> usize {
        self.num_experts / self.tokens.len()
    }

    pub fn hash(&self, what: &str, place: [usize; 3]) -> u64 {
        hash(self.seed, what, place)
    }

    /// Values whose sums depend on the order and on roundings; −0 and NaN among them.
    pub fn value(&self, what: &str, place: [usize; 3]) -> f64 {
        match self.hash(what, place) {
            hash if hash % 61 == 0 => f64::NAN,
            hash if hash % 7 == 0 => -0.0,
            hash => ((hash >> 40) as f64 / f64::from(1 << 20) - 8.0) * f64::from(1 << (hash % 5 * 3)),
        }
    }

    pub fn map(&self, rank: usize) -> Vec<bool> {
        let local = self.local();
        let chooses = |place: usize| match self.choice {
            Choice::OneIn(many) => (self.hash("map", [rank, place, 0]) >> 9).is_multiple_of(many),
            Choice::AllTo(to) => place % self.num_experts / local == to,
            Choice::Nobody => false,
            Choice::InHalves => {
                let (token, tokens) = (place / self.num_experts, self.tokens[rank]);
                place % self.num_experts / local == in_halves(rank, token, tokens, self.tokens.len())
            }
        };
        (0..self.tokens[rank] * self.num_experts).map(chooses).collect()
    }

    pub fn row(&self, what: &str, [holder, rank, token]: [usize; 3]) -> Vec<f64> {
        let dtype = self.dtype;
        let cell = |column| self.value(what, [holder * 8 + rank, token, column]);
        (0..self.hidden).map(|column| value(dtype, &element(dtype, cell(column)))).collect()
    }

    pub fn bytes(&self, row: &[f64]) -> Vec<u8> {
        row.iter().flat_map(|&value| element(self.dtype, value)).collect()
    }

    pub fn scale_bytes(&self, (rank, token): Source) -> Vec<u8> {
        (0..self.format().num_scales() * 4).map(|i| self.hash("scale", [rank, token, i]) as u8).collect()
    }

    pub fn order(&self, rank: usize) -> ByExpertOrder {
        let max_tokens = *self.tokens.iter().max().unwrap();
        let capacity = self.capacity.as_ref().map(|rows| ByExpertCapacity { rows: rows[rank], max_tokens });
        self.pad_multiple
            .map_or(ByExpertOrder::Tokens, |pad_multiple| ByExpertOrder::Experts { pad_multiple, capacity })
    }

    /// A token's row.
    pub fn x(&self, (rank, token): Source) -> Vec<u8> {
        match self.dtype {
            DType::U8 => {
                (0..self.hidden).map(|column| self.hash("code", [rank, token, column]) as u8).collect()
            }
            _ => self.bytes(&self.row("x", [0, rank, token])),
        }
    }

    pub fn inputs(&self, rank: usize) -> Inputs {
        let (tokens, num_experts, width) = (self.tokens[rank], self.num_experts, self.format().num_scales());
        let map: Vec<u8> = self.map(rank).iter().map(|&chosen| u8::from(chosen) * 3).collect();
        let x: Vec<u8> = (0..tokens).flat_map(|token| self.x((rank, token))).collect();
        let prob = |i: usize| self.prob(rank, i / num_experts, i % num_experts);
        let probs = floats((0..tokens * num_experts).map(prob));
        let scales: Vec<u8> = (0..tokens).flat_map(|token| self.scale_bytes((rank, token))).collect();
        Inputs {
            map: Array::holding(DType::U8, &[tokens, num_experts], &map),
            x: Array::holding(self.dtype, &[tokens, self.hidden], &x),
            probs: Array::holding(DType::F32, &[tokens, num_experts], &probs),
            scales: self.scales.map(|dtype| Array::holding(dtype, &[tokens, width], &scales)),
        }
    }

    pub fn prob(&self, rank: usize, token: usize, expert: usize) -> f32 {
        self.value("prob", [rank, token, expert]) as f32
    }

    /// The shape of received probs.
    pub fn shape_of_probs(&self, rows: usize) -> Vec<usize> {
        if self.pad_multiple.is_none() { vec![rows, self.local()] } else { vec![rows] }
    }

    /// What comes to each rank. By token there is a row for each token, of no expert.
    pub fn received(&self) -> Vec<Received> {
        let maps = self.maps();
        let of_rank = |rank: usize| {
            let capacity = self.capacity.as_ref().map(|rows| rows[rank]);
            let pad_multiple = self.pad_multiple.unwrap_or(1);
            let mut received = reference::received(&maps, self.num_experts, rank, pad_multiple, capacity);
            if self.pad_multiple.is_none() {
                received.rows = received.tokens.iter().map(|&source| Some((source, 0))).collect();
            }
            received
        };
        (0..self.tokens.len()).map(of_rank).collect()
    }

    pub fn maps(&self) -> Vec<Vec<bool>> {
        (0..self.tokens.len()).map(|rank| self.map(rank)).collect()
    }
}
