//! Handing file descriptors to the other ranks: memory of a device travels as such.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Instant,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
};
use serde::{Deserialize, Serialize};

use super::Communicator;
use crate::{FabricError, Operation, Signature, error::Loss, rendezvous::random_hex};

/// How often a rank that waits for descriptors looks around.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// Where a rank receives descriptors, and the words that only its peers know.
#[derive(Serialize, Deserialize)]
struct Mailbox {
    name: String,
    password: String,
}

/// What comes beside a descriptor.
#[derive(Serialize, Deserialize)]
struct Letter {
    from: usize,
    password: String,
}

impl Communicator {
    /// Gives every rank a duplicate of every rank's descriptor, in rank order (this rank's own included). They travel
    /// over Unix sockets without a file, between processes and threads alike; strangers are not heard.
    ///
    /// # Errors
    /// [`PeerLost`](FabricError::PeerLost) and [`Timeout`](FabricError::Timeout); as [`barrier`](Self::barrier);
    /// [`FabricError::InvalidArgument`] with the system's word when there is no socket or descriptor to be had.
    pub fn exchange_descriptors(&self, mine: BorrowedFd<'_>) -> Result<Vec<OwnedFd>, FabricError> {
        let own = mine.try_clone_to_owned().map_err(|e| unavailable(&e))?;
        let mailbox = Mailbox { name: format!("antiphon-{}", random_hex()), password: random_hex() };
        let socket = open(&mailbox.name).map_err(|e| unavailable(&e))?;
        let mailboxes = self.exchange_objects(&mailbox)?;
        let mut received: Vec<Option<OwnedFd>> = mailboxes.iter().map(|_| None).collect();
        received[self.rank()] = Some(own);
        let mut unsent: Vec<usize> = (0..mailboxes.len()).filter(|&rank| rank != self.rank()).collect();
        let start = Instant::now();
        loop {
            // A full mailbox takes the letter later, when its owner has emptied it.
            let mut full = Vec::new();
            for rank in unsent {
                if !send(&socket, self.rank(), &mailboxes[rank], mine).map_err(|e| unavailable(&e))? {
                    full.push(rank);
                }
            }
            unsent = full;
            while let Some((letter, descriptor)) = receive(&socket).map_err(|e| unavailable(&e))? {
                if letter.password == mailbox.password && letter.from < received.len() {
                    received[letter.from].get_or_insert(descriptor);
                }
            }
            if unsent.is_empty() && received.iter().all(Option::is_some) {
                // Nobody closes its mailbox before all letters are out of it.
                self.barrier()?;
                return Ok(received.into_iter().flatten().collect());
            }
            let mut events = [PollFd::new(&socket, PollFlags::IN)];
            let _ = poll(&mut events, Some(&LOOK)); // whatever it says, we look
            self.check_senders(&received, start)?;
        }
    }

    /// Fails if a descriptor that is missing will not come.
    fn check_senders(&self, received: &[Option<OwnedFd>], start: Instant) -> Result<(), FabricError> {
        let shared = self.shared();
        let operation = Signature::new(Operation::ExchangeObjects);
        let missing: Vec<usize> = (0..received.len()).filter(|&rank| received[rank].is_none()).collect();
        let gone = missing.iter().copied().find(|&rank| shared.health.is_gone(&shared.regions, rank));
        let (waited, world_size) = (start.elapsed(), shared.world_size);
        let error = match gone {
            Some(rank) => FabricError::PeerLost { rank, operation, how: Loss::ProcessEnded },
            None if waited > shared.timeout => {
                FabricError::Timeout { operation, waited, missing, world_size }
            }
            None => match shared.check_interrupt(operation) {
                Ok(()) => return Ok(()),
                Err(interrupted) => interrupted,
            },
        };
        shared.health.report(&shared.regions, &error);
        Err(error)
    }
}

fn open(name: &str) -> Result<OwnedFd, Errno> {
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
        // The last of these is a peer that is gone, which is noticed elsewhere.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The next letter that makes sense, with its descriptor.
fn receive(socket: &OwnedFd) -> Result<Option<(Letter, OwnedFd)>, Errno> {
    loop {
        let mut bytes = [0; 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let length = match rustix::net::recvmsg(
            socket.as_fd(),
            &mut parts,
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        ) {
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error),
        };
        let descriptor = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let letter = serde_json::from_slice(&bytes[..length]).ok();
        if let (Some(letter), Some(descriptor)) = (letter, descriptor) {
            return Ok(Some((letter, descriptor)));
        }
    }
}

fn unavailable(error: &dyn std::fmt::Display) -> FabricError {
    FabricError::invalid(format!("no descriptor can be handed over: {error}"))
}
