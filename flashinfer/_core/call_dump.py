"""Calls on disk: FLASHINFER_LOGLEVEL=10 writes the arguments and results of each, `flashinfer replay` reads them.

A call is a folder: `metadata.jsonl`, a line of JSON that says which function, which arguments, and after the call which
result; `inputs.pt` and `outputs.pt`, tensors by name. `session.jsonl` beside the folders has the lines of all calls in
their order. They are read as plain data and tensors: nothing is unpickled,
and a function is found among this package's public ones alone.
"""

from __future__ import annotations

import fnmatch
import json
import os
import threading
from datetime import datetime
from enum import Enum, EnumMeta
from pathlib import Path

import torch

from flashinfer._core import env
from flashinfer._core.call_log import capturing
from flashinfer._core.env import logger

FORMAT = 1
_lock = threading.Lock()


def wanted(name: str) -> bool:
    """Whether calls of a function are dumped, by FLASHINFER_DUMP_INCLUDE and FLASHINFER_DUMP_EXCLUDE."""
    include, exclude = (
        [part.strip() for part in variable.get().split(",") if part.strip()]
        for variable in (env.DUMP_INCLUDE, env.DUMP_EXCLUDE)
    )
    taken = not include or any(fnmatch.fnmatch(name, pattern) for pattern in include)
    return taken and not any(fnmatch.fnmatch(name, pattern) for pattern in exclude)


class Dumps:
    """The dumps of this process, with limits on how many calls and bytes they are."""

    def __init__(self):
        self.root = Path(env.DUMP_DIR.get())
        self._most = int(env.DUMP_MAX_COUNT.get())
        self._most_bytes = float(env.DUMP_MAX_SIZE_GB.get()) * 2**30
        self._count, self._bytes, self._stopped = 0, 0, False
        self._calls: dict[str, int] = {}

    def begin(self, name: str, place: str, arguments: dict, self_id: int | None) -> Dump | None:
        """Write what a call is given; None where it is not dumped.

        Parameters
        ----------
        name : str
            As patterns take it: "rmsnorm", "BatchDecodeWithPagedKVCacheWrapper.run".
        place : str
            "module:qualified name" of the function.
        arguments : dict
        self_id : int, optional
            Of the object that a method is called on.
        """
        if not wanted(name):
            return None
        tensors: dict[str, torch.Tensor] = {}
        tree = {key: _encoded(value, key, tensors) for key, value in arguments.items()}
        if any(capturing(x) for x in tensors.values()):
            logger.warning("%s is not dumped: a graph is being captured", name)
            return None
        size = _size_of(tensors)
        with _lock:
            if self._count >= self._most or self._bytes + size > self._most_bytes:
                if not self._stopped:
                    text = "no more calls are dumped to %s, after %s calls and %s bytes"
                    logger.warning(text, self.root, self._count, self._bytes)
                self._stopped = True
                return None
            self._count += 1
            self._bytes += size
            number = self._calls[name] = self._calls.get(name, 0) + 1
        stamp = f"{datetime.now():%Y%m%d_%H%M%S_%f}"
        folder = self.root / f"{stamp}_pid{os.getpid()}_{name}_call{number:04d}"
        folder.mkdir(parents=True)
        record = {"format": FORMAT, "function_name": name, "place": place, "inputs": tree, "self_id": self_id}
        record |= {"module": place.partition(":")[0], "pid": os.getpid(), "process_id": os.getpid()}
        record |= {"call_sequence": number, "timestamp": stamp, "dump_dir": str(folder), "tensor_format": "torch"}
        record["tensor_info"] = {"input_tensor_keys": list(tensors), "output_tensor_keys": []}
        kept = {key: _copied(x) for key, x in tensors.items()}
        torch.save(kept, folder / "inputs.pt")
        _append(folder, record | {"execution_status": "inputs_saved"})
        return Dump(self, folder, record, tensors, kept)

    def add(self, size: int) -> bool:
        """Count bytes; whether they are still within the limit."""
        with _lock:
            self._bytes += size
            return self._bytes <= self._most_bytes


