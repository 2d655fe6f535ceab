//! Dispatch and combine by expert between GPUs, against the host.

use antiphon_device::cuda::Graph;
use antiphon_moe::{
    ByExpertCombine, ByExpertDispatch, ByExpertRouting, ByExpertTokens, MoeConfig, MoeError,
    by_expert::cuda::{ByExpertWords, CudaByExpertRoutes},
    cuda::RouteMemory,
};
use antiphon_tensor::DType;
use antiphon_testing::sized;

use crate::{
    OnGpu, Outcome, Rank,
    cases::{
        by_expert::{ByExpertCase, Choice, Inputs},
        tensor::Array,
    },
    on_gpus, replays,
};

/// What comes of a case: rows, scales, probs, sums, and probs that came back.
pub struct Expected {
    rows: Vec<Array>,
    sums: [Array; 2],
    /// Overflow, how many tokens arrive, tokens of each expert, rows of each expert.
    words: Vec<i32>,
    places: Vec<i32>,
}

pub fn on_host(rank: &mut Rank, case: &ByExpertCase) -> Outcome<Expected> {
    let me = rank.comm.rank();
    let Inputs { map, x, probs, scales } = case.inputs(me);
    let routing = ByExpertRouting { map: map.view(), order: case.order(me), format: case.format() };
    let routes = rank.host.notify_by_expert(&rank.comm, &routing)?;
    let rows = routes.rows();
    let mut to_x = Array::unwritten(case.dtype, &[rows, case.hidden]);
    let mut to_scales = case.scales.map(|dtype| Array::unwritten(dtype, &[rows, case.format().num_scales()]));
    let mut to_probs = Array::unwritten(DType::F32, &case.shape_of_probs(rows));
    let call = ByExpertDispatch {
        tokens: ByExpertTokens {
            x: x.view(),
            scales: scales.as_ref().map(Array::view),
            probs: case.probs.then(|| probs.view()),
        },
        received: ByExpertTokens {
            x: to_x.view_mut(),
            scales: to_scales.as_mut().map(Array::view_mut),
            probs: case.probs.then(|| to_probs.view_mut()),
        },
    };
    rank.host.dispatch_by_expert(&rank.comm, &routes, call)?;
    let made = made_rows(case, me, rows);
    let mut sums = Array::unwritten(made.dtype, &[routes.num_tokens(), case.hidden]);
    let mut back = Array::unwritten(DType::F32, &probs.shape);
    let call = ByExpertCombine {
        rows: made.view(),
        probs: case.probs.then(|| to_probs.view()),
        output: sums.view_mut(),
        output_probs: case.probs.then(|| back.view_mut()),
    };
    rank.host.combine_by_expert(&rank.comm, &routes, call)?;
    let counts = routes.tokens_per_expert().iter().chain(routes.rows_per_expert()).copied();
    let first = [usize::from(routes.overflow()), routes.num_received(), routes.rows_needed()];
    let words = first.into_iter().chain(counts);
    Ok(Expected {
        rows: [Some(to_x), to_scales, Some(to_probs)].into_iter().flatten().collect(),
        sums: [sums, back],
        words: words.map(|word| word as i32).collect(),
        places: routes.places().unwrap_or_default().to_vec(),
    })
}

/// `rows` different rows, as experts make them.
fn made_rows(case: &ByExpertCase, rank: usize, rows: usize) -> Array {
    let tokens = vec![rows; case.tokens.len()];
    ByExpertCase { seed: case.seed + 100, tokens, ..summed(case) }.inputs(rank).x
}

/// The case whose rows are summed: of bytes nothing is.
fn summed(case: &ByExpertCase) -> ByExpertCase {
    match case.dtype {
        DType::U8 => ByExpertCase { dtype: DType::BF16, scales: None, ..case.clone() },
        _ => case.clone(),
    }
}

/// A case on a rank's GPU.
pub struct Calls {
    case: ByExpertCase,
    map: OnGpu,
    x: OnGpu,
    probs: OnGpu,
    scales: Option<OnGpu>,
    words: OnGpu,
    places: OnGpu,
    received: Vec<OnGpu>,
    made: OnGpu,
    pub sums: [OnGpu; 2],
    routes: CudaByExpertRoutes,
}

