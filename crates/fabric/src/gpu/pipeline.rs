//! How rows pass through a multiprocessor, and what [`PIPELINE`] is compiled for.

use antiphon_device::cuda::Program;

use super::{Source, Tenant};

/// Copying rows with many bytes under way at once; behind [`ROWS`](super::ROWS). A family that has it among its
/// [`SOURCES`](super::Family::SOURCES) [defines](Rings::define) the rings of its warps.
pub const PIPELINE: Source = Source { name: "pipeline.cuh", text: include_str!("pipeline.cuh") };

/// Bytes of a line of the cache. Places that rows are copied to between GPUs begin at lines: a copy that straddles them takes half as long again.
pub const LINE: usize = 128;

/// How rows pass through a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Staging {
    /// Through shared memory, by bulk copies, which GPUs have from Hopper on.
    Bulk,
    /// Through registers.
    Registers,
}

impl Staging {
    /// The way of this rank's GPU.
    pub fn of(tenant: &Tenant) -> Self {
        // Clusters came with bulk copies.
        if tenant.has_clusters() { Self::Bulk } else { Self::Registers }
    }
}

/// The stages of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stages {
    /// How many there are.
    pub count: u32,
    /// Bytes of each, a multiple of 16.
    pub bytes: u32,
}

/// The rings of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rings {
    /// The block's first warps, each of which has a ring. The next warp raises their flags.
    pub count: u32,
    /// What each of them has.
    pub stages: Stages,
}

impl Rings {
    /// Adds the macros of [`PIPELINE`].
    pub fn define(self, program: Program) -> Program {
        program
            .define("RINGS", self.count)
            .define("STAGES", self.stages.count)
            .define("STAGE_BYTES", self.stages.bytes)
            .define("LINE", LINE)
    }

    /// Bytes of a block's dynamic shared memory that the rings take, if that begins at a line.
    pub fn shared_bytes(self, staging: Staging) -> u32 {
        match staging {
            Staging::Bulk => self.count * self.stages.count * self.stages.bytes,
            Staging::Registers => 0,
        }
    }
}
