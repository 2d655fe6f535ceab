//! Plans between GPUs.

mod family;
#[cfg(test)]
mod machine_code;
mod memory;
mod plan;
mod report;
mod table;

pub use plan::{CudaOptions, CudaPlan};
