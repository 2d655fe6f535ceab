"""Clients of mixtures of experts as their authors wrote them, on Antiphon under the name ``deep_ep``.

    python tests/moe_clients.py --megatron PATH [--deep-ep PATH] [--hybrid-ep PATH] [--elastic PATH] [--ranks 2] [--device cpu]

The paths are checkouts: Megatron-LM (Megatron-Core 0.16 or later), DeepEP at 567632d, its branch hybrid-ep at 94a9f8f, and its version 2 at dd758ca.
Megatron's ``MoEFlexTokenDispatcher`` runs with its own ``fused_a2a.py`` on CPUs or GPUs. DeepEP's tests of version 1, and Megatron's tests of
the dispatcher, need GPUs; on CPUs the tests of version 2 run with the word ``cpu`` in place of ``cuda``. Those measure nothing here.
"""

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import ranks
import torch
import torch.distributed as dist

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 2, 64, 24
BACKENDS = ("deepep", "hybridep")


def sizes_of(world_size: int) -> list[tuple[int, int]]:
    """Sizes of tensor and expert parallelism."""
    return [(tp, world_size // tp) for tp in (1, 2, 4, 8) if world_size % tp == 0]


def join(megatron: str, device: str) -> torch.device:
    """Prepares this rank's process; the device of its tensors."""
    from antiphon import compat

    sys.path.insert(0, megatron)
    compat.install("deep_ep")
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.device(device, local) if device == "cuda" else torch.device("cpu")


def groups_of(tp_size: int) -> Any:
    """The process groups of Megatron that a dispatcher has: tensor ranks are neighbours."""
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def mine(groups: list[list[int]]) -> Any:
        made = [(group, dist.new_group(group)) for group in groups]
        return next(handle for group, handle in made if rank in group)

    tensor = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    expert = [list(range(first, world_size, tp_size)) for first in range(tp_size)]
    return SimpleNamespace(expt_tp=mine(tensor), ep=mine(expert), tp_ep=mine([list(range(world_size))]))


def routes(rank: int, drops: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, ``[TOKENS, EXPERTS]``, and which of them count: ``TOP_K`` of each token, or fewer."""
    seed = torch.Generator().manual_seed(rank)
    scores = torch.rand(TOKENS, EXPERTS, generator=seed)
    kept = scores.topk(TOP_K).indices
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, kept, True)
    if drops:
        routing_map &= torch.rand(TOKENS, EXPERTS, generator=seed) < 0.6
    return torch.where(routing_map, 1.0 / TOP_K, 0.0), routing_map


def dispatchers(megatron: str, device: str) -> int:
    """One rank: tokens that experts multiply by 2 come back as the sum of their products with the probabilities, with the gradients
    of that, for all sizes of tensor and expert parallelism. How many dispatchers it tried."""
    place = join(megatron, device)
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.__file__.startswith(megatron)
    tried = 0
    for tp_size, ep_size in sizes_of(dist.get_world_size()):
        groups = groups_of(tp_size)
        local = EXPERTS // ep_size
        first = dist.get_rank(groups.ep) * local
        fused_a2a.reset_hybrid_ep_buffer()
        # Megatron's dispatcher by routing maps makes tensors on GPUs.
        for backend, drops in itertools.product(BACKENDS[: 1 if device == "cpu" else 2], (False, True)):
            config = TransformerConfig(
                num_layers=1,
                hidden_size=HIDDEN,
                num_attention_heads=4,
                num_moe_experts=EXPERTS,
                moe_router_topk=TOP_K,
                moe_router_dtype="fp32",
                moe_token_dispatcher_type="flex",
                moe_flex_dispatcher_backend=backend,
                moe_expert_capacity_factor=0.5 if drops else None,
                tensor_model_parallel_size=tp_size,
                expert_tensor_parallel_size=tp_size,
                expert_model_parallel_size=ep_size,
                sequence_parallel=tp_size > 1,
                add_bias_linear=False,
                use_cpu_initialization=True,
            )
            dispatcher = MoEFlexTokenDispatcher(local, list(range(first, first + local)), config, groups)
            check(dispatcher, tp_size, drops, place)
            tried += 1
    by_routing_map(fused_a2a, place)
    dist.barrier()
    dist.destroy_process_group()
    return tried


def by_routing_map(fused_a2a: Any, device: torch.device) -> None:
    """Megatron's functions over ``HybridEPBuffer``, forward and backward."""
    group, world_size = dist.group.WORLD, dist.get_world_size()
    probs, routing_map = (tensor.to(device) for tensor in routes(dist.get_rank(), True))
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    tokens, factors = x.clone().requires_grad_(), probs.clone().requires_grad_()
    fused_a2a.reset_hybrid_ep_buffer()
    rows, row_probs, scales, counts, handle = fused_a2a.hybrid_ep_dispatch(
        tokens, routing_map, factors, group, EXPERTS // world_size, pad_multiple=16
    )
    assert scales is None and int(counts.sum()) == len(rows) and int(handle[-1]) == 0
    made = (rows * row_probs.unsqueeze(1)).to(rows.dtype)
    restored = fused_a2a.hybrid_ep_combine(made, handle, counts.sum(), 16)
    torch.testing.assert_close(restored.float(), x.float() * probs.sum(1, keepdim=True), rtol=2e-2, atol=2e-2)
    restored.sum().backward()
    assert tokens.grad is not None and factors.grad is not None
    torch.testing.assert_close(tokens.grad.float(), x.float() * probs.sum(1, keepdim=True), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(factors.grad, routing_map * float(HIDDEN), rtol=2e-2, atol=2e-2)
    fused_a2a.reset_hybrid_ep_buffer()


def check(dispatcher: Any, tp_size: int, drops: bool, device: torch.device) -> None:
    probs, routing_map = (tensor.to(device) for tensor in routes(dist.get_rank(), drops))
    seed = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, generator=seed).bfloat16().to(device)
    tokens, factors = x.clone().requires_grad_(), probs.clone().requires_grad_()
    sent, sent_probs = dispatcher.dispatch_preprocess(tokens, routing_map, factors)
    received, received_probs = dispatcher.token_dispatch(sent, sent_probs)
    rows, counts, row_probs = dispatcher.dispatch_postprocess(received, received_probs)
    assert int(counts.sum()) == len(rows) == len(row_probs)
    # Each of the tensor ranks of an expert has a part of what it makes of a token.
    made = (rows * row_probs.unsqueeze(1) * 2 / tp_size).to(rows.dtype)
    restored = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(made)))
    expected = 2 * x.float() * probs.sum(1, keepdim=True)
    torch.testing.assert_close(restored.float(), expected, rtol=2e-2, atol=2e-2)
    given = torch.randn(x.shape, generator=seed).bfloat16().to(device)
    restored.backward(given)
    assert tokens.grad is not None and factors.grad is not None
    torch.testing.assert_close(tokens.grad.float(), 2 * given.float() * probs.sum(1, keepdim=True), rtol=3e-2, atol=3e-2)
    products = 2 * (x.float() * given.float()).sum(1, keepdim=True) * routing_map
    torch.testing.assert_close(factors.grad * routing_map, products, rtol=3e-2, atol=0.5)


def megatron_tests(megatron: str) -> None:
    """One rank: Megatron's own container of ``TestFlexDispatcher``, forward and backward, and with dropped tokens."""
    join(megatron, "cuda")
    os.environ.setdefault("NVTE_FLASH_ATTN", "0")
    from tests.unit_tests.transformer.moe.test_token_dispatcher import MoEModelTestContainer

    for tp_size, ep_size in sizes_of(dist.get_world_size()):
        shape = {"tp_size": tp_size, "ep_size": ep_size, "pp_size": 1, "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K}
        for backend in BACKENDS:
            common = shape | {
                "moe_token_dispatcher_type": "flex",
                "moe_flex_dispatcher_backend": backend,
                "hidden_size": 1024,
                "test_dtype": torch.bfloat16,
            }
            MoEModelTestContainer(**common).dispatcher_dropless_test()
            MoEModelTestContainer(**common, moe_expert_capacity_factor=0.5).dispatcher_capacity_test()


def deep_ep_tests(deep_ep: str, world_size: int, names: Sequence[str]) -> None:
    """Some of DeepEP's tests of one machine, each with this number of processes."""
    from antiphon import compat

    compat.tell_children(["deep_ep"])
    environment = os.environ | dict.fromkeys(("NUM_OF_RANKS_PER_NODE", "NUM_OF_RANKS_PER_NVLINK_DOMAIN"), str(world_size))
    for name in names:
        command = [sys.executable, name, "--num-processes", str(world_size)]
        print("$", *command, flush=True)
        subprocess.run(command, cwd=os.path.join(deep_ep, "tests"), check=True, timeout=600, env=environment)


class Passed(Exception):
    """The part of a test that compares is over; another that measures would follow."""


def elastic_tests(deep_ep: str, name: str, device: str, changes: dict[str, Any]) -> None:
    """One rank: a test of DeepEP's version 2 with its own ``deep_ep.utils``, on our ``deep_ep``."""
    import antiphon.torch  # noqa: F401
    from antiphon import compat

    compat.install("deep_ep")
    import deep_ep as ours

    local, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])

    def load(module: str, file: str) -> Any:
        path = os.path.join(deep_ep, file)
        with open(path) as source:
            text = source.read()
        sys.modules[module] = made = ModuleType(module)
        made.__package__ = module.rpartition(".")[0]
        exec(compile(text.replace("'cuda'", repr(device)), path, "exec"), vars(made))
        return made

    def init_dist(*_arguments: Any, seed: int = 0) -> tuple[int, int, Any]:
        if device == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if device == "cuda" else "antiphon")
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(device)
        envs._local_rank = local
        envs.init_seed(seed)
        return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(world_size)))

    def passed(*_arguments: Any, **_named: Any) -> None:
        raise Passed

    ours._C = sys.modules["deep_ep._C"] = ModuleType("deep_ep._C")
    ours._C.EventHandle = ours.EventHandle
    for each in ("semantic", "math", "comm", "envs", "gate", "refs", "testing"):
        load(f"deep_ep.utils.{each}", f"deep_ep/utils/{each}.py")
    envs = sys.modules["deep_ep.utils.envs"]
    envs.init_dist, envs.get_rdma_gbs = init_dist, lambda *_: 1.0
    sys.modules["deep_ep.utils.testing"].bench_kineto = passed
    if device == "cpu":
        torch.cuda.synchronize = torch.cuda._sleep = lambda *_: None
    test = load(name, f"tests/elastic/{name}.py")
    if name == "test_agrs":
        ours.ElasticBuffer.destroy = passed
    # The arguments of its command line, with which it would start processes.
    found: list[Any] = []
    torch.multiprocessing.spawn = lambda _function, args, nprocs: found.append(args[1])
    sys.argv = [name, "--num-processes", str(world_size)]
    text = open(os.path.join(deep_ep, f"tests/elastic/{name}.py")).read()
    exec(compile(text[text.index("if __name__") :], name, "exec"), vars(test) | {"__name__": "__main__"})
    options = argparse.Namespace(**(vars(found[0]) | changes))
    with contextlib.suppress(Passed):
        getattr(test, "test_loop" if hasattr(test, "test_loop") else "test")(local, world_size, options)


