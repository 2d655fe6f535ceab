//! The CPU and its memory.

pub mod cpu;
pub mod memory;
pub mod process;
pub mod reduce;
pub mod wait;
