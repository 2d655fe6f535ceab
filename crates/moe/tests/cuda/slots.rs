//! Dispatch to slots, and combine from them, between GPUs, against their definition.

use antiphon_device::cuda::Graph;
use antiphon_moe::{
    CombineFormat, MoeConfig, SlotCombine, SlotDispatch, SlotFormat,
    slots::{
        SlotLimits,
        cuda::{CudaReceive, CudaSlotRoutes, CudaSlots},
    },
};
use antiphon_tensor::DType;
use antiphon_testing::sized;

use crate::{
    OnGpu, Outcome, Rank,
    cases::{
        by_token::{Case, Choice},
        slots::{MOST, PARTS, Received, SMALL, SlotCase},
        tensor::Array,
    },
    on_gpus, replays,
};

/// A case on a rank's GPU.
pub struct Calls<'a> {
    case: &'a SlotCase,
    x: OnGpu,
    ids: OnGpu,
    weights: OnGpu,
    rows: OnGpu,
    pub sums: OnGpu,
    received: Received<OnGpu>,
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
        Ok(Self {
            case,
            sums: rank.unwritten(DType::BF16, &x.shape)?,
            x: rank.upload(&x)?,
            ids: rank.upload(&ids)?,
            weights: rank.upload(&weights)?,
            rows: rank.upload(&case.rows(rank.comm.rank()))?,
            received: case.unwritten().map(|array| rank.upload(array).expect("a GPU has room")),
            halves: false,
            overwrites: true,
            between: None,
        })
    }

    /// Dispatches, combines, and compares what has come.
    pub fn make(&mut self, rank: &Rank, moe: &CudaSlots) -> Outcome {
        let routes = self.dispatch(rank, moe)?;
        self.combine(rank, moe, &routes)?;
        self.compare(rank, moe, 1)
    }

    pub fn dispatch(&mut self, rank: &Rank, moe: &CudaSlots) -> Outcome<CudaSlotRoutes> {
        let call = SlotDispatch {
            max_tokens: self.case.max_tokens,
            num_experts: self.case.case.num_experts,
            format: self.case.format,
            x: self.x.view(),
            ids: self.ids.view(),
            received: self.received.view_mut(OnGpu::view_mut),
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
        let mut expected = self.case.expected(me);
        let statistics = &mut expected[PARTS.len() - 1];
        *statistics = times(statistics, calls);
        let got = self.received.contents(|tensor| rank.download(tensor).expect("all went well"));
        for (part, (got, wanted)) in PARTS.iter().zip(got.iter().zip(&expected)) {
            let what = || format!("{part} of rank {me} in {:?}, {:?}", self.case.case, self.case.format);
            assert!(got == wanted, "{}", what());
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

fn all<T>(received: &Received<T>) -> impl Iterator<Item = &T> {
    let Received { x, scales, counts, source_tokens, layout_range, statistics } = received;
    [x, counts, source_tokens, layout_range, statistics].into_iter().chain(scales)
}

/// Each of these i32 times a number.
fn times(words: &[u8], by: u8) -> Vec<u8> {
    let one = |word: &[u8]| i32::from_ne_bytes([word[0], word[1], word[2], word[3]]) * i32::from(by);
    words.chunks(4).flat_map(|word| one(word).to_ne_bytes()).collect()
}

fn check(rank: &Rank, moe: &CudaSlots, case: &SlotCase) -> Outcome {
    Calls::new(rank, case)?.make(rank, moe)
}

/// The sizes of a model, of which every rank has as many tokens as it may.
#[test]
fn slots_and_sums_of_a_model_are_as_defined_on_2_gpus() {
    let most = SlotLimits { max_tokens: 128, hidden: 7168, num_experts: 256, top_k: 8 };
    on_gpus(2, MoeConfig { slots: Some(most), ..SMALL }, |rank| {
        let moe = rank.moe.slots()?;
        let case = Case { tokens: vec![128; 2], hidden: 7168, ..Case::new(2, 256, 8) };
        for format in [SlotFormat::Fp8, SlotFormat::Bf16] {
            check(rank, moe, &SlotCase::new(case.clone(), format))?;
        }
        Ok(())
    });
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
            let sent = if index % 4 < 2 { CombineFormat::Bf16 } else { CombineFormat::LogFmt };
            let case = SlotCase { sent, ..SlotCase::new(case, format) };
            let mut calls = Calls::new(rank, &case)?;
            calls.halves = !(index + rank.comm.rank()).is_multiple_of(3);
            calls.make(rank, moe)?;
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
        let mut waits = rank.upload(&Array::holding(DType::I64, &[2], &[0; 16]))?;
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
            for (to, from) in all(&calls.received).zip(all(&next.received)) {
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
