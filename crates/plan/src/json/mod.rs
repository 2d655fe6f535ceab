//! The plan as text.
//!
//! [`Plan::to_json`] writes the keys in the order in which MSCCL++ 0.9.0 writes them, with an indent of two spaces, so
//! that equal plans are equal bytes. [`Plan::from_json`] takes any JSON with these keys. Unknown keys and impossible values
//! are errors with their name and place.

mod read;
mod read_op;
mod write;

use std::path::Path;

use crate::error::PlanError;
use crate::plan::Plan;
use crate::text::{MAX_TEXT_BYTES, read_text};

impl Plan {
    /// Reads a plan's file, or what else has a path and an end.
    ///
    /// # Errors
    /// [`PlanError::File`] if it cannot be read, [`PlanError::TooLong`] if more than [`MAX_TEXT_BYTES`] can be read from
    /// it, and those of [`Plan::from_json`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Plan, PlanError> {
        Plan::from_json(&read_text(path)?)
    }

    /// Reads a plan. Keys of the header that the format gives defaults may be missing.
    ///
    /// The text may come from any source: reading takes time and memory in proportion to its length. That every number in it
    /// names something that exists is checked too ([`Plan::check`](crate::Plan::check)).
    ///
    /// # Errors
    /// [`PlanError::TooLong`] if it has more than [`MAX_TEXT_BYTES`], [`PlanError::Json`] with line and column, or what
    /// [`Plan::check`](crate::Plan::check) finds.
    pub fn from_json(text: &[u8]) -> Result<Plan, PlanError> {
        if text.len() as u64 > MAX_TEXT_BYTES {
            return Err(PlanError::TooLong { limit: MAX_TEXT_BYTES });
        }
        let plan = read::plan(text)?;
        plan.check()?;
        Ok(plan)
    }

    /// The plan as text, without a newline at its end. Plans that are equal give equal text.
    pub fn to_json(&self) -> String {
        write::plan(self)
    }
}
