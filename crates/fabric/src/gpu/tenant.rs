//! A tenant of the engine: its own memory and its own order of calls.

use std::{
    cell::{Cell, RefCell},
    fmt,
    sync::Arc,
};

use antiphon_device::cuda::{Context, DevicePointer, StreamRef, WaitBoard, WaitReport, memory};

use super::{
    Family, Loaded, MAX_WORLD, OnFailure, UntilIdle,
    engine::{CommonRoom, Engine, Programmatic},
    family::Programs,
    launch::SideStreams,
    order::Order,
    room::{Entry, MadeBy, Share},
    staging::{CHANNELS, LEAST_BYTES, SLOTS_AT, Staging},
};
use crate::{Communicator, CudaArena, FabricError, Monitor, Signature};

/// One user of a communicator's GPUs: calls that come one after the other, through memory of their own.
///
/// The calls of a tenant are ordered, on whatever streams they come: a call on another stream than the call before waits for
/// that one. So a framework's stream must live until the tenant's next call is made (in each [order](Self::enter_second) that used the
/// stream), or the tenant is dropped; a [`Stream`](antiphon_device::cuda::Stream) is kept alive until then. All ranks make the same calls
/// in the same order.
///
/// Calls that are captured are ordered within their capture, and do not touch the order of calls that run. The program orders the launch
/// of the graph behind other calls, and other calls behind it. If it does not, and two of them run at once, their kernels find that:
/// the communicator ends with [`FabricError::Overlap`] on every rank.
///
/// Several tenants of one communicator and GPU may work at once, on streams of their own: each has its own slots, tags and
/// order. All ranks make the calls of all tenants in the same order, as streams may share a queue of the hardware. They share the rank's deadline, watch and failure: when a kernel of one gives up, the communicator has failed, and
/// every tenant's waiting kernels end.
///
/// A tenant takes part in the communicator as long as it lives. Dropping it waits for the context's kernels.
pub struct Tenant {
    /// Among those that share the memory.
    rank: usize,
    resources: UntilIdle<Resources>,
    // Behind the resources, which are dropped when the context has no work left.
    room: CommonRoom,
    engine: Arc<Engine>,
    /// The share that its calls take, unless their kernels need more.
    share: Share,
    starts_dependents: Cell<bool>,
    /// Whether the memory of the arena is released now.
    is_released: Cell<bool>,
}

/// The bytes of EMPTY, with which an arena begins.
const FILL: u8 = 0xFF;

/// The memory that enqueued kernels use.
struct Resources {
    arena: CudaArena,
    staging: Staging,
    order: Order,
    second_order: Order,
    sides: SideStreams,
    programs: RefCell<Programs>,
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant {{ {:?}, arena: {} bytes }}", self.monitor(), self.resources.arena.len())
    }
}

impl Tenant {
    /// The least memory for staging, in bytes.
    pub const LEAST_STAGING_BYTES: usize = LEAST_BYTES;

    /// Shares memory between the ranks' GPUs: at most `staging_bytes` of each, for data that is under way between ranks. Larger
    /// messages go through it in pieces; less memory makes smaller pieces. All ranks call it together, with the same number.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for more than [`MAX_WORLD`] ranks; for less than
    /// [`LEAST_STAGING_BYTES`](Self::LEAST_STAGING_BYTES); for ranks that ask for different staging; and for an environment
    /// variable that [`OnFailure`] does not know. As [`CudaArena::new`]; [`FabricError::Device`].
    pub fn new(comm: &Communicator, context: &Context, staging_bytes: usize) -> Result<Self, FabricError> {
        Self::with([comm; 2], context, (staging_bytes, CHANNELS), 0)
    }

