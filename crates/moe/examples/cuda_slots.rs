//! Times dispatch to slots, and combine from them, between the GPUs of this machine: `cuda_slots [RANKS] [MAX_TOKENS] [EXPERTS]`, on rows of 7168,
//! of which each token chooses 8 experts. Per call in a graph, where a call comes behind one of its kind, and for the pair.

use std::error::Error as StdError;

use antiphon_device::cuda::{Context, DeviceMemory, Driver, Event, Graph, Stream};
use antiphon_fabric::{Communicator, LocalWorld};
use antiphon_moe::{
    CombineFormat, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat,
    slots::{
        SlotLimits,
        cuda::{CudaSlotRoutes, CudaSlots},
    },
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

type Error = Box<dyn StdError + Send + Sync>;

const HIDDEN: usize = 7168;
const TOP_K: usize = 8;
const REPLAYS: usize = 21;
/// Calls in a graph.
const CALLS: usize = 20;

fn main() -> Result<(), Error> {
    let driver = Driver::load()?;
    let argument = |n: usize| std::env::args().nth(n).and_then(|text| text.parse::<usize>().ok());
    let ranks = argument(1).unwrap_or(driver.device_count()? as usize);
    let most = SlotLimits {
        max_tokens: argument(2).unwrap_or(128),
        hidden: HIDDEN,
        num_experts: argument(3).unwrap_or(256),
        top_k: TOP_K,
    };
    println!("{ranks} GPUs, {most:?}, {:.1} MB of each", most.bytes(ranks) as f64 / 1e6);
    println!("µs, median of {REPLAYS} replays of {CALLS} calls, slowest rank");
    println!(
        "{:>6} {:>14} {:>14} {:>14} {:>14} {:>14}",
        "T", "dispatch fp8", "dispatch ue8m0", "dispatch bf16", "combine bf16", "fp8 + combine"
    );
    LocalWorld::run(ranks, |comm| rank_main(&comm, driver, most)).into_iter().collect()
}

/// A tensor on this rank's GPU.
struct Tensor {
    memory: DeviceMemory,
    dtype: DType,
    shape: Vec<usize>,
    device: Device,
}

impl Tensor {
    fn new(context: &Context, dtype: DType, shape: &[usize]) -> Result<Self, Error> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let memory = DeviceMemory::allocate(context, bytes.max(16))?;
        Ok(Self { memory, dtype, shape: shape.to_vec(), device: Device::Cuda(context.device().ordinal()) })
    }

    fn view(&self) -> TensorView<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: the memory was allocated for the elements of `shape`, and lives as long as the view.
        unsafe { TensorView::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }
            .expect("a tensor")
    }

    fn view_mut(&self) -> TensorViewMut<'_> {
        let at = self.memory.pointer().0 as usize as *mut u8;
        // SAFETY: as above; nothing but one call at a time, in one stream, writes it.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, &self.shape, None, self.device) }
            .expect("a tensor")
    }
}

