//! The collectives between GPUs.
//!
//! [`CudaCollectives`] is for the GPUs of a communicator's ranks what [`Collectives`](crate::Collectives) is for host
//! memory: the same operations with the same bits. Ranks are processes or threads, with a GPU each that reaches the others'
//! over NVLink (or PCIe). Its methods put kernels into the caller's stream: they allocate nothing, wait for nothing, and
//! may be captured in a graph.
//!
//! ```no_run
//! use antiphon_collectives::{ReduceOp, cuda::CudaCollectives};
//! use antiphon_device::cuda::{Context, DeviceMemory, Driver};
//! use antiphon_fabric::LocalWorld;
//! use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
//!
//! # type Error = Box<dyn std::error::Error + Send + Sync>;
//! let driver = Driver::load()?;
//! LocalWorld::run(2, |comm| -> Result<(), Error> {
//!     let device = driver.device(comm.rank() as u32)?;
//!     let context = Context::primary(device)?;
//!     let collectives = CudaCollectives::new(&comm, &context)?;
//!     let (stream, memory) = (context.stream()?, DeviceMemory::allocate(&context, 4096)?);
//!     let at = memory.pointer().0 as usize as *mut u8;
//!     // SAFETY: the memory has 1024 floats, and lives until the stream is done.
//!     unsafe {
//!         let device = Device::Cuda(device.ordinal());
//!         let input = TensorView::from_raw_parts(at, DType::F32, &[1024], None, device)?;
//!         let mut output = TensorViewMut::from_raw_parts(at, DType::F32, &[1024], None, device)?;
//!         collectives.all_reduce(&input, &mut output, ReduceOp::Sum, stream.borrow())?;
//!     }
//!     stream.borrow().synchronize()?;
//!     Ok(collectives.check()?)
//! });
//! # Ok::<(), Error>(())
//! ```
//!
//! ## When ranks fail
//!
//! A kernel waits for its peers until the communicator's timeout at most, and not longer than it takes to notice that one
//! has died. It then ends without its result, and the next call on the host (or [`check`](CudaCollectives::check)) returns
//! the error: [`PeerLost`](FabricError::PeerLost), [`Timeout`](FabricError::Timeout), or
//! [`Mismatch`](FabricError::Mismatch) when ranks called different things. The GPUs stay usable.

mod builder;
mod choice;
pub(crate) mod kernels;
pub(crate) mod launch;
#[cfg(test)]
mod machine_code;
mod order;
mod watch;

use std::{
    cell::{Cell, RefCell},
    mem::ManuallyDrop,
    sync::Arc,
};

use antiphon_device::{
    DeviceError, ReduceOp,
    cuda::{Context, CudaError, DevicePointer, WaitBoard, memory},
};
use antiphon_fabric::{Communicator, CudaArena, FabricError, Monitor, Operation, Signature};
use antiphon_tensor::DType;

pub use crate::all_reduce::Algorithm;
use crate::{
    all_reduce::{AllReduceTable, Registry},
    error::Result,
};
pub use builder::CudaBuilder;
pub use choice::tune;
use kernels::{Family, Kernels};
use launch::{Programmatic, Second};
use order::Order;
pub use watch::OnFailure;
use watch::Watch;

/// The most ranks whose arenas fit a kernel's arguments; all of one NVLink domain.
pub const MAX_WORLD: usize = 8;
/// Sets of slots. Large messages go in pieces through both, in two streams: while one piece is reduced or stored, the next
/// is already on the links.
const CHANNELS: usize = 2;
/// Calls in flight use three slots in turn.
const SLOTS: usize = 3;
const TAGS_BYTES: usize = 4096;
pub(crate) const THREADS: u32 = 128;
/// Blocks of a grid for each multiprocessor, at most. Blocks wait for those of other GPUs, so they must not wait for room:
/// twice as many fit, for those of another communicator.
const fn most_blocks(world_size: usize) -> u32 {
    if world_size <= 4 { 4 } else { 2 } // with more ranks a thread needs more registers
}
/// The most blocks of a grid on any device.
const MAX_BLOCKS: u32 = 640;
/// Where the slots begin in a channel, behind the control words.
const SLOTS_AT: usize = (MAX_BLOCKS as usize * 16).next_multiple_of(4096);

/// Bytes from slot to slot.
fn slot_stride(world_size: usize, lane_stride: usize) -> usize {
    TAGS_BYTES + 2 * world_size * lane_stride
}

