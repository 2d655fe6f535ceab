//! Dispatch and combine by expert against their definition.

use antiphon_moe::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRouting, ByExpertTokens,
    MoeConfig, RowFormat,
    by_expert::reference::{self, Received, Source},
};
use antiphon_tensor::DType;
use antiphon_testing::Tensor;

use crate::{
    cases::{
        by_expert::{ByExpertCase, Choice, Inputs},
        floats, ragged,
        tensor::{add, element, value},
    },
    forms::{SMALL, assert_adjoint, combinations},
    harness::{ByExpertFacts, MoeBackend, Result},
    refusals::{names, refused},
};

impl ByExpertCase {
    fn check<B: MoeBackend>(&self, rank: &B, moe: &mut B::Moe) -> B::ByExpertRoutes {
        let run = Run { case: self, on: rank, received: self.received() };
        let routes = run.notify(moe).unwrap();
        let of_rank = &run.received[rank.rank()];
        assert_eq!(B::rows_by_expert(&routes), of_rank.rows.len(), "{self:?}");
        let kept = |expert: usize| of_rank.rows.iter().flatten().filter(|row| row.1 == expert).count();
        let chosen = |expert: usize| {
            let (maps, first) = (self.maps(), rank.rank() * self.local());
            let of_map = |map: &Vec<bool>| {
                map.iter()
                    .skip(first + expert)
                    .step_by(self.num_experts)
                    .filter(|&&is_chosen| is_chosen)
                    .count()
            };
            maps.iter().map(of_map).sum::<usize>()
        };
        let tokens_per_expert: Vec<usize> = match self.pad_multiple {
            Some(_) => (0..self.local()).map(kept).collect(),
            None => (0..self.local()).map(chosen).collect(),
        };
        let expected = ByExpertFacts {
            num_received: of_rank.tokens.len(),
            overflow: of_rank.overflow,
            rows_needed: of_rank.needed,
            tokens_per_expert,
            rows_per_expert: of_rank.rows_per_expert.clone(),
        };
        assert_eq!(rank.facts_by_expert(&routes), expected, "routes of rank {} in {self:?}", rank.rank());
        run.dispatch(moe, &routes);
        if self.pad_multiple.is_some() {
            let place = |source: &Source, expert: usize| {
                let row = of_rank.rows.iter().position(|row| *row == Some((*source, expert)));
                row.map_or(-1, |row| row as i32)
            };
            let places =
                of_rank.tokens.iter().flat_map(|source| (0..self.local()).map(move |j| place(source, j)));
            assert_eq!(rank.places(&routes), places.collect::<Vec<_>>(), "places in {self:?}");
        }
        run.combine(moe, &routes);
        run.dispatch(moe, &routes); // again, along the routes
        routes
    }
}

/// A case on one of its ranks.
struct Run<'a, B> {
    case: &'a ByExpertCase,
    on: &'a B,
    received: Vec<Received>,
}

