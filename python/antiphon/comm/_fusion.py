"""The all-reduce with residual, norm and quantisation. After FlashInfer 0.6.18 comm/trtllm_ar.py."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from antiphon._types import Algorithm, Quantize
from antiphon.comm._integers import AllReduceFusionPattern
from antiphon.comm._tensors import factor, fp4_scales, missing, parted, refusing_as
from antiphon.comm._workspaces import of_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["trtllm_allreduce_fusion"]

_NAME = "trtllm_allreduce_fusion"

_SUM = AllReduceFusionPattern.kAllReduce

#: How each pattern quantises, and whether it gives the norm. Scales of tokens are those of FlashInfer's tests, which
#: torch computes on GPUs.
PATTERNS: dict[int, tuple[Quantize | None, bool]] = {
    AllReduceFusionPattern.kAllReduce: (None, False),
    AllReduceFusionPattern.kARResidualRMSNorm: (None, True),
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant: ("fp8", False),
    AllReduceFusionPattern.kARResidualRMSNormFP4Quant: ("nvfp4", False),
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant: ("fp8", True),
    AllReduceFusionPattern.kARResidualRMSNormOutFP4Quant: ("nvfp4", True),
    AllReduceFusionPattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: ("fp8-groups", False),
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: ("fp8-groups", True),
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant: ("fp8-tokens-reciprocal", False),
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant: ("fp8-tokens-reciprocal", True),
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
    10, 11   11                       E4M3; a float32 scale for each token: its largest magnitude times 1/448 in float32
    ======== ======================== ====================================================================================

    ``allreduce_out``, ``residual_out`` or ``norm_out`` may be ``allreduce_in``, and ``residual_out`` may be
    ``residual_in``.
    ``fp32_acc=False`` rounds after each addition, as FlashInfer does. ``use_oneshot=None`` takes what was measured to
    be faster. ``scale_factor`` is a number or a tensor of any float type. ``rms_eps`` and ``weight_bias``, which is
    added to ``rms_gamma``, are 0 unless given. ``launch_with_pdl`` and ``trigger_completion_at_end`` have no effect.
    Under ``SWIZZLED_8x4``, where FlashInfer writes no scales, a ``scale_out`` without room for them is left alone, with
    one warning.

    Raises ``ValueError`` that names tensors a pattern lacks, for a ``workspace_ptrs`` that is of no workspace of this
    rank and size, and for what does not fit ``metadata``; ``AssertionError`` for two-shot of ``world_size`` tokens or
    fewer; what :meth:`antiphon.Communicator.all_reduce_fused` raises.
    """
    tensor, number = parted(scale_factor)
    chosen()(
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
        number,
        layout_code,
        block_quant_group_size,
        weight_bias,
        None if metadata is None else check(metadata, allreduce_in, world_size, token_num, hidden_dim),
    )


def chosen(eager: Callable[..., None] | None = None) -> Callable[..., None]:
    """What does it: ``eager``, which is :func:`run` unless given, or the operator for it in a program that is being
    compiled."""
    import torch

    if torch.compiler.is_compiling():
        operator: Callable[..., None] = torch.ops.antiphon.trtllm_allreduce_fusion
        return operator
    return eager or run


