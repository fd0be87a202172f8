"""A pipeline: processors become steps for the types of tensor that they meet, and steps are fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer._core.checks import require
from flashinfer.logits_processor.compiler import DEFAULT_RULES, VALIDITY_CHECKS, CompileError, FusionRule, fuse
from flashinfer.logits_processor.operators import Op, ParameterizedOp
from flashinfer.logits_processor.processors import LegalizationError, LogitsProcessor
from flashinfer.logits_processor.types import TaggedTensor, TensorType


class LogitsPipe:
    """Processors applied one after the other, from logits or probabilities to filtered ones, or to tokens.

    Calling it with a tensor [batch, num_classes] and the runtime parameters of its processors by name returns a tensor.

    Parameters
    ----------
    processors : list of LogitsProcessor
    compile : bool
        Fuse steps; `compile()` does it later.
    input_type : TensorType, optional
        LOGITS or PROBS; required where the first processor takes both.
    custom_fusion_rules : list of FusionRule, optional
        Beside ours: Temperature with Softmax, and top-k, top-p, both, or min-p with a draw.
    custom_validity_checks : list of callable, optional
        Called with the list of steps before they are fused; raise to refuse them.

    Raises
    ------
    ValueError
        LegalizationError: a processor does not take what it would get; CompileError: the steps do not make a pipeline.
        When called: a runtime parameter is missing or unknown, or a shape, dtype or value is not as the functions of
        flashinfer.sampling take it.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.logits_processor import LogitsPipe, Sample, Softmax, Temperature, TopP
    >>> pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
    >>> pipe.compiled_ops
    [FusedTemperatureSoftmaxOp, FusedProbsTopPSampleOp]
    >>> pipe(torch.tensor([[0.0, 9.0, 1.0]]), temperature=0.5, top_p=0.9)
    tensor([1], dtype=torch.int32)
    """

    def __init__(
        self,
        processors: list[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: list[FusionRule] | None = None,
        custom_validity_checks: list[Callable[[list[Op]], None]] | None = None,
    ):
        named = isinstance(processors, (list, tuple)) and all(isinstance(x, LogitsProcessor) for x in processors)
        require(named and len(processors) > 0, "processors", processors, "a list of one LogitsProcessor or more")
        require(isinstance(compile, bool), "compile", repr(compile), "True or False")
        _check_rules(custom_fusion_rules)
        self.processors = list(processors)
        self.custom_fusion_rules = list(custom_fusion_rules or ())
        self.custom_validity_checks = list(custom_validity_checks or ())
        self._initial_type = _initial_type(self.processors[0], input_type)
        self.ops = _legalized(self.processors, self._initial_type)
        self.compiled_ops: list[Op] | None = None
        if compile:
            self.compile()

    @property
    def initial_type(self) -> TensorType:
        """The type of tensor that the pipeline takes."""
        return self._initial_type

    def compile(
        self,
        custom_fusion_rules: list[FusionRule] | None = None,
        custom_validity_checks: list[Callable[[list[Op]], None]] | None = None,
    ) -> None:
        """Check the steps and fuse them, by rules and checks beside those that the pipeline has."""
        _check_rules(custom_fusion_rules)
        for check in (*VALIDITY_CHECKS, *self.custom_validity_checks, *(custom_validity_checks or ())):
            check(self.ops)
        rules = [*(custom_fusion_rules or ()), *self.custom_fusion_rules, *DEFAULT_RULES]
        self.compiled_ops = fuse(self.ops, rules)

    def __call__(self, x: torch.Tensor | TaggedTensor, **kwargs: Any) -> torch.Tensor:
        if not isinstance(x, TaggedTensor):
            x = TaggedTensor(x, self._initial_type)
        require(x.type is self._initial_type, "x", x.type.name, self._initial_type.name)
        steps = self.ops if self.compiled_ops is None else self.compiled_ops
        _check_parameters(steps, kwargs)
        for step in steps:
            x = step(x, **kwargs)
        return x.data

    def __repr__(self) -> str:
        shown = f"[{' -> '.join(map(repr, self.processors))}], ops=[{' -> '.join(map(repr, self.ops))}]"
        if self.compiled_ops is not None:
            shown += f", compiled_ops=[{' -> '.join(map(repr, self.compiled_ops))}]"
        return f"LogitsPipe({shown})"


def _check_rules(rules) -> None:
    fits = rules is None or isinstance(rules, (list, tuple)) and all(isinstance(x, FusionRule) for x in rules)
    require(fits, "custom_fusion_rules", rules, "None, or a list of FusionRule")


def _initial_type(first: LogitsProcessor, given: TensorType | None) -> TensorType:
    if given is not None:
        require(given in (TensorType.LOGITS, TensorType.PROBS), "input_type", given, "LOGITS, PROBS")
        return given
    takes = []
    for kind in (TensorType.LOGITS, TensorType.PROBS):
        try:
            steps = first.legalize(kind)
        except LegalizationError:
            continue
        # A processor of a user's may not look at the type: its first step tells.
        if not steps or steps[0].IN is kind:
            takes.append(kind)
    require(len(takes) == 1, "input_type", None, f"one of those that {first!r} takes: LOGITS, PROBS")
    return takes[0]


def _legalized(processors: list[LogitsProcessor], kind: TensorType) -> list[Op]:
    steps = []
    for processor in processors:
        if kind is TensorType.INDICES:
            raise CompileError(f"{processor!r}: follows {steps[-1]!r}; allowed: nothing after tokens are drawn")
        steps += processor.legalize(kind)
        kind = steps[-1].OUT if steps else kind
    return steps


def _check_parameters(steps: list[Op], given: dict) -> None:
    """Nothing is given that no step takes. A step of a user's may take anything."""
    ours = [step for step in steps if isinstance(step, ParameterizedOp)]
    if len(ours) == len(steps):
        # Results are deterministic in any case.
        known = {name for step in ours for name in (*step.NEEDS, *step.TAKES)} | {"is_deterministic"}
        for name, value in given.items():
            require(name in known, name, value, f"the runtime parameters {', '.join(sorted(known))}")
