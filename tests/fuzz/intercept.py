"""Every public function and method of the package, called first with one wrong argument."""

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import random
import sys
import threading
import time
import zlib
from collections.abc import Callable
from types import FunctionType

import torch

from flashinfer.core.kv_cache import PagedKVCache
from flashinfer.ops.attention.copies import MadeOfWrappers
from flashinfer.ops.attention.wrapper import AttentionWrapper
from flashinfer.testing import fuzz
from tests import rooms
from tests.api.check_surface import SURFACE, resolve
from tests.fuzz import hostile


class _Depth(threading.local):
    inside = False


_depth = _Depth()
# Whose arguments are another's business: groups and ranks, files, devices.
_OTHERS = {
    "aot", "artifacts", "autotuner", "autotune_cache", "cli", "collect_env", "comm", "green_ctx", "jit", "moe_ep",
    "testing", "utils", "ops", "integrations", "compat",
}  # fmt: skip
# Of those, what one process asks of numbers and tensors alone.
_ALONE = {
    "Mapping", "compute_fp4_swizzled_layout_sf_size", "decide_ulysses_backend", "decode_cp_a2a_workspace_size",
    "get_pcie_ipc_all_gather_launch_config", "get_pcie_ipc_launch_config",
    "get_pcie_ipc_reduce_scatter_launch_config",
}  # fmt: skip
_ENDS = {"destroy", "reset", "end_forward"}
# They read tables of addresses, which nothing can check.
_BY_ADDRESS = {"replayssm_materialize"}
# What they keep of a call is counted.
_KEEPS = {"KDAPrefillPlanCache"}
_WRAPPERS = AttentionWrapper, MadeOfWrappers
# A tuner gives it arguments by position, which it names as the function does that it runs.
_TUNED = {"CheckpointingSSURunner", "TunableRunner"}
# Steps of a mixture of experts, each of which takes what the one before it gave.
_STEPS = {"finalize", "token_map"}
# What a function writes where it is not given an output.
_IN_PLACE = {("cudnn_recurrent_kda", "output_state"): "initial_state"}
# Strides of an argument that say what is asked: of which axis the blocks are.
_BY_STRIDES = {("fp4_quantize", "input")}


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
        if found in seen or not home.startswith("flashinfer."):
            continue
        if home.split(".")[1] in _OTHERS and found.__name__ not in _ALONE:
            continue
        # What answers whether something is supported never refuses; the parts of an adapter go by address, too.
        name = found.__name__
        # A record keeps what it is given.
        others = dataclasses.is_dataclass(found) or name in _BY_ADDRESS | _STEPS | _TUNED
        others |= name.startswith("bgmv_moe_")
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


@dataclasses.dataclass
class _Made:
    """The arguments after a call, its result, and the names of the arguments that it writes."""

    given: dict
    result: object
    written: set[str]


def _versions(value) -> list[int]:
    return [x._version for x in hostile.tensors_in(value)]


@dataclasses.dataclass
class _Call:
    """One call of a public function: `shown` is its name in messages, `names` what an error may name."""

    function: Callable
    target: object
    arguments: dict
    signature: inspect.Signature
    shown: str
    names: set[str]

    def make(self, arguments):
        """With the random numbers of all calls that are compared: a `_Made`."""
        torch.default_generator.manual_seed(1)
        given = hostile.copied(arguments)
        versions = {name: _versions(value) for name, value in given.items()}
        result = _bound(self.function, self.target)(**given)
        return _Made(given, result, {name for name in given if _versions(given[name]) != versions[name]})


def _call_of(function, owner, args, named) -> _Call | None:
    signature = inspect.signature(function)
    given = (*args, *named.values())
    if any(_is_traced(x) or type(x).__name__ in _KEEPS for x in given):
        return None
    # A test of defaults, or of tensors without memory.
    if torch.get_default_device().type != "cpu" or any(map(_is_meta, given)):
        return None
    try:
        bound = signature.bind(*args, **named)
    except TypeError:
        return None
    # What else is given by position has no name.
    arguments = dict(bound.arguments)
    if any(arguments.pop(name, ()) for name, p in signature.parameters.items() if p.kind is p.VAR_POSITIONAL):
        return None
    more = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    arguments |= arguments.pop(more, {}) if more else {}
    target = arguments.pop("self", None) if owner is not None else None
    shown = function.__name__ if owner is None else f"{type(target).__name__}.{function.__name__}"
    names = set(signature.parameters) | set(arguments)
    for method in ("__init__", "plan", "run"):
        if target is not None and hasattr(type(target), method):
            names |= set(inspect.signature(getattr(type(target), method)).parameters)
    return _Call(function, target, arguments, signature, shown, names)


