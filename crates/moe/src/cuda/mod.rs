//! Dispatch and combine between GPUs.
//!
//! [`CudaMoe`] is a tenant of the communicator's engine ([`antiphon_fabric::gpu`]), with memory and an order of calls of its own:
//! a dispatch may run beside an all-reduce of the same communicator on another stream. Kernels poll their own GPU's memory alone.
//!
//! *Notify*, one block, numbers this rank's tokens for each rank, and exchanges the counts; the host waits for them. *Dispatch*
//! pushes records (a token's row with its scales and choices) in order into the receiver's lane of this rank, so the receiver
//! knows the place of each. *Combine* pushes rows back in the same way, and the source sums the rows of a token when all of
//! them have arrived. A lane is a ring: if a call has more records than a lane, the sender waits until the receiver has read.

mod calls;
mod routes;

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use antiphon_device::cuda::{Context, Event, PinnedMemory, StreamRef};
use antiphon_fabric::{
    Communicator, Signature,
    gpu::{Family, Grid, Kernel as _, LINE, Launch, OnFailure, Pieces, Staging, Tenant, UntilIdle, Work},
};
use antiphon_tensor::Device;

pub(crate) use routes::{Arrived, Memory, Plan};
pub use routes::{CudaByTokenRoutes, RouteMemory};

pub(crate) use crate::words::RouteWords;

use crate::{
    MoeConfig, Movement, Multiprocessors,
    by_token::family::{Moving, Notifying},
    error::{MoeError, Result, refused},
    layout::{MAX_LOCAL_EXPERTS, cuda::Counting},
    pool::Pool,
    slots::cuda::CudaSlots,
};

/// The threads of a block: one block for each multiprocessor.
pub(crate) const THREADS: u32 = 512;
/// Parts of the region: one for each slot.
const PARTS: usize = 3;

/// Dispatch and combine between the GPUs of a communicator's ranks.
///
/// Calls go into streams, in one order, as those of a [`Tenant`]. Dropping it waits for the context's kernels, and communicates
/// nothing.
pub struct CudaMoe {
    tenant: Tenant,
    region_bytes: usize,
    /// At most, or 0.
    num_sms: Cell<u32>,
    /// Where that is 0.
    chosen: RefCell<Multiprocessors>,
    pub(crate) token: Arc<()>,
    /// The number of the routes that were made last.
    last_routes: Cell<u32>,
    /// The counts of Notify, in host memory.
    result: UntilIdle<PinnedMemory>,
    /// The number of the last call that waits for counts, which its kernel writes before them.
    waited: Cell<u32>,
    arrived: Event,
    pub(crate) pool: Arc<Pool>,
    slots: Option<CudaSlots>,
}

impl std::fmt::Debug for CudaMoe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMoe {{ num_sms: {}, {:?} }}", self.num_sms.get(), self.tenant)
    }
}

impl CudaMoe {
    /// Shares memory between the ranks' GPUs. All ranks call it together, each with the context of its GPU.
    ///
    /// # Errors
    /// As [`Tenant::new`]; [`MoeError::Refused`] for more multiprocessors than there are, and for calls to slots of a
    /// size that none can have.
    pub fn new(comm: &Communicator, context: &Context, config: MoeConfig) -> Result<Self> {
        check_num_sms("CudaMoe::new", config.num_sms, u32::MAX)?;
        let tenant = Tenant::with_region(comm, context, Tenant::LEAST_STAGING_BYTES, config.region_bytes)?;
        let usable = check_num_sms("CudaMoe::new", config.num_sms, tenant.usable_multiprocessors());
        comm.agree("asks for too much", usable)?;
        if config.region_bytes > 0 {
            tenant.load_together(comm, Counting)?;
            tenant.load_together(comm, Notifying)?;
            tenant.load_together(comm, Moving { staging: Staging::of(&tenant) })?;
        }
        let slots = config.slots.map(|most| CudaSlots::new(comm, context, most)).transpose()?;
        let words = 1 + comm.world_size() * (3 + comm.world_size()) + MAX_LOCAL_EXPERTS;
        let own = || {
            let result = PinnedMemory::allocate(context, words * 4)?;
            Ok::<_, MoeError>((UntilIdle::new(context, result), Event::new(context)?))
        };
        let (result, arrived) = comm.agree("cannot prepare its GPU", own())?;
        Ok(Self {
            tenant,
            region_bytes: config.region_bytes,
            num_sms: Cell::new(config.num_sms),
            chosen: RefCell::new(Multiprocessors::default()),
            token: Arc::new(()),
            last_routes: Cell::new(0),
            result,
            waited: Cell::new(0),
            arrived,
            pool: Pool::new(context),
            slots,
        })
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.tenant.world_size()
    }

