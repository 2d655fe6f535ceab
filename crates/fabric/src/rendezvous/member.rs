//! A rank other than 0: connects, proves itself, and waits to be welcomed.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    time::{Duration, Instant},
};

use antiphon_device::host::{memory::SharedMemory, process::ProcessWatch};
use rustix::io::Errno;

use super::{
    Address, Met, PATIENCE, RETRY, RendezvousError, TICK, Ticket, TurnedAway, Wait,
    connection::{Connection, Ended},
    frame::{Card, Frame, Nonce},
    secret::random_hex,
};

/// How much longer than its own deadline a rank that has joined waits for rank 0's list of missing ranks.
const GRACE: Duration = Duration::from_secs(1);

/// Joins rank 0, which shares `bytes` bytes of memory, or none.
pub(super) fn join(
    ticket: &Ticket,
    card: Card,
    bytes: Option<usize>,
    wait: Wait<'_>,
) -> Result<Met, RendezvousError> {
    let mut member = Member {
        wait,
        ticket,
        card: card.clone(),
        shares: bytes.is_some(),
        start: Instant::now(),
        refused: None,
        last_refusal: None,
    };
    loop {
        if let Some(socket) = ticket.address.connect()?
            && let Some(welcome) = member.converse(Connection::new(socket, card.world_size + 1))?
        {
            return welcome.accept(bytes);
        }
        if member.start.elapsed() >= wait.timeout {
            return Err(member.missing(vec![0]));
        }
        (wait.watch)()?;
        std::thread::sleep(RETRY);
    }
}

/// The memory and the handles that rank 0 has sent.
struct Welcome {
    cards: Vec<Card>,
    /// The ranks whose handles follow the memory among the descriptors.
    handles: Vec<usize>,
    descriptors: Vec<OwnedFd>,
    random: Nonce,
}

impl Welcome {
    fn accept(self, bytes: Option<usize>) -> Result<Met, RendezvousError> {
        let mut descriptors = self.descriptors.into_iter();
        let mut map = |bytes| {
            let memory = descriptors.next().expect("the memory comes with the welcome");
            SharedMemory::from_fd(memory, bytes)
        };
        let memory = bytes.map(&mut map).transpose()?;
        let watches = descriptors.map(|handle| Arc::new(ProcessWatch::from(handle)));
        let handles = self.handles.into_iter().zip(watches).collect();
        let processes = super::processes(&self.cards, handles);
        Ok(Met { processes, cards: self.cards, memory, random: self.random })
    }
}

