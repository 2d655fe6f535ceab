//! The features of the kernel, each of which is tried.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use rustix::system::uname;
use rustix::thread::futex::{self, Timespec};

use super::Check;

const SANDBOX: &str =
    "A sandbox or seccomp profile forbids it, or the kernel is too old: Linux 5.3 or newer has it.";

pub(super) fn checks() -> Vec<Check> {
    let host = uname();
    let kernel = [host.sysname(), host.release(), host.machine()].map(|part| part.to_string_lossy());
    vec![
        Check::ok("kernel", kernel.join(" "), "Antiphon needs Linux 5.3 or newer"),
        Check::required("memfd_create", memory().map(drop), "memory to share that has no name", SANDBOX),
        Check::required("file sealing", sealing(), "shared memory that nobody can shrink", SANDBOX),
        Check::required(
            "shared futex",
            shared_futex(),
            "waiting for another process without spinning",
            SANDBOX,
        ),
        Check::required("pidfd_open", pidfd(), "noticing at once that a peer has died", SANDBOX),
        Check::required("fd passing", descriptor_passing(), "handing shared memory to peers", SANDBOX),
    ]
}

fn memory() -> io::Result<File> {
    let memory = memfd_create("antiphon-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, 4096)?;
    Ok(File::from(memory))
}

/// A sealed size must not change.
fn sealing() -> io::Result<()> {
    let memory = memory()?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    match ftruncate(&memory, 0) {
        Err(Errno::PERM) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(()) => Err(io::Error::other("a sealed file could be shrunk")),
    }
}

/// A wait without a wake-up must time out; any other result means that the call is not supported.
fn shared_futex() -> io::Result<()> {
    let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    // No flags: not private to this process. The word is an atomic zero.
    match futex::wait(&Default::default(), futex::Flags::empty(), 0, Some(&millisecond)) {
        Ok(()) | Err(Errno::TIMEDOUT | Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn pidfd() -> io::Result<()> {
    pidfd_open(getpid(), PidfdFlags::empty())?;
    Ok(())
}

/// Sends a file through a socket pair and reads it on the other side.
fn descriptor_passing() -> io::Result<()> {
    const MESSAGE: &[u8] = b"antiphon";
    let mut memory = memory()?;
    memory.write_all(MESSAGE)?;
    let (here, there) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    send(&here, &memory)?;
    let mut received = File::from(receive(&there)?);
    let mut read = [0; MESSAGE.len()];
    received.rewind()?;
    received.read_exact(&mut read)?;
    if read == MESSAGE { Ok(()) } else { Err(io::Error::other("another file arrived")) }
}

fn send(socket: &OwnedFd, file: &File) -> io::Result<()> {
    let files = [std::os::fd::AsFd::as_fd(file)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::other("no space for a descriptor"));
    }
    sendmsg(socket, &[io::IoSlice::new(b"x")], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [io::IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    files.next().ok_or_else(|| io::Error::other("no descriptor arrived"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_required_works_where_the_tests_run() {
        memory().unwrap();
        sealing().unwrap();
        shared_futex().unwrap();
        pidfd().unwrap();
        descriptor_passing().unwrap();
    }
}
