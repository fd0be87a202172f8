"""What a call brings to a plan: every check of q, k, v, out, lse and scales, in the caller's names, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral, Real

import torch

from flashinfer._core.checks import check_apart, indptr_values, is_aligned, require, require_tensor
from flashinfer.ops.attention.config import factor_alignment
from flashinfer.ops.attention.options import MOST_KEYS, PlanOptions, check_flag, is_finite
from flashinfer.ops.attention.problem import Inputs
from flashinfer.ops.attention.tables import KV_INDICES, KV_INDPTR, LENGTHS, QO_INDPTR
from flashinfer.ops.attention.variants import AttentionVariant
from flashinfer.ops.formats import ELEMENTS, KV_FORMATS
from flashinfer.ops.kv_layout import as_matrix, ragged_views

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What factors may be kept as, by their element.
_FACTORS = {"ue4m3": (torch.float8_e4m3fn, torch.uint8), "fp32": (torch.float32,)}


def check(plan, q, k, v, out, lse, return_lse: bool, *, q_scale, k_scale, v_scale, window_left, sinks, params,
          k_factors, v_factors) -> tuple[Inputs, dict[str, bool]]:  # fmt: skip
    """The checked inputs of a call of `plan` (plan.Plan), with new outputs where none were given; and what a kernel is
    compiled for that only a call knows.

    Raises
    ------
    ValueError
        What does not fit the plan, by its name in the public API.
    """
    o, (of_q, of_k, of_v) = plan.options, plan.table.operands
    require(q.device == plan.device, of_q, f"a tensor on {q.device}", f"{plan.device}, where the plan is")
    expected = (o.num_qo_heads, o.head_dim_qk)
    require(q.dim() == 3 and tuple(q.shape[1:]) == expected, of_q, tuple(q.shape), f"[rows, {expected}], as planned")
    require(q.dtype == o.q_dtype, of_q, q.dtype, f"{o.q_dtype}, as planned (q_data_type)")
    _check_keys(plan, k, v)
    require(q.stride(-1) == 1, of_q, f"stride {q.stride(-1)} of head_dim", "1: call .contiguous()")
    rows = q.shape[0]
    check_rows(plan, of_q, rows)
    if plan.looks:
        check_on_device(plan, rows, k.shape[0])
    scalars, qk_scale, out_scale = _scales(plan, window_left, q_scale, k_scale, v_scale)
    of_sinks = check_sinks(plan, sinks)
    check_flag("return_lse", return_lse)
    # One that is given is written, whether it is to be returned or not.
    wants_lse = return_lse or lse is not None
    values = variant_values(plan, params, wants_lse, sinks, window_left)
    k_factors, v_factors = _check_factors(plan, (k_factors, k), (v_factors, v))
    if o.kv_dtype in KV_FORMATS:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    out, lse = outputs(plan, rows, out, lse, wants_lse)
    read = (of_q, q), (of_k, k), (of_v, v), ("kv_block_scales", k_factors), ("kv_block_scales", v_factors)
    check_apart([("out", out), ("lse", lse)], [*read, ("sinks", sinks)], in_place=(of_q,))
    facts = dict(
        lse=wants_lse, sinks=sinks is not None, head_scales=qk_scale is not None,
        aligned=is_aligned(q, k, v, out) and _aligned_factors(k_factors, v_factors),
        matrix=all([as_matrix(t, t.dim() == 4) for t in (k, v)]), window=scalars.window_left >= 0,
    )  # fmt: skip
    return Inputs(
        q, k, v, out, lse, plan.table, None, scalars, of_sinks, qk_scale, out_scale, plan.slopes, values, k_factors,
        v_factors,
    ), facts  # fmt: skip


def _check_keys(plan, k, v) -> None:
    """Shapes, dtypes, devices and strides of keys and values."""
    o, (of_q, of_k, of_v) = plan.options, plan.table.operands
    known = KV_FORMATS.get(o.kv_dtype)
    # Codes are bytes to kernels, and may be to callers.
    dtypes = (ELEMENTS[known.element].dtype, torch.uint8) if known else (o.kv_dtype,)
    packed = known.per_byte if known else 1
    for name, t, dim in ((of_k, k, o.head_dim_qk // packed), (of_v, v, o.head_dim_vo // packed)):
        require(t.device == plan.device, name, f"a tensor on {t.device}", f"{plan.device}, where {of_q} is")
        dtype = o.kv_dtype if known is None else f"{' or '.join(map(str, dict.fromkeys(dtypes)))} of {o.kv_dtype}"
        require(t.dtype in dtypes, name, t.dtype, f"{dtype}, as planned (kv_data_type)")
        got = tuple(t.shape[-2:])
        allowed = f"{(o.num_kv_heads, dim)}, as planned"
        if t.dim() == 4 and t.shape[1:3] == (o.num_kv_heads, o.page_size):
            other = "NHD" if plan.kv_layout == "HND" else "HND"
            allowed += f"; heads and tokens stand in each other's places: is this kv_layout={other!r}?"
        require(got == (o.num_kv_heads, dim), name, f"{got} heads and dim", allowed)
        require(t.stride(-1) == 1, name, f"stride {t.stride(-1)} of head_dim", "1: call .contiguous()")
        if o.page_size:
            paged = t.dim() == 4 and t.shape[1] == o.page_size
            require(paged, name, tuple(t.shape), f"pages of {o.page_size} tokens, as planned")
    require(k.shape[:-2] == v.shape[:-2], of_v, tuple(v.shape), f"as many rows as {of_k}: {tuple(k.shape)}")
    least, of_last = plan.needs[1], plan.table.names[KV_INDPTR]
    require(least <= k.shape[0], of_k, f"{k.shape[0]} rows", f"at least {least}, the last offset of {of_last}")


def check_rows(plan, name: str, rows: int) -> None:
    """That queries have the rows of the plan, and no others; `name` is what the caller calls them."""
    planned, table = plan.needs[0], plan.table
    allowed = "as planned" if table.each_q else f"the last offset of {table.names[QO_INDPTR]}"
    require(planned <= rows, name, f"{rows} rows", f"at least {planned}, {allowed}")
    # Further rows are allowed if the first offset is not 0: the batch is then a slice of a larger one.
    whole = planned < 0 or planned == rows or plan.padded or table.first_row > 0
    require(whole, name, f"{rows} rows", f"{planned}, {allowed}: further rows are of no request")


def check_on_device(plan, q_rows: int, k_rows: int) -> None:
    """What only the device knows of tables; waits for it, so on the CPU and in debug mode alone.

    `q_rows` and `k_rows` are the lengths of q, and of k or the cache, along their first axis.
    """
    page_size, table = plan.options.page_size, plan.table
    names, (of_q, of_k, _) = table.names, table.operands
    if not table.batch_size:
        return
    (q_begin, q_len), (kv_begin, kv_len) = table.q_spans(), table.kv_spans(page_size)
    for i, begin in ((QO_INDPTR, q_begin), (KV_INDPTR, kv_begin)):
        require(int(begin.min()) >= 0, names[i], f"{int(begin.min())}", "0 or more")
    rows = int((q_begin + q_len).max())
    require(rows <= q_rows, names[QO_INDPTR], f"{rows} last", f"at most {q_rows}, the rows of {of_q}")
    pages = (kv_len + page_size - 1) // page_size if page_size else kv_len
    # A request without keys may begin anywhere: rows of a block table without columns begin behind its end.
    used = int(torch.where(pages > 0, kv_begin + pages, 0).max())
    if not page_size:
        require(used <= k_rows, names[KV_INDPTR], f"{used} last", f"at most {k_rows}, the rows of {of_k}")
        return
    ids = table.kv_indices
    most = f"at most {len(ids)} in all" if not table.kv_stride else f"at most {table.kv_stride} each"
    fits = used <= len(ids) and not (table.kv_stride and int(pages.max()) > table.kv_stride)
    require(fits, names[LENGTHS], f"{int(pages.max())} pages, {used} last", most)
    ends = pages.cumsum(0)
    within = torch.arange(int(pages.sum()), dtype=torch.int64, device=ids.device)
    entries = ids[within + (kv_begin - ends + pages).repeat_interleave(pages)]
    wrong = ((entries < 0) | (entries >= k_rows)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        request = int(torch.searchsorted(ends, at, right=True))
        require(False, names[KV_INDICES], f"page {int(entries[at])} of request {request}",
                f"0 ... {k_rows - 1}, the pages of the cache")  # fmt: skip


def outputs(plan, rows: int, out, lse, wants_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs of so many rows: those given, checked, or new ones."""
    o = plan.options
    of_out, of_lse = (rows, o.num_qo_heads, o.head_dim_vo), (rows, o.num_qo_heads)
    out = plan.new_out(rows) if out is None else _given(plan, "out", out, of_out, o.o_dtype)
    if not wants_lse:
        return out, None
    if lse is None:
        return out, plan.new_lse(rows)
    lse = _given(plan, "lse", lse, of_lse, torch.float32)
    require(lse.is_contiguous(), "lse", f"strides {lse.stride()}", "contiguous")
    return out, lse


