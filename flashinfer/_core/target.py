"""The chip for which a kernel is chosen and compiled. Only this file queries the GPU's type."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """The properties of a chip on which the choice of a kernel depends.

    A Config may depend on `arch` and `smem` only: it is part of the compile key, and entries compiled for a named
    target must serve every chip of that architecture. `sms` and `l2` size grids and work lists.

    Attributes
    ----------
    arch : str
        "80", "86", "89", "90a", "100a", "103a", "120a" and so on, or "cpu".
    sms : int
        Streaming multiprocessors.
    smem : int
        Largest shared memory of one block, bytes.
    l2 : int
        L2 cache, bytes.
    """

    arch: str
    sms: int = 1
    smem: int = 0
    l2: int = 0

    @property
    def is_cpu(self) -> bool:
        return self.arch == "cpu"

    @property
    def capability(self) -> int:
        """Compute capability times ten: 90 for "90a"; 0 for the CPU."""
        return 0 if self.is_cpu else int(self.arch.rstrip("af"))

    @property
    def pdl(self) -> bool:
        """Whether a kernel may be launched before those in front of it end (PTX ISA, griddepcontrol)."""
        return self.capability >= 90


CPU = Target("cpu")

_KIB, _MIB = 1 << 10, 1 << 20

# One common chip of each architecture (A100, A40, L40S, H100, B200, B300, RTX 5090), for compiling without a GPU.
# Shared memory per block: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
NAMED = {
    t.arch: t
    for t in (
        CPU,
        Target("80", 108, 163 * _KIB, 40 * _MIB),
        Target("86", 84, 99 * _KIB, 6 * _MIB),
        Target("89", 142, 99 * _KIB, 96 * _MIB),
        Target("90a", 132, 227 * _KIB, 50 * _MIB),
        Target("100a", 148, 227 * _KIB, 126 * _MIB),
        Target("103a", 148, 227 * _KIB, 126 * _MIB),
        Target("120a", 170, 99 * _KIB, 96 * _MIB),
    )
}
GPU_ARCHS = tuple(arch for arch in NAMED if arch != "cpu")
# Chips on which the GPU tests have run; for the others kernels are only compiled.
RUN_ARCHS = ("90a",)

_by_index: dict[int, Target] = {}
_override: Target | None = None


def named(arch: str) -> Target:
    """The target of that name; ValueError for one that is not in the table."""
    if arch not in NAMED:
        raise ValueError(f"arch: got {arch!r}; allowed: {', '.join(NAMED)}")
    return NAMED[arch]


def target_of(device: torch.device) -> Target:
    """The target that tensors on `device` are computed by."""
    if _override is not None:
        return _override
    if device.type != "cuda":
        return CPU
    index = torch.cuda.current_device() if device.index is None else device.index
    target = _by_index.get(index)
    if target is None:
        target = _by_index[index] = _ask(index)
    return target


def overridden() -> Target | None:
    """The target that replaces every device's; None outside of `override`."""
    return _override


def _ask(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    number = properties.major * 10 + properties.minor
    # From Hopper on, an architecture's own instructions (wgmma, tcgen05) are behind the "a" suffix.
    arch = f"{number}a" if number >= 90 else str(number)
    smem = properties.shared_memory_per_block_optin
    return Target(arch, properties.multi_processor_count, smem, properties.L2_cache_size)


@contextmanager
def override(target: Target):
    """A context in which dispatch uses `target` for every device. Choices only: nothing is launched for another
    chip."""
    global _override
    before, _override = _override, target
    try:
        yield target
    finally:
        _override = before
