//! The one place that names atomics.
//!
//! They are thin wrappers, so that clippy can tell them from core's, which it disallows everywhere else. Under
//! `cfg(loom)` loom's are inside: the very code that runs in production is what loom explores.
#![allow(clippy::disallowed_types)]

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
