"""The patterns of the fused all-reduce, by the names and numbers that callers know."""

from __future__ import annotations


class AllReduceFusionPattern:
    """What follows an all-reduce in the same call. See `flashinfer.comm.allreduce_fusion`.

    "Out" patterns write the normalised rows beside the quantised ones.
    """

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
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """Where NVFP4 block scales lie, as `layout_code`; the numbers of `flashinfer.SfLayout`."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2
