"""What ``flashinfer.comm`` offers, under its names: for scripts written for that package.

    from antiphon.comm import Mapping, create_shared_buffer, free_shared_buffer

Signatures, integers and results are those of FlashInfer 0.6.18 (flashinfer/comm); :mod:`antiphon.compat` serves these
modules under FlashInfer's own names, to scripts that cannot be changed. What is not served yet is absent, so that
``hasattr`` and ``try: import`` tell the truth. Everything works on host memory and on GPUs.

New programs have :meth:`antiphon.Communicator.all_reduce_rms_norm`, which needs no workspace and makes its outputs.
"""

import sys
from importlib.util import find_spec
from typing import NoReturn

from antiphon._names import listed
from antiphon.comm.allreduce import (
    AllReduceFusionWorkspace,
    TRTLLMAllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from antiphon.comm.cuda_ipc import CudaRTLibrary, create_shared_buffer, free_shared_buffer
from antiphon.comm.dlpack_utils import pack_strided_memory
from antiphon.comm.mapping import Mapping
from antiphon.comm.mixed_comm import (
    MixedCommHandler,
    MixedCommMode,
    MixedCommOp,
    ParallelInfo,
    run_mixed_comm,
)
from antiphon.comm.trtllm_ar import (
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    FP4QuantizationSFLayout,
    QuantizationSFLayout,
    compute_fp4_swizzled_layout_sf_size,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_custom_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_lamport_initialize,
    trtllm_lamport_initialize_all,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
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
    "AllReduceFusionWorkspace",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "CudaRTLibrary",
    "FP4QuantizationSFLayout",
    "Mapping",
    "MixedCommHandler",
    "MixedCommMode",
    "MixedCommOp",
    "ParallelInfo",
    "QuantizationSFLayout",
    "TRTLLMAllReduceFusionWorkspace",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "create_shared_buffer",
    "free_shared_buffer",
    "pack_strided_memory",
    "run_mixed_comm",
    "trtllm_allreduce_fusion",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
    "trtllm_custom_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce",
    "trtllm_destroy_ipc_workspace_for_all_reduce_fusion",
    "trtllm_lamport_initialize",
    "trtllm_lamport_initialize_all",
    "trtllm_moe_allreduce_fusion",
    "trtllm_moe_finalize_allreduce_fusion",
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
]


def __getattr__(name: str) -> NoReturn:
    text = f"Antiphon does not serve {name!r} of flashinfer.comm yet; it serves {listed(__all__, name)}"
    # `from antiphon.comm import name` looks here before it imports a module of that name. If there is none, it would put a
    # poorer text in place of this one.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist" and find_spec(f"{__name__}.{name}") is None:
        raise ImportError(text, name=__name__)
    raise AttributeError(text, name=name)
