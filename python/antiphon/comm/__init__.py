"""What ``flashinfer.comm`` offers, under its names: for scripts written for that package.

    from antiphon.comm import Mapping, create_shared_buffer, free_shared_buffer

Signatures, integers and results are those of FlashInfer 0.6.18 (flashinfer/comm); :mod:`antiphon.compat` serves these
modules under FlashInfer's own names, to scripts that cannot be changed. What is not served yet is absent, so that
``hasattr`` and ``try: import`` tell the truth. Everything works on host memory and on GPUs.
"""

import sys
from typing import NoReturn

from antiphon.comm.cuda_ipc import create_shared_buffer, free_shared_buffer
from antiphon.comm.dlpack_utils import pack_strided_memory
from antiphon.comm.mapping import Mapping
from antiphon.comm.trtllm_ar import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    FP4QuantizationSFLayout,
    QuantizationSFLayout,
    compute_fp4_swizzled_layout_sf_size,
)
from antiphon.comm.vllm_ar import all_reduce as vllm_all_reduce
from antiphon.comm.vllm_ar import dispose as vllm_dispose
from antiphon.comm.vllm_ar import get_graph_buffer_ipc_meta as vllm_get_graph_buffer_ipc_meta
from antiphon.comm.vllm_ar import init_custom_ar as vllm_init_custom_ar
from antiphon.comm.vllm_ar import meta_size as vllm_meta_size
from antiphon.comm.vllm_ar import register_buffer as vllm_register_buffer
from antiphon.comm.vllm_ar import register_graph_buffers as vllm_register_graph_buffers

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "FP4QuantizationSFLayout",
    "Mapping",
    "QuantizationSFLayout",
    "compute_fp4_swizzled_layout_sf_size",
    "create_shared_buffer",
    "free_shared_buffer",
    "pack_strided_memory",
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]


def __getattr__(name: str) -> NoReturn:
    text = f"Antiphon does not serve {name!r} of flashinfer.comm yet; it serves {', '.join(__all__)}"
    # `from antiphon.comm import name` looks before it imports, and would put a poorer text in place of this one.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist":
        raise ImportError(text, name=__name__)
    raise AttributeError(text, name=name)
