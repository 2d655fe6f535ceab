//! The low-latency form between GPUs: the kernels of `dispatch.cuh` and `combine.cuh`, and what launches them.

use std::{cell::Cell, sync::Arc};

use antiphon_device::{
    DeviceError,
    cuda::{Context, CudaError, KernelArgument, LaunchConfig, Program, StreamRef, relaxed},
};
use antiphon_fabric::{
    Communicator, FabricError, Signature,
    gpu::{
        FORMATS, Family, Grid, Kernel as _, Launch, OnFailure, Pieces, ROWS, Source, Tenant, Work, kernels,
    },
};
use antiphon_tensor::{Device, TensorView};

use super::{
    COMBINE, DISPATCH, LowLatencyCombine, LowLatencyDispatch, LowLatencyFormat, Sizes, check_combine,
    check_dispatch, combine_signature, dispatch_signature,
};
use crate::{
    error::{MoeError, Result, refused},
    layout::check_limits,
    pool::{Pool, Pooled},
    tensors::Name,
};

/// Words of marks that a block of `dispatch.cuh` has room for: one for each expert and 32 tokens of a rank.
const MAX_MARKS: usize = 6144;
/// Tokens for which half of the multiprocessors are enough.
const SMALL: u32 = 32;
/// Slots of a tenant's memory with their lanes: two channels of three slots, each of two lanes for a rank.
const LANES_OF_A_RANK: usize = 2 * 3 * 2;
/// What a tenant's memory holds besides lanes, rounded up.
const BESIDE_LANES: usize = 1 << 20;

/// The largest calls of a [`CudaLowLatency`]; equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LowLatency {
    /// The most tokens of a rank.
    pub max_tokens: usize,
    /// The most elements of a row.
    pub hidden: usize,
    /// The most experts.
    pub num_experts: usize,
    /// The most experts that a token chooses.
    pub top_k: usize,
}

impl LowLatency {
    /// Bytes of each GPU's memory that such calls take among so many ranks.
    pub fn bytes(&self, world_size: usize) -> usize {
        let sizes = Sizes {
            world_size,
            max_tokens: self.max_tokens,
            hidden: self.hidden,
            num_experts: self.num_experts,
            top_k: self.top_k,
            tokens: 0,
        };
        let dispatches =
            [LowLatencyFormat::Bf16, LowLatencyFormat::Fp8].map(|format| dispatch_lane(&sizes, format));
        let lane = dispatches.into_iter().fold(combine_lane(&sizes), usize::max).next_multiple_of(4096);
        (LANES_OF_A_RANK * world_size * lane + BESIDE_LANES).max(Tenant::LEAST_STAGING_BYTES)
    }
}

/// Bytes of a lane that a dispatch needs: for the choices, and in another lane for the rows.
fn dispatch_lane(sizes: &Sizes, format: LowLatencyFormat) -> usize {
    let choices = (4 + 2 * sizes.max_tokens * sizes.top_k).next_multiple_of(16);
    let chunks = match format {
        LowLatencyFormat::Bf16 => (sizes.hidden * 2).div_ceil(31 * 16) * 512,
        _ => sizes.hidden.div_ceil(512) * 528,
    };
    choices.max(sizes.max_tokens * chunks)
}

/// Bytes of a lane that a combine needs, which uses them all as one.
fn combine_lane(sizes: &Sizes) -> usize {
    (sizes.max_tokens * sizes.top_k * sizes.hidden * 2).div_ceil(2 * sizes.world_size)
}

kernels! {
    /// The kernel of `dispatch.cuh`.
    pub(crate) enum DispatchKernel {
        Dispatch = "low_latency_dispatch",
    }
}
kernels! {
    /// The kernel of `combine.cuh`.
    pub(crate) enum CombineKernel {
        Combine = "low_latency_combine",
    }
}

/// `low_latency_call` of choices.cuh.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct LowLatencyCall {
    x: u64,
    ids: u64,
    weights: u64,
    to_x: u64,
    to_scales: u64,
    counts: u64,
    source_tokens: u64,
    layout_range: u64,
    statistics: u64,
    held_tokens: u64,
    places: u64,
    tokens: u32,
    most_tokens: u32,
    hidden: u32,
    top_k: u32,
    id_bytes: u32,
    experts: u32,
}

