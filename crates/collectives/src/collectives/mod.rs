//! The operations, as methods of the backends.

#[macro_use]
mod named;

mod host;
mod stream;

pub use host::Collectives;
pub(crate) use host::call_checked;
pub use stream::StreamCollectives;
