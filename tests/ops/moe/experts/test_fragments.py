"""Arranged MXFP4 weights: the order of their codes, and products of them, of any routing and size."""

from dataclasses import replace

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.fused_moe import experts, interleave_moe_weights_for_sm90_mixed_gemm, routing
from flashinfer.ops.moe import experts as room
from flashinfer.ops.moe.experts import fragments
from flashinfer.testing.compare import assert_bitwise
from tests.ops.moe.experts.layers import E2M1, nibbles, random, strips, swiglu, weights
from tests.ops.moe.experts.test_hopper import judge, routed

BF16 = torch.bfloat16
# Rows of gated weights, elements, and rows of a tile: one strip, strips that end within a program's, many steps.
SIZES = [(128, 128, 16), (384, 256, 32), (640, 768, 64), (256, 384, 128)]


def problem(gated, tile):
    given = dict(gather=True, act="swiglu", shape="abl") if gated else {}
    return room.Problem("bf16", "mxfp4", "bf16", tile, weight_layout="strips", bias="bf16", fragments=True, **given)


@pytest.mark.parametrize(
    "change",
    [
        dict(fragments=False),
        dict(rows="mxfp8"),
        dict(out="fp32"),
        dict(weight_layout="linear"),
        dict(act="geglu"),
        dict(shape="A"),
        dict(scale="tensor"),
        dict(weighted="pair"),
        dict(aligned=False),
        dict(whole=False),
    ],
    ids=str,
)
def test_choice(change):
    for gated in (True, False):
        assert room.product.select(problem(gated, 16), named("90a")).variant.name == "sm90_fragments"
        assert room.product.select(problem(gated, 16), named("100a")).variant.name == "portable"
    choice = room.product.select(replace(problem(True, 16), **change), named("90a"))
    assert choice.variant.name == "portable"
    assert dict(choice.refused)["sm90_fragments"]


def test_halves_that_are_no_whole_tiles():
    for n, whole in ((256, True), (192, False)):
        given = room.Weights(torch.empty(2, n, 64, dtype=torch.uint8))
        assert experts._fitted(problem(True, 16), torch.empty(1, 128, dtype=BF16), given, 8).whole == whole
        assert experts._fitted(problem(False, 16), torch.empty(1, 128, dtype=BF16), given, 8).whole


def test_order(device):
    """Each code where the tables of the PTX ISA have its row and column, under the masks that decode it."""
    codes = torch.randint(256, (2, 128, 96), dtype=torch.uint8, device=device)
    made = interleave_moe_weights_for_sm90_mixed_gemm(codes)
    word = made.view(torch.int32).reshape(2, 2, 3, 128, 4).long() & 0xFFFFFFFF
    last = (word << 2) & 0x80C080C0 | (word >> 6) & 0x01000100
    pairs = [x & 0x81C081C0 for x in (word, word >> 4 | word << 28, word << 6)] + [last]
    halves = nibbles(codes)
    expert, rows, columns, t, i = torch.meshgrid(*map(torch.arange, word.shape), indexing="ij")
    for j, pair in enumerate(pairs):
        for lane in range(2):
            half = pair >> 16 * lane & 0xFFFF
            row = 64 * rows + 16 * (t // 32) + t % 32 // 4 + 8 * (j % 2)
            column = 64 * columns + 16 * (i // 2) + 8 * (i % 2) + 2 * (t % 4) + lane + 32 * (j // 2)
            assert_bitwise(half >> 6 & 7 | half >> 15 << 3, halves[expert, row, column])
    for expert in range(2):
        assert_bitwise(fragments.restore(made[expert]), codes[expert])


@pytest.mark.gpu
@pytest.mark.parametrize("n, k, tile", SIZES)
@pytest.mark.parametrize("tokens", [1, 150])
def test_products(device, n, k, tile, tokens, variant="sm90_fragments"):
    count, top_k = 5, 3
    token_map = routed(device, tokens, count, top_k, tile)
    rows = token_map.row_pair.numel()
    w, factors, wide = weights("mxfp4", count, n, k, device)
    bias = torch.randn(count, n, device=device).to(BF16)
    alpha, beta, limit = torch.rand(3, count, device=device) + 0.5
    limit *= 2
    given = room.Weights(interleave_moe_weights_for_sm90_mixed_gemm(w), strips(factors), bias)

    def products(x_wide, source_of, finish):
        def of(expert, its):
            source = source_of(its)
            for compute in (torch.float64, BF16):
                y = x_wide[source].to(compute) @ wide[expert].to(compute).T + bias[expert].to(compute)
                yield finish(y, expert).to(compute)

        return lambda expert, its: tuple(of(expert, its))

    def run(problem, rows_of, finish, width):
        made = []
        for _ in range(2):
            out = torch.full((rows, width), float("nan"), device=device, dtype=BF16)
            choice = room.product(problem, torch.device(device))
            assert choice.variant.name == variant
            choice.run(rows_of, given, finish, token_map, out)
            made.append(out)
        assert_bitwise(made[1].view(torch.uint8), made[0].view(torch.uint8))
        return out

    x, _, x_wide = random("bf16", tokens, k, device=device)
    out = run(problem(True, tile), room.Rows(x, None, top_k), room.Finish(alpha=alpha, beta=beta, limit=limit), n // 2)

    def gated(y, expert):
        return swiglu(y.T, alpha[expert].item(), beta[expert].item(), limit[expert].item()).T

    judge(out, token_map, products(x_wide, lambda its: token_map.row_pair[its].long() // top_k, gated))

    x, _, x_wide = random("bf16", rows, k, device=device)
    out = run(problem(False, tile), room.Rows(x), room.Finish(), n)
    judge(out, token_map, products(x_wide, lambda its: its, lambda y, expert: y))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [16, 128])
def test_every_factor_is_exact(device, tile):
    """Rows of the unit matrix give the weights: all codes, times factors from 2^-68 to 2^65; larger ones overflow."""
    n, k = 128, 1024
    codes = torch.randint(256, (1, n, k // 2), dtype=torch.uint8, device=device)
    factors = torch.randint(59, 193, (1, n, k // 32), dtype=torch.uint8, device=device)
    factors[:, :, :2] = torch.tensor([59, 192], dtype=torch.uint8)
    factors[:, 5:7, 7] = torch.tensor([193, 254], dtype=torch.uint8)
    codes[:, 5:7, 112:128] = 0x21
    token_map, _ = routing.token_map(torch.zeros(k, 1, dtype=torch.int32, device=device), 1, 0, tile)
    given = room.Weights(interleave_moe_weights_for_sm90_mixed_gemm(codes), strips(factors))
    choice = room.product(replace(problem(False, tile), bias=""), torch.device(device))
    assert choice.variant.name == "sm90_fragments"
    out = torch.full((k, n), float("nan"), device=device, dtype=BF16)
    unit = torch.eye(k, device=device, dtype=BF16)
    choice.run(room.Rows(unit), given, room.Finish(), token_map, out)
    truth = E2M1.to(device)[nibbles(codes[0])] * torch.exp2(factors[0].double() - 127).repeat_interleave(32, 1)
    # An infinite weight times the zeros of the other rows is NaN.
    truth[5:7] = torch.nan
    found = out.double().T
    assert torch.equal(found.isnan(), truth.isnan())
    assert_bitwise(found.nan_to_num(), truth.nan_to_num())
