//! What only GPUs have: graphs, halves of calls, rings, other tenants; with the bits of the host. What every backend does is in
//! `tests/conformance/`. Ranks are threads, one for each GPU; without a GPU for every
//! rank a test is recorded as skipped. Threads cannot share a GPU here: a rank that loads a kernel or frees memory waits for all kernels
//! of the process, and a kernel of the other rank may wait for this rank. The Python tests have processes, which can.

mod by_expert;
#[allow(dead_code)] // the behaviours of all backends use all of it
#[path = "../cases/mod.rs"]
mod cases;
mod failures;
mod orders;
mod refused;
mod rings;
mod slots;

use std::{ops::Range, time::Duration};

use antiphon_device::cuda::{Context, DeviceMemory, Driver, Graph, Stream};
use antiphon_fabric::{Communicator, FabricError, LocalWorld, gpu::Tenant};
use antiphon_moe::{
    Choices, Combine, Dispatch, Layout, Moe, MoeConfig, MoeError, Routing, Tokens,
    by_token::reference,
    cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
    layout,
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::rotation::{Rotation, rotate};
use antiphon_testing::{UNWRITTEN, gpus, sized};
use cases::{
    by_token::{Case, Choice},
    hash,
    tensor::Array,
};

/// The seeds of what a graph is replayed with.
fn replays() -> Range<u64> {
    2..sized(1002, 6)
}

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A tensor on a rank's GPU.
struct OnGpu {
    memory: DeviceMemory,
    dtype: DType,
    shape: Vec<usize>,
    device: Device,
}

impl OnGpu {
    fn view(&self) -> TensorView<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory was allocated for the elements of `shape`, and lives as long as the view.
        unsafe { TensorView::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }.unwrap()
    }

    fn view_mut(&mut self) -> TensorViewMut<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: as above, exclusively.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }.unwrap()
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// What a rank of a test has.
struct Rank {
    comm: Communicator,
    context: Context,
    stream: Stream,
    host: Moe,
    moe: CudaMoe,
}

impl Rank {
    fn new(driver: &'static Driver, comm: Communicator, config: MoeConfig) -> Outcome<Self> {
        let context = Context::primary(driver.device(comm.rank() as u32)?)?;
        let moe = CudaMoe::new(&comm, &context, config)?;
        let (stream, host) = (context.stream()?, Moe::new(&comm, MoeConfig::default())?);
        Ok(Self { comm, context, stream, host, moe })
    }

    fn upload(&self, tensor: &Array) -> Outcome<OnGpu> {
        let gpu = self.unwritten(tensor.dtype, &tensor.shape)?;
        gpu.memory.write(&self.stream, 0, &tensor.content())?;
        Ok(gpu)
    }

    fn unwritten(&self, dtype: DType, shape: &[usize]) -> Outcome<OnGpu> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let memory = DeviceMemory::allocate(&self.context, bytes.max(16))?;
        memory.write(&self.stream, 0, &vec![UNWRITTEN; bytes])?;
        let device = Device::Cuda(self.context.device().ordinal());
        Ok(OnGpu { memory, dtype, shape: shape.to_vec(), device })
    }

    /// Makes a result wrong.
    fn spoil(&self, gpu: &OnGpu) -> Outcome {
        Ok(gpu.memory.write(&self.stream, 0, &vec![UNWRITTEN; gpu.bytes()])?)
    }

    /// Comes up to 2 ms later than the other ranks, or they do.
    fn is_late(&self, seed: u64) {
        std::thread::sleep(Duration::from_micros(hash(seed, "late", [self.comm.rank(), 0, 0]) % 2000));
    }

    fn download(&self, gpu: &OnGpu) -> Outcome<Vec<u8>> {
        let mut bytes = vec![0; gpu.bytes()];
        gpu.memory.read(&self.stream, 0, &mut bytes)?;
        self.moe.check()?;
        Ok(bytes)
    }
}

/// Runs `body` on `world_size` ranks with GPUs; skips the test where there are fewer.
fn on_gpus(world_size: usize, config: MoeConfig, body: impl Fn(&mut Rank) -> Outcome + Sync) {
    // The emulator compiles a kernel in seconds, one after the other. A rank may compile all of its own while its peer waits for the first.
    let deadline = sized(DEADLINE, Duration::from_secs(180));
    with_deadline(deadline, world_size, config, |rank| {
        body(rank)?;
        rank.stream.borrow().synchronize()?;
        Ok(rank.comm.barrier()?) // a rank that has left is lost for one that still checks its results
    });
}

