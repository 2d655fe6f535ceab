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

use std::{cell::Cell, ops::Range, sync::Arc};

use antiphon_device::cuda::{Context, Event, LaunchConfig, PinnedMemory, StreamRef};
use antiphon_device::{
    DeviceError,
    cuda::CudaError,
    sync::{AtomicU32, Ordering},
};
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
    normal::{
        check_routing,
        cuda::{Moving, Notifying, Staging},
    },
    pool::{Pool, Pooled},
    tensors::{ID_TYPES, Name, VECTOR},
};

/// The threads of a block: one block for each multiprocessor.
pub(crate) const THREADS: u32 = 512;
/// Parts of the region: one for each slot.
const PARTS: usize = 3;

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
    region_bytes: usize,
    num_sms: Cell<u32>,
    pub(crate) token: Arc<()>,
    handles: Cell<u32>,
    /// What Notify found.
    result: UntilIdle<PinnedMemory>,
    arrived: Event,
    pub(crate) pool: Arc<Pool>,
}

impl std::fmt::Debug for CudaMoe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMoe {{ num_sms: {}, {:?} }}", self.num_sms.get(), self.tenant)
    }
}

/// Memory of a handle on the GPU.
pub(crate) enum Memory {
    /// Of the instance's own.
    Pooled(Pooled),
    /// Of the caller, who keeps it as long as the handle is used.
    Callers(u64),
}

impl Memory {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Pooled(memory) => memory.pointer().0,
            Self::Callers(address) => *address,
        }
    }
}

/// The words that Notify leaves on the GPU for the kernels along a handle, by where they lie in its memory.
///
/// All are 32-bit integers. `R` ranks, `L` experts of each, `T` tokens of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleWords {
    world_size: usize,
    local: usize,
    tokens: usize,
}

impl HandleWords {
    /// Those of a handle of so many ranks, experts of all of them, and tokens of this rank.
    pub fn new(world_size: usize, num_experts: usize, tokens: usize) -> Self {
        Self { world_size, local: num_experts / world_size.max(1), tokens }
    }

    /// `[R, R]`: how many rows go from rank to rank, as far as there is room.
    pub fn counts(&self) -> Range<usize> {
        0..self.world_size * self.world_size
    }

    /// `[R]`: where the rows of each rank begin at this rank.
    pub fn starts(&self) -> Range<usize> {
        self.behind(self.counts(), self.world_size)
    }

    /// `[R, R]`: how many tokens the ranks up to and with the row's route to the column's.
    pub fn rank_prefix_matrix(&self) -> Range<usize> {
        self.behind(self.starts(), self.world_size * self.world_size)
    }

    /// `[R]`: how many tokens this rank routes to each.
    pub fn routed_to_each(&self) -> Range<usize> {
        self.behind(self.rank_prefix_matrix(), self.world_size)
    }

    /// `[1]`: 1 if more rows are routed here than there is room for, else 0.
    pub fn overflow(&self) -> Range<usize> {
        self.behind(self.routed_to_each(), 1)
    }

    /// `[L]`: how often all ranks' tokens chose each of this rank's experts.
    pub fn tokens_per_expert(&self) -> Range<usize> {
        self.behind(self.overflow(), self.local)
    }

    /// `[T, R]`: the number of a token among those of this rank for a rank, or −1.
    pub fn send_head(&self) -> Range<usize> {
        self.behind(self.tokens_per_expert(), self.tokens * self.world_size)
    }

    /// `[R, T]`: the tokens for each rank, ascending.
    pub fn order(&self) -> Range<usize> {
        self.behind(self.send_head(), self.tokens * self.world_size)
    }

    /// How many words there are.
    pub fn total(&self) -> usize {
        self.order().end
    }

    fn behind(&self, other: Range<usize>, count: usize) -> Range<usize> {
        other.end..other.end + count
    }
}

/// Where those words are.
pub(crate) struct Plan {
    pub(crate) memory: Memory,
    pub(crate) words: HandleWords,
}

impl Plan {
    /// The address of some of them.
    pub(crate) fn at(&self, words: impl Fn(&HandleWords) -> Range<usize>) -> u64 {
        self.memory.address() + words(&self.words).start as u64 * 4
    }
}

