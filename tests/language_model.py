"""A second `antiphon.language`, as small as can be: what the format of plans says of numbers and passes, written down once
more in another way. It checks no arguments. Operations are the plan's dictionaries; `sync` in them says on which sides threads are to meet."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from antiphon.language import BufferType, ReduceOperationType, SyncType

Op = dict[str, Any]

KEYS = (
    "name barrier_id num_threadblocks iter_context ops semaphore_ids buffer_type buffer_offset size dst_chunk src_buff dst_buff "
    "channel_ids channel_type reduce_op tbg_info"
).split()
SIDES = {
    SyncType.none: frozenset(),
    SyncType.before: frozenset({"before"}),
    SyncType.after: frozenset({"after"}),
    SyncType.both: frozenset({"before", "after"}),
}
PLAIN, PACKETS = ("re", "res", "rre", "rres"), ("repkt", "respkt", "recpkt", "recspkt")

current: "CollectiveProgram"


class Gpu:
    def __init__(self, rank: int, input_chunks: int, output_chunks: int) -> None:
        self.rank, self.chunks = rank, {"i": input_chunks, "o": output_chunks, "s": 0}
        self.blocks: list[dict[str, Any]] = []
        self.peers: dict[str, list[int]] = {}
        self.switches: list[tuple[str, list[int]]] = []
        self.remote_buffers: dict[tuple[int, str], set[str]] = {}
        self.semaphores: list[int] = []
        self.barriers: list[list[int]] = []

    def block(self, tb: int) -> dict[str, Any]:
        while len(self.blocks) <= tb:
            self.blocks.append({"ops": [], "channels": {}, "remote_buffers": {}})
        return self.blocks[tb]

    def channel(self, tb: int, kind: str, number: int) -> int:
        return place(self.block(tb)["channels"].setdefault(kind, []), number)

    def remote(self, tb: int, kind: str, chunk: "Chunk") -> dict[str, int]:
        buffer = chunk.rank, chunk.buffer.value
        self.remote_buffers.setdefault(buffer, set()).add(kind)
        number = list(self.remote_buffers).index(buffer)
        at = place(self.block(tb)["remote_buffers"].setdefault(kind, []), number)
        return {"buffer_id": at, "index": chunk.index, "size": chunk.size}


def place(items: list[Any], item: Any) -> int:
    if item not in items:
        items.append(item)
    return items.index(item)


class CollectiveProgram:
    def __init__(
        self,
        name: str,
        collective: Any,
        num_ranks: int,
        instances: int = 1,
        instr_fusion: bool = True,
        auto_sync: bool = True,
    ) -> None:
        sizes = [(buffers[BufferType.input].size, buffers[BufferType.output].size) for buffers in collective.init_buffers()]
        self.gpus = [Gpu(rank, *sizes[rank]) for rank in range(num_ranks)]
        self.name, self.collective, self.instances = name, collective, instances
        self.instr_fusion, self.auto_sync = instr_fusion, auto_sync
        self.loop: dict[tuple[int, int], list[Op]] | None = None

    def __enter__(self) -> "CollectiveProgram":
        global current
        current = self
        return self

    def __exit__(self, *error: object) -> None: ...

    def add(self, rank: int, tb: int, **op: Any) -> None:
        ops = self.gpus[rank].block(tb)["ops"] if self.loop is None else self.loop.setdefault((rank, tb), [])
        ops.append({key: value for key, value in op.items() if value is not None})

    def finished(self, ops: list[Op]) -> list[Op]:
        ops = deepcopy(ops)
        if self.instr_fusion:
            ops = fused(ops)
        ops = with_data_sync(ops)
        return with_dependencies(ops) if self.auto_sync else ops

    def to_json(self) -> str:
        plan = {
            "name": self.name,
            "collective": self.collective.name,
            "protocol": "Simple",
            "inplace": self.collective.inplace,
            "reuse_resources": False,
            "gpus": [self.gpu(gpu) for gpu in self.gpus],
            "num_threads_per_block": 1024,
            "use_double_scratch_buffer": False,
            "buffer_alignment": 16,
            "min_message_size": 0,
            "max_message_size": 2**64 - 1,
        }
        return json.dumps(plan, indent=2)

    def gpu(self, gpu: Gpu) -> dict[str, Any]:
        times = range(self.instances)
        blocks = [
            {
                "id": number * self.instances + instance,
                "ops": [self.instance(op, instance) for op in ops],
                "channels": [
                    {"channel_type": kind, "channel_ids": [each * self.instances + instance for each in ids]}
                    for kind, ids in block["channels"].items()
                ],
                "remote_buffer_refs": [
                    {"access_channel_type": kind, "remote_buffer_ids": ids}
                    for kind, ids in block["remote_buffers"].items()
                ],
            }
            for number, block in enumerate(gpu.blocks)
            for ops in [self.finished(block["ops"])]
            for instance in times
        ]
        peers = [
            {"channel_type": kind, "connected_to": [peer for peer in peers for _ in times]}
            for kind, peers in gpu.peers.items()
        ]
        switches = [
            {"channel_type": "switch", "buffer_type": buffer, "rank_groups": [{"size": len(ranks), "ranks": ranks}]}
            for buffer, ranks in gpu.switches
            for _ in times
        ]
        return {
            "id": gpu.rank,
            "input_chunks": gpu.chunks["i"] * self.instances,
            "output_chunks": gpu.chunks["o"] * self.instances,
            "scratch_chunks": gpu.chunks["s"] * self.instances,
            "threadblocks": blocks,
            "channels": peers + switches,
            "remote_buffers": [
                {"rank": rank, "type": buffer, "access_channel_types": sorted(kinds)}
                for (rank, buffer), kinds in gpu.remote_buffers.items()
            ],
            "semaphores": [{"init_value": value} for value in gpu.semaphores for _ in times],
        }

    def instance(self, op: Op, instance: int) -> Op:
        """What becomes of an operation in one of the instances."""
        index = lambda at, size: at * self.instances + instance * size
        number = lambda value: value * self.instances + instance
        chunk = lambda chunk: {**chunk, "index": index(chunk["index"], chunk["size"])}
        change = {
            "barrier_id": number,
            "semaphore_ids": lambda ids: [number(each) for each in ids],
            "buffer_offset": lambda offset: index(offset, op["size"]),
            "dst_chunk": chunk,
            "src_buff": lambda chunks: [chunk(each) for each in chunks],
            "dst_buff": lambda chunks: [chunk(each) for each in chunks],
            "ops": lambda ops: [self.instance(each, instance) for each in ops],
        }
        return {key: change.get(key, lambda value: value)(op[key]) for key in KEYS if key in op}


# The passes.


def fused(ops: list[Op]) -> list[Op]:
    done: list[Op] = []
    for following in ops:
        op = combined(done[-1], following) if done else None
        if op is None:
            done.append(following)
        else:
            done[-1] = op
        # Only now: what stands before a loop sees it as it was written.
        if done[-1]["name"] == "pipeline" and done[-1] is following:
            following["ops"] = fused(following["ops"])
    return done


def meets(op: Op, side: str) -> bool:
    """Whether the threads meet at the begin (or end) of an operation, or are to."""
    if op["name"] == "pipeline":
        return bool(op["ops"]) and meets(op["ops"][0 if side == "before" else -1], side)
    return op["name"] in ("nop", "barrier") or side in op.get("sync", ())


def combined(op: Op, following: Op) -> Op | None:
    """One operation for two neighbours, or none; then one of them may no longer ask for what the other does."""
    if one := one_of(op, following):
        return one
    if following["name"] == "nop" and "sync" not in op and meets(op, "after"):
        return op
    if op["name"] == "nop" and "sync" not in following and meets(following, "before"):
        return following
    if "sync" in op and meets(following, "before"):
        op["sync"] -= {"after"}
    elif "sync" in following and "sync" not in op and meets(op, "after"):
        following["sync"] -= {"before"}
    return None


def one_of(op: Op, following: Op) -> Op | None:
    same = lambda *keys: all(op.get(key) == following.get(key) for key in keys)
    both = lambda *keys: {key: op[key] + following[key] for key in keys if key in op}
    name, next_name = op["name"], following["name"]
    memory = following.get("channel_type") == "memory"
    if name in ("sem_acquire", "sem_release") and same("name"):
        return {**op, **both("semaphore_ids"), "sync": op["sync"] | following["sync"]}
    if name in ("signal", "rlxsignal", "wait", "rlxwait", "flush") and same("name", "channel_type"):
        one, other = set(op["channel_ids"]), set(following["channel_ids"])
        if name == "flush" or not one & other:
            return {**op, "channel_ids": sorted(one | other), "sync": op["sync"] | following["sync"]}
    if name in ("get", "put", "ppkt", "pws", "pwsf") and same("name", "channel_type", "tbg_info"):
        if op["src_buff"][0]["size"] == following["src_buff"][0]["size"]:
            return {**op, **both("src_buff", "dst_buff", "channel_ids")}
    if name == "rppkt" and same("name", "channel_type", "tbg_info", "src_buff"):
        return {**op, **both("dst_buff", "channel_ids")}
    if name in ("re", "repkt", "rre") and same("name", "dst_buff", "channel_type", "reduce_op", "tbg_info"):
        if op["src_buff"][0] == following["src_buff"][0]:
            sources = op["src_buff"] + following["src_buff"][1:]
            return {**op, "src_buff": sorted(sources, key=lambda chunk: "type" not in chunk)}
    if name in PLAIN + PACKETS and same("tbg_info"):
        result, *packets = [chunk for chunk in op["dst_buff"] if "type" in chunk]
        source = following.get("src_buff", [None])[0]
        sent = {**op, "dst_buff": op["dst_buff"] + following.get("dst_buff", []), "channel_type": "memory"}
        if name in PLAIN and next_name == "put" and memory and source == result:
            return {**sent, "name": {"re": "res", "rre": "rres"}.get(name, name)}
        if name in PACKETS and next_name == "ppkt" and memory and source == result:
            return {**sent, "name": {"repkt": "respkt", "recpkt": "recspkt"}.get(name, name)}
        if packets and next_name == "rppkt" and memory and source == packets[0]:
            return {**sent, "name": "recspkt"}
        if name == "repkt" and next_name == "cpkt" and source == result:
            return {**op, "name": "recpkt", **both("dst_buff")}
    if name == "glre" and next_name == "gstore":
        [there] = following["dst_buff"]
        here = {"switch_channel_id": op["channel_ids"][0], "index": op["buffer_offset"], "size": op["size"]}
        if {**there, "index": 0} == {**here, "index": 0} and op["dst_chunk"] == following["src_buff"][0]:
            kept = {key: op[key] for key in ("channel_type", "reduce_op")}
            return {"name": "glres", "src_buff": [here], "dst_buff": [there], **kept}
    return None


def with_data_sync(ops: list[Op]) -> list[Op]:
    done: list[Op] = []
    for op in ops:
        if op["name"] == "pipeline":
            op["ops"] = with_data_sync(op["ops"])
        sides = op.pop("sync", ())
        done += [{"name": "nop"}] * ("before" in sides) + [op] + [{"name": "nop"}] * ("after" in sides)
    return done


def with_dependencies(ops: list[Op]) -> list[Op]:
    done: list[Op] = []
    touched: dict[tuple[str, int], tuple[int, bool]] = {}
    for number, op in enumerate(ops):
        if op["name"] in ("nop", "barrier"):
            touched.clear()
        if op["name"] == "pipeline":
            op["ops"] = with_dependencies(op["ops"])
        conflicts = False
        for chunk, writes in accesses(op):
            cells = [(chunk["type"], at) for at in range(chunk["index"], chunk["index"] + chunk["size"])]
            before = [touched[cell] for cell in cells if cell in touched]
            if any(owner != number and (writes or wrote) for owner, wrote in before):
                touched.clear()
                conflicts = True
            touched.update(dict.fromkeys(cells, (number, writes)))
        done += [{"name": "nop"}] * conflicts + [op]
    return done


def accesses(op: Op) -> Iterator[tuple[dict[str, Any], bool]]:
    """Chunks of the rank, and whether they are written."""
    name = op["name"]
    if name == "pipeline":
        for each in op["ops"]:
            yield from accesses(each)
    if name in ("copy", "cpkt", "put", "ppkt", "pws", "pwsf", *PLAIN, *PACKETS):
        chunks = [chunk for chunk in op["src_buff"] if "type" in chunk]
        yield from ((chunk, False) for chunk in chunks[name in PACKETS :])
    if name in ("copy", "upkt", "get"):
        yield from ((chunk, True) for chunk in op["dst_buff"])
    if name in PLAIN + PACKETS:
        yield op["dst_buff"][0], True


# The vocabulary.


class Chunk(NamedTuple):
    rank: int
    buffer: BufferType
    index: int
    size: int

    def here(self) -> dict[str, Any]:
        return {"type": self.buffer.value, "index": self.index, "size": self.size}

    def of_rank(self) -> dict[str, Any]:
        return {"rank": self.rank, **self.here()}


class BaseBuffer(NamedTuple):
    rank: int
    kind: BufferType
    offset: int

    def __getitem__(self, key: Any) -> Chunk:
        return Chunk(self.rank, self.kind, self.offset + key.start, key.stop - key.start)


def Buffer(rank: int, size: int) -> BaseBuffer:
    chunks = current.gpus[rank].chunks
    chunks["s"] += size
    return BaseBuffer(rank, BufferType.scratch, chunks["s"] - size)


def ThreadBlockGroup(tb_list: list[int]) -> list[int]:
    return tb_list


def doers(tb: int | None, group: list[int] | None) -> Iterator[tuple[int, dict[str, int] | None]]:
    for each in [tb] if tb is not None else group or []:
        yield each, None if group is None else {"tb_id": group.index(each), "tbg_size": len(group)}


class Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_input_buffer(self) -> BaseBuffer:
        return BaseBuffer(self.rank, BufferType.input, 0)

    def get_output_buffer(self) -> BaseBuffer:
        return BaseBuffer(self.rank, BufferType.output, 0)

    def _copy(self, name: str, dst: Chunk, src: Chunk, tb: int | None, group: list[int] | None) -> None:
        for each, share in doers(tb, group):
            current.add(self.rank, each, name=name, src_buff=[src.here()], dst_buff=[dst.here()], tbg_info=share)

    def copy(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._copy("copy", dst, src, tb, tb_group)

    def copy_packets(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._copy("cpkt", dst, src, tb, tb_group)

    def unpack_packets(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._copy("upkt", dst, src, tb, tb_group)

    def reduce(
        self,
        src: Chunk,
        others: list[Chunk],
        tb: int | None = None,
        tb_group: list[int] | None = None,
        dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
        packet: bool = False,
    ) -> None:
        for each, share in doers(tb, tb_group):
            current.add(
                self.rank,
                each,
                name="repkt" if packet else "re",
                src_buff=[chunk.here() for chunk in (src, *others)],
                dst_buff=[(dst_chunk or src).here()],
                reduce_op=reduce_op.value,
                tbg_info=share,
            )

    def barrier(self, blocks: list[int]) -> None:
        if len(blocks) == 1:
            return current.add(self.rank, blocks[0], name="nop")
        number = place(current.gpus[self.rank].barriers, blocks)
        for tb in blocks:
            current.add(self.rank, tb, name="barrier", barrier_id=number, num_threadblocks=len(blocks))


class Semaphore:
    def __init__(self, rank: int, initial_value: int) -> None:
        self.rank, self.id = rank, len(current.gpus[rank].semaphores)
        current.gpus[rank].semaphores.append(initial_value)

    def acquire(self, tb: int, data_sync: SyncType) -> None:
        current.add(self.rank, tb, name="sem_acquire", semaphore_ids=[self.id], sync=SIDES[data_sync])

    def release(self, tb: int, data_sync: SyncType) -> None:
        current.add(self.rank, tb, name="sem_release", semaphore_ids=[self.id], sync=SIDES[data_sync])


class MemoryChannel:
    kind = "memory"

    def __init__(self, dst_rank: int, src_rank: int) -> None:
        self.gpu = current.gpus[src_rank]
        peers = self.gpu.peers.setdefault(self.kind, [])
        peers.append(dst_rank)
        self.src_rank, self.dst_rank, self.id = src_rank, dst_rank, len(peers) - 1

    def _notify(self, name: str, tb: int, data_sync: SyncType) -> None:
        ids = [self.gpu.channel(tb, self.kind, self.id)]
        current.add(self.src_rank, tb, name=name, channel_ids=ids, channel_type=self.kind, sync=SIDES[data_sync])

    def signal(self, tb: int, data_sync: SyncType, relaxed: bool = False) -> None:
        self._notify("rlxsignal" if relaxed else "signal", tb, data_sync)

    def wait(self, tb: int, data_sync: SyncType, relaxed: bool = False) -> None:
        self._notify("rlxwait" if relaxed else "wait", tb, data_sync)

    def _put(self, name: str, dst: Chunk, src: Chunk, tb: int | None, group: list[int] | None) -> None:
        for each, share in doers(tb, group):
            there = self.gpu.remote(each, self.kind, dst)
            ids = [self.gpu.channel(each, self.kind, self.id)]
            op: Op = {"name": name, "src_buff": [src.here()], "dst_buff": [there], "tbg_info": share}
            current.add(self.src_rank, each, **op, channel_ids=ids if self.kind == "port" else None, channel_type=self.kind)

    def put(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._put("put", dst, src, tb, tb_group)

    def put_packets(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._put("ppkt", dst, src, tb, tb_group)

    def read_put_packets(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        self._put("rppkt", dst, src, tb, tb_group)

    def get(self, dst: Chunk, src: Chunk, tb: int | None = None, tb_group: list[int] | None = None) -> None:
        for each, share in doers(tb, tb_group):
            there = self.gpu.remote(each, self.kind, src)
            ids = [self.gpu.channel(each, self.kind, self.id)]
            op: Op = {"name": "get", "src_buff": [there], "dst_buff": [dst.here()], "tbg_info": share}
            current.add(self.src_rank, each, **op, channel_ids=ids, channel_type=self.kind)

    def reduce(
        self,
        src: Chunk,
        remote: list[Chunk],
        tb: int | None = None,
        tb_group: list[int] | None = None,
        local_dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
    ) -> None:
        for each, share in doers(tb, tb_group):
            there = [self.gpu.remote(each, self.kind, chunk) for chunk in remote]
            self.gpu.channel(each, self.kind, self.id)
            current.add(
                self.src_rank,
                each,
                name="rre" if there else "re",
                src_buff=[src.here(), *there],
                dst_buff=[(local_dst_chunk or src).here()],
                channel_type=self.kind,
                reduce_op=reduce_op.value,
                tbg_info=share,
            )


class PortChannel(MemoryChannel):
    kind = "port"

    def flush(self, tb: int, data_sync: SyncType) -> None:
        self._notify("flush", tb, data_sync)

    def put_with_signal(self, dst: Chunk, src: Chunk, tb: int) -> None:
        self._put("pws", dst, src, tb, None)

    def put_with_signal_and_flush(self, dst: Chunk, src: Chunk, tb: int) -> None:
        self._put("pwsf", dst, src, tb, None)


class SwitchChannel:
    def __init__(self, rank_list: list[int], buffer_type: BufferType) -> None:
        self.buffer_type, self.ids = buffer_type.value, {}
        for rank in rank_list:
            self.ids[rank] = len(current.gpus[rank].switches)
            current.gpus[rank].switches.append((self.buffer_type, rank_list))

    def _id(self, rank: int, tb: int) -> int:
        return current.gpus[rank].channel(tb, "switch", self.ids[rank])

    def reduce(self, rank: int, offset: int, size: int, dst: Chunk, tb: int) -> None:
        where = {"buffer_type": self.buffer_type, "buffer_offset": offset, "size": size, "dst_chunk": dst.of_rank()}
        ids = [self._id(rank, tb)]
        current.add(rank, tb, name="glre", **where, channel_ids=ids, channel_type="switch", reduce_op="sum")

    def broadcast(self, rank: int, src: Chunk, offset: int, size: int, tb: int, name: str = "gstore") -> None:
        there = {"switch_channel_id": self._id(rank, tb), "index": offset, "size": size}
        current.add(rank, tb, name=name, src_buff=[src.of_rank()], dst_buff=[there], channel_type="switch")

    def broadcast_packets(self, rank: int, src: Chunk, offset: int, size: int, tb: int) -> None:
        self.broadcast(rank, src, offset, size, tb, "gstorepkt")


class LoopIterationContext:
    def __init__(self, unit: int, num_chunks: int) -> None:
        self.turns = {"unit_size": unit, "num_chunks": num_chunks}

    def __enter__(self) -> None:
        current.loop = {}

    def __exit__(self, *error: object) -> None:
        ops, current.loop = current.loop or {}, None
        for (rank, tb), inner in ops.items():
            current.add(rank, tb, name="pipeline", iter_context=self.turns, ops=inner)
