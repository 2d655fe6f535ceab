"""File descriptors from rank to rank. After FlashInfer comm/fd_exchange.py (its main branch of August 2026).

A descriptor travels in a letter to the receiving rank's mailbox, a Unix socket with an abstract name: a rank that is killed
leaves no file. The ranks tell each other the names of their mailboxes through their backend, and a password beside each. A
letter without the password is dropped. The ranks must be processes, or threads, of one network namespace.
"""

import array
import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from antiphon import PeerLostError
from antiphon.comm.abstractions import CommBackend

__all__ = ["broadcast_fd", "exchange_fds", "recv_fd_dgram", "send_fd_dgram"]

#: Seconds that a call waits for the others, where FlashInfer waits as long.
_TIMEOUT = 30.0
#: Seconds from one look at the other ranks to the next, while nothing arrives.
_LOOK = 0.02

#: The name of a mailbox, its password, and the network in which the name can be seen.
_Address: TypeAlias = tuple[str, str, str]


def exchange_fds(comm: CommBackend, local_fd: int) -> list[int]:
    """Gives every rank a duplicate of every other rank's descriptor, and returns them in rank order.

    All ranks of ``comm`` must call it. This rank's own entry is ``local_fd`` itself. The caller closes all of them. After an
    error there is only ``local_fd`` to close.

    Raises ``ValueError`` on every rank, naming the rank, if a rank's descriptor is not open, if a rank can have no socket,
    and if the ranks have no network namespace in common; ``ValueError`` on a rank that can have no more descriptors;
    :class:`antiphon.PeerLostError` if a rank has left; ``TimeoutError`` naming the ranks that did not send, or took
    nothing, for 30 s.
    """
    fds = _spread("exchange_fds", comm, local_fd, range(comm.Get_size()))
    return [fds[rank] for rank in range(comm.Get_size())]


def broadcast_fd(comm: CommBackend, local_fd: int | None, root: int) -> int:
    """Gives every other rank a duplicate of the descriptor of ``root``, and returns it; on the root, ``local_fd`` itself.

    All ranks of ``comm`` must call it, with the same root. Only the root's ``local_fd`` is looked at. The caller closes what
    is returned.

    Raises ``ValueError`` if there is no such root, and what :func:`exchange_fds` raises.
    """
    if not 0 <= root < comm.Get_size():
        raise ValueError(f"broadcast_fd: there is no root {root} among {comm.Get_size()} ranks")
    return _spread("broadcast_fd", comm, local_fd, [root])[root]


def send_fd_dgram(sock: socket.socket, fd: int, dest_path: str) -> None:
    """Sends a descriptor from a Unix datagram socket to the one that is bound to ``dest_path``.

    Raises ``TimeoutError`` if there is no room for it within the timeout of ``sock``, or within 30 s if it has none, and
    ``OSError`` if there is no such socket or no such descriptor.
    """
    deadline = time.monotonic() + _TIMEOUT
    while not _send(sock, b"\0", fd, dest_path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"send_fd_dgram: {dest_path!r} has had no room for {_TIMEOUT:g} s")
        time.sleep(_LOOK)


def recv_fd_dgram(sock: socket.socket) -> int:
    """The descriptor that comes next to a bound Unix datagram socket. The caller closes it.

    Raises ``RuntimeError`` if what comes has none, or if this process can have no more; ``TimeoutError`` if nothing comes
    within the timeout of ``sock``, or within 30 s if it has none.
    """
    if sock.gettimeout() is None and not _readable(sock, _TIMEOUT):
        raise TimeoutError(f"recv_fd_dgram: nothing has come for {_TIMEOUT:g} s")
    _, fd, is_cut = _receive(sock, 1)
    if fd is None:
        reason = "can have no more (raise `ulimit -n`)" if is_cut else "was sent a message without one"
        raise RuntimeError(f"recv_fd_dgram: no file descriptor: this process {reason}")
    return fd


def _spread(caller: str, comm: CommBackend, local_fd: int | None, senders: Sequence[int]) -> dict[int, int]:
    """The descriptors of the senders, by rank: each sends its own to all other ranks."""
    rank, size = comm.Get_rank(), comm.Get_size()
    with contextlib.ExitStack() as sockets:
        # A failure of one rank is reported to all ranks, which would wait for that rank otherwise.
        word: _Address | str
        try:
            own = {rank: _open_fd(local_fd)} if rank in senders else {}
            mailbox, outbox = (sockets.enter_context(_socket()) for _ in range(2))
            word = f"\0antiphon-{secrets.token_hex(16)}", secrets.token_hex(16), _network()
            mailbox.bind(word[0])
        except (OSError, ValueError) as error:
            word = str(error)
        words = comm.allgather(word) if size > 1 else (word,)
        addresses = _agreed(caller, words)
        post = _Post(caller, rank, mailbox, outbox, addresses, own, senders)
        try:
            post.deliver()
        except BaseException:
            for fd in post.received.values():
                os.close(fd)
            raise
        return own | post.received


