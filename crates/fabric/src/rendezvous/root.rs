//! Rank 0: listens until every rank has come, whoever else may knock.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use antiphon_device::host::memory::SharedMemory;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{
    Meeting, RETRY, RendezvousError, Ticket, Watch,
    address::Listener,
    connection::{Connection, Ended},
    frame::{Card, Frame, Nonce},
    secret::random_hex,
};

/// How many may be connected without having proved themselves. Beyond that, the longest silent one must go.
const UNPROVED: usize = 128;
/// A guest that has been connected for less than this is not sent away for lack of room: a rank needs a millisecond.
const COURTESY: Duration = Duration::from_millis(100);
/// A guest that has not proved itself by then is sent away in any case.
const SILENCE: Duration = Duration::from_secs(5);
/// How many connections to accept before looking after the guests again.
const BURST: usize = 64;
/// The longest sleep between two looks at the clock.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

pub(super) fn await_all(
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    timeout: Duration,
    watch: Watch<'_>,
) -> Result<Meeting, RendezvousError> {
    let start = Instant::now();
    let mut door = Door { ticket, seats: vec![None; card.world_size], guests: Vec::new(), start, timeout };
    door.seats[0] = Some(card);
    let listener = door.open()?;
    while door.seats.iter().any(Option::is_none) {
        if start.elapsed() >= timeout {
            return Err(door.give_up());
        }
        watch()?;
        door.wait(Some(&listener));
        door.accept(&listener);
        door.look_after_guests();
    }
    // The name is free again before anyone is welcomed, so that a rank that goes on to its next meeting under the
    // same name cannot end up at this one.
    drop(listener);
    let memory = SharedMemory::create(bytes)?;
    door.welcome(memory)
}

/// One who has connected.
struct Guest {
    connection: Connection,
    nonce: Nonce,
    since: Instant,
    /// Its rank and nonce, once it has proved itself.
    seat: Option<(usize, Nonce)>,
}

struct Door<'a> {
    ticket: &'a Ticket,
    /// By rank; rank 0 sits from the start.
    seats: Vec<Option<Card>>,
    guests: Vec<Guest>,
    start: Instant,
    timeout: Duration,
}

