"""What a variant's module offers to the rest of the library: one record, `IMPLEMENTATION`, at the end of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial, wraps

import torch


class Implementation:
    """How one variant runs problems, and which kernels it launches for them.

    Parameters
    ----------
    run : callable (problem, config, *args), or dict
        Computes. A GPU variant launches on the current stream and does not wait. A reference, which has no launcher,
        is run outside of torch.autocast: its products are as exact there as those of kernels. A module of several ops
        has a dict: for each op's Problem type its callable, of a reference without `config`.
    launchers : tuple of Launcher, or dict
        Every kernel that it may launch; none for a reference. In a dict it is the one kernel of each Problem type.
    kernels : callable (problem, config) -> iterable of (launcher, problem, config), optional
        The kernels that one problem needs, each with its own compile key. By default every launcher, or the one of the
        problem's type, with the op's problem and config.
    bind : callable (problem, config, device), optional
        `run` with everything looked up that does not depend on the call's tensors, for ops whose calls count
        microseconds. What it returns is between the op and its callers.
    compile_together : bool
        Whether a call launches all of `kernels`: the first one then compiles them side by side.
    stack_budget : int
        Bytes of stack that a thread of any kernel may use; `make matrix` refuses more.
    """

    def __init__(
        self,
        run: Callable[..., None] | dict[type, Callable[..., None]],
        launchers: Iterable | dict = (),
        *,
        kernels: Callable[..., Iterable[tuple]] | None = None,
        bind: Callable[..., Callable] | None = None,
        compile_together: bool = False,
        stack_budget: int = 0,
    ):
        self._launcher_of = launchers if isinstance(launchers, dict) else None
        self.launchers = tuple(launchers.values() if isinstance(launchers, dict) else launchers)
        if isinstance(run, dict):
            run = _by_type(run) if self.launchers else _by_type_alone(run)
        self.run = run if self.launchers else _outside_autocast(run)
        self.kernels = kernels or self._all_launchers
        self.bind = bind or self._without_lookups
        self.compile_together = compile_together
        self.stack_budget = stack_budget

    def _all_launchers(self, problem, config) -> Iterator[tuple]:
        launchers = self.launchers if self._launcher_of is None else (self._launcher_of[type(problem)],)
        return ((launcher, problem, config) for launcher in launchers)

    def _without_lookups(self, problem, config, device: torch.device) -> Callable:
        return partial(self.run, problem, config)


def _by_type(runs: dict[type, Callable]) -> Callable[..., None]:
    return lambda problem, config, *args: runs[type(problem)](problem, config, *args)


def _by_type_alone(runs: dict[type, Callable]) -> Callable[..., None]:
    return lambda problem, config, *args: runs[type(problem)](problem, *args)


def _outside_autocast(run: Callable[..., None]) -> Callable[..., None]:
    @wraps(run)
    def call(*args, **named):
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return run(*args, **named)

    return call
