//! What [`lower`](crate::lower()) is asked for.

use serde::{Deserialize, Serialize};

use crate::{
    costs::{Device, Tables},
    numerics::Numerics,
};

/// When tensors are placed in symmetric memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Realize {
    /// Where that was measured to be faster: nowhere, neither on the host nor between H200s.
    #[default]
    Measured,
    /// Wherever it is possible.
    Always,
    /// Nowhere.
    Never,
}

/// Where a graph runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct World {
    /// On what.
    pub device: Device,
    /// The groups whose calls may be changed; all of them unless given.
    pub groups: Option<Vec<String>>,
}

/// The options of [`lower`](crate::lower()).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// How much a rewrite may change what is computed.
    pub numerics: Numerics,
    /// Whether sums are fused with residuals, norms and quantisation.
    pub fuse: bool,
    /// Whether a sum of sums becomes one.
    pub merge: bool,
    /// When tensors are placed in symmetric memory.
    pub realize: Realize,
    /// Whether collectives run beside computation: the rules `bucket` and `schedule`.
    pub overlap: bool,
    /// Which measurements [`Costs::new`](crate::Costs::new) takes. [`lower`](crate::lower()) itself is given costs.
    pub tables: Tables,
    /// The most bytes by which an overlapped program's live tensors may exceed those of the program before.
    pub overlap_bytes: u64,
    /// The most bytes that a tensor of unknown size may take where peers reach it.
    pub max_slot_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        let (numerics, realize) = Default::default();
        let (overlap_bytes, max_slot_bytes) = (1 << 30, 64 << 20);
        Self {
            numerics,
            fuse: true,
            merge: true,
            realize,
            overlap: false,
            tables: Tables::BuiltIn,
            overlap_bytes,
            max_slot_bytes,
        }
    }
}
