//! Rank 0: listens until every rank has come, whoever else may knock.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_device::host::{memory::SharedMemory, process::ProcessWatch};
use rustix::event::{PollFd, PollFlags};

use super::{
    Meeting, PATIENCE, RETRY, RendezvousError, TICK, Ticket, Watch,
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

/// How long whoever holds the name may take to say who it is, each time it is asked.
const ASKING: Duration = Duration::from_millis(200);
/// How long rank 0 takes at most to tell the others that the meeting failed.
const FAREWELL: Duration = Duration::from_secs(1);

pub(super) fn await_all(
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    timeout: Duration,
    watch: Watch<'_>,
) -> Result<Meeting, RendezvousError> {
    let start = Instant::now();
    let world_size = card.world_size;
    let seats = (0..world_size).map(|_| None).collect();
    let mut door = Door { ticket, seats, world_size, guests: Vec::new(), start, timeout };
    let process = ProcessWatch::of_this_process().ok();
    door.seats[0] = Some(Seat { card, process: process.map(Arc::new) });
    let listener = door.open()?;
    let gathered = door.gather(&listener, watch).and_then(|()| Ok(SharedMemory::create(bytes)?));
    match gathered {
        Ok((memory, descriptor)) => {
            // The name is free again before anyone is welcomed, so that a rank that goes on to its next meeting under
            // the same name cannot end up at this one.
            drop(listener);
            door.welcome(memory, descriptor)
        }
        Err(error) => Err(door.give_up(listener, error)),
    }
}

/// One who has connected.
struct Guest {
    connection: Connection,
    nonce: Nonce,
    since: Instant,
    /// Its rank and nonce, once it has proved itself.
    seat: Option<(usize, Nonce)>,
}

/// A rank that has come.
struct Seat {
    card: Card,
    process: Option<Arc<ProcessWatch>>,
}

struct Door<'a> {
    ticket: &'a Ticket,
    /// By rank; rank 0 sits from the start.
    seats: Vec<Option<Seat>>,
    world_size: usize,
    guests: Vec<Guest>,
    start: Instant,
    timeout: Duration,
}

