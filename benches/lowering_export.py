"""How long the export of a program of torch takes, per node.

    python benches/lowering_export.py [--layers 600 6000] [--record FILE]

A layer is a matrix product, an all-reduce, its wait, the residual, an RMS norm in eight operations and four views: 16 nodes.
"""

import argparse
import time
from pathlib import Path

import record
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from antiphon.lowering._export import export

ROUNDS = 9


def program(layers: int, hidden: int = 64) -> torch.fx.Graph:
    def run(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        for _ in range(layers):
            total = collectives.all_reduce(x @ weight, "sum", dist.group.WORLD) + x
            wide = total.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            x = (wide.to(total.dtype) * scale).view(-1, 2, hidden).transpose(0, 1).reshape(-1, hidden)
        return x

    with FakeTensorMode():
        given = torch.empty(16, hidden, dtype=torch.bfloat16), torch.empty(hidden, hidden, dtype=torch.bfloat16)
        return make_fx(run)(*given, torch.empty(hidden, dtype=torch.bfloat16)).graph


def seconds(graph: torch.fx.Graph) -> float:
    begin = time.perf_counter()
    export(graph, {"0": 2})
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[600, 6000])
    parser.add_argument("--record", type=Path, help="a file for the figures")
    given = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    rows = []
    for layers in given.layers:
        graph = program(layers)
        each = min(seconds(graph) for _ in range(ROUNDS)) / len(graph.nodes) * 1e6
        rows.append({"nodes": len(graph.nodes), "us_per_node": each})
        print(f"{len(graph.nodes)} nodes: {each:.1f} µs a node")
    if given.record:
        record.write(given.record, {"figures": f"the fastest of {ROUNDS}", "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
