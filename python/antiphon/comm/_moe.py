"""The all-reduces after a mixture of experts. After FlashInfer 0.6.18 comm/trtllm_ar.py."""

from typing import TYPE_CHECKING

from antiphon.comm._tensors import apart, factor, fp4_scales, missing, parted, refusing_as
from antiphon.comm._workspaces import of_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"]

_REDUCTION, _FINALIZE = "trtllm_moe_allreduce_fusion", "trtllm_moe_finalize_allreduce_fusion"


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: "torch.Tensor",
    launch_with_pdl: bool,
    residual_in: "torch.Tensor | None",
    rms_gamma: "torch.Tensor | None",
    rms_eps: float | None,
    scale_factor: "float | torch.Tensor | None",
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: "torch.Tensor",
    moe_reduction_active_experts_token_input: "torch.Tensor",
    moe_reduction_token_input: "torch.Tensor",
    layout_code: int | None,
    moe_allreduce_out: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    norm_out: "torch.Tensor | None",
    quant_out: "torch.Tensor | None",
    scale_out: "torch.Tensor | None",
    weight_bias: float | None = None,
) -> None:
    """The sum over the ranks of what their experts computed for every token, weighted, and of the shared expert's.

    The experts' outputs are ``[experts, token_num, hidden_dim]``, their weights float32 ``[experts, token_num]``,
    ``moe_reduction_token_input`` ``[token_num, hidden_dim]``, as are the outputs: ``moe_allreduce_out`` is the sum,
    ``residual_out`` that with ``residual_in``, ``norm_out`` its norm, and ``quant_out`` with ``scale_out`` its FP4
    form, as in pattern 3 of :func:`trtllm_allreduce_fusion`. At least one is needed. Sums are accumulated in
    float32 and rounded once. ``launch_with_pdl`` has no effect.

    Raises ``ValueError`` that names what is missing or too small, and as :func:`trtllm_allreduce_fusion`.
    """
    import torch

    tensor, number = parted(scale_factor)
    call = torch.ops.antiphon.trtllm_moe_allreduce_fusion if torch.compiler.is_compiling() else run_reduction
    call(
        workspace_ptrs,
        world_size,
        world_rank,
        token_num,
        hidden_dim,
        residual_in,
        rms_gamma,
        rms_eps,
        tensor,
        number,
        moe_reduction_device_num_experts,
        moe_reduction_scale_input,
        moe_reduction_active_experts_token_input,
        moe_reduction_token_input,
        layout_code,
        moe_allreduce_out,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        weight_bias,
    )


@refusing_as(_REDUCTION)
def run_reduction(
    workspace: "torch.Tensor",
    world_size: int,
    world_rank: int,
    tokens: int,
    hidden: int,
    residual: "torch.Tensor | None",
    weight: "torch.Tensor | None",
    eps: float | None,
    scale_tensor: "torch.Tensor | None",
    scale: float | None,
    num_experts: int,
    expert_scales: "torch.Tensor",
    experts: "torch.Tensor",
    shared: "torch.Tensor",
    layout: int | None,
    sum_out: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    norm_out: "torch.Tensor | None",
    codes: "torch.Tensor | None",
    scales: "torch.Tensor | None",
    weight_bias: float | None,
) -> None:
    """The call, eager."""
    import torch

    comm = of_tensor(_REDUCTION, workspace, world_size, world_rank)
    _check_outputs(_REDUCTION, residual, weight, residual_out, norm_out, codes, scales, sum_out)
    for name, given, count in (
        ("moe_reduction_token_input", shared, tokens * hidden),
        ("moe_reduction_active_experts_token_input", experts, num_experts * tokens * hidden),
        ("moe_reduction_scale_input", expert_scales, num_experts * tokens),
    ):
        if given.numel() != count:
            what = f"{num_experts} experts, {tokens} tokens of {hidden}"
            raise ValueError(f"{_REDUCTION}: {name} has {given.numel()} elements, not {count}: {what}")
    if codes is not None and scales is not None:
        scales = fp4_scales(_REDUCTION, scales, tokens, hidden, layout or 0)
    comm.all_reduce_fused(
        experts=experts,
        expert_scales=expert_scales.to(torch.float32),
        shared=apart(shared, sum_out, residual_out, norm_out, codes),
        hidden=hidden,
        residual=residual,
        weight=weight,
        weight_bias=weight_bias or 0.0,
        eps=eps or 0.0,
        quantize=None if codes is None else "nvfp4",
        scale=factor(scale_tensor, scale, shared),
        scale_layout=layout or 0,
        sum_out=sum_out,
        residual_out=residual_out,
        norm_out=norm_out,
        codes=codes,
        scales=None if codes is None else scales,
    )


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: "torch.Tensor",
    residual_in: "torch.Tensor",
    norm_weight: "torch.Tensor",
    expanded_idx_to_permuted_idx: "torch.Tensor",
    norm_out: "torch.Tensor | None" = None,
    residual_out: "torch.Tensor | None" = None,
    quant_out: "torch.Tensor | None" = None,
    scale_out: "torch.Tensor | None" = None,
    workspace_ptrs: "torch.Tensor | None" = None,
    launch_with_pdl: bool = False,
    world_rank: int | None = None,
    world_size: int | None = None,
    eps: float | None = 1e-6,
    shared_expert_output: "torch.Tensor | None" = None,
    expert_scale_factor: "torch.Tensor | None" = None,
    routed_scaling_factor: float | None = None,
    weight_bias: float | None = None,
    *,
    scale_factor: "float | torch.Tensor | None" = None,
    layout_code: int | None = None,
    workspace: "torch.Tensor | None" = None,
) -> None:
    """The sum over the ranks of what their experts computed for the tokens that were sent to them.

    ``allreduce_in`` has a row for each of these, ``[rows, hidden]``; ``expanded_idx_to_permuted_idx``, int32 ``[tokens,
    top_k]``, says which are a token's, and −1 where the expert is on another rank; ``expert_scale_factor`` ``[tokens,
    top_k]`` has their weights (1 without). Their sum is multiplied by ``routed_scaling_factor`` (1), and
    ``shared_expert_output`` ``[tokens, hidden]`` added. Then as :func:`trtllm_moe_allreduce_fusion`; tokens and hidden
    size are those of ``residual_in``. At least one of the outputs is needed.

    ``scale_factor`` (1) and ``layout_code`` (0) of ``quant_out`` are not in FlashInfer, whose codes are of a scale that
    no caller has set. Where neither is given, a ``scale_out`` without room for the scales is left alone, with one warning.
    ``workspace`` is another name of ``workspace_ptrs``. Raises as :func:`trtllm_moe_allreduce_fusion`.
    """
    import torch

    workspace = workspace_ptrs if workspace is None else workspace
    if workspace is None:
        raise missing(_FINALIZE, workspace_ptrs=workspace)
    tensor, number = parted(scale_factor)
    call = torch.ops.antiphon.trtllm_moe_finalize_allreduce_fusion if torch.compiler.is_compiling() else run_finalize
    call(
        allreduce_in,
        residual_in,
        norm_weight,
        expanded_idx_to_permuted_idx,
        norm_out,
        residual_out,
        quant_out,
        scale_out,
        workspace,
        world_rank,
        world_size,
        eps,
        shared_expert_output,
        expert_scale_factor,
        routed_scaling_factor,
        weight_bias,
        tensor,
        number,
        layout_code,
    )