impl<B: MoeBackend> Run<'_, B> {
    fn notify(&self, moe: &mut B::Moe) -> Result<B::ByExpertRoutes> {
        let Self { case, on, .. } = *self;
        let map = case.inputs(on.rank()).map.on(on);
        let order = case.order(on.rank());
        on.notify_by_expert(moe, &ByExpertRouting { map: map.view(), order, format: case.format() })
    }

    fn is_by_token(&self) -> bool {
        self.case.pad_multiple.is_none()
    }

    fn dispatch(&self, moe: &mut B::Moe, routes: &B::ByExpertRoutes) {
        let Self { case, on, ref received } = *self;
        let rank = on.rank();
        let (rows, num_experts) = (B::rows_by_expert(routes), case.num_experts);
        let Inputs { x, probs, scales, .. } = case.inputs(rank);
        let (x, probs, scales) = (x.on(on), probs.on(on), scales.map(|scales| scales.on(on)));
        let num_scales = case.format().num_scales();
        let mut to_x = Tensor::unwritten(on, case.dtype, &[rows, case.hidden]);
        let mut to_probs = Tensor::unwritten(on, DType::F32, &case.shape_of_probs(rows));
        let mut to_scales = case.scales.map(|dtype| Tensor::unwritten(on, dtype, &[rows, num_scales]));
        let call = ByExpertDispatch {
            tokens: ByExpertTokens {
                x: x.view(),
                scales: scales.as_ref().map(Tensor::view),
                probs: case.probs.then(|| probs.view()),
            },
            received: ByExpertTokens {
                x: to_x.view_mut(),
                scales: to_scales.as_mut().map(Tensor::view_mut),
                probs: case.probs.then(|| to_probs.view_mut()),
            },
        };
        on.dispatch_by_expert(moe, routes, call).unwrap();

        let of_row = |of_token: &dyn Fn(Source) -> Vec<u8>, bytes: usize| -> Vec<u8> {
            let row =
                |row: &Option<(Source, usize)>| row.map_or(vec![0; bytes], |(source, _)| of_token(source));
            received[rank].rows.iter().flat_map(row).collect()
        };
        let row = |source: Source| case.x(source);
        assert!(
            to_x.content() == of_row(&row, case.hidden * case.dtype.size()),
            "rows of {rank} in {case:?}"
        );
        if let Some(to_scales) = to_scales {
            let expected = of_row(&|source| case.scale_bytes(source), num_scales * 4);
            assert!(to_scales.content() == expected, "scales of {rank} in {case:?}");
        }
        if case.probs {
            let first = rank * case.local();
            let prob = |(from, token): Source, expert: usize| case.prob(from, token, first + expert);
            let expected: Vec<u8> = match self.is_by_token() {
                false => floats(
                    received[rank].rows.iter().map(|row| row.map_or(0.0, |(source, j)| prob(source, j))),
                ),
                true => {
                    let maps = case.maps();
                    let chooses =
                        |(from, token): Source, j: usize| maps[from][token * num_experts + first + j];
                    let of_token = |&source: &Source| {
                        (0..case.local())
                            .map(move |j| if chooses(source, j) { prob(source, j) } else { 0.0 })
                            .collect::<Vec<_>>()
                    };
                    floats(received[rank].tokens.iter().flat_map(of_token))
                }
            };
            assert!(to_probs.content() == expected, "probs of {rank} in {case:?}");
        }
    }

    fn combine(&self, moe: &mut B::Moe, routes: &B::ByExpertRoutes) {
        let Self { case, on, ref received } = *self;
        let rank = on.rank();
        let (tokens, rows, num_experts, local) =
            (case.tokens[rank], B::rows_by_expert(routes), case.num_experts, case.local());
        // What a rank made of a row, and its prob; what nothing came to is not read.
        let made = |holder: usize, row: usize| match received[holder].rows[row] {
            Some((source, expert)) => {
                case.row(["made0", "made1", "made2", "made3"][expert % 4], [holder, source.0, source.1])
            }
            None => vec![f64::NAN; case.hidden],
        };
        let grad = |holder: usize, index: usize| case.value("grad", [holder, index, 0]) as f32;
        let made_bytes: Vec<u8> = (0..rows).flat_map(|row| case.bytes(&made(rank, row))).collect();
        let made_rows = Tensor::holding(on, case.dtype, &[rows, case.hidden], &made_bytes);
        let shape = case.shape_of_probs(rows);
        let grads = Tensor::holding(
            on,
            DType::F32,
            &shape,
            &floats((0..shape.iter().product()).map(|index| grad(rank, index))),
        );
        let mut sums = Tensor::unwritten(on, case.dtype, &[tokens, case.hidden]);
        let mut to_probs = Tensor::unwritten(on, DType::F32, &[tokens, num_experts]);
        let call = ByExpertCombine {
            rows: made_rows.view(),
            probs: case.probs.then(|| grads.view()),
            output: sums.view_mut(),
            output_probs: case.probs.then(|| to_probs.view_mut()),
        };
        on.combine_by_expert(moe, routes, call).unwrap();

        let plus = |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> {
            a.iter().zip(b).map(|(&a, b)| add(case.dtype, a, b)).collect()
        };
        let round = |sum: Vec<f64>| -> Vec<f64> {
            sum.iter().map(|&v| value(case.dtype, &element(case.dtype, v))).collect()
        };
        let zero = || vec![0.0; case.hidden];
        let expected: Vec<u8> = (0..tokens)
            .flat_map(|token| {
                let sum = reference::combine(received, (rank, token), zero, made, plus, round);
                case.bytes(&sum.unwrap_or_else(zero))
            })
            .collect();
        assert!(sums.content() == expected, "sums of {rank} in {case:?}");
        if !case.probs {
            return;
        }
        let map = case.map(rank);
        let prob = |index: usize| {
            let (token, holder, expert) = (index / num_experts, index % num_experts / local, index % local);
            let source = (rank, token);
            let row = match self.is_by_token() {
                false => received[holder].rows.iter().position(|&row| row == Some((source, expert))),
                true if map[index] => received[holder]
                    .tokens
                    .iter()
                    .position(|&its| its == source)
                    .map(|at| at * local + expert),
                true => None,
            };
            row.map_or(0.0, |row| grad(holder, row))
        };
        assert!(
            to_probs.content() == floats((0..tokens * num_experts).map(prob)),
            "probs of {rank} back in {case:?}"
        );
    }
}

