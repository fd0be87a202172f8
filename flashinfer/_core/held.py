"""Calls of an op that are alike: the first is checked and its launches are kept, the others are those launches again.

The rule. Calls are alike if they are on one stream, their tensors have the same shapes, strides, dtypes, devices and
alignment, the same of them begin at one address, and all other arguments are equal. Nothing else may decide what an op
does on a GPU: it looks at no values there, and its checks see no more than that. So what the first call found (that it
is allowed; kernels, grids, scalars; which pointer is which tensor) holds for all calls like it.

What a first call does is watched. It is kept if that was to launch kernels through `Launcher` on its tensors as they
begin, on scratch that it allocated, and on memory that stays for the stream, and nothing else: an op that converts,
copies or computes with torch runs anew each time, and so does one whose scratch comes from `workspace`, which moves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer._core import env, target

# Calls kept of one op. Shapes of prompts seldom come again: when there are too many, all go.
_MOST = 4096
# Of scratch, in bytes: what an allocation has, or more than any kernel is promised.
_ALIGN = 256
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
_SCALAR, _TENSOR, _LIST = range(3)
_debug = env.DEBUG.reader()


class _Now(threading.local):
    recording: Recording | None = None


_now = _Now()


def recording() -> Recording | None:
    """What watches the call that this thread is in, if it is a first one."""
    return _now.recording


def refuse() -> None:
    """The call that this thread is in does what cannot be kept."""
    if _now.recording is not None:
        _now.recording.refuse()


class Held:
    """A function of tensors and scalars whose calls on a GPU are kept.

    Parameters
    ----------
    function : callable
        Writes into its tensors and returns None.
    types : list of str
        Of its arguments, as its schema has them: "Tensor", "Optional[Tensor]", "float", "List[int]". The first is a
        tensor.
    """

    def __init__(self, function: Callable, types: list[str]):
        if types[0] != "Tensor" or "List[Tensor]" in types:
            raise TypeError(f"{function.__name__}: of {types}, the first must be a Tensor, and none a list of them")
        self._function = function
        self._kinds = [_TENSOR if "Tensor" in t else _LIST if t.startswith("List") else _SCALAR for t in types]
        self._calls: dict[tuple, Callable] = {}

    def __call__(self, *args) -> None:
        index = args[0].get_device()
        if index < 0 or _now.recording is not None:
            return self._function(*args)
        key, addresses, union = [torch._C._cuda_getCurrentRawStream(index), _debug(), target.overridden()], [], 0
        for x, kind in zip(args, self._kinds, strict=False):
            if kind == _TENSOR and x is not None:
                key += x.shape, x.stride(), x.dtype, x.device
                at = x.data_ptr()
                addresses.append(at)
                union |= at
            else:
                key.append(x if kind != _LIST else tuple(x))
        # No kernel is promised a base divisible by more than 16.
        key.append(tuple([at % 16 for at in addresses]) if union % 16 else None)
        if len(set(addresses)) < len(addresses):
            key.append(tuple(map(addresses.index, addresses)))
        key = tuple(key)
        (self._calls.get(key) or self._first(key))(args, addresses)

    def _first(self, key: tuple, again: bool = True) -> Callable:
        """The first call of a key, and the second, which finds what the first made for all: a table, counters."""

        def call(args: tuple, addresses: list[int]) -> None:
            with Recording() as recording:
                self._function(*args)
            if len(self._calls) >= _MOST:
                self._calls.clear()
            tensors = [x for x, kind in zip(args, self._kinds, strict=False) if kind == _TENSOR and x is not None]
            scalars = [x for x, kind in zip(args, self._kinds, strict=False) if kind != _TENSOR]
            repeat = None if _has_zero(scalars) or env.DEBUG.is_on() else recording.repeat(tensors, addresses)
            self._calls[key] = repeat or (self._first(key, False) if again else self._anew)

        return call

    def _anew(self, args: tuple, addresses: list[int]) -> None:
        self._function(*args)


def _has_zero(scalars: list) -> bool:
    """Whether there is a float of 0: as a key it equals -0.0."""
    flat = [y for x in scalars for y in (x if isinstance(x, (list, tuple)) else (x,))]
    return any(isinstance(x, float) and x == 0 for x in flat)


class Recording(TorchDispatchMode):
    """Watches one call in this thread."""

    def __init__(self):
        super().__init__()
        self._launches: list[tuple[Callable, list]] = []
        self._scratch: list[torch.Tensor] = []
        self._alone = True

    def __enter__(self):
        _now.recording = self
        return super().__enter__()

    def __exit__(self, *exception):
        _now.recording = None
        return super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # For True, torch imports dynamo, which takes seconds. It traces no call that comes here: to it an op is opaque.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            self._scratch.append(result)
        elif not func.is_view:
            self._alone = False
        return result

    def refuse(self) -> None:
        self._alone = False

    def add(self, hold: Callable[[], Callable], bases: list) -> None:
        """A launch: `hold()` gives one that takes the addresses of `bases`, its tensors (or None, or addresses)."""
        self._launches.append((hold, bases))

    def repeat(self, tensors: list[torch.Tensor], addresses: list[int]) -> Callable | None:
        """The launches, as a function of (arguments, addresses of their tensors); None if there is more to the call.

        Parameters
        ----------
        tensors, addresses
            Of the call.
        """
        if not self._alone or not self._launches:
            return None
        sources = _Sources(tensors, addresses, self._scratch)
        found = [[sources.of(x) for x in bases] for _, bases in self._launches]
        if any(None in places for places in found):
            return None
        launches = [
            (hold(), _picker([sources.place(at) for at in places]))
            for (hold, _), places in zip(self._launches, found, strict=True)
        ]
        return sources.repeat(launches, tensors[0].device)


class _Sources:
    """Where the pointers of a call's launches come from: its tensors, memory that stays, and scratch, in this order."""

    def __init__(self, tensors: list[torch.Tensor], addresses: list[int], scratch: list[torch.Tensor]):
        self._own = {x.untyped_storage().data_ptr() for x in tensors}
        self._addresses = addresses
        self._stays: dict[int, torch.Tensor | None] = {}
        self._size, self._starts, self._offsets = 0, {}, []
        for x in scratch:
            self._starts[x.untyped_storage().data_ptr()] = self._size
            self._size += -(-x.untyped_storage().nbytes() // _ALIGN) * _ALIGN

    def of(self, x) -> tuple[list, int] | None:
        """Which of the three lists a pointer is of, and where in it; None if it is of none."""
        if not (x is None or isinstance(x, torch.Tensor)):
            return None
        at = 0 if x is None else x.data_ptr()
        if x is not None and at in self._addresses:
            return self._addresses, self._addresses.index(at)
        storage = None if x is None else x.untyped_storage().data_ptr()
        if storage in self._starts:
            offset = self._starts[storage] + at - storage
            if offset not in self._offsets:
                self._offsets.append(offset)
            return self._offsets, self._offsets.index(offset)
        if storage in self._own:
            # Within a tensor of the call, whose other tensors may lie elsewhere in the next.
            return None
        self._stays.setdefault(at, x)
        return self._stays, list(self._stays).index(at)

    def place(self, at: tuple[list, int]) -> int:
        """Where the address stands among all."""
        kind, i = at
        before = 0
        for other in (self._addresses, self._stays, self._offsets):
            if kind is other:
                return before + i
            before += len(other)

    def repeat(self, launches: list[tuple[Callable, Callable]], device: torch.device) -> Callable:
        stays, kept, size, offsets = list(self._stays), list(self._stays.values()), self._size, self._offsets

        def repeat(args: tuple, addresses: list[int]) -> None:
            addresses += stays
            if size:
                scratch = torch.empty(size, dtype=torch.uint8, device=device)
                at = scratch.data_ptr()
                addresses += [at + offset for offset in offsets]
            for launch, pick in launches:
                launch(*pick(addresses))

        # It outlives this call.
        repeat.kept = kept
        return repeat


def _picker(places: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """What takes the numbers at `places` out of a list."""
    return itemgetter(*places) if len(places) > 1 else lambda addresses: [addresses[i] for i in places]
