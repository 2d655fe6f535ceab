//! Blocks of kernels, whose fibers the scheduler runs.

use std::{ffi::c_void, sync::Arc};

use super::mixed;
use crate::{
    circle::Watch,
    execution::{Launch, Prepared},
    races::threads::Block,
};

/// Why a fiber has left, as in device/types.hpp.
pub(super) const PASSES: u32 = 0;
pub(super) const SLEEPS_IN_WARP: u32 = 1;
pub(super) const SLEEPS_IN_BLOCK: u32 = 2;
pub(super) const LOOKS: u32 = 3;
pub(super) const SPINS: u32 = 4;
pub(super) const ENDS: u32 = 5;

/// As in device/types.hpp.
#[repr(C)]
pub(crate) struct Pace {
    pub left: i64,
    pub clock: u64,
    pub moves: u64,
    pub works: u64,
    pub writes: [u32; 256],
}

/// As in device/types.hpp.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watched {
    at: *const c_void,
    bytes: u32,
    seen: [u64; 2],
}

impl Watched {
    /// Whether other bytes are there now.
    pub(super) fn has_changed(&self) -> bool {
        // SAFETY: memory that a kernel looks at, which the host keeps until the kernel has ended; the address is aligned.
        unsafe {
            match self.bytes {
                1 => u64::from(self.at.cast::<u8>().read_volatile()) != self.seen[0] & 0xFF,
                2 => u64::from(self.at.cast::<u16>().read_volatile()) != self.seen[0] & 0xFFFF,
                4 => u64::from(self.at.cast::<u32>().read_volatile()) != self.seen[0] & 0xFFFF_FFFF,
                8 => self.at.cast::<u64>().read_volatile() != self.seen[0],
                _ => self.at.cast::<[u64; 2]>().read_volatile() != self.seen,
            }
        }
    }
}

/// As in device/types.hpp.
#[repr(C)]
pub(crate) struct Turn {
    leave: Option<unsafe extern "C" fn()>,
    failed: unsafe extern "C" fn(),
    pub(super) why: u32,
    woken_count: u32,
    pub(super) looks: *const Watched,
    pub(super) looks_count: u32,
    pub(super) at: usize,
    pub(super) pc: usize,
    woken: [u16; 1024],
}

unsafe extern "C" fn failed() {
    super::failed();
}

impl Turn {
    fn new() -> Box<Self> {
        Box::new(Self {
            leave: None,
            failed,
            why: 0,
            woken_count: 0,
            looks: std::ptr::null(),
            looks_count: 0,
            at: 0,
            pc: 0,
            woken: [0; 1024],
        })
    }

    /// The fibers that slept and go on.
    pub(super) fn woken(&self) -> &[u16] {
        &self.woken[..self.woken_count as usize]
    }
}

/// A module's functions for the scheduler.
#[derive(Clone, Copy)]
pub(crate) struct Device {
    pub begin: unsafe extern "C" fn(*const Launch) -> *mut c_void,
    pub resume: unsafe extern "C" fn(*mut c_void, u32),
    pub end: unsafe extern "C" fn(*mut c_void),
}

/// A block that is to run.
pub(crate) struct Start {
    pub device: Device,
    pub prepared: Prepared,
    pub watch: Arc<Watch>,
    /// What follows its end, with what its threads have learned.
    pub ended: Box<dyn FnOnce(Prepared)>,
}

/// A block that runs.
pub(super) struct Running {
    device: Device,
    block: *mut c_void,
    prepared: Prepared,
    pub turn: Box<Turn>,
    pub watch: Arc<Watch>,
    ended: Option<Box<dyn FnOnce(Prepared)>>,
    /// No other block has it.
    pub number: u64,
    pub threads: u32,
    pub alive: u32,
    /// From what the priorities of its fibers follow, and of how many threads with one priority.
    pub salt: u64,
    pub grain: u32,
    /// The lanes of each warp that wait for memory, and how often each thread has begun to.
    pub parked: [u32; 32],
    pub times: Vec<u32>,
}

impl Running {
    pub(super) fn begin(start: Start, pace: *mut Pace, number: u64, salt: u64) -> Self {
        let Start { device, mut prepared, watch, ended } = start;
        let mut turn = Turn::new();
        let threads = prepared.schedule(pace, &raw mut *turn);
        // SAFETY: a launch with the layout of types.hpp, whose parts stay until the block has ended.
        let block = unsafe { (device.begin)(prepared.launch()) };
        let (parked, times) = ([0; 32], vec![0; threads as usize]);
        let ended = Some(ended);
        let mut own = Self {
            device,
            block,
            prepared,
            turn,
            watch,
            ended,
            number,
            threads,
            alive: threads,
            salt,
            grain: 1,
            parked,
            times,
        };
        own.grain = own.grain_of(salt);
        own
    }

    /// How many threads have one priority, for a random number: mostly the whole block, which the processor likes best.
    pub(super) fn grain_of(&self, random: u64) -> u32 {
        match random % 16 {
            0 => 1,
            1..4 => 32,
            _ => self.threads,
        }
    }

    /// The priority of a fiber, below this number of priorities.
    pub(super) fn level(&self, thread: u16, levels: u64) -> u64 {
        mixed(self.salt ^ u64::from(u32::from(thread) / self.grain.max(1)) << 32) % levels
    }

    /// Runs a fiber until it leaves.
    pub(super) fn resume(&mut self, thread: u16) {
        let checked = self.prepared.checked();
        checked.map_or_else(Block::none_runs, Block::runs);
        // SAFETY: a fiber that can go on, of a block that has not ended.
        unsafe { (self.device.resume)(self.block, u32::from(thread)) };
    }

    /// Leaves the fiber that runs, from within.
    pub(super) fn leave(turn: *const Turn) {
        // SAFETY: of the block whose fiber runs; the module has set it.
        unsafe { (*turn).leave.into_iter().for_each(|leave| leave()) };
    }

    /// A fiber begins to wait for memory. Returns how often it has.
    pub(super) fn parks(&mut self, thread: u16) -> u32 {
        let thread = usize::from(thread);
        self.parked[thread / 32] |= 1 << (thread % 32);
        self.times[thread] += 1;
        self.times[thread]
    }

    /// Whether it still waits since that time.
    pub(super) fn is_parked(&self, thread: u16, time: u32) -> bool {
        let thread = usize::from(thread);
        self.parked[thread / 32] >> (thread % 32) & 1 != 0 && self.times[thread] == time
    }

    pub(super) fn end(mut self) {
        // SAFETY: all its fibers have ended.
        unsafe { (self.device.end)(self.block) };
        Block::none_runs();
        if let Some(ended) = self.ended.take() {
            ended(self.prepared);
        }
    }
}
