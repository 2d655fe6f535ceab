//! The memory of a receiver, and what arrived there.

use std::{
    cell::UnsafeCell,
    ptr::NonNull,
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver as Arrivals, Sender},
    },
    time::{Duration, Instant},
};

use antiphon_fabric::engine::{Engine, Message, Receiver};

/// What arrived: the message, and its payload as it was in memory at that moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    pub message: Message,
    pub len: usize,
    /// A sum over the payload that tells any two bytes apart, and their order.
    pub sum: u64,
}

/// A region for each sender, and a queue of what arrived.
pub struct Pad {
    regions: Vec<UnsafeCell<Box<[u8]>>>,
    arrived: Mutex<Sender<Arrival>>,
}

// SAFETY: a region is written by the engine alone, and read after the channel has told of its message.
unsafe impl Sync for Pad {}

// SAFETY: the memory lives as long as the pad, and is accessed through raw pointers only.
unsafe impl Receiver for Pad {
    fn region(&self, sender: usize) -> Option<NonNull<[u8]>> {
        let region = self.regions.get(sender)?.get();
        // SAFETY: the box is never replaced.
        let region: *mut [u8] = unsafe { &raw mut **region };
        NonNull::new(region)
    }

    fn arrived(&self, message: &Message, len: usize) {
        let region = self.region(message.sender as usize).filter(|_| len > 0);
        let sum = region.map_or(0, |region| {
            // SAFETY: the engine has stored these bytes, within the region, and writes no others meanwhile.
            let bytes = unsafe {
                std::slice::from_raw_parts(region.cast::<u8>().as_ptr().add(message.place as usize), len)
            };
            sum(bytes)
        });
        // The test may be over.
        let _ = self.arrived.lock().unwrap().send(Arrival { message: *message, len, sum });
    }
}

impl Pad {
    /// Regions of `len` bytes for each of `senders` senders, and what arrives.
    pub fn new(senders: usize, len: usize) -> (Arc<Self>, Arrivals<Arrival>) {
        let (arrived, arrivals) = mpsc::channel();
        let region = |_| UnsafeCell::new(vec![0; len].into());
        (
            Arc::new(Self { regions: (0..senders).map(region).collect(), arrived: Mutex::new(arrived) }),
            arrivals,
        )
    }

    /// A copy of a region.
    pub fn copy(&self, sender: usize) -> Vec<u8> {
        // SAFETY: the tests that call it wait for all messages before.
        unsafe { (*self.regions[sender].get()).to_vec() }
    }
}

/// A sum that tells any two bytes apart, and their order.
pub fn sum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (sum.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    })
}

/// Bytes that differ by seed and place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (index, chunk) in bytes.chunks_mut(8).enumerate() {
        let word =
            (index as u64 + seed.wrapping_mul(0x1234_5678_9ABC_DEF1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

/// Moves the messages of all engines until `done`.
///
/// # Panics
/// After a minute.
#[track_caller]
pub fn until(engines: &[&dyn Engine], mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        if !engines.iter().fold(false, |moved, engine| engine.progress() | moved) {
            std::thread::yield_now();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "nothing came for a minute");
    }
}
