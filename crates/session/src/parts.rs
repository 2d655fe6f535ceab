//! What one kind of calls has on the GPUs of a session: its parts are opened by one function and closed by one.
//!
//! Collectives, plans, mixtures of experts and their slots each have a list of parts. All lists of a session share what is asked
//! of its GPUs as a whole: the queue of the calls, the action after a failure, and whether the session is closed.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon_collectives::cuda::OnFailure;
use antiphon_device::{
    cuda::{Context, CudaError, Driver, StreamRef},
    sync::Mutex,
};
use antiphon_fabric::{Communicator, Queue};

use crate::{FailureAction, GpuStream, Result, SessionError};

/// What one kind of calls has on one GPU.
pub(crate) trait Part: Send {
    /// The number of the GPU.
    fn ordinal(&self) -> u32;

    /// Sets the action after a kernel of the communicator has given up on this GPU.
    fn on_failure(&self, action: OnFailure);

    /// Returns the failure that kernels have reported, if any.
    fn check(&self) -> Result;
}

/// A list of parts, whatever their kind.
trait List: Send + Sync {
    fn on_failure(&self, action: &FailureAction);
    fn check(&self) -> Result;
    fn close(&self);
}

/// What the lists of a session share.
pub(crate) struct Shared {
    /// Absent when closed. Calls hold a reference of their own.
    queue: Mutex<Option<Arc<Queue>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The action after a kernel has given up; without one, the action of the environment.
    on_failure: Option<FailureAction>,
    /// Nothing is opened any more.
    is_closed: bool,
    lists: Vec<Weak<dyn List>>,
}

/// The parts of one kind of calls on the GPUs that were used; one, as a rule.
pub(crate) struct Parts<P> {
    open: Mutex<Vec<P>>,
    shared: Arc<Shared>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(comm: Communicator) -> Arc<Self> {
        let queue = Mutex::new(Some(Arc::new(Queue::new(comm))));
        Arc::new(Self { queue, state: Mutex::default() })
    }

    /// The queue of the calls, unless the session is closed.
    pub(crate) fn queue(&self) -> Result<Arc<Queue>> {
        lock(&self.queue).clone().ok_or(SessionError::Closed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.queue).is_none()
    }

    /// The queue, which later calls do not find any more.
    pub(crate) fn take_queue(&self) -> Option<Arc<Queue>> {
        lock(&self.queue).take()
    }

    /// What `work` returns in the queue's turn.
    pub(crate) fn run<T>(&self, work: impl FnOnce(&Communicator) -> Result<T>) -> Result<T> {
        self.queue()?.run(work)
    }

    fn lists(&self) -> Vec<Arc<dyn List>> {
        lock(&self.state).lists.iter().filter_map(Weak::upgrade).collect()
    }

    /// Sets the action that is taken when a kernel gives up, on every GPU.
    pub(crate) fn on_failure(&self, action: FailureAction) {
        let mut state = lock(&self.state); // until all lists have it, so that a part that is opened meanwhile has it too
        for list in state.lists.iter().filter_map(Weak::upgrade) {
            list.on_failure(&action);
        }
        let before = state.on_failure.replace(action);
        drop(state);
        drop(before); // without the lock, as it may be a program's function
    }

    /// Returns a failure that kernels have reported, if any.
    pub(crate) fn check(&self) -> Result {
        self.lists().iter().try_for_each(|list| list.check())
    }

    /// Leaves the peers, once the kernels under way are over.
    pub(crate) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.lists().iter().for_each(|list| list.close());
    }
}

