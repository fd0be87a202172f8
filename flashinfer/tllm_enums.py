"""Enumerations whose names and values callers share with TensorRT-LLM's kernels."""

from __future__ import annotations

from enum import IntEnum

# The SwiGLU of `silu(gate) * up` as the parametrised form has it: gate * sigmoid(alpha * gate) * (up + beta), both
# clamped to limit; float32's largest number clamps nothing.
DEFAULT_SWIGLU_ALPHA = 1.0
DEFAULT_SWIGLU_BETA = 0.0
DEFAULT_SWIGLU_LIMIT = float.fromhex("0x1.fffffep127")


class _Evaluable(IntEnum):
    """What `repr` shows of a member is the expression that gives it: configurations that hold one can be read again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class SfLayout(_Evaluable):
    """Where block scale factors lie: row-major, or in tiles of 128 or 8 rows and 4 factors, padded with zeros.

    `flashinfer/ops/layouts.py` states the layouts.
    """

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


class RoutingMethodType(_Evaluable):
    """How a token's experts and their weights come from its router logits.

    `flashinfer/ops/moe/routing/__init__.py` states each.
    """

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    TopKSigmoid = 9
    Unspecified = 10


class ActivationType(_Evaluable):
    """What stands between the two matrix products of an expert."""

    Gelu = 0
    Relu = 1
    Silu = 2
    Swiglu = 3
    Geglu = 4
    SwigluBias = 5
    Relu2 = 6
    SwigluStep = 7
    GegluTanh = 8
    Identity = 9
    Situ = 10
    InvalidType = 11
    ClampedRelu2 = 12

    @property
    def is_gated(self) -> bool:
        """Whether it multiplies two halves of the first product, the gate's and the up-projection's."""
        return self in _GATED


_GATED = frozenset(
    {
        ActivationType.Swiglu,
        ActivationType.Geglu,
        ActivationType.SwigluBias,
        ActivationType.SwigluStep,
        ActivationType.GegluTanh,
        ActivationType.Situ,
    }
)


def is_gated_activation(activation_type: int | ActivationType) -> bool:
    """Whether an activation multiplies two halves of the first product, the gate's and the up-projection's.

    Parameters
    ----------
    activation_type : int or ActivationType
        A member or its number.

    Returns
    -------
    bool

    Raises
    ------
    ValueError
        A number that is no member's.

    Examples
    --------
    >>> from flashinfer.tllm_enums import ActivationType, is_gated_activation
    >>> is_gated_activation(ActivationType.Swiglu), is_gated_activation(1)
    (True, False)
    """
    return ActivationType(activation_type).is_gated


class Fp8QuantizationType(_Evaluable):
    """What an FP8 expert's scale factors stand for.

    Blocks of 128 as DeepSeek has them, blocks of 32 with e8m0 factors, tensors, or channels.
    """

    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2
    PerTensorFp8 = 3
    PerChannelFp8 = 4


class WeightLayout(_Evaluable):
    """How an expert's weight [rows, columns], with columns the summed dimension, lies in memory.

    MajorK : [rows, columns].
    MajorMn : [columns, rows].
    BlockMajorK : [columns / block, rows, block], a block 128 bytes of a row.
    """

    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2
