"""Fused all-reduces as methods of a communicator and as an operator of torch, on host memory and on GPUs."""

import tempfile
from pathlib import Path
from typing import Any

import fused_reference as reference
import harness
import numpy as np
import pytest
import torch
from harness import Checks

import antiphon
import antiphon.torch
import ranks

CHECKS = check = Checks()

Comm, Device = antiphon.Communicator, torch.device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def indices(seed: int, rows: int, *shape: int) -> torch.Tensor:
    """Rows, some of which are elsewhere."""
    return torch.randint(-1, rows, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


class Layer:
    """Tensors of a call: those of all ranks on the host, and this rank's on its device."""

    def __init__(self, comm: Comm, device: Device, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.xs = [random(rank, tokens, hidden, dtype=dtype) for rank in range(comm.world_size)]
        self.of_residual = random(100, tokens, hidden, dtype=dtype)
        self.of_weight, self.of_bias = random(101, hidden, dtype=dtype), random(102, hidden, dtype=dtype)
        self.x, self.residual = self.xs[comm.rank].to(device), self.of_residual.to(device)
        self.weight, self.bias = self.of_weight.to(device), self.of_bias.to(device)
        self.total = reference.total(self.xs)


def wide(*tensors: torch.Tensor) -> torch.Tensor:
    """The sum in float32, rounded once."""
    found = tensors[0].float()
    for tensor in tensors[1:]:
        found = found + tensor.float()
    return found.to(tensors[0].dtype)


@check
def one_operator_gives_whatever_is_asked_for(comm: Comm, device: Device) -> None:
    operator, group = torch.ops.antiphon.all_reduce_fused, antiphon.torch.ops.register(comm)
    for dtype in DTYPES:
        layer = Layer(comm, device, 5, 640, dtype)
        total = wide(layer.total, layer.of_residual)
        inverse = (total.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt().float()
        for early in False, True:
            outputs = ["scales", "inverse_rms", "norm", "codes", "residual", "sum"]
            options = (layer.residual, layer.weight, EPS, 1.0, early, "fp8-groups", None, 1.0, 128)
            scales, inverse_rms, norm, codes, residual, found = operator(layer.x, group, outputs, *options)
            torch.testing.assert_close(inverse_rms.cpu(), inverse, rtol=2**-20, atol=0)
            reference.close(norm, reference.rms_norm(total, layer.of_weight, EPS, 1.0, early))
            assert torch.equal(residual.cpu(), total) and torch.equal(found.cpu(), layer.total)
            wanted, exponents = reference.fp8_groups(norm.cpu(), 128)
            assert torch.equal(codes.cpu().view(torch.uint8), wanted)
            assert torch.equal(scales.cpu(), torch.ldexp(torch.ones(()), exponents.int() - 127))
            options = (layer.residual, layer.weight, EPS, 1.0, early, "fp8-tokens")
            norm, codes, scales = operator(layer.x, group, ["norm", "codes", "scales"], *options)
            wanted, of_tokens = reference.fp8_tokens(norm.cpu())
            assert torch.equal(codes.cpu().view(torch.uint8), wanted) and torch.equal(scales.cpu(), of_tokens)
    for outputs, options, text in (
        (["scales"], {}, "no scales of fp8"),
        (["norm", "norm"], {}, "at most once"),
        (["codes"], {"quantize": "nvfp4"}, "known are fp8, fp8-tokens, fp8-groups"),
        (["codes"], {"quantize": "fp8-groups", "group_size": 7}, "a divisor of 640"),
    ):
        with pytest.raises(ValueError, match=text):
            operator(layer.x, group, outputs, **options)


@check
def norms_and_residuals(comm: Comm, device: Device) -> None:
    for dtype in DTYPES:
        for tokens, hidden in (1, 64), (3, 640), (33, 1024):
            layer = Layer(comm, device, tokens, hidden, dtype)
            norm, residual, codes, scales = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, eps=EPS)
            wanted = wide(layer.total, layer.of_residual)
            assert torch.equal(residual.cpu(), wanted) and codes is None and scales is None
            reference.close(norm, reference.rms_norm(wanted, layer.of_weight, EPS))
            assert norm.dtype == dtype and norm.device == layer.x.device and norm.shape == (tokens, hidden)
            for algorithm in "one-shot", "two-shot":
                again = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, eps=EPS, algorithm=algorithm)
                assert torch.equal(again.norm, norm) and torch.equal(again.residual, residual)


@check
def everything_before_the_norm(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 5, 256, torch.bfloat16)
    bare = comm.all_reduce_rms_norm(layer.x.view(5, 1, 256), eps=EPS)
    assert bare.residual is None and bare.norm.shape == (5, 1, 256)
    reference.close(bare.norm.view(5, 256), reference.rms_norm(layer.total, None, EPS))

    options: Any = dict(weight_bias=1.0, bias=layer.bias, pre_norm=True, pre_weight=layer.bias)
    gemma = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, eps=EPS, **options)
    before = reference.rms_norm(wide(layer.total, layer.of_bias), layer.of_bias, EPS)
    wanted = wide(before, layer.of_residual)
    reference.close(gemma.residual, wanted)
    reference.close(gemma.norm, reference.rms_norm(gemma.residual.cpu(), layer.of_weight, EPS, 1.0))

    rounded = comm.all_reduce_rms_norm(layer.x, layer.residual, rounded=True)
    wanted = wide(reference.total(layer.xs, rounded=True), layer.of_residual)
    assert torch.equal(rounded.residual.cpu(), wanted)


