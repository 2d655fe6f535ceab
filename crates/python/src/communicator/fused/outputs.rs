//! The outputs of `all_reduce_rms_norm` that the caller did not give.

use antiphon::{
    prelude::DType,
    tensor::{ScaleLayout, dlpack::ElementType, quantize::NvFp4},
};
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBool, PyInt, PySlice, PyString},
};

use super::Arguments;
use crate::{
    arguments::{Argument, Given},
    error::Result,
    operand::{Operand, Usage},
};

/// A layout of scales as its name or its integer.
pub(super) fn scale_layout(layout: Given<'_, '_>) -> Result<ScaleLayout> {
    let Some(layout) = layout else { return Ok(ScaleLayout::default()) };
    if layout.is_instance_of::<PyInt>() && !layout.is_instance_of::<PyBool>() {
        return Ok(ScaleLayout::from_code(layout.extract()?)?);
    }
    match layout.cast::<PyString>().map_err(PyErr::from)?.to_cow()?.as_ref() {
        "128x4" => Ok(ScaleLayout::Swizzled128x4),
        "8x4" => Ok(ScaleLayout::Swizzled8x4),
        "linear" => Ok(ScaleLayout::Linear),
        other => {
            let text = format!("unknown layout of scales {other:?}: known are 128x4, 8x4, linear");
            Err(PyValueError::new_err(text).into())
        }
    }
}

/// Makes the outputs of a call.
pub(super) struct Outputs<'a, 'py> {
    pub(super) x: Argument<'a, 'py>,
    pub(super) like: Operand,
    pub(super) arguments: Arguments<'a, 'py>,
}

impl<'py> Outputs<'_, 'py> {
    /// The array that was given, or a new one if the output is wanted.
    pub(super) fn make(
        &self,
        given: Given<'_, 'py>,
        is_wanted: bool,
        new: impl FnOnce(&Self) -> Result<Bound<'py, PyAny>>,
    ) -> Result<Option<Bound<'py, PyAny>>> {
        match given {
            Some(given) => Ok(Some(given.clone())),
            None if is_wanted => {
                self.like.allocates_in_order(Usage::Call(self.arguments.stream))?;
                new(self).map(Some)
            }
            None => Ok(None),
        }
    }

    fn empty(&self, element: ElementType, shape: &[usize]) -> Result<Bound<'py, PyAny>> {
        Ok(self.like.new_of(self.x, element, shape, Usage::Call(self.arguments.stream))?.0)
    }

    pub(super) fn new_like(&self) -> Result<Bound<'py, PyAny>> {
        self.empty(self.like.element, self.like.shape())
    }

    /// Tokens and their elements.
    fn size(&self) -> (usize, usize) {
        let hidden = self.like.shape().last().copied().unwrap_or(1);
        (self.like.tensor.count.checked_div(hidden).unwrap_or(0), hidden)
    }

    /// The shape of `x` with another last dimension.
    fn with_columns(&self, columns: usize) -> Vec<usize> {
        let mut shape = self.like.shape().to_vec();
        shape.pop();
        shape.push(columns);
        shape
    }

    pub(super) fn new_codes(&self) -> Result<Bound<'py, PyAny>> {
        let (_, hidden) = self.size();
        match self.arguments.quantize {
            Some("nvfp4") => self.empty(DType::U8.into(), &self.with_columns(hidden / 2)),
            _ => self.empty(self.like.float8(self.x)?, self.like.shape()),
        }
    }

    pub(super) fn new_scales(&self) -> Result<Bound<'py, PyAny>> {
        let (tokens, hidden) = self.size();
        match self.arguments.quantize {
            Some("fp8-groups") => {
                let packs = (hidden / self.arguments.group_size.max(1)).div_ceil(4);
                self.empty(DType::I32.into(), &[packs, tokens.next_multiple_of(4)])
            }
            Some("nvfp4") => {
                let (columns, padded) = (hidden / NvFp4::BLOCK, (hidden / NvFp4::BLOCK).next_multiple_of(4));
                let shape = match scale_layout(self.arguments.scale_layout)? {
                    ScaleLayout::Swizzled128x4 => [tokens.next_multiple_of(128), padded],
                    ScaleLayout::Swizzled8x4 => [tokens.next_multiple_of(8), padded],
                    ScaleLayout::Linear => [tokens, columns],
                };
                self.empty(DType::U8.into(), &shape)
            }
            _ => self.empty(DType::F32.into(), &self.with_columns(1)),
        }
    }

    /// Whole columns of packed scales as `[tokens, packs]`.
    pub(super) fn packed(&self, columns: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let (py, tokens) = (columns.py(), self.size().0 as isize);
        let (all, first) = (PySlice::full(py), PySlice::new(py, 0, tokens, 1));
        Ok(columns.get_item((all, first))?.getattr("T")?)
    }
}