/// The routes of rows between GPUs, made by [`CudaMoe::notify`].
pub struct CudaHandle {
    owner: Arc<()>,
    pub(crate) number: u32,
    pub(crate) num_experts: usize,
    pub(crate) top_k: usize,
    rows: usize,
    arrived: Option<Arrived>,
    pub(crate) plan: Plan,
    sources: Memory,
    has_rows: AtomicU32,
}

/// What the host knows when it has waited for the counts.
pub(crate) struct Arrived {
    pub(crate) traffic: Traffic,
    pub(crate) tokens_per_expert: Vec<usize>,
}

impl std::fmt::Debug for CudaHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaHandle {{ number: {}, rows: {}, {:?} }}", self.number, self.rows, self.plan.words)
    }
}

impl CudaHandle {
    /// How many rows the received tensors have: those that arrive, or the capacity.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many rows arrive. `None` with a capacity, where only the GPU knows.
    pub fn num_received(&self) -> Option<usize> {
        self.arrived.as_ref().map(|arrived| arrived.traffic.kept_at(arrived.traffic.rank))
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.plan.words.tokens
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// How many experts each token chooses.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// How often all ranks' tokens chose each of this rank's experts: `[L]`. `None` with a capacity, where only the GPU knows:
    /// [`HandleWords::tokens_per_expert`].
    pub fn tokens_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|arrived| &*arrived.tokens_per_expert)
    }

    /// From now on the token of each row stands in the caller's memory, i32 `[N]`.
    ///
    /// # Errors
    /// [`MoeError`] for a tensor of another dtype, shape or device.
    ///
    /// # Safety
    /// The memory is nobody else's as long as the handle is used, or a graph that has its calls.
    pub unsafe fn keep_sources_in(&mut self, sources: TensorViewMut<'_>, device: Device) -> Result<()> {
        let name = Name { call: "dispatch", which: "sources" };
        let view = sources.as_view();
        name.has_dtype(view.dtype(), &[DType::I32])?;
        name.has_shape(&view, &[self.rows], "[N]")?;
        self.sources = Memory::Callers(name.address(&view, device)?);
        Ok(())
    }

    /// Where the token of each row stands.
    pub(crate) fn sources(&self) -> u64 {
        self.sources.address()
    }
}

