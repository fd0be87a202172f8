"""From steps to fewer steps: their order is checked, and rules put neighbours together."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer._core.checks import require
from flashinfer.logits_processor.fusion_rules import FusionRule, get_default_fusion_rules
from flashinfer.logits_processor.op import Op
from flashinfer.logits_processor.validators import CompileError, ValidityCheck, get_default_validity_checks

__all__ = ["CompileError", "Compiler", "compile_pipeline"]


class Compiler:
    """Checks and rules, with which it compiles steps.

    Attributes
    ----------
    fusion_rules : list of FusionRule
        Those of higher priority are tried first, of equal ones those that were registered last.
    validity_checks : list of callable
        In the order in which they are called.

    Examples
    --------
    >>> from flashinfer.logits_processor import Compiler, Softmax, Temperature, legalize_processors
    >>> Compiler().compile(legalize_processors([Temperature(), Softmax()]))
    [FusedTemperatureSoftmaxOp]
    """

    def __init__(self) -> None:
        self.fusion_rules = get_default_fusion_rules()
        self.validity_checks = get_default_validity_checks()

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Add a rule.

        Parameters
        ----------
        rule : FusionRule

        Raises
        ------
        ValueError
            It is none.
        """
        require(isinstance(rule, FusionRule), "rule", rule, "a FusionRule")
        self.fusion_rules.insert(0, rule)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Add a check.

        Parameters
        ----------
        check : callable
            Called with the list of steps before they are fused; it raises to refuse them.

        Raises
        ------
        ValueError
            It is not callable.
        """
        require(callable(check), "check", check, "a callable")
        self.validity_checks.append(check)

    def compile(self, ops: Iterable[Op]) -> list[Op]:
        """The steps that `ops` become.

        Parameters
        ----------
        ops : iterable of Op
            They stay as they are.

        Returns
        -------
        list of Op

        Raises
        ------
        CompileError
            There is no step, or the steps do not make a pipeline.
        ValueError
            One of `ops` is no Op.
        """
        steps = list(ops)
        if not steps:
            raise CompileError("ops: got none; allowed: one or more")
        for op in steps:
            require(isinstance(op, Op), "ops", repr(op), "an iterable of Op")
        for check in self.validity_checks:
            check(steps)
        for rule in sorted(self.fusion_rules, key=lambda rule: -rule.prio):
            at = 0
            while at + len(rule.pattern) <= len(steps):
                window = steps[at : at + len(rule.pattern)]
                if all(map(isinstance, window, rule.pattern)) and rule.guard(window):
                    steps[at : at + len(window)] = [rule.build(window)]
                    if len(window) > 1:
                        # What was built may be a neighbour, too.
                        at = max(at - len(window), -1)
                at += 1
        return steps


def compile_pipeline(
    ops: Iterable[Op],
    custom_fusion_rules: list[FusionRule] | None = None,
    custom_validity_checks: list[ValidityCheck] | None = None,
) -> list[Op]:
    """Check steps and fuse them.

    Parameters
    ----------
    ops : iterable of Op
        They stay as they are.
    custom_fusion_rules : list of FusionRule, optional
        Beside ours; of equal priority, the first of them is tried first.
    custom_validity_checks : list of callable, optional
        Called with the list of steps before they are fused; raise to refuse them.

    Returns
    -------
    list of Op

    Raises
    ------
    CompileError
        There is no step, or the steps do not make a pipeline.
    ValueError
        One of `ops` is no Op.

    Examples
    --------
    >>> from flashinfer.logits_processor import Sample, TensorType, TopK, compile_pipeline, legalize_processors
    >>> compile_pipeline(legalize_processors([TopK(), Sample()], TensorType.PROBS))
    [FusedProbsTopKSampleOp]
    """
    compiler = Compiler()
    for rule in reversed(custom_fusion_rules or ()):
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)
