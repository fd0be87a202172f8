"""Definitions of calls for flashinfer-bench: their axes, dtypes and a reference, without running them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["fi_trace"]


def fi_trace(func_or_method: Callable, save_dir: str | Path | None = None, **kwargs: Any) -> dict[str, Any]:
    """The definition of a function's call, which is not run.

    Parameters
    ----------
    func_or_method : callable
        A function that has a template: those of `flashinfer.activation`, `flashinfer.cascade`, `flashinfer.gemm`,
        `flashinfer.norm`, `flashinfer.page`, `flashinfer.rope` and `flashinfer.sampling` that
        `flashinfer.trace.templates` lists, the `run` of the wrappers that `flashinfer.trace.wrappers` lists, of a
        class (with pages in NHD) or of an object, and what the caller decorated by ``flashinfer_api(trace=...)``.
    save_dir : path, optional
        A folder: the definition is written there as `<name>.json`. By default it is the one that the environment
        variable FLASHINFER_TRACE_DUMP_DIR names, if any.
    kwargs
        The call's arguments, by name. Tensors may be on any device.

    Returns
    -------
    dict
        "name", "description", "op_type", "tags", "axes", "inputs", "outputs", and where the template has them
        "constraints", "reference", "check" and "init".

    Raises
    ------
    ValueError
        The function has no template.

    Examples
    --------
    >>> import torch, flashinfer
    >>> x, weight = torch.zeros(32, 7168).bfloat16(), torch.ones(7168).bfloat16()
    >>> found = flashinfer.fi_trace(flashinfer.rmsnorm, input=x, weight=weight)
    >>> found["name"], found["axes"]["hidden_size"]
    ('rmsnorm_h7168', {'type': 'const', 'value': 7168})
    """
    function = getattr(func_or_method, "__func__", func_or_method)
    of_function = getattr(function, "fi_trace", None)
    if of_function is None:
        raise ValueError(f"func_or_method: got {function!r}; allowed: a function that has a template")
    if getattr(func_or_method, "__self__", None) is not None:
        kwargs["self"] = func_or_method.__self__
    return of_function(save_dir=save_dir, **kwargs)


class _Module(ModuleType):
    """An import of this module stands before the function of the same name at the package's root: it can be called."""

    def __call__(self, func_or_method: Callable, save_dir: str | Path | None = None, **kwargs: Any) -> dict[str, Any]:
        return fi_trace(func_or_method, save_dir, **kwargs)


sys.modules[__name__].__class__ = _Module
