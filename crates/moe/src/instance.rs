//! The instance with which a rank makes its calls on host memory.

use std::{cell::Cell, sync::Arc};

use antiphon_fabric::Communicator;

use crate::{
    MoeConfig,
    error::{MoeError, Result, refused},
    handle::Handle,
    hybrid::{self, HybridCombine, HybridDispatch, HybridHandle, HybridRouting},
    layout::MAX_WORLD,
    low_latency::{self, LowLatency, LowLatencyCombine, LowLatencyDispatch, LowLatencyHandle},
    normal::{self, Combine, Dispatch, Routing},
    region::Region,
};

/// Dispatch and combine between the ranks of a communicator, on host memory.
///
/// Calls are collective and in the order of the communicator's others. Nothing that is dropped communicates:
/// [`close`](Self::close) gives the memory back before the communicator ends.
pub struct Moe {
    pub(crate) region: Region,
    /// Distinguishes handles of this instance from those of others.
    pub(crate) token: Arc<()>,
    /// The number of this instance among those of its communicator, in the order in which they were made.
    pub(crate) number: u32,
    /// The largest low-latency calls, if they are limited.
    pub(crate) low_latency: Option<LowLatency>,
}

impl std::fmt::Debug for Moe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moe {{ number: {}, region_bytes: {} }}", self.number, self.region.buffer().len())
    }
}

/// The numbers of instances and handles that a communicator has had, which are equal on all ranks.
#[derive(Default)]
struct Numbers {
    instances: Cell<u32>,
    handles: Cell<u32>,
}

/// Counts on, past 0.
fn next(count: &Cell<u32>) -> u32 {
    count.set(count.get().wrapping_add(1).max(1));
    count.get()
}

fn numbers(comm: &Communicator) -> &Numbers {
    let made = comm.extension(|_| Ok::<_, std::convert::Infallible>(Numbers::default()));
    made.unwrap_or_else(|never| match never {})
}

impl Moe {
    /// Takes the regions; all ranks call it alike.
    ///
    /// # Errors
    /// [`MoeError::Refused`] for more than [`MAX_WORLD`] ranks; [`FabricError`](antiphon_fabric::FabricError): `ArenaFull`,
    /// `InvalidArgument` if the ranks are on several nodes, and as [`barrier`](Communicator::barrier).
    pub fn new(comm: &Communicator, config: MoeConfig) -> Result<Self> {
        if comm.world_size() > MAX_WORLD {
            let problem = format!("{} ranks; at most {MAX_WORLD} are served", comm.world_size());
            return Err(refused("Moe::new", problem));
        }
        comm.check_one_node("a mixture of experts")?;
        let region = Region::new(comm.create_shared_buffer(config.region_bytes)?);
        let (token, number) = (Arc::new(()), next(&numbers(comm).instances));
        Ok(Self { region, token, number, low_latency: config.low_latency })
    }

    /// Bytes of a rank's region.
    pub fn region_bytes(&self) -> usize {
        self.region.buffer().len()
    }

