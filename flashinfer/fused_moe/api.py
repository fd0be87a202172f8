"""Names of formats that callers of upstream's unified interface use."""

from enum import Enum


class QuantFormat(Enum):
    """How an operand of an expert's products is stored.

    BF16, FP16 : as they are. FP8PerTensor : e4m3 with one scale. DeepSeekFp8 : e4m3 with float32 scales, of 128 columns
    of a row or of 128 x 128 weights. MXFP8, MXFP4 : e4m3, e2m1 with a ue8m0 scale for 32. NVFP4 : e2m1 with an e4m3
    scale for 16. MXINT4 : 4-bit integers with a bfloat16 scale for 32. INT4 : 4-bit integers with scales of groups.
    """

    BF16 = 0
    FP16 = 1
    FP8PerTensor = 2
    DeepSeekFp8 = 3
    MXFP8 = 4
    NVFP4 = 5
    MXFP4 = 6
    MXINT4 = 7
    INT4 = 8
