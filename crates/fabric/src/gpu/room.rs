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
//! comes behind a place with a message, until that is over. A call that finds too little room meanwhile is refused. The messages of
//! one communicator, with a stream each for sends and receives, leave a place for calls that all ranks make.
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
    /// That of kernels that carry messages.
    Quarter,
    Half,
    Whole,
}

impl Share {
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

/// Which ranks make a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MadeBy {
    All,
    /// The two ranks of a message.
    Two,
}

/// A call as the room sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) share: Share,
    pub(super) made_by: MadeBy,
}

impl Entry {
    fn bit(self) -> u32 {
        1 << (2 * self.share as u32 + self.made_by as u32)
    }
}

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
    /// The calls that change nothing about the place of that stream, as [bits](Entry::bit).
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
    messages: Messages,
    /// Stands behind the calls, if `is_recorded`.
    behind: Event,
    is_recorded: bool,
}

/// The messages among the calls on one stream.
enum Messages {
    None,
    /// One is among the calls since the last event.
    Open(Option<Event>),
    /// The event stands behind all of them.
    Until(Event),
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
    pub(super) fn enter(&self, stream: StreamRef<'_>, id: u64, entry: Entry) -> Result<(), FabricError> {
        let is_known = self.known.load(Ordering::Relaxed) & entry.bit() != 0;
        match self.last.load(Ordering::Relaxed) == id && is_known {
            true => Ok(()),
            false => self.take_place(stream, id, entry),
        }
    }

    #[cold]
    fn take_place(&self, stream: StreamRef<'_>, id: u64, entry: Entry) -> Result<(), FabricError> {
        let mut state = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        self.last.store(0, Ordering::Relaxed);
        self.forget_captures_that_ended(&mut state)?;
        let State { running, captured } = &mut *state;
        match stream.capture()? {
            None => running.take(&self.context, stream, id, entry)?,
            Some(number) => {
                let known = captured.iter().position(|(known, _)| *known == number);
                let index = match known {
                    Some(index) => index,
                    None => {
                        captured.push((number, Places::default()));
                        captured.len() - 1
                    }
                };
                captured[index].1.take(&self.context, stream, id, entry)?;
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
        entry: Entry,
    ) -> Result<(), FabricError> {
        let left = self.to_leave(context, stream, id, entry.share)?;
        let mut events = Vec::new();
        for index in left.into_iter().rev() {
            let place = self.0.remove(index);
            place.record(context)?;
            stream.wait(&place.behind)?;
            events.push(place.behind);
        }
        self.leave_stream_of_last(context, id)?;
        let mut place = match self.0.iter().position(|place| place.stream.id == id) {
            Some(index) => self.0.remove(index),
            None => Place::of(Used::new(stream, id), entry.share, events.pop(), context)?,
        };
        place.add(entry, context, stream)?;
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
            let has_message = place.has_message()?;
            messages += u32::from(has_message);
            captured += u32::from(!has_message && place.stream.capture(context)?.is_some());
        }
        Ok(FabricError::invalid(format!(
            "the GPU has no room for the grid of this call, which takes {needed} quarters of each multiprocessor: of the streams of \
             calls before it, {captured} are being captured and {messages} have messages under way, so this call, on another stream, \
             cannot be ordered behind them: make it before, or after the captures have ended and the messages have arrived"
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
            None => made_at_any_time(context)?,
        };
        Ok(Self { stream, share, messages: Messages::None, behind, is_recorded: false })
    }

    /// Adds a call on the stream.
    fn add(&mut self, entry: Entry, context: &Context, stream: StreamRef<'_>) -> Result<(), FabricError> {
        self.share = self.share.max(entry.share);
        self.is_recorded = false;
        let is_captured = || stream.capture().map(|capture| capture.is_some());
        self.messages = match (entry.made_by, std::mem::replace(&mut self.messages, Messages::None)) {
            (MadeBy::Two, Messages::None) => Messages::Open(None),
            (MadeBy::Two, Messages::Open(event)) => Messages::Open(event),
            (MadeBy::Two, Messages::Until(event)) => Messages::Open(Some(event)),
            // The next call of all ranks tells messages before it from those behind it.
            (MadeBy::All, Messages::Open(event)) if !is_captured()? => {
                let event = event.map_or_else(|| made_at_any_time(context), Ok)?;
                event.record(stream)?;
                Messages::Until(event)
            }
            (MadeBy::All, messages) => messages,
        };
        Ok(())
    }

    /// The calls that change nothing here, as bits.
    fn known(&self) -> u32 {
        let made_by = if matches!(self.messages, Messages::Open(_)) { MadeBy::Two } else { MadeBy::All };
        let shares =
            [Share::Quarter, Share::Half, Share::Whole].into_iter().filter(|share| *share <= self.share);
        shares.map(|share| Entry { share, made_by }.bit()).sum()
    }

    /// Whether a message may be under way.
    fn has_message(&self) -> Result<bool, FabricError> {
        match &self.messages {
            Messages::None => Ok(false),
            Messages::Open(_) => Ok(true),
            // Another stream's capture may forbid the question.
            Messages::Until(event) => Ok(!relaxed(|| event.is_passed())??),
        }
    }

    /// Whether a call on another stream can come behind these; for messages, whether they are over.
    fn can_be_left(&self, context: &Context, by_captured: bool) -> Result<bool, FabricError> {
        let is_captured = !self.is_recorded && self.stream.capture(context)?.is_some();
        match (self.has_message()?, by_captured) {
            (false, true) => Ok(true),
            (false, false) => Ok(!is_captured),
            // What is captured has not begun.
            (true, true) => Ok(false),
            (true, false) => Ok(!is_captured && self.is_over(context)?),
        }
    }

    fn is_over(&self, context: &Context) -> Result<bool, FabricError> {
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

/// An event. A capture that is open may forbid what a new event needs.
fn made_at_any_time(context: &Context) -> Result<Event, CudaError> {
    relaxed(|| Event::new(context))?
}
