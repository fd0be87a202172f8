"""Where kernels find heads and rows."""

import pytest
import torch
import triton
import triton.language as tl

from flashinfer.ops.recurrent._device.sequences import head_of
from flashinfer.ops.recurrent.layouts import dense_rows


@triton.jit
def heads_kernel(out, share, COUNT: tl.constexpr):
    head = tl.arange(0, COUNT)
    tl.store(out + head, head_of(head, share))


@pytest.mark.parametrize("group", [1, 3, 7, 96, 641, 65535])
def test_a_head_of_shared_heads_is_exact(device, group):
    """For as many heads as a grid may have."""
    out = torch.empty(1 << 16, dtype=torch.int32, device=device)
    heads_kernel[(1,)](out, 1 / group, len(out))
    assert torch.equal(out.cpu(), torch.arange(len(out), dtype=torch.int32) // group)


def test_rows_without_gaps():
    states = torch.empty(3, 2, 8, 32)
    assert dense_rows(states, None, states.bfloat16())
    assert dense_rows(states[::2, 1:]) and dense_rows(states[..., :5, :])
    assert not dense_rows(states[..., :16])
    assert not dense_rows(states.transpose(-1, -2))
    assert not dense_rows(states, torch.empty(3, 2, 8, 24))
    assert not dense_rows(torch.empty(3, 2, 8, 8))