impl Calls {
    pub fn new(rank: &Rank, case: &ByExpertCase) -> Outcome<Self> {
        let me = rank.comm.rank();
        let inputs = case.inputs(me);
        let (map, x, probs) =
            (rank.upload(&inputs.map)?, rank.upload(&inputs.x)?, rank.upload(&inputs.probs)?);
        let layout = ByExpertWords::new(rank.comm.world_size(), case.num_experts, x.shape[0]);
        let mut words = rank.unwritten(DType::I32, &[layout.total()])?;
        let mut routes = Self::notify(rank, case, &map, &mut words)?;
        let mut places = rank.unwritten(DType::I32, &[routes.places(), case.local()])?;
        // SAFETY: all memory lives until the stream has been waited for, here and below.
        unsafe { routes.keep_places_in(places.view_mut(), rank.moe.device()) }?;
        let rows = routes.rows();
        let mut received = vec![rank.unwritten(case.dtype, &[rows, case.hidden])?];
        if let Some(dtype) = case.scales {
            received.push(rank.unwritten(dtype, &[rows, case.format().num_scales()])?);
        }
        received.push(rank.unwritten(DType::F32, &case.shape_of_probs(rows))?);
        let made = rank.upload(&made_rows(case, me, rows))?;
        let sums = [
            rank.unwritten(made.dtype, &[x.shape[0], case.hidden])?,
            rank.unwritten(DType::F32, &probs.shape)?,
        ];
        let scales = inputs.scales.map(|scales| rank.upload(&scales)).transpose()?;
        let case = case.clone();
        Ok(Self { case, map, x, probs, scales, words, places, received, made, sums, routes })
    }

    fn notify(
        rank: &Rank,
        case: &ByExpertCase,
        map: &OnGpu,
        words: &mut OnGpu,
    ) -> Outcome<CudaByExpertRoutes> {
        let order = case.order(rank.comm.rank());
        let routing = ByExpertRouting { map: map.view(), order, format: case.format() };
        let memory = RouteMemory::Callers { words: words.view_mut(), sources: None };
        // SAFETY: as above.
        Ok(unsafe { rank.moe.notify_by_expert(&routing, memory, rank.stream.borrow()) }?)
    }

    pub fn run(&mut self, rank: &Rank) -> Outcome {
        self.dispatch(rank)?;
        self.combine(rank)
    }

    pub fn dispatch(&mut self, rank: &Rank) -> Outcome {
        let Self { case, x, probs, scales, received, routes, .. } = self;
        let (to_probs, rest) = received.split_last_mut().expect("there are x and probs");
        let (to_x, to_scales) = rest.split_first_mut().expect("there is x");
        let call = ByExpertDispatch {
            tokens: ByExpertTokens {
                x: x.view(),
                scales: scales.as_ref().map(OnGpu::view),
                probs: case.probs.then(|| probs.view()),
            },
            received: ByExpertTokens {
                x: to_x.view_mut(),
                scales: to_scales.first_mut().map(OnGpu::view_mut),
                probs: case.probs.then(|| to_probs.view_mut()),
            },
        };
        // SAFETY: as above.
        Ok(unsafe { rank.moe.dispatch_by_expert(routes, call, rank.stream.borrow()) }?)
    }

    pub fn combine(&mut self, rank: &Rank) -> Outcome {
        let Self { case, received, made, sums: [sums, back], routes, .. } = self;
        let to_probs = received.last().expect("there are x and probs");
        let call = ByExpertCombine {
            rows: made.view(),
            probs: case.probs.then(|| to_probs.view()),
            output: sums.view_mut(),
            output_probs: case.probs.then(|| back.view_mut()),
        };
        // SAFETY: as above.
        Ok(unsafe { rank.moe.combine_by_expert(routes, call, rank.stream.borrow()) }?)
    }

    pub fn compare(&self, rank: &Rank, expected: &Expected) -> Outcome {
        let me = rank.comm.rank();
        let integers = |bytes: Vec<u8>| -> Vec<i32> {
            bytes.chunks(4).map(|word| i32::from_ne_bytes(word.try_into().unwrap())).collect()
        };
        let layout = ByExpertWords::new(rank.comm.world_size(), self.case.num_experts, self.x.shape[0]);
        let words = integers(rank.download(&self.words)?);
        let public = layout.overflow().start..layout.rows_per_expert().end;
        assert_eq!(words[public], expected.words, "counts of rank {me} in {:?}", self.case);
        let places = integers(rank.download(&self.places)?);
        assert_eq!(
            places[..expected.places.len()],
            expected.places,
            "places of rank {me} in {:?}",
            self.case
        );
        for (got, wanted) in
            self.received.iter().chain(&self.sums).zip(expected.rows.iter().chain(&expected.sums))
        {
            assert_eq!(got.shape, wanted.shape, "{:?}", self.case);
            let what = || format!("{:?} {:?} of rank {me} in {:?}", got.dtype, got.shape, self.case);
            assert!(rank.download(got)? == wanted.content(), "{}", what());
        }
        Ok(())
    }
}

