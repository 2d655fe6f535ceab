//! The instance with which a rank makes its calls on host memory.

use std::{cell::Cell, sync::Arc};

use antiphon_fabric::Communicator;

use crate::{
    MoeConfig,
    by_expert::{self, ByExpertCombine, ByExpertDispatch, ByExpertRoutes, ByExpertRouting},
    by_token::{self, Combine, Dispatch, Routing},
    error::{MoeError, Result, refused},
    layout::MAX_WORLD,
    region::Region,
    routes::ByTokenRoutes,
    slots::{self, SlotCombine, SlotDispatch, SlotLimits, SlotRoutes},
};

/// Dispatch and combine between the ranks of a communicator, on host memory.
///
/// Calls are collective and in the order of the communicator's others. Nothing that is dropped communicates:
/// [`close`](Self::close) gives the memory back before the communicator ends.
pub struct Moe {
    pub(crate) region: Region,
    /// Distinguishes routes of this instance from those of others.
    pub(crate) token: Arc<()>,
    /// The number of this instance among those of its communicator, in the order in which they were made.
    pub(crate) number: u32,
    /// The largest calls to slots, if they are limited.
    pub(crate) slots: Option<SlotLimits>,
}

impl std::fmt::Debug for Moe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Moe {{ number: {}, region_bytes: {} }}", self.number, self.region.buffer().len())
    }
}

/// The numbers of instances and routes that a communicator has had, which are equal on all ranks.
#[derive(Default)]
struct Numbers {
    instances: Cell<u32>,
    routes: Cell<u32>,
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
        let region = Region::new(comm.symmetric(config.region_bytes)?);
        let (token, number) = (Arc::new(()), next(&numbers(comm).instances));
        Ok(Self { region, token, number, slots: config.slots })
    }

    /// Bytes of a rank's region.
    pub fn region_bytes(&self) -> usize {
        self.region.buffer().len()
    }

    /// Tells all ranks how many rows each rank sends to each other rank. The routes say which rows come to this rank; any number of
    /// dispatches and combines may go along them.
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, dtype, experts or choices per token, or
    /// in whether there is a capacity ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn notify(&mut self, comm: &Communicator, routing: &Routing<'_>) -> Result<ByTokenRoutes> {
        self.belongs_to(comm, "dispatch")?;
        by_token::notify(self, comm, routing)
    }

    /// Moves rows along routes: the tokens of every rank to where the routes say, in the order of source rank and token.
    ///
    /// # Errors
    /// As [`notify`](Self::notify), and [`MoeError::Routes`].
    pub fn dispatch(
        &mut self,
        comm: &Communicator,
        routes: &ByTokenRoutes,
        call: Dispatch<'_>,
    ) -> Result<()> {
        self.owns(comm, &routes.owner, "dispatch")?;
        by_token::dispatch(self, comm, routes, call)
    }

    /// Moves rows back along routes, and sums those of each token, in the order of biases and ranks.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); [`MoeError::Routes`] also for routes along which nothing was dispatched yet.
    pub fn combine(&mut self, comm: &Communicator, routes: &ByTokenRoutes, call: Combine<'_>) -> Result<()> {
        self.owns(comm, &routes.owner, "combine")?;
        by_token::combine(self, comm, routes, call)
    }

    /// The routes that [`ByTokenRoutes::to_words`] gave words of, on this rank, of this instance.
    ///
    /// # Errors
    /// [`MoeError::Routes`] for words that are not those of routes.
    pub fn routes_from_words(
        &self,
        comm: &Communicator,
        num_experts: usize,
        words: &[u32],
    ) -> Result<ByTokenRoutes> {
        let place = (comm.rank(), comm.world_size());
        ByTokenRoutes::from_words(words, &self.token, place, num_experts).ok_or(MoeError::Routes {
            call: "combine",
            problem: "made of words that are not those of routes",
        })
    }

    /// Moves few tokens, at most [`max_tokens`](SlotDispatch::max_tokens) of each rank, to the slots of the experts that they
    /// choose; see [`slots`]. The routes are for their combine.
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, format, experts, choices per token or
    /// `max_tokens` ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn dispatch_to_slots(&mut self, comm: &Communicator, call: SlotDispatch<'_>) -> Result<SlotRoutes> {
        self.belongs_to(comm, "dispatch_to_slots")?;
        slots::dispatch(self, comm, call)
    }

    /// Moves the rows that the experts made of their slots back to the tokens, weighs and sums them.
    ///
    /// # Errors
    /// As [`dispatch_to_slots`](Self::dispatch_to_slots), and [`MoeError::Routes`].
    pub fn combine_from_slots(
        &mut self,
        comm: &Communicator,
        routes: &SlotRoutes,
        call: SlotCombine<'_>,
    ) -> Result<()> {
        self.owns(comm, &routes.owner, "combine_from_slots")?;
        slots::combine(self, comm, routes, call)
    }

    /// Tells all ranks how many rows each rank sends to each other rank, by routing maps; see [`by_expert`].
    ///
    /// # Errors
    /// [`MoeError`]: arguments that make no sense; ranks that differ in hidden size, dtype, experts, or in whether there is a
    /// capacity and in its `max_tokens` ([`Mismatch`](antiphon_fabric::FabricError::Mismatch), on every rank).
    pub fn notify_by_expert(
        &mut self,
        comm: &Communicator,
        routing: &ByExpertRouting<'_>,
    ) -> Result<ByExpertRoutes> {
        self.belongs_to(comm, "dispatch_by_expert")?;
        by_expert::notify(self, comm, routing)
    }

    /// Moves rows along routes: the tokens of every rank to a row for each of their experts.
    ///
    /// # Errors
    /// As [`notify_by_expert`](Self::notify_by_expert), and [`MoeError::Routes`].
    pub fn dispatch_by_expert(
        &mut self,
        comm: &Communicator,
        routes: &ByExpertRoutes,
        call: ByExpertDispatch<'_>,
    ) -> Result<()> {
        self.owns(comm, &routes.owner, "dispatch_by_expert")?;
        by_expert::dispatch(self, comm, routes, call)
    }

    /// Moves rows back along routes, and sums those of each token: on each rank in the order of experts, then in that of ranks.
    ///
    /// # Errors
    /// As [`dispatch_by_expert`](Self::dispatch_by_expert); [`MoeError::Routes`] also for routes along which nothing was dispatched
    /// yet.
    pub fn combine_by_expert(
        &mut self,
        comm: &Communicator,
        routes: &ByExpertRoutes,
        call: ByExpertCombine<'_>,
    ) -> Result<()> {
        self.owns(comm, &routes.owner, "combine_by_expert")?;
        by_expert::combine(self, comm, routes, call)
    }

    /// Gives the regions back; all ranks call it alike.
    ///
    /// # Errors
    /// As [`Communicator::free`].
    pub fn close(self, comm: &Communicator) -> Result<()> {
        Ok(comm.free(self.region.into_buffer())?)
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
            false => Err(MoeError::Routes { call, problem: "of another instance" }),
        }
    }
}

/// Draws the number of new routes, when the ranks have agreed on the call, so that all draw equally often.
pub(crate) fn next_routes(comm: &Communicator) -> u32 {
    next(&numbers(comm).routes)
}
