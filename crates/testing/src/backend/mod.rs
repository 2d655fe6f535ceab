//! Where the ranks of a test run and where their memory lies.
//!
//! A *behaviour* is a function over a [`Backend`]: what the ranks of a world do and assert. A suite instantiates each for every backend,
//! so that all backends have tests of the same names. A suite whose calls differ between backends has a trait of its own over this one.
//!
//! | backend | ranks | memory |
//! | --- | --- | --- |
//! | [`HostThreads`] | threads | the process's own |
//! | [`HostProcesses`] | processes | the process's own |
//! | [`Gpus`] | threads | that of a GPU for each rank |

mod gpus;
mod host;
mod host_processes;
mod host_threads;

use std::{ops::Deref, sync::OnceLock, time::Duration};

use antiphon_fabric::Communicator;
use antiphon_tensor::Device;
use serde::{Serialize, de::DeserializeOwned};

pub use gpus::{GpuMemory, Gpus, OnGpu, on_gpus};
pub use host::{Host, Ranks};
pub use host_processes::{HostProcesses, Processes, in_processes};
pub use host_threads::{HostThreads, Threads};

/// The deadline of every wait. It is far longer than anything in a suite takes, so that no test passes because a wait ended.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// One rank of a world.
pub trait Backend: Deref<Target = Communicator> + Sized + 'static {
    /// Some bytes, whose address is aligned for every dtype.
    type Memory;

    /// Runs the ranks of a world that this process has: all of them, or its own.
    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync));

    /// What all ranks returned, of which this process has what its own ranks did.
    fn exchanged<R: Serialize + DeserializeOwned>(own: Vec<Option<R>>) -> Vec<R> {
        own.into_iter().map(|result| result.expect("every rank has returned")).collect()
    }

    /// Runs every rank of a world, and gives what they return, in rank order.
    fn run<R: Send + Sync + Serialize + DeserializeOwned>(
        world_size: usize,
        rank: impl Fn(Self) -> R + Sync,
    ) -> Vec<R> {
        let results: Vec<OnceLock<R>> = (0..world_size).map(|_| OnceLock::new()).collect();
        Self::run_ranks(world_size, &|comm| {
            let result = &results[comm.rank()];
            assert!(result.set(rank(comm)).is_ok(), "a rank runs once");
        });
        Self::exchanged(results.into_iter().map(OnceLock::into_inner).collect())
    }

    /// Waits for all ranks of the world, beside the communicator.
    fn meet(&self);

    /// The rank in a [group](Communicator::split) of its world, if it has a color.
    fn group(&self, color: Option<u64>, key: i64) -> Option<Self>;

    /// The node of each rank of a world.
    fn nodes(world_size: usize) -> Vec<u32> {
        vec![0; world_size]
    }

    /// Where tensors lie.
    fn device(&self) -> Device;
    /// Memory of at least `bytes` bytes, which hold anything.
    fn allocate(&self, bytes: usize) -> Self::Memory;
    /// Where the memory begins, to read.
    fn address(memory: &Self::Memory) -> *const u8;
    /// Where the memory begins, to write.
    fn address_mut(memory: &mut Self::Memory) -> *mut u8;
    /// Writes bytes at the start of the memory, behind the calls of its rank.
    fn write(memory: &mut Self::Memory, bytes: &[u8]);
    /// Reads all bytes of the memory, behind the calls of its rank.
    fn read(memory: &Self::Memory) -> Vec<u8>;
}

/// The number in the name of a test, `world_<size>`.
///
/// # Panics
/// For another name.
pub fn world_size(name: &str) -> usize {
    name.strip_prefix("world_").and_then(|n| n.parse().ok()).expect("tests are named world_<size>")
}
