"""The process group."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

import antiphon
from antiphon.torch import events
from antiphon.torch.cuda import Streams
from antiphon.torch.sparse import SparseSum
from antiphon.torch.tensors import (
    NUMERIC,
    OPS,
    SUM,
    Copies,
    check,
    contiguous,
    counts,
    flat,
    is_plain,
    only,
    reduction,
    scaled,
    unsupported,
    untracked,
    warn_of_lost_gradients,
)
from antiphon.torch.work import Completed, Futures, Sends, Work

#: The name of a method of the communicator, its arguments, and ``out``: a tensor, a list of them, or nothing.
Call = tuple[str, tuple[Any, ...], Any]


@dataclass
class Options:
    """What torch asks a backend for when it splits a group."""

    _timeout: timedelta
    backend: str = "antiphon"


class Group(dist.ProcessGroup):
    """A process group over one communicator. The methods are those that ``torch.distributed`` calls.

    A blocking call runs on the caller's thread; what is asked for with ``asyncOp`` (the default of the options) is
    started. Both belong to one sequence, so that it need not be the same on all ranks.
    """

    def __init__(self, store: Store, rank: int, size: int, comm: antiphon.Communicator) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with the store no subclass can be made
        self.comm, self._store = comm, store
        self._futures, self._sends = Futures(), Sends()
        self._done = Completed([], [])
        self._name = self._description = ""
        self._streams: dict[int, Streams] = {}

    def _run(self, name: str, opts: Any, calls: list[Call], result: Sequence[Tensor], copies: Copies) -> dist.Work:
        """Makes the calls of an operation in order, then the copies."""
        calls = [_untracked(*call) for call in calls]
        if not events.is_watched():
            return self._make(opts, calls, result, copies)
        read = [tensor for call in calls for tensor in call[1] if isinstance(tensor, Tensor)]
        with self._event(name, read or [call[2] for call in calls if call[2] is not None]):
            work = self._make(opts, calls, result, copies)
        return work if work is self._done else events.started(name, work)

    def _event(self, name: str, tensors: Sequence[Tensor] = ()) -> AbstractContextManager[object]:
        return events.call(name, tensors, self._description or self._name)

    def _make(self, opts: Any, calls: list[Call], result: Sequence[Tensor], copies: Copies) -> dist.Work:
        comm, started = self.comm, opts is None or opts.asyncOp
        device = next((tensor.get_device() for tensor in result if tensor.is_cuda), None)
        if device is not None:
            streams = self.streams_on(device)
            if started:
                return streams.aside(calls, result, copies)
            streams.enter()
        elif started:
            handles = [getattr(comm, f"start_{name}")(*arguments, out=out) for name, arguments, out in calls]
            return Work(handles, result, copies, self._futures)
        for name, arguments, out in calls:
            getattr(comm, name)(*arguments, out=out)
        copies.finish()
        return self._done

    def enter(self, tensor: Tensor) -> antiphon.Communicator:
        """The communicator, for a call on such a tensor that comes after those before, on the current stream."""
        if tensor.is_cuda:
            self.streams_on(tensor.get_device()).enter()
        return self.comm

    def streams_on(self, device: int) -> Streams:
        """The order of the calls on a GPU."""
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = Streams(self.comm, device)
        return streams

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        tensor: Tensor = only("all_reduce", tensors)
        # The most frequent case, without the work that the others need.
        if opts is not None and not opts.asyncOp and tensor.dtype in NUMERIC and not events.is_watched():
            op = OPS.get(int(opts.reduceOp.op))
            served = tensor.is_cpu or tensor.is_cuda
            if op is not None and served and tensor.layout is torch.strided and is_plain(tensor) and not tensor.requires_grad:
                self.enter(tensor).all_reduce(tensor, op, out=tensor)
                return self._done
        return self._all_reduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce_coalesced", tensors, opts)

    def _all_reduce(self, name: str, tensors: list[Tensor], opts: Any) -> dist.Work:
        if any(tensor.layout is not torch.strided for tensor in tensors):
            warn_of_lost_gradients("all_reduce", *tensors)
            sparse = SparseSum(self.comm, tensors, SUM if opts is None else opts.reduceOp)
            return self._run(name, opts, sparse.calls(), tensors, sparse)
        copies, calls = Copies(), list[Call]()
        for tensor in tensors:
            op, view, factor = reduction("all_reduce", SUM if opts is None else opts.reduceOp, tensor)
            array = copies.in_out(tensor) if factor is None else copies.stand_in(tensor, scaled(tensor, factor))
            array = view(array)
            calls.append(("all_reduce", (array, op), array))
        return self._run(name, opts, calls, tensors, copies)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        copies, tensor = Copies(), only("reduce", tensors)
        op, view, factor = reduction("reduce", SUM if opts is None else opts.reduceOp, tensor)
        root = 0 if opts is None else opts.rootRank
        read = view(scaled(tensor, factor))
        out = view(copies.output(tensor)) if root == self.rank() else None
        return self._run("reduce", opts, [("reduce", (read, op, root), out)], tensors, copies)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        copies, tensor = Copies(), only("broadcast", tensors)
        check("broadcast", tensor)
        root = 0 if opts is None else opts.rootRank
        array = contiguous(tensor) if root == self.rank() else copies.output(tensor)
        return self._run("broadcast", opts, [("broadcast", (array, root), None)], tensors, copies)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for output, input in zip(output_lists, input_list, strict=True):
            check("all_gather_into_tensor", input, output)
            calls.append(("all_gather", (contiguous(input),), copies.output(output)))
        return self._run("all_gather", opts, self._together(calls), output_lists, copies)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        outputs, input = only("all_gather", output_tensors), only("all_gather", input_tensors)
        copies = Copies()
        calls = self._gather_list(outputs, input, copies)
        return self._run("all_gather", opts, calls, outputs, copies)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for index, input in enumerate(input_list):
            calls += self._gather_list([of_rank[index] for of_rank in output_lists], input, copies)
        return self._run("all_gather_coalesced", opts, calls, [tensor for of_rank in output_lists for tensor in of_rank], copies)

    def _gather_list(self, outputs: list[Tensor], input: Tensor, copies: Copies) -> list[Call]:
        check("all_gather", input, *outputs)
        self._check_list("all_gather", outputs)
        mine = outputs[self.rank()]
        if input.numel() != mine.numel():
            raise ValueError(f"all_gather: an input of {list(input.shape)} for an output of {list(mine.shape)}")
        counts = [output.numel() for output in outputs]
        read = contiguous(input).detach().view(-1)
        if len(set(counts)) == 1:
            return [("all_gather", (read,), copies.outputs(outputs))]
        return [("all_gather_v", (read, counts), copies.outputs(outputs))]

    def gather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, input = Copies(), only("gather", input_tensors)
        root = 0 if opts is None else opts.rootRank
        outputs = only("gather", output_tensors) if root == self.rank() else []
        check("gather", input, *outputs)
        out = None
        if root == self.rank():
            self._check_list("gather", outputs)
            out = copies.outputs(outputs)
        return self._run("gather", opts, [("gather", (contiguous(input), root), out)], outputs, copies)

    def scatter(  # type: ignore[override]
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        copies, output = Copies(), only("scatter", output_tensors)
        root = 0 if opts is None else opts.rootRank
        inputs = only("scatter", input_tensors) if root == self.rank() else []
        check("scatter", output, *inputs)
        read = None
        if root == self.rank():
            self._check_list("scatter", inputs)
            read = flat(inputs)
        return self._run("scatter", opts, [("scatter", (read, root), copies.output(output))], output_tensors, copies)

    def _reduce_scatter_base(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([outputTensor], [inputTensor], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputTensors: list[Tensor], inputTensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for out, read in zip(outputTensors, inputTensors, strict=True):
            asked = SUM if opts is None else opts.reduceOp
            op, view, factor = reduction("reduce_scatter_tensor", asked, read, out)
            calls.append(("reduce_scatter", (view(scaled(read, factor)), op), view(copies.output(out))))
        return self._run("reduce_scatter", opts, self._together(calls), outputTensors, copies)

    def _together(self, calls: list[Call]) -> list[Call]:
        """The same calls, on CUDA in one launch."""
        if len(calls) < 2 or not all(out is not None and out.is_cuda for _, _, out in calls):
            return calls
        name, (_, *rest), _ = calls[0]
        if any(other[1:] != tuple(rest) for _, other, _ in calls):
            return calls
        inputs, outs = [read for _, (read, *_), _ in calls], [out for _, _, out in calls]
        return [(f"{name}_list", (inputs, *rest), outs)]

    def reduce_scatter(  # type: ignore[override]
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        output, inputs = only("reduce_scatter", output_tensors), only("reduce_scatter", input_tensors)
        self._check_list("reduce_scatter", inputs)
        asked = SUM if opts is None else opts.reduceOp
        copies = Copies()
        op, view, factor = reduction("reduce_scatter", asked, output, *inputs)
        out = view(copies.output(output))
        if len({input.numel() for input in inputs}) == 1:
            calls: list[Call] = [("reduce_scatter", (view(scaled(flat(inputs), factor)), op), out)]
        else:
            sizes = [view(input).numel() for input in map(contiguous, inputs)]
            read = view(scaled(flat(inputs), factor)).reshape(-1)
            calls = [("reduce_scatter_v", (read, sizes, op), out.reshape(-1))]
        return self._run("reduce_scatter", opts, calls, output_tensors, copies)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        check("all_to_all_single", input, output)
        copies, size = Copies(), self.size()
        sends, receives = counts(input, input_splits, size), counts(output, output_splits, size)
        read, out = contiguous(input).detach().view(-1), copies.output(output).detach().view(-1)
        if read.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            read = read.clone()  # as they may be the same
        # A rank without splits cannot know whether others have none: it makes the call that they make.
        return self._run("all_to_all", opts, [("all_to_all_v", (read, sends, receives), out)], [output], copies)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        check("all_to_all", *inputs, *outputs)
        self._check_list("all_to_all", inputs)
        self._check_list("all_to_all", outputs)
        copies = Copies()
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        read, out = flat(inputs), copies.outputs(outputs)
        return self._run("all_to_all", opts, [("all_to_all_v", (read, sends, receives), out)], outputs, copies)

    def barrier(self, opts: Any = None) -> dist.Work:
        with self._event("barrier"):
            for streams in self._streams.values():
                streams.synchronize()
            if opts is not None and not opts.asyncOp:
                self.comm.barrier()
                return self._done
            return Work([self.comm.start_barrier()], [], futures=self._futures)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        tensor = self._message("send", tensors)
        with self._event("send", tensors):
            if tensor.is_cuda:
                self._check_untagged("send", tag)
                return self.streams_on(tensor.get_device()).message("send", (contiguous(tensor), dstRank), [], Copies())
            handle = self.comm.start_send(contiguous(tensor), dstRank, tag=tag)
        self._sends.add(handle)
        return Work([handle], tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        return self._receive("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, name: str, tensors: list[Tensor], source: int | None, tag: int) -> dist.Work:
        copies, tensor = Copies(), self._message("recv", tensors)
        with self._event(name, tensors):
            out = copies.output(tensor)
            if tensor.is_cuda:
                self._check_untagged(name, tag)
                if source is None:
                    raise unsupported(f"{name} on CUDA", "name the rank that sends")
                return self.streams_on(tensor.get_device()).message("recv", (out, source), tensors, copies)
            handle = self.comm.start_recv(out, source, tag=tag)
        return Work([handle], tensors, copies)

    def _check_untagged(self, what: str, tag: int) -> None:
        if tag:
            raise unsupported(f"{what} with tag {tag} on CUDA", "messages of two GPUs arrive in the order they were sent")

    def _message(self, what: str, tensors: list[Tensor]) -> Tensor:
        tensor = only(what, tensors)
        check(what, tensor)
        return untracked(tensor)  # type: ignore[no-any-return]

    def _check_list(self, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{what}: {len(tensors)} tensors in the list for {self.size()} ranks")

    def shutdown(self) -> None:
        """Closes the communicator, once the collectives and sends that were started are over, which is bounded by the
        timeout.

        Receives are not waited for, as a message may never come: one still under way may fail.
        """
        self._futures.close()
        try:
            self._sends.wait()
        finally:
            self.comm.close()

    def abort(self) -> None:
        """Ends all waits in the group, of this rank and of the others, with :class:`antiphon.AbortedError`.

        Its communicator can then be shrunk; the group itself is of no more use.
        """
        self._futures.close()
        if not self.comm.closed:
            self.comm.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Changes how long this rank's calls wait for others, from now on."""
        self.comm.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> "Group | None":
        """The group of some ranks of this one, in this order; ``None`` for other ranks. All ranks of this group call it, each with
        the ranks of its own new group, or of any if it is in none."""
        member = self.rank() in new_ranks
        comm = self.comm.split(min(new_ranks) if member else None, new_ranks.index(self.rank()) if member else 0)
        if comm is None:
            return None
        if timeout is not None:
            comm.timeout = timeout.total_seconds()
        group = Group(PrefixStore(f"{group_name}/", self._store), comm.rank, comm.world_size, comm)
        group.setGroupName(group_name or "")
        group.setGroupDesc(group_desc or "")
        return group

    # What torch asks a group about itself, and would otherwise ask C++ backends, of which there are none.

    supports_splitting = True
    supports_coalescing = supports_time_estimate = supports_shrinking = False
    bound_device_id: torch.device | None = None

    def _get_backend(self, device: torch.device) -> "Group":  # type: ignore[override]
        """The backend of the tensors of a device, which is the group itself."""
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError(f"antiphon has no tensors on {device}")
        return self

    @property
    def options(self) -> Options:
        return Options(timedelta(seconds=self.comm.timeout))

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: calls have no numbers here."""

    def perform_nocolor_split(self, device: torch.device | None) -> None:
        """Only its members take part when ``new_group`` makes a group."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: the ranks are connected, and their GPUs are connected in the first call."""

    def get_group_store(self) -> Store:
        return self._store

    def name(self) -> str:
        return "antiphon"

    getBackendName = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    _device_types = property(lambda self: [torch.device("cpu"), torch.device("cuda")])

    def __repr__(self) -> str:
        return f"<antiphon.torch group {self._name!r}: rank {self.rank()} of {self.size()}>"


def _untracked(name: str, arguments: tuple[Any, ...], out: Any) -> Call:
    """The same call, of tensors that autograd does not track."""
    first, *others = arguments
    if isinstance(first, list):  # of a call in one launch
        return name, ([*map(untracked, first)], *others), [*map(untracked, out)]
    read = untracked(first)
    return name, (read, *others), read if first is out else untracked(out)


def _refuse(method: str, instead: str) -> None:
    def refuse(self: Group, *arguments: Any, **options: Any) -> NoReturn:
        raise unsupported(method, instead)

    setattr(Group, method, refuse)


for _method, _instead in {
    "merge_remote_group": "",
    "monitored_barrier": "use barrier, whose TimeoutError names the ranks that did not come",
    "_end_coalescing": "",
    "_register_on_completion_hook": "",
    "_start_coalescing": "use _coalescing_manager without a device",
}.items():
    _refuse(_method, _instead)
