"""Tensors at addresses: memory that is seen, not copied."""

import pytest
import torch

from flashinfer._core.addresses import tensor_at


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_sees_the_memory(device, dtype):
    whole = torch.arange(16, device=device).to(dtype)
    seen = tensor_at(whole[4:].data_ptr(), dtype, (2, 5), device)
    assert seen.dtype == dtype and seen.shape == (2, 5) and seen.device == device
    assert torch.equal(seen.double(), torch.arange(4.0, 14.0, dtype=torch.float64, device=device).view(2, 5))
    seen[0, 0] = 1
    assert whole[4] == 1


def test_of_no_elements(device):
    assert tensor_at(0, torch.float16, (0, 5), device).shape == (0, 5)


def test_memory_of_a_gpu_is_its_array_interface(monkeypatch):
    """torch gets the address and the bytes, and which device has them."""
    asked = []

    def as_tensor(memory, device):
        asked.append((memory.__cuda_array_interface__, device))
        return torch.zeros(memory.__cuda_array_interface__["shape"], dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    seen = tensor_at(0x7F0000001002, torch.bfloat16, (2, 3), torch.device("cuda", 1))
    assert seen.dtype == torch.bfloat16 and seen.shape == (2, 3)
    interface = {"shape": (12,), "typestr": "|u1", "data": (0x7F0000001002, False), "strides": None, "version": 3}
    assert asked == [(interface, torch.device("cuda", 1))]
