//! Mixtures of experts: the arrays of a call as the crate's tensors.

mod by_expert;
mod by_token;
mod routes;
mod slots;

use std::{
    ops::Range,
    sync::{Arc, MutexGuard, PoisonError, Weak},
};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::Queue,
    moe::{
        self, Combine, Dispatch, MoeConfig, MoeError, Routing, RowFormat,
        cuda::{CudaByTokenRoutes, RouteMemory},
    },
    prelude::FabricError,
    session::{self, MoeStream, SessionError},
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
    types::PyBytes,
};

use crate::{
    arguments::Given,
    array::{Array, check_apart},
    communicator::Communicator,
    error::Result,
    fork::Process,
    interrupt,
    stream::{RawStream, on, stream_or_current},
};

use by_token::{LayoutArrays, Rows, TokenArrays, written_layout};
use routes::{Routes, lock};

pub(crate) use {
    by_expert::{MoeByExpert, MoeByExpertRoutes},
    slots::{MoeSlotRoutes, MoeSlots},
};

#[doc = stub!("Moe")]
#[pyclass(frozen, module = "antiphon", weakref)]
pub(crate) struct Moe {
    /// Absent when closed.
    moe: Mutex<Option<moe::Moe>>,
    gpus: session::Moe,
    queue: Weak<Queue>,
    process: Process,
    world_size: usize,
    region_bytes: usize,
}

/// A stream beside the current one, and whether the current one waits for the end of a call on it.
pub(crate) type Side = (RawStream, bool);

#[doc = stub!("MoeByTokenRoutes")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeByTokenRoutes(Routes<moe::ByTokenRoutes, CudaByTokenRoutes>);

impl Moe {
    fn lock(&self) -> MutexGuard<'_, Option<moe::Moe>> {
        self.moe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a call into the current stream of a GPU, or into one beside it, where it comes behind the work of the current one. The first
    /// call on a GPU brings the ranks' GPUs together.
    pub(crate) fn run_cuda<T: Send>(
        &self,
        py: Python<'_>,
        device: u32,
        side: Option<Side>,
        call: impl FnOnce(&session::Moe, MoeStream<'_>) -> Result<T, SessionError> + Send,
    ) -> Result<T> {
        self.process.check(|| "Moe".to_owned())?;
        let closed = || PyRuntimeError::new_err("this Moe or its communicator is closed");
        let _queue = self.queue.upgrade().ok_or_else(closed)?;
        let current = stream_or_current(py, device, None)?;
        Ok(interrupt::detached(py, || {
            // SAFETY: the streams are those of the library whose tensors are used, and so of the device.
            let on = |stream| unsafe { on(device, stream) };
            let stream = MoeStream::from(on(current));
            let stream = match side {
                Some((side, joins)) => stream.beside(on(side), joins),
                None => stream,
            };
            call(&self.gpus, stream)
        })?)
    }

    /// Waits for a call in the order of the communicator's.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut moe::Moe, &antiphon::prelude::Communicator) -> Result<T, MoeError> + Send,
    ) -> Result<T> {
        self.process.check(|| "Moe".to_owned())?;
        let closed = || PyRuntimeError::new_err("this Moe or its communicator is closed");
        let queue = self.queue.upgrade().ok_or_else(closed)?;
        let outcome = interrupt::detached(py, || {
            queue.run(|comm| match &mut *self.lock() {
                Some(moe) => call(moe, comm).map(Some),
                None => Ok(None),
            })
        })?;
        Ok(outcome.ok_or_else(closed)?)
    }

