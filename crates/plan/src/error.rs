//! What can be wrong with a plan's form.

use thiserror::Error;

use crate::ids::Rank;
use crate::op::ChannelType;
use crate::place::Place;

/// What is wrong with a plan, or with what is done with it.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum PlanError {
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
        "rank {from} signals rank {to} {signals} times over {channel_type:?} channels, which waits for it {waits} times"
    )]
    Pairing {
        /// Who signals.
        from: Rank,
        /// Who waits.
        to: Rank,
        /// Memory or port channels.
        channel_type: ChannelType,
        /// How often it signals, by itself or behind a put.
        signals: u64,
        /// How often the other waits.
        waits: u64,
    },
    /// Thread blocks cannot be made many.
    #[error("rank {rank} cannot have {instances} instances: {what}")]
    Replication {
        /// Whose.
        rank: Rank,
        /// How many of each were asked for.
        instances: u32,
        /// Why, with the numbers.
        what: String,
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
