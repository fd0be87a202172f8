"""The experts' products on Hopper in the emulator, against float64."""

import pytest
import torch

from flashinfer.testing.emulator import emulate
from tests.ops.moe.experts import test_fragments as fragments
from tests.ops.moe.experts import test_hopper as experts

CPU = torch.device("cpu")


def check(seed, encoding, n, k, tokens):
    with emulate("90a", seed=seed) as launched:
        experts.test_products(CPU, encoding, n, k, tokens)
    assert set(launched) == {"product_sm90_kernel"}


def test_products_quickly():
    check(1, "fp8_block", 256, 256, 40)


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", (1, 150))
@pytest.mark.parametrize("n, k", ((288, 208), (512, 256)))
@pytest.mark.parametrize("encoding", experts.ENCODINGS)
@pytest.mark.parametrize("seed", (0, 1))
def test_products(seed, encoding, n, k, tokens):
    check(seed, encoding, n, k, tokens)


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
@pytest.mark.parametrize("tokens", (1, 150))
@pytest.mark.parametrize("n, k, tile", fragments.SIZES)
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_fragments(seed, n, k, tile, tokens):
    check_fragments(seed, n, k, tile, tokens)
