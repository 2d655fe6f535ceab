"""Tensor-parallel layers that inductor compiles: with NCCL, with each of its own ways to communicate, and lowered by antiphon.

    python benches/lowering_vs_inductor.py --record benches/results/MACHINE/DATE-lowering-vs-inductor.json
    python benches/lowering_vs_inductor.py --sections training --tokens 2048
    python benches/lowering_vs_inductor.py --smoke

Layers have the two row-parallel products of a transformer's, behind each a sum over the ranks, the residual and a norm: bf16, hidden
4096, inner 14336. SiLU takes the place of attention, which no contender changes. A `sequence` contender divides the tokens between the
products among the ranks: an all-gather comes before each pair of products and a reduce-scatter behind it. The section `fused` has one
sum with residual and norm, compiled, beside the same call without a compiler.

All contenders of a section are compiled by `torch.compile`, run in the same processes, and are replayed as CUDA graphs;
benches/README.md says how times are taken and what the columns are. Results and gradients are compared with those of the same layers
without a compiler, with NCCL. It starts a process for every GPU, by `antiphon run`, if it is not one of them. `--smoke` compiles and
compares on two ranks of the host, with gloo and tiny layers.
"""

import argparse
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import antiphon
import antiphon.lowering
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed._symmetric_memory as symmetric
from cuda_vs_torch import add_times, become_ranks, calls_for, measure, ranks, table, write_record
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch.nn.functional import rms_norm, silu

EPS = 1e-6
TOKENS = {"decoding": [1, 4, 16, 64, 256], "training": [2048, 8192], "fused": [1, 4, 16, 64, 256, 512, 2048]}
OURS: dict[str, Any] = {"backend": "antiphon"}
#: The arguments of `torch.compile`. A contender `NAME sequence` compiles the layers whose tokens are divided.
COMPILERS: dict[str, dict[str, Any]] = {
    "nccl": {"options": {}},
    # A one-shot all-reduce up to 128 KiB, and NCCL above.
    "auto_select": {"options": {"_collective.auto_select": True}},
    # On the graph of operators: what torch recommends.
    "overlap": {
        "options": {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            "aten_distributed_optimizations.collective_bucketing": True,
        }
    },
    # On the scheduler's nodes, with the passes that torch recommends there; without passes the first option does nothing.
    "reorder": {
        "options": {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": [
                "reorder_communication_preserving_peak_memory",
                "sink_waits_iterative",
                "reorder_communication_preserving_peak_memory",
            ],
            "bucket_all_reduces_fx": "all",
        }
    },
    "antiphon": OURS | {"options": {"strict": True}},
    "antiphon overlap": OURS | {"options": {"strict": True, "overlap": True}},
    "nccl sequence": {"options": {}},
    "async_tp sequence": {"options": {"_micro_pipeline_tp": True}},
    "antiphon sequence": OURS | {"options": {"strict": True}},
    "antiphon overlap sequence": OURS | {"options": {"strict": True, "overlap": True}},
}
CONTENDERS = {
    "decoding": ["nccl", "auto_select", "antiphon"],
    # Without `auto_select`: its sums are all above 128 KiB, and so NCCL's.
    "training": [name for name in COMPILERS if name != "auto_select"],
}
#: Contenders whose kernels or estimates of times need GPUs.
ONLY_GPUS = {"auto_select", "overlap", "async_tp sequence"}


