"""All-reduces with what a transformer layer does next. After FlashInfer 0.6.18 comm/trtllm_ar.py, on CUDA and host
tensors.

The functions are calls of :meth:`antiphon.Communicator.all_reduce_fused`, which defines their arithmetic: f32 inside,
sums in the order of the ranks, the same bits on every rank, whatever the algorithm and the number of tokens. They wait
for nothing on the host and may be captured in graphs, after one eager call of the dtype. ``torch.compile`` takes them
as operators.
"""

from antiphon._core import compute_fp4_swizzled_layout_sf_size
from antiphon.comm._custom import trtllm_custom_all_reduce
from antiphon.comm._fusion import trtllm_allreduce_fusion
from antiphon.comm._integers import (
    MAX_ALL_REDUCE_BLOCKS,
    MAX_COMM_SIZE,
    AllReduceFusionOp,
    AllReduceFusionPattern,
    AllReduceStrategyConfig,
    AllReduceStrategyType,
    BarrierFlagCount,
    FP4QuantizationSFLayout,
    LamportTokenNumThreshold,
    OneShotMaxToken,
    QuantizationSFLayout,
)
from antiphon.comm._moe import trtllm_moe_allreduce_fusion, trtllm_moe_finalize_allreduce_fusion
from antiphon.comm._workspaces import (
    trtllm_create_ipc_workspace_for_all_reduce,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
    trtllm_lamport_initialize,
    trtllm_lamport_initialize_all,
)

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "BarrierFlagCount",
    "FP4QuantizationSFLayout",
    "LamportTokenNumThreshold",
    "MAX_ALL_REDUCE_BLOCKS",
    "MAX_COMM_SIZE",
    "OneShotMaxToken",
    "QuantizationSFLayout",
    "compute_fp4_swizzled_layout_sf_size",
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
]