class Dump:
    """One call that is being written."""

    def __init__(self, dumps: Dumps, folder: Path, record: dict, given: dict, kept: dict):
        self.folder = folder
        self._dumps, self._record, self._given, self._kept = dumps, record, given, kept

    def end(self, result) -> None:
        """Write what the call gave back, and the arguments that it wrote."""
        tensors: dict[str, torch.Tensor] = {}
        tree = _encoded(result, "result", tensors)
        written = {}
        for name, x in self._given.items():
            now = _copied(x)
            if not _same_bytes(now, self._kept[name]):
                written[f"written {name}"] = now
        found = {name: _copied(x) for name, x in tensors.items()} | written
        fits = self._dumps.add(_size_of(found))
        if fits:
            torch.save(found, self.folder / "outputs.pt")
        else:
            logger.warning("the result of %s is not dumped: too many bytes", self._record["function_name"])
        state = "completed" if fits else "completed, result not saved"
        info = self._record["tensor_info"] | {"output_tensor_keys": list(found) if fits else []}
        _append(self.folder, self._record | {"outputs": tree, "tensor_info": info, "execution_status": state})

    def fail(self, error: BaseException) -> None:
        state = {"execution_status": "failed", "error": f"{type(error).__name__}: {error}"}
        _append(self.folder, self._record | state)


def _append(folder: Path, record: dict) -> None:
    for path in (folder / "metadata.jsonl", folder.parent / "session.jsonl"):
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def _size_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _copied(x: torch.Tensor) -> torch.Tensor:
    """On the host, packed: a view brings none of the memory around it."""
    return x.detach().to("cpu", copy=True).contiguous()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _encoded(value, name: str, tensors: dict[str, torch.Tensor]):
    """`value` as JSON holds it; its tensors go to `tensors` by name, one that is there already by that name."""
    if isinstance(value, torch.Tensor):
        for known, other in tensors.items():
            alike = other.data_ptr() == value.data_ptr() and other.stride() == value.stride()
            if alike and other.shape == value.shape and other.dtype == value.dtype and value.numel():
                name = known
        tensors[name] = value
        return {"tensor": name, "stride": list(value.stride()), "device": value.device.type}
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Size):
        value = tuple(value)
    if type(value) in (tuple, list):
        return {type(value).__name__: [_encoded(x, f"{name}.{i}", tensors) for i, x in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(x, f"{name}.{key}", tensors) for key, x in value.items()}}
    return {"not kept": type(value).__name__}


class NotKept(ValueError):
    """A dump does not hold all that a call needs."""


def read(folder: Path) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """(record, tensors of the arguments, tensors of the results or None) of a call.

    Raises
    ------
    NotKept
        The folder holds no call that was written whole.
    """
    try:
        lines = (folder / "metadata.jsonl").read_text().splitlines()
        record = json.loads(lines[-1])
        if record["format"] != FORMAT or not isinstance(record["inputs"], dict) or not isinstance(record["place"], str):
            raise NotKept(f"{folder}: format {record['format']!r}, not {FORMAT}")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise NotKept(f"{folder}: no whole call ({type(error).__name__}: {error})") from error
    return record, _tensors_of(folder / "inputs.pt"), (
        _tensors_of(folder / "outputs.pt") if (folder / "outputs.pt").exists() else None
    )  # fmt: skip


def _tensors_of(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever a file that is no dump raises
        raise NotKept(f"{path}: no tensors ({type(error).__name__}: {error})") from error
    if not isinstance(found, dict) or not all(isinstance(x, torch.Tensor) for x in found.values()):
        raise NotKept(f"{path}: no tensors by name")
    return found


def decoded(value, tensors: dict[str, torch.Tensor], enums: dict[str, EnumMeta], device: torch.device):
    """The value that `_encoded` wrote; equal names are one tensor.

    Parameters
    ----------
    value
        Plain data.
    tensors : dict
        Replaced by those on the device as they are met.
    enums : dict
        By name: what an argument may be.
    device : torch.device
        In place of the GPU that tensors were on. What was on the host stays there.
    """
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        made = tensors[content]
        if not getattr(made, "is_placed", False):
            there = device if value["device"] == "cuda" else torch.device("cpu")
            made = tensors[content] = _placed(made, value["stride"], there)
            made.is_placed = True
        return made
    if kind == "enum" and content in enums:
        return enums[content][value["name"]]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dtype" and isinstance(getattr(torch, content, None), torch.dtype):
        return getattr(torch, content)
    if kind == "device":
        return device if content.startswith("cuda") else torch.device("cpu")
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(decoded(x, tensors, enums, device) for x in content)
    if kind == "dict":
        return {key: decoded(x, tensors, enums, device) for key, x in content.items()}
    raise NotKept(f"an argument of type {content!r} was not kept")


def _placed(x: torch.Tensor, stride: list[int], device: torch.device) -> torch.Tensor:
    if list(x.stride()) == stride or 0 in stride or 0 in x.shape:
        return x.to(device)
    made = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device)
    return made.copy_(x)
