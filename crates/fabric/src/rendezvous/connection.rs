//! One end of a conversation: frames and descriptors over a non-blocking Unix socket.

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use antiphon_device::host::process::peer_credentials;
use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    },
};

use super::frame::{Frame, FrameError};

/// How many descriptors go in one piece: the kernel takes no more than 253.
const BATCH: usize = 128;

/// A socket with what has arrived but is no whole frame yet, and what has not found room in it.
pub(super) struct Connection {
    socket: OwnedFd,
    received: Vec<u8>,
    unsent: VecDeque<Piece>,
    /// How many descriptors the other side may send.
    limit: usize,
    /// The descriptors that came beside the bytes.
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Bytes on their way out, and the descriptors that go beside the first of them.
struct Piece {
    bytes: Vec<u8>,
    descriptors: Vec<Arc<dyn AsFd>>,
}

/// Why a conversation is over.
#[derive(Debug)]
pub(super) enum Ended {
    /// The other side closed it, or the system did.
    Closed,
    /// The other side does not speak the protocol.
    Malformed(FrameError),
    /// Descriptors were lost: more came than expected, or this process cannot have more.
    Descriptors,
}

impl Connection {
    /// A conversation whose other side may send `limit` descriptors.
    pub(super) fn new(socket: OwnedFd, limit: usize) -> Self {
        Self { socket, received: Vec::new(), unsent: VecDeque::new(), limit, descriptors: Vec::new() }
    }

    /// The user at the other end of a Unix socket, if it is not this process's own (or cannot be known). Other machines have other users.
    pub(super) fn other_user(&self) -> Option<u32> {
        if rustix::net::sockopt::socket_domain(&self.socket) != Ok(AddressFamily::UNIX) {
            return None;
        }
        let peer = peer_credentials(self.socket.as_fd()).map_or(u32::MAX, |peer| peer.user);
        Some(peer).filter(|&user| user != rustix::process::geteuid().as_raw())
    }

    /// The number of the process at the other end; 0 if it cannot be known.
    pub(super) fn other_process(&self) -> i32 {
        peer_credentials(self.socket.as_fd()).map_or(0, |peer| peer.process)
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether something waits for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a frame as far as the socket takes it; [`flush`](Self::flush) sends the rest.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), Ended> {
        self.send_with(frame, &[])
    }

    /// Sends a frame with descriptors beside it, as far as the socket takes it.
    pub(super) fn send_with(&mut self, frame: &Frame, descriptors: &[Arc<dyn AsFd>]) -> Result<(), Ended> {
        // Every batch needs a byte to travel with, and frames have more bytes than the ranks of a world make batches.
        let mut bytes = frame.encode();
        let mut batches = descriptors.chunks(BATCH).peekable();
        while let Some(batch) = batches.next() {
            let rest = if batches.peek().is_some() { bytes.split_off(1) } else { Vec::new() };
            self.unsent
                .push_back(Piece { bytes: std::mem::replace(&mut bytes, rest), descriptors: batch.to_vec() });
        }
        if !bytes.is_empty() {
            self.unsent.push_back(Piece { bytes, descriptors: Vec::new() });
        }
        self.flush()
    }

    /// Sends what waits for room, as far as there is room.
    pub(super) fn flush(&mut self) -> Result<(), Ended> {
        while let Some(piece) = self.unsent.front_mut() {
            let descriptors: Vec<_> = piece.descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(BATCH))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&descriptors));
            }
            let bytes = [IoSlice::new(&piece.bytes)];
            match rustix::net::sendmsg(&self.socket, &bytes, &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    piece.bytes.drain(..sent);
                    piece.descriptors.clear();
                }
                // The last of these: more descriptors of this user are under way than the kernel allows.
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Ended::Closed),
            }
            if piece.bytes.is_empty() {
                self.unsent.pop_front();
            }
        }
        Ok(())
    }

    /// Waits for a while until the other side says something; what waits for room is sent on.
    pub(super) fn await_more(&mut self, limit: &Timespec) {
        // If it fails, the next look at what has arrived says why.
        let _ = self.flush();
        // Woken, interrupted or not: the caller looks again.
        let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(limit));
    }

    /// The next frame, if it has wholly arrived.
    pub(super) fn receive(&mut self) -> Result<Option<Frame>, Ended> {
        loop {
            if let Some((frame, length)) = Frame::decode(&self.received).map_err(Ended::Malformed)? {
                self.received.drain(..length);
                return Ok(Some(frame));
            }
            if !self.read_some()? {
                return Ok(None);
            }
        }
    }

    /// Reads what is there; false if nothing is.
    fn read_some(&mut self) -> Result<bool, Ended> {
        let mut bytes = [0; 4096];
        let room = self.limit.saturating_sub(self.descriptors.len()).min(BATCH);
        let mut space = vec![MaybeUninit::uninit(); cmsg_space!(ScmRights(room))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let message = match received {
            Ok(message) if message.bytes == 0 => return Err(Ended::Closed),
            Ok(message) => message,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(_) => return Err(Ended::Closed),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Ended::Descriptors);
        }
        self.received.extend_from_slice(&bytes[..message.bytes]);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Two ends of a conversation, whose sockets take little at once.
    fn narrow_pair(limit: usize) -> (Connection, Connection) {
        let (one, other) = UnixStream::pair().unwrap();
        one.set_nonblocking(true).unwrap();
        other.set_nonblocking(true).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&one, 1).unwrap();
        (Connection::new(one.into(), 0), Connection::new(other.into(), limit))
    }

    #[test]
    fn what_finds_no_room_goes_later_descriptors_too() {
        const COUNT: usize = 2 * BATCH + 3;
        let (mut one, mut other) = narrow_pair(COUNT);
        let long = Frame::Challenge { nonce: "0".repeat(100_000) };
        one.send(&long).unwrap();
        assert!(one.has_unsent(), "the socket is full");
        let null: Arc<dyn AsFd> = Arc::new(std::fs::File::open("/dev/null").unwrap());
        let note = Frame::Noted { proof: "00".into() };
        one.send_with(&note, &vec![null; COUNT]).unwrap();
        for expected in [long, note] {
            let frame = loop {
                one.flush().unwrap();
                if let Some(frame) = other.receive().unwrap() {
                    break frame;
                }
            };
            assert_eq!(frame, expected);
        }
        assert_eq!(other.descriptors.len(), COUNT);
        assert!(!one.has_unsent());
    }

    #[test]
    fn more_descriptors_than_expected_end_the_conversation() {
        let (mut one, mut other) = narrow_pair(1);
        let null: Arc<dyn AsFd> = Arc::new(std::fs::File::open("/dev/null").unwrap());
        one.send_with(&Frame::Noted { proof: "00".into() }, &vec![null; 8]).unwrap();
        assert!(matches!(other.receive(), Err(Ended::Descriptors)));
    }
}
