"""Random calls of quantisation, bit for bit as the formats' specifications say."""

import numpy as np
import torch

import flashinfer
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
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


FAMILIES = (fp4_quantize, mxfp8_quantize, packbits, segment_packbits)
