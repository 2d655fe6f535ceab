//! Messages between two ranks: waited for, started, or in a stream of a GPU.

use antiphon::{fabric::Source, session::Order};
use pyo3::{
    exceptions::{PyNotImplementedError, PyValueError},
    prelude::*,
};

use super::{Communicator, refused, run::not_on_cuda};
use crate::{
    arguments::{Count, Operands, Tag, overlap, same_device},
    error::Result,
    handle::Handle,
    interrupt,
    operand::{Operand, Usage, refuse_gradient},
    stream::RawStream,
};

#[pymethods]
impl Communicator {
    #[doc = stub!("Communicator.send")]
    #[pyo3(signature = (x, to, *, tag = 0, stream = None))]
    fn send(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        to: Count,
        tag: i64,
        stream: Option<RawStream>,
    ) -> Result<()> {
        refuse_gradient(x, "send")?;
        let operand = Operand::import(x, "the input", Usage::Call(stream))?;
        self.exchange(py, Some((operand, to.0)), None, Tag::try_from(tag)?, stream)
    }

    #[doc = stub!("Communicator.recv")]
    #[pyo3(signature = (out, source, *, tag = 0, stream = None))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        out: Bound<'py, PyAny>,
        source: Count,
        tag: i64,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        refuse_gradient(&out, "recv")?;
        let operand = Operand::import_output(&out, "the output", Usage::Call(stream))?;
        self.exchange(py, None, Some((operand, source.0)), Tag::try_from(tag)?, stream)?;
        Ok(out)
    }

    #[doc = stub!("Communicator.recv_any")]
    #[pyo3(signature = (out, *, tag = 0))]
    fn recv_any(&self, py: Python<'_>, out: &Bound<'_, PyAny>, tag: i64) -> Result<usize> {
        self.receive(py, out, Source::Any, Tag::try_from(tag)?)
    }

    #[doc = stub!("Communicator.send_recv")]
    #[pyo3(signature = (x, to, out, source, *, stream = None))]
    fn send_recv<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        to: Count,
        out: Bound<'py, PyAny>,
        source: Count,
        stream: Option<RawStream>,
    ) -> Result<Bound<'py, PyAny>> {
        [x, &out].into_iter().try_for_each(|array| refuse_gradient(array, "send_recv"))?;
        let read = Operand::import(x, "the input", Usage::Call(stream))?;
        let write = Operand::import_output(&out, "the output", Usage::Call(stream))?;
        if overlap(&read.tensor, &write.tensor) {
            return Err(PyValueError::new_err("input and output overlap").into());
        }
        self.exchange(py, Some((read, to.0)), Some((write, source.0)), Tag(0), stream)?;
        Ok(out)
    }

    #[doc = stub!("Communicator.start_send")]
    #[pyo3(signature = (x, to, *, tag = 0))]
    fn start_send(&self, py: Python<'_>, x: &Bound<'_, PyAny>, to: Count, tag: i64) -> Result<Handle> {
        let tag = Tag::try_from(tag)?;
        refuse_gradient(x, "start_send")?;
        let operand = Operand::import(x, "the input", Usage::Started)?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        if let Some(device) = tensor.device.cuda_ordinal() {
            untagged(tag, device)?;
            let (stream, message) = (operand.stream.unwrap_or(0), (tensor, to.0));
            let started = interrupt::detached(py, || {
                // SAFETY: the operand was made to last as long as it lives, and what is started keeps it.
                unsafe { self.gpus.start_send(device, stream, message, [Some(operand), None]) }
            })?;
            return Ok(Handle::on_cuda("send", started, None));
        }
        // Detached, as no lock is taken while attached that others hold while they attach.
        let pending = py.detach(|| {
            // SAFETY: the operand is the owner.
            unsafe {
                let view = tensor.view().map_err(refused)?;
                queue.messenger().start_send::<Operands>(view, [Some(operand), None], to.0, tag.0)
            }
        })?;
        Ok(Handle::new("send", pending, None))
    }

    #[doc = stub!("Communicator.start_recv")]
    #[pyo3(signature = (out, source, *, tag = 0))]
    fn start_recv(
        &self,
        py: Python<'_>,
        out: Bound<'_, PyAny>,
        source: Option<Count>,
        tag: i64,
    ) -> Result<Handle> {
        let tag = Tag::try_from(tag)?;
        refuse_gradient(&out, "start_recv")?;
        let operand = Operand::import_output(&out, "the output", Usage::Started)?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        if let Some(device) = tensor.device.cuda_ordinal() {
            untagged(tag, device)?;
            let Some(source) = source else { return Err(not_on_cuda("start_recv from any rank", device)) };
            let (stream, message) = (operand.stream.unwrap_or(0), (tensor, source.0));
            let started = interrupt::detached(py, || {
                // SAFETY: as in `start_send`.
                unsafe { self.gpus.start_recv(device, stream, message, [None, Some(operand)]) }
            })?;
            return Ok(Handle::on_cuda("recv", started, Some(out)));
        }
        let source = source.map_or(Source::Any, |rank| Source::Rank(rank.0));
        let pending = py.detach(|| {
            // SAFETY: the operand is the owner.
            unsafe {
                let view = tensor.view_mut().map_err(refused)?;
                queue.messenger().start_recv::<Operands>(view, [None, Some(operand)], source, tag.0)
            }
        })?;
        Ok(Handle::new("recv", pending, Some(out)))
    }
}

