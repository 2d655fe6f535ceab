//! What the tenants of a communicator share on a GPU: the watch over their waits, and the failure that ends them all.

use std::{
    cell::RefCell,
    sync::{Arc, Weak},
};

use antiphon_device::{
    cuda::{Context, CudaVersion, StreamRef, WaitBoard},
    sync::{AtomicU32, Ordering},
};

use super::{
    OnFailure, UntilIdle, most_blocks,
    room::{Room, Where},
    staging::MAX_BLOCKS,
    watch::{Watch, explain},
};
use crate::{Communicator, FabricError, Monitor, Operation, Signature};

/// The engine of one communicator on one GPU.
pub(super) struct Engine {
    board: UntilIdle<Arc<WaitBoard>>,
    monitor: Monitor,
    watch: Watch,
    properties: Properties,
    context: Context,
    /// 1 once an error has been returned with its own variant, and 0 before; later calls get `Failed`.
    has_returned_error: AtomicU32,
}

/// The properties of this rank's GPU that the engine needs.
#[derive(Debug, Clone)]
pub(super) struct Properties {
    pub(super) name: String,
    uuid: String,
    /// The multiprocessors that the context's kernels may use.
    multiprocessors: u32,
    /// Those that there are.
    all_multiprocessors: u32,
    /// Whether blocks can reach each other's shared memory.
    pub(super) has_clusters: bool,
    pub(super) programmatic: Programmatic,
}

/// What calls may use of the ranks' GPUs.
pub(super) struct CommonRoom {
    pub(super) room: Arc<Room>,
    /// The multiprocessors that a kernel of every rank may use, while other ranks that share its GPU use as many. Blocks of one index
    /// meet, so grids are equal though GPUs may not be.
    pub(super) multiprocessors: u32,
    /// Those that it might use alone.
    pub(super) usable_multiprocessors: u32,
}

impl Drop for CommonRoom {
    fn drop(&mut self) {
        self.room.leave();
    }
}

/// The engines of a communicator that have tenants, by the ordinals of their GPUs.
#[derive(Default)]
struct Engines(RefCell<Vec<(u32, Weak<Engine>)>>);

impl Engine {
    /// The engine of this communicator on the GPU of `context`, which is made if it has no tenant yet. All ranks call it
    /// together, and do the same steps whether or not a rank has one already.
    pub(super) fn of(comm: &Communicator, context: &Context) -> Result<Arc<Self>, FabricError> {
        let ordinal = context.device().ordinal();
        let engines = comm.extension(|_| Ok::<_, FabricError>(Engines::default()))?;
        let known = engines.0.borrow().iter().find_map(|(gpu, engine)| {
            let engine = engine.upgrade()?;
            (*gpu == ordinal).then_some(engine)
        });
        let is_known = known.is_some();
        let engine = known.map_or_else(|| Self::new(comm, context).map(Arc::new), Ok);
        let engine = comm.agree("cannot watch its peers", engine)?;
        if !is_known {
            let mut engines = engines.0.borrow_mut();
            engines.retain(|(_, engine)| engine.strong_count() > 0);
            engines.push((ordinal, Arc::downgrade(&engine)));
        }
        Ok(engine)
    }

    fn new(comm: &Communicator, context: &Context) -> Result<Self, FabricError> {
        let monitor = comm.monitor();
        let board = Arc::new(WaitBoard::new(context)?);
        let watch = Watch::start(monitor.clone(), board.clone())?;
        Ok(Self {
            board: UntilIdle::new(context, board),
            monitor,
            watch,
            properties: Properties::of(context)?,
            context: context.clone(),
            has_returned_error: AtomicU32::new(0),
        })
    }

