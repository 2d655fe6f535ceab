//! Grids, and where their threads run.

use std::sync::{Arc, RwLock};

use super::clocks::{Id, LANES, Range};

/// Which threads an operation is for, from the smallest: as in PTX, and in device/memory.hpp.
pub(crate) type Scope = usize;
pub(super) const SCOPES: [&str; 4] = ["cta", "cluster", "gpu", "sys"];
pub(super) const SYSTEM: Scope = 3;

/// A grid, or a copy of a stream.
#[derive(Debug)]
pub(crate) struct Grid {
    pub range: Range,
    /// How many grids of the process are before it.
    pub number: usize,
    /// Null for a copy, or what the host does.
    pub name: Option<String>,
    pub device: usize,
    pub cluster_size: u32,
    pub dimensions: [[u32; 3]; 2],
}

/// Where a thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub device: usize,
    /// The first identifiers of the cluster and of the block.
    pub cluster: Id,
    pub block: Id,
}

impl Place {
    /// The smallest scope that has both.
    pub(super) fn scope_with(self, other: Self) -> Scope {
        match () {
            () if self.block == other.block => 0,
            () if self.cluster == other.cluster => 1,
            () if self.device == other.device => 2,
            () => SYSTEM,
        }
    }
}

impl Grid {
    pub(super) fn place(&self, id: Id) -> Place {
        let block = (id - self.range.start) / self.range.per_block;
        let start = |block: u32| self.range.start + block * self.range.per_block;
        Place {
            device: self.device,
            cluster: start(block / self.cluster_size * self.cluster_size),
            block: start(block),
        }
    }
}

/// All grids, in the order of their identifiers.
static GRIDS: RwLock<Vec<Arc<Grid>>> = RwLock::new(Vec::new());

impl Grid {
    /// Each thread has three identifiers: its own, one for the writes of its copies, and one for their reads.
    pub(crate) fn new(
        name: Option<String>,
        device: usize,
        cluster_size: u32,
        dimensions: [[u32; 3]; 2],
    ) -> Arc<Self> {
        let mut all = GRIDS.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        let start = all.last().map_or(LANES, |grid: &Arc<Grid>| grid.range.end());
        let [blocks, threads] = dimensions.map(|of| of.iter().product::<u32>());
        let per_block = 3 * threads.next_multiple_of(LANES);
        assert!(
            blocks.checked_mul(per_block).and_then(|count| count.checked_add(start)).is_some(),
            "the checks of races have no numbers left for a grid of {blocks} blocks of {threads} threads"
        );
        let grid = Arc::new(Self {
            range: Range { start, blocks, per_block },
            number: all.len(),
            name,
            device,
            cluster_size,
            dimensions,
        });
        all.push(grid.clone());
        grid
    }

    pub(super) fn of(id: Id) -> Option<Arc<Self>> {
        let all = GRIDS.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        all.get(all.partition_point(|grid| grid.range.end() <= id)).cloned()
    }
}
