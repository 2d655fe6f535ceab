//! The order of calls on several streams.

use std::cell::{Cell, RefCell};

use antiphon_device::cuda::{Context, CudaError, Event, Stream, StreamRef};

/// Makes a call come after the one before it, on whatever stream that was: calls that run at once would take each other's slots.
///
/// As long as calls come on one stream this is a comparison. When the stream changes, the new one waits for an event behind the
/// call before. A graph cannot wait for what is outside of it, so calls that are captured are ordered among themselves only: the
/// program that launches the graph orders it behind other calls, as it does with all that the graph uses.
pub(super) struct Order {
    context: Context,
    /// The stream of the call before.
    last: Cell<Option<usize>>,
    /// The stream, if this process made it: it is kept until the next call. Otherwise its owner keeps it.
    kept: RefCell<Option<Stream>>,
    /// Multiprocessors that the kernels of that stream may use.
    multiprocessors: Cell<u32>,
    passed: Event,
}

impl Order {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self {
            context: context.clone(),
            last: Cell::new(None),
            kept: RefCell::new(None),
            multiprocessors: Cell::new(context.multiprocessors()?),
            passed: Event::new(context)?,
        })
    }

    /// Makes what follows on `stream` come after the call before.
    #[inline]
    pub(super) fn enter(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        match self.last.get() == Some(stream.as_raw()) {
            true => Ok(()),
            false => self.follow(stream),
        }
    }

    /// How many multiprocessors the kernels of the stream that was entered last may use.
    #[inline]
    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors.get()
    }

    #[cold]
    fn follow(&self, stream: StreamRef<'_>) -> Result<(), CudaError> {
        if let Some(last) = self.last.get() {
            // SAFETY: the stream is kept here, or by a caller who keeps a framework's stream until the next call.
            let last = unsafe { self.context.borrow_stream(last) };
            if last.capture()? == stream.capture()? {
                self.passed.record(last)?;
                stream.wait(&self.passed)?;
            }
        }
        self.multiprocessors.set(stream.multiprocessors()?);
        self.last.set(Some(stream.as_raw()));
        *self.kept.borrow_mut() = stream.owner().cloned();
        Ok(())
    }
}
