//! Ranks that are threads of this process.

use std::sync::{Arc, Barrier};

use antiphon_fabric::LocalWorld;

use super::{Host, Ranks, TIMEOUT};

/// A rank that is a thread, with tensors in host memory.
pub type HostThreads = Host<Threads>;

/// Threads of this process, which meet at a barrier.
pub struct Threads(Arc<Barrier>);

impl Ranks for Threads {
    fn run(world_size: usize, rank: &(dyn Fn(HostThreads) + Sync)) {
        let all = Arc::new(Barrier::new(world_size));
        LocalWorld::run_with(world_size, TIMEOUT, |comm| rank(Host::new(comm, Self(all.clone()))));
    }

    fn meet(&self) {
        self.0.wait();
    }

    fn of_group(&self) -> Self {
        Self(self.0.clone())
    }
}
