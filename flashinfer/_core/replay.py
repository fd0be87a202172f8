"""Launch replay: the first two calls with a signature run in full, the second is recorded, and later calls repeat its
launches with new addresses.

Two calls of a function have the same signature if they are on one stream, their tensors have the same shapes, strides,
dtypes, devices and alignment, the same tensors begin at equal addresses, and all other arguments are equal. A replayed
function must not depend on anything else: it reads no values of GPU tensors, and its checks use no more than the
signature. So the result of its checks, its kernels, grids and scalars, and the origin of each pointer are the same for
all calls with the signature. Whether an output lies in part of another tensor is looked at in every call: such a call
runs in full, which refuses it.

The second call is recorded; the first one has built shared state, such as a table. The recording is kept if the call
only launched kernels through `Launcher.__call__`, on its tensors and parts of them, on memory that it allocated, and on
memory that persists for the stream. A call that converts, copies or computes with torch runs in full each time. So does
a call that uses `workspace`, whose memory may move.

Host time of a full call and of a replay in us, Python and allocation only, with a driver that does nothing, on a Xeon
of 2.5 GHz (Python 3.11): rmsnorm into `out` 39, 7; silu_and_mul into `out` 38, 6; apply_rope_pos_ids_inplace 56, 7;
append_paged_kv_cache 88, 13; sampling_from_probs with a seed 58, 15; trtllm_fp8_block_scale_routed_moe 477, 30. Each
tensor takes about 0.8 us. Recording takes about 100 us more than a full call; shapes that come once are not recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from functools import partial, wraps
from operator import itemgetter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashinfer._core import capture, env, target
from flashinfer._core.arguments import checked
from flashinfer._core.checks import watched
from flashinfer._core.tracing import is_traced

# The most recordings of one function. Prompt shapes seldom repeat: when there are too many, all are dropped.
_MOST = 4096
# The alignment of scratch in bytes, which is more than any kernel requires.
_ALIGN = 256
# The most bytes that a replay allocates at once. A call that needs more runs in full, and frees memory on the way. An
# H100 writes and reads 256 MiB in 170 us; a mixture of experts, which may need 70 MiB for 128 tokens, takes the host
# 480 to 740 us in full.
_MOST_MADE = 256 << 20
# Types of arguments that are compared by type and value, since 1, 1.0 and True are equal.
VALUES = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # fmt: skip
# Ops that draw seeds, which are repeated in every call.
_DRAWS = {
    _aten.randint.default, _aten.randint.generator, _aten.randint.low, _aten.randint.low_generator,
}  # fmt: skip
_debug = env.DEBUG.reader()


class _Now(threading.local):
    recording: Recording | None = None


_now = _Now()


def recording() -> Recording | None:
    """The Recording of this thread's call, or None."""
    return _now.recording


def refuse() -> None:
    """Mark this thread's call as one that cannot be replayed."""
    if _now.recording is not None:
        _now.recording.refuse()


def replayed(function: Callable) -> Callable:
    """Replay the calls of a public function, except calls on the CPU and traced ones.

    The function has to return tensors that it was given or has allocated, a tuple or a list of them, or None.
    """
    calls: dict[tuple, Callable] = {}
    function = checked(function)

    def second(key: tuple) -> Callable:
        def record(tensors, addresses, args, named):
            with Recording() as recording:
                result = capture.run(function, args, named, tensors[0].device)
            calls[key] = recording.repeat(tensors, addresses, result, in_full) or in_full
            return result

        return record

    def in_full(tensors, addresses, args, named):
        return capture.run(function, args, named, tensors[0].device)

    @wraps(function)
    def call(*args, **named):
        if is_traced() or _now.recording is not None:
            return function(*args, **named)
        key, tensors = [_debug(), target.overridden(), *named], []
        if not _append_signature((*args, *named.values()) if named else args, key, tensors) or not tensors:
            return capture.run(function, args, named, tensors[0].device) if tensors else function(*args, **named)
        addresses = [x.data_ptr() for x in tensors]
        # No kernel requires a base address divisible by more than 16.
        low = [at % 16 for at in addresses]
        key.append(tuple(low) if any(low) else None)
        if len(set(addresses)) < len(addresses):
            key.append(tuple(map(addresses.index, addresses)))
        key.append(torch._C._cuda_getCurrentRawStream(tensors[0].get_device()))
        key = tuple(key)
        repeat = calls.get(key)
        if repeat is not None:
            return repeat(tensors, addresses, args, named)
        if len(calls) >= _MOST:
            calls.clear()
        result = capture.run(function, args, named, tensors[0].device)
        # Reached only if the call did not raise: after a failed call the next one counts as the first again.
        calls[key] = second(key)
        return result

    call.calls = calls
    return call


