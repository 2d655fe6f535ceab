//! Calls by token against their definition.

use antiphon_moe::{
    Choices, Combine, Dispatch, MoeConfig, Routing, Tokens,
    by_token::reference::{self, Rank, Row},
    layout::reference as layout_reference,
};
use antiphon_tensor::DType;
use antiphon_testing::{Tensor, UNWRITTEN};

use crate::{
    cases::{
        by_token::Case,
        floats,
        tensor::{Array, add, element, value},
    },
    harness::{ByTokenFacts, MoeBackend, Result},
};

impl Case {
    /// Does all of it, and compares all that comes with the definition.
    pub fn check<B: MoeBackend>(&self, rank: &B, moe: &mut B::Moe) -> B::ByTokenRoutes {
        let run = Run { case: self, rank, ranks: self.ranks() };
        let received = reference::dispatch(&run.ranks, self.num_experts, self.top_k);
        let routes = run.notify(moe);
        run.compare_routes(&routes, &received);
        run.dispatch(moe, &routes, &received, true);
        run.combine(moe, &routes, &received);
        run.dispatch(moe, &routes, &received, false); // cached
        routes
    }

    /// With a region of its own.
    pub fn check_in<B: MoeBackend>(&self, rank: &B, region_bytes: usize) {
        self.check(rank, &mut rank.opened(MoeConfig { region_bytes, ..MoeConfig::default() }));
    }
}

/// A case on one of its ranks.
pub struct Run<'a, B> {
    pub case: &'a Case,
    pub rank: &'a B,
    pub ranks: Vec<Rank<u8>>,
}