    /// Tells all ranks how many rows go from whom to whom. The handle has what comes to this rank, and along it rows go as
    /// often as they are dispatched and combined.
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, dtype, experts or choices per token, or
    /// in whether there is a capacity ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn notify(&mut self, comm: &Communicator, routing: &Routing<'_>) -> Result<Handle> {
        self.belongs_to(comm, "dispatch")?;
        normal::notify(self, comm, routing)
    }

    /// Moves rows along a handle: the tokens of every rank to where the handle says, in the order of source rank and token.
    ///
    /// # Errors
    /// As [`notify`](Self::notify), and [`MoeError::Handle`].
    pub fn dispatch(&mut self, comm: &Communicator, handle: &Handle, call: Dispatch<'_>) -> Result<()> {
        self.owns(comm, &handle.owner, "dispatch")?;
        normal::dispatch(self, comm, handle, call)
    }

    /// Moves rows back along a handle, and sums those of each token, in the order of biases and ranks.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`MoeError::Handle`] also for a handle along which nothing was dispatched yet.
    pub fn combine(&mut self, comm: &Communicator, handle: &Handle, call: Combine<'_>) -> Result<()> {
        self.owns(comm, &handle.owner, "combine")?;
        normal::combine(self, comm, handle, call)
    }

    /// The handle that [`Handle::to_words`] gave words of, on this rank, of this instance.
    ///
    /// # Errors
    /// [`MoeError::Handle`] for words that are none of it.
    pub fn handle_from_words(
        &self,
        comm: &Communicator,
        num_experts: usize,
        words: &[u32],
    ) -> Result<Handle> {
        let place = (comm.rank(), comm.world_size());
        Handle::from_words(words, &self.token, place, num_experts).ok_or(MoeError::Handle {
            call: "combine",
            problem: "made of words that are not those of a handle",
        })
    }

    /// Moves few tokens, at most [`max_tokens`](LowLatencyDispatch::max_tokens) of each rank, to the slots of the experts that they
    /// choose; see [`low_latency`]. The handle is for their combine.
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, format, experts, choices per token or
    /// `max_tokens` ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn low_latency_dispatch(
        &mut self,
        comm: &Communicator,
        call: LowLatencyDispatch<'_>,
    ) -> Result<LowLatencyHandle> {
        self.belongs_to(comm, "low_latency_dispatch")?;
        low_latency::dispatch(self, comm, call)
    }

    /// Moves what the experts made of their slots back to the tokens, weighs and sums it.
    ///
    /// # Errors
    /// As [`low_latency_dispatch`](Self::low_latency_dispatch), and [`MoeError::Handle`].
    pub fn low_latency_combine(
        &mut self,
        comm: &Communicator,
        handle: &LowLatencyHandle,
        call: LowLatencyCombine<'_>,
    ) -> Result<()> {
        self.belongs_to(comm, "low_latency_combine")?;
        low_latency::combine(self, comm, handle, call)
    }

    /// Tells all ranks how many rows go from whom to whom, by routing maps; see [`hybrid`].
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, dtype, experts, or in whether there is a
    /// capacity and in its `max_tokens` ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn hybrid_notify(
        &mut self,
        comm: &Communicator,
        routing: &HybridRouting<'_>,
    ) -> Result<HybridHandle> {
        self.belongs_to(comm, "hybrid_dispatch")?;
        hybrid::notify(self, comm, routing)
    }

    /// Moves rows along a handle: the tokens of every rank to a row for each of their experts.
    ///
    /// # Errors
    /// As [`hybrid_notify`](Self::hybrid_notify), and [`MoeError::Handle`].
    pub fn hybrid_dispatch(
        &mut self,
        comm: &Communicator,
        handle: &HybridHandle,
        call: HybridDispatch<'_>,
    ) -> Result<()> {
        self.owns(comm, &handle.owner, "hybrid_dispatch")?;
        hybrid::dispatch(self, comm, handle, call)
    }

    /// Moves rows back along a handle, and sums those of each token: on each rank in the order of experts, then in that of ranks.
    ///
    /// # Errors
    /// As [`hybrid_dispatch`](Self::hybrid_dispatch); [`MoeError::Handle`] also for a handle along which nothing was dispatched
    /// yet.
    pub fn hybrid_combine(
        &mut self,
        comm: &Communicator,
        handle: &HybridHandle,
        call: HybridCombine<'_>,
    ) -> Result<()> {
        self.owns(comm, &handle.owner, "hybrid_combine")?;
        hybrid::combine(self, comm, handle, call)
    }

    /// Gives the regions back; all ranks call it alike.
    ///
    /// # Errors
    /// As [`Communicator::free_shared_buffer`].
    pub fn close(self, comm: &Communicator) -> Result<()> {
        Ok(comm.free_shared_buffer(self.region.into_buffer())?)
    }

    fn belongs_to(&self, comm: &Communicator, call: &'static str) -> Result<()> {
        match self.region.buffer().belongs_to(comm) {
            true => Ok(()),
            false => Err(refused(call, "the instance belongs to another communicator".into())),
        }
    }

    fn owns(&self, comm: &Communicator, owner: &Arc<()>, call: &'static str) -> Result<()> {
        self.belongs_to(comm, call)?;
        match Arc::ptr_eq(owner, &self.token) {
            true => Ok(()),
            false => Err(MoeError::Handle { call, problem: "of another instance" }),
        }
    }
}

/// The number of a new handle: drawn when ranks have agreed on it, so that all draw equally often.
pub(crate) fn next_handle(comm: &Communicator) -> u32 {
    next(&numbers(comm).handles)
}