pub fn check(rank: &mut Rank, case: &ByExpertCase) -> Outcome {
    let expected = on_host(rank, case)?;
    let mut calls = Calls::new(rank, case)?;
    for _ in 0..2 {
        calls.run(rank)?;
    }
    calls.compare(rank, &expected)?;
    rank.comm.barrier()?; // memory is freed while no kernel runs
    Ok(())
}

/// How many rows each rank has without a capacity, and without padding.
fn rows_of(case: &ByExpertCase) -> Vec<usize> {
    let mut rows = vec![0; case.tokens.len()];
    for from in 0..case.tokens.len() {
        let chosen = case.inputs(from).map.content();
        let experts = chosen.iter().enumerate().filter(|(_, is_chosen)| **is_chosen != 0);
        experts.for_each(|(place, _)| rows[place % case.num_experts / case.local()] += 1);
    }
    rows
}

fn every_case(world: usize, config: MoeConfig) {
    on_gpus(world, config, |rank| {
        let ragged = |shift: usize| (0..world).map(|rank| [0, 33, 1, 700][(rank + shift) % 4]).collect();
        for (choice, tokens) in [
            (Choice::OneIn(3), vec![1; world]),
            (Choice::OneIn(3), vec![17; world]),
            (Choice::OneIn(5), vec![128; world]),
            (Choice::OneIn(2), ragged(0)),
            (Choice::OneIn(1), ragged(1)),
            (Choice::AllTo(world - 1), ragged(2)),
            (Choice::Nobody, ragged(3)),
            (Choice::OneIn(3), vec![0; world]),
        ] {
            let case = ByExpertCase { choice, tokens, hidden: 520, ..ByExpertCase::new(world, 5) };
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for pad_multiple in [Some(1), Some(16), None] {
                    check(rank, &ByExpertCase { dtype, pad_multiple, ..case.clone() })?;
                }
            }
            check(rank, &ByExpertCase { probs: false, ..case.clone() })?;
            let exact = rows_of(&case);
            let around =
                [-1, 0, 1].map(|more| exact.iter().map(|rows| rows.saturating_add_signed(more)).collect());
            for capacity in around {
                let pad_multiple = Some(1);
                check(rank, &ByExpertCase { pad_multiple, capacity: Some(capacity), ..case.clone() })?;
            }
            for rows in [0, 4, 40, 2000] {
                let capacity = Some((0..world).map(|rank| rows + 4 * rank).collect());
                check(rank, &ByExpertCase { capacity, ..case.clone() })?;
            }
            // One whose choices are more than a warp's lanes, and lie in several words.
            check(rank, &ByExpertCase { num_experts: 70 * world, ..case.clone() })?;
        }
        Ok(())
    });
}

#[test]
fn by_expert_calls_take_any_number_of_multiprocessors_on_2_gpus() {
    for num_sms in [2, 5, 24, 132] {
        every_case(2, MoeConfig { num_sms, ..MoeConfig::for_gpus() });
    }
}

#[test]
fn by_expert_calls_take_any_number_of_multiprocessors_on_4_gpus() {
    every_case(4, MoeConfig::for_gpus());
}

/// As many experts of a rank as are served, and where kernels get more memory for them; of tokens that choose all of them, too.
#[test]
fn by_expert_rows_go_to_many_experts_of_a_rank_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        for local in [191, 192, 1024] {
            for choice in [Choice::OneIn(1), Choice::OneIn(7)] {
                let case = ByExpertCase { choice, tokens: vec![3, 27], ..ByExpertCase::new(2, local) };
                check(rank, &ByExpertCase { pad_multiple: Some(8), ..case.clone() })?;
                check(rank, &ByExpertCase { pad_multiple: None, ..case.clone() })?;
                check(rank, &ByExpertCase { capacity: Some(vec![600, 0]), pad_multiple: Some(4), ..case })?;
            }
        }
        Ok(())
    });
}

/// There are enough tokens for the choices of a block to be listed in several turns.
#[test]
fn by_expert_choices_are_listed_in_turns_on_2_gpus() {
    on_gpus(2, MoeConfig { num_sms: 1, ..MoeConfig::for_gpus() }, |rank| {
        let case =
            ByExpertCase { tokens: vec![100, 3], choice: Choice::OneIn(200), ..ByExpertCase::new(2, 1024) };
        check(rank, &case)
    });
}