impl<B: MoeBackend> Run<'_, B> {
    fn me(&self) -> &Rank<u8> {
        &self.ranks[self.rank.rank()]
    }

    pub fn notify(&self, moe: &mut B::Moe) -> B::ByTokenRoutes {
        self.try_notify(moe).unwrap()
    }

    pub fn try_notify(&self, moe: &mut B::Moe) -> Result<B::ByTokenRoutes> {
        let Self { case, rank, .. } = *self;
        let Case { num_experts, top_k, .. } = *case;
        let (tokens, world_size) = (self.me().x.len(), rank.world_size());
        let layout = rank.layout(moe, &case.id_array(&self.me().ids).on(rank), num_experts)?;
        assert_eq!(layout, layout_reference::layout(&self.me().ids, top_k, num_experts, world_size));
        let in_rank = Array::holding(DType::U8, &[tokens, world_size], &layout.is_token_in_rank).on(rank);
        let per_expert: Vec<u8> =
            layout.tokens_per_expert.iter().flat_map(|count| count.to_ne_bytes()).collect();
        let per_expert = Array::holding(DType::I32, &[num_experts], &per_expert).on(rank);
        let routing = Routing {
            num_experts,
            top_k,
            is_token_in_rank: in_rank.view(),
            tokens_per_expert: per_expert.view(),
            format: case.format(),
            capacity: case.capacity.as_ref().map(|rows| rows[rank.rank()]),
        };
        rank.notify(moe, &routing)
    }

    fn compare_routes(&self, routes: &B::ByTokenRoutes, received: &[Vec<Row<u8>>]) {
        let (rank, world_size) = (self.rank.rank(), self.rank.world_size());
        let unbounded: Vec<Rank<u8>> =
            self.ranks.iter().map(|rank| Rank { capacity: usize::MAX, ..rank.clone() }).collect();
        let all = reference::dispatch(&unbounded, self.case.num_experts, self.case.top_k);
        let count = |expert: usize| {
            all[rank].iter().flat_map(|row| &row.ids).filter(|&&id| id == expert as i64).count()
        };
        let prefix =
            |from: usize, to: usize| all[to].iter().filter(|row| row.source.0 <= from).count() as i32;
        let head = |token: usize, to: usize| {
            let mut own = all[to].iter().filter(|row| row.source.0 == rank);
            own.position(|row| row.source.1 == token).map_or(-1, |index| index as i32)
        };
        let by_rank = |rows: usize, cell: &dyn Fn(usize, usize) -> i32| -> Vec<i32> {
            (0..rows * world_size).map(|place| cell(place / world_size, place % world_size)).collect()
        };
        let expected = ByTokenFacts {
            num_received: received[rank].len(),
            overflow: all[rank].len() > received[rank].len(),
            tokens_per_expert: (0..self.case.num_experts / world_size).map(count).collect(),
            rank_prefix_matrix: by_rank(world_size, &prefix),
            send_head: by_rank(self.me().x.len(), &head),
        };
        assert_eq!(self.rank.facts(routes), expected, "routes of rank {rank} in {:?}", self.case);
    }

    pub fn dispatch(
        &self,
        moe: &mut B::Moe,
        routes: &B::ByTokenRoutes,
        received: &[Vec<Row<u8>>],
        with_choices: bool,
    ) {
        let Self { case, rank: on, .. } = *self;
        let rank = on.rank();
        let (tokens, rows) = (self.me().x.len(), B::rows(routes));
        let expected = &received[rank];
        let [x, ids, weights] = case.arrays(self.me()).map(|array| array.on(on));
        let num_scales = case.format().num_scales();
        let scale_bytes: Vec<u8> = (0..tokens).flat_map(|token| case.scale_bytes((rank, token))).collect();
        let from_scales =
            case.scales.map(|dtype| Tensor::holding(on, dtype, &[tokens, num_scales], &scale_bytes));
        let mut to_x = Tensor::unwritten(on, case.dtype, &[rows, case.hidden]);
        let mut to_ids = Tensor::unwritten(on, case.ids, &[rows, case.top_k]);
        let mut to_weights = Tensor::unwritten(on, DType::F32, &[rows, case.top_k]);
        let mut to_scales = case.scales.map(|dtype| Tensor::unwritten(on, dtype, &[rows, num_scales]));
        let call = Dispatch {
            tokens: Tokens {
                x: x.view(),
                scales: from_scales.as_ref().map(Tensor::view),
                choices: with_choices.then(|| Choices { ids: ids.view(), weights: weights.view() }),
            },
            received: Tokens {
                x: to_x.view_mut(),
                scales: to_scales.as_mut().map(Tensor::view_mut),
                choices: with_choices
                    .then(|| Choices { ids: to_ids.view_mut(), weights: to_weights.view_mut() }),
            },
        };
        on.dispatch(moe, routes, call).unwrap();

        let padded = |mut content: Vec<u8>, row_bytes: usize| {
            content.resize(rows * row_bytes, UNWRITTEN);
            content
        };
        let got =
            padded(expected.iter().flat_map(|row| row.x.clone()).collect(), case.hidden * case.dtype.size());
        assert!(to_x.content() == got, "rows of rank {rank} in {case:?}");
        if let Some(to_scales) = to_scales {
            let sources = expected.iter().flat_map(|row| case.scale_bytes(row.source));
            assert!(to_scales.content() == padded(sources.collect(), num_scales * 4), "scales in {case:?}");
        }
        let sources: Vec<i32> = expected.iter().map(|row| row.source.1 as i32).collect();
        assert_eq!(on.source_tokens(routes), sources);
        if with_choices {
            let mut ids: Vec<i64> = expected.iter().flat_map(|row| row.ids.clone()).collect();
            ids.resize(rows * case.top_k, -1);
            assert!(to_ids.content() == case.id_array(&ids).content(), "ids in {case:?}");
            let weights = expected.iter().flat_map(|row| floats(row.weights.iter().copied()));
            assert!(to_weights.content() == padded(weights.collect(), case.top_k * 4), "weights in {case:?}");
        }
    }

    pub fn combine(&self, moe: &mut B::Moe, routes: &B::ByTokenRoutes, received: &[Vec<Row<u8>>]) {
        let Self { case, rank: on, .. } = *self;
        let rank = on.rank();
        let (tokens, rows) = (self.me().x.len(), B::rows(routes));
        let mut made: Vec<u8> = received[rank].iter().flat_map(|row| case.made(rank, row.source)).collect();
        made.resize(rows * case.hidden * case.dtype.size(), UNWRITTEN); // what did not arrive is not read
        let mut grads: Vec<f32> =
            received[rank].iter().flat_map(|row| case.made_weights(rank, row.source)).collect();
        grads.resize(rows * case.top_k, 5.0);
        let made = Tensor::holding(on, case.dtype, &[rows, case.hidden], &made);
        let grads = Tensor::holding(on, DType::F32, &[rows, case.top_k], &floats(grads));
        let bias_rows: Vec<_> =
            (0..case.biases).map(|bias| case.rows(["bias0", "bias1"][bias], rank, tokens)).collect();
        let bias =
            |rows: &Vec<Vec<u8>>| Tensor::holding(on, case.dtype, &[tokens, case.hidden], &rows.concat());
        let biases: Vec<Tensor<B>> = bias_rows.iter().map(bias).collect();
        let mut sums = Tensor::unwritten(on, case.dtype, &[tokens, case.hidden]);
        let mut weights = Tensor::unwritten(on, DType::F32, &[tokens, case.top_k]);
        let call = Combine {
            rows: made.view(),
            weights: Some(grads.view()),
            biases: [biases.first().map(Tensor::view), biases.get(1).map(Tensor::view)],
            output: sums.view_mut(),
            output_weights: Some(weights.view_mut()),
        };
        on.combine(moe, routes, call).unwrap();
        let size = case.dtype.size();
        let values = |row: &[u8]| row.chunks(size).map(|cell| value(case.dtype, cell)).collect::<Vec<_>>();
        let plus = |dtype: DType| {
            move |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> {
                a.iter().zip(b).map(|(&a, b)| add(dtype, a, b)).collect()
            }
        };
        let (mut expected, mut expected_weights) = (Vec::new(), Vec::new());
        for token in 0..tokens {
            let start = bias_rows.iter().map(|rows| values(&rows[token])).reduce(plus(case.dtype));
            let row = |holder: usize, row: usize| values(&case.made(holder, received[holder][row].source));
            let sum = reference::combine(received, (rank, token), start, row, plus(case.dtype));
            let sum = sum.unwrap_or_else(|| vec![0.0; case.hidden]);
            expected.extend(sum.iter().flat_map(|&value| element(case.dtype, value)));
            let row = |holder: usize, row: usize| {
                let made = case.made_weights(holder, received[holder][row].source);
                made.iter().map(|&weight| f64::from(weight)).collect()
            };
            let sum = reference::combine(received, (rank, token), None, row, plus(DType::F32));
            let sum = sum.unwrap_or_else(|| vec![0.0; case.top_k]);
            expected_weights.extend(sum.iter().flat_map(|&value| element(DType::F32, value)));
        }
        assert!(sums.content() == expected, "sums of rank {rank} in {case:?}");
        assert!(weights.content() == expected_weights, "sums of weights of rank {rank} in {case:?}");
    }
}