    /// As [`new`](Self::new), for kernels that carry messages: a grid takes at most a quarter of a multiprocessor.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_messages(
        comm: &Communicator,
        context: &Context,
        staging_bytes: usize,
    ) -> Result<Self, FabricError> {
        Ok(Self { share: Share::Quarter, ..Self::new(comm, context, staging_bytes)? })
    }

    /// As [`new`](Self::new), for calls that are not in pieces: one of them at a time has all of the memory.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_one_channel(
        comm: &Communicator,
        context: &Context,
        staging_bytes: usize,
    ) -> Result<Self, FabricError> {
        Self::with([comm; 2], context, (staging_bytes, 1), 0)
    }

    /// As [`new`](Self::new), with a further region of `region_bytes` bytes in each rank's arena, which calls may use in any way.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_region(
        comm: &Communicator,
        context: &Context,
        staging_bytes: usize,
        region_bytes: usize,
    ) -> Result<Self, FabricError> {
        Self::with([comm; 2], context, (staging_bytes, CHANNELS), region_bytes)
    }

    /// A tenant of all ranks of `comm`, which are on several nodes: its memory is that of `node`, the [group](Communicator::node_group) of
    /// this rank's node, in whose order the kernels number the ranks, and which may have one rank. Kernels reach other nodes by
    /// [`Rails`](super::Rails), and what ends a wait of any rank ends those of all. The region, of `region_bytes` bytes in each rank's
    /// arena, begins as zeros. All ranks of `comm` call it together.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn between_nodes(
        comm: &Communicator,
        node: &Communicator,
        context: &Context,
        region_bytes: usize,
    ) -> Result<Self, FabricError> {
        let tenant = Self::with([comm, node], context, (LEAST_BYTES, 1), region_bytes);
        let tenant = comm.agree("cannot prepare its GPU", tenant)?;
        let clear = || -> Result<(), FabricError> {
            let stream = context.stream()?;
            let region = tenant.channel(tenant.rank(), 0).offset(tenant.region_at());
            // SAFETY: the region is as large, and no kernel uses it yet.
            unsafe { memory::fill(stream.borrow(), region, 0, region_bytes) }?;
            Ok(stream.borrow().synchronize()?)
        };
        comm.agree("cannot prepare its GPU", clear())?;
        Ok(tenant)
    }

    /// The ranks of `comm` fail together; those of `node` share the memory.
    fn with(
        [comm, node]: [&Communicator; 2],
        context: &Context,
        (staging_bytes, channels): (usize, usize),
        region_bytes: usize,
    ) -> Result<Self, FabricError> {
        let world_size = node.world_size();
        if world_size > MAX_WORLD {
            let text = format!("collectives on CUDA work among up to {MAX_WORLD} ranks, not {world_size}");
            return Err(FabricError::InvalidArgument(text));
        }
        let staging = Staging::within(staging_bytes, world_size, channels).ok_or_else(|| {
            FabricError::InvalidArgument(format!(
                "{staging_bytes} bytes for staging, at least {LEAST_BYTES} are needed"
            ))
        })?;
        let arena = CudaArena::new(node, context, staging.arena_bytes() + region_bytes, FILL)?;
        let resources = Resources::new(context, arena, staging, node.rank());
        let resources = comm.agree("cannot prepare its GPU", resources)?;
        let engine = Engine::of(comm, context)?;
        let room = engine.common_room(comm)?;
        Ok(Self {
            rank: node.rank(),
            resources: UntilIdle::new(context, resources),
            room,
            engine,
            share: Share::Half,
            starts_dependents: Cell::new(false),
            is_released: Cell::new(false),
        })
    }

    /// Gives this tenant's memory on all ranks back to their devices, and keeps its addresses. Until
    /// [`restore_memory`](Self::restore_memory), calls are refused, and graphs that hold calls may not be launched. All ranks call it
    /// together, as a second time, which changes nothing. It waits for all work of the context.
    ///
    /// # Errors
    /// As [`CudaArena::release`]: calls are refused then too, on all ranks.
    pub fn release_memory(&self, comm: &Communicator) -> Result<(), FabricError> {
        self.is_released.set(true);
        self.resources.arena.release(comm)
    }

    /// Undoes [`release_memory`](Self::release_memory): calls, and graphs that were captured before, work again. All ranks call it
    /// together; where nothing was released it does nothing.
    ///
    /// # Errors
    /// As [`CudaArena::restore`]: the memory of all ranks is released then, and this can be called again.
    pub fn restore_memory(&self, comm: &Communicator) -> Result<(), FabricError> {
        if !self.is_released.get() {
            return Ok(());
        }
        let Resources { arena, staging, .. } = &*self.resources;
        arena.restore(comm, FILL)?;
        comm.agree("cannot prepare its GPU", clear(self.context(), arena, *staging, comm.rank()))?;
        self.is_released.set(false);
        Ok(())
    }

    /// Whether there are peers, and memory, for a call.
    #[inline]
    fn check_callable(&self) -> Result<(), FabricError> {
        self.check_ready()?;
        match self.is_released.get() {
            false => Ok(()),
            true => Err(FabricError::invalid(
                "the GPU's memory for calls is released: restore_memory comes first",
            )),
        }
    }

    /// Compiles and loads the kernels of a family on all ranks, so that no call has to. All ranks call it together.
    ///
    /// # Errors
    /// On every rank, if one fails: its own error there ([`FabricError::Device`] with what is missing to compile kernels;
    /// [`FabricError::InvalidArgument`] for a GPU that cannot run enough blocks), [`FabricError::InvalidArgument`] that names
    /// it elsewhere.
    pub fn load_together<F: Family>(&self, comm: &Communicator, family: F) -> Result<(), FabricError> {
        let loaded = self.resources.programs.borrow_mut().load(family);
        comm.agree("cannot prepare its GPU", loaded.map(drop))
    }

    /// The kernels of a family, compiled and loaded if they are not yet: from the cache on disk that takes some milliseconds,
    /// else up to about a second. Not while a stream is being captured.
    ///
    /// # Errors
    /// As [`load_together`](Self::load_together). A failure is reported to the peers, which rely on the call, and ends the
    /// communicator.
    #[inline]
    pub fn load<F: Family>(&self, family: F) -> Result<Loaded<F>, FabricError> {
        self.fail_if_err(self.resources.programs.borrow_mut().load(family))
    }

    /// Begins a call, which comes after the call before it, if nothing has failed.
    ///
    /// # Errors
    /// As [`check_ready`](Self::check_ready); [`FabricError::InvalidArgument`] while the memory is
    /// [released](Self::release_memory), and where the stream of the call before, another one, is being captured since;
    /// [`FabricError::Device`].
    #[inline]
    pub fn enter(&self, stream: StreamRef<'_>) -> Result<(), FabricError> {
        self.enter_for(stream, self.share)
    }

    #[inline]
    fn enter_for(&self, stream: StreamRef<'_>, share: Share) -> Result<(), FabricError> {
        self.check_callable()?;
        let entry = Entry { share, made_by: MadeBy::All };
        self.fail_unless_refused(self.take_turn(&self.resources.order, stream, entry))
    }

    /// Makes what follows on `stream` come after the call before in an order, and where there is room for its grids.
    #[inline]
    fn take_turn(&self, order: &Order, stream: StreamRef<'_>, entry: Entry) -> Result<(), FabricError> {
        let id = stream.id()?;
        order.check(stream, id)?; // before the room, so that a call that is refused has changed neither
        self.room.room.enter(stream, id, entry)?;
        order.enter(stream, id)
    }

    /// Begins a call, as [`enter`](Self::enter), in an order of its own: for kernels that may work beside those of the first order,
    /// as they use other parts of the tenant's memory. A call that uses both parts enters both orders.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_second(&self, stream: StreamRef<'_>) -> Result<(), FabricError> {
        self.check_callable()?;
        let entry = Entry { share: self.share, made_by: MadeBy::All };
        self.fail_unless_refused(self.take_turn(&self.resources.second_order, stream, entry))
    }

    /// Begins a message, which two ranks make: in the first order if it sends, in the [second](Self::enter_second) if it receives. It may
    /// wait for a call that its peer makes after others, so no call of another stream comes behind it for want of room.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn enter_message(
        &self,
        stream: StreamRef<'_>,
        sends: bool,
        receives: bool,
    ) -> Result<(), FabricError> {
        self.check_callable()?;
        let entry = Entry { share: self.share, made_by: MadeBy::Two };
        let orders = [(sends, &self.resources.order), (receives, &self.resources.second_order)];
        orders
            .into_iter()
            .filter(|(takes_part, _)| *takes_part)
            .try_for_each(|(_, order)| self.fail_unless_refused(self.take_turn(order, stream, entry)))
    }

    /// [`load`](Self::load) for a call that has been [entered](Self::enter): it takes the room that the family's kernels need.
    ///
    /// # Errors
    /// As [`load`](Self::load); [`FabricError::InvalidArgument`] where there is no such room.
    #[inline]
    pub fn load_entered<F: Family>(
        &self,
        family: F,
        stream: StreamRef<'_>,
    ) -> Result<Loaded<F>, FabricError> {
        let loaded = self.load(family)?;
        if loaded.share() > self.share.max(Share::Half) {
            self.fail_unless_refused(self.take_room(&loaded, stream))?;
        }
        Ok(loaded)
    }

    #[cold]
    fn take_room<F: Family>(&self, loaded: &Loaded<F>, stream: StreamRef<'_>) -> Result<(), FabricError> {
        let entry = Entry { share: loaded.share(), made_by: MadeBy::All };
        self.room.room.enter(stream, stream.id()?, entry)
    }

    /// [`load`](Self::load), then [`enter`](Self::enter).
    ///
    /// # Errors
    /// As these.
    #[inline]
    pub fn ready<F: Family>(&self, family: F, stream: StreamRef<'_>) -> Result<Loaded<F>, FabricError> {
        self.check_callable()?;
        let loaded = self.load(family)?;
        self.enter_for(stream, loaded.share())?;
        Ok(loaded)
    }

    /// Whether all calls that are over have done what they should, of every tenant of this communicator on this GPU. It does
    /// not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// Why a kernel gave up: [`FabricError::PeerLost`], [`FabricError::Timeout`], [`FabricError::Mismatch`],
    /// [`FabricError::Aborted`]; from then on [`FabricError::Failed`].
    #[inline]
    pub fn check(&self) -> Result<(), FabricError> {
        self.engine.check()
    }

    /// What a kernel reported that gave up, of whatever tenant; none as long as none has.
    pub fn report(&self) -> Option<WaitReport> {
        self.board().report()
    }

    /// Whether a call may be made now, which needs all peers.
    ///
    /// # Errors
    /// As [`check`](Self::check); [`FabricError::PeerLost`] too for a peer that is gone while no kernel waits for it.
    #[inline]
    pub fn check_ready(&self) -> Result<(), FabricError> {
        self.engine.check_ready()
    }

    /// Whether this rank's program asks a wait of the host to end; see [`Monitor::check_interrupt`](crate::Monitor::check_interrupt).
    ///
    /// # Errors
    /// [`FabricError::Interrupted`].
    pub fn check_interrupt(&self, doing: Signature) -> Result<(), FabricError> {
        self.monitor().check_interrupt(doing)
    }

    /// Ends the communicator with this error, and returns it: for a rank that cannot go on with what its peers count on. They get an
    /// error that names this rank within milliseconds.
    ///
    /// # Errors
    /// The error; [`FabricError::Failed`] if the communicator has failed before.
    #[cold]
    pub fn fail<T>(&self, error: FabricError) -> Result<T, FabricError> {
        self.engine.fail(error)
    }

    /// Ends the communicator with this rank's own failure, if there is one: the peers count on the call.
    #[inline]
    pub(super) fn fail_if_err<T>(&self, outcome: Result<T, FabricError>) -> Result<T, FabricError> {
        outcome.or_else(|error| self.engine.fail(error))
    }

    /// As [`fail_if_err`](Self::fail_if_err), but for a call that was refused before anything was done: it may be made again.
    #[inline]
    fn fail_unless_refused(&self, outcome: Result<(), FabricError>) -> Result<(), FabricError> {
        match outcome {
            Err(FabricError::InvalidArgument(_)) | Ok(()) => outcome,
            Err(error) => self.engine.fail(error),
        }
    }

    /// Whether small kernels let a kernel behind them that is launched programmatically start at once, instead of when they are
    /// certain to end; at first they do not.
    ///
    /// It is right only where no other communicator or tenant, of whatever library, has calls under way on the same GPUs: a
    /// large kernel behind a call takes all the room on its GPU, and on another GPU one behind a call of the other communicator
    /// does; then each call waits for a kernel that finds no room, until the deadline.
    pub fn start_dependents_early(&self, early: bool) {
        self.starts_dependents.set(early);
    }

    /// Sets the action after a kernel of any tenant has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.engine.on_failure(action);
    }

    /// This rank, from 0, among those that share the memory.
    #[inline]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks share the memory.
    #[inline]
    pub fn world_size(&self) -> usize {
        self.resources.arena.world_size()
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        self.engine.context()
    }

    /// The name of this rank's GPU.
    pub fn gpu_name(&self) -> &str {
        &self.engine.properties().name
    }

    /// Whether the GPU's blocks reach each other's shared memory, in clusters.
    pub fn has_clusters(&self) -> bool {
        self.engine.properties().has_clusters
    }

    /// The multiprocessors that the kernels of every rank may use: a part of those of a GPU that several ranks share.
    #[inline]
    pub fn multiprocessors(&self) -> u32 {
        self.room.multiprocessors
    }

    /// The multiprocessors that the kernels of every rank could use if no ranks shared a GPU.
    pub fn usable_multiprocessors(&self) -> u32 {
        self.room.usable_multiprocessors
    }

    /// The multiprocessors of the stream that was [entered](Self::enter) last, of those that every rank's GPU has.
    #[inline]
    pub fn multiprocessors_here(&self) -> u32 {
        self.resources.order.multiprocessors().min(self.room.multiprocessors)
    }

    /// The most bytes of one rank that a lane of a slot takes: those that one launch sends to one peer.
    #[inline]
    pub fn lane_bytes(&self) -> usize {
        self.resources.staging.lane_stride
    }

    /// Where the region begins, in bytes from the `own` and the `peer`s of a launch of one piece.
    #[inline]
    pub fn region_at(&self) -> u64 {
        self.resources.staging.arena_bytes() as u64
    }

    #[inline]
    pub(super) fn monitor(&self) -> &Monitor {
        self.engine.monitor()
    }

    #[inline]
    pub(super) fn board(&self) -> &WaitBoard {
        self.engine.board()
    }

    #[inline]
    pub(super) fn sides(&self) -> &SideStreams {
        &self.resources.sides
    }

    #[inline]
    pub(super) fn staging(&self) -> Staging {
        self.resources.staging
    }

    #[inline]
    pub(super) fn programmatic(&self) -> Programmatic {
        self.engine.properties().programmatic
    }

    #[inline]
    pub(super) fn starts_dependents(&self) -> bool {
        self.starts_dependents.get()
    }

    #[inline]
    pub(super) fn limit_ns(&self) -> u64 {
        u64::try_from(self.monitor().timeout().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Where a channel of a rank's arena begins, for this rank's device.
    #[inline]
    pub(super) fn channel(&self, rank: usize, channel: usize) -> DevicePointer {
        self.resources.arena.pointer(rank).offset(self.resources.staging.channel_at(channel))
    }
}

impl Resources {
    fn new(context: &Context, arena: CudaArena, staging: Staging, rank: usize) -> Result<Self, FabricError> {
        clear(context, &arena, staging, rank)?;
        Ok(Self {
            order: Order::new(context)?,
            second_order: Order::new(context)?,
            sides: SideStreams::new(context)?,
            programs: RefCell::new(Programs::new(context, arena.world_size())),
            arena,
            staging,
        })
    }
}

/// The control words of each channel begin as zeros.
fn clear(context: &Context, arena: &CudaArena, staging: Staging, rank: usize) -> Result<(), FabricError> {
    let stream = context.stream()?;
    for channel in 0..CHANNELS {
        let at = arena.pointer(rank).offset(staging.channel_at(channel));
        // SAFETY: a channel is larger, and no kernel uses it yet.
        unsafe { memory::fill(stream.borrow(), at, 0, SLOTS_AT) }?;
    }
    stream.borrow().synchronize().map_err(FabricError::from)
}
