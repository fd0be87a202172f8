"""Logits between q . k and the softmax: scale, soft cap, ALiBi, mask, a variant's functions; and rotary embedding."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    """tanh with a relative error below 2^-20.5 for every float32: x times a quotient of two polynomials in x^2, each 1
    at 0. NaN stays NaN.

    2 / (1 + exp(-2 x)) - 1 cancels for small x: with a cap of 1e5 a logit would be wrong by up to 0.015. The
    coefficients are a weighted least squares fit on [0, 8.64] whose relative error has equal maxima of 2^-26. At 8.7
    the quotient rounds to 1. docs/rooms/attention.md derives the error.
    """
    x = tl.minimum(tl.maximum(x, -8.7, propagate_nan=tl.PropagateNan.ALL), 8.7, propagate_nan=tl.PropagateNan.ALL)
    x2 = x * x
    above = 1.0 + x2 * (
        0.13404306769371033 + x2 * (3.5233309026807547e-3 + x2 * (2.1070758521091193e-5 + x2 * 1.4008046278490838e-8))
    )
    below = 1.0 + x2 * (
        0.4673762917518616 + x2 * (2.5982271879911423e-2 + x2 * (3.3312058076262474e-4 + x2 * 8.040840953071893e-7))
    )
    # `below` is between 1 and 353, so rsqrt squared is accurate. A division takes six more instructions, for huge and
    # tiny divisors.
    root = tl.rsqrt(below)
    return x * above * (root * root)


# The largest quotient of a logit and its soft cap that `near_zero` takes.
NEAR = tl.constexpr(0.8)


@triton.jit
def near_zero(s, ratio):
    """tanh(ratio s) / ratio for |ratio s| up to NEAR: `s` times a polynomial of (ratio s)^2 that is 1 at 0.

    A logit of scale q . k under a soft cap is scale times this, with ratio = scale / soft_cap. Eight instructions,
    where `_tanh` and its factors are seventeen. The coefficients are a weighted least squares fit whose relative error
    has equal maxima of 2^-23.8; with float32's rounding it is below 2^-22.4.
    """
    x = s * ratio
    x2 = x * x
    above = -0.05317631363868713 + x2 * (0.01919076032936573 + x2 * -0.004410883411765099)
    return s * (1.0 + x2 * (-0.3333286643028259 + x2 * (0.1332276612520218 + x2 * above)))


@triton.jit
def scaled_at(
    s, scale, soft_cap, slopes, distance, UNIT: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr
):
    """Logits of raw products `s`, in base e times UNIT (LOG2E gives base 2). Other arguments broadcast to `s`;
    `distance` is the key's position less the query's."""
    if SOFT_CAP:
        s = s * (scale / soft_cap)
        if ALIBI:
            s += (slopes / soft_cap) * distance.to(tl.float32)
        s = (soft_cap * UNIT) * _tanh(s)
    else:
        s = s * (scale * UNIT)
        if ALIBI:
            s += (slopes * UNIT) * distance.to(tl.float32)
    return s


@triton.jit
def transform(s, scale, soft_cap, slopes, q_pos, kv_pos, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Logits in base 2 of a tile of raw products: scale, slopes and q_pos per row, kv_pos per column."""
    distance = kv_pos[None, :] - q_pos[:, None]
    return scaled_at(s, scale[:, None], soft_cap, slopes[:, None], distance, LOG2E, SOFT_CAP, ALIBI)


@triton.jit
def with_sink(top, total, sink):
    """Add the logit `sink` to a row's softmax: returns the new maximum, the factor for earlier sums, and the new sum.

    In base 2. For a row that has seen no key `top` is -inf and `total` 0. A sink of inf takes all the weight.
    """
    new_top = tl.maximum(top, sink)
    # inf - inf is NaN, of either sign.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - base)
    # The compiler may fuse the multiplication that made `sink` into the difference. Where it should be 0 it then is the
    # product's rounding error, which can be of any size for a large sink. Also, inf - inf is NaN. So equality is
    # tested.
    weight = tl.where(sink == base, 1.0, tl.exp2(sink - base))
    return new_top, keep, total * keep + weight


@triton.jit
def visible_at(
    q_index, q_pos, kv_pos, kv_end, kv_len, mask, row_ok, window_left,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CUSTOM: tl.constexpr,
):  # fmt: skip
    """Which (row, key) pairs are visible. `mask` points at the request's first byte of packed mask bits."""
    ok = kv_pos < kv_end
    if CAUSAL:
        ok = ok & (kv_pos <= q_pos)
    if WINDOW:
        ok = ok & (kv_pos + window_left >= q_pos)
    if CUSTOM:
        bit = q_index.to(tl.int64) * kv_len + kv_pos
        byte = tl.load(mask + (bit >> 3), mask=ok & row_ok, other=0).to(tl.int32)
        ok = ok & (((byte >> (bit & 7).to(tl.int32)) & 1) != 0)
    return ok


