"""Mixtures of experts: tokens go to the ranks of their experts, and what those make of them comes back.

    import antiphon.moe

    experts = antiphon.moe.ExpertParallel(comm, num_experts=8, hidden=1024)
    received = experts.dispatch(x, ids, weights)       # rows for this rank's experts
    y = my_experts(received.x, received.ids, received.weights)
    x = experts.combine(y, received.routes)            # their sums, for each of this rank's tokens

Both are differentiable. Existing code finds the same under the names that it knows: :mod:`antiphon.moe.fused_a2a` has those of
Megatron-Core's module of that name, :mod:`antiphon.moe.deep_ep` those of DeepEP.
"""

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
