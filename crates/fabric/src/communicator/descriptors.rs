//! Sending file descriptors to the other ranks, which is how they share memory of a device.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use antiphon_device::host::process::network_namespace;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
};
use serde::{Deserialize, Serialize};

use super::Communicator;
use crate::{FabricError, Members, Operation, Signature, endpoint::Endpoint, rendezvous::random_hex};

const PROBLEM: &str = "cannot hand over a descriptor";
/// How often a rank that waits for descriptors looks around.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Where a rank receives descriptors, and the words that only its peers know.
#[derive(Serialize, Deserialize)]
pub(super) struct Mailbox {
    pub(super) name: String,
    pub(super) password: String,
    /// The network namespace in which the name can be seen.
    pub(super) network: u64,
}

/// The bytes beside a descriptor.
#[derive(Serialize, Deserialize)]
struct Letter {
    from: usize,
    password: String,
}

impl Communicator {
    /// Gives every rank a duplicate of every rank's descriptor, in rank order (this rank's own included). They travel
    /// over Unix sockets without a file, between processes and threads alike; messages of other processes are ignored. Ranks must be in
    /// one network namespace.
    ///
    /// # Errors
    /// On every rank, if one has no socket or descriptor left: [`FabricError::InvalidArgument`] with the system's word;
    /// and if ranks are in different network namespaces. As [`barrier`](Self::barrier).
    pub fn exchange_descriptors(&self, mine: BorrowedFd<'_>) -> Result<Vec<OwnedFd>, FabricError> {
        self.endpoint().check_one_node("exchange_descriptors")?;
        let peers: Vec<usize> = (0..self.world_size()).filter(|&rank| rank != self.rank()).collect();
        let own = mine.try_clone_to_owned().map_err(|e| unavailable(&e));
        let own = self.agree(PROBLEM, own)?;
        let mut all = self.hand_over(Some(mine), &peers, &peers)?;
        all.insert(self.rank(), own);
        Ok(all)
    }

    /// Sends a descriptor to some ranks and receives one from each of `from`, in that order. All ranks call it
    /// together; each gives `to` what the others give `from`.
    ///
    /// # Errors
    /// As [`exchange_descriptors`](Self::exchange_descriptors).
    pub(super) fn hand_over(
        &self,
        descriptor: Option<BorrowedFd<'_>>,
        to: &[usize],
        from: &[usize],
    ) -> Result<Vec<OwnedFd>, FabricError> {
        let mailbox = Mailbox {
            name: format!("antiphon-{}", random_hex()),
            password: random_hex(),
            network: network_namespace(),
        };
        let socket = self.agree(PROBLEM, open(&mailbox.name).map_err(|e| unavailable(&e)))?;
        let mailboxes = self.exchange_objects(&mailbox)?;
        let mut post = Post::new(self.rank(), socket);
        post.address(mailboxes, to);
        // Only ranks of one node hand anything over.
        let nodes = self.nodes();
        for node in 0..nodes.count() {
            post.check_networks(nodes.ranks(node).iter().copied(), self.members())?;
        }
        let post = RefCell::new(post);
        self.deliver(&post, descriptor, from)?;
        // No rank closes its mailbox before it has taken all letters out of it.
        let mut post = post.into_inner();
        let arrived = from.iter().map(|&rank| post.take(rank).expect("all have been delivered"));
        self.agree(PROBLEM, arrived.collect::<Result<_, _>>().map_err(|e| unavailable(&e)))
    }

    /// Waits until all is sent and received.
    fn deliver(
        &self,
        post: &RefCell<Post>,
        descriptor: Option<BorrowedFd<'_>>,
        from: &[usize],
    ) -> Result<(), FabricError> {
        let Endpoint { health, regions, .. } = &**self.endpoint();
        let (operation, start) = (Signature::new(Operation::ExchangeObjects), Instant::now());
        let look = || -> Result<bool, FabricError> {
            post.borrow_mut().advance(descriptor).map_err(|e| unavailable(&e))?;
            if post.borrow().missing(from).is_empty() {
                return Ok(true);
            }
            self.endpoint().check_interrupt(operation)?;
            let missing = || {
                // An error now occurs again at the next look.
                let _ = post.borrow_mut().advance(descriptor);
                post.borrow().missing(from)
            };
            health
                .check(regions, operation, missing, start.elapsed(), self.endpoint.timeout())
                .map(|()| false)
        };
        while !look().inspect_err(|error| self.endpoint().report(error))? {
            let post = post.borrow();
            let mut events = [PollFd::new(&post.socket, PollFlags::IN)];
            let _ = poll(&mut events, Some(&LOOK)); // whatever it says, we look
        }
        Ok(())
    }
}

/// A descriptor, or why it was lost on arrival.
pub(super) type Arrived = Result<OwnedFd, Errno>;

/// Descriptors under way.
pub(super) struct Post {
    rank: usize,
    /// This rank's mailbox.
    socket: OwnedFd,
    mailboxes: Vec<Mailbox>,
    /// The ranks that nothing has been sent to yet.
    unsent: Vec<usize>,
    /// What each rank sent.
    received: Vec<Option<Arrived>>,
}

impl Post {
    /// For a rank with this mailbox.
    pub(super) fn new(rank: usize, socket: OwnedFd) -> Self {
        Self { rank, socket, mailboxes: Vec::new(), unsent: Vec::new(), received: Vec::new() }
    }

