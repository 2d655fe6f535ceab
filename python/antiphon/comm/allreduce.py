"""One call for all fused all-reduces. After FlashInfer 0.6.18 comm/allreduce.py."""

from typing import TYPE_CHECKING, Any, Literal

from antiphon.comm import _fusion
from antiphon.comm._fusion import PATTERNS
from antiphon.comm._integers import AllReduceFusionPattern
from antiphon.comm._moe import trtllm_moe_allreduce_fusion, trtllm_moe_finalize_allreduce_fusion
from antiphon.comm._tensors import dtype_of, fp4_scale_bytes, missing, parted, refusing_as
from antiphon.comm._workspaces import (
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from antiphon.comm.cuda_ipc import _Group
from antiphon.comm.workspace_base import AllReduceFusionWorkspace

if TYPE_CHECKING:
    import torch

__all__ = [
    "AllReduceFusionWorkspace",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "create_allreduce_fusion_workspace",
]

_NAME = "allreduce_fusion"

_SUM = AllReduceFusionPattern.kAllReduce
_MOE_REDUCTION = AllReduceFusionPattern.kMoEReductionARResidualRMSNorm
_MOE_FINALIZE = AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm

_run = refusing_as(_NAME)(_fusion.run)


class TRTLLMAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """A workspace for :func:`allreduce_fusion`. All ranks of the group make it together.

    The group is ``group``, or that of ``comm_backend``, or all ranks of ``torch.distributed``; ``dtype`` float16 unless
    given. ``workspace_tensor`` is what the ``trtllm_…`` functions take. ``metadata`` has the sizes that calls are held
    to.
    """

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: "torch.dtype | str | None" = None,
        comm_backend: Any = None,
        group: _Group = None,
        *,
        caller: str = "TRTLLMAllReduceFusionWorkspace",
    ) -> None:
        import torch

        super().__init__(tp_size, tp_rank)
        self.dtype = torch.float16 if dtype is None else dtype_of(caller, dtype)
        self.mem_handles: list[Any] = []  # scripts read it
        self.ipc_handles, self.workspace_tensor, self.metadata = trtllm_create_ipc_workspace_for_all_reduce_fusion(
            tp_rank,
            tp_size,
            max_token_num,
            hidden_dim,
            use_fp32_lamport=self.dtype == torch.float32,
            group=group,
            create_metadata=True,
            comm_backend=comm_backend,
            caller=caller,
        )

    def __repr__(self) -> str:
        most, hidden = self.metadata["max_token_num"], self.metadata["hidden_dim"]
        place = f"rank {self.rank} of {self.world_size}"
        return f"<antiphon.comm workspace {self.backend!r}: {place}, at most {most} tokens of {hidden}, {self.dtype}>"

    @property
    def backend(self) -> str:
        """``"trtllm"``, after which the functions are named."""
        return "trtllm"

    def destroy(self) -> None:
        """Ends the workspace: later calls raise ``ValueError``. It does not wait for other ranks."""
        trtllm_destroy_ipc_workspace_for_all_reduce_fusion(self.ipc_handles)

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: "torch.dtype | str",
        use_oneshot: bool | None = None,
    ) -> bool:
        """Whether calls may be of this size and dtype; ``use_oneshot`` makes no difference."""
        import torch

        dtype = dtype_of("is_buffer_size_sufficient", dtype)

        most = self.metadata["max_token_num"] * self.metadata["hidden_dim"]
        is_fp32 = bool(dtype == torch.float32)
        fits = bool(num_tokens * hidden_dim <= most)
        return tp_size == self.world_size and fits and is_fp32 == self.metadata["use_fp32_lamport"]


