//! Rank 0 of a rendezvous: listens until every rank has joined, and refuses peers that cannot prove the secret.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_device::host::{memory::SharedMemory, process::ProcessWatch};
use rustix::event::{PollFd, PollFlags};

use super::{
    Met, PATIENCE, RETRY, RendezvousError, TICK, Ticket, Wait,
    address::Listener,
    connection::{Connection, Ended},
    frame::{Card, Frame, Nonce},
    secret::random_hex,
    strangers::Strangers,
};

/// Most connections that have not proved the secret. When there are more, the oldest of them is closed.
const MAX_UNAUTHENTICATED: usize = 128;
/// A connection younger than this is not closed for lack of room: a rank needs a millisecond to prove the secret.
const MIN_STAY: Duration = Duration::from_millis(100);
/// A connection that has not proved the secret after this time is closed in any case.
const AUTHENTICATION_TIME: Duration = Duration::from_secs(5);
/// Connections to accept before the clients are served again.
const ACCEPTS_AT_ONCE: usize = 64;

/// The time in which the process that holds the address must prove the secret, each time it is asked.
const ANSWER_TIME: Duration = Duration::from_millis(200);
/// The longest time for which rank 0 tells the others that the meeting failed.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Awaits all ranks, and shares `bytes` bytes of memory with them, or none.
pub(super) fn await_all(
    ticket: &Ticket,
    card: Card,
    bytes: Option<usize>,
    wait: Wait<'_>,
) -> Result<Met, RendezvousError> {
    let start = Instant::now();
    let world_size = card.world_size;
    let ranks = (0..world_size).map(|_| None).collect();
    let strangers = Strangers::default();
    let mut server = Server { ticket, ranks, world_size, clients: Vec::new(), strangers, start, wait };
    let process = ProcessWatch::of_this_process().ok();
    server.ranks[0] = Some(JoinedRank { card, process: process.map(Arc::new) });
    let listener = server.open()?;
    let gathered = server.gather(&listener).and_then(|()| Ok(bytes.map(SharedMemory::create).transpose()?));
    match gathered {
        Ok(memory) => {
            // The address is free again before any rank is welcomed: a rank that goes on to its next meeting under the
            // same address cannot connect to this one.
            drop(listener);
            server.welcome(memory)
        }
        Err(error) => Err(server.give_up(listener, error)),
    }
}

/// A connected peer.
struct Client {
    connection: Connection,
    nonce: Nonce,
    since: Instant,
    /// Its rank and nonce, once it has proved the secret.
    joined: Option<(usize, Nonce)>,
}

/// A rank that has joined.
struct JoinedRank {
    card: Card,
    process: Option<Arc<ProcessWatch>>,
}

struct Server<'a> {
    ticket: &'a Ticket,
    /// The ranks that have joined, indexed by rank. Rank 0 has joined from the start.
    ranks: Vec<Option<JoinedRank>>,
    world_size: usize,
    clients: Vec<Client>,
    strangers: Strangers,
    start: Instant,
    wait: Wait<'a>,
}

