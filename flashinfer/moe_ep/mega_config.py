"""The sizes of a layer over ranks, and what its experts compute."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer._core.checks import present, require


@dataclass(frozen=True)
class FleetParams:
    """The sizes of a layer over ranks: the same on every rank.

    Parameters
    ----------
    num_experts : int
        On all ranks together; a multiple of their number. Expert e is on rank ``e // (num_experts / ranks)``.
    max_tokens_per_rank : int
        The most tokens of a rank in one call.
    token_hidden_size : int
        Elements of a token's row.
    dtype_bytes : int
        Of an element of the result. Only 2.
    algorithm, layout
        Of upstream's transports of two halves. Only None.

    Raises
    ------
    ValueError
        A field other than the above.

    Examples
    --------
    >>> from flashinfer.moe_ep import FleetParams
    >>> FleetParams(num_experts=8, max_tokens_per_rank=16, token_hidden_size=256).max_tokens_per_rank
    16
    """

    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int
    dtype_bytes: int = 2
    algorithm: Any = None
    layout: Any = None

    def __post_init__(self):
        for name in ("num_experts", "max_tokens_per_rank", "token_hidden_size"):
            require_count(name, getattr(self, name))
        require(self.dtype_bytes == 2, "dtype_bytes", self.dtype_bytes, "2, of bfloat16")
        for name in ("algorithm", "layout"):
            require(getattr(self, name) is None, name, getattr(self, name), "None")


def require_count(name: str, value) -> None:
    """Raise ValueError naming `value` unless it is an int of at least 1."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value > 0, name, value, "an int of at least 1")


def _require_kernel(config) -> None:
    """The fields that both kinds of experts have."""
    require_count("intermediate_size", config.intermediate_size)
    require_count("top_k", config.top_k)
    clamp = config.gate_up_clamp
    fits = clamp is None or isinstance(clamp, (int, float)) and 0 < clamp < math.inf
    require(fits, "gate_up_clamp", clamp, "None, or a number above 0")


@dataclass(frozen=True)
class Bf16MegaMoeConfig:
    """Experts in bfloat16: ``w2 @ (silu(gate) * up)``, rows and weights bfloat16, sums float32.

    Parameters
    ----------
    intermediate_size : int
        Columns of w2, half the rows of w13.
    top_k : int
        Experts of a token.
    gate_up_clamp : float, optional
        The largest gate, and the largest magnitude of what the up-projection gives.

    Raises
    ------
    ValueError
        A field other than the above.

    Examples
    --------
    >>> from flashinfer.moe_ep import Bf16MegaMoeConfig
    >>> Bf16MegaMoeConfig(intermediate_size=512, top_k=4).gate_up_clamp is None
    True
    """

    intermediate_size: int
    top_k: int
    gate_up_clamp: float | None = None

    def __post_init__(self):
        _require_kernel(self)


@dataclass(frozen=True)
class Fp8MegaMoeConfig:
    """Experts in float8_e4m3fn: ``w2 @ q(silu(gate) * up)`` of rows q(x), which travel as FP8. Sums are float32.

    ============  ===========================================  ====================================================
    scale mode    rows, between the products too               scales of the weights, float32
    ============  ===========================================  ====================================================
    blockwise     a float32 scale for 128 columns of a row,    of 128 x 128 weights: w13_scale [experts, 2 *
                  its largest magnitude over 448               intermediate / 128, hidden / 128], the gate's first;
                                                               w2_scale [experts, hidden / 128, intermediate / 128]
    per_tensor    one scale for all rows of all ranks          of an expert: w13_scale and w2_scale [experts]
    ============  ===========================================  ====================================================

    Parameters
    ----------
    intermediate_size : int
        Columns of w2, half the rows of w13; blockwise a multiple of 128, as is the hidden size.
    top_k, gate_up_clamp
        As in `Bf16MegaMoeConfig`.
    fp8_scale_mode : str
        "blockwise" or "per_tensor".
    fc1_activation_dequant_scale, fc2_activation_dequant_scale : float
        The scales of per_tensor rows, before the first and the second product; the same on every rank. They multiply
        the codes. What is over 448 times its scale becomes that. Only 1 for blockwise.

    Raises
    ------
    ValueError
        A field other than the above.

    Examples
    --------
    >>> from flashinfer.moe_ep import Fp8MegaMoeConfig
    >>> Fp8MegaMoeConfig(intermediate_size=512, top_k=4).fp8_scale_mode
    'blockwise'
    """

    intermediate_size: int
    top_k: int
    fp8_scale_mode: str = "blockwise"
    gate_up_clamp: float | None = None
    fc1_activation_dequant_scale: float = 1.0
    fc2_activation_dequant_scale: float = 1.0

    def __post_init__(self):
        _require_kernel(self)
        mode = self.fp8_scale_mode
        require(mode in ("blockwise", "per_tensor"), "fp8_scale_mode", repr(mode), "'blockwise', 'per_tensor'")
        for name in ("fc1_activation_dequant_scale", "fc2_activation_dequant_scale"):
            scale = getattr(self, name)
            if mode == "blockwise":
                require(scale == 1, name, scale, "1, as blockwise rows have scales of their own")
            require(0 < scale < math.inf, name, scale, "a number above 0")
        whole = mode == "per_tensor" or self.intermediate_size % 128 == 0
        require(whole, "intermediate_size", self.intermediate_size, "a multiple of 128, for blockwise scales")


Scaled = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class MegaConfig:
    """What `MoEEpMegaLayer` computes, and who quantises.

    Parameters
    ----------
    megakernel : Bf16MegaMoeConfig or Fp8MegaMoeConfig
        What experts compute.
    quantize_input : bool
        Whether rows are bfloat16, which FP8 experts have quantised before they travel. If not, FP8 experts take rows
        that are float8_e4m3fn.
    preprocess_weights : bool
        Whether the layer prepares the weights. If not, transformed_weights is needed.
    transformed_weights : tuple, optional
        ``((w13, w13_scale), (w2, w2_scale))`` as another layer's `transformed_weights`: in place of the weights.

    Raises
    ------
    ValueError
        A field other than the above.

    Examples
    --------
    >>> from flashinfer.moe_ep import Bf16MegaMoeConfig, MegaConfig
    >>> MegaConfig(Bf16MegaMoeConfig(intermediate_size=512, top_k=4)).quantize_input
    True
    """

    megakernel: Bf16MegaMoeConfig | Fp8MegaMoeConfig
    quantize_input: bool = True
    preprocess_weights: bool = True
    transformed_weights: tuple[Scaled, Scaled] | None = None

    def __post_init__(self):
        kinds = (Bf16MegaMoeConfig, Fp8MegaMoeConfig)
        known = isinstance(self.megakernel, kinds)
        require(known, "megakernel", self.megakernel, " or ".join(kind.__name__ for kind in kinds))
        if not self.preprocess_weights:
            present("transformed_weights", self.transformed_weights, "a layer's, without preprocess_weights")
