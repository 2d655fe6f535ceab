//! The room of a GPU for grids that wait.
//!
//! Blocks of a grid wait for blocks of other GPUs, and hold their place meanwhile. If more grids wait than find room, each may wait for
//! one that finds none, on all GPUs in turn. So the grids that are under way at once find room on every multiprocessor: each takes at
//! most a [share](Share) of it (of its threads, registers, shared memory and blocks), and the shares come to no more than the whole.
//!
//! The calls on one stream have a *place*, with the largest of their shares. A call on a stream without a place takes the places of
//! earlier calls, of whatever communicator and tenant, and comes behind them in stream order, until its share is free. So every call
//! waits for calls only that its program made before. All ranks make the calls of all communicators in one order. Consider the first
//! call in that order that is not over on all ranks: every call before it is over, so no rank waits before it, and each rank has a
//! place for it. It runs, and ends.
//!
//! A message is no call that all ranks make: it may wait for one that its peer makes after calls for which others wait here. So no call
//! comes behind a place with a message. Such a place is free once its stream is done; while it is not, and a call finds too little
//! room, that call is refused. The messages of one communicator, with a stream each for sends and receives, leave a place for calls
//! that all ranks make.
//!
//! Calls on one stream share a place, so a program with two streams, and others for messages, is never refused here.
//!
//! Calls that are captured have places in their graph. The room does not count launches of graphs: a program that launches graphs
//! beside other calls, of other tenants, has at most one of them under way beside at most one other grid.

use std::{
    process,
    sync::{Arc, PoisonError, Weak},
    thread::ThreadId,
};

use antiphon_device::{
    cuda::{Context, CudaError, Event, StreamRef, relaxed},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering},
};

use super::used::Used;
use crate::FabricError;

/// The share of each multiprocessor that a grid takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Share {
    /// That of a message.
    Quarter,
    Half,
    Whole,
}

impl Share {
    fn bit(self) -> u32 {
        1 << self as u32
    }

    fn quarters(self) -> u32 {
        match self {
            Self::Quarter => 1,
            Self::Half => 2,
            Self::Whole => QUARTERS,
        }
    }
}

/// The shares of all places come to no more.
const QUARTERS: u32 = 4;

/// Where a room is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Where {
    /// The GPU's number in this process.
    pub(super) ordinal: u32,
    /// The thread whose calls it counts, if several ranks of this process share the GPU: each has a part of the multiprocessors. None
    /// if all calls of the process are of one rank.
    pub(super) thread: Option<ThreadId>,
}

/// The room that the calls of a rank have on a GPU.
pub(super) struct Room {
    context: Context,
    /// The process that made it: a child that was forked has no driver, and perhaps a thread's lock.
    process: u32,
    /// The stream of the call before, if no capture is open: [`Stream::id`](StreamRef::id). Else 0.
    last: AtomicU64,
    /// The shares of calls that change nothing about the place of that stream, as [bits](Share::bit).
    known: AtomicU32,
    places: Mutex<State>,
}

struct State {
    running: Places,
    /// Those of each capture that is not known to have ended.
    captured: Vec<(u64, Places)>,
}

/// The places of the calls that run, or of those of one capture: that of the call before is the last one.
#[derive(Default)]
struct Places(Vec<Place>);

/// The calls on one stream.
struct Place {
    stream: Used,
    /// The largest of them.
    share: Share,
    has_message: bool,
    /// Stands behind the calls, if `is_recorded`.
    behind: Event,
    is_recorded: bool,
}

/// Rooms that have users.
static ROOMS: Mutex<Vec<(Where, Weak<Room>)>> = Mutex::new(Vec::new());

