//! Typed numbers: a position in one list cannot be used as a position in another.

use serde::{Deserialize, Serialize};

/// Defines a `u32` that names a place in a dense list.
macro_rules! define_index {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
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

        impl From<usize> for $name {
            /// Graphs are bounded far below 2³².
            fn from(index: usize) -> Self {
                Self(u32::try_from(index).expect("lists are bounded"))
            }
        }
    )*};
}

define_index! {
    /// A value: a place in [`Graph::values`](crate::Graph::values).
    ValueId;
    /// An operation: a place in [`Graph::ops`](crate::Graph::ops), which is their order.
    OpId;
    /// A storage: a place in [`Analysis::stores`](crate::Analysis::stores).
    StoreId;
    /// What joins the start of a collective with its wait.
    TokenId;
}
