//! Work in the background, while the caller does something else.

use std::{
    sync::{Arc, mpsc},
    thread::ThreadId,
    time::{Duration, Instant},
};

use super::{Communicator, Messenger};
use crate::{
    FabricError,
    endpoint::Endpoint,
    signal::channel::{Messages, Ticket},
};

pub(super) type Job = Box<dyn FnOnce(&Communicator) + Send>;

/// The thread that runs background work, in the order in which it was given.
pub(super) struct Worker {
    jobs: mpsc::Sender<Job>,
    thread: ThreadId,
}

impl Worker {
    pub(super) fn start(messenger: Messenger) -> Result<Self, FabricError> {
        let (sender, jobs) = mpsc::channel::<Job>();
        let name = format!("antiphon-{}", messenger.rank());
        let run = move || {
            let comm = Communicator::on_lane(messenger, 1);
            for job in jobs {
                job(&comm);
            }
        };
        let worker = std::thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|e| FabricError::invalid(format!("no thread for background work: {e}")))?;
        Ok(Self { jobs: sender, thread: worker.thread().id() })
    }
}

/// Tells the others when the work panics: they may be waiting for it.
struct Alarm<'a>(&'a Endpoint);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.report(&panicked());
        }
    }
}

impl Communicator {
    /// Runs `work` in the background and returns at once with a handle to wait on.
    ///
    /// The background is a communicator of the same ranks with an order of its own: work given to it runs one after
    /// the other on every rank, beside what the caller does meanwhile. All non-blocking collectives are this with
    /// one call inside; several calls may as well go together.
    ///
    /// ```
    /// use antiphon_fabric::LocalWorld;
    ///
    /// LocalWorld::run(2, |comm| {
    ///     let pending = comm.spawn(|comm| comm.barrier())?;
    ///     comm.barrier()?; // at the same time
    ///     pending.wait()
    /// });
    /// ```
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] when called in the background itself, or when no thread can be started;
    /// [`Failed`](FabricError::Failed).
    pub fn spawn<T, E>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, E> + Send + 'static,
    ) -> Result<Pending<T, E>, FabricError>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        self.check_foreground("spawn")?;
        self.endpoint.health.check_usable()?;
        if self.background.get().is_none() {
            let worker = Worker::start(self.messenger.clone())?;
            self.background.get_or_init(|| worker);
        }
        let &Worker { ref jobs, thread } = self.background.get().expect("started above");
        let (job, pending) = job(work, move || std::thread::current().id() == thread);
        jobs.send(job).map_err(|_| FabricError::Panicked)?;
        Ok(pending)
    }
}

/// Work for a thread that has a communicator, and the handle to wait for it. `is_behind` says whether the work cannot begin
/// before the calling thread has finished its present work.
pub(super) fn job<T: Send + 'static, E: Send + 'static>(
    work: impl FnOnce(&Communicator) -> Result<T, E> + Send + 'static,
    is_behind: impl Fn() -> bool + Send + Sync + 'static,
) -> (Job, Pending<T, E>) {
    let (sender, result) = mpsc::sync_channel(1);
    // The receiver may be dropped before: then no caller wants the result.
    let job = Box::new(move |comm: &Communicator| {
        let _alarm = Alarm(&comm.endpoint);
        drop(sender.send(work(comm)));
    });
    (job, Pending(State::Background { result, is_behind: Box::new(is_behind), early: None }))
}

/// Where a transfer leaves the buffer that it owned.
pub(super) type Handover<T> = mpsc::Receiver<T>;

/// Something in progress; see [`Communicator::spawn`] and [`Communicator::start_send`].
///
/// Dropping it does not cancel what it stands for: the buffers belong to the operation until that is over.
#[must_use = "wait for it, to know how it ended and to get the buffers back"]
pub struct Pending<T, E = FabricError>(State<T, E>);

enum State<T, E> {
    Background {
        result: mpsc::Receiver<Result<T, E>>,
        is_behind: Box<dyn Fn() -> bool + Send + Sync>,
        early: Option<Result<T, E>>,
    },
    Transfer {
        messages: Arc<Messages>,
        ticket: Ticket,
        buffer: Handover<T>,
        waiting: Option<Instant>,
        early: Option<FabricError>,
    },
}

impl<T, E> Pending<T, E> {
    pub(super) fn transfer(messages: Arc<Messages>, ticket: Ticket, buffer: Handover<T>) -> Self {
        Self(State::Transfer { messages, ticket, buffer, waiting: None, early: None })
    }
}

impl<T, E> Pending<T, E> {
    /// The rank that a received message came from: once it is over, of a message [from any](crate::Source::Any).
    pub fn source(&self) -> Option<usize> {
        match &self.0 {
            State::Transfer { ticket, .. } => ticket.origin(),
            State::Background { .. } => None,
        }
    }
}

impl<T, E: From<FabricError>> Pending<T, E> {
    /// Waits until it is over and returns the result, usually the buffers that were given.
    ///
    /// # Errors
    /// Those of the operation; [`FabricError::InvalidArgument`] when work waits for work that comes after it in the same
    /// order.
    pub fn wait(self) -> Result<T, E> {
        match self.0 {
            State::Background { early: Some(result), .. } => result,
            State::Background { result, is_behind, .. } => match result.try_recv() {
                Ok(result) => result,
                // It would wait for itself, for ever.
                Err(mpsc::TryRecvError::Empty) if is_behind() => Err(FabricError::invalid(
                    "this work waits for work that was given later, which begins when this one is over",
                )
                .into()),
                Err(_) => result.recv().unwrap_or_else(|_| Err(panicked().into())),
            },
            State::Transfer { messages, ticket, early: Some(error), .. } => {
                messages.cancel(&ticket);
                Err(error.into())
            }
            State::Transfer { messages, ticket, buffer, .. } => {
                messages.wait(&ticket)?;
                buffer.recv().map_err(|_| panicked().into())
            }
        }
    }

    /// Whether it is over, so that [`wait`](Self::wait) returns at once.
    pub fn is_finished(&mut self) -> bool {
        self.wait_for(Duration::ZERO)
    }

    /// Waits for `limit` at most; whether it is over then. Whatever happens it can be waited for again.
    pub fn wait_for(&mut self, limit: Duration) -> bool {
        match &mut self.0 {
            State::Background { result, early, .. } => {
                if early.is_none() {
                    *early = match result.recv_timeout(limit) {
                        Ok(value) => Some(value),
                        Err(mpsc::RecvTimeoutError::Timeout) => None,
                        Err(mpsc::RecvTimeoutError::Disconnected) => Some(Err(panicked().into())),
                    };
                }
                early.is_some()
            }
            State::Transfer { early: Some(_), .. } => true,
            State::Transfer { messages, ticket, waiting, early, .. } => {
                let since = *waiting.get_or_insert_with(Instant::now);
                match messages.wait_for(ticket, limit, since) {
                    Ok(over) => over,
                    Err(error) => {
                        *early = Some(error);
                        true
                    }
                }
            }
        }
    }
}

fn panicked() -> FabricError {
    FabricError::Panicked
}