impl Room {
    /// The room there, which is made if nobody uses it yet.
    pub(super) fn at(place: Where, context: &Context) -> Arc<Self> {
        let mut rooms = ROOMS.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.retain(|(_, room)| room.strong_count() > 0);
        let known = rooms.iter().find_map(|(known, room)| (*known == place).then(|| room.upgrade())?);
        known.unwrap_or_else(|| {
            let state = State { running: Places::default(), captured: Vec::new() };
            let (last, known, places) = (AtomicU64::new(0), AtomicU32::new(0), Mutex::new(state));
            let room =
                Arc::new(Self { context: context.clone(), process: process::id(), last, known, places });
            rooms.push((place, Arc::downgrade(&room)));
            room
        })
    }

    /// Makes what follows on `stream` come behind as many earlier calls as that there is room for its grids. `id` is the stream's.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] where too many of them are messages, or on streams that are being captured, so that nothing can
    /// be put behind them: nothing has changed then. [`FabricError::Device`].
    #[inline]
    pub(super) fn enter(&self, stream: StreamRef<'_>, id: u64, share: Share) -> Result<(), FabricError> {
        let is_known = self.known.load(Ordering::Relaxed) & share.bit() != 0;
        match self.last.load(Ordering::Relaxed) == id && is_known {
            true => Ok(()),
            false => self.take_place(stream, id, share),
        }
    }