    /// What the calls of a new tenant may use of the ranks' GPUs. All ranks call it together.
    pub(super) fn common_room(&self, comm: &Communicator) -> Result<CommonRoom, FabricError> {
        let Properties { multiprocessors, all_multiprocessors, ref uuid, .. } = self.properties;
        let mine = (uuid.clone(), std::process::id(), [multiprocessors, all_multiprocessors]);
        let ranks = comm.exchange_objects(&mine)?;
        let most = MAX_BLOCKS / most_blocks(comm.world_size());
        let usable = ranks.iter().map(|(.., [usable, _])| *usable).min().unwrap_or(multiprocessors);
        let shared = ranks.iter().map(|(gpu, _, [usable, all])| {
            let sharing = ranks.iter().filter(|(other, ..)| other == gpu).count() as u32;
            (*usable).min(all / sharing).max(1)
        });
        let each = shared.min().unwrap_or(usable);
        let is_mine = |(gpu, process, _): &&(String, u32, [u32; 2])| (gpu, process) == (&mine.0, &mine.1);
        let thread = (ranks.iter().filter(is_mine).count() > 1).then(|| std::thread::current().id());
        let place = Where { ordinal: self.context.device().ordinal(), thread };
        let room = Room::at(place, &self.context);
        Ok(CommonRoom { room, multiprocessors: each.min(most), usable_multiprocessors: usable.min(most) })
    }

    #[inline]
    pub(super) fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    #[inline]
    pub(super) fn board(&self) -> &WaitBoard {
        &self.board
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    #[inline]
    pub(super) fn properties(&self) -> &Properties {
        &self.properties
    }

    pub(super) fn on_failure(&self, action: OnFailure) {
        self.watch.on_failure(action);
    }

    /// Whether all calls that are over have done what they should.
    #[inline]
    pub(super) fn check(&self) -> Result<(), FabricError> {
        match self.board.report() {
            None => {
                self.monitor.check_usable()?;
                // The last look, behind the kernels: a peer that gave up has no result.
                let given_up = self.monitor.check_given_up(Signature::new(Operation::Barrier));
                given_up.or_else(|error| self.fail(error))
            }
            Some(report) => self.fail(explain(&self.monitor, &report, self.watch.lost())),
        }
    }

    /// Whether a call that needs all peers may be made now.
    #[inline]
    pub(super) fn check_ready(&self) -> Result<(), FabricError> {
        self.check()?;
        match self.watch.lost() {
            None => Ok(()),
            Some(lost) => self.fail(lost.clone()),
        }
    }

    /// Ends this communicator: every wait of every tenant is in vain. The first caller gets the error itself.
    #[cold]
    pub(super) fn fail<T>(&self, error: FabricError) -> Result<T, FabricError> {
        if self.has_returned_error.load(Ordering::Relaxed) != 0 {
            self.monitor.check_usable()?;
        }
        self.has_returned_error.store(1, Ordering::Relaxed);
        self.monitor.report(&error);
        self.board.abort();
        Err(error)
    }
}

impl Properties {
    fn of(context: &Context) -> Result<Self, FabricError> {
        let properties = context.device().properties()?;
        Ok(Self {
            multiprocessors: context.multiprocessors()?,
            all_multiprocessors: properties.multiprocessors,
            uuid: properties.uuid,
            has_clusters: properties.cluster_launch,
            programmatic: Programmatic::of(
                properties.compute_capability,
                context.device().driver().version(),
            ),
            name: properties.name,
        })
    }
}

/// Whether kernels are launched so that they may start while the one ahead ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Programmatic {
    Never,
    /// Not where they are captured.
    Eager,
    Always,
}

impl Programmatic {
    /// When a kernel may begin before the kernel ahead has ended: from Hopper on, and in graphs since CUDA 12.3.
    fn of(capability: (u32, u32), driver: CudaVersion) -> Self {
        match capability {
            (..9, _) => Self::Never,
            _ if driver < CudaVersion::new(12, 3) => Self::Eager,
            _ => Self::Always,
        }
    }

    /// Whether a launch into this stream is made so.
    #[inline]
    pub(super) fn applies(self, stream: StreamRef<'_>) -> Result<bool, FabricError> {
        match self {
            Self::Always => Ok(true),
            Self::Never => Ok(false),
            Self::Eager => Ok(!stream.is_capturing()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programmatic_launch_is_asked_for_where_it_exists() {
        let of = |capability, major, minor| Programmatic::of(capability, CudaVersion::new(major, minor));
        assert_eq!(of((8, 0), 13, 0), Programmatic::Never);
        assert_eq!(of((8, 9), 12, 8), Programmatic::Never);
        assert_eq!(of((9, 0), 12, 0), Programmatic::Eager);
        assert_eq!(of((9, 0), 12, 2), Programmatic::Eager);
        assert_eq!(of((9, 0), 12, 3), Programmatic::Always);
        assert_eq!(of((10, 0), 13, 0), Programmatic::Always);
    }
}
