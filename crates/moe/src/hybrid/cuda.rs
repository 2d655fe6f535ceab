//! The hybrid form between GPUs.
//!
//! Two kernels list each token's choices; Notify exchanges the counts; another kernel computes where the rows of each expert begin. A
//! dispatch or a combine is one kernel, over the region and the flags of the normal form.

use std::{ops::Range, sync::Arc};

use antiphon_device::{
    cuda::StreamRef,
    sync::{AtomicU32, Ordering},
};
use antiphon_fabric::{Operation, Signature};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use super::{
    Along, COMBINE, DISPATCH, HybridCapacity, HybridCombine, HybridDispatch, HybridOrder, HybridRouting,
    Segments, Sizes, check_combine, check_dispatch, check_routing,
    family::{
        Experts, HybridMoving, HybridRowsCall, HybridSumming, HybridSumsCall, ListCall, ListKernel, Listing,
        PlaceCall, Placing,
    },
    of_combine, of_dispatch, signature_of_routing, signature_of_rows, signature_of_sums,
};
use crate::{
    RowFormat,
    cuda::{Arrived, Blocks, CudaMoe, HandleMemory, HandleWords, Memory, Plan},
    error::{MoeError, Result, refused},
    normal::cuda::{NotifyCall, Notifying, RegionCall, SUMMED, UNBOUNDED, Warps},
    tensors::{Name, VECTOR},
};

/// The most tokens of a rank: those that `POSITION_BITS` of the kernels count.
const MAX_TOKENS: usize = (1 << 22) - 1;

/// A unit of list.cuh.
const UNIT: usize = 32;

/// The words of a handle on the GPU, 32-bit integers, by where they lie in its memory: those of the normal form, and behind them
/// those of this one.
///
/// `R` ranks, `L` experts of each, `T` tokens of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridWords {
    normal: HandleWords,
    world_size: usize,
    num_experts: usize,
    tokens: usize,
}

impl HybridWords {
    /// The words of a handle for `world_size` ranks, `num_experts` experts of all ranks, and `tokens` tokens of this rank.
    pub fn new(world_size: usize, num_experts: usize, tokens: usize) -> Self {
        Self { normal: HandleWords::new(world_size, num_experts, tokens), world_size, num_experts, tokens }
    }

    /// Those of Notify.
    pub fn normal(&self) -> HandleWords {
        self.normal
    }

    fn local(&self) -> usize {
        self.num_experts / self.world_size.max(1)
    }

    /// `[1]`: 1 if rows were dropped because a capacity has no room for them, else 0.
    pub fn overflow(&self) -> Range<usize> {
        behind(0..self.normal.total(), 1)
    }

    /// `[1]`: how many tokens arrive.
    pub fn num_received(&self) -> Range<usize> {
        behind(self.overflow(), 1)
    }

    /// `[1]`: how many rows by expert there would be without a capacity, with the padding.
    pub fn rows_needed(&self) -> Range<usize> {
        behind(self.num_received(), 1)
    }

    /// `[L]`: how many tokens each of this rank's experts gets, those that are dropped not included.
    pub fn tokens_per_expert(&self) -> Range<usize> {
        behind(self.rows_needed(), self.local())
    }

    /// `[L]`: how many rows each of this rank's experts has, with the padding.
    pub fn rows_per_expert(&self) -> Range<usize> {
        behind(self.tokens_per_expert(), self.local())
    }

    fn first(&self) -> Range<usize> {
        behind(self.rows_per_expert(), self.num_experts)
    }

    fn chosen_by(&self) -> Range<usize> {
        behind(self.first(), self.num_experts)
    }

    fn own_most(&self) -> Range<usize> {
        behind(self.chosen_by(), 1)
    }

    fn most(&self) -> Range<usize> {
        behind(self.own_most(), 1)
    }

    fn per_expert(&self) -> Range<usize> {
        behind(self.most(), self.num_experts)
    }

    fn units(&self) -> usize {
        self.tokens.div_ceil(UNIT).max(1)
    }

    fn bits(&self) -> Range<usize> {
        behind(self.per_expert(), self.units() * self.num_experts)
    }

