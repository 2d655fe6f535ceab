//! Times dispatch and combine between the GPUs of this machine: `cuda_moe [RANKS] [TOKENS]`, on rows of 7168 of bf16 and of codes
//! of FP8 with their scales, of 256 experts of which each token chooses 8. The floor is what crosses the links at 365 GB/s to one
//! peer, or 352 to more (docs/cuda.md).

use std::{error::Error as StdError, time::Instant};

use antiphon_device::cuda::{Context, DeviceMemory, Driver, Event, Graph, Stream};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_moe::{
    Choices, Combine, Dispatch, Routing, RowFormat, Tokens,
    cuda::{CudaHandle, CudaMoe, CudaMoeConfig},
    layout,
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

type Error = Box<dyn StdError + Send + Sync>;

const HIDDEN: usize = 7168;
const EXPERTS: usize = 256;
const TOP_K: usize = 8;
const REPLAYS: usize = 9;
/// Calls in a graph.
const CALLS: usize = 10;

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse::<usize>().ok());
    let ranks = argument(1).unwrap_or(driver.device_count()? as usize);
    let tokens = argument(2).unwrap_or(4096);
    println!(
        "{ranks} GPUs, {tokens} tokens each; µs, median of {REPLAYS} replays of {CALLS} calls, slowest rank"
    );
    println!("{:>6} {:>16} {:>10} {:>10} {:>8}", "SMs", "call", "wire MB", "floor", "µs");
    LocalWorld::run(ranks, |comm| rank_main(&comm, driver, tokens)).into_iter().collect()
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
        // SAFETY: the memory has so many elements, and lives as long as the view.
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

fn rank_main(comm: &Communicator, driver: &'static Driver, tokens: usize) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32)?)?;
    let stream = context.stream()?;
    let world_size = comm.world_size();
    let device = Device::Cuda(context.device().ordinal());
    let ids = choices(comm.rank(), tokens);
    let layout = layout(&TensorView::new(&ids, &[tokens, TOP_K])?, EXPERTS, world_size)?;
    let words = |counts: &[i32]| counts.iter().flat_map(|count| count.to_ne_bytes()).collect::<Vec<_>>();
    let id_bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let ids = Tensor::holding(&stream, &context, DType::I64, [tokens, TOP_K], &id_bytes)?;
    let per_expert =
        Tensor::holding(&stream, &context, DType::I32, [1, EXPERTS], &words(&layout.tokens_per_expert))?;
    let in_rank =
        Tensor::holding(&stream, &context, DType::U8, [tokens, world_size], &layout.is_token_in_rank)?;
    let weights = Tensor::new(&context, DType::F32, [tokens, TOP_K])?;
    for num_sms in [24, 48, 132] {
        let moe = CudaMoe::new(comm, &context, CudaMoeConfig { num_sms, ..CudaMoeConfig::default() })?;
        let routing = Routing {
            num_experts: EXPERTS,
            top_k: TOP_K,
            is_token_in_rank: in_rank.view(device),
            tokens_per_expert: per_expert.view(device).reshape(&[EXPERTS])?,
            format: RowFormat { hidden: HIDDEN, dtype: DType::BF16, scales: None },
            capacity: None,
        };
        // SAFETY: the routing is not written, here and below.
        let handle = unsafe { moe.notify(&routing, stream.borrow()) }?;
        comm.barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            // SAFETY: as above.
            drop(unsafe { moe.notify(&routing, stream.borrow()) }?);
        }
        let notify = start.elapsed().as_secs_f64() * 1e6 / CALLS as f64;
        let all = Calls { comm, context: &context, stream: &stream, device, moe: &moe, handle: &handle };
        let rows = handle.rows();
        let sent: usize = layout.tokens_per_rank.iter().map(|&count| count as usize).sum::<usize>()
            - layout.tokens_per_rank[comm.rank()] as usize;
        let bandwidth = if world_size == 2 { 365e9 } else { 352e9 };
        let print = |call: &str, bytes: usize, time: f64| {
            if comm.rank() == 0 {
                let floor = bytes as f64 / bandwidth * 1e6;
                println!("{num_sms:>6} {call:>16} {:>10.1} {floor:>10.0} {time:>8.1}", bytes as f64 / 1e6);
            }
        };
        print("notify, with host", 0, notify);

        let x = Tensor::new(&context, DType::BF16, [tokens, HIDDEN])?;
        let to = Tensor::new(&context, DType::BF16, [rows, HIDDEN])?;
        let (to_ids, to_weights) = (
            Tensor::new(&context, DType::I64, [rows, TOP_K])?,
            Tensor::new(&context, DType::F32, [rows, TOP_K])?,
        );
        let bf16 = sent * HIDDEN * 2;
        let time = all.time(|| Dispatch {
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
        })?;
        print("dispatch bf16", bf16, time);
        let time = all.time_combine(|| Combine::of(to.view(device), x.view_mut(device)))?;
        print("combine bf16", bf16, time);
        let (codes, to_codes) = (
            Tensor::new(&context, DType::U8, [tokens, HIDDEN])?,
            Tensor::new(&context, DType::U8, [rows, HIDDEN])?,
        );
        let scales = Tensor::new(&context, DType::F32, [tokens, HIDDEN / 128])?;
        let to_scales = Tensor::new(&context, DType::F32, [rows, HIDDEN / 128])?;
        let time = all.time(|| Dispatch {
            tokens: Tokens { x: codes.view(device), scales: Some(scales.view(device)), choices: None },
            received: Tokens {
                x: to_codes.view_mut(device),
                scales: Some(to_scales.view_mut(device)),
                choices: None,
            },
        })?;
        print("dispatch fp8", sent * (HIDDEN + HIDDEN / 32), time);
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
    device: Device,
    moe: &'a CudaMoe,
    handle: &'a CudaHandle,
}

impl Calls<'_> {
    fn time<'c>(&self, call: impl Fn() -> Dispatch<'c>) -> Result<f64, Error> {
        // SAFETY: what the call names lives until the stream has been waited for.
        self.measure(|| unsafe { Ok(self.moe.dispatch(self.handle, call(), self.stream.borrow())?) })
    }

    fn time_combine<'c>(&self, call: impl Fn() -> Combine<'c>) -> Result<f64, Error> {
        // SAFETY: as above.
        self.measure(|| unsafe { Ok(self.moe.combine(self.handle, call(), self.stream.borrow())?) })
    }

    /// A graph of calls, behind one that lines the GPUs up.
    fn measure(&self, call: impl Fn() -> Result<(), Error>) -> Result<f64, Error> {
        debug_assert!(!self.device.is_host());
        call()?; // loads the kernels
        self.stream.borrow().synchronize()?;
        let graph = Graph::capture(self.stream, |_| (0..CALLS).try_for_each(|_| call()))?;
        let graph = graph.instantiate()?;
        let (begin, end) = (Event::with_time(self.context)?, Event::with_time(self.context)?);
        let mut times = Vec::new();
        for replay in 0..=REPLAYS {
            self.comm.barrier()?;
            call()?;
            begin.record(self.stream)?;
            // SAFETY: what the calls name lives until the line after the next.
            unsafe { graph.launch(self.stream) }?;
            end.record(self.stream)?;
            self.stream.borrow().synchronize()?;
            let mine = end.elapsed_since(&begin)?.as_secs_f64() * 1e6 / CALLS as f64;
            let slowest = self.comm.exchange_objects(&mine)?.into_iter().fold(0.0, f64::max);
            if replay > 0 {
                times.push(slowest);
            }
        }
        self.moe.check()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
