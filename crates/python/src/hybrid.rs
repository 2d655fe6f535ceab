//! Mixtures of experts: the calls of the hybrid form.

use antiphon::moe::{
    HybridCapacity, HybridCombine, HybridDispatch, HybridHandle, HybridOrder, HybridRouting, HybridTokens,
    RowFormat,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::{
    arguments::Given,
    error::Result,
    moe::{Array, Moe, check_apart, words},
};

#[doc = stub!("MoeHybrid")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeHybrid(Py<Moe>);

#[doc = stub!("MoeHybridHandle")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeHybridHandle(HybridHandle);

#[pymethods]
impl MoeHybrid {
    #[new]
    fn new(moe: Py<Moe>) -> Self {
        Self(moe)
    }

    #[doc = stub!("MoeHybrid.notify")]
    #[pyo3(signature = (x, routing_map, *, pad_multiple = None, scales = None, capacity = None, max_tokens = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last four")]
    fn notify(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        routing_map: &Bound<'_, PyAny>,
        pad_multiple: Option<usize>,
        scales: Given<'_, '_>,
        capacity: Option<usize>,
        max_tokens: Option<usize>,
    ) -> Result<MoeHybridHandle> {
        let (x, scales) = (Array::read(x, "x")?, Array::given(scales, "scales", Array::read)?);
        let map = Array::read(routing_map, "routing_map")?;
        let order = match (pad_multiple, capacity) {
            (None, None) => HybridOrder::Tokens,
            (None, Some(_)) => {
                let text = "hybrid_dispatch: a capacity is of rows by expert: pass pad_multiple";
                return Err(PyValueError::new_err(text).into());
            }
            (Some(pad_multiple), capacity) => HybridOrder::Experts {
                pad_multiple,
                capacity: capacity
                    .map(|rows| HybridCapacity { rows, max_tokens: max_tokens.unwrap_or_default() }),
            },
        };
        // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
        let map = unsafe { map.view() }?;
        let scales = scales.map(|scales| scales.dtype());
        let format = RowFormat { hidden: x.columns("hybrid_dispatch")?, dtype: x.dtype(), scales };
        let routing = HybridRouting { map, order, format };
        Ok(MoeHybridHandle(self.0.get().run(py, |moe, comm| moe.hybrid_notify(comm, &routing))?))
    }

    #[doc = stub!("MoeHybrid.dispatch")]
    #[pyo3(signature = (handle, x, received_x, *, scales = None, received_scales = None, probs = None, received_probs = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last four")]
    fn dispatch(
        &self,
        py: Python<'_>,
        handle: &MoeHybridHandle,
        x: &Bound<'_, PyAny>,
        received_x: &Bound<'_, PyAny>,
        scales: Given<'_, '_>,
        received_scales: Given<'_, '_>,
        probs: Given<'_, '_>,
        received_probs: Given<'_, '_>,
    ) -> Result<()> {
        let (x, received_x) = (Array::read(x, "x")?, Array::write(received_x, "received_x")?);
        let scales = Array::given(scales, "scales", Array::read)?;
        let received_scales = Array::given(received_scales, "received_scales", Array::write)?;
        let probs = Array::given(probs, "probs", Array::read)?;
        let received_probs = Array::given(received_probs, "received_probs", Array::write)?;
        check_apart(
            "hybrid_dispatch",
            &[Some(&x), scales.as_ref(), probs.as_ref()],
            &[Some(&received_x), received_scales.as_ref(), received_probs.as_ref()],
        )?;
        // SAFETY: the arrays live until this returns, the written ones are apart from all others; that nobody else uses them
        // meanwhile is the caller's to see to.
        let read = |array: &Option<Array>| array.as_ref().map(|array| unsafe { array.view() }).transpose();
        // SAFETY: as above.
        let write =
            |array: &Option<Array>| array.as_ref().map(|array| unsafe { array.view_mut() }).transpose();
        let call = HybridDispatch {
            tokens: HybridTokens {
                // SAFETY: as above.
                x: unsafe { x.view() }?,
                scales: read(&scales)?,
                probs: read(&probs)?,
            },
            received: HybridTokens {
                // SAFETY: as above.
                x: unsafe { received_x.view_mut() }?,
                scales: write(&received_scales)?,
                probs: write(&received_probs)?,
            },
        };
        self.0.get().run(py, |moe, comm| moe.hybrid_dispatch(comm, &handle.0, call))
    }

    #[doc = stub!("MoeHybrid.combine")]
    #[pyo3(signature = (handle, rows, output, *, probs = None, output_probs = None))]
    fn combine(
        &self,
        py: Python<'_>,
        handle: &MoeHybridHandle,
        rows: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        probs: Given<'_, '_>,
        output_probs: Given<'_, '_>,
    ) -> Result<()> {
        let (rows, output) = (Array::read(rows, "rows")?, Array::write(output, "output")?);
        let probs = Array::given(probs, "probs", Array::read)?;
        let output_probs = Array::given(output_probs, "output_probs", Array::write)?;
        check_apart(
            "hybrid_combine",
            &[Some(&rows), probs.as_ref()],
            &[Some(&output), output_probs.as_ref()],
        )?;
        let call = HybridCombine {
            // SAFETY: the arrays live until this returns, the written ones are apart from all others; that nobody else uses them
            // meanwhile is the caller's to see to.
            rows: unsafe { rows.view() }?,
            // SAFETY: as above.
            probs: probs.as_ref().map(|array| unsafe { array.view() }).transpose()?,
            // SAFETY: as above.
            output: unsafe { output.view_mut() }?,
            // SAFETY: as above.
            output_probs: output_probs.as_ref().map(|array| unsafe { array.view_mut() }).transpose()?,
        };
        self.0.get().run(py, |moe, comm| moe.hybrid_combine(comm, &handle.0, call))
    }
}

#[pymethods]
impl MoeHybridHandle {
    #[doc = stub!("MoeHybridHandle.rows")]
    #[getter]
    fn rows(&self) -> usize {
        self.0.rows()
    }

    #[doc = stub!("MoeHybridHandle.num_received")]
    #[getter]
    fn num_received(&self) -> usize {
        self.0.num_received()
    }

    #[doc = stub!("MoeHybridHandle.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.num_tokens()
    }

    #[getter]
    fn num_experts(&self) -> usize {
        self.0.num_experts()
    }

    #[doc = stub!("MoeHybridHandle.overflow")]
    #[getter]
    fn overflow(&self) -> bool {
        self.0.overflow()
    }

    #[doc = stub!("MoeHybridHandle.tokens_per_expert")]
    #[getter]
    fn tokens_per_expert(&self) -> Vec<usize> {
        self.0.tokens_per_expert().to_vec()
    }

    #[doc = stub!("MoeHybridHandle.rows_per_expert")]
    #[getter]
    fn rows_per_expert(&self) -> Vec<usize> {
        self.0.rows_per_expert().to_vec()
    }

    #[doc = stub!("MoeHybridHandle.received_as")]
    #[getter]
    fn received_as<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        words(py, &self.0.received_as())
    }

    #[doc = stub!("MoeHybridHandle.places")]
    #[getter]
    fn places<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.0.places().map(|places| words(py, places))
    }
}
