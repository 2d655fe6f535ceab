//! Sending to and receiving from one rank.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use antiphon_tensor::{Element, TensorView, TensorViewMut};

use super::{Communicator, Pending, Presence, Shared};
use crate::{FabricError, Operation, Signature, signal::channel::Messages};

/// The messages of a communicator, for any thread at any time: they have an order of their own, from rank to rank.
///
/// It takes part as long as it lives, as its [`Communicator`] does.
#[derive(Clone)]
pub struct Messenger {
    pub(super) presence: Arc<Presence>,
}

impl std::fmt::Debug for Messenger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Shared { rank, world_size, .. } = self.shared();
        write!(f, "Messenger {{ rank: {rank}, world_size: {world_size} }}")
    }
}

/// Hands a buffer back when the transfer that kept it is dropped.
struct Kept<T: Send>(Option<T>, mpsc::SyncSender<T>);

impl<T: Send> Drop for Kept<T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.0.take() {
            let _ = self.1.try_send(buffer);
        }
    }
}

impl Messenger {
    pub(super) fn shared(&self) -> &Shared {
        &self.presence.0
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.shared().rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.shared().world_size
    }

    /// How long a call waits for a peer before it fails.
    pub fn timeout(&self) -> Duration {
        self.shared().timeout
    }

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
        self.shared().check_rank(to, "destination")?;
        let signature = message(&tensor);
        let messages = &self.shared().messages;
        // SAFETY: the tensor is borrowed until `wait` returns, which leaves no transfer behind.
        let ticket = unsafe { messages.start_send(to, bytes.as_ptr(), bytes.len(), signature, None) };
        messages.wait(self.shared(), &ticket)
    }

    /// Receives a tensor from a rank.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Mismatch`](FabricError::Mismatch) when the other rank sent another dtype or number
    /// of elements.
    pub fn recv<'a>(&self, tensor: impl Into<TensorViewMut<'a>>, from: usize) -> Result<(), FabricError> {
        let mut tensor = tensor.into();
        contiguous(&tensor.as_view())?;
        self.shared().check_rank(from, "source")?;
        let signature = message(&tensor.as_view());
        let (buffer, len) = (tensor.as_mut_ptr(), tensor.num_bytes());
        let messages = &self.shared().messages;
        // SAFETY: as in `send`.
        let ticket = unsafe { messages.start_receive(from, buffer, len, signature, None) };
        messages.wait(self.shared(), &ticket)
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
        self.shared().check_rank(to, "destination")?;
        self.shared().check_rank(from, "source")?;
        let (sends, receives) = (message(&send), message(&receive.as_view()));
        let (buffer, len) = (receive.as_mut_ptr(), receive.num_bytes());
        let messages = &self.shared().messages;
        // SAFETY: both tensors are borrowed until both waits have returned; a failed one leaves no transfer behind,
        // and the other is cancelled then.
        unsafe {
            let outgoing = messages.start_send(to, bytes.as_ptr(), bytes.len(), sends, None);
            let incoming = messages.start_receive(from, buffer, len, receives, None);
            messages.wait(self.shared(), &incoming).inspect_err(|_| messages.cancel(&outgoing))?;
            messages.wait(self.shared(), &outgoing)
        }
    }

    /// Waits until all that was [started](Self::start_send) is sent.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush(&self) -> Result<(), FabricError> {
        self.shared().messages.flush(self.shared())
    }

    /// Begins to send a tensor and keeps `owner`, which [`Pending::wait`] hands back. It goes on by itself.
    ///
    /// # Errors
    /// As [`send`](Self::send), for the arguments; [`Failed`](FabricError::Failed).
    ///
    /// # Safety
    /// The tensor's memory stays valid, and is not written, as long as `owner` lives.
    pub unsafe fn start_send<K: Send + 'static>(
        &self,
        tensor: TensorView<'_>,
        owner: K,
        to: usize,
    ) -> Result<Pending<K>, FabricError> {
        let bytes = contiguous(&tensor)?;
        self.shared().check_rank(to, "destination")?;
        self.shared().health.check_usable()?;
        let (sender, handover) = mpsc::sync_channel(1);
        let keep = Box::new(Kept(Some(owner), sender));
        let (data, len, messages) = (bytes.as_ptr(), bytes.len(), &self.shared().messages);
        // SAFETY: the transfer owns what keeps the memory valid.
        let ticket = unsafe { messages.start_send(to, data, len, message(&tensor), Some(keep)) };
        messages.progress(self.shared());
        Messages::pump(&self.presence.0);
        Ok(Pending::transfer(self.presence.0.clone(), ticket, handover))
    }

    /// Begins to receive into a tensor and keeps `owner`, which [`Pending::wait`] hands back.
    ///
    /// # Errors
    /// As [`start_send`](Self::start_send).
    ///
    /// # Safety
    /// The tensor's memory stays valid, and is not touched by anybody else, as long as `owner` lives.
    pub unsafe fn start_recv<K: Send + 'static>(
        &self,
        mut tensor: TensorViewMut<'_>,
        owner: K,
        from: usize,
    ) -> Result<Pending<K>, FabricError> {
        contiguous(&tensor.as_view())?;
        self.shared().check_rank(from, "source")?;
        self.shared().health.check_usable()?;
        let (sender, handover) = mpsc::sync_channel(1);
        let keep = Box::new(Kept(Some(owner), sender));
        let (signature, len) = (message(&tensor.as_view()), tensor.num_bytes());
        let messages = &self.shared().messages;
        // SAFETY: as in `start_send`.
        let ticket = unsafe { messages.start_receive(from, tensor.as_mut_ptr(), len, signature, Some(keep)) };
        messages.progress(self.shared());
        Messages::pump(&self.presence.0);
        Ok(Pending::transfer(self.presence.0.clone(), ticket, handover))
    }
}

