//! One collective, put into a stream.

use antiphon::{
    prelude::{FabricError, TensorView, TensorViewMut},
    session::{SessionError, Tensors},
};

use super::{Gpus, Started};
use crate::{
    arguments::Operands,
    call::{Call, CallTensors, mixed::Mixed, refused},
    fused::Fused,
    operand::Tensor,
    stream::{RawStream, on},
};

type Outcome<T = ()> = std::result::Result<T, SessionError>;

impl Gpus {
    /// Puts a collective into a stream of a device. The first call on a device brings the ranks' devices together.
    ///
    /// # Safety
    /// The operands are of the device and valid, and no other code uses them, until the stream has passed the call;
    /// the stream is one of the device.
    pub(crate) unsafe fn run(&self, device: u32, stream: RawStream, call: &Call) -> Outcome {
        // SAFETY: passed on.
        unsafe {
            let stream = on(device, stream);
            let Some(mixed) = &call.mixed else {
                return self.session.call(stream, &call.what, views(call.tensors)?);
            };
            let (input, mut output) = halves(call, mixed)?;
            mixed.on_gpu()?.run(stream, mixed.call(), &input, &mut output)
        }
    }

    /// Puts the same operation on several tensors into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn run_list(&self, device: u32, stream: RawStream, calls: &[Call]) -> Outcome {
        // SAFETY: passed on.
        unsafe {
            let Some(first) = calls.first() else { return Ok(()) };
            let list = calls.iter().map(|call| views(call.tensors)).collect::<Outcome<_>>()?;
            self.session.call_list(on(device, stream), &first.what, list)
        }
    }

    /// Puts a message to a rank, one from a rank, or both, into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn exchange(
        &self,
        device: u32,
        stream: RawStream,
        sent: Option<(Tensor, usize)>,
        received: Option<(Tensor, usize)>,
    ) -> Outcome {
        let session = &self.session;
        // SAFETY: the caller answers for the memory, which only the device touches, and for the stream.
        unsafe {
            let stream = on(device, stream);
            let read = sent.map(|(tensor, _)| tensor.view()).transpose().map_err(refused)?;
            let mut write = received.map(|(tensor, _)| tensor.view_mut()).transpose().map_err(refused)?;
            match (read, sent, write.as_mut(), received) {
                (Some(read), Some((_, to)), Some(write), Some((_, from))) => {
                    session.send_recv(stream, (&read, to), (write, from))
                }
                (Some(read), Some((_, to)), ..) => session.send(stream, &read, to),
                (_, _, Some(write), Some((_, from))) => session.recv(stream, write, from),
                _ => Ok(()),
            }
        }
    }

    /// Puts a fused all-reduce into a stream of a device, as [`run`](Self::run).
    ///
    /// # Safety
    /// As [`run`](Self::run).
    pub(crate) unsafe fn run_fused(&self, device: u32, stream: RawStream, fused: &Fused) -> Outcome {
        // SAFETY: the caller answers for the memory, which only the device touches, and for the stream.
        unsafe { self.session.all_reduce_fused(on(device, stream), fused.bind()) }
    }

    /// Puts a collective into a stream of the session, which first waits for a stream of the caller's.
    ///
    /// # Safety
    /// As [`run`](Self::run), until what this returns has been waited for or dropped: the operands keep the memory.
    pub(crate) unsafe fn start(
        &self,
        device: u32,
        stream: RawStream,
        call: &Call,
        operands: Operands,
    ) -> Outcome<Started> {
        // SAFETY: passed on.
        unsafe {
            let stream = on(device, stream);
            let Some(mixed) = &call.mixed else {
                return self.session.start(stream, &call.what, views(call.tensors)?, operands);
            };
            let (input, mut output) = halves(call, mixed)?;
            mixed.on_gpu()?.start(stream, mixed.call(), &input, &mut output, operands)
        }
    }

    /// Puts a message to a rank into a stream of the session, as [`start`](Self::start).
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub(crate) unsafe fn start_send(
        &self,
        device: u32,
        stream: RawStream,
        (tensor, to): (Tensor, usize),
        operands: Operands,
    ) -> Outcome<Started> {
        // SAFETY: passed on.
        unsafe { self.session.start_send(on(device, stream), &tensor.view().map_err(refused)?, to, operands) }
    }

    /// Puts a message from a rank into a stream of the session, as [`start`](Self::start).
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub(crate) unsafe fn start_recv(
        &self,
        device: u32,
        stream: RawStream,
        (tensor, from): (Tensor, usize),
        operands: Operands,
    ) -> Outcome<Started> {
        // SAFETY: passed on.
        unsafe {
            self.session.start_recv(
                on(device, stream),
                &mut tensor.view_mut().map_err(refused)?,
                from,
                operands,
            )
        }
    }
}

/// The tensors of a call as the session takes them.
///
/// # Safety
/// For `'a` the memory is valid, and only the device touches it.
pub(crate) unsafe fn views<'a>(tensors: CallTensors) -> Outcome<Tensors<'a>> {
    // SAFETY: passed on.
    unsafe {
        Ok(match tensors {
            CallTensors::Nowhere => Tensors::Nowhere,
            CallTensors::Shared(buffer) => Tensors::InPlace(buffer.view_mut().map_err(refused)?),
            CallTensors::Apart(input, output) => Tensors::Apart(
                input.map(|tensor| tensor.view()).transpose().map_err(refused)?,
                output.map(|tensor| tensor.view_mut()).transpose().map_err(refused)?,
            ),
        })
    }
}

/// What a mixed collective reads and writes: in place, its own block of the row and the row.
///
/// # Safety
/// As [`views`].
unsafe fn halves<'a>(call: &Call, mixed: &Mixed) -> Outcome<(TensorView<'a>, TensorViewMut<'a>)> {
    let (input, output) = match call.tensors {
        CallTensors::Apart(Some(input), Some(output)) => (input, output),
        CallTensors::Shared(whole) => {
            let own = whole.piece(mixed.own_piece(&call.what, whole.count)?);
            if mixed.gathers() { (own, whole) } else { (whole, own) }
        }
        _ => return Err(FabricError::invalid(format!("{} lacks an operand", call.name())).into()),
    };
    // SAFETY: passed on.
    unsafe { Ok((input.view().map_err(refused)?, output.view_mut().map_err(refused)?)) }
}
