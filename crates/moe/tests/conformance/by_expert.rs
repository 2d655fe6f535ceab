//! Dispatch and combine by expert against their definition.

use antiphon_fabric::{Communicator, FabricError};
use antiphon_moe::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRoutes, ByExpertRouting,
    ByExpertTokens, Moe, MoeConfig, MoeError, RowFormat,
    by_expert::reference::{self, Received, Source},
};
use antiphon_tensor::DType;

use crate::{
    case::{hash, in_halves},
    tensor::{Tensor, add, element, value},
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
    pub map: Tensor,
    pub x: Tensor,
    pub probs: Tensor,
    pub scales: Option<Tensor>,
}

fn floats(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(|value| element(DType::F32, value)).collect()
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

    fn hash(&self, what: &str, place: [usize; 3]) -> u64 {
        hash(self.seed, what, place)
    }

    /// Values whose sums depend on the order and on roundings; −0 and NaN among them.
    fn value(&self, what: &str, place: [usize; 3]) -> f64 {
        match self.hash(what, place) {
            hash if hash % 61 == 0 => f64::NAN,
            hash if hash % 7 == 0 => -0.0,
            hash => ((hash >> 40) as f64 / f64::from(1 << 20) - 8.0) * f64::from(1 << (hash % 5 * 3)),
        }
    }

    fn map(&self, rank: usize) -> Vec<bool> {
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

    fn row(&self, what: &str, [holder, rank, token]: [usize; 3]) -> Vec<f64> {
        let dtype = self.dtype;
        let cell = |column| self.value(what, [holder * 8 + rank, token, column]);
        (0..self.hidden).map(|column| value(dtype, &element(dtype, cell(column)))).collect()
    }

    fn bytes(&self, row: &[f64]) -> Vec<u8> {
        row.iter().flat_map(|&value| element(self.dtype, value)).collect()
    }

    fn scale_bytes(&self, (rank, token): Source) -> Vec<u8> {
        (0..self.format().num_scales() * 4).map(|i| self.hash("scale", [rank, token, i]) as u8).collect()
    }

    pub fn order(&self, rank: usize) -> ByExpertOrder {
        let max_tokens = *self.tokens.iter().max().unwrap();
        let capacity = self.capacity.as_ref().map(|rows| ByExpertCapacity { rows: rows[rank], max_tokens });
        self.pad_multiple
            .map_or(ByExpertOrder::Tokens, |pad_multiple| ByExpertOrder::Experts { pad_multiple, capacity })
    }

    /// A token's row.
    fn x(&self, (rank, token): Source) -> Vec<u8> {
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
            map: Tensor::holding(DType::U8, &[tokens, num_experts], &map),
            x: Tensor::holding(self.dtype, &[tokens, self.hidden], &x),
            probs: Tensor::holding(DType::F32, &[tokens, num_experts], &probs),
            scales: self.scales.map(|dtype| Tensor::holding(dtype, &[tokens, width], &scales)),
        }
    }

    fn prob(&self, rank: usize, token: usize, expert: usize) -> f64 {
        f64::from(self.value("prob", [rank, token, expert]) as f32)
    }

    /// The shape of received probs.
    pub fn shape_of_probs(&self, rows: usize) -> Vec<usize> {
        if self.pad_multiple.is_none() { vec![rows, self.local()] } else { vec![rows] }
    }

    /// What comes to each rank. By token there is a row for each token, of no expert.
    pub fn received(&self) -> Vec<Received> {
        let maps: Vec<_> = (0..self.tokens.len()).map(|rank| self.map(rank)).collect();
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

    fn check(&self, comm: &Communicator, moe: &mut Moe) -> ByExpertRoutes {
        let run = Run { case: self, comm, rank: comm.rank(), received: self.received() };
        let routes = run.notify(moe).unwrap();
        let of_rank = &run.received[comm.rank()];
        assert_eq!(routes.rows(), of_rank.rows.len(), "{self:?}");
        assert_eq!(routes.num_received(), of_rank.tokens.len());
        assert_eq!(routes.rows_per_expert(), of_rank.rows_per_expert);
        assert_eq!(routes.overflow(), of_rank.overflow);
        assert_eq!(routes.rows_needed(), of_rank.needed);
        run.dispatch(moe, &routes);
        run.combine(moe, &routes);
        run.dispatch(moe, &routes); // again, along the routes
        routes
    }
}

/// A case on one of its ranks.
struct Run<'a> {
    case: &'a ByExpertCase,
    comm: &'a Communicator,
    rank: usize,
    received: Vec<Received>,
}

