"""Dispatch: chooses the variant and the config that run a problem, and records why other variants were refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch

from flashinfer._core.backends import variants_of
from flashinfer._core.checks import UnsupportedConfig
from flashinfer._core.implementation import Implementation
from flashinfer._core.target import Target, target_of


def _takes_all(problem, target) -> str:
    return ""


def _no_config(problem, target) -> None:
    return None


@dataclass(frozen=True)
class Variant:
    """One way to run an Op.

    Attributes
    ----------
    name : str
        "reference", "portable", or the chip it is written for ("sm90").
    module : str
        The module of its `IMPLEMENTATION`; imported at first use.
    refuses : callable (problem, target) -> str
        Why it cannot take the problem on that target; '' if it can.
    config : callable (problem, target) -> frozen dataclass
        Tiles, warps, stages. Imports no GPU code.
    """

    name: str
    module: str
    refuses: Callable[[Any, Target], str] = _takes_all
    config: Callable[[Any, Target], Any] = _no_config

    def load(self) -> Implementation:
        return import_module(self.module).IMPLEMENTATION

    def why_not(self, problem, target: Target) -> str:
        """Why this variant does not run `problem` on `target`; '' if it does."""
        if self.name != "reference" and target.is_cpu and not interpreting():
            return "needs a CUDA device (or TRITON_INTERPRET=1)"
        return self.refuses(problem, target)


def portable_only(
    room: str, config: Callable, portable: str = "portable", reference: str = "reference", refuses=_takes_all
) -> tuple[Variant, ...]:
    """The variants of an op with one kernel for all chips: modules of its room, whose door gives its `__name__`."""
    return Variant("portable", f"{room}.{portable}", refuses, config), Variant("reference", f"{room}.{reference}")


@dataclass(frozen=True)
class Choice:
    """The variant and config that run one problem on one target, and why each better-placed variant was refused."""

    op: str
    problem: Any
    target: Target
    variant: Variant
    config: Any
    refused: tuple[tuple[str, str], ...] = ()
    _run: list = field(default_factory=list, compare=False, repr=False)

    def run(self, *args):
        if not self._run:
            implementation = self.variant.load()
            if implementation.compile_together:
                _expect(implementation.kernels(self.problem, self.config), args)
            self._run.append(implementation.run)
        return self._run[0](self.problem, self.config, *args)

    def bind(self, device: torch.device) -> Callable:
        """`run` with all lookups done that do not depend on its arguments: see Implementation."""
        return self.variant.load().bind(self.problem, self.config, device)

    def as_dict(self) -> dict:
        """Plain data, as `flashinfer explain --json` prints it."""
        return {
            "op": self.op,
            "variant": self.variant.name,
            "arch": self.target.arch,
            "problem": asdict(self.problem),
            "config": None if self.config is None else asdict(self.config),
            "refused": dict(self.refused),
        }


def _expect(kernels: Iterable, args: tuple) -> None:
    """Start compiling (launcher, problem, config) of each kernel for the device that the tensors are on."""
    device = next(x.device for x in args if isinstance(x, torch.Tensor))
    for launcher, problem, config in kernels:
        launcher.expect(problem, config, device)


class Op:
    """An operation: a Problem type and the ordered variants that run it, best first.

    A call with (problem, device, backend) returns the Choice, cached. `reference` is the CPU backend. On CUDA tensors
    it runs only if the caller names it, so that a missing kernel is an error instead of a slow fallback.
    """

    def __init__(self, name: str, problem_type: type, variants: Iterable[Variant], catalog: Callable[[], Iterable]):
        self.name = name
        self.problem_type = problem_type
        self.variants = tuple(variants)
        self.catalog = catalog
        self._choices: dict[tuple, Choice] = {}

    def __call__(self, problem, device: torch.device, backend: str = "auto") -> Choice:
        target = target_of(device)
        key = (problem, target, backend)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self.select(problem, target, backend)
            _record(choice)
        return choice

    def select(self, problem, target: Target, backend: str = "auto") -> Choice:
        """The first variant that `backend` admits and that takes the problem; UnsupportedConfig if there is none."""
        admitted = variants_of(backend)
        refused = []
        # The interpreter is for tests: it runs a kernel that the caller names, and is never chosen by default.
        on_cpu_by_default = target.is_cpu and (admitted is None or "reference" in admitted)
        for variant in self.variants:
            why = ""
            if admitted is not None and variant.name not in admitted:
                why = f"backend {backend!r} does not admit it"
            elif variant.name == "reference" and not target.is_cpu and backend != "reference":
                why = "the CPU backend; on a GPU it runs only as backend='reference'"
            elif variant.name != "reference" and on_cpu_by_default:
                why = "CPU tensors"
            why = why or variant.why_not(problem, target)
            if not why:
                return Choice(self.name, problem, target, variant, variant.config(problem, target), tuple(refused))
            refused.append((variant.name, why))
        if admitted is not None:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused if name in admitted)
            others = ", ".join(variant.name for variant in self.variants if variant.name not in admitted)
            raise UnsupportedConfig(
                f"backend: got {backend!r}; allowed for {self.name} on {target.arch}: 'auto', or the name of a variant "
                f"that takes the problem (of {others}); {reasons or 'there is no such variant'}"
            )
        reasons = "; ".join(f"{name}: {why}" for name, why in refused)
        raise UnsupportedConfig(f"{self.name} on {target.arch}: no variant takes {problem} ({reasons})")


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_made: list[Choice] = []
_lock = threading.Lock()


def _record(choice: Choice) -> None:
    with _lock:
        _made.append(choice)


def explain() -> list[Choice]:
    """Every choice made in this process, in order: which variant ran, with which config, and why others did not.

    Returns
    -------
    list of Choice
        A copy.

    Examples
    --------
    >>> import torch, flashinfer
    >>> out = flashinfer.rmsnorm(torch.ones(1, 64), torch.ones(64))
    >>> "rmsnorm" in {choice.op for choice in flashinfer.explain()}
    True
    """
    with _lock:
        return list(_made)
