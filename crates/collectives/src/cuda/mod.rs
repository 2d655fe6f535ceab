//! The collectives between GPUs.
//!
//! [`CudaCollectives`] has the operations of [`StreamCollectives`](crate::StreamCollectives) for the GPUs of a communicator's
//! ranks, with the bits of the host's. Ranks are processes or threads, each with a GPU that accesses the others' memory
//! over NVLink (or PCIe). The methods enqueue kernels in the caller's stream: they allocate nothing, do not wait, and
//! may be captured in a graph.
//!
//! ```no_run
//! use antiphon_collectives::{ReduceOp, StreamCollectives, cuda::CudaCollectives};
//! use antiphon_device::cuda::{Context, DeviceMemory, Driver};
//! use antiphon_fabric::LocalWorld;
//! use antiphon_tensor::DType;
//!
//! # type Error = Box<dyn std::error::Error + Send + Sync>;
//! let driver = Driver::load()?;
//! LocalWorld::run(2, |comm| -> Result<(), Error> {
//!     let device = driver.device(comm.rank() as u32)?;
//!     let context = Context::primary(device)?;
//!     let collectives = CudaCollectives::new(&comm, &context)?;
//!     let (stream, mut memory) = (context.stream()?, DeviceMemory::allocate(&context, 4096)?);
//!     let gradient = memory.view_mut(DType::F32, &[1024])?;
//!     // SAFETY: no other work uses the memory, which lives until the stream has finished.
//!     unsafe { collectives.all_reduce_in_place(gradient, ReduceOp::Sum, &stream) }?;
//!     stream.borrow().synchronize()?;
//!     Ok(collectives.check()?)
//! });
//! # Ok::<(), Error>(())
//! ```
//!
//! ## When ranks fail
//!
//! A kernel stops waiting for its peers at the communicator's timeout, or as soon as the library notices that one has died.
//! It then ends without its result, and the next call on the host (or [`check`](CudaCollectives::check)) returns
//! the error: [`FabricError::PeerLost`], [`FabricError::Timeout`], or [`FabricError::Mismatch`] when ranks called different
//! operations. The GPUs stay usable.

mod builder;
mod call;
pub(crate) mod choice;
mod engine;
#[cfg(test)]
mod machine_code;
mod prepare;

use std::cell::RefCell;

use antiphon_device::cuda::Context;
#[cfg(doc)]
use antiphon_fabric::FabricError;
use antiphon_fabric::{
    Communicator, Registry,
    gpu::{Tenant, UntilIdle},
};
use antiphon_tensor::Device;

pub use crate::all_reduce::{Algorithm, AllReduceOptions};
use crate::{
    AlgorithmTable,
    error::Result,
    gather_scatter::{Messaging, cuda::Movement},
};
pub use antiphon_fabric::gpu::{MAX_WORLD, OnFailure};
pub use builder::CudaBuilder;
pub use choice::{Clock, tune};
pub use engine::CudaEngine;

/// Collectives between the GPUs of a communicator's ranks, over their own loads and stores.
///
/// All ranks make the same calls in the same order. A call on another stream than the one before waits for that one. So a
/// framework's stream must live until the next call is made or these collectives are dropped; a
/// [`Stream`](antiphon_device::cuda::Stream) is kept alive until then. Calls that are captured are ordered within their
/// graph; the program orders the launch of the graph behind other calls, and other calls behind it.
///
/// It takes part as long as it lives, as its [`Communicator`] does. It is a [`Tenant`] of the communicator's engine on this GPU:
/// another one may work beside it, on another stream.
pub struct CudaCollectives {
    /// The registered memory, which all-reduces need not stage.
    pub(crate) registry: UntilIdle<RefCell<Registry>>,
    /// The algorithm of the all-reduce for each size.
    table: AlgorithmTable,
    pub(crate) tenant: Tenant,
    /// The tenant of messages between two ranks, which have an order of their own.
    pub(crate) messages: Tenant,
}

impl std::fmt::Debug for CudaCollectives {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CudaCollectives").field(&self.tenant).finish()
    }
}

impl CudaCollectives {
    /// Makes the collectives with at most `bytes` bytes of each GPU for staging.
    fn with_staging(comm: &Communicator, context: &Context, bytes: usize) -> Result<Self> {
        let tenant = Tenant::new(comm, context, bytes)?;
        let messages = Tenant::of_messages(comm, context, Tenant::LEAST_STAGING_BYTES)?;
        if comm.world_size() > 1 {
            tenant.load_together(comm, Movement)?;
            messages.load_together(comm, Messaging)?;
        }
        let table = choice::load(comm, tenant.gpu_name())?;
        Ok(Self { tenant, messages, registry: UntilIdle::new(context, RefCell::default()), table })
    }

    /// Whether small kernels let a kernel behind them that is launched programmatically start at once, instead of when they are
    /// certain to end. By default they do not.
    ///
    /// Measure the gain: on H200s consecutive small calls take as long without it. It is correct only where no other
    /// communicator, of whatever library, has calls
    /// under way on the same GPUs: a large kernel behind a call takes all the room on its GPU, and on another GPU one behind a
    /// call of the other communicator does; then each call waits for a kernel that finds no room, until the deadline.
    pub fn start_dependents_early(&self, early: bool) {
        self.tenant.start_dependents_early(early);
    }

    /// Sets the action after a kernel has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.tenant.on_failure(action);
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.tenant.rank()
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.tenant.world_size()
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        self.tenant.context()
    }

    /// Whether all calls that are over have done what they should. It does not wait: synchronise with the stream first.
    ///
    /// # Errors
    /// Why a kernel gave up: [`FabricError::PeerLost`], [`FabricError::Timeout`], [`FabricError::Mismatch`],
    /// [`FabricError::Aborted`]; from then on [`FabricError::Failed`].
    #[inline]
    pub fn check(&self) -> Result<()> {
        Ok(self.tenant.check()?)
    }

    /// Gives the memory for staging back to the GPUs of all ranks, as before a checkpoint of the processes, and keeps its addresses.
    /// Until [`restore_memory`](Self::restore_memory), calls are refused, and graphs that hold calls may not be launched. All ranks
    /// call it together; a second time it changes nothing. It waits for all work of the context. Registered memory stays.
    ///
    /// # Errors
    /// On all ranks, if one fails, for which calls are refused too: its own error there ([`FabricError::Device`], as while a stream is
    /// captured), [`FabricError::InvalidArgument`] that names it elsewhere.
    pub fn release_memory(&self, comm: &Communicator) -> Result<()> {
        self.tenant.release_memory(comm)?;
        Ok(self.messages.release_memory(comm)?)
    }

    /// Undoes [`release_memory`](Self::release_memory): calls, and graphs that were captured before, work again. All ranks call it
    /// together; where nothing was released it does nothing.
    ///
    /// # Errors
    /// As [`release_memory`](Self::release_memory), among others for a GPU that has too little memory by now. Nothing is lost then:
    /// it can be called again.
    pub fn restore_memory(&self, comm: &Communicator) -> Result<()> {
        self.tenant.restore_memory(comm)?;
        Ok(self.messages.restore_memory(comm)?)
    }

    /// This rank, and how many there are.
    pub(crate) fn ranks(&self) -> (usize, usize) {
        (self.rank(), self.world_size())
    }

    /// Where tensors must be.
    pub(crate) fn serves(&self) -> Device {
        Device::Cuda(self.context().device().ordinal())
    }
}
