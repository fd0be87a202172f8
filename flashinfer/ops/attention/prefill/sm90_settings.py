"""Hopper prefill: the kernel's compile-time settings, and records that its functions pass on.

Some values are made opaque (ops/_device/sm90/registers.py): otherwise the compiler computes derived values before the
first task and keeps them in registers that the loop over keys needs.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon
from flashinfer.ops._device.sm90.ring import Channel, make_channel

# Rows of a warpgroup's tile: M of one wgmma.
ROWS = gl.constexpr(64)


@aggregate
class Settings:
    """The kernel's compile-time settings."""

    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    CUSTOM: gl.constexpr
    SOFT_CAP: gl.constexpr
    ALIBI: gl.constexpr
    SINKS: gl.constexpr
    HEAD_SCALES: gl.constexpr
    LSE: gl.constexpr
    # Whether logits need more than a positive scale. A positive scale alone is folded into the exponent.
    TRANSFORM: gl.constexpr
    # Whether keys and values are copied row by row with cp.async instead of by TMA.
    GATHER: gl.constexpr
    # Warps that copy K by TMA, and as many that copy V.
    COPIERS: gl.constexpr
    # The format of keys and values that are widened (sm90_widen.py), or ""; the slices whose loads are in flight.
    WIDEN: gl.constexpr
    LEAD: gl.constexpr
    # Whether tensor maps have an axis of heads, first of three; else heads are rows or columns of a matrix.
    BY_HEAD: gl.constexpr
    GROUP: gl.constexpr
    PAGE_SIZE: gl.constexpr
    D_VO: gl.constexpr
    D_VO_PAD: gl.constexpr
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr
    # Whether head_dim has two parts, see Ring; the head's columns in the second; whether outputs are staged in shared
    # memory.
    TWO: gl.constexpr
    REST: gl.constexpr
    STAGED: gl.constexpr
    # Whether queries, keys, weights and values are e4m3; K of one wgmma; the number of warps that transpose values.
    FP8: gl.constexpr
    MMA_K: gl.constexpr
    TRANSPOSE_WARPS: gl.constexpr
    # The functions of a user's variant, or None; whether there is a variant; whether a softmax follows its logits.
    LOGITS: gl.constexpr
    MASK: gl.constexpr
    VARIED: gl.constexpr
    SOFTMAX: gl.constexpr
    # Whether blocks without a mask use a fixed shift, see sm90_softmax.steps.
    FIXED: gl.constexpr
    # Whether the consumer warpgroups take turns in issuing products.
    TURNS: gl.constexpr
    # Whether weights stay float32 until the next block's scores are issued.
    LATE: gl.constexpr
    # FP8 with HEAD_SCALES: scores are multiplied by the row's scale as a part of the exponent.
    BY_ROW: gl.constexpr
    # One of so many exponentials of a fixed shift is a polynomial, see sm90_exponentials.py; 0 for none.
    BY_FMA: gl.constexpr


@aggregate
class Tensors:
    """The kernel's pointers that consumers use."""

    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    partial_out: gl.tensor
    partial_lse: gl.tensor
    items: gl.tensor
    counts: gl.tensor
    arrivals: gl.tensor
    mask: gl.tensor
    mask_indptr: gl.tensor
    sinks: gl.tensor
    qk_scale: gl.tensor
    v_scale: gl.tensor
    alibi_slopes: gl.tensor


@aggregate
class Scalars:
    """The kernel's numbers that consumers use."""

    num_kv_heads: gl.tensor
    q_stride_n: gl.tensor
    q_stride_h: gl.tensor
    o_stride_n: gl.tensor
    o_stride_h: gl.tensor
    sm_scale: gl.tensor
    out_scale: gl.tensor
    soft_cap: gl.tensor
    window_left: gl.tensor


@aggregate
class Ring:
    """Stages of K or V tiles, and their channel.

    A head_dim that is no power of two has two parts, `tiles` and `rest`: 192 is 128 and 64; 72 is 64 and 16, of which 8
    are zeros. Else both are the same.
    """

    tiles: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    channel: Channel


@gluon.jit
def make_ring(tiles, rest, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    return Ring(tiles, rest, make_channel(STAGES, WRITERS, READERS))


@gluon.jit
def opaque_sum(first, index, STEP: gl.constexpr):
    """first + index, opaque. `index` is an arange whose elements in a thread differ by less than STEP or by multiples
    of STEP.

    The part of `index` below STEP is added before the opaque move, the multiples of STEP after it. So a thread keeps
    few registers and uses constant offsets; otherwise the compiler keeps one register for each element. Example: with
    STEP 8 and columns 2, 3, 10, 11 a thread keeps first + 2 and first + 3, and adds 0 and 8 where it uses them.
    """
    offset = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [first + (index & (STEP - 1))], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip
    return offset + (index & -STEP)


@gluon.jit
def token_of(packed, GROUP: gl.constexpr):
    """The token of rows that are counted in (token, head of the group) pairs. They are never negative, so that for a
    GROUP that is a power of two it is one shift."""
    return (packed.to(gl.uint32) // GROUP).to(gl.int32)


@gluon.jit
def places_of_rows(
    first, later, row, kv_head, stride_n, stride_h, STEP: gl.constexpr, GROUP: gl.constexpr, VEC: gl.constexpr
):
    """Of rows first + later of a work item, where `later` is a multiple of STEP: the tokens, and the offsets in a
    tensor in which the request begins with `row`. Strides are multiples of VEC.

    Where GROUP divides STEP, rows of one `first` have one head, and tokens that differ by constants. So a thread
    multiplies one token by stride_n, and adds multiples of stride_n. These are of an opaque copy: the compiler would
    keep them for all tasks, or add before it multiplies.
    """
    if STEP % GROUP == 0:
        token = token_of(first, GROUP)
        stride = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [stride_n], dtype=gl.int64, is_pure=False, pack=1)
        at = (row + token).to(gl.int64) * stride_n + (kv_head * GROUP + first - token * GROUP) * stride_h
        at += (later // GROUP).to(gl.int64) * gl.multiple_of(stride, [VEC])
        token += later // GROUP
    else:
        token = token_of(first + later, GROUP)
        at = (row + token).to(gl.int64) * stride_n
        at += (kv_head * GROUP + first + later - token * GROUP) * stride_h
    return token, at