    /// The device of the tensors.
    pub fn device(&self) -> Device {
        Device::Cuda(self.tenant.context().device().ordinal())
    }

    /// Whether all calls that are over have done what they should; see [`Tenant::check`].
    ///
    /// # Errors
    /// As there.
    pub fn check(&self) -> Result<()> {
        self.slots.as_ref().map_or(Ok(()), CudaSlots::check)?;
        Ok(self.tenant.check()?)
    }

    /// What happens, from now on, when a kernel has given up; see [`OnFailure`].
    pub fn on_failure(&self, action: OnFailure) {
        self.tenant.on_failure(action);
    }

    /// What makes the calls to and from slots.
    ///
    /// # Errors
    /// [`MoeError::Refused`] if this was made without [`MoeConfig::slots`].
    pub fn slots(&self) -> Result<&CudaSlots> {
        let problem = "the instance was made without slots: MoeConfig's, which says how large such calls are";
        self.slots.as_ref().ok_or_else(|| refused("slots", problem.into()))
    }

    /// The context of this rank's GPU.
    pub fn context(&self) -> &Context {
        self.tenant.context()
    }

    /// Sets the most multiprocessors that a later call uses; 0 leaves it to [`choose`](Self::choose).
    ///
    /// # Errors
    /// [`MoeError::Refused`] for more than there are.
    pub fn set_num_sms(&self, num_sms: u32) -> Result<()> {
        check_num_sms("num_sms", num_sms, self.tenant.usable_multiprocessors())?;
        self.num_sms.set(num_sms);
        Ok(())
    }

    /// The number of the next call that waits for counts.
    pub(crate) fn result_number(&self) -> u32 {
        self.waited.get().wrapping_add(1)
    }

    pub(crate) fn result_pointer(&self) -> u64 {
        self.result.pointer().0
    }

    /// Sets what later calls take where the number of multiprocessors is 0: until then the default. Ranks may differ.
    pub fn choose(&self, chosen: Multiprocessors) {
        self.chosen.replace(chosen);
    }

    /// How many multiprocessors a call uses, whose rank has so many bytes of tokens.
    pub(crate) fn blocks(&self, movement: Movement, bytes: usize) -> u32 {
        let most = match self.num_sms.get() {
            0 => self.chosen.borrow().of(movement, bytes),
            most => most,
        };
        most.min(self.tenant.multiprocessors_here()).max(1)
    }

    /// The way that rows pass through a multiprocessor of this GPU.
    pub(crate) fn staging(&self) -> Staging {
        Staging::of(&self.tenant)
    }

    /// Bytes of the region of each rank.
    pub(crate) fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    pub(crate) fn region_at(&self) -> u64 {
        self.tenant.region_at()
    }

    /// The bytes of the region for the rows of one peer.
    pub(crate) fn region_lane_bytes(&self) -> usize {
        self.region_bytes() / PARTS / (self.world_size() - 1).max(1) / LINE * LINE
    }

    /// The number of flags that fit a lane of a slot.
    pub(crate) fn flags(&self) -> usize {
        self.tenant.lane_bytes() / 4
    }

    /// Launches the kernel of a family that has one.
    ///
    /// # Safety
    /// As [`Tenant::run`], but for the stream.
    pub(crate) unsafe fn launch<F: Family<Arguments: Copy> + Copy>(
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
    pub(crate) unsafe fn launch_kernel<F: Family<Arguments: Copy> + Copy>(
        &self,
        family: F,
        kernel: F::Kernel,
        signature: &Signature,
        blocks: Blocks,
        arguments: F::Arguments,
        stream: StreamRef<'_>,
    ) -> Result<()> {
        if self.region_bytes == 0 {
            let problem = "the instance was made with region_bytes 0, for calls to slots alone";
            return Err(refused("CudaMoe", problem.into()));
        }
        let loaded = self.tenant.ready(family, stream)?;
        let blocks = match blocks {
            Blocks::One => 1,
            Blocks::Of(blocks) => blocks,
        };
        let config = family.blocks(blocks, self.tenant.world_size());
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

/// The number of blocks of a grid: one, or one for each of so many multiprocessors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Blocks {
    One,
    Of(u32),
}

/// Refuses more multiprocessors than `most`.
fn check_num_sms(call: &'static str, num_sms: u32, most: u32) -> Result<()> {
    match num_sms <= most {
        true => Ok(()),
        false => Err(refused(call, format!("{num_sms} multiprocessors; kernels may use {most}"))),
    }
}
