//! Dispatch and combine by expert between GPUs.
//!
//! Two kernels list each token's choices; Notify exchanges the counts; another kernel computes where the rows of each expert begin. A
//! dispatch or a combine is one kernel, over the region and the flags of the form by token.

use std::{ops::Range, sync::Arc};

use antiphon_device::{
    cuda::StreamRef,
    sync::{AtomicU32, Ordering},
};
use antiphon_fabric::{Operation, Signature};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use super::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRouting, COMBINE, DISPATCH,
    RouteSizes, Segments, Sizes, check_combine, check_dispatch, check_routing,
    family::{
        ByExpertMoving, ByExpertRowsCall, ByExpertSumming, ByExpertSumsCall, Experts, ListCall, ListKernel,
        Listing, PlaceCall, Placing,
    },
    of_combine, of_dispatch, signature_of_routing, signature_of_rows, signature_of_sums,
};
use crate::{
    Movement, RowFormat,
    by_token::{
        cuda::SUMMED,
        family::{NotifyCall, Notifying, RegionCall, UNBOUNDED},
    },
    cuda::{Arrived, Blocks, CudaMoe, Memory, Plan, RouteMemory},
    error::{MoeError, Result, refused},
    tensors::{Name, VECTOR},
    words::{RouteWords, words},
};

/// The most tokens of a rank: those that `POSITION_BITS` of the kernels count.
const MAX_TOKENS: usize = (1 << 22) - 1;

/// A unit of list.cuh.
const UNIT: usize = 32;

words! {
    /// The words of routes on the GPU, 32-bit integers, by where they lie in the memory of the routes: first those that the form by
    /// token has too, then those of the form by expert.
    ///
    /// `R` ranks, `L` experts of each, `T` tokens of this rank.
    pub struct ByExpertWords(world_size, num_experts, tokens) from |w| w.by_token().total();
    /// `[1]`: 1 if rows were dropped because a capacity has no room for them, else 0.
    pub overflow: |_| 1,
    /// `[1]`: how many tokens arrive.
    pub num_received: |_| 1,
    /// `[1]`: how many rows by expert there would be without a capacity, with the padding.
    pub rows_needed: |_| 1,
    /// `[L]`: how many tokens each of this rank's experts gets, those that are dropped not included.
    pub tokens_per_expert: Self::local,
    /// `[L]`: how many rows each of this rank's experts has, with the padding.
    pub rows_per_expert: Self::local,
    first: |w| w.num_experts,
    chosen_by: |w| w.num_experts,
    own_most: |_| 1,
    most: |_| 1,
    per_expert: |w| w.num_experts,
    bits: |w| w.units() * w.num_experts,
    of_chunk: |w| w.units() * w.num_experts,
    number: |w| (w.tokens * w.world_size).div_ceil(2),
    in_rank: |w| (w.tokens * w.world_size).div_ceil(4),
    all: |w| w.tokens * w.num_experts,
}

impl ByExpertWords {
    /// The words of routes for `world_size` ranks, `num_experts` experts of all ranks, and `tokens` tokens of this rank.
    pub fn new(world_size: usize, num_experts: usize, tokens: usize) -> Self {
        Self { world_size, num_experts, tokens }
    }

    /// The words that routes by token have too.
    pub fn by_token(&self) -> RouteWords {
        RouteWords::new(self.world_size, self.num_experts, self.tokens)
    }

    fn local(&self) -> usize {
        self.num_experts / self.world_size.max(1)
    }

    fn units(&self) -> usize {
        self.tokens.div_ceil(UNIT).max(1)
    }
}

/// The routes of a dispatch by expert between GPUs, made by [`CudaMoe::notify_by_expert`].
pub struct CudaByExpertRoutes {
    owner: Arc<()>,
    route_sizes: RouteSizes,
    arrived: Option<Known>,
    plan: Plan,
    words: ByExpertWords,
    places: Memory,
    has_rows: AtomicU32,
}

/// The counts that the host knows when it has waited for them.
struct Known {
    num_received: usize,
    tokens_per_expert: Vec<usize>,
    rows_per_expert: Vec<usize>,
}

impl std::fmt::Debug for CudaByExpertRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaByExpertRoutes {{ {:?} }}", self.route_sizes)
    }
}

impl CudaByExpertRoutes {
    /// How many rows received tensors have: `P` by expert, `N` by token.
    pub fn rows(&self) -> usize {
        self.route_sizes.rows
    }

