"""Scripts that say ``flashinfer.comm``: what they import, the arguments that they pass by name, tensors that are longer or
of another dtype than they need be, and nothing of ours. On host memory and on GPUs."""

from typing import Any

import harness
import pytest
import torch

import ranks
from antiphon import compat

EPS, TOKENS, HIDDEN = 1e-5, 6, 512


def norm_of(x: torch.Tensor, weight: torch.Tensor, weight_bias: float = 0.0) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (weight_bias + weight.float())


class Tensors:
    """Random tensors that are the same on all ranks, or of which every rank knows every rank's."""

    def __init__(self, device: torch.device, world_size: int, rank: int) -> None:
        self.device, self.world_size, self.rank, self.seed = device, world_size, rank, 0

    def same(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def each(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's, and the sum of all."""
        everybody = [self.same(*shape) for _ in range(self.world_size)]
        return everybody[self.rank], sum(each.float() for each in everybody).to(torch.bfloat16)  # type: ignore[union-attr]

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=5e-2)


def script(device_type: str) -> None:
    compat.install()
    import torch.distributed as dist
    from flashinfer.comm.mnnvl import TorchDistBackend

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = harness.place(device_type, rank)
    tensors = Tensors(device, world_size, rank)
    layers(tensors, dist.group.WORLD)
    forms(tensors, TorchDistBackend())
    mixtures(tensors, dist.group.WORLD)
    first_all_reduce(tensors, dist.group.WORLD)
    if device_type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def layers(tensors: Tensors, group: Any) -> None:
    """Flat tensors for everything, whatever the pattern, and scales without room."""
    import flashinfer.comm as comm

    patterns, layouts = comm.AllReduceFusionPattern, comm.QuantizationSFLayout
    rank, world_size = tensors.rank, tensors.world_size
    handles, pointers, metadata = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, world_size, 64, HIDDEN, group=group, use_fp32_lamport=False, create_metadata=True
    )
    for tokens in 1, TOKENS:
        x, total = tensors.each(tokens * HIDDEN)
        residual, gamma, scale = tensors.same(tokens * HIDDEN), tensors.same(HIDDEN), tensors.same(1, dtype=torch.float32)
        wanted = (total.float() + residual.float()).view(tokens, HIDDEN)
        for code in (
            patterns.kAllReduce,
            patterns.kARResidualRMSNorm,
            patterns.kARResidualRMSNormFP8Quant,
            patterns.kARResidualRMSNormFP4Quant,
            patterns.kARResidualRMSNormOutFP8Quant,
            patterns.kARResidualRMSNormOutFP4Quant,
        ):
            for layout in layouts.LINEAR, layouts.SWIZZLED_128x4, layouts.SWIZZLED_8x4:
                out, residual_out, norm, codes = (tensors.empty(tokens * HIDDEN) for _ in range(4))
                room = 128 * HIDDEN // 16 if layout == layouts.SWIZZLED_128x4 else tokens * HIDDEN // 16
                comm.trtllm_allreduce_fusion(
                    allreduce_in=x,
                    world_size=world_size,
                    world_rank=rank,
                    token_num=tokens,
                    hidden_dim=HIDDEN,
                    workspace_ptrs=pointers,
                    launch_with_pdl=True,
                    use_oneshot=True if tokens <= world_size else None,
                    trigger_completion_at_end=False,
                    fp32_acc=False,
                    pattern_code=code,
                    allreduce_out=out,
                    residual_in=residual,
                    residual_out=residual_out,
                    norm_out=norm,
                    quant_out=codes,
                    scale_out=tensors.empty(room),
                    rms_gamma=gamma,
                    rms_eps=EPS,
                    weight_bias=1.0,
                    scale_factor=scale,
                    layout_code=layout,
                    metadata=metadata,
                )
                if code == patterns.kAllReduce:
                    close(out, total)
                else:
                    close(residual_out.view(tokens, HIDDEN), wanted)
                if code in (patterns.kARResidualRMSNormOutFP8Quant, patterns.kARResidualRMSNormOutFP4Quant):
                    close(norm.view(tokens, HIDDEN), norm_of(wanted, gamma, 1.0))
    comm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, group=group)


