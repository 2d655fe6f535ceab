"""The names of DeepEP's package: ``Buffer``, ``HybridEPBuffer`` and ``ElasticBuffer``, on tensors in host memory and on CUDA GPUs.

What they do is that of :class:`antiphon.moe.ExpertParallel`; what they take and give is DeepEP's (its version 1, commit
567632d, and ``deep_ep/buffers/legacy.py`` later; of its branch hybrid-ep, 94a9f8f; its version 2, dd758ca). On a GPU a ``Buffer``'s
normal calls and an ``ElasticBuffer``'s asynchronous ones go on a stream of its own, and all others in the current one; on the CPU calls
are synchronous, and events do nothing.
"""

from antiphon.moe.deep_ep import utils
from antiphon.moe.deep_ep.buffer import Buffer, Config
from antiphon.moe.deep_ep.elastic import ElasticBuffer
from antiphon.moe.deep_ep.elastic_handle import EPHandle
from antiphon.moe.deep_ep.elastic_sizes import get_logical_domain_size, get_physical_domain_size
from antiphon.moe.deep_ep.events import EventHandle, EventOverlap, topk_idx_t
from antiphon.moe.deep_ep.hybrid import HybridEPBuffer

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
    "utils",
]
