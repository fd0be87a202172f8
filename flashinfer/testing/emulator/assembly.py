"""The inline assembly of kernels: what each text computes. Others are refused."""

from __future__ import annotations

import re

import numpy as np
import triton.language as tl

from flashinfer.testing.emulator.errors import EmulationError, here
from flashinfer.testing.emulator.values import Lanes, Tensor, decode, encode, rounded, scalar

_WIDEN = re.compile(r"\.reg \.b16 lo, hi;.*cvt\.rn\.f16x2\.(e4m3|e5m2)x2")


def inline_assembly(asm: str, args: list, dtype, pack: int, program: int, programs: int):
    """What `gl.inline_asm_elementwise` returns."""
    if asm == "mov.b32 $0, $1;":
        x = args[0] if isinstance(args[0], Tensor) else scalar(args[0])
        return type(x)(x.a, x.dtype, x.layout)
    if asm == "mov.u32 $0, %nctaid.x;":
        return scalar(programs)
    if asm == "mov.u32 $0, %ctaid.x;":
        return scalar(program)
    if asm == "mov.u32 $0, %laneid;":
        return Lanes(np.arange(32, dtype=np.int32), tl.int32)
    if asm == "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;" and pack == 4:
        return _columns_of_pairs(args[0])
    found = _WIDEN.search(asm)
    if found:
        return _widened(args[0], tl.float8e4nv if found[1] == "e4m3" else tl.float8e5, "bf16x2" in asm)
    raise EmulationError(f"this assembly is not known to the emulator: {asm!r}, at {here()}")


def _widened(words: Tensor, kind, to_bf16: bool) -> tuple[Tensor, Tensor]:
    """Words of four FP8 elements as two words of two wider ones."""
    to = tl.bfloat16 if to_bf16 else tl.float16
    codes = np.ascontiguousarray(words.a).view(np.uint8).reshape(*words.shape, 4)
    wide = encode(rounded(decode(codes, kind), to), to)
    halves = np.ascontiguousarray(wide.reshape(*words.shape, 2, 2)).view(np.int32)
    return tuple(Tensor(halves[..., i, 0], tl.int32, words.layout) for i in range(2))


def _columns_of_pairs(x: Tensor) -> Tensor:
    """Of four neighbours in a thread's registers, int16 each, the even bytes and then the odd ones.

    Which elements are neighbours, the layout says: its first two bases of registers.
    """
    bases = getattr(x.layout, "reg_bases", None)
    if not bases or any(sorted(base)[0] != 0 or sum(n != 0 for n in base) != 1 for base in bases[:2]):
        raise EmulationError(f"bytes of neighbours in registers, whose layout is not known: {x.layout}, at {here()}")
    near, far = (np.array(base) for base in bases[:2])
    bytes_of = np.ascontiguousarray(x.a).view(np.uint8).reshape(*x.shape, 2)
    places = np.indices(x.shape).reshape(len(x.shape), -1).T
    first = places[((places & (near + far)) == 0).all(1)]
    four = [tuple((first + step).T) for step in (0, near, far, near + far)]
    flat = np.stack([bytes_of[at] for at in four], 1).reshape(len(first), 8)
    turned = np.concatenate([flat[:, 0::2], flat[:, 1::2]], 1).reshape(len(first), 4, 2)
    out = np.empty_like(bytes_of)
    for i, at in enumerate(four):
        out[at] = turned[:, i]
    return Tensor(out.reshape(*x.shape[:-1], -1).view(np.int16).reshape(x.shape), x.dtype, x.layout)