def forms(tensors: Tensors, backend: Any) -> None:
    """The one call for all: packed scales in memory that held something, Gemma's norm, everything in place."""
    import flashinfer.comm as comm
    from flashinfer.norm import gemma_fused_add_rmsnorm

    patterns, group = comm.AllReduceFusionPattern, 128
    workspace = comm.create_allreduce_fusion_workspace(
        backend="trtllm", world_size=tensors.world_size, rank=tensors.rank, max_token_num=TOKENS, hidden_dim=640,
        dtype=torch.bfloat16, comm_backend=backend,
    )  # fmt: skip
    for tokens, hidden in (1, 384), (3, 640):
        x, total = tensors.each(tokens, hidden)
        residual, gamma = tensors.same(tokens, hidden), tensors.same(hidden)
        groups, step = hidden // group, -(-tokens // 4) * 4
        packs = -(-groups // 4)
        scales = torch.empty_strided((tokens, packs), (1, step), dtype=torch.int32, device=tensors.device)
        flat = torch.as_strided(scales, (tokens + (packs - 1) * step,), (1,))
        flat.fill_(0x7F7F7F7F)
        residual_out, norm = tensors.empty(tokens, hidden), tensors.empty(tokens, hidden)
        codes = tensors.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
        common: Any = dict(
            workspace=workspace, residual_in=residual, residual_out=residual_out, rms_gamma=gamma, rms_eps=EPS,
            use_oneshot=True, fp32_acc=True,
        )  # fmt: skip
        found = comm.allreduce_fusion(
            input=x,
            pattern=patterns.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
            norm_out=norm,
            quant_out=codes,
            scale_out=scales,
            block_quant_group_size=group,
            **common,
        )
        assert found.data_ptr() == norm.data_ptr()
        grouped = norm.float().cpu().view(tokens, groups, group)
        powers = torch.exp2(torch.ceil(torch.log2((grouped.abs().amax(-1) / 448).clamp(min=1e-10))))
        wanted = (grouped / powers.unsqueeze(-1)).clamp(-448, 448).view(tokens, hidden).to(torch.float8_e4m3fn)
        assert torch.equal(codes.cpu().view(torch.uint8), wanted.view(torch.uint8))
        parts = torch.zeros(flat.numel() * 4, dtype=torch.uint8)
        for token in range(tokens):
            for index in range(groups):
                place = (index // 4 * step + token) * 4 + index % 4
                parts[place] = int(torch.log2(powers[token, index])) + 127
        assert torch.equal(flat.cpu().clone().view(torch.uint8), parts)

        of_tokens = tensors.empty(tokens, 1, dtype=torch.float32)
        comm.allreduce_fusion(
            input=x, pattern=patterns.kARResidualRMSNormDynamicFP8Quant, quant_out=codes, scale_out=of_tokens, **common
        )
        most = norm.float().abs().amax(-1, keepdim=True)
        torch.testing.assert_close(of_tokens, (most / 448).clamp(min=1 / 512 / 448), rtol=1e-3, atol=0)

        comm.allreduce_fusion(input=x, pattern=patterns.kARResidualRMSNorm, norm_out=norm, weight_bias=1.0, **common)
        gemma, sums = total.clone(), residual.clone()
        gemma_fused_add_rmsnorm(gemma, sums, gamma, eps=EPS)
        close(norm, gemma)
        close(residual_out, sums)

        hidden_states, stream = x.clone(), residual.clone()
        in_place: Any = {**common, "residual_in": stream, "residual_out": stream}
        comm.allreduce_fusion(
            input=hidden_states, pattern=patterns.kARResidualRMSNorm, launch_with_pdl=True, output=None,
            norm_out=hidden_states, quant_out=None, scale_out=None, scale_factor=None, layout_code=None, **in_place,
        )  # fmt: skip
        assert torch.equal(stream, residual_out)
        close(hidden_states, norm_of(stream, gamma))
    workspace.destroy()


def mixtures(tensors: Tensors, group: Any) -> None:
    """Flat tensors, codes and scales of the dtype of the layer, and the other kind's function for the end."""
    import flashinfer.comm as comm
    from flashinfer.comm import AllReduceFusionPattern, TRTLLMAllReduceFusionWorkspace, allreduce_fusion

    rank, world_size, dtype = tensors.rank, tensors.world_size, torch.bfloat16
    handles, pointers = comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(rank, world_size, 64, HIDDEN, group=group)
    num_experts, size = 3, TOKENS * HIDDEN
    experts, shared, residual = tensors.same(num_experts * size), tensors.same(size), tensors.same(size)
    weights, gamma = tensors.same(num_experts * TOKENS, dtype=torch.float32), tensors.same(HIDDEN)
    local = (experts.view(num_experts, TOKENS, HIDDEN).float() * weights.view(num_experts, TOKENS, 1)).sum(0)
    total = (local + shared.view(TOKENS, HIDDEN).float()).to(dtype).float() * world_size
    for layout in comm.FP4QuantizationSFLayout.LINEAR, comm.FP4QuantizationSFLayout.SWIZZLED_128x4:
        sum_out, residual_out, norm = tensors.empty(size), tensors.empty(size), tensors.empty(size)
        room = comm.compute_fp4_swizzled_layout_sf_size(TOKENS, HIDDEN // 16)
        comm.trtllm_moe_allreduce_fusion(
            world_size=world_size,
            world_rank=rank,
            token_num=TOKENS,
            hidden_dim=HIDDEN,
            workspace_ptrs=pointers,
            launch_with_pdl=False,
            residual_in=residual,
            rms_gamma=gamma,
            rms_eps=EPS,
            scale_factor=-0.25,
            moe_reduction_device_num_experts=num_experts,
            moe_reduction_scale_input=weights,
            moe_reduction_active_experts_token_input=experts,
            moe_reduction_token_input=shared,
            layout_code=layout,
            moe_allreduce_out=sum_out,
            residual_out=residual_out,
            norm_out=norm,
            quant_out=tensors.empty(size // 4),
            scale_out=tensors.empty(room),
        )
        close(sum_out.view(TOKENS, HIDDEN), total)
        wanted = total + residual.view(TOKENS, HIDDEN).float()
        close(residual_out.view(TOKENS, HIDDEN), wanted)
        close(norm.view(TOKENS, HIDDEN), norm_of(residual_out.view(TOKENS, HIDDEN), gamma))

    top_k = 2
    rows, shared, residual = (tensors.same(count, HIDDEN) for count in (TOKENS * top_k, TOKENS, TOKENS))
    factors, index = tensors.same(TOKENS, top_k), torch.arange(TOKENS * top_k, dtype=torch.int32).flip(0)
    index = index.view(TOKENS, top_k).to(tensors.device)
    routed = (rows[index].float() * factors.float().unsqueeze(-1)).sum(1)
    residual_out, norm = torch.empty_like(residual), torch.empty_like(residual)
    comm.trtllm_moe_finalize_allreduce_fusion(
        allreduce_in=rows,
        residual_in=residual,
        norm_weight=gamma,
        expanded_idx_to_permuted_idx=index,
        workspace_ptrs=pointers,
        launch_with_pdl=True,
        world_rank=rank,
        world_size=world_size,
        eps=EPS,
        shared_expert_output=shared,
        expert_scale_factor=factors,
        norm_out=norm,
        residual_out=residual_out,
        quant_out=tensors.empty(size // 4),
        scale_out=tensors.empty(size // 16),
        routed_scaling_factor=2.5,
    )
    close(residual_out, (routed * 2.5 + shared.float()).to(dtype).float() * world_size + residual.float())
    close(norm, norm_of(residual_out, gamma))
    comm.trtllm_destroy_ipc_workspace_for_all_reduce(handles, group=group)

    workspace = TRTLLMAllReduceFusionWorkspace(
        tp_size=world_size, tp_rank=rank, max_token_num=64, hidden_dim=HIDDEN, dtype=dtype
    )
    common: Any = dict(
        workspace=workspace, launch_with_pdl=True, residual_in=residual, residual_out=residual_out, norm_out=norm,
        rms_gamma=gamma, rms_eps=EPS,
    )  # fmt: skip
    found = allreduce_fusion(
        input=rows,
        pattern=AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        expanded_idx_to_permuted_idx=index,
        expert_scale_factor=factors,
        shared_expert_output=None,
        **common,
    )
    assert found.data_ptr() == norm.data_ptr()
    close(residual_out, routed.to(dtype).float() * world_size + residual.float())
    allreduce_fusion(
        input=shared,
        pattern=AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
        moe_reduction_device_num_experts=top_k,
        moe_reduction_scale_input=tensors.same(TOKENS, top_k, dtype=torch.float32),  # in an order that nobody checks
        moe_reduction_active_experts_token_input=rows,
        moe_reduction_token_input=shared,
        **common,
    )
    assert norm.isfinite().all() and residual_out.isfinite().all()
    workspace.destroy()


def first_all_reduce(tensors: Tensors, group: Any) -> None:
    """Addresses as tensors on the host, flags that are counted, buffers that are initialised again."""
    import flashinfer.comm as comm

    rank, world_size, flag = tensors.rank, tensors.world_size, 0
    workspace = comm.trtllm_create_ipc_workspace_for_all_reduce(
        rank=rank, tp_size=world_size, max_token_num=64, hidden_dim=HIDDEN, group=group
    )
    size = world_size * comm.trtllm_ar.LamportTokenNumThreshold * world_size * HIDDEN * 2
    comm.trtllm_lamport_initialize_all(*(workspace[part][rank] for part in (4, 5, 6)), size // 2, torch.float16)
    addresses = [torch.tensor(part, dtype=torch.int64) for part in workspace]
    bias, gamma, residual = tensors.same(HIDDEN), tensors.same(HIDDEN), tensors.same(TOKENS * HIDDEN)
    for strategy in comm.AllReduceStrategyType.ONESHOT, comm.AllReduceStrategyType.TWOSHOT:
        for config in 0, comm.AllReduceStrategyConfig.USE_MEMCPY, comm.AllReduceStrategyConfig.PUSH_MODE:
            for operation in comm.AllReduceFusionOp.NONE, comm.AllReduceFusionOp.RESIDUAL_RMS_NORM:
                x, total = tensors.each(TOKENS * HIDDEN)
                out, middle, flag = torch.empty_like(x), torch.zeros_like(x), flag + 1
                comm.trtllm_custom_all_reduce(
                    inp=x,
                    out=out,
                    tp_size=world_size,
                    tp_rank=rank,
                    token_num=TOKENS,
                    fusion_op_code=operation,
                    strategy_code=strategy,
                    config_code=config,
                    launch_with_pdl=False,
                    flag_value=flag,
                    peer_comm_buffer_ptrs=addresses[0],
                    peer_barrier_ptrs_in=addresses[2],
                    peer_barrier_ptrs_out=addresses[3],
                    bias=bias,
                    residual=residual,
                    weight=gamma,
                    weight_pre_residual_norm=gamma,
                    eps=EPS,
                    intermediate_buffer=middle,
                    lamport_peer_comm_buffer_ptrs_0=addresses[4],
                    lamport_peer_comm_buffer_ptrs_1=addresses[5],
                    lamport_peer_comm_buffer_ptrs_2=addresses[6],
                )
                if operation == comm.AllReduceFusionOp.NONE:
                    close(out, total)
                    continue
                wanted = (total.float() + residual.float()).view(TOKENS, HIDDEN) + bias.float()
                close(middle.view(TOKENS, HIDDEN), wanted)
                close(out.view(TOKENS, HIDDEN), norm_of(wanted, gamma))
    comm.trtllm_destroy_ipc_workspace_for_all_reduce(workspace, group=group)


@pytest.mark.parametrize(("device", "world_size"), harness.WORLDS)
def test_scripts_run(device: str, world_size: int) -> None:
    harness.need(device, world_size)
    ranks.processes(world_size, script, device)