pub fn by_expert_forms<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    let tokens = [vec![0; world], vec![1; world], vec![17; world], ragged(world, 0), ragged(world, 3)];
    let choices =
        [Choice::OneIn(3), Choice::AllTo(world - 1), Choice::Nobody, Choice::OneIn(1), Choice::InHalves];
    let forms = [(4, Some(1)), (3, Some(16)), (1, Some(7)), (4, None), (1, None)];
    for [i, j, k] in combinations([tokens.len(), choices.len(), forms.len()]) {
        let (local, pad_multiple) = forms[k];
        let case = ByExpertCase::new(world, local);
        ByExpertCase { tokens: tokens[i].clone(), choice: choices[j], pad_multiple, ..case }.check(rank, moe);
    }
}

pub fn by_expert_dtypes<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(SMALL);
    for &dtype in B::SUMMED {
        for pad_multiple in [Some(1), Some(8), None] {
            let case =
                ByExpertCase { dtype, pad_multiple, hidden: 24, ..ByExpertCase::new(rank.world_size(), 4) };
            case.check(rank, moe);
            ByExpertCase { probs: false, ..case }.check(rank, moe);
        }
    }
}

pub fn by_expert_capacities<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let moe = &mut rank.opened(SMALL);
    for pad_multiple in [1, 4] {
        let case = ByExpertCase {
            tokens: ragged(world, 1),
            pad_multiple: Some(pad_multiple),
            ..ByExpertCase::new(world, 3)
        };
        let exact: Vec<usize> = case.received().iter().map(|received| received.rows.len()).collect();
        let changed = |by: isize| {
            exact.iter().map(|&rows| rows.saturating_add_signed(by * pad_multiple as isize)).collect()
        };
        for (capacity, overflows) in [
            (vec![0; world], Some(true)),
            (vec![4; world], None),
            (exact.clone(), Some(false)), // exactly at the limit
            (changed(-1), Some(true)),    // one above it
            (changed(1), Some(false)),
            (changed(50), Some(false)),
            (exact.iter().map(|rows| rows / 2 / pad_multiple * pad_multiple).collect(), None),
        ] {
            let routes = ByExpertCase { capacity: Some(capacity), ..case.clone() }.check(rank, moe);
            if let Some(overflows) = overflows.filter(|_| exact[rank.rank()] > 0) {
                assert_eq!(rank.facts_by_expert(&routes).overflow, overflows);
            }
        }
    }
}

pub fn by_expert_scales_and_probs<B: MoeBackend>(rank: &B) {
    let moe = &mut rank.opened(MoeConfig::default());
    for (scales, hidden) in [(DType::F32, 128), (DType::F32, 384), (DType::I32, 640), (DType::I32, 2048)] {
        for (probs, pad_multiple) in [(true, Some(4)), (false, Some(4)), (true, None)] {
            let case = ByExpertCase::new(rank.world_size(), 4);
            let case =
                ByExpertCase { dtype: DType::U8, scales: Some(scales), hidden, probs, pad_multiple, ..case };
            let run = |case| Run { case, on: rank, received: ByExpertCase::received(case) };
            let routes = run(&case).notify(moe).unwrap();
            // What is made of codes may be of another dtype and length.
            let made = ByExpertCase { dtype: DType::BF16, scales: None, hidden: 64, ..case.clone() };
            run(&case).dispatch(moe, &routes);
            run(&made).combine(moe, &routes);
        }
    }
}