/// Bytes of a set of slots with its control words.
fn channel_bytes(world_size: usize, lane_stride: usize) -> usize {
    SLOTS_AT + SLOTS * slot_stride(world_size, lane_stride)
}

/// Collectives between the GPUs of a communicator's ranks, over their own loads and stores.
///
/// All ranks make the same calls in the same order. A call on another stream than the one before waits for that one. So a
/// stream lives until the next call is made or these collectives are dropped. Calls that are captured are ordered within their
/// graph; the program orders the launch of the graph behind other calls, and other calls behind it.
///
/// It takes part as long as it lives, as its [`Communicator`] does.
pub struct CudaCollectives {
    monitor: Monitor,
    arena: ManuallyDrop<CudaArena>,
    second: ManuallyDrop<Second>,
    order: ManuallyDrop<Order>,
    board: ManuallyDrop<Arc<WaitBoard>>,
    kernels: ManuallyDrop<RefCell<Kernels>>,
    /// What all-reduces need not stage.
    pub(crate) registry: ManuallyDrop<RefCell<Registry>>,
    watch: Watch,
    lane_stride: usize,
    /// Those that the kernels of every rank may use.
    multiprocessors: u32,
    programmatic: Programmatic,
    starts_dependents: Cell<bool>,
    /// Whether blocks can reach each other's shared memory.
    has_clusters: bool,
    /// Which all-reduce for which size.
    pub(crate) table: AllReduceTable,
    /// Whether an error has been returned as what it is.
    has_told: Cell<bool>,
}

impl std::fmt::Debug for CudaCollectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaCollectives {{ {:?}, arena: {} bytes }}", self.monitor, self.arena.len())
    }
}

impl CudaCollectives {
    /// With lanes of so many bytes.
    fn with_lanes(comm: &Communicator, context: &Context, lane_stride: usize) -> Result<Self> {
        let world_size = comm.world_size();
        let len = CHANNELS * channel_bytes(world_size, lane_stride);
        let arena = CudaArena::new(comm, context, len, 0xFF)?; // EMPTY, everywhere
        let parts = Parts::new(context, world_size, arena.pointer(comm.rank()), lane_stride);
        let Parts { board, second, order, kernels, name, multiprocessors, has_clusters, programmatic } =
            comm.agree("cannot prepare its GPU", parts)?;
        // Blocks of one index meet, so grids are equal though GPUs may not be.
        let multiprocessors =
            comm.exchange_objects(&multiprocessors)?.into_iter().min().unwrap_or(multiprocessors);
        let multiprocessors = multiprocessors.min(MAX_BLOCKS / most_blocks(world_size));
        let table = choice::load(comm, &name)?;
        comm.barrier()?;
        let monitor = comm.monitor();
        let watch = comm.agree("cannot watch its peers", Watch::start(monitor.clone(), board.clone()))?;
        Ok(Self {
            monitor,
            arena: ManuallyDrop::new(arena),
            second: ManuallyDrop::new(second),
            order: ManuallyDrop::new(order),
            board: ManuallyDrop::new(board),
            kernels: ManuallyDrop::new(RefCell::new(kernels)),
            registry: ManuallyDrop::default(),
            watch,
            lane_stride,
            multiprocessors,
            programmatic,
            starts_dependents: Cell::new(false),
            has_clusters,
            table,
            has_told: Cell::new(false),
        })
    }

    /// Compiles and loads the kernels that reduce a dtype by an operator, so that no call has to; once memory is
    /// [registered](Self::register), those for that too. From the cache on disk it takes some milliseconds, else about a
    /// second. Not while a stream is being captured.
    ///
    /// # Errors
    /// [`CollectiveError::NotNumeric`](crate::CollectiveError::NotNumeric) for dtypes other than f32, f16 and bf16;
    /// [`FabricError::Device`].
    pub fn prepare(&self, dtype: DType, op: ReduceOp) -> Result<()> {
        self.load(Family::Reduction(dtype, op))?;
        if !self.registry.borrow().is_empty() {
            self.load(Family::Registered(dtype, op))?;
        }
        Ok(())
    }

