//! Messages from one rank to another: a ring of packets each way, and whatever number of transfers in flight.

use std::{
    any::Any,
    cell::RefCell,
    ops::{Deref, DerefMut},
    sync::{Arc, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use antiphon_device::host::wait::Patience;
use antiphon_device::sync::Mutex;

use super::matching::{Incoming, Outgoing, Source};
use crate::{
    FabricError, Signature,
    endpoint::Endpoint,
    layout::{MESSAGE_BELL, RING, RING_BODY},
};

/// The peer of a message, and its direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// To a rank.
    To(usize),
    /// From one rank, or from any rank.
    From(Source),
}

/// The memory of a message.
#[derive(Clone, Copy)]
pub(crate) struct Buffer {
    pub(crate) data: *mut u8,
    pub(crate) len: usize,
}

/// The rank that a message came from, once that is known.
pub(crate) type Origin = Arc<OnceLock<usize>>;

/// One message on its way. Its buffer outlives it: it is borrowed by a call that does not return before, or kept.
pub(super) struct Transfer {
    /// Later transfers have greater numbers.
    pub(super) id: u64,
    buffer: Buffer,
    done: usize,
    pub(super) signature: Signature,
    /// Keeps the buffer alive.
    keep: Option<Keep>,
    /// Where to leave the rank that it came from, for a receive from any.
    pub(super) origin: Option<Origin>,
}

/// The owner of a buffer. Dropping it may run foreign code, and so happens without the lock.
type Keep = Box<dyn Any + Send>;

// SAFETY: the buffer is used only under the lock of `Messages`, and stays valid as said above.
unsafe impl Send for Transfer {}

impl Transfer {
    /// A message that no receive awaits yet, with a buffer of its own; none if there is no memory for it.
    pub(super) fn unexpected(id: u64, signature: Signature) -> Option<Self> {
        let size = signature.dtype.map_or(1, |dtype| dtype.size());
        let len = usize::try_from(signature.count).ok()?.checked_mul(size)?;
        let mut memory = Vec::<u8>::new();
        memory.try_reserve_exact(len).ok()?;
        memory.resize(len, 0);
        let buffer = Buffer { data: memory.as_mut_ptr(), len };
        Some(Self { id, buffer, done: 0, signature, keep: Some(Box::new(memory)), origin: None })
    }

    /// Takes what has come to another buffer, of the same length.
    pub(super) fn take(&mut self, arrived: &Self) {
        debug_assert!(arrived.is_over() && self.buffer.len == arrived.buffer.len);
        // SAFETY: both buffers are valid for their equal lengths, and apart: one was made for this message.
        unsafe { self.buffer.data.copy_from_nonoverlapping(arrived.buffer.data, self.buffer.len) };
        self.done = self.buffer.len;
    }

    fn is_over(&self) -> bool {
        self.done == self.buffer.len
    }

    /// How many bytes the next packet has.
    fn part(&self) -> usize {
        (self.buffer.len - self.done).min(RING_BODY)
    }
}

/// The messages of one rank.
pub(crate) struct Messages {
    endpoint: Arc<Endpoint>,
    state: Mutex<State>,
}

struct State {
    next_id: u64,
    outgoing: Vec<Outgoing>,
    incoming: Incoming,
    active: usize,
    /// Owners of buffers whose transfers are over, on their way out of the lock.
    released: Vec<Keep>,
    /// Whether a thread advances transfers for which no caller waits.
    pumped: bool,
}

/// The state, locked. What was released meanwhile is dropped after the lock.
struct Locked<'a>(Option<MutexGuard<'a, State>>);

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.0.as_ref().expect("locked until dropped")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.0.as_mut().expect("locked until dropped")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let released = self.0.take().map(|mut state| std::mem::take(&mut state.released));
        drop(released);
    }
}

/// A message in flight; see [`Messages::start`].
#[derive(Debug, Clone)]
pub(crate) struct Ticket {
    id: u64,
    route: Route,
    signature: Signature,
    origin: Option<Origin>,
}

impl Ticket {
    /// The rank that the message came from, when a receive is over.
    pub(crate) fn origin(&self) -> Option<usize> {
        match self.route {
            Route::From(Source::Rank(rank)) => Some(rank),
            _ => self.origin.as_ref().and_then(|origin| origin.get().copied()),
        }
    }
}