    /// Writes the layout of choices.
    fn count(
        &self,
        py: Python<'_>,
        ids: &Array,
        layout: &LayoutArrays<'_>,
        side: Option<Side>,
    ) -> Result<()> {
        let [per_rank, per_expert, in_rank] = written_layout(layout)?;
        // SAFETY: the arrays live until this returns; that nobody writes the ids or uses the others meanwhile is the caller's to see to.
        let view = unsafe { ids.view() }?;
        if let Some(device) = view.device().cuda_ordinal() {
            // SAFETY: as above, in the order of the stream, as the caller's library uses them.
            let outputs = unsafe { [per_rank.view_mut()?, per_expert.view_mut()?, in_rank.view_mut()?] };
            let [mut per_rank, mut per_expert, mut in_rank] = outputs;
            return self.run_cuda(py, device, side, |moe, stream| {
                let outputs = [&mut per_rank, &mut per_expert, &mut in_rank];
                // SAFETY: as above.
                unsafe { moe.layout(stream, &view, outputs) }
            });
        }
        let num_experts = per_expert.elements();
        let layout = py.detach(|| moe::layout(&view, num_experts, self.world_size))?;
        // SAFETY: as above.
        unsafe {
            per_rank.fill("layout", &bytes(&layout.tokens_per_rank))?;
            per_expert.fill("layout", &bytes(&layout.tokens_per_expert))?;
            in_rank.fill("layout", &layout.is_token_in_rank)
        }
    }

    /// Makes routes, which with a capacity keep the token of each row in `sources` on a GPU. The words are written for the caller.
    #[expect(clippy::too_many_arguments, reason = "those of a call of Python's")]
    fn route(
        &self,
        py: Python<'_>,
        tokens: &Rows,
        layout: &LayoutArrays<'_>,
        capacity: Option<usize>,
        words: Option<&Array>,
        sources: Option<&Array>,
        side: Option<Side>,
    ) -> Result<MoeByTokenRoutes> {
        let per_expert = Array::read(&layout.1, "tokens_per_expert")?;
        let in_rank = Array::read(&layout.2, "is_token_in_rank")?;
        let scales = tokens.scales.as_ref().map(Array::dtype);
        let hidden = tokens.x.columns("dispatch")?;
        let routing = Routing {
            num_experts: per_expert.elements(),
            top_k: tokens.ids.as_ref().map_or(Ok(0), |ids| ids.columns("dispatch"))?,
            // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
            is_token_in_rank: unsafe { in_rank.view() }?,
            // SAFETY: as above.
            tokens_per_expert: unsafe { per_expert.view() }?,
            format: RowFormat { hidden, dtype: tokens.x.dtype(), scales },
            capacity,
        };
        let Some(device) = routing.is_token_in_rank.device().cuda_ordinal() else {
            let routes = self.run(py, |moe, comm| moe.notify(comm, &routing))?;
            if let Some(words) = words {
                // SAFETY: that nobody else uses the array meanwhile is the caller's to see to.
                unsafe { words.fill("dispatch", &bytes(&routes.parts())) }?;
            }
            return Ok(MoeByTokenRoutes(Routes::Host(routes)));
        };
        // SAFETY: the caller keeps these arrays as long as the routes.
        let write = |array: &Array| unsafe { array.view_mut() };
        let memory = match words {
            None => RouteMemory::Own,
            Some(words) => {
                RouteMemory::Callers { words: write(words)?, sources: sources.map(write).transpose()? }
            }
        };
        // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
        let routes =
            self.run_cuda(py, device, side, |moe, stream| unsafe { moe.notify(stream, &routing, memory) })?;
        Ok(MoeByTokenRoutes(Routes::Cuda(Mutex::new(routes))))
    }

    /// Keeps the token of each row in `sources` from now on, if the routes are on a GPU.
    ///
    /// # Safety
    /// The caller keeps the array as long as the routes.
    unsafe fn keep_sources(&self, routes: &MoeByTokenRoutes, sources: &Array, rows: usize) -> Result<()> {
        let Routes::Cuda(routes) = &routes.0 else { return Ok(()) };
        // SAFETY: passed on.
        let view = unsafe { sources.first_rows(rows) }?;
        let device = view.as_view().device();
        // SAFETY: passed on.
        Ok(unsafe { lock(routes).keep_sources_in(view, device) }?)
    }