#: The tests of DeepEP's version 2 that one machine can run, and what of their command line is changed.
ELASTIC = {
    "test_ep": {"num_tokens": 40, "hidden": 512, "num_topk": 3, "num_experts": 48, "skip_perf_test": True, "masked_ratio": 0.2},
    "test_agrs": {"num_stress_iterations": 1},
    "test_pp": {"num_tokens": 256, "hidden": 512},
    "test_barrier": {},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", metavar="PATH")
    parser.add_argument("--deep-ep", metavar="PATH")
    parser.add_argument("--hybrid-ep", metavar="PATH")
    parser.add_argument("--elastic", metavar="PATH")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    failures = []

    def run(name: str, call: Any, *arguments: Any) -> None:
        try:
            print(f"{name}: {call(*arguments) or 'passed'}", flush=True)
        except Exception as error:
            failures.append(name)
            print(f"{name}: FAILED: {error}", flush=True)

    on_ranks = functools.partial(ranks.processes, options.ranks)
    if options.megatron:
        run("Megatron's dispatcher", on_ranks, dispatchers, os.path.abspath(options.megatron), options.device)
        if options.device == "cuda":
            run("Megatron's tests", on_ranks, megatron_tests, os.path.abspath(options.megatron))
    for checkout, names in (
        (options.deep_ep, ("test_intranode.py", "test_low_latency.py")),
        (options.hybrid_ep, ("test_hybrid_ep.py", "test_graphed_hybrid_ep.py")),
    ):
        if checkout and options.device == "cuda":
            run(f"DeepEP's {names[0]}", deep_ep_tests, os.path.abspath(checkout), options.ranks, names)
    for name, changes in ELASTIC.items() if options.elastic else ():
        run(f"DeepEP's {name}", on_ranks, elastic_tests, os.path.abspath(options.elastic), name, options.device, changes)
    sys.exit(f"failed: {', '.join(failures)}" if failures else 0)


if __name__ == "__main__":
    main()