    /// `N`: how many tokens arrive. `None` with a capacity, where only the GPU knows.
    pub fn num_received(&self) -> Option<usize> {
        self.arrived.as_ref().map(|known| known.num_received)
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.route_sizes.sizes.tokens
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.route_sizes.sizes.num_experts
    }

    /// How many tokens each of this rank's experts gets: `[L]`. `None` with a capacity, where only the GPU knows:
    /// [`ByExpertWords::tokens_per_expert`].
    pub fn tokens_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|known| &*known.tokens_per_expert)
    }

    /// How many rows each of this rank's experts has, with the padding: `[L]`. `None` with a capacity.
    pub fn rows_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|known| &*known.rows_per_expert)
    }

    /// How many tokens the routes have room for, of those that may arrive: `N`, or with a capacity `R` times
    /// [`ByExpertCapacity::max_tokens`].
    pub fn places(&self) -> usize {
        places_of(&self.route_sizes, self.num_received())
    }

    /// Keeps the row of each received token for each expert in the caller's memory from now on: i32 `[N, L]`, where `N` is
    /// [`places`](Self::places), and −1 stands for no row.
    ///
    /// # Errors
    /// [`MoeError`] for a tensor of another dtype, shape or device.
    ///
    /// # Safety
    /// The memory is used for nothing else as long as the routes are used, or a graph that has calls along them.
    pub unsafe fn keep_places_in(&mut self, places: TensorViewMut<'_>, device: Device) -> Result<()> {
        let shape = [self.places(), self.route_sizes.sizes.local()];
        self.places = callers("places", &places.as_view(), &shape, "[N, L]", device)?;
        Ok(())
    }

    fn at(&self, words: impl Fn(&ByExpertWords) -> Range<usize>) -> u64 {
        self.plan.at(|_| words(&self.words))
    }
}

fn places_of(route_sizes: &RouteSizes, num_received: Option<usize>) -> usize {
    let bound = match route_sizes.order {
        ByExpertOrder::Experts { capacity: Some(capacity), .. } => {
            route_sizes.sizes.world_size * capacity.max_tokens
        }
        _ => 0,
    };
    num_received.unwrap_or(bound)
}

/// Memory of the caller for integers.
fn callers(
    which: &'static str,
    view: &TensorView<'_>,
    shape: &[usize],
    rule: &str,
    device: Device,
) -> Result<Memory> {
    of_dispatch(which).has_dtype(view.dtype(), &[DType::I32])?;
    of_dispatch(which).has_shape(view, shape, rule)?;
    Ok(Memory::Callers(of_dispatch(which).address(view, device)?))
}

/// Refuses numbers of tokens that kernels cannot count.
fn check_limits(sizes: &Sizes, order: ByExpertOrder) -> Result<()> {
    let Sizes { world_size, tokens, .. } = *sizes;
    let local = sizes.local();
    let most = match order {
        ByExpertOrder::Experts { capacity: Some(ByExpertCapacity { max_tokens, .. }), .. } => max_tokens,
        _ => tokens,
    };
    if most > MAX_TOKENS || world_size * most * local > i32::MAX as usize {
        let problem =
            format!("{most} tokens of each rank, for {local} experts of a rank, are more than kernels count");
        return Err(refused(DISPATCH, problem));
    }
    Ok(())
}

