"""Batches of one kind: what is known of them before any length is, looked up once and shared by all plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flashinfer._core.checks import dtype_name, require
from flashinfer._core.dispatch import Choice
from flashinfer._core.target import Target, target_of
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.options import NVFP4, PlanOptions
from flashinfer.ops.attention.prefill import prefill
from flashinfer.ops.attention.problem import Problem, Scalars


class Kind:
    """What all batches of the same options and tile share.

    Attributes
    ----------
    options : PlanOptions
    problem : Problem
        As planned. What only a call knows (alignment, lse, sinks, scales) stands at what is most likely.
    choice : Choice
        The variant and config of `problem`.
    latest : Choice
        Those that a call was last bound to: what the next plan should expect.
    scalars : Scalars
        Of a call without scales or a window of its own.
    """

    def __init__(self, options: PlanOptions, rows: int, custom: bool, device: torch.device, backend: str):
        self.options = options
        self.device = device
        self._backend = backend
        owned = options.variant is not None and options.variant.owns_mask
        require(not (custom and owned), "custom_mask", "a mask", "None: the variant owns the mask")
        self.problem = _problem(options, rows, custom)
        # Up to 64 rows a tile reads memory longer than it multiplies.
        self._op = decode if rows <= 64 else prefill
        self.choice: Choice = self._op(self.problem, device, backend)
        self.latest = self.choice
        self.scalars = Scalars(
            sm_scale=options.head_dim_qk**-0.5 if options.sm_scale is None else options.sm_scale,
            soft_cap=float(options.logits_soft_cap or 0.0),
            window_left=options.window_left,
            rope_scale=1.0 if options.rope_scale is None else float(options.rope_scale),
            rope_theta=1e4 if options.rope_theta is None else float(options.rope_theta),
        )
        self._bound: dict[tuple, tuple] = {}
        self._expected: set[bool] = set()

    def expect(self, lse: bool) -> None:
        """See expect_kernels; `lse` is whether calls ask for it."""
        if lse not in self._expected:
            self._expected.add(lse)
            expect_kernels(self._op(replace(self.problem, lse=lse), self.device, self._backend), self.device)

    def bind(self, lse: bool, sinks: bool, head_scales: bool, aligned: bool, matrix: bool, window: bool):
        """What computes the problem under the facts that only a call knows, and the Choice behind it."""
        facts = (lse, sinks, head_scales, aligned, matrix, window)
        if facts not in self._bound:
            problem = replace(
                self.problem, lse=lse, sinks=sinks, head_scales=head_scales, aligned=aligned, matrix=matrix,
                window=window,
            )  # fmt: skip
            choice = self._op(problem, self.device, self._backend)
            self._bound[facts] = choice.bind(self.device), choice
        kernel, self.latest = self._bound[facts]
        return kernel, self.latest


def expect_kernels(choice: Choice, device: torch.device) -> None:
    """Start compiling what runs a choice, while the kernel that makes its work list is compiled."""
    if device.type != "cuda" or choice.variant.name == "reference":
        return
    from flashinfer.ops.attention.worklist import schedule_launch

    for launcher, problem, config in choice.variant.load().kernels(choice.problem, choice.config):
        if launcher is not schedule_launch:
            launcher.expect(problem, config, device)


def kind_of(options: PlanOptions, rows: int, custom: bool, device: torch.device, backend: str) -> Kind:
    """The kind of a batch; `rows` a tile should hold, `custom` for a custom mask."""
    return _kind_of(options, rows, custom, device, backend, target_of(device))


@lru_cache(maxsize=1024)
def _kind_of(options, rows, custom, device, backend, target: Target) -> Kind:
    return Kind(options, rows, custom, device, backend)


@lru_cache(maxsize=1024)
def effective(kind: Kind) -> dict:
    """The options of a kind, with what the defaults among them come to."""
    options, scalars = kind.options, kind.scalars
    return options._asdict() | dict(
        sm_scale=scalars.sm_scale, logits_soft_cap=scalars.soft_cap, rope_scale=scalars.rope_scale,
        rope_theta=scalars.rope_theta, fixed_split_size=options.splits,
    )  # fmt: skip


def means(kind: Kind, changes: dict, masked: bool) -> bool:
    """Whether a kind has these options already, whatever stands for a default in them."""
    now = effective(kind)
    defaults = dict(sm_scale=kind.options.head_dim_qk**-0.5, logits_soft_cap=0.0, rope_scale=1.0, rope_theta=1e4)
    for name, value in changes.items():
        same = value == getattr(kind.options, name) or now[name] == (defaults.get(name) if value is None else value)
        # A custom mask stands in the place of causal.
        if not same and not (masked and name == "causal"):
            return False
    return True


def _problem(o: PlanOptions, rows: int, custom: bool) -> Problem:
    variant = o.variant
    causal = o.causal and not (variant is not None and variant.owns_mask)
    return Problem(
        source=o.source,
        q_dtype=dtype_name(o.q_dtype),
        kv_dtype="nvfp4" if o.kv_dtype == NVFP4 else dtype_name(o.kv_dtype),
        o_dtype=dtype_name(o.o_dtype),
        head_dim_qk=o.head_dim_qk,
        head_dim_vo=o.head_dim_vo,
        group=o.group,
        page_size=o.page_size,
        # A custom mask stands in the place of the causal one, as upstream has it.
        mask="custom" if custom else "causal" if causal else "full",
        window=o.window_left >= 0,
        soft_cap=bool(o.logits_soft_cap),
        pos_encoding=o.pos_encoding_mode,
        split=not o.disable_split_kv,
        rows=rows,
        variant="" if variant is None else variant.key,
        softmax=variant is None or variant.use_softmax,
        variant_mask=variant is not None and variant.mask is not None,
        interleaved=o.interleaved,
    )
