"""All-reduces of ``antiphon.comm`` after mixtures of experts, the one call for all, and TensorRT-LLM's first one; and
programs of them all, on host memory and on GPUs."""

from typing import Any

import fused_reference as reference
import harness
import pytest
import torch
from harness import Checks
from test_fusion import Comm, Device, Layer, indices, random, wide
from trtllm import EPS, GROUP, PATTERNS, Call, Workspace, quantised

import antiphon.torch
from antiphon import comm as peer
from antiphon.comm import AllReduceFusionOp, AllReduceStrategyType, QuantizationSFLayout

CHECKS = check = Checks()


@check
def experts(comm: Comm, device: Device) -> None:
    workspace, world, tokens, hidden, dtype = Workspace(comm), comm.world_size, 6, 256, torch.bfloat16
    outputs = [random(10 + rank, 4, tokens, hidden, dtype=dtype) for rank in range(world)]
    weights = [random(20 + rank, 4, tokens, dtype=torch.float32) for rank in range(world)]
    shared = [random(30 + rank, tokens, hidden, dtype=dtype) for rank in range(world)]
    layer = Layer(comm, device, tokens, hidden, dtype)
    total, residual, norm = (torch.empty(tokens, hidden, dtype=dtype, device=device) for _ in range(3))
    codes = torch.empty(tokens * hidden // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(tokens * hidden // 16, dtype=torch.uint8, device=device)
    mine = [tensors[comm.rank].to(device) for tensors in (weights, outputs, shared)]
    peer.trtllm_moe_allreduce_fusion(
        world, comm.rank, tokens, hidden, workspace.tensor, False, layer.residual, layer.weight, EPS, 0.25, 4, *mine,
        QuantizationSFLayout.LINEAR, total, residual, norm, codes, scales,
    )  # fmt: skip
    wanted = reference.total([reference.of_experts(*each) for each in zip(outputs, weights, shared)])
    torch.testing.assert_close(total.cpu().float(), wanted.float(), rtol=2**-6, atol=2**-5)
    check_rest(layer, total, residual, norm, codes, scales, 2)

    lines = [random(40 + rank, 9, hidden, dtype=dtype) for rank in range(world)]
    index = [indices(rank, 9, tokens, 3) for rank in range(world)]
    factors = [random(50 + rank, tokens, 3, dtype=dtype) for rank in range(world)]
    rows, where, factor, other = (tensors[comm.rank].to(device) for tensors in (lines, index, factors, shared))
    scales = torch.empty(128 * hidden // 16, dtype=torch.uint8, device=device)
    finalize = dict(
        allreduce_in=rows, residual_in=layer.residual, norm_weight=layer.weight, expanded_idx_to_permuted_idx=where,
        norm_out=norm, residual_out=residual, launch_with_pdl=True, world_rank=comm.rank, world_size=world, eps=EPS,
        shared_expert_output=other, expert_scale_factor=factor, routed_scaling_factor=2.5,
    )  # fmt: skip
    peer.trtllm_moe_finalize_allreduce_fusion(
        **finalize, workspace_ptrs=workspace.tensor, quant_out=codes, scale_out=scales, scale_factor=0.25
    )
    wanted = reference.total([reference.of_rows(*each, 2.5) for each in zip(lines, index, factors, shared)])
    wanted = wide(wanted, layer.of_residual)
    torch.testing.assert_close(residual.cpu().float(), wanted.float(), rtol=2**-6, atol=2**-3)
    check_rest(layer, None, residual, norm, codes, scales, 0)

    # As scripts call it: no scale, a name of another release, and no room for scales.
    again = torch.empty_like(norm)
    small = torch.zeros(16, dtype=torch.uint8, device=device)
    peer.trtllm_moe_finalize_allreduce_fusion(
        **{**finalize, "norm_out": again}, workspace=workspace.tensor, quant_out=codes, scale_out=small
    )
    assert torch.equal(again, norm) and small.eq(0).all()
    with pytest.raises(ValueError, match="one of residual_out, norm_out, quant_out must be given"):
        peer.trtllm_moe_finalize_allreduce_fusion(
            **{**finalize, "norm_out": None, "residual_out": None}, workspace=workspace.tensor
        )
    with pytest.raises(ValueError, match="workspace_ptrs must be given"):
        peer.trtllm_moe_finalize_allreduce_fusion(**finalize)
    with pytest.raises(ValueError, match="active_experts_token_input has 6144 elements, not 4608"):
        peer.trtllm_moe_allreduce_fusion(
            world, comm.rank, tokens, hidden, workspace.tensor, False, layer.residual, layer.weight, EPS, 0.25, 3, *mine,
            None, total, None, None, None, None,
        )  # fmt: skip
    # What the call behind them refuses names what the caller called.
    nine = layer.weight[:9]
    with pytest.raises(ValueError, match="^trtllm_moe_finalize_allreduce_fusion: .*weight has 9 elements, expected 256"):
        peer.trtllm_moe_finalize_allreduce_fusion(**{**finalize, "norm_weight": nine}, workspace=workspace.tensor)
    with pytest.raises(ValueError, match="^trtllm_moe_allreduce_fusion: .*weight has 9 elements, expected 256"):
        peer.trtllm_moe_allreduce_fusion(
            world, comm.rank, tokens, hidden, workspace.tensor, False, layer.residual, nine, EPS, 0.25, 4, *mine,
            None, total, residual, norm, None, None,
        )  # fmt: skip
    workspace.end()


def check_rest(
    layer: Layer,
    total: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    layout: int,
) -> None:
    """What follows from the sum."""
    if total is not None:
        assert torch.equal(residual.cpu(), wide(total.cpu(), layer.of_residual))
    reference.close(norm, reference.rms_norm(residual.cpu(), layer.of_weight, EPS))
    wanted = reference.nvfp4(norm.cpu(), 0.25)
    assert torch.equal(codes.cpu(), wanted[0].flatten())
    assert torch.equal(scales.cpu(), reference.placed(wanted[1], layout))


@check
def one_call_for_all(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 6, 256, torch.bfloat16)
    workspace: Any = peer.create_allreduce_fusion_workspace(
        world_size=comm.world_size, rank=comm.rank, max_token_num=8, hidden_dim=256, dtype=torch.bfloat16, group=comm
    )
    assert (workspace.backend, workspace.world_size, workspace.rank) == ("trtllm", comm.world_size, comm.rank)
    fits = workspace.is_buffer_size_sufficient
    assert fits(comm.world_size, 4, 512, torch.bfloat16) and not fits(comm.world_size, 9, 256, torch.bfloat16)
    assert not fits(comm.world_size + 1, 1, 256, torch.bfloat16) and not fits(comm.world_size, 1, 256, torch.float32)

    assert torch.equal(peer.allreduce_fusion(layer.x, workspace, 0, fp32_acc=True).cpu(), layer.total)
    norm = comm.all_reduce_rms_norm(layer.x, layer.residual, layer.weight, eps=EPS, keep_norm=True, quantize="fp8-tokens")
    common: Any = dict(residual_in=layer.residual, rms_gamma=layer.weight, rms_eps=EPS, fp32_acc=True)
    residual, out = torch.empty_like(layer.x), torch.empty_like(layer.x)
    found = peer.allreduce_fusion(layer.x, workspace, 1, residual_out=residual, norm_out=out, **common)
    assert found is out and torch.equal(out, norm.norm) and torch.equal(residual, norm.residual)
    assert torch.equal(peer.allreduce_fusion(layer.x, workspace, 1, **common), norm.norm)
    for pattern, name in PATTERNS.items():
        if "Quant" in name:
            found = peer.allreduce_fusion(
                layer.x, workspace, pattern, scale_factor=0.25, block_quant_group_size=GROUP, **common
            )
            wanted = norm.norm if "Out" in name else quantised(norm.norm.cpu(), name, 0)[0]
            assert torch.equal(found.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8))
    scales = torch.empty_strided((6, 1), (1, 8), dtype=torch.int32, device=device)
    peer.allreduce_fusion(layer.x, workspace, 9, scale_out=scales, block_quant_group_size=GROUP, **common)
    assert torch.equal(reference.unpacked(scales, 6, 4), reference.fp8_groups(norm.norm.cpu(), GROUP)[1])

    # Mixtures of experts: one expert of weight 1 beside zeros is that expert.
    zeros, ones = torch.zeros_like(layer.x), torch.ones(1, 6, device=device)
    found = peer.allreduce_fusion(
        zeros, workspace, 6, moe_reduction_device_num_experts=1, moe_reduction_scale_input=ones,
        moe_reduction_active_experts_token_input=layer.x, moe_reduction_token_input=zeros, residual_out=residual, **common,
    )  # fmt: skip
    assert torch.equal(found, norm.norm) and torch.equal(residual, norm.residual)
    rows = torch.arange(6, dtype=torch.int32, device=device).view(6, 1)
    found = peer.allreduce_fusion(layer.x, workspace, 7, norm_out=out, expanded_idx_to_permuted_idx=rows, **common)
    assert found is out and torch.equal(out, norm.norm)

    with pytest.raises(ValueError, match="^allreduce_fusion: .*weight has 9 elements, expected 256"):
        peer.allreduce_fusion(layer.x, workspace, 1, **{**common, "rms_gamma": layer.weight[:9]})
    with pytest.raises(ValueError, match="12 tokens of 256 are more than the workspace's 8 tokens of 256"):
        peer.allreduce_fusion(torch.cat([layer.x, layer.x]), workspace, 0)
    with pytest.raises(ValueError, match=r"input must be \[tokens, hidden\], not \[1536\]"):
        peer.allreduce_fusion(layer.x.flatten(), workspace, 0)
    with pytest.raises(TypeError, match="None is no workspace"):
        peer.allreduce_fusion(layer.x, None, 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no backend 'mnnvl'"):
        peer.create_allreduce_fusion_workspace("mnnvl")
    with pytest.raises(ValueError, match="rank, max_token_num, hidden_dim must be given"):
        peer.create_allreduce_fusion_workspace(world_size=2)
    workspace.destroy()
    workspace.destroy()
    with pytest.raises(ValueError, match="no workspace, or it was destroyed"):
        peer.allreduce_fusion(layer.x, workspace, 0)


@check
def the_first_custom_all_reduce(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 5, 256, torch.float16)
    pointers = peer.trtllm_create_ipc_workspace_for_all_reduce(comm.rank, comm.world_size, 128, 4096, comm)
    flat = [pointer for part in pointers for pointer in part]
    assert len(pointers) == 7 and len(set(flat)) == 7 * comm.world_size and all(type(each) is int for each in flat)
    peer.trtllm_lamport_initialize_all(*(pointers[part][comm.rank] for part in (4, 5, 6)), 1 << 20, torch.float16)
    tensors = [torch.tensor(part, dtype=torch.int64) for part in pointers]
    out, middle, flag = torch.empty_like(layer.x), torch.empty_like(layer.x), 0

    def call(operation: int, strategy: int = AllReduceStrategyType.ONESHOT, config: int = 0, **changes: Any) -> None:
        nonlocal flag
        flag += 1
        options: dict[str, Any] = dict(
            inp=layer.x.flatten(), out=out, tp_size=comm.world_size, tp_rank=comm.rank, token_num=5,
            fusion_op_code=operation, strategy_code=strategy, config_code=config, launch_with_pdl=True, flag_value=flag,
            peer_comm_buffer_ptrs=tensors[0], peer_barrier_ptrs_in=tensors[2], peer_barrier_ptrs_out=tensors[3],
            bias=layer.bias, residual=layer.residual, weight=layer.weight, weight_pre_residual_norm=layer.bias, eps=EPS,
            intermediate_buffer=middle, lamport_peer_comm_buffer_ptrs_0=tensors[4],
            lamport_peer_comm_buffer_ptrs_1=tensors[5], lamport_peer_comm_buffer_ptrs_2=tensors[6],
        )  # fmt: skip
        peer.trtllm_custom_all_reduce(**{**options, **changes})

    for strategy in (AllReduceStrategyType.ONESHOT, AllReduceStrategyType.TWOSHOT):
        for config in 0, 1, 2:
            call(AllReduceFusionOp.NONE, strategy, config)
            assert torch.equal(out.cpu(), layer.total)
            call(AllReduceFusionOp.RESIDUAL_RMS_NORM, strategy, config)
            assert torch.equal(middle.cpu(), wide(layer.total, layer.of_bias, layer.of_residual))
            reference.close(out, reference.rms_norm(middle.cpu(), layer.of_weight, EPS))
            call(AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM, strategy, config)
            before = reference.rms_norm(wide(layer.total, layer.of_bias), layer.of_bias, EPS)
            reference.close(middle, wide(before, layer.of_residual))
            reference.close(out, reference.rms_norm(middle.cpu(), layer.of_weight, EPS))
    call(AllReduceFusionOp.RESIDUAL_RMS_NORM, bias=None, weight=None, eps=None)
    reference.close(out, reference.rms_norm(wide(layer.total, layer.of_residual), None, 1e-5))

    for kind in ValueError, RuntimeError:
        with pytest.raises(kind, match="operation 4 is not served, only NONE"):
            call(AllReduceFusionOp.RESIDUAL_RMS_NORM_QUANT_FP8)
        with pytest.raises(kind, match="strategy 3 is not served"):
            call(AllReduceFusionOp.NONE, AllReduceStrategyType.AUTO)
        with pytest.raises(kind, match="configuration unsupported: USE_MEMCPY with PUSH_MODE"):
            call(AllReduceFusionOp.NONE, config=3)
        with pytest.raises(kind, match="configuration unsupported: 1280 elements are no 3 rows"):
            call(AllReduceFusionOp.NONE, token_num=3)
    with pytest.raises(ValueError, match="residual, intermediate_buffer must be given"):
        call(AllReduceFusionOp.RESIDUAL_RMS_NORM, residual=None, intermediate_buffer=None)
    peer.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(pointers)
    with pytest.raises(ValueError, match="no workspace, or it was destroyed"):
        call(AllReduceFusionOp.NONE)


@check
def compiled_programs(comm: Comm, device: Device) -> None:
    layer = Layer(comm, device, 8, 256, torch.bfloat16)
    workspace: Any = peer.create_allreduce_fusion_workspace(
        "auto", comm.world_size, comm.rank, 64, 256, torch.bfloat16, group=comm
    )
    pointers = torch.tensor(
        peer.trtllm_create_ipc_workspace_for_all_reduce(comm.rank, comm.world_size, 64, 256, comm)[0]
    )
    tensor = workspace.workspace_tensor
    ones, rows = torch.ones(1, 8, device=device), torch.arange(8, dtype=torch.int32, device=device).view(8, 1)

    def program(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        doubled = x * 2
        first = peer.allreduce_fusion(doubled, workspace, 1, residual_in=residual, rms_gamma=weight)
        codes, scales = torch.empty_like(x, dtype=torch.uint8), torch.empty(x.shape[0], 1, device=x.device)
        total, norm = torch.empty_like(x), torch.empty_like(x)
        peer.trtllm_allreduce_fusion(
            doubled, comm_size, comm_rank, x.shape[0], x.shape[1], tensor, True, True, True, 11, True, None, residual,
            total, norm, codes, scales, weight, EPS, 0.5, None, workspace_metadata,
        )  # fmt: skip
        moe = peer.allreduce_fusion(
            doubled, workspace, 6, residual_in=residual, rms_gamma=weight, moe_reduction_device_num_experts=1,
            moe_reduction_scale_input=ones, moe_reduction_active_experts_token_input=x,
        )  # fmt: skip
        final = peer.allreduce_fusion(
            doubled, workspace, 7, residual_in=residual, rms_gamma=weight, expanded_idx_to_permuted_idx=rows
        )
        custom = torch.empty_like(x)
        peer.trtllm_custom_all_reduce(
            doubled, custom, comm_size, comm_rank, 8, 0, 4, 0, False, 1, pointers, pointers, pointers, None, None, None,
            None, None, None, None, None, None,
        )  # fmt: skip
        return [first + 1, total, norm * 2, codes, scales, moe, final, custom]

    comm_size, comm_rank, workspace_metadata = comm.world_size, comm.rank, workspace.metadata
    wanted = program(layer.x, layer.residual, layer.weight)
    assert torch.equal(wanted[7].cpu(), reference.total([x * 2 for x in layer.xs]))
    for backend in "aot_eager", "inductor":
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True, backend=backend)
        for _ in range(2):
            for mine, other in zip(compiled(layer.x, layer.residual, layer.weight), wanted):
                torch.testing.assert_close(mine, other)


@check
def calls_of_compiled_programs_keep_their_order(comm: Comm, device: Device) -> None:
    layer, size, rank = Layer(comm, device, 8, 256, torch.bfloat16), comm.world_size, comm.rank
    workspace: Any = peer.create_allreduce_fusion_workspace("auto", size, rank, 64, 256, torch.bfloat16, group=comm)
    pointers = torch.tensor(peer.trtllm_create_ipc_workspace_for_all_reduce(rank, size, 64, 256, comm)[0])
    ones, rows = torch.ones(1, 8, device=device), torch.arange(8, dtype=torch.int32, device=device).view(8, 1)
    common: Any = dict(residual_in=layer.residual, rms_gamma=layer.weight)
    experts: Any = dict(moe_reduction_scale_input=ones, moe_reduction_active_experts_token_input=layer.residual)

    def custom(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        peer.trtllm_custom_all_reduce(
            x, out, size, rank, 8, 0, 4, 0, False, 1, pointers, pointers, pointers, *(None,) * 9
        )
        return out

    calls = [
        lambda x: peer.allreduce_fusion(x, workspace, 1, **common),
        lambda x: peer.allreduce_fusion(x, workspace, 6, moe_reduction_device_num_experts=1, **common, **experts),
        lambda x: peer.allreduce_fusion(x, workspace, 7, expanded_idx_to_permuted_idx=rows, **common),
        custom,
    ]
    group = antiphon.torch.ops.register(comm)

    def program(x: torch.Tensor, waits: bool) -> list[torch.Tensor]:
        """Each call after a sum, which it waits for or not."""
        results = []
        for call in calls:
            total = torch.ops.antiphon.all_reduce(x, group)
            results += [call(x + total if waits else x * 2).sum(), total.sum()]
        return results

    wanted = program(layer.x, rank == 0)
    torch._dynamo.reset()
    for mine, other in zip(torch.compile(program, fullgraph=True)(layer.x, rank == 0), wanted):
        torch.testing.assert_close(mine, other, rtol=2**-6, atol=1)


@check
def calls_in_a_graph(comm: Comm, device: Device) -> None:
    if device.type != "cuda":
        return
    call = Call(comm, device, 64, 2048, torch.bfloat16)
    for pattern in range(12):
        if pattern in (6, 7):
            continue
        call(pattern_code=pattern)
        wanted = [tensor.clone() for tensor in (call.sum, call.residual, call.norm, call.codes)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(5):
                call(pattern_code=pattern)
        graph.replay()
        torch.cuda.synchronize()
        comm.check()
        for mine, other in zip((call.sum, call.residual, call.norm, call.codes), wanted):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    call.workspace.end()


@check
def the_others_in_a_graph(comm: Comm, device: Device) -> None:
    if device.type != "cuda":
        return
    layer, tokens = Layer(comm, device, 16, 1024, torch.bfloat16), 16
    workspace: Any = peer.create_allreduce_fusion_workspace(
        "trtllm", comm.world_size, comm.rank, 64, 1024, torch.bfloat16, group=comm
    )
    size, rank = comm.world_size, comm.rank
    pointers = torch.tensor(peer.trtllm_create_ipc_workspace_for_all_reduce(rank, size, 64, 1024, comm)[0])
    common: Any = dict(residual_in=layer.residual, rms_gamma=layer.weight, rms_eps=EPS, launch_with_pdl=True)
    experts, rows = torch.stack([layer.x, layer.residual]), torch.cat([layer.x, layer.residual])
    weights = torch.linspace(-1, 1, 2 * tokens, device=device).view(2, tokens)
    index = torch.arange(2 * tokens, dtype=torch.int32, device=device).view(tokens, 2)
    out, residual, in_place, kept = (torch.empty_like(layer.x) for _ in range(4))
    short = torch.zeros(8, dtype=torch.uint8, device=device)
    codes = torch.empty(tokens, 512, dtype=torch.uint8, device=device)

    def reduction() -> None:
        peer.allreduce_fusion(
            layer.x, workspace, 6, moe_reduction_device_num_experts=2, moe_reduction_scale_input=weights,
            moe_reduction_active_experts_token_input=experts, norm_out=out, residual_out=residual, **common,
        )  # fmt: skip

    def finalize() -> None:  # with what scripts pass: no room for the scales
        peer.trtllm_moe_finalize_allreduce_fusion(
            rows, layer.residual, layer.weight, index, out, residual, codes, short, workspace.workspace_tensor, True,
            rank, size, EPS, layer.x, None, 2.5,
        )  # fmt: skip

    def custom() -> None:
        peer.trtllm_custom_all_reduce(
            layer.x, out, size, rank, tokens, AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM, AllReduceStrategyType.TWOSHOT,
            0, True, 1, pointers, pointers, pointers, layer.bias, layer.residual, layer.weight, layer.bias, EPS, residual,
            None, None, None,
        )  # fmt: skip

    def everything_in_place() -> None:
        in_place.copy_(layer.x)
        kept.copy_(layer.residual)
        given: Any = {**common, "residual_in": kept, "residual_out": kept, "norm_out": in_place}
        peer.allreduce_fusion(in_place, workspace, 1, **given)

    calls: list[tuple[Any, Any]] = [(call, (out, residual)) for call in (reduction, finalize, custom)]
    for call, results in [*calls, (everything_in_place, (in_place, kept))]:
        call()  # what is captured has been called before
        wanted = [tensor.clone() for tensor in results]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                call()
        for tensor in results:
            tensor.zero_()
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
        comm.check()
        assert all(torch.equal(*pair) for pair in zip(results, wanted)), call.__name__
    assert short.eq(0).all()
    workspace.destroy()


@pytest.mark.parametrize(("device", "world_size"), harness.WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_trtllm_family", name, device, world_size)