impl Communicator {
    /// Receives a message; returns the rank that sent it.
    fn receive(&self, py: Python<'_>, out: &Bound<'_, PyAny>, source: Source, tag: Tag) -> Result<usize> {
        refuse_gradient(out, "recv_any")?;
        let operand = Operand::import(out, "the output", Usage::Call(None))?
            .on_host("recv_any")?
            .written(out, "the output")?;
        let (queue, tensor) = (self.queue()?, operand.tensor);
        Ok(interrupt::detached(py, || {
            // SAFETY: the operand and the caller's reference live until this returns.
            let view = unsafe { tensor.view_mut() }.map_err(refused)?;
            queue.messenger().recv_with_tag(view, source, tag.0)
        })?)
    }

    /// Sends a message to a rank, receives one from a rank, or does both.
    fn exchange(
        &self,
        py: Python<'_>,
        sent: Option<(Operand, usize)>,
        received: Option<(Operand, usize)>,
        tag: Tag,
        stream: Option<RawStream>,
    ) -> Result<()> {
        let queue = self.queue()?;
        let [read, write] =
            [&sent, &received].map(|side| side.as_ref().map(|(operand, peer)| (operand.tensor, *peer)));
        let [from, to] = [&sent, &received].map(|side| side.as_ref().map(|(operand, _)| operand));
        if let (Some(from), Some(to)) = (from, to) {
            same_device(&from.tensor, &to.tensor)?;
        }
        let operand = from.or(to);
        let device = operand.and_then(|operand| operand.tensor.device.cuda_ordinal());
        if let Some(device) = device {
            untagged(tag, device)?;
            let stream = stream.or_else(|| operand.and_then(|operand| operand.stream)).unwrap_or(0);
            // SAFETY: as in `run`.
            interrupt::detached(py, || unsafe { self.gpus.exchange(device, stream, read, write) })?;
            let orders = [read.map(|_| Order::Sends), write.map(|_| Order::Receives)];
            let orders: Vec<Order> = orders.into_iter().flatten().collect();
            return Ok(self.gpus.keep_stream(py, stream, &orders)?);
        }
        if let Some(stream) = stream {
            let text = format!("a message: host memory has no stream {stream}");
            return Err(PyValueError::new_err(text).into());
        }
        interrupt::detached(py, || {
            let messenger = queue.messenger();
            // SAFETY: the operands and the caller's references live until this returns.
            unsafe {
                let read = read.map(|(tensor, to)| Ok((tensor.view()?, to))).transpose();
                let write = write.map(|(tensor, from)| Ok((tensor.view_mut()?, from))).transpose();
                match (read.map_err(refused)?, write.map_err(refused)?) {
                    (Some((read, to)), Some((write, from))) => messenger.send_recv(read, to, write, from),
                    (Some((read, to)), None) => messenger.send_with_tag(read, to, tag.0),
                    (None, Some((write, from))) => {
                        messenger.recv_with_tag(write, Source::Rank(from), tag.0).map(drop)
                    }
                    (None, None) => Ok(()),
                }
            }
        })?;
        Ok(())
    }
}

/// Refuses a tag for messages between GPUs.
fn untagged(Tag(tag): Tag, device: u32) -> PyResult<()> {
    match tag {
        0 => Ok(()),
        _ => Err(PyNotImplementedError::new_err(format!(
            "a message with tag {tag} on cuda:{device}: messages between GPUs have no tags"
        ))),
    }
}
