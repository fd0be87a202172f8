"""User variants: functions of a user's that change logits, or choose which keys take part, inside every kernel."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from keyword import iskeyword
from typing import Any

import torch

from flashinfer._core.checks import UnsupportedConfig, require, torch_dtype

_SCALARS = {"fp32": (int, float), "i32": (int,), "i64": (int,)}
_ELEMENTS = ("bf16", "fp16", "fp32", "fp64", "u8", "i8", "i32", "i64", "i1")
# Attributes that Triton's tuples, and Python's, have already.
_TAKEN = {"count", "fields", "index", "type", "values"}


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """Attention whose logits, or whose mask, are functions of the user's.

    Both functions are `@triton.jit` functions of (logits, batch, q_pos, kv_pos, head, params). They are called on
    tiles, in registers, and work on elements: the arguments broadcast against each other, and of their shapes nothing
    is promised. `logits` are float32, after sm_scale (and after logits_soft_cap and ALiBi, where plan() asks for them);
    `batch` is the request's number, `q_pos` and `kv_pos` are positions in its sequence, the last query standing at the
    last key; `head` is the query head. `params` has what `params` below names.

    Two variants of the same source and parameters are one: they compare equal and share their compiled kernels.

    Parameters
    ----------
    logits : function, optional
        Returns the logits to take the softmax of, in base e; -inf hides a key.
    mask : function, optional
        Returns booleans: which (query, key) pairs take part. They are combined with causal, window and custom mask.
    params : dict of str to str
        Names that the functions read as attributes of `params`, and what run() is given for them, in Triton's words:
        "*fp32", "*i32", ... for a contiguous tensor, of which the functions see a pointer; "fp32", "i32", "i64" for a
        number.
    use_softmax : bool
        False: what `logits` returns are weights, and out = sum over keys of weight * v. There is no LSE then.
    owns_mask : bool
        `mask` is all of the mask: it stands in the place of causal, as a custom mask does.

    Raises
    ------
    ValueError
        An argument is none of the above.

    Examples
    --------
    >>> import flashinfer
    >>> flashinfer.AttentionVariant(logits=lambda logits, batch, q_pos, kv_pos, head, params: logits)
    Traceback (most recent call last):
    flashinfer._core.checks.WrongArgument: logits: got ...
    """

    logits: Any = None
    mask: Any = None
    params: Mapping[str, str] = field(default_factory=dict)
    use_softmax: bool = True
    owns_mask: bool = False

    def __post_init__(self):
        for name, function in (("logits", self.logits), ("mask", self.mask)):
            if function is not None:
                _check_function(name, function)
        require(self.logits is not None or self.mask is not None, "logits", None, "a function, or one for mask")
        require(self.use_softmax or self.logits is not None, "use_softmax", False, "True without a logits function")
        require(not self.owns_mask or self.mask is not None, "owns_mask", True, "False without a mask function")
        object.__setattr__(self, "params", dict(self.params))
        for name, kind in self.params.items():
            plain = name.isidentifier() and not iskeyword(name) and name[0] != "_" and name not in _TAKEN
            require(plain, "params", repr(name), f"names of attributes, none of {', '.join(sorted(_TAKEN))}")
            known = kind in _SCALARS or kind[:1] == "*" and kind[1:] in _ELEMENTS
            allowed = f"{', '.join(_SCALARS)}, or * and one of {', '.join(_ELEMENTS)}"
            require(known, f"params[{name!r}]", repr(kind), allowed)

    @cached_property
    def key(self) -> str:
        """What stands for the variant in a compile key: where its functions are, their hash, and all else of it.

        It says enough for another process to find the variant, see `find`. TypeError if two of the functions share a
        name.
        """
        from flashinfer._core.compiler import check_names, fingerprint

        check_names(self.logits, self.mask)
        hashes = [fingerprint(f, by_source=True)[:16] if f is not None else "" for f in (self.logits, self.mask)]
        key = "|".join(
            (
                _place_of(self.logits), hashes[0], _place_of(self.mask), hashes[1],
                ",".join(f"{name}:{kind}" for name, kind in self.params.items()),
                "softmax" if self.use_softmax else "weights", "owns_mask" if self.owns_mask else "",
            )  # fmt: skip
        )
        _known.setdefault(key, self)
        return key

    def __eq__(self, other):
        return isinstance(other, AttentionVariant) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def named(self, args: tuple, params: Mapping[str, Any] | None) -> dict[str, Any]:
        """The parameters of a call, given in the order of `params` or by name."""
        require(len(args) <= len(self.params), "*args", f"{len(args)} arguments", f"at most {len(self.params)}")
        given = dict(zip(self.params, args))
        for name, value in (params or {}).items():
            require(name not in given, f"params[{name!r}]", "a second value", "one, in *args or in params")
            given[name] = value
        return given

    def values(self, given: Mapping[str, Any] | None, device: torch.device) -> tuple:
        """What a kernel takes for its parameters, in their order; ValueError for what does not fit them."""
        given = given or {}
        for name in given:
            require(name in self.params, f"params[{name!r}]", "a value", f"one of {', '.join(self.params) or 'none'}")
        for name, kind in self.params.items():
            argument = f"params[{name!r}]"
            require(name in given, argument, "nothing", f"a value of type {kind}, in run()")
            _check_value(argument, kind, given[name], device)
        return tuple(given[name] for name in self.params)


_known: dict[str, AttentionVariant] = {}


def find(key: str) -> AttentionVariant | None:
    """The variant of a Problem's `variant`; None for "".

    One that this process has not met, as when it compiles for another, is taken from the imported modules that define
    its functions, and has to be the same there.

    Raises
    ------
    UnsupportedConfig
        Its module is not imported, or its source is another one there.
    """
    if not key:
        return None
    if key in _known:
        return _known[key]
    logits, _, mask, _, params, softmax, owns = key.split("|")
    named = dict(part.split(":") for part in params.split(",") if part)
    found = AttentionVariant(_imported(logits), _imported(mask), named, softmax == "softmax", bool(owns))
    if found.key != key:
        raise UnsupportedConfig(f"variant: got {key}; allowed: the one in this process's modules, {found.key}")
    return found


def _imported(place: str):
    module, _, name = place.partition(":")
    if not place:
        return None
    # Never imported by name: a key may come from a file.
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise UnsupportedConfig(
            f"variant: got {place}, which this process has not met; allowed: a function at the top of a module that is "
            "imported already (flashinfer precompile --import MODULE)"
        )
    return found


def _place_of(function) -> str:
    return "" if function is None else f"{function.fn.__module__}:{function.fn.__qualname__}"


def _check_function(name: str, function) -> None:
    from flashinfer._core.compiler import is_device_function

    jitted = is_device_function(function)
    require(jitted, name, type(function).__name__, "a @triton.jit function of (logits, batch, q_pos, kv_pos, head, "
            "params)")  # fmt: skip
    count = len(function.arg_names)
    require(count == 6, name, f"{function.fn.__name__} of {count} parameters", "6: logits, batch, q_pos, kv_pos, head, "
            "params")  # fmt: skip


def _check_value(argument: str, kind: str, value, device: torch.device) -> None:
    if kind in _SCALARS:
        fits = isinstance(value, _SCALARS[kind]) and not isinstance(value, bool)
        require(fits, argument, value, f"a number of type {kind}")
        if kind != "fp32":
            bits = int(kind[1:]) - 1
            require(-(1 << bits) <= value < 1 << bits, argument, value, kind)
        return
    require(isinstance(value, torch.Tensor), argument, value, f"a tensor of {kind[1:]}")
    require(value.dtype == torch_dtype(kind[1:]), argument, f"a tensor of {value.dtype}", str(torch_dtype(kind[1:])))
    require(value.device == device, argument, f"a tensor on {value.device}", f"{device}, where the plan is")
    require(value.is_contiguous(), argument, f"strides {value.stride()}", "contiguous: functions see a pointer")


def identity_of(given: Mapping[str, Any] | None) -> tuple | None:
    """What of a call's parameters a replay depends on."""
    if not given:
        return None
    return tuple(
        (name, value.data_ptr(), value.numel(), value.dtype, value.device, value.is_contiguous())
        if isinstance(value, torch.Tensor) else (name, type(value), value)
        for name, value in given.items()
    )  # fmt: skip


