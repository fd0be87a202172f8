"""Decorators that say which backends and chips a function has, and check its calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from flashinfer._core.checks import BackendSupportedError
from flashinfer.utils.devices import get_compute_capability


def supported_compute_capability(supported_ccs: Iterable[int]) -> Callable:
    """Decorator: the function's `is_compute_capability_supported` says whether a chip is among `supported_ccs`.

    Parameters
    ----------
    supported_ccs : iterable of int
        Compute capabilities times ten, such as 90 for Hopper.

    Returns
    -------
    callable
        The decorator; it returns the function itself.

    Raises
    ------
    TypeError
        It is no iterable, or one of something else than integers.

    Examples
    --------
    >>> from flashinfer.utils import supported_compute_capability
    >>> @supported_compute_capability([80, 90])
    ... def product(a, b):
    ...     return a @ b
    >>> product.is_compute_capability_supported(90), product.is_compute_capability_supported(75)
    (True, False)
    """
    try:
        known = list(supported_ccs)
    except TypeError:
        raise TypeError(f"supported_ccs: got {supported_ccs!r}; allowed: an iterable of integers") from None
    for i, cc in enumerate(known):
        if isinstance(cc, bool) or not isinstance(cc, int):
            raise TypeError(f"supported_ccs[{i}]: got {cc!r}, a {type(cc).__name__}; allowed: an integer")

    def decorate(function: Callable) -> Callable:
        function._supported_ccs = set(known)
        function.is_compute_capability_supported = lambda cc: cc in function._supported_ccs
        return function

    return decorate


def backend_requirement(
    backend_checks: dict[str, Callable],
    common_check: Callable | None = None,
    heuristic_func: Callable | None = None,
) -> Callable:
    """Decorator: a call whose backend, chip or problem does not fit is an error before the function runs.

    The chip is that of the first tensor among the arguments; on a CPU none is asked for. Checks are called with the
    call's arguments by name, those left out at their defaults, and say whether they take the problem.

    Parameters
    ----------
    backend_checks : dict
        {name: check}. A check may have `supported_compute_capability`; without it, it is for no chip. Empty: the
        function has no `backend` to choose.
    common_check : callable, optional
        Of every backend. Without backends it is needed, with `supported_compute_capability`.
    heuristic_func : callable, optional
        For ``backend="auto"``: called with a list of the backends that take the call, and the call's arguments, it
        returns those to be tried, best first. The function finds them in its `suitable_auto_backends`.

    Returns
    -------
    callable
        The decorator. The function then takes `skip_check`, and has these attributes:
        ``is_backend_supported(backend, cc=None)``, ``is_compute_capability_supported(cc)``, ``has_backend(backend)``
        and ``has_backend_choices()``.

    Raises
    ------
    ValueError
        From a call: the problem does not fit. BackendSupportedError: no such backend, or not for this chip.

    Examples
    --------
    >>> import torch
    >>> from flashinfer.utils import backend_requirement, supported_compute_capability
    >>> @supported_compute_capability([80, 90])
    ... def narrow(x, backend):
    ...     return x.shape[-1] <= 256
    >>> @backend_requirement({"plain": narrow})
    ... def double(x, backend="plain"):
    ...     return 2 * x
    >>> double(torch.ones(1)), double.is_backend_supported("plain", 75)
    (tensor([2.]), False)
    >>> double(torch.ones(1), backend="fast")
    Traceback (most recent call last):
    flashinfer._core.checks.BackendSupportedError: backend: got 'fast'; allowed for double: plain
    """

    def decorate(function: Callable) -> Callable:
        name, signature, choices = function.__name__, inspect.signature(function), bool(backend_checks)

        def is_backend_supported(backend: str, cc: int | None = None) -> bool:
            if not choices:
                raise ValueError(f"backend: got {backend!r}; allowed: none, as {name} has no choice of them")
            return backend in backend_checks and (cc is None or _is_for(backend_checks[backend], cc))

        def is_compute_capability_supported(cc: int) -> bool:
            if choices:
                return any(_is_for(check, cc) for check in backend_checks.values())
            supports = getattr(common_check, "is_compute_capability_supported", None)
            if supports is None:
                raise ValueError(f"common_check: {name} has no backends and its check no supported_compute_capability")
            return supports(cc)

        def choose(cc: int | None, /, *args, **named) -> bool:
            """Whether a backend takes the call; those that do, best first, are left in `suitable_auto_backends`."""
            if common_check is not None and not common_check(*args, **named):
                return False
            if heuristic_func is None:
                raise ValueError(f"backend: got 'auto'; allowed for {name}: {', '.join(backend_checks)}")
            able = [b for b, check in backend_checks.items() if _takes(check, cc, args, named)]
            best = heuristic_func(able, *args, **named)
            if best:
                setattr(call, "suitable_auto_backends", best)
            return bool(best)

        def check_call(args, named) -> None:
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            values, cc = dict(bound.arguments), _capability_of(*args, *named.values())
            backend: Any = values.get("backend")
            if not choices and common_check is None:
                raise ValueError(f"backend_requirement: {name} has neither backends nor a common_check")
            if backend == "auto" and choices:
                if not choose(cc, **values):
                    raise BackendSupportedError(f"backend: got 'auto'; none of {name}'s takes this call{_on(cc)}")
                return
            if choices and not is_backend_supported(backend, cc):
                able = [b for b in backend_checks if is_backend_supported(b, cc)]
                allowed = ", ".join(able) or "none"
                raise BackendSupportedError(f"backend: got {backend!r}; allowed for {name}{_on(cc)}: {allowed}")
            if not choices and cc is not None and not is_compute_capability_supported(cc):
                raise BackendSupportedError(f"device: got one{_on(cc)}; allowed for {name}: another compute capability")
            checks = [check for check in (common_check, backend_checks.get(backend)) if check is not None]
            if not all(check(**values) for check in checks):
                raise ValueError(f"{name}: a check refuses the size of this problem{_on(cc)}")

        @functools.wraps(function)
        def call(*args, **named):
            if not named.pop("skip_check", False):
                check_call(args, named)
            elif named.get("backend") == "auto" and heuristic_func is not None:
                choose(_capability_of(*args, *named.values()), *args, **named)
            return function(*args, **named)

        call.__dict__.update(
            is_backend_supported=is_backend_supported,
            is_compute_capability_supported=is_compute_capability_supported,
            has_backend=lambda backend: backend in backend_checks,
            has_backend_choices=lambda: choices,
        )
        return call

    return decorate


def register_custom_op(name: str, fn: Callable | None = None, /, **options) -> Callable:
    """Upstream's decorator of its functions, which returns them as they are."""
    return lambda function: function


def register_fake_op(name: str, fn: Callable | None = None) -> Callable:
    """Upstream's decorator of what stands for its functions in a trace; it returns them as they are."""
    return lambda function: function


def _is_for(check: Callable, cc: int) -> bool:
    return hasattr(check, "is_compute_capability_supported") and check.is_compute_capability_supported(cc)


def _takes(check: Callable, cc: int | None, args, named) -> bool:
    try:
        return bool(check(*args, **named)) and (cc is None or _is_for(check, cc))
    except ValueError:
        return False


def _capability_of(*values) -> int | None:
    """That of the first tensor's device, times ten; None where there is none, or it is no CUDA device."""
    device = next((x.device for x in values if isinstance(x, torch.Tensor)), None)
    if device is None or device.type != "cuda":
        return None
    major, minor = get_compute_capability(device)
    return 10 * major + minor


def _on(cc: int | None) -> str:
    return "" if cc is None else f" on compute capability {cc / 10}"
