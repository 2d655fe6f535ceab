//! One set of calls: the inputs of all ranks, and what the definition says must come of it.

use antiphon_fabric::Communicator;
use antiphon_moe::{
    ByTokenRoutes, Choices, Combine, Dispatch, Moe, MoeConfig, MoeError, Routing, RowFormat, Tokens,
    by_token::reference::{self, Rank, Row},
    layout,
    layout::reference as layout_reference,
};
use antiphon_tensor::DType;

use crate::tensor::{Tensor, UNWRITTEN, add, element, value};

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

/// The rank that a token chooses whose rank's first half of tokens goes to the next rank, and its second half to the one behind: each rank
/// is sent two runs of tokens, of two sources, in the other order than its neighbours.
pub fn in_halves(rank: usize, token: usize, tokens: usize, world: usize) -> usize {
    (rank + if 2 * token < tokens { 1 } else { 2 }) % world
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

    fn rows(&self, what: &str, rank: usize, rows: usize) -> Vec<Vec<u8>> {
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

    /// What a rank made of the row of a token of another.
    fn made(&self, holder: usize, source: (usize, usize)) -> Vec<u8> {
        let cell = |column| self.value("made", [holder * 64 + source.0, source.1, column]);
        (0..self.hidden).flat_map(|column| element(self.dtype, cell(column))).collect()
    }

    fn made_weights(&self, holder: usize, source: (usize, usize)) -> Vec<f32> {
        (0..self.top_k).map(|k| self.value("grad", [holder * 64 + source.0, source.1, k]) as f32).collect()
    }

    /// Does all of it, and compares all that comes with the definition.
    pub fn check(&self, comm: &Communicator, moe: &mut Moe) -> ByTokenRoutes {
        let run = Run { case: self, comm, ranks: self.ranks() };
        let received = reference::dispatch(&run.ranks, self.num_experts, self.top_k);
        let routes = run.notify(moe);
        run.compare_routes(&routes, &received);
        run.dispatch(moe, &routes, &received, true);
        run.combine(moe, &routes, &received);
        run.dispatch(moe, &routes, &received, false); // cached
        routes
    }

    /// With a region of its own.
    pub fn check_in(&self, comm: &Communicator, region_bytes: usize) {
        let mut moe = Moe::new(comm, MoeConfig { region_bytes, ..MoeConfig::default() }).unwrap();
        self.check(comm, &mut moe);
        moe.close(comm).unwrap();
    }
}

/// A number that looks random, the same on every rank.
pub fn hash(seed: u64, what: &str, place: [usize; 3]) -> u64 {
    let bytes = what.bytes().map(u64::from);
    bytes.chain(place.map(|number| number as u64 + 1)).fold(seed, |hash, word| {
        let mixed = (hash ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    })
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A case on one of its ranks.
pub struct Run<'a> {
    pub case: &'a Case,
    pub comm: &'a Communicator,
    pub ranks: Vec<Rank<u8>>,
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Bytes that look like scales, one after the other.
fn scales(case: &Case, (rank, token): (usize, usize)) -> Vec<u8> {
    (0..case.format().num_scales() * 4).map(|i| case.hash("scale", [rank, token, i]) as u8).collect()
}

impl Run<'_> {
    fn me(&self) -> &Rank<u8> {
        &self.ranks[self.comm.rank()]
    }

    fn id_tensor(&self, ids: &[i64], rows: usize) -> Tensor {
        let bytes = |&id: &i64| match self.case.ids {
            DType::I32 => (id as i32).to_ne_bytes().to_vec(),
            _ => id.to_ne_bytes().to_vec(),
        };
        let content: Vec<u8> = ids.iter().flat_map(bytes).collect();
        Tensor::holding(self.case.ids, &[rows, self.case.top_k], &content)
    }

    pub fn notify(&self, moe: &mut Moe) -> ByTokenRoutes {
        self.try_notify(moe).unwrap()
    }

    pub fn try_notify(&self, moe: &mut Moe) -> Result<ByTokenRoutes, MoeError> {
        let (case, world_size) = (self.case, self.comm.world_size());
        let ids = self.id_tensor(&self.me().ids, self.me().x.len());
        let layout = layout(&ids.view(), case.num_experts, world_size)?;
        let defined = layout_reference::layout(&self.me().ids, case.top_k, case.num_experts, world_size);
        assert_eq!(layout, defined);
        let capacity = case.capacity.as_ref().map(|rows| rows[self.comm.rank()]);
        moe.notify(self.comm, &Routing { capacity, ..Routing::of(&layout, case.format()) })
    }

    fn compare_routes(&self, routes: &ByTokenRoutes, received: &[Vec<Row<u8>>]) {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        assert_eq!(routes.num_received(), received[rank].len());
        let unbounded: Vec<Rank<u8>> =
            self.ranks.iter().map(|rank| Rank { capacity: usize::MAX, ..rank.clone() }).collect();
        let all = reference::dispatch(&unbounded, self.case.num_experts, self.case.top_k);
        assert_eq!(routes.overflow(), all[rank].len() > received[rank].len());
        let counts: Vec<usize> = (0..self.case.num_experts / world_size)
            .map(|expert| {
                all[rank].iter().flat_map(|row| &row.ids).filter(|&&id| id == expert as i64).count()
            })
            .collect();
        assert_eq!(routes.tokens_per_expert(), counts);
        let prefix =
            |from: usize, to: usize| all[to].iter().filter(|row| row.source.0 <= from).count() as i32;
        let matrix: Vec<i32> = (0..world_size)
            .flat_map(|from| (0..world_size).map(move |to| (from, to)))
            .map(|(f, t)| prefix(f, t))
            .collect();
        assert_eq!(routes.rank_prefix_matrix(), matrix);
        for (token, heads) in routes.send_head().chunks(world_size).enumerate() {
            for (to, &head) in heads.iter().enumerate() {
                let own: Vec<_> = all[to].iter().filter(|row| row.source.0 == rank).collect();
                let index = own.iter().position(|row| row.source.1 == token);
                assert_eq!(head, index.map_or(-1, |index| index as i32));
            }
        }
    }

    pub fn dispatch(
        &self,
        moe: &mut Moe,
        routes: &ByTokenRoutes,
        received: &[Vec<Row<u8>>],
        with_choices: bool,
    ) {
        let (case, rank) = (self.case, self.comm.rank());
        let (tokens, rows) = (self.me().x.len(), routes.rows());
        let expected = &received[rank];
        let x = Tensor::holding(case.dtype, &[tokens, case.hidden], &self.me().x.concat());
        let ids = self.id_tensor(&self.me().ids, tokens);
        let weights = Tensor::holding(DType::F32, &[tokens, case.top_k], &floats(&self.me().weights));
        let num_scales = case.format().num_scales();
        let scale_bytes: Vec<u8> = (0..tokens).flat_map(|token| scales(case, (rank, token))).collect();
        let from_scales =
            case.scales.map(|dtype| Tensor::holding(dtype, &[tokens, num_scales], &scale_bytes));
        let mut to_x = Tensor::unwritten(case.dtype, &[rows, case.hidden]);
        let mut to_ids = Tensor::unwritten(case.ids, &[rows, case.top_k]);
        let mut to_weights = Tensor::unwritten(DType::F32, &[rows, case.top_k]);
        let mut to_scales = case.scales.map(|dtype| Tensor::unwritten(dtype, &[rows, num_scales]));
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
        moe.dispatch(self.comm, routes, call).unwrap();

        let padded = |mut content: Vec<u8>, row_bytes: usize| {
            content.resize(rows * row_bytes, UNWRITTEN);
            content
        };
        let got =
            padded(expected.iter().flat_map(|row| row.x.clone()).collect(), case.hidden * case.dtype.size());
        assert!(to_x.content() == got, "rows of rank {rank} in {case:?}");
        if let Some(to_scales) = to_scales {
            let sources = expected.iter().flat_map(|row| scales(case, row.source));
            assert!(to_scales.content() == padded(sources.collect(), num_scales * 4), "scales in {case:?}");
        }
        let sources: Vec<i32> = expected.iter().map(|row| row.source.1 as i32).collect();
        assert_eq!(routes.source_tokens().unwrap(), sources);
        if with_choices {
            let mut ids: Vec<i64> = expected.iter().flat_map(|row| row.ids.clone()).collect();
            ids.resize(rows * case.top_k, -1);
            assert!(to_ids.content() == self.id_tensor(&ids, rows).content(), "ids in {case:?}");
            let weights = expected.iter().flat_map(|row| floats(&row.weights));
            assert!(to_weights.content() == padded(weights.collect(), case.top_k * 4), "weights in {case:?}");
        }
    }

    pub fn combine(&self, moe: &mut Moe, routes: &ByTokenRoutes, received: &[Vec<Row<u8>>]) {
        let (case, rank) = (self.case, self.comm.rank());
        let (tokens, rows) = (self.me().x.len(), routes.rows());
        let mut made: Vec<u8> = received[rank].iter().flat_map(|row| case.made(rank, row.source)).collect();
        made.resize(rows * case.hidden * case.dtype.size(), UNWRITTEN); // what did not arrive is not read
        let mut grads: Vec<f32> =
            received[rank].iter().flat_map(|row| case.made_weights(rank, row.source)).collect();
        grads.resize(rows * case.top_k, 5.0);
        let made = Tensor::holding(case.dtype, &[rows, case.hidden], &made);
        let grads = Tensor::holding(DType::F32, &[rows, case.top_k], &floats(&grads));
        let bias_rows = |bias: usize| case.rows(["bias0", "bias1"][bias], rank, tokens);
        let bias =
            |bias: usize| Tensor::holding(case.dtype, &[tokens, case.hidden], &bias_rows(bias).concat());
        let biases: Vec<Tensor> = (0..case.biases).map(bias).collect();
        let mut sums = Tensor::unwritten(case.dtype, &[tokens, case.hidden]);
        let mut weights = Tensor::unwritten(DType::F32, &[tokens, case.top_k]);
        let call = Combine {
            rows: made.view(),
            weights: Some(grads.view()),
            biases: [biases.first().map(Tensor::view), biases.get(1).map(Tensor::view)],
            output: sums.view_mut(),
            output_weights: Some(weights.view_mut()),
        };
        moe.combine(self.comm, routes, call).unwrap();
        let size = case.dtype.size();
        let values = |row: &[u8]| row.chunks(size).map(|cell| value(case.dtype, cell)).collect::<Vec<_>>();
        let plus = |dtype: DType| {
            move |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> {
                a.iter().zip(b).map(|(&a, b)| add(dtype, a, b)).collect()
            }
        };
        let (mut expected, mut expected_weights) = (Vec::new(), Vec::new());
        for token in 0..tokens {
            let start = (0..case.biases).map(|bias| values(&bias_rows(bias)[token])).reduce(plus(case.dtype));
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
