//! One collective with its tensors, as a value.

pub(crate) mod mixed;

use antiphon::{
    operation::{self, Extent, Root},
    prelude::{CollectiveError, Collectives, Communicator, FabricError},
    tensor::TensorError,
};
use pyo3::prelude::*;

use crate::operand::Tensor;
use mixed::Mixed;

/// An operation with its arguments except the tensors.
pub(crate) type What = operation::Call<'static>;

#[doc = stub!("operations")]
#[pyfunction]
pub(crate) fn operations() -> Vec<(&'static str, String, String, bool, Option<&'static str>)> {
    let name = |extent: Extent| format!("{extent:?}").to_lowercase();
    let calls = operation::Operation::ALL.iter().filter(|operation| operation.is_call());
    calls
        .map(|operation| {
            let row = operation.row();
            let root = row.root.map(|root| if root == Root::Gives { "gives" } else { "gets" });
            (row.name, name(row.input), name(row.output), row.reduces, root)
        })
        .collect()
}

/// The tensors of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallTensors {
    /// No tensor: nothing is read or written.
    Nowhere,
    /// One buffer for input and output.
    Shared(Tensor),
    /// An input and an output that do not overlap; on some ranks one is missing.
    Apart(Option<Tensor>, Option<Tensor>),
}

impl CallTensors {
    /// The same with other tensors.
    pub(crate) fn map(self, other: impl Fn(Tensor) -> Tensor) -> Self {
        match self {
            Self::Nowhere => Self::Nowhere,
            Self::Shared(tensor) => Self::Shared(other(tensor)),
            Self::Apart(input, output) => Self::Apart(input.map(&other), output.map(&other)),
        }
    }
}

/// A collective with its operands.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) what: What,
    /// The mixed collective that takes the place of the operation, on the same tensors.
    pub(crate) mixed: Option<Mixed>,
    pub(crate) tensors: CallTensors,
}

impl Call {
    /// The name of the method.
    pub(crate) fn name(&self) -> &'static str {
        self.operation().name()
    }

    /// The operation that is carried out.
    pub(crate) fn operation(&self) -> operation::Operation {
        self.mixed.as_ref().map_or(self.what.operation, Mixed::operation)
    }

    /// One tensor of the call; all have its dtype and its device.
    fn tensor(&self) -> Option<&Tensor> {
        match &self.tensors {
            CallTensors::Nowhere => None,
            CallTensors::Shared(tensor) => Some(tensor),
            CallTensors::Apart(input, output) => input.as_ref().or(output.as_ref()),
        }
    }

    /// The GPU that its tensors are on.
    pub(crate) fn cuda_device(&self) -> Option<u32> {
        self.tensor().and_then(|tensor| tensor.device.cuda_ordinal())
    }

    /// Takes part in the collective.
    ///
    /// # Safety
    /// The operands are valid until this returns; no other code writes the input, or uses the output, meanwhile.
    pub(crate) unsafe fn run(&self, comm: &Communicator) -> Result<(), CollectiveError> {
        // SAFETY: the caller answers for the memory.
        unsafe {
            if let Some(mixed) = &self.mixed {
                return match self.tensors {
                    CallTensors::Shared(buffer) => {
                        mixed.run_in_place(comm, buffer.view_mut().map_err(refused)?)
                    }
                    CallTensors::Apart(Some(input), Some(output)) => {
                        mixed.run(comm, input.view().map_err(refused)?, output.view_mut().map_err(refused)?)
                    }
                    _ => Err(FabricError::invalid(format!("{} lacks an operand", self.name())).into()),
                };
            }
            match self.tensors {
                CallTensors::Nowhere => comm.call(&self.what, None, None),
                CallTensors::Shared(buffer) => {
                    comm.call_in_place(&self.what, buffer.view_mut().map_err(refused)?)
                }
                CallTensors::Apart(input, output) => {
                    let input = input.map(|tensor| tensor.view()).transpose().map_err(refused)?;
                    let output = output.map(|tensor| tensor.view_mut()).transpose().map_err(refused)?;
                    comm.call(&self.what, input, output)
                }
            }
        }
    }
}

pub(crate) fn refused(error: TensorError) -> CollectiveError {
    FabricError::invalid(error.to_string()).into()
}
