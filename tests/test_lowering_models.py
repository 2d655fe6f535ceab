"""Models that are lowered as they are: DTensor's, vLLM's, recompiled, from the cache, in CUDA graphs."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import antiphon.lowering
import harness
import pytest
import torch
import torch.distributed as dist
from harness import Checks
from lowered import HIDDEN, Comm, Device, Group, close, compiled, lowered, rms_norm, summed, tensors
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

CHECKS = check = Checks()
INNER = 128


class Block(nn.Module):
    """A feed-forward block between two norms, which knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.down(nn.functional.silu(self.up(self.before(x)))))  # type: ignore[no-any-return]


def among_ranks(comm: Comm, device: Device, sequence: bool) -> tuple[Block, Tensor]:
    """The block in parts, by DTensor alone, and this rank's input."""
    torch.manual_seed(7)
    block, x = Block().to(device), torch.randn(2, 4 * comm.world_size, HIDDEN).to(device)
    mesh = init_device_mesh(device.type, (comm.world_size,))
    if not sequence:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(block, mesh, plan), x  # type: ignore[arg-type, return-value]
    plan = {
        "before": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "after": SequenceParallel(),
    }
    return parallelize_module(block, mesh, plan), x.chunk(comm.world_size, 1)[comm.rank].contiguous()  # type: ignore[arg-type, return-value]


def trained(program: object, block: Block, x: Tensor) -> list[Tensor]:
    """What it gives, and its gradients."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    result = program(x)  # type: ignore[operator]
    result = result.to_local() if hasattr(result, "to_local") else result
    result.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in block.parameters())]
    return [result.detach(), *(grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads)]  # type: ignore[union-attr]


@check
def tensor_parallel_blocks_of_dtensor(comm: Comm, device: Device) -> None:
    with Group(comm, device):
        block, x = among_ranks(comm, device, sequence=False)
        before = len(antiphon.lowering.reports())
        close(trained(lowered(block), block, x), trained(block, block, x), torch.float32)
        reports = [str(report) for report in antiphon.lowering.reports()[before:]]
        assert any("one call gives" in report and "inverse_rms" in report for report in reports), reports


@check
def sequence_parallel_blocks_of_dtensor(comm: Comm, device: Device) -> None:
    with Group(comm, device):
        block, x = among_ranks(comm, device, sequence=True)
        before = len(antiphon.lowering.reports())
        close(trained(lowered(block), block, x), trained(block, block, x), torch.float32)
        assert any("sync" in report.rules for report in antiphon.lowering.reports()[before:])


@contextmanager
def vllm(group: dist.ProcessGroup) -> Iterator[None]:
    """The operators of vLLM that are in a compiled model of its, by their names and their definitions."""
    ours, kernels = torch.library.Library("vllm", "FRAGMENT"), torch.library.Library("_C", "FRAGMENT")
    ours.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
    kernels.define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()")
    kernels.define("static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, (int, int)? group_shape=None) -> ()")

    def all_reduce(x: Tensor, group_name: str) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
        residual.add_(x)
        wide = residual.float()
        x.copy_((wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype) * weight)

    def fp8(result: Tensor, x: Tensor, scale: Tensor, group_shape: object = None) -> None:
        result.copy_((x.float() / scale).clamp(-448, 448).to(result.dtype))

    ours.impl("all_reduce", all_reduce, "CPU")
    kernels.impl("fused_add_rms_norm", add_norm, "CPU")
    kernels.impl("static_scaled_fp8_quant", fp8, "CPU")
    torch.library.register_fake("vllm::all_reduce", lambda x, group_name: torch.empty_like(x), lib=ours)
    torch.library.register_fake("_C::fused_add_rms_norm", lambda *_: None, lib=kernels)
    torch.library.register_fake("_C::static_scaled_fp8_quant", lambda *_: None, lib=kernels)
    try:
        yield
    finally:
        ours._destroy()
        kernels._destroy()


def of_vllm(x: Tensor, w0: Tensor, residual: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total, residual = torch.ops.vllm.all_reduce(x @ w0, "tp:0"), residual.clone()
    torch.ops._C.fused_add_rms_norm(total, residual, w, 1e-6)
    codes = torch.empty_like(total, dtype=torch.float8_e4m3fn)
    torch.ops._C.static_scaled_fp8_quant(codes, total, scale)
    return codes, residual


@check
def models_of_vllm(comm: Comm, device: Device) -> None:
    if device.type != "cpu":
        return  # where vLLM has kernels of its own
    with Group(comm, device), torch.no_grad(), vllm(dist.group.WORLD):
        antiphon.lowering.attach(name="tp:0")
        given = (*tensors(comm.rank, torch.bfloat16), torch.tensor([0.25]))
        with torch._inductor.config.patch(enable_auto_functionalized_v2=False):
            codes, residual = lowered(of_vllm)(*given)
        report = str(antiphon.lowering.reports()[-1])
        assert "one call gives residual, codes" in report, report
        wanted, total = of_vllm(*given)
        close(residual, total, torch.bfloat16)
        torch.testing.assert_close(codes.float(), wanted.float(), rtol=0.15, atol=0.02)


def mapped() -> int:
    """Bytes of shared memory that this process has mapped."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    ends = [[int(end, 16) for end in re.split("-", line[0])] for line in lines]
    return sum(end - start for start, end in ends)


@check
def a_hundred_programs_map_what_one_does(comm: Comm, device: Device) -> None:
    with Group(comm, device), torch.no_grad():
        x, after = torch.arange(8.0, device=device), []
        realize = "always" if device.type == "cpu" else "never"
        for number in range(100):
            torch._dynamo.reset()
            found = lowered(lambda x, number=number: summed(x + number) + 1, realize=realize)(x)
            assert torch.equal(found, (x + number) * comm.world_size + 1)
            after.append(mapped())
        assert after[0] == after[-1], after


@check
def one_rank_takes_its_program_from_the_cache(comm: Comm, device: Device) -> None:
    with Group(comm, device), torch.no_grad(), tempfile.TemporaryDirectory() as kept, pytest.MonkeyPatch.context() as patch:
        mine = tuple(tensor.to(device) for tensor in tensors(comm.rank, torch.float32))
        wanted = rms_norm(*mine)
        for turn in range(2):
            folder = Path(kept) / ("kept" if comm.rank == 0 else f"new {turn}")
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
            torch._dynamo.reset()
            counters.clear()
            close(compiled(rms_norm, fx_graph_cache=True)(*mine), wanted, torch.float32)
            assert counters["inductor"]["fxgraph_cache_hit"] == (turn if comm.rank == 0 else 0)


@check
def replayed_as_cuda_graphs(comm: Comm, device: Device) -> None:
    if device.type != "cuda":
        return
    with Group(comm, device), torch.no_grad():
        program = torch.compile(rms_norm, backend="antiphon", mode="reduce-overhead")
        for turn in range(4):
            mine = tuple((tensor + turn).to(device) for tensor in tensors(comm.rank, torch.bfloat16))
            found = [result.clone() for result in program(*mine)]
            close(found, list(rms_norm(*mine)), torch.bfloat16)
        assert "fuse" in antiphon.lowering.reports()[-1].rules


@pytest.mark.parametrize("device", harness.DEVICES)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str) -> None:
    harness.expect("test_lowering_models", name, device, 2)