    /// Moves rows along routes. On the host the token of each row is written to `sources`; on a GPU the routes know where that is.
    fn move_rows(
        &self,
        py: Python<'_>,
        routes: &MoeByTokenRoutes,
        call: Dispatch<'_>,
        sources: Option<&Array>,
        side: Option<Side>,
    ) -> Result<()> {
        if let Some(device) = call.tokens.x.device().cuda_ordinal() {
            let routes = routes.0.cuda("dispatch")?;
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return self
                .run_cuda(py, device, side, |moe, stream| unsafe { moe.dispatch(stream, &routes, call) });
        }
        let routes = routes.0.host("dispatch")?;
        self.run(py, |moe, comm| moe.dispatch(comm, routes, call))?;
        if let Some(sources) = sources {
            let mut tokens = routes.source_tokens().unwrap_or_default();
            tokens.resize(routes.rows(), -1);
            // SAFETY: that nobody else uses the array meanwhile is the caller's to see to.
            unsafe { sources.fill("dispatch", &bytes(&tokens)) }?;
        }
        Ok(())
    }
}

#[pymethods]
impl Moe {
    #[classattr]
    const MAX_LOCAL_EXPERTS: usize = moe::layout::MAX_LOCAL_EXPERTS;
    #[classattr]
    const NUM_SMS: u32 = MoeConfig::NUM_SMS;

    #[new]
    #[pyo3(signature = (comm, region_bytes = None))]
    fn new(py: Python<'_>, comm: &Communicator, region_bytes: Option<usize>) -> Result<Self> {
        let queue = comm.queue()?;
        let default = MoeConfig::default();
        let config = MoeConfig { region_bytes: region_bytes.unwrap_or(default.region_bytes), ..default };
        let moe = interrupt::detached(py, || queue.run(|comm| moe::Moe::new(comm, config)))?;
        Ok(Self {
            region_bytes: moe.region_bytes(),
            moe: Mutex::new(Some(moe)),
            // Detached, as another thread may hold the lock while it attaches.
            gpus: py.detach(|| comm.gpus().session().moe(MoeConfig::for_gpus())),
            world_size: queue.messenger().world_size(),
            queue: Arc::downgrade(&queue),
            process: Process::current(),
        })
    }

    #[getter]
    fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    #[doc = stub!("Moe.num_sms")]
    #[getter]
    fn num_sms(&self) -> u32 {
        self.gpus.num_sms()
    }

    #[setter]
    fn set_num_sms(&self, num_sms: u32) {
        self.gpus.set_num_sms(num_sms);
    }

    #[doc = stub!("Moe.tune")]
    fn tune(
        &self,
        py: Python<'_>,
        device: u32,
        hidden: usize,
        smallest: usize,
        largest: usize,
    ) -> Result<()> {
        self.process.check(|| "Moe".to_owned())?;
        let tuned = interrupt::detached(py, || self.gpus.tune(device, hidden, smallest..=largest));
        Ok(tuned.map(drop)?)
    }

    #[doc = stub!("Moe.route_words")]
    #[staticmethod]
    #[pyo3(signature = (world_size, num_experts, num_tokens))]
    fn route_words(world_size: usize, num_experts: usize, num_tokens: usize) -> NamedWords {
        let words = moe::RouteWords::new(world_size, num_experts, num_tokens);
        named_words(words.named(), words.total())
    }

    #[doc = stub!("Moe.host_words")]
    #[staticmethod]
    #[pyo3(signature = (world_size, num_experts, num_tokens, rows))]
    fn host_words(world_size: usize, num_experts: usize, num_tokens: usize, rows: usize) -> usize {
        moe::route_words(world_size, num_experts, num_tokens, rows)
    }

