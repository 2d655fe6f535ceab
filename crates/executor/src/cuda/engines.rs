//! Requests to copy engines, which a plan's blocks make where these do the work of ports ([`Ports::Engines`](super::Ports::Engines)).
//!
//! A FIFO of [`REQUESTS`] slots lies in pinned memory of the host. A thread of a block takes a number from a counter in its GPU's memory,
//! waits until the request that has had the slot is done, and writes its own: what is to be done, and then the number, with release. A
//! thread of the host hands requests to a stream, in the order of their numbers. The stream copies, raises the counts of peers,
//! which are in device memory, and tells in a counter beside the first one how many requests are done. So no wait of a kernel looks at
//! the host: a block that waits for room, or for its requests, polls that counter, and a peer the count of its channel.
//!
//! * *Order.* A request happens behind what its block did before its threads last met: the number's release is behind that meeting,
//!   and the host's acquire ahead of the stream's work. The word that a stream writes has a fence before it, so whoever acquires a count
//!   sees the copies ahead of it. Only this rank raises the counts of its channels' other ends.
//! * *Requests come to an end*, whatever kernels do: a copy waits for nothing. The thread tells what is done when it finds no
//!   request, and when half of the slots are to be told of. So a FIFO that is full has room soon.
//! * *A launch ends behind its requests*: a block waits for its own before it leaves.
//! * *A request that fails* ends the communicator, and its error is what the plan's calls return from then on.
//! * *A plan that is dropped* waits for the work of its context. Then the thread waits for its stream, and ends. After a failure there may
//!   be a number whose block has given up: what is behind it is never done.
//!
//! `tests/ports.rs` is a model of this, for 1, 2, 3, 4 and 8 ranks.

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use antiphon_device::{
    cuda::{Context, CudaError, DevicePointer, PinnedMemory, Stream, memory, relaxed},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering},
};
use antiphon_fabric::FabricError;

use super::tenants::{PlanTenant, lock};

/// Slots of a FIFO.
pub(super) const REQUESTS: usize = 512;

/// How long the thread looks for the next request without a pause, and its pauses from then on. A launch that the host makes ends a pause;
/// one of a graph does not.
const ALERT: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(100);

/// A slot; `plan_request` of table.cuh.
#[repr(C, align(32))]
struct Slot {
    /// The number of its request, from 1, once it is there.
    number: AtomicU64,
    from: AtomicU64,
    /// Where bytes are copied to; or the count that is raised, if there are none.
    to: AtomicU64,
    bytes: AtomicU64,
}

/// The FIFO of a loaded plan, and the thread that empties it.
pub(super) struct Engines {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    fifo: PinnedMemory,
    stop: AtomicU32,
    /// Whether requests are to fail.
    fails: AtomicU32,
    failed: OnceLock<CudaError>,
}

