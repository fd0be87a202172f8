"""Questions that engines put to a function before they call it, as attributes of the function."""

from __future__ import annotations

from collections.abc import Callable


def answering(*backends: str) -> Callable[[Callable], Callable]:
    """Decorator: the function gets `is_backend_supported(backend, compute_capability=None)`.

    It is true of `backends`, which all give the same result here, on compute capability 8.0 and above. "cute-dsl" is
    left out of them where engines go on from its name to modules of that kernel, which are not here.
    """

    def decorate(function: Callable) -> Callable:
        def is_backend_supported(backend: str, compute_capability: int | None = None) -> bool:
            return backend in backends and (compute_capability is None or compute_capability >= 80)

        function.is_backend_supported = is_backend_supported
        return function

    return decorate
