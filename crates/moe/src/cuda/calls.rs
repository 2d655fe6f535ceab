//! The layout, and the calls by token, between GPUs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_device::{
    cuda::StreamRef,
    sync::{AtomicU32, Ordering},
};
use antiphon_fabric::{FabricError, Operation, Signature};
use antiphon_tensor::{DType, TensorView, TensorViewMut};

use super::{
    Blocks, CudaMoe,
    routes::{Arrived, CudaByTokenRoutes, Memory, Plan, RouteMemory},
};
use crate::{
    Combine, Dispatch, Movement, Routing,
    by_token::{check_routing, signature_of_routing},
    error::{MoeError, Result, refused},
    layout::{
        check_limits,
        cuda::{Counting, Kernel, LayoutCall},
    },
    routes::Traffic,
    tensors::{ID_TYPES, Name},
    words::RouteWords,
};

/// How often a rank that waits for counts looks for an interrupt.
const INTERRUPT_LOOK: Duration = Duration::from_millis(10);

impl CudaMoe {
    /// The layout of `ids`, i64 or i32 `[T, K]`: `tokens_per_rank`, i32 `[R]`; `tokens_per_expert`, i32 `[E]`; and
    /// `is_token_in_rank`, u8 `[T, R]`. No other rank has a part in it.
    ///
    /// # Errors
    /// As [`layout`](crate::layout()); [`FabricError::Device`].
    ///
    /// # Safety
    /// No other code writes the ids, or uses the outputs, until the stream has passed this call.
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
        let blocks = self.blocks(Movement::Dispatch, usize::MAX); // the rows are not known yet
        // SAFETY: the tensors are as the kernel takes them; the caller answers for how long.
        unsafe {
            self.launch_kernel(Counting, Kernel::Clear, &signature, Blocks::One, call, stream)?;
            self.launch_kernel(Counting, Kernel::Layout, &signature, Blocks::Of(blocks), call, stream)
        }
    }

    /// As [`Moe::notify`](crate::Moe::notify), with a routing on the GPU.
    ///
    /// Without a capacity it waits for the counts of all ranks, and so cannot be captured. With one it waits for nothing, and may
    /// be: what is captured uses the routes' memory as long as the graph lives.
    ///
    /// # Errors
    /// As there; [`MoeError::Captured`] for a stream that is being captured, without a capacity.
    ///
    /// # Safety
    /// No other code writes the routing until the stream has passed this call. Memory of [`RouteMemory::Callers`] is used for nothing
    /// else as long as the routes are used, or a graph that has calls along them.
    pub unsafe fn notify(
        &self,
        routing: &Routing<'_>,
        memory: RouteMemory<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaByTokenRoutes> {
        if routing.capacity.is_none() && stream.is_capturing()? {
            let problem = "without a capacity it waits for the counts, and cannot be captured: pass a capacity \
                           (num_worst_tokens), or capture calls along routes";
            return Err(MoeError::Captured { call: "dispatch", problem });
        }
        let tokens = check_routing(routing, self.world_size())?;
        let (plan, sources) = self.memory(routing, tokens, memory)?;
        let sources = match (sources, routing.capacity) {
            (None, Some(rows)) => Some(Memory::Pooled(self.pool.take(rows * 4)?)),
            (sources, _) => sources,
        };
        self.exchange_counts(routing, &plan, stream)?;
        // The peers go on to the dispatch.
        self.or_fail(self.with_counts(routing, plan, sources, stream))
    }

    /// Makes the routes when the counts are exchanged.
    fn with_counts(
        &self,
        routing: &Routing<'_>,
        plan: Plan,
        sources: Option<Memory>,
        stream: StreamRef<'_>,
    ) -> Result<CudaByTokenRoutes> {
        let arrived = match routing.capacity {
            Some(_) => None,
            None => Some(self.wait_for_counts(&signature_of_routing(routing), plan.words.local(), stream)?),
        };
        let rows = match (&arrived, routing.capacity) {
            (Some(Arrived { traffic, .. }), _) => traffic.kept_at(traffic.rank),
            (None, capacity) => capacity.unwrap_or(0),
        };
        let sources = match sources {
            Some(sources) => sources,
            None => Memory::Pooled(self.pool.take(rows * 4)?),
        };
        Ok(CudaByTokenRoutes {
            owner: self.token.clone(),
            number: self.next_routes(),
            num_experts: routing.num_experts,
            top_k: routing.top_k,
            rows,
            arrived,
            plan,
            sources,
            has_rows: AtomicU32::new(0),
        })
    }

    /// The routes of a dispatch that left its words and sources in these tensors. Each token had `top_k` choices.
    ///
    /// # Errors
    /// [`MoeError`] for tensors of other dtypes, shapes or devices.
    ///
    /// # Safety
    /// A dispatch of this instance, with these numbers, has written them, and no other code has since. They live as long as the
    /// routes are used, or a graph that has calls along them.
    pub unsafe fn routes_of(
        &self,
        (words, sources): (&TensorView<'_>, &TensorView<'_>),
        [num_experts, tokens, top_k]: [usize; 3],
    ) -> Result<CudaByTokenRoutes> {
        let name = |which| Name { call: "combine", which };
        let layout = RouteWords::new(self.world_size(), num_experts, tokens);
        let rows = sources.numel();
        for (which, view, count) in [("routes", words, layout.total()), ("sources", sources, rows)] {
            name(which).has_dtype(view.dtype(), &[DType::I32])?;
            name(which).has_shape(view, &[count], "[N]")?;
        }
        let plan =
            Plan { memory: Memory::Callers(name("routes").address(words, self.device())?), words: layout };
        Ok(CudaByTokenRoutes {
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

    /// The memory of routes: that of the words, and, where the caller gave it, that of the sources.
    fn memory(
        &self,
        routing: &Routing<'_>,
        tokens: usize,
        memory: RouteMemory<'_>,
    ) -> Result<(Plan, Option<Memory>)> {
        let words = RouteWords::new(self.world_size(), routing.num_experts, tokens);
        let name = |which| Name { call: "dispatch", which };
        let callers = |which, view: &TensorView<'_>, count: usize| {
            name(which).has_dtype(view.dtype(), &[DType::I32])?;
            name(which).has_shape(view, &[count], "[N]")?;
            Ok::<_, MoeError>(Memory::Callers(name(which).address(view, self.device())?))
        };
        match memory {
            RouteMemory::Own => {
                let memory = Memory::Pooled(self.pool.take(words.total() * 4)?);
                Ok((Plan { memory, words }, None))
            }
            RouteMemory::Callers { words: callers_words, sources } => {
                let memory = callers("words of the routes", &callers_words.as_view(), words.total())?;
                let sources = match (sources, routing.capacity) {
                    (Some(sources), Some(rows)) => Some(callers("sources", &sources.as_view(), rows)?),
                    _ => None,
                };
                Ok((Plan { memory, words }, sources))
            }
        }
    }

    /// Waits for the counts of Notify, which has this signature.
    pub(crate) fn wait_for_counts(
        &self,
        signature: &Signature,
        local: usize,
        stream: StreamRef<'_>,
    ) -> Result<Arrived> {
        let number = self.result_number();
        self.waited.set(number);
        self.arrived.record(stream)?;
        let result = self.result.host().as_ptr().cast::<u32>();
        // SAFETY: an aligned word of memory that lasts, which only the kernel writes.
        let written = unsafe { &*result.cast::<AtomicU32>() };
        let mut next_look = Instant::now() + INTERRUPT_LOOK;
        // A kernel that gives up, by the communicator's deadline, writes nothing.
        for looks in 1u64.. {
            if written.load(Ordering::Acquire) == number || (looks % 64 == 0 && self.arrived.is_passed()?) {
                break;
            }
            // The clock is read at each look: where threads outnumber cores, one that yields is away for milliseconds.
            if Instant::now() >= next_look {
                self.tenant.check_interrupt(*signature)?;
                next_look = Instant::now() + INTERRUPT_LOOK;
            }
            std::thread::yield_now();
        }
        self.check()?;
        if written.load(Ordering::Acquire) != number {
            return Err(refused("dispatch", "the counts of the ranks did not come".into()));
        }
        let (rank, world_size) = (self.tenant.rank(), self.world_size());
        // SAFETY: the kernel wrote these words before its number, and `index` is below their count.
        let word = |index: usize| unsafe { result.add(1 + index).read() as usize };
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
    /// Until the stream has passed this call no other code writes the inputs or uses the outputs, and the routes live.
    pub unsafe fn dispatch(
        &self,
        routes: &CudaByTokenRoutes,
        call: Dispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&routes.owner, "dispatch")?;
        self.move_rows(routes, &call, stream)?;
        routes.has_rows.store(1, Ordering::Relaxed);
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
        routes: &CudaByTokenRoutes,
        call: Combine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&routes.owner, "combine")?;
        if routes.has_rows.load(Ordering::Relaxed) == 0 {
            return Err(MoeError::Routes {
                call: "combine",
                problem: "ones along which nothing was dispatched yet",
            });
        }
        self.sum_rows(routes, &call, stream)
    }

    /// The outcome of a step of a call on which the peers count, as they have heard from this rank: if it fails, so does the
    /// communicator, on all ranks.
    pub(crate) fn or_fail<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.or_else(|error| match error {
            // The communicator has failed, and the peers have heard of it.
            error if self.tenant.check().is_err() => Err(error),
            MoeError::Fabric(error) => Ok(self.tenant.fail(error)?),
            error => {
                let reported = self.tenant.fail::<T>(FabricError::invalid(error.to_string()));
                reported.map_err(|_| error)
            }
        })
    }

    /// Draws the number of new routes.
    pub(crate) fn next_routes(&self) -> u32 {
        self.last_routes.set(self.last_routes.get().wrapping_add(1).max(1));
        self.last_routes.get()
    }

    pub(crate) fn owns(&self, owner: &Arc<()>, call: &'static str) -> Result<()> {
        match Arc::ptr_eq(owner, &self.token) {
            true => Ok(()),
            false => Err(MoeError::Routes { call, problem: "of another instance" }),
        }
    }
}