impl Engines {
    /// Starts the thread. `requested` is a counter in device memory: the requests that are done, and then those that were made.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] where streams cannot write words or there is no thread; of the driver.
    pub(super) fn start(
        context: &Context,
        requested: DevicePointer,
        tenant: Arc<Mutex<PlanTenant>>,
    ) -> Result<Self, FabricError> {
        let properties = context.device().properties()?;
        if !properties.stream_writes {
            let what = format!(
                "{}: its streams cannot write words of 64 bits; ports can be blocks",
                properties.name
            );
            return Err(FabricError::invalid(what));
        }
        let shared = Arc::new(Shared {
            fifo: PinnedMemory::allocate(context, REQUESTS * size_of::<Slot>())?,
            stop: AtomicU32::new(0),
            fails: AtomicU32::new(0),
            failed: OnceLock::new(),
        });
        let stream = context.stream()?;
        let mut worker =
            Worker { shared: shared.clone(), stream, requested, read: 0, told: 0, raised: HashMap::new() };
        let run = move || {
            if let Err(error) = relaxed(|| worker.work()).and_then(|outcome| outcome) {
                worker.shared.failed.get_or_init(|| error.clone());
                let _ = lock(&tenant).fail::<()>(error.into());
            }
            // The memory that copies use is given back when the thread has ended.
            let _ = relaxed(|| worker.stream.borrow().synchronize());
        };
        let thread = thread::Builder::new()
            .name("antiphon-engines".into())
            .spawn(run)
            .map_err(|error| FabricError::invalid(format!("no thread for copy engines: {error}")))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The first slot, for kernels.
    pub(super) fn fifo(&self) -> DevicePointer {
        self.shared.fifo.pointer()
    }

    /// A launch follows, which makes requests.
    #[inline]
    pub(super) fn wake(&self) {
        self.thread.as_ref().map(JoinHandle::thread).map(Thread::unpark);
    }

    /// Why a request has failed, if one has.
    pub(super) fn failed(&self) -> Option<&CudaError> {
        self.shared.failed.get()
    }

    pub(super) fn fail_requests(&self) {
        self.shared.fails.store(1, Ordering::Relaxed);
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        self.shared.stop.store(1, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Worker {
    shared: Arc<Shared>,
    stream: Stream,
    requested: DevicePointer,
    /// Requests that were read, and those of which the stream tells that they are done.
    read: u64,
    told: u64,
    /// How often each count was raised, by its address.
    raised: HashMap<u64, u64>,
}

impl Worker {
    fn work(&mut self) -> Result<(), CudaError> {
        let mut last = Instant::now();
        while self.shared.stop.load(Ordering::Acquire) == 0 {
            match self.turn()? {
                true => last = Instant::now(),
                false if last.elapsed() < ALERT => thread::yield_now(),
                false => thread::park_timeout(PAUSE),
            }
        }
        Ok(())
    }

    /// Hands over a request, or tells what is done. False if there is nothing to do.
    fn turn(&mut self) -> Result<bool, CudaError> {
        let behind = self.read - self.told;
        let next = if behind < REQUESTS as u64 / 2 { self.next() } else { None };
        match next {
            Some(request) => self.hand_over(request)?,
            None if behind > 0 => {
                // SAFETY: the counter lives until this thread has ended, and kernels load it by strong loads.
                unsafe { memory::write_word(self.stream.borrow(), self.requested, self.read) }?;
                self.told = self.read;
            }
            None => return Ok(false),
        }
        Ok(true)
    }

    /// Where from, where to, and how many bytes.
    fn next(&mut self) -> Option<[u64; 3]> {
        let at = self.read as usize % REQUESTS;
        // SAFETY: the memory has so many slots, which are atomic words alone, and lives as long as the worker.
        let slot = unsafe { self.shared.fifo.host().cast::<Slot>().add(at).as_ref() };
        // Pairs with the block's release of the number.
        if slot.number.load(Ordering::Acquire) != self.read + 1 {
            return None;
        }
        self.read += 1;
        Some([&slot.from, &slot.to, &slot.bytes].map(|word| word.load(Ordering::Relaxed)))
    }

    fn hand_over(&mut self, [from, to, bytes]: [u64; 3]) -> Result<(), CudaError> {
        if self.shared.fails.load(Ordering::Relaxed) != 0 {
            return Err(CudaError::Call {
                function: "a test",
                code: 1,
                name: "CUDA_ERROR_INVALID_VALUE",
                text: "a request that is to fail",
            });
        }
        let (stream, from, place) = (self.stream.borrow(), DevicePointer(from), DevicePointer(to));
        if bytes == 0 {
            let count = self.raised.entry(to).or_default();
            *count += 1;
            // SAFETY: the count of a peer's channel, which this rank alone raises, and kernels load by strong loads.
            return unsafe { memory::write_word(stream, place, *count) };
        }
        // SAFETY: the ranges of an operation, which was checked to lie in the plan's buffers; the launch that asks for it waits for it, and
        // its memory lives until this thread has ended.
        unsafe { memory::copy(stream, place, from, bytes as usize) }
    }
}
