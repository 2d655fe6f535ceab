//! Messages from one rank to another: a ring of packets each way, and whatever number of transfers in flight.

use std::{
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use antiphon_device::host::wait::{Patience, wait_for};

use crate::{
    FabricError, Signature,
    communicator::Shared,
    layout::{MESSAGE_BELL, RING, RING_BODY},
};

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Send,
    Receive,
}

/// One message on its way. Its buffer outlives it: it is borrowed by a call that does not return before, or kept.
struct Transfer {
    id: u64,
    buffer: *mut u8,
    len: usize,
    done: usize,
    signature: Signature,
    /// Keeps the buffer alive.
    keep: Option<Keep>,
}

/// Whatever owns a buffer. Dropping it may run anybody's code, and so happens without our lock.
type Keep = Box<dyn Any + Send>;

// SAFETY: the buffer is used only under the lock of `Messages`, and stays valid as said above.
unsafe impl Send for Transfer {}

/// The messages between this rank and one other, in one direction; they go in order.
#[derive(Default)]
struct Port {
    /// Packets sent, or consumed.
    sequence: u64,
    queue: VecDeque<Transfer>,
}

/// The messages of one rank.
pub(crate) struct Messages(Mutex<State>);

struct State {
    next_id: u64,
    outgoing: Vec<Port>,
    incoming: Vec<Port>,
    active: usize,
    /// Owners of buffers whose transfers are over, on their way out of the lock.
    released: Vec<Keep>,
    /// Whether a thread moves transfers that nobody waits for.
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
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    id: u64,
    peer: usize,
    direction: Direction,
    signature: Signature,
}

impl Messages {
    pub(crate) fn new(world_size: usize) -> Self {
        let ports = || (0..world_size).map(|_| Port::default()).collect();
        let (outgoing, incoming, released) = (ports(), ports(), Vec::new());
        Self(Mutex::new(State { next_id: 0, outgoing, incoming, active: 0, released, pumped: false }))
    }

    /// Begins to send (or receive) a message and moves it as far as it goes.
    ///
    /// # Safety
    /// `buffer` stays valid for `len` bytes, untouched (unread, for a receive) by others, until the transfer is over
    /// or [cancelled](Self::cancel); giving its owner as `keep` ensures it.
    unsafe fn start(
        &self,
        direction: Direction,
        peer: usize,
        buffer: *mut u8,
        len: usize,
        signature: Signature,
        keep: Option<Keep>,
    ) -> Ticket {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.active += 1;
        let transfer = Transfer { id, buffer, len, done: 0, signature, keep };
        state.port(direction, peer).queue.push_back(transfer);
        Ticket { id, peer, direction, signature }
    }

    /// As [`start`](Self::start), for sending.
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub(crate) unsafe fn start_send(
        &self,
        to: usize,
        data: *const u8,
        len: usize,
        signature: Signature,
        keep: Option<Keep>,
    ) -> Ticket {
        // SAFETY: passed on; a transfer that sends only reads its buffer.
        unsafe { self.start(Direction::Send, to, data.cast_mut(), len, signature, keep) }
    }

    /// As [`start`](Self::start), for receiving.
    ///
    /// # Safety
    /// As [`start`](Self::start).
    pub(crate) unsafe fn start_receive(
        &self,
        from: usize,
        buffer: *mut u8,
        len: usize,
        signature: Signature,
        keep: Option<Keep>,
    ) -> Ticket {
        // SAFETY: passed on.
        unsafe { self.start(Direction::Receive, from, buffer, len, signature, keep) }
    }

    /// Whether the transfer is over, after moving everything as far as it goes.
    pub(crate) fn is_over(&self, shared: &Shared, ticket: &Ticket) -> Result<bool, FabricError> {
        let mut state = self.lock();
        if !state.is_active(ticket) {
            return Ok(true); // also when something else has failed since
        }
        self.advance(shared, &mut state)?;
        Ok(!state.is_active(ticket))
    }

    /// Waits until the transfer is over. After an error it is cancelled.
    pub(crate) fn wait(&self, shared: &Shared, ticket: &Ticket) -> Result<(), FabricError> {
        let over = wait_for(
            &shared.regions.control(shared.rank).bells[MESSAGE_BELL].0,
            shared.patience,
            || match self.is_over(shared, ticket) {
                Ok(false) => None,
                Ok(true) => Some(Ok(())),
                Err(error) => Some(Err(error)),
            },
            |waited| {
                let interrupted = shared.check_interrupt(ticket.signature);
                interrupted.inspect_err(|error| shared.health.report(&shared.regions, error))?;
                self.look_around(shared, ticket, waited)
            },
        );
        over.and_then(|result| result).inspect_err(|_| self.cancel(ticket))
    }

