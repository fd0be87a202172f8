"""Parts of a GPU: streams whose kernels run on some of its multiprocessors only (CUDA's green contexts)."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer._core.arguments import checked
from flashinfer._core.checks import require
from flashinfer._core.driver import bindings, fail, use_context
from flashinfer._core.target import target_of

__all__ = [
    "empty_per_locality_domain",
    "get_locality_domain_count",
    "get_sm_count_constraint",
    "split_device_green_ctx",
    "split_device_green_ctx_by_locality_domain",
    "split_device_green_ctx_by_sm_count",
]


def get_sm_count_constraint(major: int, minor: int) -> tuple[int, int]:
    """The fewest multiprocessors of a part, and the number that theirs is a multiple of, by compute capability.

    Raises
    ------
    ValueError
        A compute capability below 6.0.

    Examples
    --------
    >>> from flashinfer.green_ctx import get_sm_count_constraint
    >>> get_sm_count_constraint(9, 0)
    (8, 8)
    """
    require(major >= 6, "major", major, "6 or more")
    return {6: (1, 1), 7: (2, 2), 8: (4, 2)}.get(major, (8, 8))


@checked
def split_device_green_ctx(
    dev: torch.device, num_groups: int, min_count: int
) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """Split a GPU into parts with as many multiprocessors each, and what is left over.

    Parameters
    ----------
    dev : torch.device
        A CUDA device.
    num_groups : int
        Parts, 1 or more.
    min_count : int
        Multiprocessors of a part, rounded up to what the chip allows: on Hopper to a multiple of 8.

    Returns
    -------
    streams : list of torch.cuda.Stream
        One for each part, and one for what is left over, `num_groups` + 1. Use them by ``torch.cuda.stream``.
    resources : list of CUdevResource
        Of cuda-bindings, one for each stream; ``resource.sm.smCount`` are its multiprocessors.

    Raises
    ------
    ValueError
        The device is no CUDA device; fewer than one part.
    RuntimeError
        The device has fewer multiprocessors, or the driver has no green contexts.

    Notes
    -----
    The parts stay until the process ends. Kernels here take as many programs as the whole device wants, which is
    correct on a part, and not the quickest.

    References
    ----------
    CUDA Driver API, "Green Contexts".
    """
    require(num_groups >= 1, "num_groups", num_groups, "1 or more")
    return _split(dev, [min_count] * num_groups, "min_count")


@checked
def split_device_green_ctx_by_sm_count(
    dev: torch.device, sm_counts: list[int]
) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """Split a GPU into parts with numbers of multiprocessors of their own, and what is left over.

    Parameters
    ----------
    dev : torch.device
        A CUDA device.
    sm_counts : list of int
        Multiprocessors of each part, 1 or more, rounded up to what the chip allows: on Hopper to a multiple of 8.

    Returns
    -------
    streams, resources : list
        As `split_device_green_ctx` returns them, ``len(sm_counts) + 1``.

    Raises
    ------
    ValueError
        The device is no CUDA device; no part, or one with less than a multiprocessor.
    RuntimeError
        As `split_device_green_ctx` raises it.
    """
    require(len(sm_counts) >= 1, "sm_counts", sm_counts, "one or more")
    for count in sm_counts:
        require(count >= 1, "sm_counts", sm_counts, "1 or more each")
    return _split(dev, list(sm_counts), "sm_counts")


def get_locality_domain_count(dev: torch.device) -> int:
    """Dies of a device that have memory of their own: 1, as every chip has for which there are kernels here."""
    return 1


def split_device_green_ctx_by_locality_domain(
    dev: torch.device, backfill: bool = True
) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """A part of a GPU for each of its dies.

    Raises
    ------
    RuntimeError
        The device has one, as every chip for which there are kernels here.
    """
    raise RuntimeError(f"dev: got {dev}, which has one locality domain; allowed: a device with two or more")


def empty_per_locality_domain(part_shape: tuple[int, ...], dtype: torch.dtype, dev: torch.device) -> torch.Tensor:
    """A tensor with a part in the memory of each die.

    Raises
    ------
    RuntimeError
        The device has one, as every chip for which there are kernels here.
    """
    raise RuntimeError(f"dev: got {dev}, which has one locality domain; allowed: a device with two or more")


def _split(dev, counts: list[int], argument: str) -> tuple[list[torch.cuda.Stream], list[Any]]:
    dev = torch.device(dev)
    require(dev.type == "cuda", "dev", dev, "a CUDA device")
    target = target_of(dev)
    least, multiple = get_sm_count_constraint(*divmod(target.capability, 10))
    counts = [-(-max(count, least) // multiple) * multiple for count in counts]
    if sum(counts) > target.sms:
        asked = f"{counts} multiprocessors, rounded up to multiples of {multiple}"
        raise RuntimeError(f"{argument}: got {asked}; allowed: {target.sms} together, which {dev} has")
    index = torch.cuda.current_device() if dev.index is None else dev.index
    use_context(index)
    device = _ask("device", bindings().cuDeviceGet(index))
    kind = bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    left = _ask("multiprocessors of the device", bindings().cuDeviceGetDevResource(device, kind))
    parts = []
    for count in counts:
        groups, _, left = _ask(f"a part of {count} multiprocessors",
                               bindings().cuDevSmResourceSplitByCount(1, left, 0, count))  # fmt: skip
        parts += groups
        # A remainder can be split again only as the resource of a context.
        left = _ask("what is left over", bindings().cuGreenCtxGetDevResource(_context(device, left), kind))
    parts.append(left)
    return [_stream(_context(device, part), torch.device("cuda", index)) for part in parts], parts


def _context(device, resource):
    driver = bindings()
    described = _ask("description of a part", driver.cuDevResourceGenerateDesc([resource], 1))
    default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    return _ask("green context", driver.cuGreenCtxCreate(described, device, default))


def _stream(context, dev: torch.device) -> torch.cuda.Stream:
    flags = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _ask("stream of a green context", bindings().cuGreenCtxStreamCreate(context, flags, 0))
    return torch.cuda.ExternalStream(int(stream), device=dev)


def _ask(doing: str, answer: tuple) -> Any:
    """What the driver answers behind its status, a value or several."""
    status, *values = answer
    if status:
        fail(status, doing)
    return values[0] if len(values) == 1 else values
