//! Values that kernels may use, and that are dropped only when the GPU is idle.

use std::{
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    process,
};

use antiphon_device::cuda::Context;

/// A value that the kernels of a context use: it is dropped when all work of the context is over.
///
/// Kernels end by their deadline at the latest. Where the end cannot be waited for, as while a stream is captured, the value is
/// leaked: that is better than taking it away from a kernel. So it is in a forked child, which cannot use the driver, and whose
/// parent has the value.
#[derive(Debug)]
pub struct UntilIdle<T> {
    value: ManuallyDrop<T>,
    context: ManuallyDrop<Context>,
    /// The process that made it.
    process: u32,
}

impl<T> UntilIdle<T> {
    /// Keeps a value for the kernels of a context.
    pub fn new(context: &Context, value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            context: ManuallyDrop::new(context.clone()),
            process: process::id(),
        }
    }
}

impl<T> Deref for UntilIdle<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for UntilIdle<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for UntilIdle<T> {
    fn drop(&mut self) {
        if self.process != process::id() || self.context.synchronize().is_err() {
            return;
        }
        // SAFETY: both are dropped once, here, and not used any more.
        unsafe {
            ManuallyDrop::drop(&mut self.value);
            ManuallyDrop::drop(&mut self.context);
        }
    }
}