    fn of_chunk(&self) -> Range<usize> {
        behind(self.bits(), self.units() * self.num_experts)
    }

    fn number(&self) -> Range<usize> {
        behind(self.of_chunk(), (self.tokens * self.world_size).div_ceil(2))
    }

    fn in_rank(&self) -> Range<usize> {
        behind(self.number(), (self.tokens * self.world_size).div_ceil(4))
    }

    fn all(&self) -> Range<usize> {
        behind(self.in_rank(), self.tokens * self.num_experts)
    }

    /// How many words there are.
    pub fn total(&self) -> usize {
        self.all().end
    }
}

fn behind(other: Range<usize>, count: usize) -> Range<usize> {
    other.end..other.end + count
}

/// The routes of rows by a routing map between GPUs, made by [`CudaMoe::hybrid_notify`].
pub struct CudaHybridHandle {
    owner: Arc<()>,
    along: Along,
    arrived: Option<Known>,
    plan: Plan,
    words: HybridWords,
    places: Memory,
    has_rows: AtomicU32,
}

/// What the host knows when it has waited for the counts.
struct Known {
    num_received: usize,
    tokens_per_expert: Vec<usize>,
    rows_per_expert: Vec<usize>,
}

impl std::fmt::Debug for CudaHybridHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaHybridHandle {{ {:?} }}", self.along)
    }
}

impl CudaHybridHandle {
    /// How many rows received tensors have: `P` by expert, `N` by token.
    pub fn rows(&self) -> usize {
        self.along.rows
    }

    /// `N`: how many tokens arrive. `None` with a capacity, where only the GPU knows.
    pub fn num_received(&self) -> Option<usize> {
        self.arrived.as_ref().map(|known| known.num_received)
    }

    /// How many tokens this rank dispatches.
    pub fn num_tokens(&self) -> usize {
        self.along.sizes.tokens
    }

    /// How many experts there are.
    pub fn num_experts(&self) -> usize {
        self.along.sizes.num_experts
    }

    /// How many tokens each of this rank's experts gets: `[L]`. `None` with a capacity, where only the GPU knows:
    /// [`HybridWords::tokens_per_expert`].
    pub fn tokens_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|known| &*known.tokens_per_expert)
    }

    /// How many rows each of this rank's experts has, with the padding: `[L]`. `None` with a capacity.
    pub fn rows_per_expert(&self) -> Option<&[usize]> {
        self.arrived.as_ref().map(|known| &*known.rows_per_expert)
    }

    /// How many tokens the handle has room for, of those that may arrive: `N`, or with a capacity `R` times
    /// [`HybridCapacity::max_tokens`].
    pub fn places(&self) -> usize {
        places_of(&self.along, self.num_received())
    }

    /// Keeps the row of each received token for each expert in the caller's memory from now on: i32 `[N, L]`, where `N` is
    /// [`places`](Self::places), and −1 stands for no row.
    ///
    /// # Errors
    /// [`MoeError`] for a tensor of another dtype, shape or device.
    ///
    /// # Safety
    /// The memory is nobody else's as long as the handle is used, or a graph that has its calls.
    pub unsafe fn keep_places_in(&mut self, places: TensorViewMut<'_>, device: Device) -> Result<()> {
        let shape = [self.places(), self.along.sizes.local()];
        self.places = callers("places", &places.as_view(), &shape, "[N, L]", device)?;
        Ok(())
    }

    fn at(&self, words: impl Fn(&HybridWords) -> Range<usize>) -> u64 {
        self.plan.at(|_| words(&self.words))
    }
}