impl Communicator {
    /// The messages of this communicator, for other threads.
    pub fn messenger(&self) -> &Messenger {
        &self.messenger
    }

    /// Sends a tensor to a rank; see [`Messenger::send`].
    ///
    /// # Errors
    /// As [`Messenger::send`].
    pub fn send<'a>(&self, tensor: impl Into<TensorView<'a>>, to: usize) -> Result<(), FabricError> {
        self.messenger.send(tensor, to)
    }

    /// Receives a tensor from a rank; see [`Messenger::recv`].
    ///
    /// # Errors
    /// As [`Messenger::recv`].
    pub fn recv<'a>(&self, tensor: impl Into<TensorViewMut<'a>>, from: usize) -> Result<(), FabricError> {
        self.messenger.recv(tensor, from)
    }

    /// Sends one tensor and receives another at the same time; see [`Messenger::send_recv`].
    ///
    /// # Errors
    /// As [`Messenger::send_recv`].
    pub fn send_recv<'a, 'b>(
        &self,
        send: impl Into<TensorView<'a>>,
        to: usize,
        receive: impl Into<TensorViewMut<'b>>,
        from: usize,
    ) -> Result<(), FabricError> {
        self.messenger.send_recv(send, to, receive, from)
    }

    /// Begins to send a buffer, which comes back from [`Pending::wait`]. It goes on by itself.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for a rank that does not exist; [`Failed`](FabricError::Failed).
    pub fn start_send<T: Element>(&self, buffer: Vec<T>, to: usize) -> Result<Pending<Vec<T>>, FabricError> {
        let elements: *const [T] = &*buffer;
        // SAFETY: the vector is the owner, and its heap memory does not move with it.
        unsafe { self.messenger.start_send(TensorView::from(&*elements), buffer, to) }
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
        let elements: *mut [T] = &mut *buffer;
        // SAFETY: as in `start_send`.
        unsafe { self.messenger.start_recv(TensorViewMut::from(&mut *elements), buffer, from) }
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