class Hostile:
    """Makes hostile calls of each call that it sees; what was wrong is in `wrong`, by what was changed.

    With `count`, as many changes of each call, drawn from the seed. Without, every change of every argument, of the
    first calls of a function that differ in what they are given; large ones and slow ones apart.
    """

    KINDS, ELEMENTS, SECONDS = 1, 1 << 15, 0.05

    def __init__(self, seed: int = 0, count: int = 0):
        self.seed, self.count = seed, count
        self.made, self.refused = 0, 0
        self.wrong: dict[tuple, str] = {}
        self.taken: list[str] = []
        self.calls_of: dict[str, set] = collections.defaultdict(set)
        self.made_of: collections.Counter = collections.Counter()

    def visit(self, function, owner, args, named):
        call = _call_of(function, owner, args, named)
        if call is None:
            return
        state = torch.get_rng_state()
        # Under the reference: a kernel reads what a table names.
        try:
            with rooms.by("reference"):
                self._each(call) if self.count else self._whole(call)
        finally:
            torch.set_rng_state(state)

    def _each(self, call):
        for _ in range(self.count):
            draw = random.Random(zlib.crc32(call.shown.encode()) + 1000003 * self.seed + self.made)
            found = hostile.drawn(call.arguments, call.signature, draw)
            if found is None:
                self.made += 1
                continue
            base = functools.cache(lambda: _tried(call, call.arguments))
            self._one(call, *found, base)

    def _whole(self, call):
        kind = frozenset(name for name, value in call.arguments.items() if value is not None)
        seen = self.calls_of[call.shown]
        size = sum(x.numel() for x in hostile.tensors_in(call.arguments))
        if kind in seen or len(seen) >= self.KINDS or size > self.ELEMENTS:
            return
        begin = time.perf_counter()
        base = _tried(call, call.arguments)
        if base is None or time.perf_counter() - begin > self.SECONDS:
            return
        seen.add(kind)
        for name, change in hostile.of_call(call.arguments, call.signature):
            self._one(call, name, change.made(), lambda: base)

    def _one(self, call, name, change, base):
        self.made += 1
        self.made_of[call.shown] += 1
        written = base().written if base() is not None else None
        if written is not None and change.value is None and (call.shown, name) in _IN_PLACE:
            written = written | {_IN_PLACE[call.shown, name]}
        if change.expected == hostile.SAME and (call.shown, name) in _BY_STRIDES and _is_moved(call, name, change):
            change = dataclasses.replace(change, expected=hostile.EITHER)
        if change.expected == hostile.SHARED:
            if not (written or set()) & {name, *change.beside}:
                return
            change = dataclasses.replace(change, expected=hostile.REFUSED)
        torch.default_generator.manual_seed(1)
        try:
            function = _bound(call.function, call.target)
            taken = hostile.attempt(function, call.arguments, name, change, call.names, call.shown, written)
            if taken is None:
                self.refused += 1
                return
            if change.expected == hostile.EITHER:
                self.taken.append(f"{call.shown} {name}: {change.what}")
                return
            # The dtype of an output is a request: codes of another format, or bytes that hold them.
            if name in (written or ()) and _is_narrow(call.arguments[name]) and _is_narrow(change.value):
                return
            # The test's own call may be one to refuse.
            expected = base() if change.expected == hostile.SAME else _tried(call, call.arguments | {name: change.like})
            if expected is None:
                if change.expected == hostile.SAME:
                    return
                why = "taken, where the same values are refused"
            else:
                # What was one tensor in two places is so no longer.
                parts = set() if _shares(name, call.arguments) else written or set()
                taken_parts, expected_parts = (
                    (result, [given[each] for each in sorted(parts)])
                    for given, result in (taken, (expected.given, expected.result))
                )
                why = hostile.differ(taken_parts, expected_parts)
            if why:
                given = fuzz.described(call.arguments)
                raise fuzz.Wrong(f"{call.shown}({name}: {change.what}; {given}): another result: {why}")
        except fuzz.Wrong as fault:
            key = call.shown, name, change.what
            self.wrong.setdefault(key, f"[seed {self.seed} call {self.made}] {fault}")


def _tried(call, arguments) -> _Made | None:
    """The call; None where it is refused."""
    try:
        return call.make(arguments)
    except Exception:
        return None


def _shares(name, arguments):
    """Whether an argument has memory of another one."""

    def memory(*values):
        return {x.untyped_storage().data_ptr() for x in hostile.tensors_in(list(values))}

    return bool(memory(arguments[name]) & memory(*(value for other, value in arguments.items() if other != name)))


def _bound(function, target):
    if target is None:
        # Wrappers may be arguments, too.
        return lambda **given: function(**{k: _again(v) if isinstance(v, _WRAPPERS) else v for k, v in given.items()})
    if isinstance(target, PagedKVCache) and function.__name__ != "__init__":
        return functools.partial(_on_a_copy, function, target)
    made = object.__new__(type(target)) if function.__name__ == "__init__" else _again(target)
    return functools.partial(function, made)


def _on_a_copy(function, target, **given):
    """The method of an object that its methods change, with what the arguments have of it."""
    kept = {id(x): x for x in hostile.tensors_in(given)}
    target, given = copy.deepcopy((target, given), kept)
    return function(target, **given)


def _again(target):
    """An object of its own with the same attributes. What copy() makes of a wrapper has no plan, and runs nothing."""
    if isinstance(target, dict):
        return dict(target)
    if isinstance(target, list):
        return [_again(x) if isinstance(x, _WRAPPERS) else x for x in target]
    if not isinstance(target, _WRAPPERS):
        return copy.copy(target)
    made = object.__new__(type(target))
    for name, value in vars(target).items():
        vars(made)[name] = _again(value) if isinstance(value, (list, dict, *_WRAPPERS)) else value
    return made


def _is_moved(call, name, change):
    """Whether a change is of the order of strides."""
    return _order(call.arguments[name]) != _order(change.value)


def _order(x):
    return sorted(range(x.dim()), key=x.stride)


def _is_narrow(value):
    return isinstance(value, torch.Tensor) and value.dtype.itemsize == 1


def _is_meta(value):
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _is_traced(value):
    return isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter)
