"""From steps to fewer steps: checks of their order, and rules that put neighbours together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.operators import Op
from flashinfer.logits_processor.types import TensorType


class CompileError(ValueError):
    """The steps do not make a pipeline."""


@dataclass(frozen=True)
class FusionRule:
    """Neighbours that one step replaces.

    Attributes
    ----------
    pattern : tuple of Op types
        The neighbours, in order.
    guard : callable (list of Op) -> bool
        Whether these may be replaced.
    build : callable (list of Op) -> Op
        What replaces them.
    prio : int
        Rules of higher priority are tried first.
    """

    pattern: tuple[type[Op], ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


def always(window: list[Op]) -> bool:
    return True


def into(fused: type[Op]) -> Callable[[list[Op]], Op]:
    """Build `fused` with the parameters of all that it replaces."""

    def build(window: list[Op]) -> Op:
        params = {}
        for op in window:
            params |= op.params
        params.pop("joint_topk_topp", None)
        return fused(**params)

    return build


def top_k_top_p(window: list[Op]) -> Op:
    order = "joint" if window[0].params.get("joint_topk_topp") else "top_k_first"
    fused = into(ops.FusedProbsTopKTopPSampleOp)(window)
    fused.params["filter_apply_order"] = order
    return fused


DEFAULT_RULES = (
    FusionRule((ops.ProbsTopKOp, ops.TopPOp, ops.ProbsSampleOp), always, top_k_top_p, 30),
    FusionRule((ops.TemperatureOp, ops.SoftmaxOp), always, into(ops.FusedTemperatureSoftmaxOp), 20),
    FusionRule((ops.ProbsTopKOp, ops.ProbsSampleOp), always, into(ops.FusedProbsTopKSampleOp), 10),
    FusionRule((ops.TopPOp, ops.ProbsSampleOp), always, into(ops.FusedProbsTopPSampleOp), 10),
    FusionRule((ops.MinPOp, ops.ProbsSampleOp), always, into(ops.FusedProbsMinPSampleOp), 10),
)


def fuse(steps: list[Op], rules: list[FusionRule]) -> list[Op]:
    """Apply the rules, those of higher priority first, until none fits."""
    steps = list(steps)
    for rule in sorted(rules, key=lambda rule: -rule.prio):
        at = 0
        while at + len(rule.pattern) <= len(steps):
            window = steps[at : at + len(rule.pattern)]
            if all(type(op) is kind for op, kind in zip(window, rule.pattern)) and rule.guard(window):
                steps[at : at + len(window)] = [rule.build(window)]
            at += 1
    return steps


def check_types(steps: list[Op]) -> None:
    """Each step takes what the one before gives; tokens end a pipeline."""
    for before, after in zip(steps, steps[1:]):
        if before.OUT is TensorType.INDICES:
            raise CompileError(f"{after!r}: follows {before!r}; allowed: nothing after tokens are drawn")
        if before.OUT is not after.IN:
            raise CompileError(f"{after!r}: gets {before.OUT.name} from {before!r}; allowed: {after.IN.name}")


def check_softmax(steps: list[Op]) -> None:
    """At most one softmax."""
    count = sum(isinstance(op, ops.SoftmaxOp) for op in steps)
    if count > 1:
        raise CompileError(f"Softmax: got {count}; allowed: one in a pipeline")


def check_joint(steps: list[Op]) -> None:
    """A joint top-k needs the top-p and the draw that it is joint with."""
    for at, op in enumerate(steps):
        if op.params.get("joint_topk_topp") and [type(op) for op in steps[at:]] != list(DEFAULT_RULES[0].pattern):
            raise CompileError("joint_topk_topp: got True; allowed: before TopP and Sample, on probabilities")


VALIDITY_CHECKS = (check_types, check_softmax, check_joint)