    #[doc = stub!("Moe.routes_of")]
    #[pyo3(signature = (words, num_experts, *, num_tokens = 0, top_k = 0, sources = None))]
    fn routes_of(
        &self,
        py: Python<'_>,
        words: &Bound<'_, PyAny>,
        num_experts: usize,
        num_tokens: usize,
        top_k: usize,
        sources: Given<'_, '_>,
    ) -> Result<MoeByTokenRoutes> {
        let words = Array::read(words, "routes")?;
        // SAFETY: the arrays live until this returns, and those on a GPU as long as the routes; nobody writes them.
        let words = unsafe { words.view() }?;
        let Some(device) = words.device().cuda_ordinal() else {
            let bytes = words.as_bytes()?;
            let words: Vec<u32> = bytes
                .chunks_exact(4)
                .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
                .collect();
            let routes = self.run(py, |moe, comm| moe.routes_from_words(comm, num_experts, &words))?;
            return Ok(MoeByTokenRoutes(Routes::Host(routes)));
        };
        let Some(sources) = Array::given(sources, "sources", Array::read)? else {
            return Err(PyValueError::new_err("combine: routes on a GPU need the sources").into());
        };
        // SAFETY: as above.
        let sources = unsafe { sources.view() }?;
        let sizes = [num_experts, num_tokens, top_k];
        // SAFETY: that they are what a dispatch has left is the caller's to see to.
        let routes = self.run_cuda(py, device, None, |moe, stream| unsafe {
            moe.routes_of(stream, (&words, &sources), sizes)
        })?;
        Ok(MoeByTokenRoutes(Routes::Cuda(Mutex::new(routes))))
    }

    #[doc = stub!("Moe.check")]
    fn check(&self, py: Python<'_>) -> Result<()> {
        Ok(py.detach(|| self.gpus.check())?)
    }

    #[doc = stub!("Moe.give_up")]
    fn give_up(&self, py: Python<'_>, reason: &str) {
        if let Some(queue) = self.queue.upgrade() {
            py.detach(|| queue.monitor().report(&FabricError::invalid(reason)));
        }
    }

    #[getter]
    fn closed(&self) -> bool {
        self.lock().is_none()
    }

