//! The Python exception for each error. The text is the error's own.

use antiphon::{
    fabric::rendezvous::RendezvousError,
    moe::MoeError,
    prelude::{CollectiveError, FabricError},
    session::SessionError,
    tensor::TensorError,
    topology::TopologyError,
};
use antiphon_executor::ExecutorError;
use pyo3::{
    create_exception,
    exceptions::{
        PyAssertionError, PyKeyboardInterrupt, PyNotImplementedError, PyRuntimeError, PyTimeoutError,
        PyTypeError, PyValueError,
    },
    prelude::*,
};

use crate::interrupt;

create_exception!(antiphon, PeerLostError, PyRuntimeError, stub!("PeerLostError"));

create_exception!(antiphon, AbortedError, PyRuntimeError, stub!("AbortedError"));

/// An error on its way to Python.
pub(crate) struct Error(PyErr);

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        error.0
    }
}

impl From<PyErr> for Error {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        match error {
            CollectiveError::Fabric(error) => error.into(),
            CollectiveError::DTypes { .. }
            | CollectiveError::NotNumeric { .. }
            | CollectiveError::NotBits { .. } => Self(PyTypeError::new_err(error.to_string())),
            CollectiveError::Tuning(_) => Self(PyRuntimeError::new_err(error.to_string())),
            _ => Self(PyValueError::new_err(error.to_string())),
        }
    }
}

impl From<MoeError> for Error {
    fn from(error: MoeError) -> Self {
        let text = error.to_string();
        Self(match error {
            MoeError::Fabric(error) => return error.into(),
            MoeError::DType { .. } => PyTypeError::new_err(text),
            MoeError::Instances { .. } | MoeError::Captured { .. } => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        })
    }
}

impl From<ExecutorError> for Error {
    fn from(error: ExecutorError) -> Self {
        let text = error.to_string();
        Self(match error {
            ExecutorError::Fabric(error) => return error.into(),
            ExecutorError::Tuning(error) => return CollectiveError::clone(&error).into(),
            ExecutorError::Stuck { reason, .. } => kind(&reason)(text),
            ExecutorError::DTypes { .. } => PyTypeError::new_err(text),
            ExecutorError::PlansDiffer { .. }
            | ExecutorError::Unprepared { .. }
            | ExecutorError::Occupancy { .. } => PyRuntimeError::new_err(text),
            _ => PyValueError::new_err(text),
        })
    }
}

impl From<SessionError> for Error {
    fn from(error: SessionError) -> Self {
        match error {
            SessionError::Fabric(error) => error.into(),
            SessionError::Collective(error) => (*error).into(),
            SessionError::Moe(error) => (*error).into(),
            SessionError::Plan(error) => (*error).into(),
            SessionError::Captured { calls } => Self(PyValueError::new_err(format!(
                "the first {calls} of a communicator on a GPU sets up memory and kernels, and this stream is being captured: make one \
                 before the capture, or call comm.prepare_cuda() for collectives, with the dtypes and operators that the capture will use"
            ))),
            SessionError::SlotsClosed => {
                Self(PyRuntimeError::new_err("this MoeSlots or its communicator is closed"))
            }
            error => Self(PyValueError::new_err(error.to_string())),
        }
    }
}

impl From<FabricError> for Error {
    fn from(error: FabricError) -> Self {
        let text = error.to_string();
        Self(kind(&error)(text))
    }
}

impl From<TensorError> for Error {
    fn from(error: TensorError) -> Self {
        Self(PyValueError::new_err(error.to_string()))
    }
}

impl From<TopologyError> for Error {
    fn from(error: TopologyError) -> Self {
        let text = error.to_string();
        // As FlashInfer's `Mapping` raises them.
        Self(match error {
            TopologyError::ExpertsWithContext { .. } => PyNotImplementedError::new_err(text),
            TopologyError::ExpertsWithClusters { .. } => PyAssertionError::new_err(text),
            _ => PyValueError::new_err(text),
        })
    }
}

fn kind(error: &FabricError) -> Box<dyn FnOnce(String) -> PyErr> {
    match error {
        FabricError::Interrupted { .. } | FabricError::Rendezvous(RendezvousError::Interrupted) => {
            Box::new(|text| interrupt::take().unwrap_or_else(|| PyKeyboardInterrupt::new_err(text)))
        }
        FabricError::PeerLost { rank, .. } => {
            about(PeerLostError::new_err, *rank, error.lost_world_rank().unwrap_or(*rank))
        }
        FabricError::Rendezvous(RendezvousError::RootLost { .. }) => about(PeerLostError::new_err, 0, 0),
        FabricError::AbortCalled { by, members, .. } => {
            about(AbortedError::new_err, *by, members.world_rank(*by))
        }
        FabricError::Timeout { .. }
        | FabricError::ShrinkTimeout { .. }
        | FabricError::Rendezvous(RendezvousError::Missing { .. }) => Box::new(PyTimeoutError::new_err),
        FabricError::InvalidArgument(_) | FabricError::Rendezvous(RendezvousError::InvalidRank { .. }) => {
            Box::new(PyValueError::new_err)
        }
        FabricError::NotImplemented(_) => Box::new(PyNotImplementedError::new_err),
        // A communicator that failed says why again, in the same words and with the same type.
        FabricError::Failed(first) if !matches!(**first, FabricError::Interrupted { .. }) => kind(first),
        _ => Box::new(PyRuntimeError::new_err),
    }
}

/// An exception that says which rank it is about.
fn about(exception: fn(String) -> PyErr, rank: usize, world_rank: usize) -> Box<dyn FnOnce(String) -> PyErr> {
    Box::new(move |text| {
        let error = exception(text);
        // Setting attributes of a fresh exception does not fail; without them the text still has the ranks.
        Python::attach(|py| {
            drop(error.value(py).setattr("rank", rank));
            drop(error.value(py).setattr("world_rank", world_rank));
        });
        error
    })
}
