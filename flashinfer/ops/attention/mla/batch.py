"""A batch of latent attention: work lists shared with the other attentions, and launches held for every layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from flashinfer._core.alike import like
from flashinfer._core.checks import dtype_name, is_aligned, require
from flashinfer._core.dispatch import Choice
from flashinfer._core.target import Target, target_of
from flashinfer.ops.attention.batch import Batch, Call, facts
from flashinfer.ops.attention.kind import expect_kernels
from flashinfer.ops.attention.mla import mla
from flashinfer.ops.attention.mla.problem import Inputs, Problem, matrix_of
from flashinfer.ops.attention.options import PlanOptions
from flashinfer.ops.attention.problem import Scalars
from flashinfer.ops.attention.split import Limits
from flashinfer.ops.attention.variants import identity_of

# Of tensors that few calls bring.
_NONE = (None,) * 4


class LatentKind:
    """What all batches of the same options and tile share: to latent attention what Kind is to the others."""

    def __init__(self, options: PlanOptions, rows: int, device: torch.device, backend: str):
        self.options = options
        self.device = device
        self._backend = backend
        variant = options.variant
        causal = options.causal and not (variant and variant.owns_mask)
        self.problem = Problem(
            dtype_name(options.q_dtype), dtype_name(options.kv_dtype), dtype_name(options.o_dtype),
            options.num_qo_heads, options.head_dim_vo, options.head_dim_kpe, options.page_size,
            mask="causal" if causal else "full", sparse=options.sparse, first=options.first,
            first_page=options.first_page, split=not options.disable_split_kv, rows=rows,
            variant=variant.key if variant else "", softmax=variant is None or variant.use_softmax,
        )  # fmt: skip
        self.choice: Choice = mla(self.problem, device, backend)
        self.latest = self.choice
        # What a graph wrapper holds later plans to; calls bring their factors themselves.
        self.scalars = Scalars(sm_scale=options.sm_scale)
        self._bound: dict[tuple, tuple] = {}
        self._expected: set[bool] = set()

    def expect(self, lse: bool) -> None:
        """See expect_kernels; `lse` is whether calls ask for it."""
        if lse not in self._expected:
            self._expected.add(lse)
            expect_kernels(mla(replace(self.problem, lse=lse), self.device, self._backend), self.device)

    def bind(self, **facts):
        """What computes the problem under the facts that only a call knows, and the Choice behind it."""
        key = tuple(facts.values())
        if key not in self._bound:
            choice = mla(replace(self.problem, **facts), self.device, self._backend)
            self._bound[key] = choice.bind(self.device), choice
        kernel, self.latest = self._bound[key]
        return kernel, self.latest


def latent_kind(options: PlanOptions, rows: int, device: torch.device, backend: str) -> LatentKind:
    return _latent_kind(options, rows, device, backend, target_of(device))


@lru_cache(maxsize=1024)
def _latent_kind(options, rows, device, backend, target: Target) -> LatentKind:
    return LatentKind(options, rows, device, backend)


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


@dataclass
class _Launch:
    """A launch that serves every call of one kind, and what it reads beside what moves; see Batch's."""

    launch: Callable
    like: Callable[..., bool]
    kept: tuple