impl Messages {
    pub(crate) fn new(endpoint: Arc<Endpoint>) -> Self {
        let world_size = endpoint.world_size;
        let outgoing = (0..world_size).map(|_| Outgoing::default()).collect();
        let (incoming, released) = (Incoming::new(world_size), Vec::new());
        let state = State { next_id: 0, outgoing, incoming, active: 0, released, pumped: false };
        Self { endpoint, state: Mutex::new(state) }
    }

    /// The rank's end of the world that the messages go through.
    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Begins to send or receive a message and moves it as far as it goes.
    ///
    /// # Safety
    /// The buffer stays valid, untouched (a send's: unwritten) by others, until the transfer is over
    /// or [cancelled](Self::cancel); giving its owner as `keep` ensures it.
    pub(crate) unsafe fn start(
        &self,
        route: Route,
        buffer: Buffer,
        signature: Signature,
        keep: Option<Keep>,
    ) -> Ticket {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.active += 1;
        let origin = (route == Route::From(Source::Any)).then(Origin::default);
        let transfer = Transfer { id, buffer, done: 0, signature, keep, origin: origin.clone() };
        match route {
            Route::To(peer) => state.outgoing[peer].queue.push_back(transfer),
            Route::From(source) => state.incoming.expect(source, transfer),
        }
        Ticket { id, route, signature, origin }
    }

    /// Whether the transfer is over, after moving everything as far as it goes.
    pub(crate) fn is_over(&self, ticket: &Ticket) -> Result<bool, FabricError> {
        let mut state = self.lock();
        if !state.is_active(ticket) {
            return Ok(true); // also when something else has failed since
        }
        self.advance(&mut state)?;
        Ok(!state.is_active(ticket))
    }

    /// Waits until the transfer is over. After an error it is cancelled.
    pub(crate) fn wait(&self, ticket: &Ticket) -> Result<(), FabricError> {
        let endpoint = &*self.endpoint;
        let over = endpoint.wait_for(
            &endpoint.regions.control(endpoint.rank).bells[MESSAGE_BELL].0,
            endpoint.patience,
            || match self.is_over(ticket) {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                Err(error) => Some(Err(error)),
            },
            |waited| {
                let interrupted = endpoint.check_interrupt(ticket.signature);
                interrupted.inspect_err(|error| endpoint.report(error))?;
                self.look_around(ticket, waited)
            },
        );
        if let (Some(links), Route::To(peer)) = (&endpoint.links, ticket.route) {
            links.leave_messages(peer);
        }
        over.and_then(|result| result).inspect_err(|_| self.cancel(ticket))
    }

    /// Waits for `limit` at most; whether the transfer is over then. `since` is when the wait for it began. After an
    /// error it is still there.
    pub(crate) fn wait_for(
        &self,
        ticket: &Ticket,
        limit: Duration,
        since: Instant,
    ) -> Result<bool, FabricError> {
        if limit.is_zero() {
            self.endpoint.poll();
            // A caller that only polls must learn of a lost peer too.
            let over = self.is_over(ticket)?;
            return if over { Ok(true) } else { self.look_around(ticket, since.elapsed()).map(|()| false) };
        }
        let over = self.endpoint.wait_for(
            &self.endpoint.regions.control(self.endpoint.rank).bells[MESSAGE_BELL].0,
            self.endpoint.patience,
            || self.is_over(ticket).map(|over| over.then_some(true)).transpose(),
            |waited| match self.look_around(ticket, since.elapsed()) {
                Ok(()) if waited < limit => Ok(()),
                Ok(()) => Err(Ok(false)),
                Err(error) => Err(Err(error)),
            },
        );
        over.unwrap_or_else(|ended| ended)
    }

    /// Forgets a transfer: its buffer is not touched any more.
    pub(crate) fn cancel(&self, ticket: &Ticket) {
        let mut state = self.lock();
        let removed = match ticket.route {
            Route::To(peer) => state.outgoing[peer].remove(ticket.id),
            Route::From(_) => state.incoming.remove(ticket.id),
        };
        if let Some(transfer) = removed {
            state.released.extend(transfer.keep);
            state.active -= 1;
        }
    }

    /// Moves every transfer as far as it goes, without waiting: for callers that wait for something else.
    pub(crate) fn progress(&self) {
        // The thread that holds the lock is moving them already; an error is for the transfers' own callers.
        if let Ok(state) = self.state.try_lock()
            && state.active > 0
        {
            let _ = self.advance(&mut Locked(Some(state)));
        }
    }

