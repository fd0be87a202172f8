"""The Hopper kernel of the experts' products: when it is chosen, and what routings and sizes of any kind give."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from flashinfer._core.target import named
from flashinfer.fused_moe import experts, routing
from flashinfer.ops.moe import experts as room
from flashinfer.testing.compare import assert_bitwise, assert_close
from tests.ops.moe.experts.layers import random, weights

ENCODINGS = ["bf16", "fp16", "fp8", "fp8_block"]
# Rows of gated weights, and elements: whole tiles, and ones whose ends lie within.
SIZES = [(512, 512), (1024, 256), (288, 208)]


def first(encoding):
    scaled = dict(scale="tensor", scale_out="tensor", out="fp8") if encoding == "fp8" else dict(out="bf16")
    return room.Problem(encoding, encoding, tile=128, gather=True, act="swiglu", **scaled)


def second(encoding):
    return room.Problem(encoding, encoding, "bf16", 128, scale="tensor" if encoding == "fp8" else "")


@pytest.mark.parametrize(
    "change",
    [
        dict(tile=64),
        dict(weights="mxfp4"),
        dict(paired=1),
        dict(shuffle=16),
        dict(block=128),
        dict(bias="bf16"),
        dict(act="geglu"),
        dict(shape="abl"),
        dict(weighted="pair"),
        dict(aligned=False),
        dict(whole=False),
        dict(full=False),
        dict(out="fp32"),
    ],
    ids=str,
)
def test_choice(change):
    for encoding in ENCODINGS:
        for problem in (first(encoding), second(encoding)):
            assert room.product.select(problem, named("90a")).variant.name == "sm90"
            assert room.product.select(problem, named("100a")).variant.name == "portable"
        choice = room.product.select(replace(first(encoding), **change), named("90a"))
        assert choice.variant.name == "portable"
        assert dict(choice.refused)["sm90"]


@pytest.mark.parametrize("encoding, rows", [("bf16", 512), ("fp8", 192), ("fp8_block", 192)])
def test_rows_that_it_is_worth(encoding, rows):
    """Experts have to have rows, and gated halves whole blocks of scales."""
    codes = {"bf16": torch.bfloat16}.get(encoding, torch.float8_e4m3fn)

    def chosen(pairs, n):
        given = room.Weights(torch.empty(2, n, 128, dtype=codes))
        problem = experts._fitted(first(encoding), torch.empty(1, 128, dtype=codes), given, pairs)
        return room.product.select(problem, named("90a")).variant.name

    assert chosen(2 * rows, 512) == "sm90"
    assert chosen(2 * rows - 1, 512) == "portable"
    assert chosen(2 * rows, 384) == ("portable" if encoding == "fp8_block" else "sm90")


def routed(device, tokens, experts, top_k, tile=128):
    """Choices: one expert has none, one nearly all; some are of other ranks."""
    ids = torch.randint(-1, experts + 2, (tokens, top_k), device=device)
    ids[ids == 1] = 2
    ids[: tokens * 3 // 4, 0] = 3
    token_map, _ = routing.token_map(ids.int(), experts, 0, tile)
    return token_map


def judge(out, token_map, truth_of):
    """Rows of the map against float64; padding as it was."""
    starts, counts = token_map.first.tolist(), token_map.count.tolist()
    written = torch.zeros(len(out), dtype=torch.bool, device=out.device)
    for expert, (start, count) in enumerate(zip(starts, counts)):
        its = slice(start, start + count)
        if count:
            written[its] = True
            truth, same = truth_of(expert, its)
            assert_close(out[its].float().to(same.dtype), same, truth, f"expert {expert}")
    assert out[~written].float().isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("n, k", SIZES)
@pytest.mark.parametrize("tokens", [1, 700])
def test_products(device, encoding, n, k, tokens):
    count, top_k = 5, 3
    if encoding == "fp8_block" and k % 128:
        n, k = 256, 384
    token_map = routed(device, tokens, count, top_k)
    rows = token_map.row_pair.numel()
    w, factors, wide = weights(encoding, count, n, k, device)
    scale = torch.rand(count, device=device) + 0.5 if encoding == "fp8" else None

    x, x_factors, x_wide = random(encoding, tokens, k, device=device)
    problem = first(encoding)
    problem = problem if encoding != "fp16" else replace(problem, out="fp16")
    dtype = {"fp16": torch.float16, "fp8": torch.float8_e4m3fn}.get(encoding, torch.bfloat16)
    finish = room.Finish(scale, None if scale is None else scale / 4)
    made = []
    for _ in range(2):
        out = torch.full((rows, n // 2), float("nan"), device=device).to(dtype)
        choice = room.product(problem, torch.device(device))
        assert choice.variant.name == "sm90"
        choice.run(room.Rows(x, x_factors, top_k), room.Weights(w, factors), finish, token_map, out)
        made.append(out)
    assert_bitwise(made[1].view(torch.uint8), made[0].view(torch.uint8))

    def gated(expert, its):
        source = token_map.row_pair[its].long() // top_k
        results = []
        for compute in (torch.float64, torch.float16 if encoding == "fp16" else torch.bfloat16):
            y = x_wide[source].to(compute) @ wide[expert].to(compute).T
            y = y if scale is None else y * scale[expert].to(compute)
            up, gate = y.chunk(2, 1)
            h = silu(gate) * up
            results.append(h if scale is None else h * (scale[expert] / 4).to(compute))
        return results[0], results[1].to(dtype)

    judge(out, token_map, gated)

    x, x_factors, x_wide = random(encoding, rows, k, device=device)
    out = torch.full((rows, n), float("nan"), device=device, dtype=torch.bfloat16)
    choice = room.product(second(encoding), torch.device(device))
    assert choice.variant.name == "sm90"
    choice.run(room.Rows(x, x_factors), room.Weights(w, factors), room.Finish(scale), token_map, out)

    def plain(expert, its):
        results = []
        for compute in (torch.float64, torch.bfloat16):
            y = x_wide[its].to(compute) @ wide[expert].to(compute).T
            results.append(y if scale is None else y * scale[expert].to(compute))
        return results

    judge(out, token_map, plain)
