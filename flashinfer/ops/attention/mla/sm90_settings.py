"""Latent attention on Hopper: tile sizes, compile-time settings, and shared memory."""

from flashinfer._core.gluon_compat import aggregate, gl

# Query rows of a tile: M of one wgmma. Keys of a block: with fewer than 64, reading the queries from shared memory
# takes longer than the product.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# Columns of the output of one warpgroup, half of a latent row.
HALF = gl.constexpr(256)
# Columns with an mbarrier of their own: products start when the first part of a half has arrived.
PART = gl.constexpr(128)
# Columns of a positional row.
REST = gl.constexpr(64)
# The most work items that a thread block retries. After that many failures it no longer uses a fixed shift.
MOST_FAILED = gl.constexpr(64)
# Four warps copy 16 rows of 64 columns at a time, eight lanes a row, whose 128 bytes fill all banks. Each thread has
# the same rows in every tile.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))

# The output of a warpgroup as it is stored: four lanes have 32 bytes of a row, a sector, where wgmma's layout gives
# them 16. Lanes exchange every second register; 64 bytes would go through shared memory, and more registers.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]], [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 256],
    )
)  # fmt: skip


@aggregate
class Settings:
    """The kernel's compile-time settings."""

    HEADS: gl.constexpr
    PAGE_SIZE: gl.constexpr
    # Whether entries of the table are tokens instead of pages.
    SPARSE: gl.constexpr
    # Whether keys are copied row by row instead of by TMA.
    GATHER: gl.constexpr
    # Whether the producers copy queries too: those that gather with cp.async.
    Q_COPIED: gl.constexpr
    # Whether keys have a positional row.
    POSITIONAL: gl.constexpr
    # The FP8 formats ("e4m3", "e5m2") of keys and queries, which are widened as they are loaded; "" for bf16 and fp16.
    KV_FP8: gl.constexpr
    Q_FP8: gl.constexpr
    CAUSAL: gl.constexpr
    SINKS: gl.constexpr
    DEVICE_SCALES: gl.constexpr
    # Whether logits need more than a positive scale. A positive scale alone is folded into the exponent.
    TRANSFORM: gl.constexpr
    # Whether blocks without a mask use a fixed shift: in bf16, which has the range of float32.
    FIXED: gl.constexpr
    LSE: gl.constexpr
    BASE_E: gl.constexpr


@aggregate
class Shared:
    """Shared memory: queries, and a pair of blocks of keys. A block has a left and a right half of its latent rows, and
    positional rows.

    A half is released as a whole (one mbarrier for each block) and filled in two parts (mbarrier 2 * block + part).
    Positional rows are filled together with the half whose release also frees them: the right half of block 0, the left
    half of block 1.
    """

    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    # With Q_COPIED: the mbarriers of producers for consumers, and of both consumers for producers.
    q_full: gl.shared_memory_descriptor
    q_read: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    # Data of one warpgroup for the other: its weights, which overwrite its positional keys (`ready`), the maximum and
    # the factor of each row, and its sums; `met` is a barrier of both.
    ready: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    keeps: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    # Sparse keys: 0, or -inf where the table names no key, and its barrier.
    bias: gl.shared_memory_descriptor
    bias_full: gl.shared_memory_descriptor
    # The work items whose fixed shift failed, then their count; `reported` is the mbarrier after the last one.
    failed: gl.shared_memory_descriptor
    reported: gl.shared_memory_descriptor


@aggregate
class Tensors:
    """The kernel's pointers that consumers use."""

    q_nope: gl.tensor
    q_pe: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    partial_out: gl.tensor
    partial_lse: gl.tensor
    items: gl.tensor
    counts: gl.tensor
    sinks: gl.tensor
    qk_scale: gl.tensor
    v_scale: gl.tensor


@aggregate
class Scalars:
    """The kernel's numbers that consumers use."""

    q_nope_stride_n: gl.tensor
    q_nope_stride_h: gl.tensor
    q_pe_stride_n: gl.tensor
    q_pe_stride_h: gl.tensor
    o_stride_n: gl.tensor
    o_stride_h: gl.tensor
    sm_scale: gl.tensor
    out_scale: gl.tensor
    pe_ratio: gl.tensor
