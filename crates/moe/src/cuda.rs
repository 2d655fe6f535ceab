//! Dispatch and combine between GPUs.
//!
//! [`CudaMoe`] is a tenant of the communicator's engine ([`antiphon_fabric::gpu`]), with memory and an order of calls of its own:
//! a dispatch may run beside an all-reduce of the same communicator on another stream. Kernels poll their own GPU's memory alone.
//!
//! *Notify*, one block, numbers this rank's tokens for each rank, and exchanges the counts; the host waits for them. *Dispatch*
//! pushes records (a token's row with what travels beside it) in order into the receiver's lane of this rank, so the receiver
//! knows of each where it belongs, and needs no flags: data is its own. *Combine* pushes rows back likewise, and the source sums
//! a token's when all of them are there. What does not fit a lane goes in pieces, through two channels in turn: a dispatch by
//! records of each pair of ranks, a combine by tokens.

use std::{cell::Cell, sync::Arc};

use antiphon_device::cuda::{Context, Event, LaunchConfig, PinnedMemory, StreamRef};
use antiphon_device::{DeviceError, cuda::CudaError};
use antiphon_fabric::{
    Communicator, FabricError, Operation, Signature,
    gpu::{Family, Grid, Kernel as _, Launch, OnFailure, Pieces, Tenant, UntilIdle, Work},
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::{
    Combine, Dispatch, Routing,
    error::{MoeError, Result, refused},
    handle::Traffic,
    layout::{
        MAX_LOCAL_EXPERTS, check_limits,
        cuda::{Counting, LayoutCall},
    },
    normal::cuda::{Moving, Notifying},
    pool::{Pool, Pooled},
    tensors::{ID_TYPES, Name},
};

/// The most threads of a block: one block for each multiprocessor.
pub(crate) const THREADS: u32 = 512;
/// Bytes that 31 vectors take in a lane.
const CHUNK_BYTES: usize = 512;

/// What a [`CudaMoe`] is made with; equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaMoeConfig {
    /// Bytes of each GPU's memory for rows under way.
    pub region_bytes: usize,
    /// How many multiprocessors a call uses, at most.
    pub num_sms: u32,
}

impl Default for CudaMoeConfig {
    fn default() -> Self {
        Self { region_bytes: 256 << 20, num_sms: 24 }
    }
}

/// Dispatch and combine between the GPUs of a communicator's ranks.
///
/// Calls go into streams, in one order, as those of a [`Tenant`]. Dropping it waits for the context's kernels, and communicates
/// nothing.
pub struct CudaMoe {
    tenant: Tenant,
    num_sms: u32,
    token: Arc<()>,
    handles: Cell<u32>,
    /// What Notify found.
    result: UntilIdle<PinnedMemory>,
    arrived: Event,
    pool: Arc<Pool>,
}

impl std::fmt::Debug for CudaMoe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMoe {{ num_sms: {}, {:?} }}", self.num_sms, self.tenant)
    }
}

/// What Notify leaves on the GPU, for the kernels along a handle.
pub(crate) struct Plan {
    memory: Pooled,
    world_size: usize,
    tokens: usize,
}

impl Plan {
    fn at(&self, words: usize) -> u64 {
        self.memory.pointer().0 + words as u64 * 4
    }

    /// `[R, R]`
    pub(crate) fn counts(&self) -> u64 {
        self.at(0)
    }

    /// `[R]`
    pub(crate) fn starts(&self) -> u64 {
        self.at(self.world_size * self.world_size)
    }

    /// `[T, R]`
    pub(crate) fn heads(&self) -> u64 {
        self.at(self.world_size * (self.world_size + 1))
    }

    /// `[R, T]`
    pub(crate) fn order(&self) -> u64 {
        self.at(self.world_size * (self.world_size + 1 + self.tokens))
    }

    /// Words in all.
    fn words(world_size: usize, tokens: usize) -> usize {
        world_size * (world_size + 1 + 2 * tokens)
    }
}

/// The routes of rows between GPUs, made by [`CudaMoe::notify`].
pub struct CudaHandle {
    owner: Arc<()>,
    pub(crate) number: u32,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) traffic: Traffic,
    tokens_per_expert: Vec<usize>,
    pub(crate) plan: Plan,
    sources: Pooled,
    has_rows: Cell<bool>,
}

impl std::fmt::Debug for CudaHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaHandle {{ number: {}, {:?} }}", self.number, self.traffic)
    }
}

impl CudaHandle {
    /// How many rows arrive.
    pub fn rows(&self) -> usize {
        self.traffic.kept_at(self.traffic.rank)
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.plan.tokens
    }

    /// How often all ranks' tokens chose each of this rank's experts: `[L]`.
    pub fn tokens_per_expert(&self) -> &[usize] {
        &self.tokens_per_expert
    }

    /// Where the token of each row stands.
    pub(crate) fn sources(&self) -> u64 {
        self.sources.pointer().0
    }
}