@refusing_as(_FINALIZE)
def run_finalize(
    rows: "torch.Tensor",
    residual: "torch.Tensor",
    weight: "torch.Tensor",
    index: "torch.Tensor",
    norm_out: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    codes: "torch.Tensor | None",
    scales: "torch.Tensor | None",
    workspace: "torch.Tensor",
    world_rank: int | None,
    world_size: int | None,
    eps: float | None,
    shared: "torch.Tensor | None",
    expert_scales: "torch.Tensor | None",
    routed_scaling: float | None,
    weight_bias: float | None,
    scale_tensor: "torch.Tensor | None",
    scale: float | None,
    layout: int | None,
) -> None:
    """The call, eager."""
    import torch

    comm = of_tensor(_FINALIZE, workspace, world_size, world_rank)
    _check_outputs(_FINALIZE, residual, weight, residual_out, norm_out, codes, scales, None)
    if residual.dim() != 2 or index.dim() != 2 or index.shape[0] != residual.shape[0]:
        shapes = f"{list(residual.shape)} and {list(index.shape)}"
        raise ValueError(f"{_FINALIZE}: residual_in and expanded_idx_to_permuted_idx are {shapes}, not rows of tokens")
    tokens, hidden = residual.shape
    if codes is not None and scales is not None:
        is_meant = layout is not None or scale is not None or scale_tensor is not None
        scales = fp4_scales(_FINALIZE, scales, tokens, hidden, layout or 0, is_meant)
    comm.all_reduce_fused(
        rows=apart(rows, residual_out, norm_out, codes),
        index=index.to(torch.int32),
        expert_scales=None if expert_scales is None else expert_scales.to(rows.dtype),
        shared=None if shared is None else apart(shared, residual_out, norm_out, codes),
        routed_scaling=1.0 if routed_scaling is None else routed_scaling,
        hidden=hidden,
        residual=residual,
        weight=weight,
        weight_bias=weight_bias or 0.0,
        eps=eps or 0.0,
        quantize=None if codes is None else "nvfp4",
        scale=factor(scale_tensor, scale, rows),
        scale_layout=layout or 0,
        residual_out=residual_out,
        norm_out=norm_out,
        codes=codes,
        scales=None if codes is None else scales,
    )


def _check_outputs(
    caller: str,
    residual: "torch.Tensor | None",
    weight: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    norm_out: "torch.Tensor | None",
    codes: "torch.Tensor | None",
    scales: "torch.Tensor | None",
    sum_out: "torch.Tensor | None",
) -> None:
    """Refuses a call without an output, and one that lacks what an output is made of."""
    has_norm = norm_out is not None or codes is not None
    if sum_out is None and residual_out is None and not has_norm:
        raise missing(caller, **{"one of residual_out, norm_out, quant_out": None})
    if (residual_out is not None or has_norm) and residual is None:
        raise missing(caller, residual_in=residual)
    if has_norm and weight is None:
        raise missing(caller, rms_gamma=weight)
    if codes is not None and scales is None:
        raise missing(caller, scale_out=scales)
