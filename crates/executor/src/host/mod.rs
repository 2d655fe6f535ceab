//! Plans on host memory: ranks are processes or threads, peers' memory is mapped.

mod books;
mod call;
mod compile;
mod data;
mod home;
mod load;
mod machine;
mod memory;
mod packet;
mod program;
mod run;
mod usage;

pub use load::{LoadedPlan, Options};
pub use packet::PacketKind;
