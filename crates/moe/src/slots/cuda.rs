//! Dispatch to slots, and combine from them, between GPUs: the launches of the kernels.

use std::{borrow::Borrow, cell::Cell, sync::Arc};

use antiphon_device::{
    cuda::{Context, StreamRef, relaxed},
    sync::{AtomicU64, Ordering},
};
use antiphon_fabric::{
    Communicator, Signature,
    gpu::{Grid, Kernel as _, Launch, OnFailure, Pieces, Tenant, Work},
};
use antiphon_tensor::{Device, TensorView, TensorViewMut};

use super::{
    COMBINE, CombineFormat, DISPATCH, Sizes, SlotCombine, SlotDispatch, SlotFormat, SlotLimits,
    check_combine, check_dispatch, combine_signature,
    config::{combine_lane, dispatch_lane},
    dispatch_signature,
    family::{Combining, Dispatching, Marks, Phases, SlotCall, SlotFamily},
    too_large,
};
use crate::{
    error::{MoeError, Result, refused},
    layout::check_limits,
    pool::{Pool, Pooled},
    tensors::Name,
};

/// Tokens for which half of the multiprocessors are enough.
const SMALL: u32 = 32;

/// Dispatch to slots, and combine from them, between the GPUs of a communicator's ranks.
///
/// Calls go into streams, in one order, as those of a [`Tenant`]; they wait for nothing on the host, and may be captured. Dropping
/// it waits for the context's kernels, and communicates nothing.
pub struct CudaSlots {
    tenant: Tenant,
    token: Arc<Token>,
    /// The number of the routes that were made last.
    last_routes: Cell<u32>,
    pool: Arc<Pool>,
    /// Counts the calls that have sent.
    halves: Cell<u64>,
    /// The call that has sent and not received yet.
    unreceived: Cell<Option<Sent>>,
}

/// Distinguishes routes and halves of an instance from those of others.
struct Token {
    /// The largest number of a half that was dropped; an older half may be dropped after a newer one.
    dropped: AtomicU64,
}

/// A call that has sent and not received yet.
#[derive(Clone, Copy)]
struct Sent {
    /// The number of the half among those of the instance.
    number: u64,
    half: Half,
    signature: Signature,
    arguments: SlotCall,
    /// Which capture the first half is part of.
    capture: Option<u64>,
}

impl std::fmt::Debug for CudaSlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaSlots {{ {:?} }}", self.tenant)
    }
}

/// The routes of a [`CudaSlots::dispatch`], for its combine. A captured call uses them as long as its graph lives.
pub struct CudaSlotRoutes {
    owner: Arc<Token>,
    number: u32,
    sizes: Sizes,
    /// The number of tokens of each rank, `[R]`, and the place of every choice, `[R, M, K]`.
    memory: Pooled,
}

/// The second half of a call that has sent: what [`CudaSlots::receive`] launches.
///
/// When it is dropped before that, the next call of the instance first receives in its place, into no output. A graph whose capture
/// has the first half alone must not be launched.
#[must_use = "the next call is refused before this one has received"]
pub struct CudaReceive {
    owner: Arc<Token>,
    number: u64,
    call: &'static str,
}

impl std::fmt::Debug for CudaReceive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaReceive {{ number: {}, call: {} }}", self.number, self.call)
    }
}

impl Drop for CudaReceive {
    fn drop(&mut self) {
        self.owner.dropped.raise(self.number, Ordering::Release);
    }
}

/// The kernel of a second half.
#[derive(Debug, Clone, Copy)]
enum Half {
    Dispatch(Dispatching),
    Combine(Combining),
}

impl Half {
    fn call(self) -> &'static str {
        match self {
            Self::Dispatch(_) => DISPATCH,
            Self::Combine(_) => COMBINE,
        }
    }
}

/// Counts on, past 0.
fn next(count: &Cell<u32>) -> u32 {
    count.set(count.get().wrapping_add(1).max(1));
    count.get()
}

impl std::fmt::Debug for CudaSlotRoutes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaSlotRoutes {{ number: {}, {:?} }}", self.number, self.sizes)
    }
}

