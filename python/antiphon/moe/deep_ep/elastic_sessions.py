"""What an ``ElasticBuffer`` has besides mixtures of experts: messages between neighbours, and sessions of all-gathers."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from antiphon import Communicator, Pending
from antiphon.comm.cuda_ipc import communicator, uses_cuda
from antiphon.moe._arguments import check_tensors, refuse_derivatives, whole
from antiphon.moe.deep_ep.elastic_sizes import LARGEST, Group, aligned

__all__ = ["ElasticSessions"]

_Shape: TypeAlias = Sequence[int]


class ElasticSessions:
    """Pipelines (``pp_*``): messages to the ranks before and behind this one, in a ring. Sessions (``agrs_*``): all-gathers that run
    beside other work.

    Messages are those of the group's communicator, and all-gathers its started ones: they need no memory of the buffer. The sizes that
    are configured are limits.
    """

    _comm: Communicator
    _pipeline: tuple[int, int] | None = None
    _limits: tuple[int, int] | None = None
    _session: "_Session | None" = None
    _sends: dict[int, deque[Pending[None]]]

    def _open(self) -> Any:
        raise NotImplementedError

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """The bytes of messages to and from both neighbours, a multiple of 2 MiB."""
        call = "get_pp_buffer_size_hint"
        size = aligned(whole(call, "num_max_tensor_bytes", num_max_tensor_bytes, most=LARGEST), 32)
        return aligned(size * whole(call, "num_max_inflight_tensors", num_max_inflight_tensors) * 4)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Sets how large a message is at most, and how many to one rank may be under way. All ranks call it alike, and wait for the
        messages that were sent before.

        Raises ``ValueError`` on all ranks if their numbers differ.
        """
        self._open()
        call = "pp_set_config"
        config = (
            whole(call, "num_max_tensor_bytes", num_max_tensor_bytes, 1, LARGEST),
            whole(call, "num_max_inflight_tensors", num_max_inflight_tensors, 1),
        )
        for sends in self._sends.values():
            while sends:
                sends.popleft().wait()
        self._agree(call, config)
        self._pipeline = config

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a contiguous tensor to the rank before or behind this one. The tensor may be written when the call returns, on a GPU
        behind it in the stream.

        Up to ``num_max_inflight_tensors`` messages to a rank wait for nobody; then the call waits for the first of them, on a GPU in
        the stream. On a GPU messages leave in the order of the calls, so that one which the receiver does not take yet delays
        those to the other neighbour. ``num_sms`` has no effect.
        """
        to = self._neighbour("pp_send", t, "dst_rank_idx", dst_rank_idx, num_sms)
        assert self._pipeline is not None
        sends = self._sends.setdefault(to, deque())
        while len(sends) >= self._pipeline[1]:
            sends.popleft().wait()
        sends.append(self._comm.start_send(t.detach().clone(), to))

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives the next message of the rank before or behind this one into a contiguous tensor of its dtype and size. On the CPU
        the call waits for it, on a GPU the stream. ``num_sms`` has no effect."""
        source = self._neighbour("pp_recv", t, "src_rank_idx", src_rank_idx, num_sms)
        self._comm.recv(t, source)

    def _neighbour(self, call: str, t: Tensor, name: str, rank: int, num_sms: int) -> int:
        """The rank of a message, after the checks of all arguments."""
        self._open()
        if self._pipeline is None:
            raise RuntimeError(f"{call}: call pp_set_config first")
        _check_contiguous(call, "t", t)
        refuse_derivatives(call, t)
        whole(call, "num_sms", num_sms)
        most, size = self._pipeline[0], t.numel() * t.element_size()
        if size > most:
            raise ValueError(f"{call}: t has {size} bytes; pp_set_config allows {most}")
        mine, count = self._comm.rank, self._comm.world_size
        if count == 1:
            raise ValueError(f"{call}: rank {mine} is alone and has no neighbour")
        neighbours = sorted({(mine - 1) % count, (mine + 1) % count})
        rank = whole(call, name, rank)
        if rank not in neighbours:
            ranks = " and ".join(map(str, neighbours))
            raise ValueError(f"{call}: {name} is {rank}; the neighbours of rank {mine} of {count} are {ranks}")
        return rank

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: Group, shapes: _Shape | Sequence[_Shape], dtype: torch.dtype
    ) -> int:
        """The bytes that all-gathers of tensors of these shapes, or of one, come to in a session: those of each result, in 32s."""
        call = "get_agrs_num_max_session_bytes"
        count = communicator(call, group).world_size
        return sum(_gathered_bytes(count, shape, dtype) for shape in _shapes(call, shapes)[0])

    @staticmethod
    def get_agrs_buffer_size_hint(group: Group, num_max_session_bytes: int) -> int:
        """The bytes of a session, in 2 MiB, whatever the ``group``."""
        return aligned(whole("get_agrs_buffer_size_hint", "num_max_session_bytes", num_max_session_bytes, most=LARGEST))

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Sets how many bytes the results of a session come to at most, and how many calls of :meth:`all_gather` it has. All ranks call
        it alike, outside of a session.

        Raises ``ValueError`` on all ranks if their numbers differ.
        """
        self._open()
        call = "agrs_set_config"
        config = (
            whole(call, "num_max_session_bytes", num_max_session_bytes, 1, LARGEST),
            whole(call, "num_max_all_gathers_per_session", num_max_all_gathers_per_session, 1),
        )
        if self._session is not None:
            raise RuntimeError(f"{call}: destroy the session first")
        self._agree(call, config)
        self._limits = config

    def create_agrs_session(self) -> None:
        """Begins a session. Raises ``RuntimeError`` in another one, and before :meth:`agrs_set_config`."""
        self._open()
        if self._limits is None:
            raise RuntimeError("create_agrs_session: call agrs_set_config first")
        if self._session is not None:
            raise RuntimeError("create_agrs_session: there is a session already")
        self._session = _Session(self._comm, *self._limits)

    def destroy_agrs_session(self) -> None:
        """Ends the session, behind its all-gathers. Their results stay as they are. Raises ``RuntimeError`` without a session."""
        session = self._in_session("destroy_agrs_session")
        self._session = None
        session.end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session as a context; nothing unless ``enabled``."""
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        finally:
            self.destroy_agrs_session()

    def agrs_get_inplace_tensor(
        self,
        shapes: _Shape | Sequence[_Shape],
        dtype: torch.dtype,
        device: torch.device | str | int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """A tensor of a shape, or a tuple of one for each shape, which :meth:`all_gather` of this session takes without a copy: this
        rank's place in its result. ``device``, which DeepEP does not have, is the current GPU if torch has initialised CUDA in this process,
        else the CPU."""
        session = self._in_session("agrs_get_inplace_tensor")
        wanted, is_one = _shapes("agrs_get_inplace_tensor", shapes)
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda() else torch.device("cpu")
        tensors = session.places(wanted, dtype, torch.device(device))
        return tensors[0] if is_one else tensors

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Starts to gather a contiguous tensor of all ranks, of one shape and dtype, in a session: the result, ``[R, …]``, and a
        function that waits for it, on a GPU in the current stream. Of a sequence of tensors: a result for each, and one such function.

        Until then the tensors may not be written. Raises ``ValueError`` for more than :meth:`agrs_set_config` allows, and
        ``RuntimeError`` without a session; the function does so after its session.
        """
        session = self._in_session("all_gather")
        is_one = isinstance(t, Tensor)
        tensors = [t] if isinstance(t, Tensor) else list(t)
        if not tensors:
            raise ValueError("all_gather: no tensors")
        names = ["t" if is_one else f"t[{index}]" for index in range(len(tensors))]
        check_tensors("all_gather", dict(zip(names, tensors, strict=True)))
        for name, tensor in zip(names, tensors, strict=True):
            _check_contiguous("all_gather", name, tensor)
        refuse_derivatives("all_gather", *tensors)
        results, waits = session.start(tensors)

        def wait() -> None:
            if self._session is not session:
                raise RuntimeError("all_gather: the session is over")
            for handle in waits:
                handle.wait()

        return (*results, wait)

    def _in_session(self, call: str) -> "_Session":
        self._open()
        if self._session is None:
            raise RuntimeError(f"{call}: there is no session: call create_agrs_session first")
        return self._session

    def _agree(self, call: str, config: tuple[int, int]) -> None:
        """Raises ``ValueError`` unless all ranks, which come here together, have the same numbers."""
        found = self._comm.exchange_objects(config)
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise ValueError(f"{call}: rank 0 passes {found[0]}, and rank {other} {found[other]}")


class _Session:
    """What is under way between ``create_agrs_session`` and ``destroy_agrs_session``."""

    def __init__(self, comm: Communicator, most_bytes: int, most_calls: int) -> None:
        self._comm, self._most_bytes, self._most_calls = comm, most_bytes, most_calls
        self._bytes = self._calls = 0
        self._waits: list[Pending[Any]] = []
        #: The results of which ``places`` gave this rank's part, by its address.
        self._results: dict[int, Tensor] = {}

    def places(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """This rank's part of new results."""
        count = self._comm.world_size
        self._check("agrs_get_inplace_tensor", sum(_gathered_bytes(count, shape, dtype) for shape in shapes))
        parts = []
        for shape in shapes:
            result = torch.empty(count, *shape, dtype=dtype, device=device)
            part = result[self._comm.rank]
            self._results[part.data_ptr()] = result
            parts.append(part)
        return tuple(parts)

    def start(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Pending[Any]]]:
        """Starts an all-gather of each tensor."""
        count = self._comm.world_size
        size = sum(_gathered_bytes(count, tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._check("all_gather", size)
        self._bytes, self._calls = self._bytes + size, self._calls + 1
        results, waits = [], []
        for tensor in tensors:
            result = self._results.get(tensor.data_ptr())
            if result is None or result.shape[1:] != tensor.shape or result.dtype != tensor.dtype:
                result = tensor.new_empty(count, *tensor.shape)
            waits.append(self._comm.start_all_gather(tensor, out=result))
            results.append(result)
        self._waits += waits
        return results, waits

    def end(self) -> None:
        """Waits for what was started."""
        for handle in self._waits:
            handle.wait()

    def _check(self, call: str, size: int) -> None:
        if self._calls >= self._most_calls:
            raise ValueError(f"{call}: the session has had {self._calls} all-gathers; agrs_set_config allows {self._most_calls}")
        if self._bytes + size > self._most_bytes:
            raise ValueError(
                f"{call}: {size} bytes, behind {self._bytes} of this session; agrs_set_config allows {self._most_bytes}"
            )


def _check_contiguous(call: str, name: str, tensor: Any) -> None:
    check_tensors(call, {name: tensor})
    if not tensor.is_contiguous():
        raise ValueError(f"{call}: {name} must be contiguous; its strides are {list(tensor.stride())} for {list(tensor.shape)}")


def _gathered_bytes(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return aligned(count * prod(shape) * dtype.itemsize, 32)


def _shapes(call: str, shapes: Any) -> tuple[list[tuple[int, ...]], bool]:
    """Shapes, and whether they were passed as one."""

    def one(shape: Any) -> tuple[int, ...]:
        return tuple(whole(call, "a size of a shape", size) for size in shape)

    if isinstance(shapes, tuple) and not any(isinstance(each, Sequence) for each in shapes):
        return [one(shapes)], True
    is_sequence = isinstance(shapes, Sequence) and not isinstance(shapes, str)
    if not is_sequence or not shapes or not all(isinstance(each, Sequence) for each in shapes):
        raise TypeError(f"{call}: shapes must be a tuple of sizes, or a sequence of such tuples, not {shapes!r}")
    return [one(shape) for shape in shapes], False
