"""``trtllm_allreduce_fusion`` of ``antiphon.comm``, on host memory and on GPUs."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import fused_reference as reference
import harness
import pytest
import torch
from harness import Checks
from test_fusion import Comm, Device, wide
from trtllm import EPS, PATTERNS, Call, quantised

import antiphon
from antiphon import comm as peer
from antiphon.comm import AllReduceFusionPattern, QuantizationSFLayout

CHECKS = check = Checks()


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
    for dtype, tokens, hidden in (torch.bfloat16, 9, 256), (torch.float32, 70, 1040), (torch.float16, 250, 2048):
        call, pattern = Call(comm, device, tokens, hidden, dtype), AllReduceFusionPattern.kARResidualRMSNorm
        start, kept = call.options["allreduce_in"], call.options["residual_in"]
        call(pattern_code=pattern)
        norm, residual = call.norm.clone(), call.residual.clone()
        call(pattern_code=AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant)
        codes = call.codes.clone()
        for use_oneshot in True, False, None:
            x, old = start.clone(), kept.clone()
            call(
                pattern_code=pattern, use_oneshot=use_oneshot, allreduce_in=x, norm_out=x, residual_in=old, residual_out=old
            )
            assert torch.equal(x, norm) and torch.equal(old, residual)
            x = start.clone()
            call(use_oneshot=use_oneshot, allreduce_in=x, allreduce_out=x)
            assert torch.equal(x.cpu(), call.layer.total.flatten())
            x = start.clone()
            quant = AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant
            call(pattern_code=quant, use_oneshot=use_oneshot, allreduce_in=x, residual_out=x)
            assert torch.equal(x, residual) and torch.equal(call.norm, norm)
            assert torch.equal(call.codes.view(torch.uint8), codes.view(torch.uint8))
        call.workspace.end()
    both = torch.zeros(5 * 256, dtype=torch.bfloat16, device=device)
    call = Call(comm, device, 4, 256, torch.bfloat16)
    with pytest.raises(ValueError, match="sum_out and x overlap: they must be apart, or the same, not 2048 bytes at 0x"):
        call(allreduce_in=both[:1024], allreduce_out=both[256:])
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
    refused("x has 512 elements, and 1024 are needed", allreduce_in=call.layer.x.flatten()[:512])
    refused("rank 0 of 9 was passed in", world_size=9, world_rank=0, metadata=None)
    refused("no workspace", workspace_ptrs=torch.zeros_like(call.workspace.tensor), metadata=None)
    refused("metadata lacks tp_size", metadata={"max_token_num": 1, "hidden_dim": 1, "use_fp32_lamport": False})
    refused("512 tokens of 2048 are more than", token_num=512, hidden_dim=2048)
    refused("was made with use_fp32_lamport=True", metadata={**call.workspace.metadata, "use_fp32_lamport": True})
    for changes in ({}, {"metadata": None}):  # a copy of the tensor is as good
        call(workspace_ptrs=call.workspace.tensor.clone(), **changes)
        assert torch.equal(call.sum.cpu(), call.layer.total.flatten())
    call.workspace.end()
    refused("no workspace, or it was destroyed")


@check
def scales_of_tokens_are_of_sums_that_are_rounded_before_the_residual(comm: Comm, device: Device) -> None:
    """As FlashInfer's test computes them, whose ``fp32_acc`` is true."""
    tokens, hidden = 16, 4096
    call = Call(comm, device, tokens, hidden, torch.bfloat16)
    total = torch.stack([x.float() for x in call.layer.xs]).sum(0).to(torch.bfloat16)
    wanted = total.view(tokens, hidden) + call.layer.of_residual.view(tokens, hidden)
    exact = (torch.stack([x.float() for x in call.layer.xs]).sum(0) + call.layer.of_residual.float()).to(torch.bfloat16)
    assert comm.world_size > 2 or not torch.equal(wanted, exact.view(tokens, hidden))
    for pattern in 10, 11:
        call(pattern_code=pattern, fp32_acc=True)
        assert comm.world_size > 2 or torch.equal(call.residual.cpu().view(tokens, hidden), wanted)
    call.workspace.end()


@pytest.mark.parametrize(("device", "world_size"), harness.WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_on(name: str, device: str, world_size: int) -> None:
    harness.expect("test_trtllm", name, device, world_size)


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
