//! The one place that names atomics, and the lock of all crates.
//!
//! Atomics are thin wrappers, so that clippy can tell them from core's, which it disallows everywhere else. Under
//! `cfg(loom)` loom's are inside: the very code that runs in production is what loom explores.
#![allow(clippy::disallowed_types)]

use std::{
    cell::Cell,
    sync::{LockResult, MutexGuard, TryLockResult},
};

#[cfg(loom)]
use loom::sync::atomic as imp;
#[cfg(not(loom))]
use std::sync::atomic as imp;

#[doc(no_inline)]
pub use imp::{Ordering, fence};

macro_rules! atomic {
    ($(#[$doc:meta])* $name:ident, $value:ty) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Debug, Default)]
        pub struct $name(imp::$name);

        impl $name {
            /// An atomic that holds `value`.
            pub fn new(value: $value) -> Self {
                Self(imp::$name::new(value))
            }

            /// The value.
            #[inline(always)]
            pub fn load(&self, order: Ordering) -> $value {
                self.0.load(order)
            }

            /// Replaces the value.
            #[inline(always)]
            pub fn store(&self, value: $value, order: Ordering) {
                self.0.store(value, order);
            }

            /// Replaces the value by `value` if that is greater. It locks the line: not for what is often done.
            pub fn raise(&self, value: $value, order: Ordering) {
                self.0.fetch_max(value, order);
            }
        }
    };
}

atomic!(
    /// 32 bits that several processes may use at once; all-zero bytes are a valid one.
    AtomicU32,
    u32
);
atomic!(
    /// 64 bits that several processes may use at once; all-zero bytes are a valid one.
    AtomicU64,
    u64
);

#[cfg(not(loom))]
impl AtomicU32 {
    /// For the futex calls, which take core's.
    pub(crate) fn as_core(&self) -> &imp::AtomicU32 {
        &self.0
    }
}

/// A [`std::sync::Mutex`] that builds with debug assertions count: the documentation says how many locks a call takes, and tests
/// hold it to that.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock of `value`.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// As [`std::sync::Mutex::lock`].
    ///
    /// # Errors
    /// The guard, if a thread panicked while it held the lock.
    #[inline]
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        count();
        self.0.lock()
    }

    /// As [`std::sync::Mutex::try_lock`].
    ///
    /// # Errors
    /// As for [`lock`](Self::lock), or if another holds the lock.
    #[inline]
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        count();
        self.0.try_lock()
    }
}

thread_local! {
    static LOCKS_TAKEN: Cell<u64> = const { Cell::new(0) };
}

#[inline(always)]
fn count() {
    if cfg!(debug_assertions) {
        LOCKS_TAKEN.set(LOCKS_TAKEN.get() + 1);
    }
}

/// How often this thread has locked a [`Mutex`] of this module, in a build with debug assertions: `None` in others.
pub fn locks_taken() -> Option<u64> {
    cfg!(debug_assertions).then(|| LOCKS_TAKEN.get())
}
