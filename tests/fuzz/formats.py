"""Random calls of quantisation, bit for bit as the formats' specifications say."""

import numpy as np
import torch

import flashinfer
from flashinfer import SfLayout
from flashinfer.quantization import per_token_group_quant_8bit
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise, assert_close
from flashinfer.testing.fuzz import Call
from tests.ops.quantize import truth


def blocks(draw):
    n = draw.pick(1, 2, 5, 130)
    return draw.tensor(n, draw.fitting((32, 64, 96, 160, 1024), n), dtype=draw.half())


def fp4_quantize(draw):
    x, swizzled = blocks(draw), draw.chance()
    scale = torch.tensor([draw.pick(0.25, 1.0, 448 * 6 / 5.0, 37.5)], dtype=torch.float32, device=draw.device)
    arguments = dict(input=x, global_scale=scale, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=swizzled)

    def check(result):
        nibbles, factors = truth.nvfp4(x, scale)
        assert_bitwise(result[0].view(torch.uint8), truth.pack(nibbles), "codes")
        expected = truth.arranged(factors, "128x4" if swizzled else "linear")
        assert_bitwise(result[1].view(torch.uint8).flatten(), expected, "factors")

    return Call(flashinfer.fp4_quantize, arguments, check)


def mxfp8_quantize(draw):
    x, swizzled = blocks(draw), draw.chance()

    def check(result):
        codes, factors = truth.mx(x, "e4m3")
        assert_bitwise(result[0].view(torch.uint8), codes, "codes")
        expected = truth.arranged(factors, "128x4" if swizzled else "linear")
        assert_bitwise(result[1].view(torch.uint8).flatten(), expected, "factors")

    return Call(flashinfer.mxfp8_quantize, dict(input=x, is_sf_swizzled_layout=swizzled), check)


def rows_of(draw, width):
    """Rows of blocks under any leading dimensions, some of a wider tensor."""
    lead = draw.pick((0,), (1,), (5,), (130,), (2, 3), (2, 1, 9))
    x = draw.values(*lead, width * draw.pick(1, 3, 6), dtype=draw.float())
    return generate.strided(x, len(lead) - 1, 32) if x.numel() and draw.chance(0.3) else x


def layout_of(draw):
    return draw.pick((SfLayout.layout_128x4, "128x4"), (SfLayout.layout_8x4, "8x4"), (SfLayout.layout_linear, "linear"))


def same_bytes(result, codes, factors, name):
    assert_bitwise(result[0].view(torch.uint8).flatten(), codes.flatten(), "codes")
    assert_bitwise(result[1].view(torch.uint8).flatten(), truth.arranged(factors, name), "factors")


def laid_out(draw):
    """NVFP4, MXFP4 and MXFP8 in every layout of factors."""
    kind, (layout, name) = draw.pick("nvfp4", "mxfp4", "mxfp8"), layout_of(draw)
    x = rows_of(draw, 16 if kind == "nvfp4" else 32)
    rows = x.reshape(-1, x.shape[-1])
    backend = draw.pick("cuda", "cute-dsl")
    if kind == "nvfp4":
        scale = draw.pick(1.0, 37.5, 448 * 6 / 5.0)
        given = torch.tensor(scale, dtype=torch.float32, device=draw.device).view(draw.pick((), (1,), (1, 1)))
        arguments = dict(a=x, a_global_sf=draw.pick(given, scale), sfLayout=layout, backend=backend)
        expected = truth.nvfp4(rows, given.view(1))
        codes, function = truth.pack(expected[0]), flashinfer.nvfp4_quantize
    elif kind == "mxfp4":
        arguments, expected = dict(a=x, sfLayout=layout, backend=backend), truth.mx(rows, "e2m1")
        codes, function = truth.pack(expected[0]), flashinfer.mxfp4_quantize
    else:
        arguments = dict(input=x, sf_swizzle_layout=layout, is_sf_swizzled_layout=draw.chance(), backend=backend)
        multiple = draw.pick(32, 64, 128)
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % multiple))
        expected = truth.mx(padded, "e4m3")
        arguments |= dict(alignment=multiple)
        codes, function = expected[0], flashinfer.mxfp8_quantize

    def check(result):
        assert result[0].shape[:-1] == x.shape[:-1]
        same_bytes(result, codes, expected[1], name)

    return Call(function, arguments, check)


