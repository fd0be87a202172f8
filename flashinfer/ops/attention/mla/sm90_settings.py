"""Latent attention on Hopper: sizes of tiles, what the kernel is compiled for, and what its warps share."""

from flashinfer._core.gluon_compat import aggregate, gl

# Query rows of a tile, and keys of a block: what one wgmma takes, and 64 columns, below which reading the queries from
# shared memory for each product takes longer than the product.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
# Columns of a latent row that a warpgroup has of the output.
HALF = gl.constexpr(256)
# Columns that are waited for at a time: products start when the first ones are there.
PART = gl.constexpr(128)
# Columns of a positional row.
REST = gl.constexpr(64)
# Work items that a block of threads retries, at most. Past them it tries no fixed shift any more.
MOST_FAILED = gl.constexpr(64)
# Four warps copy 16 rows of 64 columns at a time: eight lanes a row, whose 128 bytes fill all banks. A thread has the
# same few rows of any tile.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@aggregate
class Settings:
    """Constants that the kernel is compiled for."""

    HEADS: gl.constexpr
    PAGE_SIZE: gl.constexpr
    # Whether entries of the table are tokens, as in portable_kernel.py.
    SPARSE: gl.constexpr
    # Whether keys are gathered row by row, and not copied in boxes.
    GATHER: gl.constexpr
    # Whether keys have a positional row.
    POSITIONAL: gl.constexpr
    # The FP8 formats ("e4m3", "e5m2") of keys and queries, which are widened as they are loaded; "" for bf16 and fp16.
    KV_FP8: gl.constexpr
    Q_FP8: gl.constexpr
    CAUSAL: gl.constexpr
    SINKS: gl.constexpr
    DEVICE_SCALES: gl.constexpr
    # Whether logits are more than products times a positive scale, which is folded into the exponent.
    TRANSFORM: gl.constexpr
    # Whether weights of blocks without a mask have a fixed shift: in bf16, which has the range of float32.
    FIXED: gl.constexpr
    LSE: gl.constexpr
    BASE_E: gl.constexpr


@aggregate
class Shared:
    """Shared memory: queries, and two blocks of keys, each a left and a right half of latent rows and positional rows.

    A half of a block is released as a whole, and filled in two parts (barriers 2 * block + part). Positional rows are
    filled with the half whose release also frees them: the right one of the first block, the left one of the second.
    """

    q_left: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    q_rest: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    left_full: gl.shared_memory_descriptor
    left_empty: gl.shared_memory_descriptor
    right_full: gl.shared_memory_descriptor
    right_empty: gl.shared_memory_descriptor
    # What a warpgroup publishes for the other: its weights (`ready`, in the place of its positional keys), the maximum
    # and the factor of each row, and its sums; and the barrier at which both meet.
    ready: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    keeps: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    # Sparse keys: 0, or -inf where the table names no key, and its barrier.
    bias: gl.shared_memory_descriptor
    bias_full: gl.shared_memory_descriptor
    # Work items at which a fixed shift failed, their count behind them, and the barrier after the last one.
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
