//! Mixtures of experts: the calls to and from slots.

use std::{
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use antiphon::device::sync::Mutex;
use antiphon::{
    fabric::Queue,
    moe::{
        self, CombineFormat, MoeConfig, MoeError, ReceivedSlots, SlotCombine, SlotDispatch, SlotFormat,
        SlotRoutes,
        slots::{SlotLimits, cuda::CudaReceive},
    },
    prelude::{TensorView, TensorViewMut},
    session::{self, GpuStream, SessionError},
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use super::routes::lock;
use crate::{
    arguments::Given,
    array::{Array, check_apart},
    communicator::Communicator,
    error::Result,
    fork::Process,
    handle::{Handle, Unfinished, Work},
    interrupt,
    operand::Usage,
    stream::{on, stream_or_current},
};

#[doc = stub!("MoeSlots")]
#[pyclass(frozen, module = "antiphon", weakref)]
pub(crate) struct MoeSlots {
    engine: Engine,
    queue: Weak<Queue>,
    process: Process,
}

/// What makes the calls.
enum Engine {
    /// Absent when closed.
    Host(Arc<Mutex<Option<moe::Moe>>>),
    Cuda(session::MoeSlots),
}

#[doc = stub!("MoeSlotRoutes")]
#[pyclass(frozen, module = "antiphon")]
pub(crate) struct MoeSlotRoutes(Routes);

enum Routes {
    /// Absent until the dispatch is over.
    Host(Arc<OnceLock<SlotRoutes>>),
    Cuda(session::SlotRoutes),
}

/// The second half of a call on a GPU.
struct Receiving {
    gpu: session::MoeSlots,
    receive: CudaReceive,
    /// Keeps the memory until the second half is in a stream, in whose order libraries give memory back.
    _arrays: Vec<Array>,
}

impl Work for Receiving {
    fn wait_for(&mut self, _limit: Duration) -> bool {
        true // it is the stream that waits
    }

    fn is_over(&mut self) -> bool {
        false
    }

    fn finish(self: Box<Self>) -> Result<(), Unfinished> {
        match self.launch() {
            Ok(()) => Ok(()),
            // Nothing was launched: the hook may be called again.
            Err(error) => Err(Unfinished { error, refused: Some(self) }),
        }
    }
}

impl Receiving {
    fn launch(&self) -> Result<()> {
        let device = self.gpu.device();
        let stream = Python::attach(|py| stream_or_current(py, device, None))?;
        // SAFETY: the arrays live, and the stream is the library's, of the device.
        Ok(unsafe { self.gpu.receive(on(device, stream), &self.receive) }?)
    }
}

/// A call, its arrays, and whether it is only started.
struct Prepared<C> {
    call: C,
    arrays: Vec<Array>,
    starts: bool,
}

fn format_of(name: &str) -> Result<SlotFormat> {
    Ok(match name {
        "bf16" => SlotFormat::Bf16,
        "fp8" => SlotFormat::Fp8,
        "fp8_powers_of_two" => SlotFormat::Fp8PowersOfTwo,
        "fp8_packed" => SlotFormat::Fp8Packed,
        _ => {
            let text = format!("the format must be bf16, fp8, fp8_powers_of_two or fp8_packed, not {name:?}");
            return Err(PyValueError::new_err(text).into());
        }
    })
}

fn sent_format_of(name: &str) -> Result<CombineFormat> {
    Ok(match name {
        "bf16" => CombineFormat::Bf16,
        "logfmt" => CombineFormat::LogFmt,
        _ => {
            let text = format!("the format must be bf16 or logfmt, not {name:?}");
            return Err(PyValueError::new_err(text).into());
        }
    })
}

impl MoeSlots {
    fn queue(&self) -> Result<Arc<Queue>> {
        self.process.check(|| "MoeSlots".to_owned())?;
        Ok(self.queue.upgrade().ok_or_else(closed)?)
    }

    /// Makes a call on host memory in the order of the communicator's, or starts it.
    fn on_host<C: Send + 'static>(
        &self,
        py: Python<'_>,
        moe: &Arc<Mutex<Option<moe::Moe>>>,
        prepared: Prepared<C>,
        call: impl FnOnce(&mut moe::Moe, &antiphon::prelude::Communicator, C) -> Result<(), MoeError>
        + Send
        + 'static,
    ) -> Result<Option<Handle>> {
        let queue = self.queue()?;
        let Prepared { call: operands, arrays, starts } = prepared;
        let moe = moe.clone();
        let run = move |comm: &antiphon::prelude::Communicator| match &mut *lock(&moe) {
            Some(moe) => call(moe, comm, operands).map(|()| true),
            None => Ok(false),
        };
        if starts {
            let pending = queue.start(move |comm| run(comm).map(|_| arrays))?;
            return Ok(Some(Handle::new("dispatch_to_slots", pending, None)));
        }
        match interrupt::detached(py, || queue.run(run))? {
            true => Ok(None),
            false => Err(closed().into()),
        }
    }

    /// Makes a call in the current stream of a GPU, or its first half.
    fn on_cuda(
        &self,
        py: Python<'_>,
        gpu: &session::MoeSlots,
        arrays: Vec<Array>,
        call: impl FnOnce(&session::MoeSlots, GpuStream<'_>) -> Result<Option<CudaReceive>, SessionError> + Send,
    ) -> Result<Option<Handle>> {
        let _queue = self.queue()?;
        let (device, stream) = (gpu.device(), stream_or_current(py, gpu.device(), None)?);
        // SAFETY: the stream is that of the library whose tensors are used, and so of the device.
        let receive = interrupt::detached(py, || call(gpu, unsafe { on(device, stream) }))?;
        let half = receive.map(|receive| Receiving { gpu: gpu.clone(), receive, _arrays: arrays });
        Ok(half.map(|half| Handle::of("dispatch_to_slots", Box::new(half), None)))
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("this MoeSlots or its communicator is closed")
}

const COMBINE: &str = "combine_from_slots";

/// What a function makes of each element.
fn try_each<T, U, E, const N: usize>(
    array: [T; N],
    function: impl FnMut(T) -> Result<U, E>,
) -> Result<[U; N], E> {
    let made = array.into_iter().map(function).collect::<Result<Vec<_>, _>>()?;
    Ok(made.try_into().unwrap_or_else(|_| unreachable!("as many as there were")))
}

/// The arrays of a call: those that it reads, and those that it writes, of which some may be absent.
struct Arrays<const READ: usize, const WRITTEN: usize> {
    call: &'static str,
    usage: Usage,
    read: [Array; READ],
    written: [Option<Array>; WRITTEN],
}

impl<const READ: usize> Arrays<READ, 0> {
    fn read(
        call: &'static str,
        starts: bool,
        arrays: [(&Bound<'_, PyAny>, &'static str); READ],
    ) -> Result<Self> {
        let usage = if starts { Usage::Started } else { Usage::Call(None) };
        let read = try_each(arrays, |(array, name)| Array::import(array, name, usage))?;
        Ok(Self { call, usage, read, written: [] })
    }

    /// Adds arrays that are apart from all others.
    fn write<const WRITTEN: usize>(
        self,
        arrays: [(Given<'_, '_>, &'static str); WRITTEN],
    ) -> Result<Arrays<READ, WRITTEN>> {
        let Self { call, usage, read, .. } = self;
        let import = |(array, name): (Given<'_, '_>, _)| {
            array.map(|array| Array::import(array, name, usage)?.written(array)).transpose()
        };
        let written = try_each(arrays, import)?;
        check_apart(call, &read.each_ref().map(Some), &written.each_ref().map(Option::as_ref))?;
        Ok(Arrays { call, usage, read, written })
    }
}

/// Views of arrays.
type Views<'a, const READ: usize, const WRITTEN: usize> =
    ([TensorView<'a>; READ], [Option<TensorViewMut<'a>>; WRITTEN]);

impl<const READ: usize, const WRITTEN: usize> Arrays<READ, WRITTEN> {
    /// # Safety
    /// For `'a` nobody else writes those that are read, or uses those that are written.
    unsafe fn views<'a>(&self) -> Result<Views<'a, READ, WRITTEN>> {
        // SAFETY: passed on; they are apart.
        let read = try_each(self.read.each_ref(), |array| unsafe { array.view() })?;
        // SAFETY: as above.
        let write = |array: &Array| unsafe { array.view_mut() };
        let written = try_each(self.written.each_ref(), |array| array.as_ref().map(write).transpose())?;
        Ok((read, written))
    }

    fn into_vec(self) -> Vec<Array> {
        self.read.into_iter().chain(self.written.into_iter().flatten()).collect()
    }
}

#[pymethods]
impl MoeSlots {
    #[new]
    #[pyo3(signature = (comm, *, max_tokens, hidden, num_experts, top_k, device = None))]
    fn new(
        py: Python<'_>,
        comm: &Communicator,
        max_tokens: usize,
        hidden: usize,
        num_experts: usize,
        top_k: usize,
        device: Option<u32>,
    ) -> Result<Self> {
        let queue = comm.queue()?;
        let most = SlotLimits { max_tokens, hidden, num_experts, top_k };
        let engine = match device {
            None => {
                let config = MoeConfig { slots: Some(most), ..MoeConfig::default() };
                let moe = interrupt::detached(py, || queue.run(|comm| moe::Moe::new(comm, config)))?;
                Engine::Host(Arc::new(Mutex::new(Some(moe))))
            }
            Some(device) => {
                let (stream, session) = (stream_or_current(py, device, None)?, comm.gpus().session());
                // SAFETY: the stream is one of the device.
                let make = || session.moe_slots(unsafe { on(device, stream) }, most);
                Engine::Cuda(interrupt::detached(py, make)?)
            }
        };
        Ok(Self { engine, queue: Arc::downgrade(&queue), process: Process::current() })
    }

    #[doc = stub!("MoeSlots.bytes")]
    #[staticmethod]
    #[pyo3(signature = (world_size, *, max_tokens, hidden, num_experts, top_k))]
    fn bytes(world_size: usize, max_tokens: usize, hidden: usize, num_experts: usize, top_k: usize) -> usize {
        SlotLimits { max_tokens, hidden, num_experts, top_k }.bytes(world_size)
    }

    #[doc = stub!("MoeSlots.check")]
    fn check(&self, py: Python<'_>) -> Result<()> {
        match &self.engine {
            Engine::Host(_) => Ok(()),
            Engine::Cuda(gpu) => Ok(py.detach(|| gpu.check())?),
        }
    }

    #[doc = stub!("MoeSlots.close")]
    fn close(&self, py: Python<'_>) -> Result<()> {
        let (Some(queue), true) = (self.queue.upgrade(), self.process.is_current()) else { return Ok(()) };
        let closed = interrupt::detached(py, || {
            queue.run(|comm| match &self.engine {
                Engine::Host(moe) => lock(moe).take().map_or(Ok(()), |moe| moe.close(comm)),
                Engine::Cuda(gpu) => {
                    gpu.close();
                    Ok(())
                }
            })
        });
        Ok(closed?)
    }

    #[doc = stub!("MoeSlots.dispatch")]
    #[pyo3(signature = (x, ids, received_x, *, format, max_tokens, num_experts, counts, source_tokens, layout_range, received_scales = None, statistics = None, waits = None, start = false))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names all but three")]
    fn dispatch(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        received_x: &Bound<'_, PyAny>,
        format: &str,
        max_tokens: usize,
        num_experts: usize,
        counts: &Bound<'_, PyAny>,
        source_tokens: &Bound<'_, PyAny>,
        layout_range: &Bound<'_, PyAny>,
        received_scales: Given<'_, '_>,
        statistics: Given<'_, '_>,
        waits: Given<'_, '_>,
        start: bool,
    ) -> Result<(MoeSlotRoutes, Option<Handle>)> {
        let format = format_of(format)?;
        let arrays = Arrays::read("dispatch_to_slots", start, [(x, "x"), (ids, "ids")])?;
        let arrays = arrays.write([
            (Some(received_x), "received_x"),
            (Some(counts), "counts"),
            (Some(source_tokens), "source_tokens"),
            (Some(layout_range), "layout_range"),
            (received_scales, "received_scales"),
            (statistics, "statistics"),
            (waits, "waits"),
        ])?;
        // SAFETY: the arrays live until the call is over, or on a GPU until the stream has passed, as the caller's library sees to;
        // the written ones are apart from all others; that nobody else uses them meanwhile is the caller's to see to.
        let ([x, ids], [received_x, counts, source_tokens, layout_range, scales, statistics, waits]) =
            unsafe { arrays.views() }?;
        let present = |view: Option<_>| view.expect("it was given");
        let call = SlotDispatch {
            max_tokens,
            num_experts,
            format,
            x,
            ids,
            received: ReceivedSlots {
                x: present(received_x),
                scales,
                counts: present(counts),
                source_tokens: present(source_tokens),
                layout_range: present(layout_range),
                statistics,
                waits,
            },
        };
        let arrays = arrays.into_vec();
        let gpu = match &self.engine {
            Engine::Cuda(gpu) => gpu,
            Engine::Host(moe) => {
                let routes = Arc::new(OnceLock::new());
                let (prepared, made) = (Prepared { call, arrays, starts: start }, routes.clone());
                let pending = self.on_host(py, moe, prepared, move |moe, comm, call| {
                    let _ = made.set(moe.dispatch_to_slots(comm, call)?); // once, by this call
                    Ok(())
                })?;
                return Ok((MoeSlotRoutes(Routes::Host(routes)), pending));
            }
        };
        let mut routes = None;
        let pending = self.on_cuda(py, gpu, arrays, |gpu, stream| {
            // SAFETY: as above.
            let (made, receive) = unsafe {
                match start {
                    false => (gpu.dispatch(stream, &call)?, None),
                    true => gpu.send_dispatch(stream, &call).map(|(made, half)| (made, Some(half)))?,
                }
            };
            routes = Some(Routes::Cuda(made));
            Ok(receive)
        })?;
        Ok((MoeSlotRoutes(routes.ok_or_else(closed)?), pending))
    }

    #[doc = stub!("MoeSlots.combine")]
    #[pyo3(signature = (routes, rows, ids, weights, output, *, format = "bf16", waits = None, start = false))]
    #[expect(clippy::too_many_arguments, reason = "of which Python names the last three")]
    fn combine(
        &self,
        py: Python<'_>,
        routes: &MoeSlotRoutes,
        rows: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        format: &str,
        waits: Given<'_, '_>,
        start: bool,
    ) -> Result<Option<Handle>> {
        let format = sent_format_of(format)?;
        let reads = [(rows, "rows"), (ids, "ids"), (weights, "weights")];
        let arrays = Arrays::read("combine_from_slots", start, reads)?;
        let arrays = arrays.write([(Some(output), "output"), (waits, "waits")])?;
        // SAFETY: as in `dispatch`.
        let ([rows, ids, weights], [output, waits]) = unsafe { arrays.views() }?;
        let output = output.expect("it was given");
        let call = SlotCombine { format, rows, ids, weights, output, waits };
        let arrays = arrays.into_vec();
        match (&routes.0, &self.engine) {
            (Routes::Host(routes), Engine::Host(moe)) => {
                let routes = routes.clone();
                self.on_host(py, moe, Prepared { call, arrays, starts: start }, move |moe, comm, call| {
                    let missing =
                        MoeError::Routes { call: COMBINE, problem: "of a dispatch that has failed" };
                    moe.combine_from_slots(comm, routes.get().ok_or(missing)?, call)
                })
            }
            (Routes::Cuda(routes), Engine::Cuda(gpu)) => self.on_cuda(py, gpu, arrays, |gpu, stream| {
                // SAFETY: as in `dispatch`.
                unsafe {
                    match start {
                        false => gpu.combine(stream, routes, &call).map(|()| None),
                        true => gpu.send_combine(stream, routes, &call).map(Some),
                    }
                }
            }),
            _ => Err(MoeError::Routes { call: COMBINE, problem: "of another instance" }.into()),
        }
    }
}

#[pymethods]
impl MoeSlotRoutes {
    #[doc = stub!("MoeSlotRoutes.num_tokens")]
    #[getter]
    fn num_tokens(&self) -> Option<usize> {
        match &self.0 {
            Routes::Host(routes) => routes.get().map(SlotRoutes::num_tokens),
            Routes::Cuda(routes) => Some(routes.num_tokens()),
        }
    }
}
