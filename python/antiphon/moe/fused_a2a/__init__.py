"""The names of Megatron-Core's ``core.transformer.moe.fused_a2a``, over :mod:`antiphon.moe.deep_ep`.

Arguments are in the order of release 0.16; names of later releases are taken by keyword. What differs: the gradient of
``token_probs`` counts only where the received id is an expert of the receiving rank, which is the exact product; float32, float16
and float64 are combined as bfloat16 is; gradients may be non-contiguous. The functions over NCCL EP move rows by expert as
:meth:`antiphon.moe.ExpertParallel.dispatch_by_expert` does.
"""

import sys
from types import ModuleType
from typing import Any

from antiphon.moe.deep_ep import Buffer, HybridEPBuffer
from antiphon.moe.fused_a2a import hybrid as _hybrid
from antiphon.moe.fused_a2a import normal as _normal
from antiphon.moe.fused_a2a.hybrid import (
    HYBRIDEP_TOKEN_ALIGNMENT,
    HybridEPCombine,
    HybridEPDispatch,
    hybrid_ep_combine,
    hybrid_ep_dispatch,
    init_hybrid_ep_buffer,
    reset_hybrid_ep_buffer,
)
from antiphon.moe.fused_a2a.nccl import (
    EpBuffer,
    alloc_ep_symm_buffer,
    ensure_nccl_ep_bootstrapped,
    is_nccl_ep_bootstrapped,
    nccl_ep_combine,
    nccl_ep_dispatch,
    nccl_ep_finalize,
    new_nccl_ep_buffer,
)
from antiphon.moe.fused_a2a.normal import (
    FusedCombine,
    FusedDispatch,
    fused_combine,
    fused_dispatch,
    get_buffer,
    get_hidden_bytes,
    set_deepep_num_sms,
)

__all__ = [
    "HAVE_DEEP_EP",
    "HAVE_HYBRIDEP",
    "HAVE_TE_EP",
    "HYBRIDEP_TOKEN_ALIGNMENT",
    "Buffer",
    "EpBuffer",
    "FusedCombine",
    "FusedDispatch",
    "HybridEPBuffer",
    "HybridEPCombine",
    "HybridEPDispatch",
    "alloc_ep_symm_buffer",
    "ensure_nccl_ep_bootstrapped",
    "fused_combine",
    "fused_dispatch",
    "get_buffer",
    "get_hidden_bytes",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "init_hybrid_ep_buffer",
    "is_nccl_ep_bootstrapped",
    "nccl_ep_combine",
    "nccl_ep_dispatch",
    "nccl_ep_finalize",
    "new_nccl_ep_buffer",
    "reset_hybrid_ep_buffer",
    "set_deepep_num_sms",
]

HAVE_DEEP_EP = True
HAVE_HYBRIDEP = True
#: The functions over NCCL EP need nothing of Transformer Engine here.
HAVE_TE_EP = True


class _Module(ModuleType):
    """The buffers that all layers share are attributes; ``None`` before they are made, and to make new ones."""

    @property
    def _buffer(self) -> Buffer | None:
        return _normal._buffer

    @_buffer.setter
    def _buffer(self, none: None) -> None:
        _check_none("_buffer", none)
        _normal.reset_buffer()

    @property
    def _hybrid_ep_buffer(self) -> HybridEPBuffer | None:
        return _hybrid._hybrid_ep_buffer

    @_hybrid_ep_buffer.setter
    def _hybrid_ep_buffer(self, none: None) -> None:
        _check_none("_hybrid_ep_buffer", none)
        _hybrid.reset_hybrid_ep_buffer()


def _check_none(name: str, value: Any) -> None:
    if value is not None:
        raise TypeError(f"{name} may only be set to None, for new buffers of all groups, not to {type(value).__name__}")


sys.modules[__name__].__class__ = _Module
