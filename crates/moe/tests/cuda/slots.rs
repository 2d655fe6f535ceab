//! Dispatch to slots, and combine from them, between GPUs, against their definition.

use antiphon_device::cuda::Graph;
use antiphon_moe::{
    CombineFormat, MoeConfig, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat,
    cuda::CudaMoe,
    slots::{
        SlotLimits,
        cuda::{CudaReceive, CudaSlotRoutes, CudaSlots},
    },
};
use antiphon_tensor::DType;
use antiphon_testing::sized;

use crate::{
    OnGpu, Outcome, Rank,
    case::{Case, Choice},
    on_gpus, replays,
    slot_case::{Received, SlotCase},
    tensor::Tensor,
};

pub const MOST: SlotLimits = SlotLimits { max_tokens: 129, hidden: 7168, num_experts: 60, top_k: 8 };
/// The configuration of the ranks: small regions, and room for the largest calls to slots.
pub const SMALL: MoeConfig = MoeConfig { region_bytes: 16 << 20, num_sms: 24, slots: Some(MOST) };

/// A case on a rank's GPU.
pub struct Calls<'a> {
    case: &'a SlotCase,
    x: OnGpu,
    ids: OnGpu,
    weights: OnGpu,
    rows: OnGpu,
    pub sums: OnGpu,
    scales: Option<OnGpu>,
    /// x, counts, source tokens, layout range, statistics.
    received: [OnGpu; 5],
    /// Whether calls are made in halves.
    pub halves: bool,
    /// Whether what a half has sent is written anew before the next half.
    pub overwrites: bool,
    /// What happens between them, if anything. Instead of the second half, if it takes that.
    pub between: Option<&'a Between<'a>>,
}

pub type Between<'a> = dyn Fn(&mut Option<CudaReceive>) -> Outcome + 'a;

impl<'a> Calls<'a> {
    pub fn new(rank: &Rank, case: &'a SlotCase) -> Outcome<Self> {
        let [x, ids, weights] = case.inputs(rank.comm.rank());
        let Received { x: to_x, scales, counts, source_tokens, layout_range, statistics } = case.unwritten();
        Ok(Self {
            case,
            sums: rank.unwritten(DType::BF16, &x.shape)?,
            x: rank.upload(&x)?,
            ids: rank.upload(&ids)?,
            weights: rank.upload(&weights)?,
            rows: rank.upload(&case.rows(rank.comm.rank()))?,
            scales: scales.map(|scales| rank.upload(&scales)).transpose()?,
            received: [
                rank.upload(&to_x)?,
                rank.upload(&counts)?,
                rank.upload(&source_tokens)?,
                rank.upload(&layout_range)?,
                rank.upload(&statistics)?,
            ],
            halves: false,
            overwrites: true,
            between: None,
        })
    }

    pub fn dispatch(&mut self, rank: &Rank, moe: &CudaSlots) -> Outcome<CudaSlotRoutes> {
        let [x, counts, source_tokens, layout_range, statistics] = &mut self.received;
        let call = SlotDispatch {
            max_tokens: self.case.max_tokens,
            num_experts: self.case.case.num_experts,
            format: self.case.format,
            x: self.x.view(),
            ids: self.ids.view(),
            received: ReceivedSlots {
                x: x.view_mut(),
                scales: self.scales.as_mut().map(OnGpu::view_mut),
                counts: counts.view_mut(),
                source_tokens: source_tokens.view_mut(),
                layout_range: layout_range.view_mut(),
                statistics: Some(statistics.view_mut()),
                waits: None,
            },
        };
        if self.halves {
            // SAFETY: the tensors live until the stream has been waited for, here and below.
            let (routes, receive) = unsafe { moe.send_dispatch(&call, rank.stream.borrow()) }?;
            if self.overwrites {
                rank.spoil(&self.x)?;
            }
            self.receive(rank, moe, receive)?;
            return Ok(routes);
        }
        // SAFETY: the tensors live until the stream has been waited for, here and below.
        Ok(unsafe { moe.dispatch(&call, rank.stream.borrow()) }?)
    }

    pub fn combine(&mut self, rank: &Rank, moe: &CudaSlots, routes: &CudaSlotRoutes) -> Outcome {
        let call = SlotCombine {
            format: self.case.sent,
            rows: self.rows.view(),
            ids: self.ids.view(),
            weights: self.weights.view(),
            output: self.sums.view_mut(),
            waits: None,
        };
        if self.halves {
            // SAFETY: as above.
            let receive = unsafe { moe.send_combine(routes, &call, rank.stream.borrow()) }?;
            if self.overwrites {
                rank.spoil(&self.rows)?;
            }
            return self.receive(rank, moe, receive);
        }
        // SAFETY: as above.
        Ok(unsafe { moe.combine(routes, &call, rank.stream.borrow()) }?)
    }

