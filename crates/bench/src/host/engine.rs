//! The engine between machines, bare: a message one way, and the bandwidth of many under way. It is the floor of what is built on it.

use std::{
    cell::UnsafeCell,
    ptr::NonNull,
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon::{
    collectives::Communicator,
    device::sync::{AtomicU64, Ordering},
    fabric::{
        FabricError,
        engine::{Engine, EngineError, Flight, Key, Message, Receiver, Ucx},
    },
};

use super::{Measured, Pace, total};
use crate::{Result, Row, Settings, Wrong, algbw_gbs, case::Case};

pub(crate) const ABOUT: &str = "A message between two ranks by the engine between machines (UCX): the time one way, the bandwidth of 16 under way";

/// Messages under way at once when the bandwidth is measured.
const WINDOW: u64 = 16;
/// Between two ranks.
pub(crate) const RANKS: usize = 2;
/// A benchmark that waits longer for a message is broken.
const LIMIT: Duration = Duration::from_secs(60);

/// Refuses what a message between two ranks does not have.
pub(crate) fn refuse(settings: &Settings) -> Result<(), String> {
    if settings.ranks.is_some_and(|ranks| ranks != RANKS) {
        return Err(format!("engine is measured between {RANKS} ranks"));
    }
    if settings.symmetric {
        return Err("--buffers symmetric is not for engine".into());
    }
    Ok(())
}

/// The memory of a rank, and how many messages have arrived there.
struct Memory {
    bytes: UnsafeCell<Box<[u8]>>,
    arrived: AtomicU64,
}

// SAFETY: the engine writes the bytes, and they are read after the last message has arrived.
unsafe impl Sync for Memory {}

// SAFETY: the box is never replaced, and no reference leads into it while messages may arrive.
unsafe impl Receiver for Memory {
    fn region(&self, _sender: usize) -> Option<NonNull<[u8]>> {
        // SAFETY: as above.
        NonNull::new(unsafe { &raw mut **self.bytes.get() })
    }

    fn arrived(&self, _message: &Message, _len: usize) {
        // Only the thread that moves messages counts.
        self.arrived.store(self.arrived.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

/// A rank's end of the connection.
struct End {
    // Before what it reads and writes.
    engine: Ucx,
    memory: Arc<Memory>,
    payload: Vec<u8>,
    flight: Arc<Flight>,
    message: Message,
    peer: usize,
    /// How many messages are awaited in all.
    awaited: u64,
}

impl End {
    /// Connects the two ranks.
    fn new(comm: &Communicator, len: usize) -> Result<Self, FabricError> {
        let rank = comm.rank();
        let engine =
            comm.agree("cannot open the engine", Ucx::open(rank, RANKS).map_err(FabricError::from))?;
        let key = comm.exchange_bytes(&Key::random().to_bytes())?.swap_remove(0);
        let addresses = comm.exchange_bytes(engine.address())?;
        let memory = Memory { bytes: UnsafeCell::new(vec![0; len].into()), arrived: AtomicU64::default() };
        let memory = Arc::new(memory);
        let message = Message { communicator: 1, sender: rank as u32, ..Message::default() };
        engine.inbox().register(message.communicator, memory.clone());
        let key = key.try_into().map_err(|_| FabricError::invalid("rank 0's key is of another version"))?;
        engine.inbox().open(Key::from_bytes(key));
        let peer = RANKS - 1 - rank;
        engine.connect(peer, &addresses[peer])?;
        // No message comes before both can take it.
        comm.barrier()?;
        let (payload, flight) = (pattern(rank, len), Arc::new(Flight::new()));
        Ok(Self { engine, memory, payload, flight, message, peer, awaited: 0 })
    }

    /// Sends the payload. It is never written, so that messages may be under way together.
    fn send(&self) -> Result<(), EngineError> {
        // SAFETY: the payload is dropped after the engine, and never written.
        unsafe { self.engine.send(self.peer, &self.message, &raw const *self.payload, &self.flight) }
    }

    /// Waits until `messages` further messages have arrived.
    fn wait(&mut self, messages: u64) -> Result<(), FabricError> {
        self.awaited += messages;
        self.until(|end| end.memory.arrived.load(Ordering::Acquire) >= end.awaited)
    }

    fn until(&self, done: impl Fn(&Self) -> bool) -> Result<(), FabricError> {
        let start = Instant::now();
        let mut looks = 0u32;
        while !done(self) {
            self.engine.progress();
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024)
                && (start.elapsed() > LIMIT || self.engine.lost(self.peer).is_some())
            {
                return Err(FabricError::invalid(format!(
                    "rank {} sends nothing, or is lost, after {:?}",
                    self.peer,
                    start.elapsed()
                )));
            }
        }
        Ok(())
    }

    /// A message there and one back.
    fn round_trip(&mut self) -> Result<(), FabricError> {
        if self.peer == 1 {
            self.send()?;
            self.wait(1)
        } else {
            self.wait(1)?;
            self.send().map_err(Into::into)
        }
    }

    /// Many messages to rank 1, which says when it has them all.
    fn stream(&mut self) -> Result<(), FabricError> {
        if self.peer == 1 {
            (0..WINDOW).try_for_each(|_| self.send())?;
            self.wait(1)
        } else {
            self.wait(WINDOW)?;
            self.engine.tell(self.peer, &self.message).map_err(Into::into)
        }
    }
}

fn pattern(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251 + rank * 97) as u8).collect()
}

/// The row of a size: half of a round trip, and the bandwidth of [`WINDOW`] messages under way.
pub(super) fn measure(comm: &Communicator, case: Case, pace: Pace) -> Result<Row> {
    let count = (case.bytes as usize / case.dtype.size()).max(1);
    let len = count * case.dtype.size();
    let mut end = End::new(comm, len)?;
    let round_trips = pace.time(comm, || end.round_trip())?;
    let times = round_trips.into_iter().map(|round_trip| round_trip / 2.0).collect();
    let streams = pace.time(comm, || end.stream())?;
    end.until(|end| end.flight.is_complete())?;
    comm.barrier()?;
    // SAFETY: all messages have arrived.
    let arrived = unsafe { &**end.memory.bytes.get() };
    let expected = pattern(end.peer, len);
    let elements = arrived.iter().zip(&expected).filter(|(a, b)| a != b).count() as u64;
    let wrong = total(comm, Wrong { elements, worst: 0.0 })?;
    let bandwidth = algbw_gbs(len as u64 * WINDOW, streams[streams.len() / 2]);
    let row = Measured { name: end.engine.name().to_owned(), times, wrong }.row(comm, case, count);
    Ok(Row { algbw_gbs: bandwidth, busbw_gbs: bandwidth, ..row })
}
