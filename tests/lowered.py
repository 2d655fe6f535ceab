"""Compiled blocks of tensor-parallel models: what the tests of lowering share."""

from collections.abc import Callable

import antiphon.lowering
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from antiphon.lowering import Options
from functorch.compile import make_boxed_func
from ports import free_port
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V

Comm, Device = antiphon.Communicator, torch.device
HIDDEN = 64


def summed(x: Tensor, op: str = "sum") -> Tensor:
    return collectives.all_reduce(x, op, dist.group.WORLD)


def rms_norm(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    total = summed(x @ w0) + residual
    return F.rms_norm(total, (HIDDEN,), w, 1e-6), total


def llama(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    total = residual + summed(x @ w0)
    wide = total.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * wide.to(total.dtype), total


def gemma(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    total = summed(x @ w0) + residual
    wide = total.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + w.float())).type_as(total), total


def vllm(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    wide = summed(x @ w0).float() + residual.float()
    total = wide.to(x.dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(x.dtype) * w, total


def without_residual(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    total = summed(x @ w0)
    return (F.rms_norm(total, (HIDDEN,), w, 1e-6),)


Block = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
SPELLINGS: list[Block] = [rms_norm, llama, gemma, vllm, without_residual]


def tensors(rank: int, dtype: torch.dtype, rows: int = 6) -> tuple[Tensor, ...]:
    """Of this rank the input and its weight; the rest is equal on all ranks."""
    own, shared = torch.Generator().manual_seed(rank + 1), torch.Generator().manual_seed(99)
    shapes = (2, rows, 32), (32, HIDDEN), (2, rows, HIDDEN), (HIDDEN,)
    return tuple(torch.randn(shape, generator=own if at < 2 else shared).to(dtype) for at, shape in enumerate(shapes))


def with_any_rows(given: tuple[Tensor, ...], dynamic: bool) -> tuple[Tensor, ...]:
    """The same tensors; of how many rows, a compiler is told not to rely on."""
    for tensor in given[0], given[2]:
        if dynamic:
            torch._dynamo.mark_dynamic(tensor, 1)
    return given


class Group:
    """The default group, of gloo or NCCL, with a communicator beside it, for one check. NCCL wants a GPU for each rank: where
    ranks share one, the group is ours."""

    def __init__(self, comm: Comm, device: Device = Device("cpu")) -> None:
        port = comm.exchange_objects(free_port() if comm.rank == 0 else None)[0]
        has_gpus = torch.cuda.device_count() >= comm.world_size
        backend = "gloo" if device.type == "cpu" else "nccl" if has_gpus else "antiphon"
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.world_size)

    def __enter__(self) -> str:
        torch._dynamo.reset()
        return antiphon.lowering.attach()

    def __exit__(self, *_: object) -> None:
        antiphon.lowering.detach()
        dist.destroy_process_group()


def compiled(block: Callable[..., object], dynamic: bool = False, **options: object) -> Callable[..., object]:
    """By inductor, as users compile."""
    return torch.compile(block, backend="antiphon", dynamic=dynamic, options={"strict": True, "fx_graph_cache": False} | options)


def lowered(block: Callable[..., object], dynamic: bool = False, **options: object) -> Callable[..., object]:
    """By inductor's passes and ours, and then interpreted: C++ takes seconds to compile."""
    return interpreted(block, antiphon.lowering.Pass(Options(**{"strict": True} | options)), dynamic)  # type: ignore[arg-type]


def interpreted(block: Callable[..., object], ours: object, dynamic: bool = False) -> Callable[..., object]:
    """By inductor's passes and this one."""

    def inner(module: torch.fx.GraphModule, inputs: object, **more: object) -> Callable[[list[object]], object]:
        view_to_reshape(module)
        with V.set_fake_mode(detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])):
            post_grad_passes(module, bool(more.get("is_inference")))
        module.recompile()
        return make_boxed_func(module.forward)

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        patches = {"post_grad_custom_post_pass": ours, "fx_graph_cache": False}
        return compile_fx(module, inputs, inner_compile=inner, config_patches=patches)

    return torch.compile(block, backend=backend, dynamic=dynamic)


def close(found: object, wanted: object, dtype: torch.dtype) -> None:
    tolerance = {torch.bfloat16: 4e-2, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def last_rules() -> tuple[str, ...]:
    return antiphon.lowering.reports()[-1].rules