    #[doc = stub!("Moe.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        let (Some(queue), true) = (self.queue.upgrade(), self.process.is_current()) else { return Ok(()) };
        let closed = interrupt::detached(py, || {
            self.gpus.close();
            queue.run(|comm| self.lock().take().map_or(Ok(()), |moe| moe.close(comm)))
        });
        Ok(closed?)
    }

    #[doc = stub!("Moe.layout")]
    #[pyo3(signature = (ids, layout, *, side = None, num_sms = None))]
    fn layout(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        layout: LayoutArrays<'_>,
        side: Option<Side>,
        num_sms: Option<u32>,
    ) -> Result<()> {
        num_sms.into_iter().for_each(|number| self.set_num_sms(number));
        self.count(py, &Array::read(ids, "ids")?, &layout, side)
    }

    #[doc = stub!("Moe.notify")]
    #[pyo3(signature = (tokens, layout, *, counts = false, capacity = None, words = None, sources = None, received = None, side = None, num_sms = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last seven")]
    fn notify(
        &self,
        py: Python<'_>,
        tokens: TokenArrays<'_>,
        layout: LayoutArrays<'_>,
        counts: bool,
        capacity: Option<usize>,
        words: Given<'_, '_>,
        sources: Given<'_, '_>,
        received: Option<TokenArrays<'_>>,
        side: Option<Side>,
        num_sms: Option<u32>,
    ) -> Result<Made> {
        num_sms.into_iter().for_each(|number| self.set_num_sms(number));
        let tokens = Rows::sent(&tokens)?;
        let received = received.map(|received| Rows::received(&received)).transpose()?;
        if let Some(received) = &received {
            check_apart("dispatch", &tokens.all(), &received.all())?;
        }
        let (words, sources) =
            (Array::given(words, "words", Array::write)?, Array::given(sources, "sources", Array::write)?);
        if counts {
            let ids = tokens
                .ids
                .as_ref()
                .ok_or_else(|| PyValueError::new_err("dispatch: a layout is made of ids"))?;
            self.count(py, ids, &layout, side)?;
        }
        let room = received.as_ref().map_or(Ok(0), |received| received.x.rows("dispatch"))?;
        let kept = sources.as_ref().filter(|_| capacity.is_some());
        let routes = self.route(py, &tokens, &layout, capacity, words.as_ref(), kept, side)?;
        let rows = routes.rows();
        // Memory that few rows would keep is not used.
        let fills = matches!(routes.0, Routes::Cuda(_)) && (room / 4 * 3..=room).contains(&rows);
        let Some(received) = received.filter(|_| capacity.is_some() || fills) else {
            return Ok(routes.made(false));
        };
        let moved = || {
            if let (None, Some(sources)) = (capacity, &sources) {
                // SAFETY: the caller keeps the array as long as the routes.
                unsafe { self.keep_sources(&routes, sources, rows) }?;
            }
            let call = Dispatch {
                // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
                tokens: tokens.tokens(|array| unsafe { array.view() })?,
                // SAFETY: these are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
                received: received.tokens(|array| unsafe { array.first_rows(rows) })?,
            };
            self.move_rows(py, &routes, call, sources.as_ref(), side)
        };
        moved().map_err(|error| {
            let error = PyErr::from(error);
            self.give_up(py, &format!("dispatch: {error}")); // peers have the counts, and wait for rows
            error
        })?;
        Ok(routes.made(true))
    }

    #[doc = stub!("Moe.dispatch")]
    #[pyo3(signature = (routes, tokens, received, *, sources = None, side = None, num_sms = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last three")]
    fn dispatch(
        &self,
        py: Python<'_>,
        routes: &MoeByTokenRoutes,
        tokens: TokenArrays<'_>,
        received: TokenArrays<'_>,
        sources: Given<'_, '_>,
        side: Option<Side>,
        num_sms: Option<u32>,
    ) -> Result<()> {
        num_sms.into_iter().for_each(|number| self.set_num_sms(number));
        let tokens = Rows::sent(&tokens)?;
        let received = Rows::received(&received)?;
        check_apart("dispatch", &tokens.all(), &received.all())?;
        let sources = Array::given(sources, "sources", Array::write)?;
        if let Some(sources) = &sources {
            // SAFETY: the caller keeps the array as long as the routes.
            unsafe { self.keep_sources(routes, sources, sources.elements()) }?;
        }
        let call = Dispatch {
            // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
            tokens: tokens.tokens(|array| unsafe { array.view() })?,
            // SAFETY: these are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
            received: received.tokens(|array| unsafe { array.view_mut() })?,
        };
        self.move_rows(py, routes, call, sources.as_ref(), side)
    }

    #[doc = stub!("Moe.combine")]
    #[pyo3(signature = (routes, rows, output, *, weights = None, output_weights = None, bias = None, second_bias = None, side = None, num_sms = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last six")]
    fn combine(
        &self,
        py: Python<'_>,
        routes: &MoeByTokenRoutes,
        rows: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        weights: Given<'_, '_>,
        output_weights: Given<'_, '_>,
        bias: Given<'_, '_>,
        second_bias: Given<'_, '_>,
        side: Option<Side>,
        num_sms: Option<u32>,
    ) -> Result<()> {
        num_sms.into_iter().for_each(|number| self.set_num_sms(number));
        let (rows, output) = (Array::read(rows, "rows")?, Array::write(output, "output")?);
        let weights = Array::given(weights, "weights", Array::read)?;
        let output_weights = Array::given(output_weights, "output_weights", Array::write)?;
        let biases = [
            Array::given(bias, "bias", Array::read)?,
            Array::given(second_bias, "second_bias", Array::read)?,
        ];
        check_apart(
            "combine",
            &[Some(&rows), weights.as_ref(), biases[0].as_ref(), biases[1].as_ref()],
            &[Some(&output), output_weights.as_ref()],
        )?;
        // SAFETY: the arrays live until this returns, the written ones are apart from all others; that nobody else uses them
        // meanwhile is the caller's to see to.
        let read = |array: &Option<Array>| array.as_ref().map(|array| unsafe { array.view() }).transpose();
        let call = Combine {
            // SAFETY: as above.
            rows: unsafe { rows.view() }?,
            weights: read(&weights)?,
            biases: [read(&biases[0])?, read(&biases[1])?],
            // SAFETY: as above.
            output: unsafe { output.view_mut() }?,
            // SAFETY: as above.
            output_weights: output_weights.as_ref().map(|array| unsafe { array.view_mut() }).transpose()?,
        };
        if let Some(device) = call.rows.device().cuda_ordinal() {
            let routes = routes.0.cuda("combine")?;
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return self
                .run_cuda(py, device, side, |moe, stream| unsafe { moe.combine(stream, &routes, call) });
        }
        let routes = routes.0.host("combine")?;
        self.run(py, |moe, comm| moe.combine(comm, routes, call))
    }
}

