//! The one place that names atomics.
//!
//! Under `cfg(loom)` these are loom's, so that the very code that runs in production is what loom explores. Every
//! other file takes them from here (clippy.toml disallows the others).
#![allow(clippy::disallowed_types)]

#[cfg(not(loom))]
pub use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

#[cfg(loom)]
pub use loom::sync::atomic::{
    AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