impl CudaMoe {
    /// As [`Moe::notify_by_expert`](crate::Moe::notify_by_expert), with a map on the GPU. [`RouteMemory::Callers`] has the words
    /// ([`ByExpertWords::total`]) and, instead of sources, the places (i32 `[N, L]`; see [`CudaByExpertRoutes::keep_places_in`]).
    ///
    /// Without a capacity it waits for the counts of all ranks, and so cannot be captured.
    ///
    /// # Errors
    /// As there; [`MoeError::Refused`] also for more tokens than kernels count; [`MoeError::Captured`] for a stream that is being
    /// captured, without a capacity.
    ///
    /// # Safety
    /// The map is not written until the stream has passed this call. Memory of [`RouteMemory::Callers`] is used for
    /// nothing else as long as the routes are used, or a graph that has calls along them.
    pub unsafe fn notify_by_expert(
        &self,
        routing: &ByExpertRouting<'_>,
        memory: RouteMemory<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaByExpertRoutes> {
        let sizes = check_routing(routing, self.world_size())?;
        check_limits(&sizes, routing.order)?;
        let capacity = match routing.order {
            ByExpertOrder::Experts { capacity, .. } => capacity,
            ByExpertOrder::Tokens => None,
        };
        if capacity.is_none() && stream.is_capturing()? {
            let problem = "without a capacity it waits for the counts, and cannot be captured: pass a capacity \
                           (num_permuted_tokens), or capture calls along routes";
            return Err(MoeError::Captured { call: DISPATCH, problem });
        }
        let words = ByExpertWords::new(self.world_size(), sizes.num_experts, sizes.tokens);
        let (memory, places) = match memory {
            RouteMemory::Own => (Memory::Pooled(self.pool.take(words.total() * 4)?), None),
            RouteMemory::Callers { words: callers_words, sources } => {
                let memory = callers(
                    "words of the routes",
                    &callers_words.as_view(),
                    &[words.total()],
                    "[W]",
                    self.device(),
                )?;
                (memory, sources)
            }
        };
        let route_sizes = RouteSizes {
            sizes,
            order: routing.order,
            rows: capacity.map_or(0, |capacity| capacity.rows),
            number: 0,
        };
        let mut routes = CudaByExpertRoutes {
            owner: self.token.clone(),
            route_sizes,
            arrived: None,
            plan: Plan { memory, words: words.by_token() },
            words,
            places: Memory::Callers(0),
            has_rows: AtomicU32::new(0),
        };
        // With a capacity the number of places is known. What may be refused comes before what peers wait for.
        if capacity.is_some() {
            routes.places = self.memory_of_places(&routes, &places)?;
        }
        self.exchange_choices(&routes, routing, capacity, stream)?;
        if capacity.is_none() {
            // The peers go on to the dispatch.
            let signature = signature_of_routing(routing, &sizes);
            self.or_fail(self.add_counts(&mut routes, &signature, stream).and_then(|()| {
                routes.places = self.memory_of_places(&routes, &places)?;
                Ok(())
            }))?;
        }
        routes.route_sizes.number = self.next_routes();
        Ok(routes)
    }

    /// Memory for the places of routes: the caller's if there is one, else memory of this instance.
    fn memory_of_places(
        &self,
        routes: &CudaByExpertRoutes,
        places: &Option<TensorViewMut<'_>>,
    ) -> Result<Memory> {
        let shape = [routes.places(), routes.route_sizes.sizes.local()];
        match places {
            Some(places) => callers("places", &places.as_view(), &shape, "[N, L]", self.device()),
            None => Ok(Memory::Pooled(self.pool.take(shape[0] * shape[1] * 4)?)),
        }
    }

    /// Waits for the counts of all ranks, and adds what follows from them.
    fn add_counts(
        &self,
        routes: &mut CudaByExpertRoutes,
        signature: &Signature,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let RouteSizes { sizes, order, .. } = routes.route_sizes;
        let Arrived { traffic, tokens_per_expert } =
            self.wait_for_counts(signature, sizes.local(), stream)?;
        let num_received = traffic.kept_at(traffic.rank);
        let segments = Segments::new(order, &tokens_per_expert, sizes.local());
        routes.route_sizes.rows = segments.as_ref().map_or(num_received, |segments| segments.rows);
        let rows_per_expert = segments.map_or_else(|| tokens_per_expert.clone(), |segments| segments.padded);
        routes.arrived = Some(Known { num_received, tokens_per_expert, rows_per_expert });
        Ok(())
    }

    /// Lists the choices, and exchanges their counts.
    fn exchange_choices(
        &self,
        routes: &CudaByExpertRoutes,
        routing: &ByExpertRouting<'_>,
        capacity: Option<ByExpertCapacity>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let RouteSizes { sizes, order, .. } = routes.route_sizes;
        let (tokens, local) = (sizes.tokens as u32, sizes.local() as u32);
        let at = |words: fn(&ByExpertWords) -> Range<usize>| routes.at(words);
        let blocks = self.blocks(Movement::DispatchByExpert, routing.map.num_bytes());
        let list = ListCall {
            map: of_dispatch("routing map").address(&routing.map, self.device())?,
            bits: at(ByExpertWords::bits),
            of_chunk: at(ByExpertWords::of_chunk),
            all: at(ByExpertWords::all),
            number: at(ByExpertWords::number),
            in_rank: at(ByExpertWords::in_rank),
            per_expert: at(ByExpertWords::per_expert),
            most: at(ByExpertWords::own_most),
            tokens,
            experts: sizes.num_experts as u32,
            chunk: Listing::chunk(routes.words.units(), blocks, sizes.local(), sizes.world_size) as u32,
        };
        let alone = Signature::new(Operation::DispatchByExpert);
        for kernel in [ListKernel::Count, ListKernel::List] {
            // SAFETY: the routes have room for what the kernel writes, and last; the caller answers for the map.
            unsafe { self.launch_kernel(Listing, kernel, &alone, Blocks::Of(blocks), list, stream) }?;
        }
        let call = NotifyCall {
            in_rank: at(ByExpertWords::in_rank),
            per_expert: at(ByExpertWords::per_expert),
            own_most: at(ByExpertWords::own_most),
            chosen_by: at(ByExpertWords::chosen_by),
            most: at(ByExpertWords::most),
            result: if capacity.is_none() { self.result_pointer() } else { 0 },
            number: self.result_number(),
            tokens,
            local,
            ..NotifyCall::leaving(&routes.plan)
        };
        let signature = signature_of_routing(routing, &sizes);
        // SAFETY: as above.
        unsafe { self.launch(Notifying, &signature, Blocks::One, call, stream) }?;
        let multiple = match order {
            ByExpertOrder::Experts { pad_multiple, .. } => pad_multiple as u32,
            ByExpertOrder::Tokens => 1,
        };
        let call = PlaceCall {
            chosen_by: at(ByExpertWords::chosen_by),
            counts: routes.plan.at(RouteWords::counts),
            first: at(ByExpertWords::first),
            kept: at(ByExpertWords::tokens_per_expert),
            padded: at(ByExpertWords::rows_per_expert),
            overflow: at(ByExpertWords::overflow),
            received: at(ByExpertWords::num_received),
            needed: at(ByExpertWords::rows_needed),
            local,
            multiple,
            limit: capacity.map_or(UNBOUNDED, |capacity| capacity.rows as u32),
        };
        // SAFETY: as above.
        unsafe { self.launch(Placing, &alone, Blocks::One, call, stream) }
    }

    /// As [`Moe::dispatch_by_expert`](crate::Moe::dispatch_by_expert), in the order of the stream. It waits for nothing, and may be
    /// captured.
    ///
    /// # Errors
    /// As there; that a peer is lost or late comes with a later call, or [`check`](Self::check).
    ///
    /// # Safety
    /// Until the stream has passed this call no other code writes the inputs or uses the outputs, and the routes live.
    pub unsafe fn dispatch_by_expert(
        &self,
        routes: &CudaByExpertRoutes,
        call: ByExpertDispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&routes.owner, DISPATCH)?;
        let route_sizes = &routes.route_sizes;
        let format = check_dispatch(&call, route_sizes)?;
        let ByExpertDispatch { tokens: from, received: to } = &call;
        let local = route_sizes.sizes.local();
        let scales = format.num_scales();
        let has_scale_rows = scales.is_multiple_of(4);
        let optional = |which, view: Option<&TensorView<'_>>, is_whole: bool| {
            view.map_or(Ok(0), |view| match is_whole {
                true => of_dispatch(which).vectors(view, self.device()),
                false => of_dispatch(which).address(view, self.device()),
            })
        };
        let (to_scales, to_probs) = (to.scales.as_ref(), to.probs.as_ref());
        let second = if has_scale_rows { scales * 4 } else { 0 };
        let words =
            if from.probs.is_some() { 2 } else { 1 } * local + if has_scale_rows { 0 } else { scales };
        let family = ByExpertMoving { staging: self.staging() };
        let tokens = route_sizes.sizes.tokens;
        let blocks = self.blocks(Movement::DispatchByExpert, tokens * format.row_bytes());
        let rows = ByExpertRowsCall {
            counts: routes.plan.at(RouteWords::counts),
            starts: routes.plan.at(RouteWords::starts),
            heads: routes.plan.at(RouteWords::send_head),
            most: routes.at(ByExpertWords::most),
            all: routes.at(ByExpertWords::all),
            number: routes.at(ByExpertWords::number),
            first: routes.at(ByExpertWords::first),
            kept: routes.at(ByExpertWords::tokens_per_expert),
            places: routes.places.address(),
            x: of_dispatch("x").vectors(&from.x, self.device())?,
            scales: optional("scales", from.scales.as_ref(), has_scale_rows)?,
            probs: optional("probs", from.probs.as_ref(), false)?,
            to_x: of_dispatch("received x").vectors(&to.x.as_view(), self.device())?,
            to_scales: optional(
                "received scales",
                to_scales.map(|view| view.as_view()).as_ref(),
                has_scale_rows,
            )?,
            to_probs: optional("received probs", to_probs.map(|view| view.as_view()).as_ref(), false)?,
            region: self.region_of_map(of_dispatch("x"), format.row_bytes() + second, words)?,
            tokens: tokens as u32,
            rows: route_sizes.rows as u32,
            row_bytes: format.row_bytes() as u32,
            scales_of_row: scales as u32,
            local: local as u32,
            senders: ByExpertMoving::senders(self.world_size(), blocks),
            is_by_token: route_sizes.is_by_token().into(),
        };
        let signature = signature_of_rows(&format, from.probs.is_some(), route_sizes);
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::Of(blocks), rows, stream) }?;
        routes.has_rows.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// As [`Moe::combine_by_expert`](crate::Moe::combine_by_expert), of f32, f16 or bf16, in the order of the stream. It waits for nothing,
    /// and may be captured.
    ///
    /// # Errors
    /// As [`dispatch_by_expert`](Self::dispatch_by_expert).
    ///
    /// # Safety
    /// As [`dispatch_by_expert`](Self::dispatch_by_expert).
    pub unsafe fn combine_by_expert(
        &self,
        routes: &CudaByExpertRoutes,
        call: ByExpertCombine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&routes.owner, COMBINE)?;
        if routes.has_rows.load(Ordering::Relaxed) == 0 {
            let problem = "ones along which nothing was dispatched yet";
            return Err(MoeError::Routes { call: COMBINE, problem });
        }
        let route_sizes = &routes.route_sizes;
        let format: RowFormat = check_combine(&call, route_sizes, &SUMMED)?;
        let experts = Experts::of(route_sizes.sizes.local());
        let Some(family) = ByExpertSumming::new(format.dtype, self.staging(), experts) else {
            let expected = "f32, f16 or bf16".into();
            return Err(MoeError::DType { call: COMBINE, which: "rows", actual: format.dtype, expected });
        };
        let local = route_sizes.sizes.local();
        let optional = |which, view: Option<&TensorView<'_>>| {
            view.map_or(Ok(0), |view| of_combine(which).address(view, self.device()))
        };
        let words = if call.probs.is_some() { local } else { 0 };
        let tokens = route_sizes.sizes.tokens;
        let blocks = self.blocks(Movement::CombineByExpert, tokens * format.row_bytes());
        let sums = ByExpertSumsCall {
            counts: routes.plan.at(RouteWords::counts),
            starts: routes.plan.at(RouteWords::starts),
            heads: routes.plan.at(RouteWords::send_head),
            most: routes.at(ByExpertWords::most),
            all: routes.at(ByExpertWords::all),
            number: routes.at(ByExpertWords::number),
            places: routes.places.address(),
            rows: of_combine("rows").vectors(&call.rows, self.device())?,
            probs: optional("probs", call.probs.as_ref())?,
            output: of_combine("output").vectors(&call.output.as_view(), self.device())?,
            to_probs: optional(
                "output probs",
                call.output_probs.as_ref().map(|view| view.as_view()).as_ref(),
            )?,
            region: self.region_of_map(of_combine("rows"), format.row_bytes(), words)?,
            tokens: tokens as u32,
            row_bytes: format.row_bytes() as u32,
            local: local as u32,
            is_by_token: route_sizes.is_by_token().into(),
        };
        let signature = signature_of_sums(&format, call.probs.is_some(), route_sizes);
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::Of(blocks), sums, stream) }
    }

    /// How the region serves records of `bytes` bytes with words beside them. Only the GPU knows the number of words of a record, which is
    /// at most `words`.
    fn region_of_map(&self, name: Name, bytes: usize, words: usize) -> Result<RegionCall> {
        self.region_of_records(name.call, bytes + words.div_ceil(4) * VECTOR)?; // there is room for the largest
        Ok(RegionCall { record_bytes: bytes as u32, ..self.region_of_records(name.call, bytes)? })
    }
}