/// 32-bit numbers in the machine's byte order.
fn bytes(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// [`bytes`] for Python.
pub(crate) fn words<'py>(py: Python<'py>, numbers: &[i32]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &bytes(numbers))
}

/// Routes; whether the rows were moved; how many rows received arrays have; how many rows arrive and how often the experts were chosen, if
/// the host knows.
type Made = (MoeByTokenRoutes, bool, usize, Option<usize>, Option<Vec<usize>>);

/// The parts of routes' words, and all of them: name, begin and end.
type NamedWords = Vec<(&'static str, usize, usize)>;

fn named_words(parts: Vec<(&'static str, Range<usize>)>, total: usize) -> NamedWords {
    parts.into_iter().chain([("all", 0..total)]).map(|(name, range)| (name, range.start, range.end)).collect()
}

impl MoeByTokenRoutes {
    /// With what the caller asks for next.
    fn made(self, is_moved: bool) -> Made {
        let (rows, num_received, per_expert) = self.0.either(
            |routes| (routes.rows(), Some(routes.num_received()), Some(routes.tokens_per_expert().to_vec())),
            |routes| {
                (routes.rows(), routes.num_received(), routes.tokens_per_expert().map(<[usize]>::to_vec))
            },
        );
        (self, is_moved, rows, num_received, per_expert)
    }
}

#[pymethods]
impl MoeByTokenRoutes {
    #[doc = stub!("MoeByTokenRoutes.rows")]
    #[getter]
    fn rows(&self) -> usize {
        self.0.either(moe::ByTokenRoutes::rows, CudaByTokenRoutes::rows)
    }

    #[doc = stub!("MoeByTokenRoutes.num_received")]
    #[getter]
    fn num_received(&self) -> Option<usize> {
        self.0.either(|routes| Some(routes.num_received()), CudaByTokenRoutes::num_received)
    }

    #[doc = stub!("MoeByTokenRoutes.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> usize {
        self.0.either(moe::ByTokenRoutes::num_tokens, CudaByTokenRoutes::num_tokens)
    }

    #[getter]
    fn num_experts(&self) -> usize {
        self.0.either(moe::ByTokenRoutes::num_experts, CudaByTokenRoutes::num_experts)
    }

    #[getter]
    fn top_k(&self) -> usize {
        self.0.either(moe::ByTokenRoutes::top_k, CudaByTokenRoutes::top_k)
    }

    #[doc = stub!("MoeByTokenRoutes.words")]
    #[getter]
    fn words<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let bytes: Vec<u8> =
            self.0.host("words")?.to_words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }
}
