//! A rank other than 0: connects, proves itself, and waits to be welcomed.

use std::time::{Duration, Instant};

use antiphon_device::host::memory::SharedMemory;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::{
    Address, Meeting, RETRY, RendezvousError, Ticket, Watch,
    connection::{Connection, Ended},
    frame::{Card, Frame},
    secret::random_hex,
};

/// How much longer than its own deadline a rank that has joined waits for rank 0 to say who is missing.
const GRACE: Duration = Duration::from_secs(1);

pub(super) fn join(
    ticket: &Ticket,
    card: Card,
    bytes: usize,
    timeout: Duration,
    watch: Watch<'_>,
) -> Result<Meeting, RendezvousError> {
    let mut member = Member { watch, ticket, card, start: Instant::now(), timeout, last_refusal: None };
    loop {
        if let Some(socket) = ticket.address.connect()?
            && let Some((cards, descriptor)) = member.converse(Connection::new(socket))?
        {
            return Ok(Meeting { cards, memory: SharedMemory::from_fd(descriptor, bytes)? });
        }
        if member.start.elapsed() >= timeout {
            return Err(member.missing(vec![0]));
        }
        watch()?;
        std::thread::sleep(RETRY);
    }
}

struct Member<'a> {
    watch: Watch<'a>,
    ticket: &'a Ticket,
    card: Card,
    start: Instant,
    timeout: Duration,
    last_refusal: Option<String>,
}

impl Member<'_> {
    fn address(&self) -> Address {
        self.ticket.address.clone()
    }

    fn impostor(&self, problem: String) -> RendezvousError {
        RendezvousError::Impostor { address: self.address(), problem }
    }

    fn missing(&mut self, missing: Vec<usize>) -> RendezvousError {
        RendezvousError::Missing {
            rank: self.card.rank,
            world_size: self.card.world_size,
            address: self.address(),
            waited: self.start.elapsed(),
            missing,
            last_refusal: self.last_refusal.take(),
        }
    }

    /// One conversation with rank 0: all cards and the memory, or nothing if it is worth another try.
    fn converse(
        &mut self,
        mut connection: Connection,
    ) -> Result<Option<(Vec<Card>, std::os::fd::OwnedFd)>, RendezvousError> {
        let mine = random_hex();
        let mut theirs = None;
        let mut noted = false;
        if let Some(user) = connection.other_user() {
            return Err(self.impostor(format!("it belongs to user {user}")));
        }
        loop {
            match connection.receive() {
                Ok(Some(Frame::Challenge { nonce })) if theirs.is_none() => {
                    let proof = self.ticket.secret.prove_join(&nonce, &mine, &self.card);
                    theirs = Some(nonce);
                    let join = Frame::Join { card: self.card.clone(), nonce: mine.clone(), proof };
                    if connection.send(&join).is_err() {
                        return Ok(None);
                    }
                }
                Ok(Some(Frame::Noted)) if !noted => noted = true,
                // Whoever chatters on must not keep us from looking at the clock.
                Ok(Some(Frame::Challenge { .. } | Frame::Noted)) => {
                    return Err(self.impostor("it says the same thing twice".into()));
                }
                Ok(Some(Frame::Refusal { missing, .. })) if !missing.is_empty() => {
                    return Err(self.missing(missing));
                }
                Ok(Some(Frame::Refusal { reason, retry: true, .. })) => {
                    self.last_refusal = Some(reason);
                    return Ok(None);
                }
                Ok(Some(Frame::Refusal { reason, .. })) => {
                    let rank = self.card.rank;
                    return Err(RendezvousError::Refused { rank, address: self.address(), reason });
                }
                Ok(Some(Frame::Welcome { cards, proof })) => {
                    let proved =
                        self.ticket.secret.verify_welcome(&theirs.unwrap_or_default(), &mine, &cards, &proof);
                    return match connection.descriptor.take() {
                        Some(memory) if proved && cards.len() == self.card.world_size => {
                            Ok(Some((cards, memory)))
                        }
                        _ => Err(self.impostor("it does not know the secret".into())),
                    };
                }
                Ok(Some(Frame::Join { .. })) => return Err(self.impostor("it asks to join".into())),
                Err(Ended::Malformed(error)) => return Err(self.impostor(error.to_string())),
                Err(Ended::Closed) if noted => {
                    return Err(RendezvousError::RootLost { address: self.address() });
                }
                Err(Ended::Closed) => return Ok(None),
                Ok(None) => self.wait(&connection, noted)?,
            }
        }
    }

    /// Waits for more bytes.
    fn wait(&mut self, connection: &Connection, noted: bool) -> Result<(), RendezvousError> {
        let patience = if noted { self.timeout.saturating_add(GRACE) } else { self.timeout };
        if self.start.elapsed() >= patience {
            return Err(self.missing(if noted { vec![] } else { vec![0] }));
        }
        (self.watch)()?;
        let mut fds = [PollFd::from_borrowed_fd(connection.as_fd(), PollFlags::IN)];
        // Woken, interrupted or not: the caller looks again.
        let _ = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
        Ok(())
    }
}
