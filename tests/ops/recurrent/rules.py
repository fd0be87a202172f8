"""How near the results of recurrent layers have to be: of state spaces from the recurrence and what kernels round.

h <- h exp(dt A) + (dt x) B^T;  y = h C + D x;  y <- y z sigmoid(z)        (h is [dim, dstate])

Terms may cancel, so that y is a small difference of large ones: by dt (B C) = -D, by a state that has decayed, by
sums over dstate. Float32 in another order than torch's, and operands of products that are rounded, err by parts of the
terms, not of y. So the bound follows the sizes of the terms through the same recurrence, in float64.
"""

import math
from typing import NamedTuple

import torch

# Half an ulp of float32, and what ex2.approx.f32 errs: 2 ulp (PTX ISA).
UNIT = 2.0**-24
EXP = 4 * UNIT
# What is smaller may be 0.
TINY = 2.0**-126
# The relative error of a product by its operands' dtype: one operand of 16 bits is rounded to it (of float16 to tf32);
# three products in tf32 leave out that of the rests, 2^-10 of each factor, and cut off as much of the rests.
PRODUCT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 3 * 2.0**-20}
# Prefill takes a token's decay below exp(-64) for exp(-64).
LEAST = -64.0
ANY = -torch.inf, torch.inf


def additions(n: int) -> float:
    """What a sum of n terms in float32 errs whatever its order, of the sum of their sizes: n roundings at most, and
    6 sqrt(n) but once in 10^7 (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019)."""
    return UNIT * min(n, 6 * n**0.5)


class Truth(NamedTuple):
    """Results [tokens, heads, dim], states after each token [tokens, heads, dim, dstate], and what each may err by."""

    out: torch.Tensor
    states: torch.Tensor
    out_error: torch.Tensor
    state_error: torch.Tensor


class Chunks(NamedTuple):
    """Prefill: logarithms of decays are summed over `tile` tokens in float32, and products err by `product` of a
    term."""

    tile: int
    product: float


# A reference sums them in float64, so that only what is short has an error, and multiplies in float32.
REFERENCE = Chunks(1, 0.0)
# Tokens of a chunk at most.
LONGEST = 256


def chunks_of(backend, dtype, device) -> Chunks:
    """What prefill by a backend rounds, of x in a dtype."""
    by_reference = backend == "reference" or backend == "auto" and device.type == "cpu"
    return REFERENCE if by_reference else Chunks(64, PRODUCT[dtype])


def _steps(dt, bias, softplus, limit):
    """dt of each token in float64, and its error."""
    x = dt.double() if bias is None else dt.double() + bias.double()
    if not softplus:
        return x.clamp(*limit), UNIT * x.abs()
    rest = torch.log1p(torch.exp(-x.abs()))
    p = (x.clamp(min=0) + rest).clamp(*limit)
    # Of log(1 + e), e = exp(-|x|): x, its product with log2(e), which is rounded too, ex2 (2 ulp), the logarithm (1),
    # a quotient (2) and four roundings.
    return p, UNIT * (x.abs() * x.sigmoid() + p + rest * (2 * x.abs() + 14))


def _largest_sum(sizes, tokens):
    """The largest sum over so many consecutive tokens."""
    sums = torch.cat((torch.zeros_like(sizes[:1]), sizes.cumsum(0)))
    n = min(tokens, len(sizes))
    return float((sums[n:] - sums[:-n]).max())


