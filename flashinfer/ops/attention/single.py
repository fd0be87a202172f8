"""One request without a wrapper. Under torch.compile it is one op, whose memory is torch's allocator's.

What the op allocates lies in the pool of a CUDA graph (mode="reduce-overhead"), and its results alone may outlive the
call: nothing else that it makes is kept for later calls.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from flashinfer._core import env
from flashinfer._core.checks import renamed
from flashinfer._core.custom_op import custom_op
from flashinfer._core.packed import packed, unpacked
from flashinfer._core.tracing import is_traced
from flashinfer.ops.attention.kernels import kernels_of
from flashinfer.ops.attention.masks import custom_mask_table
from flashinfer.ops.attention.operands import as_slots, slot_factors
from flashinfer.ops.attention.options import PlanOptions, default_o_dtype, tile_rows
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.problem import alibi_slopes
from flashinfer.ops.attention.tables import Table
from flashinfer.ops.kv_layout import check_layout, ragged_views

# Options that a call without a plan has from the shapes and dtypes of its operands.
_FROM = {
    "num_qo_heads": "q", "num_kv_heads": "k", "head_dim_qk": "q", "head_dim_vo": "v", "q_data_type": "q",
    "kv_data_type": "k", "o_data_type": "o_dtype",
}  # fmt: skip


def run_single(q, k, v, kv_layout: str, backend: str, call: dict, *, o_dtype=None, custom_mask=None,
               packed_custom_mask=None, kv_cache_sf=None, **others
               ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one request: q [rows, heads, dim], k and v as `kv_layout` says.

    `call` are the arguments of Plan.run, `others` fields of PlanOptions; kv_cache_sf are the factors of nvfp4 k and v.

    Returns out [rows, heads, dim], or (out, lse).
    """
    if is_traced():
        named = dict(o_dtype=o_dtype, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask,
                     kv_cache_sf=kv_cache_sf, **others)  # fmt: skip
        return _traced(q, k, v, kv_layout, backend, call, named)
    check_layout(kv_layout)
    rows = ragged_views(k, v, kv_layout)
    codes = 2 if k.dtype == torch.uint8 else 1
    asked = PlanOptions(
        source="ragged", num_qo_heads=q.shape[1], num_kv_heads=rows[0].shape[1], head_dim_qk=q.shape[2],
        head_dim_vo=codes * rows[1].shape[2], page_size=0, q_dtype=q.dtype, kv_dtype=k.dtype, o_dtype=o_dtype,
        **others,
    )  # fmt: skip
    tables = _indptr(q.shape[0], q.device), _indptr(rows[0].shape[0], q.device), None, None
    if k.dtype == torch.uint8:
        asked, tables = as_slots(asked, (None, _indptr(rows[0].shape[0], torch.device("cpu")), None, None))
        tables = _indptr(q.shape[0], q.device), *(t.to(q.device, non_blocking=True) for t in tables[1:])
        rows = tuple(t.unsqueeze(1) for t in rows)
    if kv_cache_sf is not None:
        call = call | slot_factors(kv_cache_sf, kv_layout)
    try:
        asked = asked.plain().checked()
    except ValueError as error:
        raise renamed(error, _FROM) from None
    table = Table(*tables)
    table.rows, table.kv_entries, table.uniform_q_len = q.shape[0], rows[0].shape[0], q.shape[0]
    if custom_mask is not None or packed_custom_mask is not None:
        pairs = torch.tensor([q.shape[0] * rows[0].shape[0]], dtype=torch.int64, device="cpu")
        custom_mask_table(table, asked.page_size, custom_mask, packed_custom_mask, pairs=pairs)
    kernels = kernels_of(asked, tile_rows(q.shape[0], asked.group), table.mask is not None, q.device, backend)
    slopes = None
    if asked.pos_encoding_mode == "ALIBI":
        slopes = torch.tensor(alibi_slopes(asked.num_qo_heads), dtype=torch.float32, device="cpu")
        slopes = slopes.to(q.device, non_blocking=True)
    scratch = partial(torch.empty, dtype=torch.uint8, device=q.device)
    plan = Plan(kernels, scratch, slopes, env.DEBUG.is_on())
    plan.fill(table, table.limits(asked.page_size))
    return plan.run(q, rows, lambda pair: pair, **call)


def _indptr(rows: int, device: torch.device) -> torch.Tensor:
    if _inside.op:
        # Nothing that a graph's pool holds may be kept.
        return torch.arange(0, max(2 * rows, 2), max(rows, 1), dtype=torch.int32, device=device).mul_(rows > 0)
    return _kept_indptr(rows, device)


@lru_cache(maxsize=256)
def _kept_indptr(rows: int, device: torch.device) -> torch.Tensor:
    # Not from the device's own arange: this waits until it is there, so that work on any stream finds it.
    return torch.tensor([0, rows], dtype=torch.int32, device=device)


class _Inside(threading.local):
    """Whether this thread is in the op."""

    op = False


_inside = _Inside()


def _traced(q, k, v, kv_layout: str, backend: str, call: dict, others: dict):
    """`run_single` as a trace sees it; `others` are its arguments by name."""
    out, lse = call.get("out"), call.get("lse")
    call = {name: value for name, value in call.items() if name not in ("out", "lse")}
    given = dict(kv_layout=kv_layout, backend=backend, call=call, other=others)
    found = attention_single(q, k, v, *packed(given))
    for place, result in zip((out, lse), found):
        if place is not None:
            place.copy_(result)
    result = found[0] if out is None else out
    return (result, found[1] if lse is None else lse) if call.get("return_lse") else result


def _like_single(q, k, v, tensors, floats, ints, names, words):
    given = unpacked(tensors, floats, ints, names, words)
    codes = 2 if v.dtype == torch.uint8 else 1
    dtype = default_o_dtype(q.dtype, given["other"].get("o_dtype"))
    out = torch.empty((*q.shape[:2], codes * v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return [out, lse] if given["call"].get("return_lse") else [out]


@custom_op("flashinfer::attention_single", fake=_like_single)
def attention_single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    floats: Sequence[float],
    ints: Sequence[int],
    names: str,
    words: str,
) -> list[torch.Tensor]:
    """`run_single` with its arguments as an op takes them: `packed`."""
    given = unpacked(tensors, floats, ints, names, words)
    before, _inside.op = _inside.op, True
    try:
        result = run_single(q, k, v, given["kv_layout"], given["backend"], given["call"], **given["other"])
    finally:
        _inside.op = before
    return list(result) if isinstance(result, tuple) else [result]