/// After so long a rank that does not come is named.
const DEADLINE: Duration = Duration::from_secs(20);

/// As `on_gpus`, for a body after which a communicator may have failed.
fn that_may_fail(world_size: usize, config: MoeConfig, body: impl Fn(&mut Rank) -> Outcome + Sync) {
    with_deadline(DEADLINE, world_size, config, body);
}

fn with_deadline(
    deadline: Duration,
    world_size: usize,
    config: MoeConfig,
    body: impl Fn(&mut Rank) -> Outcome + Sync,
) {
    let Some(driver) = gpus(world_size) else { return };
    let outcomes = LocalWorld::run_with(world_size, deadline, |comm| -> Outcome {
        body(&mut Rank::new(driver, comm, config)?)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        outcome.unwrap_or_else(|error| panic!("rank {rank}: {error}"));
    }
}

/// A rank's x, ids and weights of a case.
fn inputs(case: &Case, rank: usize) -> [Array; 3] {
    case.arrays(&case.ranks()[rank])
}

/// What the host makes of a case: the layout; received x, ids, weights; sums, and sums of weights, of what came.
fn on_host(rank: &mut Rank, case: &Case) -> Outcome<(Layout, [Array; 3], [Array; 2])> {
    let [x, ids, weights] = inputs(case, rank.comm.rank());
    let world_size = rank.comm.world_size();
    let layout = layout(&ids.view(), case.num_experts, world_size)?;
    let capacity = case.capacity.as_ref().map(|rows| rows[rank.comm.rank()]);
    let routing = Routing { capacity, ..Routing::of(&layout, case.format()) };
    let routes = rank.host.notify(&rank.comm, &routing)?;
    let (rows, tokens) = (routes.rows(), routes.num_tokens());
    let mut to_x = Array::unwritten(case.dtype, &[rows, case.hidden]);
    let mut to_ids = Array::unwritten(DType::I64, &[rows, case.top_k]);
    let mut to_weights = Array::unwritten(DType::F32, &[rows, case.top_k]);
    let choices = Choices { ids: to_ids.view_mut(), weights: to_weights.view_mut() };
    let call = Dispatch {
        tokens: Tokens {
            x: x.view(),
            scales: None,
            choices: Some(Choices { ids: ids.view(), weights: weights.view() }),
        },
        received: Tokens { x: to_x.view_mut(), scales: None, choices: Some(choices) },
    };
    rank.host.dispatch(&rank.comm, &routes, call)?;
    let mut sums = Array::unwritten(case.dtype, &[tokens, case.hidden]);
    let mut weight_sums = Array::unwritten(DType::F32, &[tokens, case.top_k]);
    let call = Combine {
        rows: to_x.view(),
        weights: Some(to_weights.view()),
        biases: [(case.biases > 0).then(|| x.view()), (case.biases > 1).then(|| x.view())],
        output: sums.view_mut(),
        output_weights: Some(weight_sums.view_mut()),
    };
    rank.host.combine(&rank.comm, &routes, call)?;
    Ok((layout, [to_x, to_ids, to_weights], [sums, weight_sums]))
}

/// A case on a rank's GPU.
struct Calls {
    x: OnGpu,
    ids: OnGpu,
    weights: OnGpu,
    received: [OnGpu; 3],
    sums: [OnGpu; 2],
    routes: CudaByTokenRoutes,
    biases: usize,
}

impl Calls {
    fn new(rank: &Rank, case: &Case, layout: &Layout) -> Outcome<Self> {
        let [x, ids, weights] = inputs(case, rank.comm.rank());
        let [x, ids, weights] = [rank.upload(&x)?, rank.upload(&ids)?, rank.upload(&weights)?];
        let (world_size, tokens) = (rank.comm.world_size(), x.shape[0]);
        let mut per_rank = rank.unwritten(DType::I32, &[world_size])?;
        let mut per_expert = rank.unwritten(DType::I32, &[case.num_experts])?;
        let mut in_rank = rank.unwritten(DType::U8, &[tokens, world_size])?;
        let stream = rank.stream.borrow();
        // SAFETY: all memory lives until the stream has been waited for, here and below.
        unsafe {
            let outputs = [&mut per_rank.view_mut(), &mut per_expert.view_mut(), &mut in_rank.view_mut()];
            rank.moe.layout(&ids.view(), outputs, stream)?;
        }
        let words = |counts: &[i32]| counts.iter().flat_map(|count| count.to_ne_bytes()).collect::<Vec<_>>();
        assert_eq!(rank.download(&per_rank)?, words(&layout.tokens_per_rank), "{case:?}");
        assert_eq!(rank.download(&per_expert)?, words(&layout.tokens_per_expert), "{case:?}");
        assert_eq!(rank.download(&in_rank)?, layout.is_token_in_rank, "{case:?}");
        let routing = Routing {
            num_experts: case.num_experts,
            top_k: case.top_k,
            is_token_in_rank: in_rank.view(),
            tokens_per_expert: per_expert.view(),
            format: case.format(),
            capacity: case.capacity.as_ref().map(|rows| rows[rank.comm.rank()]),
        };
        // SAFETY: as above.
        let routes = unsafe { rank.moe.notify(&routing, RouteMemory::Own, stream) }?;
        let rows = routes.rows();
        let received = [
            rank.unwritten(case.dtype, &[rows, case.hidden])?,
            rank.unwritten(DType::I64, &[rows, case.top_k])?,
            rank.unwritten(DType::F32, &[rows, case.top_k])?,
        ];
        let sums = [
            rank.unwritten(case.dtype, &[tokens, case.hidden])?,
            rank.unwritten(DType::F32, &[tokens, case.top_k])?,
        ];
        Ok(Self { x, ids, weights, received, sums, routes, biases: case.biases })
    }

    fn run(&mut self, rank: &Rank) -> Outcome {
        self.dispatch(rank)?;
        self.combine(rank)
    }

    fn dispatch(&mut self, rank: &Rank) -> Outcome {
        let stream = rank.stream.borrow();
        let Self { x, ids, weights, received: [to_x, to_ids, to_weights], .. } = self;
        let from = Choices { ids: ids.view(), weights: weights.view() };
        let to = Choices { ids: to_ids.view_mut(), weights: to_weights.view_mut() };
        let call = Dispatch {
            tokens: Tokens { x: x.view(), scales: None, choices: Some(from) },
            received: Tokens { x: to_x.view_mut(), scales: None, choices: Some(to) },
        };
        // SAFETY: all memory lives until the stream has been waited for.
        Ok(unsafe { rank.moe.dispatch(&self.routes, call, stream) }?)
    }

    fn combine(&mut self, rank: &Rank) -> Outcome {
        let stream = rank.stream.borrow();
        let Self { x, received: [to_x, _, to_weights], sums: [sums, weight_sums], .. } = self;
        let call = Combine {
            rows: to_x.view(),
            weights: Some(to_weights.view()),
            biases: [(self.biases > 0).then(|| x.view()), (self.biases > 1).then(|| x.view())],
            output: sums.view_mut(),
            output_weights: Some(weight_sums.view_mut()),
        };
        // SAFETY: as above.
        Ok(unsafe { rank.moe.combine(&self.routes, call, stream) }?)
    }

    fn compare(&self, rank: &Rank, case: &Case, received: &[Array; 3], sums: &[Array; 2]) -> Outcome {
        let names = ["x", "ids", "weights", "sums", "sums of weights"];
        let got = self.received.iter().chain(&self.sums);
        for ((got, expected), name) in got.zip(received.iter().chain(sums)).zip(names) {
            assert_eq!(got.shape, expected.shape, "{name} of {case:?}");
            assert!(
                rank.download(got)? == expected.content(),
                "{name} of rank {} in {case:?}",
                rank.comm.rank()
            );
        }
        Ok(())
    }
}

fn check(rank: &mut Rank, case: &Case) -> Outcome {
    let (layout, received, sums) = on_host(rank, case)?;
    let mut calls = Calls::new(rank, case, &layout)?;
    for _ in 0..2 {
        calls.run(rank)?;
    }
    calls.compare(rank, case, &received, &sums)?;
    rank.comm.barrier()?; // memory is freed while no kernel runs
    Ok(())
}

fn every_case(world_size: usize, config: MoeConfig) {
    on_gpus(world_size, config, |rank| {
        let ragged = |shift: usize| (0..world_size).map(|rank| [0, 33, 1, 700][(rank + shift) % 4]).collect();
        for (choice, tokens) in [
            (Choice::Spread, vec![1; world_size]),
            (Choice::Spread, vec![128; world_size]),
            (Choice::Wild, ragged(0)),
            (Choice::Wild, ragged(1)),
            (Choice::AllTo(world_size - 1), ragged(2)),
            (Choice::Nobody, ragged(3)),
            (Choice::Spread, vec![0; world_size]),
        ] {
            let case = Case {
                choice,
                tokens,
                hidden: 520,
                special: true,
                ..Case::new(world_size, 4 * world_size, 3)
            };
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for biases in 0..3 {
                    check(rank, &Case { dtype, biases, ..case.clone() })?;
                }
            }
            let exact = reference::dispatch(&case.ranks(), case.num_experts, case.top_k);
            let around = [-1, 0, 1]
                .map(|more| exact.iter().map(|rows| rows.len().saturating_add_signed(more)).collect());
            let any = [0, 1, 40, 1000].map(|rows| (0..world_size).map(|rank| rows + rank).collect());
            for capacity in around.into_iter().chain(any) {
                check(rank, &Case { dtype: DType::BF16, capacity: Some(capacity), ..case.clone() })?;
            }
        }
        // As many experts as ranks, more choices than experts of a rank, the same one twice.
        for (local, top_k) in [(1, 1), (1, 5), (2, 32)] {
            check(rank, &Case { choice: Choice::Wild, ..Case::new(world_size, local * world_size, top_k) })?;
        }
        Ok(())
    });
}

