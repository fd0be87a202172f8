"""FP8 prefill on Hopper, in the emulator: within the bound that its number format gives, element by element."""

import pytest

from flashinfer.testing.emulator import emulate
from tests.ops.attention import test_fp8_prefill as fp8
from tests.ops.attention.cases import run_ragged
from tests.ops.attention.oracle import Options


@pytest.mark.parametrize("causal", (False, True))
def test_within_the_bound(causal):
    x = fp8.positive(fp8.batch("cpu", (130,), (400,), heads=(2, 1), dim=64))
    with emulate("90a", seed=1) as launched:
        out, _ = run_ragged(x, Options(causal=causal), "sm90", plan=fp8.OUT)
    assert "attend_sm90_kernel" in launched
    fp8.check_bound(out, x, causal)
    with pytest.raises(AssertionError):
        fp8.check_bound(out * 0, x, causal)
    with pytest.raises(AssertionError):
        fp8.check_bound(out * 1.25, x, causal)