    fn receive(&self, rank: &Rank, moe: &CudaSlots, receive: CudaReceive) -> Outcome {
        let mut receive = Some(receive);
        if let Some(between) = self.between {
            between(&mut receive)?;
        }
        if let Some(receive) = receive {
            // SAFETY: as above.
            unsafe { moe.receive(receive, rank.stream.borrow()) }?;
        }
        Ok(())
    }

    /// Compares what the last of `calls` calls brought. The statistics count all of them.
    pub fn compare(&self, rank: &Rank, moe: &CudaSlots, calls: u8) -> Outcome {
        rank.stream.borrow().synchronize()?;
        moe.check()?;
        let me = rank.comm.rank();
        let expected = self.case.expected(me);
        let [x, scales, counts, source_tokens, layout_range, _] = expected.contents();
        if let Some(to_scales) = &self.scales {
            assert!(rank.download(to_scales)? == scales, "scales of rank {me} in {:?}", self.case.case);
        }
        let statistics = times(&counts, calls);
        let parts = ["rows", "counts", "source tokens", "layout range", "statistics"];
        let wanted = [x, counts, source_tokens, layout_range, statistics];
        for ((part, got), wanted) in parts.iter().zip(&self.received).zip(wanted) {
            let what = || format!("{part} of rank {me} in {:?}, {:?}", self.case.case, self.case.format);
            assert!(rank.download(got)? == wanted, "{}", what());
        }
        self.compare_sums(rank, moe)
    }

    /// Compares the sums of the combine alone.
    pub fn compare_sums(&self, rank: &Rank, moe: &CudaSlots) -> Outcome {
        rank.stream.borrow().synchronize()?;
        moe.check()?;
        let me = rank.comm.rank();
        let sums = self.case.expected_sums(me, |_| false);
        let SlotCase { case, sent, .. } = self.case;
        assert!(rank.download(&self.sums)? == sums.content(), "{sent:?} sums of rank {me} in {case:?}");
        Ok(())
    }
}

/// Each of these i32 times a number.
fn times(words: &[u8], by: u8) -> Vec<u8> {
    let one = |word: &[u8]| i32::from_ne_bytes([word[0], word[1], word[2], word[3]]) * i32::from(by);
    words.chunks(4).flat_map(|word| one(word).to_ne_bytes()).collect()
}

fn check(rank: &Rank, moe: &CudaSlots, case: &SlotCase) -> Outcome {
    let mut calls = Calls::new(rank, case)?;
    let routes = calls.dispatch(rank, moe)?;
    calls.combine(rank, moe, &routes)?;
    calls.compare(rank, moe, 1)
}

