//! One end of a conversation: frames and descriptors over a non-blocking Unix socket.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};

use super::frame::{Frame, FrameError};

/// A socket with the bytes that have arrived but are no whole frame yet.
pub(super) struct Connection {
    socket: OwnedFd,
    received: Vec<u8>,
    unsent: Vec<u8>,
    /// A descriptor that came beside the bytes.
    pub(super) descriptor: Option<OwnedFd>,
}

/// Why a conversation is over.
#[derive(Debug)]
pub(super) enum Ended {
    /// The other side closed it, or the system did.
    Closed,
    /// The other side does not speak the protocol.
    Malformed(FrameError),
}

impl Connection {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, received: Vec::new(), unsent: Vec::new(), descriptor: None }
    }

    /// The user at the other end, if it is not this process's own (or cannot be known).
    pub(super) fn other_user(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(&self.socket).map_or(u32::MAX, |c| c.uid.as_raw());
        Some(peer).filter(|&user| user != rustix::process::geteuid().as_raw())
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether bytes wait for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends a frame as far as the socket takes it; [`flush`](Self::flush) sends the rest.
    pub(super) fn send(&mut self, frame: &Frame) -> Result<(), Ended> {
        self.unsent.extend_from_slice(&frame.encode());
        self.flush()
    }

    /// Sends a frame with a descriptor beside it.
    pub(super) fn send_with(&mut self, frame: &Frame, descriptor: BorrowedFd<'_>) -> Result<(), Ended> {
        // The descriptor travels with the frame's first byte, which therefore must be the next to go.
        self.flush()?;
        let bytes = frame.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let sent =
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
                .map_err(|_| Ended::Closed)?;
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<(), Ended> {
        while !self.unsent.is_empty() {
            match rustix::net::send(&self.socket, &self.unsent, SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Ended::Closed),
            }
        }
        Ok(())
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
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let received = match received {
            Ok(message) if message.bytes == 0 => return Err(Ended::Closed),
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(_) => return Err(Ended::Closed),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptor = descriptors.last();
            }
        }
        self.received.extend_from_slice(&bytes[..received]);
        Ok(true)
    }
}
