//! Mixtures of experts: the calls of the hybrid form.

use std::sync::{MutexGuard, PoisonError};

use antiphon::device::sync::Mutex;
use antiphon::moe::{
    HybridCapacity, HybridCombine, HybridDispatch, HybridHandle, HybridOrder, HybridRouting, HybridTokens,
    RowFormat,
    cuda::HandleMemory,
    hybrid::cuda::{CudaHybridHandle, HybridWords},
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::{
    arguments::Given,
    array::{Array, check_apart},
    error::Result,
    moe::{Moe, elsewhere, words},
};

#[doc = stub!("MoeHybrid")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeHybrid(Py<Moe>);

#[doc = stub!("MoeHybridHandle")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeHybridHandle(Routes);

/// The routes of rows, on the host or between GPUs.
enum Routes {
    Host(HybridHandle),
    Cuda(Mutex<CudaHybridHandle>),
}

impl Routes {
    fn host(&self, call: &str) -> Result<&HybridHandle> {
        match self {
            Self::Host(handle) => Ok(handle),
            Self::Cuda(_) => Err(elsewhere(call, "a GPU", "the host")),
        }
    }

    fn cuda(&self, call: &str) -> Result<MutexGuard<'_, CudaHybridHandle>> {
        match self {
            Self::Cuda(handle) => Ok(handle.lock().unwrap_or_else(PoisonError::into_inner)),
            Self::Host(_) => Err(elsewhere(call, "the host", "a GPU")),
        }
    }

    /// What both have.
    fn either<T>(
        &self,
        host: impl FnOnce(&HybridHandle) -> T,
        cuda: impl FnOnce(&CudaHybridHandle) -> T,
    ) -> T {
        match self {
            Self::Host(handle) => host(handle),
            Self::Cuda(handle) => cuda(&handle.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

#[pymethods]
impl MoeHybrid {
    #[new]
    fn new(moe: Py<Moe>) -> Self {
        Self(moe)
    }

    #[doc = stub!("MoeHybrid.handle_words")]
    #[staticmethod]
    #[pyo3(signature = (world_size, num_experts, num_tokens))]
    fn handle_words(
        world_size: usize,
        num_experts: usize,
        num_tokens: usize,
    ) -> Vec<(&'static str, usize, usize)> {
        let words = HybridWords::new(world_size, num_experts, num_tokens);
        let named = [
            ("rank_prefix_matrix", words.normal().rank_prefix_matrix()),
            ("send_head", words.normal().send_head()),
            ("overflow", words.overflow()),
            ("num_received", words.num_received()),
            ("rows_needed", words.rows_needed()),
            ("tokens_per_expert", words.tokens_per_expert()),
            ("rows_per_expert", words.rows_per_expert()),
            ("all", 0..words.total()),
        ];
        named.map(|(name, range)| (name, range.start, range.end)).to_vec()
    }

    #[doc = stub!("MoeHybrid.notify")]
    #[pyo3(signature = (x, routing_map, *, pad_multiple = None, scales = None, capacity = None, max_tokens = None, words = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last five")]
    fn notify(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        routing_map: &Bound<'_, PyAny>,
        pad_multiple: Option<usize>,
        scales: Given<'_, '_>,
        capacity: Option<usize>,
        max_tokens: Option<usize>,
        words: Given<'_, '_>,
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
        let moe = self.0.get();
        let Some(device) = routing.map.device().cuda_ordinal() else {
            let handle = moe.run(py, |moe, comm| moe.hybrid_notify(comm, &routing))?;
            return Ok(MoeHybridHandle(Routes::Host(handle)));
        };
        let words = Array::given(words, "words", Array::write)?;
        let memory = match &words {
            None => HandleMemory::Own,
            // SAFETY: the caller keeps this array as long as the handle.
            Some(words) => HandleMemory::Callers { words: unsafe { words.view_mut() }?, sources: None },
        };
        // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
        let handle = moe.run_cuda(py, device, None, |moe, stream| unsafe {
            moe.hybrid_notify(stream, &routing, memory)
        })?;
        Ok(MoeHybridHandle(Routes::Cuda(Mutex::new(handle))))
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
        if let Some(device) = call.tokens.x.device().cuda_ordinal() {
            let handle = handle.0.cuda("hybrid_dispatch")?;
            let moe = self.0.get();
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return moe.run_cuda(py, device, None, |moe, stream| unsafe {
                moe.hybrid_dispatch(stream, &handle, call)
            });
        }
        let handle = handle.0.host("hybrid_dispatch")?;
        self.0.get().run(py, |moe, comm| moe.hybrid_dispatch(comm, handle, call))
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
        if let Some(device) = call.rows.device().cuda_ordinal() {
            let handle = handle.0.cuda("hybrid_combine")?;
            let moe = self.0.get();
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return moe.run_cuda(py, device, None, |moe, stream| unsafe {
                moe.hybrid_combine(stream, &handle, call)
            });
        }
        let handle = handle.0.host("hybrid_combine")?;
        self.0.get().run(py, |moe, comm| moe.hybrid_combine(comm, handle, call))
    }
}

#[pymethods]
impl MoeHybridHandle {
    #[doc = stub!("MoeHybridHandle.rows")]
    #[getter]
    fn rows(&self) -> usize {
        self.0.either(HybridHandle::rows, CudaHybridHandle::rows)
    }

    #[doc = stub!("MoeHybridHandle.num_received")]
    #[getter]
    fn num_received(&self) -> Option<usize> {
        self.0.either(|handle| Some(handle.num_received()), CudaHybridHandle::num_received)
    }

    #[doc = stub!("MoeHybridHandle.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.either(HybridHandle::num_tokens, CudaHybridHandle::num_tokens)
    }

    #[getter]
    fn num_experts(&self) -> usize {
        self.0.either(HybridHandle::num_experts, CudaHybridHandle::num_experts)
    }

    #[doc = stub!("MoeHybridHandle.overflow")]
    #[getter]
    fn overflow(&self) -> Result<bool> {
        Ok(self.0.host("overflow")?.overflow())
    }

    #[doc = stub!("MoeHybridHandle.rows_needed")]
    #[getter]
    fn rows_needed(&self) -> Result<usize> {
        Ok(self.0.host("rows_needed")?.rows_needed())
    }

    #[doc = stub!("MoeHybridHandle.tokens_per_expert")]
    #[getter]
    fn tokens_per_expert(&self) -> Option<Vec<usize>> {
        self.0.either(
            |handle| Some(handle.tokens_per_expert().to_vec()),
            |handle| handle.tokens_per_expert().map(<[_]>::to_vec),
        )
    }

    #[doc = stub!("MoeHybridHandle.rows_per_expert")]
    #[getter]
    fn rows_per_expert(&self) -> Option<Vec<usize>> {
        self.0.either(
            |handle| Some(handle.rows_per_expert().to_vec()),
            |handle| handle.rows_per_expert().map(<[_]>::to_vec),
        )
    }

    #[doc = stub!("MoeHybridHandle.received_as")]
    #[getter]
    fn received_as<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(words(py, &self.0.host("received_as")?.received_as()))
    }

    #[doc = stub!("MoeHybridHandle.places")]
    #[getter]
    fn places<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyBytes>>> {
        Ok(self.0.host("places")?.places().map(|places| words(py, places)))
    }

    #[doc = stub!("MoeHybridHandle.num_places")]
    #[getter]
    fn num_places(&self) -> usize {
        self.0.either(HybridHandle::num_received, CudaHybridHandle::places)
    }

    #[doc = stub!("MoeHybridHandle.keep_places_in")]
    fn keep_places_in(&self, places: &Bound<'_, PyAny>) -> Result<()> {
        let places = Array::write(places, "places")?;
        // SAFETY: the caller keeps the array as long as the handle.
        let view = unsafe { places.view_mut() }?;
        let device = view.as_view().device();
        // SAFETY: as above.
        Ok(unsafe { self.0.cuda("keep_places_in")?.keep_places_in(view, device) }?)
    }
}