def _append_signature(values: tuple, key: list, tensors: list) -> bool:
    """Append values to the signature `key`, and tensors to `tensors`. False if the call cannot be replayed: for CPU
    tensors, and for values of other types."""
    for x in values:
        kind = type(x)
        if kind in VALUES:
            if kind is float and x == 0:
                # 0.0 equals -0.0.
                return False
            key += kind, x
        elif isinstance(x, torch.Tensor):
            if not x.is_cuda:
                return False
            key += x.shape, x.stride(), x.dtype, x.device
            tensors.append(x)
        elif kind is tuple or kind is list:
            key += kind, len(x)
            if not _append_signature(x, key, tensors):
                return False
        elif isinstance(x, (Enum, torch.Generator)):
            key.append(x)
        else:
            return False
    return True


def _is(x: torch.Tensor, y) -> bool:
    """Whether `y` is `x` or an alias of all of it, which torch may return for what it has allocated."""
    if x is y or not isinstance(y, torch.Tensor):
        return x is y
    facts = ((t.untyped_storage().data_ptr(), t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (x, y))
    return x.numel() > 0 and next(facts) == next(facts)


def bytes_of(t: torch.Tensor) -> int:
    """From the first to the last element."""
    if not t.numel():
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def lie_apart(writes: list[tuple[int, int, list[tuple[int, int]]]], addresses: list[int]) -> bool:
    """Whether outputs are outside of other tensors.

    Parameters
    ----------
    writes : list of (int, int, list of (int, int))
        Outputs, their bytes, and other tensors with theirs.
    addresses : list of int
        Of all tensors.
    """
    for i, size, others in writes:
        begin = addresses[i]
        end = begin + size
        for j, count in others:
            if addresses[j] < end and begin < addresses[j] + count:
                return False
    return True


def _writes_of(outputs: list[torch.Tensor], tensors: list[torch.Tensor], addresses: list[int]) -> list:
    """The outputs among a call's tensors, as `lie_apart` takes them, with the tensors that they lie apart from."""
    written = {x.untyped_storage().data_ptr() for x in outputs}
    found = []
    for i, x in enumerate(tensors):
        if x.untyped_storage().data_ptr() in written:
            others = [(j, bytes_of(y)) for j, y in enumerate(tensors) if j != i]
            others = [other for other in others if lie_apart([(i, bytes_of(x), [other])], addresses)]
            found.append((i, bytes_of(x), others))
    return [write for write in found if write[1] and write[2]]


class Recording(TorchDispatchMode):
    """Records one call in this thread."""

    def __init__(self):
        super().__init__()
        self.launches: list[tuple[Callable, list]] = []
        # Allocated tensors, and for seeds the function that draws them.
        self.made: list[tuple[torch.Tensor, Callable | None]] = []
        self._bytes = 0
        self.alone = not env.DEBUG.is_on()
        # What the call has checked as its outputs, the caller's among them.
        self.outputs: list[torch.Tensor] = []

    def __enter__(self):
        _now.recording, watched.outputs = self, self.outputs
        return super().__enter__()

    def __exit__(self, *exception):
        _now.recording = watched.outputs = None
        return super().__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If this were True torch would import dynamo, which takes seconds. Traced calls do not come here.
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES or func in _DRAWS:
            self._bytes += result.numel() * result.element_size()
            self.made.append((result, None if func in _ALLOCATES else partial(func, *args, **(kwargs or {}))))
        if not (func in _ALLOCATES or func in _DRAWS or func.is_view) or self._bytes > _MOST_MADE:
            self.refuse()
        return result

    def refuse(self) -> None:
        self.alone = False
        self.made.clear()

    def add(self, hold: Callable[[], Callable], bases: list) -> None:
        """Add a launch: `hold()` returns a function of the addresses of `bases`, its tensors (or None, or
        addresses)."""
        self.launches.append((hold, bases))

    def add_kept(self, launch: Callable, bases: list) -> None:
        """Add a launch that reads memory which the thread keeps for the stream: a replay of any thread has none."""
        self.refuse()

    def repeat(self, tensors: list[torch.Tensor], addresses: list[int], result, in_full: Callable) -> Callable | None:
        """A function that repeats the call for (tensors, addresses, ...) of another one; None if it cannot be replayed.

        Parameters
        ----------
        tensors, addresses, result
            Those of the recorded call.
        in_full : callable
            Makes a call in full: one whose outputs lie otherwise among its tensors.
        """
        if not self.alone or not self.launches:
            return None
        several = isinstance(result, (tuple, list))
        results = result if several else () if result is None else (result,)
        sources = _Sources(tensors, addresses, self.made, results)
        picks = [sources.picker(bases) for _, bases in self.launches]
        returned = [sources.object(x) for x in results]
        if None in picks or None in returned:
            return None
        launches = [(hold(), pick) for (hold, _), pick in zip(self.launches, picks, strict=True)]
        writes = _writes_of(self.outputs, tensors, addresses)
        return sources.repeat(launches, returned, type(result) if several else None, writes, in_full)


class _Sources:
    """The origin of each address in a call's launches: a base and an offset.

    Bases are, in this order: the call's tensors, tensors that it allocates (results and seeds), its scratch memory, and
    memory that persists.
    """

    def __init__(self, tensors: list[torch.Tensor], addresses: list[int], made: list[tuple], results: tuple):
        self._addresses, self._device = addresses, tensors[0].device
        self._of_tensor: dict[int, int | None] = {}
        for i, x in enumerate(tensors):
            # If tensors share memory, the origin of an address in it is ambiguous: None.
            at = x.untyped_storage().data_ptr()
            self._of_tensor[at] = None if at in self._of_tensor else i
        self._objects = list(tensors)
        self._of_made: dict[int, tuple[int, int]] = {}
        self._makers: list[Callable] = []
        self._size, scratch = 0, []
        for x, make in made:
            if make is None and any(_is(x, result) for result in results):
                make = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
            if make is None:
                scratch.append(x)
                continue
            self._of_made[x.untyped_storage().data_ptr()] = len(self._objects), 0
            self._objects.append(x)
            self._makers.append(make)
        for x in scratch:
            self._of_made[x.untyped_storage().data_ptr()] = len(self._objects), self._size
            self._size += -(-x.untyped_storage().nbytes() // _ALIGN) * _ALIGN
        self._fixed = len(self._objects) + bool(self._size)
        self._stays: dict[int, torch.Tensor | None] = {}
        self._elsewhere = any(x.device != self._device for x, _ in made)

    def picker(self, tensors: list) -> Callable[[list[int]], tuple[int, ...]] | None:
        """A function from a call's bases to the addresses of `tensors`; None if the bases do not determine them."""
        places = [self._place(x) for x in tensors]
        if None in places or self._elsewhere:
            return None
        if len(places) == 1 or any(offset for _, offset in places):
            return lambda bases: [bases[i] + offset for i, offset in places]
        return itemgetter(*(i for i, _ in places))

    def _place(self, x) -> tuple[int, int] | None:
        if x is None:
            return self._staying(0, None)
        if not isinstance(x, torch.Tensor):
            return None
        at, storage = x.data_ptr(), x.untyped_storage().data_ptr()
        if at in self._addresses:
            return self._addresses.index(at), 0
        if storage in self._of_made:
            i, start = self._of_made[storage]
            return i, start + at - storage
        if storage not in self._of_tensor:
            return self._staying(at, x)
        i = self._of_tensor[storage]
        return None if i is None else (i, at - self._addresses[i])

    def _staying(self, at: int, x: torch.Tensor | None) -> tuple[int, int]:
        self._stays.setdefault(at, x)
        return self._fixed + list(self._stays).index(at), 0

    def object(self, x) -> int | None:
        """The index of `x` among the call's and the allocated tensors; None if it is none of them."""
        return next((i for i, y in enumerate(self._objects) if _is(y, x)), None)

    def repeat(
        self, launches: list[tuple[Callable, Callable]], returned: list[int], several, writes: list, in_full: Callable
    ) -> Callable:
        makers, size, device, stays = self._makers, self._size, self._device, list(self._stays)

        def repeat(tensors: list[torch.Tensor], addresses: list[int], args, named):
            if writes and not lie_apart(writes, addresses):
                return in_full(tensors, addresses, args, named)
            for make in makers:
                made = make()
                tensors.append(made)
                addresses.append(made.data_ptr())
            if size:
                scratch = torch.empty(size, dtype=torch.uint8, device=device)
                addresses.append(scratch.data_ptr())
                if capture.is_unknown(device):
                    capture.keep(scratch)
            addresses += stays
            for launch, pick in launches:
                launch(*pick(addresses))
            if several is not None:
                return several([tensors[i] for i in returned])
            return tensors[returned[0]] if returned else None

        # Keeps persistent memory alive as long as this function.
        repeat.kept = list(self._stays.values())
        return repeat
