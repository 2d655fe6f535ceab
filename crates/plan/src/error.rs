//! The errors in a plan's form.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::ids::Rank;
use crate::op::ChannelType;
use crate::place::Place;
use crate::plan::Origin;
use crate::text::escaped;

/// An error in a plan, or in its use.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum PlanError {
    /// A file cannot be read.
    #[error("{path}: {message}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The kind of the operating system's error.
        kind: io::ErrorKind,
        /// Its words.
        message: String,
    },
    /// The text is longer than any plan may be.
    #[error("the plan's text is longer than {limit} bytes, the most that is read")]
    TooLong {
        /// The most bytes that it may have.
        limit: u64,
    },
    /// The text is no plan.
    #[error("the plan's text: {message} (line {line}, column {column})")]
    Json {
        /// What is wrong.
        message: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// Something in the header, or of a rank as a whole, makes no sense.
    #[error("{what}")]
    Malformed {
        /// What, with the numbers.
        what: String,
    },
    /// An operation makes no sense.
    #[error("{place}: {what}")]
    Operation {
        /// Where.
        place: Place,
        /// What, with the numbers.
        what: String,
    },
    /// A rank waits more or less often for another than that one signals it.
    #[error(
        "rank {from} signals rank {to} {signals} times over {channel_type:?} channels, which waits for it {waits} times{}",
        at(lines, if signals > waits { "signals" } else { "waits" })
    )]
    Pairing {
        /// The signalling rank.
        from: Rank,
        /// The waiting rank.
        to: Rank,
        /// Memory or port channels.
        channel_type: ChannelType,
        /// How often it signals, by itself or behind a put.
        signals: u64,
        /// How often the other waits.
        waits: u64,
        /// The lines of the program that made the signals, or the waits if these are more; as far as they are known.
        lines: Vec<Origin>,
    },
    /// Thread blocks cannot be made many.
    #[error("rank {rank} cannot have {instances} instances: {what}")]
    Replication {
        /// The rank.
        rank: Rank,
        /// How many of each were asked for.
        instances: u32,
        /// Why, with the numbers.
        what: String,
    },
    /// Thread blocks cannot be made many under a policy that divides no chunks.
    #[error("rank {rank} has an operation that touches chunks, which the policy `none` cannot divide")]
    Undivided {
        /// The rank.
        rank: Rank,
    },
    /// The tensors do not fit the plan.
    #[error("plan {plan:?}: {what}")]
    Sizes {
        /// The plan's name.
        plan: String,
        /// What, with the numbers.
        what: String,
    },
}

impl PlanError {
    /// What serde_json says of a text. It quotes names from there, and it puts the place behind its message, which stands
    /// in fields of its own here.
    pub(crate) fn json(error: &serde_json::Error) -> Self {
        let text = escaped(&error.to_string());
        let message = text.split(" at line ").next().unwrap_or(&text).to_owned();
        PlanError::Json { message, line: error.line(), column: error.column() }
    }
}

/// Where operations come from.
fn at(lines: &[Origin], what: &str) -> String {
    const MOST: usize = 4;
    if lines.is_empty() {
        return String::new();
    }
    let shown: Vec<_> =
        lines.iter().take(MOST).map(|Origin { file, line }| format!("{file}:{line}")).collect();
    let others = lines.len().saturating_sub(MOST);
    let others = if others > 0 { format!(" and {others} more lines") } else { String::new() };
    format!("; the {what} are made at {}{others}", shown.join(", "))
}
