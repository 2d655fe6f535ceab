//! Mixtures of experts: the arrays of a call as the crate's tensors.

mod by_expert;
mod routes;
mod slots;

use std::sync::{Arc, MutexGuard, PoisonError, Weak};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::Queue,
    moe::{
        self, Choices, Combine, Dispatch, MoeConfig, MoeError, Routing, RowFormat, Tokens,
        cuda::{CudaByTokenRoutes, RouteMemory},
    },
    prelude::{Device, FabricError},
    session::{self, MoeStream, SessionError},
    tensor::TensorError,
};
use pyo3::{
    exceptions::{PyRuntimeError, PyTypeError, PyValueError},
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

use routes::Routes;

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

/// The arrays of a dispatch that have rows of tokens, or of what is received.
struct RowArrays {
    x: Array,
    scales: Option<Array>,
    ids: Option<Array>,
    weights: Option<Array>,
}

/// Arrays as Python gives them: `x`, `scales`, `ids` and `weights`.
type GivenRows<'a, 'py> = (&'a Bound<'py, PyAny>, [Given<'a, 'py>; 3]);

impl RowArrays {
    /// Those of the tokens and those that rows go to, which are apart from all others.
    fn pair(from: GivenRows<'_, '_>, to: GivenRows<'_, '_>) -> Result<[Self; 2]> {
        let from = Self {
            x: Array::read(from.0, "x")?,
            scales: Array::given(from.1[0], "scales", Array::read)?,
            ids: Array::given(from.1[1], "ids", Array::read)?,
            weights: Array::given(from.1[2], "weights", Array::read)?,
        };
        let to = Self {
            x: Array::write(to.0, "received_x")?,
            scales: Array::given(to.1[0], "received_scales", Array::write)?,
            ids: Array::given(to.1[1], "received_ids", Array::write)?,
            weights: Array::given(to.1[2], "received_weights", Array::write)?,
        };
        if [&from, &to].iter().any(|rows| rows.ids.is_some() != rows.weights.is_some()) {
            return Err(PyValueError::new_err("dispatch: ids need weights, and weights need ids").into());
        }
        check_apart("dispatch", &from.all(), &to.all())?;
        Ok([from, to])
    }

    fn all(&self) -> [Option<&Array>; 4] {
        [Some(&self.x), self.scales.as_ref(), self.ids.as_ref(), self.weights.as_ref()]
    }

    /// The tensors of the arrays.
    fn tokens<T>(&self, view: impl Fn(&Array) -> Result<T, TensorError>) -> Result<Tokens<T>> {
        let given = |array: &Option<Array>| array.as_ref().map(&view).transpose();
        Ok(Tokens {
            x: view(&self.x)?,
            scales: given(&self.scales)?,
            choices: given(&self.ids)?
                .zip(given(&self.weights)?)
                .map(|(ids, weights)| Choices { ids, weights }),
        })
    }
}

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
}

