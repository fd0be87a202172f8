"""Decode without a work list in the emulator: items that programs make of lengths, beside the list of a plan."""

import pytest
import torch

from flashinfer.ops.attention import direct, worklist
from flashinfer.ops.attention.tables import block_table
from flashinfer.ops.kv_layout import paged_views
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from flashinfer.testing.emulator import emulate
from tests.ops.attention.cases import check
from tests.ops.attention.oracle import Options
from tests.ops.attention.test_direct import blocks, lens, run

PAGE = 16


def both(kv, q_len=1, window_left=-1, heads=(8, 2), dim=64, kv_dtype=None, sms=4):
    """Results with and without a list, which have to be the same, bit by bit, and right."""
    x = generate.ragged_batch([q_len] * len(kv), list(kv), *heads, dim, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    paged, o = generate.paged(x, PAGE, "NHD"), Options(causal=q_len > 1, window_left=window_left)
    tables, results = blocks(paged, kv, -(-max(*kv, 1) // PAGE) + 1, gap=3), []
    views = lambda cache: paged_views(cache, "NHD")
    write = worklist.WorkList._launch
    for listed in (False, True):
        with emulate("90a", seed=1, sms=sms) as launched, pytest.MonkeyPatch.context() as patch:
            lists = []
            patch.setattr(worklist.WorkList, "_launch", lambda *given, lists=lists: (lists.append(1), write(*given))[1])
            if listed:
                patch.setattr(worklist.WorkList, "_requests", lambda *_: 0)
            direct._kept.__dict__.clear()
            # A second call finds the counters as the first has left them; the list's is what a plan's call is, too.
            for _ in range(2 - listed):
                table = block_table(tables, lens(kv, "cpu"), q_len=q_len)
                results.append(run(x, table, paged.kv_cache, views, "sm80", page_size=PAGE, longest_q=q_len, o=o))
            direct._kept.__dict__.clear()
        assert launched == ["attend_sm80_kernel"] * (2 - listed) and bool(lists) == listed
    for other in results[1:]:
        assert_bitwise(results[0][0], other[0])
        assert_bitwise(results[0][1], other[1])
    check(results[0], x, o)


def test_quickly():
    both((300,))
    both((70, 0, 1, 900, 33))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    (
        dict(kv=(3000,), sms=132, dim=16), dict(kv=(0,)), dict(kv=(129,), window_left=40), dict(kv=(1000, 900, 1100)),
        dict(kv=(500, 7, 64), q_len=3), dict(kv=(500,), q_len=5), dict(kv=(40,) * 33), dict(kv=(0,) * 63 + (300,)),
        dict(kv=(1500, *range(60)), window_left=100), dict(kv=(400, 200), kv_dtype=torch.float8_e4m3fn),
        dict(kv=(2000, 0, 2000), heads=(8, 1), sms=20),
    ),
    ids=str,
)  # fmt: skip
def test_lengths(case):
    both(**case)
