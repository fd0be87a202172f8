"""The decode kernel from Ampere on for heads wider than 128, in the emulator, against attention in float64."""

from itertools import product

import pytest
import torch

from flashinfer.testing import generate
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import check, run_paged, run_ragged
from tests.ops.attention.oracle import Extras, Options
from tests.pairs import pairs

HALF, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
NAN = float("nan")
ALL = Options(window_left=70, logits_soft_cap=1.5)
SIZES = ((256, 256), (192, 192), (136, 136), (192, 128), (128, 256), (256, 64), (512, 512), (264, 320))
PAGES = (1, 16, 24, 5)
GROUPS = (1, 2, 4, 5, 8, 16)
# Lengths 0, 1 and odd, and one that is split.
LENGTHS = (0, 1, 77, 701)


def batch(dims=(256, 256), group=4, qo=(1, 1, 1, 1), kv=LENGTHS, dtype=BF16, kv_dtype=None):
    return generate.ragged_batch(qo, kv, 2 * group, 2, dims[0], head_dim_vo=dims[1], dtype=dtype, kv_dtype=kv_dtype)


def attended(x, options, seed=1, page_size=16, kv_layout="NHD", arch="90a", **kwargs):
    """out and lse of the kernel, which has to be the one that ran."""
    with emulate(arch, seed=seed) as launched:
        if page_size:
            result = run_paged(x, options, "sm80", page_size=page_size, kv_layout=kv_layout, **kwargs)
        else:
            result = run_ragged(x, options, "sm80", **kwargs)
    assert "attend_sm80_kernel" in launched
    return result


def check_poisoned(dims, page_size, kv_dtype=None):
    """A head is right while all other heads, and all other requests, are NaN."""
    x = batch(dims, kv_dtype=kv_dtype)
    alone = generate.Ragged(
        x.q[3:4, 4:8].clone(), x.k[78:779, 1:2].clone(), x.v[78:779, 1:2].clone(), generate.indptr([1]),
        generate.indptr([701]),
    )  # fmt: skip
    for tensor in (x.q, x.k, x.v):
        tensor.fill_(NAN)
    x.q[3:4, 4:8], x.k[78:779, 1:2], x.v[78:779, 1:2] = alone.q, alone.k, alone.v
    out, lse = attended(x, Options(), page_size=page_size)
    check((out[3:4, 4:8].contiguous(), lse[3:4, 4:8].contiguous()), alone, Options())


@pytest.mark.parametrize("dims", ((256, 256), (192, 128), (512, 512)))
def test_quickly(dims):
    x = batch(dims)
    check(attended(x, Options()), x, Options())


def test_fp8_with_sinks_window_and_soft_cap_quickly():
    sinks = torch.linspace(-2, 2, 8)
    x = batch(kv_dtype=E4M3)
    check(attended(x, ALL, page_size=24, run=dict(sinks=sinks)), x, ALL, Extras(sinks=sinks))


def test_several_tokens_quickly():
    x = batch(group=8, qo=(1, 3, 4, 2), kv=(5, 3, 77, 300))
    check(attended(x, Options(causal=True)), x, Options(causal=True))


def test_neighbours_that_are_nan_quickly():
    check_poisoned((256, 256), 24)


@pytest.mark.matrix
@pytest.mark.parametrize("dims, page_size", list(product(SIZES, PAGES)))
def test_sizes_and_pages(dims, page_size):
    x = batch(dims)
    check(attended(x, Options(), page_size=page_size, kv_layout="HND"), x, Options())
    check_poisoned(dims, page_size)


@pytest.mark.matrix
@pytest.mark.parametrize("dims", SIZES)
@pytest.mark.parametrize("kv, plan", (((1500,), {}), (LENGTHS, dict(fixed_split_size=64))))
def test_splits(dims, kv, plan):
    sinks = torch.linspace(-2, 2, 16)
    x = batch(dims, 8, (1,) * len(kv), kv)
    check(attended(x, Options(), plan=plan, run=dict(sinks=sinks)), x, Options(), Extras(sinks=sinks))


@pytest.mark.matrix
@pytest.mark.parametrize("group, seed", list(product(GROUPS, (0, 1, 2))))
def test_groups_and_seeds(group, seed):
    x = batch(group=group)
    check(attended(x, Options(), seed=seed), x, Options())


@pytest.mark.matrix
@pytest.mark.parametrize("codes, dtype, page_size", pairs(
    ((E4M3, "89"), (E4M3, "90a"), (E5M2, "80"), (E5M2, "90a")), (HALF, BF16), PAGES
), ids=str)  # fmt: skip
def test_fp8(codes, dtype, page_size):
    kv_dtype, arch = codes
    x = batch(dtype=dtype, kv_dtype=kv_dtype)
    check(attended(x, Options(), arch=arch, page_size=page_size), x, Options())


@pytest.mark.matrix
@pytest.mark.parametrize("kv_dtype", (E4M3, E5M2))
def test_fp8_of_narrow_values_on_ampere(kv_dtype):
    x = batch((192, 128), kv_dtype=kv_dtype)
    check(attended(x, Options(), arch="80"), x, Options())


@pytest.mark.matrix
@pytest.mark.parametrize("dims", ((256, 256), (192, 128)))
def test_neighbours_of_fp8_that_are_nan(dims):
    check_poisoned(dims, 1, E4M3)


@pytest.mark.matrix
@pytest.mark.parametrize("dims", ((256, 256), (192, 128), (512, 512)))
@pytest.mark.parametrize(
    "options",
    (
        Options(window_left=50),
        Options(logits_soft_cap=1.5),
        Options(pos_encoding_mode="ALIBI"),
        Options(pos_encoding_mode="ALIBI", logits_soft_cap=1.5),
        Options(sm_scale=0.0),
        ALL,
    ),
    ids=str,
)
def test_options(options, dims):
    sinks = torch.linspace(-2, 2, 8)
    x = batch(dims, dtype=HALF)
    check(attended(x, options), x, options)
    check(attended(x, options, run=dict(sinks=sinks)), x, options, Extras(sinks=sinks))


@pytest.mark.matrix
@pytest.mark.parametrize("rows, kv_dtype, dims", pairs(
    ((8, 4), (16, 2), (16, 4), (5, 6), (64, 1)), (None, E4M3), ((256, 256), (192, 128))
), ids=str)  # fmt: skip
def test_tiles_of_32_and_64_rows(rows, kv_dtype, dims):
    group, tokens = rows
    options = Options(causal=True, window_left=90)
    x = batch(dims, group, (tokens,) * 3, (tokens, 77, 400), kv_dtype=kv_dtype)
    check(attended(x, options), x, options)


@pytest.mark.matrix
@pytest.mark.parametrize("dims", ((256, 256), (192, 128), (512, 512)))
def test_ragged(dims):
    x = batch(dims)
    check(attended(x, Options(), page_size=0), x, Options())