impl CudaMoe {
    /// Shares memory between the ranks' GPUs. All ranks call it together, each with the context of its GPU.
    ///
    /// # Errors
    /// As [`Tenant::new`]; [`MoeError::Refused`] for no multiprocessors, or more than there are.
    pub fn new(comm: &Communicator, context: &Context, config: CudaMoeConfig) -> Result<Self> {
        if config.num_sms == 0 {
            return Err(refused("CudaMoe::new", "0 multiprocessors; a call needs one for each peer".into()));
        }
        let tenant = Tenant::new(comm, context, config.region_bytes)?;
        if config.num_sms > tenant.multiprocessors() {
            let problem =
                format!("{} multiprocessors; kernels may use {}", config.num_sms, tenant.multiprocessors());
            return Err(refused("CudaMoe::new", problem));
        }
        tenant.load_together(comm, Counting)?;
        tenant.load_together(comm, Notifying)?;
        tenant.load_together(comm, Moving::new(comm.world_size()))?;
        let words = comm.world_size() * (2 + comm.world_size()) + MAX_LOCAL_EXPERTS;
        Ok(Self {
            tenant,
            num_sms: config.num_sms,
            token: Arc::new(()),
            handles: Cell::new(0),
            result: UntilIdle::new(context, PinnedMemory::allocate(context, words * 4).map_err(device)?),
            arrived: Event::new(context).map_err(device)?,
            pool: Pool::new(context),
        })
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.tenant.world_size()
    }