    /// Whether small kernels let a kernel behind them that is launched programmatically start at once, instead of when they are
    /// certain to end; they do not unless told so.
    ///
    /// Measure what it gains: on H200s small calls one behind the other take as long without it. It is right only where no other
    /// communicator, of whatever library, has calls
    /// under way on the same GPUs: a large kernel behind a call takes all the room on its GPU, and on another GPU one behind a
    /// call of the other communicator does; then each call waits for a kernel that finds no room, until the deadline.
    pub fn start_dependents_early(&self, early: bool) {
        self.starts_dependents.set(early);
    }

    /// What happens, from now on, when a kernel has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.watch.on_failure(action);
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.monitor.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.monitor.world_size()
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        self.arena.context()
    }

    /// Whether all calls that are over have done what they should. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// Why a kernel gave up: [`FabricError::PeerLost`], [`FabricError::Timeout`], [`FabricError::Mismatch`],
    /// [`FabricError::Aborted`]; from then on [`FabricError::Failed`].
    #[inline]
    pub fn check(&self) -> Result<()> {
        match self.board.report() {
            None => Ok(self.monitor.check_usable()?),
            Some(report) => self.fail(watch::explain(&self.monitor, &report, self.watch.lost())),
        }
    }

    /// That a call may be made now, which needs all peers.
    #[inline]
    pub(crate) fn check_ready(&self) -> Result<()> {
        self.check()?;
        match self.watch.lost() {
            None => Ok(()),
            Some(lost) => self.fail(lost.clone()),
        }
    }

    /// Ends this communicator: whatever waits does so in vain. The first to ask hears why.
    #[cold]
    pub(crate) fn fail<T>(&self, error: FabricError) -> Result<T> {
        if self.has_told.replace(true) {
            self.monitor.check_usable()?;
        }
        self.monitor.report(&error);
        self.board.abort();
        Err(error.into())
    }
}

impl Drop for CudaCollectives {
    fn drop(&mut self) {
        // Kernels under way use all of this. They end by their deadline at the latest. Where that cannot be waited for (as
        // during a capture) it stays: better lost than pulled away from under a kernel. So it does in a forked child, which
        // cannot use the driver, and where it is the parent's.
        if !self.watch.is_here() || self.context().synchronize().is_err() {
            return;
        }
        // SAFETY: dropped once, here, and not used any more.
        unsafe {
            ManuallyDrop::drop(&mut self.second);
            ManuallyDrop::drop(&mut self.order);
            ManuallyDrop::drop(&mut self.board);
            ManuallyDrop::drop(&mut self.kernels);
            ManuallyDrop::drop(&mut self.registry);
            ManuallyDrop::drop(&mut self.arena);
        }
    }
}

/// What one rank needs for itself.
struct Parts {
    board: Arc<WaitBoard>,
    second: Second,
    order: Order,
    kernels: Kernels,
    /// Of the GPU.
    name: String,
    multiprocessors: u32,
    has_clusters: bool,
    programmatic: Programmatic,
}

impl Parts {
    fn new(context: &Context, world_size: usize, arena: DevicePointer, lane_stride: usize) -> Result<Self> {
        for channel in 0..CHANNELS {
            let at = arena.offset((channel * channel_bytes(world_size, lane_stride)) as u64);
            clear_control(context, at).map_err(device)?;
        }
        let mut kernels = Kernels::new(context, world_size);
        kernels.load(Family::Movement)?;
        let properties = context.device().properties().map_err(device)?;
        Ok(Self {
            board: Arc::new(WaitBoard::new(context).map_err(device)?),
            second: Second::new(context).map_err(device)?,
            order: Order::new(context).map_err(device)?,
            kernels,
            name: properties.name,
            multiprocessors: context.multiprocessors().map_err(device)?,
            has_clusters: properties.cluster_launch,
            programmatic: Programmatic::of(
                properties.compute_capability,
                context.device().driver().version(),
            ),
        })
    }
}

/// A channel's control words begin as zeros.
fn clear_control(context: &Context, at: DevicePointer) -> std::result::Result<(), CudaError> {
    let stream = context.stream()?;
    // SAFETY: a channel is larger, and nobody uses it yet.
    unsafe { memory::fill(stream.borrow(), at, 0, SLOTS_AT) }?;
    stream.borrow().synchronize()
}

pub(crate) fn device(error: CudaError) -> crate::CollectiveError {
    FabricError::from(DeviceError::from(error)).into()
}

/// An operation with what all ranks must agree on.
pub(crate) fn signature(operation: Operation, dtype: DType, count: usize) -> Signature {
    Signature { dtype: Some(dtype), count: count as u64, ..Signature::new(operation) }
}
