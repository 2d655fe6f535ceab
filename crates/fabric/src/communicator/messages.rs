//! Sending to and receiving from one rank.

use std::sync::mpsc;

use antiphon_tensor::{Element, TensorView, TensorViewMut};

use super::{Communicator, Pending};
use crate::{FabricError, Operation, Signature};

/// Hands a buffer back when the transfer that kept it is dropped.
struct Kept<T: Send>(Option<T>, mpsc::SyncSender<T>);

impl<T: Send> Drop for Kept<T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            let _ = self.1.try_send(buffer);
        }
    }
}

impl Communicator {
    /// Sends a tensor to a rank, which must [`recv`](Self::recv) one of the same dtype and number of elements.
    ///
    /// Messages to one rank arrive in the order in which they were sent. The first
    /// few (8, of up to 32 KiB each) are buffered: the call returns before the other rank asks for them.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for a rank that does not exist or a strided tensor;
    /// [`PeerLost`](FabricError::PeerLost), [`Timeout`](FabricError::Timeout), [`Aborted`](FabricError::Aborted)
    /// (the receiver expected something else), [`Failed`](FabricError::Failed).
    pub fn send<'a>(&self, tensor: impl Into<TensorView<'a>>, to: usize) -> Result<(), FabricError> {
        let tensor = tensor.into();
        let bytes = contiguous(&tensor)?;
        self.check_rank(to, "destination")?;
        let signature = message(&tensor);
        let messages = &self.shared.messages;
        // SAFETY: the tensor is borrowed until `wait` returns, which leaves no transfer behind.
        let ticket = unsafe { messages.start_send(to, bytes.as_ptr(), bytes.len(), signature, None) };
        messages.wait(&self.shared, &ticket)
    }

    /// Receives a tensor from a rank.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Mismatch`](FabricError::Mismatch) when the other rank sent another dtype or number
    /// of elements.
    pub fn recv<'a>(&self, tensor: impl Into<TensorViewMut<'a>>, from: usize) -> Result<(), FabricError> {
        let mut tensor = tensor.into();
        contiguous(&tensor.as_view())?;
        self.check_rank(from, "source")?;
        let signature = message(&tensor.as_view());
        let (buffer, len) = (tensor.as_mut_ptr(), tensor.num_bytes());
        let messages = &self.shared.messages;
        // SAFETY: as in `send`.
        let ticket = unsafe { messages.start_receive(from, buffer, len, signature, None) };
        messages.wait(&self.shared, &ticket)
    }

    /// Sends one tensor and receives another at the same time, which rings and neighbour exchanges of any size need.
    ///
    /// # Errors
    /// As [`send`](Self::send) and [`recv`](Self::recv).
    pub fn send_recv<'a, 'b>(
        &self,
        send: impl Into<TensorView<'a>>,
        to: usize,
        receive: impl Into<TensorViewMut<'b>>,
        from: usize,
    ) -> Result<(), FabricError> {
        let (send, mut receive) = (send.into(), receive.into());
        let bytes = contiguous(&send)?;
        contiguous(&receive.as_view())?;
        self.check_rank(to, "destination")?;
        self.check_rank(from, "source")?;
        let (sends, receives) = (message(&send), message(&receive.as_view()));
        let (buffer, len) = (receive.as_mut_ptr(), receive.num_bytes());
        let messages = &self.shared.messages;
        // SAFETY: both tensors are borrowed until both waits have returned; a failed one leaves no transfer behind,
        // and the other is cancelled then.
        unsafe {
            let outgoing = messages.start_send(to, bytes.as_ptr(), bytes.len(), sends, None);
            let incoming = messages.start_receive(from, buffer, len, receives, None);
            messages.wait(&self.shared, &incoming).inspect_err(|_| messages.cancel(&outgoing))?;
            messages.wait(&self.shared, &outgoing)
        }
    }

    /// Begins to send a buffer, which comes back from [`Pending::wait`]. It goes on whenever this rank
    /// calls anything on this communicator that waits.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for a rank that does not exist; [`Failed`](FabricError::Failed).
    pub fn start_send<T: Element>(&self, buffer: Vec<T>, to: usize) -> Result<Pending<Vec<T>>, FabricError> {
        self.check_rank(to, "destination")?;
        self.shared.health.check_usable()?;
        let view = TensorView::from(&buffer);
        let (signature, data, len) = (message(&view), buffer.as_ptr().cast(), view.num_bytes());
        let (sender, handover) = mpsc::sync_channel(1);
        let keep = Box::new(Kept(Some(buffer), sender));
        // SAFETY: the transfer owns the vector, whose heap memory does not move with it.
        let ticket = unsafe { self.shared.messages.start_send(to, data, len, signature, Some(keep)) };
        self.shared.messages.progress(&self.shared);
        Ok(self.pending_transfer(ticket, handover))
    }

    /// Begins to receive into a buffer, which comes back, filled, from [`Pending::wait`].
    ///
    /// # Errors
    /// As [`start_send`](Self::start_send).
    pub fn start_recv<T: Element>(
        &self,
        mut buffer: Vec<T>,
        from: usize,
    ) -> Result<Pending<Vec<T>>, FabricError> {
        self.check_rank(from, "source")?;
        self.shared.health.check_usable()?;
        let view = TensorView::from(&buffer);
        let (signature, len) = (message(&view), view.num_bytes());
        let data = buffer.as_mut_ptr().cast();
        let (sender, handover) = mpsc::sync_channel(1);
        let keep = Box::new(Kept(Some(buffer), sender));
        // SAFETY: as in `start_send`.
        let ticket = unsafe { self.shared.messages.start_receive(from, data, len, signature, Some(keep)) };
        self.shared.messages.progress(&self.shared);
        Ok(self.pending_transfer(ticket, handover))
    }
}

fn contiguous<'t>(tensor: &'t TensorView<'_>) -> Result<&'t [u8], FabricError> {
    tensor.as_bytes().map_err(|e| FabricError::invalid(e.to_string()))
}

fn message(tensor: &TensorView<'_>) -> Signature {
    Signature {
        dtype: Some(tensor.dtype()),
        count: tensor.numel() as u64,
        ..Signature::new(Operation::Message)
    }
}
