//! Mixtures of experts: the calls by expert.

use antiphon::device::sync::Mutex;
use antiphon::moe::{
    ByExpertCapacity, ByExpertCombine, ByExpertDispatch, ByExpertOrder, ByExpertRoutes, ByExpertRouting,
    ByExpertTokens, RowFormat,
    by_expert::cuda::{ByExpertWords, CudaByExpertRoutes},
    cuda::RouteMemory,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use super::{Moe, NamedWords, named_words, routes::Routes, words};
use crate::{
    arguments::Given,
    array::{Array, check_apart},
    error::Result,
};

#[doc = stub!("MoeByExpert")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeByExpert(Py<Moe>);

#[doc = stub!("MoeByExpertRoutes")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeByExpertRoutes(Routes<ByExpertRoutes, CudaByExpertRoutes>);

#[pymethods]
impl MoeByExpert {
    #[new]
    fn new(moe: Py<Moe>) -> Self {
        Self(moe)
    }

    #[doc = stub!("MoeByExpert.route_words")]
    #[staticmethod]
    #[pyo3(signature = (world_size, num_experts, num_tokens))]
    fn route_words(world_size: usize, num_experts: usize, num_tokens: usize) -> NamedWords {
        let words = ByExpertWords::new(world_size, num_experts, num_tokens);
        // Where two parts have one name, the later one is meant.
        named_words(words.by_token().named().into_iter().chain(words.named()).collect(), words.total())
    }

    #[doc = stub!("MoeByExpert.notify")]
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
    ) -> Result<MoeByExpertRoutes> {
        let (x, scales) = (Array::read(x, "x")?, Array::given(scales, "scales", Array::read)?);
        let map = Array::read(routing_map, "routing_map")?;
        let order = match (pad_multiple, capacity) {
            (None, None) => ByExpertOrder::Tokens,
            (None, Some(_)) => {
                let text = "dispatch_by_expert: a capacity is of rows by expert: pass pad_multiple";
                return Err(PyValueError::new_err(text).into());
            }
            (Some(pad_multiple), capacity) => ByExpertOrder::Experts {
                pad_multiple,
                capacity: capacity
                    .map(|rows| ByExpertCapacity { rows, max_tokens: max_tokens.unwrap_or_default() }),
            },
        };
        // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
        let map = unsafe { map.view() }?;
        let scales = scales.map(|scales| scales.dtype());
        let format = RowFormat { hidden: x.columns("dispatch_by_expert")?, dtype: x.dtype(), scales };
        let routing = ByExpertRouting { map, order, format };
        let moe = self.0.get();
        let Some(device) = routing.map.device().cuda_ordinal() else {
            let routes = moe.run(py, |moe, comm| moe.notify_by_expert(comm, &routing))?;
            return Ok(MoeByExpertRoutes(Routes::Host(routes)));
        };
        let words = Array::given(words, "words", Array::write)?;
        let memory = match &words {
            None => RouteMemory::Own,
            // SAFETY: the caller keeps this array as long as the routes.
            Some(words) => RouteMemory::Callers { words: unsafe { words.view_mut() }?, sources: None },
        };
        // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
        let routes = moe.run_cuda(py, device, None, |moe, stream| unsafe {
            moe.notify_by_expert(stream, &routing, memory)
        })?;
        Ok(MoeByExpertRoutes(Routes::Cuda(Mutex::new(routes))))
    }

    #[doc = stub!("MoeByExpert.dispatch")]
    #[pyo3(signature = (routes, x, received_x, *, scales = None, received_scales = None, probs = None, received_probs = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last four")]
    fn dispatch(
        &self,
        py: Python<'_>,
        routes: &MoeByExpertRoutes,
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
            "dispatch_by_expert",
            &[Some(&x), scales.as_ref(), probs.as_ref()],
            &[Some(&received_x), received_scales.as_ref(), received_probs.as_ref()],
        )?;
        // SAFETY: the arrays live until this returns, the written ones are apart from all others; that nobody else uses them
        // meanwhile is the caller's to see to.
        let read = |array: &Option<Array>| array.as_ref().map(|array| unsafe { array.view() }).transpose();
        // SAFETY: as above.
        let write =
            |array: &Option<Array>| array.as_ref().map(|array| unsafe { array.view_mut() }).transpose();
        let call = ByExpertDispatch {
            tokens: ByExpertTokens {
                // SAFETY: as above.
                x: unsafe { x.view() }?,
                scales: read(&scales)?,
                probs: read(&probs)?,
            },
            received: ByExpertTokens {
                // SAFETY: as above.
                x: unsafe { received_x.view_mut() }?,
                scales: write(&received_scales)?,
                probs: write(&received_probs)?,
            },
        };
        if let Some(device) = call.tokens.x.device().cuda_ordinal() {
            let routes = routes.0.cuda("dispatch_by_expert")?;
            let moe = self.0.get();
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return moe.run_cuda(py, device, None, |moe, stream| unsafe {
                moe.dispatch_by_expert(stream, &routes, call)
            });
        }
        let routes = routes.0.host("dispatch_by_expert")?;
        self.0.get().run(py, |moe, comm| moe.dispatch_by_expert(comm, routes, call))
    }

    #[doc = stub!("MoeByExpert.combine")]
    #[pyo3(signature = (routes, rows, output, *, probs = None, output_probs = None))]
    fn combine(
        &self,
        py: Python<'_>,
        routes: &MoeByExpertRoutes,
        rows: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        probs: Given<'_, '_>,
        output_probs: Given<'_, '_>,
    ) -> Result<()> {
        let (rows, output) = (Array::read(rows, "rows")?, Array::write(output, "output")?);
        let probs = Array::given(probs, "probs", Array::read)?;
        let output_probs = Array::given(output_probs, "output_probs", Array::write)?;
        check_apart(
            "combine_by_expert",
            &[Some(&rows), probs.as_ref()],
            &[Some(&output), output_probs.as_ref()],
        )?;
        let call = ByExpertCombine {
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
            let routes = routes.0.cuda("combine_by_expert")?;
            let moe = self.0.get();
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return moe.run_cuda(py, device, None, |moe, stream| unsafe {
                moe.combine_by_expert(stream, &routes, call)
            });
        }
        let routes = routes.0.host("combine_by_expert")?;
        self.0.get().run(py, |moe, comm| moe.combine_by_expert(comm, routes, call))
    }
}