def check_given(name: str, t: torch.Tensor | None, shape: tuple, dtype: torch.dtype) -> None:
    """Check an output that a caller may give."""
    require_tensor(name, t, optional=True)
    if t is not None:
        require(tuple(t.shape) == tuple(shape), name, tuple(t.shape), str(tuple(shape)))
        require(t.dtype == dtype, name, t.dtype, str(dtype))
        check_apart([(name, t)])


def _given(plan, name: str, t: torch.Tensor, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    check_given(name, t, shape, dtype)
    require(t.device == plan.device, name, f"a tensor on {t.device}", str(plan.device))
    # The LSE of one head may have any stride there.
    dense = t.stride(-1) == 1 or t.shape[-1] == 1
    require(dense, name, f"stride {t.stride(-1)} of the last axis", "1")
    return t


def check_sinks(plan, sinks) -> torch.Tensor | None:
    if sinks is None:
        return None
    heads = plan.options.num_qo_heads
    require(tuple(sinks.shape) == (heads,), "sinks", tuple(sinks.shape), f"[{heads}], one logit per query head")
    require(sinks.device == plan.device, "sinks", f"a tensor on {sinks.device}", str(plan.device))
    return sinks.float().contiguous()


def variant_values(plan, params: dict | None, wants_lse: bool, sinks, window_left: int | None = None) -> tuple:
    """What the planned variant's functions are given. Checks what cannot go with it."""
    variant = plan.options.variant
    if variant is None:
        require(not params, "params", list(params or ()), "None: no variant was planned")
        return ()
    if not variant.use_softmax:
        require(not wants_lse, "return_lse", True, "False: without a softmax (use_softmax) there is no LSE")
        require(sinks is None, "sinks", "a tensor", "None: without a softmax (use_softmax) there is no sink")
    if variant.owns_mask:
        require(window_left in (None, -1), "window_left", window_left, "-1: the variant owns the mask")
    return variant.values(params, plan.device)


def _check_factors(plan, *given: tuple) -> tuple[torch.Tensor | None, ...]:
    """The factors of keys and values in a format that has them; `given` are pairs (factors, keys or values)."""
    known = KV_FORMATS.get(plan.options.kv_dtype)
    if known is None:
        has = any(factors is not None for factors, _ in given)
        require(not has, "kv_block_scales", "tensors", f"None, of {plan.options.kv_dtype} keys and values")
        return None, None
    for i, (factors, x) in enumerate(given):
        name = f"kv_block_scales[{i}]"
        kind = plan.options.kv_dtype
        require(factors is not None, name, None, f"the factors of {kind} keys and values")
        shape = *x.shape[:-1], known.blocks(x.shape[-1] * known.per_byte)
        require(tuple(factors.shape) == shape, name, tuple(factors.shape), f"{shape} (page, token, head, factor)")
        dtypes = _FACTORS[known.factor]
        require(factors.dtype in dtypes, name, factors.dtype, f"{' or '.join(map(str, dtypes))} of {kind}")
        require(factors.device == plan.device, name, f"a tensor on {factors.device}", str(plan.device))
        dense = factors.stride(-1) == 1 or shape[-1] == 1
        require(dense, name, f"stride {factors.stride(-1)} of the last axis", "1")
    return tuple(factors.view(_FACTORS[known.factor][0]) for factors, _ in given)


def _aligned_factors(*factors: torch.Tensor | None) -> bool:
    """Whether rows of nvfp4 factors start where loads of all their bytes may."""
    for t in factors:
        if t is None or t.dtype == torch.float32:
            continue
        if any(n % factor_alignment(16 * t.shape[-1]) for n in (t.data_ptr(), *t.stride()[:-1])):
            return False
    return True


def _scales(plan, window_left: int | None, q_scale, k_scale, v_scale):
    """Scalars of the call, and factors of logits and outputs per query head where a scale is a tensor."""
    planned = plan.kernels.scalars
    if window_left is None and q_scale is None and k_scale is None and v_scale is None:
        return planned, None, None
    numbers, vectors = {}, {}
    for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(value, torch.Tensor) and not (value.numel() == 1 and not value.is_cuda):
            vectors[name] = _per_head(plan, name, value)
            value = 1.0
        check_number(name, value)
        numbers[name] = 1.0 if value is None else float(value)
        require(is_finite(numbers[name]), name, numbers[name], "a finite number")
    check_window(window_left)
    window = planned.window_left if window_left is None else min(window_left, MOST_KEYS)
    # The schedule leaves out keys that no query sees in the planned window.
    ok = planned.window_left < 0 or 0 <= window <= planned.window_left
    require(ok and window >= -1, "window_left", window, f"at most the planned {planned.window_left}")
    scalars = replace(
        planned,
        sm_scale=planned.sm_scale * numbers["q_scale"] * numbers["k_scale"],
        out_scale=numbers["v_scale"],
        window_left=window,
    )
    if not vectors:
        return scalars, None, None
    one = torch.ones(plan.options.num_qo_heads, dtype=torch.float32, device=plan.device)
    qk = vectors.get("q_scale", one) * vectors.get("k_scale", one)
    return scalars, qk.contiguous(), vectors.get("v_scale", one).contiguous()


def check_number(name: str, value) -> None:
    """Refuse what is no number, tensor or None."""
    fits = value is None or isinstance(value, (Real, torch.Tensor))
    require(fits, name, repr(value), "None, a number, or a tensor")


def check_window(window_left) -> None:
    """Refuse a window of a call that is no integer."""
    require(window_left is None or isinstance(window_left, Integral), "window_left", repr(window_left), "an integer")


def is_wider(window_left, planned: int) -> bool:
    """Whether a window of a call shows more keys than the planned one."""
    return type(window_left) is int and 0 <= planned and (window_left == -1 or window_left > planned)


def _per_head(plan, name: str, value: torch.Tensor) -> torch.Tensor:
    """A scale tensor as one float32 per query head; per-KV-head scales are repeated over their group."""
    heads, kv_heads = plan.options.num_qo_heads, plan.options.num_kv_heads
    require_tensor(name, value)
    value = value.to(plan.device, torch.float32, non_blocking=True).flatten()
    if value.shape[0] == 1:
        return value.expand(heads)
    if value.shape[0] == kv_heads:
        return value.repeat_interleave(plan.options.group)
    require(value.shape[0] == heads, name, tuple(value.shape), f"1, {kv_heads} or {heads} elements")
    return value


def by_name(
    args: tuple, variant: AttentionVariant | None, q: torch.Tensor, params: dict | None, scales: tuple
) -> tuple[dict | None, tuple]:
    """What callers give after keys and values without names: the variant's parameters, and the scales of q, k and v.

    Either may have been given by name, too. Further arguments are a variant's. Without one they are the scales of FP8
    queries, keys and values, as FlashInfer's FA3 backend takes them, times those that have names.
    """
    if variant is not None:
        return variant.named(args, params), scales
    fp8 = q.dtype in _FP8
    allowed = "3 of FP8 queries: the scales of q, k and v" if fp8 else "none without a variant (docs/variants.md)"
    require(fp8 and len(args) == 3, "*args", f"{len(args)} extra arguments", allowed)
    return params, tuple(one if named is None else one * named for one, named in zip(args, scales, strict=True))


def is_plain(lse_base: str, lse_layout: str = "NH") -> bool:
    """Whether a log-sum-exp is asked for as kernels write it: base 2, [rows, heads]. ValueError for what is unknown."""
    if lse_base == "log2" and lse_layout == "NH":
        return True
    require(lse_base in ("log2", "ln"), "lse_base", repr(lse_base), "'log2' or 'ln'")
    require(lse_layout in ("NH", "HN"), "lse_layout", repr(lse_layout), "'NH' (rows, heads) or 'HN' (heads, rows)")
    return False


def with_lse(attend: Callable, q: torch.Tensor, lse: torch.Tensor | None, return_lse: bool, lse_base: str,
             lse_layout: str = "NH") -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result of `attend(lse, return_lse)` for q [rows, heads, dim], its log-sum-exp in another base or layout.

    `lse` is the caller's, in that layout, and is written where it is given.
    """
    if not return_lse and lse is None:
        return attend(None, False)
    turned = lse_layout == "HN"
    if turned and lse is not None:
        shape = q.shape[1], q.shape[0]
        require(tuple(lse.shape) == shape, "lse", tuple(lse.shape), f"{shape}, with lse_layout='HN'")
        require(lse.dtype == torch.float32, "lse", lse.dtype, "torch.float32")
        require(lse.device == q.device, "lse", f"a tensor on {lse.device}", str(q.device))
    out, found = attend(None if turned else lse, True)
    if lse_base == "ln":
        found.mul_(math.log(2.0))
    if turned:
        found = found.t().contiguous() if lse is None else lse.copy_(found.t())
    return (out, found) if return_lse else out


def as_slots(asked: PlanOptions, tables: tuple) -> tuple[PlanOptions, tuple]:
    """Options, and tables in the order of `tables.NAMES`, of a ragged batch with factors as those of a paged one.

    Kernels read factors in pages, so a row is a page of one token. Waits for a kv_indptr on a device, since its last
    offset is the length of the page table.
    """
    qo_indptr, kv_indptr, *_ = tables
    require_tensor("kv_indptr", kv_indptr)
    fits = kv_indptr.dim() == 1 and kv_indptr.dtype in (torch.int32, torch.int64)
    require(fits, "kv_indptr", f"{kv_indptr.dtype} {tuple(kv_indptr.shape)}", "int32 or int64 [batch + 1]")
    count = indptr_values("kv_indptr", kv_indptr, sliced=True)[-1]
    last = torch.ones(max(kv_indptr.numel() - 1, 0), dtype=torch.int32, device=kv_indptr.device)
    slots = torch.arange(count, dtype=torch.int32, device=kv_indptr.device)
    return asked._replace(source="paged", page_size=1), (qo_indptr, kv_indptr, last, slots)


def slot_views(kv: tuple[torch.Tensor, torch.Tensor], kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows as pages of one token."""
    k, v = ragged_views(*kv, kv_layout)
    return k.unsqueeze(1), v.unsqueeze(1)


def slot_factors(kv_cache_sf, kv_layout: str) -> dict:
    """Their factors, laid out as those, as Plan.run takes them."""
    if isinstance(kv_cache_sf, torch.Tensor) and kv_cache_sf.dim() == 4:
        kv_cache_sf = kv_cache_sf.unbind(1)
    shown = tuple(kv_cache_sf.shape) if isinstance(kv_cache_sf, torch.Tensor) else f"a {type(kv_cache_sf).__name__}"
    pair = isinstance(kv_cache_sf, (tuple, list)) and len(kv_cache_sf) == 2
    require(pair, "kv_cache_sf", shown, "a pair of tensors, or one with 2 as its second axis: the factors of k and v")
    k_factors, v_factors = slot_views(kv_cache_sf, kv_layout)
    for factors in (k_factors, v_factors):
        allowed = "float8_e4m3fn, uint8: factors of nvfp4 k and v; float32 of other formats"
        require(factors.dtype in sum(_FACTORS.values(), ()), "kv_cache_sf", factors.dtype, allowed)
    return dict(k_factors=k_factors, v_factors=v_factors)
