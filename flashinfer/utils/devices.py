"""What a device is and can."""

from __future__ import annotations

import torch

from flashinfer._core.checks import require
from flashinfer._core.target import target_of


def get_compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor compute capability of a CUDA device.

    Raises
    ------
    ValueError
        The device is no CUDA device.
    """
    return divmod(_target(device).capability, 10)


def get_device_sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device.

    Raises
    ------
    ValueError
        The device is no CUDA device.
    """
    return _target(device).sms


def _target(device):
    device = torch.device(device)
    require(device.type == "cuda", "device", device, "a CUDA device")
    return target_of(device)


def device_support_pdl(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch: CUDA devices from compute capability 9.0 on."""
    device = torch.device(device)
    return device.type == "cuda" and target_of(device).capability >= 90


def _capability(device: torch.device) -> int:
    device = torch.device(device)
    return target_of(device).capability if device.type == "cuda" else 0


def is_sm90a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 9.x."""
    return _capability(device) // 10 == 9


def is_sm100a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 10.x."""
    return _capability(device) // 10 == 10


def is_sm100f_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 10.x."""
    return is_sm100a_supported(device)


def is_sm110a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 11.x."""
    return _capability(device) // 10 == 11


def is_sm120a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.0."""
    return _capability(device) == 120


def is_sm121a_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.1."""
    return _capability(device) == 121


def is_sm12x_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.x."""
    return _capability(device) // 10 == 12


def is_sm120f_supported(device: torch.device) -> bool:
    """Whether a device is a CUDA device of compute capability 12.x."""
    return is_sm12x_supported(device)


def get_device_name(device: torch.device) -> str:
    """The name of a CUDA device."""
    return torch.cuda.get_device_name(device)


def get_device_properties(device: torch.device):
    """What torch knows of a CUDA device: `torch.cuda.get_device_properties`."""
    return torch.cuda.get_device_properties(device)


def get_device_index(device: torch.device) -> int:
    """The number of a CUDA device; of one without a number, the current device's."""
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def get_shared_bytes_per_block_optin(device: torch.device) -> int:
    """The most shared memory that a block of a CUDA device may have, in bytes.

    Raises
    ------
    ValueError
        The device is no CUDA device.
    """
    return _target(device).smem


def get_gpu_memory_bandwidth(device: torch.device) -> float:
    """The bandwidth of a CUDA device's memory by its clock and the width of its bus, GB/s; a copy reaches less.

    Raises
    ------
    ValueError
        The device is no CUDA device.
    """
    require(torch.device(device).type == "cuda", "device", device, "a CUDA device")
    found = get_device_properties(device)
    # kHz, two transfers a cycle, bits.
    return 2 * found.memory_clock_rate * found.memory_bus_width / 8 / 1e6


def is_cvt_rs_supported(device: torch.device | None = None) -> bool:
    """Whether a CUDA device, the current one by default, rounds to 16 bits stochastically in one instruction.

    Compute capabilities 10.0, 10.3 and 10.7 do (PTX ISA, cvt.rs). `flashinfer.mamba` rounds so on every chip.
    """
    return _capability(torch.device("cuda") if device is None else device) in (100, 103, 107)


def get_default_generators(device: torch.device) -> torch.Generator:
    """The generator that a device's random numbers come from where none is named."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[get_device_index(device)]
