//! Symmetric memory on GPUs: every rank's arena, mapped by every rank.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{MutexGuard, PoisonError},
};

use antiphon_device::cuda::{Allocation, Context, CudaError, DevicePointer, Mapping, memory};
use antiphon_device::sync::Mutex;

use crate::{Communicator, FabricError};

/// Memory of one size on the GPU of every rank, which every rank's GPU reads and writes over NVLink (or PCIe).
///
/// It is made by the driver's virtual memory management and handed over as descriptors: it has no name, and is gone when
/// the last rank that maps it is. Ranks may be processes or threads.
///
/// The memory can be [released](Self::release) for a while, and its addresses kept.
#[derive(Debug)]
pub struct CudaArena {
    context: Context,
    pointers: Box<[DevicePointer]>,
    len: usize,
    mappings: Mutex<Vec<Mapping>>,
}

impl CudaArena {
    /// Makes the arenas: at least `len` bytes on the device of every rank's `context`, every byte of which is `fill`. All
    /// ranks call it with the same `len`.
    ///
    /// # Errors
    /// On every rank, if one fails: its own error there, [`FabricError::InvalidArgument`] that names it elsewhere.
    /// [`FabricError::InvalidArgument`] too when ranks ask for different sizes; as [`Communicator::barrier`].
    pub fn new(comm: &Communicator, context: &Context, len: usize, fill: u8) -> Result<Self, FabricError> {
        comm.check_one_node("CudaArena")?;
        let (allocation, descriptors) = exchange(comm, context, len)?;
        let mapped = map(context, comm.rank(), allocation, &descriptors).map_err(FabricError::from);
        let mappings = comm.agree("cannot map the memory of its peers", mapped)?;
        let pointers: Box<[_]> = mappings.iter().map(Mapping::pointer).collect();
        let len = mappings[0].len();
        let arena = Self { context: context.clone(), pointers, len, mappings: Mutex::new(mappings) };
        let filled = arena.fill(comm.rank(), fill).map_err(FabricError::from);
        comm.agree("cannot fill its memory", filled)?; // no rank uses the memory before
        Ok(arena)
    }

    /// Gives the memory of all ranks back to their devices, and keeps the addresses, at which nothing may be used until
    /// [`restore`](Self::restore). All ranks call it together; a second time it changes nothing.
    ///
    /// It waits for all work of this rank's context first.
    ///
    /// # Errors
    /// On every rank, if one fails: its own error there, [`FabricError::InvalidArgument`] that names it elsewhere. Some of the
    /// memory may have been given back then: call either function again. As [`Communicator::barrier`].
    pub fn release(&self, comm: &Communicator) -> Result<(), FabricError> {
        let idle = self.context.synchronize().map_err(FabricError::from);
        comm.agree("cannot wait for its kernels", idle)?; // of all ranks, whose kernels use this memory too
        let released = self.mappings().iter_mut().try_for_each(Mapping::release).map_err(FabricError::from);
        comm.agree("cannot give its memory back", released)
    }

    /// Gives all ranks memory again at the addresses that they had, every byte of which is `fill`, whether or not the memory had
    /// been [released](Self::release). All ranks call it together.
    ///
    /// # Errors
    /// As [`release`](Self::release), among others for a device that has too little memory by now: all memory is released then.
    pub fn restore(&self, comm: &Communicator, fill: u8) -> Result<(), FabricError> {
        self.release(comm)?;
        let restored = self.put_back(comm, fill);
        if restored.is_err() {
            // As before this call: what did not fail here may have failed elsewhere, which all ranks know.
            let _ = self.mappings().iter_mut().try_for_each(Mapping::release);
        }
        restored
    }

    fn put_back(&self, comm: &Communicator, fill: u8) -> Result<(), FabricError> {
        let (own, descriptors) = exchange(comm, &self.context, self.len)?;
        let each = memory_of_all(&self.context, comm.rank(), own, &descriptors);
        let mapped =
            self.mappings().iter_mut().zip(each).try_for_each(|(mapping, each)| mapping.restore(each?));
        comm.agree("cannot map the memory of its peers", mapped.map_err(FabricError::from))?;
        comm.agree("cannot fill its memory", self.fill(comm.rank(), fill).map_err(FabricError::from))
    }

    fn fill(&self, own: usize, value: u8) -> Result<(), CudaError> {
        let stream = self.context.stream()?;
        // SAFETY: the memory has that size, and no other code uses it yet.
        unsafe { memory::fill(stream.borrow(), self.pointers[own], value, self.len) }?;
        stream.borrow().synchronize()
    }

    fn mappings(&self) -> MutexGuard<'_, Vec<Mapping>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the arena of `rank` begins, for this rank's device.
    ///
    /// # Panics
    /// When there is no such rank.
    #[inline]
    pub fn pointer(&self, rank: usize) -> DevicePointer {
        self.pointers[rank]
    }

    /// How many ranks have one.
    pub fn world_size(&self) -> usize {
        self.pointers.len()
    }

    /// The size of each arena, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The context of this rank's device.
    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// This rank's new memory, and the descriptors of all ranks'.
fn exchange(
    comm: &Communicator,
    context: &Context,
    len: usize,
) -> Result<(Allocation, Vec<OwnedFd>), FabricError> {
    let made = comm.agree("has no memory to share", make(context, len).map_err(FabricError::from))?;
    let sizes = comm.exchange_objects(&made.0.len())?;
    if let Some(rank) = sizes.iter().position(|&size| size != sizes[0]) {
        let text = format!("rank 0 makes an arena of {} bytes, but rank {rank} of {}", sizes[0], sizes[rank]);
        return Err(FabricError::invalid(text));
    }
    let (allocation, descriptor) = made;
    Ok((allocation, comm.exchange_descriptors(descriptor.as_fd())?))
}

fn make(context: &Context, len: usize) -> Result<(Allocation, OwnedFd), CudaError> {
    let allocation = Allocation::create(context, len)?;
    let descriptor = allocation.export()?;
    Ok((allocation, descriptor))
}

fn map(
    context: &Context,
    own: usize,
    allocation: Allocation,
    descriptors: &[OwnedFd],
) -> Result<Vec<Mapping>, CudaError> {
    let device = [context.device()];
    memory_of_all(context, own, allocation, descriptors).map(|memory| memory?.map(&device)).collect()
}

/// The memory of every rank: this rank's own, and the peers' by their descriptors.
fn memory_of_all(
    context: &Context,
    own: usize,
    allocation: Allocation,
    descriptors: &[OwnedFd],
) -> impl Iterator<Item = Result<Allocation, CudaError>> {
    let (len, mut mine) = (allocation.len(), Some(allocation));
    descriptors.iter().enumerate().map(move |(rank, descriptor)| match mine.take_if(|_| rank == own) {
        Some(mine) => Ok(mine),
        None => Allocation::import(context, descriptor.as_fd(), len),
    })
}
