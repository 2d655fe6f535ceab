"""The integers that choose an all-reduce. After FlashInfer 0.6.18 comm/trtllm_ar.py.

The classes hold plain ``int`` constants, which go into calls as they are.
"""

# The limits of FlashInfer's kernels. Here only the sizes of workspaces depend on them.
OneShotMaxToken = 128
MAX_ALL_REDUCE_BLOCKS = 24
LamportTokenNumThreshold = 16
BarrierFlagCount = 256
MAX_COMM_SIZE = ((1 << 31) - 1) >> 21 << 21


class AllReduceStrategyType:
    """The algorithm of an all-reduce."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6


class AllReduceStrategyConfig:
    """Details of a strategy, as bits; 0 is none."""

    USE_MEMCPY = 1
    PUSH_MODE = 2


class AllReduceFusionOp:
    """The operations that follow a custom all-reduce in the same call."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    MOE_ALLREDUCE_RESIDUAL_RMS_NORM = 8
    MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM = 9


class AllReduceFusionPattern:
    """What a fused all-reduce computes."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


class QuantizationSFLayout:
    """The order of a matrix of scales.

    Older releases of FlashInfer called the class ``FP4QuantizationSFLayout``, with ``SWIZZLED`` = 0 and ``LINEAR`` = 1.
    Both names are this class: a script that writes ``LINEAR`` gets 2, which is right; one that writes 1 gets 8x4.
    """

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2
    SWIZZLED = SWIZZLED_128x4


FP4QuantizationSFLayout = QuantizationSFLayout
