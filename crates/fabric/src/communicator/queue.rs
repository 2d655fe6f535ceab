//! A queue that gives the calls of many threads one order.

use std::{
    cell::Cell,
    collections::BTreeSet,
    sync::{Arc, Condvar, MutexGuard, PoisonError, mpsc},
    thread::{self, ThreadId},
    time::Duration,
};

use super::{
    Communicator, Messenger, Monitor, Pending,
    background::{Job, job},
};
use crate::FabricError;
use antiphon_device::sync::Mutex;

/// How often a caller that waits for its turn looks for an interrupt.
const LOOK: Duration = Duration::from_millis(10);

/// A communicator that any thread may use, with one order for all its calls.
///
/// Calls happen in the order in which they were made, whether they were [run](Self::run) (and waited for) or
/// [started](Self::start). So it does not matter to the others whether a rank waits: what one rank starts, another may
/// run. (The background of [`Communicator::spawn`] has an order of its own: it runs beside the caller's calls, and
/// every rank must use it alike.) [Messages](Self::messenger) do not queue up.
///
/// ```
/// use antiphon_fabric::{FabricError, LocalWorld, Queue};
///
/// LocalWorld::run(2, |comm| {
///     let queue = Queue::new(comm);
///     let greeting = format!("from rank {}", queue.messenger().rank());
///     let all = match queue.messenger().rank() {
///         0 => queue.run(|comm| comm.exchange_bytes(greeting.as_bytes()))?,
///         _ => queue.start(move |comm| comm.exchange_bytes(greeting.as_bytes()))?.wait()?,
///     };
///     assert_eq!(all[1], b"from rank 1");
///     queue.run(|comm| comm.barrier())
/// });
/// ```
pub struct Queue {
    lane: Arc<Lane>,
    messenger: Messenger,
    /// Locked while a turn is taken for a job, so that jobs come in the order of their turns.
    worker: Mutex<Option<mpsc::Sender<(Turn, Job)>>>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue {{ {:?} }}", self.messenger)
    }
}

/// The communicator, and whose turn it is.
struct Lane {
    comm: Mutex<Communicator>,
    order: Mutex<Order>,
    moved: Condvar,
}

#[derive(Default)]
struct Order {
    /// The number of the next to come.
    next: u64,
    /// The number whose turn it is.
    serving: u64,
    /// The callers that left before their turn.
    left: BTreeSet<u64>,
    /// The threads that wait for their turn, or have it.
    inside: Vec<ThreadId>,
    /// The number of callers that sleep until it is their turn: a wake-up without sleepers costs a system call too.
    waiting: usize,
}

/// A place in the order, given up when dropped.
struct Turn {
    lane: Arc<Lane>,
    number: u64,
    /// The thread that waits for the turn, or has the turn.
    begun: Cell<Option<ThreadId>>,
}

impl Queue {
    /// Makes a queue of a communicator.
    pub fn new(comm: Communicator) -> Self {
        let messenger = comm.messenger().clone();
        let lane = Lane { comm: Mutex::new(comm), order: Mutex::default(), moved: Condvar::new() };
        Self { lane: Arc::new(lane), messenger, worker: Mutex::default() }
    }

    /// The messages of the communicator.
    pub fn messenger(&self) -> &Messenger {
        &self.messenger
    }

    /// A look at the peers, which does not queue up either.
    pub fn monitor(&self) -> Monitor {
        Monitor { presence: self.messenger.presence.clone() }
    }

    /// Does `work` when all earlier calls are done, on this thread.
    ///
    /// # Errors
    /// Those of `work`; [`FabricError::InvalidArgument`] when called inside a call of the same queue;
    /// [`FabricError::Interrupted`] while earlier calls run (the communicator stays usable then). The hook of
    /// [`Builder::interrupt`](crate::Builder::interrupt) is asked without any lock held.
    pub fn run<T, E: From<FabricError>>(
        &self,
        work: impl FnOnce(&Communicator) -> Result<T, E>,
    ) -> Result<T, E> {
        let turn = Turn::take(&self.lane)?;
        turn.begin(|| self.messenger.endpoint().check_interrupt(None))?;
        let comm = lock(&self.lane.comm);
        work(&comm)
    }

    /// Has `work` done when all earlier calls are done, on a thread of the queue, and returns at once with a handle.
    ///
    /// # Errors
    /// As [`Communicator::spawn`].
    pub fn start<T, E>(
        &self,
        work: impl FnOnce(&Communicator) -> Result<T, E> + Send + 'static,
    ) -> Result<Pending<T, E>, FabricError>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        self.messenger.endpoint().health.check_usable()?;
        let lane = Arc::downgrade(&self.lane); // a handle does not take part
        let (job, pending) = job(work, move || lane.upgrade().is_some_and(|lane| lane.is_inside()));
        let mut worker = lock(&self.worker);
        let jobs = match &mut *worker {
            Some(jobs) => jobs,
            none => none.insert(start_worker(self.messenger.rank())?),
        };
        jobs.send((Turn::take(&self.lane)?, job)).map_err(|_| FabricError::Panicked)?;
        Ok(pending)
    }
}

fn start_worker(rank: usize) -> Result<mpsc::Sender<(Turn, Job)>, FabricError> {
    let (sender, jobs) = mpsc::channel::<(Turn, Job)>();
    let run = move || {
        for (turn, job) in jobs {
            // Nothing interrupts this wait: the earlier callers were interrupted too, or finish.
            if turn.begin(|| Ok(())).is_ok() {
                job(&lock(&turn.lane.comm));
            }
        }
    };
    thread::Builder::new()
        .name(format!("antiphon-{rank}"))
        .spawn(run)
        .map_err(|e| FabricError::invalid(format!("no thread for background work: {e}")))?;
    Ok(sender)
}

impl Lane {
    /// Whether this thread waits for its turn, or has its turn.
    fn is_inside(&self) -> bool {
        lock(&self.order).inside.contains(&thread::current().id())
    }
}

impl Turn {
    fn take(lane: &Arc<Lane>) -> Result<Self, FabricError> {
        let mut order = lock(&lane.order);
        if order.inside.contains(&thread::current().id()) {
            return Err(FabricError::invalid(
                "a call of this communicator was made inside another one, by a signal handler perhaps",
            ));
        }
        let number = order.next;
        order.next += 1;
        Ok(Self { lane: lane.clone(), number, begun: Cell::new(None) })
    }

    /// Waits until it is its turn, which this thread then uses. No lock is held while `check` runs: it may run foreign
    /// code, such as a signal handler.
    fn begin(&self, mut check: impl FnMut() -> Result<(), FabricError>) -> Result<(), FabricError> {
        let thread = thread::current().id();
        let mut order = lock(&self.lane.order);
        order.inside.push(thread);
        self.begun.set(Some(thread));
        while order.serving != self.number {
            order.waiting += 1;
            order = self.lane.moved.wait_timeout(order, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            order.waiting -= 1;
            if order.serving != self.number {
                drop(order);
                check()?;
                order = lock(&self.lane.order);
            }
        }
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut order = lock(&self.lane.order);
        if let Some(thread) = self.begun.get() {
            order.inside.retain(|inside| *inside != thread);
        }
        if order.serving != self.number {
            order.left.insert(self.number);
            return;
        }
        order.serving += 1;
        while order.serving < order.next && {
            let serving = order.serving;
            order.left.remove(&serving)
        } {
            order.serving += 1;
        }
        if order.waiting > 0 {
            self.lane.moved.notify_all();
        }
    }
}

/// A panic elsewhere has been reported to all ranks; the data behind the lock is still consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
