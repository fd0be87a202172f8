"""The formats in which rows travel: bytes of a row, and how rows become so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer._core.checks import present, require
from flashinfer.ops import narrow
from flashinfer.quantization import fp4_quantize, mxfp8_quantize

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """Rows as they travel.

    code_bits : of an element.
    width : columns that share a scale; 1 where none travels.
    scale_dtype : of a scale; None where none travels.
    code_dtypes : that codes may have.
    """

    code_bits: int
    width: int = 1
    scale_dtype: torch.dtype | None = None
    code_dtypes: tuple[torch.dtype, ...] = ()

    def bytes_of(self, hidden: int) -> int:
        scales = 0 if self.scale_dtype is None else hidden // self.width * self.scale_dtype.itemsize
        return hidden * self.code_bits // 8 + scales


FORMATS = {
    "BF16": Format(16, code_dtypes=(torch.bfloat16,)),
    "FP16": Format(16, code_dtypes=(torch.float16,)),
    "FP8PerTensor": Format(8, code_dtypes=(_FP8, torch.uint8)),
    "DeepSeekFp8": Format(8, 128, torch.float32, (_FP8, torch.uint8)),
    "MXFP8": Format(8, 32, torch.uint8, (_FP8, torch.uint8)),
    "NVFP4": Format(4, 16, torch.uint8, (torch.uint8,)),
    "MXFP4": Format(4, 32, torch.uint8, (torch.uint8,)),
}
# Of one byte, whatever their name.
_BYTES = (torch.uint8, _FP8, getattr(torch, "float8_e8m0fnu", torch.uint8))


def is_quantised(name: str, x: torch.Tensor) -> bool:
    return FORMATS[name].code_bits < 16 and x.dtype.itemsize == 1


def check_codes(name: str, x: torch.Tensor, scale: torch.Tensor | None, hidden: int) -> None:
    """Rows that the caller has quantised, and their scales."""
    number_format = FORMATS[name]
    shape = (len(x), hidden * number_format.code_bits // 8 // x.element_size())
    fits = tuple(x.shape) == shape and x.dtype in number_format.code_dtypes
    named = ", ".join(str(dtype) for dtype in number_format.code_dtypes)
    require(fits, "hidden_states", f"{x.dtype} {tuple(x.shape)}", f"{named} {shape}, of {name}")
    if number_format.scale_dtype is None:
        require(scale is None, "hidden_states_scale", "a tensor", f"None, for scales of {name} do not travel")
        return
    shape = (len(x), hidden // number_format.width)
    allowed = (torch.float32,) if number_format.scale_dtype == torch.float32 else _BYTES
    fits = scale is not None and tuple(scale.shape) == shape and scale.dtype in allowed
    got = None if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
    require(fits, "hidden_states_scale", got, f"{number_format.scale_dtype} {shape}, of {name}")


def quantise(name: str, x: torch.Tensor, global_scale) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [tokens, hidden] as codes and scales of a format."""
    needs = name in ("NVFP4", "FP8PerTensor")
    require(needs or global_scale is None, "global_scale", global_scale, f"None, for {name} has none")
    if needs:
        given = present("global_scale", global_scale, f"a number or a float32 tensor, for {name}")
        global_scale = torch.as_tensor(given, dtype=torch.float32, device=x.device).reshape(-1)
        require(global_scale.numel() == 1, "global_scale", tuple(global_scale.shape), "one element")
        if name == "FP8PerTensor":
            return narrow.to_fp8(x.float() * (1 / global_scale), _FP8), None
    number_format = FORMATS[name]
    if len(x) == 0:
        codes = x.new_empty((0, x.shape[1] * number_format.code_bits // 8), dtype=number_format.code_dtypes[0])
        return codes, x.new_empty((0, x.shape[1] // number_format.width), dtype=number_format.scale_dtype)
    if name == "DeepSeekFp8":
        return narrow.quantize_fp8(x.float(), number_format.width, _FP8)
    # The quantisers take 16 bits; float32 rows are rounded first.
    x = x if x.dtype in (torch.bfloat16, torch.float16) else x.bfloat16()
    if name == "MXFP8":
        codes, scale = mxfp8_quantize(x, is_sf_swizzled_layout=False)
    else:
        ue8m0 = name == "MXFP4"
        codes, scale = fp4_quantize(x, global_scale, number_format.width, ue8m0, is_sf_swizzled_layout=False)
    return codes, scale.view(torch.uint8).reshape(len(x), -1)
