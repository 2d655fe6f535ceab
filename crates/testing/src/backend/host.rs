//! Ranks whose tensors lie in host memory, however they run.

use std::ops::Deref;

use antiphon_fabric::Communicator;
use antiphon_tensor::{Device, TensorView, TensorViewMut};
use serde::{Serialize, de::DeserializeOwned};

use super::Backend;

/// How ranks run whose tensors lie in host memory.
pub trait Ranks: Sized + 'static {
    /// Runs the ranks of a world that this process has.
    fn run(world_size: usize, rank: &(dyn Fn(Host<Self>) + Sync));

    /// The node of each rank.
    fn nodes(world_size: usize) -> Vec<u32> {
        vec![0; world_size]
    }

    /// Waits for all ranks of the world, beside the communicator.
    fn meet(&self);

    /// The same for a group of the world.
    fn of_group(&self) -> Self;

    /// As [`Backend::exchanged`].
    fn exchanged<R: Serialize + DeserializeOwned>(own: Vec<Option<R>>) -> Vec<R> {
        own.into_iter().map(|result| result.expect("every rank has returned")).collect()
    }
}

/// A rank with tensors in host memory.
pub struct Host<R> {
    comm: Communicator,
    ranks: R,
}

impl<R> Host<R> {
    /// A rank of a world.
    pub fn new(comm: Communicator, ranks: R) -> Self {
        Self { comm, ranks }
    }
}

impl<R> Deref for Host<R> {
    type Target = Communicator;

    fn deref(&self) -> &Communicator {
        &self.comm
    }
}

impl<R: Ranks> Backend for Host<R> {
    type Memory = Vec<i64>;

    fn run_ranks(world_size: usize, rank: &(dyn Fn(Self) + Sync)) {
        R::run(world_size, rank);
    }

    fn exchanged<T: Serialize + DeserializeOwned>(own: Vec<Option<T>>) -> Vec<T> {
        R::exchanged(own)
    }

    fn meet(&self) {
        self.ranks.meet();
    }

    fn group(&self, color: Option<u64>, key: i64) -> Option<Self> {
        let comm = self.comm.split(color, key).unwrap()?;
        Some(Self { comm, ranks: self.ranks.of_group() })
    }

    fn nodes(world_size: usize) -> Vec<u32> {
        R::nodes(world_size)
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn allocate(&self, bytes: usize) -> Vec<i64> {
        vec![0; bytes.div_ceil(size_of::<i64>())]
    }

    fn address(memory: &Vec<i64>) -> *const u8 {
        memory.as_ptr().cast()
    }

    fn address_mut(memory: &mut Vec<i64>) -> *mut u8 {
        memory.as_mut_ptr().cast()
    }

    fn write(memory: &mut Vec<i64>, bytes: &[u8]) {
        TensorViewMut::from(memory).as_mut_bytes().unwrap()[..bytes.len()].copy_from_slice(bytes);
    }

    fn read(memory: &Vec<i64>) -> Vec<u8> {
        TensorView::from(memory).as_bytes().unwrap().to_vec()
    }
}
