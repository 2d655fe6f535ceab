//! Times dispatch and combine between the GPUs of this machine: `cuda_moe [RANKS] [TOKENS] [SMS]...`, on rows of 7168 of bf16 and of
//! codes of FP8 with their scales, of 256 experts of which each token chooses 8. The floor is what crosses the links at 365 GB/s to
//! one peer (benches/results/h200-x4/2026-11-21-limits.txt), or at 352 to more. *Eager* is one call behind a flush of the L2 cache and an exchange that lines the GPUs
//! up; *graph* is a call of ten in a graph.

use std::{error::Error as StdError, time::Instant};

use antiphon_device::cuda::{Context, DeviceMemory, Driver, Event, Graph, Stream, memory};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_moe::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRouting, ByExpertTokens,
    Choices, Combine, Dispatch, MoeConfig, Routing, RowFormat, Tokens,
    cuda::{CudaByTokenRoutes, CudaMoe, RouteMemory},
    layout,
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

type Error = Box<dyn StdError + Send + Sync>;

const HIDDEN: usize = 7168;
const EXPERTS: usize = 256;
const TOP_K: usize = 8;
const REPLAYS: usize = 9;
/// Eager calls.
const ROUNDS: usize = 20;
/// More than the L2 cache holds.
const FLUSHED: usize = 256 << 20;
/// Calls in a graph.
const CALLS: usize = 10;

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse::<usize>().ok());
    let ranks = argument(1).unwrap_or(driver.device_count()? as usize);
    let tokens = argument(2).unwrap_or(4096);
    println!(
        "{ranks} GPUs, {tokens} tokens each; µs, medians of the slowest rank: {ROUNDS} eager calls, {REPLAYS} replays"
    );
    println!("{:>6} {:>24} {:>8} {:>6} {:>8} {:>8}", "SMs", "call", "wire MB", "floor", "eager", "graph");
    let mut sms: Vec<u32> = std::env::args().skip(3).filter_map(|text| text.parse().ok()).collect();
    if sms.is_empty() {
        sms = vec![24, 48];
    }
    LocalWorld::run(ranks, |comm| rank_main(&comm, driver, tokens, &sms)).into_iter().collect()
}

/// A tensor on this rank's GPU.
struct Tensor {
    memory: DeviceMemory,
    dtype: DType,
    shape: [usize; 2],
}

impl Tensor {
    fn new(context: &Context, dtype: DType, shape: [usize; 2]) -> Result<Self, Error> {
        let bytes = shape[0] * shape[1] * dtype.size();
        Ok(Self { memory: DeviceMemory::allocate(context, bytes.max(16))?, dtype, shape })
    }

    fn holding(
        stream: &Stream,
        context: &Context,
        dtype: DType,
        shape: [usize; 2],
        bytes: &[u8],
    ) -> Result<Self, Error> {
        let tensor = Self::new(context, dtype, shape)?;
        tensor.memory.write(stream, 0, bytes)?;
        Ok(tensor)
    }

    fn view(&self, device: Device) -> TensorView<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory was allocated for the elements of `shape`, and lives as long as the view.
        unsafe { TensorView::from_raw_parts(at, self.dtype, &self.shape, None, device) }.expect("a matrix")
    }

    fn view_mut(&self, device: Device) -> TensorViewMut<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: as above; nothing but one call at a time, in one stream, writes it.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, &self.shape, None, device) }.expect("a matrix")
    }
}

