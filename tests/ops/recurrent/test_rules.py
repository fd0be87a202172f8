"""The rule of state spaces: what float32 and rounded operands err passes, where terms cancel too; faults do not."""

import functools

import pytest
import torch

from flashinfer.testing import generate
from tests.ops.recurrent import rules
from tests.ops.recurrent.rules import REFERENCE, Chunks, assert_within

BF16 = torch.bfloat16
HEADS, DIM, DSTATE, TOKENS, CHUNK = 1, 16, 64, 140, 128
# What is asked, and in which dtype results are.
KINDS = {
    "steps": (None, torch.float32),
    "reference": (REFERENCE, torch.float32),
    "chunks": (Chunks(64, rules.PRODUCT[torch.float32]), torch.float32),
    "bf16 chunks": (Chunks(64, rules.PRODUCT[BF16]), BF16),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def layer(tokens=TOKENS):
    """Arguments of `rules.state_space`, with values that bfloat16 has."""

    def randn(*shape):
        return generate.randn(*shape, dtype=BF16, device="cpu")

    x, z = randn(tokens, HEADS, DIM), randn(tokens, HEADS, DIM)
    B, C = randn(tokens, HEADS, DSTATE), randn(tokens, HEADS, DSTATE)
    dt, A = randn(tokens, HEADS, 1).float(), -torch.rand(HEADS, 1, 1)
    state = generate.randn(HEADS, DIM, DSTATE, device="cpu")
    return dict(h=state, x=x, dt=dt, A=A, B=B, C=C, D=torch.rand(HEADS, 1), z=z, bias=torch.rand(HEADS, 1))


def in_float32(h, x, dt, A, B, C, D, z, bias, operand=None):
    """(results, states) in torch: token by token, or by chunks whose products have one operand in a dtype."""
    p = torch.nn.functional.softplus(dt + bias)[..., 0]
    x, B, C, gate = x.float(), B.float(), C.float(), torch.nn.functional.silu(z.float())
    if operand is None:
        results, states = [], []
        for t in range(len(x)):
            h = h * torch.exp(p[t][:, None, None] * A) + (p[t][:, None] * x[t])[..., None] * B[t][:, None]
            results.append(((h * C[t][:, None]).sum(-1) + D * x[t]) * gate[t])
            states.append(h)
        return torch.stack(results), torch.stack(states)
    results, states = [], []
    for part in torch.arange(len(x)).split(CHUNK):
        steps, rows, b, c = p[part], x[part], B[part], C[part]
        sums = (steps * A.flatten()).cumsum(0)
        gaps = (sums[:, None] - sums).permute(2, 0, 1).tril().exp().tril()
        scores = torch.einsum("ihn,jhn->hij", c, b) * gaps * steps.T[:, None]
        y = torch.einsum("ihn,hdn->ihd", c, h.to(operand).float()) * sums.exp()[..., None]
        y = y + torch.einsum("hij,jhd->ihd", scores.to(operand).float(), rows) + D * rows
        results.append(y * gate[part])
        weights = steps * (sums[-1] - sums).exp()
        added = (b * weights[..., None]).to(operand).float()
        h = h * sums[-1].exp()[:, None, None] + torch.einsum("jhd,jhn->hdn", rows, added)
        states.append(h)
    return torch.cat(results), torch.stack(states)


@functools.cache
def case(kind):
    """(arguments, truth, dtype of results)."""
    given, (chunks, dtype) = layer(), KINDS[kind]
    return given, rules.state_space(**given, chunks=chunks), dtype


def check(kind, given, out, last):
    chunks, dtype = KINDS[kind]
    truth = rules.state_space(**given, chunks=chunks)
    assert_within(out.to(dtype), truth.out, truth.out_error)
    assert_within(last, truth.states[-1], truth.state_error[-1], "state")


@pytest.mark.parametrize("seed", range(2))
@kinds
def test_what_is_asked_passes(kind, seed):
    torch.manual_seed(seed)
    given = layer()
    out, states = in_float32(**given, operand=BF16 if kind == "bf16 chunks" else None)
    check(kind, given, out, states[-1])


@pytest.mark.parametrize("order", [1, -1])
@kinds
def test_terms_that_cancel(kind, order):
    """A state's part and the token's own, of which less than 2^-12 is left."""
    given = layer(CHUNK + 1)
    given["dt"][-1], given["D"] = 0, torch.zeros(HEADS, 1)
    step, (B, C) = torch.nn.functional.softplus(given["bias"]), (given[name][-1].float() for name in "BC")
    state = rules.state_space(**given).states[-2] * torch.exp(step[..., None] * given["A"])
    # x of the last token undoes what the state before it gives.
    given["x"] = given["x"].float()
    given["x"][-1] = (state * C[:, None]).sum(-1) / (step * (B * C).sum(-1, keepdim=True)) * (order * 2.0**-14 - 1)
    out, states = in_float32(**given, operand=BF16 if kind == "bf16 chunks" else None)
    check(kind, given, out, states[-1])
    exact = rules.state_space(**given).out
    assert exact[-1].norm() < 1e-3 * exact[:-1].norm(dim=-1).mean()


def left_out(given):
    return {name: t[:-1] if name in ("x", "dt", "B", "C", "z") else t for name, t in given.items()}


FAULTS = {
    "zeros": lambda out, state: (torch.zeros_like(out), torch.zeros_like(state)),
    "NaN": lambda out, state: (out.index_fill(0, torch.tensor([7]), torch.nan), state * torch.nan),
    "infinite": lambda out, state: (out / 0, state / 0),
    "twice": lambda out, state: (2 * out, 2 * state),
    "a tenth more": lambda out, state: (1.1 * out, 1.1 * state),
    "a token earlier": lambda out, state: (out.roll(1, 0), state.roll(1, -1)),
    "in bfloat16": lambda out, state: (out.bfloat16().to(out.dtype), state.bfloat16().float()),
}


@pytest.mark.parametrize("fault", FAULTS)
@kinds
def test_faults_are_refused(kind, fault):
    _, truth, dtype = case(kind)
    if dtype == BF16 and fault == "in bfloat16":
        return
    out, state = FAULTS[fault](truth.out.to(dtype), truth.states[-1].float())
    with pytest.raises(AssertionError, match="^out: "):
        assert_within(out.to(dtype), truth.out, truth.out_error)
    with pytest.raises(AssertionError, match="^state: "):
        assert_within(state, truth.states[-1], truth.state_error[-1], "state")


@kinds
def test_a_token_that_is_left_out(kind):
    """One of 140, of which the last result and the state tell; and the state that it began with."""
    given, truth, dtype = case(kind)
    for name, change in (("x", lambda t: t[-2].zero_()), ("h", lambda t: t.zero_())):
        other = given | {name: given[name].clone()}
        change(other[name])
        found = rules.state_space(**other)
        with pytest.raises(AssertionError, match="^out: "):
            assert_within(found.out.to(dtype), truth.out, truth.out_error)
    less = rules.state_space(**left_out(given))
    with pytest.raises(AssertionError, match="^state: "):
        assert_within(less.states[-1].float(), truth.states[-1], truth.state_error[-1], "state")


@pytest.mark.parametrize("kind", ["steps", "reference", "chunks"])
@pytest.mark.parametrize("operand", [BF16, torch.float16], ids=str)
def test_operands_of_16_bits_are_refused_where_float32_is_asked(kind, operand):
    """float16 has the precision of tf32."""
    given, truth, _ = case(kind)
    out, states = in_float32(**given, operand=operand)
    with pytest.raises(AssertionError, match="^out: "):
        assert_within(out, truth.out, truth.out_error)
    with pytest.raises(AssertionError, match="^state: "):
        assert_within(states[-1], truth.states[-1], truth.state_error[-1], "state")


def test_values_that_no_bound_has():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="^out: no bound"):
        assert_within(one.float(), one, one * torch.nan)
    assert_within(one.float() * torch.nan, one * torch.nan, one)
    with pytest.raises(AssertionError, match="^out: isnan differs"):
        assert_within(one.float(), one * torch.nan, one)
    with pytest.raises(AssertionError, match="^out: isposinf differs"):
        assert_within(one.half(), one * 1e6, one)
