"""Latent attention's operands: what a call brings to a plan of it, checked, and launched as those of any other plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flashinfer._core.checks import check_apart, is_aligned, require, require_tensor
from flashinfer.ops.attention import operands
from flashinfer.ops.attention.mla.problem import Inputs, matrix_of
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.replay import extents_of, identity, lie_apart
from flashinfer.ops.attention.tables import KV_INDICES
from flashinfer.ops.attention.variants import identity_of

# Stands for optional tensors that most calls leave out.
_NONE = (None,) * 4


@dataclass(frozen=True)
class Factors:
    """What logits and outputs are multiplied by.

    Attributes
    ----------
    logits, outputs : float
    pe_ratio : float
        A further factor of q_pe . kpe.
    logits_on_device, outputs_on_device : float32 Tensor [1], optional
        Further factors, read by the kernel.
    """

    logits: float
    outputs: float = 1.0
    pe_ratio: float = 1.0
    logits_on_device: torch.Tensor | None = None
    outputs_on_device: torch.Tensor | None = None


def attend(plan: Plan, q_nope, q_pe, ckv, kpe, factors: Factors, *, out=None, lse=None, return_lse=False, base_e=False,
           sinks=None, first_ckv=None, params=None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of q_nope [rows, heads, head_dim_ckv] and q_pe over pages ckv and kpe [pages, page_size, dim].

    As Plan.run: calls that are alike in all a kernel or a check depends on are checked once per plan. Returns out, or
    (out, lse).
    """
    try:
        places = [0 if t is None else t.data_ptr() for t in (q_nope, q_pe, ckv, kpe, out)]
    except AttributeError:
        for name, t in dict(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, out=out).items():
            require_tensor(name, t, optional=True)
        raise
    read = (sinks, factors.logits_on_device, factors.outputs_on_device, first_ckv)
    given = [t for t in (q_nope, q_pe, ckv, kpe, out, lse) if t is not None]
    more, new_out, new_lse = None, out is None, lse is None
    if params is not None or read != _NONE:
        more = identity_of(params), *[identity(t) for t in read]
    key = (
        q_pe is None, kpe is None, new_out, new_lse, _all_on_16(places), return_lse, base_e, factors.logits,
        factors.outputs, factors.pe_ratio, more,
    )  # fmt: skip
    for replay in plan.replays.get(key, ()):
        if (
            replay.like(*given)
            and (new_out or lie_apart(replay.extents, places[4], *places[:4]))
            and (new_lse or lie_apart(replay.of_lse, lse.data_ptr(), *places))
        ):
            break
    else:
        x = _check(plan, q_nope, q_pe, ckv, kpe, out, lse, return_lse, factors, sinks, first_ckv, params)
        facts = _facts_of(x, base_e)
        # What was copied may change in place: each call copies it.
        extents, of_lse = extents_of(out, q_nope, q_pe, ckv, kpe), extents_of(lse, q_nope, q_pe, ckv, kpe, out)
        stays = x.sinks is sinks and (new_out or lie_apart(extents, places[4], *places[:4]))
        stays = stays and (new_lse or lie_apart(of_lse, lse.data_ptr(), *places))
        plan.first_call(
            x, facts, key if stays else None, given, new_out, new_lse, kept=read, extents=extents, of_lse=of_lse
        )
        return (x.out, x.lse) if return_lse else x.out
    if new_out:
        out = plan.new_out(q_nope.shape[0])
    if new_lse and return_lse:
        lse = plan.new_lse(q_nope.shape[0])
    if plan.gaps:
        plan.fill_gaps(out, lse if return_lse else None, new_out, new_lse)
    replay.launch(*places[:4], out.data_ptr(), lse.data_ptr() if return_lse else 0, plan.pages_at)
    return (out, lse) if return_lse else out


def _facts_of(x: Inputs, base_e: bool) -> dict[str, bool]:
    """What a kernel is compiled for that only a call knows."""
    tensors = [t for t in (x.q_nope, x.q_pe, x.ckv, x.kpe, x.first_ckv, x.out) if t is not None]
    return dict(
        lse=x.lse is not None, base_e=base_e and x.lse is not None, sinks=x.sinks is not None,
        scales=x.qk_scale is not None, aligned=is_aligned(*tensors),
        matrix=all([matrix_of(t) is not None for t in (x.ckv, x.kpe) if t is not None]),
    )  # fmt: skip


