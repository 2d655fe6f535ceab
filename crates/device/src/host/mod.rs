//! The CPU and its memory.

pub mod cpu;
pub mod memory;
pub mod process;
pub mod reduce;
#[cfg(not(loom))]
pub mod signal;
pub mod wait;