fn every_case(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let ragged: Vec<usize> = (0..world).map(|rank| [0, 33, 1, 128][rank % 4]).collect();
        for tokens in [vec![0; world], vec![1; world], vec![17; world], ragged] {
            for choice in [Choice::Spread, Choice::AllTo(world - 1), Choice::Nobody, Choice::Wild] {
                for (local, top_k) in [(4, 2), (2, 5), (1, 1), (8, 8)] {
                    let case =
                        Case { tokens: tokens.clone(), choice, ..Case::new(world, local * world, top_k) };
                    check(rank, moe, &SlotCase::new(case, SlotFormat::Bf16))?;
                }
            }
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

fn every_format(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        for (format, hidden) in [
            (SlotFormat::Bf16, 1024),
            (SlotFormat::Fp8, 640),
            (SlotFormat::Fp8PowersOfTwo, 128),
            (SlotFormat::Fp8Packed, 1024),
        ] {
            for special in [false, true] {
                let case = Case { hidden, special, ..Case::new(world, 4 * world, 3) };
                check(rank, moe, &SlotCase::new(case, format))?;
            }
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn slots_and_sums_are_as_defined_on_1_gpus() {
    every_case(1);
}

#[test]
fn slots_and_sums_are_as_defined_on_2_gpus() {
    every_case(2);
}

#[test]
fn slots_and_sums_are_as_defined_on_3_gpus() {
    every_case(3);
}

#[test]
fn slots_and_sums_are_as_defined_on_4_gpus() {
    every_case(4);
}

#[test]
fn slot_formats_are_as_defined_on_2_gpus() {
    every_format(2);
}

/// Of blocks that are coded and others; at last rows of one block, which is half of a warp's.
fn combines_in_logfmt(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        for (hidden, choice, halves) in [
            (1024, Choice::Spread, false),
            (384, Choice::Wild, true),
            (128, Choice::AllTo(world - 1), false),
            (640, Choice::Spread, true),
        ] {
            let tokens = (0..world).map(|rank| [9, 0, 4][rank % 3]).collect();
            let case = Case { hidden, choice, tokens, ..Case::new(world, 3 * world, 5) };
            let case = SlotCase::new(case, SlotFormat::Bf16);
            for sent in [CombineFormat::LogFmt, CombineFormat::Bf16] {
                let case = SlotCase { sent, ranks: case.ranks.clone(), case: case.case.clone(), ..case };
                let mut calls = Calls::new(rank, &case)?;
                calls.halves = halves && rank.comm.rank() != 1;
                let routes = calls.dispatch(rank, moe)?;
                // A call in halves has its rows overwritten.
                for _ in 0..if halves { 1 } else { 4 } {
                    calls.combine(rank, moe, &routes)?;
                    calls.compare_sums(rank, moe)?;
                }
            }
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn combines_in_logfmt_are_as_defined_on_1_gpus() {
    combines_in_logfmt(1);
}

#[test]
fn combines_in_logfmt_are_as_defined_on_2_gpus() {
    combines_in_logfmt(2);
}

#[test]
fn combines_in_logfmt_are_as_defined_on_3_gpus() {
    combines_in_logfmt(3);
}

/// As many experts of a rank as are served, whose marks take more shared memory.
#[test]
fn slots_and_sums_of_many_experts_are_as_defined_on_2_gpus() {
    let most = SlotLimits { num_experts: 2048, ..MOST };
    on_gpus(2, MoeConfig { slots: Some(most), ..SMALL }, |rank| {
        let moe = rank.moe.slots()?;
        for (local, tokens) in [(768, [128, 90]), (1024, [128, 128]), (1024, [3, 0])] {
            let case = Case { tokens: tokens.to_vec(), ..Case::new(2, 2 * local, 8) };
            for format in [SlotFormat::Bf16, SlotFormat::Fp8] {
                check(rank, moe, &SlotCase::new(Case { hidden: 128, ..case.clone() }, format))?;
            }
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn slot_formats_are_as_defined_on_4_gpus() {
    every_format(4);
}

/// A call in halves gives the same as one in one, and a rank may make it in halves while another does not. What goes may be
/// written before the second half.
fn calls_in_halves(world: usize) {
    on_gpus(world, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let formats = [(SlotFormat::Bf16, 1024), (SlotFormat::Fp8, 640)];
        for (index, (format, hidden)) in formats.into_iter().cycle().take(12).enumerate() {
            let tokens = (0..world).map(|rank| [33, 0, 128, 1][(rank + index) % 4]).collect();
            let choice = if index % 3 == 0 { Choice::Wild } else { Choice::Spread };
            let case = Case { hidden, tokens, choice, seed: index as u64, ..Case::new(world, 4 * world, 3) };
            let case = SlotCase::new(case, format);
            let mut calls = Calls::new(rank, &case)?;
            calls.halves = !(index + rank.comm.rank()).is_multiple_of(3);
            let routes = calls.dispatch(rank, moe)?;
            calls.combine(rank, moe, &routes)?;
            calls.compare(rank, moe, 1)?;
        }
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn slot_calls_in_halves_are_the_same_on_2_gpus() {
    calls_in_halves(2);
}

#[test]
fn slot_calls_in_halves_are_the_same_on_4_gpus() {
    calls_in_halves(4);
}

#[test]
fn a_call_before_the_second_half_is_refused_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let case = SlotCase::new(Case::new(2, 8, 2), SlotFormat::Bf16);
        let mut calls = Calls::new(rank, &case)?;
        let routes = calls.dispatch(rank, moe)?;
        let mut waits = rank.upload(&Tensor::holding(DType::I64, &[2], &[0; 16]))?;
        let call = SlotCombine {
            format: case.sent,
            rows: calls.rows.view(),
            ids: calls.ids.view(),
            weights: calls.weights.view(),
            output: calls.sums.view_mut(),
            waits: Some(waits.view_mut()),
        };
        // SAFETY: the tensors live until the stream has been waited for, here and below.
        let receive = unsafe { moe.send_combine(&routes, &call, rank.stream.borrow()) }?;
        // SAFETY: as above.
        let error =
            unsafe { moe.combine(&routes, &call, rank.stream.borrow()) }.expect_err("a half is missing");
        let text = "combine_from_slots has sent and not received yet: receive first (call its hook)";
        assert_eq!(error.to_string(), text);
        if rank.comm.rank() == 1 {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        // SAFETY: as above.
        unsafe { moe.receive(receive, rank.stream.borrow()) }?;
        calls.compare(rank, moe, 1)?;
        let waited = rank.download(&waits)?;
        let waited = |of: usize| i64::from_ne_bytes(waited[of * 8..][..8].try_into().expect("8 bytes"));
        assert_eq!(waited(rank.comm.rank()), 0);
        assert!(waited(1 - rank.comm.rank()) >= 0);
        rank.comm.barrier()?;
        Ok(())
    });
}

/// Slots are used again, with other choices each time, and by formats and forms in turn.
#[test]
fn a_graph_replays_slot_calls_with_changing_choices_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let case = |seed: u64| {
            let choice = if seed.is_multiple_of(3) { Choice::Wild } else { Choice::Spread };
            let case = Case { tokens: vec![60, 41], hidden: 512, seed, choice, ..Case::new(2, 16, 4) };
            SlotCase::new(case, SlotFormat::Fp8)
        };
        let first = case(1);
        let mut calls = Calls::new(rank, &first)?;
        let routes = calls.dispatch(rank, moe)?;
        calls.combine(rank, moe, &routes)?; // loads the kernels
        rank.stream.borrow().synchronize()?;
        let mut kept = Vec::new();
        let graph = Graph::capture(&rank.stream, |_| {
            for _ in 0..5 {
                let routes = calls.dispatch(rank, moe)?;
                calls.combine(rank, moe, &routes)?;
                kept.push(routes);
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })?;
        let graph = graph.instantiate()?;
        for seed in replays().step_by(sized(20, 1)) {
            let case = case(seed);
            let next = Calls::new(rank, &case)?;
            for (to, from) in [
                (&calls.x, case.inputs(rank.comm.rank())[0].content()),
                (&calls.ids, case.inputs(rank.comm.rank())[1].content()),
                (&calls.weights, case.inputs(rank.comm.rank())[2].content()),
                (&calls.rows, case.rows(rank.comm.rank()).content()),
            ] {
                to.memory.write(&rank.stream, 0, &from)?;
            }
            for (to, from) in
                calls.received.iter().chain(&calls.scales).zip(next.received.iter().chain(&next.scales))
            {
                to.memory.write(&rank.stream, 0, &rank.download(from)?)?;
            }
            for replay in 0..20 {
                rank.is_late(seed + replay);
                // SAFETY: the memory of the calls lives until the stream has been waited for.
                unsafe { graph.launch(&rank.stream) }?;
            }
            let compared = Calls { case: &case, between: None, ..calls };
            compared.compare(rank, moe, 100)?;
            calls = Calls { case: &first, between: None, ..compared };
        }
        drop(graph);
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn ranks_that_differ_in_slot_calls_hear_of_it_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let case = SlotCase::new(Case::new(2, 8, 2), SlotFormat::Bf16);
        let case = SlotCase { max_tokens: 18 + rank.comm.rank(), ..case };
        let mut calls = Calls::new(rank, &case)?;
        let routes = calls.dispatch(rank, moe)?;
        rank.stream.borrow().synchronize()?;
        let error = match moe.check() {
            Err(error) => error.to_string(),
            Ok(()) => calls.combine(rank, moe, &routes).expect_err("the other heard of it").to_string(),
        };
        let hears = error.contains("up to 18 rows") && error.contains("up to 19 rows");
        assert!(hears || error.contains("aborted"), "{error}");
        Ok(())
    });
}

#[test]
fn ranks_that_combine_in_different_formats_hear_of_it_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let moe = rank.moe.slots()?;
        let case = Case { hidden: 128, ..Case::new(2, 8, 2) };
        let case = SlotCase::new(case, SlotFormat::Bf16);
        let sent = if rank.comm.rank() == 0 { CombineFormat::LogFmt } else { CombineFormat::Bf16 };
        let case = SlotCase { sent, ..case };
        let mut calls = Calls::new(rank, &case)?;
        let routes = calls.dispatch(rank, moe)?;
        calls.combine(rank, moe, &routes)?;
        rank.stream.borrow().synchronize()?;
        let error = match moe.check() {
            Err(error) => error.to_string(),
            Ok(()) => calls.dispatch(rank, moe).map(drop).expect_err("the other heard of it").to_string(),
        };
        assert!(error.contains("logfmt") || error.contains("aborted"), "{error}");
        Ok(())
    });
}

#[test]
fn slot_calls_that_are_too_large_are_refused_on_2_gpus() {
    on_gpus(2, SMALL, |rank| {
        let most = SlotLimits { max_tokens: 8, hidden: 128, num_experts: 8, top_k: 2 };
        let config = MoeConfig { region_bytes: 0, slots: Some(most), ..MoeConfig::default() };
        let moe = CudaMoe::new(&rank.comm, &rank.context, config)?;
        let case = Case { tokens: vec![300; 2], hidden: 4096, ..Case::new(2, 8, 2) };
        let case = SlotCase::new(case, SlotFormat::Bf16);
        let error = Calls::new(rank, &case)?
            .dispatch(rank, moe.slots()?)
            .map(drop)
            .expect_err("too large")
            .to_string();
        assert!(error.contains("exceed what the instance was made for"), "{error}");
        Ok(())
    });
}