def create_allreduce_fusion_workspace(
    backend: Literal["trtllm", "mnnvl", "auto"] | str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: "torch.dtype | str | None" = None,
    gpus_per_node: int | None = None,
    comm_backend: Any = None,
    force_oneshot_support: bool = False,
    group: _Group = None,
) -> AllReduceFusionWorkspace:
    """A workspace for :func:`allreduce_fusion`. All ranks of the group make it together.

    ``world_size``, ``rank``, ``max_token_num`` and ``hidden_dim`` are needed. ``backend`` is ``"trtllm"`` or
    ``"auto"``, which is the same here. ``gpus_per_node`` and ``force_oneshot_support`` have no effect.

    Raises ``RuntimeError`` for other backends, ``ValueError`` for what is missing.
    """
    if backend not in ("auto", "trtllm"):
        raise RuntimeError(f'create_allreduce_fusion_workspace: no backend {backend!r}, only "trtllm" and "auto"')
    if world_size is None or rank is None or max_token_num is None or hidden_dim is None:
        needed = {"world_size": world_size, "rank": rank, "max_token_num": max_token_num, "hidden_dim": hidden_dim}
        raise missing("create_allreduce_fusion_workspace", **needed)
    return TRTLLMAllReduceFusionWorkspace(
        world_size,
        rank,
        max_token_num,
        hidden_dim,
        dtype,
        comm_backend,
        group,
        caller="create_allreduce_fusion_workspace",
    )


