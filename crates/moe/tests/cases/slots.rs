//! One set of calls to slots.

use antiphon_moe::{
    CombineFormat, MoeConfig, ReceivedSlots, SlotFormat,
    by_token::reference::Rank,
    slots::{
        SlotLimits, logfmt,
        reference::{self, Source},
    },
};
use antiphon_tensor::{DType, TensorViewMut, bf16};

use super::{
    by_token::Case,
    tensor::{Array, element},
};

/// The largest calls of the instances.
pub const MOST: SlotLimits = SlotLimits { max_tokens: 129, hidden: 7168, num_experts: 60, top_k: 8 };
/// Small regions, and room for the largest calls.
pub const SMALL: MoeConfig =
    MoeConfig { region_bytes: 16 << 20, num_sms: MoeConfig::NUM_SMS, slots: Some(MOST) };

/// A dispatch to slots, and its combine, of the tokens and choices of a case.
pub struct SlotCase {
    pub case: Case,
    pub format: SlotFormat,
    /// The format of the combine.
    pub sent: CombineFormat,
    pub max_tokens: usize,
    pub ranks: Vec<Rank<u8>>,
}

/// What a rank receives, in tensors of some kind.
pub struct Received<T> {
    pub x: T,
    pub scales: Option<T>,
    pub counts: T,
    pub source_tokens: T,
    pub layout_range: T,
    pub statistics: T,
}

/// What the [contents](Received::contents) are.
pub const PARTS: [&str; 6] = ["rows", "scales", "counts", "source tokens", "layout range", "statistics"];

impl<T> Received<T> {
    /// The same in tensors of another kind.
    pub fn map<U>(&self, mut each: impl FnMut(&T) -> U) -> Received<U> {
        Received {
            x: each(&self.x),
            scales: self.scales.as_ref().map(&mut each),
            counts: each(&self.counts),
            source_tokens: each(&self.source_tokens),
            layout_range: each(&self.layout_range),
            statistics: each(&self.statistics),
        }
    }

    /// The arguments of a call.
    pub fn view_mut<'a>(&'a mut self, view: impl Fn(&'a mut T) -> TensorViewMut<'a>) -> ReceivedSlots<'a> {
        ReceivedSlots {
            x: view(&mut self.x),
            scales: self.scales.as_mut().map(&view),
            counts: view(&mut self.counts),
            source_tokens: view(&mut self.source_tokens),
            layout_range: view(&mut self.layout_range),
            statistics: Some(view(&mut self.statistics)),
            waits: None,
        }
    }

    /// Those of absent scales are empty.
    pub fn contents(&self, content: impl Fn(&T) -> Vec<u8>) -> [Vec<u8>; 6] {
        let scales = self.scales.as_ref().map_or(Vec::new(), &content);
        let [x, counts, sources] = [&self.x, &self.counts, &self.source_tokens].map(&content);
        [x, scales, counts, sources, content(&self.layout_range), content(&self.statistics)]
    }
}

impl SlotCase {
    /// A case with room for one token more than any rank has.
    pub fn new(case: Case, format: SlotFormat) -> Self {
        let case = Case { dtype: DType::BF16, ..case };
        let max_tokens = case.tokens.iter().max().unwrap() + 1;
        Self { format, sent: CombineFormat::Bf16, max_tokens, ranks: case.ranks(), case }
    }

    fn world_size(&self) -> usize {
        self.case.tokens.len()
    }

    fn local(&self) -> usize {
        self.case.num_experts / self.world_size()
    }

    fn slots(&self) -> usize {
        self.world_size() * self.max_tokens
    }

    /// x, ids, weights of a rank.
    pub fn inputs(&self, rank: usize) -> [Array; 3] {
        self.case.arrays(&self.ranks[rank])
    }

    pub fn unwritten(&self) -> Received<Array> {
        let (local, slots, hidden) = (self.local(), self.slots(), self.case.hidden);
        let scales = self.format.scale_dtype().map(|dtype| (dtype, self.format.num_scales(hidden)));
        Received {
            x: Array::unwritten(self.format.dtype(), &[local, slots, hidden]),
            scales: scales.map(|(dtype, scales)| Array::unwritten(dtype, &[local, scales, slots])),
            counts: Array::unwritten(DType::I32, &[local]),
            source_tokens: Array::unwritten(DType::I32, &[local, slots]),
            layout_range: Array::unwritten(DType::I64, &[local, self.world_size()]),
            statistics: Array::holding(DType::I32, &[local], &vec![0; local * 4]),
        }
    }

    fn slots_of(&self, expert: usize) -> Vec<Source> {
        let ids: Vec<Vec<i64>> = self.ranks.iter().map(|rank| rank.ids.clone()).collect();
        reference::slots(&ids, self.case.top_k, expert)
    }

