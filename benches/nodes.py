"""Collectives between two nodes, ours beside gloo and the bare engine.

    cargo build --release -p antiphon-cli && cargo build --release -p antiphon-collectives --example nodes
    .venv/bin/python benches/nodes.py --record benches/results/MACHINE/DATE-nodes.json

The nodes are network namespaces with a cable between them, and UCX and gloo go over TCP. It needs torch, UCX (`pip install libucx-cu13`),
iproute2, util-linux, and root or user namespaces. Contenders take turns, each time in new processes, bound to cores in turn; of the
rounds the medians are recorded, with the least and the most. `engine` is what UCX does over TCP between two processes of one namespace.
`--mixed` times mixed collectives of two nodes of two ranks instead.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).resolve()
TARGET = HERE.parent.parent / "target" / "release"
#: By world: operation, sizes in bytes, our forms.
KIB, MIB = 1 << 10, 1 << 20
FORMS = ("auto", "one-shot", "mirrored", "hierarchical")
CASES: dict[int, list[tuple[str, list[int], tuple[str, ...]]]] = {
    1: [("all_reduce", [8, KIB, 8 * KIB, 64 * KIB, MIB, 8 * MIB, 64 * MIB], FORMS)],
    2: [
        ("all_reduce", [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB], FORMS),
        ("reduce_scatter", [64 * KIB, MIB, 16 * MIB], ("auto", "mirrored", "hierarchical")),
        ("all_gather", [MIB, 4 * MIB, 16 * MIB], ("auto",)),
        ("broadcast", [256 * KIB, MIB, 4 * MIB, 16 * MIB], ("auto", "mirrored", "hierarchical")),
    ],
}
#: Mixed operations of two nodes of two ranks: by tensor parallel ranks of a node and nodes, the modes.
MIXED = {"1x2": ("auto", "waits", "bytes2", "composed"), "2x1": ("auto", "waits", "bytes1", "composed")}
MIXED_SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
NAMESPACES = """
set -e
mount -t sysfs sysfs /sys
ip link set lo up
coproc other { exec unshare --net --mount sh -c "mount -t sysfs sysfs /sys && ip link set lo up && echo \\$\\$ && exec cat"; }
read -r second <&"${other[0]}"
ip link add cable type veth peer name cable netns "$second"
ip addr add 10.77.0.1/24 dev cable
ip link set cable up
nsenter --target "$second" --net sh -c "ip addr add 10.77.0.2/24 dev cable && ip link set cable up"
for side in "" "nsenter --target $second --net --mount"; do
    until $side grep -q up /sys/class/net/cable/operstate; do sleep 0.01; done
