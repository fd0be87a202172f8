"""The experts' products on Hopper in the emulator, against float64."""

import pytest
import torch

from flashinfer.testing.emulator import emulate
from tests.ops.moe.experts import test_fragments as fragments
from tests.ops.moe.experts import test_hopper as experts
from tests.pairs import pairs

CPU = torch.device("cpu")


def check(seed, encoding, n, k, tokens):
    with emulate("90a", seed=seed) as launched:
        experts.test_products(CPU, encoding, n, k, tokens)
    assert set(launched) == {"product_sm90_kernel"}


def test_products_quickly():
    check(1, "fp8_block", 256, 256, 40)


@pytest.mark.matrix
@pytest.mark.parametrize("seed, encoding, sizes, tokens", pairs(
    (0, 1), experts.ENCODINGS, ((288, 208), (512, 256)), (1, 150)
), ids=str)  # fmt: skip
def test_products(seed, encoding, sizes, tokens):
    check(seed, encoding, *sizes, tokens)


def check_fragments(seed, n, k, tile, tokens):
    with emulate("90a", seed=seed) as launched:
        fragments.test_products(CPU, n, k, tile, tokens)
    assert set(launched) == {"product_fragments_kernel"}


@pytest.mark.parametrize("n, k, tile", fragments.SIZES[:2])
def test_fragments_quickly(n, k, tile):
    check_fragments(1, n, k, tile, 40)


@pytest.mark.matrix
@pytest.mark.parametrize("tile", (16, 128))
def test_factors_of_fragments(tile):
    with emulate("90a", seed=2):
        fragments.test_every_factor_is_exact(CPU, tile)


@pytest.mark.matrix
@pytest.mark.parametrize("seed, sizes, tokens", pairs((0, 1, 2), fragments.SIZES, (1, 150)), ids=str)
def test_fragments(seed, sizes, tokens):
    check_fragments(seed, *sizes, tokens)
