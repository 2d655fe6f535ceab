"""An all-gather before a product, and a reduce-scatter behind one: torch's fused operators, NCCL, ours, and ours in a pipeline.

    python benches/all_gather_matmul.py --record benches/results/MACHINE/DATE-all-gather-matmul.json

bf16, hidden 4096, inner 14336 / ranks. In a pipeline the copy engines move blocks on a second stream, into symmetric memory, while
the products of other blocks run; the forms are in `Pipeline`. The bare product is what remains without communication. Each
contender's results are compared with those of float32, and all are replayed as CUDA graphs; benches/README.md says how times are
taken. It starts a process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import antiphon
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from antiphon.comm.dlpack_utils import pack_strided_memory
from cuda_vs_torch import add_times, become_ranks, measure, ranks, table, write_record
from torch import Tensor

HIDDEN, INNER = 4096, 14336
TOKENS = [2048, 4096, 8192]
#: In a graph. Even: the calls of a pipeline use the halves of its buffers in turn.
CALLS = 20
#: From this rank's tokens or activations and its weight to the result, in the given tensor or in a new one.
Contender = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pipeline:
    """Products of blocks, and copies between the ranks beside them.

    A buffer holds two halves, which calls use in turn. A rank writes into a peer's half only after the barrier of the call between,
    which the peer reaches after it has read this half. So one barrier for each step is enough.
    """

    def __init__(self, comm: antiphon.Communicator, tokens: int) -> None:
        self.comm, self.side, self.call = comm, torch.cuda.Stream(priority=-1), 0
        shape = comm.world_size, tokens // comm.world_size, HIDDEN
        self.products = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        size = 2 * self.products.nbytes
        self.buffer = comm.symmetric(size, "cuda")
        # [rank, half, block of a rank, row, column]
        self.memory = [
            pack_strided_memory(self.buffer.pointer(rank), size, size, 1, torch.bfloat16, comm.rank).view(2, *shape)
            for rank in range(comm.world_size)
        ]

    def free(self) -> None:
        torch.cuda.synchronize()
        self.memory.clear()
        self.comm.free(self.buffer)

    def begin(self) -> tuple[torch.cuda.Stream, list[Tensor]]:
        """The stream of the products, and each rank's half for this call."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        self.call += 1
        return main, [memory[self.call % 2] for memory in self.memory]

    def barrier(self) -> torch.cuda.Event:
        """On the second stream: behind the event lies all that the ranks copied before it."""
        self.comm.barrier(device=self.comm.rank, stream=self.side.cuda_stream)
        return self.side.record_event()

    def gather_by_writing(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Each rank writes its block to one peer after the other, and multiplies what has arrived."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        blocks, arrived = out.chunk(world), []
        with torch.cuda.stream(self.side):
            for step in range(1, world):
                halves[(rank + step) % world][rank].copy_(x)
                arrived.append(self.barrier())
        torch.mm(x, weight, out=blocks[rank])
        for step, event in enumerate(arrived, 1):
            source = (rank - step) % world
            main.wait_event(event)
            torch.mm(halves[rank][source], weight, out=blocks[source])
        main.wait_stream(self.side)
        return out

    def gather_by_reading(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """Each rank copies its block to where its peers read it, and reads theirs."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        blocks, arrived = out.chunk(world), []
        with torch.cuda.stream(self.side):
            halves[rank][rank].copy_(x)
            self.barrier()
            for step in range(1, world):
                source = (rank + step) % world
                halves[rank][source].copy_(halves[source][source])
                arrived.append((source, self.side.record_event()))
        torch.mm(x, weight, out=blocks[rank])
        for source, event in arrived:
            main.wait_event(event)
            torch.mm(halves[rank][source], weight, out=blocks[source])
        main.wait_stream(self.side)
        return out

    def scatter(self, x: Tensor, weight: Tensor, out: Tensor, *, stores: bool = False) -> Tensor:
        """Each rank multiplies the blocks of its peers first and writes each into its peer's memory, and then adds up its own.

        With ``stores`` the products themselves store there, and no copy engine does."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        blocks = x.chunk(world)
        for step in range(1, world):
            peer = (rank + step) % world
            product = halves[peer][rank] if stores else self.products[peer]
            torch.mm(blocks[peer], weight, out=product)
            self.side.wait_stream(main)
            if not stores:
                with torch.cuda.stream(self.side):
                    halves[peer][rank].copy_(product)
        self.barrier()
        torch.mm(blocks[rank], weight, out=out)
        main.wait_stream(self.side)
        for step in range(1, world):
            out.add_(halves[rank][(rank + step) % world])
        return out

    def scatter_in_parts(self, x: Tensor, weight: Tensor, out: Tensor, *, parts: int = 2) -> Tensor:
        """The same in parts of each block: a product of own rows adds what has arrived from one peer by itself."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        blocks, arrived = x.chunk(world), []
        for step in range(1, world):
            peer = (rank + step) % world
            places = zip(blocks[peer].chunk(parts), self.products[peer].chunk(parts), halves[peer][rank].chunk(parts), strict=True)
            for rows, product, place in places:
                torch.mm(rows, weight, out=product)
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    place.copy_(product)
                arrived.append(self.barrier())
        received = [halves[rank][(rank + step) % world].chunk(parts) for step in range(1, world)]
        for part, (rows, result) in enumerate(zip(blocks[rank].chunk(parts), out.chunk(parts), strict=True)):
            main.wait_event(arrived[part - parts])
            first, *others = (blocks[part] for blocks in received)
            torch.addmm(first, rows, weight, out=result)
            for other in others:
                result.add_(other)
        main.wait_stream(self.side)
        return out


def gathers(comm: antiphon.Communicator, pipeline: Pipeline, gathered: Tensor) -> dict[str, Contender]:
    """Contenders for the product of all ranks' tokens, for which ``gathered`` has room, and a rank's columns of the weight."""

    def torch_fused(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        name = dist.group.WORLD.group_name
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, name, return_A=False)[1][0]

    def nccl(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        dist.all_gather_into_tensor(gathered, x)
        return torch.mm(gathered, weight, out=out)

    def ours(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        comm.all_gather(x, out=gathered)
        return torch.mm(gathered, weight, out=out)

    pipelines = {"antiphon writing": pipeline.gather_by_writing, "antiphon reading": pipeline.gather_by_reading}
    return {"torch fused": torch_fused, "nccl": nccl, "antiphon": ours, **pipelines}


def scatters(comm: antiphon.Communicator, pipeline: Pipeline, products: Tensor) -> dict[str, Contender]:
    """Contenders for this rank's tokens of the sum of the ranks' products, of which ``products`` has room for one."""

    def torch_fused(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, dist.group.WORLD.group_name)

    def nccl(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(x, weight, out=products))
        return out

    def ours(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return comm.reduce_scatter(torch.mm(x, weight, out=products), out=out)

    pipelines = {"antiphon copying": pipeline.scatter, "antiphon in parts": pipeline.scatter_in_parts}
    pipelines["antiphon storing"] = partial(pipeline.scatter, stores=True)
    return {"torch fused": torch_fused, "nccl": nccl, "antiphon": ours, **pipelines}


def check(what: str, call: Contender, x: Tensor, weight: Tensor, out: Tensor, wanted: Tensor) -> None:
    """Compares by the norm of the difference. The calls follow one another without a pause, each with other values, so that a call
    which reads the data of another one gives a wrong result."""
    factors = [1.0, -2.0, 4.0, -8.0]
    results = [call(x * factor, weight, out).clone() for factor in factors]
    for factor, result in zip(factors, results, strict=True):
        error = (result.float() / factor - wanted).norm() / wanted.norm()
        assert error < 0.01, f"{what}: the result is wrong by {error:.4f} of its norm"


def figures(comm: antiphon.Communicator, what: str, tokens: int) -> dict[str, object]:
    world, own = comm.world_size, torch.Generator("cuda").manual_seed(comm.rank)
    gathers_first = what == "all_gather_matmul"
    rows, inner, columns = (tokens // world, HIDDEN, INNER // world) if gathers_first else (tokens, INNER // world, HIDDEN)
    x, weight = (torch.randn(shape, generator=own, device="cuda") for shape in ((rows, inner), (inner, columns)))
    x, weight = x.bfloat16(), (weight * inner**-0.5).bfloat16()
    all_tokens = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    if gathers_first:
        dist.all_gather_into_tensor(all_tokens, x)
        wanted = all_tokens.float() @ weight.float()
    else:
        wanted = torch.empty(tokens // world, HIDDEN, device="cuda")
        dist.reduce_scatter_tensor(wanted, x.float() @ weight.float())
    out = torch.empty_like(wanted, dtype=torch.bfloat16)
    pipeline = Pipeline(comm, tokens)
    contenders = (gathers if gathers_first else scatters)(comm, pipeline, all_tokens)
    for name, call in contenders.items():
        check(f"{what} {tokens} {name}", call, x, weight, out, wanted)
    calls: dict[str, Callable[[], object]] = {name: partial(call, x, weight, out) for name, call in contenders.items()}
    calls["bare product"] = (
        partial(torch.mm, all_tokens, weight, out=out) if gathers_first else partial(torch.mm, x, weight, out=all_tokens)
    )
    row: dict[str, object] = {"what": what, "tokens": tokens, "contenders": {name: {} for name in calls}}
    add_times(row, measure(comm, calls, CALLS), ("bare product", "nccl", "torch fused"))
    pipeline.free()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of all ranks together")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    become_ranks()
    with ranks() as comm:
        if wrong := [tokens for tokens in arguments.tokens if tokens % (2 * comm.world_size)]:
            parser.error(f"--tokens {wrong[0]}: not a multiple of 2 × {comm.world_size} ranks")
        symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        rows = []
        for what in ("all_gather_matmul", "matmul_reduce_scatter"):
            for tokens in arguments.tokens:
                rows.append(figures(comm, what, tokens))
                if comm.rank == 0:
                    print(table(rows[-1]), flush=True)
        if comm.rank == 0 and arguments.record:
            write_record(comm, arguments.record, f"bfloat16, µs a call, hidden {HIDDEN}, inner {INNER} / ranks", rows)


if __name__ == "__main__":
    main()