    /// Begins to send to some ranks, given the mailboxes of all, and to receive.
    pub(super) fn address(&mut self, mailboxes: Vec<Mailbox>, to: &[usize]) {
        self.received = mailboxes.iter().map(|_| None).collect();
        self.mailboxes = mailboxes;
        self.unsent = to.to_vec();
    }

    /// Fails if some of these ranks cannot see the mailboxes of others.
    pub(super) fn check_networks(
        &self,
        ranks: impl IntoIterator<Item = usize>,
        members: &Members,
    ) -> Result<(), FabricError> {
        let mut ranks = ranks.into_iter();
        let Some(first) = ranks.next() else { return Ok(()) };
        match ranks.find(|&rank| self.mailboxes[rank].network != self.mailboxes[first].network) {
            None => Ok(()),
            Some(other) => Err(FabricError::invalid(format!(
                "{} cannot hand descriptors to {}, which is in another network namespace: give their containers one \
                 network",
                members.subject(first),
                members.name(other)
            ))),
        }
    }

    /// What a rank has sent, if anything.
    pub(super) fn take(&mut self, rank: usize) -> Option<Arrived> {
        self.received[rank].take()
    }

    /// Sends and receives what is possible now.
    pub(super) fn advance(&mut self, descriptor: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        if let Some(descriptor) = descriptor {
            // A full mailbox takes the letter later, when its owner has emptied it.
            let mut full = Vec::new();
            for &rank in &self.unsent {
                if !send(&self.socket, self.rank, &self.mailboxes[rank], descriptor)? {
                    full.push(rank);
                }
            }
            self.unsent = full;
        }
        while let Some((letter, descriptor)) = receive(&self.socket)? {
            if letter.password == self.mailboxes[self.rank].password && letter.from < self.received.len() {
                self.received[letter.from].get_or_insert(descriptor);
            }
        }
        Ok(())
    }

    /// The ranks that this one waits for: to send, or to take what it sends.
    pub(super) fn missing(&self, from: &[usize]) -> Vec<usize> {
        let unheard = from.iter().filter(|&&rank| self.received[rank].is_none());
        let missing: BTreeSet<usize> = unheard.chain(&self.unsent).copied().collect();
        missing.into_iter().collect()
    }
}

pub(super) fn open(name: &str) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    Ok(socket)
}

/// Sends a descriptor; false if there is no room for it now.
fn send(socket: &OwnedFd, from: usize, to: &Mailbox, descriptor: BorrowedFd<'_>) -> Result<bool, Errno> {
    let letter = Letter { from, password: to.password.clone() };
    let bytes = serde_json::to_vec(&letter).expect("plain data serialises");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let address = SocketAddrUnix::new_abstract_name(to.name.as_bytes())?;
    let bytes = [IoSlice::new(&bytes)];
    match rustix::net::sendmsg_addr(socket, &address, &bytes, &mut control, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(true),
        // Too many descriptors of this user are under way; or the last of these: a peer that is gone, which is noticed
        // elsewhere.
        Err(Errno::AGAIN | Errno::INTR | Errno::TOOMANYREFS | Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The next valid letter, with its descriptor, unless this process cannot have another one.
fn receive(socket: &OwnedFd) -> Result<Option<(Letter, Arrived)>, Errno> {
    loop {
        let mut bytes = [0; 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let message = match rustix::net::recvmsg(
            socket.as_fd(),
            &mut parts,
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        ) {
            Ok(message) => message,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error),
        };
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let descriptor = match descriptor {
            Some(descriptor) => Ok(descriptor),
            None if message.flags.contains(ReturnFlags::CTRUNC) => Err(Errno::MFILE),
            None => continue,
        };
        if let Ok(letter) = serde_json::from_slice(&bytes[..message.bytes]) {
            return Ok(Some((letter, descriptor)));
        }
    }
}

pub(super) fn unavailable(error: &dyn std::fmt::Display) -> FabricError {
    FabricError::invalid(format!("{error} (raise `ulimit -n`, if files are too many)"))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, time::Duration};

    use super::*;
    use crate::LocalWorld;

    /// Rank 1 sends its own descriptor and leaves before a peer can send it one.
    #[test]
    fn a_recipient_that_left_after_it_had_sent_is_named_at_once() {
        let start = Instant::now();
        let results = LocalWorld::run_with(2, Duration::from_secs(20), |comm| {
            let mine = File::open("/dev/null").unwrap();
            if comm.rank() == 0 {
                return comm.exchange_descriptors(mine.as_fd()).map(drop);
            }
            comm.agree(PROBLEM, Ok::<_, FabricError>(()))?;
            comm.agree(PROBLEM, Ok::<_, FabricError>(()))?;
            let socket = open(&random_hex()).unwrap();
            let nowhere =
                Mailbox { name: random_hex(), password: random_hex(), network: network_namespace() };
            let mailboxes = comm.exchange_objects(&nowhere)?;
            assert!(send(&socket, 1, &mailboxes[0], mine.as_fd()).unwrap());
            Ok(())
        });
        assert!(matches!(results[0], Err(FabricError::PeerLost { rank: 1, .. })), "{results:?}");
        assert!(start.elapsed() < Duration::from_secs(5), "it was known only after {:?}", start.elapsed());
    }
}
