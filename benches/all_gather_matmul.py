"""An all-gather before a product, and a reduce-scatter behind one: torch's fused operators, NCCL, ours, and ours in a pipeline.

    python benches/all_gather_matmul.py --record benches/results/MACHINE/DATE-all-gather-matmul.json

bf16, hidden 4096, inner 14336 / ranks. In a pipeline the copy engines move blocks on a second stream, into symmetric memory of the
peers, while the products of other blocks run; the forms are in `Pipeline`. benches/README.md says how times are taken. It starts a
process for every GPU, by `antiphon run`, if it is not one of them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import antiphon
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from antiphon.comm.dlpack_utils import pack_strided_memory
from cuda_vs_torch import become_ranks, measure, ranks, record
from torch import Tensor

HIDDEN, INNER = 4096, 14336
TOKENS = [2048, 4096, 8192]
#: Even: each call of a pipeline uses the other half of its buffers.
CALLS = 20


class Pipeline:
    """Products of blocks, and copies between the ranks beside them.

    A buffer holds two halves, which calls use in turn. A rank writes into a peer's half only after the barrier of the call between,
    which the peer reaches after it has read this half. So one barrier for each step is enough.
    """

    def __init__(self, comm: antiphon.Communicator, tokens: int) -> None:
        self.comm, self.side, self.call = comm, torch.cuda.Stream(priority=-1), 0
        block = tokens // comm.world_size
        self.buffer = comm.create_cuda_buffer(2 * tokens * HIDDEN * 2)
        # [rank, half, block from this rank, row, column]
        self.memory = [
            pack_strided_memory(self.buffer.pointer(rank), len(self.buffer), len(self.buffer), 1, torch.bfloat16, comm.rank).view(
                2, comm.world_size, block, HIDDEN
            )
            for rank in range(comm.world_size)
        ]

    def free(self) -> None:
        torch.cuda.synchronize()
        self.memory.clear()
        self.comm.free_cuda_buffer(self.buffer)

    def begin(self) -> tuple[torch.cuda.Stream, list[Tensor]]:
        """The stream of the products, and each rank's half for this call."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        self.call += 1
        return main, [memory[self.call % 2] for memory in self.memory]

    def barrier(self) -> torch.cuda.Event:
        """On the second stream: what every rank has copied so far has arrived behind the event."""
        self.comm.barrier(device=self.comm.rank, stream=self.side.cuda_stream)
        return self.side.record_event()

    def gather(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
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

    def gather_by_reading(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Each rank copies its block to where its peers read it."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        halves[rank][rank].copy_(x)
        self.side.wait_stream(main)
        blocks, arrived = out.chunk(world), []
        with torch.cuda.stream(self.side):
            self.barrier()
            for step in range(1, world):
                source = (rank + step) % world
                halves[rank][source].copy_(halves_of(self.memory, self.call, source))
                arrived.append((source, self.side.record_event()))
        torch.mm(x, weight, out=blocks[rank])
        for source, event in arrived:
            main.wait_event(event)
            torch.mm(halves[rank][source], weight, out=blocks[source])
        main.wait_stream(self.side)

    def scatter(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Each rank multiplies the blocks of its peers first and writes each into its peer's memory, and then adds up its own."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        blocks = x.chunk(world)
        for step in range(1, world):
            peer = (rank + step) % world
            partial = torch.mm(blocks[peer], weight)
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                partial.record_stream(self.side)
                halves[peer][rank].copy_(partial)
        with torch.cuda.stream(self.side):
            self.barrier()
        torch.mm(blocks[rank], weight, out=out)
        main.wait_stream(self.side)
        for step in range(1, world):
            out.add_(halves[rank][(rank + step) % world])

    def scatter_in_parts(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """The same in two parts: a product of own rows adds what has arrived by itself, into the memory where it lies."""
        rank, world = self.comm.rank, self.comm.world_size
        main, halves = self.begin()
        assert world == 2
        peer = 1 - rank
        arrived = []
        for rows, place in zip(x.chunk(world)[peer].chunk(2), halves[peer][rank].chunk(2), strict=True):
            partial = torch.mm(rows, weight)
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                partial.record_stream(self.side)
                place.copy_(partial)
                arrived.append(self.barrier())
        for rows, received, event in zip(x.chunk(world)[rank].chunk(2), halves[rank][peer].chunk(2), arrived, strict=True):
            main.wait_event(event)
            torch.addmm(received, rows, weight, out=received)
        main.wait_stream(self.side)
        out.copy_(halves[rank][peer])
