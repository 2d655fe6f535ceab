//! Dispatch to slots, and combine from them, against their definition.

use antiphon_moe::{CombineFormat, MoeConfig, SlotCombine, SlotDispatch, SlotFormat, slots::SlotLimits};
use antiphon_tensor::DType;
use antiphon_testing::{Tensor, UNWRITTEN};

use crate::{
    cases::{
        by_token::{Case, Choice},
        ragged,
        slots::{PARTS, Received, SMALL, SlotCase},
    },
    harness::{MoeBackend, Result},
    refusals::refused,
};

/// Each format, for rows of how many elements.
const FORMATS: [(SlotFormat, usize); 4] = [
    (SlotFormat::Bf16, 1024),
    (SlotFormat::Fp8, 640),
    (SlotFormat::Fp8PowersOfTwo, 128),
    (SlotFormat::Fp8Packed, 1024),
];

impl SlotCase {
    /// The call of these tensors.
    pub fn call<'a, B: MoeBackend>(
        &self,
        [x, ids]: [&'a Tensor<B>; 2],
        received: &'a mut Received<Tensor<B>>,
    ) -> SlotDispatch<'a> {
        SlotDispatch {
            max_tokens: self.max_tokens,
            num_experts: self.case.num_experts,
            format: self.format,
            x: x.view(),
            ids: ids.view(),
            received: received.view_mut(Tensor::view_mut),
        }
    }

    pub fn dispatch<B: MoeBackend>(
        &self,
        rank: &B,
        moe: &mut B::Moe,
    ) -> Result<(B::SlotRoutes, Received<Tensor<B>>)> {
        let [x, ids, _] = self.inputs(rank.rank()).map(|array| array.on(rank));
        let mut received = self.unwritten().map(|array| array.on(rank));
        let routes = rank.dispatch_to_slots(moe, self.call([&x, &ids], &mut received))?;
        Ok((routes, received))
    }

    /// What a rank combines.
    fn combining<B: MoeBackend>(&self, rank: &B) -> Combining<B> {
        let [x, ids, weights] = self.inputs(rank.rank()).map(|array| array.on(rank));
        let sums = Tensor::unwritten(rank, DType::BF16, x.shape());
        Combining { format: self.sent, rows: self.rows(rank.rank()).on(rank), ids, weights, sums }
    }

    /// The sums.
    fn combine<B: MoeBackend>(
        &self,
        rank: &B,
        moe: &mut B::Moe,
        routes: &B::SlotRoutes,
    ) -> Result<Tensor<B>> {
        let mut combining = self.combining(rank);
        rank.combine_from_slots(moe, routes, combining.call())?;
        Ok(combining.sums)
    }

    fn check<B: MoeBackend>(&self, rank: &B, moe: &mut B::Moe) {
        let me = rank.rank();
        let (routes, received) = self.dispatch(rank, moe).unwrap();
        let contents = received.contents(Tensor::content);
        for (part, (got, expected)) in PARTS.iter().zip(contents.iter().zip(&self.expected(me))) {
            assert!(got == expected, "{part} of rank {me} in {:?}, {:?}", self.case, self.format);
        }
        assert!(B::tokens(&routes).is_none_or(|tokens| tokens == self.case.tokens));

        let sums = self.combine(rank, moe, &routes).unwrap();
        let expected = self.expected_sums(me, |_| false);
        assert!(sums.content() == expected.content(), "{:?} sums of rank {me} in {:?}", self.sent, self.case);
    }
}

/// The tensors of a combine.
struct Combining<B: MoeBackend> {
    format: CombineFormat,
    rows: Tensor<B>,
    ids: Tensor<B>,
    weights: Tensor<B>,
    sums: Tensor<B>,
}

impl<B: MoeBackend> Combining<B> {
    fn call(&mut self) -> SlotCombine<'_> {
        SlotCombine {
            format: self.format,
            rows: self.rows.view(),
            ids: self.ids.view(),
            weights: self.weights.view(),
            output: self.sums.view_mut(),
            waits: None,
        }
    }
}

pub fn slots_and_sums<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    for tokens in [vec![0; world], vec![1; world], vec![17; world], ragged(world, 0)] {
        for choice in [Choice::Spread, Choice::AllTo(world - 1), Choice::Nobody, Choice::Wild] {
            for (local, top_k) in [(4, 2), (2, 5), (1, 1), (8, 8)] {
                let case = Case::new(world, local * world, top_k);
                let case = Case { tokens: tokens.clone(), choice, ..case };
                SlotCase::new(case, SlotFormat::Bf16).check(rank, moe);
            }
        }
    }
}

pub fn every_format<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    for (format, hidden) in FORMATS {
        for special in [false, true] {
            let case = Case { hidden, special, ..Case::new(world, 4 * world, 3) };
            SlotCase::new(case, format).check(rank, moe);
        }
    }
}

pub fn combines_in_logfmt<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    for (hidden, choice) in [(128, Choice::Wild), (384, Choice::Spread), (1024, Choice::AllTo(world - 1))] {
        let case = Case { hidden, choice, tokens: vec![5; world], ..Case::new(world, 2 * world, 3) };
        let case = SlotCase::new(case, SlotFormat::Bf16);
        SlotCase { sent: CombineFormat::LogFmt, ..case }.check(rank, moe);
    }
}

/// Regions that hold few rows: as few as two, or as the rows of a token.
pub fn small_regions<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = Case { tokens: vec![7; world], choice: Choice::Wild, ..Case::new(world, 2 * world, 3) };
    for records in [6, 8, 20] {
        let moe = &mut rank.opened(MoeConfig { region_bytes: records * 32, ..MoeConfig::default() });
        for _ in 0..3 {
            SlotCase::new(case.clone(), SlotFormat::Bf16).check(rank, moe);
        }
    }
}

