"""Hopper's prefill kernel in the emulator, through the public wrappers, against attention in float64."""

import pytest
import torch

from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.ops.attention import test_fp8_prefill as fp8
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options
from tests.pairs import pairs

SEEDS = (0, 1, 2)
# A tile and a part of one, a request of one token, one without keys.
LENGTHS = (150, 1, 5), (300, 70, 0)


def batch(dim=64, dtype=torch.bfloat16, qo=LENGTHS[0], kv=LENGTHS[1], heads=(2, 1), **kwargs):
    return generate.ragged_batch(list(qo), list(kv), *heads, dim, dtype=dtype, **kwargs)


def check_ragged(x, options, seed, extras=None, watch=None, **kwargs):
    with emulate("90a", seed=seed, watch=watch):
        result = run_ragged(x, options, "sm90", **kwargs)
    check(result, x, options, extras)


QUICK = {"causal": Options(causal=True), "full": Options()}
OPTIONS = {
    **QUICK,
    "window": Options(causal=True, window_left=100),
    "soft cap": Options(causal=True, logits_soft_cap=1.5),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
    "alibi under a cap": Options(causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=1.5),
    "negative scale": Options(causal=True, sm_scale=-0.1),
}


@pytest.mark.parametrize("name", QUICK)
def test_options_quickly(name):
    check_ragged(batch(), QUICK[name], 1)


def check_window(window_left, causal, heads, qo=(70, 9, 30), kv=(300, 5, 30)):
    x = batch(qo=qo, kv=kv, heads=heads)
    check_ragged(x, Options(causal=causal, window_left=window_left), 1)


@pytest.mark.parametrize("window_left, heads", ((128, (8, 1)), (31, (5, 1))))
def test_windows_quickly(window_left, heads):
    """Tiles whose windows end within a block; heads of a group in one tile and across two; more queries than keys."""
    check_window(window_left, True, heads)


@pytest.mark.matrix
@pytest.mark.parametrize("window_left, causal, heads", pairs(
    (0, 1, 31, 40, 128, 129, 300, 2**30), (True, False), ((8, 1), (5, 1), (2, 2))
), ids=str)  # fmt: skip
def test_windows(window_left, causal, heads):
    check_window(window_left, causal, heads)


@pytest.mark.matrix
def test_windows_of_split_keys():
    """Splits that begin before a window, within it, and at its end: some rows see nothing of them."""
    check_window(1500, True, (8, 1), (20, 3), (3000, 1700))


@pytest.mark.matrix
@pytest.mark.parametrize("name, dtype, seed", pairs(list(OPTIONS), (torch.bfloat16, torch.float16), SEEDS), ids=str)
def test_options(name, dtype, seed):
    check_ragged(batch(dtype=dtype), OPTIONS[name], seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim, dim_vo", ((96, 96), (128, 128), (192, 128), (192, 192), (256, 256)))
def test_head_dims(dim, dim_vo, seed):
    check_ragged(batch(dim, head_dim_vo=dim_vo), Options(causal=True), seed)


@pytest.mark.matrix
@pytest.mark.parametrize("page_size, kv_layout, seed", pairs((1, 7, 16, 128, 256), ("NHD", "HND"), SEEDS))
def test_pages(page_size, kv_layout, seed):
    x = batch(heads=(4, 2))
    with emulate("90a", seed=seed):
        result = run_paged(x, Options(causal=True), "sm90", page_size=page_size, kv_layout=kv_layout)
    check(result, x, Options(causal=True))


@pytest.mark.matrix
@pytest.mark.parametrize("page_size", (16, 32))
@pytest.mark.parametrize("dim, window_left", ((80, -1), (128, 100), (256, -1)))
def test_pages_of_two_warps(dim, window_left, page_size):
    """Each half of a block's pages is copied by a warp of its own, where a block has four pages or more."""
    x, options = batch(dim), Options(causal=True, window_left=window_left)
    with emulate("90a", seed=1):
        result = run_paged(x, options, "sm90", page_size=page_size)
    check(result, x, options)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_custom_masks(seed):
    x = batch()
    mask = generate.random_mask(*LENGTHS)
    masks = [part.view(n, m) for part, n, m in zip(mask.split([n * m for n, m in zip(*LENGTHS)]), *LENGTHS)]
    check_ragged(x, Options(), seed, mask=mask, extras=Extras(masks=masks))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_split_keys(seed):
    """Few rows beside many keys: the splits of a tile are merged by the last to end."""
    x = batch(qo=(40, 3), kv=(1100, 900))
    check_ragged(x, Options(causal=True), seed)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_wide_logits(seed):
    """What a fixed shift does not serve is made again, with a maximum of each block."""
    x = batch(qo=(200, 130), kv=(600, 500))
    x.k[:300] *= 40
    check_ragged(x, Options(causal=True), seed)


def check_fp8(seed, dim=64, qo=(130,), kv=(300,), options=Options(causal=True), page_size=0, v_dim=None):
    x = fp8.batch("cpu", qo, kv, heads=(2, 1), dim=dim, v_dim=v_dim)
    with emulate("90a", seed=seed) as launched:
        if page_size:
            result = run_paged(x, options, "sm90", page_size=page_size, plan=fp8.OUT)
        else:
            result = run_ragged(x, options, "sm90", plan=fp8.OUT)
    assert "attend_sm90_kernel" in launched
    fp8.check(result, x, options)


def test_fp8_quickly():
    check_fp8(1)


@pytest.mark.parametrize("scales, options", (
    ((0.5, 1.5), Options(causal=True)), ((2.0, -0.7), Options()), ((0.0, 1.0), Options(causal=True)),
    ((1e-45, 1.0), Options(causal=True)),
    ((0.5, 1.5), Options(causal=True, sm_scale=-0.1)), ((0.5, 1.5), Options(causal=True, logits_soft_cap=1.5)),
))  # fmt: skip
def test_fp8_scales_of_heads(scales, options):
    """A head's scale is part of its exponents, or its logits are multiplied first."""
    x = fp8.batch("cpu", *LENGTHS, heads=(4, 2), dim=64)
    q_scale = torch.tensor([*scales, 1.25, 0.75])
    with emulate("90a", seed=0) as launched:
        out, lse = run_ragged(x, options, "sm90", plan=fp8.OUT, run=dict(q_scale=q_scale))
    assert "attend_sm90_kernel" in launched
    for head, scale in enumerate(q_scale.tolist()):
        q, keys = slice(head, head + 1), slice(head // 2, head // 2 + 1)
        one = generate.Ragged(x.q[:, q], x.k[:, keys], x.v[:, keys], x.qo_indptr, x.kv_indptr)
        fp8.check((out[:, q], lse[:, q]), one, options, Extras(q_scale=scale))


@pytest.mark.matrix
@pytest.mark.parametrize("dim, name, page_size, seed", pairs(
    (64, 128), ("causal", "full", "window", "soft cap", "alibi"), (0, 16, 128), SEEDS
), ids=str)  # fmt: skip
def test_fp8(dim, name, page_size, seed):
    check_fp8(seed, dim, *LENGTHS, OPTIONS[name], page_size)