fn places_of(along: &Along, num_received: Option<usize>) -> usize {
    let bound = match along.order {
        HybridOrder::Experts { capacity: Some(capacity), .. } => along.sizes.world_size * capacity.max_tokens,
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

/// Refuses what kernels cannot count.
fn check_limits(sizes: &Sizes, order: HybridOrder) -> Result<()> {
    let Sizes { world_size, tokens, .. } = *sizes;
    let local = sizes.local();
    let most = match order {
        HybridOrder::Experts { capacity: Some(HybridCapacity { max_tokens, .. }), .. } => max_tokens,
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
    /// As [`Moe::hybrid_notify`](crate::Moe::hybrid_notify), with a map on the GPU. In the caller's memory, if it is that, are the
    /// words ([`HybridWords::total`]) and, instead of sources, the places (i32 `[N, L]`; see
    /// [`CudaHybridHandle::keep_places_in`]).
    ///
    /// Without a capacity it waits for the counts of all ranks, and so cannot be captured.
    ///
    /// # Errors
    /// As there; [`MoeError::Refused`] also for more tokens than kernels count; [`MoeError::Captured`] for a stream that is being
    /// captured, without a capacity.
    ///
    /// # Safety
    /// The map is not written until the stream has passed this call. The caller's memory, if it is that, is nobody else's as long as
    /// the handle is used, or a graph that has its calls.
    pub unsafe fn hybrid_notify(
        &self,
        routing: &HybridRouting<'_>,
        memory: HandleMemory<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaHybridHandle> {
        let sizes = check_routing(routing, self.world_size())?;
        check_limits(&sizes, routing.order)?;
        let capacity = match routing.order {
            HybridOrder::Experts { capacity, .. } => capacity,
            HybridOrder::Tokens => None,
        };
        if capacity.is_none() && stream.is_capturing()? {
            let problem = "without a capacity it waits for the counts, and cannot be captured: pass a capacity \
                           (num_permuted_tokens), or capture calls along a handle";
            return Err(MoeError::Captured { call: DISPATCH, problem });
        }
        let words = HybridWords::new(self.world_size(), sizes.num_experts, sizes.tokens);
        let (memory, places) = match memory {
            HandleMemory::Own => (Memory::Pooled(self.pool.take(words.total() * 4)?), None),
            HandleMemory::Callers { words: callers_words, sources } => {
                let memory = callers(
                    "handle's words",
                    &callers_words.as_view(),
                    &[words.total()],
                    "[W]",
                    self.device(),
                )?;
                (memory, sources)
            }
        };
        let along = Along {
            sizes,
            order: routing.order,
            rows: capacity.map_or(0, |capacity| capacity.rows),
            number: 0,
        };
        let mut handle = CudaHybridHandle {
            owner: self.token.clone(),
            along,
            arrived: None,
            plan: Plan { memory, words: words.normal() },
            words,
            places: Memory::Callers(0),
            has_rows: AtomicU32::new(0),
        };
        // With a capacity the number of places is known. What may be refused comes before what peers wait for.
        if capacity.is_some() {
            handle.places = self.memory_of_places(&handle, &places)?;
        }
        self.exchange_choices(&handle, routing, capacity, stream)?;
        if capacity.is_none() {
            // The peers go on to the dispatch.
            let signature = signature_of_routing(routing, &sizes);
            self.or_fail(self.add_counts(&mut handle, &signature, stream).and_then(|()| {
                handle.places = self.memory_of_places(&handle, &places)?;
                Ok(())
            }))?;
        }
        handle.along.number = self.next_handle();
        Ok(handle)
    }

    /// Memory for the places of a handle: the caller's, or else this instance's.
    fn memory_of_places(
        &self,
        handle: &CudaHybridHandle,
        places: &Option<TensorViewMut<'_>>,
    ) -> Result<Memory> {
        let shape = [handle.places(), handle.along.sizes.local()];
        match places {
            Some(places) => callers("places", &places.as_view(), &shape, "[N, L]", self.device()),
            None => Ok(Memory::Pooled(self.pool.take(shape[0] * shape[1] * 4)?)),
        }
    }

    /// Waits for the counts of all ranks, and adds what follows from them.
    fn add_counts(
        &self,
        handle: &mut CudaHybridHandle,
        signature: &Signature,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let Along { sizes, order, .. } = handle.along;
        let Arrived { traffic, tokens_per_expert } =
            self.wait_for_counts(signature, sizes.local(), stream)?;
        let num_received = traffic.kept_at(traffic.rank);
        let segments = Segments::new(order, &tokens_per_expert, sizes.local());
        handle.along.rows = segments.as_ref().map_or(num_received, |segments| segments.rows);
        let rows_per_expert = segments.map_or_else(|| tokens_per_expert.clone(), |segments| segments.padded);
        handle.arrived = Some(Known { num_received, tokens_per_expert, rows_per_expert });
        Ok(())
    }

    /// Lists the choices, and exchanges their counts.
    fn exchange_choices(
        &self,
        handle: &CudaHybridHandle,
        routing: &HybridRouting<'_>,
        capacity: Option<HybridCapacity>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let Along { sizes, order, .. } = handle.along;
        let (tokens, local) = (sizes.tokens as u32, sizes.local() as u32);
        let at = |words: fn(&HybridWords) -> Range<usize>| handle.at(words);
        let list = ListCall {
            map: of_dispatch("routing map").address(&routing.map, self.device())?,
            bits: at(HybridWords::bits),
            of_chunk: at(HybridWords::of_chunk),
            all: at(HybridWords::all),
            number: at(HybridWords::number),
            in_rank: at(HybridWords::in_rank),
            per_expert: at(HybridWords::per_expert),
            most: at(HybridWords::own_most),
            tokens,
            experts: sizes.num_experts as u32,
            chunk: Listing::chunk(handle.words.units(), self.blocks(), sizes.local(), sizes.world_size)
                as u32,
        };
        let alone = Signature::new(Operation::HybridDispatch);
        for kernel in [ListKernel::Count, ListKernel::List] {
            // SAFETY: the handle has room for what the kernel writes, and lasts; the caller answers for the map.
            unsafe { self.launch_kernel(Listing, kernel, &alone, Blocks::All, list, stream) }?;
        }
        let call = NotifyCall {
            in_rank: at(HybridWords::in_rank),
            per_expert: at(HybridWords::per_expert),
            own_most: at(HybridWords::own_most),
            chosen_by: at(HybridWords::chosen_by),
            most: at(HybridWords::most),
            result: if capacity.is_none() { self.result_pointer() } else { 0 },
            number: self.result_number(),
            tokens,
            local,
            ..NotifyCall::leaving(&handle.plan)
        };
        let signature = signature_of_routing(routing, &sizes);
        // SAFETY: as above.
        unsafe { self.launch(Notifying, &signature, Blocks::One, call, stream) }?;
        let multiple = match order {
            HybridOrder::Experts { pad_multiple, .. } => pad_multiple as u32,
            HybridOrder::Tokens => 1,
        };
        let call = PlaceCall {
            chosen_by: at(HybridWords::chosen_by),
            counts: handle.plan.at(HandleWords::counts),
            first: at(HybridWords::first),
            kept: at(HybridWords::tokens_per_expert),
            padded: at(HybridWords::rows_per_expert),
            overflow: at(HybridWords::overflow),
            received: at(HybridWords::num_received),
            needed: at(HybridWords::rows_needed),
            local,
            multiple,
            limit: capacity.map_or(UNBOUNDED, |capacity| capacity.rows as u32),
        };
        // SAFETY: as above.
        unsafe { self.launch(Placing, &alone, Blocks::One, call, stream) }
    }

    /// As [`Moe::hybrid_dispatch`](crate::Moe::hybrid_dispatch), in the order of the stream. It waits for nothing, and may be
    /// captured.
    ///
    /// # Errors
    /// As there; that a peer is lost or late comes with a later call, or [`check`](Self::check).
    ///
    /// # Safety
    /// Nobody writes what goes, or uses what comes, until the stream has passed this call; the handle lives as long.
    pub unsafe fn hybrid_dispatch(
        &self,
        handle: &CudaHybridHandle,
        call: HybridDispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&handle.owner, DISPATCH)?;
        let along = &handle.along;
        let format = check_dispatch(&call, along)?;
        let HybridDispatch { tokens: from, received: to } = &call;
        let local = along.sizes.local();
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
        let family = HybridMoving { staging: self.staging(), experts: Experts::of(local) };
        let rows = HybridRowsCall {
            counts: handle.plan.at(HandleWords::counts),
            starts: handle.plan.at(HandleWords::starts),
            order: handle.plan.at(HandleWords::order),
            most: handle.at(HybridWords::most),
            all: handle.at(HybridWords::all),
            number: handle.at(HybridWords::number),
            first: handle.at(HybridWords::first),
            kept: handle.at(HybridWords::tokens_per_expert),
            places: handle.places.address(),
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
            region: self.region_of_map(
                of_dispatch("x"),
                format.row_bytes() + second,
                words,
                family.warps(),
            )?,
            tokens: along.sizes.tokens as u32,
            rows: along.rows as u32,
            row_bytes: format.row_bytes() as u32,
            scales_of_row: scales as u32,
            local: local as u32,
            is_by_token: along.is_by_token().into(),
        };
        let signature = signature_of_rows(&format, from.probs.is_some(), along);
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::All, rows, stream) }?;
        handle.has_rows.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// As [`Moe::hybrid_combine`](crate::Moe::hybrid_combine), of f32, f16 or bf16, in the order of the stream. It waits for nothing,
    /// and may be captured.
    ///
    /// # Errors
    /// As [`hybrid_dispatch`](Self::hybrid_dispatch).
    ///
    /// # Safety
    /// As [`hybrid_dispatch`](Self::hybrid_dispatch).
    pub unsafe fn hybrid_combine(
        &self,
        handle: &CudaHybridHandle,
        call: HybridCombine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        self.owns(&handle.owner, COMBINE)?;
        if handle.has_rows.load(Ordering::Relaxed) == 0 {
            let problem = "one along which nothing was dispatched yet";
            return Err(MoeError::Handle { call: COMBINE, problem });
        }
        let along = &handle.along;
        let format: RowFormat = check_combine(&call, along, &SUMMED)?;
        let experts = Experts::of(along.sizes.local());
        let Some(family) = HybridSumming::new(format.dtype, self.staging(), experts) else {
            let expected = "f32, f16 or bf16".into();
            return Err(MoeError::DType { call: COMBINE, which: "rows", actual: format.dtype, expected });
        };
        let local = along.sizes.local();
        let optional = |which, view: Option<&TensorView<'_>>| {
            view.map_or(Ok(0), |view| of_combine(which).address(view, self.device()))
        };
        let words = if call.probs.is_some() { local } else { 0 };
        let sums = HybridSumsCall {
            counts: handle.plan.at(HandleWords::counts),
            starts: handle.plan.at(HandleWords::starts),
            heads: handle.plan.at(HandleWords::send_head),
            most: handle.at(HybridWords::most),
            all: handle.at(HybridWords::all),
            number: handle.at(HybridWords::number),
            places: handle.places.address(),
            rows: of_combine("rows").vectors(&call.rows, self.device())?,
            probs: optional("probs", call.probs.as_ref())?,
            output: of_combine("output").vectors(&call.output.as_view(), self.device())?,
            to_probs: optional(
                "output probs",
                call.output_probs.as_ref().map(|view| view.as_view()).as_ref(),
            )?,
            region: self.region_of_map(of_combine("rows"), format.row_bytes(), words, family.warps())?,
            tokens: along.sizes.tokens as u32,
            row_bytes: format.row_bytes() as u32,
            local: local as u32,
            is_by_token: along.is_by_token().into(),
        };
        let signature = signature_of_sums(&format, call.probs.is_some(), along);
        // SAFETY: the handle's memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, Blocks::All, sums, stream) }
    }

    /// How the region serves records of `bytes` bytes with words beside them. Only the GPU knows the number of words of a record, which is
    /// at most `words`.
    fn region_of_map(&self, name: Name, bytes: usize, words: usize, warps: Warps) -> Result<RegionCall> {
        let (beside, most) = (words.div_ceil(4) * VECTOR, warps.beside as usize);
        if beside > most {
            let problem = format!(
                "choices, probs and scales beside a row are up to {beside} bytes; at most {most} are served"
            );
            return Err(refused(name.call, problem));
        }
        self.region_of_records(name.call, bytes + beside)?; // there is room for the largest
        Ok(RegionCall { record_bytes: bytes as u32, ..self.region_of_records(name.call, bytes)? })
    }
}
