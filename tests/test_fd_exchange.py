"""``antiphon.comm.fd_exchange``: descriptors from rank to rank, on Unix sockets alone."""

import array
import contextlib
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import antiphon
import ranks
from antiphon.comm import fd_exchange
from antiphon.comm.fd_exchange import broadcast_fd, exchange_fds, recv_fd_dgram, send_fd_dgram


class Backend:
    """The ranks of a communicator; ``then`` sees the exchanged objects before this rank continues."""

    def __init__(self, comm: antiphon.Communicator, then: Callable[[Any], Any] = lambda words: words) -> None:
        self.comm, self.then = comm, then

    def Get_rank(self) -> int:
        return self.comm.rank

    def Get_size(self) -> int:
        return self.comm.world_size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        words = tuple(self.comm.exchange_objects(data))
        self.then(words)
        return words

    def bcast(self, data: Any, root: int) -> Any:
        return self.allgather(data)[root]

    def barrier(self) -> None:
        self.comm.barrier()

    def Split(self, color: int, key: int) -> "Backend":
        raise NotImplementedError


def descriptors() -> list[str]:
    """What this process has open: files and sockets. Pipes are multiprocessing's own."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in targets if not target.startswith("pipe:"))


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


def file_of(rank: int) -> int:
    """A descriptor of a file that says whose it is."""
    fd = os.memfd_create("rank")
    os.write(fd, f"rank {rank}".encode())
    return fd


def text_of(fd: int) -> str:
    assert not os.get_inheritable(fd)
    return os.pread(fd, 100, 0).decode()


def read_and_close(*fds: int) -> list[str]:
    try:
        return [text_of(fd) for fd in fds]
    finally:
        for fd in fds:
            os.close(fd)


def exchanged(comm: antiphon.Communicator, then: Callable[[Any], Any] = lambda words: words) -> list[str]:
    """What this rank reads from every rank's descriptor."""
    mine = file_of(comm.rank)
    try:
        fds = exchange_fds(Backend(comm, then), mine)
    except BaseException:
        os.close(mine)
        raise
    assert fds[comm.rank] == mine and len(set(fds)) == comm.world_size
    return read_and_close(*fds)


def exchanged_by_processes() -> list[str]:
    with antiphon.init() as comm:
        return exchanged(comm)


@pytest.mark.parametrize("world_size", [1, 2, 3, 13])
def test_every_rank_reads_every_file(world_size: int) -> None:
    # More than 11 letters do not fit into a mailbox at once, where the system has its usual limit.
    files = [f"rank {rank}" for rank in range(world_size)]
    assert ranks.threads(world_size, exchanged) == [files] * world_size


def test_between_processes() -> None:
    assert ranks.processes(2, exchanged_by_processes) == [["rank 0", "rank 1"]] * 2


@pytest.mark.parametrize(("world_size", "root"), [(1, 0), (2, 1), (4, 2)])
def test_every_rank_reads_the_file_of_the_root(world_size: int, root: int) -> None:
    def body(comm: antiphon.Communicator) -> str:
        mine = file_of(comm.rank) if comm.rank == root else None
        fd = broadcast_fd(Backend(comm), mine, root)
        assert mine in (None, fd)
        comm.barrier()
        return read_and_close(fd)[0]

    assert ranks.threads(world_size, body) == [f"rank {root}"] * world_size


@pytest.mark.parametrize("wrong", [None, -1, 1 << 20, 1 << 40, "3"])
def test_what_is_no_descriptor_is_named_on_every_rank(wrong: Any) -> None:
    def body(comm: antiphon.Communicator, call: Callable[..., Any], *root: int) -> None:
        with open(os.devnull) as good, pytest.raises(ValueError, match="rank 1: .* is no open file descriptor"):
            call(Backend(comm), wrong if comm.rank == 1 else good.fileno(), *root)

    ranks.threads(3, body, exchange_fds)
    ranks.threads(3, body, broadcast_fd, 1)


def test_roots_that_are_not_there_are_refused() -> None:
    def body(comm: antiphon.Communicator) -> None:
        for root in -1, 2:
            with pytest.raises(ValueError, match=f"no root {root} among 2 ranks"):
                broadcast_fd(Backend(comm), 0, root)

    ranks.threads(2, body)


def test_ranks_of_other_networks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = iter(["host 1", "host 2"])
    monkeypatch.setattr(fd_exchange, "_network", lambda: next(networks))
    for outcome in ranks.outcomes(2, exchanged):
        assert isinstance(outcome, ValueError) and "rank 0 cannot hand descriptors to rank 1" in str(outcome)