def _agreed(caller: str, words: Sequence[_Address | str]) -> list[_Address]:
    """The addresses of all ranks, if each has one that all of them can reach."""
    addresses: list[_Address] = []
    for rank, word in enumerate(words):
        if isinstance(word, str):
            raise ValueError(f"{caller}: rank {rank}: {word}")
        addresses.append(word)
        if word[2] != addresses[0][2]:
            raise ValueError(
                f"{caller}: rank 0 cannot hand descriptors to rank {rank}, which is on another machine or in another network "
                "namespace: give their containers one network"
            )
    return addresses


@dataclass
class _Post:
    """Descriptors on their way: ``own``, which has this rank's if it is a sender, and those of the other senders."""

    caller: str
    rank: int
    mailbox: socket.socket
    outbox: socket.socket
    addresses: Sequence[_Address]
    own: dict[int, int]
    senders: Sequence[int]

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + _TIMEOUT
        #: The ranks that this rank's descriptor has to be sent to.
        self.unsent = {rank for rank in range(len(self.addresses)) if self.own and rank != self.rank}
        #: The ranks whose descriptors have to come, by the letters that they come in.
        self.due = {self.letter(rank, self.rank): rank for rank in self.senders if rank != self.rank}
        self.received: dict[int, int] = {}

    def letter(self, sender: int, receiver: int) -> bytes:
        return f"{sender} {self.addresses[receiver][1]}".encode()

    def deliver(self) -> None:
        """Waits until everything is sent and received."""
        while waited := self.advance():
            gone = [rank for rank in waited if not self.is_there(rank)]
            # A rank may leave when it has sent everything: its letter is in the mailbox then.
            if left := self.advance().intersection(gone):
                # A rank that left because of another one had sent its letter before.
                lost = sorted(left.intersection(self.due.values()) or left)
                error = PeerLostError(f"{self.caller}: rank {self.rank} waits for ranks {lost}, which have left")
                error.rank = error.world_rank = lost[0]
                raise error
            if time.monotonic() > self.deadline:
                raise TimeoutError(
                    f"{self.caller}: rank {self.rank} still waits for ranks {sorted(waited)} of {len(self.addresses)} "
                    f"after {_TIMEOUT:g} s"
                )
            _readable(self.mailbox, _LOOK)

    def advance(self) -> set[int]:
        """Sends and receives what is possible now; the ranks that are still waited for."""
        self.unsent = {rank for rank in self.unsent if not self.is_sent(rank)}
        with contextlib.suppress(BlockingIOError):
            while time.monotonic() < self.deadline:  # other processes may write without end
                self.take()
        return self.unsent.union(self.due.values())

    def is_sent(self, to: int) -> bool:
        try:
            return _send(self.outbox, self.letter(self.rank, to), self.own[self.rank], self.addresses[to][0])
        except ConnectionRefusedError:  # it has left, which the next look finds
            return False

    def take(self) -> None:
        """Takes the next letter. ``BlockingIOError`` if there is none."""
        letter, fd, _ = _receive(self.mailbox, 256)
        if letter not in self.due:
            if fd is not None:
                os.close(fd)
        elif fd is None:
            raise ValueError(
                f"{self.caller}: rank {self.rank} can have no more descriptors (raise `ulimit -n`), and lost the one of "
                f"rank {self.due[letter]}"
            )
        else:
            self.received[self.due.pop(letter)] = fd

    def is_there(self, rank: int) -> bool:
        """Whether a rank's mailbox is open."""
        return self.outbox.connect_ex(self.addresses[rank][0]) != errno.ECONNREFUSED


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _network() -> str:
    """Differs between machines and network namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _open_fd(fd: int | None) -> int:
    """A descriptor that is open; ``ValueError`` for anything else."""
    try:
        os.fstat(fd)  # type: ignore[arg-type]
    except (OSError, TypeError, OverflowError):
        raise ValueError(f"{fd!r} is no open file descriptor") from None
    assert fd is not None
    return fd


def _send(sock: socket.socket, letter: bytes, fd: int, address: str) -> bool:
    """Sends a letter with a descriptor; false if there is no room for it now."""
    try:
        # `socket.send_fds` ignores its address, in Python 3.11 for one.
        sock.sendmsg([letter], _fd_ancillary(fd), socket.MSG_DONTWAIT, address)
    except OSError as error:
        # The latter: too many descriptors of this user are under way.
        if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
            return False
        raise
    return True


def _receive(sock: socket.socket, size: int) -> tuple[bytes, int | None, bool]:
    """The next letter, its descriptor, and whether something of it was cut off. A second descriptor is closed by the
    kernel, as there is no room for it."""
    # `socket.recv_fds` ignores its flags, in Python 3.11 for one.
    room = socket.CMSG_LEN(array.array("i").itemsize)
    letter, ancillary, flags, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    return letter, _extract_fd(ancillary), bool(flags & socket.MSG_CTRUNC)


def _readable(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to receive; waits for it so long."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# FlashInfer's tests import these two; the annotation is text since Python 3.10 and 3.11 cannot subscript the class.


def _fd_ancillary(fd: int) -> "tuple[tuple[int, int, array.array[int]]]":
    """A descriptor as ``socket.sendmsg`` takes it."""
    return ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd])),)


def _extract_fd(ancillary: Iterable[tuple[int, int, bytes]]) -> int | None:
    """The first descriptor of what ``socket.recvmsg`` gives."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return fds[0] if fds else None
