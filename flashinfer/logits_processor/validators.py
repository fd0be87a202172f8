"""Checks of the order of steps. Each gets all of them, and raises where they do not make a pipeline."""

from __future__ import annotations

from collections.abc import Callable

from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.op import Op
from flashinfer.logits_processor.types import TensorType

ValidityCheck = Callable[[list[Op]], None]


class CompileError(ValueError):
    """The steps do not make a pipeline."""


def check_types(steps: list[Op]) -> None:
    """Each step takes what the one before gives; tokens end a pipeline."""
    if steps[0].IN is TensorType.INDICES:
        raise CompileError(f"{steps[0]!r}: takes INDICES; allowed: LOGITS, PROBS for the first step")
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
        joint = isinstance(op, ops.ProbsTopKOp | ops.LogitsTopKOp) and op.params.get("joint_topk_topp")
        if joint and [type(op) for op in steps[at:]] != [ops.ProbsTopKOp, ops.TopPOp, ops.ProbsSampleOp]:
            raise CompileError("joint_topk_topp: got True; allowed: before TopP and Sample, on probabilities")


def get_default_validity_checks() -> list[ValidityCheck]:
    """The checks that every pipeline has to pass.

    Returns
    -------
    list of callable

    Examples
    --------
    >>> from flashinfer.logits_processor.validators import get_default_validity_checks
    >>> [check.__name__ for check in get_default_validity_checks()]
    ['check_types', 'check_softmax', 'check_joint']
    """
    return [check_types, check_softmax, check_joint]