// SAFETY: the layout of the kernel's struct: 64-bit words, then those of 32.
unsafe impl KernelArgument for LowLatencyCall {}

const CHOICES: Source = Source { name: "low_latency/choices.cuh", text: include_str!("choices.cuh") };

/// Tokens to the slots of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dispatching {
    format: LowLatencyFormat,
    threads: u32,
}

impl Dispatching {
    /// Of rows of a format, for so many ranks: with more of them a thread needs more registers.
    pub(crate) fn new(format: LowLatencyFormat, world_size: usize) -> Self {
        Self { format, threads: if world_size <= 4 { 512 } else { 384 } }
    }
}

impl Family for Dispatching {
    type Kernel = DispatchKernel;
    type Arguments = LowLatencyCall;
    const NAME: &'static str = "moe_low_latency_dispatch.cuh";
    const SOURCES: &'static [Source] = &[
        ROWS,
        FORMATS,
        CHOICES,
        Source { name: "low_latency/dispatch.cuh", text: include_str!("dispatch.cuh") },
    ];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program.define("FORMAT", self.format as u32)
    }

    fn threads(&self) -> u32 {
        self.threads
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}

/// Rows back, and their sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Combining;

impl Family for Combining {
    type Kernel = CombineKernel;
    type Arguments = LowLatencyCall;
    const NAME: &'static str = "moe_low_latency_combine.cuh";
    const SOURCES: &'static [Source] =
        &[CHOICES, Source { name: "low_latency/combine.cuh", text: include_str!("combine.cuh") }];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        program
    }

    fn threads(&self) -> u32 {
        320
    }

    fn most_blocks(&self, _world_size: usize) -> u32 {
        1
    }
}

/// A kernel of the low-latency form.
trait LowLatencyFamily: Family<Arguments = LowLatencyCall> {
    /// Whether it lets the kernel behind it start when it is certain to end, if it is small.
    const IS_RELEASED: bool;
}

impl LowLatencyFamily for Dispatching {
    const IS_RELEASED: bool = true;
}

impl LowLatencyFamily for Combining {
    const IS_RELEASED: bool = false;
}

/// Low-latency dispatch and combine between the GPUs of a communicator's ranks.
///
/// Calls go into streams, in one order, as those of a [`Tenant`]; they wait for nothing on the host, and may be captured. Dropping
/// it waits for the context's kernels, and communicates nothing.
pub struct CudaLowLatency {
    tenant: Tenant,
    token: Arc<()>,
    handles: Cell<u32>,
    pool: Arc<Pool>,
}

impl std::fmt::Debug for CudaLowLatency {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaLowLatency {{ {:?} }}", self.tenant)
    }
}

/// Where rows went, made by [`CudaLowLatency::dispatch`], for its combine. What is captured uses it as long as the graph lives.
pub struct CudaLowLatencyHandle {
    owner: Arc<()>,
    number: u32,
    sizes: Sizes,
    /// The tokens of each rank, `[R]`, and the places of all choices, `[R, M, K]`.
    memory: Pooled,
}

impl std::fmt::Debug for CudaLowLatencyHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaLowLatencyHandle {{ number: {}, {:?} }}", self.number, self.sizes)
    }
}

impl CudaLowLatencyHandle {
    /// How many tokens this rank dispatched.
    pub fn num_tokens(&self) -> usize {
        self.sizes.tokens
    }

    fn held_tokens(&self) -> u64 {
        self.memory.pointer().0
    }

    fn places(&self) -> u64 {
        self.held_tokens() + (self.sizes.world_size as u64 * 4).next_multiple_of(16)
    }

    fn bytes(sizes: &Sizes) -> usize {
        (sizes.world_size * 4).next_multiple_of(16) + sizes.slots() * sizes.top_k * 4
    }
}

