"""The processors that users put together; each becomes the step for the type of tensor that it meets."""

from __future__ import annotations

from typing import Any, ClassVar

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer.logits_processor import operators as ops
from flashinfer.logits_processor.op import Op, ParameterizedOp
from flashinfer.logits_processor.types import TensorType


class LegalizationError(ValueError):
    """A processor does not take the type of tensor that it would get."""


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

        Parameters
        ----------
        input_type : TensorType
            Of the tensor that reaches it.

        Returns
        -------
        list of Op
            One for the built-in processors.

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
    ours = [step for step in kind.STEPS.values() if issubclass(step, ParameterizedOp) and step._lists_parameters()]
    if ours and len(ours) == len(kind.STEPS):
        known = {*kind.OWN, *(name for step in ours for name in (*step.NEEDS, *step.TAKES))}
        for name, value in params.items():
            require(name in known, name, value, f"the parameters {', '.join(sorted(known))} of {kind.__name__}")


class Temperature(LogitsProcessor):
    """Divide logits by a temperature.

    Parameters
    ----------
    **params
        `temperature`, if it is fixed; else it is given at run time: a number above 0, or a tensor [batch] or
        [batch, 1]. A row whose temperature is 0 has equal logits, but for those of -inf, as `flashinfer.softmax` has
        it; one whose temperature is negative or NaN is NaN.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Temperature
    >>> pipe = LogitsPipe([Temperature()])
    >>> pipe(torch.tensor([[2.0, 4.0]]), temperature=2.0)
    tensor([[1., 2.]])
    """

    STEPS = {TensorType.LOGITS: ops.TemperatureOp}


class Softmax(LogitsProcessor):
    """Logits to probabilities, float32.

    Parameters
    ----------
    enable_pdl : bool, optional
        Programmatic dependent launch: no effect on results.
    **params
        None but `enable_pdl`; another name is refused.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Softmax
    >>> pipe = LogitsPipe([Softmax()])
    >>> pipe(torch.zeros(1, 4))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    STEPS = {TensorType.LOGITS: ops.SoftmaxOp}

    @checked
    def __init__(self, enable_pdl: bool | None = None, **params: Any):
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(LogitsProcessor):
    """Keep the largest of a row: other logits become -inf, other probabilities 0.

    Parameters
    ----------
    joint_topk_topp : bool
        Apply a TopP that follows, and then a Sample, to the same row: a token has to pass both filters as they are.
        Otherwise top-p is a share of what top-k kept.
    **params
        `top_k`, if it is fixed; else it is given at run time: a number, or a tensor [batch].

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Softmax, TopK
    >>> pipe = LogitsPipe([Softmax(), TopK()])
    >>> pipe(torch.tensor([[0.0, 0.0, -9.0]]), top_k=2)
    tensor([[0.5000, 0.5000, 0.0000]])
    """

    STEPS = {TensorType.LOGITS: ops.LogitsTopKOp, TensorType.PROBS: ops.ProbsTopKOp}
    OWN = ("joint_topk_topp",)

    @checked
    def __init__(self, joint_topk_topp: bool = False, **params: Any):
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(LogitsProcessor):
    """Keep the fewest largest probabilities that sum to `top_p`.

    Parameters
    ----------
    **params
        `top_p`, if it is fixed; else it is given at run time: a number, or a tensor [batch].

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Softmax, TopP
    >>> pipe = LogitsPipe([Softmax(), TopP()])
    >>> pipe(torch.tensor([[0.0, -9.0, -9.0]]), top_p=0.5)
    tensor([[1., 0., 0.]])
    """

    STEPS = {TensorType.PROBS: ops.TopPOp}


class MinP(LogitsProcessor):
    """Keep probabilities of at least `min_p` times the row's largest.

    Parameters
    ----------
    **params
        `min_p`, if it is fixed; else it is given at run time: a number, or a tensor [batch]. Rows with NaN or inf are
        NaN; rows without a probability above 0, or with a `min_p` that is not in 0 to 1, are 0.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, MinP, Softmax
    >>> pipe = LogitsPipe([Softmax(), MinP()])
    >>> pipe(torch.tensor([[0.0, -9.0, -9.0]]), min_p=0.5)
    tensor([[1., 0., 0.]])
    """

    STEPS = {TensorType.PROBS: ops.MinPOp}


class Sample(LogitsProcessor):
    """Draw a token of each row.

    Parameters
    ----------
    deterministic : bool
        No effect on results: draws are deterministic.
    **params
        `indices`, `generator`, `check_nan`, `seed` and `offset`, those that are fixed; the others may be given at run
        time. They are those of `flashinfer.sampling.sampling_from_probs`.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, TopK
    >>> pipe = LogitsPipe([Softmax(), TopK(), Sample()])
    >>> pipe(torch.tensor([[0.0, 1.0, 2.0]]), top_k=1)
    tensor([2], dtype=torch.int32)
    """

    STEPS = {TensorType.LOGITS: ops.LogitsSampleOp, TensorType.PROBS: ops.ProbsSampleOp}

    @checked
    def __init__(self, deterministic: bool = True, **params: Any):
        super().__init__(deterministic=deterministic, **params)