/// Every record waits until the one before has been read.
#[test]
fn a_region_of_two_rows_has_the_hosts_bits_on_2_gpus() {
    let record = 14_336 + 7 * 4; // a row of bf16 with a token's number, and choices with their weights
    let region_bytes = 3 * 2 * (record as usize).next_multiple_of(128); // of each of three slots
    on_gpus(2, MoeConfig { region_bytes, ..MoeConfig::for_gpus() }, |rank| {
        let case = Case { tokens: vec![70, 40], dtype: DType::BF16, hidden: 7168, ..Case::new(2, 8, 3) };
        check(rank, &case)?;
        check(rank, &Case { choice: Choice::AllTo(1), capacity: Some(vec![0, 90]), ..case })
    });
    on_gpus(2, MoeConfig { region_bytes: region_bytes - 6 * 128, ..MoeConfig::for_gpus() }, |rank| {
        let case = Case { dtype: DType::BF16, hidden: 7168, ..Case::new(2, 8, 3) };
        let error = check(rank, &case).expect_err("it is too small").to_string();
        assert!(error.contains("region"), "{error}");
        Ok(())
    });
}

#[test]
fn any_number_of_multiprocessors_will_do_on_2_gpus() {
    for num_sms in [2, 5, 24, 132] {
        every_case(2, MoeConfig { num_sms, ..MoeConfig::for_gpus() });
    }
}

