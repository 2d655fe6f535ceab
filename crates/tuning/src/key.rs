//! The key of a table.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The key of a table: the operation, the world and the machine for which it was measured.
///
/// Whatever else changes the times belongs into one of the strings: a fused epilogue into the operation, the
/// driver and the links between the GPUs into the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The operation, such as `all_reduce`.
    pub operation: String,
    /// The elements' type, such as `bf16`; empty if it does not matter.
    #[serde(default)]
    pub dtype: String,
    /// The number of ranks that take part.
    pub world_size: usize,
    /// How many ranks each node has, such as `4 + 4`; empty if all ranks are on one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub nodes: String,
    /// The kind of machine, such as `8x H200 NVLink`.
    #[serde(default)]
    pub machine: String,
}

impl Key {
    /// A key of these parts.
    pub fn new(
        operation: impl Into<String>,
        dtype: impl Into<String>,
        world_size: usize,
        machine: impl Into<String>,
    ) -> Self {
        let (operation, dtype, machine) = (operation.into(), dtype.into(), machine.into());
        Self { operation, dtype, world_size, nodes: String::new(), machine }
    }

    /// For ranks on several nodes, each of which has this number of them.
    ///
    /// ```
    /// use antiphon_tuning::Key;
    ///
    /// let key = Key::new("all_reduce", "", 4, "EPYC").on_nodes([1, 3]);
    /// assert_eq!(key.nodes, "1 + 3");
    /// ```
    #[must_use]
    pub fn on_nodes(self, ranks: impl IntoIterator<Item = usize>) -> Self {
        let ranks: Vec<String> = ranks.into_iter().map(|ranks| ranks.to_string()).collect();
        Self { nodes: ranks.join(" + "), ..self }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, dtype, world_size, nodes, machine } = self;
        let operation = operation.escape_debug(); // it may come from a file
        write!(f, "{operation} of {dtype:?} over {world_size} ranks")?;
        if !nodes.is_empty() {
            write!(f, " ({})", nodes.escape_debug())?;
        }
        write!(f, " on {machine:?}")
    }
}