struct Member<'a> {
    wait: Wait<'a>,
    ticket: &'a Ticket,
    card: Card,
    /// Whether rank 0 shares memory.
    shares: bool,
    start: Instant,
    /// Since when it has been turned away for something that may pass.
    refused: Option<Instant>,
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
            turned_away: TurnedAway::default(),
        }
    }

    /// One conversation with rank 0: all cards and the memory, or nothing if it is worth another try.
    fn converse(&mut self, mut connection: Connection) -> Result<Option<Welcome>, RendezvousError> {
        let (mine, connected) = (random_hex(), Instant::now());
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
                    // Without a handle its peers notice its death by the deadline only.
                    let handle = ProcessWatch::of_this_process().ok().filter(|_| self.shares);
                    let handle = handle.map(|watch| Arc::new(watch) as _);
                    if connection.send_with(&join, handle.as_slice()).is_err() {
                        return Ok(None);
                    }
                }
                Ok(Some(Frame::Noted { proof })) if !noted => {
                    let theirs = theirs.as_ref().map_or("", |nonce| nonce.as_str());
                    noted = self.ticket.secret.verify_root(&theirs.into(), &mine, &proof);
                    if !noted {
                        return Err(self.impostor("it does not know the secret".into()));
                    }
                }
                // A peer that keeps sending must not keep this rank from looking at the clock.
                Ok(Some(Frame::Challenge { .. } | Frame::Noted { .. })) => {
                    return Err(self.impostor("it says the same thing twice".into()));
                }
                Ok(Some(Frame::Refusal { missing, .. })) if !missing.is_empty() => {
                    return Err(self.missing(missing));
                }
                Ok(Some(Frame::Refusal { reason, retry: true, .. }))
                    if self.refused.get_or_insert_with(Instant::now).elapsed() < PATIENCE =>
                {
                    self.last_refusal = Some(reason);
                    return Ok(None);
                }
                Ok(Some(Frame::Refusal { reason, .. })) => {
                    let rank = self.card.rank;
                    return Err(RendezvousError::Refused { rank, address: self.address(), reason });
                }
                Ok(Some(Frame::Welcome { cards, handles, random, proof })) => {
                    let said = (&cards[..], &handles[..], &random);
                    let theirs = theirs.unwrap_or_default();
                    let descriptors = std::mem::take(&mut connection.descriptors);
                    let whole = descriptors.len() >= handles.len() + usize::from(self.shares)
                        && cards.len() == self.card.world_size;
                    return match self.ticket.secret.verify_welcome(&theirs, &mine, said, &proof) {
                        true if whole => Ok(Some(Welcome { cards, handles, descriptors, random })),
                        _ => Err(self.impostor("it does not know the secret".into())),
                    };
                }
                Ok(Some(Frame::Join { .. } | Frame::Ask { .. })) => {
                    return Err(self.impostor("it asks to join".into()));
                }
                Err(Ended::Malformed(error)) => return Err(self.impostor(error.to_string())),
                Err(Ended::Descriptors) => {
                    // Too many of them would be dropped in the same way; rank 0 does not send too many.
                    return Err(self.ticket.address.failed(Errno::MFILE.into()));
                }
                Err(Ended::Closed) if noted => {
                    return Err(RendezvousError::RootLost { address: self.address() });
                }
                Err(Ended::Closed) => return Ok(None),
                Ok(None) if !noted && connected.elapsed() >= PATIENCE => {
                    return Err(self.impostor(format!("it has not answered for {PATIENCE:?}")));
                }
                Ok(None) => self.wait(&mut connection, noted)?,
            }
        }
    }

    /// Waits for more bytes.
    fn wait(&mut self, connection: &mut Connection, noted: bool) -> Result<(), RendezvousError> {
        let patience = if noted { self.wait.timeout.saturating_add(GRACE) } else { self.wait.timeout };
        if self.start.elapsed() >= patience {
            return Err(self.missing(if noted { vec![] } else { vec![0] }));
        }
        (self.wait.watch)()?;
        connection.await_more(&TICK);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    };

    use super::*;

    #[test]
    fn a_rank_that_was_noted_sees_its_root_die() {
        let ticket = Ticket::random();
        let Address::Abstract(name) = &ticket.address else { unreachable!("a random ticket") };
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
        let card = Card {
            rank: 1,
            world_size: 2,
            pid: 1,
            pid_namespace: 1,
            cores: vec![0],
            arena_bytes: 4096,
            parent_rank: None,
            place: None,
        };
        std::thread::scope(|scope| {
            let dying = scope.spawn(|| {
                let mut guest = Connection::new(listener.accept().unwrap().0.into(), 1);
                let challenge = random_hex();
                guest.send(&Frame::Challenge { nonce: challenge.clone() }).unwrap();
                let Ok(Some(Frame::Join { nonce, .. })) = guest.receive() else { panic!("a join is due") };
                let proof = ticket.secret.prove_root(&challenge, &nonce);
                guest.send(&Frame::Noted { proof }).unwrap();
            });
            let wait = Wait { timeout: Duration::from_secs(20), watch: &|| Ok(()) };
            let joined = join(&ticket, card, Some(4096), wait);
            assert!(matches!(joined, Err(RendezvousError::RootLost { .. })), "{:?}", joined.map(|_| ()));
            dying.join().unwrap();
        });
    }
}
