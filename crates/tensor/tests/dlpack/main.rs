//! Tensors lent to and borrowed from other libraries.

mod foreign;
mod header;
mod round_trip;
mod strided;

use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use antiphon_tensor::TensorError;
use antiphon_tensor::dlpack::{Imported, sys};
use antiphon_testing::{CountingAllocator, allocations, frees};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs something that must free all that it allocates, and gives the number of allocations.
fn leak_free(run: impl FnOnce()) -> u64 {
    let (allocated, freed) = (allocations(), frees());
    run();
    let (allocated, freed) = (allocations() - allocated, frees() - freed);
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
