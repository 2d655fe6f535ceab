//! Plans on host memory: ranks are processes or threads, peers' memory is mapped.

mod addresses;
mod data;
mod load;
mod machine;
mod memory;
mod packet;
mod run;

pub use load::{LoadedPlan, Options};
