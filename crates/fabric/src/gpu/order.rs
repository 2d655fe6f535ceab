//! The order of calls on several streams.

use std::cell::{Cell, RefCell};

use antiphon_device::cuda::{Context, CudaError, Event, StreamRef};

use super::used::Used;
use crate::FabricError;

/// Makes a call come after the one before it, on whatever stream that was: calls that run at once would take each other's slots.
///
/// Calls that run are one *chain*, and the calls of each capture are another. A chain orders its own calls only: a graph cannot wait for
/// what is outside of it, and what runs cannot wait for a graph that has not been launched. The program orders the launches of a graph
/// behind other calls, as it does with all that the graph uses; kernels find launches that overlap a call (slots.cuh says how).
///
/// As long as no stream is captured and calls come on one stream, this is a comparison. When the stream changes, the new one waits
/// for an event behind the call before.
pub(super) struct Order {
    context: Context,
    /// The stream of the call before that runs.
    last: RefCell<Option<Used>>,
    /// Its number; 0 for none.
    last_id: Cell<u64>,
    /// Stands behind the call before that runs, where `is_recorded`; `last` is none then.
    passed: Event,
    is_recorded: Cell<bool>,
    /// Those that are not known to have ended.
    captures: RefCell<Vec<Captured>>,
    has_captures: Cell<bool>,
    /// For the chains of captures, whose uses of it are over at once.
    within: Event,
    /// Multiprocessors that the kernels of the stream that was entered last may use.
    multiprocessors: Cell<u32>,
}

/// The chain of a capture: its number, and the stream of its last call.
struct Captured {
    number: u64,
    last: Used,
}

impl Order {
    pub(super) fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self {
            context: context.clone(),
            last: RefCell::new(None),
            last_id: Cell::new(0),
            passed: Event::new(context)?,
            is_recorded: Cell::new(false),
            captures: RefCell::default(),
            has_captures: Cell::new(false),
            within: Event::new(context)?,
            multiprocessors: Cell::new(context.multiprocessors()?),
        })
    }

    /// Whether [`enter`](Self::enter) would order a call on `stream` behind the one before, so that it can be refused before anything
    /// changes.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub(super) fn check(&self, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        match self.last_id.get() == id {
            true => Ok(()),
            false => self.check_last(stream, id),
        }
    }

    #[cold]
    fn check_last(&self, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        match &*self.last.borrow() {
            Some(last)
                if last.id != id && stream.capture()?.is_none() && last.capture(&self.context)?.is_some() =>
            {
                Err(FabricError::invalid(
                    "the stream of the call before is being captured, so this call, on another stream, cannot be \
                     ordered behind it: make it before that capture begins, or after it has ended",
                ))
            }
            _ => Ok(()),
        }
    }

    /// Makes what follows on `stream` come after the call before of its chain. `id` is the stream's.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] where the stream of the call before is being captured, so that nothing can be put behind
    /// that call: nothing has changed then. [`FabricError::Device`].
    #[inline]
    pub(super) fn enter(&self, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        match self.last_id.get() == id && !self.has_captures.get() {
            true => Ok(()),
            false => self.follow(stream, id),
        }
    }

    /// How many multiprocessors the kernels of the stream that was entered last may use.
    #[inline]
    pub(super) fn multiprocessors(&self) -> u32 {
        self.multiprocessors.get()
    }

    #[cold]
    fn follow(&self, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        self.forget_what_ended()?;
        match stream.capture()? {
            None => self.follow_running(stream, id)?,
            Some(number) => self.follow_captured(number, stream, id)?,
        }
        self.multiprocessors.set(stream.multiprocessors()?);
        Ok(())
    }

    fn follow_running(&self, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        self.check_last(stream, id)?;
        let mut last = self.last.borrow_mut();
        match &*last {
            Some(last) if last.id == id => return Ok(()),
            Some(last) => {
                last.record(&self.context, &self.passed)?;
                stream.wait(&self.passed)?;
            }
            None if self.is_recorded.get() => stream.wait(&self.passed)?,
            None => {}
        }
        self.is_recorded.set(false);
        self.last_id.set(id);
        *last = Some(Used::new(stream, id));
        Ok(())
    }

    fn follow_captured(&self, number: u64, stream: StreamRef<'_>, id: u64) -> Result<(), FabricError> {
        let mut captures = self.captures.borrow_mut();
        let known = captures.iter_mut().find(|captured| captured.number == number);
        if let Some(Captured { last: before, .. }) = &known
            && before.id != id
        {
            before.record(&self.context, &self.within)?;
            stream.wait(&self.within)?;
        }
        let last = Used::new(stream, id);
        match known {
            Some(captured) => captured.last = last,
            None => {
                self.leave_stream_of_last()?;
                captures.push(Captured { number, last });
            }
        }
        self.has_captures.set(true);
        Ok(())
    }

    /// The next call that runs needs an event, and not the stream of the call before, whose owner may drop it now or capture it.
    fn leave_stream_of_last(&self) -> Result<(), FabricError> {
        let mut last = self.last.borrow_mut();
        if let Some(running) = &*last
            && running.can_be_recorded(&self.context)?
        {
            running.record(&self.context, &self.passed)?;
            self.is_recorded.set(true);
            self.last_id.set(0);
            *last = None;
        }
        Ok(())
    }

    /// Drops the chains of captures that have ended.
    fn forget_what_ended(&self) -> Result<(), FabricError> {
        let mut captures = self.captures.borrow_mut();
        let mut index = 0;
        while let Some(Captured { number, last }) = captures.get(index) {
            match last.capture(&self.context)? == Some(*number) {
                true => index += 1,
                false => drop(captures.swap_remove(index)),
            }
        }
        self.has_captures.set(!captures.is_empty());
        Ok(())
    }
}
