//! Dispatch to slots, and combine from them, against their definition.

use antiphon_fabric::Communicator;
use antiphon_moe::{
    CombineFormat, Moe, MoeConfig, MoeError, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat,
    SlotRoutes,
    by_token::reference::Rank,
    slots::{
        SlotLimits, logfmt,
        reference::{self, Source},
    },
};
use antiphon_tensor::{DType, bf16};

use crate::{
    case::{Case, Choice},
    tensor::{Tensor, UNWRITTEN, element},
};

const FORMATS: [SlotFormat; 4] =
    [SlotFormat::Bf16, SlotFormat::Fp8, SlotFormat::Fp8PowersOfTwo, SlotFormat::Fp8Packed];

/// A dispatch to slots, and its combine, of the tokens and choices of a case.
pub struct SlotCase {
    pub case: Case,
    pub format: SlotFormat,
    /// The format of the combine.
    pub sent: CombineFormat,
    pub max_tokens: usize,
    pub ranks: Vec<Rank<u8>>,
}

/// What a rank receives.
pub struct Received {
    pub x: Tensor,
    pub scales: Option<Tensor>,
    pub counts: Tensor,
    pub source_tokens: Tensor,
    pub layout_range: Tensor,
    pub statistics: Tensor,
}

impl Received {
    pub fn view_mut(&mut self) -> ReceivedSlots<'_> {
        ReceivedSlots {
            x: self.x.view_mut(),
            scales: self.scales.as_mut().map(Tensor::view_mut),
            counts: self.counts.view_mut(),
            source_tokens: self.source_tokens.view_mut(),
            layout_range: self.layout_range.view_mut(),
            statistics: Some(self.statistics.view_mut()),
            waits: None,
        }
    }

    pub fn contents(&self) -> [Vec<u8>; 6] {
        let scales = self.scales.as_ref().map_or(Vec::new(), Tensor::content);
        let [x, counts, sources] = [&self.x, &self.counts, &self.source_tokens].map(Tensor::content);
        [x, scales, counts, sources, self.layout_range.content(), self.statistics.content()]
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
    pub fn inputs(&self, rank: usize) -> [Tensor; 3] {
        let Case { hidden, top_k, .. } = self.case;
        let Rank { x, ids, weights, .. } = &self.ranks[rank];
        let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        let weights: Vec<u8> = weights.iter().flat_map(|weight| weight.to_ne_bytes()).collect();
        [
            Tensor::holding(DType::BF16, &[x.len(), hidden], &x.concat()),
            Tensor::holding(DType::I64, &[x.len(), top_k], &ids),
            Tensor::holding(DType::F32, &[x.len(), top_k], &weights),
        ]
    }

    pub fn unwritten(&self) -> Received {
        let (local, slots, hidden) = (self.local(), self.slots(), self.case.hidden);
        let scales = self.format.scale_dtype().map(|dtype| (dtype, self.format.num_scales(hidden)));
        Received {
            x: Tensor::unwritten(self.format.dtype(), &[local, slots, hidden]),
            scales: scales.map(|(dtype, scales)| Tensor::unwritten(dtype, &[local, scales, slots])),
            counts: Tensor::unwritten(DType::I32, &[local]),
            source_tokens: Tensor::unwritten(DType::I32, &[local, slots]),
            layout_range: Tensor::unwritten(DType::I64, &[local, self.world_size()]),
            statistics: Tensor::holding(DType::I32, &[local], &vec![0; local * 4]),
        }
    }

    pub fn call<'a>(&self, x: &'a Tensor, ids: &'a Tensor, received: &'a mut Received) -> SlotDispatch<'a> {
        SlotDispatch {
            max_tokens: self.max_tokens,
            num_experts: self.case.num_experts,
            format: self.format,
            x: x.view(),
            ids: ids.view(),
            received: received.view_mut(),
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
    pub fn rows(&self, rank: usize) -> Tensor {
        let (local, row_bytes) = (self.local(), self.case.hidden * 2);
        let mut content = vec![0xFF; local * self.slots() * row_bytes];
        for expert in 0..local {
            for (slot, source) in self.slots_of(rank * local + expert).into_iter().enumerate() {
                let at = (expert * self.slots() + slot) * row_bytes;
                content[at..][..row_bytes].copy_from_slice(&self.made(rank * local + expert, source));
            }
        }
        Tensor::holding(DType::BF16, &[local, self.slots(), self.case.hidden], &content)
    }

    /// What must come to a rank.
    pub fn expected(&self, rank: usize) -> Received {
        let (local, slots, hidden) = (self.local(), self.slots(), self.case.hidden);
        let empty = self.unwritten();
        let num_scales = self.format.num_scales(hidden);
        let [mut x, mut scales, mut counts, mut sources, mut ranges, mut statistics] = empty.contents();
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
        let holding = |like: Tensor, content: &[u8]| Tensor::holding(like.dtype, &like.shape, content);
        Received {
            x: holding(empty.x, &x),
            scales: empty.scales.map(|like| holding(like, &scales)),
            counts: holding(empty.counts, &counts),
            source_tokens: holding(empty.source_tokens, &sources),
            layout_range: holding(empty.layout_range, &ranges),
            statistics: holding(empty.statistics, &statistics),
        }
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
    pub fn expected_sums(&self, rank: usize, is_left_out: impl Fn(usize) -> bool) -> Tensor {
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
        Tensor::holding(DType::BF16, &[x.len(), hidden], &content)
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

    pub fn dispatch(&self, comm: &Communicator, moe: &mut Moe) -> Result<(SlotRoutes, Received), MoeError> {
        let [x, ids, _] = self.inputs(comm.rank());
        let mut received = self.unwritten();
        let routes = moe.dispatch_to_slots(comm, self.call(&x, &ids, &mut received))?;
        Ok((routes, received))
    }

    /// The sums.
    fn combine(&self, comm: &Communicator, moe: &mut Moe, routes: &SlotRoutes) -> Result<Tensor, MoeError> {
        let [_, ids, weights] = self.inputs(comm.rank());
        let rows = self.rows(comm.rank());
        let mut sums = Tensor::unwritten(DType::BF16, &[routes.num_tokens(), self.case.hidden]);
        let call = SlotCombine {
            format: self.sent,
            rows: rows.view(),
            ids: ids.view(),
            weights: weights.view(),
            output: sums.view_mut(),
            waits: None,
        };
        moe.combine_from_slots(comm, routes, call)?;
        Ok(sums)
    }

    fn check(&self, comm: &Communicator, moe: &mut Moe) {
        let rank = comm.rank();
        let (routes, received) = self.dispatch(comm, moe).unwrap();
        let expected = self.expected(rank);
        let parts = ["rows", "scales", "counts", "source tokens", "layout range", "statistics"];
        for (part, (got, expected)) in parts.iter().zip(received.contents().iter().zip(&expected.contents()))
        {
            assert!(got == expected, "{part} of rank {rank} in {:?}, {:?}", self.case, self.format);
        }
        assert_eq!(routes.tokens(), self.case.tokens);

        let sums = self.combine(comm, moe, &routes).unwrap();
        let expected = self.expected_sums(rank, |_| false);
        assert!(
            sums.content() == expected.content(),
            "{:?} sums of rank {rank} in {:?}",
            self.sent,
            self.case
        );
    }
}

fn widened(row: &[u8]) -> Vec<f32> {
    row.chunks(2).map(|cell| bf16::from_ne_bytes([cell[0], cell[1]]).to_f32()).collect()
}

pub fn slots_and_sums(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let ragged: Vec<usize> = (0..world).map(|rank| [0, 33, 1, 128][rank % 4]).collect();
    for tokens in [vec![0; world], vec![1; world], vec![17; world], ragged] {
        for choice in [Choice::Spread, Choice::AllTo(world - 1), Choice::Nobody, Choice::Wild] {
            for (local, top_k) in [(4, 2), (2, 5), (1, 1)] {
                let case = Case::new(world, local * world, top_k);
                let case = Case { tokens: tokens.clone(), choice, ..case };
                SlotCase::new(case, SlotFormat::Bf16).check(comm, &mut moe);
            }
        }
    }
}

pub fn every_format(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    for format in FORMATS {
        for special in [false, true] {
            let case =
                Case { hidden: 512, tokens: vec![5; world], special, ..Case::new(world, 2 * world, 3) };
            SlotCase::new(case, format).check(comm, &mut moe);
        }
    }
}

pub fn combines_in_logfmt(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    for (hidden, choice) in [(128, Choice::Wild), (384, Choice::Spread), (1024, Choice::AllTo(world - 1))] {
        let case = Case { hidden, choice, tokens: vec![5; world], ..Case::new(world, 2 * world, 3) };
        let case = SlotCase::new(case, SlotFormat::Bf16);
        SlotCase { sent: CombineFormat::LogFmt, ..case }.check(comm, &mut moe);
    }
}

/// Regions that hold few rows: as few as two, or as the rows of a token.
pub fn small_regions(comm: &Communicator) {
    let world = comm.world_size();
    let case = Case { tokens: vec![7; world], choice: Choice::Wild, ..Case::new(world, 2 * world, 3) };
    for records in [6, 8, 20] {
        let mut moe =
            Moe::new(comm, MoeConfig { region_bytes: records * 32, ..MoeConfig::default() }).unwrap();
        for _ in 0..3 {
            SlotCase::new(case.clone(), SlotFormat::Bf16).check(comm, &mut moe);
        }
    }
}

pub fn choices_that_are_left_out(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let case = SlotCase::new(Case::new(world, 4 * world, 4), SlotFormat::Bf16);
    let (routes, _) = case.dispatch(comm, &mut moe).unwrap();
    let [_, _, weights] = case.inputs(comm.rank());
    let rows = case.rows(comm.rank());
    let is_left_out = |choice: usize| choice.is_multiple_of(3);
    let kept = case.ranks[comm.rank()].ids.iter().enumerate();
    let kept: Vec<u8> =
        kept.flat_map(|(choice, &id)| if is_left_out(choice) { -1 } else { id }.to_ne_bytes()).collect();
    let ids = Tensor::holding(DType::I64, &weights.shape, &kept);
    let mut sums = Tensor::unwritten(DType::BF16, &[routes.num_tokens(), case.case.hidden]);
    let call = SlotCombine {
        format: case.sent,
        rows: rows.view(),
        ids: ids.view(),
        weights: weights.view(),
        output: sums.view_mut(),
        waits: None,
    };
    moe.combine_from_slots(comm, &routes, call).unwrap();
    assert!(sums.content() == case.expected_sums(comm.rank(), is_left_out).content());
}

#[track_caller]
fn refused<T>(outcome: Result<T, MoeError>, text: &str) {
    match outcome {
        Ok(_) => panic!("not refused: {text}"),
        Err(error) => assert_eq!(error.to_string(), text),
    }
}

pub fn arguments_that_make_no_sense(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let case = SlotCase::new(Case::new(world, 4 * world, 2), SlotFormat::Bf16);
    let [x, ids, weights] = case.inputs(comm.rank());
    let few = SlotCase { max_tokens: 16, ..SlotCase::new(case.case.clone(), case.format) };
    refused(few.dispatch(comm, &mut moe), "dispatch_to_slots: 17 tokens; max_tokens is 16");
    let most = SlotLimits { max_tokens: 17, hidden: 16, num_experts: 4 * world, top_k: 2 };
    let config = MoeConfig { slots: Some(most), ..MoeConfig::default() };
    let error = case.dispatch(comm, &mut Moe::new(comm, config).unwrap()).err().unwrap().to_string();
    let text =
        format!("dispatch_to_slots: max_tokens 18, rows of 16, {} experts and top-2 exceed", 4 * world);
    assert!(error.starts_with(&text) && error.contains("max_tokens: 17"), "{error}");
    let codes = SlotCase::new(case.case.clone(), SlotFormat::Fp8);
    refused(
        codes.dispatch(comm, &mut moe),
        "dispatch_to_slots: rows of 16 elements, which must be a multiple of 128",
    );
    let odd = SlotCase::new(Case { num_experts: 4 * world + 1, ..case.case.clone() }, case.format);
    let mut received = odd.unwritten();
    if world > 1 {
        refused(
            moe.dispatch_to_slots(comm, odd.call(&x, &ids, &mut received)),
            &format!("dispatch_to_slots: {} experts cannot be divided among {world} ranks", 4 * world + 1),
        );
    }
    let mut received = case.unwritten();
    received.counts = Tensor::unwritten(DType::I32, &[3]);
    refused(
        moe.dispatch_to_slots(comm, case.call(&x, &ids, &mut received)),
        "dispatch_to_slots: the counts must be of shape [L] = [4], not [3]",
    );
    let mut received = case.unwritten();
    let halves = Tensor::holding(DType::F16, &x.shape, &x.content());
    refused(
        moe.dispatch_to_slots(comm, case.call(&halves, &ids, &mut received)),
        "dispatch_to_slots: the x must be bf16, not f16",
    );

    let (routes, received) = case.dispatch(comm, &mut moe).unwrap();
    assert!(received.x.content().iter().any(|&byte| byte != UNWRITTEN));
    let rows = case.rows(comm.rank());
    let mut short = Tensor::unwritten(DType::BF16, &[16, 16]);
    let call = SlotCombine {
        format: case.sent,
        rows: rows.view(),
        ids: ids.view(),
        weights: weights.view(),
        output: short.view_mut(),
        waits: None,
    };
    refused(
        moe.combine_from_slots(comm, &routes, call),
        "combine_from_slots: the output must be of shape [T, H] = [17, 16], not [16, 16]",
    );
    let mut other = Moe::new(comm, MoeConfig::default()).unwrap();
    let mut sums = Tensor::unwritten(DType::BF16, &[17, 16]);
    let call = SlotCombine {
        format: case.sent,
        rows: rows.view(),
        ids: ids.view(),
        weights: weights.view(),
        output: sums.view_mut(),
        waits: None,
    };
    refused(
        other.combine_from_slots(comm, &routes, call),
        "combine_from_slots: the routes are of another instance",
    );
    let call = SlotCombine {
        format: CombineFormat::LogFmt,
        rows: rows.view(),
        ids: ids.view(),
        weights: weights.view(),
        output: sums.view_mut(),
        waits: None,
    };
    refused(
        moe.combine_from_slots(comm, &routes, call),
        "combine_from_slots: rows of 16 elements, which must be a multiple of 128",
    );
    // Nobody was kept waiting.
    case.check(comm, &mut moe);
}

pub fn ranks_that_differ(comm: &Communicator) {
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let case = SlotCase::new(Case::new(comm.world_size(), 8, 2), SlotFormat::Bf16);
    let max_tokens = 18 + comm.rank();
    let error = SlotCase { max_tokens, ..case }.dispatch(comm, &mut moe).err().unwrap().to_string();
    assert!(error.contains("up to 18 rows") && error.contains("up to 19 rows"), "{error}");
}

pub fn ranks_that_combine_in_different_formats(comm: &Communicator) {
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    let world = comm.world_size();
    let case = Case { hidden: 128, ..Case::new(world, 2 * world, 2) };
    let case = SlotCase::new(case, SlotFormat::Bf16);
    let sent = if comm.rank() == 0 { CombineFormat::Bf16 } else { CombineFormat::LogFmt };
    let (routes, _) = case.dispatch(comm, &mut moe).unwrap();
    let error = SlotCase { sent, ..case }.combine(comm, &mut moe, &routes).err().unwrap().to_string();
    assert!(error.contains("logfmt"), "{error}");
}
