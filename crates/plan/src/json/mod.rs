//! The plan as text.
//!
//! [`Plan::to_json`] writes the keys in the order in which MSCCL++ 0.9.0 writes them, with an indent of two spaces, so
//! that equal plans are equal bytes. [`Plan::from_json`] takes any JSON with these keys; what it does not know, and what
//! cannot be, it refuses by name and place.

mod read;
mod read_op;
mod write;

use crate::error::PlanError;
use crate::plan::Plan;

impl Plan {
    /// Reads a plan. Keys of the header that the format gives defaults may be missing.
    ///
    /// The text may be anybody's: reading takes time and memory in proportion to its length. That every number in it
    /// names something that exists is checked too ([`Plan::check`](crate::Plan::check)).
    ///
    /// # Errors
    /// [`PlanError::Json`] with line and column, or what [`Plan::check`](crate::Plan::check) finds.
    pub fn from_json(text: &[u8]) -> Result<Plan, PlanError> {
        let plan = read::plan(text)?;
        plan.check()?;
        Ok(plan)
    }

    /// The plan as text, without a newline at its end. Plans that are equal give equal text.
    pub fn to_json(&self) -> String {
        write::plan(self)
    }
}
