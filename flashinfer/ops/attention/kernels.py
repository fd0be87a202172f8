"""The kernels of a plan: chosen by its options and tile, not by lengths, and shared by all plans alike in these."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from flashinfer._core.checks import dtype_name, require
from flashinfer._core.dispatch import Choice
from flashinfer._core.target import Target, target_of
from flashinfer.ops.attention.decode import decode
from flashinfer.ops.attention.mla import mla
from flashinfer.ops.attention.mla.problem import latent_problem
from flashinfer.ops.attention.options import PlanOptions, kv_name
from flashinfer.ops.attention.prefill import prefill
from flashinfer.ops.attention.problem import Problem, Scalars
from flashinfer.ops.attention.split import SplitPolicy


class Kernels:
    """The variant, config and bound kernels of all plans with the same options and tile.

    Attributes
    ----------
    options : PlanOptions
        Checked.
    problem : Problem, or mla's
        As planned. What only a call determines (alignment, lse, sinks, scales) has its most likely value.
    choice : Choice
        The variant and config of `problem`.
    latest : Choice
        Those of the last call that was bound. The next plan makes its work list for them.
    scalars : Scalars
        Of a call without scales or a window of its own.
    """

    def __init__(self, options: PlanOptions, rows: int, custom: bool, device: torch.device, backend: str):
        self.options = options
        self.device = device
        self._backend = backend
        owned = options.variant is not None and options.variant.owns_mask
        require(not (custom and owned), "custom_mask", "a mask", "None: the variant owns the mask")
        if options.source == "latent":
            self.problem, self._op = latent_problem(options, rows), mla
        else:
            # A tile of up to 64 rows is bound by reading memory.
            self.problem, self._op = _problem(options, rows, custom), decode if rows <= 64 else prefill
        self.choice: Choice = self._op(self.problem, device, backend)
        if self._op is decode and _many_splits(options, self.choice, device):
            self.problem = replace(self.problem, many_splits=True)
            self.choice = self._op(self.problem, device, backend)
        self.latest = self.choice
        self.scalars = Scalars(
            # Latent attention's calls bring the factor; this one is what later plans of a graph are compared with.
            sm_scale=options.head_dim_qk**-0.5
            if options.sm_scale is None and options.source != "latent" else options.sm_scale,
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

    def chosen(self, **facts: int) -> Choice:
        """The Choice under the facts that only a call knows."""
        return self._op(replace(self.problem, **facts), self.device, self._backend)

    def bind(self, **facts: int):
        """What computes the problem under the facts that only a call knows, and the Choice behind it."""
        key = tuple(facts.items())
        if key not in self._bound:
            choice = self.chosen(**facts)
            self._bound[key] = choice.bind(self.device), choice
        kernel, self.latest = self._bound[key]
        return kernel, self.latest


def expect_kernels(choice: Choice, device: torch.device) -> None:
    """Start compiling what runs a choice, while the kernel that makes its work list is compiled."""
    if device.type != "cuda" or choice.variant.name == "reference":
        return
    from flashinfer.ops.attention.worklist import schedule_launch

    for launcher, problem, config in choice.variant.load().kernels(choice.problem, choice.config):
        if launcher is not schedule_launch:
            launcher.expect(problem, config, device)


def kernels_of(options: PlanOptions, rows: int, custom: bool, device: torch.device, backend: str) -> Kernels:
    """The kernels of checked options; `rows` a tile should hold, `custom` for a custom mask."""
    return _kernels_of(options, rows, custom, device, backend, target_of(device))


@lru_cache(maxsize=1024)
def _kernels_of(options, rows, custom, device, backend, target: Target) -> Kernels:
    return Kernels(options, rows, custom, device, backend)


@lru_cache(maxsize=1024)
def effective(kernels: Kernels) -> dict:
    """The options of kernels, with what the defaults among them come to."""
    options, scalars = kernels.options, kernels.scalars
    found = options._asdict()
    if options.source == "latent":
        # Of latent attention it is the sum of two that callers give.
        found = found | dict(head_dim_qk=options.head_dim_kpe)
    return found | dict(
        sm_scale=scalars.sm_scale, logits_soft_cap=scalars.soft_cap, rope_scale=scalars.rope_scale,
        rope_theta=scalars.rope_theta, fixed_split_size=options.splits,
    )  # fmt: skip


def means(kernels: Kernels, changes: dict, masked: bool) -> bool:
    """Whether kernels have these options already, whatever stands for a default in them."""
    now = effective(kernels)
    defaults = dict(sm_scale=kernels.options.head_dim_qk**-0.5, logits_soft_cap=0.0, rope_scale=1.0, rope_theta=1e4)
    for name, value in changes.items():
        same = value == getattr(kernels.options, name) or now[name] == (defaults.get(name) if value is None else value)
        # A custom mask replaces the causal one.
        if not same and not (masked and name == "causal"):
            return False
    return True


def check_captured(old: Kernels, new: Kernels) -> None:
    """A captured graph keeps its kernel, its scalars and the size of its buffers."""
    if new is old:
        return
    for name, was in effective(old).items():
        now = effective(new)[name]
        require(was == now, name, now, f"{was}, as first planned: a captured graph cannot follow")
    custom = old.problem.mask == "custom"
    require(
        custom == (new.problem.mask == "custom"), "custom_mask", "None" if custom else "a mask",
        f"{'a mask' if custom else 'None'}, as first planned: a captured graph cannot follow",
    )  # fmt: skip
    now, was = new.choice.variant.name, old.choice.variant.name
    require(now == was, "backend", now, f"{was}, as first planned: a captured graph cannot follow")


def _many_splits(o: PlanOptions, choice: Choice, device: torch.device) -> bool:
    """Whether the splits of a tile may be so many that kernels combine them in two levels."""
    c = choice.config
    if o.disable_split_kv or choice.variant.name == "reference":
        return False
    return SplitPolicy.of(c, target_of(device).sms, o.num_kv_heads, c.block_n, o.splits).many


def _problem(o: PlanOptions, rows: int, custom: bool) -> Problem:
    variant = o.variant
    causal = o.causal and not (variant is not None and variant.owns_mask)
    return Problem(
        source=o.source,
        q_dtype=dtype_name(o.q_dtype),
        kv_dtype=kv_name(o.kv_dtype),
        o_dtype=dtype_name(o.o_dtype),
        head_dim_qk=o.head_dim_qk,
        head_dim_vo=o.head_dim_vo,
        group=o.group,
        page_size=o.page_size,
        # A custom mask replaces the causal one, as upstream has it.
        mask="custom" if custom else "causal" if causal else "full",
        window=o.window_left >= 0,
        soft_cap=bool(o.logits_soft_cap),
        pos_encoding=o.pos_encoding_mode,
        split=not o.disable_split_kv,
        rows=rows,
        variant="" if variant is None else variant.key,
        softmax=variant is None or variant.use_softmax,
        interleaved=o.interleaved,
    )
