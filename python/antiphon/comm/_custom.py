"""TensorRT-LLM's first custom all-reduce. After FlashInfer 0.6.18 comm/trtllm_ar.py."""

from typing import TYPE_CHECKING

from antiphon._types import Algorithm
from antiphon.comm._integers import AllReduceFusionOp, AllReduceStrategyConfig, AllReduceStrategyType
from antiphon.comm._tensors import missing, refusing_as
from antiphon.comm._workspaces import of_pointers
from antiphon.comm.vllm_ar import Refused

if TYPE_CHECKING:
    import torch

__all__ = ["trtllm_custom_all_reduce"]

_NAME = "trtllm_custom_all_reduce"

_ALGORITHMS: dict[int, Algorithm] = {AllReduceStrategyType.ONESHOT: "one-shot", AllReduceStrategyType.TWOSHOT: "two-shot"}


def trtllm_custom_all_reduce(
    inp: "torch.Tensor",
    out: "torch.Tensor",
    tp_size: int,
    tp_rank: int,
    token_num: int,
    fusion_op_code: int,
    strategy_code: int,
    config_code: int,
    launch_with_pdl: bool,
    flag_value: int,
    peer_comm_buffer_ptrs: "torch.Tensor",
    peer_barrier_ptrs_in: "torch.Tensor",
    peer_barrier_ptrs_out: "torch.Tensor",
    bias: "torch.Tensor | None",
    residual: "torch.Tensor | None",
    weight: "torch.Tensor | None",
    weight_pre_residual_norm: "torch.Tensor | None",
    eps: float | None,
    intermediate_buffer: "torch.Tensor | None",
    lamport_peer_comm_buffer_ptrs_0: "torch.Tensor | None",
    lamport_peer_comm_buffer_ptrs_1: "torch.Tensor | None",
    lamport_peer_comm_buffer_ptrs_2: "torch.Tensor | None",
) -> None:
    """``out`` becomes the sum of all ranks' ``inp``, or what ``fusion_op_code`` (an :class:`AllReduceFusionOp`) makes
    of it.

    ``NONE`` is the sum. ``RESIDUAL_RMS_NORM`` puts the sum, with ``bias`` and ``residual``, into
    ``intermediate_buffer``, and its norm, times ``weight``, into ``out``. ``RESIDUAL_RMS_PREPOST_NORM`` norms before
    the residual is added, too, times ``weight_pre_residual_norm``, for both strategies. Weights and bias may be
    missing. ``eps`` is 1e-5 unless given. Tensors are float32, float16 or bfloat16, contiguous, of ``token_num`` rows.
    ``strategy_code`` is ``ONESHOT`` or ``TWOSHOT``.

    ``peer_comm_buffer_ptrs`` is a list of the workspace as an int64 tensor on the host. All other addresses,
    ``flag_value``, ``config_code`` and ``launch_with_pdl`` have no effect.

    Raises ``ValueError`` (here a ``RuntimeError`` too) for other operations and strategies, both bits of
    ``config_code``, and rows that are not whole 16 bytes; ``ValueError`` for what is missing, and as
    :func:`trtllm_allreduce_fusion`.
    """
    import torch

    call = torch.ops.antiphon.trtllm_custom_all_reduce if torch.compiler.is_compiling() else run
    call(
        inp,
        out,
        tp_size,
        tp_rank,
        token_num,
        fusion_op_code,
        strategy_code,
        config_code,
        peer_comm_buffer_ptrs,
        bias,
        residual,
        weight,
        weight_pre_residual_norm,
        eps,
        intermediate_buffer,
    )


@refusing_as(_NAME)
def run(
    x: "torch.Tensor",
    out: "torch.Tensor",
    tp_size: int,
    tp_rank: int,
    tokens: int,
    operation: int,
    strategy: int,
    config: int,
    pointers: "torch.Tensor",
    bias: "torch.Tensor | None",
    residual: "torch.Tensor | None",
    weight: "torch.Tensor | None",
    pre_weight: "torch.Tensor | None",
    eps: float | None,
    intermediate: "torch.Tensor | None",
) -> None:
    """The call, eager."""
    comm = of_pointers(_NAME, pointers, tp_size, tp_rank)
    algorithm = _ALGORITHMS.get(strategy)
    if algorithm is None:
        raise Refused(f"{_NAME}: strategy {strategy} is not served, only ONESHOT and TWOSHOT")
    if config == AllReduceStrategyConfig.USE_MEMCPY | AllReduceStrategyConfig.PUSH_MODE:
        raise Refused(f"{_NAME}: configuration unsupported: USE_MEMCPY with PUSH_MODE")
    count = x.numel()
    if tokens < 1 or count % tokens or count // tokens * x.element_size() % 16:
        raise Refused(f"{_NAME}: configuration unsupported: {count} elements are no {tokens} rows of whole 16 bytes")
    hidden = count // tokens
    if operation == AllReduceFusionOp.NONE:
        comm.all_reduce_fused(x, hidden=hidden, sum_out=out, algorithm=algorithm)
        return
    has_pre_norm = operation == AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM
    if operation != AllReduceFusionOp.RESIDUAL_RMS_NORM and not has_pre_norm:
        served = "NONE, RESIDUAL_RMS_NORM and RESIDUAL_RMS_PREPOST_NORM"
        raise Refused(f"{_NAME}: operation {operation} is not served, only {served}")
    if residual is None or intermediate is None:
        raise missing(_NAME, residual=residual, intermediate_buffer=intermediate)
    comm.all_reduce_fused(
        x,
        hidden=hidden,
        bias=bias,
        pre_norm=has_pre_norm,
        pre_weight=pre_weight if has_pre_norm else None,
        residual=residual,
        weight=weight,
        eps=1e-5 if eps is None else eps,
        residual_out=intermediate,
        norm_out=out,
        algorithm=algorithm,
    )
