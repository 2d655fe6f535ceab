"""Mixed collectives between two nodes on GPUs, in graphs, beside NCCL's composition of the same groups.

    python benches/mixed_nodes_cuda.py [--record benches/results/MACHINE/DATE-mixed-nodes-cuda.json]

The nodes are processes of this machine that are told so, half of the GPUs each, so that data crosses NVLink where it would cross a network.
``fused`` is what the handler chooses, ``nccl`` torch's NCCL by the handler's mode NCCL_TP_DP, or NCCL_ONE where there is one group. Both run in
graphs of some calls in turn; the slowest rank counts.
"""

import argparse
import os
import secrets
import socket
import statistics
from pathlib import Path
from typing import Any

import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from antiphon.comm import MixedCommHandler, MixedCommMode, MixedCommOp, run_mixed_comm

HIDDEN, CALLS, ROUNDS = 7168, 10, 15
ROWS = (1, 4, 16, 64, 256, 1024)


def measure(handler: MixedCommHandler, op: MixedCommOp, rows: int) -> dict[str, float]:
    """µs of a call of each contender, of ``rows`` rows of bf16 of each data parallel rank."""
    info = handler.para_info
    x = torch.ones(rows * (info.dp_size if op == MixedCommOp.REDUCESCATTER_ALLREDUCE else 1), HIDDEN, device="cuda", dtype=torch.bfloat16)
    by_torch = MixedCommMode.NCCL_TP_DP if info.use_mixed else MixedCommMode.NCCL_ONE
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, mode in (("fused", MixedCommMode.AUTOTUNE), ("nccl", by_torch)):
        out = run_mixed_comm(op, handler, x, mode=mode)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                run_mixed_comm(op, handler, x, out, mode=mode)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()  # the ranks come together
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            each = torch.tensor(begin.elapsed_time(end) * 1e3 / CALLS, device="cuda")
            dist.all_reduce(each, dist.ReduceOp.MAX)
            times[name].append(each.item())
    return {name: round(statistics.median(samples), 2) for name, samples in times.items()}


def rank_main(rank: int, world: int, port: int, secret: str, path: Path | None) -> None:
    node_size = world // 2
    place = {"RANK": rank, "LOCAL_RANK": rank % node_size, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": node_size, "ANTIPHON_NODE": f"node{rank // node_size}"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ANTIPHON_PORT": port + 1, "ANTIPHON_SECRET": secret}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(128 << 20))
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows = []
    for local_tp in (1, 2) if node_size == 2 else (1,):
        layout = local_tp, node_size // local_tp, 1, 2
        handler = MixedCommHandler(rank, world, rank % node_size, node_size, rank // node_size, 2, *layout, torch.bfloat16, torch.device("cuda", rank))
        ops = [MixedCommOp.ALLREDUCE_ALLGATHER, MixedCommOp.REDUCESCATTER_ALLREDUCE] if local_tp > 1 else [MixedCommOp.ALLGATHER, MixedCommOp.REDUCESCATTER]
        for op, count in ((op, count) for op in ops for count in ROWS):
            row: dict[str, Any] = {"local": f"{layout[0]}x{layout[1]}", "nodes": 2, "call": op.name, "rows": count, "bytes": count * HIDDEN * 2}
            row |= measure(handler, op, count)
            rows.append(row | {"ratio": round(row["fused"] / row["nccl"], 3)})
            if rank == 0:
                print(rows[-1], flush=True)
        handler.shutdown()
    if rank == 0 and path:
        libraries = {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
        record.write(path, {"ranks": world, "libraries": libraries, "figures": f"µs of a call in a graph of {CALLS}, bf16, rows of {HIDDEN}", "rows": rows})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    world = torch.cuda.device_count() // 2 * 2
    if world < 2:
        raise SystemExit("there are fewer than two GPUs")
    mp.spawn(rank_main, (world, port, secrets.token_hex(), arguments.record), world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
