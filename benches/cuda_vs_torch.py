"""All-reduce on GPUs beside NCCL and torch's paths, in the same processes; benches/README.md says how to read it.

    python benches/cuda_vs_torch.py --record benches/results/MACHINE/DATE-cuda-all-reduce.json

It starts a process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Multicast objects belong to the switches, which others share.
for name, value in {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}.items():
    os.environ.setdefault(name, value)

import antiphon
import record
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from nccl import Nccl, grids

SIZES = [14336, 57344, 229376, 917504, 3670016, 7340032, 29360128, 268435456]
REPLAYS = 7
# Larger ones than their own users give them, and they take minutes.
ONE_SHOT_MOST, TWO_SHOT_MOST = 4 << 20, 64 << 20


def calls_for(size: int) -> int:
    """Calls in a graph: enough that what a launch takes does not show."""
    return 100 if size < 1 << 20 else 40 if size < 16 << 20 else 15


def capture(call: Callable[[], object], calls: int, keep_graph: bool = False) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def blocks(contenders: dict[str, Callable[[], object]]) -> dict[str, list[int]]:
    """The blocks of each kernel of a call, by contender: how many multiprocessors it can be on at once, if they are fewer."""
    return {name: grids(capture(call, 1, keep_graph=True)) for name, call in contenders.items()}


class Limited:
    """NCCL with no more blocks than ours: a communicator for each number."""

    #: More channels than this NCCL does not have between GPUs of one host.
    MOST = 32

    def __init__(self, comm: antiphon.Communicator) -> None:
        self.comm, self.made = comm, dict[int, Nccl]()

    def to(self, ours: list[int]) -> Nccl:
        """As many as the largest kernel of ours has."""
        count = min(max(ours), self.MOST)
        if count not in self.made:
            self.made[count] = Nccl(self.comm, count)
        return self.made[count]


def measure(comm: antiphon.Communicator, contenders: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Microseconds per call, of graphs of ``calls`` calls: the slowest rank of each replay, the median of the replays, in which all
    take turns."""
    graphs = {name: capture(call, calls) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for replay in range(REPLAYS + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            comm.barrier()
            torch.cuda._sleep(200_000)  # while it lasts, everything is submitted
            comm.barrier(device=torch.cuda.current_device(), stream=torch.cuda.current_stream().cuda_stream)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            slowest = max(comm.exchange_objects(begin.elapsed_time(end) / calls * 1e3))
            if replay:
                times[name].append(slowest)
    return {name: round(statistics.median(found), 2) for name, found in times.items()}


def contenders_for(
    comm: antiphon.Communicator, nccl: Nccl, limited: Limited, size: int
) -> dict[str, Callable[[], object]]:
    count, group = size // 2, dist.group.WORLD.group_name
    x = (torch.arange(count, device="cuda") % 61).to(torch.bfloat16)
    out, for_torch = torch.empty_like(x), x.clone()
    shared = symmetric.empty(count, dtype=torch.bfloat16, device=x.device)
    shared.copy_(x)
    symmetric.rendezvous(shared, group)
    comm.all_reduce(x, out=out)
    assert out.equal(x * comm.world_size), "the sum is wrong"
    nccl.all_reduce(x, out)
    assert out.equal(x * comm.world_size), "NCCL's sum is wrong"
    as_ours = limited.to(blocks({"ours": lambda: comm.all_reduce(x, out=out)})["ours"])
    contenders: dict[str, Callable[[], object]] = {
        "antiphon": lambda: comm.all_reduce(x, out=out),
        "nccl": lambda: nccl.all_reduce(x, out),
        "nccl limited": lambda: as_ours.all_reduce(x, out),
        "torch.distributed": lambda: dist.all_reduce(for_torch),
    }
    if size <= ONE_SHOT_MOST:
        contenders["torch one-shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)
    if size <= TWO_SHOT_MOST:
        contenders["torch two-shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)
    return contenders


@contextmanager
def ranks(device: str = "cuda") -> Iterator[antiphon.Communicator]:
    """This rank, with its GPU and with NCCL; on the device ``"cpu"`` with gloo."""
    with antiphon.init() as comm:
        gpu = torch.device("cuda", comm.rank) if device == "cuda" else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        folder = comm.exchange_objects(tempfile.mkdtemp() if comm.rank == 0 else "")[0]
        dist.init_process_group(
            "gloo" if gpu is None else "nccl", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.world_size,
            device_id=gpu,
        )  # fmt: skip
        if gpu is not None:
            comm.prepare_cuda(comm.rank, dtypes=["bfloat16"])
        yield comm
        comm.check()
        dist.destroy_process_group()


def write_record(comm: antiphon.Communicator, path: Path, what: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Records rows of figures of all ranks' GPUs; ``what`` says of what, in which unit."""
    libraries = {"antiphon": antiphon.__version__, "torch": torch.__version__}
    libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    record.write(path, {"ranks": comm.world_size, "libraries": libraries, "figures": what, **more, "rows": rows})


def add_times(row: dict[str, Any], times: dict[str, float], references: tuple[str, ...]) -> None:
    """Adds each contender's time, and its ratio to those of the references and of the fastest peer.

    A peer is a contender whose name does not begin with "antiphon" or "bare"."""
    peers = {name: time for name, time in times.items() if not name.startswith(("antiphon", "bare"))}
    against = {f"of {name}": times[name] for name in references if name in times}
    if peers:
        row["best peer"] = min(peers, key=lambda name: peers[name])
        against["of best peer"] = min(peers.values())
    for name, contender in row["contenders"].items():
        contender |= {"µs": times[name]} | {what: round(times[name] / time, 3) for what, time in against.items()}


def table(row: dict[str, Any]) -> str:
    """A line for each contender of a row; last in it the calls of its program, if they were counted."""
    contenders = row["contenders"]
    columns = list(dict.fromkeys(column for contender in contenders.values() for column in contender if column != "calls"))
    lines = [f"{row['what']}, {row['tokens']} tokens".ljust(36) + "".join(column.rjust(17) for column in columns)]
    for name, contender in contenders.items():
        figures = "".join(str(contender.get(column, "")).rjust(17) for column in columns)
        calls = ", ".join(f"{count} {call}" for call, count in contender.get("calls", {}).items())
        lines.append(f"{name:36}{figures}   {calls}".rstrip())
    return "\n".join(lines)


def become_ranks(count: int | None = None) -> None:
    """Starts ``count`` processes, by default one for every GPU, in this one's place, if it is not one of them."""
    if "RANK" not in os.environ:
        count = count or torch.cuda.device_count()
        os.execv(sys.executable, [sys.executable, "-m", "antiphon", "run", "-n", str(count), sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    with ranks() as comm:
        rows, nccl, limited = [], Nccl(comm), Limited(comm)
        for size in arguments.sizes:
            contenders = contenders_for(comm, nccl, limited, size)
            times = measure(comm, contenders, calls_for(size))
            best = min(time for name, time in times.items() if name != "antiphon")
            ratios = {"ratio to nccl": round(times["antiphon"] / times["nccl"], 3), "ratio to best": round(times["antiphon"] / best, 3)}
            row: dict[str, Any] = {"bytes": size, **times, **ratios, "blocks": blocks(contenders)}
            rows.append(row)
            if comm.rank == 0:
                print(row, flush=True)
        if comm.rank == 0 and arguments.record:
            write_record(comm, arguments.record, "bfloat16, sum, µs", rows)


if __name__ == "__main__":
    main()
