"""Compiled models whose collectives are fused with what follows, on host ranks: against eager, and what is refused."""

import json
import warnings
from collections.abc import Callable

import antiphon.lowering
import antiphon.torch
import harness
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from antiphon import _core
from antiphon.lowering import Options
from functorch.compile import make_boxed_func
from harness import Checks
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V

CHECKS = check = Checks()

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


class Group:
    """The default group, of gloo, with a communicator beside it, for one check."""

    def __init__(self, comm: Comm) -> None:
        port = comm.exchange_objects(_free_port() if comm.rank == 0 else None)[0]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.world_size)

    def __enter__(self) -> str:
        torch._dynamo.reset()
        return antiphon.lowering.attach()

    def __exit__(self, *_: object) -> None:
        antiphon.lowering.detach()
        dist.destroy_process_group()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


@check
def every_spelling_is_fused(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        for block in SPELLINGS:
            for dtype in (torch.bfloat16, torch.float32) if block is rms_norm else (torch.bfloat16,):
                torch._dynamo.reset()
                mine = tensors(comm.rank, dtype)
                found = lowered(block)(*mine)
                assert "fuse" in last_rules(), f"{block.__name__}: {antiphon.lowering.reports()[-1]}"
                close(found, block(*mine), dtype)


@check
def sizes_may_change(comm: Comm, device: Device) -> None:
    """D2."""
    with Group(comm), torch.no_grad():
        program = lowered(rms_norm, dynamic=True)
        for rows in 6, 3, 17:
            mine = tensors(comm.rank, torch.float32, rows)
            close(program(*mine), rms_norm(*mine), torch.float32)
        assert "fuse" in last_rules()


@check
def gradients_are_those_of_eager(comm: Comm, device: Device) -> None:
    with Group(comm):
        def gradients(block: Callable[..., object]) -> list[Tensor | None]:
            mine = [tensor.requires_grad_() for tensor in tensors(comm.rank, torch.float32)]
            norm, total = block(*mine)  # type: ignore[misc]
            (norm.square().sum() + total.sum()).backward()
            return [tensor.grad for tensor in mine]

        before = len(antiphon.lowering.reports())
        close(gradients(lowered(rms_norm)), gradients(rms_norm), torch.float32)
        assert any("fuse" in report.rules for report in antiphon.lowering.reports()[before:])


def sum_then_average(x: Tensor) -> Tensor:
    return summed(summed(x + 1), "avg") * 2


@check
def the_second_of_two_is_waited_for(comm: Comm, device: Device) -> None:
    """D1, D7."""
    with Group(comm), torch.no_grad():
        x = tensors(comm.rank, torch.float32)[0]
        close(lowered(sum_then_average)(x), sum_then_average(x), torch.float32)
        assert last_rules().count("sync") == 2


def kept(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    return summed(y), y


@check
def what_is_returned_stays_the_callers(comm: Comm, device: Device) -> None:
    """D3."""
    with Group(comm), torch.no_grad():
        x = tensors(comm.rank, torch.float32)[0]
        program = lowered(kept)
        first = program(x)
        second = program(x * 2)
        close(first, kept(x), torch.float32)
        close(second, kept(x * 2), torch.float32)


@check
def other_dtypes_are_served_or_left(comm: Comm, device: Device) -> None:
    """D4."""
    with Group(comm), torch.no_grad():
        for dtype in torch.float16, torch.int32, torch.int64, torch.float64:
            torch._dynamo.reset()
            x = torch.arange(24).reshape(3, 8).to(dtype) + comm.rank
            assert torch.equal(lowered(lambda x: summed(x + 1) + 1)(x), summed(x + 1) + 1)


@check
def memory_planning_changes_nothing(comm: Comm, device: Device) -> None:
    """D6."""
    with Group(comm), torch.no_grad():
        mine = tensors(comm.rank, torch.float32)
        close(compiled(rms_norm, memory_planning=True)(*mine), rms_norm(*mine), torch.float32)


def three_sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return summed(a) + summed(b) + summed(c)


@check
def sums_of_sums_are_one(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        a, b, c = (torch.randn(4, 8) for _ in range(3))
        close(lowered(three_sums)(a, b, c), three_sums(a, b, c), torch.float32)
        assert antiphon.lowering.reports()[-1].calls == (3, 1)


@check
def under_same_the_bits_are_those_of_the_collective(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        a, b, c = (torch.randn(4, 8) for _ in range(3))
        assert torch.equal(lowered(three_sums, numerics="same")(a, b, c), three_sums(a, b, c))
        assert antiphon.lowering.reports()[-1].calls == (3, 3)


@check
def groups_that_are_not_attached_are_left_alone(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        antiphon.lowering.detach()
        count = len(antiphon.lowering.reports())
        mine = tensors(comm.rank, torch.float32)
        close(lowered(rms_norm)(*mine), rms_norm(*mine), torch.float32)
        assert len(antiphon.lowering.reports()) == count


@check
def ranks_that_compile_other_programs_are_told(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad():
        mine = tensors(comm.rank, torch.float32)
        with pytest.raises(RuntimeError, match="run different programs"):
            lowered(rms_norm, merge=comm.rank == 0)(*mine)


@check
def a_proof_that_fails_changes_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(antiphon.lowering._pass._core, "check_lowering", lambda *_: ["it is somebody else's"])
        mine = tensors(comm.rank, torch.float32)
        with pytest.warns(UserWarning, match="left as it was: it is somebody else's .it is in /"):
            found = lowered(rms_norm, strict=False)(*mine)
        close(found, rms_norm(*mine), torch.float32)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="left as it was"):
            lowered(rms_norm)(*mine)


@check
def enabled_for_all_and_for_nothing(comm: Comm, device: Device) -> None:
    with Group(comm), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        mine, count = tensors(comm.rank, torch.float32), len(antiphon.lowering.reports())
        antiphon.lowering.enable(strict=True)
        try:
            here = torch._inductor.config.post_grad_custom_post_pass
            close(interpreted(rms_norm, here)(*mine), rms_norm(*mine), torch.float32)
            assert len(antiphon.lowering.reports()) == count + 1
            patch.setenv("ANTIPHON_LOWERING", "off")
            torch._dynamo.reset()
            close(interpreted(rms_norm, here)(*mine), rms_norm(*mine), torch.float32)
            assert len(antiphon.lowering.reports()) == count + 1
        finally:
            antiphon.lowering.disable()
        assert torch._inductor.config.post_grad_custom_post_pass is None


@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str) -> None:
    harness.expect("test_lowering", name, "host", 2)


def test_wrong_options_are_told() -> None:
    with pytest.raises(ValueError, match="numerics='exact': known are close, same"):
        Options(numerics="exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overlap=1: True or False"):
        Options(overlap=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names of groups"):
        Options(groups="tp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="known are off, log, strict"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTIPHON_LOWERING", "on")
        antiphon.lowering._options.mode()
    with pytest.raises(ValueError, match="what it is"):
        antiphon.lowering.spell("mine.add.default", "")


def test_what_is_no_program_is_told() -> None:
    request = json.dumps({"world": {}, "options": {}})
    with pytest.raises(ValueError, match="line 1 column 1"):
        _core.lower(b"[", request)
    with pytest.raises(ValueError, match="unknown field"):
        _core.lower(b"{}", json.dumps({"world": {}, "options": {}, "more": 1}))
    program = b'{"nodes": [{"name": "output", "op": "output", "args": []}]}'
    answer = json.loads(_core.lower(program, request))
    assert answer["edits"]["new"] == []
    assert _core.check_lowering(program, json.dumps(answer["plan"]).encode(), program) == []


def test_what_inductor_keeps_depends_on_the_options() -> None:
    assert antiphon.lowering.Pass(Options()).uuid() != antiphon.lowering.Pass(Options(merge=False)).uuid()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert antiphon.lowering.Pass(Options()).uuid() == antiphon.lowering.Pass().uuid()
