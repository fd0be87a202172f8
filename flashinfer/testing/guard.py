"""Memory that shows what should not touch it: allocations between canaries, filled with what no result may keep.

While `watch` lasts, what `torch.empty`, its relatives and `torch.zeros` give to this repository's code lies inside a
larger buffer. On both sides are canaries; where the caller gets undefined memory it is NaN in floating types and bytes
of 0x7f in others. The tensors are otherwise as torch makes them: contiguous, at the start of a storage of their own
size, aligned to 256 bytes, and free again when nobody refers to them. Canaries are looked at when a tensor ends and by
`check`.
"""

import contextlib
import dataclasses
import itertools
import sys
import weakref

import numpy as np
import torch
from torch.utils._device import _device_constructors

MARGIN, ALIGNMENT, CANARY = 1024, 256, 0xA5
# Larger ones on the CPU stay as they come: nobody waits for pages that are only touched to be poisoned.
_LARGEST = 32 << 20
_CALLERS = ("flashinfer", "tests", "examples")
_UNDEFINED = ("empty", "empty_like", "empty_strided")
_ZEROS = ("zeros", "zeros_like")
_METHODS = ("new_empty", "new_empty_strided", "new_zeros")
_CANARIES = bytes([CANARY]) * (2 * MARGIN + ALIGNMENT)


def guarded(shape, dtype: torch.dtype, device="cpu") -> torch.Tensor:
    """An undefined tensor between canaries; `check` and its end look at them.

    Example
    -------
    >>> out = guarded((4, 8), torch.float16)
    >>> bool(out.isnan().all())
    True
    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    return _inside(like, torch.device(device), _poison(dtype), sys._getframe(1))


def check() -> None:
    """Assert that the canaries around all living tensors, and around those that ended since the last call, are whole.

    Raises
    ------
    AssertionError
        With the line that allocated the memory, and the first byte that changed, counted from the start of the tensor.
    """
    for room in list(_rooms.values()):
        room.look()
    found = [room.fault(margins) for room, margins in _on_cpu]
    _on_cpu.clear()
    on_gpu = _on_gpu[:]
    _on_gpu.clear()
    if on_gpu:
        # Margins of a living tensor of another stream are read there, at the same time as this stream's work.
        for stream in {room.stream for room, _ in on_gpu}:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        whole = torch.stack([margins for _, margins in on_gpu]) == CANARY
        found += [on_gpu[i][0].fault(on_gpu[i][1].cpu().numpy()) for i in (~whole.all(1)).nonzero()[:, 0].tolist()]
    if found:
        raise AssertionError("; ".join(found))


@contextlib.contextmanager
def watch():
    """Guard what this repository's code allocates, and check at the end."""
    # Torch's default devices know factories by identity, and look them up once.
    _device_constructors()
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch, _UNDEFINED + _ZEROS), (torch.Tensor, _METHODS)):
            for name in names:
                stack.callback(_put, owner, name, owner.__dict__.get(name))
                setattr(owner, name, _guarding(getattr(owner, name), undefined="empty" in name))
        # The compiler of torch knows factories by identity, too: from a call of it on, they are torch's own again.
        for owner, name in ((torch, "compile"), (torch.library, "opcheck")):
            stack.callback(_put, owner, name, getattr(owner, name))
            setattr(owner, name, _after(stack, getattr(owner, name)))
        yield
    check()


def _after(stack, function):
    def call(*args, **kwargs):
        stack.close()
        # It may have looked them up while they were guarded, for something else than a compilation.
        if rules := sys.modules.get("torch._dynamo.trace_rules"):
            rules.clear_lru_cache()
        return function(*args, **kwargs)

    return call


def _put(owner, name, function):
    if function is None:
        delattr(owner, name)
    else:
        setattr(owner, name, function)


def _guarding(allocate, undefined):
    def guarding(*args, **kwargs):
        made = allocate(*args, **kwargs)
        if not _is_ours(made, kwargs):
            return made
        caller = sys._getframe(1)
        if not caller.f_globals.get("__name__", "").startswith(_CALLERS):
            return made
        return _inside(made, made.device, _poison(made.dtype) if undefined else 0, caller)

    return guarding


def _is_ours(made, options):
    """Whether a tensor that torch made is plain memory of the CPU or a GPU."""
    if type(made) is not torch.Tensor or made.layout != torch.strided or not made.numel():
        return False
    if options.get("out") is not None or options.get("pin_memory") or made.requires_grad:
        return False
    if made.device.type == "cpu":
        return made.nbytes <= _LARGEST
    # What a graph allocates it would poison again at each replay.
    return made.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _poison(dtype):
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 1 if dtype == torch.bool else 0x7F


# Buffers of living tensors by number; margins of checked buffers, on the CPU only those that changed.
_rooms, _on_cpu, _on_gpu, _numbers = {}, [], [], itertools.count()


@dataclasses.dataclass(eq=False)
class _Room:
    """A buffer with a tensor of `size` bytes from byte `first` on; `where` is the line that asked for it."""

    number: int
    buffer: np.ndarray | torch.Tensor
    first: int
    size: int
    where: str
    stream: torch.cuda.Stream | None
    ended: bool = False

    def end(self):
        """The tensor has no more references."""
        self.ended = True
        self.look()

    def look(self):
        """Keep the margins for `check`. A GPU's are read on the stream that wrote them, and not within a capture."""
        before, after = self.buffer[: self.first], self.buffer[self.first + self.size :]
        if self.stream is None:
            margins = np.concatenate((before, after))
            if margins.tobytes() != _CANARIES:
                _on_cpu.append((self, margins))
                before[:], after[:] = CANARY, CANARY
        elif torch.cuda.is_current_stream_capturing():
            return
        else:
            with torch.cuda.stream(self.stream):
                if torch.cuda.is_current_stream_capturing():
                    return
                _on_gpu.append((self, torch.cat((before, after))))
                before.fill_(CANARY)
                after.fill_(CANARY)
        if self.ended:
            # What a look allocates may start a collection, in which the tensor ends and is looked at first.
            _rooms.pop(self.number, None)

    def fault(self, margins):
        byte = int(np.flatnonzero(margins != CANARY)[0]) - self.first
        return f"memory of {self.where} was written at byte {byte if byte < 0 else byte + self.size} of {self.size}"


def _inside(like, device, fill, caller):
    """A tensor of the shape, strides and dtype of `like` inside a buffer with canaries."""
    steps = zip(like.shape, like.stride())
    size = like.element_size() * (1 + sum((n - 1) * step for n, step in steps)) if like.numel() else 0
    total, stream = size + 2 * MARGIN + ALIGNMENT, None
    if device.type == "cpu":
        buffer = np.empty(total, np.uint8)
        first = MARGIN + -(buffer.__array_interface__["data"][0] + MARGIN) % ALIGNMENT
        buffer[:first], buffer[first : first + size], buffer[first + size :] = CANARY, fill, CANARY
        inner = torch.from_numpy(buffer[first : first + size])
    else:
        buffer = torch.full((total,), CANARY, dtype=torch.uint8, device=device)
        first, stream = MARGIN, torch.cuda.current_stream(device)
        buffer[first : first + size] = fill
        with torch.cuda.device(device):
            inner = torch.from_dlpack(buffer[first : first + size])
    # Not a view: of the storage that starts where the tensor does.
    made = torch.tensor((), dtype=like.dtype, device=device)
    made.set_(inner.untyped_storage(), 0, like.shape, like.stride())
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    room = _Room(next(_numbers), buffer, first, size, where, stream)
    _rooms[room.number] = room
    weakref.finalize(made, room.end).atexit = False
    return made