impl CudaLowLatency {
    /// Shares memory between the ranks' GPUs, for calls of at most these sizes. All ranks call it together, each with the context
    /// of its GPU.
    ///
    /// # Errors
    /// As [`Tenant::new`]; [`MoeError::Refused`] for sizes that no call can have.
    pub fn new(comm: &Communicator, context: &Context, most: LowLatency) -> Result<Self> {
        const CALL: &str = "CudaLowLatency::new";
        let world_size = comm.world_size();
        check_limits(CALL, most.num_experts, most.top_k, world_size)?;
        if most.max_tokens == 0 || most.hidden == 0 || most.hidden.checked_mul(most.max_tokens * 64).is_none()
        {
            let problem = format!("{} tokens of {} elements", most.max_tokens, most.hidden);
            return Err(refused(CALL, problem));
        }
        let tenant = Tenant::new(comm, context, most.bytes(world_size))?;
        if world_size > 1 {
            for format in [LowLatencyFormat::Bf16, LowLatencyFormat::Fp8] {
                tenant.load_together(comm, Dispatching::new(format, world_size))?;
            }
            tenant.load_together(comm, Combining)?;
        }
        let pool = Pool::new(context);
        Ok(Self { tenant, token: Arc::new(()), handles: Cell::new(0), pool })
    }

    /// The context of this rank's GPU.
    pub fn context(&self) -> &Context {
        self.tenant.context()
    }

    /// The number of this rank's GPU.
    pub fn ordinal(&self) -> u32 {
        self.context().device().ordinal()
    }

    /// Where tensors must be.
    pub fn device(&self) -> Device {
        Device::Cuda(self.ordinal())
    }

