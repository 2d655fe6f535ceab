//! What can be wrong with a plan's form.

use thiserror::Error;

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
    /// The tensors do not fit the plan.
    #[error("plan {plan:?}: {what}")]
    Sizes {
        /// The plan's name.
        plan: String,
        /// What, with the numbers.
        what: String,
    },
}
