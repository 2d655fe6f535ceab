//! Puts with signals, which take effect late and in another order.
//!
//! A thread carries out the puts of this process, one at a time, and takes any of them next: only the signal of a put comes behind its own
//! data. The data comes in two parts, the second one first if the seed says so. The source of a put that does not block is read then,
//! and not before, so a kernel that changes it too early sends what it should not.

use std::{
    ffi::{c_int, c_void},
    sync::{
        Condvar, Mutex, Once,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::PE;
use crate::{lock, schedule::Random, seed, wait};

struct Put {
    to: u64,
    from: Source,
    signal: u64,
    value: u64,
    adds: bool,
}

enum Source {
    /// What was there when the put was made.
    Bytes(Vec<u8>),
    At(u64, usize),
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Put>,
    /// Whether one is being carried out.
    is_busy: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: Vec::new(), is_busy: false });
static CHANGED: Condvar = Condvar::new();

const SET: u32 = 9;
const ADD: u32 = 10;

/// What device/nvshmem.hpp calls.
pub(crate) unsafe extern "C" fn put(
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    signal: *mut c_void,
    value: u64,
    change: u32,
    pe: c_int,
    is_nbi: bool,
) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let name = "emulated NIC".to_owned();
        std::thread::Builder::new().name(name).spawn(carry_out_all).expect("a thread for puts");
    });
    let there = |address: *const c_void| {
        let state = lock(&PE);
        let own = state.as_ref().expect("a PE");
        let offset = own.offset(address.addr() as u64);
        let offset = offset.unwrap_or_else(|| panic!("emulator: {address:p} is no symmetric address"));
        assert!(!own.is_near[pe as usize], "emulator: a put to PE {pe}, which stores reach");
        own.heaps[pe as usize] + offset
    };
    assert!(change == SET || change == ADD, "emulator: a signal changes by {change}");
    // A network card reads registered memory only.
    there(from);
    let source = match is_nbi {
        true => Source::At(from.addr() as u64, bytes),
        // SAFETY: the kernel's bytes.
        false => Source::Bytes(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec()),
    };
    let put = Put { to: there(to), from: source, signal: there(signal), value, adds: change == ADD };
    lock(&QUEUE).waiting.push(put);
    CHANGED.notify_all();
}

/// Waits until all puts have taken effect.
pub(super) fn drain() {
    let mut queue = lock(&QUEUE);
    while queue.is_busy || !queue.waiting.is_empty() {
        queue = wait(&CHANGED, queue);
    }
}

fn carry_out_all() {
    let number = lock(&PE).as_ref().map_or(0, |pe| pe.number as u64);
    let mut random = Random(seed() ^ number << 32);
    let mut queue = lock(&QUEUE);
    loop {
        if queue.waiting.is_empty() {
            queue = wait(&CHANGED, queue);
            continue;
        }
        let chosen = random.below(queue.waiting.len() as u64) as usize;
        let late = Duration::from_micros(random.below(4) * random.below(100));
        // Others may be made meanwhile, and one of them may be next.
        if random.below(2) == 0 {
            queue.is_busy = true;
            drop(queue);
            std::thread::sleep(late);
            queue = lock(&QUEUE);
        }
        let put = queue.waiting.swap_remove(chosen);
        queue.is_busy = true;
        drop(queue);
        carry_out(&put, &mut random);
        queue = lock(&QUEUE);
        queue.is_busy = false;
        CHANGED.notify_all();
    }
}

fn carry_out(put: &Put, random: &mut Random) {
    let (from, len) = match &put.from {
        Source::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
        Source::At(from, len) => (*from as usize as *const u8, *len),
    };
    let to = put.to as usize as *mut u8;
    let middle = random.below(len as u64 + 1) as usize;
    let mut parts = [(0, middle), (middle, len - middle)];
    if random.below(2) == 0 {
        parts.reverse();
    }
    for (start, len) in parts {
        // SAFETY: symmetric memory of this PE, which the kernel keeps until it has learned of the arrival, and of another one.
        unsafe { to.add(start).copy_from_nonoverlapping(from.add(start), len) };
        if random.below(4) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(50)));
        }
    }
    // SAFETY: symmetric memory of another PE, where the kernels have a word of 64 bits.
    let signal = unsafe { AtomicU64::from_ptr(put.signal as usize as *mut u64) };
    match put.adds {
        true => drop(signal.fetch_add(put.value, Ordering::AcqRel)),
        false => signal.store(put.value, Ordering::Release),
    }
}