impl Run<'_> {
    fn notify(&self, moe: &mut Moe) -> Result<ByExpertRoutes, MoeError> {
        let (case, rank) = (self.case, self.rank);
        let map = case.inputs(rank).map;
        let routing = ByExpertRouting { map: map.view(), order: case.order(rank), format: case.format() };
        moe.notify_by_expert(self.comm, &routing)
    }

    fn is_by_token(&self) -> bool {
        self.case.pad_multiple.is_none()
    }

    fn dispatch(&self, moe: &mut Moe, routes: &ByExpertRoutes) {
        let Self { case, rank, ref received, .. } = *self;
        let (rows, num_experts) = (routes.rows(), case.num_experts);
        let Inputs { x, probs, scales, .. } = case.inputs(rank);
        let num_scales = case.format().num_scales();
        let mut to_x = Tensor::unwritten(case.dtype, &[rows, case.hidden]);
        let mut to_probs = Tensor::unwritten(DType::F32, &case.shape_of_probs(rows));
        let mut to_scales = case.scales.map(|dtype| Tensor::unwritten(dtype, &[rows, num_scales]));
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
        moe.dispatch_by_expert(self.comm, routes, call).unwrap();

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
                    let maps: Vec<_> = (0..case.tokens.len()).map(|rank| case.map(rank)).collect();
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

    fn combine(&self, moe: &mut Moe, routes: &ByExpertRoutes) {
        let Self { case, rank, ref received, .. } = *self;
        let (tokens, rows, num_experts, local) =
            (case.tokens[rank], routes.rows(), case.num_experts, case.local());
        // What a rank made of a row, and its prob; what nothing came to is not read.
        let made = |holder: usize, row: usize| match received[holder].rows[row] {
            Some((source, expert)) => {
                case.row(["made0", "made1", "made2", "made3"][expert % 4], [holder, source.0, source.1])
            }
            None => vec![f64::NAN; case.hidden],
        };
        let grad = |holder: usize, index: usize| f64::from(case.value("grad", [holder, index, 0]) as f32);
        let made_bytes: Vec<u8> = (0..rows).flat_map(|row| case.bytes(&made(rank, row))).collect();
        let made_rows = Tensor::holding(case.dtype, &[rows, case.hidden], &made_bytes);
        let shape = case.shape_of_probs(rows);
        let grads = Tensor::holding(
            DType::F32,
            &shape,
            &floats((0..shape.iter().product()).map(|index| grad(rank, index))),
        );
        let mut sums = Tensor::unwritten(case.dtype, &[tokens, case.hidden]);
        let mut to_probs = Tensor::unwritten(DType::F32, &[tokens, num_experts]);
        let call = ByExpertCombine {
            rows: made_rows.view(),
            probs: case.probs.then(|| grads.view()),
            output: sums.view_mut(),
            output_probs: case.probs.then(|| to_probs.view_mut()),
        };
        moe.combine_by_expert(self.comm, routes, call).unwrap();

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

fn moe(comm: &Communicator) -> Moe {
    Moe::new(comm, MoeConfig { region_bytes: 64 << 10, ..MoeConfig::default() }).unwrap()
}

/// Numbers of tokens that differ by rank.
fn ragged(world: usize, shift: usize) -> Vec<usize> {
    (0..world).map(|rank| [0, 33, 1, 128][(rank + shift) % 4]).collect()
}

pub fn by_expert_forms(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
    for tokens in [vec![0; world], vec![1; world], vec![17; world], ragged(world, 0), ragged(world, 3)] {
        for choice in
            [Choice::OneIn(3), Choice::AllTo(world - 1), Choice::Nobody, Choice::OneIn(1), Choice::InHalves]
        {
            for (local, pad_multiple) in [(4, Some(1)), (3, Some(16)), (1, Some(7)), (4, None), (1, None)] {
                let case = ByExpertCase {
                    tokens: tokens.clone(),
                    choice,
                    pad_multiple,
                    ..ByExpertCase::new(world, local)
                };
                case.check(comm, &mut moe);
            }
        }
    }
}

pub fn by_expert_dtypes(comm: &Communicator) {
    let mut moe = moe(comm);
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        for pad_multiple in [Some(1), Some(8), None] {
            let case =
                ByExpertCase { dtype, pad_multiple, hidden: 24, ..ByExpertCase::new(comm.world_size(), 4) };
            case.check(comm, &mut moe);
            ByExpertCase { probs: false, ..case }.check(comm, &mut moe);
        }
    }
}

pub fn by_expert_capacities(comm: &Communicator) {
    let world = comm.world_size();
    let mut moe = moe(comm);
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
            let routes = ByExpertCase { capacity: Some(capacity), ..case.clone() }.check(comm, &mut moe);
            if let Some(overflows) = overflows.filter(|_| exact[comm.rank()] > 0) {
                assert_eq!(routes.overflow(), overflows);
            }
        }
    }
}