#[pymethods]
impl MoeByExpertRoutes {
    #[doc = stub!("MoeByExpertRoutes.rows")]
    #[getter]
    fn rows(&self) -> usize {
        self.0.either(ByExpertRoutes::rows, CudaByExpertRoutes::rows)
    }

    #[doc = stub!("MoeByExpertRoutes.num_received")]
    #[getter]
    fn num_received(&self) -> Option<usize> {
        self.0.either(|routes| Some(routes.num_received()), CudaByExpertRoutes::num_received)
    }

    #[doc = stub!("MoeByExpertRoutes.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.either(ByExpertRoutes::num_tokens, CudaByExpertRoutes::num_tokens)
    }

    #[getter]
    fn num_experts(&self) -> usize {
        self.0.either(ByExpertRoutes::num_experts, CudaByExpertRoutes::num_experts)
    }

    #[doc = stub!("MoeByExpertRoutes.overflow")]
    #[getter]
    fn overflow(&self) -> Result<bool> {
        Ok(self.0.host("overflow")?.overflow())
    }

    #[doc = stub!("MoeByExpertRoutes.rows_needed")]
    #[getter]
    fn rows_needed(&self) -> Result<usize> {
        Ok(self.0.host("rows_needed")?.rows_needed())
    }

    #[doc = stub!("MoeByExpertRoutes.tokens_per_expert")]
    #[getter]
    fn tokens_per_expert(&self) -> Option<Vec<usize>> {
        self.0.either(
            |routes| Some(routes.tokens_per_expert().to_vec()),
            |routes| routes.tokens_per_expert().map(<[_]>::to_vec),
        )
    }

    #[doc = stub!("MoeByExpertRoutes.rows_per_expert")]
    #[getter]
    fn rows_per_expert(&self) -> Option<Vec<usize>> {
        self.0.either(
            |routes| Some(routes.rows_per_expert().to_vec()),
            |routes| routes.rows_per_expert().map(<[_]>::to_vec),
        )
    }

    #[doc = stub!("MoeByExpertRoutes.received_as")]
    #[getter]
    fn received_as<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(words(py, &self.0.host("received_as")?.received_as()))
    }

    #[doc = stub!("MoeByExpertRoutes.places")]
    #[getter]
    fn places<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyBytes>>> {
        Ok(self.0.host("places")?.places().map(|places| words(py, places)))
    }

    #[doc = stub!("MoeByExpertRoutes.num_places")]
    #[getter]
    fn num_places(&self) -> usize {
        self.0.either(ByExpertRoutes::num_received, CudaByExpertRoutes::places)
    }

    #[doc = stub!("MoeByExpertRoutes.keep_places_in")]
    fn keep_places_in(&self, places: &Bound<'_, PyAny>) -> Result<()> {
        let places = Array::write(places, "places")?;
        // SAFETY: the caller keeps the array as long as the routes.
        let view = unsafe { places.view_mut() }?;
        let device = view.as_view().device();
        // SAFETY: as above.
        Ok(unsafe { self.0.cuda("keep_places_in")?.keep_places_in(view, device) }?)
    }
}