def _check(plan: Plan, q_nope, q_pe, ckv, kpe, out, lse, return_lse, factors, sinks, first_ckv, params) -> Inputs:
    o = plan.options
    require(q_nope.dim() == 3, "q_nope", tuple(q_nope.shape), "[rows, num_heads, head_dim_ckv]")
    operands.check_rows(plan, "q_nope", q_nope.shape[0])
    of_pe = o.head_dim_kpe > 0
    for name, t, dim in (("q_nope", q_nope, o.head_dim_vo), ("q_pe", q_pe, o.head_dim_kpe)):
        if _is_there(plan, name, t, dim):
            expected = (q_nope.shape[0], o.num_qo_heads, dim)
            require(tuple(t.shape) == expected, name, tuple(t.shape), f"{expected}, as planned")
            _check_one(name, t, o.q_dtype, "q_data_type")
    for name, t, dim in (("ckv_cache", ckv, o.head_dim_vo), ("kpe_cache", kpe, o.head_dim_kpe)):
        if _is_there(plan, name, t, dim):
            require(t.dim() == 3 and tuple(t.shape[1:]) == (o.page_size, dim), name, tuple(t.shape),
                    f"[pages, {o.page_size}, {dim}], as planned")  # fmt: skip
            require(t.shape[0] == ckv.shape[0], name, f"{t.shape[0]} pages", f"{ckv.shape[0]}, as ckv_cache")
            _check_one(name, t, o.kv_dtype, "kv_data_type")
    if o.first:
        shape = tuple(first_ckv.shape)
        fits = len(shape) == 3 and shape[1:] == (o.first_page, o.head_dim_vo)
        require(fits, "swa_kv_cache", shape, f"[pages, {o.first_page}, {o.head_dim_vo}]")
        _is_there(plan, "swa_kv_cache", first_ckv, o.head_dim_vo)
        _check_one("swa_kv_cache", first_ckv, o.kv_dtype, "kv_data_type")
    if plan.looks and o.sparse:
        _check_tokens(plan, ckv.shape[0] * o.page_size, 0 if first_ckv is None else first_ckv.shape[0] * o.first_page)
    elif plan.looks:
        operands.check_on_device(plan, q_nope.shape[0], ckv.shape[0])
    out, lse = operands.outputs(plan, q_nope.shape[0], out, lse, return_lse)
    read = dict(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, sinks=sinks, swa_kv_cache=first_ckv)
    check_apart([("out", out), ("lse", lse)], read.items(), in_place=("q_nope",))
    qk_scale, v_scale = _device_factors(plan, factors)
    return Inputs(
        q_nope, q_pe if of_pe else None, ckv, kpe if of_pe else None, out, lse, plan.table, None, factors.logits,
        factors.outputs, factors.pe_ratio, first_ckv, operands.check_sinks(plan, sinks), qk_scale, v_scale,
        operands.variant_values(plan, params, return_lse, sinks),
    )  # fmt: skip


def _check_tokens(plan: Plan, tokens: int, first_tokens: int) -> None:
    """That the keys which a table names for each query are of the cache, which has so many, or of the first, which has
    `first_tokens`. Waits for the device."""
    table, ids = plan.table, plan.table.kv_indices
    begin, lens = table.kv_spans(plan.options.page_size)
    column = torch.arange(min(int(lens.max()), table.kv_stride) if len(lens) else 0, device=ids.device)
    at = begin[:, None] + column
    limit = torch.where(column < plan.options.first, first_tokens, tokens)
    found = ids[at.clamp(max=max(len(ids) - 1, 0))] if len(ids) else at
    wrong = ((found >= limit) & (column < lens[:, None])).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        require(False, table.names[KV_INDICES], f"token {int(found[row, place])} for query {row}, in column {place}",
                f"below {int(limit[place])}, the tokens of the cache; negative ones are none")  # fmt: skip


def _is_there(plan: Plan, name: str, t: torch.Tensor | None, dim: int) -> bool:
    """Whether a tensor of rows of `dim` elements is given; None, or one of no columns, for 0."""
    if t is not None:
        require(t.device == plan.device, name, f"a tensor on {t.device}", f"{plan.device}, where the plan is")
    if t is None or not (dim or t.dim() != 3 or t.shape[-1]):
        require(not dim, name, "none", f"a tensor, since head_dim_kpe is {dim}")
        return False
    return True


def _check_one(name: str, t: torch.Tensor, dtype: torch.dtype, planned: str) -> None:
    require(t.dtype == dtype, name, t.dtype, f"{dtype}, as planned ({planned})")
    require(t.stride(-1) == 1 or t.shape[-1] == 1, name, f"stride {t.stride(-1)} of the last axis", "1")


def _device_factors(plan: Plan, factors: Factors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    given = factors.logits_on_device, factors.outputs_on_device
    if given == (None, None):
        return given
    for name, t in zip(("bmm1_scale", "bmm2_scale"), given, strict=True):
        if t is not None:
            require(t.numel() == 1 and t.dtype == torch.float32, name, f"{t.dtype} {tuple(t.shape)}",
                    "a number, or one float32 in a tensor")  # fmt: skip
            require(t.device == plan.device, name, f"a tensor on {t.device}", str(plan.device))
    one = _one(plan.device)
    return tuple(one if t is None else t for t in given)


@lru_cache(maxsize=64)
def _one(device: torch.device) -> torch.Tensor:
    # From the host: this waits until it is there, so that work on any stream finds it.
    return torch.tensor([1.0], dtype=torch.float32, device=device)


def _all_on_16(places: list[int]) -> bool:
    bits = 0
    for place in places:
        bits |= place
    return bits % 16 == 0