done
"$@" --second "$second"
true  # the shell stays, as the other namespace ends with its input
"""


def gloo(cases: list[str]) -> None:
    """A rank of gloo: times the cases as the example `nodes` does, and prints the same lines."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {}
    if world == 4:  # by tensor parallel sizes: the group that shares tensors, and the other
        within, across = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
        for name, (shares, others) in {"2x1": (within, across), "1x2": (across, within)}.items():
            made = [[(ranks, dist.new_group(ranks)) for ranks in kind] for kind in (shares, others)]
            groups[name] = [next(group for ranks, group in kind if rank in ranks) for kind in made]
    for case in cases:
        operation, size, form = case.split(":")
        count = int(size) // 4
        tensor = torch.ones(count)
        tp, dp = groups.get(form.split("/")[0], (None, None))
        block = torch.ones(count // (world if tp is None else 2))

        def gather() -> None:
            dist.all_reduce(block, group=tp)
            dist.all_gather_into_tensor(tensor, block, group=dp)

        def scatter() -> None:
            dist.reduce_scatter_tensor(block, tensor, group=dp)
            dist.all_reduce(block, group=tp)

        calls = {
            "all_reduce_all_gather": gather,
            "reduce_scatter_all_reduce": scatter,
            "all_reduce": lambda: dist.all_reduce(tensor),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(block, tensor),
            "all_gather": lambda: dist.all_gather_into_tensor(tensor, block),
            "broadcast": lambda: dist.broadcast(tensor, 0),
        }
        call = calls[operation]
        repeats = min(max((8 << 20) // (int(size) + (16 << 10)), 3), 300)
        call()
        times = []
        for _ in range(9):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            own = torch.tensor([(time.perf_counter() - start) / repeats * 1e6])
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            times.append(own.item())
            tensor.fill_(1.0)
            block.fill_(1.0)
        if rank == 0:
            print(operation, size, form, f"{statistics.median(times):.1f}", flush=True)
    dist.destroy_process_group()


def run(second: str, ranks: int, port: int, command: list[str]) -> list[str]:
    """What rank 0 prints of a program that runs with a number of ranks in each namespace."""
    secret, processes = secrets.token_hex(32), []
    for rank in range(2 * ranks):
        node = rank // ranks
        variables = {
            "RANK": rank, "WORLD_SIZE": 2 * ranks, "LOCAL_RANK": rank % ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": node,
            "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": port, "ANTIPHON_SECRET": secret, "OMP_NUM_THREADS": 1,
            "UCX_TLS": "tcp", "UCX_NET_DEVICES": "cable", "GLOO_SOCKET_IFNAME": "cable",
        }  # fmt: skip
        inside = ["nsenter", "--target", second, "--net", "--mount", f"--wd={os.getcwd()}"] if node else []
        bound = ["taskset", "--cpu-list", str(rank % (os.cpu_count() or 1))]
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen([*inside, *bound, *command], env=environment, stdout=out, text=True))
    lines = processes[0].communicate(timeout=300)[0].splitlines()
    if any(process.wait(timeout=60) for process in processes):
        raise SystemExit(f"{command} failed")
    return [line for line in lines if len(line.split()) == 4]


def engine() -> list[dict[str, Any]]:
    """The bare engine's rows, of short messages: the microseconds one way, and the bandwidth of many under way."""
    environment = os.environ | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine.json"
        command = [str(TARGET / "antiphon"), "bench", "engine", "--sizes", "8,1K,8K,64K", "--json", str(file)]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=120)
        return list(json.loads(file.read_text())["rows"])


def measure_mixed(second: str, rounds: int) -> dict[str, Any]:
    """The rows of mixed operations; gloo's are one collective in each kind of group."""
    taken: dict[tuple[str, int, str, str], list[float]] = {}
    port = 29500
    for _ in range(rounds):
        for name in ("all_reduce_all_gather", "reduce_scatter_all_reduce"):
            ours = [f"{name}:{size}:{tp}/{mode}" for tp, modes in MIXED.items() for size in MIXED_SIZES for mode in modes]
            theirs = [f"{name}:{size}:{tp}/gloo" for tp in MIXED for size in MIXED_SIZES]
            ours_command = [str(TARGET / "examples" / "nodes"), *ours]
            for command in (ours_command, [sys.executable, str(HERE), "--gloo", *theirs]):
                port += 2
                for line in run(second, 2, port, command):
                    operation, size, form, took = line.split()
                    tp, mode = form.split("/")
                    taken.setdefault((operation, int(size), tp, mode), []).append(float(took))
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for (operation, size, tp, mode), times in taken.items():
        row = rows.setdefault((operation, size, tp), {"nodes": "2x2", "operation": f"{operation} {tp}", "bytes": size})
        row[mode] = statistics.median(times)
        row[f"{mode} least, most"] = [min(times), max(times)]
    for row in rows.values():
        row["auto/gloo"] = round(row["auto"] / row["gloo"], 3)
    return {"unit": "µs", "rounds": rounds, "rows": list(rows.values()), "engine": []}


def measure(second: str, rounds: int, operations: list[str] | None) -> dict[str, Any]:
    """The rows of all contenders, of these operations or of all."""
    taken: dict[tuple[int, str, int, str], list[float]] = {}
    port = 29500
    for _ in range(rounds):
        for ranks, all_cases in CASES.items():
            cases = [case for case in all_cases if operations is None or case[0] in operations]
            if not cases:
                continue
            ours = [f"{name}:{size}:{form}" for name, sizes, forms in cases for size in sizes for form in forms]
            theirs = [f"{name}:{size}:gloo" for name, sizes, _ in cases for size in sizes]
            ours_command = [str(TARGET / "examples" / "nodes"), *ours]
            for command in (ours_command, [sys.executable, str(HERE), "--gloo", *theirs]):
                port += 2
                for line in run(second, ranks, port, command):
                    name, size, form, took = line.split()
                    taken.setdefault((ranks, name, int(size), form), []).append(float(took))
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for (ranks, name, size, form), times in taken.items():
        row = rows.setdefault((ranks, name, size), {"nodes": f"2x{ranks}", "operation": name, "bytes": size})
        row[form] = statistics.median(times)
        row[f"{form} least, most"] = [min(times), max(times)]
    for row in rows.values():
        row["auto/gloo"] = round(row["auto"] / row["gloo"], 3)
    return {"unit": "µs", "rounds": rounds, "rows": list(rows.values()), "engine": engine()}


def main() -> None:
    """Makes the namespaces, or is what runs inside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mixed", action="store_true", help="mixed operations alone, beside the same of gloo's collectives")
    parser.add_argument("--operations", nargs="+", help="these alone, such as broadcast")
    parser.add_argument("--gloo", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--second", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo:
        return gloo(args.gloo)
    if not args.second:
        user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
        inside = ["unshare", *user, "--net", "--mount", "--kill-child", "--fork", "bash", "-c", NAMESPACES, "bash"]
        os.execvp(inside[0], [*inside, sys.executable, str(HERE), *sys.argv[1:]])
    results = measure_mixed(args.second, args.rounds) if args.mixed else measure(args.second, args.rounds, args.operations)
    for row in results["rows"] + results["engine"]:
        print(json.dumps(row, ensure_ascii=False))
    if args.record:
        record.write(args.record, results)
    return None


if __name__ == "__main__":
    main()