def allreduce_fusion(
    input: "torch.Tensor",
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: "torch.Tensor | None" = None,
    residual_out: "torch.Tensor | None" = None,
    norm_out: "torch.Tensor | None" = None,
    quant_out: "torch.Tensor | None" = None,
    scale_out: "torch.Tensor | None" = None,
    residual_in: "torch.Tensor | None" = None,
    rms_gamma: "torch.Tensor | None" = None,
    rms_eps: float = 1e-6,
    scale_factor: "torch.Tensor | float | None" = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    block_quant_group_size: int | None = None,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: "torch.Tensor | None" = None,
    moe_reduction_active_experts_token_input: "torch.Tensor | None" = None,
    moe_reduction_token_input: "torch.Tensor | None" = None,
    expanded_idx_to_permuted_idx: "torch.Tensor | None" = None,
    expert_scale_factor: "torch.Tensor | None" = None,
    shared_expert_output: "torch.Tensor | None" = None,
    routed_scaling_factor: float | None = None,
    weight_bias: float | None = 0.0,
) -> "torch.Tensor":
    """The fused all-reduce of an :class:`AllReduceFusionPattern`, and its result: the norm if the pattern gives it,
    else the codes, else the sum.

    Patterns 0 to 5 and 8 to 11 are :func:`trtllm_allreduce_fusion` of ``input`` ``[tokens, hidden]``, 6 is
    :func:`trtllm_moe_allreduce_fusion` (``input`` is the shared expert's output, unless ``moe_reduction_token_input``
    is given), 7 is :func:`trtllm_moe_finalize_allreduce_fusion` (of the rows ``input``). What a pattern gives and the
    caller has no tensor for is made, but for ``residual_out`` of patterns 6 and 7.

    Raises ``ValueError`` for an ``input`` of other dimensions, and as those functions; ``TypeError`` for a foreign
    workspace.
    """
    if not isinstance(workspace, TRTLLMAllReduceFusionWorkspace):
        raise TypeError(f"{_NAME}: {workspace!r} is no workspace of create_allreduce_fusion_workspace")
    shape = input.shape
    if len(shape) != 2:
        raise ValueError(f"{_NAME}: input must be [tokens, hidden], not {list(shape)}")
    if pattern == _MOE_REDUCTION:
        experts, scales = moe_reduction_active_experts_token_input, moe_reduction_scale_input
        if experts is None or scales is None or moe_reduction_device_num_experts is None:
            raise missing(
                _NAME,
                moe_reduction_device_num_experts=moe_reduction_device_num_experts,
                moe_reduction_scale_input=scales,
                moe_reduction_active_experts_token_input=experts,
            )
        shared = input if moe_reduction_token_input is None else moe_reduction_token_input
        norm_out = _like(input) if norm_out is None and quant_out is None else norm_out
        tokens, hidden = (shared if residual_in is None else residual_in).shape
        trtllm_moe_allreduce_fusion(
            workspace.world_size,
            workspace.rank,
            tokens,
            hidden,
            workspace.workspace_tensor,
            launch_with_pdl,
            residual_in,
            rms_gamma,
            rms_eps,
            scale_factor,
            moe_reduction_device_num_experts,
            scales,
            experts,
            shared,
            layout_code,
            output,
            residual_out,
            norm_out,
            quant_out,
            scale_out,
            weight_bias,
        )
        return _result(norm_out, quant_out)
    if pattern == _MOE_FINALIZE:
        if residual_in is None or rms_gamma is None or expanded_idx_to_permuted_idx is None:
            raise missing(
                _NAME,
                residual_in=residual_in,
                rms_gamma=rms_gamma,
                expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
            )
        norm_out = _like(residual_in) if norm_out is None and quant_out is None else norm_out
        trtllm_moe_finalize_allreduce_fusion(
            input,
            residual_in,
            rms_gamma,
            expanded_idx_to_permuted_idx,
            norm_out,
            residual_out,
            quant_out,
            scale_out,
            workspace.workspace_tensor,
            launch_with_pdl,
            workspace.rank,
            workspace.world_size,
            rms_eps,
            shared_expert_output,
            expert_scale_factor,
            routed_scaling_factor,
            weight_bias,
            scale_factor=scale_factor,
            layout_code=layout_code,
        )
        return _result(norm_out, quant_out)
    tokens, hidden = shape
    quantize, gives_norm = PATTERNS.get(pattern, (None, False))
    if pattern in PATTERNS and pattern != _SUM and (residual_in is None or rms_gamma is None):
        raise missing(_NAME, residual_in=residual_in, rms_gamma=rms_gamma)
    if quantize in ("fp8", "nvfp4") and scale_factor is None:
        raise missing(_NAME, scale_factor=scale_factor)
    if pattern == _SUM:
        output = _like(input) if output is None else output
    else:
        residual_out = _like(input) if residual_out is None else residual_out
        norm_out = _like(input) if gives_norm and norm_out is None else norm_out
    if quantize is not None and quant_out is None:
        quant_out = _codes(input, quantize)
    if quantize not in (None, "fp8") and scale_out is None:
        scale_out = _scales(input, str(quantize), layout_code or 0, block_quant_group_size or hidden)
    tensor, number = parted(scale_factor)
    world_size = workspace.world_size
    _fusion.chosen(_run)(
        input,
        workspace.workspace_tensor,
        world_size,
        workspace.rank,
        tokens,
        hidden,
        fp32_acc,
        pattern,
        use_oneshot,
        output,
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
        _fusion.check(workspace.metadata, input, world_size, tokens, hidden, _NAME, f"dtype={workspace.dtype}"),
    )
    if pattern == _SUM:
        return _result(output, None)
    return _result(norm_out if gives_norm else None, quant_out)


def _result(norm: "torch.Tensor | None", codes: "torch.Tensor | None") -> "torch.Tensor":
    found = codes if norm is None else norm
    assert found is not None
    return found


def _like(x: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.empty_like(x)


def _codes(x: "torch.Tensor", quantize: str) -> "torch.Tensor":
    import torch

    if quantize == "nvfp4":
        return torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


def _scales(x: "torch.Tensor", quantize: str, layout: int, group_size: int) -> "torch.Tensor":
    import torch

    tokens, hidden = x.shape
    if quantize == "fp8-tokens-reciprocal":
        return torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    if quantize == "fp8-groups":
        packs = -(-(hidden // group_size) // 4)
        shape, strides = (tokens, packs), (1, -(-tokens // 4) * 4)
        return torch.empty_strided(shape, strides, dtype=torch.int32, device=x.device)
    return torch.empty(fp4_scale_bytes(tokens, hidden, layout), dtype=torch.uint8, device=x.device)
