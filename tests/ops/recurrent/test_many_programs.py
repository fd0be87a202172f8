"""Steps with many programs have twice the rows in each, and those with very many requests a third axis of programs: a
request has the bits that it has alone."""

from functools import partialmethod

import pytest
import torch

from flashinfer._core.dispatch import Op
from flashinfer._core.target import target_of
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose
from flashinfer.mamba import selective_state_update
from flashinfer.testing import generate
from flashinfer.testing.compare import assert_bitwise
from tests.ops.recurrent.delta import test_delta, test_kda
from tests.ops.recurrent.ssm import test_replay

BF16 = torch.bfloat16
HEADS, ROWS, COLUMNS = 2, 32, 128
# Programs of 8 rows of a request.
PROGRAMS = HEADS * ROWS // 8


def batch_of(many: int, device) -> int:
    return many * target_of(device).sms // PROGRAMS + 2


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_of_delta_rules(device, dtype):
    # Kernels' modules import Triton, which the interpreter's setting has to precede.
    from flashinfer.ops.recurrent.delta.step import _MANY

    n = batch_of(_MANY, device)
    q, k = (generate.randn(n, 1, 1, COLUMNS, dtype=BF16, device=device) for _ in range(2))
    v = generate.randn(n, 1, HEADS, ROWS, dtype=BF16, device=device)
    a, b = (generate.randn(n, 1, HEADS, dtype=BF16, device=device) for _ in range(2))
    rate, bias = (generate.randn(HEADS, device=device) for _ in range(2))
    state = generate.randn(n, HEADS, ROWS, COLUMNS, device=device).to(dtype)

    def step(some):
        after = state[some].clone()
        given = q[some], k[some], v[some], after, rate, a[some], bias, b[some]
        return gated_delta_rule_decode_pretranspose(*given, backend="portable")

    for alone, together in zip(step(slice(n - 1, n)), step(slice(0, n)), strict=True):
        assert_bitwise(together[-1:].contiguous(), alone)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_of_state_spaces(device, dtype, monkeypatch):
    from flashinfer.ops.recurrent.ssm.portable import _MANY

    monkeypatch.setattr(Op, "__call__", partialmethod(Op.__call__, backend="portable"))
    n = batch_of(_MANY, device)
    x, dt = (generate.randn(n, HEADS, ROWS, dtype=BF16, device=device) for _ in range(2))
    dt = dt[..., :1].expand(n, HEADS, ROWS)
    B, C = (generate.randn(n, 1, COLUMNS, dtype=BF16, device=device) for _ in range(2))
    A = (-torch.rand(HEADS, 1, 1, device=device)).expand(HEADS, ROWS, COLUMNS)
    state = generate.randn(n, HEADS, ROWS, COLUMNS, device=device).to(dtype)

    def step(some):
        after = state[some].clone()
        return selective_state_update(after, x[some], dt[some], A, B[some], C[some], None, dt_softplus=True), after

    for alone, together in zip(step(slice(n - 1, n)), step(slice(0, n)), strict=True):
        assert_bitwise(together[-1:].contiguous(), alone)


def requests_past_an_axis(device, monkeypatch) -> int:
    """Two requests more than the second axis of a grid holds; on a CPU, where it is made shorter, 5."""
    from triton import language as tl

    from flashinfer.ops.recurrent._device import sequences

    if device.type != "cuda":
        monkeypatch.setattr(sequences, "MOST", tl.constexpr(3))
    return sequences.MOST.value + 2


def test_of_more_delta_rules_than_an_axis_holds(device, monkeypatch):
    n = requests_past_an_axis(device, monkeypatch)
    q, k = (generate.randn(n, 1, 1, 16, dtype=BF16, device=device) for _ in range(2))
    v = generate.randn(n, 1, 1, 8, dtype=BF16, device=device)
    a, b = (generate.randn(n, 1, 1, dtype=BF16, device=device) for _ in range(2))
    rate, bias = (generate.randn(1, device=device) for _ in range(2))
    state = generate.randn(n, 1, 8, 16, device=device)

    def step(some):
        after = state[some].clone()
        given = q[some], k[some], v[some], after, rate, a[some], bias, b[some]
        return gated_delta_rule_decode_pretranspose(*given, backend="portable")

    for last, together in zip(step(slice(n - 3, n)), step(slice(0, n)), strict=True):
        assert_bitwise(together[-3:].contiguous(), last)


def test_of_more_state_spaces_than_an_axis_holds(device, monkeypatch):
    n = requests_past_an_axis(device, monkeypatch)
    monkeypatch.setattr(Op, "__call__", partialmethod(Op.__call__, backend="portable"))
    x = generate.randn(n, 1, 8, dtype=BF16, device=device)
    B, C = (generate.randn(n, 1, 16, dtype=BF16, device=device) for _ in range(2))
    A = -torch.rand(1, 1, 1, device=device).expand(1, 8, 16)
    state = generate.randn(n, 1, 8, 16, device=device)

    def step(some):
        after = state[some].clone()
        dt = x[some, :, :1].expand(-1, 1, 8)
        return selective_state_update(after, x[some], dt, A, B[some], C[some], None, dt_softplus=True), after

    for last, together in zip(step(slice(n - 3, n)), step(slice(0, n)), strict=True):
        assert_bitwise(together[-3:].contiguous(), last)


@pytest.mark.parametrize(("room", "most"), [("tree", 3), ("commit", 4), ("replay", 2)])
def test_requests_past_an_axis(room, most, device, monkeypatch):
    """Four, six and three requests, with what is packed outside of all, on a grid whose axis holds `most` of them."""
    from triton import language as tl

    from flashinfer.ops.recurrent._device import sequences

    if device.type != "cuda":
        monkeypatch.setattr(sequences, "MOST", tl.constexpr(most))
    if room == "tree":
        test_kda.test_a_tree("portable", device, "caches", packed=True, lower=-5.0)
    elif room == "commit":
        test_delta.test_replay("portable", device, normalize=True)
    else:
        monkeypatch.setattr(Op, "__call__", partialmethod(Op.__call__, backend="portable"))
        test_replay.test_steps_of_speculative_decoding("portable", device, packed=True)