/// Where a warp gathers many times what travels beside rows, and writes many sums without a wait in between.
#[test]
fn by_expert_warps_may_have_many_tokens_on_2_gpus() {
    on_gpus(2, MoeConfig { num_sms: 1, ..MoeConfig::for_gpus() }, |rank| {
        for probs in [true, false] {
            let case =
                ByExpertCase { scales: Some(DType::F32), hidden: 128, probs, ..ByExpertCase::new(2, 4) };
            check(rank, &ByExpertCase { dtype: DType::U8, tokens: vec![300, 200], ..case })?;
        }
        Ok(())
    });
}

/// Some tens of pieces, each of some tens of rows; of a capacity that drops all rows of some tokens.
#[test]
fn by_expert_pieces_have_the_hosts_bits_on_2_gpus() {
    let config = MoeConfig { region_bytes: 16 << 20, ..MoeConfig::for_gpus() };
    on_gpus(2, config, |rank| {
        for capacity in [None, Some(vec![2000, 1408])] {
            let case = ByExpertCase { capacity, tokens: vec![1500, 900], ..ByExpertCase::new(2, 8) };
            check(
                rank,
                &ByExpertCase { hidden: 7168, choice: Choice::OneIn(4), pad_multiple: Some(16), ..case },
            )?;
        }
        Ok(())
    });
}

/// The graph has all calls twice, on the same memory, so each kernel may begin before the one ahead has ended.
#[test]
fn a_graph_replays_the_capacity_form_by_expert_with_other_maps_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        let case = |seed| ByExpertCase {
            seed,
            capacity: Some(sized(vec![1024, 800], vec![200, 160])),
            tokens: sized(vec![300, 200], vec![60, 40]),
            hidden: 1024,
            ..ByExpertCase::new(2, 8)
        };
        let mut calls = Calls::new(rank, &case(1))?;
        calls.run(rank)?; // kernels are loaded
        rank.stream.borrow().synchronize()?;
        let graph = Graph::capture(&rank.stream, |_| -> Outcome {
            for _ in 0..2 {
                let mut routes = Calls::notify(rank, &calls.case, &calls.map, &mut calls.words)?;
                // SAFETY: all memory outlives the graph.
                unsafe { routes.keep_places_in(calls.places.view_mut(), rank.moe.device()) }?;
                calls.routes = routes;
                calls.run(rank)?;
            }
            Ok(())
        })?;
        let graph = graph.instantiate()?;
        for seed in replays() {
            let case = case(seed);
            let expected = on_host(rank, &case)?;
            let inputs = case.inputs(rank.comm.rank());
            for (gpu, tensor) in
                [(&calls.map, inputs.map), (&calls.x, inputs.x), (&calls.probs, inputs.probs)]
            {
                gpu.memory.write(&rank.stream, 0, &tensor.content())?;
            }
            let made = made_rows(&case, rank.comm.rank(), calls.routes.rows());
            calls.made.memory.write(&rank.stream, 0, &made.content())?;
            rank.is_late(seed);
            // SAFETY: the memory of the calls lives until the stream has been waited for.
            unsafe { graph.launch(&rank.stream) }?;
            calls.compare(rank, &expected)?;
        }
        drop(graph);
        rank.comm.barrier()?;
        Ok(())
    });
}

#[test]
fn what_the_form_by_expert_cannot_do_is_refused_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        let error = Calls::new(rank, &ByExpertCase::new(2, 1025)).err().expect("it is refused");
        assert_eq!(
            error.to_string(),
            "dispatch_by_expert: 2050 experts among 2 ranks are 1025 for each; at most 1024 are served"
        );
        let calls = Calls::new(rank, &ByExpertCase::new(2, 4))?;
        let stream = rank.context.stream()?;
        let order = calls.case.order(rank.comm.rank());
        let routing = ByExpertRouting { map: calls.map.view(), order, format: calls.case.format() };
        let mut outcome = None;
        let _ = Graph::capture(&stream, |_| -> Outcome {
            // SAFETY: all memory lives until the stream has been waited for.
            outcome = Some(unsafe { rank.moe.notify_by_expert(&routing, RouteMemory::Own, stream.borrow()) });
            Ok(())
        });
        assert!(matches!(outcome, Some(Err(MoeError::Captured { .. }))), "{outcome:?}");
        rank.comm.barrier()?;
        Ok(())
    });
}
