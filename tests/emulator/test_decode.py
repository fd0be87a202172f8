"""The decode kernel from Ampere on in the emulator, through the public wrapper, against attention in float64."""

import pytest
import torch

from flashinfer.ops.attention.split import FEW
from flashinfer.testing import generate
from flashinfer.testing.emulator import EmulationError, emulate
from tests.ops.attention.cases import check, run_decode
from tests.ops.attention.oracle import Options

HALF, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
SEEDS = (0, 1)


def check_decode(seed=1, options=Options(), dtype=BF16, kv_dtype=None, dim=64, heads=(8, 2), page_size=16,
                 kv=(300, 1, 0, 70), arch="90a", kv_layout="NHD", plan=None, sms=2,
                 watch=None):  # fmt: skip
    x = generate.ragged_batch([1] * len(kv), list(kv), *heads, dim, dtype=dtype, kv_dtype=kv_dtype)
    with emulate(arch, seed=seed, sms=sms, watch=watch) as launched:
        result = run_decode(x, options, "sm80", page_size=page_size, kv_layout=kv_layout, plan=plan)
    assert "attend_sm80_kernel" in launched
    check(result, x, options)


def test_decode_quickly():
    check_decode()
    check_decode(kv_dtype=E4M3, arch="80")


FIXED = dict(heads=(8, 1), plan=dict(fixed_split_size=32))


@pytest.mark.parametrize("case", (
    dict(kv=(64 * FEW + 1, 70), **FIXED),
    pytest.param(dict(kv=(64 * FEW,), kv_dtype=E4M3, **FIXED), marks=pytest.mark.matrix),
    pytest.param(dict(heads=(2, 1), kv=(25000,), dim=16, sms=132), marks=pytest.mark.matrix),
), ids=str)  # fmt: skip
def test_more_splits_than_are_combined_in_one_level(case):
    """One more, of 64 keys; twice as many in FP8, of 32; those of a long request on a whole chip."""
    places = set()
    check_decode(watch=lambda _, place: places.add(place), **case)
    assert any("_combine_group" in place for place in places)


@pytest.mark.parametrize("counter", (0, 1))
def test_groups_that_are_released_without_a_barrier_are_found(counter):
    """The barriers before a group's counter and before the tile's, one of them left out."""
    sites = {}

    def watch(operation, place):
        if operation != "block barrier" or "_is_last" not in place:
            return None
        return "skip" if sites.setdefault(place, len(sites)) == counter else None

    with pytest.raises(EmulationError, match="no barrier of theirs between"):
        check_decode(heads=(8, 1), kv=(64 * FEW + 1,), plan=dict(fixed_split_size=64), watch=watch)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "case",
    (
        dict(dim=128, heads=(8, 1)),
        dict(dim=80, heads=(3, 3)),
        dict(heads=(32, 1), dtype=HALF),
        dict(kv_dtype=E4M3, dtype=HALF),
        dict(kv_dtype=E5M2, arch="80"),
        dict(kv_dtype=E4M3, arch="89"),
        dict(page_size=1),
        dict(page_size=5, kv_layout="HND"),
        dict(page_size=128),
        dict(kv=(3000,)),
        dict(kv=(2000, 17, 1500)),
        dict(options=Options(window_left=50)),
        dict(heads=(8, 1), kv=(64 * FEW + 700, 4), dim=128, plan=dict(fixed_split_size=64)),
        dict(heads=(16, 1), kv=(64 * FEW + 2000,), dim=32, plan=dict(fixed_split_size=64)),
        dict(heads=(2, 2), kv=(6000,), kv_dtype=E5M2, plan=dict(fixed_split_size=32)),
        dict(options=Options(logits_soft_cap=1.5)),
        dict(options=Options(pos_encoding_mode="ALIBI")),
        dict(options=Options(pos_encoding_mode="ALIBI", logits_soft_cap=1.5)),
    ),
    ids=str,
)
def test_decode(case, seed):
    check_decode(seed, **case)
