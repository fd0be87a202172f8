"""What wrappers of block-sparse attention share: workspace, the plan, heads that each have a map."""

from __future__ import annotations

import torch

from flashinfer._core.backends import variants_of
from flashinfer._core.checks import NoPlan, UnsupportedConfig, as_dtype, present, require
from flashinfer._core.literals import Backend
from flashinfer.ops.attention.caller_workspace import CallerWorkspace, device_of
from flashinfer.ops.attention.operands import check_given
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.plan import Plan
from flashinfer.ops.attention.sparse import Blocks, as_pages, as_rows, causal_variant, per_head_lse, plan_blocks

_OLDER_NAMES: dict[str, Backend] = {"vsa_blackwell": "vsa_sm100_blk128", "vsa_blackwell_blk64": "vsa_sm100_blk64"}


class BlockSparseWrapper(CallerWorkspace):
    """What both wrappers share: the plan, and options that the older forward() replaces."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: Backend = "auto"):
        backend = _OLDER_NAMES.get(str(backend), backend)
        variants_of(backend)
        self._float_workspace_buffer = float_workspace_buffer
        self.device = device_of(float_workspace_buffer)
        self._backend = backend
        self._active: Plan | None = None

    def _plan(self, asked: PlanOptions, blocks: Blocks, causal: bool, mask=None, packed_mask=None) -> None:
        masked = mask is not None or packed_mask is not None
        if causal and not masked:
            asked = asked.changed(variant=causal_variant())
        masks = mask, packed_mask
        self._active = plan_blocks(asked, blocks, self.device, self._backend, self._float_workspace_buffer, *masks)
        self._asked, self._blocks, self._masks = asked, blocks, masks
        self._params = None if asked.variant is None else blocks.params

    def _planned(self) -> Plan:
        if self._active is None:
            raise NoPlan(f"{type(self).__name__}.run: got no plan; allowed: after plan()")
        return self._active

    def _change(self, pos_encoding_mode: str, logits_soft_cap, sm_scale) -> None:
        """What the older forward() takes over from plan()."""
        self._planned()
        refuse_positions(pos_encoding_mode)
        asked = self._asked.changed(logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)
        if asked != self._asked:
            self._active = plan_blocks(
                asked, self._blocks, self.device, self._backend, self._float_workspace_buffer, *self._masks
            )
            self._asked = asked


def refuse_positions(pos_encoding_mode: str) -> None:
    if pos_encoding_mode != "NONE":
        raise UnsupportedConfig(f"pos_encoding_mode: got {pos_encoding_mode!r}; allowed: 'NONE' with gathered blocks")


def run_per_head(plan: Plan, q, k, v, page_size: int, kv_heads: int, call: dict, out=None):
    """Attention of q [num_qo_heads, M, dim] where each KV head has its own map; out and lse are laid out as q is. None
    in the place of lse without call["return_lse"].

    It writes to `out` if rows of that are a view as the core takes them, else to a new tensor.
    """
    heads, rows, _ = q.shape
    require(heads == kv_heads * plan.options.num_qo_heads, "q", f"{heads} heads",
            f"{kv_heads * plan.options.num_qo_heads}, as planned")  # fmt: skip
    for name, x in (("k", k), ("v", v)):
        require(x.shape[0] == kv_heads, name, f"{x.shape[0]} heads", f"{kv_heads}, as planned")
    shape = (heads, rows, v.shape[2])
    if out is None or tuple(out.shape) != shape or as_rows(out, kv_heads) is None:
        out = torch.empty(shape, dtype=as_dtype(plan.options.o_dtype), device=q.device)
    view = as_rows(q, kv_heads)
    view = present("q", as_rows(q.contiguous(), kv_heads) if view is None else view)
    pages = as_pages(k, page_size), as_pages(v, page_size)
    result = plan.run(view, pages, as_they_are, out=as_rows(out, kv_heads), **call)
    return out, per_head_lse(result[1], kv_heads, rows) if call["return_lse"] else None


def filled(given: torch.Tensor | None, name: str, result: torch.Tensor) -> torch.Tensor:
    """The result, in the tensor that is given for it."""
    if given is None:
        return result.contiguous()
    check_given(name, given, result.shape, result.dtype)
    return given.copy_(result)


def as_they_are(kv):
    return kv
