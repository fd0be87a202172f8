"""The inline assembly of kernels: what each text computes. Others are refused."""

from __future__ import annotations

import re

import numpy as np
import triton.language as tl

from flashinfer.testing.emulator.errors import EmulationError, here
from flashinfer.testing.emulator.values import Lanes, Tensor, decode, encode, rounded, scalar

_WIDEN = re.compile(r"\.reg \.b16 lo, hi;.*cvt\.rn\.f16x2\.(e4m3|e5m2)x2")

# Codes of a word times a factor, which stands twice in another word; a factor in e4m3 as such a word.
_TIMES_FP8 = re.compile(r"cvt\.rn\.f16x2\.(e4m3|e5m2)x2 h, second;")
_TIMES_E2M1 = "mul.lo.u32 $0, $0, 0x1040;"
_TIMES_E2M1_AS_HALF = "prmt.b32 $0, low, 0, 0x2404;"
_FACTOR_AS_HALF = "cvt.rn.f16x2.e4m3x2 $0, first;"
_BY_2_126 = "mov.b32 most, 0x7E807E80;"
_FACTOR = "mul.f32 x, x, 0f7A800000;"
# 2^x of several numbers, some of them by a polynomial.
_BY_FMA = "max.NaN.f32 t, $"

# One of the instructions that decode a word of eight e2m1 codes.
_FRAGMENTS = "lop3.b32 $3, $3, 0x80C080C0, moved, 0xEA;"


def inline_assembly(asm: str, args: list, dtype, pack: int, program: int, programs: int):
    """What `gl.inline_asm_elementwise` returns."""
    if asm in ("mov.b32 $0, $1;", "mov.b64 $0, $1;"):
        x = args[0] if isinstance(args[0], Tensor) else scalar(args[0])
        return type(x)(x.a, x.dtype, x.layout)
    if asm == "mov.u32 $0, %nctaid.x;":
        return scalar(programs)
    if asm == "mov.u32 $0, %ctaid.x;":
        return scalar(program)
    if asm == "prefetch.global.L2 [$1]; mov.b32 $0, 0;":
        return scalar(0)
    if asm == "mov.u32 $0, %laneid;":
        return Lanes(np.arange(32, dtype=np.int32), tl.int32)
    if asm == "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;" and pack == 4:
        return _columns_of_pairs(args[0])
    if _FRAGMENTS in asm and pack == 4:
        return _fragments(*args)
    if asm == "ex2.approx.ftz.f32 $0, $1;" or _BY_FMA in asm:
        return Tensor(_flushed(np.exp2(args[0].a)), tl.float32, args[0].layout)
    if asm == "rcp.approx.ftz.f32 $0, $1;":
        with np.errstate(divide="ignore"):
            return Tensor(_flushed(np.float32(1) / _flushed(args[0].a)), tl.float32, args[0].layout)
    if asm == "cvt.rn.bf16x2.f32 $0, $2, $1;" and pack == 2:
        return Tensor(rounded(args[0].a, tl.bfloat16), tl.bfloat16, args[0].layout)
    if _FACTOR in asm:
        codes = (args[0].a & 0xFF).astype(np.uint8)
        scaled = decode(codes, tl.float8e4nv) * np.float32(2.0**118)
        return Tensor(_twice(encode(scaled, tl.bfloat16)), tl.int32, args[0].layout)
    if _FACTOR_AS_HALF in asm:
        codes = np.ascontiguousarray(args[0].a).view(np.uint8).reshape(*args[0].shape, 4)[..., :2]
        halves = np.ascontiguousarray(encode(decode(codes, tl.float8e4nv), tl.float16))
        return Tensor(halves.view(np.int32)[..., 0], tl.int32, args[0].layout)
    if _TIMES_E2M1_AS_HALF in asm and pack == 4:
        return _halves(*args)
    if _TIMES_E2M1 in asm and pack == 4:
        return _pairs(*args, _BY_2_126 in asm)
    found = _TIMES_FP8.search(asm)
    if found and pack == 4:
        return _times(decode(args[0].a, tl.float8e4nv if found[1] == "e4m3" else tl.float8e5), *args)
    found = _WIDEN.search(asm)
    if found:
        return _widened(args[0], tl.float8e4nv if found[1] == "e4m3" else tl.float8e5, "bf16x2" in asm)
    raise EmulationError(f"this assembly is not known to the emulator: {asm!r}, at {here()}")