    #[cold]
    fn take_place(&self, stream: StreamRef<'_>, id: u64, share: Share) -> Result<(), FabricError> {
        let mut state = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        self.last.store(0, Ordering::Relaxed);
        self.forget_captures_that_ended(&mut state)?;
        let State { running, captured } = &mut *state;
        match stream.capture()? {
            None => running.take(&self.context, stream, id, share)?,
            Some(number) => {
                let known = captured.iter().position(|(known, _)| *known == number);
                let index = match known {
                    Some(index) => index,
                    None => {
                        captured.push((number, Places::default()));
                        captured.len() - 1
                    }
                };
                captured[index].1.take(&self.context, stream, id, share)?;
            }
        }
        if captured.is_empty()
            && let Some(place) = running.0.last()
        {
            self.known.store(place.known(), Ordering::Relaxed);
            self.last.store(id, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Forgets the streams of frameworks, which may be gone: for a tenant that ends, when the context has no work left.
    pub(super) fn leave(&self) {
        if self.process != process::id() {
            return;
        }
        self.last.store(0, Ordering::Relaxed);
        let mut state = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        state.running.0.retain(|place| place.stream.is_kept());
    }

    fn forget_captures_that_ended(&self, state: &mut State) -> Result<(), FabricError> {
        let mut index = 0;
        while let Some((number, places)) = state.captured.get(index) {
            match places.is_in(&self.context, *number)? {
                true => index += 1,
                false => drop(state.captured.swap_remove(index)),
            }
        }
        Ok(())
    }
}

impl Places {
    /// Whether the stream of the call before is in a capture.
    fn is_in(&self, context: &Context, number: u64) -> Result<bool, FabricError> {
        let Some(place) = self.0.last() else { return Ok(false) };
        Ok(place.stream.capture(context)? == Some(number))
    }

    fn take(
        &mut self,
        context: &Context,
        stream: StreamRef<'_>,
        id: u64,
        share: Share,
    ) -> Result<(), FabricError> {
        let left = self.to_leave(context, stream, id, share)?;
        let mut events = Vec::new();
        for index in left.into_iter().rev() {
            let place = self.0.remove(index);
            if !place.has_message {
                place.record(context)?;
                stream.wait(&place.behind)?;
            }
            events.push(place.behind);
        }
        self.leave_stream_of_last(context, id)?;
        let mut place = match self.0.iter().position(|place| place.stream.id == id) {
            Some(index) => self.0.remove(index),
            None => Place::of(Used::new(stream, id), share, events.pop(), context)?,
        };
        place.share = place.share.max(share);
        place.has_message |= share == Share::Quarter;
        place.is_recorded = false;
        self.0.push(place);
        Ok(())
    }

    /// The places, in ascending order, that a call must leave so that its share is free: the oldest ones that it can come behind. Nothing
    /// changes.
    fn to_leave(
        &self,
        context: &Context,
        stream: StreamRef<'_>,
        id: u64,
        share: Share,
    ) -> Result<Vec<usize>, FabricError> {
        let others = || self.0.iter().enumerate().filter(|(_, place)| place.stream.id != id);
        let own = self.0.iter().find(|place| place.stream.id == id);
        let needed = own.map_or(share, |own| own.share.max(share)).quarters();
        let mut taken = needed + others().map(|(_, place)| place.share.quarters()).sum::<u32>();
        let (mut left, is_captured) = (Vec::new(), stream.capture()?.is_some());
        for (index, place) in others() {
            if taken <= QUARTERS {
                break;
            }
            if place.can_be_left(context, is_captured)? {
                taken -= place.share.quarters();
                left.push(index);
            }
        }
        match taken <= QUARTERS {
            true => Ok(left),
            false => Err(self.refusal(context, id, needed)?),
        }
    }

    fn refusal(&self, context: &Context, id: u64, needed: u32) -> Result<FabricError, FabricError> {
        let (mut messages, mut captured) = (0, 0);
        for place in self.0.iter().filter(|place| place.stream.id != id) {
            messages += u32::from(place.has_message);
            captured += u32::from(!place.has_message && place.stream.capture(context)?.is_some());
        }
        Ok(FabricError::invalid(format!(
            "the GPU has no room for the grid of this call, which takes {needed} quarters of each multiprocessor: of the streams of              calls before it, {captured} are being captured and {messages} have messages under way, so this call, on another stream,              cannot be ordered behind them: make it before, or after the captures have ended and the messages have arrived"
        )))
    }

    /// A framework's stream may be gone when its place is wanted, so the event comes as soon as a call is made on another stream.
    fn leave_stream_of_last(&mut self, context: &Context, id: u64) -> Result<(), FabricError> {
        if let Some(place) = self.0.last_mut()
            && place.stream.id != id
            && !place.stream.is_kept()
            && !place.is_recorded
            && place.stream.capture(context)?.is_none()
        {
            place.record(context)?;
            place.is_recorded = true;
        }
        Ok(())
    }
}

impl Place {
    fn of(stream: Used, share: Share, behind: Option<Event>, context: &Context) -> Result<Self, FabricError> {
        let behind = match behind {
            Some(behind) => behind,
            // A capture that is open may forbid what a new event needs.
            None => relaxed(|| Event::new(context)).and_then(|made: Result<_, CudaError>| made)?,
        };
        Ok(Self { stream, share, has_message: false, behind, is_recorded: false })
    }

    /// The shares of calls that change nothing here, as bits.
    fn known(&self) -> u32 {
        let messages = if self.has_message { Share::Quarter.bit() } else { 0 };
        [Share::Half, Share::Whole]
            .into_iter()
            .filter(|share| *share <= self.share)
            .fold(messages, |all, share| all | share.bit())
    }

    /// Whether a call on another stream can come behind these; for messages, whether they are over.
    fn can_be_left(&self, context: &Context, by_captured: bool) -> Result<bool, FabricError> {
        let is_captured =
            || Ok::<_, FabricError>(!self.is_recorded && self.stream.capture(context)?.is_some());
        match (self.has_message, by_captured) {
            (false, true) => Ok(true),
            (false, false) => Ok(!is_captured()?),
            // What is captured has not begun.
            (true, true) => Ok(false),
            (true, false) => Ok(!is_captured()? && self.is_over(context)?),
        }
    }

    fn is_over(&self, context: &Context) -> Result<bool, FabricError> {
        // Another stream's capture may forbid a question.
        relaxed(|| match self.is_recorded {
            true => Ok(self.behind.is_passed()?),
            false => self.stream.is_done(context),
        })?
    }

    fn record(&self, context: &Context) -> Result<(), FabricError> {
        if !self.is_recorded {
            self.stream.record(context, &self.behind)?;
        }
        Ok(())
    }
}
