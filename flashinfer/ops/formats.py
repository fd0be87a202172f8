"""The number formats: what a code is, which factor a block of codes shares, and where factors lie.

A value is code * factor of its block, times or over a scale of the whole tensor where a function takes one: each such
argument's docstring says which, and docs/rooms/quantize.md has them in a table. Conversions are in `narrow` (torch) and
in `flashinfer/ops/_device/formats.py` (kernels), blocks and the arrangement of factors in `layouts` and in
`flashinfer/ops/_device/scales.py`.

An example, NVFP4 with a global scale g = 448 * 6 / 12 = 224, of a block whose largest magnitude is 3: its factor is
e4m3(224 * 3 / 6) = 112, the code of 3 is e2m1(3 / (112 / 224)) = 6, and 6 * 112 / 224 is 3 again.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0; for NVFP4 the PTX
ISA, block scaling of mma.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of tensors of factors of a byte. Engines hold bytes of ue8m0 as e4m3, too.
FACTOR_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)

@dataclass(frozen=True)
class Element:
    """One code.

    bits : of a code; codes of 4 bits lie two in a byte, the first in the low half. largest : finite magnitude.
    dtype : of a tensor of codes; bytes where torch has no dtype of its own.
    """

    bits: int
    largest: float
    dtype: torch.dtype

    @property
    def per_byte(self) -> int:
        """Codes in an element of `dtype`."""
        return 2 if self.bits == 4 else 1


def _torch(dtype: torch.dtype) -> Element:
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return Element(info.bits, float(info.max), dtype)


ELEMENTS = {
    "fp32": _torch(torch.float32),
    "bf16": _torch(torch.bfloat16),
    "fp16": _torch(torch.float16),
    "fp8e4nv": _torch(torch.float8_e4m3fn),
    "fp8e5": _torch(torch.float8_e5m2),
    "i8": _torch(torch.int8),
    "e2m1": Element(4, 6.0, torch.uint8),
    "i4": Element(4, 7.0, torch.uint8),
    # Of factors alone: e4m3 without a sign, and powers of two from 2^-127 to 2^127. Both are kept as bytes.
    "ue4m3": Element(8, 448.0, torch.uint8),
    "ue8m0": Element(8, 2.0**127, torch.uint8),
}


@dataclass(frozen=True)
class Format:
    """Codes in blocks.

    element : of ELEMENTS. factor : of ELEMENTS, "" where blocks have none. width : codes of a row that share a factor;
    1 without factors, 0 where a row has one.
    global_scale : "divides" where factors are made for values times a scale of the whole tensor, so that a value is
    code * factor / scale; "" where there is none.
    """

    element: str
    factor: str = ""
    width: int = 1
    global_scale: str = ""

    def code_bytes(self, columns: int) -> int:
        return columns * ELEMENTS[self.element].bits // 8

    def blocks(self, columns: int) -> int:
        """Factors of a row of a format that has them."""
        return columns // self.width if self.width else 1

    @property
    def per_byte(self) -> int:
        """Codes in a byte, of elements of 8 or 4 bits."""
        return ELEMENTS[self.element].per_byte


FORMATS = {
    "bf16": Format("bf16"),
    "fp16": Format("fp16"),
    "fp32": Format("fp32"),
    "fp8e4nv": Format("fp8e4nv"),
    "fp8e5": Format("fp8e5"),
    "int8": Format("i8"),
    "fp8_block": Format("fp8e4nv", "fp32", 128),
    "mxfp8": Format("fp8e4nv", "ue8m0", 32),
    "mxfp4": Format("e2m1", "ue8m0", 32),
    "nvfp4": Format("e2m1", "ue4m3", 16, global_scale="divides"),
    "mxint4": Format("i4", "bf16", 32),
    "int4": Format("i4", "bf16", 128),
}

# Of keys and values in caches with factors, by the names that `kv_data_type` has for them. A row is a head of a token.
KV_FORMATS = {
    "nvfp4": FORMATS["nvfp4"],
    "fp8_per_token_head": Format("fp8e4nv", "fp32", 0),
    "int8_per_token_head": Format("i8", "fp32", 0),
    "int4_per_token_head": Format("i4", "fp32", 0),
    "int4_group_64": Format("i4", "fp32", 64),
}
# What callers may say for them: the name, or uint8, as upstream has it for nvfp4.
KV_NAMES = {name: name for name in KV_FORMATS}
KV_NAMES |= dict.fromkeys((torch.uint8, "uint8", "torch.uint8"), "nvfp4")