    /// Waits for `limit` at most; whether the transfer is over then. `since` is when the wait for it began. After an
    /// error it is still there.
    pub(crate) fn wait_for(
        &self,
        shared: &Shared,
        ticket: &Ticket,
        limit: Duration,
        since: Instant,
    ) -> Result<bool, FabricError> {
        if limit.is_zero() {
            // Who only ever asks must hear of a lost peer too.
            let over = self.is_over(shared, ticket)?;
            return if over {
                Ok(true)
            } else {
                self.look_around(shared, ticket, since.elapsed()).map(|()| false)
            };
        }
        let over = wait_for(
            &shared.regions.control(shared.rank).bells[MESSAGE_BELL].0,
            shared.patience,
            || self.is_over(shared, ticket).map(|over| over.then_some(true)).transpose(),
            |waited| match self.look_around(shared, ticket, since.elapsed()) {
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
        let queue = &mut state.port(ticket.direction, ticket.peer).queue;
        if let Some(place) = queue.iter().position(|t| t.id == ticket.id) {
            let keep = queue.remove(place).and_then(|transfer| transfer.keep);
            state.released.extend(keep);
            state.active -= 1;
        }
    }

    /// Moves every transfer as far as it goes, without waiting: for those who wait for something else.
    pub(crate) fn progress(&self, shared: &Shared) {
        // Whoever holds the lock is moving them already; an error is for the transfers' own callers.
        if let Ok(state) = self.0.try_lock()
            && state.active > 0
        {
            let _ = self.advance(shared, &mut Locked(Some(state)));
        }
    }

    /// Has a thread move transfers until none is left: for those that nobody waits for yet, while this rank does
    /// something else, on another communicator perhaps.
    pub(crate) fn pump(shared: &Arc<Shared>) {
        let mut state = shared.messages.lock();
        if state.active == 0 || state.pumped {
            return;
        }
        let shared = shared.clone();
        let run = move || shared.messages.pump_until_idle(&shared);
        // Without a thread they move whenever this rank waits.
        state.pumped = std::thread::Builder::new().name("antiphon-messages".into()).spawn(run).is_ok();
    }

    fn pump_until_idle(&self, shared: &Shared) {
        let control = shared.regions.control(shared.rank);
        let done = |state: &mut State| {
            state.pumped = self.advance(shared, state).is_ok() && state.active > 0;
            !state.pumped
        };
        let stop = |waited| {
            // Whoever waits for a transfer finds out why it does not move; this thread only leaves.
            let hopeless = waited > shared.timeout || control.has_departed();
            if hopeless { Err(()) } else { Ok(()) }
        };
        let bell = &control.bells[MESSAGE_BELL].0;
        let ready = || done(&mut self.lock()).then_some(());
        if wait_for(bell, Patience::SHARED_CORE, ready, stop).is_err() {
            self.lock().pumped = false;
        }
    }

    /// Waits until everything is sent that was going to be.
    pub(crate) fn flush(&self, shared: &Shared) -> Result<(), FabricError> {
        let unsent = |state: &State| {
            let of_port = |(peer, port): (usize, &Port)| {
                port.queue.back().map(|last| {
                    let (id, signature) = (last.id, last.signature);
                    Ticket { id, peer, direction: Direction::Send, signature }
                })
            };
            state.outgoing.iter().enumerate().filter_map(of_port).collect::<Vec<_>>()
        };
        let tickets = unsent(&self.lock());
        tickets.iter().try_for_each(|ticket| self.wait(shared, ticket))?;
        // A failure drops what was not sent, and what is dropped is not waited for.
        shared.health.check_usable()
    }

    fn lock(&self) -> Locked<'_> {
        Locked(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn advance(&self, shared: &Shared, state: &mut State) -> Result<(), FabricError> {
        if state.active == 0 {
            return Ok(());
        }
        // Under the lock: a transfer that was cancelled half-way, which takes a failure, is the last of its stream.
        shared.health.check_usable()?;
        let State { outgoing, incoming, active, released, .. } = state;
        for peer in 0..shared.world_size {
            while self.send_packet(shared, peer, &mut outgoing[peer], active, released) {}
            loop {
                match self.receive_packet(shared, peer, &mut incoming[peer], active, released) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        shared.health.report(&shared.regions, &error);
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends the next packet to `peer`, if there is one and room for it.
    fn send_packet(
        &self,
        shared: &Shared,
        peer: usize,
        port: &mut Port,
        active: &mut usize,
        released: &mut Vec<Keep>,
    ) -> bool {
        let Some(transfer) = port.queue.front_mut() else { return false };
        if !has_room(port.sequence, shared.regions.consumed(shared.rank, peer).count(), RING) {
            return false;
        }
        let packet = shared.regions.ring(shared.rank, peer, place(port.sequence, RING));
        let part = (transfer.len - transfer.done).min(RING_BODY);
        // SAFETY: the buffer is valid for `len` bytes, the packet's body for RING_BODY, and the receiver is done with
        // it.
        unsafe { packet.payload(part).copy_from_nonoverlapping(transfer.buffer.add(transfer.done), part) };
        port.sequence += 1;
        packet.head.publish(port.sequence, transfer.signature.to_words());
        shared.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        finish_part(port, part, active, released);
        true
    }

    /// Takes the next packet of `peer`, if someone awaits one and it is here.
    fn receive_packet(
        &self,
        shared: &Shared,
        peer: usize,
        port: &mut Port,
        active: &mut usize,
        released: &mut Vec<Keep>,
    ) -> Result<bool, FabricError> {
        let Some(transfer) = port.queue.front_mut() else { return Ok(false) };
        let packet = shared.regions.ring(peer, shared.rank, place(port.sequence, RING));
        let Some(words) = packet.head.arrival(port.sequence + 1) else { return Ok(false) };
        if words != transfer.signature.to_words() {
            let theirs = Signature::from_words(words).unwrap_or(transfer.signature);
            let mine = transfer.signature;
            shared.regions.consumed(peer, shared.rank).refuse(mine.to_words());
            return Err(shared.health.disagreement(mine, peer, theirs));
        }
        let part = (transfer.len - transfer.done).min(RING_BODY);
        // SAFETY: as in `send_packet`; equal signatures mean equal lengths, so the packet holds `part` bytes.
        unsafe { transfer.buffer.add(transfer.done).copy_from_nonoverlapping(packet.payload(part), part) };
        port.sequence += 1;
        shared.regions.consumed(peer, shared.rank).announce(port.sequence);
        shared.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        finish_part(port, part, active, released);
        Ok(true)
    }

    #[cold]
    fn look_around(&self, shared: &Shared, ticket: &Ticket, waited: Duration) -> Result<(), FabricError> {
        // Looking moves the transfer on, which may fail: then there is nothing to wait for.
        let failed = RefCell::new(None);
        let missing = || match self.is_over(shared, ticket) {
            Ok(false) => vec![ticket.peer],
            Ok(true) => Vec::new(),
            Err(error) => {
                failed.borrow_mut().get_or_insert(error);
                Vec::new()
            }
        };
        let Shared { health, regions, timeout, .. } = shared;
        let checked = health.check(regions, ticket.signature, missing, waited, *timeout);
        let checked = checked.map_err(|error| refusal(shared, ticket).unwrap_or(error));
        let checked = failed.into_inner().map_or(checked, Err);
        checked.inspect_err(|error| health.report(regions, error))
    }
}

impl State {
    fn is_active(&mut self, ticket: &Ticket) -> bool {
        self.port(ticket.direction, ticket.peer).queue.iter().any(|t| t.id == ticket.id)
    }

    fn port(&mut self, direction: Direction, peer: usize) -> &mut Port {
        match direction {
            Direction::Send => &mut self.outgoing[peer],
            Direction::Receive => &mut self.incoming[peer],
        }
    }
}

/// What the receiver expected instead, if it refused what this ticket sends.
fn refusal(shared: &Shared, ticket: &Ticket) -> Option<FabricError> {
    let (rank, peer) = (shared.rank, ticket.peer);
    let sends = ticket.direction == Direction::Send;
    let expected = shared.regions.consumed(rank, peer).refusal().filter(|_| sends)?;
    Some(shared.health.disagreement(ticket.signature, peer, Signature::from_words(expected)?))
}

/// Where in the ring the packet after the first `sequence` packets lies.
pub(super) fn place(sequence: u64, ring: usize) -> usize {
    (sequence % ring as u64) as usize
}

/// Whether that place is free: the receiver has consumed the packet that lay there before.
pub(super) fn has_room(sequence: u64, consumed: u64, ring: usize) -> bool {
    sequence - consumed < ring as u64
}

/// Notes that a part of the first transfer has moved, and removes the transfer when it was the last.
fn finish_part(port: &mut Port, part: usize, active: &mut usize, released: &mut Vec<Keep>) {
    let transfer = port.queue.front_mut().expect("a part belongs to a transfer");
    transfer.done += part;
    if transfer.done == transfer.len {
        released.extend(port.queue.pop_front().and_then(|transfer| transfer.keep));
        *active -= 1;
    }
}