pub fn by_expert_small_regions<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = ByExpertCase { tokens: ragged(world, 1), ..ByExpertCase::new(world, 2) };
    let record = 16 + 16 * 2 + 5 * 2 * world; // of a dispatch; those of a combine are shorter
    for records in [2, 4, 10, 34] {
        let region_bytes = rank.region_of(records, record);
        let moe = &mut rank.opened(MoeConfig { region_bytes, ..MoeConfig::default() });
        case.check(rank, moe);
        ByExpertCase { pad_multiple: None, ..case.clone() }.check(rank, moe);
    }
}

/// ⟨dispatch x, y⟩ over all ranks is ⟨x, combine y⟩, with the probs: in small integers, exactly.
pub fn by_expert_is_adjoint<B: MoeBackend>(rank: &B) {
    let (me, world) = (rank.rank(), rank.world_size());
    let moe = &mut rank.opened(SMALL);
    for pad_multiple in [Some(8), None] {
        let case = ByExpertCase {
            tokens: (0..world).map(|rank| 40 + rank).collect(),
            dtype: DType::F32,
            pad_multiple,
            ..ByExpertCase::new(world, 4)
        };
        let routes = Run { case: &case, on: rank, received: case.received() }.notify(moe).unwrap();
        let (tokens, rows, num_experts) = (case.tokens[me], B::rows_by_expert(&routes), case.num_experts);
        let whole = |what: &str, shape: &[usize]| {
            let number = |index| (case.hash(what, [me, index, 0]) >> 9) % 17;
            let numbers = (0..shape.iter().product()).map(|i| number(i) as f32 - 8.0);
            Tensor::holding(rank, DType::F32, shape, &floats(numbers))
        };
        let (x, probs) = (whole("x", &[tokens, 16]), whole("probs", &[tokens, num_experts]));
        let (y, grads) = (whole("y", &[rows, 16]), whole("grads", &case.shape_of_probs(rows)));
        let like = |tensor: &Tensor<B>| Tensor::unwritten(rank, DType::F32, tensor.shape());
        let (mut to_x, mut to_probs, mut sums, mut back) = (like(&y), like(&grads), like(&x), like(&probs));
        let call = ByExpertDispatch {
            tokens: ByExpertTokens { probs: Some(probs.view()), ..ByExpertTokens::of(x.view()) },
            received: ByExpertTokens {
                probs: Some(to_probs.view_mut()),
                ..ByExpertTokens::of(to_x.view_mut())
            },
        };
        rank.dispatch_by_expert(moe, &routes, call).unwrap();
        let call = ByExpertCombine {
            rows: y.view(),
            probs: Some(grads.view()),
            output: sums.view_mut(),
            output_probs: Some(back.view_mut()),
        };
        rank.combine_by_expert(moe, &routes, call).unwrap();
        assert_adjoint(rank, &[(&to_x, &y), (&to_probs, &grads)], &[(&x, &sums), (&probs, &back)]);
    }
}