/// The experts that tokens choose at random: different ones for each token.
fn choices(rank: usize, tokens: usize) -> Vec<i64> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(rank as u64 + 1) | 1;
    let mut ids = Vec::with_capacity(tokens * TOP_K);
    for token in 0..tokens {
        while ids.len() < (token + 1) * TOP_K {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let id = (state >> 33) as i64 % EXPERTS as i64;
            if !ids[token * TOP_K..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

fn rank_main(
    comm: &Communicator,
    driver: &'static Driver,
    tokens: usize,
    all_sms: &[u32],
) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32 % driver.device_count()?)?)?;
    let stream = context.stream()?;
    let world_size = comm.world_size();
    let device = Device::Cuda(context.device().ordinal());
    let ids = choices(comm.rank(), tokens);
    let layout = layout(&TensorView::new(&ids, &[tokens, TOP_K])?, EXPERTS, world_size)?;
    let mut map = vec![0u8; tokens * EXPERTS];
    ids.iter().enumerate().for_each(|(place, &id)| map[place / TOP_K * EXPERTS + id as usize] = 1);
    let words = |counts: &[i32]| counts.iter().flat_map(|count| count.to_ne_bytes()).collect::<Vec<_>>();
    let id_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let ids = Tensor::holding(&stream, &context, DType::I64, [tokens, TOP_K], &id_bytes)?;
    let per_expert =
        Tensor::holding(&stream, &context, DType::I32, [1, EXPERTS], &words(&layout.tokens_per_expert))?;
    let in_rank =
        Tensor::holding(&stream, &context, DType::U8, [tokens, world_size], &layout.is_token_in_rank)?;
    let weights = Tensor::new(&context, DType::F32, [tokens, TOP_K])?;
    let map = Tensor::holding(&stream, &context, DType::U8, [tokens, EXPERTS], &map)?;
    let flushed = DeviceMemory::allocate(&context, FLUSHED)?;
    for &num_sms in all_sms {
        let moe = CudaMoe::new(comm, &context, MoeConfig { num_sms, ..MoeConfig::for_gpus() })?;
        let routing = Routing {
            num_experts: EXPERTS,
            top_k: TOP_K,
            is_token_in_rank: in_rank.view(device),
            tokens_per_expert: per_expert.view(device).reshape(&[EXPERTS])?,
            format: RowFormat { hidden: HIDDEN, dtype: DType::BF16, scales: None },
            capacity: None,
        };
        // SAFETY: the routing is not written, here and below.
        let routes = unsafe { moe.notify(&routing, RouteMemory::Own, stream.borrow()) }?;
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            // SAFETY: as above.
            drop(unsafe { moe.notify(&routing, RouteMemory::Own, stream.borrow()) }?);
        }
        let notify = start.elapsed().as_secs_f64() * 1e6 / CALLS as f64;
        let waits_for_nothing = Routing { capacity: Some(tokens * world_size), ..routing.clone() };
        let exchange = || {
            // SAFETY: as above.
            drop(unsafe { moe.notify(&waits_for_nothing, RouteMemory::Own, stream.borrow()) }?);
            Ok(())
        };
        let calls =
            Calls { comm, context: &context, stream: &stream, moe: &moe, routes: &routes, flushed: &flushed };
        let rows = routes.rows();
        let sent: usize = layout.tokens_per_rank.iter().map(|&count| count as usize).sum::<usize>()
            - layout.tokens_per_rank[comm.rank()] as usize;
        let bandwidth = if world_size == 2 { 365e9 } else { 352e9 };
        let print = |call: &str, bytes: usize, eager: f64, graph: f64| {
            if comm.rank() == 0 {
                let floor = bytes as f64 / bandwidth * 1e6;
                let megabytes = bytes as f64 / 1e6;
                println!("{num_sms:>6} {call:>24} {megabytes:>8.1} {floor:>6.0} {eager:>8.1} {graph:>8.1}");
            }
        };
        print("notify, with the host", 0, notify, 0.0);
        let time = |name: &str, bytes: usize, call: &dyn Fn() -> Result<(), Error>| -> Result<(), Error> {
            print(name, bytes, calls.eager(&exchange, call)?, calls.in_graph(call)?);
            Ok(())
        };
        time("notify", 0, &exchange)?;
        let layout_of = [
            Tensor::new(&context, DType::I32, [1, world_size])?,
            Tensor::new(&context, DType::I32, [1, EXPERTS])?,
            Tensor::new(&context, DType::U8, [tokens, world_size])?,
        ];
        time("layout", 0, &|| {
            let [per_rank, per_expert, in_rank] = &layout_of;
            let mut per_rank = per_rank.view_mut(device).reshape(&[world_size])?;
            let mut per_expert = per_expert.view_mut(device).reshape(&[EXPERTS])?;
            let outputs = [&mut per_rank, &mut per_expert, &mut in_rank.view_mut(device)];
            // SAFETY: the tensors live until the stream has been waited for.
            Ok(unsafe { moe.layout(&ids.view(device), outputs, stream.borrow()) }?)
        })?;

        let x = Tensor::new(&context, DType::BF16, [tokens, HIDDEN])?;
        let to = Tensor::new(&context, DType::BF16, [rows, HIDDEN])?;
        let (to_ids, to_weights) = (
            Tensor::new(&context, DType::I64, [rows, TOP_K])?,
            Tensor::new(&context, DType::F32, [rows, TOP_K])?,
        );
        let bytes = |row: usize| sent * row;
        let whole = || Dispatch {
            tokens: Tokens {
                x: x.view(device),
                scales: None,
                choices: Some(Choices { ids: ids.view(device), weights: weights.view(device) }),
            },
            received: Tokens {
                x: to.view_mut(device),
                scales: None,
                choices: Some(Choices { ids: to_ids.view_mut(device), weights: to_weights.view_mut(device) }),
            },
        };
        time("dispatch bf16, ids", bytes(HIDDEN * 2), &|| calls.dispatch(whole()))?;
        let rows_alone =
            || Dispatch { tokens: Tokens::of(x.view(device)), received: Tokens::of(to.view_mut(device)) };
        time("dispatch bf16", bytes(HIDDEN * 2), &|| calls.dispatch(rows_alone()))?;
        time("combine bf16", bytes(HIDDEN * 2), &|| {
            calls.combine(Combine::of(to.view(device), x.view_mut(device)))
        })?;
        time("combine bf16, weights", bytes(HIDDEN * 2), &|| {
            calls.combine(Combine {
                weights: Some(to_weights.view(device)),
                output_weights: Some(weights.view_mut(device)),
                ..Combine::of(to.view(device), x.view_mut(device))
            })
        })?;
        let (codes, to_codes) = (
            Tensor::new(&context, DType::U8, [tokens, HIDDEN])?,
            Tensor::new(&context, DType::U8, [rows, HIDDEN])?,
        );
        let scales = Tensor::new(&context, DType::F32, [tokens, HIDDEN / 128])?;
        let to_scales = Tensor::new(&context, DType::F32, [rows, HIDDEN / 128])?;
        time("dispatch fp8", bytes(HIDDEN + HIDDEN / 32), &|| {
            calls.dispatch(Dispatch {
                tokens: Tokens { x: codes.view(device), scales: Some(scales.view(device)), choices: None },
                received: Tokens {
                    x: to_codes.view_mut(device),
                    scales: Some(to_scales.view_mut(device)),
                    choices: None,
                },
            })
        })?;
        // By expert: a routing map, and rows ordered by expert.
        let order = |rows| ByExpertOrder::Experts {
            pad_multiple: 32,
            capacity: (rows > 0).then_some(ByExpertCapacity { rows, max_tokens: tokens }),
        };
        let format = RowFormat { hidden: HIDDEN, dtype: DType::BF16, scales: None };
        let routing = |rows| ByExpertRouting { map: map.view(device), order: order(rows), format };
        // SAFETY: the map is not written, here and below.
        let by_map = unsafe { moe.notify_by_expert(&routing(0), RouteMemory::Own, stream.borrow()) }?;
        let by_expert = Tensor::new(&context, DType::BF16, [by_map.rows(), HIDDEN])?;
        time("notify by expert", 0, &|| {
            let waits_for_nothing = routing(by_map.rows());
            // SAFETY: as above.
            drop(unsafe { moe.notify_by_expert(&waits_for_nothing, RouteMemory::Own, stream.borrow()) }?);
            Ok(())
        })?;
        time("dispatch by expert bf16", bytes(HIDDEN * 2), &|| {
            let (tokens, received) =
                (ByExpertTokens::of(x.view(device)), ByExpertTokens::of(by_expert.view_mut(device)));
            let call = ByExpertDispatch { tokens, received };
            // SAFETY: the tensors live until the stream has been waited for.
            Ok(unsafe { moe.dispatch_by_expert(&by_map, call, stream.borrow()) }?)
        })?;
        time("combine by expert bf16", bytes(HIDDEN * 2), &|| {
            let call = ByExpertCombine::of(by_expert.view(device), x.view_mut(device));
            // SAFETY: as above.
            Ok(unsafe { moe.combine_by_expert(&by_map, call, stream.borrow()) }?)
        })?;
        stream.borrow().synchronize()?;
        comm.barrier()?;
    }
    Ok(())
}

