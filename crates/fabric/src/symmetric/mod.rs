//! Symmetric memory: buffers at the same offset of every rank's arena.
//!
//! Every rank can read and write every rank's copy through its own mapping. The users of a
//! buffer order their accesses by barriers, rounds or signals of their own.

mod allocator;
#[cfg(not(loom))]
mod cuda;
#[cfg(not(loom))]
mod registered;
#[cfg(not(loom))]
mod registry;

use std::sync::Arc;

use antiphon_tensor::Element;

pub(crate) use allocator::Allocator;
#[cfg(not(loom))]
pub use cuda::CudaArena;
#[cfg(not(loom))]
pub use registered::RegisteredMemory;
#[cfg(not(loom))]
pub use registry::{RegisteredTensor, Registry};

use crate::{Communicator, FabricError, Operation, Signature, Written, endpoint::Endpoint};

/// A buffer of which every rank has a copy, zeroed when it is made; see [`Communicator::symmetric`].
///
/// It keeps the memory mapped as long as it lives, even beyond its communicator.
pub struct SymmetricBuffer {
    endpoint: Arc<Endpoint>,
    offset: usize,
    len: usize,
}

impl std::fmt::Debug for SymmetricBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SymmetricBuffer {{ offset: {}, len: {} }}", self.offset, self.len)
    }
}

impl SymmetricBuffer {
    /// Where the copy of `rank` begins: readable and writable for [`len`](Self::len) bytes as long as the buffer is
    /// not freed, aligned to 4096 bytes.
    ///
    /// # Panics
    /// When there is no such rank.
    pub fn as_mut_ptr(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.endpoint.world_size, "rank {rank} is not below {}", self.endpoint.world_size);
        self.endpoint.regions.arena(rank, self.offset)
    }

    /// The copy of `rank` as elements (as many as fit), to pass to collectives, say.
    ///
    /// # Safety
    /// No thread, on any rank, writes these elements while the slice lives. After a collective on them has failed, slower
    /// ranks may still do so, until they have left or met again.
    ///
    /// # Panics
    /// When there is no such rank.
    pub unsafe fn slice<T: Element>(&self, rank: usize) -> &[T] {
        // SAFETY: the copy is `len` bytes long, page-aligned, mapped as long as `self`, and any bytes are a valid `T`;
        // the caller answers for the writers.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(rank).cast(), self.len / size_of::<T>()) }
    }

    /// The copy of `rank` as elements, to write.
    ///
    /// # Safety
    /// No thread, on any rank, reads or writes these elements while the slice lives, except through it. After a collective on
    /// them has failed, slower ranks may still do so, until they have left or met again.
    ///
    /// # Panics
    /// When there is no such rank.
    #[allow(clippy::mut_from_ref)] // the memory belongs to all ranks; the caller orders their accesses
    pub unsafe fn slice_mut<T: Element>(&self, rank: usize) -> &mut [T] {
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(rank).cast(), self.len / size_of::<T>()) }
    }

    /// The size of each copy, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `comm` made it.
    pub fn belongs_to(&self, comm: &Communicator) -> bool {
        Arc::ptr_eq(&self.endpoint, comm.endpoint())
    }

    /// The offset in the arena, equal on all ranks.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

/// Keeps the symmetric memory mapped as long as it lives, even when a buffer has been freed or its communicator is gone:
/// for views that other libraries hold. (Memory that was freed is zero, or belongs to another buffer.)
#[derive(Clone)]
pub struct Mapped(#[expect(dead_code, reason = "held, not used")] Arc<Endpoint>);

impl std::fmt::Debug for Mapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mapped")
    }
}

impl SymmetricBuffer {
    /// A handle that keeps the memory of all copies mapped.
    pub fn keep_mapped(&self) -> Mapped {
        Mapped(self.endpoint.clone())
    }
}

impl Communicator {
    /// Makes a buffer of `len` bytes on every rank; all must ask for the same size. It is zeroed, and every rank may
    /// use every copy when the call returns.
    ///
    /// ```
    /// use antiphon_fabric::{FabricError, LocalWorld};
    ///
    /// LocalWorld::run(2, |comm| {
    ///     let buffer = comm.symmetric(1024)?;
    ///     let peer = 1 - comm.rank();
    ///     // SAFETY: each rank writes to one place, and reads after the barrier.
    ///     unsafe { buffer.as_mut_ptr(peer).write(comm.rank() as u8 + 1) };
    ///     comm.barrier()?;
    ///     assert_eq!(unsafe { buffer.as_mut_ptr(comm.rank()).read() }, peer as u8 + 1);
    ///     comm.free(buffer)
    /// });
    /// ```
    ///
    /// # Errors
    /// [`FabricError::ArenaFull`] with the numbers (on every rank, and the communicator stays usable); as
    /// [`barrier`](Self::barrier).
    pub fn symmetric(&self, len: usize) -> Result<SymmetricBuffer, FabricError> {
        self.check_foreground("symmetric")?;
        self.endpoint().check_one_node("symmetric")?;
        let mut rounds = self.own_rounds()?;
        let signature = Signature { count: len as u64, ..Signature::new(Operation::Allocate) };
        // Allocation is the same calculation on every rank, so nothing but the size need be agreed upon. Memory that
        // was freed has been given back to the machine, and so is zero again.
        rounds.exchange(&signature, Written::nothing(0))?;
        let offset = self.allocator().borrow_mut().allocate(len)?;
        Ok(SymmetricBuffer { endpoint: self.endpoint().clone(), offset, len })
    }

    /// Frees a buffer on all ranks, which must free the same one. No rank may use any copy any more; the pages go back
    /// to the machine. A buffer that is dropped instead keeps its place until its communicator ends.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`FabricError::InvalidArgument`] for a buffer of another communicator.
    pub fn free(&self, buffer: SymmetricBuffer) -> Result<(), FabricError> {
        self.check_foreground("free")?;
        if !buffer.belongs_to(self) {
            return Err(FabricError::invalid("the buffer belongs to another communicator"));
        }
        let mut rounds = self.own_rounds()?;
        let signature = Signature { count: buffer.offset as u64, ..Signature::new(Operation::Free) };
        rounds.exchange(&signature, Written::nothing(0))?; // all are done with it
        let pages = self.allocator().borrow_mut().free(buffer.offset);
        let released = self.endpoint().regions.release_arena(self.rank(), buffer.offset, pages);
        rounds.exchange(&signature, Written::nothing(0))?; // all copies are zero again before anyone may get the place anew
        Ok(released?)
    }
}