pub fn by_expert_refusals<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = ByExpertCase::new(world, 2);
    let moe = &mut rank.opened(SMALL);
    let unwritten = |dtype, shape: [usize; 2]| Tensor::unwritten(rank, dtype, &shape);
    let map = |dtype, shape: &[usize]| Tensor::unwritten(rank, dtype, shape);
    let mut route = |map: &Tensor<B>, order, hidden| {
        let format = RowFormat { hidden, ..case.format() };
        rank.notify_by_expert(moe, &ByExpertRouting { map: map.view(), order, format })
    };
    let by_expert = |pad_multiple, capacity| ByExpertOrder::Experts { pad_multiple, capacity };
    let good = map(DType::U8, &[17, 2 * world]);
    refused(
        route(&map(DType::I32, &[17, 2 * world]), ByExpertOrder::Tokens, 16),
        "dispatch_by_expert: the routing map must be u8 or bool, not i32",
    );
    refused(
        route(&map(DType::U8, &[17]), ByExpertOrder::Tokens, 16),
        "dispatch_by_expert: the routing map must be of shape [T, E], not [17]",
    );
    if world > 1 {
        refused(
            route(&map(DType::U8, &[17, 5]), ByExpertOrder::Tokens, 16),
            "dispatch_by_expert: 5 experts cannot be divided among 2 ranks",
        );
    }
    refused(
        route(&good, ByExpertOrder::Tokens, 20),
        "dispatch_by_expert: rows of 20 × bf16 are 40 bytes, which must be a multiple of 16",
    );
    refused(
        route(&good, by_expert(0, None), 16),
        "dispatch_by_expert: pad_multiple is 0; it must be at least 1",
    );
    let capacity = |rows, max_tokens| Some(ByExpertCapacity { rows, max_tokens });
    refused(
        route(&good, by_expert(16, capacity(40, 17)), 16),
        "dispatch_by_expert: num_permuted_tokens is 40, which is no multiple of pad_multiple, 16",
    );
    refused(
        route(&good, by_expert(1, capacity(40, 16)), 16),
        "dispatch_by_expert: 17 tokens; max_tokens is 16",
    );

    let routes = Run { case: &case, on: rank, received: case.received() }.notify(moe).unwrap();
    let rows = B::rows_by_expert(&routes);
    let combine = |moe: &mut B::Moe, rows: &Tensor<B>, output: &mut Tensor<B>| {
        rank.combine_by_expert(moe, &routes, ByExpertCombine::of(rows.view(), output.view_mut()))
    };
    let made = unwritten(DType::BF16, [rows, 16]);
    let mut sums = unwritten(DType::BF16, [17, 16]);
    refused(
        combine(moe, &made, &mut sums),
        "combine_by_expert: the routes are ones along which nothing was dispatched yet",
    );
    let dispatch = |moe: &mut B::Moe, x: &Tensor<B>, received: &mut Tensor<B>| {
        let (tokens, received) = (ByExpertTokens::of(x.view()), ByExpertTokens::of(received.view_mut()));
        rank.dispatch_by_expert(moe, &routes, ByExpertDispatch { tokens, received })
    };
    let x = unwritten(DType::BF16, [17, 16]);
    refused(
        dispatch(moe, &unwritten(DType::BF16, [18, 16]), &mut unwritten(DType::BF16, [rows, 16])),
        "dispatch_by_expert: the x must be of shape [T, H] = [17, 16], not [18, 16]",
    );
    refused(
        dispatch(moe, &x, &mut unwritten(DType::BF16, [rows + 4, 16])),
        &format!(
            "dispatch_by_expert: the received x must be of shape [P, H] = [{rows}, 16], not [{}, 16]",
            rows + 4
        ),
    );
    let mut received = unwritten(DType::BF16, [rows, 16]);
    dispatch(moe, &x, &mut received).unwrap();
    refused(
        combine(moe, &unwritten(DType::BF16, [rows + 1, 16]), &mut sums),
        &format!(
            "combine_by_expert: the rows must be of shape [P, H] = [{rows}, 16], not [{}, 16]",
            rows + 1
        ),
    );
    refused(
        combine(moe, &unwritten(DType::U8, [rows, 16]), &mut sums),
        &format!("combine_by_expert: the rows must be {}, not u8", names(B::SUMMED)),
    );
    let other = &mut rank.opened(MoeConfig::default());
    refused(combine(other, &made, &mut sums), "combine_by_expert: the routes are of another instance");
    // Nobody was kept waiting, and the routes are as good as before.
    combine(moe, &made, &mut sums).unwrap();
}

/// The last rank's call differs from the others' in one thing; each needs a communicator of its own, which is of no use after.
pub fn by_expert_mismatches<B: MoeBackend>(rank: &B) {
    let world = rank.world_size();
    let case = ByExpertCase::new(world, 8);
    let others = [
        (ByExpertCase { hidden: 24, ..case.clone() }, "rows of 24 × bf16"),
        (ByExpertCase { dtype: DType::F16, ..case.clone() }, "rows of 16 × f16"),
        (ByExpertCase { num_experts: 4 * world, ..case.clone() }, "experts"),
        (ByExpertCase { capacity: Some(vec![64; world]), ..case.clone() }, "capacity"),
    ];
    for (other, text) in others {
        let group = rank.group(Some(0), 0).unwrap();
        let mut moe = group.moe(MoeConfig::default()).unwrap();
        let case = if group.rank() + 1 == world { &other } else { &case };
        let outcome = Run { case, on: &group, received: case.received() }.notify(&mut moe);
        let error = group.error_of(&moe, outcome);
        assert!(B::tells(&error, text), "{error}");
    }
}