pub fn by_expert_scales_and_probs(comm: &Communicator) {
    let mut moe = Moe::new(comm, MoeConfig::default()).unwrap();
    for (scales, hidden) in [(DType::F32, 128), (DType::F32, 384), (DType::I32, 512), (DType::I32, 640)] {
        for (probs, pad_multiple) in [(true, Some(4)), (false, Some(4)), (true, None)] {
            let case = ByExpertCase::new(comm.world_size(), 4);
            let case =
                ByExpertCase { dtype: DType::U8, scales: Some(scales), hidden, probs, pad_multiple, ..case };
            let run = |case| Run { case, comm, rank: comm.rank(), received: ByExpertCase::received(case) };
            let routes = run(&case).notify(&mut moe).unwrap();
            // What is made of codes may be of another dtype and length.
            let made = ByExpertCase { dtype: DType::BF16, scales: None, hidden: 64, ..case.clone() };
            run(&case).dispatch(&mut moe, &routes);
            run(&made).combine(&mut moe, &routes);
        }
    }
}

pub fn by_expert_small_regions(comm: &Communicator) {
    let world = comm.world_size();
    let case = ByExpertCase { tokens: ragged(world, 1), ..ByExpertCase::new(world, 2) };
    let record = 16 + 16 * 2 + 5 * 2 * world; // of a dispatch; those of a combine are shorter
    for records in [2, 4, 10, 34] {
        let mut moe = Moe::new(
            comm,
            MoeConfig { region_bytes: records * record.next_multiple_of(16), ..MoeConfig::default() },
        )
        .unwrap();
        case.check(comm, &mut moe);
        ByExpertCase { pad_multiple: None, ..case.clone() }.check(comm, &mut moe);
        moe.close(comm).unwrap();
    }
}

/// ⟨dispatch x, y⟩ over all ranks is ⟨x, combine y⟩, with the probs: in small integers, exactly.
pub fn by_expert_is_adjoint(comm: &Communicator) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let mut moe = moe(comm);
    for pad_multiple in [Some(8), None] {
        let case = ByExpertCase {
            tokens: (0..world).map(|rank| 40 + rank).collect(),
            dtype: DType::F64,
            pad_multiple,
            ..ByExpertCase::new(world, 4)
        };
        let run = Run { case: &case, comm, rank, received: case.received() };
        let routes = run.notify(&mut moe).unwrap();
        let (tokens, rows, num_experts) = (case.tokens[rank], routes.rows(), case.num_experts);
        let whole = |what: &str, dtype: DType, shape: &[usize]| {
            let number = |index| (case.hash(what, [rank, index, 0]) >> 9) % 17;
            let bytes: Vec<u8> =
                (0..shape.iter().product()).flat_map(|i| element(dtype, number(i) as f64 - 8.0)).collect();
            Tensor::holding(dtype, shape, &bytes)
        };
        let (x, probs) =
            (whole("x", DType::F64, &[tokens, 16]), whole("probs", DType::F32, &[tokens, num_experts]));
        let (y, grads) =
            (whole("y", DType::F64, &[rows, 16]), whole("grads", DType::F32, &case.shape_of_probs(rows)));
        let (mut to_x, mut to_probs) =
            (Tensor::unwritten(DType::F64, &y.shape), Tensor::unwritten(DType::F32, &grads.shape));
        let (mut sums, mut back) =
            (Tensor::unwritten(DType::F64, &x.shape), Tensor::unwritten(DType::F32, &probs.shape));
        let call = ByExpertDispatch {
            tokens: ByExpertTokens { probs: Some(probs.view()), ..ByExpertTokens::of(x.view()) },
            received: ByExpertTokens {
                probs: Some(to_probs.view_mut()),
                ..ByExpertTokens::of(to_x.view_mut())
            },
        };
        moe.dispatch_by_expert(comm, &routes, call).unwrap();
        let call = ByExpertCombine {
            rows: y.view(),
            probs: Some(grads.view()),
            output: sums.view_mut(),
            output_probs: Some(back.view_mut()),
        };
        moe.combine_by_expert(comm, &routes, call).unwrap();
        let values = |tensor: &Tensor| -> Vec<f64> {
            tensor.content().chunks(tensor.dtype.size()).map(|cell| value(tensor.dtype, cell)).collect()
        };
        let dot = |a: &Tensor, b: &Tensor| values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum::<f64>();
        let [there, here] = [dot(&to_x, &y) + dot(&to_probs, &grads), dot(&x, &sums) + dot(&probs, &back)];
        let all = comm.exchange_objects(&format!("{there} {here}")).unwrap();
        let total = |part: usize| -> f64 {
            all.iter().map(|pair| pair.split(' ').nth(part).unwrap().parse::<f64>().unwrap()).sum()
        };
        assert_eq!(total(0), total(1));
        assert_ne!(total(0), 0.0);
    }
}