pub fn choices_that_are_left_out<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    let case = SlotCase::new(Case::new(world, 4 * world, 4), SlotFormat::Bf16);
    let (routes, _) = case.dispatch(rank, moe).unwrap();
    let mut combining = case.combining(rank);
    let is_left_out = |choice: usize| choice.is_multiple_of(3);
    let kept = case.ranks[rank.rank()].ids.iter().enumerate();
    let kept: Vec<u8> =
        kept.flat_map(|(choice, &id)| if is_left_out(choice) { -1 } else { id }.to_ne_bytes()).collect();
    combining.ids.write(&kept);
    rank.combine_from_slots(moe, &routes, combining.call()).unwrap();
    let expected = case.expected_sums(rank.rank(), is_left_out);
    assert!(combining.sums.content() == expected.content());
}

pub fn arguments_that_make_no_sense<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    let case = SlotCase::new(Case::new(world, 4 * world, 2), SlotFormat::Bf16);
    let [x, ids, _] = case.inputs(rank.rank()).map(|array| array.on(rank));
    let few = SlotCase { max_tokens: 16, ..SlotCase::new(case.case.clone(), case.format) };
    refused(few.dispatch(rank, moe), "dispatch_to_slots: 17 tokens; max_tokens is 16");
    let most = SlotLimits { max_tokens: 17, hidden: 128, num_experts: 4 * world, top_k: 2 };
    let small = &mut rank.opened(MoeConfig { slots: Some(most), ..SMALL });
    let large = Case { tokens: vec![300; world], hidden: 4096, ..case.case.clone() };
    // A rank that is alone sends nothing.
    if world > 1 {
        let error = SlotCase::new(large, case.format).dispatch(rank, small).err().unwrap().to_string();
        let text = format!(
            "dispatch_to_slots: max_tokens 301, rows of 4096, {} experts and top-2 exceed",
            4 * world
        );
        assert!(error.starts_with(&text), "{error}");
    }
    let codes = SlotCase::new(case.case.clone(), SlotFormat::Fp8);
    refused(
        codes.dispatch(rank, moe),
        "dispatch_to_slots: rows of 16 elements, which must be a multiple of 128",
    );
    let odd = SlotCase::new(Case { num_experts: 4 * world + 1, ..case.case.clone() }, case.format);
    let mut received = odd.unwritten().map(|array| array.on(rank));
    if world > 1 {
        refused(
            rank.dispatch_to_slots(moe, odd.call([&x, &ids], &mut received)),
            &format!("dispatch_to_slots: {} experts cannot be divided among {world} ranks", 4 * world + 1),
        );
    }
    let mut received = case.unwritten().map(|array| array.on(rank));
    received.counts = Tensor::unwritten(rank, DType::I32, &[3]);
    refused(
        rank.dispatch_to_slots(moe, case.call([&x, &ids], &mut received)),
        "dispatch_to_slots: the counts must be of shape [L] = [4], not [3]",
    );
    let mut received = case.unwritten().map(|array| array.on(rank));
    let halves = Tensor::holding(rank, DType::F16, x.shape(), &x.content());
    refused(
        rank.dispatch_to_slots(moe, case.call([&halves, &ids], &mut received)),
        "dispatch_to_slots: the x must be bf16, not f16",
    );

    let (routes, received) = case.dispatch(rank, moe).unwrap();
    assert!(received.x.content().iter().any(|&byte| byte != UNWRITTEN));
    let mut short = case.combining(rank);
    short.sums = Tensor::unwritten(rank, DType::BF16, &[16, 16]);
    refused(
        rank.combine_from_slots(moe, &routes, short.call()),
        "combine_from_slots: the output must be of shape [T, H] = [17, 16], not [16, 16]",
    );
    let mut combining = case.combining(rank);
    refused(
        rank.combine_from_slots(small, &routes, combining.call()),
        "combine_from_slots: the routes are of another instance",
    );
    combining.format = CombineFormat::LogFmt;
    refused(
        rank.combine_from_slots(moe, &routes, combining.call()),
        "combine_from_slots: rows of 16 elements, which must be a multiple of 128",
    );
    // Nobody was kept waiting.
    case.check(rank, moe);
}

pub fn ranks_that_differ<B: MoeBackend>(rank: &B) {
    let mut moe = rank.moe(SMALL).unwrap();
    let case = SlotCase::new(Case::new(rank.world_size(), 8, 2), SlotFormat::Bf16);
    let outcome = SlotCase { max_tokens: 18 + rank.rank(), ..case }.dispatch(rank, &mut moe);
    let error = rank.error_of(&moe, outcome);
    assert!(B::tells(&error, "up to 18 rows") && B::tells(&error, "up to 19 rows"), "{error}");
}

pub fn ranks_that_combine_in_different_formats<B: MoeBackend>(rank: &B) {
    let mut moe = rank.moe(SMALL).unwrap();
    let world = rank.world_size();
    let case = Case { hidden: 128, ..Case::new(world, 2 * world, 2) };
    let case = SlotCase::new(case, SlotFormat::Bf16);
    let sent = if rank.rank() == 0 { CombineFormat::Bf16 } else { CombineFormat::LogFmt };
    let (routes, _) = case.dispatch(rank, &mut moe).unwrap();
    let outcome = SlotCase { sent, ..case }.combine(rank, &mut moe, &routes);
    let error = rank.error_of(&moe, outcome);
    assert!(B::tells(&error, "logfmt"), "{error}");
}
