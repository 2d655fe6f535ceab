//! The arrays of a call as tensors that know their arguments' names.

use antiphon::{
    prelude::{DType, TensorView, TensorViewMut},
    tensor::TensorError,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    arguments::{Given, overlap},
    error::Result,
    operand::{Operand, Usage},
};

/// An array of a call, with the name of its argument.
pub(crate) struct Array {
    name: &'static str,
    operand: Operand,
    shape: Vec<usize>,
}

impl Array {
    pub(crate) fn read(array: &Bound<'_, PyAny>, name: &'static str) -> Result<Self> {
        Self::import(array, name, Usage::Call(None))
    }

    /// An array that this keeps alive.
    pub(crate) fn import(array: &Bound<'_, PyAny>, name: &'static str, usage: Usage) -> Result<Self> {
        let operand = Operand::import(array, name, usage)?;
        let mut shape = operand.shape().to_vec();
        // What is only moved as bytes.
        if let Some(last) = shape.last_mut() {
            *last *= operand.units();
        }
        Ok(Self { name, operand, shape })
    }

    pub(crate) fn write(array: &Bound<'_, PyAny>, name: &'static str) -> Result<Self> {
        Self::read(array, name)?.written(array)
    }

    pub(crate) fn written(self, array: &Bound<'_, PyAny>) -> Result<Self> {
        let Self { name, operand, shape } = self;
        Ok(Self { name, operand: operand.written(array, name)?, shape })
    }

    pub(crate) fn given(
        array: Given<'_, '_>,
        name: &'static str,
        import: fn(&Bound<'_, PyAny>, &'static str) -> Result<Self>,
    ) -> Result<Option<Self>> {
        array.map(|array| import(array, name)).transpose()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.operand.tensor.dtype
    }

    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of a row of `[T, H]`.
    pub(crate) fn columns(&self, call: &str) -> Result<usize> {
        Ok(self.matrix(call)?[1])
    }

    /// Rows of `[T, H]`.
    pub(crate) fn rows(&self, call: &str) -> Result<usize> {
        Ok(self.matrix(call)?[0])
    }

    fn matrix(&self, call: &str) -> Result<[usize; 2]> {
        match *self.shape {
            [rows, columns] => Ok([rows, columns]),
            _ => {
                let text = format!("{call}: the {} must be of shape [T, H], not {:?}", self.name, self.shape);
                Err(PyValueError::new_err(text).into())
            }
        }
    }

    /// # Safety
    /// The array is not written by others for `'a`.
    pub(crate) unsafe fn view<'a>(&self) -> Result<TensorView<'a>, TensorError> {
        // SAFETY: passed on; the operand keeps the memory.
        unsafe { self.operand.tensor.view_as(&self.shape) }
    }

    /// # Safety
    /// The array is not used by others for `'a`.
    pub(crate) unsafe fn view_mut<'a>(&self) -> Result<TensorViewMut<'a>, TensorError> {
        // SAFETY: passed on; the operand keeps the memory, and may be written.
        unsafe { self.operand.tensor.view_mut()?.reshape(&self.shape) }
    }

    /// The first `rows` rows to write.
    ///
    /// # Errors
    /// [`TensorError`] if there are fewer.
    ///
    /// # Safety
    /// As [`view_mut`](Self::view_mut).
    pub(crate) unsafe fn first_rows<'a>(&self, rows: usize) -> Result<TensorViewMut<'a>, TensorError> {
        // SAFETY: passed on.
        unsafe { self.view_mut() }?.narrow(0, 0, rows)
    }

    /// Writes these bytes into an array on the host, which must have as many.
    ///
    /// # Safety
    /// The array is not used by others meanwhile.
    pub(crate) unsafe fn fill(&self, call: &str, content: &[u8]) -> Result<()> {
        let tensor = &self.operand.tensor;
        if tensor.bytes() != content.len() || !tensor.device.is_host() {
            let (name, bytes, expected) = (self.name, tensor.bytes(), content.len());
            let text = format!(
                "{call}: {name} has {bytes} bytes on {}, expected {expected} on the host",
                tensor.device
            );
            return Err(PyValueError::new_err(text).into());
        }
        // SAFETY: passed on.
        unsafe { self.view_mut() }?.as_mut_bytes()?.copy_from_slice(content);
        Ok(())
    }
}

/// Refuses outputs that share memory with anything else of a call.
pub(crate) fn check_apart(call: &str, inputs: &[Option<&Array>], outputs: &[Option<&Array>]) -> Result<()> {
    for (index, output) in outputs.iter().enumerate() {
        let Some(output) = output else { continue };
        for other in inputs.iter().chain(&outputs[index + 1..]).flatten() {
            if overlap(&output.operand.tensor, &other.operand.tensor) {
                let text = format!("{call}: {} and {} overlap: they must be apart", output.name, other.name);
                return Err(PyValueError::new_err(text).into());
            }
        }
    }
    Ok(())
}