    /// Lets a thread advance transfers until none is left: those for which no caller waits yet, while this rank does
    /// something else, on another communicator perhaps.
    pub(crate) fn pump(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.active == 0 || state.pumped {
            return;
        }
        let messages = self.clone();
        let run = move || messages.pump_until_idle();
        // Without a thread they move whenever this rank waits.
        state.pumped = std::thread::Builder::new().name("antiphon-messages".into()).spawn(run).is_ok();
    }

    fn pump_until_idle(&self) {
        let control = self.endpoint.regions.control(self.endpoint.rank);
        let done = |state: &mut State| {
            state.pumped = self.advance(state).is_ok() && state.active > 0;
            !state.pumped
        };
        let stop = |waited| {
            // The caller that waits for a transfer finds out why it does not move; this thread only leaves.
            let hopeless = waited > self.endpoint.timeout() || control.has_departed();
            if hopeless { Err(()) } else { Ok(()) }
        };
        let bell = &control.bells[MESSAGE_BELL].0;
        let ready = || done(&mut self.lock()).then_some(());
        if self.endpoint.wait_for(bell, Patience::SHARED_CORE, ready, stop).is_err() {
            self.lock().pumped = false;
        }
    }

    /// Waits until everything is sent that was going to be.
    pub(crate) fn flush(&self) -> Result<(), FabricError> {
        let unsent = |state: &State| {
            let of_peer = |(peer, outbox): (usize, &Outgoing)| {
                outbox.queue.back().map(|last| {
                    let (id, signature) = (last.id, last.signature);
                    Ticket { id, route: Route::To(peer), signature, origin: None }
                })
            };
            state.outgoing.iter().enumerate().filter_map(of_peer).collect::<Vec<_>>()
        };
        let tickets = unsent(&self.lock());
        tickets.iter().try_for_each(|ticket| self.wait(ticket))?;
        // A failure drops what was not sent, and what is dropped is not waited for.
        self.endpoint.health.check_usable()
    }