impl CudaSlotRoutes {
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

impl CudaSlots {
    /// Shares memory between the ranks' GPUs, for calls of at most these sizes. All ranks call it together, each with the context
    /// of its GPU.
    ///
    /// # Errors
    /// As [`Tenant::new`]; [`MoeError::Refused`] for sizes that no call can have.
    pub fn new(comm: &Communicator, context: &Context, most: SlotLimits) -> Result<Self> {
        const CALL: &str = "CudaSlots::new";
        let world_size = comm.world_size();
        check_limits(CALL, most.num_experts, most.top_k, world_size)?;
        if most.max_tokens == 0 || most.hidden == 0 || most.hidden.checked_mul(most.max_tokens * 64).is_none()
        {
            let problem = format!("{} tokens of {} elements", most.max_tokens, most.hidden);
            return Err(refused(CALL, problem));
        }
        let tenant = Tenant::with_one_channel(comm, context, most.bytes(world_size))?;
        let marks = Marks::of(most.num_experts, most.max_tokens).unwrap_or(Marks::Many);
        for format in [SlotFormat::Bf16, SlotFormat::Fp8] {
            tenant.load_together(comm, Dispatching::new(Phases::Both, format, world_size, marks))?;
        }
        tenant.load_together(comm, Combining { phases: Phases::Both, format: CombineFormat::Bf16 })?;
        let (last_routes, halves, unreceived) = (Cell::new(0), Cell::new(0), Cell::new(None));
        let token = Arc::new(Token { dropped: AtomicU64::new(0) });
        Ok(Self { tenant, token, last_routes, pool: Pool::new(context), halves, unreceived })
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

    /// As [`Moe::dispatch_to_slots`](crate::Moe::dispatch_to_slots), in the order of the stream.
    ///
    /// # Errors
    /// As there; [`MoeError::Refused`] for a call that exceeds what this was made for; [`MoeError::Unreceived`]. That a peer is
    /// lost or late comes with a later call, or [`check`](Self::check).
    ///
    /// # Safety
    /// Until the stream has passed this call no other code writes the inputs or uses the outputs, and the routes live.
    pub unsafe fn dispatch(&self, call: &SlotDispatch<'_>, stream: StreamRef<'_>) -> Result<CudaSlotRoutes> {
        let (mut routes, arguments) = self.prepare_dispatch(call)?;
        let (family, signature) = self.dispatching(call, &routes.sizes)?;
        self.receive_dropped(stream)?;
        // SAFETY: the routes' memory and the tensors are as the kernel takes them; the caller answers for how long.
        unsafe { self.launch(family, &signature, arguments, stream) }?;
        routes.number = next(&self.last_routes);
        Ok(routes)
    }

    /// The first half of [`dispatch`](Self::dispatch): a kernel that sends and waits for nothing. [`receive`](Self::receive)
    /// launches the second half, whose deadline starts then. It comes before any other call of this instance, on all ranks.
    /// The other ranks may make the call in one.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// No other code writes the inputs until the stream has passed this call, or uses the outputs until a stream has passed the
    /// second half. The routes and the tensors live until then.
    pub unsafe fn send_dispatch(
        &self,
        call: &SlotDispatch<'_>,
        stream: StreamRef<'_>,
    ) -> Result<(CudaSlotRoutes, CudaReceive)> {
        let (mut routes, arguments) = self.prepare_dispatch(call)?;
        let (family, signature) = self.dispatching(call, &routes.sizes)?;
        // SAFETY: as in `dispatch`.
        let half = unsafe { self.send(Half::Dispatch(family), signature, arguments, stream) }?;
        routes.number = next(&self.last_routes);
        Ok((routes, half))
    }

    /// As [`Moe::combine_from_slots`](crate::Moe::combine_from_slots), in the order of the stream.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// As [`dispatch`](Self::dispatch).
    pub unsafe fn combine(
        &self,
        routes: &CudaSlotRoutes,
        call: &SlotCombine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let arguments = self.prepare_combine(routes, call)?;
        let signature = combine_signature(&routes.sizes, routes.number, call.format);
        let family = Combining { phases: Phases::Both, format: call.format };
        self.receive_dropped(stream)?;
        // SAFETY: as in `dispatch`.
        unsafe { self.launch(family, &signature, arguments, stream) }
    }

    /// The first half of [`combine`](Self::combine); as [`send_dispatch`](Self::send_dispatch). The second half reads the ids and
    /// the weights.
    ///
    /// # Errors
    /// As [`combine`](Self::combine).
    ///
    /// # Safety
    /// As [`send_dispatch`](Self::send_dispatch), and no other code writes the ids and the weights until a stream has passed the
    /// second half.
    pub unsafe fn send_combine(
        &self,
        routes: &CudaSlotRoutes,
        call: &SlotCombine<'_>,
        stream: StreamRef<'_>,
    ) -> Result<CudaReceive> {
        let arguments = self.prepare_combine(routes, call)?;
        let signature = combine_signature(&routes.sizes, routes.number, call.format);
        let half = Half::Combine(Combining { phases: Phases::Both, format: call.format });
        // SAFETY: as in `dispatch`.
        unsafe { self.send(half, signature, arguments, stream) }
    }

    /// Launches the second half of a call, once. A later call on another stream comes behind it.
    ///
    /// A call that is refused has changed nothing: it may be made again, with a half that was lent.
    ///
    /// # Errors
    /// [`MoeError::Captured`] if a graph that is captured has one half of the call and not the other; [`MoeError::Half`] for a half
    /// of another instance, and for one that has been received; as [`dispatch`](Self::dispatch).
    ///
    /// # Safety
    /// As promised to the first half.
    pub unsafe fn receive(&self, receive: impl Borrow<CudaReceive>, stream: StreamRef<'_>) -> Result<()> {
        let CudaReceive { owner, number, call } = receive.borrow();
        if !Arc::ptr_eq(owner, &self.token) {
            return Err(MoeError::Half { call, problem: "of another instance" });
        }
        let Some(sent) = self.unreceived.get().filter(|sent| sent.number == *number) else {
            return Err(MoeError::Half { call, problem: "of a call that has received already" });
        };
        if sent.capture != stream.capture()? {
            let problem = "one half of the call is captured in a graph and the other is not: capture both";
            return Err(MoeError::Captured { call, problem });
        }
        // SAFETY: passed on.
        unsafe { self.launch_half(sent.half, Phases::Receive, &sent.signature, sent.arguments, stream) }?;
        self.unreceived.set(None);
        Ok(())
    }

    /// Before a call: refuses it if an earlier one has not received; if nobody can receive that any more, empties the slot.
    fn receive_dropped(&self, stream: StreamRef<'_>) -> Result<()> {
        let Some(sent) = self.unreceived.get() else { return Ok(()) };
        let is_dropped = self.token.dropped.load(Ordering::Acquire) == sent.number;
        let capture = if is_dropped { stream.capture()? } else { None };
        match (sent.capture, capture) {
            _ if !is_dropped => return Err(MoeError::Unreceived { sent: sent.half.call() }),
            (None, Some(_)) => return Err(MoeError::Unreceived { sent: sent.half.call() }),
            (sent_in, now_in) if sent_in == now_in => {
                let arguments = sent.arguments.without_outputs();
                // SAFETY: the kernel uses the memory of the routes, which the pool keeps, and no tensor.
                unsafe { self.launch_half(sent.half, Phases::Receive, &sent.signature, arguments, stream) }?;
            }
            _ => {} // only a graph has the first half
        }
        self.unreceived.set(None);
        Ok(())
    }

    /// Launches the first half of a call.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn send(
        &self,
        half: Half,
        signature: Signature,
        arguments: SlotCall,
        stream: StreamRef<'_>,
    ) -> Result<CudaReceive> {
        let capture = stream.capture()?;
        self.receive_dropped(stream)?;
        // SAFETY: passed on.
        unsafe { self.launch_half(half, Phases::Send, &signature, arguments, stream) }?;
        let number = self.halves.get() + 1;
        self.halves.set(number);
        self.unreceived.set(Some(Sent { number, half, signature, arguments, capture }));
        Ok(CudaReceive { owner: self.token.clone(), number, call: half.call() })
    }

