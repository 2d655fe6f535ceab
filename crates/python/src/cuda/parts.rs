//! What one kind of calls has on the GPUs of a communicator: its parts are opened by one function and closed by one.
//!
//! Collectives, plans, mixtures of experts and their slots each have a list of parts. All lists of a communicator share what is asked
//! of its GPUs as a whole: the action after a failure, and whether the communicator is closed.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    collectives::cuda::OnFailure,
    device::cuda::{Context, CudaError, Driver, StreamRef},
    fabric::{Communicator, Queue},
    prelude::FabricError,
};
use pyo3::prelude::*;

use super::Action;
use crate::{error::Result, stream::RawStream};

/// What one kind of calls has on one GPU.
pub(crate) trait Part: Send {
    /// The number of the GPU.
    fn ordinal(&self) -> u32;

    /// Sets the action after a kernel of the communicator has given up on this GPU.
    fn on_failure(&self, action: OnFailure);

    /// Returns the failure that kernels have reported, if any.
    fn check(&self) -> Result<()>;
}

/// A list of parts, whatever their kind.
pub(crate) trait List: Send + Sync {
    fn on_failure(&self, py: Python<'_>, action: &Action);
    fn check(&self) -> Result<()>;
    /// Leaves the peers, once the kernels under way are over.
    fn close(&self);
}

/// What the lists of a communicator share.
#[derive(Default)]
pub(super) struct Shared(Mutex<State>);

#[derive(Default)]
struct State {
    /// The action after a kernel has given up; without one, the action of the environment.
    on_failure: Option<Action>,
    /// Nothing is opened any more.
    is_closed: bool,
    lists: Vec<Weak<dyn List>>,
}

/// The parts of one kind of calls on the GPUs that were used; one, as a rule.
pub(crate) struct Parts<P> {
    open: Mutex<Vec<P>>,
    shared: Arc<Shared>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lists(&self) -> Vec<Arc<dyn List>> {
        self.lock().lists.iter().filter_map(Weak::upgrade).collect()
    }

    /// Sets the action that is taken when a kernel gives up, on every GPU.
    pub(super) fn on_failure(&self, py: Python<'_>, action: Action) {
        let before = py.detach(|| {
            let mut state = self.lock(); // until all lists have it, so that a part that is opened meanwhile has it too
            for list in state.lists.iter().filter_map(Weak::upgrade) {
                Python::attach(|py| list.on_failure(py, &action));
            }
            state.on_failure.replace(action)
        });
        drop(before); // attached, as it may be a callable
    }

    /// Returns a failure that kernels have reported, if any.
    pub(super) fn check(&self) -> Result<()> {
        self.lists().iter().try_for_each(|list| list.check())
    }

    /// Leaves the peers, once the kernels under way are over.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.lists().iter().for_each(|list| list.close());
    }
}

impl<P: Part> Parts<P> {
    /// An empty list of a communicator.
    pub(super) fn new(shared: &Arc<Shared>) -> Arc<Self>
    where
        P: 'static,
    {
        let parts = Arc::new(Self { open: Mutex::default(), shared: shared.clone() });
        let list: Weak<Self> = Arc::downgrade(&parts);
        let mut state = shared.lock();
        state.lists.retain(|list| list.strong_count() > 0);
        state.lists.push(list);
        drop(state);
        parts
    }

    fn lock(&self) -> MutexGuard<'_, Vec<P>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `work` returns with the part of a device, if that is open.
    pub(crate) fn with_open<T>(&self, device: u32, work: impl FnOnce(&mut P) -> T) -> Option<T> {
        find(&mut self.lock(), device).map(work)
    }

    /// What `work` returns with the part of a device, which `make` makes if it is not open: together with the peers, so in the queue's
    /// turn, where another thread may have been faster.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] if `stream` is being captured, as memory and kernels are set up, which names `calls`; if the
    /// communicator is closed. As `make` and `work`.
    ///
    /// # Safety
    /// `stream` is one of the device.
    pub(crate) unsafe fn with<T, E: From<FabricError> + From<CudaError>>(
        &self,
        (queue, device, stream): (&Queue, u32, Option<RawStream>),
        calls: &str,
        make: impl FnOnce(&Communicator, &Context) -> Result<P, E>,
        work: impl FnOnce(&mut P) -> Result<T, E>,
    ) -> Result<T, E> {
        if let Some(part) = find(&mut self.lock(), device) {
            return work(part);
        }
        // SAFETY: passed on.
        unsafe { self.open(queue, device, stream, calls, make) }?;
        match find(&mut self.lock(), device) {
            Some(part) => work(part),
            None => Err(closed().into()),
        }
    }

    /// # Safety
    /// As [`with`](Self::with).
    #[cold]
    unsafe fn open<E: From<FabricError> + From<CudaError>>(
        &self,
        queue: &Queue,
        device: u32,
        stream: Option<RawStream>,
        calls: &str,
        make: impl FnOnce(&Communicator, &Context) -> Result<P, E>,
    ) -> Result<(), E> {
        let context = primary(device)?;
        if let Some(stream) = stream {
            // SAFETY: passed on.
            not_captured(unsafe { context.borrow_stream(stream) }, calls)?;
        }
        queue.run(|comm| {
            if self.with_open(device, |_| ()).is_some() {
                return Ok(()); // another thread was faster
            }
            let part = make(comm, &context)?;
            let state = self.shared.lock();
            if state.is_closed {
                drop(state); // first, as the end of the part waits
                return Err(closed().into());
            }
            if let Some(action) = &state.on_failure {
                part.on_failure(Python::attach(|py| action.on_failure(py)));
            }
            self.lock().push(part);
            Ok(())
        })
    }
}

impl<P: Part> List for Parts<P> {
    fn on_failure(&self, py: Python<'_>, action: &Action) {
        for part in &*self.lock() {
            part.on_failure(action.on_failure(py));
        }
    }

    fn check(&self) -> Result<()> {
        self.lock().iter().try_for_each(Part::check)
    }

    fn close(&self) {
        let open = std::mem::take(&mut *self.lock());
        drop(open); // without the lock, as it waits
    }
}

/// The part of a device.
fn find<P: Part>(open: &mut [P], device: u32) -> Option<&mut P> {
    open.iter_mut().find(|part| part.ordinal() == device)
}

/// Refuses to set up in the middle of a capture, which would end it.
fn not_captured(stream: StreamRef<'_>, calls: &str) -> Result<(), FabricError> {
    match stream.is_capturing()? {
        false => Ok(()),
        true => Err(FabricError::invalid(format!(
            "the first {calls} of a communicator on a GPU sets up memory and kernels, and this stream is being captured: make one \
             before the capture, or call comm.prepare_cuda() for collectives, with the dtypes and operators that the capture will use"
        ))),
    }
}

pub(super) fn closed() -> FabricError {
    FabricError::invalid("the communicator was closed meanwhile")
}

pub(crate) fn primary(device: u32) -> Result<Context, CudaError> {
    Context::primary(Driver::load()?.device(device)?)
}
