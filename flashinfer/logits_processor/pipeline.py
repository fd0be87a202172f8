"""A pipeline: processors become steps for the types of tensor that they meet, and steps are fused."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.checks import require
from flashinfer.logits_processor import operators
from flashinfer.logits_processor.compiler import compile_pipeline
from flashinfer.logits_processor.fusion_rules import FusionRule
from flashinfer.logits_processor.legalization import infer_initial_type, legalize_processors
from flashinfer.logits_processor.op import Op, ParameterizedOp
from flashinfer.logits_processor.processors import LogitsProcessor
from flashinfer.logits_processor.types import TaggedTensor, TensorType
from flashinfer.logits_processor.validators import ValidityCheck


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
        custom_validity_checks: list[ValidityCheck] | None = None,
    ):
        named = isinstance(processors, (list, tuple)) and all(isinstance(x, LogitsProcessor) for x in processors)
        require(named and len(processors) > 0, "processors", processors, "a list of one LogitsProcessor or more")
        require(isinstance(compile, bool), "compile", repr(compile), "True or False")
        _check_rules(custom_fusion_rules)
        self.processors = list(processors)
        self.custom_fusion_rules = list(custom_fusion_rules or ())
        self.custom_validity_checks = list(custom_validity_checks or ())
        allowed = input_type is None or input_type in (TensorType.LOGITS, TensorType.PROBS)
        require(allowed, "input_type", input_type, "LOGITS, PROBS")
        self._initial_type = input_type or infer_initial_type(self.processors)
        self.ops = legalize_processors(self.processors, self._initial_type)
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
        custom_validity_checks: list[ValidityCheck] | None = None,
    ) -> None:
        """Check the steps and fuse them, by rules and checks beside those that the pipeline has.

        Parameters
        ----------
        custom_fusion_rules : list of FusionRule, optional
            For this call; of one priority they come before the pipeline's and the built-in ones.
        custom_validity_checks : list of callable (list of Op) -> None, optional
            Each raises where the steps do not make a pipeline; the built-in ones come first.

        Raises
        ------
        CompileError
            Neighbours that do not fit, two softmaxes, or a joint top-k without the steps that it is joint with.
        ValueError
            custom_fusion_rules is no list of FusionRule.
        """
        _check_rules(custom_fusion_rules)
        rules = [*(custom_fusion_rules or ()), *self.custom_fusion_rules]
        checks = [*self.custom_validity_checks, *(custom_validity_checks or ())]
        self.compiled_ops = compile_pipeline(self.ops, rules, checks)

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


def _check_parameters(steps: list[Op], given: dict) -> None:
    """Nothing is given that no step of any pipeline takes. A step that does not list its parameters takes anything.

    Callers give pipelines of several kinds one set of parameters: a top_k stands for nothing where no step filters.
    """
    ours = [step for step in steps if isinstance(step, ParameterizedOp) and step._lists_parameters()]
    if len(ours) == len(steps):
        kinds = [kind for kind in vars(operators).values() if isinstance(kind, type)]
        built_in = [kind for kind in kinds if issubclass(kind, ParameterizedOp)]
        # Results are deterministic in any case.
        known = {name for step in (*ours, *built_in) for name in (*step.NEEDS, *step.TAKES)} | {"is_deterministic"}
        for name, value in given.items():
            require(name in known, name, value, f"the runtime parameters {', '.join(sorted(known))}")
