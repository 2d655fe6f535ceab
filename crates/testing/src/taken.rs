//! What calls take: memory and locks.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::Instant,
};

use antiphon_device::{host::wait::NAP, sync::locks_taken};

/// The system's allocator, which counts what each thread allocates and frees. A test target makes it its own:
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: antiphon_testing::CountingAllocator = antiphon_testing::CountingAllocator;
/// ```
pub struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static FREES: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        FREES.set(FREES.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// How often this thread has allocated memory from the [`CountingAllocator`].
pub fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// How often this thread has freed memory of the [`CountingAllocator`].
pub fn frees() -> u64 {
    FREES.get()
}

/// What a call has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Allocations of memory by the calling thread.
    pub allocations: u64,
    /// Locks of [`antiphon_device::sync::Mutex`] by the calling thread; `None` in builds without debug assertions, which do not count.
    pub locks: Option<u64>,
}

impl Taken {
    /// `allocations` allocations and, in builds that count locks, `locks` locks.
    pub fn new(allocations: u64, locks: u64) -> Self {
        Self { allocations, locks: locks_taken().map(|_| locks) }
    }

    /// What equal calls take after the first three, in a target with the [`CountingAllocator`].
    ///
    /// A call that waits for its peers looks around after each [`NAP`], and how often is up to the machine. Only the calls that were
    /// over before are compared.
    ///
    /// # Panics
    /// If calls differ in what they take, and if fewer than one in ten were over in time.
    pub fn by_each_of(calls: u64, mut call: impl FnMut()) -> Self {
        (0..3).for_each(|_| call());
        let mut quick = 0;
        let mut taken: Option<Self> = None;
        for _ in 0..calls {
            let (start, before) = (Instant::now(), Self::until_now());
            call();
            let (after, took) = (Self::until_now(), start.elapsed());
            if took < NAP {
                let this = Self {
                    allocations: after.allocations - before.allocations,
                    locks: after.locks.zip(before.locks).map(|(after, before)| after - before),
                };
                assert_eq!(*taken.get_or_insert(this), this, "after {quick} equal calls");
                quick += 1;
            }
        }
        assert!(quick >= calls.div_ceil(10), "only {quick} of {calls} calls were over within {NAP:?}");
        taken.expect("there were calls")
    }

    fn until_now() -> Self {
        Self { allocations: allocations(), locks: locks_taken() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use antiphon_device::sync::Mutex;

    #[test]
    fn locks_are_counted() {
        let mutex = Mutex::new(0);
        let taken = Taken::by_each_of(100, || {
            *mutex.lock().unwrap() += 1;
            assert!(mutex.try_lock().is_ok());
        });
        assert_eq!(taken, Taken::new(0, 2));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "locks are not counted")]
    #[should_panic = "after 7 equal calls"]
    fn a_call_that_takes_more_is_found() {
        let (mutex, mut number) = (Mutex::new(()), 0);
        Taken::by_each_of(100, || {
            number += 1;
            if number == 11 {
                drop(mutex.lock().unwrap());
            }
        });
    }
}
