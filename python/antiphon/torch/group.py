"""The process group."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

import antiphon
from antiphon.torch.cuda import Streams
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
)
from antiphon.torch.work import Completed, Futures, Sends, Work

#: The name of a method of the communicator, its arguments, and ``out``: a tensor, a list of them, or nothing.
Call = tuple[str, tuple[Any, ...], Any]


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

    def _run(self, opts: Any, calls: list[Call], result: Sequence[Tensor], copies: Copies) -> dist.Work:
        """Makes the calls in order, then the copies."""
        comm, started = self.comm, opts is None or opts.asyncOp
        device = next((tensor.get_device() for tensor in result if tensor.is_cuda), None)
        if device is not None:
            streams = self._on(device)
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
            self._on(tensor.get_device()).enter()
        return self.comm

    def _on(self, device: int) -> Streams:
        """The order of the calls on a GPU."""
        streams = self._streams.get(device)
        if streams is None:
            streams = self._streams[device] = Streams(self.comm, device)
        return streams

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        tensor: Tensor = only("all_reduce", tensors)
        # The most frequent case, without what the others need.
        if opts is not None and not opts.asyncOp and tensor.dtype in NUMERIC:
            op = OPS.get(int(opts.reduceOp.op))
            served = tensor.is_cpu or tensor.is_cuda
            if op is not None and served and tensor.layout is torch.strided and is_plain(tensor):
                self.enter(tensor).all_reduce(tensor, op, out=tensor)
                return self._done
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for tensor in tensors:
            op, view, factor = reduction("all_reduce", SUM if opts is None else opts.reduceOp, tensor)
            array = copies.in_out(tensor) if factor is None else copies.stand_in(tensor, scaled(tensor, factor))
            array = view(array)
            calls.append(("all_reduce", (array, op), array))
        return self._run(opts, calls, tensors, copies)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        copies, tensor = Copies(), only("reduce", tensors)
        op, view, factor = reduction("reduce", SUM if opts is None else opts.reduceOp, tensor)
        root = 0 if opts is None else opts.rootRank
        read = view(scaled(tensor, factor))
        out = view(copies.output(tensor)) if root == self.rank() else None
        return self._run(opts, [("reduce", (read, op, root), out)], tensors, copies)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        copies, tensor = Copies(), only("broadcast", tensors)
        check("broadcast", tensor)
        root = 0 if opts is None else opts.rootRank
        array = contiguous(tensor) if root == self.rank() else copies.output(tensor)
        return self._run(opts, [("broadcast", (array, root), None)], tensors, copies)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(
        self, output_lists: list[Tensor], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for output, input in zip(output_lists, input_list, strict=True):
            check("all_gather_into_tensor", input, output)
            calls.append(("all_gather", (contiguous(input),), copies.output(output)))
        return self._run(opts, self._together(calls), output_lists, copies)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        outputs, input = only("all_gather", output_tensors), only("all_gather", input_tensors)
        copies = Copies()
        calls = self._gather_list(outputs, input, copies)
        return self._run(opts, calls, outputs, copies)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> dist.Work:
        copies, calls = Copies(), list[Call]()
        for index, input in enumerate(input_list):
            calls += self._gather_list([of_rank[index] for of_rank in output_lists], input, copies)
        return self._run(opts, calls, [tensor for of_rank in output_lists for tensor in of_rank], copies)

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
        return self._run(opts, [("gather", (contiguous(input), root), out)], outputs, copies)

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
        return self._run(opts, [("scatter", (read, root), copies.output(output))], output_tensors, copies)

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
        return self._run(opts, self._together(calls), outputTensors, copies)

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
        return self._run(opts, calls, output_tensors, copies)

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
        return self._run(opts, [("all_to_all_v", (read, sends, receives), out)], [output], copies)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        check("all_to_all", *inputs, *outputs)
        self._check_list("all_to_all", inputs)
        self._check_list("all_to_all", outputs)
        copies = Copies()
        sends, receives = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        read, out = flat(inputs), copies.outputs(outputs)
        return self._run(opts, [("all_to_all_v", (read, sends, receives), out)], outputs, copies)

    def barrier(self, opts: Any = None) -> dist.Work:
        for streams in self._streams.values():
            streams.synchronize()
        if opts is None or opts.asyncOp:
            return Work([self.comm.start_barrier()], [], futures=self._futures)
        self.comm.barrier()
        return self._done

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> dist.Work:
        tensor = self._message("send", tensors, tag)
        if tensor.is_cuda:
            return self._on(tensor.get_device()).message("send", (contiguous(tensor), dstRank), [], Copies())
        handle = self.comm.start_send(contiguous(tensor), dstRank)
        self._sends.add(handle)
        return Work([handle], tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> dist.Work:
        copies, tensor = Copies(), self._message("recv", tensors, tag)
        out = copies.output(tensor)
        if tensor.is_cuda:
            return self._on(tensor.get_device()).message("recv", (out, srcRank), tensors, copies)
        return Work([self.comm.start_recv(out, srcRank)], tensors, copies, source=srcRank)

    def _message(self, what: str, tensors: list[Tensor], tag: int) -> Tensor:
        if tag:
            raise unsupported(f"{what} with tag {tag}", "messages of two ranks arrive in the order they were sent")
        tensor = only(what, tensors)
        check(what, tensor)
        return tensor  # type: ignore[no-any-return]

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

    # What torch asks a group about itself, and would otherwise ask C++ backends, of which there are none.

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


def _refuse(method: str, instead: str) -> None:
    def refuse(self: Group, *arguments: Any, **options: Any) -> NoReturn:
        raise unsupported(method, instead)

    setattr(Group, method, refuse)


for _method, _instead in {
    "abort": "close the group with destroy_process_group",
    "merge_remote_group": "",
    "monitored_barrier": "use barrier, whose TimeoutError names the ranks that did not come",
    "recv_anysource": "say which rank to receive from",
    "set_timeout": "pass the timeout when the group is made",
    "split_group": "use new_group",
    "_end_coalescing": "",
    "_register_on_completion_hook": "",
    "_start_coalescing": "use _coalescing_manager without a device",
}.items():
    _refuse(_method, _instead)