impl Server<'_> {
    /// Opens the socket; waits until an earlier meeting under the same address has ended.
    fn open(&self) -> Result<Listener, RendezvousError> {
        let mut silent_since = None;
        loop {
            if let Some(listener) = self.ticket.address.listen()? {
                return Ok(listener);
            }
            match self.is_held_by_another_meeting()? {
                true => silent_since = None,
                false if silent_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE => {}
                false => {
                    let holder = "a process that does not know the secret, or does not answer";
                    return Err(self.ticket.address.taken(holder.into()));
                }
            }
            if self.start.elapsed() >= self.wait.timeout {
                return Err(self.missing(self.missing_ranks(), Some("another process listens there".into())));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Whether the process that holds the address knows the secret. Such a process gives the address up again.
    fn is_held_by_another_meeting(&self) -> Result<bool, RendezvousError> {
        let Some(socket) = self.ticket.address.connect()? else { return Ok(false) };
        let mut connection = Connection::new(socket, 0);
        if let Some(user) = connection.other_user() {
            return Err(self.ticket.address.taken(format!("user {user}")));
        }
        let (mine, mut theirs, connected) = (random_hex(), None, Instant::now());
        while connected.elapsed() < ANSWER_TIME {
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

    /// Waits until every rank has joined.
    fn gather(&mut self, listener: &Listener) -> Result<(), RendezvousError> {
        while self.ranks.iter().any(Option::is_none) {
            if self.start.elapsed() >= self.wait.timeout {
                return Err(self.missing(self.missing_ranks(), None));
            }
            (self.wait.watch)()?;
            self.wait(Some(listener));
            self.accept(listener)?;
            self.serve_clients();
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
            turned_away: self.strangers.turned_away(),
        }
    }

    fn missing_ranks(&self) -> Vec<usize> {
        (0..self.ranks.len()).filter(|&rank| self.ranks[rank].is_none()).collect()
    }

    /// Tells the ranks that have joined, and those that connect now, why the meeting failed; returns the reason.
    fn give_up(&mut self, listener: Listener, error: RendezvousError) -> RendezvousError {
        let (missing, linger) = match &error {
            RendezvousError::Missing { missing, .. } => (missing.clone(), Duration::ZERO),
            RendezvousError::Interrupted => (Vec::new(), Duration::ZERO),
            _ => (Vec::new(), REFUSAL_TIME), // so early that other ranks may be about to connect
        };
        let refusal = Frame::Refusal { reason: format!("rank 0 failed: {error}"), retry: false, missing };
        self.clients.retain(|client| client.joined.is_some());
        self.clients.retain_mut(|client| client.connection.send(&refusal).is_ok());
        self.flush_until(Instant::now() + REFUSAL_TIME);
        // The descriptors of closed connections are free now for the connections that could not be accepted.
        self.clients.clear();
        self.ranks.clear();
        let deadline = Instant::now() + linger;
        loop {
            match listener.accept() {
                Ok(socket) => {
                    let mut connection = Connection::new(socket, 0);
                    if connection.other_user().is_none() {
                        let _ = connection.send(&refusal);
                    }
                }
                Err(_) if Instant::now() < deadline => std::thread::sleep(RETRY),
                Err(_) => return error,
            }
        }
    }

    /// Sends the unsent rest of all frames, until the deadline at the latest.
    fn flush_until(&mut self, deadline: Instant) {
        while self.clients.iter().any(|g| g.connection.has_unsent()) && Instant::now() < deadline {
            std::thread::sleep(RETRY);
            self.clients.retain_mut(|g| g.connection.flush().is_ok());
        }
    }

    fn unauthenticated(&self) -> usize {
        self.clients.iter().filter(|g| g.joined.is_none()).count()
    }

    /// Sleeps until a peer connects or sends something, or a frame can be sent on.
    fn wait(&self, listener: Option<&Listener>) {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(self.clients.len() + 1);
        for client in &self.clients {
            let out = if client.connection.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
            fds.push(PollFd::from_borrowed_fd(client.connection.as_fd(), PollFlags::IN | out));
        }
        if let Some(listener) = listener
            && self.unauthenticated() < MAX_UNAUTHENTICATED
        {
            fds.push(PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN));
        }
        // Woken, interrupted or timed out: the caller looks at everything again.
        let _ = rustix::event::poll(&mut fds, Some(&TICK));
    }

    fn accept(&mut self, listener: &Listener) -> Result<(), RendezvousError> {
        for _ in 0..ACCEPTS_AT_ONCE {
            if self.unauthenticated() >= MAX_UNAUTHENTICATED && !self.make_room() {
                break;
            }
            match listener.accept() {
                Ok(socket) => self.challenge(socket),
                Err(error) if is_of_the_connection(&error) => break,
                // Unauthenticated connections may have taken all descriptors, so one of them is closed. (Else the pending
                // connection would stay ready, and this loop would spin.)
                Err(_) if self.unauthenticated() > 0 => {
                    self.make_room();
                    break;
                }
                Err(error) => return Err(self.ticket.address.failed(error)),
            }
        }
        Ok(())
    }

    /// Closes the oldest unauthenticated connection; false if all of them are young.
    fn make_room(&mut self) -> bool {
        // Clients are in the order in which they connected.
        let oldest = self.clients.iter().position(|g| g.joined.is_none());
        match oldest {
            Some(index) if self.clients[index].since.elapsed() >= MIN_STAY => {
                self.clients.remove(index);
                true
            }
            _ => false,
        }
    }

    fn challenge(&mut self, socket: OwnedFd) {
        let connection = Connection::new(socket, 1);
        if connection.other_user().is_some() {
            self.strangers.of_another_user(&connection);
            return;
        }
        let mut client = Client { connection, nonce: random_hex(), since: Instant::now(), joined: None };
        if client.connection.send(&Frame::Challenge { nonce: client.nonce.clone() }).is_ok() {
            self.clients.push(client);
        }
    }

    fn serve_clients(&mut self) {
        let mut clients = std::mem::take(&mut self.clients);
        clients.retain_mut(|client| {
            let stays = self.handle_frames(client).is_ok()
                && (client.joined.is_some() || client.since.elapsed() < AUTHENTICATION_TIME);
            if let (false, Some((rank, _))) = (stays, &client.joined) {
                self.ranks[*rank] = None; // it ended, or was killed; a restarted process may join as this rank
            }
            stays
        });
        self.clients = clients;
    }

    /// Handles the frames that a client has sent; an error closes its connection.
    fn handle_frames(&mut self, client: &mut Client) -> Result<(), Ended> {
        client.connection.flush()?;
        while let Some(frame) = client.connection.receive()? {
            let (card, nonce, proof) = match frame {
                Frame::Join { card, nonce, proof } if client.joined.is_none() => (card, nonce, proof),
                Frame::Ask { nonce } if client.joined.is_none() => {
                    let proof = self.ticket.secret.prove_root(&client.nonce, &nonce);
                    client.connection.send(&Frame::Noted { proof })?;
                    continue;
                }
                _ => return Err(Ended::Closed),
            };
            if !self.ticket.secret.verify_join(&client.nonce, &nonce, &card, &proof) {
                self.strangers.without_the_secret(&client.connection);
                return refuse(
                    client,
                    "the secret differs: is ANTIPHON_SECRET the same everywhere?".into(),
                    false,
                );
            }
            if let Err((reason, retry)) = self.admit(&card) {
                return refuse(client, reason, retry);
            }
            let noted = Frame::Noted { proof: self.ticket.secret.prove_root(&client.nonce, &nonce) };
            client.joined = Some((card.rank, nonce));
            let rank = card.rank;
            let process = client.connection.descriptors.pop().map(|handle| Arc::new(handle.into()));
            self.ranks[rank] = Some(JoinedRank { card, process });
            client.connection.send(&noted)?;
        }
        Ok(())
    }

    /// Whether a proved rank fits this world; if not, why, and whether it may ask again.
    fn admit(&self, card: &Card) -> Result<(), (String, bool)> {
        let mine = &self.ranks[0].as_ref().expect("rank 0 has joined from the start").card;
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
        match self.ranks.get(card.rank) {
            None => {
                Err((format!("rank {} is not below the world size {}", card.rank, mine.world_size), false))
            }
            Some(Some(joined)) => {
                Err((format!("rank {} has already joined, as process {}", card.rank, joined.card.pid), true))
            }
            Some(None) => Ok(()),
        }
    }

    /// Sends every rank all cards, and, where there is memory to share, that and the handles of the other ranks' processes.
    fn welcome(mut self, memory: Option<(SharedMemory, OwnedFd)>) -> Result<Met, RendezvousError> {
        let joined: Vec<JoinedRank> =
            std::mem::take(&mut self.ranks).into_iter().map(|s| s.expect("all ranks have joined")).collect();
        let cards: Vec<Card> = joined.iter().map(|rank| rank.card.clone()).collect();
        let random = random_hex();
        let (memory, descriptor) = memory.unzip();
        let descriptor: Option<Arc<dyn AsFd>> = descriptor.map(|descriptor| Arc::new(descriptor) as _);
        self.clients.retain_mut(|client| {
            let Some((rank, nonce)) = &client.joined else { return false };
            let handles = descriptor.as_ref().map_or(Vec::new(), |_| handles_for(*rank, &joined));
            let (ranks, handles): (Vec<usize>, Vec<_>) = handles.into_iter().unzip();
            let proof = self.ticket.secret.prove_welcome(&client.nonce, nonce, (&cards, &ranks, &random));
            let (cards, random) = (cards.clone(), random.clone());
            let welcome = Frame::Welcome { cards, handles: ranks, random, proof };
            let handles = handles.into_iter().map(|handle| handle as Arc<dyn AsFd>);
            let descriptors: Vec<_> = descriptor.iter().cloned().chain(handles).collect();
            // The first barrier reports a rank that has died since.
            client.connection.send_with(&welcome, &descriptors).is_ok()
        });
        self.flush_until(self.start + self.wait.timeout);
        let unsent = self.clients.iter().filter(|g| g.connection.has_unsent());
        let unsent: Vec<usize> = unsent.filter_map(|g| g.joined.as_ref().map(|(rank, _)| *rank)).collect();
        if !unsent.is_empty() {
            let what = "they did not take the memory that rank 0 handed to them";
            return Err(self.missing(unsent, Some(what.into())));
        }
        let processes = super::processes(&cards, handles_for(0, &joined));
        Ok(Met { cards, processes, memory, random })
    }
}

/// The handles of the processes that `rank` watches: each other process once, under the lowest of its ranks.
fn handles_for(rank: usize, joined: &[JoinedRank]) -> Vec<(usize, Arc<ProcessWatch>)> {
    let mut handles: Vec<(usize, Arc<ProcessWatch>)> = Vec::new();
    for (at, other) in joined.iter().enumerate().filter(|(at, _)| *at != rank) {
        let watched = handles.iter().map(|(first, _)| *first).chain([rank]);
        let is_known = watched.into_iter().any(|known| joined[known].card.is_of_process(&other.card));
        if let Some(process) = other.process.clone().filter(|_| !is_known) {
            handles.push((at, process));
        }
    }
    handles
}

fn refuse(client: &mut Client, reason: String, retry: bool) -> Result<(), Ended> {
    let _ = client.connection.send(&Frame::Refusal { reason, retry, missing: Vec::new() });
    Err(Ended::Closed)
}

/// Whether accepting failed because of the pending connection, and not because this process lacks a resource.
fn is_of_the_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}