@check
def outputs_that_were_given(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 4, 256, torch.float16)
    wanted = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight)
    out, residual = torch.empty_like(layer.x), layer.residual.clone()
    found = comm.all_reduce_rms_norm(layer.x, residual, layer.weight, out=out, residual_out=residual)
    assert found.norm is out and found.residual is residual
    assert torch.equal(out, wanted.norm) and torch.equal(residual, wanted.residual)

    for algorithm in "one-shot", "two-shot":  # in the place of what they are made of
        x, residual = layer.x.clone(), layer.residual.clone()
        comm.all_reduce_rms_norm(x, residual, layer.weight, out=x, residual_out=residual, algorithm=algorithm)
        assert torch.equal(x, wanted.norm) and torch.equal(residual, wanted.residual)
        x = layer.x.clone()
        norm = comm.all_reduce_rms_norm(x, layer.residual, layer.weight, residual_out=x, algorithm=algorithm).norm
        assert torch.equal(x, wanted.residual) and torch.equal(norm, wanted.norm)
        x = layer.x.clone()
        comm.all_reduce_fused(x, sum_out=x, algorithm=algorithm)
        assert torch.equal(x.cpu(), layer.total)

    longer = torch.zeros(7, 256, dtype=layer.x.dtype, device=device)  # what comes first counts
    comm.all_reduce_fused(torch.cat([layer.x, layer.x]), tokens=4, hidden=256, sum_out=longer)
    assert torch.equal(longer[:4].cpu(), layer.total) and longer[4:].eq(0).all()

    plain, total = torch.empty_like(layer.x), torch.empty_like(layer.x)
    comm.all_reduce_fused(layer.x, bias=layer.bias, sum_out=plain, residual_out=total)
    assert torch.equal(plain, comm.all_reduce(layer.x))
    assert torch.equal(total.cpu(), wide(layer.total, layer.of_bias))


