//! Plans between GPUs.

mod family;
mod memory;
mod plan;
mod report;
mod table;

pub use plan::{CudaOptions, CudaPlan};