def _flushed(x: np.ndarray) -> np.ndarray:
    """float32 with subnormal numbers as 0."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _widened(words: Tensor, kind, to_bf16: bool) -> tuple[Tensor, Tensor]:
    """Words of four FP8 elements as two words of two wider ones."""
    to = tl.bfloat16 if to_bf16 else tl.float16
    codes = np.ascontiguousarray(words.a).view(np.uint8).reshape(*words.shape, 4)
    wide = encode(rounded(decode(codes, kind), to), to)
    halves = np.ascontiguousarray(wide.reshape(*words.shape, 2, 2)).view(np.int32)
    return tuple(Tensor(halves[..., i, 0], tl.int32, words.layout) for i in range(2))


def _twice(halves: np.ndarray) -> np.ndarray:
    """16 bits, twice in a word each."""
    words = halves.view(np.uint16).astype(np.uint32)
    return (words | words << np.uint32(16)).view(np.int32)


def _times(values: np.ndarray, bytes_of: Tensor, factors: Tensor, kind=tl.bfloat16) -> Tensor:
    """Values, four neighbours of which are those of a word, times the number in the lower half of each factor."""
    factor = decode((np.broadcast_to(factors.a, values.shape) & 0xFFFF).astype(np.uint16), kind)
    return Tensor(rounded(values * factor, kind), kind, bytes_of.layout)


def _halves(bytes_of: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """As `_pairs`, by float16: the bytes of a code and of a zero are the value over 2^14."""
    shape = bytes_of.shape
    word = np.ascontiguousarray(bytes_of.a).view(np.uint32)
    high = word & np.uint32(0x80808080) | word >> np.uint32(3) & np.uint32(0x0E0E0E0E)
    low = word << np.uint32(4) & np.uint32(0x80808080) | word << np.uint32(1) & np.uint32(0x0E0E0E0E)
    both = np.stack([low, high], -1)
    two = [(both << np.uint32(8 * (1 - i))) & np.uint32(0xFF00FF00) for i in range(2)]
    values = [decode(np.ascontiguousarray(x).view(np.uint16), tl.float16).reshape(shape) for x in two]
    return tuple(_times(x, bytes_of, factors, tl.float16) for x in values)


def _pairs(bytes_of: Tensor, factors: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Eight e2m1 codes of a word, two of them four codes apart to an instruction, times the word's factor.

    whole : the value itself, not its bits as a bfloat16, which are the value over 2^126, is multiplied."""
    shape = bytes_of.shape
    word = np.ascontiguousarray(bytes_of.a).view(np.uint32)[..., None]
    mask = np.array([0x000F000F, 0x00F000F0], np.uint32)
    times = np.array([0x1040, 0x0104], np.uint32)
    two = [(part & mask) * times & np.uint32(0x81C081C0) for part in (word, word >> np.uint32(8))]
    values = [decode(x.view(np.uint16), tl.bfloat16) * np.float32(2.0**126 if whole else 1) for x in two]
    return tuple(_times(x.reshape(shape), bytes_of, factors) for x in values)


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


def _fragments(codes: Tensor, near: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
    """Eight e2m1 codes of a word, two to an instruction, times factors: those of 32 columns, and of the next 32.

    A word is four neighbours in a thread's registers: of wgmma's first operand two columns, and the same 8 rows on.
    """
    layout = codes.layout
    if getattr(layout, "operand_index", None) != 0 or getattr(layout, "k_width", None) != 2:
        raise EmulationError(f"words of fragments, whose layout is not known: {layout}, at {here()}")
    rows, columns = codes.shape

    def neighbours(x):
        # rows / 16, row, columns / 2; 8 rows on, column
        whole = np.ascontiguousarray(np.broadcast_to(x.a, (rows, columns)))
        return whole.reshape(rows // 16, 2, 8, columns // 2, 2).transpose(0, 2, 3, 1, 4)

    word = np.ascontiguousarray(neighbours(codes)).reshape(-1, 4).view(np.uint32).reshape(rows // 16, 8, columns // 2)
    turned = word >> np.uint32(4) | word << np.uint32(28)
    last = word << np.uint32(2) & np.uint32(0x80C080C0) | word >> np.uint32(6) & np.uint32(0x01000100)
    pairs = [x & np.uint32(0x81C081C0) for x in (word, turned, word << np.uint32(6))] + [last]
    found = []
    for two, factors in ((pairs[:2], near), (pairs[2:], far)):
        bits = np.ascontiguousarray(np.stack(two, -1)).view(np.uint16).reshape(rows // 16, 8, columns // 2, 2, 2)
        factor = (neighbours(factors) & 0xFFFF).astype(np.uint16)
        value = rounded(decode(bits, tl.bfloat16) * decode(factor, tl.bfloat16), tl.bfloat16)
        found.append(Tensor(value.transpose(0, 3, 1, 2, 4).reshape(rows, columns), tl.bfloat16, layout))
    return tuple(found)