@check
def quantised_norms(comm: Comm, device: Device) -> None:
    for dtype in DTYPES:
        for tokens, hidden in (1, 128), (7, 640), (130, 256):
            layer = Layer(comm, device, tokens, hidden, dtype)

            def call(quantize: str, **options: Any) -> Any:
                arguments = layer.x, layer.residual, layer.weight
                found = comm.all_reduce_rms_norm(*arguments, quantize=quantize, keep_norm=True, **options)
                alone = comm.all_reduce_rms_norm(*arguments, quantize=quantize, **options)
                assert alone.norm is None and torch.equal(alone.codes.view(torch.uint8), found.codes.view(torch.uint8))
                return found.norm.cpu(), found.codes, found.scales

            norm, codes, scales = call("fp8", scale=0.25)
            assert codes.dtype == torch.float8_e4m3fn and codes.shape == norm.shape and scales is None
            assert torch.equal(codes.view(torch.uint8).cpu(), reference.e4m3(norm.float() * (1 / 0.25)))
            _, again, _ = call("fp8", scale=torch.tensor([0.25], device=device))
            assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))

            for quantize in "fp8-tokens", "fp8-tokens-reciprocal":
                norm, codes, scales = call(quantize)
                wanted = reference.fp8_tokens(norm, quantize.endswith("reciprocal"))
                assert torch.equal(codes.view(torch.uint8).cpu(), wanted[0]) and torch.equal(scales.cpu(), wanted[1])

            norm, codes, scales = call("fp8-groups", group_size=64)
            wanted = reference.fp8_groups(norm, 64)
            assert torch.equal(codes.view(torch.uint8).cpu(), wanted[0])
            groups = hidden // 64
            assert scales.shape == (tokens, -(-groups // 4)) and scales.dtype == torch.int32
            assert scales.stride() == (1, -(-tokens // 4) * 4)
            assert torch.equal(reference.unpacked(scales, tokens, groups), wanted[1])

            if dtype == torch.float32:
                continue
            for name, layout in (("128x4", 0), ("8x4", 1), ("linear", 2), (2, 2)):
                norm, codes, scales = call("nvfp4", scale=20.0, scale_layout=name)
                wanted = reference.nvfp4(norm, 20.0)
                assert codes.dtype == torch.uint8 and codes.shape == (tokens, hidden // 2)
                assert torch.equal(codes.cpu(), wanted[0])
                assert torch.equal(scales.cpu().flatten(), reference.placed(wanted[1], layout))


@check
def mixtures_of_experts(comm: Comm, device: Device) -> None:
    world, tokens, hidden, dtype = comm.world_size, 6, 256, torch.bfloat16
    experts = [random(10 + rank, 4, tokens, hidden, dtype=dtype) for rank in range(world)]
    scales = [random(20 + rank, 4, tokens, dtype=torch.float32) for rank in range(world)]
    shared = [random(30 + rank, tokens, hidden, dtype=dtype) for rank in range(world)]
    out = torch.empty(tokens, hidden, dtype=dtype, device=device)
    mine = comm.rank
    of, with_scales, beside = (tensors[mine].to(device) for tensors in (experts, scales, shared))
    comm.all_reduce_fused(experts=of, expert_scales=with_scales, shared=beside, sum_out=out)
    wanted = reference.total([reference.of_experts(*each) for each in zip(experts, scales, shared)])
    torch.testing.assert_close(out.cpu().float(), wanted.float(), rtol=2**-6, atol=2**-5)

    rows = [random(40 + rank, 9, hidden, dtype=dtype) for rank in range(world)]
    index = [indices(rank, 9, tokens, 3) for rank in range(world)]
    weights = [random(50 + rank, tokens, 3, dtype=dtype) for rank in range(world)]
    for uses in (True, False):
        some: Any = (lambda tensors: tensors) if uses else (lambda tensors: [None] * world)
        comm.all_reduce_fused(
            rows=rows[mine].to(device),
            index=index[mine].to(device),
            expert_scales=weights[mine].to(device) if uses else None,
            shared=shared[mine].to(device) if uses else None,
            routed_scaling=2.5,
            sum_out=out,
        )
        each_rank = zip(rows, index, some(weights), some(shared))
        wanted = reference.total([reference.of_rows(*each, 2.5) for each in each_rank])
        torch.testing.assert_close(out.cpu().float(), wanted.float(), rtol=2**-6, atol=2**-4)


@check
def arguments_that_make_no_sense(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 4, 256, torch.float16)
    x, out, wide_x = layer.x, torch.empty_like(layer.x), layer.x.repeat(2, 1)
    fused: Any = comm.all_reduce_fused
    norm: Any = comm.all_reduce_rms_norm

    def refused(kind: type[Exception], text: str, call: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            call(*arguments, **options)

    refused(TypeError, "pass x, or experts .*, or rows", fused, sum_out=out)
    refused(TypeError, "pass x, or experts .*, or rows", fused, x, rows=x, sum_out=out)
    refused(TypeError, "pass index", fused, rows=x, sum_out=out)
    refused(TypeError, "tokens needs x, and hidden", fused, x, tokens=2, sum_out=out)
    refused(ValueError, "sum_out has 1024 elements, and 1280 are needed", fused, wide_x, tokens=5, hidden=256, sum_out=out)
    refused(ValueError, "outputs must be at least one", fused, x)
    refused(ValueError, "x: 1024 elements are no rows of 300", fused, x, hidden=300, sum_out=out)
    refused(ValueError, "hidden size must be a multiple of 8", fused, x, hidden=4, sum_out=out)
    both = torch.empty(5, 256, dtype=x.dtype, device=device)
    text = r"norm_out and x overlap: they must be apart, or the same, not 2048 bytes at 0x\w+ and 2048 bytes at 0x"
    refused(ValueError, text, fused, both[:4], norm_out=both[1:])
    refused(ValueError, "residual_out and residual overlap", fused, x, residual=both[1:], residual_out=both[:4])
    refused(ValueError, "codes and x overlap: they must be apart, not", fused, x, quantize="fp8", codes=x)
    refused(ValueError, "sum_out and norm_out overlap", fused, x, sum_out=x, norm_out=x)
    refused(ValueError, "residual_out and residual overlap", fused, x, residual=x, residual_out=x)
    refused(ValueError, "norm_out and residual overlap", fused, x, residual=out, norm_out=out)
    refused(ValueError, "residual_out and norm_out overlap", fused, x, norm_out=out, residual_out=out)
    refused(ValueError, "quantize and codes need each other", fused, x, quantize="fp8", norm_out=out)
    refused(ValueError, "unknown quantisation .int4.: known are fp8", norm, x, quantize="int4")
    refused(ValueError, "layout of scales .4x4.: known are 128x4", norm, x, quantize="nvfp4", scale_layout="4x4")
    refused(ValueError, "unknown algorithm .best.", norm, x, algorithm="best")
    refused(ValueError, "the weight has 128 elements", norm, x, weight=layer.weight[:128])
    refused(ValueError, "elements of f16, not f32", norm, x, layer.residual.float())
    refused(TypeError, "f64", norm, x.double())
    refused(ValueError, "f16 or bf16 for FP4, not f32", norm, x.float(), quantize="nvfp4")
    refused(ValueError, "codes must be at least 1024 bytes", norm, x, quantize="fp8", codes=out.flatten()[:8])
    refused(ValueError, "x of shape .* is not contiguous", norm, x.t())
    if device.type == "cpu":
        refused(ValueError, "host memory has no stream", norm, x, stream=0)
    assert torch.equal(norm(x, layer.residual).residual.cpu(), wide(layer.total, layer.of_residual))


def layers(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    norm, residual = torch.ops.antiphon.all_reduce_rms_norm(x * 2, group, residual, weight, EPS)
    second, total = torch.ops.antiphon.all_reduce_rms_norm(norm.t().contiguous().t(), group, bias=weight)
    return second + 1, residual, total


@check
def compiled_programs(comm: Comm, device: Device) -> None:
    group = antiphon.torch.ops.register(comm)
    layer = Layer(comm, device, 8, 64, torch.float32)
    wanted = layers(layer.x, layer.residual, layer.weight, group)
    total = reference.total([x * 2 for x in layer.xs])
    assert torch.equal(wanted[1].cpu(), wide(total, layer.of_residual))
    for backend in "aot_eager", "inductor":
        torch._dynamo.reset()
        program = torch.compile(layers, fullgraph=True, backend=backend)
        for _ in range(2):
            for mine, other in zip(program(layer.x, layer.residual, layer.weight, group), wanted):
                torch.testing.assert_close(mine, other)


@check
def calls_in_a_graph(comm: Comm, device: Device) -> None:
    if device.type != "cuda":
        return
    layer = Layer(comm, device, 16, 1024, torch.bfloat16)
    wanted = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, quantize="fp8-tokens", keep_norm=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, quantize="fp8-tokens", keep_norm=True)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    comm.check()
    for mine, other in zip(found, wanted):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@check
def groups_of_any_length_that_divides_a_row(comm: Comm, device: Device) -> None:
    for dtype, hidden in (torch.bfloat16, 768), (torch.float32, 768), (torch.bfloat16, 1024):
        x = (random(comm.rank, 5, hidden, dtype=dtype) * 8).to(device)
        for size in (each for each in (1, 2, 3, 4, 6, 12, 24, 48, 512, hidden) if hidden % each == 0):
            found = comm.all_reduce_rms_norm(x, quantize="fp8-groups", group_size=size, keep_norm=True)
            groups = found.norm.float().reshape(5, -1, size)
            powers = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10))))
            wanted = (groups / powers).reshape(5, hidden).to(torch.float8_e4m3fn)
            assert torch.equal(found.codes.view(torch.uint8), wanted.view(torch.uint8)), f"{dtype}, {size} of {hidden}"


@pytest.mark.parametrize(("device", "world_size"), harness.WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_fusion", name, device, world_size)


@pytest.mark.parametrize("device", harness.DEVICES[:1])
def test_torch_finds_no_fault_with_the_operator(device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with antiphon.init(rank=0, world_size=1, path=Path(folder) / "world") as comm:
            x = torch.ones(4, 8)
            operator = torch.ops.antiphon.all_reduce_rms_norm.default
            torch.library.opcheck(operator, (x, antiphon.torch.ops.register(comm), x + 1, x[0]))


def test_numpy_arrays_are_taken_and_given() -> None:
    def body(comm: antiphon.Communicator) -> None:
        x, weight = np.full((3, 8), comm.rank + 1.0, np.float32), np.full(8, 0.5, np.float32)
        options: Any = dict(quantize="fp8-groups", group_size=8, keep_norm=True)
        norm, residual, codes, scales = comm.all_reduce_rms_norm(x, np.ones_like(x), weight, **options)
        assert isinstance(norm, np.ndarray) and np.allclose(norm, 0.5) and (residual == 4).all()
        assert codes.dtype == np.uint8 and codes.shape == (3, 8)
        assert scales.dtype == np.int32 and scales.shape == (3, 1)
        result = comm.all_reduce_rms_norm(x)
        assert result.residual is None and np.allclose(result.norm, 1)

    ranks.threads(2, body)


def on_the_default_communicator() -> None:
    x = np.ones((2, 4), np.float32)
    assert (antiphon.all_reduce(x) == 2).all()
    comm = antiphon.default()
    assert comm is antiphon.default() and comm.world_size == 2
    assert np.allclose(antiphon.all_reduce_rms_norm(x, x, eps=0.0).norm, 1)
    with comm.split(comm.rank) as alone:
        antiphon.set_default(alone)
        assert (antiphon.all_reduce(x, "max") == 1).all()
    with pytest.raises(RuntimeError, match="is closed"):
        antiphon.all_reduce(x)
    antiphon.set_default(comm)
    antiphon.all_reduce(x, out=x)
    assert (x == 2).all()


def test_calls_of_the_module_are_those_of_the_default_communicator() -> None:
    ranks.processes(2, on_the_default_communicator)