    fn lock(&self) -> Locked<'_> {
        Locked(Some(self.state.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn advance(&self, state: &mut State) -> Result<(), FabricError> {
        let endpoint = &*self.endpoint;
        if state.active == 0 {
            return Ok(());
        }
        // Under the lock: a transfer that was cancelled half-way, which takes a failure, is the last of its stream.
        endpoint.health.check_usable()?;
        let mut advance_all = || {
            for peer in 0..endpoint.world_size {
                while state.send_packet(endpoint, peer)? {}
                while state.receive_packet(endpoint, peer)? {}
            }
            Ok(())
        };
        advance_all().inspect_err(|error| endpoint.report(error))
    }

    /// The ranks without which a transfer does not move.
    fn awaited(&self, ticket: &Ticket) -> Vec<usize> {
        let endpoint = &*self.endpoint;
        match ticket.route {
            Route::To(peer) | Route::From(Source::Rank(peer)) => vec![peer],
            Route::From(Source::Any) => {
                // A rank that has left in order does not keep the others from sending.
                let others = || {
                    (0..endpoint.world_size).filter(|&rank| rank != endpoint.rank || endpoint.world_size == 1)
                };
                let has_stayed = |&rank: &usize| !endpoint.regions.control(rank).has_departed();
                match others().filter(has_stayed).collect::<Vec<_>>() {
                    none if none.is_empty() => others().collect(),
                    stayed => stayed,
                }
            }
        }
    }

    #[cold]
    fn look_around(&self, ticket: &Ticket, waited: Duration) -> Result<(), FabricError> {
        // Looking moves the transfer on, which may fail: then there is nothing to wait for.
        let failed = RefCell::new(None);
        let missing = || match self.is_over(ticket) {
            Ok(false) => self.awaited(ticket),
            Ok(true) => Vec::new(),
            Err(error) => {
                failed.borrow_mut().get_or_insert(error);
                Vec::new()
            }
        };
        let Endpoint { health, regions, .. } = &*self.endpoint;
        self.endpoint.look_around(ticket.signature, &missing, waited);
        let checked = health.check(regions, ticket.signature, missing, waited, self.endpoint.timeout());
        let checked = checked.map_err(|error| refusal(&self.endpoint, ticket).unwrap_or(error));
        let checked = failed.into_inner().map_or(checked, Err);
        checked.inspect_err(|error| self.endpoint.report(error))
    }
}

impl State {
    fn is_active(&self, ticket: &Ticket) -> bool {
        match ticket.route {
            Route::To(peer) => self.outgoing[peer].queue.iter().any(|transfer| transfer.id == ticket.id),
            Route::From(_) => self.incoming.has(ticket.id),
        }
    }

    /// Sends the next packet to `peer`, if there is one and room for it. Fails if the peer gave up before it took the last packet of a
    /// message.
    fn send_packet(&mut self, endpoint: &Endpoint, peer: usize) -> Result<bool, FabricError> {
        let outbox = &mut self.outgoing[peer];
        let Some(transfer) = outbox.queue.front_mut() else { return Ok(false) };
        let consumed = endpoint.regions.consumed(endpoint.rank, peer);
        let index = place(outbox.sequence, RING);
        let has_sent = endpoint.links.as_ref().is_none_or(|links| links.has_sent(peer, index));
        if !has_room(outbox.sequence, consumed.count(), RING) || !has_sent {
            return Ok(false);
        }
        let packet = endpoint.regions.ring(endpoint.rank, peer, index);
        let part = transfer.part();
        // SAFETY: the buffer is valid for its length, the packet's body for RING_BODY, and the receiver is done with it.
        unsafe {
            packet.payload(part).copy_from_nonoverlapping(transfer.buffer.data.add(transfer.done), part);
        }
        transfer.done += part;
        outbox.sequence += 1;
        let words = transfer.signature.to_words();
        packet.head.publish(outbox.sequence, words);
        if let Some(links) = &endpoint.links {
            links.send_packet(peer, index, outbox.sequence, words, part)?;
        }
        endpoint.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        if transfer.is_over() {
            // The last look: the peer says that it gave up before it leaves.
            let given_up = endpoint.health.given_up_by(&endpoint.regions, transfer.signature, peer);
            if let Some(error) = given_up.filter(|_| consumed.count() < outbox.sequence) {
                return Err(error);
            }
            let sent = outbox.queue.pop_front();
            self.end(sent);
        }
        Ok(true)
    }

    /// Takes the next packet of `peer`, if it has arrived and a receive awaits a message of that rank.
    fn receive_packet(&mut self, endpoint: &Endpoint, peer: usize) -> Result<bool, FabricError> {
        while let Some(received) = self.incoming.take_unexpected(endpoint, peer)? {
            self.end(Some(received));
        }
        let sequence = self.incoming.sequence(peer);
        let packet = endpoint.regions.ring(peer, endpoint.rank, place(sequence, RING));
        let Some(words) = packet.head.arrival(sequence + 1) else { return Ok(false) };
        let next_id = &mut self.next_id;
        let Some(transfer) = self.incoming.destination(endpoint, peer, words, next_id)? else {
            return Ok(false);
        };
        let part = transfer.part();
        // SAFETY: as in `send_packet`; equal signatures mean equal lengths, so the packet holds `part` bytes.
        unsafe {
            transfer.buffer.data.add(transfer.done).copy_from_nonoverlapping(packet.payload(part), part);
        }
        transfer.done += part;
        let is_over = transfer.is_over();
        self.incoming.consume(peer);
        endpoint.regions.consumed(peer, endpoint.rank).announce(sequence + 1);
        endpoint.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        if let Some(links) = &endpoint.links {
            links.tell_consumed(peer, sequence + 1, [0; 2])?;
        }
        if is_over {
            let received = self.incoming.finish(peer);
            self.end(received);
        }
        Ok(true)
    }

    /// Lets go of a transfer that is over.
    fn end(&mut self, transfer: Option<Transfer>) {
        if let Some(transfer) = transfer {
            self.released.extend(transfer.keep);
            self.active -= 1;
        }
    }
}

/// The error with the receiver's call, if it refused the message of this ticket.
fn refusal(endpoint: &Endpoint, ticket: &Ticket) -> Option<FabricError> {
    let Route::To(peer) = ticket.route else { return None };
    let expected = endpoint.regions.consumed(endpoint.rank, peer).refusal()?;
    Some(endpoint.health.disagreement(ticket.signature, peer, Signature::from_words(expected)?))
}

/// Where in the ring the packet after the first `sequence` packets lies.
pub(super) fn place(sequence: u64, ring: usize) -> usize {
    (sequence % ring as u64) as usize
}

/// Whether that place is free: the receiver has consumed the packet that lay there before.
pub(super) fn has_room(sequence: u64, consumed: u64, ring: usize) -> bool {
    sequence - consumed < ring as u64
}
