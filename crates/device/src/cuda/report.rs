//! The report of a kernel that gave up waiting.

use std::ptr::NonNull;

use super::{Context, CudaError, DeviceMemory, DevicePointer, PinnedMemory};
use crate::sync::{AtomicU32, Ordering};

/// The waiting rank and the awaited rank, as the prelude's `wait_until` records them in a `wait_report` before it returns false. Of all
/// threads that give up, the first one is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitReport {
    /// Why it gave up.
    pub reason: GaveUp,
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// Its call, as the two words that the kernel was given.
    pub doing: [u64; 2],
    /// The block that waited.
    pub block: u32,
    /// The thread in it.
    pub thread: u32,
    /// The value that it waited for.
    pub expected: u64,
    /// The value that it saw last; where ranks disagree, the two words of the peer's call.
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
    /// Another call of the same rank and tenant ran at the same time.
    Overlapped,
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

/// Words of 64 bits of the prelude's `wait_board`: whether a wait has stopped, when the host's word was read, and where that word
/// and the report are.
const BOARD_WORDS: usize = 4;

/// The means by which waits on a device end: the word by which the host ends them, the report of the first one that gives up,
/// and the board in the device's memory on which the others see that it has.
///
/// The word and the report lie in host memory, which the host reads while a kernel runs and after it has left. Kernels read the
/// word rarely, and one thread at a time, since host memory is far away; what all their threads read is the board.
#[derive(Debug)]
pub struct WaitBoard {
    memory: PinnedMemory,
    board: DeviceMemory,
}

impl WaitBoard {
    /// Bytes from the word to the report, so that reading the one does not disturb the other.
    const REPORT: usize = 128;

    /// A board on which nothing stands.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let memory = PinnedMemory::allocate(context, Self::REPORT + size_of::<Raw>())?;
        let this = Self { memory, board: DeviceMemory::allocate(context, BOARD_WORDS * size_of::<u64>())? };
        this.reset(context)?;
        Ok(this)
    }

    /// Where kernels find the board: the `board` of the prelude's `waiter`.
    #[inline]
    pub fn pointer(&self) -> DevicePointer {
        self.board.pointer()
    }

    /// Makes every kernel that waits, now or later, give up within some milliseconds.
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
                    5 => GaveUp::Overlapped,
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
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn clear(&self, context: &Context) -> Result<(), CudaError> {
        self.word().store(0, Ordering::Release);
        // SAFETY: as in `report`.
        unsafe { &self.raw().as_ref().state }.store(0, Ordering::Release);
        self.reset(context)
    }

    /// Writes the device's part.
    fn reset(&self, context: &Context) -> Result<(), CudaError> {
        let (abort, report) = (self.memory.pointer(), self.memory.pointer().offset(Self::REPORT as u64));
        let board: [_; BOARD_WORDS] = [0, 0, abort.0, report.0].map(u64::to_ne_bytes);
        self.board.write(&context.stream()?, 0, board.as_flattened())
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
