"""Replay of functions that plan and launch at every call: block tables and lengths are on the device, work lists stay.

It is launch replay (`flashinfer/_core/replay.py`) with these differences.

- Launches may read memory that the thread keeps for its stream, such as work lists. So a replay is of one thread, and a
  captured stream, which gets memory of its own, has none.
- A signature is looked up by what is no tensor and by the shape of the first tensor; one call into torch compares all
  tensors (`flashinfer/_core/alike.py`).
- Arguments that only bound what others say are no part of it: a longest request that grows with every step.
- Calls with a tensor on the host are made in full: what a launch was given of its values would stay.
- What a launch keeps of the caller's beside what moves (sinks, a workspace) has to be in the same memory.
- An output in the memory of another tensor of the call is left to a call in full, which refuses some of these.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import NamedTuple

import torch

from flashinfer._core import capture, env, target
from flashinfer._core.alike import like
from flashinfer._core.replay import VALUES, Recording, bytes_of, lie_apart, recording
from flashinfer._core.tracing import is_traced

# Signatures that are kept of one function and thread; calls of one that differ in their tensors, as those of layers do
# whose sinks do; recordings of one, with those that failed or were dropped.
_MOST, _MOST_ALIKE, _MOST_RECORDED = 4096, 128, 512
# A recording that fails counts for so many: the next would fail, too.
_FAILED = 128
_debug = env.DEBUG.reader()


class _Kept(NamedTuple):
    """One recorded call.

    Attributes
    ----------
    like : callable
        Whether tensors are like those of the call.
    low : list of int
        The last four bits of each address.
    stays : list of (int, int)
        Tensors that do not move, and where they are.
    same : list of (int, int)
        Tensors that begin where another one does.
    writes : list of (int, int, list of (int, int))
        Outputs, their bytes, and all other tensors with theirs.
    repeat : callable (tensors, addresses)
    constants : list of Tensor
        What launches read beside the tensors of a call; held here, so that its memory stays.
    """

    like: Callable[..., bool]
    low: list[int]
    stays: list[tuple[int, int]]
    same: list[tuple[int, int]]
    writes: list[tuple[int, int, list[tuple[int, int]]]]
    repeat: Callable
    constants: list[torch.Tensor]


class DirectRecording(Recording):
    """Records one call, with launches on memory that the thread keeps, and its `constants`: tensors whose memory and
    content stay."""

    def __init__(self):
        super().__init__()
        self.constants: list[torch.Tensor] = []

    def add_kept(self, launch: Callable, bases: list) -> None:
        self.add(lambda: launch, bases)


class _Calls(threading.local):
    def __init__(self):
        # By signature: how many recordings were made, and those that are kept, the latest first.
        self.known: dict[tuple, tuple[int, list[_Kept]]] = {}


class _Layout:
    """What the types of a call's arguments say of them.

    Parameters
    ----------
    types : tuple of type
        Of the arguments, by position and then by name.
    bounds : sequence of int
        Places of integers that are bounds.

    Attributes
    ----------
    fits : bool
        Whether such calls can be replayed.
    tensors, others : callable
        Of all arguments, those that are tensors, and those whose values are compared.
    pairs, floats, bounds : list of int
        Places of tuples and lists, of floats, and of bounds.
    """

    def __init__(self, types: tuple[type, ...], bounds: Sequence[int]):
        places = list(enumerate(types))
        tensors = [i for i, kind in places if issubclass(kind, torch.Tensor)]
        self.bounds = [i for i in bounds if types[i] is int]
        self.pairs = [i for i, kind in places if kind in (tuple, list)]
        self.floats = [i for i, kind in places if kind is float]
        others = [i for i, kind in places if kind in VALUES and i not in self.bounds]
        known = len(tensors) + len(others) + len(self.bounds) + len(self.pairs)
        self.fits = known == len(types) and bool(tensors)
        self.tensors, self.others = _all_of(tensors), _all_of(others)


def _all_of(places: list[int]) -> Callable:
    """A function that gives the elements at some places; itemgetter gives no tuple for one."""
    return itemgetter(*places) if len(places) > 1 else lambda values: tuple([values[i] for i in places])


def direct(*, bounds: Sequence[str] = (), only_with: str = "", writes: Sequence[str] = ("out", "lse")) -> Callable:
    """Replay the calls of a public function, except calls on the CPU, traced ones, and those in a captured stream.

    Parameters
    ----------
    bounds : sequence of str
        Integers of which a call depends on no more than that they are 0 to 2^31 - 1.
    only_with : str
        An argument by name without which that is not so.
    writes : sequence of str
        Tensors that it writes.
    """

    def decorate(function: Callable) -> Callable:
        names = list(inspect.signature(function).parameters)
        calls, layouts = _Calls(), {}

        def layout_of(types: tuple[type, ...], count: int, given: tuple[str, ...]) -> _Layout:
            # The first `count` arguments are given by position.
            if len(layouts) >= _MOST:
                layouts.clear()
            at = dict(zip([*names[:count], *given], range(len(types))))
            there = not only_with or (only_with in at and issubclass(types[at[only_with]], torch.Tensor))
            places = [at[name] for name in bounds if name in at] if there else []
            layout = layouts[types, given] = _Layout(types, places)
            return layout

        def in_full(args: tuple, given: dict):
            # In a capture that torch does not know of, what the call allocates is kept.
            values = (*args, *given.values())
            found = next((x for x in values if isinstance(x, torch.Tensor) and x.is_cuda), None)
            return function(*args, **given) if found is None else capture.run(function, args, given, found.device)

        @wraps(function)
        def call(*args, **given):
            if is_traced() or recording() is not None:
                return function(*args, **given)
            values, named = ((*args, *given.values()), tuple(given)) if given else (args, ())
            types = tuple(map(type, values))
            layout = layouts.get((types, named)) or layout_of(types, len(args), named)
            if not layout.fits:
                return in_full(args, given)
            tensors = [*layout.tensors(values)]
            first = tensors[0]
            for i in layout.pairs:
                pair = values[i]
                if len(pair) != 2 or not (isinstance(pair[0], torch.Tensor) and isinstance(pair[1], torch.Tensor)):
                    return in_full(args, given)
                tensors += pair
            for x in tensors:
                if not x.is_cuda:
                    # Its values are the host's, and may be in the launches.
                    return in_full(args, given)
            for i in layout.bounds:
                if not 0 <= values[i] < 1 << 31:
                    return in_full(args, given)
            for i in layout.floats:
                if values[i] == 0:
                    # 0.0 equals -0.0.
                    return in_full(args, given)
            if torch.cuda.is_current_stream_capturing():
                return in_full(args, given)
            stream = torch._C._cuda_getCurrentRawStream(first.get_device())
            key = layout, layout.others(values), first.shape, stream, _debug(), target.overridden()
            known = calls.known
            before = known.get(key)
            if before is None:
                if len(known) >= _MOST:
                    known.clear()
                result = function(*args, **given)
                known[key] = 0, []
                return result
            addresses = [x.data_ptr() for x in tensors]
            count, alike = before
            for kept in alike:
                if _lie_alike(kept, addresses) and kept.like(*tensors):
                    if kept.writes and not lie_apart(kept.writes, addresses):
                        return function(*args, **given)
                    return kept.repeat(tensors, addresses)
            if count >= _MOST_RECORDED:
                return function(*args, **given)
            with DirectRecording() as recorded:
                result = function(*args, **given)
            outputs = [x for name, x in zip(names, args) if name in writes] + [given.get(name) for name in writes]
            kept = _kept(recorded, tensors, addresses, [x for x in outputs if isinstance(x, torch.Tensor)], result)
            known[key] = count + (_FAILED if kept is None else 1), alike
            if kept is not None:
                alike.insert(0, kept)
                del alike[_MOST_ALIKE:]
            return result

        call.direct_calls = calls
        return call

    return decorate


def _lie_alike(kept: _Kept, addresses: list[int]) -> bool:
    """Whether what does not move is where it was, and addresses are aligned as they were."""
    for i, at in kept.stays:
        if addresses[i] != at:
            return False
    for i, j in kept.same:
        if addresses[i] != addresses[j]:
            return False
    low = 0
    for at in addresses:
        low |= at
    return not (low % 16 or any(kept.low)) or [at % 16 for at in addresses] == kept.low


def _kept(recorded: DirectRecording, tensors: list, addresses: list[int], outputs: list, result) -> _Kept | None:
    """What serves calls like the recorded one; None where not all of it was launches whose addresses the call gives."""
    several = isinstance(result, (tuple, list))
    results = list(result) if several else [] if result is None else [result]
    if not (recorded.alone and recorded.launches and all(x is None or isinstance(x, torch.Tensor) for x in results)):
        return None
    storages = [x.untyped_storage().data_ptr() for x in tensors]
    # New outputs, in the shape that the function gives them. Other new memory may be what the stream keeps from now on.
    bases, makers, returned = list(addresses), [], []
    made = {x.data_ptr(): x for x, draws in recorded.made if draws is None and x.numel()}
    for x in results:
        at = None if x is None else next((i for i, y in enumerate(tensors) if y is x), None)
        if at is None and x is not None:
            source = made.pop(x.data_ptr(), None)
            if source is None or not x.is_contiguous() or (x.numel(), x.dtype) != (source.numel(), source.dtype):
                return None
            at = len(bases)
            bases.append(x.data_ptr())
            makers.append((x.shape, x.dtype))
        returned.append(at)
    if made or len(recorded.made) != len(makers):
        return None
    launches, stays = [], {}
    for hold, moving in recorded.launches:
        launch = hold()
        for x in launch.kept:
            if isinstance(x, torch.Tensor):
                stays |= {i: addresses[i] for i, at in enumerate(storages) if at == x.untyped_storage().data_ptr()}
        picks = [_place(x, bases, storages, recorded.constants) for x in moving]
        if None in picks:
            return None
        launches.append((launch, picks))
    writes = []
    for x in outputs:
        i = next(i for i, y in enumerate(tensors) if y is x)
        writes.append((i, bytes_of(x), [(j, bytes_of(y)) for j, y in enumerate(tensors) if y is not x]))
    constants = recorded.constants
    repeat = _repeat(launches, makers, tensors[0].device, returned, type(result), several, constants)
    same = [(i, addresses.index(at)) for i, at in enumerate(addresses) if addresses.index(at) != i]
    low = [at % 16 for at in addresses]
    kept = _Kept(like(*tensors), low, list(stays.items()), same, writes, repeat, constants)
    return kept if lie_apart(kept.writes, addresses) else None


def _place(x: torch.Tensor | None, bases: list, storages: list, constants: list) -> tuple[int, int] | None:
    """Which base an address comes from, and the bytes between; behind all bases are 0 and the constants. None where
    that is not clear."""
    if x is None:
        return len(bases), 0
    at = x.data_ptr()
    if at in bases:
        return bases.index(at), 0
    for i, constant in enumerate(constants):
        if at == constant.data_ptr():
            return len(bases) + 1 + i, 0
    storage = x.untyped_storage().data_ptr()
    inside = {bases[i] for i, begin in enumerate(storages) if begin == storage}
    if len(inside) != 1:
        return None
    (base,) = inside
    return bases.index(base), at - base


def _repeat(
    launches: list, makers: list, device, returned: list[int | None], kind: type, several: bool, constants: list
) -> Callable:
    """The function that makes outputs and launches for other tensors."""
    picked, behind = [], [0, *(x.data_ptr() for x in constants)]
    for launch, picks in launches:
        if any(offset for _, offset in picks):
            picked.append((launch, lambda at, picks=picks: [at[i] + offset for i, offset in picks]))
        else:
            picked.append((launch, _all_of([i for i, _ in picks])))

    def repeat(tensors: list[torch.Tensor], addresses: list[int]):
        for shape, dtype in makers:
            new = torch.empty(shape, dtype=dtype, device=device)
            tensors.append(new)
            addresses.append(new.data_ptr())
        addresses.extend(behind)
        for launch, pick in picked:
            launch(*pick(addresses))
        if several:
            return kind([None if i is None else tensors[i] for i in returned])
        return tensors[returned[0]] if returned else None

    return repeat