def chosen(
    variant: AttentionVariant | None, jit_args=None, jit_kwargs: Mapping[str, Any] | None = None,
    variant_owns_mask: bool = False,
) -> AttentionVariant | None:  # fmt: skip
    """The variant that a wrapper's arguments name: ours, or upstream's `jit_args` with an AttentionVariant in them.

    Parameters
    ----------
    variant : AttentionVariant, optional
    jit_args : optional
        An AttentionVariant, or upstream's list (uri, q, kv, out and index dtypes, head_dim_qk, head_dim_vo, names and
        dtypes of tensors, names and dtypes of scalars, variant name, declaration) with one for its declaration. run()
        then takes the tensors, and after them the scalars, in the order of the list. Dtypes and head dims are plan()'s.
    jit_kwargs : dict, optional
        Upstream's build options. Those that follow from plan() here are read over.
    variant_owns_mask : bool
        As AttentionVariant.owns_mask.

    Raises
    ------
    ValueError
        jit_args and variant are both given, or the list's names are not the variant's parameters.
    UnsupportedConfig
        jit_args declares its variant in CUDA C++, or jit_kwargs has an option that would change results.
    """
    require(variant is None or jit_args is None, "jit_args", "a variant", "None where variant is given")
    if jit_args is not None:
        variant = _from_jit_args(jit_args)
    for name, value in (jit_kwargs or {}).items():
        if value and name not in ("use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction", "fp8_enabled"):
            raise UnsupportedConfig(f"jit_kwargs[{name!r}]: got {value!r}; allowed: none; plan() takes such options")
    if variant_owns_mask:
        require(variant is not None, "variant_owns_mask", True, "False without a variant")
        variant = replace(variant, owns_mask=True)
    return variant