class Layers:
    """The weights of this rank, and the functions that the contenders compile."""

    def __init__(self, comm: antiphon.Communicator, arguments: argparse.Namespace) -> None:
        device, hidden, inner = arguments.device, arguments.hidden, arguments.inner
        own, world = torch.Generator(device).manual_seed(comm.rank), comm.world_size

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=own, device=device) * rows**-0.5).to(torch.bfloat16)

        self.weights = [
            (
                weight(hidden, hidden // world),
                weight(hidden // world, hidden),
                weight(hidden, 2 * inner // world),
                weight(inner // world, hidden),
            )
            for _ in range(arguments.layers)
        ]
        self.norms = [torch.ones(hidden, device=device, dtype=torch.bfloat16) for _ in range(2 * arguments.layers)]

    def leaves(self) -> list[Tensor]:
        """The weights, from now on with gradients; those of the norms come last."""
        return [tensor.requires_grad_() for tensor in (*(weight for weights in self.weights for weight in weights), *self.norms)]

    def products(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What comes between two norms: this rank's part of a sum."""
        for into, out, up, down in self.weights:
            # In the place of attention. Torch's pass for async TP fails at a product whose operand is another product.
            yield lambda x, into=into, out=out: silu(x @ into) @ out
            yield lambda x, up=up, down=down: _gated(x @ up) @ down

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for product, weight in zip(self.products(), self.norms, strict=True):
            residual = residual + collectives.all_reduce(product(x), "sum", dist.group.WORLD)
            x = rms_norm(residual, weight.shape, weight, EPS)
        return x, residual

    def run_sequence(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The same of this rank's tokens."""
        for product, weight in zip(self.products(), self.norms, strict=True):
            partial = product(collectives.all_gather_tensor(x, 0, dist.group.WORLD))
            residual = residual + collectives.reduce_scatter_tensor(partial, "sum", 0, dist.group.WORLD)
            x = rms_norm(residual, weight.shape, weight, EPS)
        return x, residual


def _gated(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value


def step(run: Callable[..., Any], inputs: list[Tensor], leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """A forward and a backward pass, which returns the gradients."""

    def both() -> tuple[Tensor, ...]:
        x, residual = run(*inputs)
        return torch.autograd.grad((x.float().square().mean() + residual.float().square().mean()), leaves)

    return both


def check(what: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Compares by the norm of the difference: roundings differ."""
    for index, (result, expected) in enumerate(zip(found, wanted, strict=True)):
        error = (result.detach().float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.03, f"{what}: result {index} is wrong by {error:.4f} of its norm"


def summed(gradients: tuple[Tensor, ...], norms: int) -> tuple[Tensor, ...]:
    """The gradients of the norms' weights summed over the ranks: each rank has those of its tokens, or of its part of the products."""
    of_norms = [gradient.float() for gradient in gradients[-norms:]]
    for gradient in of_norms:
        dist.all_reduce(gradient)
    return (*(gradient.clone() for gradient in gradients[:-norms]), *of_norms)


@contextmanager
def calls_in_code(counts: Counter[str]) -> Iterator[None]:
    """Counts the collectives in the code that inductor makes meanwhile, or takes from its cache."""

    def count(code: str) -> None:
        counts.update(re.findall(r"torch\.ops\.\w+\.(\w*(?:reduce|gather|scatter)\w*)\.\w+\(", code))

    with mock.patch.object(GraphLowering, "save_output_code", count):
        yield


def outside() -> float:
    """MiB of this GPU that are not in torch's allocator: buffers of collectives, and what CUDA itself takes. 0 on the host."""
    if not torch.cuda.is_initialized():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


def peak(call: Callable[[], object]) -> float:
    """MiB that a call takes from torch's allocator at most, with its results. 0 on the host."""
    if not torch.cuda.is_initialized():
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Bench:
    def __init__(self, comm: antiphon.Communicator, arguments: argparse.Namespace) -> None:
        self.comm, self.arguments = comm, arguments
        #: MiB of each GPU that a communicator takes: another one of NCCL's, and the one that `attach` makes.
        self.communicators: dict[str, float] = {}
        #: MiB that a contender's programs have taken besides so far. What one of them allocates, the next one may use.
        self.taken: dict[str, float] = defaultdict(float)
        x = torch.ones(max(TOKENS["training"]), arguments.hidden, device=arguments.device, dtype=torch.bfloat16)
        before, group = outside(), dist.new_group()
        dist.all_reduce(x.clone(), group=group)
        self.communicators["nccl"] = outside() - before
        dist.destroy_process_group(group)
        before = outside()
        antiphon.lowering.attach()
        assert torch.ops.antiphon.all_reduce(x, dist.group.WORLD.group_name).eq(comm.world_size).all()
        self.communicators["antiphon"] = outside() - before
        self.log(f"MiB of a communicator: {rounded(self.communicators)}")

    def compiled(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False, **COMPILERS[name])

    def random(self, rows: int, columns: int, seed: int) -> Tensor:
        generator = torch.Generator(self.arguments.device).manual_seed(seed)
        return torch.randn(rows, columns, generator=generator, device=self.arguments.device).to(torch.bfloat16)

    def layers(self, what: str, tokens: int) -> dict[str, Any]:
        """Each contender's decoding or training step."""
        comm, arguments, trains = self.comm, self.arguments, what == "training"
        inputs = [self.random(tokens, arguments.hidden, seed) for seed in (98, 99)]
        # Other tensors of the same values: autograd would tie the leaves of this graph to a stream that is not captured.
        eager = Layers(comm, arguments)
        with torch.no_grad():
            wanted = eager.run(*inputs)
        norms = len(eager.norms)
        wanted_gradients = summed(step(eager.run, inputs, eager.leaves())(), norms) if trains else ()
        layers = Layers(comm, arguments)
        leaves = layers.leaves() if trains else []
        calls: dict[str, Callable[[], Any]] = {}
        contenders: dict[str, dict[str, Any]] = {}
        for name in arguments.contenders or CONTENDERS[what]:
            if arguments.smoke and name in ONLY_GPUS:
                continue
            started, before, code = time.monotonic(), outside(), Counter[str]()
            random.seed(f"{name} {tokens}")  # from which auto_select draws the names of its buffers, again and again the same
            sequence = name.endswith("sequence")
            run = self.compiled(layers.run_sequence if sequence else layers.run, name)
            own = [x.chunk(comm.world_size)[comm.rank].clone() if sequence else x for x in inputs]
            expected = tuple(x.chunk(comm.world_size)[comm.rank] if sequence else x for x in wanted)
            calls[name] = step(run, own, leaves) if trains else lambda run=run, own=own: run(*own)
            with torch.set_grad_enabled(trains), calls_in_code(code):
                check(f"{what} {tokens} {name}", run(*own), expected)
                if trains:
                    check(f"gradients {tokens} {name}", summed(calls[name](), norms), wanted_gradients)
                most = peak(calls[name])
            self.taken[name] += outside() - before
            communicator = self.communicators["antiphon" if name.startswith("antiphon") else "nccl"]
            contenders[name] = {"comm MiB": round(communicator + self.taken[name], 1), "peak MiB": round(most, 1)}
            contenders[name]["calls"] = dict(sorted(code.items()))
            self.log(f"{what} {tokens} {name}: compiled in {time.monotonic() - started:.1f} s")
        row = {"what": "training step" if trains else what, "tokens": tokens, "layers": arguments.layers, "contenders": contenders}
        if not arguments.check:
            with torch.set_grad_enabled(trains):
                add_times(row, measure(comm, calls, 6 if trains else 40), ("nccl", "auto_select"))
        return row

    def fused(self, what: str, tokens: int) -> dict[str, Any]:
        """A sum with residual and norm, compiled and not."""
        comm, wide = self.comm, self.arguments.wide
        x, residual = self.random(tokens, wide, comm.rank), self.random(tokens, wide, 99)
        weight = self.random(1, wide, 98).abs().flatten()
        norm, total = torch.empty_like(x), torch.empty_like(x)

        def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            total = residual + collectives.all_reduce(x, "sum", dist.group.WORLD)
            return rms_norm(total, (wide,), weight, EPS), total

        def bare() -> tuple[Tensor, Tensor]:
            comm.all_reduce_rms_norm(x, residual, weight, eps=EPS, residual_out=total, out=norm)
            return norm, total

        wanted = model(x, residual, weight)
        check(f"{what} {tokens} bare", bare(), wanted)
        calls: dict[str, Callable[[], object]] = {"bare": bare}
        contenders: dict[str, dict[str, Any]] = {"bare": {"calls": {}}}
        for name in ("antiphon", "nccl"):
            run, code = self.compiled(model, name), Counter[str]()
            with calls_in_code(code):
                check(f"{what} {tokens} {name}", run(x, residual, weight), wanted)
            calls[name] = lambda run=run: run(x, residual, weight)
            contenders[name] = {"calls": dict(code)}
        row = {"what": what, "tokens": tokens, "hidden": wide, "contenders": contenders}
        if not self.arguments.check:
            add_times(row, measure(comm, calls, calls_for(2 * tokens * wide)), ("bare",))
        return row

    def log(self, text: str) -> None:
        if self.comm.rank == 0:
            print(text, flush=True)

    def section(self, name: str) -> Iterator[dict[str, Any]]:
        """The rows of a section, until its time is over."""
        end = time.monotonic() + self.arguments.limit
        for tokens in self.arguments.tokens or TOKENS[name]:
            if any(self.comm.exchange_objects(time.monotonic() > end)):
                yield {"what": name, "tokens": tokens, "skipped": f"{self.arguments.limit:g} s were over"}
                continue
            torch.compiler.reset()
            row = (self.fused if name == "fused" else self.layers)(name, tokens)
            self.log(table(row))
            yield row


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(figure, 1) for name, figure in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument("--tokens", type=int, nargs="+", help="of each section that is run; by default each section has its own")
    parser.add_argument("--contenders", nargs="+", choices=list(COMPILERS), help="of layers; by default each section has its own")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a section starts no further row")
    parser.add_argument("--check", action="store_true", help="compile and compare without times: it fills inductor's caches")
    parser.add_argument("--smoke", action="store_true", help="the same of tiny layers on two ranks of the host")
    parser.add_argument("--record", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    arguments.device, arguments.hidden, arguments.inner, arguments.wide = "cuda", 4096, 14336, 7168
    if arguments.smoke:
        arguments.device, arguments.hidden, arguments.inner, arguments.wide = "cpu", 64, 128, 64
        arguments.tokens, arguments.check = arguments.tokens or [8], True
    become_ranks(2 if arguments.smoke else None)
    torch._dynamo.config.recompile_limit = 64
    with ranks(arguments.device) as comm:
        bench = Bench(comm, arguments)
        rows: list[dict[str, Any]] = [{"what": "MiB of a communicator"} | rounded(bench.communicators)]
        if not arguments.smoke:
            symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        for name in arguments.sections:
            rows.extend(bench.section(name))
        if arguments.check:
            for report in dict.fromkeys(map(str, antiphon.lowering.reports())):
                bench.log(report)
        if comm.rank == 0 and arguments.record:
            write_record(comm, arguments.record, "bfloat16, µs of all layers or of a fused call", rows)
        antiphon.lowering.detach()


if __name__ == "__main__":
    main()