impl Door<'_> {
    /// Opens the socket, waiting for an earlier meeting under the same name to end.
    fn open(&self) -> Result<Listener, RendezvousError> {
        let mut stranger_since = None;
        loop {
            if let Some(listener) = self.ticket.address.listen()? {
                return Ok(listener);
            }
            match self.is_held_by_a_world()? {
                true => stranger_since = None,
                false if stranger_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE => {}
                false => {
                    let holder = "a process that does not know the secret, or does not answer";
                    return Err(self.ticket.address.taken(holder.into()));
                }
            }
            if self.start.elapsed() >= self.timeout {
                return Err(self.missing(self.empty_seats(), Some("another process listens there".into())));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Whether the process that holds the name knows the secret, and so gives the name up again.
    fn is_held_by_a_world(&self) -> Result<bool, RendezvousError> {
        let Some(socket) = self.ticket.address.connect()? else { return Ok(false) };
        let mut connection = Connection::new(socket, 0);
        if let Some(user) = connection.other_user() {
            return Err(self.ticket.address.taken(format!("user {user}")));
        }
        let (mine, mut theirs, connected) = (random_hex(), None, Instant::now());
        while connected.elapsed() < ASKING {
            match connection.receive() {
                Ok(Some(Frame::Challenge { nonce })) if theirs.is_none() => {
                    theirs = Some(nonce);
                    if connection.send(&Frame::Ask { nonce: mine.clone() }).is_err() {
                        return Ok(false);
                    }
                }
                Ok(Some(Frame::Noted { proof })) => {
                    let theirs = theirs.unwrap_or_default();
                    return Ok(self.ticket.secret.verify_root(&theirs, &mine, &proof));
                }
                Ok(None) => connection.await_more(&TICK),
                Ok(Some(_)) | Err(_) => return Ok(false),
            }
        }
        Ok(false)
    }

    /// Waits until every seat is taken.
    fn gather(&mut self, listener: &Listener, watch: Watch<'_>) -> Result<(), RendezvousError> {
        while self.seats.iter().any(Option::is_none) {
            if self.start.elapsed() >= self.timeout {
                return Err(self.missing(self.empty_seats(), None));
            }
            watch()?;
            self.wait(Some(listener));
            self.accept(listener)?;
            self.look_after_guests();
        }
        Ok(())
    }

    fn missing(&self, missing: Vec<usize>, last_refusal: Option<String>) -> RendezvousError {
        RendezvousError::Missing {
            rank: 0,
            world_size: self.world_size,
            address: self.ticket.address.clone(),
            waited: self.start.elapsed(),
            missing,
            last_refusal,
        }
    }

    fn empty_seats(&self) -> Vec<usize> {
        (0..self.seats.len()).filter(|&rank| self.seats[rank].is_none()).collect()
    }

    /// Tells those who came, and those who are about to, why there is no world; returns the reason.
    fn give_up(&mut self, listener: Listener, error: RendezvousError) -> RendezvousError {
        let (missing, farewell) = match &error {
            RendezvousError::Missing { missing, .. } => (missing.clone(), Duration::ZERO),
            RendezvousError::Interrupted => (Vec::new(), Duration::ZERO),
            _ => (Vec::new(), FAREWELL), // so early that others may be on their way
        };
        let refusal = Frame::Refusal { reason: format!("rank 0 failed: {error}"), retry: false, missing };
        self.guests.retain(|guest| guest.seat.is_some());
        self.guests.retain_mut(|guest| guest.connection.send(&refusal).is_ok());
        self.flush_until(Instant::now() + FAREWELL);
        // Their descriptors, and that of this process, are free now for those whom rank 0 could not let in.
        self.guests.clear();
        self.seats.clear();
        let deadline = Instant::now() + farewell;
        loop {
            match listener.socket.accept() {
                Ok((socket, _)) => {
                    let mut connection = Connection::new(socket.into(), 0);
                    if connection.other_user().is_none() {
                        let _ = connection.send(&refusal);
                    }
                }
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
                Err(_) => return error,
            }
        }
    }

    /// Sends what waits for room, until the deadline at the latest.
    fn flush_until(&mut self, deadline: Instant) {
        while self.guests.iter().any(|g| g.connection.has_unsent()) && Instant::now() < deadline {
            std::thread::sleep(RETRY);
            self.guests.retain_mut(|g| g.connection.flush().is_ok());
        }
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

    fn accept(&mut self, listener: &Listener) -> Result<(), RendezvousError> {
        for _ in 0..BURST {
            if self.unproved() >= UNPROVED && !self.make_room() {
                break;
            }
            match listener.socket.accept() {
                Ok((socket, _)) if socket.set_nonblocking(true).is_ok() => self.greet(socket.into()),
                Ok(_) => {}
                Err(error) if is_about_the_guest(&error) => break,
                // Perhaps strangers have all the descriptors. (Otherwise whoever knocks stays at the door, and it would
                // look as if rank 0 had forever something to do.)
                Err(_) if self.unproved() > 0 => {
                    self.make_room();
                    break;
                }
                Err(error) => return Err(self.ticket.address.failed(error)),
            }
        }
        Ok(())
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
        let connection = Connection::new(socket, 1);
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
            let (card, nonce, proof) = match frame {
                Frame::Join { card, nonce, proof } if guest.seat.is_none() => (card, nonce, proof),
                Frame::Ask { nonce } if guest.seat.is_none() => {
                    let proof = self.ticket.secret.prove_root(&guest.nonce, &nonce);
                    guest.connection.send(&Frame::Noted { proof })?;
                    continue;
                }
                _ => return Err(Ended::Closed),
            };
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
            let noted = Frame::Noted { proof: self.ticket.secret.prove_root(&guest.nonce, &nonce) };
            guest.seat = Some((card.rank, nonce));
            let rank = card.rank;
            let process = guest.connection.descriptors.pop().map(|handle| Arc::new(handle.into()));
            self.seats[rank] = Some(Seat { card, process });
            guest.connection.send(&noted)?;
        }
        Ok(())
    }

    /// Whether a proved rank fits this world; if not, why, and whether it may ask again.
    fn admit(&self, card: &Card) -> Result<(), (String, bool)> {
        let mine = &self.seats[0].as_ref().expect("rank 0 sits from the start").card;
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
                Err((format!("rank {} has already joined, as process {}", card.rank, seated.card.pid), true))
            }
            Some(None) => Ok(()),
        }
    }

    /// Gives everybody all cards, the memory and the handles of the others' processes.
    fn welcome(mut self, memory: SharedMemory, descriptor: OwnedFd) -> Result<Meeting, RendezvousError> {
        let seats: Vec<Seat> =
            std::mem::take(&mut self.seats).into_iter().map(|s| s.expect("all seats are taken")).collect();
        let cards: Vec<Card> = seats.iter().map(|seat| seat.card.clone()).collect();
        let descriptor: Arc<dyn AsFd> = Arc::new(descriptor);
        self.guests.retain_mut(|guest| {
            let Some((rank, nonce)) = &guest.seat else { return false };
            let (ranks, handles): (Vec<usize>, Vec<_>) = handles_for(*rank, &seats).into_iter().unzip();
            let proof = self.ticket.secret.prove_welcome(&guest.nonce, nonce, (&cards, &ranks));
            let welcome = Frame::Welcome { cards: cards.clone(), handles: ranks, proof };
            let handles = handles.into_iter().map(|handle| handle as Arc<dyn AsFd>);
            let descriptors: Vec<_> = std::iter::once(descriptor.clone()).chain(handles).collect();
            // One that has died since is noticed as lost by everybody, in the first barrier.
            guest.connection.send_with(&welcome, &descriptors).is_ok()
        });
        self.flush_until(self.start + self.timeout);
        let unsent = self.guests.iter().filter(|g| g.connection.has_unsent());
        let unsent: Vec<usize> = unsent.filter_map(|g| g.seat.as_ref().map(|(rank, _)| *rank)).collect();
        if !unsent.is_empty() {
            let what = "they did not take the memory that rank 0 handed to them";
            return Err(self.missing(unsent, Some(what.into())));
        }
        let processes = super::processes(&cards, handles_for(0, &seats));
        Ok(Meeting { cards, processes, memory })
    }
}

/// The handles of the processes that `rank` is to watch: each but its own once, under the first of its ranks.
fn handles_for(rank: usize, seats: &[Seat]) -> Vec<(usize, Arc<ProcessWatch>)> {
    let mut handles: Vec<(usize, Arc<ProcessWatch>)> = Vec::new();
    for (at, seat) in seats.iter().enumerate().filter(|(at, _)| *at != rank) {
        let watched = handles.iter().map(|(first, _)| *first).chain([rank]);
        let is_known = watched.into_iter().any(|known| seats[known].card.is_of_process(&seat.card));
        if let Some(process) = seat.process.clone().filter(|_| !is_known) {
            handles.push((at, process));
        }
    }
    handles
}

fn refuse(guest: &mut Guest, reason: String, retry: bool) -> Result<(), Ended> {
    let _ = guest.connection.send(&Frame::Refusal { reason, retry, missing: Vec::new() });
    Err(Ended::Closed)
}

/// Whether accepting failed because nobody is there (any more), and not for want of something that this process needs.
fn is_about_the_guest(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}