class LatentBatch(Batch):
    """A batch of latent attention on one device. `fill` is Batch's."""

    def run(self, q_nope, q_pe, ckv, kpe, factors: Factors, *, out=None, lse=None, return_lse=False, base_e=False,
            sinks=None, first_ckv=None, params=None):  # fmt: skip
        """Attention of q_nope [rows, heads, head_dim_ckv] and q_pe over pages ckv and kpe [pages, page_size, dim].

        Calls that are alike in all a kernel or a check depends on are checked once per plan. Returns out, or
        (out, lse).
        """
        places = [0 if t is None else t.data_ptr() for t in (q_nope, q_pe, ckv, kpe, out)]
        read = (sinks, factors.logits_on_device, factors.outputs_on_device, first_ckv)
        given = [t for t in (q_nope, q_pe, ckv, kpe, out, lse) if t is not None]
        more = None
        if params is not None or read != _NONE:
            more = identity_of(params), *[facts(t) for t in read]
        key = (
            q_pe is None, kpe is None, out is None, lse is None, _all_on_16(places), return_lse, base_e, factors.logits,
            factors.outputs, factors.pe_ratio, more,
        )  # fmt: skip
        for held in self._held.get(key, ()):
            if held.like(*given):
                break
        else:
            x = self._checked(q_nope, q_pe, ckv, kpe, out, lse, return_lse, factors, sinks, first_ckv, params)
            self._run_latent(x, base_e, (key, given), read)
            return (x.out, x.lse) if return_lse else x.out
        if out is None:
            out = self._new_out(q_nope)
        if lse is None and return_lse:
            lse = self._new_lse(q_nope)
        held.launch(*places[:4], out.data_ptr(), lse.data_ptr() if return_lse else 0, self._pages_at)
        return (out, lse) if return_lse else out

    def _run_latent(self, x: Inputs, base_e: bool, alike: tuple, read: tuple) -> None:
        """The first call of its kind: bound to a kernel, and its launch held for those that follow."""
        if not self.limits.known:
            self.limits = Limits(self.table.batch_size, x.q_nope.shape[0], x.table.kv_indices.shape[0])
        tensors = [t for t in (x.q_nope, x.q_pe, x.ckv, x.kpe, x.first_ckv, x.out) if t is not None]
        kernel, choice = self.kind.bind(
            lse=x.lse is not None, base_e=base_e and x.lse is not None, sinks=x.sinks is not None,
            scales=x.qk_scale is not None, aligned=is_aligned(*tensors),
            matrix=all([matrix_of(t) is not None for t in (x.ckv, x.kpe) if t is not None]),
        )  # fmt: skip
        x.schedule = self._schedule_of(choice)
        if not x.q_nope.shape[0] or not self.table.batch_size:
            return
        if x.schedule is None:
            kernel(x)
            return
        launch = kernel.hold(x)
        # What was copied may change in place, and is copied anew for each call.
        if not self.debug and x.sinks is read[0]:
            key, given = alike
            self._keep(key, _Launch(launch, like(*given), read))
        launch(*x.addresses())

    def _checked(self, q_nope, q_pe, ckv, kpe, out, lse, return_lse, factors, sinks, first_ckv,
                 params) -> Inputs:  # fmt: skip
        o, rows = self.options, self._needs[0]
        require(q_nope.dim() == 3, "q_nope", tuple(q_nope.shape), "[rows, num_heads, head_dim_ckv]")
        require(rows <= q_nope.shape[0], "q_nope", f"{q_nope.shape[0]} rows", f"at least {rows}, as planned")
        of_pe = o.head_dim_kpe > 0
        for name, t, dim in (("q_nope", q_nope, o.head_dim_vo), ("q_pe", q_pe, o.head_dim_kpe)):
            if t is None or not (dim or t.shape[-1]):
                require(not dim, name, "none", f"a tensor, since head_dim_kpe is {dim}")
                continue
            expected = (q_nope.shape[0], o.num_qo_heads, dim)
            require(tuple(t.shape) == expected, name, tuple(t.shape), f"{expected}, as planned")
            self._check_one(name, t, o.q_dtype, "q_data_type")
        for name, t, dim in (("ckv_cache", ckv, o.head_dim_vo), ("kpe_cache", kpe, o.head_dim_kpe)):
            if t is None or not (dim or t.shape[-1]):
                require(not dim, name, "none", f"a tensor, since head_dim_kpe is {dim}")
                continue
            require(t.dim() == 3 and tuple(t.shape[1:]) == (o.page_size, dim), name, tuple(t.shape),
                    f"[pages, {o.page_size}, {dim}], as planned")  # fmt: skip
            require(t.shape[0] == ckv.shape[0], name, f"{t.shape[0]} pages", f"{ckv.shape[0]}, as ckv_cache")
            self._check_one(name, t, o.kv_dtype, "kv_data_type")
        if o.first:
            shape = tuple(first_ckv.shape)
            fits = len(shape) == 3 and shape[1:] == (o.first_page, o.head_dim_vo)
            require(fits, "swa_kv_cache", shape, f"[pages, {o.first_page}, {o.head_dim_vo}]")
            self._check_one("swa_kv_cache", first_ckv, o.kv_dtype, "kv_data_type")
        if self.looks and not o.sparse:
            self._check_on_device(q_nope, ckv)
        out = self._new_out(q_nope) if out is None else self._given(out, "out", (*q_nope.shape[:2], o.head_dim_vo))
        if not return_lse:
            lse = None
        else:
            lse = self._new_lse(q_nope) if lse is None else self._given(lse, "lse", q_nope.shape[:2])
        qk_scale, v_scale = self._device_factors(factors)
        return Inputs(
            q_nope, q_pe if of_pe else None, ckv, kpe if of_pe else None, out, lse, self.table, None, factors.logits,
            factors.outputs, factors.pe_ratio, first_ckv, self._sinks(sinks), qk_scale, v_scale,
            self._params(Call(sinks=sinks, params=params), return_lse),
        )  # fmt: skip

    def _check_one(self, name: str, t: torch.Tensor, dtype: torch.dtype, planned: str) -> None:
        require(t.device == self.device, name, f"a tensor on {t.device}", f"{self.device}, where the plan is")
        require(t.dtype == dtype, name, t.dtype, f"{dtype}, as planned ({planned})")
        require(t.stride(-1) == 1 or t.shape[-1] == 1, name, f"stride {t.stride(-1)} of the last axis", "1")

    def _device_factors(self, factors: Factors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        given = factors.logits_on_device, factors.outputs_on_device
        if given == (None, None):
            return given
        for name, t in zip(("bmm1_scale", "bmm2_scale"), given, strict=True):
            if t is not None:
                require(t.numel() == 1 and t.dtype == torch.float32, name, f"{t.dtype} {tuple(t.shape)}",
                        "a number, or one float32 in a tensor")  # fmt: skip
                require(t.device == self.device, name, f"a tensor on {t.device}", str(self.device))
        one = _one(self.device)
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
