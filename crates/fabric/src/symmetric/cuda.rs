//! Symmetric memory on GPUs: every rank's arena, mapped by every rank.

use std::os::fd::{AsFd, OwnedFd};

use antiphon_device::cuda::{Allocation, Context, CudaError, DevicePointer, Mapping, memory};

use crate::{Communicator, FabricError};

/// Memory of one size on the GPU of every rank, which every rank's GPU reads and writes over NVLink (or PCIe).
///
/// It is made by the driver's virtual memory management and handed over as descriptors: it has no name, and is gone when
/// the last rank that maps it is. Ranks may be processes or threads.
#[derive(Debug)]
pub struct CudaArena {
    context: Context,
    mappings: Vec<Mapping>,
}

impl CudaArena {
    /// Makes the arenas: at least `len` bytes on the device of every rank's `context`, every byte of which is `fill`. All
    /// ranks call it with the same `len`.
    ///
    /// # Errors
    /// On every rank, if one fails: its own error there, [`FabricError::InvalidArgument`] that names it elsewhere.
    /// [`FabricError::InvalidArgument`] too when ranks ask for different sizes; as [`Communicator::barrier`].
    pub fn new(comm: &Communicator, context: &Context, len: usize, fill: u8) -> Result<Self, FabricError> {
        let made = comm.agree("has no memory to share", make(context, len).map_err(FabricError::from))?;
        let sizes = comm.exchange_objects(&made.0.len())?;
        if let Some(rank) = sizes.iter().position(|&size| size != sizes[0]) {
            let text =
                format!("rank 0 makes an arena of {} bytes, but rank {rank} of {}", sizes[0], sizes[rank]);
            return Err(FabricError::invalid(text));
        }
        let (allocation, descriptor) = made;
        let descriptors = comm.exchange_descriptors(descriptor.as_fd())?;
        let mapped = map(context, comm.rank(), allocation, &descriptors).map_err(FabricError::from);
        let mappings = comm.agree("cannot map the memory of its peers", mapped)?;
        let filled = fill_all(context, &mappings[comm.rank()], fill).map_err(FabricError::from);
        comm.agree("cannot fill its memory", filled)?; // and nobody uses it before
        Ok(Self { context: context.clone(), mappings })
    }

    /// Where the arena of `rank` begins, for this rank's device.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn pointer(&self, rank: usize) -> DevicePointer {
        self.mappings[rank].pointer()
    }

    /// How many ranks have one.
    pub fn world_size(&self) -> usize {
        self.mappings.len()
    }

    /// The size of each arena, in bytes.
    pub fn len(&self) -> usize {
        self.mappings[0].len()
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
    let (len, device) = (allocation.len(), [context.device()]);
    let mut mine = Some(allocation);
    let each = descriptors.iter().enumerate().map(|(rank, descriptor)| {
        let allocation = match mine.take_if(|_| rank == own) {
            Some(mine) => mine,
            None => Allocation::import(context, descriptor.as_fd(), len)?,
        };
        allocation.map(&device)
    });
    each.collect()
}

fn fill_all(context: &Context, mapping: &Mapping, value: u8) -> Result<(), CudaError> {
    let stream = context.stream()?;
    // SAFETY: the mapping is of that size, and nobody else uses it yet.
    unsafe { memory::fill(stream.borrow(), mapping.pointer(), value, mapping.len()) }?;
    stream.borrow().synchronize()
}
