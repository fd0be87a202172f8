"""Hopper prefill: what the kernel is compiled for, and the records that its warps pass on.

Numbers are made opaque (ops/_device/sm90/registers.py) where the compiler would compute what follows from them before
the first task and keep it in registers that the loop over keys needs.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon
from flashinfer.ops._device.sm90.ring import Channel, make_channel

# Rows of a warpgroup's tile: what one wgmma takes.
ROWS = gl.constexpr(64)


@aggregate
class Settings:
    """Constants that the kernel is compiled for."""

    CAUSAL: gl.constexpr
    WINDOW: gl.constexpr
    CUSTOM: gl.constexpr
    SOFT_CAP: gl.constexpr
    ALIBI: gl.constexpr
    SINKS: gl.constexpr
    HEAD_SCALES: gl.constexpr
    LSE: gl.constexpr
    # Whether logits are more than products times a positive scale, which is folded into the exponent.
    TRANSFORM: gl.constexpr
    # Whether tiles are gathered row by row, and not copied in boxes.
    GATHER: gl.constexpr
    GROUP: gl.constexpr
    PAGE_SIZE: gl.constexpr
    D_VO: gl.constexpr
    D_VO_PAD: gl.constexpr
    BLOCK_M: gl.constexpr
    STAGES: gl.constexpr
    # Whether keys have two parts, see Ring; whether outputs are staged in shared memory.
    TWO: gl.constexpr
    STAGED: gl.constexpr
    # Whether queries, keys, weights and values are e4m3; the depth of a wgmma; the warps that transpose values.
    FP8: gl.constexpr
    MMA_K: gl.constexpr
    TRANSPOSE_WARPS: gl.constexpr
    # The functions of a user's variant, or None; whether there is a variant; whether a softmax follows its logits.
    LOGITS: gl.constexpr
    MASK: gl.constexpr
    VARIED: gl.constexpr
    SOFTMAX: gl.constexpr
    # Whether weights of blocks without a mask have a fixed shift, see sm90_softmax.steps.
    FIXED: gl.constexpr
    # Whether the first block of keys may come in front of those without a mask, see sm90_queue.seed_of.
    SEEDED: gl.constexpr


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

    A head_dim that is no power of two comes in two parts, `tiles` and `rest`; else they are the same.
    """

    tiles: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    channel: Channel


@gluon.jit
def make_ring(tiles, rest, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    return Ring(tiles, rest, make_channel(STAGES, WRITERS, READERS))


@gluon.jit
def opaque_sum(first, index, STEP: gl.constexpr):
    """first + index, opaque. `index` is an arange; a thread's elements differ by 1, or by STEP or more.

    The thread's offset, which is below STEP, is added to `first` behind the opaque move, and the rest are constants:
    else the compiler keeps one sum of offset and constant for each element. Example: STEP 8, and a thread with columns
    2, 3, 10, 11: it keeps first + 2 and first + 3, and adds 0 and 8 where it uses them.
    """
    offset = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [first + (index & (STEP - 1))], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip
    return offset + (index & -STEP)