/// What ranks agree on before a dispatch: `layout` is `is_token_in_rank` and `tokens_per_expert`.
///
/// # Safety
/// As [`Array::view`].
unsafe fn routing<'a>(
    x: &Array,
    scales: Option<&Array>,
    [in_rank, per_expert]: &[Array; 2],
    top_k: usize,
    capacity: Option<usize>,
) -> Result<Routing<'a>> {
    Ok(Routing {
        num_experts: per_expert.elements(),
        top_k,
        // SAFETY: passed on.
        is_token_in_rank: unsafe { in_rank.view() }?,
        // SAFETY: passed on.
        tokens_per_expert: unsafe { per_expert.view() }?,
        format: RowFormat {
            hidden: x.columns("dispatch")?,
            dtype: x.dtype(),
            scales: scales.map(|scales| scales.dtype()),
        },
        capacity,
    })
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
    fn route_words(
        world_size: usize,
        num_experts: usize,
        num_tokens: usize,
    ) -> Vec<(&'static str, usize, usize)> {
        let words = moe::cuda::RouteWords::new(world_size, num_experts, num_tokens);
        let named = [
            ("rank_prefix_matrix", words.rank_prefix_matrix()),
            ("routed_to_each", words.routed_to_each()),
            ("overflow", words.overflow()),
            ("tokens_per_expert", words.tokens_per_expert()),
            ("send_head", words.send_head()),
            ("all", 0..words.total()),
        ];
        named.map(|(name, range)| (name, range.start, range.end)).to_vec()
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
    #[pyo3(signature = (ids, num_experts, *, tokens_per_rank, tokens_per_expert, is_token_in_rank, side = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last four")]
    fn layout(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        num_experts: usize,
        tokens_per_rank: &Bound<'_, PyAny>,
        tokens_per_expert: &Bound<'_, PyAny>,
        is_token_in_rank: &Bound<'_, PyAny>,
        side: Option<Side>,
    ) -> Result<()> {
        let ids = Array::read(ids, "ids")?;
        // SAFETY: the array lives until this returns; that nobody writes it meanwhile is the caller's to see to.
        let view = unsafe { ids.view() }?;
        if let Some(device) = view.device().cuda_ordinal() {
            let per_rank = Array::write(tokens_per_rank, "tokens_per_rank")?;
            let per_expert = Array::write(tokens_per_expert, "tokens_per_expert")?;
            let in_rank = Array::write(is_token_in_rank, "is_token_in_rank")?;
            // SAFETY: the arrays may be written; in the order of the stream, as the caller's library uses them.
            let outputs = unsafe { [per_rank.view_mut()?, per_expert.view_mut()?, in_rank.view_mut()?] };
            let [mut per_rank, mut per_expert, mut in_rank] = outputs;
            return self.run_cuda(py, device, side, |moe, stream| {
                let outputs = [&mut per_rank, &mut per_expert, &mut in_rank];
                // SAFETY: as above.
                unsafe { moe.layout(stream, &view, outputs) }
            });
        }
        let layout = py.detach(|| moe::layout(&view, num_experts, self.world_size))?;
        let bytes = |counts: &[i32]| counts.iter().flat_map(|count| count.to_ne_bytes()).collect::<Vec<_>>();
        let outputs = [
            (tokens_per_rank, "tokens_per_rank", bytes(&layout.tokens_per_rank)),
            (tokens_per_expert, "tokens_per_expert", bytes(&layout.tokens_per_expert)),
            (is_token_in_rank, "is_token_in_rank", layout.is_token_in_rank),
        ];
        for (array, name, content) in outputs {
            // SAFETY: the array lives until this returns; that no other thread uses it meanwhile is the caller's to see to.
            unsafe { Array::write(array, name)?.fill("layout", &content) }?;
        }
        Ok(())
    }

    #[doc = stub!("Moe.notify")]
    #[pyo3(signature = (x, is_token_in_rank, tokens_per_expert, *, top_k = 0, scales = None, capacity = None, words = None, sources = None, side = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last six")]
    fn notify(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        is_token_in_rank: &Bound<'_, PyAny>,
        tokens_per_expert: &Bound<'_, PyAny>,
        top_k: usize,
        scales: Given<'_, '_>,
        capacity: Option<usize>,
        words: Given<'_, '_>,
        sources: Given<'_, '_>,
        side: Option<Side>,
    ) -> Result<MoeByTokenRoutes> {
        let (x, scales) = (Array::read(x, "x")?, Array::given(scales, "scales", Array::read)?);
        let layout = [
            Array::read(is_token_in_rank, "is_token_in_rank")?,
            Array::read(tokens_per_expert, "tokens_per_expert")?,
        ];
        // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
        let routing = unsafe { routing(&x, scales.as_ref(), &layout, top_k, capacity) }?;
        let Some(device) = routing.is_token_in_rank.device().cuda_ordinal() else {
            return Ok(MoeByTokenRoutes(Routes::Host(self.run(py, |moe, comm| moe.notify(comm, &routing))?)));
        };
        let words = Array::given(words, "words", Array::write)?;
        let sources = Array::given(sources, "sources", Array::write)?;
        // SAFETY: the caller keeps these arrays as long as the routes.
        let write = |array: &Array| unsafe { array.view_mut() };
        let memory = match &words {
            None => RouteMemory::Own,
            Some(words) => RouteMemory::Callers {
                words: write(words)?,
                sources: sources.as_ref().map(write).transpose()?,
            },
        };
        // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
        let routes =
            self.run_cuda(py, device, side, |moe, stream| unsafe { moe.notify(stream, &routing, memory) })?;
        Ok(MoeByTokenRoutes(Routes::Cuda(Mutex::new(routes))))
    }

    #[doc = stub!("Moe.dispatch")]
    #[pyo3(signature = (routes, x, received_x, *, scales = None, received_scales = None, ids = None, weights = None, received_ids = None, received_weights = None, side = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last seven")]
    fn dispatch(
        &self,
        py: Python<'_>,
        routes: &MoeByTokenRoutes,
        x: &Bound<'_, PyAny>,
        received_x: &Bound<'_, PyAny>,
        scales: Given<'_, '_>,
        received_scales: Given<'_, '_>,
        ids: Given<'_, '_>,
        weights: Given<'_, '_>,
        received_ids: Given<'_, '_>,
        received_weights: Given<'_, '_>,
        side: Option<Side>,
    ) -> Result<()> {
        let [from, to] = RowArrays::pair(
            (x, [scales, ids, weights]),
            (received_x, [received_scales, received_ids, received_weights]),
        )?;
        let call = Dispatch {
            // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
            tokens: from.tokens(|array| unsafe { array.view() })?,
            // SAFETY: these are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
            received: to.tokens(|array| unsafe { array.view_mut() })?,
        };
        if let Some(device) = call.tokens.x.device().cuda_ordinal() {
            let routes = routes.0.cuda("dispatch")?;
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            return self
                .run_cuda(py, device, side, |moe, stream| unsafe { moe.dispatch(stream, &routes, call) });
        }
        let routes = routes.0.host("dispatch")?;
        self.run(py, |moe, comm| moe.dispatch(comm, routes, call))
    }

    #[doc = stub!("Moe.notify_and_dispatch")]
    #[pyo3(signature = (x, is_token_in_rank, tokens_per_expert, received_x, *, words, sources, top_k = 0, capacity = None, scales = None, received_scales = None, ids = None, weights = None, received_ids = None, received_weights = None, side = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last eleven")]
    fn notify_and_dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        is_token_in_rank: &Bound<'_, PyAny>,
        tokens_per_expert: &Bound<'_, PyAny>,
        received_x: &Bound<'_, PyAny>,
        words: &Bound<'_, PyAny>,
        sources: &Bound<'_, PyAny>,
        top_k: usize,
        capacity: Option<usize>,
        scales: Given<'_, '_>,
        received_scales: Given<'_, '_>,
        ids: Given<'_, '_>,
        weights: Given<'_, '_>,
        received_ids: Given<'_, '_>,
        received_weights: Given<'_, '_>,
        side: Option<Side>,
    ) -> Result<(MoeByTokenRoutes, bool)> {
        let [from, to] = RowArrays::pair(
            (x, [scales, ids, weights]),
            (received_x, [received_scales, received_ids, received_weights]),
        )?;
        let layout = [
            Array::read(is_token_in_rank, "is_token_in_rank")?,
            Array::read(tokens_per_expert, "tokens_per_expert")?,
        ];
        let (words, sources) = (Array::write(words, "words")?, Array::write(sources, "sources")?);
        // SAFETY: the arrays live until this returns; that nobody writes them meanwhile is the caller's to see to.
        let routing = unsafe { routing(&from.x, from.scales.as_ref(), &layout, top_k, capacity) }?;
        // SAFETY: as above.
        let tokens = from.tokens(|array| unsafe { array.view() })?;
        let Some(device) = tokens.x.device().cuda_ordinal() else {
            return Err(PyTypeError::new_err("notify_and_dispatch: x must be on a GPU").into());
        };
        let room = to.x.rows("dispatch")?;
        let memory = RouteMemory::Callers {
            // SAFETY: the caller keeps these arrays as long as the routes.
            words: unsafe { words.view_mut() }?,
            // SAFETY: as above.
            sources: capacity.map(|_| unsafe { sources.view_mut() }).transpose()?,
        };
        // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
        let mut routes =
            self.run_cuda(py, device, side, |moe, stream| unsafe { moe.notify(stream, &routing, memory) })?;
        let rows = routes.rows();
        // Memory that few rows would keep is not used.
        if capacity.is_none() && !(room / 4 * 3..=room).contains(&rows) {
            return Ok((MoeByTokenRoutes(Routes::Cuda(Mutex::new(routes))), false));
        }
        let moved = || {
            if capacity.is_none() {
                // SAFETY: the caller keeps the array as long as the routes.
                unsafe { routes.keep_sources_in(sources.first_rows(rows)?, Device::Cuda(device)) }?;
            }
            // SAFETY: these are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
            let received = to.tokens(|array| unsafe { array.first_rows(rows) })?;
            let call = Dispatch { tokens, received };
            // SAFETY: the arrays are used in the order of the stream, as the caller's library uses them.
            self.run_cuda(py, device, side, |moe, stream| unsafe { moe.dispatch(stream, &routes, call) })
        };
        moved().map_err(|error| {
            let error = PyErr::from(error);
            self.give_up(py, &error.to_string()); // peers have the counts, and wait for rows
            error
        })?;
        Ok((MoeByTokenRoutes(Routes::Cuda(Mutex::new(routes))), true))
    }

    #[doc = stub!("Moe.combine")]
    #[pyo3(signature = (routes, rows, output, *, weights = None, output_weights = None, bias = None, second_bias = None, side = None))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last five")]
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
    ) -> Result<()> {
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
pub(crate) fn words<'py>(py: Python<'py>, numbers: &[i32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
    PyBytes::new(py, &bytes)
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

    #[doc = stub!("MoeByTokenRoutes.overflow")]
    #[getter]
    fn overflow(&self) -> Result<bool> {
        Ok(self.0.host("overflow")?.overflow())
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

    #[doc = stub!("MoeByTokenRoutes.tokens_per_expert")]
    #[getter]
    fn tokens_per_expert(&self) -> Option<Vec<usize>> {
        self.0.either(
            |routes| Some(routes.tokens_per_expert().to_vec()),
            |routes| routes.tokens_per_expert().map(<[usize]>::to_vec),
        )
    }

    #[doc = stub!("MoeByTokenRoutes.rank_prefix_matrix")]
    #[getter]
    fn rank_prefix_matrix<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(words(py, &self.0.host("rank_prefix_matrix")?.rank_prefix_matrix()))
    }

    #[doc = stub!("MoeByTokenRoutes.routed_to_each")]
    #[getter]
    fn routed_to_each<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(words(py, &self.0.host("routed_to_each")?.routed_to_each()))
    }

    #[doc = stub!("MoeByTokenRoutes.send_head")]
    #[getter]
    fn send_head<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(words(py, &self.0.host("send_head")?.send_head()))
    }

    #[doc = stub!("MoeByTokenRoutes.source_tokens")]
    #[getter]
    fn source_tokens<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyBytes>>> {
        Ok(self.0.host("source_tokens")?.source_tokens().map(|tokens| words(py, &tokens)))
    }

    #[doc = stub!("MoeByTokenRoutes.words")]
    #[getter]
    fn words<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        let bytes: Vec<u8> =
            self.0.host("words")?.to_words().iter().flat_map(|word| word.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    #[doc = stub!("MoeByTokenRoutes.keep_sources_in")]
    fn keep_sources_in(&self, sources: &Bound<'_, PyAny>) -> Result<()> {
        let sources = Array::write(sources, "sources")?;
        // SAFETY: the caller keeps the array as long as the routes.
        let view = unsafe { sources.view_mut() }?;
        let device = view.as_view().device();
        // SAFETY: as above.
        Ok(unsafe { self.0.cuda("keep_sources_in")?.keep_sources_in(view, device) }?)
    }
}