/// Where a handle keeps what it has on the GPU.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "it is made for one call, and not kept")]
pub enum HandleMemory<'a> {
    /// In memory of the instance, which goes back to it with the handle.
    Own,
    /// In the caller's, i32: the words, and the token of each row, `[N]`, if `N` is known (the capacity).
    /// What is known later comes by [`CudaHandle::keep_sources_in`].
    Callers {
        /// As many words as [`HandleWords::total`] says.
        words: TensorViewMut<'a>,
        /// `[N]`
        sources: Option<TensorViewMut<'a>>,
    },
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
        let tenant = Tenant::with_region(comm, context, Tenant::LEAST_STAGING_BYTES, config.region_bytes)?;
        if config.num_sms > tenant.multiprocessors() {
            let problem =
                format!("{} multiprocessors; kernels may use {}", config.num_sms, tenant.multiprocessors());
            return Err(refused("CudaMoe::new", problem));
        }
        tenant.load_together(comm, Counting)?;
        tenant.load_together(comm, Notifying)?;
        tenant.load_together(comm, Moving { staging: staging(&tenant) })?;
        let words = comm.world_size() * (3 + comm.world_size()) + MAX_LOCAL_EXPERTS;
        Ok(Self {
            tenant,
            region_bytes: config.region_bytes,
            num_sms: Cell::new(config.num_sms),
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
        unsafe { self.launch(Counting, &signature, Blocks::All, call, stream) }
    }

    /// The context of this rank's GPU.
    pub fn context(&self) -> &Context {
        self.tenant.context()
    }

    /// From now on a call uses so many multiprocessors, at most, of those that there are.
    pub fn set_num_sms(&self, num_sms: u32) {
        self.num_sms.set(num_sms.max(1));
    }

    /// As [`Moe::notify`](crate::Moe::notify), with a routing on the GPU.
    ///
    /// Without a capacity it waits for the counts of all ranks, and so cannot be captured. With one it waits for nothing, and may
    /// be: what is captured uses the handle's memory as long as the graph lives.
    ///
    /// # Errors
    /// As there; [`MoeError::Captured`] for a stream that is being captured, without a capacity.
    ///
    /// # Safety
    /// The routing is not written until the stream has passed this call. The caller's memory, if it is that, is nobody else's as
    /// long as the handle is used, or a graph that has its calls.
    pub unsafe fn notify(
        &self,
        routing: &Routing<'_>,
        memory: HandleMemory<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaHandle> {
        if routing.capacity.is_none() && stream.is_capturing().map_err(device)? {
            let problem = "without a capacity it waits for the counts, and cannot be captured: pass a capacity \
                           (num_worst_tokens), or capture calls along a handle";
            return Err(MoeError::Captured { call: "dispatch", problem });
        }
        let tokens = check_routing(routing, self.world_size())?;
        let (plan, sources) = self.memory(routing, tokens, memory)?;
        self.exchange_counts(routing, &plan, stream)?;
        let arrived = match routing.capacity {
            Some(_) => None,
            None => Some(self.wait_for_counts(plan.words.local, stream)?),
        };
        let rows = match (&arrived, routing.capacity) {
            (Some(Arrived { traffic, .. }), _) => traffic.kept_at(traffic.rank),
            (None, capacity) => capacity.unwrap_or(0),
        };
        let sources = match sources {
            Some(sources) => sources,
            None => Memory::Pooled(self.pool.take(rows * 4).map_err(device)?),
        };
        Ok(CudaHandle {
            owner: self.token.clone(),
            number: self.next_handle(),
            num_experts: routing.num_experts,
            top_k: routing.top_k,
            rows,
            arrived,
            plan,
            sources,
            has_rows: AtomicU32::new(0),
        })
    }

    /// The handle of a dispatch, of so many choices for each token, that left its words and sources in these tensors.
    ///
    /// # Errors
    /// [`MoeError`] for tensors of other dtypes, shapes or devices.
    ///
    /// # Safety
    /// Such a dispatch along a handle of this instance did, of so many experts, and nobody has written them since. They live as
    /// long as the handle is used, or a graph that has its calls.
    pub unsafe fn handle_of(
        &self,
        (words, sources): (&TensorView<'_>, &TensorView<'_>),
        [num_experts, tokens, top_k]: [usize; 3],
    ) -> Result<CudaHandle> {
        let name = |which| Name { call: "combine", which };
        let layout = HandleWords::new(self.world_size(), num_experts, tokens);
        let rows = sources.numel();
        for (which, view, count) in [("routes", words, layout.total()), ("sources", sources, rows)] {
            name(which).has_dtype(view.dtype(), &[DType::I32])?;
            name(which).has_shape(view, &[count], "[N]")?;
        }
        let plan =
            Plan { memory: Memory::Callers(name("routes").address(words, self.device())?), words: layout };
        Ok(CudaHandle {
            owner: self.token.clone(),
            number: 0,
            num_experts,
            top_k,
            rows,
            arrived: None,
            plan,
            sources: Memory::Callers(name("sources").address(sources, self.device())?),
            has_rows: AtomicU32::new(1),
        })
    }

    /// The memory of a handle: its words, and if they are there the sources.
    fn memory(
        &self,
        routing: &Routing<'_>,
        tokens: usize,
        memory: HandleMemory<'_>,
    ) -> Result<(Plan, Option<Memory>)> {
        let words = HandleWords::new(self.world_size(), routing.num_experts, tokens);
        let name = |which| Name { call: "dispatch", which };
        let callers = |which, view: &TensorView<'_>, count: usize| {
            name(which).has_dtype(view.dtype(), &[DType::I32])?;
            name(which).has_shape(view, &[count], "[N]")?;
            Ok::<_, MoeError>(Memory::Callers(name(which).address(view, self.device())?))
        };
        match memory {
            HandleMemory::Own => {
                let memory = Memory::Pooled(self.pool.take(words.total() * 4).map_err(device)?);
                Ok((Plan { memory, words }, None))
            }
            HandleMemory::Callers { words: callers_words, sources } => {
                let memory = callers("handle's words", &callers_words.as_view(), words.total())?;
                let sources = match (sources, routing.capacity) {
                    (Some(sources), Some(rows)) => Some(callers("sources", &sources.as_view(), rows)?),
                    _ => None,
                };
                Ok((Plan { memory, words }, sources))
            }
        }
    }

    /// Waits for what Notify found.
    pub(crate) fn wait_for_counts(&self, local: usize, stream: StreamRef<'_>) -> Result<Arrived> {
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
        let said = |from: usize, index: usize| word(from * (3 + world_size) + index);
        let traffic = Traffic {
            rank,
            world_size,
            tokens: (0..world_size).map(|from| said(from, 0)).collect(),
            capacity: vec![None; world_size],
            routed: (0..world_size)
                .flat_map(|from| (0..world_size).map(move |to| (from, to)))
                .map(|(from, to)| said(from, 3 + to))
                .collect(),
        };
        let chosen = (0..local).map(|expert| word(world_size * (3 + world_size) + expert));
        Ok(Arrived { tokens_per_expert: chosen.collect(), traffic })
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
        self.owns(&handle.owner, "dispatch")?;
        self.move_rows(handle, &call, stream)?;
        handle.has_rows.store(1, Ordering::Relaxed);
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
        self.owns(&handle.owner, "combine")?;
        if handle.has_rows.load(Ordering::Relaxed) == 0 {
            return Err(MoeError::Handle {
                call: "combine",
                problem: "one along which nothing was dispatched yet",
            });
        }
        self.sum_rows(handle, &call, stream)
    }

    /// The number of a new handle.
    pub(crate) fn next_handle(&self) -> u32 {
        self.handles.set(self.handles.get().wrapping_add(1).max(1));
        self.handles.get()
    }

    pub(crate) fn owns(&self, owner: &Arc<()>, call: &'static str) -> Result<()> {
        match Arc::ptr_eq(owner, &self.token) {
            true => Ok(()),
            false => Err(MoeError::Handle { call, problem: "of another instance" }),
        }
    }

    pub(crate) fn result_pointer(&self) -> u64 {
        self.result.pointer().0
    }

    /// How rows pass through a multiprocessor of this GPU.
    pub(crate) fn staging(&self) -> Staging {
        staging(&self.tenant)
    }

    /// Bytes of the region of each rank.
    pub(crate) fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    pub(crate) fn region_at(&self) -> u64 {
        self.tenant.region_at()
    }

    /// Bytes for the rows of a peer.
    pub(crate) fn region_lane_bytes(&self) -> usize {
        self.region_bytes() / PARTS / (self.world_size() - 1) / VECTOR * VECTOR
    }

    /// How many flags a lane of a slot has room for.
    pub(crate) fn flags(&self) -> usize {
        self.tenant.lane_bytes() / 4
    }

    /// Launches the kernel of a family that has one.
    ///
    /// # Safety
    /// As [`Tenant::run`], but for the stream.
    pub(crate) unsafe fn launch<F: Family<Arguments: Copy>>(
        &self,
        family: F,
        signature: &Signature,
        blocks: Blocks,
        arguments: F::Arguments,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.launch_kernel(family, F::Kernel::ALL[0], signature, blocks, arguments, stream) }
    }

    /// Launches one of a family's kernels.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(crate) unsafe fn launch_kernel<F: Family<Arguments: Copy>>(
        &self,
        family: F,
        kernel: F::Kernel,
        signature: &Signature,
        blocks: Blocks,
        arguments: F::Arguments,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let loaded = self.tenant.ready(family, stream)?;
        let blocks = match blocks {
            Blocks::One => 1,
            Blocks::All => self.num_sms.get().min(self.tenant.multiprocessors_here()).max(1),
        };
        let config = LaunchConfig::new(blocks, family.threads()).shared_bytes(family.shared_bytes());
        let launch = |_, _, _| Launch {
            kernel,
            grid: Grid::Exact { config, is_small: false },
            work: Work::new(*signature),
            arguments,
        };
        // SAFETY: passed on; a grid has at most a block for each multiprocessor, of which two run at once.
        Ok(unsafe { self.tenant.run(&loaded, Pieces { total: 1, most: 1, unit: 1 }, stream, launch) }?)
    }
}

/// How many blocks a grid has, of as many as the call may use multiprocessors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks {
    One,
    All,
}

/// Clusters came with bulk copies.
fn staging(tenant: &Tenant) -> Staging {
    if tenant.has_clusters() { Staging::Bulk } else { Staging::Registers }
}

/// What went wrong on the GPU, before there is an instance.
pub fn failed(error: CudaError) -> MoeError {
    device(error).into()
}

pub(crate) fn device(error: CudaError) -> FabricError {
    DeviceError::from(error).into()
}
