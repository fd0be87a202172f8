"""Scores of an indexer that chooses keys for sparse attention, over paged caches, in upstream's layouts."""

from __future__ import annotations

import torch

from flashinfer._core.arguments import checked, named
from flashinfer._core.checks import aligned_rows, dtype_name, require
from flashinfer._core.custom_op import custom_op
from flashinfer._core.target import target_of
from flashinfer._direct.given import flag, whole
from flashinfer.ops.attention.engine import check_pages, integers
from flashinfer.ops.attention.kernels import expect_kernels
from flashinfer.ops.attention.mqa_logits import Beside, Problem, mqa_logits
from flashinfer.paged_mqa import _fp8_paged_mqa_logits

__all__ = [
    "compute_paged_mqa_logits_schedule",
    "fp4_paged_mqa_logits",
    "fp8_paged_mqa_logits",
    "min_block_table_width",
    "padded_seq_len",
    "precompile_paged_mqa_logits",
]

# Columns of a buffer of logits come in multiples of this, so that rows start on 16 bytes in every dtype.
_COLUMNS = 256
_FP4_BLOCK = 32
_VARIANTS = ("fp8", "fp4")
_OUTPUTS = {"fp8": (torch.float32, torch.float16), "fp4": (torch.bfloat16, torch.float32, torch.float16)}