    /// Launches one half of a call.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    unsafe fn launch_half(
        &self,
        half: Half,
        phases: Phases,
        signature: &Signature,
        arguments: SlotCall,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe {
            match half {
                Half::Dispatch(family) => self.launch(family.with(phases), signature, arguments, stream),
                Half::Combine(family) => self.launch(family.with(phases), signature, arguments, stream),
            }
        }
    }

    /// The kernel of a dispatch, and what ranks agree on.
    fn dispatching(&self, call: &SlotDispatch<'_>, sizes: &Sizes) -> Result<(Dispatching, Signature)> {
        let marks = marks_of(sizes)?;
        let family = Dispatching::new(Phases::Both, call.format, sizes.world_size, marks);
        Ok((family, dispatch_signature(sizes, call.format)))
    }

    /// The arguments of the kernels of a dispatch, and its routes.
    fn prepare_dispatch(&self, call: &SlotDispatch<'_>) -> Result<(CudaSlotRoutes, SlotCall)> {
        let sizes = check_dispatch(call, self.tenant.world_size())?;
        self.check_room(&sizes, dispatch_lane(&sizes, call.format), DISPATCH)?;
        let name = |which| Name { call: DISPATCH, which };
        let address = |which, view: &TensorView<'_>| name(which).address(view, self.device());
        let optional = |which, view: &Option<TensorViewMut<'_>>| {
            view.as_ref().map_or(Ok(0), |view| address(which, &view.as_view()))
        };
        let received = &call.received;
        let bytes = CudaSlotRoutes::bytes(&sizes);
        let arguments = SlotCall {
            x: name("x").vectors(&call.x, self.device())?,
            ids: address("ids", &call.ids)?,
            to_x: name("received x").vectors(&received.x.as_view(), self.device())?,
            to_scales: optional("received scales", &received.scales)?,
            counts: address("counts", &received.counts.as_view())?,
            source_tokens: address("source tokens", &received.source_tokens.as_view())?,
            layout_range: address("layout range", &received.layout_range.as_view())?,
            statistics: optional("statistics", &received.statistics)?,
            waits: optional("waits", &received.waits)?,
            id_bytes: call.ids.dtype().size() as u32,
            ..SlotCall::of(&sizes)
        };
        let memory = relaxed(|| self.pool.take(bytes))??;
        // A call that is made draws the number.
        let routes = CudaSlotRoutes { owner: self.token.clone(), number: 0, sizes, memory };
        let (held_tokens, places) = (routes.held_tokens(), routes.places());
        Ok((routes, SlotCall { held_tokens, places, ..arguments }))
    }

    /// The arguments of the kernels of a combine.
    fn prepare_combine(&self, routes: &CudaSlotRoutes, call: &SlotCombine<'_>) -> Result<SlotCall> {
        if !Arc::ptr_eq(&routes.owner, &self.token) {
            return Err(MoeError::Routes { call: COMBINE, problem: "of another instance" });
        }
        let sizes = &routes.sizes;
        check_combine(call, sizes)?;
        self.check_room(sizes, combine_lane(sizes), COMBINE)?;
        let name = |which| Name { call: COMBINE, which };
        let vectors = |which, view: &TensorView<'_>| name(which).vectors(view, self.device());
        let waits = call.waits.as_ref();
        Ok(SlotCall {
            x: vectors("rows", &call.rows)?,
            ids: name("ids").address(&call.ids, self.device())?,
            weights: name("weights").address(&call.weights, self.device())?,
            to_x: vectors("output", &call.output.as_view())?,
            waits: waits.map_or(Ok(0), |waits| name("waits").address(&waits.as_view(), self.device()))?,
            held_tokens: routes.held_tokens(),
            places: routes.places(),
            id_bytes: call.ids.dtype().size() as u32,
            ..SlotCall::of(sizes)
        })
    }

    /// Refuses a call that needs longer lanes.
    fn check_room(&self, sizes: &Sizes, needed: usize, call: &'static str) -> Result<()> {
        let lane = self.tenant.lane_bytes();
        if needed <= lane {
            return Ok(());
        }
        Err(too_large(call, sizes, format_args!("lanes of {needed} bytes, of which it has {lane}")))
    }

    /// Launches the kernel of a family on all multiprocessors.
    ///
    /// # Safety
    /// The arguments are as the kernel takes them, until the stream has passed.
    unsafe fn launch<F: SlotFamily>(
        &self,
        family: F,
        signature: &Signature,
        arguments: SlotCall,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        let loaded = self.tenant.ready(family, stream)?;
        let all = self.tenant.multiprocessors_here().max(1);
        let is_small = family.is_released() && arguments.tokens <= SMALL && all > 1;
        let config = family.blocks(if is_small { all / 2 } else { all }, self.tenant.world_size());
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

/// What a block has for a call's marks.
fn marks_of(sizes: &Sizes) -> Result<Marks> {
    let Sizes { num_experts, max_tokens, .. } = *sizes;
    Marks::of(num_experts, max_tokens).ok_or_else(|| {
        let most = Marks::Many.words();
        let problem =
            format!("{num_experts} experts and max_tokens {max_tokens}: at most {most} × 32 of their product are served");
        refused(DISPATCH, problem)
    })
}
