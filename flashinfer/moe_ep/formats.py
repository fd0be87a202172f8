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
    code_dtype : that of codes that are made here.
    """

    code_bits: int
    width: int = 1
    scale_dtype: torch.dtype | None = None
    code_dtype: torch.dtype = torch.uint8

    def bytes_of(self, hidden: int) -> int:
        scales = 0 if self.scale_dtype is None else -(-hidden // self.width) * self.scale_dtype.itemsize
        return -(-hidden * self.code_bits // 8) + scales


FORMATS = {
    "BF16": Format(16, code_dtype=torch.bfloat16),
    "FP16": Format(16, code_dtype=torch.float16),
    "FP8PerTensor": Format(8, code_dtype=_FP8),
    "DeepSeekFp8": Format(8, 128, torch.float32, _FP8),
    "MXFP8": Format(8, 32, torch.uint8, _FP8),
    "NVFP4": Format(4, 16, torch.uint8),
    "MXFP4": Format(4, 32, torch.uint8),
}


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
    width, hidden = number_format.width, x.shape[1]
    require(hidden % width == 0, "hidden_states", f"rows of {hidden}", f"rows of a multiple of {width}, for {name}")
    if len(x) == 0:
        codes = x.new_empty((0, x.shape[1] * number_format.code_bits // 8), dtype=number_format.code_dtype)
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
