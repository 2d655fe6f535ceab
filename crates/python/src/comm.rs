//! Functions for `antiphon.comm`.

use antiphon::tensor::{
    self, Device,
    dlpack::{self, ElementType},
};
use pyo3::{exceptions::PyNotImplementedError, prelude::*, types::PyCapsule};

use crate::{error::Result, mapping::unsigned};

#[doc = stub!("strided_memory")]
#[pyfunction]
#[pyo3(signature = (ptr, segment_size, segment_stride, num_segments, dtype, device = None))]
pub(crate) fn strided_memory<'py>(
    py: Python<'py>,
    ptr: usize,
    segment_size: i64,
    segment_stride: i64,
    num_segments: i64,
    dtype: &str,
    device: Option<u32>,
) -> Result<Bound<'py, PyCapsule>> {
    let element = ElementType::named(dtype)
        .ok_or_else(|| PyNotImplementedError::new_err(format!("there are no tensors of {dtype} here")))?;
    let device = device.map_or(Device::Host, Device::Cuda);
    let ptr = std::ptr::with_exposed_provenance_mut(ptr);
    // SAFETY: the caller answers for the memory, as the stub says: an address is all that Python has.
    let exported =
        unsafe { dlpack::strided_memory(ptr, segment_size, segment_stride, num_segments, element, device) }?;
    // Every version of PyTorch takes an unversioned capsule.
    crate::operand::capsule(py, exported, false)
}

#[doc = stub!("compute_fp4_swizzled_layout_sf_size")]
#[pyfunction]
pub(crate) fn compute_fp4_swizzled_layout_sf_size(total_row: i64, total_column: i64) -> Result<usize> {
    let (rows, columns) = (unsigned("total_row", total_row)?, unsigned("total_column", total_column)?);
    Ok(tensor::compute_fp4_swizzled_layout_sf_size(rows, columns)?)
}
