"""Mixtures of experts: tokens go to the ranks of their experts, and what those make of them comes back.

    import antiphon.moe

    experts = antiphon.moe.ExpertParallel(comm, num_experts=8, hidden=1024)
    received = experts.dispatch(x, ids, weights)       # rows for this rank's experts
    y = my_experts(received.x, received.ids, received.weights)
    x = experts.combine(y, received.routes)            # their sums, for each of this rank's tokens

Both are differentiable. Existing code finds the same under the names that it knows: :mod:`antiphon.moe.fused_a2a` has those of
Megatron-Core's module of that name, :mod:`antiphon.moe.deep_ep` those of DeepEP. They are imported when they are named.
"""

import importlib
import sys
from types import ModuleType

from antiphon.moe._by_expert import ByExpertReceived, ByExpertRoutes
from antiphon.moe._calls import ByTokenRoutes, Layout
from antiphon.moe._slots import ReceivedSlots, SlotRoutes
from antiphon.moe.expert_parallel import Dispatched, ExpertParallel

__all__ = [
    "ByExpertReceived",
    "ByExpertRoutes",
    "ByTokenRoutes",
    "Dispatched",
    "ExpertParallel",
    "Layout",
    "ReceivedSlots",
    "SlotRoutes",
]

#: Modules that are imported when they are named.
_PARTS = ("deep_ep", "fused_a2a")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS})


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        return importlib.import_module(f"antiphon.moe.{name}")
    raise AttributeError(f"module 'antiphon.moe' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
