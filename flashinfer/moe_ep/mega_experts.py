"""The experts of a rank: their weights as the products read them, rows as they travel, and both products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import present, require, require_tensor, same_device
from flashinfer.fused_moe import QuantFormat, experts
from flashinfer.moe_ep import formats
from flashinfer.moe_ep.backend import MoEEpDispatchResult
from flashinfer.moe_ep.mega_config import Bf16MegaMoeConfig, FleetParams, Fp8MegaMoeConfig, Scaled
from flashinfer.moe_ep.tensors import MoEWeightPack
from flashinfer.ops import narrow

_FP8 = torch.float8_e4m3fn
_SIDE = 128
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What rows travel as.
_TRAVEL = {"bf16": None, "fp8_block": QuantFormat.DeepSeekFp8, "fp8": QuantFormat.FP8PerTensor}


@dataclass(frozen=True, eq=False)
class Experts:
    """Experts `offset` to `offset + count - 1`.

    input_scale : float32 [1], what per_tensor rows are divided by; None of others.
    """

    encoding: str
    offset: int
    count: int
    weights: MoEWeightPack
    first: experts.Weight
    second: experts.Weight
    activation: experts.Activation
    between: experts.Between
    input_scale: torch.Tensor | None

    @property
    def row_dtype(self) -> torch.dtype:
        """Of rows as they travel."""
        return torch.bfloat16 if self.encoding == "bf16" else _FP8

    @property
    def dispatch_format(self) -> QuantFormat | None:
        """What rows travel as."""
        return _TRAVEL[self.encoding]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights.w13.device

    @property
    def transformed(self) -> tuple[Scaled, Scaled]:
        """The weights as `prepared` takes them back."""
        pack = self.weights
        return (pack.w13, pack.w13_scale), (pack.w2, pack.w2_scale)

    def rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """bfloat16 rows as they travel, and their scales."""
        if self.encoding == "fp8_block":
            return experts.quantized_tokens(x, "fp8_block", None)
        return (x, None) if self.input_scale is None else formats.quantise("FP8PerTensor", x, self.input_scale)

    def run(self, got: MoEEpDispatchResult, out: torch.Tensor) -> None:
        """The weighted sums of these experts for each row that arrived; rows of no token get zeros."""
        tokens = experts.Tokens(got.hidden_states, self.encoding, got.hidden_states_scale)
        routed = experts.Routed(got.topk_ids, got.topk_weights, self.offset, self.count)
        experts.run(tokens, routed, self.first, self.activation, self.between, self.second, out)


def _encoding(config: Bf16MegaMoeConfig | Fp8MegaMoeConfig) -> str:
    """The format of rows and weights, as the experts' room names it."""
    if isinstance(config, Bf16MegaMoeConfig):
        return "bf16"
    return "fp8_block" if config.fp8_scale_mode == "blockwise" else "fp8"


def prepared(
    config: Bf16MegaMoeConfig | Fp8MegaMoeConfig, fleet: FleetParams, rank: int, ranks: int,
    weights: MoEWeightPack | None, transformed: tuple[Scaled, Scaled] | None,
) -> Experts:  # fmt: skip
    """The experts of a rank, of weights in the order of checkpoints, or as an earlier call has transformed them."""
    encoding, count = _encoding(config), fleet.num_experts // ranks
    hidden = fleet.token_hidden_size
    whole = encoding != "fp8_block" or hidden % _SIDE == 0
    require(whole, "token_hidden_size", hidden, f"a multiple of {_SIDE}, for blockwise scales")
    if transformed is None:
        weights = present("weights", weights, "a MoEWeightPack, without transformed_weights")
        require(isinstance(weights, MoEWeightPack), "weights", type(weights).__name__, "a MoEWeightPack")
        _check(weights, config, count, hidden, "")
        weights = _arranged(weights, encoding)
    else:
        weights = _unpacked(transformed)
        _check(weights, config, count, hidden, "transformed_weights: ")
        stored = torch.bfloat16 if encoding == "bf16" else _FP8
        require(weights.w13.dtype == stored, "transformed_weights: w13", weights.w13.dtype, str(stored))
    clamp = config.gate_up_clamp
    limit = {} if clamp is None else {"numbers": experts.Numbers(limit=float(clamp)), "by_number": "L"}
    between, input_scale = experts.Between("" if encoding == "bf16" else encoding), None
    scales = {"w13": weights.w13_scale, "w2": weights.w2_scale} if encoding == "fp8_block" else {}
    if isinstance(config, Fp8MegaMoeConfig) and encoding == "fp8":
        before, after = config.fc1_activation_dequant_scale, config.fc2_activation_dequant_scale
        input_scale = torch.tensor([before], dtype=torch.float32, device=weights.w13.device)
        between = experts.Between(
            "fp8", scale=present("w13_scale", weights.w13_scale) * before,
            scale_out=torch.tensor([1 / after], dtype=torch.float32, device=weights.w13.device),
            second=present("w2_scale", weights.w2_scale) * after,
        )  # fmt: skip
    return Experts(
        encoding, rank * count, count, weights,
        first=experts.Weight("w13", weights.w13, encoding, scales.get("w13")),
        second=experts.Weight("w2", weights.w2, encoding, scales.get("w2")),
        activation=experts.Activation("swiglu", **limit), between=between, input_scale=input_scale,
    )  # fmt: skip


