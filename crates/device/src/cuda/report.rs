//! What a kernel that gave up waiting leaves behind.

use std::ptr::NonNull;

use super::{CudaError, DevicePointer, PinnedMemory};
use crate::sync::{AtomicU32, Ordering};

/// Who waited for whom, as the prelude's `wait_until` records it in a `wait_report` before it returns false. Of all
/// threads that give up, the first one is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitReport {
    /// Why it gave up.
    pub reason: GaveUp,
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// What it was doing, by the two words that the kernel was given.
    pub doing: [u64; 2],
    /// The block that waited.
    pub block: u32,
    /// The thread in it.
    pub thread: u32,
    /// What it waited to see.
    pub expected: u64,
    /// What it saw last; where ranks disagree, the two words of what the peer does.
    pub seen: [u64; 2],
    /// How long it waited, in nanoseconds.
    pub waited_ns: u64,
}

/// Why a wait ended without what it waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GaveUp {
    /// The time was up.
    Deadline,
    /// The host said so.
    Aborted,
    /// The peer does something else.
    Disagreed,
}

/// The `wait_report` of the prelude.
#[repr(C)]
struct Raw {
    state: AtomicU32,
    reason: u32,
    rank: u32,
    peer: u32,
    block: u32,
    thread: u32,
    doing: [u64; 2],
    expected: u64,
    seen: [u64; 2],
    waited_ns: u64,
}

/// The state of a report that is complete; 0 is none, 1 is being written.
const COMPLETE: u32 = 2;

/// The word that makes waiting kernels give up, and the report of the first one that does: memory that the host reads
/// while a kernel runs, and after it has left.
#[derive(Debug)]
pub struct WaitBoard {
    memory: PinnedMemory,
}

impl WaitBoard {
    /// Bytes from the word to the report, so that polling the one does not disturb the other.
    const REPORT: usize = 128;

    /// A board in pinned memory.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &super::Context) -> Result<Self, CudaError> {
        PinnedMemory::allocate(context, Self::REPORT + size_of::<Raw>()).map(|memory| Self { memory })
    }

    /// Where kernels find the word: the `abort` of the prelude's `waiter`.
    pub fn abort_pointer(&self) -> DevicePointer {
        self.memory.pointer()
    }

    /// Where kernels write the report: the `report` of the prelude's `waiter`.
    pub fn report_pointer(&self) -> DevicePointer {
        self.memory.pointer().offset(Self::REPORT as u64)
    }

    /// Makes every kernel that waits, now or later, give up within microseconds.
    pub fn abort(&self) {
        self.word().store(1, Ordering::Release);
    }

    /// Takes the report, if a kernel has left one.
    pub fn report(&self) -> Option<WaitReport> {
        let raw = self.raw();
        // SAFETY: the board's memory holds a `Raw`, which begins as zeros, and whose state is only used atomically.
        let state = unsafe { &raw.as_ref().state };
        // Pairs with the device's st.release.sys of the state, behind the other fields.
        if state.load(Ordering::Acquire) != COMPLETE {
            return None;
        }
        // SAFETY: the device wrote the other fields before the state, and writes nothing while the state is not 0.
        let report = unsafe {
            let raw = raw.as_ptr();
            WaitReport {
                reason: match (*raw).reason {
                    1 => GaveUp::Deadline,
                    2 => GaveUp::Aborted,
                    _ => GaveUp::Disagreed,
                },
                rank: (*raw).rank,
                peer: (*raw).peer,
                doing: (*raw).doing,
                block: (*raw).block,
                thread: (*raw).thread,
                expected: (*raw).expected,
                seen: (*raw).seen,
                waited_ns: (*raw).waited_ns,
            }
        };
        Some(report)
    }

    /// Forgets the report and the abort, once no kernel that knows of them runs any more.
    pub fn clear(&self) {
        self.word().store(0, Ordering::Release);
        // SAFETY: as in `report`.
        unsafe { &self.raw().as_ref().state }.store(0, Ordering::Release);
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the board's memory begins with the word, which is only used atomically.
        unsafe { self.memory.host().cast::<AtomicU32>().as_ref() }
    }

    fn raw(&self) -> NonNull<Raw> {
        // SAFETY: the board's memory reaches `size_of::<Raw>()` bytes beyond this offset.
        unsafe { self.memory.host().add(Self::REPORT).cast() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The prelude has the same numbers in static_asserts.
    #[test]
    fn the_report_is_laid_out_as_the_prelude_has_it() {
        let offsets = [
            offset_of!(Raw, state),
            offset_of!(Raw, thread),
            offset_of!(Raw, expected),
            offset_of!(Raw, waited_ns),
        ];
        assert_eq!((offsets, size_of::<Raw>()), ([0, 20, 40, 64], 72));
    }
}