/// Where calls are made.
struct Calls<'a> {
    comm: &'a Communicator,
    context: &'a Context,
    stream: &'a Stream,
    moe: &'a CudaMoe,
    routes: &'a CudaByTokenRoutes,
    flushed: &'a DeviceMemory,
}

type Call<'c> = &'c dyn Fn() -> Result<(), Error>;

impl Calls<'_> {
    fn dispatch(&self, call: Dispatch<'_>) -> Result<(), Error> {
        // SAFETY: what the call names lives until the stream has been waited for.
        Ok(unsafe { self.moe.dispatch(self.routes, call, self.stream.borrow()) }?)
    }

    fn combine(&self, call: Combine<'_>) -> Result<(), Error> {
        // SAFETY: as above.
        Ok(unsafe { self.moe.combine(self.routes, call, self.stream.borrow()) }?)
    }

    /// The median of what the slowest rank measures.
    fn median(&self, rounds: usize, measure: impl Fn() -> Result<f64, Error>) -> Result<f64, Error> {
        let mut times = Vec::new();
        for round in 0..=rounds {
            self.comm.barrier()?;
            let slowest = self.comm.exchange_objects(&measure()?)?.into_iter().fold(0.0, f64::max);
            if round > 0 {
                times.push(slowest);
            }
        }
        self.moe.check()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    /// The µs of what `work` puts into the stream.
    fn between_events(&self, work: impl Fn() -> Result<(), Error>) -> Result<f64, Error> {
        let (begin, end) = (Event::with_time(self.context)?, Event::with_time(self.context)?);
        begin.record(self.stream)?;
        work()?;
        end.record(self.stream)?;
        self.stream.borrow().synchronize()?;
        Ok(end.elapsed_since(&begin)?.as_secs_f64() * 1e6)
    }

    /// One call, behind an exchange that lines the GPUs up.
    fn eager(&self, exchange: Call<'_>, call: Call<'_>) -> Result<f64, Error> {
        self.median(ROUNDS, || {
            // SAFETY: nobody else uses the memory.
            unsafe { memory::fill(self.stream.borrow(), self.flushed.pointer(), 0, FLUSHED) }?;
            exchange()?;
            self.between_events(call)
        })
    }

    /// One of the calls of a graph, behind one that lines the GPUs up.
    fn in_graph(&self, call: Call<'_>) -> Result<f64, Error> {
        call()?; // loads the kernels
        self.stream.borrow().synchronize()?;
        let graph = Graph::capture(self.stream, |_| (0..CALLS).try_for_each(|_| call()))?;
        let graph = graph.instantiate()?;
        self.median(REPLAYS, || {
            call()?;
            let time = self.between_events(|| {
                // SAFETY: what the calls name lives until the stream has been waited for.
                Ok(unsafe { graph.launch(self.stream) }?)
            })?;
            Ok(time / CALLS as f64)
        })
    }
}
