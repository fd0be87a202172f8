"""Hopper's prefill kernel for heads that are narrower than their tiles, in the emulator, against float64."""

from itertools import cycle

import pytest
import torch

from flashinfer._core.target import named
from flashinfer.ops.attention.prefill import config
from flashinfer.ops.attention.problem import Problem
from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.emulator.test_prefill import LENGTHS, OPTIONS, SEEDS, batch
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options
from tests.pairs import pairs

NAN = float("nan")
DTYPES = torch.bfloat16, torch.float16
CAUSAL = Options(causal=True)
# A second tile of 16, 32 or 64 columns, which the head fills or not, beside one of 64 or 128.
SIZES = (72, 80, 88, 104, 112, 120, 136, 144, 152, 160, 192)
PAGES = ((0, "NHD"), (16, "NHD"), (16, "HND"), (1, "NHD"), (24, "HND"))
QUICK = ((80, 0, "NHD"), (72, 16, "HND"), (112, 24, "NHD"), (144, 16, "NHD"), (80, 1, "NHD"), (192, 16, "NHD"))


def is_source(dim, page, *others):
    return dim < 128 or page[0] in (0, 16)


SOURCES = [(dim, *page) for dim, page in pairs(SIZES, PAGES, where=is_source)]


def attended(x, options, seed, page_size=0, kv_layout="NHD", **kwargs):
    """out and lse of the kernel, which has to be the one that ran."""
    with emulate("90a", seed=seed) as launched:
        if page_size:
            result = run_paged(x, options, "sm90", page_size=page_size, kv_layout=kv_layout, **kwargs)
        else:
            result = run_ragged(x, options, "sm90", **kwargs)
    assert "attend_sm90_kernel" in launched
    return result


def check_poisoned(dim, page_size, kv_layout, seed, dtype=torch.bfloat16):
    """A head is right while all other heads, and all other requests, are NaN."""
    x = batch(dim, dtype, qo=(3, 140, 2), kv=(80, 270, 90), heads=(6, 3))
    alone = generate.Ragged(
        x.q[3:143, 2:4].clone(), x.k[80:350, 1:2].clone(), x.v[80:350, 1:2].clone(), generate.indptr([140]),
        generate.indptr([270]),
    )  # fmt: skip
    for tensor in (x.q, x.k, x.v):
        tensor.fill_(NAN)
    x.q[3:143, 2:4], x.k[80:350, 1:2], x.v[80:350, 1:2] = alone.q, alone.k, alone.v
    out, lse = attended(x, CAUSAL, seed, page_size, kv_layout)
    check((out[3:143, 2:4].contiguous(), lse[3:143, 2:4].contiguous()), alone, CAUSAL)


@pytest.mark.parametrize("dim, page_size, kv_layout", QUICK)
def test_quickly(dim, page_size, kv_layout):
    x = batch(dim)
    check(attended(x, CAUSAL, 1, page_size, kv_layout), x, CAUSAL)


@pytest.mark.parametrize("dim, page_size, kv_layout", QUICK[:3])
def test_neighbours_that_are_nan_quickly(dim, page_size, kv_layout):
    check_poisoned(dim, page_size, kv_layout, 1)


OTHERS = ((144, 144), 24), ((192, 192), 24), ((168, 168), 16), ((76, 76), 16), ((80, 72), 16), ((56, 56), 16)


@pytest.mark.parametrize("dims, page_size", OTHERS)
def test_what_is_left_to_the_portable_kernel(dims, page_size):
    problem = Problem("paged", "bf16", "bf16", "bf16", *dims, 1, page_size=page_size)
    assert config.refuses(problem, named("90a")).startswith("head_dim")


@pytest.mark.matrix
@pytest.mark.parametrize("source, dtype", list(zip(SOURCES, cycle(DTYPES))), ids=str)
def test_neighbours_that_are_nan(source, dtype):
    dim, page_size, kv_layout = source
    check_poisoned(dim, page_size, kv_layout, 2, dtype)


@pytest.mark.matrix
@pytest.mark.parametrize("dim, page, dtype, seed", pairs(SIZES, PAGES, DTYPES, SEEDS, where=is_source), ids=str)
def test_sources(dim, page, dtype, seed):
    """Groups of 1, 4 and 8 in turn; causal masks and full ones."""
    page_size, kv_layout = page
    x = batch(dim, dtype, heads=((2, 2), (4, 1), (16, 2))[seed])
    options = CAUSAL if seed else Options()
    check(attended(x, options, seed, page_size, kv_layout), x, options)


@pytest.mark.matrix
@pytest.mark.parametrize("dim, name, dtype, page_size", pairs(
    (72, 80, 112, 144, 160), list(OPTIONS), DTYPES, (0, 16)
), ids=str)  # fmt: skip
def test_options(dim, name, dtype, page_size):
    x = batch(dim, dtype)
    check(attended(x, OPTIONS[name], 3, page_size), x, OPTIONS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", (72, 80, 112, 144, 160))
def test_custom_masks_and_sinks(dim, seed):
    x, sinks = batch(dim), torch.tensor([0.3, 5.0])
    mask = generate.random_mask(*LENGTHS)
    masks = [part.view(n, m) for part, n, m in zip(mask.split([n * m for n, m in zip(*LENGTHS)]), *LENGTHS)]
    check(attended(x, Options(), seed, mask=mask), x, Options(), Extras(masks=masks))
    window = Options(causal=True, window_left=100)
    check(attended(x, window, seed, 16, run=dict(sinks=sinks)), x, window, Extras(sinks=sinks))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", (72, 80, 112, 144, 160))
def test_splits_and_retries(dim, seed):
    """Splits of a tile are merged by the last to end; what a fixed shift does not serve is made again."""
    x = batch(dim, qo=(40, 3), kv=(1100, 900))
    check(attended(x, CAUSAL, seed), x, CAUSAL)
    x = batch(dim, qo=(200, 130), kv=(600, 500))
    x.k[:300] *= 40
    check(attended(x, CAUSAL, seed), x, CAUSAL)