@triton.jit
def visible(
    q_index, q_pos, kv_pos, kv_end, kv_len, mask, row_ok, window_left,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CUSTOM: tl.constexpr,
):  # fmt: skip
    """visible_at for a tile of rows and columns: q_index, q_pos and row_ok per row, kv_pos per column."""
    return visible_at(
        q_index[:, None], q_pos[:, None], kv_pos[None, :], kv_end, kv_len, mask, row_ok[:, None], window_left,
        CAUSAL, WINDOW, CUSTOM,
    )  # fmt: skip


@triton.jit
def vary_at(
    s, scale, soft_cap, slopes, batch, q_pos, kv_pos, kv_len, head, params,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """A user's variant: transformed logits of raw products, and which of them its mask makes visible.

    Logits are in base 2 if a softmax follows, else weights. `MASK` and `LOGITS` may be None; without a mask the second
    result is True. Positions past the request's end are clamped to its last, so that a function's loads by position are
    in bounds.
    """
    s = scaled_at(s, scale, soft_cap, slopes, kv_pos - q_pos, 1.0, SOFT_CAP, ALIBI)
    q_pos = tl.minimum(q_pos, kv_len - 1)
    kv_pos = tl.minimum(kv_pos, kv_len - 1)
    ok = True
    if MASK is not None:
        ok = MASK(s, batch, q_pos, kv_pos, head, params)
        tl.static_assert(ok.dtype == tl.int1, "the mask function of a variant must return booleans")
    if LOGITS is not None:
        changed = LOGITS(s, batch, q_pos, kv_pos, head, params)
        s, _ = tl.broadcast(changed.to(tl.float32), s)
    if SOFTMAX:
        s = s * LOG2E
    return s, ok


@triton.jit
def vary(
    s, scale, soft_cap, slopes, batch, q_pos, kv_pos, kv_len, head, params,
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, LOGITS: tl.constexpr, MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """vary_at for a tile of rows and columns: scale, slopes, q_pos and head per row, kv_pos per column."""
    return vary_at(
        s, scale[:, None], soft_cap, slopes[:, None], batch, q_pos[:, None], kv_pos[None, :], kv_len, head[:, None],
        params, SOFT_CAP, ALIBI, LOGITS, MASK, SOFTMAX,
    )  # fmt: skip


@triton.jit
def _cos_sin(angle):
    """Cosine and sine of non-negative angles, float32.

    The angle is reduced to [-pi/4, pi/4] by multiples of pi/2 in three parts (Cody and Waite, 1980); both functions are
    then polynomials (Cephes, Moshier, 1989). libdevice's functions have a slow path for huge arguments, which would be
    most of a kernel's code.
    """
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    x = angle - quarter * 1.5703125
    x = x - quarter * 4.837512969970703e-4
    x = x - quarter * 7.549789948768648e-8
    x2 = x * x
    sin = x + x * x2 * (-1.6666654611e-1 + x2 * (8.3321608736e-3 + x2 * -1.9515295891e-4))
    cos = 1.0 - 0.5 * x2 + x2 * x2 * (
        4.166664568298827e-2 + x2 * (-1.388731625493765e-3 + x2 * 2.443315711809948e-5)
    )
    turn = quarter.to(tl.int32) & 3
    odd = (turn & 1) != 0
    c = tl.where(odd, sin, cos)
    s = tl.where(odd, cos, sin)
    # Quarters 0 ... 3 turn (cos, sin) to (c, s), (-s, c), (-c, -s), (s, -c).
    return tl.where((turn == 1) | (turn == 2), -c, c), tl.where(turn >= 2, -s, s)


@triton.jit
def rotate(lo, hi, positions, rope_scale, rope_log2_theta, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Rotary embedding of rows split in halves (element i pairs with i + HALF), positions down the first axis."""
    i = tl.arange(0, HALF_PAD).to(tl.float32)
    frequency = tl.exp2(-rope_log2_theta * (i / HALF)) / rope_scale
    angle = positions.to(tl.float32)[:, None] * frequency[None, :]
    c, s = _cos_sin(angle)
    lo, hi = lo.to(tl.float32), hi.to(tl.float32)
    return lo * c - hi * s, hi * c + lo * s
