"""Every public function and method of the package, called first with one wrong argument."""

import contextlib
import copy
import functools
import inspect
import json
import random
import sys
import threading
import zlib
from types import FunctionType

import torch

from flashinfer.testing import fuzz, hostile
from tests import rooms
from tests.api.check_surface import SURFACE, resolve


class _Depth(threading.local):
    inside = False


_depth = _Depth()
# Whose arguments are another's business: groups and ranks, files, devices.
_OTHERS = {
    "aot", "artifacts", "autotuner", "autotune_cache", "cli", "collect_env", "comm", "green_ctx", "jit", "moe_ep",
    "testing", "utils", "ops", "integrations", "compat",
}  # fmt: skip
_ENDS = {"destroy", "reset", "end_forward"}
# They read tables of addresses, which nothing can check.
_BY_ADDRESS = {"replayssm_materialize"}
# Steps of a mixture of experts, each of which takes what the one before it gave.
_STEPS = {"finalize", "token_map"}


def objects():
    """Upstream's public functions and classes, and what our loaded modules name in `__all__`."""
    for entry in json.loads(SURFACE.read_text())["entries"].values():
        if entry["kind"] in ("function", "class"):
            with contextlib.suppress(ImportError, AttributeError):
                yield resolve(entry["paths"][0], entry["kind"])
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer.") and name.split(".")[1] not in _OTHERS:
            yield from (vars(module).get(each) for each in vars(module).get("__all__", ()))


def public():
    """(function, owner) of every public function (owner None) and of every method of public classes."""
    seen = set()
    for found in objects():
        if not isinstance(found, (FunctionType, type)):
            continue
        home = getattr(found, "__module__", None) or ""
        if found in seen or not home.startswith("flashinfer.") or home.split(".")[1] in _OTHERS:
            continue
        # What answers whether something is supported never refuses; the parts of an adapter go by address, too.
        name = found.__name__
        others = name in _BY_ADDRESS | _STEPS or name.startswith("bgmv_moe_")
        if others or name.startswith(("supports_", "resolve_")) or name.endswith("_supported"):
            continue
        seen.add(found)
        if isinstance(found, FunctionType):
            yield found, None
        elif inspect.isclass(found):
            for owner in found.__mro__[:-1]:
                for name, method in list(vars(owner).items()):
                    # A base's constructor is called by that of the class.
                    constructs = name == "__init__" and found.__init__ is method
                    wanted = constructs or not name.startswith("_") and name not in _ENDS
                    if isinstance(method, FunctionType) and wanted and (owner, name) not in seen:
                        if owner.__module__.startswith("flashinfer."):
                            seen.add((owner, name))
                            yield method, owner


@contextlib.contextmanager
def intercepted(visit):
    """Inside the block, `visit(function, owner, args, named)` sees each outermost public call before it is made."""

    def wrapping(function, owner):
        @functools.wraps(function)
        def call(*args, **named):
            if _depth.inside or torch.compiler.is_compiling():
                return function(*args, **named)
            _depth.inside = True
            try:
                visit(function, owner, args, named)
                return function(*args, **named)
            finally:
                _depth.inside = False

        return call

    undo, wrapped = [], {}
    for function, owner in public():
        if owner is None:
            wrapped[id(function)] = wrapping(function, None)
        else:
            undo.append((owner, function.__name__, function))
            setattr(owner, function.__name__, wrapping(function, owner))
    for name, module in list(sys.modules.items()):
        if name.startswith(("flashinfer", "test")) and not name.startswith(("flashinfer._core", "flashinfer.ops")):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and id(value) in wrapped:
                    undo.append((module, attribute, value))
                    setattr(module, attribute, wrapped[id(value)])
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


class Hostile:
    """Makes `count` hostile calls of each call that it sees; what was wrong is in `wrong`, by what was changed."""

    def __init__(self, seed: int, count: int = 1, share: float = 1.0):
        self.seed, self.count, self.share = seed, count, share
        self.made, self.refused = 0, 0
        self.wrong: dict[tuple, str] = {}

    def visit(self, function, owner, args, named):
        signature = inspect.signature(function)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        given = (*args, *named.values())
        if inspect.Parameter.VAR_POSITIONAL in kinds or any(map(_is_traced, given)):
            return
        # A test of defaults, or of tensors without memory.
        if torch.get_default_device().type != "cpu" or any(map(_is_meta, given)):
            return
        try:
            bound = signature.bind(*args, **named).arguments
        except TypeError:
            return
        more = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
        arguments = dict(bound)
        arguments |= arguments.pop(more, {}) if more else {}
        target = arguments.pop("self", None) if owner is not None else None
        shown = function.__name__ if owner is None else f"{type(target).__name__}.{function.__name__}"
        names = set(signature.parameters) | set(arguments)
        for method in ("__init__", "plan", "run"):
            if target is not None and hasattr(type(target), method):
                names |= set(inspect.signature(getattr(type(target), method)).parameters)
        for _ in range(self.count):
            draw = random.Random(zlib.crc32(shown.encode()) + 1000003 * self.seed + self.made)
            self.made += 1
            if draw.random() > self.share:
                continue
            self._one(function, target, arguments, signature, draw, names, shown)

    def _one(self, function, target, arguments, signature, draw, names, shown):
        found = hostile.drawn(arguments, signature, draw)
        if found is None:
            return
        name, change = found
        key = (shown, name, change.what)
        state = torch.get_rng_state()
        # Under the reference: a kernel reads what a table names.
        try:
            with rooms.by("reference"):
                torch.manual_seed(1)
                taken = hostile.attempt(_bound(function, target), arguments, name, change, names, shown)
                if taken is None:
                    self.refused += 1
                elif change.expected == hostile.SAME:
                    torch.manual_seed(1)
                    base = hostile.copied(arguments)
                    try:
                        expected = base, _bound(function, target)(**base)
                    except ValueError:
                        # The test's own call is one to refuse.
                        return
                    why = hostile.differ(taken, expected)
                    if why:
                        given = fuzz.described(arguments)
                        raise fuzz.Wrong(f"{shown}({name}: {change.what}; {given}): another result: {why}")
        except fuzz.Wrong as fault:
            self.wrong.setdefault(key, f"[seed {self.seed} call {self.made}] {fault}")
        finally:
            torch.set_rng_state(state)


def _bound(function, target):
    if target is None:
        return function
    made = object.__new__(type(target)) if function.__name__ == "__init__" else copy.copy(target)
    return functools.partial(function, made)


def _is_meta(value):
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _is_traced(value):
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)
