//! Messages from one rank to another: a ring of packets each way, and whatever number of transfers in flight.

use std::{
    any::Any,
    cell::RefCell,
    collections::VecDeque,
    sync::Mutex,
    time::{Duration, Instant},
};

use antiphon_device::host::wait::wait_for;

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
    _keep: Option<Box<dyn Any + Send>>,
}

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
        Self(Mutex::new(State { next_id: 0, outgoing: ports(), incoming: ports(), active: 0 }))
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
        keep: Option<Box<dyn Any + Send>>,
    ) -> Ticket {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        state.active += 1;
        let transfer = Transfer { id, buffer, len, done: 0, signature, _keep: keep };
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
        keep: Option<Box<dyn Any + Send>>,
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
        keep: Option<Box<dyn Any + Send>>,
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
            return self.is_over(shared, ticket);
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
        let before = queue.len();
        queue.retain(|t| t.id != ticket.id);
        state.active -= before - state.port(ticket.direction, ticket.peer).queue.len();
    }

    /// Moves every transfer as far as it goes, without waiting: for those who wait for something else.
    pub(crate) fn progress(&self, shared: &Shared) {
        // Whoever holds the lock is moving them already; an error is for the transfers' own callers.
        if let Ok(mut state) = self.0.try_lock()
            && state.active > 0
        {
            let _ = self.advance(shared, &mut state);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn advance(&self, shared: &Shared, state: &mut State) -> Result<(), FabricError> {
        if state.active == 0 {
            return Ok(());
        }
        // Under the lock: a transfer that was cancelled half-way, which takes a failure, is the last of its stream.
        shared.health.check_usable()?;
        for peer in 0..shared.world_size {
            while self.send_packet(shared, peer, &mut state.outgoing[peer], &mut state.active) {}
            loop {
                match self.receive_packet(shared, peer, &mut state.incoming[peer], &mut state.active) {
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
    fn send_packet(&self, shared: &Shared, peer: usize, port: &mut Port, active: &mut usize) -> bool {
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
        packet.head.publish(port.sequence, transfer.signature.encode());
        shared.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        finish_part(port, part, active);
        true
    }

    /// Takes the next packet of `peer`, if someone awaits one and it is here.
    fn receive_packet(
        &self,
        shared: &Shared,
        peer: usize,
        port: &mut Port,
        active: &mut usize,
    ) -> Result<bool, FabricError> {
        let Some(transfer) = port.queue.front_mut() else { return Ok(false) };
        let packet = shared.regions.ring(peer, shared.rank, place(port.sequence, RING));
        let Some(words) = packet.head.arrival(port.sequence + 1) else { return Ok(false) };
        if words != transfer.signature.encode() {
            let theirs = Signature::decode(words).unwrap_or(transfer.signature);
            let (rank, mine) = (shared.rank, transfer.signature);
            shared.regions.consumed(peer, rank).refuse(mine.encode());
            return Err(FabricError::Mismatch { rank, mine, peer, theirs });
        }
        let part = (transfer.len - transfer.done).min(RING_BODY);
        // SAFETY: as in `send_packet`; equal signatures mean equal lengths, so the packet holds `part` bytes.
        unsafe { transfer.buffer.add(transfer.done).copy_from_nonoverlapping(packet.payload(part), part) };
        port.sequence += 1;
        shared.regions.consumed(peer, shared.rank).announce(port.sequence);
        shared.regions.control(peer).bells[MESSAGE_BELL].0.ring();
        finish_part(port, part, active);
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
    let (rank, peer, mine) = (shared.rank, ticket.peer, ticket.signature);
    let sends = ticket.direction == Direction::Send;
    let expected = shared.regions.consumed(rank, peer).refusal().filter(|_| sends)?;
    Some(FabricError::Mismatch { rank, mine, peer, theirs: Signature::decode(expected)? })
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
fn finish_part(port: &mut Port, part: usize, active: &mut usize) {
    let transfer = port.queue.front_mut().expect("a part belongs to a transfer");
    transfer.done += part;
    if transfer.done == transfer.len {
        port.queue.pop_front();
        *active -= 1;
    }
}
