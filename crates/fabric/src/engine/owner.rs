//! Which process an engine belongs to.

use super::EngineError;

/// The process that made a value. A forked child inherits the value, but not what it stands for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner(u32);

impl Owner {
    /// This process.
    pub(super) fn this() -> Self {
        Self(std::process::id())
    }

    pub(super) fn is_this(self) -> bool {
        self.0 == std::process::id()
    }

    /// Fails in another process.
    pub(super) fn check(self) -> Result<(), EngineError> {
        if self.is_this() { Ok(()) } else { Err(EngineError::Forked { owner: self.0 }) }
    }
}