#[test]
fn any_number_of_multiprocessors_will_do_on_4_gpus() {
    every_case(4, MoeConfig::for_gpus());
}

/// Some tens of pieces, each of some tens of rows.
#[test]
fn pieces_have_the_hosts_bits_on_2_gpus() {
    let config = MoeConfig { region_bytes: 16 << 20, ..MoeConfig::for_gpus() };
    on_gpus(2, config, |rank| {
        for choice in [Choice::Spread, Choice::Wild, Choice::AllTo(0)] {
            for capacity in [None, Some(vec![2000, 1400])] {
                let case = Case { choice, capacity, tokens: vec![1500, 900], ..Case::new(2, 16, 4) };
                check(rank, &Case { dtype: DType::BF16, hidden: 7168, ..case })?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_graph_replays_dispatch_and_combine_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        let case = Case { dtype: DType::BF16, tokens: vec![300, 200], hidden: 1024, ..Case::new(2, 16, 4) };
        let (layout, received, sums) = on_host(rank, &case)?;
        let mut calls = Calls::new(rank, &case, &layout)?;
        calls.run(rank)?; // loads the kernels
        rank.stream.borrow().synchronize()?;
        let graph = Graph::capture(&rank.stream, |_| calls.run(rank))?;
        let graph = graph.instantiate()?;
        for _ in 0..200 {
            // SAFETY: the memory of the calls lives until the stream has been waited for.
            unsafe { graph.launch(&rank.stream) }?;
        }
        calls.compare(rank, &case, &received, &sums)?;
        drop(graph);
        rank.comm.barrier()?;
        Ok(())
    });
}

/// The capacity form waits for nothing: the layout and the exchange of counts are in the graph, too, and each replay has other
/// choices. The graph has all of it twice, on the same memory, so each kernel may begin before the one ahead has ended.
#[test]
fn a_graph_replays_the_capacity_form_with_other_choices_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        let case = |seed| Case {
            seed,
            dtype: DType::BF16,
            tokens: sized(vec![300, 200], vec![60, 40]),
            hidden: 1024,
            capacity: Some(sized(vec![250, 600], vec![50, 120])),
            ..Case::new(2, 16, 4)
        };
        let (layout, ..) = on_host(rank, &case(1))?;
        let mut calls = Calls::new(rank, &case(1), &layout)?;
        let mut outputs = [
            rank.unwritten(DType::I32, &[2])?,
            rank.unwritten(DType::I32, &[16])?,
            rank.unwritten(DType::U8, &[case(1).tokens[rank.comm.rank()], 2])?,
        ];
        calls.run(rank)?; // loads the kernels
        rank.stream.borrow().synchronize()?;
        let mut kept = Vec::new();
        let graph = Graph::capture(&rank.stream, |_| -> Outcome {
            for _ in 0..2 {
                let stream = rank.stream.borrow();
                let [per_rank, per_expert, in_rank] = &mut outputs;
                let views = [&mut per_rank.view_mut(), &mut per_expert.view_mut(), &mut in_rank.view_mut()];
                // SAFETY: all memory lives until the graph is gone, here and below.
                unsafe { rank.moe.layout(&calls.ids.view(), views, stream) }?;
                let routing = Routing {
                    num_experts: 16,
                    top_k: 4,
                    is_token_in_rank: in_rank.view(),
                    tokens_per_expert: per_expert.view(),
                    format: case(1).format(),
                    capacity: Some(calls.routes.rows()),
                };
                // SAFETY: as above.
                let routes = unsafe { rank.moe.notify(&routing, RouteMemory::Own, stream) }?;
                kept.push(std::mem::replace(&mut calls.routes, routes));
                calls.run(rank)?;
            }
            Ok(())
        })?;
        let graph = graph.instantiate()?;
        for seed in replays() {
            let (_, received, sums) = on_host(rank, &case(seed))?;
            let inputs = inputs(&case(seed), rank.comm.rank());
            for (gpu, tensor) in [&calls.x, &calls.ids, &calls.weights].into_iter().zip(&inputs) {
                gpu.memory.write(&rank.stream, 0, &tensor.content())?;
            }
            for (gpu, tensor) in calls.received.iter().zip(&received) {
                gpu.memory.write(&rank.stream, 0, &vec![UNWRITTEN; tensor.content().len()])?;
            }
            rank.is_late(seed);
            // SAFETY: as above.
            unsafe { graph.launch(&rank.stream) }?;
            calls.compare(rank, &case(seed), &received, &sums)?;
        }
        drop(graph);
        rank.comm.barrier()?;
        Ok(())
    });
}