def _unpacked(transformed) -> MoEWeightPack:
    pairs = isinstance(transformed, tuple) and [isinstance(x, tuple) and len(x) for x in transformed] == [2, 2]
    allowed = "((w13, w13_scale), (w2, w2_scale)), a layer's"
    require(pairs, "transformed_weights", type(transformed).__name__, allowed)
    (w13, w13_scale), (w2, w2_scale) = transformed
    return MoEWeightPack(w13, w2, w13_scale, w2_scale)


def _check(pack: MoEWeightPack, config, count: int, hidden: int, at: str) -> None:
    """Shapes, dtypes and devices. at : what stands before names in errors."""
    middle, encoding = config.intermediate_size, _encoding(config)
    shapes = {"w13": (count, 2 * middle, hidden), "w2": (count, hidden, middle)}
    for name, shape in shapes.items():
        tensor = getattr(pack, name)
        require(tuple(tensor.shape) == shape, f"{at}{name}", tuple(tensor.shape), f"{shape}")
    require(pack.w2.dtype == pack.w13.dtype, f"{at}w2", pack.w2.dtype, f"{pack.w13.dtype}, as w13")
    same_device(w13=pack.w13, w2=pack.w2, w13_scale=pack.w13_scale, w2_scale=pack.w2_scale)
    if encoding == "bf16":
        require(pack.w13.dtype == torch.bfloat16, f"{at}w13", pack.w13.dtype, "bfloat16")
        require(pack.w13_scale is None, f"{at}w13_scale", "a tensor", "None with bfloat16")
        return
    dtypes = (_FP8, *_FLOATS)
    require(pack.w13.dtype in dtypes, f"{at}w13", pack.w13.dtype, ", ".join(map(str, dtypes)))
    quantised = pack.w13.dtype == _FP8
    for name, (experts_, rows, columns) in shapes.items():
        scale, name = getattr(pack, f"{name}_scale"), f"{at}{name}_scale"
        if not quantised:
            require(scale is None, name, "a tensor", f"None with {pack.w13.dtype}")
            continue
        require_tensor(name, scale)
        shape = (experts_,) if encoding == "fp8" else (experts_, rows // _SIDE, columns // _SIDE)
        fits = scale.dtype == torch.float32 and tuple(scale.shape) == shape
        require(fits, name, f"{scale.dtype} {tuple(scale.shape)}", f"float32 {shape}")


def _arranged(pack: MoEWeightPack, encoding: str) -> MoEWeightPack:
    """Weights, quantised if they are to be, with the up-projection's rows first."""
    (w13, scale13), (w2, scale2) = (pack.w13, pack.w13_scale), (pack.w2, pack.w2_scale)
    if encoding != "bf16" and scale13 is None:
        (w13, scale13), (w2, scale2) = _quantised(w13, encoding), _quantised(w2, encoding)
    if scale13 is not None and scale13.dim() == 3:
        scale13 = _up_first(scale13)
    return MoEWeightPack(_up_first(w13), w2.contiguous(), scale13, None if scale2 is None else scale2.contiguous())


def _up_first(x: torch.Tensor) -> torch.Tensor:
    # torch flips no float8.
    stored = x.view(torch.uint8) if x.dtype == _FP8 else x
    return stored.unflatten(1, (2, -1)).flip(1).flatten(1, 2).view(x.dtype)


def _quantised(weights: torch.Tensor, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and float32 scales, of an expert or of 128 x 128; an expert at a time, as float32 takes much memory."""
    codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device)
    count, n, k = weights.shape
    shape = (count,) if encoding == "fp8" else (count, n // _SIDE, k // _SIDE)
    scales = torch.empty(shape, dtype=torch.float32, device=weights.device)
    for expert, given in enumerate(weights):
        if encoding == "fp8":
            made, scale = narrow.quantize_fp8(given.float().flatten(), n * k, _FP8)
        else:
            blocks = given.float().unflatten(0, (-1, _SIDE)).unflatten(2, (-1, _SIDE)).transpose(1, 2)
            made, scale = narrow.quantize_fp8(blocks.flatten(2), _SIDE * _SIDE, _FP8)
            made = made.view(torch.uint8).unflatten(2, (_SIDE, _SIDE)).transpose(1, 2)
        codes[expert] = made.view(torch.uint8).reshape(n, k)
        scales[expert] = scale.view(shape[1:])
    return codes.view(_FP8), scales