    /// Whether all calls that are over have done what they should; see [`Tenant::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(&self) -> Result<()> {
        Ok(self.tenant.check()?)
    }

    /// What happens, from now on, when a kernel has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.tenant.on_failure(action);
    }

    /// As [`Moe::low_latency_dispatch`](crate::Moe::low_latency_dispatch), in the order of the stream.
    ///
    /// # Errors
    /// As there; [`MoeError::Refused`] for a call that exceeds what this was made for. That a peer is lost or late comes with a
    /// later call, or [`check`](Self::check).
    ///
    /// # Safety
    /// Nobody writes what goes, or uses what comes, until the stream has passed this call; the handle lives as long.
    pub unsafe fn dispatch(
        &self,
        call: &LowLatencyDispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaLowLatencyHandle> {
        let sizes = check_dispatch(call, self.tenant.world_size())?;
        self.check_room(&sizes, dispatch_lane(&sizes, call.format), DISPATCH)?;
        let marks = sizes.num_experts * sizes.max_tokens.div_ceil(32);
        if marks > MAX_MARKS {
            let problem = format!(
                "{} experts and max_tokens {}: at most {MAX_MARKS} × 32 of their product are served",
                sizes.num_experts, sizes.max_tokens
            );
            return Err(refused(DISPATCH, problem));
        }
        let name = |which| Name { call: DISPATCH, which };
        let address = |which, view: &TensorView<'_>| name(which).address(view, self.device());
        let received = &call.received;
        let optional = |which, view: Option<TensorView<'_>>| view.map_or(Ok(0), |view| address(which, &view));
        let scales = optional("received scales", received.scales.as_ref().map(|scales| scales.as_view()))?;
        let statistics = optional("statistics", received.statistics.as_ref().map(|counts| counts.as_view()))?;
        let mut arguments = LowLatencyCall {
            x: name("x").vectors(&call.x, self.device())?,
            ids: address("ids", &call.ids)?,
            to_x: name("received x").vectors(&received.x.as_view(), self.device())?,
            to_scales: scales,
            counts: address("counts", &received.counts.as_view())?,
            source_tokens: address("source tokens", &received.source_tokens.as_view())?,
            layout_range: address("layout range", &received.layout_range.as_view())?,
            statistics,
            id_bytes: call.ids.dtype().size() as u32,
            ..numbers(&sizes)
        };
        let bytes = CudaLowLatencyHandle::bytes(&sizes);
        let memory = relaxed(|| self.pool.take(bytes)).and_then(|taken| taken).map_err(device)?;
        self.handles.set(self.handles.get().wrapping_add(1).max(1));
        let owner = self.token.clone();
        let handle = CudaLowLatencyHandle { owner, number: self.handles.get(), sizes, memory };
        arguments.held_tokens = handle.held_tokens();
        arguments.places = handle.places();
        let signature = dispatch_signature(&sizes, call.format);
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe {
            self.launch(Dispatching::new(call.format, sizes.world_size), &signature, arguments, stream)
        }?;
        Ok(handle)
    }

    /// As [`Moe::low_latency_combine`](crate::Moe::low_latency_combine), in the order of the stream.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// As [`dispatch`](Self::dispatch).
    pub unsafe fn combine(
        &self,
        handle: &CudaLowLatencyHandle,
        call: &LowLatencyCombine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if !Arc::ptr_eq(&handle.owner, &self.token) {
            return Err(MoeError::Handle { call: COMBINE, problem: "of another instance" });
        }
        let sizes = &handle.sizes;
        check_combine(call, sizes)?;
        self.check_room(sizes, combine_lane(sizes), COMBINE)?;
        let name = |which| Name { call: COMBINE, which };
        let vectors = |which, view: &TensorView<'_>| name(which).vectors(view, self.device());
        let arguments = LowLatencyCall {
            x: vectors("rows", &call.rows)?,
            ids: name("ids").address(&call.ids, self.device())?,
            weights: name("weights").address(&call.weights, self.device())?,
            to_x: vectors("output", &call.output.as_view())?,
            held_tokens: handle.held_tokens(),
            places: handle.places(),
            id_bytes: call.ids.dtype().size() as u32,
            ..numbers(sizes)
        };
        let signature = combine_signature(sizes, handle.number);
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(Combining, &signature, arguments, stream) }
    }

    /// Refuses a call that needs longer lanes.
    fn check_room(&self, sizes: &Sizes, needed: usize, call: &'static str) -> Result<()> {
        let lane = self.tenant.lane_bytes();
        if needed <= lane {
            return Ok(());
        }
        let Sizes { max_tokens, hidden, num_experts, top_k, .. } = sizes;
        let problem = format!(
            "max_tokens {max_tokens}, rows of {hidden}, {num_experts} experts and top-{top_k} exceed what the instance was made \
             for: lanes of {needed} bytes, of which it has {lane}"
        );
        Err(refused(call, problem))
    }

    /// Launches the kernel of a family on all multiprocessors.
    ///
    /// # Safety
    /// The arguments are as the kernel takes them, until the stream has passed.
    unsafe fn launch<F: LowLatencyFamily>(
        &self,
        family: F,
        signature: &Signature,
        arguments: LowLatencyCall,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let loaded = self.tenant.ready(family, stream)?;
        let all = self.tenant.multiprocessors_here().max(1);
        let is_small = F::IS_RELEASED && arguments.tokens <= SMALL && all > 1;
        let config = LaunchConfig::new(if is_small { all / 2 } else { all }, family.threads());
        let launch = |_, _, _| Launch {
            kernel: F::Kernel::ALL[0],
            grid: Grid::Exact { config, is_small },
            work: Work::new(*signature),
            arguments,
        };
        let once = Pieces { total: 1, most: 1, unit: 1 };
        // SAFETY: passed on; a grid has a block for each multiprocessor, of which two run at once, and lanes have room.
        Ok(unsafe { self.tenant.run(&loaded, once, stream, launch) }?)
    }
}

/// The numbers of a call.
fn numbers(sizes: &Sizes) -> LowLatencyCall {
    LowLatencyCall {
        tokens: sizes.tokens as u32,
        most_tokens: sizes.max_tokens as u32,
        hidden: sizes.hidden as u32,
        top_k: sizes.top_k as u32,
        experts: sizes.num_experts as u32,
        ..LowLatencyCall::default()
    }
}

fn device(error: CudaError) -> FabricError {
    DeviceError::from(error).into()
}
