"""Rules that put neighbouring steps together, so that one launch does what two or three would."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.op import Op


class FusionRule(NamedTuple):
    """Neighbours that one step replaces.

    Attributes
    ----------
    pattern : tuple of Op types
        The neighbours, in order, of these types or of subclasses.
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


def _into(fused: type[Op]) -> Callable[[list[Op]], Op]:
    """Build `fused` with the parameters of all that it replaces."""

    def build(window: list[Op]) -> Op:
        params = {}
        for op in window:
            params |= op.params
        params.pop("joint_topk_topp", None)
        return fused(**params)

    return build


def _top_k_top_p(window: list[Op]) -> Op:
    order = "joint" if window[0].params.get("joint_topk_topp") else "top_k_first"
    fused = _into(ops.FusedProbsTopKTopPSampleOp)(window)
    fused.params["filter_apply_order"] = order
    return fused


def _rule(pattern: tuple[type[Op], ...], build: Callable[[list[Op]], Op], prio: int) -> FusionRule:
    """A rule for these types alone: a subclass may do something else."""
    return FusionRule(pattern, lambda window: [*map(type, window)] == [*pattern], build, prio)


def get_default_fusion_rules() -> list[FusionRule]:
    """The rules that every pipeline is fused by.

    Returns
    -------
    list of FusionRule

    Examples
    --------
    >>> from flashinfer.logits_processor.fusion_rules import get_default_fusion_rules
    >>> [op.__name__ for op in get_default_fusion_rules()[1].pattern]
    ['TemperatureOp', 'SoftmaxOp']
    """
    return [
        _rule((ops.ProbsTopKOp, ops.TopPOp, ops.ProbsSampleOp), _top_k_top_p, 30),
        _rule((ops.TemperatureOp, ops.SoftmaxOp), _into(ops.FusedTemperatureSoftmaxOp), 20),
        _rule((ops.ProbsTopKOp, ops.ProbsSampleOp), _into(ops.FusedProbsTopKSampleOp), 10),
        _rule((ops.TopPOp, ops.ProbsSampleOp), _into(ops.FusedProbsTopPSampleOp), 10),
        _rule((ops.MinPOp, ops.ProbsSampleOp), _into(ops.FusedProbsMinPSampleOp), 10),
    ]
