//! The registered memory that a rank's kernels know.

use antiphon_device::cuda::{Context, DevicePointer};

use super::RegisteredMemory;
use crate::{Communicator, FabricError, gpu::MAX_WORLD};

/// Registered memories that kernels may use. All ranks register the same memories in the same order, so each has a number that is
/// equal on all ranks.
#[derive(Debug, Default)]
pub struct Registry {
    known: Vec<(u32, RegisteredMemory)>,
    next: u32,
}

/// A tensor in registered memory.
#[derive(Debug, Clone, Copy)]
pub struct RegisteredTensor {
    /// The number of the registration.
    number: u32,
    /// Bytes from the beginning of the memory.
    offset: u64,
    /// Its address on every rank, for this rank's device, if it has that offset there; 0 where there is no rank.
    pub at: [u64; MAX_WORLD],
}

impl RegisteredTensor {
    /// A digest, which almost always differs for ranks whose tensors are in different places.
    pub fn digest(places: [Option<Self>; 2]) -> u32 {
        let words =
            places.into_iter().map(|place| place.map_or(0, |p| (p.offset << 8) | (u64::from(p.number) + 1)));
        let mixed = words.fold(0u64, |sum, word| (sum ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        (mixed >> 32) as u32
    }
}

impl Registry {
    /// Whether there is no memory.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The tensor of `bytes` bytes at an address of `rank`, which is this rank; none if it is not within one memory.
    pub fn find(&self, rank: usize, address: u64, bytes: u64) -> Option<RegisteredTensor> {
        self.known.iter().find_map(|(number, memory)| {
            let offset = address.checked_sub(memory.pointer(rank).0)?;
            if offset.checked_add(bytes)? > memory.len() {
                return None;
            }
            let mut at = [0; MAX_WORLD];
            for (rank, at) in at.iter_mut().enumerate().take(memory.world_size()) {
                *at = memory.pointer(rank).offset(offset).0;
            }
            Some(RegisteredTensor { number: *number, offset, at })
        })
    }

    /// Adds some memory, which kernels of `context` may use from now on, between `world_size` ranks.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for memory of another number of ranks or of another device.
    pub fn register(
        &mut self,
        world_size: usize,
        context: &Context,
        memory: RegisteredMemory,
    ) -> Result<(), FabricError> {
        let (device, ours) = (memory.context().device().ordinal(), context.device().ordinal());
        if (memory.world_size(), device) != (world_size, ours) {
            return Err(FabricError::invalid(format!(
                "the memory is of {} ranks and device {device}, its user of {world_size} and device {ours}",
                memory.world_size(),
            )));
        }
        self.known.push((self.next, memory));
        self.next += 1;
        Ok(())
    }

    /// Takes memory away again, when the work of every rank's device is over. All ranks call it together, each with the address of its
    /// own.
    ///
    /// # Errors
    /// On every rank: [`FabricError::InvalidArgument`] for an address at which no registered memory begins, and when ranks name
    /// different memory; [`FabricError::Device`] for what went wrong in earlier work; as [`Communicator::barrier`].
    pub fn unregister(
        &mut self,
        comm: &Communicator,
        context: &Context,
        address: DevicePointer,
    ) -> Result<(), FabricError> {
        const PROBLEM: &str = "cannot give memory back";
        let found = self.known.iter().position(|(_, memory)| memory.pointer(comm.rank()) == address);
        let index = comm.agree(
            PROBLEM,
            found.ok_or_else(|| {
                FabricError::invalid(format!("no registered memory begins at {:#x}", address.0))
            }),
        )?;
        comm.agree(PROBLEM, context.synchronize().map_err(FabricError::from))?;
        let number = self.known[index].0;
        let numbers = comm.exchange_objects(&number)?;
        if let Some(other) = numbers.iter().position(|&theirs| theirs != numbers[0]) {
            return Err(FabricError::invalid(format!(
                "rank 0 gives back registration {}, but rank {other} registration {}",
                numbers[0], numbers[other]
            )));
        }
        self.known.remove(index);
        comm.barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_differ_by_registration_offset_and_which_is_which() {
        let place = |number, offset| Some(RegisteredTensor { number, offset, at: [0; MAX_WORLD] });
        let digests = [
            [place(0, 0), None],
            [place(1, 0), None],
            [place(0, 16), None],
            [place(0, 0), place(0, 0)],
            [place(0, 0), place(0, 4096)],
            [place(0, 4096), place(0, 0)],
        ]
        .map(RegisteredTensor::digest);
        for (index, digest) in digests.iter().enumerate() {
            assert!(!digests[..index].contains(digest), "{digests:x?}");
        }
    }
}