def batched(draw):
    """A batch of matrices, whose factors have tiles of their own."""
    x = draw.values(draw.pick(1, 3), draw.pick(1, 5, 130), 16 * draw.pick(1, 3, 6), dtype=draw.float())
    scales = torch.rand(draw.pick(1, len(x)), device=draw.device) * 40 + 0.5
    expected = [truth.nvfp4(each, scale.view(1)) for each, scale in zip(x, scales.expand(len(x)))]

    def check(result):
        codes, factors = (torch.stack(part) for part in zip(*expected))
        assert_bitwise(result[0].view(torch.uint8), truth.pack(codes), "codes")
        tiles = torch.stack([truth.arranged(each, "128x4") for each in factors])
        assert_bitwise(result[1].view(torch.uint8).reshape(tiles.shape), tiles, "factors")

    return Call(flashinfer.nvfp4_batched_quantize, dict(a=x, a_global_sf=scales), check)


def token_groups(draw):
    """Groups of rows in FP8 and INT8, with scales in every order."""
    size = draw.pick(16, 32, 64, 128)
    x = draw.values(*draw.pick((0,), (1,), (7,), (2, 3)), size * draw.pick(1, 3), dtype=draw.float())
    dtype, eps = draw.pick(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8), draw.pick(1e-10, 1e-3)
    columns = x.dim() == 2 and draw.chance()
    powers = columns and draw.chance()
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    groups = x.double().unflatten(-1, (-1, size))
    scale = truth.rounded(groups.abs().amax(-1).clamp(min=truth_of(eps))) / largest
    scale = truth.rounded(scale)
    if powers:
        scale = torch.exp2(scale.clamp(min=truth_of(1e-10)).log2().ceil())

    def check(result):
        codes, scales = result
        assert codes.shape == x.shape and codes.dtype == dtype
        assert_close(scales, scale.float(), scale, "scales")
        wide = codes.double().unflatten(-1, (-1, size)) * scales.double()[..., None]
        step = 0.5 if dtype == torch.int8 else 0.0
        spacing = 0.0 if dtype == torch.int8 else torch.finfo(dtype).eps / 2
        tiny = 0.5 if dtype == torch.int8 else torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        bound = groups.abs() * (spacing + 1e-6) + scales.double()[..., None] * (max(step, tiny) * (1 + 1e-5))
        assert bool(((wide - groups).abs() <= bound).all()), "codes that are not the nearest"

    arguments = dict(x=x, group_size=size, eps=eps, dst_dtype=dtype, column_major_scales=columns, scale_ue8m0=powers)
    return Call(per_token_group_quant_8bit, arguments | dict(scale_tma_aligned=columns and draw.chance()), check)


def truth_of(number):
    """A number as float32 has it."""
    return float(torch.tensor(number, dtype=torch.float32))


def packbits(draw):
    x = torch.rand(draw.pick(0, 1, 7, 8, 9, 1000, 4097), device=draw.device) < 0.5
    order = draw.pick("little", "big")
    expected = torch.from_numpy(np.packbits(x.cpu().numpy(), bitorder=order))
    return Call(flashinfer.packbits, dict(x=x, bitorder=order), lambda out: assert_bitwise(out.cpu(), expected))


def segment_packbits(draw):
    lens = [draw.pick(0, 1, 7, 8, 9, 130) for _ in range(draw.pick(0, 1, 4))]
    x, order = torch.rand(sum(lens), device=draw.device) < 0.5, draw.pick("little", "big")
    parts = [torch.from_numpy(np.packbits(part.cpu().numpy(), bitorder=order)) for part in x.split(lens)]
    indptr = generate.indptr(lens).tolist()

    def check(result):
        packed, offsets = result
        assert offsets.tolist() == generate.indptr([len(part) for part in parts]).tolist()
        if parts:
            assert_bitwise(packed.cpu(), torch.cat(parts))

    return Call(flashinfer.segment_packbits, dict(x=x, indptr=draw.ints(indptr), bitorder=order), check)


FAMILIES = (fp4_quantize, mxfp8_quantize, laid_out, batched, token_groups, packbits, segment_packbits)