impl Door<'_> {
    /// Opens the socket, waiting for an earlier meeting under the same name to end.
    fn open(&self) -> Result<Listener, RendezvousError> {
        loop {
            if let Some(listener) = self.ticket.address.listen()? {
                return Ok(listener);
            }
            if self.start.elapsed() >= self.timeout {
                return Err(self.missing(Some("another process listens there".into())));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn missing(&self, last_refusal: Option<String>) -> RendezvousError {
        RendezvousError::Missing {
            rank: 0,
            world_size: self.seats.len(),
            address: self.ticket.address.clone(),
            waited: self.start.elapsed(),
            missing: self.empty_seats(),
            last_refusal,
        }
    }

    fn empty_seats(&self) -> Vec<usize> {
        (0..self.seats.len()).filter(|&rank| self.seats[rank].is_none()).collect()
    }

    /// Tells those who came who did not.
    fn give_up(&mut self) -> RendezvousError {
        let missing = self.empty_seats();
        let reason = format!("ranks {missing:?} never arrived");
        for guest in self.guests.iter_mut().filter(|g| g.seat.is_some()) {
            let refusal = Frame::Refusal { reason: reason.clone(), retry: false, missing: missing.clone() };
            let _ = guest.connection.send(&refusal);
        }
        self.missing(None)
    }

    fn unproved(&self) -> usize {
        self.guests.iter().filter(|g| g.seat.is_none()).count()
    }

    /// Sleeps until someone knocks or says something.
    fn wait(&self, listener: Option<&Listener>) {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.guests.len() + 1);
        for guest in &self.guests {
            let out = if guest.connection.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(guest.connection.as_fd(), PollFlags::IN | out));
        }
        if let Some(listener) = listener
            && self.unproved() < UNPROVED
        {
            fds.push(PollFd::from_borrowed_fd(listener.socket.as_fd(), PollFlags::IN));
        }
        // Woken, interrupted or timed out: the caller looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&TICK));
    }

    fn accept(&mut self, listener: &Listener) {
        for _ in 0..BURST {
            if self.unproved() >= UNPROVED && !self.make_room() {
                return;
            }
            let Ok((socket, _)) = listener.socket.accept() else { return };
            if socket.set_nonblocking(true).is_ok() {
                self.greet(socket.into());
            }
        }
    }

    /// Sends the longest silent guest away; false if all have come just now.
    fn make_room(&mut self) -> bool {
        // Guests are in the order of their coming.
        let oldest = self.guests.iter().position(|g| g.seat.is_none());
        match oldest {
            Some(index) if self.guests[index].since.elapsed() >= COURTESY => {
                self.guests.remove(index);
                true
            }
            _ => false,
        }
    }

    fn greet(&mut self, socket: OwnedFd) {
        let connection = Connection::new(socket);
        if connection.other_user().is_some() {
            return;
        }
        let mut guest = Guest { connection, nonce: random_hex(), since: Instant::now(), seat: None };
        if guest.connection.send(&Frame::Challenge { nonce: guest.nonce.clone() }).is_ok() {
            self.guests.push(guest);
        }
    }

    fn look_after_guests(&mut self) {
        let mut guests = std::mem::take(&mut self.guests);
        guests.retain_mut(|guest| {
            let stays =
                self.converse(guest).is_ok() && (guest.seat.is_some() || guest.since.elapsed() < SILENCE);
            if let (false, Some((rank, _))) = (stays, &guest.seat) {
                self.seats[*rank] = None; // it ended, or was killed; a restarted one may take its seat
            }
            stays
        });
        self.guests = guests;
    }

    /// Hears what a guest has to say; an error sends it away.
    fn converse(&mut self, guest: &mut Guest) -> Result<(), Ended> {
        guest.connection.flush()?;
        while let Some(frame) = guest.connection.receive()? {
            let Frame::Join { card, nonce, proof } = frame else { return Err(Ended::Closed) };
            if guest.seat.is_some() {
                return Err(Ended::Closed);
            }
            if !self.ticket.secret.verify_join(&guest.nonce, &nonce, &card, &proof) {
                return refuse(
                    guest,
                    "the secret differs: is ANTIPHON_SECRET the same everywhere?".into(),
                    false,
                );
            }
            if let Err((reason, retry)) = self.admit(&card) {
                return refuse(guest, reason, retry);
            }
            guest.seat = Some((card.rank, nonce));
            let rank = card.rank;
            self.seats[rank] = Some(card);
            if guest.connection.send(&Frame::Noted).is_err() {
                return Err(Ended::Closed);
            }
        }
        Ok(())
    }

    /// Whether a proved rank fits this world; if not, why, and whether it may ask again.
    fn admit(&self, card: &Card) -> Result<(), (String, bool)> {
        let mine = self.seats[0].as_ref().expect("rank 0 sits from the start");
        if card.world_size != mine.world_size {
            let reason = format!("it expects a world of {}, rank 0 of {}", card.world_size, mine.world_size);
            return Err((reason, false));
        }
        if card.arena_bytes != mine.arena_bytes {
            let reason = format!(
                "it expects {} bytes of symmetric memory (ANTIPHON_ARENA_BYTES), rank 0 has {}",
                card.arena_bytes, mine.arena_bytes
            );
            return Err((reason, false));
        }
        match self.seats.get(card.rank) {
            None => {
                Err((format!("rank {} is not below the world size {}", card.rank, mine.world_size), false))
            }
            Some(Some(seated)) => {
                Err((format!("rank {} has already joined, as process {}", card.rank, seated.pid), true))
            }
            Some(None) => Ok(()),
        }
    }

    /// Gives everybody all cards and the memory.
    fn welcome(mut self, memory: SharedMemory) -> Result<Meeting, RendezvousError> {
        let cards: Vec<Card> = self.seats.drain(..).map(|s| s.expect("all seats are taken")).collect();
        self.guests.retain(|g| g.seat.is_some());
        for guest in &mut self.guests {
            let (_, nonce) = guest.seat.as_ref().expect("only the seated are left");
            let proof = self.ticket.secret.prove_welcome(&guest.nonce, nonce, &cards);
            // One that has died since is noticed as lost by everybody, in the first barrier.
            let _ =
                guest.connection.send_with(&Frame::Welcome { cards: cards.clone(), proof }, memory.as_fd());
        }
        while self.start.elapsed() < self.timeout && self.guests.iter().any(|g| g.connection.has_unsent()) {
            self.wait(None);
            self.guests.retain_mut(|g| g.connection.flush().is_ok());
        }
        Ok(Meeting { cards, memory })
    }
}

fn refuse(guest: &mut Guest, reason: String, retry: bool) -> Result<(), Ended> {
    let _ = guest.connection.send(&Frame::Refusal { reason, retry, missing: Vec::new() });
    Err(Ended::Closed)
}
