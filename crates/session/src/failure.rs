//! How a program learns of kernels that give up while it makes no call.

use std::{fmt, str::FromStr, sync::Arc};

use antiphon_collectives::cuda::OnFailure;
use antiphon_fabric::FabricError;

/// What happens at once when a kernel has given up, on any GPU and in calls of any kind. [`OnFailure`] is the same for one kind of calls
/// on one GPU.
#[derive(Clone, Default)]
pub enum FailureAction {
    /// Nothing but a line on standard error.
    #[default]
    Error,
    /// The process is aborted.
    Abort,
    /// A thread of the library calls a function with the error, once for each kind of calls on each GPU.
    Call(Arc<dyn Fn(&FabricError) + Send + Sync>),
}

impl FailureAction {
    /// For one kind of calls on one GPU.
    pub(crate) fn on_failure(&self) -> OnFailure {
        match self {
            Self::Error => OnFailure::Error,
            Self::Abort => OnFailure::Abort,
            Self::Call(call) => {
                let call = call.clone();
                OnFailure::Callback(Box::new(move |error| call(error)))
            }
        }
    }
}

impl fmt::Debug for FailureAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "Error",
            Self::Abort => "Abort",
            Self::Call(_) => "Call(_)",
        })
    }
}

/// The words of [`OnFailure`]: `error` and `abort`.
impl FromStr for FailureAction {
    type Err = FabricError;

    fn from_str(word: &str) -> Result<Self, FabricError> {
        Ok(match word.parse()? {
            OnFailure::Abort => Self::Abort,
            _ => Self::Error,
        })
    }
}
