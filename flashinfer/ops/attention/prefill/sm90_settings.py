"""Hopper prefill: what the kernel is compiled for, the records that its warps pass on, and opaque numbers.

The compiler works out before the first task what is the same for all tasks, and keeps it: in registers that the loop
over keys needs, so that they spill. A number behind an empty PTX instruction is opaque: the compiler cannot see that it
is always the same, and computes what follows from it where it is used.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier

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
    TURN_WARPS: gl.constexpr
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
    """Stages of K or V tiles, with a full and an empty barrier each.

    A head_dim that is no power of two comes in two parts, `tiles` and `rest`; else they are the same.
    """

    tiles: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_ring(tiles, rest, STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Ring(tiles, rest, full, empty)


@gluon.jit
def opaque(number):
    """int32 `number`, opaque: nothing that follows from it (its 64 bits, say) is computed once and kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


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


@gluon.jit
def block_count():
    """gl.num_programs(0), read where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, %nctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def block_id():
    """gl.program_id(0), read where it is used."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
