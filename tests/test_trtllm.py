"""TensorRT-LLM's names in ``antiphon.comm``, on host memory and on GPUs."""

import gc
import os
import tempfile
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import fused_reference as reference
import pytest
import torch
import worlds
from test_fusion import WORLDS, Comm, Device, Layer, indices, random, wide
from worlds import Checks

import antiphon
import ranks
from antiphon import comm as peer
from antiphon.comm import AllReduceFusionOp, AllReduceFusionPattern, AllReduceStrategyType, QuantizationSFLayout

CHECKS = check = Checks()

EPS, GROUP = 1e-5, 64
PATTERNS = {
    value: name.removeprefix("kAR") for name, value in vars(AllReduceFusionPattern).items() if name.startswith("kAR")
}


class Workspace:
    """What scripts make before their first call."""

    def __init__(self, comm: Comm, dtype: torch.dtype = torch.bfloat16) -> None:
        self.handles, self.tensor, self.metadata = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion(
            comm.rank,
            comm.world_size,
            256,
            2048,
            use_fp32_lamport=dtype == torch.float32,
            group=comm,
            create_metadata=True,
        )

    def end(self) -> None:
        peer.trtllm_destroy_ipc_workspace_for_all_reduce(self.handles)


class Call:
    """A call with all the tensors that scripts pass, whatever the pattern: as long as those of FlashInfer's tests."""

    def __init__(self, comm: Comm, device: Device, tokens: int, hidden: int, dtype: torch.dtype) -> None:
        self.comm, self.tokens, self.hidden = comm, tokens, hidden
        self.workspace = Workspace(comm, dtype)
        self.layer = layer = Layer(comm, device, tokens, hidden, dtype)

        def empty(size: int = tokens * hidden) -> torch.Tensor:
            return torch.full((size,), 7, dtype=dtype, device=device)

        self.sum, self.residual, self.norm, self.codes = empty(), empty(), empty(), empty()
        self.scales = empty(-(-tokens // 128) * 128 * (-(-hidden // 64) * 4))
        self.options: dict[str, Any] = dict(
            allreduce_in=layer.x.flatten(),
            world_size=comm.world_size,
            world_rank=comm.rank,
            token_num=tokens,
            hidden_dim=hidden,
            workspace_ptrs=self.workspace.tensor,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            fp32_acc=True,
            pattern_code=AllReduceFusionPattern.kAllReduce,
            use_oneshot=None,
            allreduce_out=self.sum,
            residual_in=layer.residual.flatten(),
            residual_out=self.residual,
            norm_out=self.norm,
            quant_out=self.codes,
            scale_out=self.scales,
            rms_gamma=layer.weight,
            rms_eps=EPS,
            scale_factor=torch.tensor([0.25], device=device),
            layout_code=QuantizationSFLayout.LINEAR,
            metadata=self.workspace.metadata,
            block_quant_group_size=GROUP,
        )

    def __call__(self, **changes: Any) -> None:
        for tensor in self.sum, self.residual, self.norm, self.codes, self.scales:
            tensor.view(torch.uint8).fill_(0x11)
        peer.trtllm_allreduce_fusion(**{**self.options, **changes})

    def is_untouched(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.view(torch.uint8).eq(0x11).all())

    def bytes_of(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """The first bytes; those after them must be untouched."""
        raw = tensor.view(torch.uint8).cpu()
        assert raw[size:].eq(0x11).all()
        return raw[:size]


def quantised(norm: torch.Tensor, pattern: str, layout: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bytes of the codes, and of the scales."""
    if "PerTokenGroup" in pattern:
        codes, exponents = reference.fp8_groups(norm, GROUP)
        tokens, groups = exponents.shape
        packs, step = -(-groups // 4), -(-tokens // 4) * 4
        packed = torch.zeros(packs * step * 4, dtype=torch.uint8)
        for group in range(groups):
            packed[torch.arange(tokens) * 4 + group // 4 * step * 4 + group % 4] = exponents[:, group]
        return codes, packed[: (tokens + (packs - 1) * step) * 4]
    if "DynamicFP8" in pattern:
        codes, scales = reference.fp8_tokens(norm)
        return codes, scales.flatten().view(torch.uint8)
    if "FP8" in pattern:
        return reference.e4m3(norm.float() * (1 / 0.25)), None
    codes, scales = reference.nvfp4(norm, 0.25)
    return codes, reference.placed(scales, layout)


@check
def every_pattern(comm: Comm, device: Device) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens, hidden in (1, 256), (5, 640), (130, 256):
            call = Call(comm, device, tokens, hidden, dtype)
            call()
            assert torch.equal(call.sum.cpu(), call.layer.total.flatten())
            assert all(map(call.is_untouched, (call.residual, call.norm, call.codes, call.scales)))
            before = wide(call.layer.total, call.layer.of_residual)
            for code, name in PATTERNS.items():
                if "FP4" in name and dtype == torch.float32:
                    with pytest.raises(ValueError, match="f16 or bf16 for FP4"):
                        call(pattern_code=code)
                    continue
                call(pattern_code=AllReduceFusionPattern.kARResidualRMSNorm)
                norm = call.norm.cpu().clone().view(tokens, hidden)
                reference.close(norm, reference.rms_norm(before, call.layer.of_weight, EPS))
                for layout in (0, 1, 2) if "FP4" in name else (0,):
                    call(pattern_code=code, layout_code=layout)
                    assert call.is_untouched(call.sum)
                    assert torch.equal(call.residual.cpu().view(tokens, hidden), before)
                    if name == "ResidualRMSNorm" or "Out" in name:
                        assert torch.equal(call.norm.cpu().view(tokens, hidden), norm)
                    else:
                        assert call.is_untouched(call.norm)
                    if name == "ResidualRMSNorm":
                        assert call.is_untouched(call.codes)
                        continue
                    codes, scales = quantised(norm, name, layout)
                    assert torch.equal(call.bytes_of(call.codes, codes.numel()), codes.flatten())
                    if scales is None:
                        assert call.is_untouched(call.scales)
                    else:
                        assert torch.equal(call.bytes_of(call.scales, scales.numel()), scales)
            call.workspace.end()


@check
def algorithms_and_accumulation(comm: Comm, device: Device) -> None:
    call = Call(comm, device, 12, 512, torch.bfloat16)
    for use_oneshot in (True, False, None):
        call(use_oneshot=use_oneshot)
        assert torch.equal(call.sum.cpu(), call.layer.total.flatten())
        call(use_oneshot=use_oneshot, fp32_acc=False)
        assert torch.equal(call.sum.cpu(), reference.total(call.layer.xs, rounded=True).flatten())
    with pytest.raises(AssertionError, match="larger than tp_size"):
        call(use_oneshot=False, token_num=comm.world_size)
    call(use_oneshot=True, token_num=1)  # of more memory than that
    assert torch.equal(call.sum[:512].cpu(), call.layer.total[0])
    call.workspace.end()


@check
def norms_of_gemma_and_scales_of_any_kind(comm: Comm, device: Device) -> None:
    call = Call(comm, device, 3, 256, torch.bfloat16)
    call(pattern_code=AllReduceFusionPattern.kARResidualRMSNorm, weight_bias=1.0, rms_eps=None)
    before = wide(call.layer.total, call.layer.of_residual)
    reference.close(call.norm.view(3, 256), reference.rms_norm(before, call.layer.of_weight, 0.0, 1.0))
    found = []
    for scale in (0.25, torch.tensor(0.25, dtype=torch.float64, device=device), torch.tensor([0.25]).half()):
        call(pattern_code=AllReduceFusionPattern.kARResidualRMSNormFP8Quant, scale_factor=scale)
        found.append(call.codes.clone().view(torch.uint8))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    call.workspace.end()


@check
def outputs_in_the_place_of_inputs(comm: Comm, device: Device) -> None:
    call = Call(comm, device, 9, 256, torch.bfloat16)
    pattern = AllReduceFusionPattern.kARResidualRMSNorm
    call(pattern_code=pattern)
    norm, residual = call.norm.clone(), call.residual.clone()
    x, old = call.options["allreduce_in"].clone(), call.options["residual_in"].clone()
    call(pattern_code=pattern, allreduce_in=x, norm_out=x, residual_in=old, residual_out=old)
    assert torch.equal(x, norm) and torch.equal(old, residual)
    x = call.options["allreduce_in"].clone()
    call(allreduce_in=x, allreduce_out=x)
    assert torch.equal(x.cpu(), call.layer.total.flatten())
    call.workspace.end()


@check
def scales_without_room(comm: Comm, device: Device) -> None:
    call, pattern = Call(comm, device, 1, 1024, torch.bfloat16), AllReduceFusionPattern.kARResidualRMSNormFP4Quant
    call(pattern_code=pattern, layout_code=QuantizationSFLayout.SWIZZLED_8x4)
    wanted, small = call.codes.clone(), torch.full((64,), 7, dtype=torch.bfloat16, device=device)
    peer._tensors._has_warned = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            call(pattern_code=pattern, layout_code=QuantizationSFLayout.SWIZZLED_8x4, scale_out=small)
            assert torch.equal(call.codes, wanted) and small.eq(7).all()
    assert ["128 bytes, and the scales take 512" in str(each.message) for each in said] == [True]
    with pytest.raises(ValueError, match="scales must be at least 8192 bytes, not 128"):
        call(pattern_code=pattern, layout_code=QuantizationSFLayout.SWIZZLED_128x4, scale_out=small)
    call.workspace.end()


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
def tensors_that_a_pattern_lacks(comm: Comm, device: Device) -> None:
    call = Call(comm, device, 4, 256, torch.bfloat16)

    def refused(text: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=text):
            call(**changes)

    refused("trtllm_allreduce_fusion: allreduce_out must be given", allreduce_out=None)
    refused("residual_in, rms_gamma must be given", pattern_code=1, residual_in=None, rms_gamma=None)
    refused("norm_out must be given", pattern_code=1, norm_out=None)
    refused("quant_out must be given", pattern_code=2, quant_out=None)
    refused("scale_factor must be given", pattern_code=2, scale_factor=None)
    refused("scale_out must be given", pattern_code=3, scale_out=None)
    refused("block_quant_group_size must be given", pattern_code=8, block_quant_group_size=None)
    refused("pattern 6 is one of trtllm_moe_allreduce_fusion", pattern_code=6)
    refused("pattern 12 is unknown", pattern_code=12)
    refused("allreduce_in has 512 elements, and 1024 are needed", allreduce_in=call.layer.x.flatten()[:512])
    refused("rank 0 of 9 was passed in", world_size=9, world_rank=0, metadata=None)
    refused("no workspace", workspace_ptrs=torch.zeros_like(call.workspace.tensor), metadata=None)
    refused("metadata lacks tp_size", metadata={"max_token_num": 1, "hidden_dim": 1, "use_fp32_lamport": False})
    refused("512 tokens of 2048 are more than", token_num=512, hidden_dim=2048)
    refused("use_fp32_lamport is True", metadata={**call.workspace.metadata, "use_fp32_lamport": True})
    for changes in ({}, {"metadata": None}):  # a copy of the tensor is as good
        call(workspace_ptrs=call.workspace.tensor.clone(), **changes)
        assert torch.equal(call.sum.cpu(), call.layer.total.flatten())
    call.workspace.end()
    refused("no workspace, or it was destroyed")


@check
def workspaces(comm: Comm, device: Device) -> None:
    create, rank, size = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion, comm.rank, comm.world_size
    handles, tensor = create(rank, size, 64, 256, group=comm)
    assert [len(part) for part in handles] == [size] * 3 and tensor.dtype == torch.int64
    assert tensor.tolist()[:-1] == [pointer for part in handles for pointer in part]
    assert tensor.numel() == 3 * size + 1 == len(set(tensor.tolist())) and tensor.device == device
    other, _, metadata = create(rank, size, 64, 256, True, comm, True)
    assert metadata["lamport_comm_size"] == size * 64 * 256 * 4 and metadata["lamport_buffer_size"] == 3 * size * 65536
    assert not {pointer for part in handles for pointer in part} & {pointer for part in other for pointer in part}
    with_memory = create(rank, size, 64, 256, group=comm, create_metadata=True, use_symm_dev_mem=True)
    assert len(with_memory) == 4 and with_memory[2] == [] and with_memory[3]["control_flag_ptr"] == with_memory[1][-1]
    with pytest.raises(ValueError, match="create_metadata"):
        create(rank, size, 64, 256, group=comm, use_symm_dev_mem=True)
    with pytest.raises(ValueError, match=f"rank {rank} of {size + 1} was passed in, but the group has"):
        create(rank, size + 1, 64, 256, group=comm)
    for destroy in (
        peer.trtllm_destroy_ipc_workspace_for_all_reduce,
        peer.trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    ):
        for workspace in (handles, handles, [[1, 2, 3]], []):
            destroy(workspace, group=comm)
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(other)
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(with_memory[0])

    def again(times: int) -> None:
        for _ in range(times):
            workspace: Any = peer.create_allreduce_fusion_workspace(
                "auto", size, rank, 64, 256, torch.bfloat16, group=comm
            )
            workspace.destroy()
            peer.trtllm_destroy_ipc_workspace_for_all_reduce(
                peer.trtllm_create_ipc_workspace_for_all_reduce(rank, size, 64, 256, comm)
            )

    def used() -> tuple[int, int, int, int]:
        gc.collect()
        found = peer._workspaces
        files = len(os.listdir("/proc/self/fd"))
        return tracemalloc.get_traced_memory()[0], files, len(found._found), sum(map(len, found._owned.values()))

    tracemalloc.start()
    again(50)
    before = used()
    again(300)
    after = used()
    tracemalloc.stop()
    grown = after[0] - before[0]
    assert after[1:] == before[1:] and grown < 300 * 50, f"{grown} bytes"


@check
def negative_zeros_in_memory(comm: Comm, device: Device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        memory = [torch.ones(24, dtype=dtype, device=device) for _ in range(3)]
        peer.trtllm_lamport_initialize(memory[0].data_ptr(), 16, dtype)
        assert memory[0][:16].eq(0).all() and memory[0][:16].signbit().all() and memory[0][16:].eq(1).all()
        peer.trtllm_lamport_initialize_all(*(each.data_ptr() for each in memory), 24, dtype)
        assert all(each.eq(0).all() and each.signbit().all() for each in memory)
    peer.trtllm_lamport_initialize(1, 0, torch.float16)
    with pytest.raises(NotImplementedError, match="torch.int32 is not float32"):
        peer.trtllm_lamport_initialize(memory[0].data_ptr(), 1, torch.int32)


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


@pytest.mark.parametrize(("device", "world_size"), WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    worlds.expect("test_trtllm", name, device, world_size)


def in_groups(device_type: str) -> int:
    """Two groups of two ranks, each with workspaces of its own; a rank's device is the current one."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, mine = dist.get_rank(), dist.get_rank() % 2
    device = worlds.place(device_type, rank)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    backend = peer.mnnvl.TorchDistBackend(group)
    assert (backend.Get_rank(), backend.Get_size()) == (mine, 2) and backend.bcast(rank, 1) == rank // 2 * 2 + 1
    x = torch.full((4, 256), float(rank + 1), device=device)
    for options in ({"comm_backend": backend}, {"group": group}):
        workspace: Any = peer.create_allreduce_fusion_workspace(
            backend="trtllm", world_size=2, rank=mine, max_token_num=64, hidden_dim=256, dtype=torch.float32, **options
        )
        assert peer.allreduce_fusion(x, workspace, 0).eq(3 if rank < 2 else 7).all()
        workspace.destroy()
    pointers = peer.trtllm_create_ipc_workspace_for_all_reduce(mine, 2, 64, 256, group=group)
    _, everybody = peer.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, 4, 64, 256, True)
    total = torch.empty_like(x)
    peer.trtllm_allreduce_fusion(
        x, 4, rank, 4, 256, everybody, False, False, True, 0, True, total, *[None] * 7, EPS, None, None
    )
    assert total.eq(10).all()
    peer.trtllm_destroy_ipc_workspace_for_all_reduce(pointers)
    halves = peer.mnnvl.TorchDistBackend().Split(rank % 2, 0)
    assert (halves.Get_rank(), halves.allgather(rank)) == (rank // 2, [rank % 2, 2 + rank % 2])
    # What was made for a group ends with it.
    del groups, group, backend, workspace, halves, options
    dist.destroy_process_group()
    gc.collect()
    return len(peer._workspaces._found) + len(peer._workspaces._owned)


@pytest.mark.parametrize("device", worlds.DEVICES)
def test_groups_have_workspaces_of_their_own(device: str) -> None:
    worlds.need(device, 4)
    assert ranks.processes(4, in_groups, device) == [0, 0, 0, 0]


def test_every_name_of_the_peers_page_is_served() -> None:
    names = """create_shared_buffer free_shared_buffer pack_strided_memory Mapping AllReduceStrategyType
        AllReduceStrategyConfig AllReduceFusionOp AllReduceFusionPattern FP4QuantizationSFLayout
        compute_fp4_swizzled_layout_sf_size trtllm_custom_all_reduce trtllm_allreduce_fusion
        trtllm_create_ipc_workspace_for_all_reduce trtllm_create_ipc_workspace_for_all_reduce_fusion
        trtllm_destroy_ipc_workspace_for_all_reduce trtllm_destroy_ipc_workspace_for_all_reduce_fusion
        trtllm_lamport_initialize trtllm_lamport_initialize_all trtllm_moe_allreduce_fusion
        trtllm_moe_finalize_allreduce_fusion vllm_init_custom_ar vllm_all_reduce vllm_dispose vllm_register_buffer
        vllm_register_graph_buffers vllm_get_graph_buffer_ipc_meta vllm_meta_size""".split()
    assert [name for name in names if name not in peer.__all__] == []
    constants = peer.trtllm_ar
    assert (constants.OneShotMaxToken, constants.MAX_ALL_REDUCE_BLOCKS, constants.BarrierFlagCount) == (128, 24, 256)
    assert (constants.LamportTokenNumThreshold, constants.MAX_COMM_SIZE) == (16, 2145386496)


def test_torch_finds_no_fault_with_the_operator() -> None:
    with tempfile.TemporaryDirectory() as folder:
        with antiphon.init(rank=0, world_size=1, path=Path(folder) / "world") as comm:
            call = Call(comm, torch.device("cpu"), 2, 64, torch.bfloat16)
            names = ["allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma"]
            tensors = [call.options[name] for name in names]
            for pattern in (0, 1, 5):
                start = call.options["allreduce_in"], call.workspace.tensor, 1, 0, 2, 64, True, pattern, None
                arguments = (*start, *tensors, EPS, None, 0.25, 0, None, None, None)
                torch.library.opcheck(torch.ops.antiphon.trtllm_allreduce_fusion.default, arguments)