@refusing_as(_NAME)
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
    scale_tensor: "torch.Tensor | None",
    scale: float | None,
    layout: int | None,
    group_size: int | None,
    weight_bias: float | None,
    number: int | None,
) -> None:
    """The call, eager."""
    comm = of_tensor(_NAME, workspace, world_size, world_rank, number)
    if use_oneshot is False and tokens <= world_size:
        raise AssertionError(f"sequence length should be larger than tp_size: {tokens} tokens of {world_size} ranks")
    algorithm: Algorithm | None = None if use_oneshot is None else "one-shot" if use_oneshot else "two-shot"
    if pattern == _SUM:
        if sum_out is None:
            raise missing(_NAME, allreduce_out=sum_out)
        comm.all_reduce_fused(
            x, tokens=tokens, hidden=hidden, rounded=not fp32_acc, sum_out=sum_out, algorithm=algorithm
        )
        return
    quantize, gives_norm = PATTERNS.get(pattern) or _refuse(pattern)
    if residual is None or residual_out is None or weight is None:
        raise missing(_NAME, residual_in=residual, residual_out=residual_out, rms_gamma=weight)
    if gives_norm and norm_out is None:
        raise missing(_NAME, norm_out=norm_out)
    if quantize is None:  # without keywords that have no effect, which take time
        comm.all_reduce_fused(
            x,
            tokens=tokens,
            hidden=hidden,
            rounded=not fp32_acc,
            residual=residual,
            weight=weight,
            weight_bias=weight_bias or 0.0,
            eps=eps or 0.0,
            residual_out=residual_out,
            norm_out=norm_out,
            algorithm=algorithm,
        )
        return
    if codes is None:
        raise missing(_NAME, quant_out=codes)
    if quantize in ("fp8", "nvfp4") and scale_tensor is None and scale is None:
        raise missing(_NAME, scale_factor=scale)
    if quantize == "fp8":
        scales = None
    elif scales is None:
        raise missing(_NAME, scale_out=scales)
    elif quantize == "nvfp4":
        scales = fp4_scales(_NAME, scales, tokens, hidden, layout or 0)
    elif quantize == "fp8-groups" and not group_size:
        raise missing(_NAME, block_quant_group_size=None)
    comm.all_reduce_fused(
        x,
        tokens=tokens,
        hidden=hidden,
        rounded=not fp32_acc,
        residual=residual,
        weight=weight,
        weight_bias=weight_bias or 0.0,
        eps=eps or 0.0,
        quantize=quantize,
        scale=factor(scale_tensor, scale, x),
        group_size=group_size or 0,
        scale_layout=layout or 0,
        residual_out=residual_out,
        norm_out=norm_out if gives_norm else None,
        codes=codes,
        scales=scales,
        algorithm=algorithm,
    )


def _refuse(pattern: int) -> NoReturn:
    moe = (
        AllReduceFusionPattern.kMoEReductionARResidualRMSNorm,
        AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
    )
    instead = "is one of trtllm_moe_allreduce_fusion and trtllm_moe_finalize_allreduce_fusion"
    raise ValueError(f"{_NAME}: pattern {pattern} {instead if pattern in moe else 'is unknown'}")


def check(
    metadata: dict[str, Any], x: "torch.Tensor", world_size: int, tokens: int, hidden: int, caller: str = _NAME, made_with: str = ""
) -> int | None:
    """Refuses what FlashInfer's workspace would not hold. The number of the workspace. Errors name the caller, and what the workspace was
    ``made_with``: ``use_fp32_lamport`` unless given."""
    import torch

    try:
        ranks, most_tokens, most_hidden = metadata["tp_size"], metadata["max_token_num"], metadata["hidden_dim"]
        is_fp32: bool = metadata["use_fp32_lamport"]
    except KeyError:
        needed = "tp_size", "max_token_num", "hidden_dim", "use_fp32_lamport"
        absent = [name for name in needed if name not in metadata]
        raise ValueError(f"{caller}: metadata lacks {', '.join(absent)}") from None
    if ranks != world_size:
        raise ValueError(f"{caller}: the workspace is of {ranks} ranks, not {world_size}")
    if tokens * hidden > most_tokens * most_hidden:
        most = f"{most_tokens} tokens of {most_hidden}"
        raise ValueError(f"{caller}: {tokens} tokens of {hidden} are more than the workspace's {most}")
    if (x.dtype == torch.float32) != is_fp32:
        made_with = made_with or f"use_fp32_lamport={is_fp32}"
        raise ValueError(f"{caller}: the workspace was made with {made_with}, and the input is of {x.dtype}")
    return metadata.get("workspace_id")