def state_space(h, x, dt, A, B, C, D=None, z=None, bias=None, softplus=True, limit=ANY, chunks=None) -> Truth:
    """One sequence in float64, token by token, and the bounds of its errors.

    h : [heads, dim, dstate]. x, z : [tokens, heads, dim]. dt : [tokens, heads, dim or 1]. B, C : [tokens, groups,
    dstate]. A : [heads, dim or 1, dstate or 1]. D, bias : [heads, dim or 1]. chunks : None for kernels that go token by
    token in float32.

    `size` is what the sum of the sizes of a state's terms is. A token's decay errs by what its logarithm does, and a
    term by the decays that it has passed. Roundings are those of each token, or those of a chunk.
    """
    h, A = h.double(), A.double()
    p, p_error = _steps(dt, bias, softplus, limit)
    logs = p[..., None] * A
    error, size, dstate = torch.zeros_like(h), h.abs(), h.shape[-1]
    rounds, of_state, of_out, floor = 6 * UNIT, 0.0, additions(dstate), TINY
    if chunks is not None and len(x):
        # Two sums of logarithms, by scans; three exponentials, the products with them, and a carry from chunk to chunk.
        sums = UNIT * math.log2(chunks.tile) * _largest_sum(logs.abs().clamp(max=-LEAST), chunks.tile)
        of_term = 2 * sums + 3 * EXP + 4 * UNIT + len(x) // 32 * (EXP + UNIT)
        of_state = of_term + additions(LONGEST) + chunks.product
        of_out = of_state + additions(LONGEST + dstate) + chunks.product
        rounds, floor = 0.0, math.exp(LEAST)
    kept = [[], [], [], []]
    for t in range(len(x)):
        decay = logs[t].exp()
        # At a decay of 0 its logarithm may be -inf.
        log_error = p_error[t][..., None] * A.abs() + 3 * UNIT * logs[t].abs()
        decay_error = torch.where(decay > TINY, decay * (log_error + rounds), 0) + floor
        wide_B, wide_C = (m[t].double().repeat_interleave(len(h) // m.shape[1], 0)[:, None] for m in (B, C))
        value = x[t].double()
        added = (p[t] * value)[..., None] * wide_B
        error = decay * error + decay_error * size + (p_error[t] * value.abs())[..., None] * wide_B.abs()
        error = error + (rounds + 2 * UNIT) * added.abs()
        h, size = h * decay + added, size * decay + added.abs()
        y, y_error = (h * wide_C).sum(-1), ((error + of_out * size) * wide_C.abs()).sum(-1)
        if D is not None:
            skip = D.double() * value
            y, y_error = y + skip, y_error + 2 * UNIT * (skip.abs() + y.abs())
        if z is not None:
            gate = z[t].double()
            # The product of -z with log2(e), ex2 (2 ulp), a sum, a quotient (2 ulp) and two products.
            of_gate = UNIT * (2 * gate.abs() + 12)
            plain, y = y.abs(), y * gate * gate.sigmoid()
            y_error = y_error * (gate * gate.sigmoid()).abs() + of_gate * y.abs() + TINY * (plain * gate).abs()
        for some, value in zip(kept, (y, h, y_error, error + of_state * size), strict=True):
            some.append(value)
    return Truth(*map(torch.stack, kept))


def assert_within(found, truth, error, what="out") -> None:
    """Assert that every element of `found` errs by at most `error` and a spacing of its dtype, to which Triton's
    interpreter cuts bfloat16; NaN and infinities stand where the truth in that dtype has them."""
    finfo = torch.finfo(found.dtype)
    assert found.shape == truth.shape and truth.dtype == torch.float64, f"{what}: {found.shape}, {truth.shape}"
    truth, error = truth.to(found.device), error.to(found.device)
    expected = truth.to(found.dtype)
    for name in ("isnan", "isposinf", "isneginf"):
        differs = getattr(torch, name)(found) != getattr(torch, name)(expected)
        assert not differs.any(), f"{what}: {name} differs at {differs.nonzero()[0].tolist()}"
    finite = expected.isfinite()
    assert error[finite].isfinite().all(), f"{what}: no bound"
    allowed = error + finfo.eps * (truth.abs() + error) + finfo.smallest_normal * finfo.eps
    excess = torch.where(finite, (found.double() - truth).abs() / allowed, 0)
    if (excess > 1).any():
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int((excess > 1).sum())} elements err by more than allowed; worst {worst}: "
            f"{found[worst].item():.9g}, truth {truth[worst].item():.9g}, allowed {allowed[worst].item():.4g}"
        )


# -- delta rules ------------------------------------------------------------------------------------------------------

# What a chunk in float32 errs, of the largest value.
NEAR = 1e-5


def assert_near(out, truth, what="", by=NEAR) -> None:
    """Assert that `out` errs by at most `by` of the largest value, or of 1."""
    error, size = (out.double() - truth).abs().max(), max(1.0, float(truth.abs().max()))
    assert error <= by * size, f"{what}: {float(error)} of {size}"


def delta_state_error(backend, dtype) -> float:
    """What the state after a prompt errs, of its largest value.

    Kernels round what products multiply: 16-bit floats to their dtype, but float16 to tf32; a few roundings add up.
    """
    rounded = backend != "reference" and dtype != torch.float32
    return 4 * PRODUCT[dtype] if rounded else NEAR


def assert_delta_results(backend, out, q, scale, states, truth, what="out") -> None:
    """Assert what kernels make of a prompt in 16 bits: q [tokens, heads, K] of length 1, states [tokens, heads, V, K].

    They round the states that queries multiply, and what makes these, so they err as states do: of the size of scale
    times |state| |q|, whose terms may cancel.
    """
    q = q.repeat_interleave(states.shape[1] // q.shape[1], 1)[:, :, None]
    terms = scale * (states.abs() * q.abs()).sum(-1)
    assert_within(out, truth, delta_state_error(backend, out.dtype) * terms.amax().expand_as(truth), what)
