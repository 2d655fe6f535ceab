"""The all-reduce with residual, norm and quantisation. After FlashInfer 0.6.18 comm/trtllm_ar.py."""

from typing import TYPE_CHECKING, Any

from antiphon.comm._integers import AllReduceFusionPattern
from antiphon.comm._tensors import algorithm, apart, factor, first, fp4_scales, missing
from antiphon.comm._workspaces import of_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["trtllm_allreduce_fusion"]

_NAME = "trtllm_allreduce_fusion"

#: How each pattern quantises, and whether it gives the norm.
PATTERNS: dict[int, tuple[str | None, bool]] = {
    AllReduceFusionPattern.kAllReduce: (None, False),
    AllReduceFusionPattern.kARResidualRMSNorm: (None, True),
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant: ("fp8", False),
    AllReduceFusionPattern.kARResidualRMSNormFP4Quant: ("nvfp4", False),
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant: ("fp8", True),
    AllReduceFusionPattern.kARResidualRMSNormOutFP4Quant: ("nvfp4", True),
    AllReduceFusionPattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: ("fp8-groups", False),
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: ("fp8-groups", True),
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant: ("fp8-tokens", False),
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant: ("fp8-tokens", True),
}


def trtllm_allreduce_fusion(
    allreduce_in: "torch.Tensor",
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: "torch.Tensor",
    launch_with_pdl: bool,
    trigger_completion_at_end: bool,
    fp32_acc: bool,
    pattern_code: int,
    use_oneshot: bool | None,
    allreduce_out: "torch.Tensor | None",
    residual_in: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    norm_out: "torch.Tensor | None",
    quant_out: "torch.Tensor | None",
    scale_out: "torch.Tensor | None",
    rms_gamma: "torch.Tensor | None",
    rms_eps: float | None,
    scale_factor: "torch.Tensor | float | None",
    layout_code: int | None,
    metadata: dict[str, Any] | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = None,
) -> None:
    """The sum of all ranks' ``allreduce_in``, and what ``pattern_code`` (an :class:`AllReduceFusionPattern`) makes of
    it.

    Tensors are contiguous, float16, bfloat16 or float32, and of any shape: at least ``token_num * hidden_dim``
    elements, of which the first count, ``hidden_dim`` in ``rms_gamma``. Pattern 0 writes ``allreduce_out`` and nothing
    else; the others ``residual_out``, the sum with ``residual_in``, and of its norm:

    ======== ======================== ====================================================================================
    patterns ``norm_out``             ``quant_out``, as bytes, and ``scale_out``
    ======== ======================== ====================================================================================
    1        yes
    2, 4     4                        E4M3 of the norm divided by ``scale_factor``; ``scale_out`` is not used
    3, 5     5                        E2M1, two in a byte, low half first; for 16 elements an E4M3 scale, which includes the
                                      factor ``scale_factor``, at its place in ``layout_code`` (0 unless given)
    8, 9     9                        E4M3; for ``block_quant_group_size`` elements a power of two, four exponents in an
                                      int32, of shape ``(token_num, packs)`` and strides ``(1, token_num rounded up to
                                      4)``
    10, 11   11                       E4M3; a float32 scale for each token
    ======== ======================== ====================================================================================

    Outputs may take the place of ``allreduce_in`` (which costs a copy), and ``residual_out`` that of ``residual_in``.
    ``fp32_acc=False`` rounds after each addition, as FlashInfer does. ``use_oneshot=None`` takes what was measured to
    be faster. ``scale_factor`` is a number or a tensor of any float type. ``rms_eps`` and ``weight_bias``, which is
    added to ``rms_gamma``, are 0 unless given. ``launch_with_pdl`` and ``trigger_completion_at_end`` have no effect.
    Under ``SWIZZLED_8x4``, where FlashInfer writes no scales, a ``scale_out`` without room for them is left alone, with
    one warning.

    Raises ``ValueError`` that names tensors a pattern lacks, for a ``workspace_ptrs`` that is of no workspace of this
    rank and size, and for what does not fit ``metadata``; ``AssertionError`` for two-shot of ``world_size`` tokens or
    fewer; what :meth:`antiphon.Communicator.all_reduce_fused` raises.
    """
    import torch

    number = None
    if metadata is not None:
        _check(metadata, allreduce_in, world_size, token_num, hidden_dim)
        number = metadata.get("workspace_id")
    if torch.compiler.is_compiling():
        tensor = scale_factor if isinstance(scale_factor, torch.Tensor) else None
        value = None if tensor is not None or scale_factor is None else float(scale_factor)
        torch.ops.antiphon.trtllm_allreduce_fusion(
            allreduce_in,
            workspace_ptrs,
            world_size,
            world_rank,
            token_num,
            hidden_dim,
            fp32_acc,
            pattern_code,
            use_oneshot,
            allreduce_out,
            residual_in,
            residual_out,
            norm_out,
            quant_out,
            scale_out,
            rms_gamma,
            rms_eps,
            tensor,
            value,
            layout_code,
            block_quant_group_size,
            weight_bias,
            number,
        )
        return
    run(
        allreduce_in,
        workspace_ptrs,
        world_size,
        world_rank,
        token_num,
        hidden_dim,
        fp32_acc,
        pattern_code,
        use_oneshot,
        allreduce_out,
        residual_in,
        residual_out,
        norm_out,
        quant_out,
        scale_out,
        rms_gamma,
        rms_eps,
        scale_factor,
        layout_code,
        block_quant_group_size,
        weight_bias,
        number,
    )


