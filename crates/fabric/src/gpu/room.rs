//! The room of a GPU for grids that wait.
//!
//! Blocks of a grid wait for blocks of other GPUs, and hold their place meanwhile. If more grids wait than find room, each may wait for
//! one that finds none, on all GPUs in turn. So every grid takes at most half of a multiprocessor (of its threads, registers, shared
//! memory and blocks) on each of those that it uses, or it takes [all](Share::Whole) of it; and at most so many grids are under way at
//! once as find room.
//!
//! A room has two *places*. A call takes the place of an earlier call, of whatever communicator and tenant, and comes behind it in
//! stream order; a call that takes whole multiprocessors takes both. So every call waits for calls only that its program made before.
//! All ranks make the calls of all communicators in one order. Consider the first call in that order that is not over on all ranks:
//! every call before it is over, so no rank waits before it, and each rank has a place for it. It runs, and ends.
//!
//! Calls on one stream share a place, so a program with two streams never waits here.
//!
//! Calls that are captured have places in their graph. The room does not count launches of graphs: a program that launches graphs
//! beside other calls, of other tenants, has at most one of them under way beside at most one other grid.

use std::{
    sync::{Arc, PoisonError, Weak},
    thread::ThreadId,
};

use antiphon_device::{
    cuda::{Context, CudaError, Event, StreamRef, relaxed},
    sync::{AtomicU64, Mutex, Ordering},
};

use super::used::Used;
use crate::FabricError;

/// The share of each multiprocessor that a grid takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Share {
    Half,
    Whole,
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
    /// The stream of the call before, if that took one place and no capture is open: [`Stream::id`](StreamRef::id). Else 0.
    last: AtomicU64,
    places: Mutex<State>,
}

struct State {
    running: Places,
    /// Those of each capture that is not known to have ended.
    captured: Vec<(u64, Places)>,
}

/// The two places of the calls that run, or of those of one capture.
#[derive(Default)]
struct Places {
    places: [Option<Place>; 2],
    /// That of the call before.
    last: usize,
}

/// The calls on one stream.
struct Place {
    stream: Used,
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
            let (last, places) = (AtomicU64::new(0), Mutex::new(state));
            let room = Arc::new(Self { context: context.clone(), last, places });
            rooms.push((place, Arc::downgrade(&room)));
            room
        })
    }

    /// Makes what follows on `stream` come behind as many earlier calls as that there is room for its grids. `id` is the stream's.
    ///
    /// # Errors
    /// [`FabricError::InvalidArgument`] where both places are of streams that are being captured, so that nothing can be put behind
    /// their calls; [`FabricError::Device`].
    #[inline]
    pub(super) fn enter(&self, stream: StreamRef<'_>, id: u64, share: Share) -> Result<(), FabricError> {
        match self.last.load(Ordering::Relaxed) == id && share == Share::Half {
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
        if captured.is_empty() && share == Share::Half {
            self.last.store(id, Ordering::Relaxed);
        }
        Ok(())
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
        let Some(place) = &self.places[self.last] else { return Ok(false) };
        Ok(place.stream.capture(context)? == Some(number))
    }

    fn take(
        &mut self,
        context: &Context,
        stream: StreamRef<'_>,
        id: u64,
        share: Share,
    ) -> Result<(), FabricError> {
        let is_its = |place: &Option<Place>| place.as_ref().is_some_and(|place| place.stream.id == id);
        match share {
            Share::Half => {
                let its = (0..2).find(|&index| is_its(&self.places[index]));
                let index = match its {
                    Some(index) => index,
                    None => self.leave_for(context, stream)?,
                };
                self.switch_to(index, context)?;
                if its.is_none() {
                    self.places[index] = Some(Place::of(Used::new(stream, id), context)?);
                }
            }
            Share::Whole => {
                for index in 0..2 {
                    if !is_its(&self.places[index]) {
                        self.wait_for(index, context, stream)?;
                    }
                }
                for place in &mut self.places {
                    *place = Some(Place::of(Used::new(stream, id), context)?);
                }
            }
        }
        let last = self.last;
        if let Some(place) = &mut self.places[last] {
            place.is_recorded = false;
        }
        Ok(())
    }

    /// The place that `stream` may have, behind whose calls it comes: the older one, or the other one while nothing can be put behind
    /// the older one.
    fn leave_for(&mut self, context: &Context, stream: StreamRef<'_>) -> Result<usize, FabricError> {
        let older = 1 - self.last;
        match self.wait_for(older, context, stream) {
            Ok(()) => Ok(older),
            Err(FabricError::InvalidArgument(_)) => {
                self.wait_for(self.last, context, stream).map(|()| self.last)
            }
            Err(error) => Err(error),
        }
    }

    fn wait_for(&self, index: usize, context: &Context, stream: StreamRef<'_>) -> Result<(), FabricError> {
        let Some(place) = &self.places[index] else { return Ok(()) };
        if !place.is_recorded {
            if stream.capture()?.is_none() && place.stream.capture(context)?.is_some() {
                return Err(FabricError::invalid(
                    "the GPU has room for the grids of two calls at once, and the streams of two calls before this one are being \
                     captured, so this call, on another stream, cannot be ordered behind them: make it before the captures begin, \
                     or after they have ended",
                ));
            }
            place.stream.record(context, &place.behind)?;
        }
        Ok(stream.wait(&place.behind)?)
    }

    /// The next call has this place. A framework's stream may be gone when its place is wanted, so the event comes now.
    fn switch_to(&mut self, index: usize, context: &Context) -> Result<(), FabricError> {
        if index != self.last
            && let Some(place) = &mut self.places[self.last]
            && !place.stream.is_kept()
            && !place.is_recorded
            && place.stream.capture(context)?.is_none()
        {
            place.stream.record(context, &place.behind)?;
            place.is_recorded = true;
        }
        self.last = index;
        Ok(())
    }
}

impl Place {
    fn of(stream: Used, context: &Context) -> Result<Self, FabricError> {
        // A capture that is open may forbid what a new event needs.
        let behind = relaxed(|| Event::new(context)).and_then(|made: Result<_, CudaError>| made)?;
        Ok(Self { stream, behind, is_recorded: false })
    }
}