/// Another tenant of the same communicator moves data on a stream of its own; one rank is late between the two, so both kernels
/// of the other rank wait at once.
#[test]
fn another_tenant_works_beside_on_2_gpus() {
    on_gpus(2, MoeConfig::for_gpus(), |rank| {
        let me = rank.comm.rank();
        let rotations = Tenant::new(&rank.comm, &rank.context, Tenant::LEAST_STAGING_BYTES)?;
        rotations.load_together(&rank.comm, Rotation)?;
        let beside = rank.context.stream()?;
        let case = Case { dtype: DType::BF16, tokens: vec![300, 200], hidden: 1024, ..Case::new(2, 16, 4) };
        let (layout, received, sums) = on_host(rank, &case)?;
        let mut calls = Calls::new(rank, &case, &layout)?;
        let bytes = 1 << 20;
        let of = |rank: usize| vec![rank as u8 + 1; bytes];
        let input = rank.upload(&Array::holding(DType::U8, &[bytes], &of(me)))?;
        let rotated = rank.unwritten(DType::U8, &[bytes])?;
        rank.comm.barrier()?;
        for round in 0..20 {
            let at = [input.memory.pointer(), rotated.memory.pointer()];
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { rotate(&rotations, at, bytes, beside.borrow()) }?;
            if round % 2 == me {
                std::thread::sleep(Duration::from_millis(3));
            }
            calls.run(rank)?;
        }
        beside.borrow().synchronize()?;
        calls.compare(rank, &case, &received, &sums)?;
        assert!(rank.download(&rotated)? == of(1 - me));
        rank.comm.barrier()?;
        Ok(())
    });
}

