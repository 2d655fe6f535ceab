//! The proof that a rewritten program computes what the program before does.
//!
//! It knows the two graphs and the decisions, and nothing of how they came to be: no rule is imported here.

pub(crate) mod check;
mod lifetime;
pub mod race;
mod roundings;
mod terms;
