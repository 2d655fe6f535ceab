"""``CommGroup``."""

import os
import re
import socket
import tempfile
from typing import TYPE_CHECKING, Any

import antiphon
from antiphon import Communicator
from antiphon.mscclpp._absent import Absent
from antiphon.mscclpp._memory import whole

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Bootstrap", "CommGroup"]

_TRIO = re.compile(r"(?:[^:\[\]]+:)?(?P<host>\[[^\[\]]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})")
_CHANNELS = "write what its channels would do in mscclpp.language, and compile it"
_MEMORY = "an executor takes any memory; antiphon.Communicator.symmetric makes what all ranks reach"


class Bootstrap:
    """The numbers of a group's ranks, and their barrier."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def get_rank(self) -> int:
        """This rank."""
        return self._comm.rank

    def get_n_ranks(self) -> int:
        """The number of ranks."""
        return self._comm.world_size

    def get_n_ranks_per_node(self) -> int:
        """The number of ranks on this rank's node."""
        return len(self._comm.nodes[self._comm.node])

    def get_n_ranks_per_ipc_domain(self) -> int:
        """The number of ranks that share memory with this one: those of its node."""
        return self.get_n_ranks_per_node()

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self._comm.barrier()

    all_gather = Absent("Bootstrap.all_gather", "use antiphon.Communicator.exchange_bytes of CommGroup.communicator")
    send = Absent("Bootstrap.send", "use CommGroup.send")
    recv = Absent("Bootstrap.recv", "use CommGroup.recv")


class CommGroup:
    """The ranks that execute plans together; all of them make it together.

    They are described by one of these: ``mpi_comm``, a communicator of mpi4py; ``torch_group``, a torch process group of any backend,
    or an :class:`antiphon.Communicator`; ``interfaceIpPortTrio``, ``"eth0:10.0.0.1:50000"`` or without the interface, with ``rank`` and
    ``size``: ranks of this machine and of one user, which meet at a Unix socket that is named after the address, and not at the port.
    Groups made of one torch or MPI group share their communicator.

    Raises ``ValueError`` for more or less than one of these, numbers that are wrong, and an address of another machine;
    ``TypeError`` for other groups; what :func:`antiphon.init` raises when ranks do not meet.
    """

    #: The communicator, for :class:`Executor`, :meth:`Algorithm.execute` and everything else that Antiphon has.
    communicator: Communicator
    bootstrap: Bootstrap
    my_rank: int
    nranks: int
    nranks_per_node: int
    nranks_per_ipc_domain: int
    ipc_domain_n_ranks: int

    def __init__(
        self,
        mpi_comm: Any = None,
        torch_group: "ProcessGroup | Communicator | None" = None,
        interfaceIpPortTrio: str = "",
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        ways = {"mpi_comm": mpi_comm, "torch_group": torch_group, "interfaceIpPortTrio": interfaceIpPortTrio or None}
        given = [name for name, way in ways.items() if way is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"CommGroup: pass one of mpi_comm, torch_group and interfaceIpPortTrio, not {got}")
        if torch_group is not None:
            from antiphon.comm.cuda_ipc import communicator

            comm = communicator("CommGroup", torch_group)
        elif mpi_comm is not None:
            if not all(hasattr(mpi_comm, name) for name in ("Get_rank", "Get_size", "allgather")):
                kind = type(mpi_comm).__name__
                raise TypeError(f"CommGroup: mpi_comm must be a communicator of mpi4py, not {kind}")
            from antiphon.comm.mnnvl import communicator_of

            comm = communicator_of("CommGroup", mpi_comm)
        else:
            comm = _at_address(interfaceIpPortTrio, rank, size)
        for name, said, found in (("rank", rank, comm.rank), ("size", size, comm.world_size)):
            if said is not None and whole("CommGroup", name, said) != found:
                raise ValueError(f"CommGroup: {name} is {said}, and the group says {found}")
        self.communicator, self.bootstrap = comm, Bootstrap(comm)
        self.my_rank, self.nranks = comm.rank, comm.world_size
        self.nranks_per_node = self.bootstrap.get_n_ranks_per_node()
        self.nranks_per_ipc_domain = self.ipc_domain_n_ranks = self.bootstrap.get_n_ranks_per_ipc_domain()

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        self.communicator.barrier()

    def send(self, tensor: Any, peer: int, tag: int) -> None:
        """Sends an array on the host to a rank, which receives it with the same tag."""
        self.communicator.send(tensor, peer, tag=tag)

    def recv(self, tensor: Any, peer: int, tag: int) -> None:
        """Receives into an array on the host what a rank sent with this tag."""
        self.communicator.recv(tensor, peer, tag=tag)

    my_ib_device = Absent("CommGroup.my_ib_device", "ranks of a plan are on one machine, and use no InfiniBand")
    make_connection = Absent("CommGroup.make_connection", _CHANNELS)
    make_semaphores = Absent("CommGroup.make_semaphores", _CHANNELS)
    make_memory_channels = Absent("CommGroup.make_memory_channels", _CHANNELS)
    make_memory_channels_with_scratch = Absent("CommGroup.make_memory_channels_with_scratch", _CHANNELS)
    make_port_channels = Absent("CommGroup.make_port_channels", _CHANNELS)
    make_port_channels_with_scratch = Absent("CommGroup.make_port_channels_with_scratch", _CHANNELS)
    register_semaphore_with_proxy = Absent("CommGroup.register_semaphore_with_proxy", _CHANNELS)
    register_memory_with_proxy = Absent("CommGroup.register_memory_with_proxy", _MEMORY)
    register_tensor_with_connections = Absent("CommGroup.register_tensor_with_connections", _MEMORY)
    register_local_memory = Absent("CommGroup.register_local_memory", _MEMORY)


def _at_address(trio: str, rank: int | None, size: int | None) -> Communicator:
    """The communicator of ranks of this machine that all know an address of it."""
    found = _TRIO.fullmatch(trio) if isinstance(trio, str) else None
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise ValueError(f"CommGroup: interfaceIpPortTrio must be interface:ip:port, such as eth0:10.0.0.1:50000, not {trio!r}")
    if rank is None or size is None:
        raise ValueError("CommGroup: interfaceIpPortTrio needs rank and size")
    size = whole("CommGroup", "size", size, 1)
    rank = whole("CommGroup", "rank", rank)
    address = _address_here(found["host"].strip("[]"))
    path = os.path.join(_own_folder(), f"mscclpp-{address}-{int(found['port'])}")
    timeout = os.environ.get("ANTIPHON_TIMEOUT")
    return antiphon.init(rank=rank, world_size=size, path=path, timeout=None if timeout is None else float(timeout))


def _address_here(host: str) -> str:
    """An address of this machine in figures."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as one:
            one.bind(address)
    except OSError as error:
        several = "ranks on several machines meet by antiphon.init(), and those of a plan are on one"
        raise ValueError(f"CommGroup: {host} is no address of this machine ({error}): {several}") from None
    return str(address[0])


def _own_folder() -> str:
    """A folder that only this user can enter."""
    user = os.geteuid()
    folder = os.path.join(tempfile.gettempdir(), f"antiphon-{user}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if found.st_uid != user or found.st_mode & 0o7777 != 0o700 or os.path.islink(folder):
        what = f"{found.st_mode:o} of user {found.st_uid}"
        raise RuntimeError(f"CommGroup: {folder} must be a folder of this user alone (0700), but it is {what}")
    return folder
