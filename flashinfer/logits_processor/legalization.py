"""From processors to steps: which step a processor becomes hangs on the type of tensor that it gets."""

from __future__ import annotations

from collections.abc import Sequence

from flashinfer._core.checks import require
from flashinfer.logits_processor.op import Op
from flashinfer.logits_processor.processors import LegalizationError, LogitsProcessor
from flashinfer.logits_processor.types import TensorType
from flashinfer.logits_processor.validators import CompileError

__all__ = ["LegalizationError", "infer_initial_type", "legalize_processors"]


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The steps that processors become, one after the other.

    Parameters
    ----------
    processors : sequence of LogitsProcessor
        One or more.
    initial_type : TensorType
        What the first of them gets, LOGITS or PROBS.

    Returns
    -------
    list of Op

    Raises
    ------
    LegalizationError
        There is no processor, one becomes no step, or does not take what it would get.
    CompileError
        A processor follows a draw of tokens.
    ValueError
        One of `processors` is no LogitsProcessor.

    Examples
    --------
    >>> from flashinfer.logits_processor import Sample, Softmax, legalize_processors
    >>> legalize_processors([Softmax(), Sample()])
    [SoftmaxOp, ProbsSampleOp]
    """
    _check(processors)
    steps: list[Op] = []
    kind = initial_type
    for processor in processors:
        if kind is TensorType.INDICES:
            raise CompileError(f"{processor!r}: follows {steps[-1]!r}; allowed: nothing after tokens are drawn")
        these = processor.legalize(kind)
        if not these:
            raise LegalizationError(f"{processor!r}: became no step; allowed: one or more")
        steps += these
        kind = these[-1].OUT
    return steps


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """The type of tensor that the first of some processors takes, where it takes one type only.

    Parameters
    ----------
    processors : sequence of LogitsProcessor

    Returns
    -------
    TensorType

    Raises
    ------
    ValueError
        The first processor takes logits and probabilities, there is none, or one is no LogitsProcessor.

    Examples
    --------
    >>> from flashinfer.logits_processor import Softmax
    >>> from flashinfer.logits_processor.legalization import infer_initial_type
    >>> infer_initial_type([Softmax()])
    TensorType.LOGITS
    """
    _check(processors)
    takes = []
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        try:
            steps = processors[0].legalize(kind)
        except ValueError:
            continue
        # A processor of a user's may not look at the type: its first step tells.
        if not steps or steps[0].IN is kind:
            takes.append(kind)
    require(len(takes) == 1, "input_type", None, f"one of those that {processors[0]!r} takes: LOGITS, PROBS")
    return takes[0]


def _check(processors: Sequence[LogitsProcessor]) -> None:
    if not processors:
        raise LegalizationError("processors: got none; allowed: one or more")
    for each in processors:
        require(isinstance(each, LogitsProcessor), "processors", repr(each), "a sequence of LogitsProcessor")
