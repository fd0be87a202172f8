"""Exponentials by a polynomial: the assembly, run in float32, against numpy's in float64."""

import re

import numpy as np
import pytest
import torch

from flashinfer.ops.attention.prefill.sm90_exponentials import assembly
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import check, run_ragged
from tests.ops.attention.oracle import Options


def fma(x, y, z):
    return (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32)


# max.NaN and min.NaN are numpy's.
DOES = {
    "ex2.approx.ftz.f32": np.exp2, "max.NaN.f32": np.maximum, "min.NaN.f32": np.minimum, "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract, "fma.rn.f32": fma, "mov.b32": lambda x: x,
    "shl.b32": lambda x, y: (x.view(np.int32) << int(y)).view(np.float32),
    "add.s32": lambda x, y: (x.view(np.int32) + y.view(np.int32)).view(np.float32),
}  # fmt: skip


def exponentials(x, pack):
    """Of the last of `pack` numbers; the others are checked to be what ex2 gives."""
    text = getattr(assembly(pack), "value", assembly(pack))
    values = {f"${pack + i}": x.astype(np.float32) for i in range(pack)}

    def value(name):
        if name.startswith("0f"):
            return np.array(int(name[2:], 16), np.uint32).view(np.float32)
        return values[name] if name in values else float(name)

    with np.errstate(all="ignore"):
        for line in text.split("\n"):
            found = re.fullmatch(r"(\S+) (\S+), (.*);", line)
            if found and found[1] in DOES:
                values[found[2]] = DOES[found[1]](*map(value, found[3].split(", ")))
            else:
                assert line in "{}" or line.startswith(".reg"), line
        for i in range(pack - 1):
            np.testing.assert_array_equal(values[f"${i}"], np.exp2(x.astype(np.float32)))
    return values[f"${pack - 1}"]


@pytest.mark.parametrize("pack", (4, 8))
def test_near_what_they_stand_for(pack):
    x = np.concatenate([np.linspace(-125, 127, 100_001), np.arange(-125, 128), np.arange(-124.5, 127)])
    truth = np.exp2(np.float64(np.float32(x)))
    assert np.abs(exponentials(x, pack) / truth - 1).max() < 2.5e-7
    # What is out of range is nothing, or more than a sum of weights may be; NaN is one of these.
    assert (exponentials(np.array([-np.inf, -1e30, -127.0, -126.0]), pack) <= 2.0**-125).all()
    assert not (exponentials(np.array([127.5, 200.0, 1e30, np.inf, np.nan]), pack) < 2.0**126).any()


@pytest.mark.parametrize("causal", (True, False))
def test_in_attention(causal):
    from tests.emulator.test_prefill import batch

    x, options = batch(qo=(130, 3), kv=(700, 200)), Options(causal=causal)
    with emulate("90a", seed=3):
        result = run_ragged(x, options, "sm90")
    check(result, x, options, None)
    assert result[0].dtype == torch.bfloat16