impl<P: Part> Parts<P> {
    /// An empty list of a session.
    pub(crate) fn new(shared: &Arc<Shared>) -> Arc<Self>
    where
        P: 'static,
    {
        let parts = Arc::new(Self { open: Mutex::default(), shared: shared.clone() });
        let list: Weak<Self> = Arc::downgrade(&parts);
        let mut state = lock(&shared.state);
        state.lists.retain(|list| list.strong_count() > 0);
        state.lists.push(list);
        drop(state);
        parts
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// What `work` returns with the part of a device, if that is open.
    pub(crate) fn with_open<T>(&self, device: u32, work: impl FnOnce(&mut P) -> T) -> Option<T> {
        find(&mut lock(&self.open), device).map(work)
    }

    /// What `work` returns with the part of a device that is open, in the queue's turn.
    ///
    /// # Errors
    /// [`SessionError::Closed`]; as `work`.
    pub(crate) fn run<T>(
        &self,
        device: u32,
        work: impl FnOnce(&Communicator, &mut P) -> Result<T>,
    ) -> Result<T> {
        self.shared
            .run(|comm| self.with_open(device, |part| work(comm, part)).unwrap_or(Err(SessionError::Closed)))
    }

    /// What `work` returns with the part of a device, which `make` makes if it is not open: together with the peers, so in the queue's
    /// turn, where another thread may have been faster.
    ///
    /// # Errors
    /// [`SessionError::Captured`], which names `calls`, if the stream is being captured, as memory and kernels are set up;
    /// [`SessionError::Closed`]; as `make` and `work`.
    pub(crate) fn with<T>(
        &self,
        (device, stream): (u32, Option<GpuStream<'_>>),
        calls: &'static str,
        make: impl FnOnce(&Communicator, &Context) -> Result<P>,
        work: impl FnOnce(&mut P) -> Result<T>,
    ) -> Result<T> {
        if let Some(part) = find(&mut lock(&self.open), device) {
            return work(part);
        }
        self.open((device, stream), calls, make)?;
        match find(&mut lock(&self.open), device) {
            Some(part) => work(part),
            None => Err(SessionError::Closed),
        }
    }

    #[cold]
    fn open(
        &self,
        (device, stream): (u32, Option<GpuStream<'_>>),
        calls: &'static str,
        make: impl FnOnce(&Communicator, &Context) -> Result<P>,
    ) -> Result {
        let context = primary(device)?;
        if let Some(stream) = stream {
            not_captured(stream.on(&context), calls)?;
        }
        self.shared.run(|comm| {
            if self.with_open(device, |_| ()).is_some() {
                return Ok(()); // another thread was faster
            }
            let part = make(comm, &context)?;
            let state = lock(&self.shared.state);
            if state.is_closed {
                drop(state); // first, as the end of the part waits
                return Err(SessionError::Closed);
            }
            if let Some(action) = &state.on_failure {
                part.on_failure(action.on_failure());
            }
            lock(&self.open).push(part);
            Ok(())
        })
    }

    /// The part of a device, which is not open any more.
    pub(crate) fn take(&self, device: u32) -> Option<P> {
        let mut open = lock(&self.open);
        let index = open.iter().position(|part| part.ordinal() == device)?;
        Some(open.swap_remove(index))
    }

    /// Returns the failure that kernels of these calls have reported, if any.
    pub(crate) fn check(&self) -> Result {
        lock(&self.open).iter().try_for_each(Part::check)
    }

    /// Leaves the peers, once the kernels under way are over.
    pub(crate) fn close(&self) {
        let open = std::mem::take(&mut *lock(&self.open));
        drop(open); // without the lock, as it waits
    }
}

impl<P: Part> List for Parts<P> {
    fn on_failure(&self, action: &FailureAction) {
        for part in &*lock(&self.open) {
            part.on_failure(action.on_failure());
        }
    }

    fn check(&self) -> Result {
        Self::check(self)
    }

    fn close(&self) {
        Self::close(self);
    }
}

/// The part of a device.
fn find<P: Part>(open: &mut [P], device: u32) -> Option<&mut P> {
    open.iter_mut().find(|part| part.ordinal() == device)
}

/// Refuses to set up in the middle of a capture, which would end it.
fn not_captured(stream: StreamRef<'_>, calls: &'static str) -> Result {
    match stream.is_capturing()? {
        false => Ok(()),
        true => Err(SessionError::Captured { calls }),
    }
}

/// The context that a device shares among the libraries of a process.
fn primary(device: u32) -> Result<Context, CudaError> {
    Context::primary(Driver::load()?.device(device)?)
}
