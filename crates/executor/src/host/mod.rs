//! Plans on host memory: ranks are processes or threads, peers' memory is mapped.

mod addresses;
mod arguments;
mod compile;
mod data;
mod load;
mod machine;
mod memory;
mod packet;
mod placement;
mod program;
mod run;
mod usage;

pub use load::{LoadedPlan, Options};
pub use packet::PacketKind;