def padded_seq_len(max_seq_len: int) -> int:
    """Columns of the `out` of the two functions below for sequences of up to max_seq_len keys: a multiple of 256.

    Parameters
    ----------
    max_seq_len : int
        Keys of the longest sequence.

    Returns
    -------
    int
        Columns, a multiple of 256.

    Raises
    ------
    ValueError
        A negative number, or no integer.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.padded_seq_len(8000), flashinfer.padded_seq_len(256), flashinfer.padded_seq_len(0)
    (8192, 256, 0)
    """
    most = whole("max_seq_len", max_seq_len, 0)
    return -(-most // _COLUMNS) * _COLUMNS


def min_block_table_width(seq_len: int, block_size: int) -> int:
    """Columns of a block table for sequences of up to seq_len keys: ceil(seq_len / block_size).

    Parameters
    ----------
    seq_len : int
        Keys of the longest sequence.
    block_size : int
        Keys of a page.

    Returns
    -------
    int
        Columns.

    Raises
    ------
    ValueError
        A number out of its range, or no integer.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.min_block_table_width(8000, 32)
    250
    """
    return -(-whole("seq_len", seq_len, 0) // whole("block_size", block_size, 1))


@checked
@named(block_table="block_tables", kv_cache="kv_fused", context_lens="seq_lens", max_context_len="max_seq_len")
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    output_dtype: torch.dtype = torch.float32,
    epi_dtype: torch.dtype = torch.float32,
    acc_dtype: torch.dtype = torch.float32,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of every key for every query: scale_k * sum over heads of weights[q, h] * relu(q_h . k).

    Nothing waits for the device, and a CUDA graph can capture the call.

    Parameters
    ----------
    q : float8_e4m3fn Tensor [batch, next_n, num_heads, head_dim]
        The queries of a request, its last tokens. head_dim a multiple of 16 up to 256, up to 128 heads.
    kv_fused : uint8 Tensor [num_blocks, block_size, 1, head_dim + 4]
        Each block holds block_size * head_dim bytes of float8_e4m3fn, then block_size float32 scales, one per key.
        Blocks may be further apart. Any block size.
    weights : float32 Tensor [batch * next_n, num_heads]
    block_tables : int32 Tensor [batch, max_blocks]
        Block ids of each request; past its keys anything. Rows may have any stride.
    seq_lens : int32 Tensor [batch]
        Keys of each request, those of its queries among them. Any stride.
    max_seq_len : int
        Columns of the result.
    output_dtype : torch.dtype
        float32 or float16.
    epi_dtype, acc_dtype : torch.dtype
        float32 or float16, permissions to sum in fewer bits: sums are float32 with each.
    schedule_meta : int32 Tensor, optional
        Not read: the keys of a request are shared out among programs by its length, on the device.
    out : Tensor [at least batch * next_n, at least padded_seq_len(max_seq_len)], optional
        Where to write; of output_dtype, its rows contiguous.

    Returns
    -------
    Tensor [batch * next_n, max_seq_len] of output_dtype
        A view of `out`, if there is one. Row b * next_n + t has scores of keys 0 to seq_lens[b] - next_n + t; what
        stands behind them is undefined, and rows of requests without keys are not written.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    References
    ----------
    DeepSeek-V3.2-Exp, 2025: the lightning indexer.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q = torch.ones(1, 1, 2, 16).to(torch.float8_e4m3fn)
    >>> keys, scales = torch.ones(1, 4, 16).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    >>> pool = torch.cat((keys.view(torch.uint8).flatten(1), scales.view(torch.uint8)), 1).view(1, 4, 1, 20)
    >>> table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> flashinfer.fp8_paged_mqa_logits(q, pool, torch.tensor([[1.0, -0.5]]), table, lens, 3).tolist()
    [[8.0, 16.0, 24.0]]
    """
    fits = q.dim() == 4 and q.dtype == torch.float8_e4m3fn
    require(fits, "q", f"{q.dtype} {tuple(q.shape)}", "float8_e4m3fn [batch, next_n, num_heads, head_dim]")
    _check_types("fp8", output_dtype, epi_dtype=epi_dtype, acc_dtype=acc_dtype)
    lens = _lens(seq_lens, q)
    logits, written = _output(q, max_seq_len, output_dtype, out, block_tables, kv_fused)
    shape, (dim, strides) = tuple(kv_fused.shape), (q.shape[3], kv_fused.stride())
    fits = kv_fused.dtype == torch.uint8 and shape[2:] == (1, dim + 4) and strides[3] == 1
    require(fits and (shape[1] == 1 or strides[1] == dim + 4), "kv_fused",
            f"{kv_fused.dtype} {shape}, strides {strides}", f"uint8 [num_blocks, block_size, 1, {dim} + 4], contiguous")
    _fp8_paged_mqa_logits(q, kv_fused, weights, lens, block_tables, written, False)
    return logits


@checked
def fp4_paged_mqa_logits(
    q: torch.Tensor,
    q_sf: torch.Tensor,
    kv_fused: torch.Tensor,
    weights: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    sf_vec_size: int = _FP4_BLOCK,
    output_dtype: torch.dtype = torch.bfloat16,
    epi_dtype: torch.dtype = torch.float32,
    is_kv_sf_interleaved: bool = False,
    schedule_meta: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fp8_paged_mqa_logits` of mxfp4 queries and keys: sum over heads of weights[q, h] * relu(q_h . k).

    Products are exact in bfloat16, and sums float32. Nothing waits for the device.

    Parameters
    ----------
    q : uint8 Tensor [batch, next_n, num_heads, head_dim / 2]
        Two e2m1 a byte, the first in the low half. head_dim a multiple of 32 up to 256.
    q_sf : int32 Tensor [batch, next_n, num_heads], or uint8 [batch, next_n, num_heads, head_dim / 32]
        ue8m0 factors of 32 elements each, the first in the lowest byte.
    kv_fused : uint8 Tensor [num_blocks, block_size, 1, head_dim / 2 + head_dim / 32]
        Each block holds the bytes of its keys, as q's, then their factors, head_dim / 32 bytes a key.
    weights, block_tables, seq_lens, max_seq_len, schedule_meta, out
        As in `fp8_paged_mqa_logits`.
    sf_vec_size : int
        32.
    output_dtype : torch.dtype
        bfloat16, float32 or float16.
    epi_dtype : torch.dtype
        float32, float16 or bfloat16, a permission to sum in fewer bits: sums are float32 with each.
    is_kv_sf_interleaved : bool
        Whether the factors of key t of a block are in place 4 (t mod (block_size / 4)) + t div (block_size / 4).

    Returns
    -------
    Tensor [batch * next_n, max_seq_len] of output_dtype
        As in `fp8_paged_mqa_logits`.

    Raises
    ------
    ValueError
        A shape, dtype or device other than the above.

    Examples
    --------
    >>> import torch, flashinfer
    >>> q, kv = torch.full((1, 1, 64, 64), 0x22).byte(), torch.full((2, 32, 1, 64), 0x22).byte()  # e2m1 of 1
    >>> ones = torch.full((1, 1, 64, 4), 127).byte()  # ue8m0 of 1
    >>> kv = torch.cat((kv.view(2, -1), torch.full((2, 128), 127).byte()), 1).view(2, 32, 1, 68)
    >>> table, lens = torch.tensor([[1, 0]]).int(), torch.tensor([40]).int()
    >>> flashinfer.fp4_paged_mqa_logits(q, ones, kv, torch.ones(1, 64), table, lens, 64)[0, 0].item()  # 64 heads of 128
    8192.0
    """
    fits = q.dim() == 4 and q.dtype == torch.uint8 and q.shape[3] % 16 == 0
    require(fits, "q", f"{q.dtype} {tuple(q.shape)}", "uint8 [batch, next_n, num_heads, head_dim / 2], 16 to 128 bytes")
    require(sf_vec_size == _FP4_BLOCK, "sf_vec_size", sf_vec_size, f"{_FP4_BLOCK}, the block of mxfp4")
    _check_types("fp4", output_dtype, epi_dtype=epi_dtype)
    factors = q_sf if q_sf.dtype == torch.uint8 else q_sf.unsqueeze(-1).contiguous().view(torch.uint8)
    shape = (*q.shape[:3], q.shape[3] // 16)
    known = q_sf.dtype in (torch.uint8, torch.int32) and tuple(factors.shape) == shape
    require(known, "q_sf", f"{q_sf.dtype} {tuple(q_sf.shape)}", f"int32 {shape[:3]}, or uint8 {shape}")
    interleaved = flag("is_kv_sf_interleaved", is_kv_sf_interleaved)
    fits = not interleaved or kv_fused.shape[1] % 4 == 0
    require(fits, "is_kv_sf_interleaved", True, "False, where block_size is no multiple of 4")
    lens = _lens(seq_lens, q)
    logits, written = _output(q, max_seq_len, output_dtype, out, block_tables, kv_fused)
    _fp4_paged_mqa_logits(q, factors.contiguous(), kv_fused, weights, lens, block_tables, written, interleaved)
    return logits


@custom_op("flashinfer::fp4_paged_mqa_logits", mutates_args=("logits",))
def _fp4_paged_mqa_logits(
    q: torch.Tensor, q_sf: torch.Tensor, kv_fused: torch.Tensor, weights: torch.Tensor, seq_lens: torch.Tensor,
    block_tables: torch.Tensor, logits: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    q = aligned_rows(q)
    batch, tokens, heads, stored = q.shape
    groups, device = stored // 16, q.device
    shape, strides = tuple(kv_fused.shape), kv_fused.stride()
    fits = kv_fused.dtype == torch.uint8 and len(shape) == 4 and shape[2:] == (1, stored + groups)
    fits = fits and strides[3] == 1 and (shape[1] == 1 or strides[1] == stored + groups)
    require(fits, "kv_fused", f"{kv_fused.dtype} {shape}, strides {strides}",
            f"uint8 [num_blocks, block_size, 1, {stored} + {groups}], a block without gaps")  # fmt: skip
    starts = strides[0] % 4 == 0 and kv_fused.data_ptr() % 16 == 0
    require(starts, "kv_fused", f"blocks {strides[0]} bytes apart", "blocks that start on 4 bytes, the first on 16")
    for name, t in (("q_sf", q_sf), ("kv_fused", kv_fused), ("weights", weights)):
        require(t.device == device, name, f"a tensor on {t.device}", f"{device}, where q is")
    fits = weights.shape[-1:] == (heads,) and weights.numel() == batch * tokens * heads
    require(fits and weights.dtype == torch.float32, "weights",
            f"{weights.dtype} {tuple(weights.shape)}", f"float32 [{batch * tokens}, {heads}]")  # fmt: skip
    pages, size = shape[:2]
    keys = kv_fused.as_strided((pages, size, stored), (strides[0], stored, 1))
    begin = kv_fused.storage_offset() + size * stored
    factors = kv_fused.as_strided((pages, size, groups), (strides[0], groups, 1), begin)
    tables = integers(block_tables, "block_tables", device, (batch, None))
    check_pages({"block_tables": tables, "seq_lens": seq_lens}, size, pages, logits.shape[1])
    problem = Problem(
        heads, 2 * stored, size, max(tokens, 1), aligned=strides[0] % 16 == 0, qk_format="mxfp4",
        out=dtype_name(logits.dtype), interleaved=interleaved,
    )  # fmt: skip
    choice = mqa_logits(problem, device)
    weights = weights.reshape(-1, heads).contiguous()
    choice.run(q, keys, factors, weights, seq_lens, tables, logits, logits.shape[1], Beside(q_sf))


def _check_types(variant: str, output_dtype, **others) -> None:
    allowed = _OUTPUTS[variant]
    for name, dtype in dict(output_dtype=output_dtype, **others).items():
        require(dtype in allowed, name, dtype, ", ".join(str(d).removeprefix("torch.") for d in allowed))


def _lens(seq_lens: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return integers(seq_lens, "seq_lens", q.device, (q.shape[0],)).contiguous()


def _output(q, max_seq_len, dtype, out, block_tables, kv_fused) -> tuple[torch.Tensor, torch.Tensor]:
    """What is returned, and what is written of it: no more columns than the table has keys."""
    most, rows = whole("max_seq_len", max_seq_len, 0), q.shape[0] * q.shape[1]
    columns = padded_seq_len(most)
    if out is None:
        out = torch.empty((rows, columns), dtype=dtype, device=q.device)
    fits = out.dim() == 2 and out.shape[0] >= rows and out.shape[1] >= columns
    require(fits, "out", tuple(out.shape), f"[{rows} or more, {columns} or more], columns as padded_seq_len says")
    require(out.dtype == dtype, "out", out.dtype, f"{dtype}, the output_dtype")
    require(out.device == q.device, "out", f"a tensor on {out.device}", str(q.device))
    apart = (out.stride(1) == 1 or columns == 0) and (rows < 2 or out.stride(0) >= columns)
    require(apart, "out", f"strides {out.stride()}", "contiguous rows that do not overlap")
    require(kv_fused.dim() == 4 and kv_fused.shape[1] > 0, "kv_fused", tuple(kv_fused.shape), "four axes")
    require(block_tables.dim() == 2, "block_tables", tuple(block_tables.shape), "[batch, max_blocks]")
    logits = out[:rows, :most]
    return logits, logits[:, : block_tables.shape[1] * kv_fused.shape[1]]


@checked
def precompile_paged_mqa_logits(
    device: torch.device | str | None = None,
    variants: tuple[str, ...] = _VARIANTS,
    output_dtypes: tuple[torch.dtype, ...] | None = None,
    batch_sizes=None,
) -> None:
    """Compile the kernels of the common problems: 64 heads of 128, blocks of 32, 64 and 128 keys, 1 to 4 queries.

    Parameters
    ----------
    device : torch.device, optional
        Default the current CUDA device; on a CPU there is nothing to compile.
    variants : tuple of str
        Of "fp8" and "fp4".
    output_dtypes : tuple of torch.dtype, optional
        Default float32 for fp8, bfloat16 and float32 for fp4.
    batch_sizes : sequence of int, optional
        Changes nothing: kernels serve every batch size.

    Raises
    ------
    ValueError
        Another variant or dtype.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.precompile_paged_mqa_logits("cpu")  # nothing to compile
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    for variant in variants:
        require(variant in _VARIANTS, "variants", repr(variant), "'fp8', 'fp4'")
        default = (torch.float32,) if variant == "fp8" else (torch.bfloat16, torch.float32)
        for dtype in default if output_dtypes is None else output_dtypes:
            require(dtype in _OUTPUTS[variant], "output_dtypes", dtype, str(_OUTPUTS[variant]))
            for size in (32, 64, 128):
                for tokens in range(1, 5):
                    qk_format = "mxfp4" if variant == "fp4" else "fp8"
                    problem = Problem(64, 128, size, tokens, qk_format=qk_format, out=dtype_name(dtype))
                    expect_kernels(mqa_logits(problem, device), device)


@checked
def compute_paged_mqa_logits_schedule(
    seq_lens: torch.Tensor,
    device: torch.device | str | None = None,
    *,
    next_n: int = 1,
    variant: str = "fp8",
    use_gpu_kernel: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A tensor to pass as the schedule_meta of the functions above, which divide their work without one.

    Upstream computes it again whenever lengths change; here it holds zeros and no information.

    Parameters
    ----------
    seq_lens : int32 Tensor [batch]
        Not read.
    device : torch.device, optional
        Of the result; default that of `seq_lens`, or the current CUDA device if it is on the CPU and there is one.
    next_n : int
        Queries per request, at least 1.
    variant : str
        "fp8" or "fp4".
    use_gpu_kernel : bool
        Changes nothing: no kernel is needed.
    out : int32 Tensor [multiprocessors + 1, 2], optional
        Returned as it is.

    Returns
    -------
    int32 Tensor [multiprocessors + 1, 2]

    Raises
    ------
    ValueError
        An argument out of its range, by name.

    Examples
    --------
    >>> import torch, flashinfer
    >>> flashinfer.compute_paged_mqa_logits_schedule(torch.tensor([20, 5]).int()) is not None
    True
    """
    require(seq_lens.dim() == 1, "seq_lens", tuple(seq_lens.shape), "[batch]")
    whole("next_n", next_n, 1)
    require(variant in _VARIANTS, "variant", repr(variant), "'fp8', 'fp4'")
    if device is None:
        there = seq_lens.is_cuda or not torch.cuda.is_available()
        device = seq_lens.device if there else torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    shape = (target_of(device).sms + 1, 2)
    if out is not None:
        require(out.shape == shape and out.dtype == torch.int32, "out", f"{out.dtype} {tuple(out.shape)}",
                f"int32 {shape}")  # fmt: skip
        return out
    return torch.zeros(shape, dtype=torch.int32, device=device)