def run(
    x: "torch.Tensor",
    workspace: "torch.Tensor",
    world_size: int,
    world_rank: int,
    tokens: int,
    hidden: int,
    fp32_acc: bool,
    pattern: int,
    use_oneshot: bool | None,
    sum_out: "torch.Tensor | None",
    residual: "torch.Tensor | None",
    residual_out: "torch.Tensor | None",
    norm_out: "torch.Tensor | None",
    codes: "torch.Tensor | None",
    scales: "torch.Tensor | None",
    weight: "torch.Tensor | None",
    eps: float | None,
    scale: "torch.Tensor | float | None",
    layout: int | None,
    group_size: int | None,
    weight_bias: float | None,
    number: int | None,
) -> None:
    """The call, eager."""
    comm = of_tensor(_NAME, workspace, world_size, world_rank, number)
    if use_oneshot is False and tokens <= world_size:
        raise AssertionError(f"sequence length should be larger than tp_size: {tokens} tokens of {world_size} ranks")
    count = tokens * hidden
    x = first(_NAME, "allreduce_in", x, count)
    if pattern == AllReduceFusionPattern.kAllReduce:
        if sum_out is None:
            raise missing(_NAME, allreduce_out=sum_out)
        sum_out = first(_NAME, "allreduce_out", sum_out, count)
        x = apart(x, sum_out)
        comm.all_reduce_fused(
            x, hidden=hidden, rounded=not fp32_acc, sum_out=sum_out, algorithm=algorithm(use_oneshot)
        )
        return
    quantize, gives_norm = _pattern(pattern)
    if residual is None or residual_out is None or weight is None:
        raise missing(_NAME, residual_in=residual, residual_out=residual_out, rms_gamma=weight)
    if gives_norm:
        if norm_out is None:
            raise missing(_NAME, norm_out=norm_out)
        norm_out = first(_NAME, "norm_out", norm_out, count)
    else:
        norm_out = None
    residual = first(_NAME, "residual_in", residual, count)
    residual_out = first(_NAME, "residual_out", residual_out, count)
    if quantize is None:  # without keywords that say nothing, which take time
        comm.all_reduce_fused(
            apart(x, residual_out, norm_out),
            hidden=hidden,
            rounded=not fp32_acc,
            residual=residual,
            weight=weight,
            weight_bias=weight_bias or 0.0,
            eps=eps or 0.0,
            residual_out=residual_out,
            norm_out=norm_out,
            algorithm=algorithm(use_oneshot),
        )
        return
    codes, scales, scale = _quantized(quantize, x, tokens, hidden, codes, scales, scale, layout, group_size)
    comm.all_reduce_fused(
        apart(x, residual_out, norm_out, codes),
        hidden=hidden,
        rounded=not fp32_acc,
        residual=residual,
        weight=weight,
        weight_bias=weight_bias or 0.0,
        eps=eps or 0.0,
        quantize=quantize,
        scale=scale,
        group_size=group_size or 0,
        scale_layout=layout or 0,
        residual_out=residual_out,
        norm_out=norm_out,
        codes=codes,
        scales=scales,
        algorithm=algorithm(use_oneshot),
    )


def _pattern(code: int) -> tuple[str | None, bool]:
    try:
        return PATTERNS[code]
    except KeyError:
        moe = (
            AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
            AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        )
        instead = "is one of trtllm_moe_allreduce_fusion and trtllm_moe_finalize_allreduce_fusion"
        raise ValueError(f"{_NAME}: pattern {code} {instead if code in moe else 'is unknown'}") from None


def _quantized(
    quantize: str,
    x: "torch.Tensor",
    tokens: int,
    hidden: int,
    codes: "torch.Tensor | None",
    scales: "torch.Tensor | None",
    scale: "torch.Tensor | float | None",
    layout: int | None,
    group_size: int | None,
) -> "tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | float | None]":
    """Codes, scales and the scale of the tensor, as this form needs them."""
    if codes is None:
        raise missing(_NAME, quant_out=codes)
    if quantize in ("fp8", "nvfp4"):
        if scale is None:
            raise missing(_NAME, scale_factor=scale)
        scale = factor(scale, x)
    else:
        scale = None
    if quantize == "fp8":
        return codes, None, scale
    if scales is None:
        raise missing(_NAME, scale_out=scales)
    if quantize == "nvfp4":
        scales = fp4_scales(_NAME, scales, tokens, hidden, layout or 0)
    if quantize == "fp8-groups" and not group_size:
        raise missing(_NAME, block_quant_group_size=None)
    return codes, scales, scale


def _check(metadata: dict[str, Any], x: "torch.Tensor", world_size: int, tokens: int, hidden: int) -> None:
    """Refuses what FlashInfer's workspace would not hold."""
    import torch

    absent = [name for name in ("tp_size", "max_token_num", "hidden_dim", "use_fp32_lamport") if name not in metadata]
    if absent:
        raise ValueError(f"{_NAME}: metadata lacks {', '.join(absent)}")
    if metadata["tp_size"] != world_size:
        raise ValueError(f"{_NAME}: the workspace is of {metadata['tp_size']} ranks, not {world_size}")
    if tokens * hidden > metadata["max_token_num"] * metadata["hidden_dim"]:
        most = f"{metadata['max_token_num']} tokens of {metadata['hidden_dim']}"
        raise ValueError(f"{_NAME}: {tokens} tokens of {hidden} are more than the workspace's {most}")
    if (x.dtype == torch.float32) != metadata["use_fp32_lamport"]:
        raise ValueError(f"{_NAME}: use_fp32_lamport is {metadata['use_fp32_lamport']}, and the input {x.dtype}")