    /// Where tensors must be.
    pub fn device(&self) -> Device {
        Device::Cuda(self.tenant.context().device().ordinal())
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

    /// The layout of `ids`, i64 or i32 `[T, K]`: `tokens_per_rank`, i32 `[R]`; `tokens_per_expert`, i32 `[E]`; and
    /// `is_token_in_rank`, u8 `[T, R]`. No other rank has a part in it.
    ///
    /// # Errors
    /// As [`layout`](crate::layout()); [`FabricError::Device`].
    ///
    /// # Safety
    /// Nobody writes the ids, or uses the outputs, until the stream has passed this call.
    pub unsafe fn layout(
        &self,
        ids: &TensorView<'_>,
        outputs: [&mut TensorViewMut<'_>; 3],
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let name = |which| Name { call: "layout", which };
        let (tokens, top_k) = name("ids").matrix(ids, "[T, K]")?;
        let [per_rank, per_expert, in_rank] = outputs;
        let experts = per_expert.numel();
        check_limits("layout", experts, top_k, self.world_size())?;
        name("ids").has_dtype(ids.dtype(), &ID_TYPES)?;
        name("tokens_per_rank").has_shape(&per_rank.as_view(), &[self.world_size()], "[R]")?;
        name("is_token_in_rank").has_shape(&in_rank.as_view(), &[tokens, self.world_size()], "[T, R]")?;
        for (which, view, dtype) in [
            ("tokens_per_rank", per_rank.as_view(), DType::I32),
            ("tokens_per_expert", per_expert.as_view(), DType::I32),
            ("is_token_in_rank", in_rank.as_view(), DType::U8),
        ] {
            name(which).has_dtype(view.dtype(), &[dtype])?;
        }
        let call = LayoutCall {
            ids: name("ids").address(ids, self.device())?,
            per_rank: name("tokens_per_rank").address(&per_rank.as_view(), self.device())?,
            per_expert: name("tokens_per_expert").address(&per_expert.as_view(), self.device())?,
            in_rank: name("is_token_in_rank").address(&in_rank.as_view(), self.device())?,
            tokens: tokens as u32,
            top_k: top_k as u32,
            experts: experts as u32,
            id_bytes: ids.dtype().size() as u32,
        };
        let signature = Signature::new(Operation::Dispatch);
        // SAFETY: the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(Counting, &signature, Extent::whole(Blocks::All), call, stream) }
    }

    /// As [`Moe::notify`](crate::Moe::notify), with a routing on the GPU. It waits for the counts of all ranks, and so cannot be
    /// captured.
    ///
    /// # Errors
    /// As there; [`MoeError::Refused`] for a stream that is being captured.
    ///
    /// # Safety
    /// The routing is not written before this returns.
    pub unsafe fn notify(&self, routing: &Routing<'_>, stream: StreamRef<'_>) -> Result<CudaHandle> {
        if stream.is_capturing().map_err(device)? {
            let problem = "the blocking form waits for the counts, and cannot be captured: capture calls along its handle";
            return Err(refused("dispatch", problem.into()));
        }
        let plan = self.exchange_counts(routing, stream)?;
        self.arrived.record(stream).map_err(device)?;
        // The kernel ends by the communicator's deadline.
        while !self.arrived.is_passed().map_err(device)? {
            std::thread::yield_now();
        }
        self.check()?;
        let (rank, world_size) = (self.tenant.rank(), self.world_size());
        let result = self.result.host().as_ptr().cast::<u32>();
        // SAFETY: the kernel that wrote these words is over, and so many there are.
        let word = |index: usize| unsafe { result.add(index).read() as usize };
        let said = |from: usize, index: usize| word(from * (2 + world_size) + index);
        let traffic = Traffic {
            rank,
            world_size,
            tokens: (0..world_size).map(|from| said(from, 0)).collect(),
            capacity: (0..world_size).map(|from| Some(said(from, 1))).collect(),
            routed: (0..world_size)
                .flat_map(|from| (0..world_size).map(move |to| (from, to)))
                .map(|(from, to)| said(from, 2 + to))
                .collect(),
        };
        let local = routing.num_experts / world_size;
        let sources = self.pool.take(traffic.kept_at(rank) * 4).map_err(device)?;
        self.handles.set(self.handles.get().wrapping_add(1).max(1));
        Ok(CudaHandle {
            owner: self.token.clone(),
            number: self.handles.get(),
            num_experts: routing.num_experts,
            top_k: routing.top_k,
            tokens_per_expert: (0..local)
                .map(|expert| word(world_size * (2 + world_size) + expert))
                .collect(),
            plan,
            sources,
            traffic,
            has_rows: Cell::new(false),
        })
    }

    /// As [`Moe::dispatch`](crate::Moe::dispatch), in the order of the stream. It waits for nothing, and may be captured.
    ///
    /// # Errors
    /// As there; that a peer is lost or late comes with a later call, or [`check`](Self::check).
    ///
    /// # Safety
    /// Nobody writes what goes, or uses what comes, until the stream has passed this call; the handle lives as long.
    pub unsafe fn dispatch(
        &self,
        handle: &CudaHandle,
        call: Dispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.knows(handle, "dispatch")?;
        self.move_rows(handle, &call, stream)?;
        handle.has_rows.set(true);
        Ok(())
    }

    /// As [`Moe::combine`](crate::Moe::combine), of f32, f16 or bf16, in the order of the stream. It waits for nothing, and may be
    /// captured.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// As [`dispatch`](Self::dispatch).
    pub unsafe fn combine(
        &self,
        handle: &CudaHandle,
        call: Combine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.knows(handle, "combine")?;
        if !handle.has_rows.get() {
            return Err(MoeError::Handle {
                call: "combine",
                problem: "one along which nothing was dispatched yet",
            });
        }
        self.sum_rows(handle, &call, stream)
    }

    fn knows(&self, handle: &CudaHandle, call: &'static str) -> Result<()> {
        match Arc::ptr_eq(&handle.owner, &self.token) {
            true => Ok(()),
            false => Err(MoeError::Handle { call, problem: "of another instance" }),
        }
    }

    pub(crate) fn plan(&self, tokens: usize) -> Result<Plan> {
        let world_size = self.world_size();
        let memory = self.pool.take(Plan::words(world_size, tokens) * 4).map_err(device)?;
        Ok(Plan { memory, world_size, tokens })
    }

    pub(crate) fn result_pointer(&self) -> u64 {
        self.result.pointer().0
    }

    /// Launches the kernel of a family that has one, in pieces that fit a lane.
    ///
    /// # Safety
    /// As [`Tenant::run`], but for the stream.
    pub(crate) unsafe fn launch<F: Family<Arguments: Copy>>(
        &self,
        family: F,
        signature: &Signature,
        extent: Extent,
        arguments: F::Arguments,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let loaded = self.tenant.ready(family, stream)?;
        let Extent { records, chunks, blocks } = extent;
        let (needed, lane) = (chunks * CHUNK_BYTES, self.tenant.lane_bytes());
        if needed > lane {
            let problem =
                format!("a row takes {needed} bytes, a lane of the region has {lane} (raise region_bytes)");
            return Err(refused(signature.operation.name(), problem));
        }
        let peers = self.world_size() as u32 - 1;
        let available = self.num_sms.min(self.tenant.multiprocessors_here());
        let pieces = Pieces { total: records.max(1), most: lane / needed, unit: 1 };
        let launch = |start: usize, len: usize, channels: usize| {
            let blocks = match blocks {
                Blocks::One => 1,
                Blocks::All => available.max(1),
                Blocks::ForEachPeer => (available / channels as u32 / peers).max(1) * peers,
            };
            Launch {
                kernel: F::Kernel::ALL[0],
                grid: Grid::Exact { config: LaunchConfig::new(blocks, family.threads()), is_small: false },
                work: Work { count: len, root: start, ..Work::new(*signature) },
                arguments,
            }
        };
        // SAFETY: passed on; a grid has at most a block for each multiprocessor, of which two run at once.
        Ok(unsafe { self.tenant.run(&loaded, pieces, stream, launch) }?)
    }
}

/// How much a call moves, and by how many blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    /// Records between a pair of ranks, at most.
    pub(crate) records: usize,
    /// Chunks of 31 vectors of each.
    pub(crate) chunks: usize,
    pub(crate) blocks: Blocks,
}

impl Extent {
    /// Of a call that is one piece, however large.
    pub(crate) fn whole(blocks: Blocks) -> Self {
        Self { records: 1, chunks: 1, blocks }
    }
}

/// How many blocks a grid has, of as many as the call may use multiprocessors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks {
    One,
    All,
    /// The same number for each peer.
    ForEachPeer,
}

fn device(error: CudaError) -> FabricError {
    DeviceError::from(error).into()
}
