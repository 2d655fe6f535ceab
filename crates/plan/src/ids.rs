//! Typed numbers: a position in one list cannot be used as a position in another.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Defines a `u32` that names a place in a dense list.
macro_rules! define_index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The place as an index.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

define_index! {
    /// A rank: a place in [`Plan::gpus`](crate::Plan::gpus).
    Rank
}
define_index! {
    /// A thread block: a place in [`Gpu::threadblocks`](crate::Gpu::threadblocks).
    ThreadBlockId
}
define_index! {
    /// A channel of a rank: a place in that rank's list of channels of one type.
    ChannelId
}
define_index! {
    /// A channel as an operation names it: a place in its thread block's list of channels of one type.
    ChannelIndex
}
define_index! {
    /// A remote buffer of a rank: a place in [`Gpu::remote_buffers`](crate::Gpu::remote_buffers).
    RemoteBufferId
}
define_index! {
    /// A remote buffer as an operation names it: a place in its thread block's list of remote buffers of one type.
    RemoteBufferIndex
}
define_index! {
    /// A semaphore: a place in [`Gpu::semaphores`](crate::Gpu::semaphores).
    SemaphoreId
}
define_index! {
    /// A barrier of thread blocks of one rank.
    BarrierId
}
define_index! {
    /// A line of the program that made an operation: a place in [`Plan::origins`](crate::Plan::origins).
    OriginId
}
