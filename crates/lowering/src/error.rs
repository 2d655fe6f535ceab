//! What can be wrong with a graph's form, and with its meaning.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a graph cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoweringError {
    /// The text is longer than any graph may be.
    #[error("a graph of {bytes} bytes: at most {limit} are read")]
    TooLong {
        /// How many bytes it has.
        bytes: usize,
        /// The most that are read.
        limit: usize,
    },
    /// There are more of something than any graph may have.
    #[error("{count} {what}: a graph has at most {limit}")]
    TooMany {
        /// The things that are too many.
        what: &'static str,
        /// How many there are.
        count: usize,
        /// The most that there may be.
        limit: usize,
    },
    /// Something stands where something else is wanted.
    #[error("{at}: found {found}, wanted {wanted}")]
    Unexpected {
        /// A line of the text (`line 3`) or a path in the JSON (`ops[2].args[0]`).
        at: String,
        /// What stands there.
        found: String,
        /// What is wanted there.
        wanted: String,
    },
    /// The graph is well formed, but this crate does not know what it means.
    #[error("{at}: {what}")]
    Unsupported {
        /// The operation.
        at: String,
        /// What is not supported, with the numbers.
        what: String,
    },
}

impl LoweringError {
    pub(crate) fn unexpected(
        at: impl Into<String>,
        found: impl fmt::Display,
        wanted: impl Into<String>,
    ) -> Self {
        let found: String = found.to_string().chars().flat_map(char::escape_debug).take(200).collect();
        Self::Unexpected { at: at.into(), found, wanted: wanted.into() }
    }
}

/// The kinds of things that are wrong with a graph, or with what was made of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FindingKind {
    /// A value is used before it is defined, or nowhere defined.
    Undefined,
    /// An operation has operands or results that do not fit it.
    Shape,
    /// A value is read, written or returned while a collective is in flight on its storage.
    InFlight,
    /// A version of a storage is used after a later one was written.
    Stale,
    /// A token is waited for twice, or never, or by nobody's start.
    Token,
    /// A group that does not exist, or a call that does not fit its group.
    Group,
    /// Storage that belongs to communication leaves the graph.
    Escape,
    /// An output, or what an effect is given, has another meaning than before.
    Meaning,
    /// The calls of a group, or other effects, are others than before or come in another order.
    Order,
    /// Two storages that are in use at the same time share bytes, or one has too few.
    Slot,
    /// Two accesses of the same bytes, of which one writes, have no order.
    Race,
    /// Decisions do not belong to the graphs.
    #[serde(rename = "plan")]
    Decisions,
}

/// Something that is wrong, with the names and numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What kind of thing.
    pub kind: FindingKind,
    /// The operations that it is about.
    pub ops: Vec<String>,
    /// The values that it is about.
    pub values: Vec<String>,
    /// The numbers, where there are some.
    pub numbers: Vec<i64>,
    /// The same in words.
    pub text: String,
}

impl Finding {
    pub(crate) fn new(kind: FindingKind, text: impl Into<String>) -> Self {
        Self { kind, ops: Vec::new(), values: Vec::new(), numbers: Vec::new(), text: text.into() }
    }

    pub(crate) fn op(mut self, op: &str) -> Self {
        self.ops.push(op.to_owned());
        self
    }

    pub(crate) fn value(mut self, value: &str) -> Self {
        self.values.push(value.to_owned());
        self
    }

    pub(crate) fn numbers(mut self, numbers: impl IntoIterator<Item = i64>) -> Self {
        self.numbers.extend(numbers);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut place = self.ops.iter().chain(&self.values);
        match place.next() {
            Some(first) => write!(f, "{first}: {}", self.text),
            None => f.write_str(&self.text),
        }
    }
}
