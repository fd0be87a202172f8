"""What callers ask a function before they call it, as its attributes; and the keyword that upstream adds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from flashinfer._core.checks import require

_LEAST = 80


def answering(*backends: str, denied: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorator: the function answers as upstream's do, and takes `skip_check`, which skips nothing.

    `backends` and `denied` are upstream's names of its implementations, which all give the same result here. Engines go
    on from a denied one to modules of that kernel, which are not here; a call may name it all the same. It stands below
    `replayed`, which hands the attributes on.

    is_backend_supported(backend, cc=None) : whether the name is among `backends`, on that compute capability.
    is_compute_capability_supported(cc) : 80 and above.
    has_backend(backend) : whether upstream has the name.
    has_backend_choices() : whether upstream has any.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.bmm_fp8.is_backend_supported("cudnn", 90), flashinfer.bmm_fp8.is_compute_capability_supported(75)
    (True, False)
    """
    names = {*backends, *denied} - {"auto"}

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args, **named):
            named.pop("skip_check", None)
            return function(*args, **named)

        def is_backend_supported(backend: str, cc: int | None = None) -> bool:
            require(bool(names), "backend", repr(backend), f"none, as {function.__name__} has no choice of them")
            return backend in backends and (cc is None or cc >= _LEAST)

        call.__dict__.update(
            is_backend_supported=is_backend_supported,
            is_compute_capability_supported=lambda cc: cc >= _LEAST,
            has_backend=lambda backend: backend in names,
            has_backend_choices=lambda: bool(names),
        )
        return call

    return decorate
