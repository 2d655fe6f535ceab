//! Ranks on several nodes, as threads: each node has memory of its own, and an engine between threads carries what passes between nodes.

use std::{
    marker::PhantomData,
    sync::{Arc, Barrier},
};

use antiphon_collectives::hierarchical::{Form, prefer};
use antiphon_fabric::LocalWorld;
use antiphon_testing::backend::{Host, Ranks, TIMEOUT};

/// Ranks are threads on the nodes of a layout.
pub type HostNodes<L> = Host<OnNodes<L>>;

/// Which node each rank is on.
pub trait Layout: Send + Sync + 'static {
    /// How reductions go.
    const FORM: Form = Form::Mirrored;

    fn node(rank: usize, world_size: usize) -> u32;
}

/// The first half of the ranks, and the others.
pub struct Halves;
/// The first third of the ranks, the second, and the others.
pub struct Thirds;
/// The first rank, and the others.
pub struct OneAndRest;
/// Even ranks, and odd ones.
pub struct Interleaved;

/// A layout whose reductions go by nodes.
pub struct ByNodes<L>(PhantomData<L>);

impl<L: Layout> Layout for ByNodes<L> {
    const FORM: Form = Form::Hierarchical;

    fn node(rank: usize, world_size: usize) -> u32 {
        L::node(rank, world_size)
    }
}

impl Layout for Halves {
    fn node(rank: usize, world_size: usize) -> u32 {
        u32::from(rank >= world_size.div_ceil(2))
    }
}

impl Layout for Thirds {
    fn node(rank: usize, world_size: usize) -> u32 {
        (rank * 3 / world_size) as u32
    }
}

impl Layout for OneAndRest {
    fn node(rank: usize, _world_size: usize) -> u32 {
        u32::from(rank > 0)
    }
}

impl Layout for Interleaved {
    fn node(rank: usize, _world_size: usize) -> u32 {
        rank as u32 % 2
    }
}

/// Threads on the nodes of a layout.
pub struct OnNodes<L>(Arc<Barrier>, PhantomData<L>);

impl<L: Layout> Ranks for OnNodes<L> {
    fn run(world_size: usize, rank: &(dyn Fn(Host<Self>) + Sync)) {
        let all = Arc::new(Barrier::new(world_size));
        let names: Vec<&str> =
            Self::nodes(world_size).iter().map(|node| ["left", "right", "behind"][*node as usize]).collect();
        // Each test has another order of messages, and the same one each time.
        let disturb = |network: &antiphon_fabric::engine::Network| network.reorder(world_size as u64);
        LocalWorld::run_on_nodes(&names, TIMEOUT, disturb, |comm| {
            prefer(&comm, L::FORM).unwrap();
            rank(Host::new(comm, Self(all.clone(), PhantomData)));
        });
    }

    fn nodes(world_size: usize) -> Vec<u32> {
        (0..world_size).map(|rank| L::node(rank, world_size)).collect()
    }

    fn meet(&self) {
        self.0.wait();
    }

    fn of_group(&self) -> Self {
        Self(self.0.clone(), PhantomData)
    }
}
