//! Sending to and receiving from one rank.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use antiphon_tensor::{Element, TensorView, TensorViewMut};

use super::{Communicator, Pending};
use crate::{
    FabricError, Operation, Signature,
    endpoint::{Endpoint, Presence},
    signal::{
        channel::{Buffer, Messages, Route},
        matching::Source,
    },
};

/// The messages of a communicator, for any thread at any time: they have an order of their own, from rank to rank.
///
/// It takes part as long as it lives, as its [`Communicator`] does.
#[derive(Clone)]
pub struct Messenger {
    pub(super) presence: Arc<Presence>,
    pub(super) messages: Arc<Messages>,
}

impl std::fmt::Debug for Messenger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Endpoint { rank, world_size, .. } = self.endpoint();
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
    pub(super) fn new(presence: Presence) -> Self {
        let messages = Arc::new(Messages::new(presence.0.clone()));
        Self { presence: Arc::new(presence), messages }
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.presence.0
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.endpoint().rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.endpoint().world_size
    }

    /// How long a call waits for a peer before it fails.
    pub fn timeout(&self) -> Duration {
        self.endpoint().timeout()
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
        self.send_with_tag(tensor, to, 0)
    }

    /// Sends a tensor that only a receive with the same tag gets; without a tag is with tag 0.
    ///
    /// Messages to one rank with one tag arrive in the order in which they were sent. While a rank awaits a message with one
    /// tag, it keeps those with others that come before in memory of its own.
    ///
    /// ```
    /// use antiphon_fabric::{FabricError, LocalWorld};
    ///
    /// LocalWorld::run(2, |comm| {
    ///     if comm.rank() == 0 {
    ///         comm.send_with_tag(&[1i32], 1, 10)?;
    ///         return comm.send_with_tag(&[2i32], 1, 20);
    ///     }
    ///     let mut received = [0i32; 2];
    ///     let (first, second) = received.split_at_mut(1);
    ///     comm.recv_with_tag(&mut *second, 0, 20)?;
    ///     comm.recv_with_tag(&mut *first, 0, 10)?;
    ///     assert_eq!(received, [1, 2]);
    ///     Ok::<_, FabricError>(())
    /// });
    /// ```
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_with_tag<'a>(
        &self,
        tensor: impl Into<TensorView<'a>>,
        to: usize,
        tag: u32,
    ) -> Result<(), FabricError> {
        let tensor = tensor.into();
        let buffer = readable(&tensor)?;
        self.endpoint().check_rank(to, "destination")?;
        let messages = &self.messages;
        // SAFETY: the tensor is borrowed until `wait` returns, which leaves no transfer behind.
        let ticket = unsafe { messages.start(Route::To(to), buffer, message(&tensor, tag), None) };
        messages.wait(&ticket)
    }

    /// Receives a tensor from a rank.
    ///
    /// # Errors
    /// As [`send`](Self::send); [`Mismatch`](FabricError::Mismatch) when the other rank sent another dtype or number
    /// of elements.
    pub fn recv<'a>(&self, tensor: impl Into<TensorViewMut<'a>>, from: usize) -> Result<(), FabricError> {
        self.recv_with_tag(tensor, from, 0).map(drop)
    }

    /// Receives a tensor that was sent with this tag, from a rank or from [any](Source::Any), and returns the rank that sent
    /// it. Of the receives that a message fits, the one that was asked for first gets it.
    ///
    /// # Errors
    /// As [`recv`](Self::recv). From any rank: [`PeerLost`](FabricError::PeerLost) when the process of a rank ends, or when all
    /// others have left.
    pub fn recv_with_tag<'a>(
        &self,
        tensor: impl Into<TensorViewMut<'a>>,
        from: impl Into<Source>,
        tag: u32,
    ) -> Result<usize, FabricError> {
        let mut tensor = tensor.into();
        let buffer = writable(&mut tensor)?;
        let source = self.check_source(from.into())?;
        let signature = message(&tensor.as_view(), tag);
        let messages = &self.messages;
        // SAFETY: as in `send_with_tag`.
        let ticket = unsafe { messages.start(Route::From(source), buffer, signature, None) };
        messages.wait(&ticket)?;
        Ok(ticket.origin().expect("the sender of a message that has arrived is known"))
    }

    fn check_source(&self, source: Source) -> Result<Source, FabricError> {
        if let Source::Rank(rank) = source {
            self.endpoint().check_rank(rank, "source")?;
        }
        Ok(source)
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
        let (read, write) = (readable(&send)?, writable(&mut receive)?);
        self.endpoint().check_rank(to, "destination")?;
        self.endpoint().check_rank(from, "source")?;
        let (sends, receives) = (message(&send, 0), message(&receive.as_view(), 0));
        let messages = &self.messages;
        // SAFETY: both tensors are borrowed until both waits have returned; a failed one leaves no transfer behind,
        // and the other is cancelled then.
        unsafe {
            let outgoing = messages.start(Route::To(to), read, sends, None);
            let incoming = messages.start(Route::From(from.into()), write, receives, None);
            messages.wait(&incoming).inspect_err(|_| messages.cancel(&outgoing))?;
            messages.wait(&outgoing)
        }
    }

    /// Waits until all that was [started](Self::start_send) is sent.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn flush(&self) -> Result<(), FabricError> {
        self.messages.flush()
    }

    /// Begins to send a tensor, [with a tag](Self::send_with_tag), and keeps `owner`, which [`Pending::wait`] returns. The message
    /// advances by itself.
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
        tag: u32,
    ) -> Result<Pending<K>, FabricError> {
        let buffer = readable(&tensor)?;
        self.endpoint().check_rank(to, "destination")?;
        // SAFETY: passed on.
        unsafe { self.start(Route::To(to), buffer, message(&tensor, tag), owner) }
    }

    /// Begins to receive into a tensor, [with a tag](Self::recv_with_tag) from a rank or from any, and keeps `owner`, which
    /// [`Pending::wait`] returns. [`Pending::source`] is the rank that sent the message.
    ///
    /// # Errors
    /// As [`start_send`](Self::start_send).
    ///
    /// # Safety
    /// The tensor's memory stays valid, and is not accessed otherwise, as long as `owner` lives.
    pub unsafe fn start_recv<K: Send + 'static>(
        &self,
        mut tensor: TensorViewMut<'_>,
        owner: K,
        from: impl Into<Source>,
        tag: u32,
    ) -> Result<Pending<K>, FabricError> {
        let buffer = writable(&mut tensor)?;
        let source = self.check_source(from.into())?;
        // SAFETY: passed on.
        unsafe { self.start(Route::From(source), buffer, message(&tensor.as_view(), tag), owner) }
    }

    /// # Safety
    /// The buffer stays valid, and is not accessed otherwise (a sent buffer: not written), as long as `owner` lives.
    unsafe fn start<K: Send + 'static>(
        &self,
        route: Route,
        buffer: Buffer,
        signature: Signature,
        owner: K,
    ) -> Result<Pending<K>, FabricError> {
        self.endpoint().health.check_usable()?;
        let (sender, handover) = mpsc::sync_channel(1);
        let keep = Box::new(Kept(Some(owner), sender));
        let messages = &self.messages;
        // SAFETY: the transfer owns what keeps the memory valid.
        let ticket = unsafe { messages.start(route, buffer, signature, Some(keep)) };
        messages.progress();
        messages.pump();
        Ok(Pending::transfer(messages.clone(), ticket, handover))
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

    /// Sends a tensor with a tag; see [`Messenger::send_with_tag`].
    ///
    /// # Errors
    /// As [`Messenger::send`].
    pub fn send_with_tag<'a>(
        &self,
        tensor: impl Into<TensorView<'a>>,
        to: usize,
        tag: u32,
    ) -> Result<(), FabricError> {
        self.messenger.send_with_tag(tensor, to, tag)
    }

    /// Receives a tensor that was sent with a tag, from a rank or from any; see [`Messenger::recv_with_tag`].
    ///
    /// # Errors
    /// As [`Messenger::recv_with_tag`].
    pub fn recv_with_tag<'a>(
        &self,
        tensor: impl Into<TensorViewMut<'a>>,
        from: impl Into<Source>,
        tag: u32,
    ) -> Result<usize, FabricError> {
        self.messenger.recv_with_tag(tensor, from, tag)
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

    /// Begins to send a buffer, which [`Pending::wait`] returns. The message advances by itself.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] for a rank that does not exist; [`Failed`](FabricError::Failed).
    pub fn start_send<T: Element>(&self, buffer: Vec<T>, to: usize) -> Result<Pending<Vec<T>>, FabricError> {
        let elements: *const [T] = &*buffer;
        // SAFETY: the vector is the owner, and its heap memory does not move with it.
        unsafe { self.messenger.start_send(TensorView::from(&*elements), buffer, to, 0) }
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
        unsafe { self.messenger.start_recv(TensorViewMut::from(&mut *elements), buffer, from, 0) }
    }
}

/// The memory of a tensor to send, which must be contiguous.
fn readable(tensor: &TensorView<'_>) -> Result<Buffer, FabricError> {
    let bytes = tensor.as_bytes().map_err(|e| FabricError::invalid(e.to_string()))?;
    Ok(Buffer { data: bytes.as_ptr().cast_mut(), len: bytes.len() })
}

/// The memory of a tensor to receive into, which must be contiguous.
fn writable(tensor: &mut TensorViewMut<'_>) -> Result<Buffer, FabricError> {
    readable(&tensor.as_view())?;
    Ok(Buffer { data: tensor.as_mut_ptr(), len: tensor.num_bytes() })
}

fn message(tensor: &TensorView<'_>, tag: u32) -> Signature {
    Signature {
        dtype: Some(tensor.dtype()),
        count: tensor.numel() as u64,
        detail: tag,
        ..Signature::new(Operation::Message)
    }
}
