//! The symmetric memory of loaded plans.

use std::cell::RefCell;

use antiphon_device::{host::wait::Doorbell, sync::AtomicU64};
use antiphon_fabric::{Communicator, FabricError, SymmetricBuffer};

/// Every rank's bell, and the counts of signals that its peers write.
pub(super) struct SyncArea(SymmetricBuffer);

/// Counts have a cache line each, after the bell's two.
const COUNTS: usize = 128;
const LINE: usize = 64;

impl SyncArea {
    /// Allocates room for `channels` channels on every rank. All ranks call it together.
    pub(super) fn new(comm: &Communicator, channels: usize) -> Result<Self, FabricError> {
        let bytes = channels.checked_mul(LINE).and_then(|bytes| bytes.checked_add(COUNTS));
        comm.symmetric(bytes.unwrap_or(usize::MAX)).map(Self)
    }

    pub(super) fn buffer(&self) -> &SymmetricBuffer {
        &self.0
    }

    pub(super) fn into_buffer(self) -> SymmetricBuffer {
        self.0
    }

    /// Where a rank sleeps.
    #[inline]
    pub(super) fn bell(&self, rank: usize) -> &Doorbell {
        // SAFETY: a rank's area begins, page-aligned, with its bell; zero bytes are a valid one.
        unsafe { &*self.0.as_mut_ptr(rank).cast() }
    }

    /// How many signals a channel of a rank has got.
    #[inline]
    pub(super) fn count(&self, rank: usize, channel: usize) -> &AtomicU64 {
        let offset = COUNTS + channel * LINE;
        assert!(offset + LINE <= self.0.len());
        // SAFETY: the offset lies in the area and is aligned to 64; zero bytes are a valid count.
        unsafe { &*self.0.as_mut_ptr(rank).add(offset).cast() }
    }
}

/// Scratch and staging, which grow when a message needs more, and the flag of packets.
#[derive(Default)]
pub(super) struct Workspace {
    staging: Option<SymmetricBuffer>,
    scratch: Option<SymmetricBuffer>,
    /// The flag of the last launch: every launch has another one, and none is zero.
    flag: u32,
}

/// The memory that several plans of a communicator share.
#[derive(Default)]
pub(super) struct SharedWorkspace(pub(super) RefCell<Workspace>);

impl Workspace {
    /// Makes room. All ranks call it together, with the same numbers.
    pub(super) fn reserve(
        &mut self,
        comm: &Communicator,
        staging: usize,
        scratch: usize,
    ) -> Result<(), FabricError> {
        reserve(comm, &mut self.staging, staging)?;
        reserve(comm, &mut self.scratch, scratch)
    }

    /// Whether there is room already.
    pub(super) fn has_room(&self, staging: usize, scratch: usize) -> bool {
        let len = |buffer: &Option<SymmetricBuffer>| buffer.as_ref().map_or(0, SymmetricBuffer::len);
        len(&self.staging) >= staging && len(&self.scratch) >= scratch
    }

    pub(super) fn staging(&self, rank: usize) -> *mut u8 {
        self.staging.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.as_mut_ptr(rank))
    }

    pub(super) fn scratch(&self, rank: usize) -> *mut u8 {
        self.scratch.as_ref().map_or(std::ptr::null_mut(), |buffer| buffer.as_mut_ptr(rank))
    }

    pub(super) fn next_flag(&mut self) -> u32 {
        self.flag = self.flag.wrapping_add(1).max(1);
        self.flag
    }

    /// Gives everything back. All ranks call it together.
    pub(super) fn free(self, comm: &Communicator) -> Result<(), FabricError> {
        [self.staging, self.scratch].into_iter().flatten().try_for_each(|buffer| comm.free(buffer))
    }
}

fn reserve(comm: &Communicator, buffer: &mut Option<SymmetricBuffer>, len: usize) -> Result<(), FabricError> {
    if buffer.as_ref().map_or(0, SymmetricBuffer::len) >= len {
        return Ok(());
    }
    if let Some(old) = buffer.take() {
        comm.free(old)?;
    }
    *buffer = Some(comm.symmetric(len)?);
    Ok(())
}
