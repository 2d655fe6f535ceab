//! The classes of `antiphon.language`: programs, and the chunks that their operations name.
//!
//! The modules of that package hold the names, defaults and the current program; here arguments become those of
//! `antiphon-language`.

mod channel;
mod chunk;
mod convert;
mod error;
mod library;
mod program;

pub(crate) use channel::{Channel, Switch};
pub(crate) use chunk::{BaseBuffer, Chunk, ThreadBlockGroup};
pub(crate) use library::{library_names, library_plan};
pub(crate) use program::{FinishedPlan, Program};