def as_module(jit_module) -> AttentionVariant:
    """An AttentionVariant where upstream has a compiled module; UnsupportedConfig for what is none."""
    if not isinstance(jit_module, AttentionVariant):
        raise UnsupportedConfig(
            f"jit_module: got {type(jit_module).__name__}; allowed: an AttentionVariant (docs/variants.md), since CUDA "
            "C++ is not compiled here"
        )
    return jit_module


def _from_jit_args(jit_args) -> AttentionVariant:
    if isinstance(jit_args, AttentionVariant):
        return jit_args
    parts = list(jit_args)
    if not parts or not isinstance(parts[-1], AttentionVariant):
        last = type(parts[-1]).__name__ if parts else "nothing"
        raise UnsupportedConfig(
            f"jit_args: got a variant declared by {last}; allowed: an AttentionVariant in its place, since CUDA C++ is "
            "not compiled here (docs/variants.md shows how to write one)"
        )
    variant = parts[-1]
    if len(parts) == 1:
        return variant
    require(len(parts) == 13, "jit_args", f"{len(parts)} elements", "13, upstream's list, or an AttentionVariant")
    tensors, scalars = list(parts[7]), list(parts[9])
    pointers = {name for name, kind in variant.params.items() if kind[0] == "*"}
    same = set(tensors) == pointers and set(tensors + scalars) == set(variant.params)
    require(same, "jit_args", f"tensors {tensors} and scalars {scalars}", f"the variant's: {variant.params}")
    return replace(variant, params={name: variant.params[name] for name in tensors + scalars})
