"""The processors that users put together; each becomes the step for the type of tensor that it meets."""

from __future__ import annotations

from typing import Any, ClassVar

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.legalization import LegalizationError
from flashinfer.logits_processor.op import Op, ParameterizedOp
from flashinfer.logits_processor.types import TensorType


class LogitsProcessor:
    """A transformation of logits or probabilities. Subclass it, and define `legalize`, for one of your own.

    Parameters
    ----------
    **params
        Fixed when the pipeline is built; a runtime parameter may be fixed here, too.
    """

    # the steps that it becomes, one for each type of tensor that it takes
    STEPS: ClassVar[dict[TensorType, type[Op]]] = {}
    # parameters of its own, beside those of its steps
    OWN: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **params: Any):
        _check_names(type(self), params)
        self.params = params

    def legalize(self, input_type: TensorType) -> list[Op]:
        """The steps that it becomes for a tensor of `input_type`.

        Raises
        ------
        LegalizationError
            It does not take that type.
        """
        step = self.STEPS.get(input_type)
        if step is None:
            takes = " or ".join(kind.name for kind in self.STEPS)
            raise LegalizationError(f"{self!r}: got {input_type.name}; allowed: {takes}")
        return [step(**self.params)]

    def __repr__(self) -> str:
        return type(self).__name__


def _check_names(kind: type[LogitsProcessor], params: dict) -> None:
    """Nothing is fixed that no step takes. A step that does not list its parameters may take anything."""
    ours = [step for step in kind.STEPS.values() if issubclass(step, ParameterizedOp) and step.lists_parameters()]
    if ours and len(ours) == len(kind.STEPS):
        known = {*kind.OWN, *(name for step in ours for name in (*step.NEEDS, *step.TAKES))}
        for name, value in params.items():
            require(name in known, name, value, f"the parameters {', '.join(sorted(known))} of {kind.__name__}")


class Temperature(LogitsProcessor):
    """Divide logits by the runtime parameter `temperature`: a number, or a tensor [batch], above 0."""

    STEPS = {TensorType.LOGITS: ops.TemperatureOp}


class Softmax(LogitsProcessor):
    """Logits to probabilities. `enable_pdl` changes no result."""

    STEPS = {TensorType.LOGITS: ops.SoftmaxOp}

    @checked
    def __init__(self, enable_pdl: bool | None = None, **params: Any):
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(LogitsProcessor):
    """Keep the `top_k` largest (runtime: a number or a tensor [batch]): other logits become -inf, probabilities 0.

    With `joint_topk_topp`, a TopP that follows, and then a Sample, are applied to the same row: a token has to pass
    both filters as they are. Otherwise top-p is a share of what top-k kept.
    """

    STEPS = {TensorType.LOGITS: ops.LogitsTopKOp, TensorType.PROBS: ops.ProbsTopKOp}
    OWN = ("joint_topk_topp",)

    @checked
    def __init__(self, joint_topk_topp: bool = False, **params: Any):
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(LogitsProcessor):
    """Keep the fewest largest probabilities that sum to `top_p` (runtime: a number or a tensor [batch])."""

    STEPS = {TensorType.PROBS: ops.TopPOp}


class MinP(LogitsProcessor):
    """Keep probabilities of at least `min_p` (runtime: a number or a tensor [batch]) times the row's largest."""

    STEPS = {TensorType.PROBS: ops.MinPOp}


class Sample(LogitsProcessor):
    """Draw a token. Runtime parameters: `indices`, `generator`, `check_nan`, `seed`, `offset`, as those of
    `flashinfer.sampling.sampling_from_probs`. `deterministic` changes no result."""

    STEPS = {TensorType.LOGITS: ops.LogitsSampleOp, TensorType.PROBS: ops.ProbsSampleOp}

    @checked
    def __init__(self, deterministic: bool = True, **params: Any):
        super().__init__(deterministic=deterministic, **params)