/// The experts that tokens choose at random: different ones for each token.
fn choices(rank: usize, tokens: usize, experts: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64.wrapping_mul(rank as u64 + 1) | 1;
    let mut ids: Vec<i64> = Vec::with_capacity(tokens * TOP_K);
    for token in 0..tokens {
        while ids.len() < (token + 1) * TOP_K {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let id = (state >> 33) as i64 % experts as i64;
            if !ids[token * TOP_K..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids.iter().flat_map(|id| id.to_ne_bytes()).collect()
}

fn rank_main(comm: &Communicator, driver: &'static Driver, most: SlotLimits) -> Result<(), Error> {
    let context = Context::primary(driver.device(comm.rank() as u32 % driver.device_count()?)?)?;
    let stream = context.stream()?;
    let moe = CudaSlots::new(comm, &context, most)?;
    let (local, slots) = (most.num_experts / comm.world_size(), comm.world_size() * most.max_tokens);
    let new = |dtype, shape: &[usize]| Tensor::new(&context, dtype, shape);
    let to_x = new(DType::BF16, &[local, slots, HIDDEN])?;
    let codes = new(DType::U8, &[local, slots, HIDDEN])?;
    let scales = new(DType::F32, &[local, HIDDEN / 128, slots])?;
    let packed = new(DType::I32, &[local, HIDDEN / 512, slots])?;
    let (counts, sources) = (new(DType::I32, &[local])?, new(DType::I32, &[local, slots])?);
    let layout_range = new(DType::I64, &[local, comm.world_size()])?;
    for tokens in [1, 8, 32, 64, 128].into_iter().filter(|&tokens| tokens <= most.max_tokens) {
        let (x, output) = (new(DType::BF16, &[tokens, HIDDEN])?, new(DType::BF16, &[tokens, HIDDEN])?);
        let (ids, weights) = (new(DType::I64, &[tokens, TOP_K])?, new(DType::F32, &[tokens, TOP_K])?);
        ids.memory.write(&stream, 0, &choices(comm.rank(), tokens, most.num_experts))?;
        let dispatch = |format: SlotFormat| -> Result<CudaSlotRoutes, Error> {
            let (to_x, scales) = match format {
                SlotFormat::Bf16 => (&to_x, None),
                SlotFormat::Fp8Packed => (&codes, Some(packed.view_mut())),
                _ => (&codes, Some(scales.view_mut())),
            };
            let received = ReceivedSlots {
                x: to_x.view_mut(),
                scales,
                counts: counts.view_mut(),
                source_tokens: sources.view_mut(),
                layout_range: layout_range.view_mut(),
                statistics: None,
                waits: None,
            };
            let call = SlotDispatch {
                max_tokens: most.max_tokens,
                num_experts: most.num_experts,
                format,
                x: x.view(),
                ids: ids.view(),
                received,
            };
            // SAFETY: the tensors live until the stream has been waited for, here and below.
            Ok(unsafe { moe.dispatch(&call, stream.borrow()) }?)
        };
        let combine = |routes: &CudaSlotRoutes| -> Result<(), Error> {
            let call = SlotCombine {
                format: CombineFormat::Bf16,
                rows: to_x.view(),
                ids: ids.view(),
                weights: weights.view(),
                output: output.view_mut(),
                waits: None,
            };
            // SAFETY: as above.
            Ok(unsafe { moe.combine(routes, &call, stream.borrow()) }?)
        };
        let all = Calls { comm, context: &context, stream: &stream, moe: &moe };
        let routes = dispatch(SlotFormat::Bf16)?;
        let times = [
            all.measure(|| dispatch(SlotFormat::Fp8).map(Some))?,
            all.measure(|| dispatch(SlotFormat::Fp8Packed).map(Some))?,
            all.measure(|| dispatch(SlotFormat::Bf16).map(Some))?,
            all.measure(|| combine(&routes).map(|()| None))?,
            all.measure(|| {
                let routes = dispatch(SlotFormat::Fp8)?;
                combine(&routes)?;
                Ok(Some(routes))
            })?,
        ];
        if comm.rank() == 0 {
            let times: String = times.iter().map(|time| format!(" {time:>14.2}")).collect();
            println!("{tokens:>6}{times}");
        }
    }
    stream.borrow().synchronize()?;
    comm.barrier()?;
    Ok(())
}

/// Where calls are made.
struct Calls<'a> {
    comm: &'a Communicator,
    context: &'a Context,
    stream: &'a Stream,
    moe: &'a CudaSlots,
}

impl Calls<'_> {
    /// A graph of calls, behind one that lines the GPUs up. Routes live as long as the graph.
    fn measure(&self, call: impl Fn() -> Result<Option<CudaSlotRoutes>, Error>) -> Result<f64, Error> {
        let mut routes = vec![call()?]; // loads the kernels
        self.stream.borrow().synchronize()?;
        let graph = Graph::capture(self.stream, |_| {
            (0..CALLS).try_for_each(|_| call().map(|made| routes.push(made)))
        })?;
        let graph = graph.instantiate()?;
        let (begin, end) = (Event::with_time(self.context)?, Event::with_time(self.context)?);
        let mut times = Vec::new();
        for replay in 0..=REPLAYS {
            self.comm.barrier()?;
            routes.push(call()?);
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