    /// What an expert made of a token.
    fn made(&self, expert: usize, (rank, token): Source) -> Vec<u8> {
        let cell = |column: usize| {
            let hash = (expert * 7919 + rank * 104_729 + token * 1_299_709 + column * 31) % 1009;
            let x = hash as f32 / 64.0 - 8.0;
            // Blocks that are not coded, and ones of different ranges.
            let power = match (self.sent, (expert + token + column / logfmt::BLOCK) % 4) {
                (CombineFormat::Bf16, _) | (_, 0) => 0,
                (_, 1) => -4,
                (_, 2) => -24,
                _ => -4 - (column % 45) as i32,
            };
            bf16::from_f32(x * 2f32.powi(power)).to_ne_bytes()
        };
        (0..self.case.hidden).flat_map(cell).collect()
    }

    /// What all experts of a rank made of their slots.
    pub fn rows(&self, rank: usize) -> Array {
        let (local, row_bytes) = (self.local(), self.case.hidden * 2);
        let mut content = vec![0xFF; local * self.slots() * row_bytes];
        for expert in 0..local {
            for (slot, source) in self.slots_of(rank * local + expert).into_iter().enumerate() {
                let at = (expert * self.slots() + slot) * row_bytes;
                content[at..][..row_bytes].copy_from_slice(&self.made(rank * local + expert, source));
            }
        }
        Array::holding(DType::BF16, &[local, self.slots(), self.case.hidden], &content)
    }

    /// The contents of what must come to a rank.
    pub fn expected(&self, rank: usize) -> [Vec<u8>; 6] {
        let (local, slots) = (self.local(), self.slots());
        let num_scales = self.format.num_scales(self.case.hidden);
        let [mut x, mut scales, mut counts, mut sources, mut ranges, mut statistics] =
            self.unwritten().contents(Array::content);
        for expert in 0..local {
            let filled = self.slots_of(rank * local + expert);
            for (slot, &(from, token)) in filled.iter().enumerate() {
                let row = &self.ranks[from].x[token];
                let (row, row_scales) = self.quantised(row);
                x[(expert * slots + slot) * row.len()..][..row.len()].copy_from_slice(&row);
                for (scale, word) in row_scales.chunks(4).enumerate() {
                    scales[((expert * num_scales + scale) * slots + slot) * 4..][..4].copy_from_slice(word);
                }
                sources[(expert * slots + slot) * 4..][..4].copy_from_slice(&(token as i32).to_ne_bytes());
            }
            let count = filled.len() as i32;
            counts[expert * 4..][..4].copy_from_slice(&count.to_ne_bytes());
            statistics[expert * 4..][..4].copy_from_slice(&count.to_ne_bytes());
            for from in 0..self.world_size() {
                let begin = filled.iter().filter(|source| source.0 < from).count() as i64;
                let count = filled.iter().filter(|source| source.0 == from).count() as i64;
                let at = (expert * self.world_size() + from) * 8;
                ranges[at..][..8].copy_from_slice(&(begin << 32 | count).to_ne_bytes());
            }
        }
        [x, scales, counts, sources, ranges, statistics]
    }

    /// A row of the format and its scales, of a row of bf16.
    fn quantised(&self, row: &[u8]) -> (Vec<u8>, Vec<u8>) {
        if self.format == SlotFormat::Bf16 {
            return (row.to_vec(), Vec::new());
        }
        let powers_of_two = self.format != SlotFormat::Fp8;
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in widened(row).chunks(128) {
            let (group_codes, scale) = reference::quantise(group, powers_of_two);
            codes.extend(group_codes);
            match self.format {
                SlotFormat::Fp8Packed => scales.push((scale.to_bits() >> 23) as u8),
                _ => scales.extend(scale.to_ne_bytes()),
            }
        }
        (codes, scales)
    }

    /// The sums of a rank's tokens, of which `is_left_out` says which choices do not count.
    pub fn expected_sums(&self, rank: usize, is_left_out: impl Fn(usize) -> bool) -> Array {
        let Case { num_experts, top_k, hidden, .. } = self.case;
        let Rank { x, ids, weights, .. } = &self.ranks[rank];
        let row = |token: usize| {
            let choices: Vec<_> = (token * top_k..(token + 1) * top_k)
                .map(|choice| {
                    let expert = usize::try_from(ids[choice]).ok().filter(|&expert| expert < num_experts);
                    let expert = expert.filter(|_| !is_left_out(choice));
                    (weights[choice], expert.map(|expert| self.arrived(&self.made(expert, (rank, token)))))
                })
                .collect();
            let sum = reference::combine(&choices, hidden);
            sum.into_iter().flat_map(|value| element(DType::BF16, f64::from(value))).collect::<Vec<_>>()
        };
        let content: Vec<u8> = (0..x.len()).flat_map(row).collect();
        Array::holding(DType::BF16, &[x.len(), hidden], &content)
    }

    /// What a row is to a sum.
    fn arrived(&self, row: &[u8]) -> Vec<f32> {
        let mut x = widened(row);
        if self.sent == CombineFormat::LogFmt {
            let elements: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            logfmt::arrive(&elements, &mut x);
        }
        x
    }
}

fn widened(row: &[u8]) -> Vec<f32> {
    row.chunks(2).map(|cell| bf16::from_ne_bytes([cell[0], cell[1]]).to_f32()).collect()
}