def test_a_rank_that_leaves_is_named_at_once_and_nothing_stays_open() -> None:
    def leave(words: Any) -> None:
        raise KeyError

    def body(comm: antiphon.Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(KeyError):
                exchanged(comm, leave)
            return
        with pytest.raises(antiphon.PeerLostError, match=r"waits for ranks \[1\], which have left") as caught:
            exchanged(comm)
        assert caught.value.rank == caught.value.world_rank == 1

    start = time.monotonic()
    ranks.threads(4, body)
    assert time.monotonic() - start < 10


def killed_in_between() -> tuple[str, list[str]]:
    """The error of rank 0 when rank 1 is killed, and the names of all mailboxes."""
    names: list[str] = []

    def then(words: Any) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        names.extend(name for name, *_ in words)

    with antiphon.init() as comm, pytest.raises(antiphon.PeerLostError) as caught:
        exchanged(comm, then)
    return str(caught.value), names


def test_a_rank_that_is_killed_is_named_and_leaves_no_socket() -> None:
    (said, names), _ = ranks.processes(2, killed_in_between, dying=[1])
    assert said == "exchange_fds: rank 0 waits for ranks [1], which have left"
    with open("/proc/net/unix") as sockets:
        left = sockets.read()
    assert len(names) == 2 and not any(name.replace("\0", "@") in left for name in names)


def test_a_rank_that_does_nothing_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fd_exchange, "_TIMEOUT", 0.3)
    is_over = threading.Event()

    def idle(words: Any) -> None:
        assert is_over.wait(20)
        raise KeyError

    def body(comm: antiphon.Communicator) -> None:
        with pytest.raises(KeyError if comm.rank == 1 else TimeoutError) as caught:
            exchanged(comm, idle if comm.rank == 1 else lambda words: words)
        if comm.rank == 0:
            is_over.set()
            assert "rank 0 still waits for ranks [1] of 2 after 0.3 s" in str(caught.value)

    ranks.threads(2, body)


def test_messages_without_the_secret_are_dropped() -> None:
    def write(words: Any) -> None:
        with open(os.devnull) as file, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outsider:
            outsider.setblocking(False)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 3))]
            for letter in b"", b"1", b"1 password", bytes(10_000), b"\xff":
                outsider.sendmsg([letter], rights, 0, words[0][0])
            with pytest.raises(BlockingIOError):  # until no more goes in
                for _ in range(10_000):
                    outsider.sendto(b"1 ", words[0][0])

    def body(comm: antiphon.Communicator) -> list[str]:
        return exchanged(comm, write if comm.rank == 0 else lambda words: words)

    assert ranks.threads(3, body) == [["rank 0", "rank 1", "rank 2"]] * 3


# One socket and another.


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket, str]]:
    """A socket to send from, one to receive at, and the latter's path."""
    path = str(tmp_path / "here")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as here:
        here.bind(path)
        yield to, here, path


def test_one_descriptor(pair: tuple[socket.socket, socket.socket, str]) -> None:
    sender, receiver, path = pair
    mine = file_of(0)
    send_fd_dgram(sender, mine, path)
    theirs = recv_fd_dgram(receiver)
    assert theirs != mine and read_and_close(mine, theirs) == ["rank 0"] * 2


def test_a_message_without_a_descriptor(pair: tuple[socket.socket, socket.socket, str]) -> None:
    sender, receiver, path = pair
    sender.sendto(b"\0", path)
    with pytest.raises(RuntimeError, match="no file descriptor: .* a message without one"):
        recv_fd_dgram(receiver)


def test_a_process_with_no_room_for_descriptors_is_told_so(pair: tuple[socket.socket, socket.socket, str]) -> None:
    sender, receiver, path = pair
    send_fd_dgram(sender, 0, path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="no file descriptor: .* `ulimit -n`"):
            recv_fd_dgram(receiver)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sockets_without_a_timeout_do_not_wait_for_ever(
    pair: tuple[socket.socket, socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver, path = pair
    monkeypatch.setattr(fd_exchange, "_TIMEOUT", 0.1)
    with pytest.raises(TimeoutError, match="nothing has come for 0.1 s"):
        recv_fd_dgram(receiver)
    with pytest.raises(TimeoutError, match="here' has had no room for 0.1 s"):
        for _ in range(10_000):
            send_fd_dgram(sender, 0, path)
    with pytest.raises(OSError) as caught:
        send_fd_dgram(sender, 1 << 20, path)
    assert caught.value.errno == errno.EBADF
