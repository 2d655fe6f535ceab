//! Tensors lent to and borrowed from other libraries.

mod foreign;
mod header;
mod round_trip;
mod strided;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use antiphon_tensor::TensorError;
use antiphon_tensor::dlpack::{Imported, sys};

/// Counts this thread's allocations and frees.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
    static FREED: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        FREED.set(FREED.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs something that must free all that it allocates, and gives the number of allocations.
fn leak_free(run: impl FnOnce()) -> usize {
    let (allocated, freed) = (ALLOCATED.get(), FREED.get());
    run();
    let (allocated, freed) = (ALLOCATED.get() - allocated, FREED.get() - freed);
    assert_eq!(allocated, freed, "allocations and frees");
    allocated
}

/// How often owners were dropped, or deleters called.
#[derive(Clone, Debug, Default)]
struct Drops(Arc<Mutex<usize>>);

impl Drops {
    fn count(&self) -> usize {
        *self.0.lock().unwrap()
    }
}

fn import(managed: NonNull<sys::DLManagedTensorVersioned>) -> Result<Imported, TensorError> {
    // SAFETY: the tests make tensors with one consumer; where they lie, it is refused before memory is touched.
    unsafe { Imported::from_versioned(managed) }
}

fn import_unversioned(managed: NonNull<sys::DLManagedTensor>) -> Result<Imported, TensorError> {
    // SAFETY: as for `import`.
    unsafe { Imported::from_unversioned(managed) }
}