/// Calls of every form, one after the other, with other choices each time and with ranks that are late at random, beside another
/// tenant. `ANTIPHON_SOAK_CALLS` says how many.
#[test]
fn a_soak_of_every_form_on_2_gpus() {
    let rounds = std::env::var("ANTIPHON_SOAK_CALLS").map_or(60, |calls| calls.parse().expect("a number"));
    let config = MoeConfig { region_bytes: 16 << 20, ..MoeConfig::for_gpus() };
    on_gpus(2, config, |rank| {
        let me = rank.comm.rank();
        let rotations = Tenant::new(&rank.comm, &rank.context, Tenant::LEAST_STAGING_BYTES)?;
        rotations.load_together(&rank.comm, Rotation)?;
        let beside = rank.context.stream()?;
        let bytes = 1 << 18;
        let input = rank.upload(&Array::holding(DType::U8, &[bytes], &vec![me as u8 + 1; bytes]))?;
        let rotated = rank.unwritten(DType::U8, &[bytes])?;
        let mut random = 0x9E37_79B9u32;
        let mut next = |below: usize| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 8) as usize % below
        };
        for round in 0..rounds {
            let tokens = vec![next(700), next(700)];
            let capacity = (next(2) == 1).then(|| vec![next(900), next(900)]);
            let choice = [Choice::Spread, Choice::Wild, Choice::AllTo(next(2)), Choice::Nobody][next(4)];
            let hidden = [8, 512, 2048][next(3)];
            let case = Case {
                seed: round,
                tokens,
                capacity,
                choice,
                hidden,
                biases: next(3),
                dtype: [DType::BF16, DType::F16, DType::F32][next(3)],
                ..Case::new(2, 8, 1 + next(4))
            };
            rank.moe.set_num_sms([2, 24, 132][next(3)])?;
            let late = [next(3), next(3)][me];
            let (layout, received, sums) = on_host(rank, &case)?;
            std::thread::sleep(Duration::from_millis(late as u64));
            let at = [input.memory.pointer(), rotated.memory.pointer()];
            // SAFETY: the memory lives until the stream has been waited for.
            unsafe { rotate(&rotations, at, bytes, beside.borrow()) }?;
            let mut calls = Calls::new(rank, &case, &layout)?;
            for _ in 0..1 + next(3) {
                calls.run(rank)?;
            }
            calls.compare(rank, &case, &received, &sums)?;
            rank.comm.barrier()?;
        }
        beside.borrow().synchronize()?;
        assert!(rank.download(&rotated)? == vec![2 - me as u8; bytes]);
        Ok(())
    });
}

/// A rank that does not come is named when the deadline has passed; nothing waits for ever.
#[test]
fn a_rank_that_does_not_come_is_named_on_2_gpus() {
    let deadline = sized(DEADLINE, Duration::from_secs(60));
    with_deadline(deadline, 2, MoeConfig::for_gpus(), |rank| {
        let case = Case { dtype: DType::BF16, ..Case::new(2, 8, 2) };
        let (layout, ..) = on_host(rank, &case)?;
        let mut calls = Calls::new(rank, &case, &layout)?;
        // Loading a kernel could wait for the one that waits.
        calls.run(rank)?;
        rank.stream.borrow().synchronize()?;
        rank.comm.barrier()?;
        if rank.comm.rank() == 1 {
            // Until the other has given up.
            std::thread::sleep(deadline + Duration::from_secs(5));
            return Ok(());
        }
        calls.run(rank)?;
        rank.stream.borrow().synchronize()?;
        let error = rank.moe.check().expect_err("nobody came");
        let MoeError::Fabric(FabricError::Timeout { missing, .. }) = &error else { panic!("{error}") };
        assert_eq!(missing, &[1], "{error}");
        Ok(())
    });
}