#[track_caller]
fn refused<T>(outcome: Result<T, MoeError>, text: &str) {
    assert_eq!(outcome.err().expect("it is refused").to_string(), text);
}

pub fn by_expert_refusals(comm: &Communicator) {
    let world = comm.world_size();
    let case = ByExpertCase::new(world, 2);
    let mut moe = moe(comm);
    let map = |dtype, shape: &[usize]| Tensor::unwritten(dtype, shape);
    let mut route = |map: &Tensor, order, hidden| {
        let format = RowFormat { hidden, ..case.format() };
        moe.notify_by_expert(comm, &ByExpertRouting { map: map.view(), order, format })
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

    let run = Run { case: &case, comm, rank: comm.rank(), received: case.received() };
    let routes = run.notify(&mut moe).unwrap();
    let rows = routes.rows();
    let combine = |moe: &mut Moe, rows: &Tensor, output: &mut Tensor| {
        moe.combine_by_expert(comm, &routes, ByExpertCombine::of(rows.view(), output.view_mut()))
    };
    let made = Tensor::unwritten(DType::BF16, &[rows, 16]);
    let mut sums = Tensor::unwritten(DType::BF16, &[17, 16]);
    refused(
        combine(&mut moe, &made, &mut sums),
        "combine_by_expert: the routes are ones along which nothing was dispatched yet",
    );
    let dispatch = |moe: &mut Moe, x: &Tensor, received: &mut Tensor| {
        let (tokens, received) = (ByExpertTokens::of(x.view()), ByExpertTokens::of(received.view_mut()));
        moe.dispatch_by_expert(comm, &routes, ByExpertDispatch { tokens, received })
    };
    let x = Tensor::unwritten(DType::BF16, &[17, 16]);
    refused(
        dispatch(
            &mut moe,
            &Tensor::unwritten(DType::BF16, &[18, 16]),
            &mut Tensor::unwritten(DType::BF16, &[rows, 16]),
        ),
        "dispatch_by_expert: the x must be of shape [T, H] = [17, 16], not [18, 16]",
    );
    refused(
        dispatch(&mut moe, &x, &mut Tensor::unwritten(DType::BF16, &[rows + 4, 16])),
        &format!(
            "dispatch_by_expert: the received x must be of shape [P, H] = [{rows}, 16], not [{}, 16]",
            rows + 4
        ),
    );
    let mut received = Tensor::unwritten(DType::BF16, &[rows, 16]);
    dispatch(&mut moe, &x, &mut received).unwrap();
    refused(
        combine(&mut moe, &Tensor::unwritten(DType::BF16, &[rows + 1, 16]), &mut sums),
        &format!(
            "combine_by_expert: the rows must be of shape [P, H] = [{rows}, 16], not [{}, 16]",
            rows + 1
        ),
    );
    refused(
        combine(&mut moe, &Tensor::unwritten(DType::U8, &[rows, 16]), &mut sums),
        "combine_by_expert: the rows must be f32 or f16 or bf16 or f64, not u8",
    );
    let mut other = Moe::new(comm, MoeConfig::default()).unwrap();
    refused(combine(&mut other, &made, &mut sums), "combine_by_expert: the routes are of another instance");
    // Nobody was kept waiting, and the routes are as good as before.
    combine(&mut moe, &made, &mut sums).unwrap();
}

/// The last rank's call differs from the others' in one thing; each needs a communicator of its own, which is of no use after.
pub fn by_expert_mismatches(comm: &Communicator) {
    let world = comm.world_size();
    let case = ByExpertCase::new(world, 8);
    let others = [
        (ByExpertCase { hidden: 24, ..case.clone() }, "rows of 24 × bf16"),
        (ByExpertCase { dtype: DType::F16, ..case.clone() }, "rows of 16 × f16"),
        (ByExpertCase { num_experts: 4 * world, ..case.clone() }, "experts"),
        (ByExpertCase { capacity: Some(vec![64; world]), ..case.clone() }, "capacity"),
    ];
    for (other, text) in others {
        let group = comm.split(Some(0), 0).unwrap().unwrap();
        let mut moe = Moe::new(&group, MoeConfig::default()).unwrap();
        let case = if group.rank() + 1 == world { &other } else { &case };
        let run = Run { case, comm: &group, rank: group.rank(), received: case.received() };
        let error = run.notify(&mut moe).unwrap_err();
        assert!(
            matches!(error, MoeError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. })),
            "{error}"
        );
        assert!(error.to_string().contains(text), "{error}");
    }
}
