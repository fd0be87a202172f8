"""Hopper's kernel of latent attention in the emulator, against attention in float64."""

import pytest
import torch

from flashinfer.testing.emulator import emulate
from tests.ops.attention.mla import test_sm90 as mla
from tests.pairs import pairs

HALF, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
SEEDS = (0, 1)
# q_lens, kv_lens, heads, page, causal, dtype, kpe
CASES = {
    "one block to three pairs": ([1] * 8, [0, 1, 64, 65, 128, 129, 256, 300], 64, 64, False, BF16, 64),
    "two tiles a token, split": ([1] * 2, [1000, 77], 128, 64, False, HALF, 64),
    "no positional rows": ([1] * 2, [700, 77], 16, 32, False, HALF, 0),
    "few heads, tokens": ([4, 1, 0, 16], [100, 7, 9, 400], 16, 16, True, BF16, 64),
    "odd heads, before the first key": ([9, 3, 5], [2, 0, 300], 21, 256, True, BF16, 64),
    "many tokens of one head": ([100, 77], [300, 70], 1, 64, True, BF16, 64),
    "pages of a token": ([2, 1], [300, 77], 16, 1, True, BF16, 64),
    "pages of no box": ([1] * 3, [300, 0, 77], 16, 5, False, BF16, 0),
}


def check(seed, call, *args):
    with emulate("90a", seed=seed) as launched:
        call(*args)
    assert "attend_latent_sm90_kernel" in launched


def test_latents_quickly():
    case = ([2, 1], [200, 33], 16, 32, True, BF16, 64)
    check(1, mla._check_batch, case, BF16, True, CPU)
    check(1, mla._check_batch, case, E4M3, True, CPU)


@pytest.mark.parametrize("sms", (2, 8))
def test_equal_queries_quickly(sms):
    """A list that is kept, of whole keys and of keys that are split."""
    for seed in range(2):
        with emulate("90a", seed=seed, sms=sms):
            mla.test_keys_named_one_by_one(64, 16, 3, 600, BF16, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_batches(case, seed):
    check(seed, mla._check_batch, CASES[case], CASES[case][5], seed != 1, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_fp8_keys(case, seed):
    check(seed, mla._check_batch, CASES[case], E5M2 if seed else E4M3, seed != 1, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_fp8_queries(seed):
    check(seed, mla.test_fp8_queries, E4M3, 5, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("kv_dtype", (BF16, E4M3))
@pytest.mark.parametrize("seed", SEEDS)
def test_sinks_and_factors(seed, kv_dtype):
    check(seed, mla.test_sinks_and_factors, kv_dtype, CPU)


@pytest.mark.matrix
@pytest.mark.parametrize("seed, case, kv_dtype", pairs(
    SEEDS, ((64, 16, 3, 40), (1, 16, 3, 200), (5, 21, 4, 100), (64, 128, 5, 600)), (BF16, E4M3)
), ids=str)  # fmt: skip
def test_keys_named_one_by_one(seed, case, kv_dtype):
    """Of pages, for heads, queries and keys so many."""
    check(seed, mla.test_keys_named_one_by_one, *case, kv_dtype, CPU)
